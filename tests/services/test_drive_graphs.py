"""Graphs carried out by drives: what reaches each node, what it does, what the run comes to; with the demo model and a
log in memory. What comes next is in tests/core/test_graph.py.
"""

import json
from typing import Any

import msgspec
import pytest
from tests.support.driving import Outcome, World

from turnstream.agents import Agent, builtin
from turnstream.session.commands import AnswerRequest
from turnstream.session.events import (
    ASK_USER,
    DELEGATE,
    UPDATE_PLAN,
    NodeFinished,
    NodeStarted,
    PolicyData,
    RunEnded,
    RunWaiting,
)
from turnstream_runner.models.demo import DemoModel
from turnstream_runner.roles import VERDICT
from turnstream_runner.tools import function

TOOLS = builtin.TOOLS


def world(*edges: str, agent: dict[str, Any] | None = None, **nodes: Any) -> World:
    """An agent on the demo model with this graph: nodes are fields of their type, `q` and `done` are there."""
    graph = {"nodes": {"q": {"type": "input"}, "done": {"type": "output"}, **nodes}, "edges": list(edges)}
    tools = [tool.name for tool in TOOLS]
    made = Agent.model_validate({"name": "default", "model": "demo", "tools": tools, "graph": graph, **(agent or {})})
    return World(DemoModel().stream, tools=TOOLS, agent=made)


async def run(world: World, text: str = "hello", session: str = "s1") -> RunEnded:
    await world.post(text, session)
    assert await world.drive(session).outcome() is Outcome.DONE
    (ended,) = [fact for fact in await world.facts(session) if isinstance(fact, RunEnded)]
    return ended


async def finished(world: World) -> dict[str, tuple[str, str]]:
    """The port and the output of each node, by path."""
    facts = await world.facts()
    return {fact.path: (fact.port, fact.output) for fact in facts if isinstance(fact, NodeFinished)}


def llm(prompt: str = "echo {{ input }}", **more: Any) -> dict[str, Any]:
    return {"type": "llm", "prompt": prompt, **more}


