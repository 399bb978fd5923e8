"""Templates: what they come to, which are refused, and that none takes long or gets at Python."""

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from turnstream.agents import sandbox
from turnstream.agents.templates import TemplateError, parse, render, value

SCOPE: dict[str, object] = {
    "input": {
        "n": 3,
        "f": 1.5,
        "text": "a crash 👍",
        "list": [1, 2, 3],
        "object": {"a": None, "b": True},
        "items": [7],
        "rows": [{"k": "b"}, {"k": "a"}],
        "many": list(range(3000)),
        "long": "x" * 100_000,
    },
    "nodes": {"x": "text", "y": [{"k": 1}]},
    "session": {"account": "default", "id": "s", "run": "s.1", "author": "user:ann"},
}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("no template\n", "no template\n"),
        ("<{{ input.text }}>", "<a crash 👍>"),
        ("{{ input.object }} {{ true }} {{ none }} {{ 1.5 }}", '{"a":null,"b":true} true null 1.5'),
        ("{{ input.n + 1 }} {{ 7 // 2 }} {{ 'a' ~ 1 ~ input.list }}", "4 3 a1[1,2,3]"),
        ("{% for x in input.list %}{{ loop.index }}/{{ loop.length }}:{{ x }} {% endfor %}", "1/3:1 2/3:2 3/3:3 "),
        ("{% for k, v in input.object.items() %}{{ k }}={{ v }};{% endfor %}", "a=null;b=true;"),
        ("{% if input.n > 2 and 'crash' in input.text %}yes{% else %}no{% endif %}", "yes"),
        ("{% set y = input.n %}{{ y }}{# nothing #}{% raw %}{{ z }}{% endraw %}", "3{{ z }}"),
        ("{{ input.list | join(', ') }} {{ input.rows | map(attribute='k') | sort | join('-') }}", "1, 2, 3 a-b"),
        ("{{ input.text | upper }} {{ input.text.split(' ')[1] }} {{ input.text[:1] }}", "A CRASH 👍 crash a"),
        ("{{ input.missing | default('d') }} {{ input.missing is defined }}", "d false"),
        ("{{ input.object | json }} {{ input.text | json }}", '{"a":null,"b":true} "a crash 👍"'),
        ("{{ input.text | replace('crash', 'boom') }} {{ input.text | wordcount }}", "a boom 👍 3"),
        ("{{ input.items }} {{ nodes.y[0].k }} {{ nodes['x'] }} {{ session.author }}", "[7] 1 text user:ann"),
        ("{{ '%s' }} {{ 7 % 4 }} {{ 'abcdefghij' | truncate(4) }}", "%s 3 abc…"),
        ("<script>{{ '<&>' }}</script>", "<script><&></script>"),
    ],
)
def test_what_a_template_comes_to(source: str, text: str) -> None:
    assert render(parse(source), SCOPE) == text


