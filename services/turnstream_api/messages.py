"""Saying something in a session, and the run that it starts, awaited (`wait`) or streamed.

The same for a message that is posted to a session, comes by the inbox, or starts a run with a session of its own.
"""

from typing import Literal

import msgspec

from turnstream.ids import SessionKey, parse_run_id
from turnstream.session.commands import PostMessage as PostCommand
from turnstream.session.events import MessagePosted, Opens, Part, Recorded, Routed
from turnstream.session.state import Session
from turnstream_api import attachments, checks, policies
from turnstream_api.api import Answer, Api, Caller, Stream
from turnstream_api.attachments import Names
from turnstream_api.checks import AgentName, Author, ExpectedSeq, MessageId, ModelName, Wait, WindowContext
from turnstream_api.errors import Problem
from turnstream_api.operation import Request
from turnstream_api.policies import OnBusy
from turnstream_api.watched import Watched, watched


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    type: Literal["text"] = "text"


class PostMessage(Request, frozen=True, kw_only=True):
    """`content` is a text or a list of parts; it may be empty where something is attached. A `notice` starts
    nothing."""

    session: str
    content: str | list[TextPart] = ""
    attachments: Names = []
    context: WindowContext = ""
    message_id: MessageId | None = None
    kind: Literal["message", "notice"] = "message"
    author: Author | None = None
    agent: AgentName | None = None
    model: ModelName | None = None
    on_busy: OnBusy | None = None
    expected_seq: ExpectedSeq | None = None
    wait: Wait = 0.0


class Posted(Watched, frozen=True, kw_only=True, omit_defaults=True):
    """Where a message went: it `started` a run, is `queued` for one of its own, `steered` one that is there or
    `answered` what it waits for, or starts nothing (`none`). `run`: the one that it went to. `seq`: the event that says
    so. `status`, `outcome` and `requests` are there if `wait` asked for them."""

    message: str
    routed: Routed


async def post_message(api: Api, caller: Caller, request: PostMessage) -> Answer | Stream:
    """Says something in a session. By the session's state and policy it starts a run, waits for its turn, steers the
    run that is there, answers what that waits for, or is refused."""
    return await post(api, caller, checks.session_key(caller, request.session), request, None)


async def post(
    api: Api,
    caller: Caller,
    key: SessionKey,
    message: PostMessage,
    opens: Opens | None,
    *,
    operation: str = "post_message",
    request: Request | None = None,
    fresh: bool = False,
) -> Answer | Stream:
    """The same for whoever may open the session by it: `opens` says how. `request` is what a repeat of the operation
    must be equal to, if it is not the message itself. `fresh`: the session's id was made up a moment ago."""
    body = msgspec.structs.replace(request or message, wait=0.0, expected_seq=None)
    origin = api.origin(caller, operation, body, expected_seq=message.expected_seq, key_of_body=message.message_id)
    command = PostCommand(
        origin=origin,
        message_id=message.message_id or api.new_id(),
        author=message.author or caller.actor,
        kind=message.kind,
        content=content_of(api, message.content),
        context=checks.context(message.context),
        specs=api.agents(caller.account),
        agent=message.agent,
        model=checks.model(api, message.model),
        policy=policies.on_busy(message.on_busy),
        opens=opens,
    )
    command, handled = await attachments.handle(api, key, command, message.attachments, fresh=fresh)
    posted = _posted(key, command, handled.session, handled.recorded)
    run = parse_run_id(posted.run) if posted.run else None
    return await watched(
        api,
        caller,
        handled.session,
        run[1] if run else 0,
        posted,
        wait=message.wait,
        replayed=handled.recorded is None,
        attached=posted.routed in ("started", "queued"),
    )


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
    run = key.run(data.run) if data.run else None
    return Posted(session=key.session, message=data.message_id, routed=data.routed, seq=recorded.seq, run=run)