def tool(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool", "tool": name, "arguments": arguments}


async def test_what_reaches_the_output_is_what_the_run_comes_to() -> None:
    line = world("q -> a", "a -> done", a=llm("echo {{ input }}, {{ nodes.q }}!"))
    ended = await run(line, "hi")
    assert (ended.status, ended.content, ended.note) == ("completed", "hi, hi!", "")
    assert await finished(line) == {"q": ("out", "hi"), "a": ("out", "hi, hi!"), "done": ("out", "hi, hi!")}
    assert ended.usage.output_tokens > 0


async def test_a_value_that_is_no_text_goes_on_as_what_it_is_and_comes_out_as_json() -> None:
    line = world("q -> a", "a -> b", "b -> done", a=tool("count_words", text="{{ input }}"),
                 b=tool("add", a="{{ input.words }}", b=1))  # fmt: skip
    assert (await run(line, "two words")).content == "3"
    calls = [fact.call for fact in await line.facts() if isinstance(fact, NodeStarted)]
    assert [call.arguments for call in calls if call] == ['{"text":"two words"}', '{"a":2,"b":1}']


async def test_branches_meet_by_name() -> None:
    both = world("q -> a", "q -> b", "a -> c.all", "b -> c.all", "c -> done",
                 a=llm("echo A"), b=llm("echo B"), c=llm("echo {{ input.a }}{{ input.b }}"))  # fmt: skip
    assert (await run(both)).content == "AB"


ROUTE = {"type": "router", "rules": [{"port": "loud", "when": 'input.contains("!")'}]}


@pytest.mark.parametrize(("text", "content"), [("hey!", "loud hey!"), ("hey", "quiet hey")])
async def test_a_router_takes_the_first_rule_that_holds(text: str, content: str) -> None:
    ways = world("q -> r", "r.loud -> a", "r.default -> b", "a -> done.any", "b -> done.any",
                 r=ROUTE, a=llm("echo loud {{ input }}"), b=llm("echo quiet {{ input }}"))  # fmt: skip
    assert (await run(ways, text)).content == content


async def test_no_route_fails_the_run_by_the_router_s_name() -> None:
    ways = world("q -> r", "r.loud -> done", r=ROUTE)
    ended = await run(ways)
    assert (
        ended.status == "failed" and ended.error and ended.error.code == "no_route" and "node r" in ended.error.message
    )


@pytest.mark.parametrize(("text", "content"), [("nice", "yes nice"), ("rude", "no")])
async def test_a_guardrail_lets_pass_or_blocks(text: str, content: str) -> None:
    rule = {"type": "guardrail", "rule": 'input != "rude"'}
    model = {"type": "guardrail", "check": "echo {{ 'block' if input == 'rude' else 'Allow.' }}"}
    for guard in (rule, model):
        gate = world("q -> g", "g.allow -> a", "g.block -> b", "a -> done.any", "b -> done.any",
                     g=guard, a=llm("echo yes {{ input }}"), b=llm("echo no"))  # fmt: skip
        assert (await run(gate, text)).content == content


async def test_a_model_that_neither_allows_nor_blocks_lets_nothing_pass() -> None:
    gate = world("q -> g", "g.allow -> done", g={"type": "guardrail", "check": "echo perhaps"})
    ended = await run(gate)
    assert (ended.content, ended.note) == ("", "node g failed: the model said neither allow nor block: perhaps")


async def test_a_node_that_fails_goes_on_by_err() -> None:
    line = world("q -> a", "a -> done.any", "a.err -> b", "b -> done.any",
                 a=tool("fail", message="no luck"), b=llm("echo {{ input.error }}"))  # fmt: skip
    assert (await run(line)).content == "no luck"


async def test_earlier_turns_are_read_by_a_node_s_model() -> None:
    line = world("q -> a", "a -> done", a=llm("{{ input }}"))
    await run(line, "first")
    await line.post("second")
    assert await line.drive(work=2).outcome() is Outcome.DONE
    last = [fact for fact in await line.facts() if isinstance(fact, RunEnded)][-1]
    assert "Before that you said one thing, the last was: “first”" in last.content


async def test_a_node_s_model_uses_tools() -> None:
    line = world("q -> a", "a -> done", a=llm('[tool add {"a":1,"b":2}]'))
    assert (await run(line)).content == "add returned 3"
    types = await line.types()
    assert types.count("model.replied") == types.count("tool.returned") == 1


async def test_what_a_node_does_not_say_is_the_agent_s() -> None:
    own: dict[str, Any] = {"model": "other", "instructions": "be quick", "params": {"temperature": 1}}
    own |= {"tools": ["add"], "control": {"plan": True}}
    agent: dict[str, Any] = {"instructions": "be kind", "params": {"seed": 1}, "tools": ["sleep"]}
    agent |= {"control": {"ask_user": True}}
    await run(line := world("q -> a", "a -> b", "b -> done", agent=agent, a=llm("hi", **own), b=llm("hi")))
    asked = line.models.requests
    assert [(one.model, one.instructions, one.params) for one in asked] == [
        ("other", "be quick", {"temperature": 1.0}),
        ("demo", "be kind", {"seed": 1}),
    ]
    assert [[tool.name for tool in one.tools] for one in asked] == [[UPDATE_PLAN, "add"], [ASK_USER, "sleep"]]


async def test_a_model_that_checks_knows_of_nothing_else() -> None:
    guard = {"type": "guardrail", "check": "echo allow", "model": "judge"}
    gate = world("q -> g", "g.allow -> done", agent={"instructions": "be kind"}, g=guard)
    await run(gate)
    await gate.post("second")
    assert await gate.drive(work=2).outcome() is Outcome.DONE
    for asked in gate.models.requests:
        assert (asked.model, asked.instructions, asked.tools) == ("judge", VERDICT, ())
        assert [message.text for message in asked.messages] == ["echo allow"]


async def test_an_answer_has_to_fit_the_schema_of_its_node() -> None:
    schema = {"type": "object", "required": ["n"]}
    line = world("q -> a", "a -> done", a=llm('[say {"n":1}]', output=schema))
    assert (await run(line)).content == '{"n":1}'
    never = world("q -> a", "a -> done", a=llm("[say no]", output=schema))
    ended = await run(never)
    assert ended.note.startswith("node a failed: 3 answers did not fit the schema")
    assert len(never.models.requests) == 3
    assert all('{"type":"object","required":["n"]}' in asked.instructions for asked in never.models.requests)


EACH = {"nodes": {"e": {"type": "input"}, "x": llm("echo <{{ input }}>"), "o": {"type": "output"}},
        "edges": ["e -> x", "x -> o"]}  # fmt: skip


async def test_a_map_gives_what_its_elements_came_to_in_their_order() -> None:
    line = world("q -> m", "m -> done", m={"type": "map", "graph": EACH})
    assert (await run(line, '["a","b","c"]')).content == '["<a>","<b>","<c>"]'
    assert (await run(line, "[]", "s2")).content == "[]"


async def test_what_is_inside_sees_what_came_before_around_it() -> None:
    prompt = "echo {{ nodes.q }} {{ nodes.e }} {{ session.author }} {{ session.account }} {{ session.run }}"
    inside = {**EACH, "nodes": {**EACH["nodes"], "x": llm(prompt)}}
    line = world("q -> m", "m -> done", m={"type": "map", "graph": inside, "over": '["a", "b"]'})
    assert (await run(line, "hi")).content == '["hi a user:ann acme s1.1","hi b user:ann acme s1.1"]'


async def test_a_map_goes_through_so_many_elements_and_no_more() -> None:
    line = world("q -> m", "m -> done", m={"type": "map", "graph": EACH})
    assert (await run(line, str([1] * 1001))).note == "node m failed: 1001 elements, and 1000 are allowed"


async def test_a_map_over_what_is_no_list_fails() -> None:
    line = world("q -> m", "m -> done", m={"type": "map", "graph": EACH})
    ended = await run(line, "no list")
    assert ended.status == "completed" and ended.note.startswith("node m failed: ")


FRAGILE = {"nodes": {"e": {"type": "input"}, "x": tool("add", a="{{ input }}", b=1), "o": {"type": "output"}},
           "edges": ["e -> x", "x -> o"]}  # fmt: skip


async def test_an_element_that_fails_fails_the_map_or_is_collected() -> None:
    fast = world("q -> m", "m -> done", m={"type": "map", "graph": FRAGILE})
    assert (await run(fast, '[1,"x",3]')).note.startswith("node m failed: element 1: node m[1].x: ")
    slow = world("q -> m", "m -> done", m={"type": "map", "graph": FRAGILE, "on_error": "collect"})
    content = (await run(slow, '[1,"x",3]')).content
    assert content.startswith('[2,{"error":"node m[1].x: ') and content.endswith("},4]")


AGAIN = {"nodes": {"i": {"type": "input"}, "x": llm("echo {{ input }}."), "o": {"type": "output"}},
         "edges": ["i -> x", "x -> o"]}  # fmt: skip


async def test_a_loop_goes_on_until_its_condition_holds() -> None:
    loop = {"type": "loop", "graph": AGAIN, "until": "size(input) >= 4", "max_iterations": 9}
    line = world("q -> l", "l -> done", l=loop)
    assert (await run(line, "a")).content == "a..."
    short = world("q -> l", "l -> done", l={**loop, "max_iterations": 2})
    assert (await run(short, "a")).content == "a.."
    (last,) = [fact for fact in await short.facts() if isinstance(fact, NodeFinished) and fact.path == "l"]
    assert last.note == "the condition did not hold in 2 iterations: this is what the last one gave"


async def test_a_loop_fails_with_its_iteration() -> None:
    inside = {**AGAIN, "nodes": {**AGAIN["nodes"], "x": tool("add", a="{{ input }}", b=1)}}
    loop = {"type": "loop", "graph": inside, "until": "true", "max_iterations": 2}
    ended = await run(world("q -> l", "l -> done", l=loop), "no number")
    assert ended.note.startswith("node l failed: iteration 1: node l[0].x: ")


async def test_a_person_is_asked_and_the_answer_goes_on() -> None:
    human = {"type": "human", "prompt": "Ship {{ input }}?", "choices": ["yes", "no"]}
    line = world("q -> h", "h -> a", "a -> done", h=human, a=llm("echo {{ nodes.q }}: {{ input }}"))
    await line.post("it")
    assert await line.drive().outcome() is Outcome.DONE
    (waits,) = [fact for fact in await line.facts() if isinstance(fact, RunWaiting)]
    (asked,) = waits.requests
    assert (asked.prompt, asked.choices, asked.path) == ("Ship it?", ("yes", "no"), "h")
    await line.do(AnswerRequest(origin=line.origin(), run=1, answer="yes"))
    assert await line.drive(work=2).outcome() is Outcome.DONE
    (ended,) = [fact for fact in await line.facts() if isinstance(fact, RunEnded)]
    assert ended.content == "it: yes"


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, (None, None, None)),
        ({"timeout": 60}, (60_000, "fail", None)),
        ({"timeout": 1.5, "on_timeout": "default", "default": 3}, (1500, "default", 3)),
    ],
)
async def test_a_person_is_waited_for_as_long_as_was_said(fields: dict[str, Any], asked: tuple[object, ...]) -> None:
    human = {"type": "human", "prompt": "How many?", "schema": {"type": "integer"}, **fields}
    line = world("q -> h", "h -> done", h=human)
    await line.post()
    assert await line.drive().outcome() is Outcome.DONE
    (waits,) = [fact for fact in await line.facts() if isinstance(fact, RunWaiting)]
    (ask,) = waits.requests
    assert ask.schema == {"type": "integer"}
    assert (ask.expires_in, ask.on_expiry if fields else None, ask.default) == asked


