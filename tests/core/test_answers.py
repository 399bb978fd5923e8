"""What does as an answer."""

from typing import Any

import msgspec
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from turnstream.schemas import COSTLY_MAX, DEPTH_MAX, KEYWORDS_MAX, SCHEMA_MAX, fault_of
from turnstream.session.answers import check, read, read_json
from turnstream.session.errors import Rejected


def as_text(schema: object) -> str:
    return msgspec.json.encode(schema).decode()


def refusal(answer: object, schema: object = None, choices: tuple[str, ...] = ()) -> tuple[str, str]:
    with pytest.raises(Rejected) as caught:
        check(answer, "" if schema is None else as_text(schema), choices)
    assert caught.value.message.startswith(str(caught.value.details["field"]))
    return caught.value.code, str(caught.value.details["field"])


def nest(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


ADDRESS = {
    "type": "object",
    "required": ["city"],
    "properties": {"city": {"type": "string", "minLength": 1}, "lines": {"type": "array", "items": {"type": "string"}}},
    "additionalProperties": False,
}


@pytest.mark.parametrize("answer", [None, 0, "x", [1, {"a": None}], {"a": {"b": 2}}, True])
def test_where_nothing_is_said_everything_does(answer: object) -> None:
    check(answer, "", ())


@pytest.mark.parametrize("answer", [{"city": "Rome"}, {"city": "Rome", "lines": ["a", "b"]}])
def test_what_fits_the_schema_does(answer: object) -> None:
    check(answer, as_text(ADDRESS), ())


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        ({}, "answer.city"),
        ({"city": ""}, "answer.city"),
        ({"city": 5}, "answer.city"),
        ({"city": "Rome", "lines": ["a", 2]}, "answer.lines.1"),
        ({"city": "Rome", "zip": 1}, "answer"),
        ("Rome", "answer"),
        (None, "answer"),
    ],
)
def test_what_does_not_fit_is_named(answer: object, field: str) -> None:
    assert refusal(answer, ADDRESS) == ("invalid", field)


@pytest.mark.parametrize("answer", ["green", "RED", "red ", None, 1, ["red"], {"red": 1}])
def test_only_a_choice_does_where_there_are_choices(answer: object) -> None:
    check("red", "", ("red", "blue"))
    assert refusal(answer, None, ("red", "blue")) == ("invalid", "answer")


def test_choices_and_a_schema_are_both_asked() -> None:
    schema = {"type": "string", "maxLength": 3}
    check("red", as_text(schema), ("red", "crimson"))
    assert refusal("crimson", schema, ("red", "crimson")) == ("invalid", "answer")


@pytest.mark.parametrize("answer", [nest(DEPTH_MAX + 1), nest(600), {"a": nest(DEPTH_MAX)}])
def test_an_answer_is_not_deep(answer: object) -> None:
    check(nest(DEPTH_MAX), "", ())
    assert refusal(answer) == ("invalid", "answer")
    assert refusal(answer, {"type": "array"}) == ("invalid", "answer")


@pytest.mark.parametrize("answer", [10**30, -(10**400), 1e308, 2**63])
def test_numbers_of_any_size_are_judged(answer: object) -> None:
    check(answer, as_text({"type": "number"}), ())
    assert refusal(answer, {"type": "string"}) == ("invalid", "answer")