@pytest.mark.parametrize(
    ("source", "comes_to"),
    [
        ("{{ input.n }}", 3),
        ("{{ input.object }}", {"a": None, "b": True}),
        ("{{ input.list | length }}", 3),
        ("{{ input.rows | selectattr('k', 'equalto', 'a') | list }}", [{"k": "a"}]),
        ("{{ input.list | map('string') }}", ["1", "2", "3"]),
        ("{{ [input.n, {'a': (input.f, none)}] }}", [3, {"a": [1.5, None]}]),
        ("{{ range(3) }}", [0, 1, 2]),
        ("{{ input.text }}", "a crash 👍"),
        ("{{ input.n }} ", "3 "),
        ("{{ input.n }}{{ input.n }}", "33"),
        ("{# c #}{{ input.n }}", 3),
        ("{% if true %}{{ input.n }}{% endif %}", "3"),
        ("text", "text"),
    ],
)
def test_one_that_is_nothing_but_a_value_is_the_value(source: str, comes_to: object) -> None:
    assert value(parse(source), SCOPE) == comes_to


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ x", "line 1: unexpected end of template"),
        ("a\n{% if %}", "line 2: Expected an expression"),
        ("{{ foo.bar }}", "line 1: unknown name 'foo'; known: input, nodes, session"),
        ("{% for x in input %}{% endfor %}{{ x }}", "line 1: unknown name 'x'"),
        ("{{ input | nope }}", "line 1: No filter named 'nope'"),
        ("{{ input is nope }}", "line 1: No test named 'nope'"),
        ("{{ input | attr('x') }}", "line 1: No filter named 'attr'"),
        ("{{ input.__class__ }}", "line 1: '__class__': names that begin with `_` are out of reach"),
        ("{{ _meter }}", "line 1: '_meter': names that begin with `_` are out of reach"),
        ("{{ input | _turns }}", "line 1: '_turns': names that begin with `_` are out of reach"),
        ("{% set input.x = 1 %}", "line 1: "),
        ("{% set _x = 1 %}", "line 1: '_x'"),
        ("{% include 'x' %}", "line 1: `include` is not for templates"),
        ("{% import 'x' as y %}", "line 1: `import` is not for templates"),
        ("{% extends 'x' %}", "line 1: `extends` is not for templates"),
        ("{% macro m() %}{% endmacro %}", "line 1: `macro` is not for templates"),
        ("{% set x %}a{% endset %}", "line 1: `assignblock` is not for templates"),
        ("{% filter upper %}a{% endfilter %}", "line 1: `filterblock` is not for templates"),
        ("{% with x = 1 %}{% endwith %}", "line 1: `with` is not for templates"),
        ("{% block x %}{% endblock %}", "line 1: `block` is not for templates"),
        ("{{ 9 ** 9 }}", "line 1: `pow` is not for templates"),
        ("{{ range(*input) }}", "line 1: that is not for templates"),
        ("{% for x in input recursive %}{% endfor %}", "line 1: that is not for templates"),
        ("{{ namespace(x=1) }}", "line 1: unknown name 'namespace'"),
        ("{% set x = 1 %}" * 9, "line 1: 9 loops and `set`s, more than 8"),
        ("{{ [" + "input," * 65 + "] }}", "line 1: 65 names in lists and objects, more than 64"),
        ("{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", "too much inside one another"),
        ("{% if true %}" * 120 + "{% endif %}" * 120, "too much inside one another"),
        ("a\n{{ '\\ud83d' }}", "line 2: has characters that no text has"),
        ("{{ {'\\ude00': 1} }}", "line 1: has characters that no text has"),
        ("{{ 1e999 }}", "line 1: inf is no number that JSON has"),
    ],
)
def test_a_template_that_is_none_says_why(source: str, message: str) -> None:
    with pytest.raises(TemplateError) as caught:
        parse(source)
    assert str(caught.value).startswith(f"is no template: {message}"), caught.value


def test_a_template_is_not_long() -> None:
    parse("x" * 16_384)
    with pytest.raises(TemplateError, match="has 16385 characters, more than 16384"):
        parse("x" * 16_385)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ input.missing }}", "there is no 'missing'; there is n, f, text, list, object, items, rows, many, long"),
        ("{{ input.missing.deeper }}", "there is no 'missing'; "),
        ("{{ input.n.x }}", "there is no 'x' in a number"),
        ("{{ input.list[7] }}", "there is no 7 in a list"),
        ("{{ input['__class__'] }}", "there is no '__class__'; "),
        ("{{ ''['__class__'] }}", "there is no '__class__' in a text"),
        ("{{ input.text.format(1) }}", "there is no 'format' in a text"),
        ("{{ input.text.upper.x }}", "there is no 'x' in something else"),
        ("{{ input.list.append(1) }}", "there is no 'append' in a list"),
        ("{{ input.update({}) }}", "there is no 'update'; "),
        ("{{ input | map(attribute='__class__') | list }}", "there is no '__class__' in a text"),
        ("{{ input.text.upper }}", "something else is no value"),
        ("{% for x in input.list %}{{ loop }}{% endfor %}", "something else is no value"),
        ("{{ self }}", "something else is no value"),
        ("{{ 'a' + 1 }}", "a text + a number comes to nothing"),
        ("{{ '%999999999d' % 1 }}", "a text % a number comes to nothing"),
        ("{{ 1 // 0 }}", "ZeroDivisionError: "),
        ("{{ input.rows | sum(attribute='k') }}", "sum: a text is no number"),
        ("{% for x in input.n %}{% endfor %}", "'int' object is not iterable"),
        ("{{ 1e308 * 10 }}", "inf is no number that JSON has"),
        ("{{ {'a': [-1e308 * 10]} }}", "-inf is no number that JSON has"),
        ("{{ ['nan' | float] | json }}", "nan is no number that JSON has"),
    ],
)
def test_what_cannot_be_said_says_why(source: str, message: str) -> None:
    for carry_out in (value, render):
        with pytest.raises(TemplateError) as caught:
            carry_out(parse(source), SCOPE)
        assert str(caught.value).startswith(message), caught.value


