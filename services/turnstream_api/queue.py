"""What waits for its turn in a session: look at it, take a message back."""

from collections.abc import Sequence

import msgspec

from turnstream.session.commands import WithdrawMessage as WithdrawCommand
from turnstream.session.events import MessagePosted, Part, Recorded
from turnstream_api import checks
from turnstream_api.api import Answer, Api, Caller, written
from turnstream_api.checks import ExpectedSeq
from turnstream_api.operation import Request


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
    events: Sequence[Recorded] = ()
    if not all(run.taken for run in session.runs):
        session, events = await api.sessions.events(key, at_least=session.seq)
    said = {recorded.seq: recorded.event.data for recorded in events}
    items = [
        Queued(
            message=data.message_id,
            run=key.run(run.n),
            position=position,
            author=data.author,
            content=data.content,
            agent=run.spec.agent,
            seq=run.requested_seq,
            queued_at=run.requested_at,
        )
        for position, run in enumerate((run for run in session.runs if not run.taken), 1)
        if isinstance(data := said[run.requested_seq], MessagePosted)
    ]
    active = session.holder or next((run for run in session.runs if run.taken), None)
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
    body = msgspec.structs.replace(request, expected_seq=None)
    origin = api.origin(caller, "withdraw_message", body, expected_seq=request.expected_seq)
    handled = await api.sessions.handle(key, WithdrawCommand(origin=origin, message_id=request.message))
    seq, replayed = written(handled, origin)
    answer = Withdrawn(session=key.session, message=request.message, seq=seq)
    return Answer(body=answer, seq=seq, replayed=replayed)