async def test_another_agent_is_asked_in_the_version_that_was_pinned() -> None:
    other = {"type": "agent", "agent": "default", "prompt": "do {{ input }}", "output": {"type": "object"}}
    line = world("q -> other", "other -> done", other=other)
    await line.post("it")
    await line.drive().outcome()
    (call,) = [fact.call for fact in await line.facts() if isinstance(fact, NodeStarted) and fact.call]
    order = {"brief": "do it", "agent": f"default@{line.spec.version}", "schema": {"type": "object"}}
    assert (call.name, call.asks, json.loads(call.arguments)) == (DELEGATE, "child", order)


@pytest.mark.parametrize(
    ("note", "edges", "nodes"),
    [
        ("no output node was reached", ["q -> r", "r.loud -> done", "r.default -> a"], {"r": ROUTE, "a": llm()}),
        ("node a produced nothing", ["q -> a", "a -> done"], {"a": tool("repeat", text="x", times=0)}),
        (
            "node a produced nothing",
            ["q -> a", "a -> r", "r.default -> g", "g.allow -> done"],
            {"a": tool("repeat", text="x", times=0), "r": ROUTE, "g": {"type": "guardrail", "rule": "true"}},
        ),
        ("node a hit the token limit; raise max_tokens", ["q -> a", "a -> done"], {"a": llm("[think x][cut 0]")}),
        ("node a failed: broken", ["q -> a", "a -> done"], {"a": tool("fail", message="broken")}),
    ],
)
async def test_an_empty_output_says_why(note: str, edges: list[str], nodes: dict[str, Any]) -> None:
    ended = await run(world(*edges, **nodes))
    assert (ended.status, ended.content, ended.note) == ("completed", "", note)