DOUBLING = "{% set a = [1, 1] %}" + "".join(
    f"{{% set {b} = [{', '.join(a * 8)}] %}}" for a, b in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) %}{% if " + " ~ ".join(["input.long"] * 9) + " == '' %}{% endif %}{% endfor %}",
        "{% for a in range(1000) %}{{ input.long }}{% endfor %}",
        "{{ range(100000000) }}",
        "{{ 'a' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ " + " * ".join(["99999999999"] * 40) + " }}",
        "{{ input.long | replace('', input.long) }}",
        "{{ input.many | join(input.long) }}",
        "{{ " + " ~ ".join(["input.long"] * 40) + " }}",
        "{{ " + " + ".join(["input.long"] * 40) + " }}",
        DOUBLING + "{{ g }}",
        DOUBLING + "{{ g ~ '' }}",
        DOUBLING + "{{ g | upper }}",
        DOUBLING + "{{ [g] | join }}",
        DOUBLING + "{{ g | string | length }}",
    ],
)
def test_none_takes_long_or_makes_much(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(sandbox, "SECONDS_MAX", 0.2)
    started = time.monotonic()
    with pytest.raises(TemplateError, match=r"takes longer|more than \d+|comes to nothing"):
        render(parse(source), SCOPE)
    assert time.monotonic() - started < 5


def test_what_it_comes_to_is_not_long() -> None:
    scope = {**SCOPE, "input": "é" * (128 << 10)}
    assert render(parse("{{ input }}"), scope) == scope["input"]
    with pytest.raises(TemplateError, match="comes to more than 262144 bytes"):
        render(parse("{{ input }}."), scope)


def test_a_template_says_which_nodes_it_names() -> None:
    assert parse("{{ nodes.a }}{{ nodes['b'].c }}{{ input.nodes.c }}").nodes == {"a", "b"}


SIGNS = ["{{", "}}", "{%", "%}", "{#", "#}", *".|()[]'1+-~*, "]
WORDS = [*SIGNS, "input", "nodes", "range", "join", "json", "loop", "x", "_", "__class__", "is", "in"]
WORDS += ["for x in", "endfor", "if", "endif", "set x ="]


@for_all(st.lists(st.sampled_from(WORDS), max_size=25))
def test_any_text_is_a_template_or_says_why_not(parts: list[str]) -> None:
    with suppress(TemplateError):
        value(parse("".join(parts)), SCOPE)


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | NUMBERS | st.text()
JSON: st.SearchStrategy[Any] = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@settings(max_examples=50)
@for_all(JSON)
def test_values_go_in_and_come_out_as_they_are(given: Any) -> None:
    scope = {"input": given, "nodes": {}, "session": {}}
    assert value(parse("{{ input }}"), scope) == given
    text = render(parse("{{ input }}"), scope)
    assert text == given if isinstance(given, str) else json.loads(text) == given
