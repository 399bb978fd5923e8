"""What runs ask of people: questions and approvals, listed, and answered by the run that asks or by the request's own
id."""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta

from turnstream import ids
from turnstream.ids import SessionKey
from turnstream.log.handle import Handled
from turnstream.session.commands import AnswerRequest as AnswerCommand
from turnstream.session.commands import Origin
from turnstream.session.events import RequestAnswered
from turnstream.session.state import request_id
from turnstream.views import requests as view
from turnstream_api import checks
from turnstream_api.api import Answer, Api, Caller, Stream
from turnstream_api.checks import Cursor, ExpectedSeq, Limit, Wait
from turnstream_api.errors import Problem, ProblemCode
from turnstream_api.operation import Read, Request
from turnstream_api.watched import Watched, watched

REFUSALS: Final[tuple[ProblemCode, ...]] = (
    "not_found",
    "not_waiting",
    "already_answered",
    "request_expired",
    "request_closed",
)
RequestName = Annotated[str, Meta(max_length=ids.SESSION_MAX + 64, description="`<run>.q<k>`.")]
AnyAnswer = Annotated[object, Meta(description="The answer to a question: any JSON, null too.")]
Approved = Annotated[bool, Meta(description="Whether the call may be carried out.")]
Reason = Annotated[str, Meta(max_length=1024, description="Why it may not; the model is told.")]


class ListRequests(Read, frozen=True, kw_only=True):
    """`state`: those that are open, unless another is named; `any` is all."""

    limit: Limit = 50
    cursor: Cursor | None = None
    state: view.State | Literal["any"] = "open"
    session: Annotated[str, Meta(max_length=ids.SESSION_MAX)] | None = None
    run: Annotated[str, Meta(max_length=ids.SESSION_MAX + 32)] | None = None
    kind: view.Kind | None = None


async def list_requests(api: Api, caller: Caller, request: ListRequests) -> Answer:
    """What the account's runs ask of people, the latest first. `next` continues the list."""
    await checks.shown(api, request.after)
    page = await view.list_page(
        api.views,
        caller.account,
        limit=request.limit,
        cursor=request.cursor,
        state=None if request.state == "any" else request.state,
        session=request.session,
        run=request.run,
        kind=request.kind,
    )
    return Answer(body=page, seq=page.position)


class AnswerRun(Request, frozen=True, kw_only=True):
    """`answer` for a question, `approved` for an approval. `request` may be left out where the run has one request."""

    run: str
    request: RequestName | None = None
    answer: AnyAnswer = UNSET
    approved: Approved | None = None
    reason: Reason = ""
    expected_seq: ExpectedSeq | None = None
    wait: Wait = 0.0


class AnswerRequest(Request, frozen=True, kw_only=True):
    """`answer` for a question, `approved` for an approval."""

    request: str
    answer: AnyAnswer = UNSET
    approved: Approved | None = None
    reason: Reason = ""
    expected_seq: ExpectedSeq | None = None
    wait: Wait = 0.0


class Answered(Watched, frozen=True, kw_only=True, omit_defaults=True):
    """`seq`: the event that holds the answer. With it the run goes on, unless it has other requests open. `status`,
    `outcome` and `requests` are there if `wait` asked for them."""

    request: str


async def answer_run(api: Api, caller: Caller, request: AnswerRun) -> Answer | Stream:
    """Answers a question, or decides on an approval, that a run waits for. The first answer counts: the same again
    changes nothing (200), another is refused (`already_answered`)."""
    key, n = checks.run_key(caller, request.run)
    k: int | None = None
    if request.request is not None:
        parsed = ids.parse_request_id(request.request)
        if parsed is None or parsed[:2] != (key.session, n):
            raise _no_request(request.request)
        k = parsed[2]
    return await _answer(api, caller, key, n, k, request, "answer_run")


async def answer_request(api: Api, caller: Caller, request: AnswerRequest) -> Answer | Stream:
    """Answers a question, or decides on an approval, by the request's own id; see `answer_run`."""
    parsed = ids.parse_request_id(request.request)
    if parsed is None:
        raise _no_request(request.request)
    session, n, k = parsed
    return await _answer(api, caller, SessionKey(caller.account, session), n, k, request, "answer_request")


async def _answer(
    api: Api,
    caller: Caller,
    key: SessionKey,
    n: int,
    k: int | None,
    given: AnswerRun | AnswerRequest,
    operation: str,
) -> Answer | Stream:
    _check(api, given)
    body = msgspec.structs.replace(given, wait=0.0, expected_seq=None)
    origin = api.origin(caller, operation, body, expected_seq=given.expected_seq)
    command = AnswerCommand(
        origin=origin,
        run=n,
        request=k,
        answer=None if given.answer is UNSET else given.answer,
        approved=given.approved,
        reason=given.reason,
    )
    handled = await api.sessions.handle(key, command)
    name, seq = await _closed(api, handled, origin, n, k)
    answered = Answered(session=key.session, run=key.run(n), request=name, seq=seq)
    replayed = handled.recorded is None
    return await watched(api, caller, handled.session, n, answered, wait=given.wait, replayed=replayed)


def _check(api: Api, given: AnswerRun | AnswerRequest) -> None:
    if given.answer is UNSET and given.approved is None:
        raise Problem("invalid", "answer: is missing; an approval takes `approved`", field="answer")
    if given.answer is not UNSET and given.approved is not None:
        raise Problem("invalid", "approved: a request takes `answer` or `approved`, not both", field="approved")
    if given.reason and given.approved is None:
        raise Problem("invalid", "reason: is for an approval", field="reason")
    if given.answer is not UNSET:
        checks.value(given.answer, "answer", api.settings.message_max)


async def _closed(api: Api, handled: Handled, origin: Origin, n: int, k: int | None) -> tuple[str, int]:
    """The request that was answered, by this call or by an equal one before, and the event that did it."""
    session, recorded = handled.session, handled.recorded
    receipt = None if recorded else session.receipt(origin.idempotency_key)
    if receipt:
        recorded = await api.log.at(session.key, receipt.seq)
    if recorded and isinstance(data := recorded.event.data, RequestAnswered):
        return data.request, recorded.seq
    name = request_id(session, n, k or 1)
    closed = session.closed.get(name)
    if closed is None:  # an answer is stored, refused, or was there before
        raise Problem("internal_error", f"the answer to request {name} was not stored")
    return name, closed.seq


def _no_request(request: str) -> Problem:
    return Problem("not_found", f"no request {request[:200]}")
