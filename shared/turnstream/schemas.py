"""Which JSON Schemas (draft 2020-12) can be used, and what they say.

Not here: whether an answer fits (`turnstream.session.answers`). A schema comes from a model, or from whoever saves an
agent, and is judged where nothing may take long: it is small, refers to nothing, and its regular expressions are those
that take linear time.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final, cast

import msgspec
from jsonschema_rs import Draft202012Validator, RegexOptions, ValidationError

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
"""Levels of a schema, and of a value that is held against one."""
REFUSED: Final = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_SHOWN: Final = 200


def fault_of(schema: Mapping[str, object]) -> str | None:
    """Why a schema cannot be used, if so."""
    if is_deep(schema, DEPTH_MAX + 1):
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
        validator_of(text.decode())
    except ValidationError as error:
        return said(error)
    return None


def misfit_of(value: object, schema: Mapping[str, object]) -> str | None:
    """Why a value does not fit a schema that can be used, if so."""
    error = next(iter(validator_of(msgspec.json.encode(schema).decode()).iter_errors(value)), None)
    return None if error is None else said(error)


def is_readable(schema: str) -> bool:
    """Whether values can be held against a schema that is the server's own: it may be larger than a model's."""
    try:
        validator_of(schema)
    except ValidationError:
        return False
    return True


def is_deep(value: object, levels: int) -> bool:
    """Whether a value has more levels than this."""
    if not isinstance(value, (Mapping, list, tuple)):
        return False
    inner = cast("Mapping[str, object]", value).values() if isinstance(value, Mapping) else cast("list[object]", value)
    return levels == 0 or any(is_deep(one, levels - 1) for one in inner)


def said(error: ValidationError) -> str:
    """What does not fit, short enough to be shown."""
    return error.message if len(error.message) <= _SHOWN else f"{error.message[:_SHOWN]}…"


@lru_cache(maxsize=64)
def validator_of(schema: str) -> Draft202012Validator:
    """What holds values against a schema, given as text. Raises `jsonschema_rs.ValidationError`."""
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
