"""Whether an answer does: the choices and the JSON Schema (draft 2020-12) that a question came with.

A schema is written by a model, and judged where nothing may take long: it is small, refers to nothing, and its regular
expressions are those that take linear time.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final, cast

import msgspec
from jsonschema_rs import Draft202012Validator, RegexOptions, ValidationError, ValidationErrorKind

from turnstream.session.errors import Rejected

SCHEMA_MAX: Final = 8192
"""Bytes of a schema."""
KEYWORDS_MAX: Final = 200
"""Keywords, and names of properties, of a schema."""
COSTLY_MAX: Final = 8
"""How often a schema may ask for what takes long to find out."""
COSTLY: Final = frozenset({"pattern", "patternProperties", "uniqueItems", "contains"})
PATTERN_BYTES: Final = 64 * 1024
"""Bytes of a regular expression as it is compiled."""
DEPTH_MAX: Final = 32
"""Levels of a schema, and of an answer."""
REFUSED: Final = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_SHOWN: Final = 200


def fault_of(schema: Mapping[str, object]) -> str | None:
    """Why a schema cannot be used, if so."""
    if _is_deep(schema, DEPTH_MAX + 1):
        return f"the schema is more than {DEPTH_MAX} levels deep"
    text = msgspec.json.encode(schema)
    if len(text) > SCHEMA_MAX:
        return f"the schema has {len(text)} bytes, more than {SCHEMA_MAX}"
    names = list(_names(schema))
    if refused := REFUSED.intersection(names):  # wherever they stand: nothing is ever looked up for a schema
        return f"{min(refused)} cannot be used in a schema"
    if len(names) > KEYWORDS_MAX:
        return f"the schema has {len(names)} keywords, more than {KEYWORDS_MAX}"
    if sum(name in COSTLY for name in names) > COSTLY_MAX:
        return f"the schema has more than {COSTLY_MAX} of {', '.join(sorted(COSTLY))}"
    try:
        _validator(text.decode())
    except ValidationError as error:
        return _said(error)
    return None


def is_readable(schema: str) -> bool:
    """Whether values can be held against a schema that is the server's own: it may be larger than a model's."""
    try:
        _validator(schema)
    except ValidationError:
        return False
    return True


def check(answer: object, schema: str, choices: tuple[str, ...], field: str = "answer") -> None:
    """Raises `Rejected` naming the part of the answer, or of what else `field` is, that does not fit."""
    if _is_deep(answer, DEPTH_MAX):
        raise Rejected("invalid", f"{field}: more than {DEPTH_MAX} levels deep", field=field)
    if choices and answer not in choices:
        message = f"{field}: must be one of {', '.join(choices)}"
        raise Rejected("invalid", message, field=field)
    if schema and (error := next(iter(_validator(schema).iter_errors(answer)), None)):
        missing = [error.kind.property] if isinstance(error.kind, ValidationErrorKind.Required) else []
        path = ".".join([field, *map(str, error.instance_path), *missing])
        raise Rejected("invalid", f"{path}: {_said(error)}", field=path)


def read_json(text: str, schema: str) -> object:
    """The JSON that a text is. Raises `Rejected` for one that is none, or does not fit."""
    try:
        value = msgspec.json.decode(text.strip())
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Rejected("invalid", f"it is no JSON: {error}", field="content") from None
    check(value, schema, ())
    return value


def read(text: str, schema: str, choices: tuple[str, ...]) -> object:
    """The answer that a text is: the text itself, or the JSON in it. Raises `Rejected` if neither fits."""
    text = text.strip()
    try:
        check(text, schema, choices)
        return text
    except Rejected as refusal:
        try:
            value = msgspec.json.decode(text)
        except (msgspec.MsgspecError, RecursionError):
            raise Rejected(refusal.code, refusal.message, field="content") from None
    try:
        check(value, schema, choices)
    except Rejected as refusal:
        raise Rejected(refusal.code, refusal.message, field="content") from None
    return value


def _is_deep(value: object, levels: int) -> bool:
    if not isinstance(value, (Mapping, list, tuple)):
        return False
    inner = cast("Mapping[str, object]", value).values() if isinstance(value, Mapping) else cast("list[object]", value)
    return levels == 0 or any(_is_deep(one, levels - 1) for one in inner)


def _said(error: ValidationError) -> str:
    return error.message if len(error.message) <= _SHOWN else f"{error.message[:_SHOWN]}…"


@lru_cache(maxsize=64)
def _validator(schema: str) -> Draft202012Validator:
    options = RegexOptions(size_limit=PATTERN_BYTES, dfa_size_limit=PATTERN_BYTES)
    return Draft202012Validator(msgspec.json.decode(schema), pattern_options=options, offline=True)


def _names(value: object) -> Iterator[str]:
    """Every name in it, whether it is a keyword or a property's."""
    if isinstance(value, Mapping):
        for name, inner in cast("Mapping[str, object]", value).items():
            yield name
            yield from _names(inner)
    elif isinstance(value, (list, tuple)):
        for inner in cast("list[object]", value):
            yield from _names(inner)
