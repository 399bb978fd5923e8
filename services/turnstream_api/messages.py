"""Saying something in a session: post, look at what waits for its turn, take it back.

Also the run that a message starts, awaited (`wait`) or streamed: the same for a message that is posted to a session and
for a run that is started with its own.
"""

from typing import Literal

import msgspec

from turnstream.ids import SessionKey
from turnstream.session.commands import PostMessage as PostCommand
from turnstream.session.commands import WithdrawMessage as WithdrawCommand
from turnstream.session.events import (
    Blob,
    Error,
    MessagePosted,
    MessageWithdrawn,
    Opens,
    Part,
    Recorded,
    Routed,
    RunEnded,
    RunStatus,
    Usage,
)
from turnstream.session.state import Session
from turnstream_api import checks
from turnstream_api.api import Answer, Api, Caller, Stream
from turnstream_api.checks import AgentName, Author, ExpectedSeq, MessageId, ModelName, OnBusy, Wait
from turnstream_api.errors import Problem
from turnstream_api.frames import Filter, control
from turnstream_api.operation import Request


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    type: Literal["text"] = "text"


class PostMessage(Request, frozen=True, kw_only=True):
    """`content` is a text or a list of parts. A `notice` starts nothing."""

    session: str
    content: str | list[TextPart]
    message_id: MessageId | None = None
    kind: Literal["message", "notice"] = "message"
    author: Author | None = None
    agent: AgentName | None = None
    model: ModelName | None = None
    on_busy: OnBusy | None = None
    expected_seq: ExpectedSeq | None = None
    wait: Wait = 0.0


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


class Posted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a message went. `seq`: the event that says so. `outcome` is there if the run's end was waited for and
    came."""

    session: str
    message: str
    routed: Routed
    seq: int
    run: str | None = None
    outcome: Outcome | None = None


async def post_message(api: Api, caller: Caller, request: PostMessage) -> Answer | Stream:
    """Says something in a session. By the session's state and policy it starts a run, waits for its turn, or is
    refused."""
    return await say(api, caller, checks.session_key(caller, request.session), request, None)


async def say(api: Api, caller: Caller, key: SessionKey, request: PostMessage, opens: Opens | None) -> Answer | Stream:
    """The same for whoever may open the session by it: `opens` says how."""
    message = Message(
        operation="post_message",
        content=request.content,
        message_id=request.message_id,
        kind=request.kind,
        author=request.author,
        agent=request.agent,
        model=request.model,
        on_busy=request.on_busy,
        expected_seq=request.expected_seq,
        wait=request.wait,
    )
    body = msgspec.structs.replace(request, wait=0.0, expected_seq=None)
    return await post(api, caller, key, message, opens, body=body)


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What every way of posting has in common."""

    operation: str
    content: str | list[TextPart]
    message_id: str | None = None
    kind: Literal["message", "notice"] = "message"
    author: str | None = None
    agent: str | None = None
    model: str | None = None
    on_busy: str | None = None
    expected_seq: int | None = None
    wait: float = 0.0


async def post(
    api: Api,
    caller: Caller,
    key: SessionKey,
    message: Message,
    opens: Opens | None,
    *,
    body: Request,
    fresh: bool = False,
) -> Answer | Stream:
    """`body` is what a repeat must be equal to. `fresh`: the session's id was made up a moment ago."""
    command = PostCommand(
        origin=api.origin(
            caller,
            message.operation,
            body,
            expected_seq=message.expected_seq,
            key_of_body=message.message_id,
        ),
        message_id=message.message_id or api.new_id(),
        author=message.author or caller.actor,
        kind=message.kind,
        content=content_of(api, message.content),
        specs=api.specs,
        agent=message.agent,
        model=checks.model(api, message.model),
        policy=checks.on_busy(message.on_busy),
        opens=opens,
    )
    handled = await api.sessions.handle(key, command, fresh=fresh)
    posted = _posted(key, command, handled.session, handled.recorded)
    replayed = handled.recorded is None
    n = int(posted.run.rpartition(".")[2]) if posted.run else 0
    if caller.streams:
        first = control("posted", posted)
        return Stream(key=key, after=posted.seq, filter=Filter(run=n), first=first, over=not n)
    if n and message.wait:
        session = handled.session if not replayed else await api.sessions.load(key)
        posted = msgspec.structs.replace(posted, outcome=await outcome(api, session, n, message.wait, after=posted.seq))
    return Answer(body=posted, status=200 if replayed else 202, seq=posted.seq, replayed=replayed)


def content_of(api: Api, content: str | list[TextPart]) -> tuple[Part, ...]:
    parts = (Part(text=content),) if isinstance(content, str) else tuple([Part(text=part.text) for part in content])
    size = sum(len(part.text.encode()) for part in parts)
    limit = api.settings.message_max
    if size > limit:
        raise Problem("too_large", f"content: {size} bytes of text, {limit} are allowed", field="content", limit=limit)
    return parts


