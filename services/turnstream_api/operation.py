"""What an operation is: a row of the table in `operations.py`, and what both entrances derive from it.

A request is one flat struct, whichever way it came: over HTTP its fields stand in the path, in the query and in the
body, over NATS all of them in the body. A field that is neither in the path nor named in `query` is of the body, and
of the query where the method has no body.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from turnstream_api.api import Answer, Api, Caller, Stream
from turnstream_api.errors import Problem, ProblemCode

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fields of an operation."""


class Read(Request, frozen=True, kw_only=True):
    """`after`: a sequence that the answer must reflect; the read waits a moment for the views to show it."""

    after: int | None = None


Call = Callable[[Api, Caller, Any], Awaitable[Answer | Stream]]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """`statuses`: what success answers with. `errors`: codes beyond those that every operation has. `cursors`: fields
    that only an answer of ours can have given. `planned`: fields that are known and that this release does not offer.
    `waits`: the field that says how many seconds it may take. `streams`: it can answer with server-sent events.
    `takes_bytes`: over HTTP the body is the field `content` and its type `media_type`; `gives_bytes`: so is the
    answer's."""

    name: str
    method: Method
    path: str
    summary: str
    request: type[Request]
    answers: tuple[type[msgspec.Struct], ...]
    call: Call
    statuses: tuple[int, ...] = (200,)
    errors: tuple[ProblemCode, ...] = ()
    query: frozenset[str] = frozenset()
    cursors: frozenset[str] = frozenset()
    planned: frozenset[str] = frozenset()
    writes: bool = False
    waits: str = ""
    streams: bool = False
    takes_bytes: bool = False
    gives_bytes: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """Type of each field, by the name it has outside; whether it may be null is left out."""
        hints = get_type_hints(self.request, include_extras=True)
        names = zip(self.request.__struct_fields__, self.request.__struct_encode_fields__, strict=True)
        return {outside: _without_none(hints[inside]) for inside, outside in names}

    @property
    def in_path(self) -> tuple[str, ...]:
        return tuple(re.findall(r"{(\w+)}", self.path))

    @property
    def has_body(self) -> bool:
        return self.method in ("POST", "PUT", "PATCH")

    @property
    def in_query(self) -> frozenset[str]:
        return self.query if self.has_body else frozenset(self.fields) - frozenset(self.in_path)

    @property
    def in_body(self) -> frozenset[str]:
        return frozenset(self.fields) - frozenset(self.in_path) - self.in_query

    @property
    def all_errors(self) -> tuple[ProblemCode, ...]:
        common: list[ProblemCode] = ["invalid", "unauthorized", "unavailable", "internal_error"]
        if self.in_path:
            common.append("not_found")
        if self.takes_bytes:
            common.append("too_large")
        elif self.has_body:
            common += ["invalid_json", "too_large", "unsupported_media_type"]
        if self.writes:
            common += ["key_reused", "session_moved", "session_copying"]
        if self.planned:
            common.append("not_available")
        if self.cursors:
            common.append("invalid_cursor")
        if issubclass(self.request, Read):
            common.append("projection_behind")
        return tuple(dict.fromkeys((*common, *self.errors)))


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        kept = tuple(part for part in get_args(hint) if part is not type(None))
        return Union[kept]  # noqa: UP007 - made at run time
    return hint


def convert(operation: Operation, fields: Mapping[str, object]) -> Request:
    """The request with these fields. Raises `Problem` naming the field that does not fit."""
    for name in fields:
        if name in operation.planned:
            raise Problem("not_available", f"{name} is not available in this release", field=name)
    try:
        return msgspec.convert(fields, operation.request)
    except msgspec.ValidationError as error:
        raise misfit(operation, str(error)) from None


_WHERE = re.compile(r"(?s)(.*) - at `\$(?:\.?)(.*)`")
_CHOICE = re.compile(r"Invalid enum value .*")
_NAMED = re.compile(r"(unknown|missing required) field `([^`]*)`")


def misfit(operation: Operation, message: str) -> Problem:
    """msgspec's words on what does not fit, as a problem that names the field."""
    where = ""
    if match := _WHERE.fullmatch(message):
        message, where = match.groups()
    named = _NAMED.search(message)
    field = ".".join(filter(None, (where, named[2] if named else "")))
    if _CHOICE.fullmatch(message) and (choices := get_args(operation.fields.get(field))):
        message = f"{message}: it is one of {', '.join(map(str, choices))}"
    if field in operation.in_path:
        return Problem("not_found", f"no such {field}")
    if field in operation.cursors:
        return Problem("invalid_cursor", f"{field}: {message}", field=field)
    return Problem("invalid", f"{field}: {message}" if field else message, field=field or "body")
