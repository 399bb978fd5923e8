"""How every failure is said: one closed list of codes, one status each, one document (RFC 9457).

    Problem(code, detail, **details)

An operation raises `Problem` for what the API itself refuses; the core's `Rejected` and the failures of log, broker and
views are translated here and nowhere else. HTTP sends the document with its status; NATS sends the same document with
the status in `Nats-Service-Error-Code`.
"""

from typing import Literal, get_args

import msgspec

from turnstream.broker.errors import BrokerFault
from turnstream.log.base import LogError, Unavailable
from turnstream.session.errors import Code, Rejected
from turnstream.views.database import ViewsError
from turnstream.views.sessions import InvalidCursor

ApiCode = Literal[
    "invalid_json",  # the body is not JSON
    "invalid_cursor",  # a cursor that no answer of ours ever held
    "unauthorized",  # no API key, or one that is not (any more) valid
    "method_not_allowed",
    "not_available",  # a known field that this release does not offer
    "version_conflict",  # a version of an agent that says something else
    "agent_defined",  # an agent of the deployment's files and modules, which is changed there
    "too_large",  # over a limit; `limit` says which
    "unsupported_media_type",
    "projection_behind",  # the views do not show what `after` names yet
    "unavailable",  # the broker or the database does not answer
    "internal_error",
]
ProblemCode = Code | ApiCode
CODES: tuple[str, ...] = (*get_args(Code), *get_args(ApiCode))

STATUS: dict[str, tuple[int, str]] = {
    "not_found": (404, "Not found"),
    "already_exists": (409, "Already exists"),
    "run_active": (409, "A run is active"),
    "run_waiting": (409, "A run waits for an answer"),
    "not_waiting": (409, "Nothing waits for an answer"),
    "already_answered": (409, "Answered already"),
    "request_expired": (409, "The time for an answer is over"),
    "request_closed": (409, "The run ended before it was answered"),
    "nothing_to_retry": (409, "Nothing to retry"),
    "session_copying": (409, "The session is being copied"),
    "key_reused": (409, "Idempotency key reused"),
    "session_moved": (412, "The session has moved"),
    "not_available": (422, "Not available in this release"),
    "invalid": (422, "A value does not fit"),
    "invalid_transition": (409, "Not possible in this state"),
    "fenced": (409, "Fenced"),
    "not_queued": (409, "Not queued any more"),
    "agent_not_found": (422, "No such agent"),
    "version_conflict": (409, "The version says something else"),
    "agent_defined": (409, "The deployment defines it"),
    "invalid_json": (400, "Not JSON"),
    "invalid_cursor": (400, "Not a cursor"),
    "unauthorized": (401, "No valid API key"),
    "method_not_allowed": (405, "Method not allowed"),
    "too_large": (413, "Too large"),
    "unsupported_media_type": (415, "Not application/json"),
    "projection_behind": (503, "The views are behind"),
    "unavailable": (503, "Unavailable"),
    "internal_error": (500, "Internal error"),
}
RETRY_AFTER = 1
"""Seconds after which it is worth asking again what passes by itself: whatever fails with 503, and a fork that is not
whole yet."""
CONTENT_TYPE = "application/problem+json"


class Wrong(msgspec.Struct, frozen=True, kw_only=True):
    """One of the things that are wrong with a definition: where in it, `limits.max_steps`, and what."""

    path: str
    message: str


class Document(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"kind": "type"}):
    """A problem document (RFC 9457): what happened, and what a caller needs to go on."""

    kind: str
    title: str
    status: int
    code: str
    detail: str
    request_id: str = ""
    run: str | None = None
    """The run in the way."""
    request: str | None = None
    """The request that it is about."""
    field: str | None = None
    """The field of the request that does not fit."""
    seq: int | None = None
    """The session's last sequence, or that of the event in the way."""
    limit: int | None = None
    retry_after: int | None = None
    """Seconds."""
    faults: tuple[Wrong, ...] = ()
    """Everything that is wrong with a definition."""


class Problem(Exception):
    """A refused or failed request. `details` are fields of `Document`."""

    def __init__(self, code: ProblemCode, detail: str, *, faults: tuple[Wrong, ...] = (), **details: str | int) -> None:
        super().__init__(detail)
        self.code: ProblemCode = code
        self.detail = detail
        self.faults = faults
        self.details = details

    @property
    def status(self) -> int:
        return STATUS[self.code][0]

    @property
    def passes(self) -> bool:
        """Whether it is worth asking again."""
        return self.status == 503 or self.code == "session_copying"

    def document(self, request_id: str) -> Document:
        status, title = STATUS[self.code]
        return Document(
            kind=f"urn:turnstream:problem:{self.code}",
            title=title,
            status=status,
            code=self.code,
            detail=self.detail,
            request_id=request_id,
            faults=self.faults,
            retry_after=RETRY_AFTER if self.passes else None,
            **self.details,  # pyright: ignore[reportArgumentType]
        )


def problem_of(error: Exception) -> Problem:
    """Any failure as a problem. What nobody foresaw is `internal_error` and tells nothing of its inside."""
    match error:
        case Problem():
            return error
        case Rejected():
            return Problem(error.code, error.message, **error.details)
        case Unavailable() | BrokerFault():
            return Problem("unavailable", f"the broker does not answer: {error}")
        case ViewsError():
            return Problem("unavailable", str(error))
        case InvalidCursor():
            return Problem("invalid_cursor", str(error), field="cursor")
        case LogError():
            return Problem("internal_error", f"the session's log cannot be read: {error}")
        case _:
            return Problem("internal_error", "something went wrong here; the server's log says what")