async def test_a_node_keeps_what_its_model_thought_and_why_it_said_nothing() -> None:
    line = world("q -> a", "a -> done", a=llm("[think hard][cut 0]"))
    await run(line)
    (last,) = [fact for fact in await line.facts() if isinstance(fact, NodeFinished) and fact.path == "a"]
    assert (last.output, last.reasoning, last.finish) == ("", "hard", "length")
    assert "raise max_tokens" in last.note


async def test_a_graph_without_an_output_says_so() -> None:
    graph = {"nodes": {"q": {"type": "input"}, "a": llm()}, "edges": ["q -> a"]}
    agent = Agent.model_validate({"name": "default", "model": "demo", "graph": graph})
    ended = await run(World(DemoModel().stream, agent=agent))
    assert (ended.status, ended.note) == ("completed", "the graph declares no output node")


async def test_s48_two_outputs_fail_the_run() -> None:
    ended = await run(world("q -> done", "q -> two", two={"type": "output"}))
    assert ended.status == "failed" and ended.error and ended.error.code == "multiple_outputs"
    assert "done and two" in ended.error.message


async def test_what_is_empty_is_not_remembered() -> None:
    edges = ("q -> r", "r.loud -> a", "r.default -> b", "a -> done")
    line = world(*edges, r=ROUTE, a=llm("{{ input }}"), b=tool("count_words", text="{{ input }}"))
    assert await _asked_second(line, "quiet") == ["second!"]
    assert len(await _asked_second(line, "loud!", "s2")) == 3, "what came to something is"


async def _asked_second(line: World, first: str, session: str = "s1") -> list[str]:
    """What the model is asked in the second turn."""
    await line.post(first, session)
    await line.drive(session).outcome()
    await line.post("second!", session)
    assert await line.drive(session, work=2).outcome() is Outcome.DONE
    return [message.text for message in line.models.requests[-1].messages]


