"""What waits in a session until a run takes it: look at it, take a message back."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec

from turnstream.session.commands import WithdrawMessage as WithdrawCommand
from turnstream.session.events import Attachment, MessagePosted, Part, Recorded, Requested, RunRequested
from turnstream.session.state import Run, Session
from turnstream_api import checks
from turnstream_api.api import Answer, Api, Caller, written
from turnstream_api.checks import ExpectedSeq
from turnstream_api.operation import Request

Waits = Literal["queued", "retry", "leftover", "steering", "action"]


class ReadQueue(Request, frozen=True, kw_only=True):
    session: str


class Queued(msgspec.Struct, frozen=True, kw_only=True):
    """A message that no run has taken. `run`: the one that will. `waits`: it is `queued` for a turn of its own, is of a
    turn that failed and is tried again (`retry`), reached another run too late (`leftover`), or is `steering`: the run
    takes it before its next step. Or an `action` that has not begun: it is no message, `verb` is the tool that `author`
    calls. `position` counts from 1; `seq` and `queued_at` (milliseconds) are of the event that it is."""

    message: str | None
    verb: str | None
    run: str
    waits: Waits
    position: int
    author: str
    content: tuple[Part, ...]
    attachments: tuple[Attachment, ...]
    agent: str
    seq: int
    queued_at: int


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """What no run has taken, in the order in which it will be; `active` is the run in front."""

    session: str
    active: str | None
    items: tuple[Queued, ...]
    seq: int


async def read_queue(api: Api, caller: Caller, request: ReadQueue) -> Answer:
    """What waits in a session until a run takes it, by the log itself."""
    key = checks.session_key(caller, request.session)
    session = await api.sessions.load(key)
    if not session.exists:
        raise checks.no_session(request.session)
    waiting = list(_waiting(session))
    said = await _said(api, session, waiting) if waiting else {}
    items: list[Queued] = []
    for position, (run, name, waits) in enumerate(waiting, 1):
        recorded = said.get(run.requested_seq if name is None else name)
        if recorded is None:  # it is being deleted
            raise checks.no_session(request.session)
        items.append(_item(session, recorded, run, waits, position))
    active = session.holder
    body = Queue(session=key.session, active=key.run(active.n) if active else None, items=tuple(items), seq=session.seq)
    return Answer(body=body, seq=session.seq)


async def _said(
    api: Api, session: Session, waiting: Sequence[tuple[Run, str | None, Waits]]
) -> dict[str | int, Recorded]:
    """These messages by id, and these actions by sequence: all of them are there, unless the session has been deleted
    since."""
    names = {name for _, name, _ in waiting}
    asked = {run.requested_seq for run, name, _ in waiting if name is None}
    since = min([run.since for run, _, _ in waiting])
    _, events = await api.sessions.events(session.key, session.seq, since)
    said: dict[str | int, Recorded] = {}
    for recorded in events:
        data = recorded.event.data
        if isinstance(data, MessagePosted) and data.message_id in names:
            said[data.message_id] = recorded
        elif recorded.seq in asked:
            said[recorded.seq] = recorded
    return said


def _item(session: Session, recorded: Recorded, run: Run, waits: Waits, position: int) -> Queued:
    data = recorded.event.data
    posted = data if isinstance(data, MessagePosted) else None
    return Queued(
        message=posted.message_id if posted else None,
        verb=data.action.name if isinstance(data, RunRequested) and data.action else None,
        run=session.key.run(run.n),
        waits=waits,
        position=position,
        author=posted.author if posted else run.author,
        content=posted.content if posted else (),
        attachments=posted.attachments if posted else (),
        agent=run.spec.agent,
        seq=recorded.seq,
        queued_at=recorded.time,
    )


def _waiting(session: Session) -> Iterator[tuple[Run, str | None, Waits]]:
    """Every message that no run has taken, with the run that will; those of runs that have begun come first, but for
    one that was interrupted: what steers it comes behind what interrupted it. And, without a message, every action that
    has not begun. In a fork that is not whole nothing waits: what waited there does not go on here."""
    if session.copying:
        return
    late = {run.interrupts: run for run in session.runs}
    steered = [run for run in session.runs if run.steering]
    for run in sorted(session.runs, key=lambda run: not run.taken):
        if run.trigger == "action" and not run.taken:
            yield run, None, "action"
        elif not run.taken:
            for name in run.message_ids:
                yield run, name, _QUEUED.get(run.trigger, "queued")
        for other in steered:
            if late.get(other.n, other) is run:
                for name in other.steering:
                    yield other, name, "steering"


_QUEUED: Final[Mapping[Requested, Waits]] = {"retry": "retry", "leftover": "leftover"}


class WithdrawMessage(Request, frozen=True, kw_only=True):
    session: str
    message: str
    expected_seq: ExpectedSeq | None = None


class Withdrawn(msgspec.Struct, frozen=True, kw_only=True):
    session: str
    message: str
    seq: int


async def withdraw_message(api: Api, caller: Caller, request: WithdrawMessage) -> Answer:
    """Takes back a message that no run has taken yet. A run that it was alone queued for ends as `cancelled`. One
    that was withdrawn before stays so. To change a message that waits, withdraw it and post another."""
    key = checks.session_key(caller, request.session)
    body = msgspec.structs.replace(request, expected_seq=None)
    origin = api.origin(caller, "withdraw_message", body, expected_seq=request.expected_seq)
    handled = await api.sessions.handle(key, WithdrawCommand(origin=origin, message_id=request.message))
    seq, replayed = written(handled, origin)
    answer = Withdrawn(session=key.session, message=request.message, seq=seq)
    return Answer(body=answer, seq=seq, replayed=replayed)