# -- schemas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        {},
        ADDRESS,
        {"enum": [1, "a", None]},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "string", "pattern": "^(a+)+$"},
        {"type": "string", "format": "date"},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "string"},
        {"a-keyword-of-one's-own": 1},
    ],
)
def test_a_schema_that_can_be_used(schema: dict[str, object]) -> None:
    assert fault_of(schema) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "text"},
        {"type": 5},
        {"required": "city"},
        {"pattern": "("},
        {"pattern": "(?=a)b"},
        {"properties": {"a": {"$ref": "https://example.com/schema"}}},
        {"$ref": "#"},
        {"items": {"$dynamicRef": "#x"}},
        {"description": "x" * SCHEMA_MAX},
        # Nothing is looked up, wherever it stands; and nothing takes long.
        {"const": {"$ref": "#"}},
        {"properties": {"const": {"$ref": "http://127.0.0.1:1/x"}}},
        {"$defs": {"enum": {"$ref": "file:///etc/hostname"}}},
        {"pattern": "(a{1,200}){100}"},
        {"allOf": [{"pattern": "a"}] * (COSTLY_MAX + 1)},
        {"allOf": [{"uniqueItems": True}] * (COSTLY_MAX + 1)},
        {"properties": {f"p{n}": {} for n in range(KEYWORDS_MAX + 1)}},
    ],
)
def test_a_schema_that_cannot_be_used(schema: dict[str, object]) -> None:
    assert fault_of(schema)


def test_a_schema_is_not_deep() -> None:
    def deep(levels: int) -> dict[str, object]:
        schema: dict[str, object] = {}
        for _ in range(levels):
            schema = {"items": schema}
        return schema

    assert fault_of(deep(DEPTH_MAX)) is None
    assert fault_of(deep(DEPTH_MAX + 1))
    assert fault_of(deep(300))


def test_an_expression_that_would_take_for_ever_does_not() -> None:
    schema = {"type": "string", "pattern": "^(a+)+$"}
    assert refusal("a" * 50_000 + "!", schema) == ("invalid", "answer")


# -- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "schema", "choices", "answer"),
    [
        (" blue ", None, (), "blue"),
        ("42", None, (), "42"),
        ("42", {"type": "integer"}, (), 42),
        ('{"city": "Rome"}', ADDRESS, (), {"city": "Rome"}),
        ("null", {"type": "null"}, (), None),
        ("true", {"type": ["string", "boolean"]}, (), "true"),
        ("blue\n", None, ("blue",), "blue"),
        ('"blue"', None, ("blue",), "blue"),
    ],
)
def test_a_text_is_the_answer_or_the_json_in_it(
    text: str, schema: object, choices: tuple[str, ...], answer: object
) -> None:
    assert read(text, "" if schema is None else as_text(schema), choices) == answer


@pytest.mark.parametrize("text", ["Rome", "{}", '{"city":', "[" * 5000, "1" * 5000, "{" * 5000])
def test_a_text_that_is_neither_is_refused(text: str) -> None:
    with pytest.raises(Rejected) as caught:
        read(text, as_text(ADDRESS), ())
    assert (caught.value.code, caught.value.details) == ("invalid", {"field": "content"})


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@for_all(JSON, st.sampled_from([None, ADDRESS, {"type": "array"}, {"type": "number"}, {"enum": [1, "a"]}]))
def test_any_answer_is_taken_or_refused(answer: object, schema: object) -> None:
    """Nothing else comes of it, and what is taken as a text is what is taken as an answer."""
    text = "" if schema is None else as_text(schema)
    try:
        check(answer, text, ())
    except Rejected:
        with pytest.raises(Rejected):
            read(as_text(answer), text, ())
    else:
        assert isinstance(answer, str) or schema is None or read(as_text(answer), text, ()) == answer


@pytest.mark.parametrize("text", ["hello", '{"n":1}\n\nsaid so', "", "{'n': 1}"])
def test_what_has_to_be_json_is_json_whatever_the_schema_lets_through(text: str) -> None:
    with pytest.raises(Rejected, match="it is no JSON"):
        read_json(text, "{}")


@pytest.mark.parametrize(("text", "schema"), [('{"n":1}', '{"required":["m"]}'), ("5", '{"minimum":6}')])
def test_json_that_does_not_fit_is_refused_where_a_text_would_do(text: str, schema: str) -> None:
    with pytest.raises(Rejected):
        read_json(text, schema)
    assert read(text, schema, ()) == text


def test_json_that_fits_is_what_it_says() -> None:
    assert read_json(' {"m": 1}\n', '{"required":["m"]}') == {"m": 1}
    assert read_json('"yes"', '{"type":"string"}') == "yes"
