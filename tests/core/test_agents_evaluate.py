"""What the fields of nodes come to."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from turnstream.agents import evaluate
from turnstream.agents.evaluate import Scope, Unfit
from turnstream.agents.nodes import Node

ADAPTER: TypeAdapter[Any] = TypeAdapter(Node)


def node(kind: str, **fields: Any) -> Any:
    return ADAPTER.validate_python({"type": kind, **fields})


def scope(arrived: object, **nodes: object) -> Scope:
    return Scope(
        input=arrived,
        nodes=nodes,
        session={"account": "default", "id": "s1", "run": "s1.2", "author": "user:ann"},
    )


RULES = [{"port": "bug", "when": 'input.contains("crash")'}, {"port": "long", "when": "size(input) > 10"}]


@pytest.mark.parametrize(
    ("arrived", "port"),
    [("it crashes", "bug"), ("a crash, and long", "bug"), ("words and words", "long"), ("hi", None)],
)
def test_a_router_takes_the_first_rule_that_holds(arrived: str, port: str | None) -> None:
    assert evaluate.route(node("router", rules=RULES), scope(arrived)) == port


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("input.kind == 1", "rules.0.when: there is no 'kind'"),
        ("size(input)", "rules.0.when: came to int, neither true nor false"),
        ("input > 1", "rules.0.when: No such overload"),
    ],
)
def test_a_rule_that_cannot_be_said_says_why(when: str, message: str) -> None:
    with pytest.raises(Unfit, match=message):
        evaluate.route(node("router", rules=[{"port": "a", "when": when}]), scope({"other": 1}))


def test_a_guardrail_allows_what_its_rule_holds_for() -> None:
    guardrail = node("guardrail", rule="input.amount <= nodes.ask.most")
    assert evaluate.allows(guardrail, scope({"amount": 3}, ask={"most": 3.5}))
    assert not evaluate.allows(guardrail, scope({"amount": 4}, ask={"most": 3.5}))
    with pytest.raises(Unfit, match="rule: there is no 'most'"):
        evaluate.allows(guardrail, scope({"amount": 4}, ask={}))


def test_a_loop_is_done_once_its_condition_holds() -> None:
    loop = node(
        "loop",
        until='input == "ok"',
        max_iterations=3,
        graph={"nodes": {"i": {"type": "input"}, "o": {"type": "output"}}, "edges": ["i -> o"]},
    )
    assert evaluate.until(loop, scope("ok"))
    assert not evaluate.until(loop, scope({"ok": True}))


@pytest.mark.parametrize("kind", ["llm", "human", "agent", "guardrail"])
def test_a_prompt_is_a_text(kind: str) -> None:
    text = "{{ session.author }} of {{ session.account }} wants {{ input }}, after {{ nodes.a }}."
    fields = {"check" if kind == "guardrail" else "prompt": text, **({"agent": "b"} if kind == "agent" else {})}
    made = evaluate.prompt(node(kind, **fields), scope({"n": [1, None]}, a="x"))
    assert made == 'user:ann of default wants {"n":[1,null]}, after x.'
    with pytest.raises(
        Unfit, match=f"{'check' if kind == 'guardrail' else 'prompt'}: there is no 'a'; there is nothing"
    ):
        evaluate.prompt(node(kind, **fields), scope("x"))


def test_arguments_are_values_where_they_are_nothing_but_one() -> None:
    call = node(
        "tool",
        tool="add",
        arguments={
            "n": "{{ input.n }}",
            "text": "{{ input.n }} ",
            "deep": [{"all": "{{ input }}"}, 3, None, True, "{{ nodes.a | length }}"],
            "plain": "no template",
        },
    )
    assert evaluate.arguments(call, scope({"n": 1.5}, a=[1, 2])) == {
        "n": 1.5,
        "text": "1.5 ",
        "deep": [{"all": {"n": 1.5}}, 3, None, True, 2],
        "plain": "no template",
    }
    with pytest.raises(Unfit, match=r"arguments\.deep\.4: there is no 'a'; there is nothing"):
        evaluate.arguments(call, scope({"n": 1}))


@pytest.mark.parametrize(
    ("over", "arrived", "elements"),
    [
        (None, [1, "a", {}], [1, "a", {}]),
        (None, "[1, 2]", [1, 2]),
        (None, " []\n", []),
        ("input.items.filter(i, i > 1)", {"items": [1, 2, 3]}, [2, 3]),
        ("nodes.a.map(x, x.name)", "", ["n"]),
    ],
)
def test_a_map_goes_through_a_list(over: str | None, arrived: object, elements: list[object]) -> None:
    assert evaluate.elements(mapping(over), scope(arrived, a=[{"name": "n"}])) == elements


@pytest.mark.parametrize(
    ("over", "arrived", "message"),
    [
        (None, "words", "input: a map goes through a list, and this text is no JSON"),
        (None, '{"a": 1}', "input: a map goes through a list, and this is an object"),
        (None, 3, "input: a map goes through a list, and this is a number"),
        ("input.n", {"n": "[1]"}, "over: a map goes through a list, and this is a text"),
        ("input.m", {"n": 3}, "over: there is no 'm'"),
        ("[b'a']", "", "over: came to what JSON does not have: a bytes is nothing that JSON has"),
    ],
)
def test_a_map_says_what_it_cannot_go_through(over: str | None, arrived: object, message: str) -> None:
    with pytest.raises(Unfit) as caught:
        evaluate.elements(mapping(over), scope(arrived))
    assert str(caught.value) == message


def mapping(over: str | None) -> Any:
    graph = {"nodes": {"i": {"type": "input"}, "o": {"type": "output"}}, "edges": ["i -> o"]}
    return node("map", graph=graph, **({} if over is None else {"over": over}))


@pytest.mark.parametrize(
    ("value", "text", "is_json"),
    [
        ("a", "a", False),
        ('{"a":1}', '{"a":1}', False),
        (None, "null", True),
        (1.0, "1.0", True),
        ({"é": [True]}, '{"é":[true]}', True),
    ],
)
def test_a_text_stays_and_anything_else_is_json(value: object, text: str, is_json: bool) -> None:
    assert evaluate.written(value) == (text, is_json)
