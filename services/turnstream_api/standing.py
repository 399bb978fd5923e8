"""How a run stands, by the log itself: it has ended, it waits for a person, or it goes on. Awaited on the session's
feed, or looked up."""

import asyncio

import msgspec

from turnstream.session.events import (
    Blob,
    Error,
    MessageWithdrawn,
    OnExpiry,
    Recorded,
    RunEnded,
    RunStatus,
    RunWaiting,
    SessionDeleted,
    SessionErased,
    Usage,
)
from turnstream.session.state import Run, Session, request_id
from turnstream.views.requests import Kind, kind_of
from turnstream.views.run_row import BY_DELETION, BY_WITHDRAWAL
from turnstream_api.api import Api
from turnstream_api.errors import Problem
from turnstream_api.frames import Filter


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a run ended. An answer too large for an event is in `blob`; `output` then holds its head. `seq` is the
    sequence of the event that ended it."""

    status: RunStatus
    seq: int
    output: str = ""
    reasoning: str = ""
    blob: Blob | None = None
    note: str = ""
    error: Error | None = None
    reason: str = ""
    finish: str = ""
    usage: Usage = Usage()
    model: str = ""


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a run waits for: a question, which takes an `answer`, or an approval, which takes `approved`. The answer is
    one of `choices`, or fits `schema`, where these are given. `expires_at` is broker time in milliseconds; `on_expiry`
    says what happens then."""

    request: str
    kind: Kind
    prompt: str
    call_id: str
    schema: dict[str, object] | None = None
    choices: tuple[str, ...] = ()
    expires_at: int | None = None
    on_expiry: OnExpiry = "fail"
    default: object = None


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """`outcome` is there if the run has ended, `requests` if it waits for a person. `seq` is the sequence
    that this reflects."""

    status: RunStatus
    seq: int
    outcome: Outcome | None = None
    requests: tuple[OpenRequest, ...] = ()


async def standing_of(api: Api, session: Session, n: int, timeout: float, *, after: int) -> Standing:
    """How run `n` stands once it has ended or waits for a person, `timeout` seconds from now at the latest. `after`: an
    event before its end."""
    clock = asyncio.get_running_loop().time
    until = clock() + timeout
    over = timeout <= 0
    while True:
        run = session.run(n)
        if run is None and session.deleted:
            outcome = Outcome(status="cancelled", seq=session.deleted.seq, reason=BY_DELETION)
            return Standing(status=outcome.status, seq=outcome.seq, outcome=outcome)
        if run is None:
            return await _end_of(api, session, n, after)
        if run.for_people or over:
            requests = await requests_of(api, session, run)
            return Standing(status=run.status, seq=session.seq, requests=requests)
        found = await api.hub.wait(session, Filter(run=n), until - clock())
        if found and (outcome := ended(found, n)):
            return Standing(status=outcome.status, seq=outcome.seq, outcome=outcome)
        over = found is None
        session = await api.sessions.load(session.key, found.seq if found else 0)


async def _end_of(api: Api, session: Session, n: int, after: int) -> Standing:
    async for page in api.log.read(session.key, max(after, session.before_end(n))):
        for recorded in page:
            if outcome := ended(recorded, n):
                return Standing(status=outcome.status, seq=outcome.seq, outcome=outcome)
    raise Problem("internal_error", f"the log does not say how run {session.key.run(n)} ended")


async def requests_of(api: Api, session: Session, run: Run) -> tuple[OpenRequest, ...]:
    """What the run asks of people and is not answered, as it was asked."""
    asked: dict[str, OpenRequest] = {}
    for seq in sorted({request.asked_seq for request in run.for_people}):
        recorded = await api.log.at(session.key, seq)
        data = recorded.event.data if recorded else None
        for ask in data.requests if isinstance(data, RunWaiting) else ():
            if (kind := kind_of(ask.kind)) is None:
                continue
            asked[ask.request] = OpenRequest(
                request=ask.request,
                kind=kind,
                prompt=ask.prompt,
                call_id=ask.call_id,
                schema=ask.schema,
                choices=ask.choices,
                on_expiry=ask.on_expiry,
                default=ask.default,
            )
    return tuple(
        msgspec.structs.replace(asked[name], expires_at=request.expires_at)
        for request in run.for_people
        if (name := request_id(session, run.n, request.k)) in asked
    )


def ended(recorded: Recorded, n: int) -> Outcome | None:
    """The outcome of run `n`, if this event ends it."""
    data = recorded.event.data
    match data:
        case RunEnded() if data.run == n:
            return Outcome(
                status=data.status,
                seq=recorded.seq,
                output=data.content,
                reasoning=data.reasoning,
                blob=data.blob,
                note=data.note,
                error=data.error,
                reason=data.reason,
                finish=data.finish,
                usage=data.usage,
                model=data.model,
            )
        case MessageWithdrawn() if data.run == n:
            return Outcome(status="cancelled", seq=recorded.seq, reason=BY_WITHDRAWAL)
        case SessionDeleted() | SessionErased():
            return Outcome(status="cancelled", seq=recorded.seq, reason=BY_DELETION)
        case _:
            return None