def _posted(key: SessionKey, command: PostCommand, session: Session, recorded: Recorded | None) -> Posted:
    if recorded is None:
        receipt = session.receipt(command.origin.idempotency_key)
        if receipt is None:  # only a repeat is answered without an event
            raise Problem("internal_error", f"message {command.message_id} was not stored")
        run = key.run(receipt.run) if receipt.run else None
        return Posted(
            session=key.session, message=receipt.message_id, routed=receipt.routed or "none", seq=receipt.seq, run=run
        )
    data = recorded.event.data
    assert isinstance(data, MessagePosted)
    routing = data.starts or data.queued
    return Posted(
        session=key.session,
        message=data.message_id,
        routed="started" if data.starts else "queued" if data.queued else "none",
        seq=recorded.seq,
        run=key.run(routing.run) if routing else None,
    )


# --- a run's end --------------------------------------------------------------------------------------------------


async def outcome(api: Api, session: Session, n: int, timeout: float, *, after: int) -> Outcome | None:
    """How run `n` ended; None if it has not within `timeout` seconds. `after`: an event before its end."""
    if session.run(n) is not None:
        recorded = await api.hub.wait(session, Filter(run=n), timeout)
        return None if recorded is None else _outcome(recorded)
    async for page in api.log.read(session.key, after):
        for recorded in page:
            if ended := _outcome(recorded, n):
                return ended
    return None


def _outcome(recorded: Recorded, n: int | None = None) -> Outcome | None:
    data = recorded.event.data
    match data:
        case RunEnded() if n in (None, data.run):
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
        case MessageWithdrawn() if n in (None, data.run):
            return Outcome(status="cancelled", seq=recorded.seq, reason="its message was withdrawn")
        case _:
            return None


# --- what waits ---------------------------------------------------------------------------------------------------


class ReadQueue(Request, frozen=True, kw_only=True):
    session: str


class Queued(msgspec.Struct, frozen=True, kw_only=True):
    """A message that waits for its turn; `position` counts from 1."""

    message: str
    run: str
    position: int
    author: str
    content: tuple[Part, ...]
    agent: str
    seq: int
    queued_at: int


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """What no runner has begun with, in the order of its turn; `active` is the run in front."""

    session: str
    active: str | None
    items: tuple[Queued, ...]
    seq: int


async def read_queue(api: Api, caller: Caller, request: ReadQueue) -> Answer:
    """What waits for its turn in a session, by the log itself."""
    key = checks.session_key(caller, request.session)
    session = await api.sessions.load(key)
    if not session.exists:
        raise checks.no_session(request.session)
    waiting = [run for run in session.runs if run.status == "queued" and not run.attempt]
    said: dict[str, tuple[Recorded, MessagePosted]] = {}
    if waiting:
        session, events = await api.sessions.events(key, at_least=session.seq)
        for recorded in events:
            if isinstance(recorded.event.data, MessagePosted):
                said[recorded.event.data.message_id] = recorded, recorded.event.data
        waiting = [run for run in session.runs if run.status == "queued" and not run.attempt]
    items = [
        Queued(
            message=data.message_id,
            run=key.run(run.n),
            position=position,
            author=data.author,
            content=data.content,
            agent=run.spec.agent,
            seq=recorded.seq,
            queued_at=run.requested_at,
        )
        for position, run in enumerate(waiting, 1)
        for recorded, data in [said[run.message_ids[0]]]
    ]
    active = session.holder or next((run for run in session.runs if run.attempt), None)
    body = Queue(session=key.session, active=key.run(active.n) if active else None, items=tuple(items), seq=session.seq)
    return Answer(body=body, seq=session.seq)


class WithdrawMessage(Request, frozen=True, kw_only=True):
    session: str
    message: str
    expected_seq: ExpectedSeq | None = None


class Withdrawn(msgspec.Struct, frozen=True, kw_only=True):
    session: str
    message: str
    seq: int


async def withdraw_message(api: Api, caller: Caller, request: WithdrawMessage) -> Answer:
    """Takes back a message that no run has taken yet. The run that it was queued for ends as `cancelled`."""
    key = checks.session_key(caller, request.session)
    origin = api.origin(
        caller,
        "withdraw_message",
        msgspec.structs.replace(request, expected_seq=None),
        expected_seq=request.expected_seq,
    )
    handled = await api.sessions.handle(key, WithdrawCommand(origin=origin, message_id=request.message))
    receipt = handled.session.receipt(origin.idempotency_key)
    seq = handled.recorded.seq if handled.recorded else receipt.seq if receipt else handled.session.seq
    body = Withdrawn(session=key.session, message=request.message, seq=seq)
    return Answer(body=body, seq=seq, replayed=handled.recorded is None)