async def test_a_large_value_goes_by_the_object_store() -> None:
    whole = {"type": "router", "rules": [{"port": "whole", "when": "size(input) == 600000"}]}
    line = world("q -> a", "a -> r", "r.whole -> done", a=tool("repeat", text="x", times=600_000), r=whole)
    ended = await run(line)
    assert ended.blob and ended.blob.size == 600_000 and len(ended.content) < 100_000
    assert line.blobs.there[ended.blob.name] == b"x" * 600_000


async def test_a_large_value_that_is_lost_fails_whoever_needs_it() -> None:
    line = world("q -> a", "a -> h", "h -> b", "b -> done", a=tool("repeat", text="x", times=600_000),
                 h={"type": "human", "prompt": "Well?"}, b=llm("echo {{ nodes.a }}"))  # fmt: skip
    await line.post()
    assert await line.drive().outcome() is Outcome.DONE
    line.blobs.there.clear()
    await line.do(AnswerRequest(origin=line.origin(), run=1, answer="yes"))
    assert await line.drive(work=2).outcome() is Outcome.DONE
    (ended,) = [fact for fact in await line.facts() if isinstance(fact, RunEnded)]
    assert ended.note == "node b failed: what node a gave is lost"


async def test_a_value_that_is_no_json_after_all_fails_whoever_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "_written", lambda value: ("no JSON", True))
    line = world("q -> a", "a -> b", "b -> done", a=tool("add", a=1, b=2), b=llm("echo {{ input }}"))
    assert (await run(line)).note == "node b failed: what node a gave cannot be read as JSON"


async def test_a_tool_node_whose_tool_needs_an_approval_waits_for_it() -> None:
    for approved, port in ((True, "out"), (False, "err")):
        line = world("q -> a", "a -> done.any", "a.err -> done.any", a=tool("ask_first", text="{{ input }}"))
        await line.post("fine")
        assert await line.drive().outcome() is Outcome.DONE
        (waits,) = [fact for fact in await line.facts() if isinstance(fact, RunWaiting)]
        assert [(ask.kind, ask.path) for ask in waits.requests] == [("approval", "a")]
        await line.do(AnswerRequest(origin=line.origin(), run=1, approved=approved))
        assert await line.drive(work=2).outcome() is Outcome.DONE
        assert (await finished(line))["a"] == (port, "fine" if approved else "")
        (ended,) = [fact for fact in await line.facts() if isinstance(fact, RunEnded)]
        assert ended.content.startswith("fine" if approved else '{"error":"denied: ')


async def test_arguments_that_are_too_much_for_an_event_fail_the_node() -> None:
    line = world("q -> a", "a -> b", "b -> done", a=tool("repeat", text="x", times=600_000),
                 b=tool("count_words", text="{{ input }}"))  # fmt: skip
    assert (await run(line)).note == "node b failed: the arguments have 600011 bytes, which is too much"


async def test_an_agent_with_a_schema_answers_with_what_fits() -> None:
    agent = Agent(name="default", model="demo", output={"type": "object"})
    made = World(DemoModel().stream, agent=agent)
    ended = await run(made, "[say no]")
    assert ended.status == "failed" and ended.error and ended.error.code == "model_error"
    again = World(DemoModel().stream, agent=agent)
    assert (await run(again, '[say {"a":1}]')).content == '{"a":1}'


async def test_a_graph_in_memory_of_completed_turns_shows_pairs() -> None:
    line = world("q -> a", "a -> done", agent={"policy": {"preset": "memory"}}, a=llm("{{ input }}"))
    line.spec = msgspec.structs.replace(line.spec, policy=PolicyData(preset="memory"))
    await run(line, "first")
    await line.post("second")
    assert await line.drive(work=2).outcome() is Outcome.DONE
    asked = line.models.requests[-1].messages
    assert asked[0].text == "first" and len(asked) == 3


async def test_a_map_that_fails_fast_waits_for_no_other_element() -> None:
    prompt = "{{ '[hang]' if input == 'slow' else '[fail]' }}"
    nodes = {"e": {"type": "input"}, "x": llm(prompt), "o": {"type": "output"}}
    line = world("q -> m", "m -> done", m={"type": "map", "graph": {"nodes": nodes, "edges": ["e -> x", "x -> o"]}})
    ended = await run(line, '["slow","bad","slow"]')
    assert ended.note.startswith("node m failed: element 1: node m[1].x: model_error")
