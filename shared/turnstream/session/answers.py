"""Whether an answer does: the choices and the JSON Schema (draft 2020-12) that a question came with.

Which schemas can be used at all: `turnstream.schemas`.
"""

import msgspec
from jsonschema_rs import ValidationErrorKind

from turnstream.schemas import DEPTH_MAX, is_deep, said, validator_of
from turnstream.session.errors import Rejected


def check(answer: object, schema: str, choices: tuple[str, ...], field: str = "answer") -> None:
    """Raises `Rejected` naming the part of the answer, or of what else `field` is, that does not fit."""
    if is_deep(answer, DEPTH_MAX):
        raise Rejected("invalid", f"{field}: more than {DEPTH_MAX} levels deep", field=field)
    if choices and answer not in choices:
        message = f"{field}: must be one of {', '.join(choices)}"
        raise Rejected("invalid", message, field=field)
    if schema and (error := next(iter(validator_of(schema).iter_errors(answer)), None)):
        missing = [error.kind.property] if isinstance(error.kind, ValidationErrorKind.Required) else []
        path = ".".join([field, *map(str, error.instance_path), *missing])
        raise Rejected("invalid", f"{path}: {said(error)}", field=path)


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
