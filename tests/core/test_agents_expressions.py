"""Expressions: what they come to, which are refused, and that none takes long."""

import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from turnstream.agents import expressions
from turnstream.agents.expressions import MACROS, ExpressionError, holds, parse, value

SCOPE: dict[str, object] = {
    "input": {
        "n": 3,
        "f": 1.5,
        "text": "crash Ümlaut 👍",
        "list": [1, 2, 3],
        "object": {"a": None, "b": True},
        "many": list(range(3000)),
        "long": "x" * 100_000,
    },
    "nodes": {"x": "text", "y": [{"k": 1}, {"k": 2.5}]},
    "session": {"account": "default", "id": "s", "run": "s.1", "author": "user:ann"},
}


@pytest.mark.parametrize(
    ("text", "comes_to"),
    [
        ("input.n == 3.0 && input.n > 2.5 && input.f < 2", True),
        ('input.n == "3"', False),
        ('input.text.contains("crash") && input.text.startsWith("c")', True),
        ("size(input.text) == 14 && input.text.size() == 14", True),
        ("size(input.list) == 3 && size(input.object) == 2", True),
        ('input.text.matches("^cr.sh") && !input.text.endsWith("x")', True),
        ('input.text.lowerAscii() == "crash Ümlaut 👍" && " a ".trim() == "a" && "a".upperAscii() == "A"', True),
        ("has(input.object.a) && !has(input.object.c) && input.object.a == null", True),
        ('"k" in nodes.y[0] && 3.0 in input.list', True),
        ("input.list.exists(x, x > 2) && input.list.all(x, x < 4)", True),
        ("input.list.exists_one(x, x == 1) && input.list.existsOne(x, x == 1)", True),
        ("input.list.filter(x, x > 1).map(x, x * 2)", [4, 6]),
        ("input.list.map(x, x > 1, [x, nodes.y.map(y, y.k)])", [[2, [1, 2.5]], [3, [1, 2.5]]]),
        ("input.list . map ( x , x ) // a comment", [1, 2, 3]),
        ("input.list.exists(size, size > 2)", True),
        ("{'a': input.list.map(x, x)}.a", [1, 2, 3]),
        ("""'",(.map(x,' + r"\\" + '''it's''' + "a\\"(" """, '",(.map(x,\\it\'sa"('),
        ('input["n"] > 2 ? session.author : "nobody"', "user:ann"),
        ("0x1F == 31 && 1e3 == 1000.0 && 2u == 2 && .5 < 1", True),
        ("input.missing == 1 || true", True),
    ],
)
def test_what_an_expression_comes_to(text: str, comes_to: object) -> None:
    assert value(parse(text), SCOPE) == comes_to


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no expression: line 1, column 1: "),
        ("input.", "is no expression: line 1, column 7: "),
        ("1 +\n+", "is no expression: line 2, column 1: "),
        ("(" * 300 + "1" + ")" * 300, "is no expression: "),
        ("x" * 1001, "has 1001 characters, more than 1000"),
        ("y == 1", "unknown name 'y'; known: input, nodes, session"),
        ("input.list.map(x, y)", "unknown name 'y'"),
        ("input.foo()", "unknown function 'foo'; known: all, "),
        ("_go()", "unknown function '_go'"),
        ("[1].map(_made, _made)", ""),
        ("input.list.map(input, 1)", "'input' is taken: it is what the graph gives"),
        ("optional.of(1)", "unknown name 'optional'"),
        ("__import__('os')", "unknown function '__import__'"),
    ],
)
def test_an_expression_that_is_none_says_why(text: str, message: str) -> None:
    if not message:
        assert value(parse(text), SCOPE) == [1]
        return
    with pytest.raises(ExpressionError) as caught:
        parse(text)
    assert str(caught.value).startswith(message), caught.value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("input.missing == 1", "there is no 'missing'"),
        ("nodes.z", "there is no 'z'"),
        ("input.list[9]", "index out of bounds: 9"),
        ("1 / 0 == 1", "division by zero"),
        ("9223372036854775807 + 1", "Arithmetic overflow"),
        ("input.n && true", "No such overload"),
        ("input.n.trim() == ''", "trim: there is none of int"),
        ("input.text.trim(1)", "trim: there is none of str, int"),
        ("size()", "size: there is none of nothing"),
        ("lowerAscii(1) == ''", "lowerAscii: there is none of int"),
        ("size(input.n)", "size: there is none of int"),
        ("'('.matches('(')", "Function 'matches' error"),
        ("timestamp('2020-01-01T00:00:00Z')", "came to what JSON does not have: a datetime"),
        ("[[1.0 / 0.0]]", "came to what JSON does not have: inf"),
        ("input.long.map(x, x)", "No such overload"),
        ("input.__class__", "there is no '__class__'"),
    ],
)
def test_what_cannot_be_found_out_says_why(text: str, message: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        value(parse(text), SCOPE)
    assert str(caught.value).startswith(message), caught.value


@pytest.mark.parametrize("text", ["input.n", "input.text", "null", "input.list", "1 == 1 ? 1 : 2"])
def test_only_a_truth_value_holds_or_does_not(text: str) -> None:
    with pytest.raises(ExpressionError, match="neither true nor false"):
        holds(parse(text), SCOPE)


THREE = "input.many.{0}(x, input.many.{0}(y, input.many.{0}(z, x + y + z {1} 0)))"


@pytest.mark.parametrize(
    "text",
    [
        THREE.format("all", ">="),
        THREE.format("exists", "<"),
        THREE.format("exists_one", "<"),
        "input.many.filter(x, input.many.exists(y, input.many.exists(z, false)))",
        "input.many.map(x, input.many)",
        "input.many.map(x, input.long)",
        "input.many.map(x, input.many.map(y, 0)).map(x, x)",
        "['a']" + ".map(x, x + x)" * 40,
        "[1]" + ".map(x, [x, x])" * 40,
        "input.many.all(x, input.many.all(y, (input.long + input.long) != ''))",
        "input.many.filter(x, input.many.all(y, 'a'.matches('(a{100}){100}') || true))",
    ],
)
def test_none_takes_long_or_makes_much(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(expressions, "SECONDS_MAX", 0.2)
    started = time.monotonic()
    with pytest.raises(ExpressionError, match=r"takes longer than|makes more than"):
        value(parse(text), SCOPE)
    assert time.monotonic() - started < 5


def test_an_expression_says_which_nodes_it_names() -> None:
    assert parse("nodes.a == 1 && nodes['b'].c.d && input.nodes.c == 1").nodes == {"a", "b"}
    assert not parse("nodes.a == 1").needs_all
    assert parse("size(nodes) == 1 && nodes.a == 1").needs_all
    everything = {"input": {"k": "x"}, "nodes": {"x": 1}, "session": {}}
    assert value(parse("nodes[input.k] + nodes.x"), everything) == 2


WORDS = [*"()[]{}.,+-*/%&|!=<>?:'\"\\ \n1ax", "input", "nodes", "size", "map", *MACROS]


@for_all(st.lists(st.sampled_from(WORDS), max_size=30))
def test_any_text_is_an_expression_or_says_why_not(parts: list[str]) -> None:
    with suppress(ExpressionError):
        value(parse("".join(parts)), SCOPE)


NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | NUMBERS | st.text()
JSON: st.SearchStrategy[Any] = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@settings(max_examples=50)
@for_all(JSON)
def test_values_go_in_and_come_out_as_they_are(given: object) -> None:
    scope = {"input": given, "nodes": {}, "session": {}}
    assert value(parse("input"), scope) == given
    assert value(parse("[input].map(x, x)"), scope) == [given]
    assert holds(parse("input == input"), scope)
