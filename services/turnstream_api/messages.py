"""Saying something in a session, and the run that it starts, awaited (`wait`) or streamed.

The same for a message that is posted to a session, comes by the inbox, or starts a run with a session of its own.
"""

from typing import Literal

import msgspec

from turnstream.ids import SessionKey
from turnstream.session.commands import PostMessage as PostCommand
from turnstream.session.events import (
    MessagePosted,
    Opens,
    Part,
    Recorded,
    Routed,
)
from turnstream.session.state import Session
from turnstream_api import checks
from turnstream_api.api import Answer, Api, Caller, Stream
from turnstream_api.checks import AgentName, Author, ExpectedSeq, MessageId, ModelName, OnBusy, Wait
from turnstream_api.errors import Problem
from turnstream_api.frames import Filter, control
from turnstream_api.operation import Request
from turnstream_api.outcome import Outcome, outcome_of


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
        posted = msgspec.structs.replace(
            posted, outcome=await outcome_of(api, session, n, message.wait, after=posted.seq)
        )
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
