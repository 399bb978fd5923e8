"""What a session is, as folded from its events: `evolve(session, recorded)`.

The folded state holds ids, numbers and digests, never content, so it stays small however long a session grows. It is
immutable: whoever holds one holds what the log said at `seq`. It is not a read model (those are in `turnstream.views`)
and decides nothing (`decide.py`).

For whoever edits this: the table of edges below is the only place that says which status follows which; the diagram in
the README is checked against it. An event that fits no edge is ignored when read (the first end wins); it is `decide`
that refuses to write one.
"""

from collections.abc import Iterable
from itertools import chain
from typing import assert_never

import msgspec

from turnstream.ids import DEFAULT_AGENT, SessionKey
from turnstream.session.events import (
    Limits,
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    Opens,
    PolicyData,
    Recorded,
    Routed,
    RunCancelRequested,
    RunEnded,
    RunReleased,
    RunStarted,
    RunStatus,
    SessionOpened,
    SessionUpdated,
    Spec,
    TitleSource,
    ToolReturned,
    ToolStarted,
    Trigger,
    Unknown,
    Usage,
    Wake,
)
from turnstream.session.recent import Recent

REMEMBERED = 1000
"""How many idempotency keys, and how many message ids, a session remembers at least. The key that opened it is
remembered for ever."""
TURNS = 64
"""How many turns lie in one block: ending a turn copies the last block, not all turns."""

EDGES: dict[RunStatus | None, dict[str, frozenset[RunStatus]]] = {
    None: {"message.posted": frozenset({"queued"})},
    "queued": {
        "run.started": frozenset({"running"}),
        "message.withdrawn": frozenset({"cancelled"}),
        "run.ended": frozenset({"failed", "cancelled", "timed_out"}),
    },
    "running": {
        "run.started": frozenset({"running"}),
        "run.released": frozenset({"queued"}),
        "run.ended": frozenset({"completed", "failed", "cancelled", "timed_out"}),
    },
    "completed": {},
    "failed": {},
    "cancelled": {},
    "timed_out": {},
}
"""status -> event -> what it may become. A status without edges is terminal."""
TERMINAL = frozenset(
    event for edges in EDGES.values() for event, statuses in edges.items() if any(not EDGES[to] for to in statuses)
)
"""Events that end the run that they are about."""


def has_edge(status: RunStatus, event: str, to: RunStatus) -> bool:
    return to in EDGES[status].get(event, frozenset())


class Call(msgspec.Struct, frozen=True):
    """A tool call that has no result yet. `started` is the attempt that began it (only of tools that are not
    idempotent), else 0."""

    id: str
    name: str
    started: int = 0


class Run(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run that has not ended."""

    n: int
    spec: Spec
    message_ids: tuple[str, ...]
    requested_seq: int
    requested_at: int
    status: RunStatus = "queued"
    attempt: int = 0
    start_id: str = ""
    """Id of the current attempt's `run.started`: the fence."""
    runner: str = ""
    wake: Wake | None = None
    deadline: int | None = None
    """Broker time in milliseconds, from the first start."""
    cancel: bool = False
    recoveries: int = 0
    """Recoveries since the last new fact."""
    steps: int = 0
    tool_calls: int = 0
    reply_seq: int = 0
    """Sequence of the reply that asked for `open_calls`."""
    open_calls: tuple[Call, ...] = ()
    usage: Usage = Usage()
    size: int = 0

    @property
    def limits(self) -> Limits:
        return self.spec.limits

    @property
    def taken(self) -> bool:
        """Whether its message was taken: it has been started."""
        return self.attempt > 0

    def next_start(self) -> tuple[Trigger, tuple[str, ...]]:
        """Why the next attempt starts, and the messages that its start names: each message is taken once."""
        if self.status == "running":
            return "recovery", ()
        return ("handover", ()) if self.taken else ("message", self.message_ids)

    def call(self, call_id: str) -> Call | None:
        """The open call of this id."""
        return next((call for call in self.open_calls if call.id == call_id), None)


class Turn(msgspec.Struct, frozen=True):
    """A run that has ended: where its events begin and how many bytes they have, so that history can start reading
    where it needs to."""

    run: int
    seq: int
    size: int


class Receipt(msgspec.Struct, frozen=True):
    """The first answer to a command with an idempotency key."""

    seq: int
    body_digest: str | None
    message_id: str = ""
    run: int = 0
    routed: Routed | None = None


class Session(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A session as of `seq`, the sequence of its last event; `seq` 0 is one that does not exist."""

    key: SessionKey
    seq: int = 0
    opened_at: int = 0
    agent: str | None = None
    title_source: TitleSource = "derived"
    policy: PolicyData = PolicyData()
    one_shot: bool = False
    runs: tuple[Run, ...] = ()
    """The runs that have not ended, by number."""
    last_run: int = 0
    last_end: RunStatus | None = None
    """Status of the run that ended last."""
    turn_blocks: tuple[tuple[Turn, ...], ...] = ()
    receipts: Recent[Receipt] = Recent(REMEMBERED)
    messages: Recent[int] = Recent(REMEMBERED)
    """The run that each message started or is queued for, 0 for none."""
    opening: tuple[str, Receipt] | None = None

    @property
    def exists(self) -> bool:
        return self.seq > 0

    @property
    def agent_name(self) -> str:
        return self.agent or DEFAULT_AGENT

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The runs that were started and have ended, in the order of their ends."""
        return tuple(chain.from_iterable(self.turn_blocks))

    def run(self, n: int) -> Run | None:
        """The run of this number if it has not ended."""
        for run in self.runs:
            if run.n == n:
                return run
        return None

    def receipt(self, key: str | None) -> Receipt | None:
        if key is None:
            return None
        if self.opening and self.opening[0] == key:
            return self.opening[1]
        return self.receipts.get(key)

    @property
    def holder(self) -> Run | None:
        """The run that holds the turn."""
        for run in self.runs:
            if run.status == "running":
                return run
        return None

    @property
    def next_run(self) -> Run | None:
        """The run that may start now: resumed runs go before runs that never started."""
        if self.holder:
            return None
        return min(self.runs, key=lambda run: (not run.taken, run.n), default=None)


def fold(session: Session, events: Iterable[Recorded]) -> Session:
    for recorded in events:
        session = evolve(session, recorded)
    return session


def evolve(session: Session, recorded: Recorded) -> Session:
    """The session after this event. Events come in the order of their sequence; none is left out."""
    event = recorded.event
    data = event.data
    if event.idempotency_key is not None:
        session = _remember(session, recorded, event.idempotency_key)
    session = msgspec.structs.replace(session, seq=recorded.seq, opened_at=session.opened_at or recorded.time)
    match data:
        case SessionOpened():
            return _opened(session, data)
        case SessionUpdated():
            return msgspec.structs.replace(
                session,
                title_source=data.title.source if data.title else session.title_source,
                agent=data.agent if data.agent is not None else session.agent,
                policy=data.policy if data.policy is not None else session.policy,
            )
        case MessagePosted():
            return _posted(session, recorded, data)
        case MessageWithdrawn():
            return _withdrawn(session, recorded, data)
        case RunStarted():
            return _started(session, recorded, data)
        case RunReleased():
            return _released(session, recorded, data)
        case ModelReplied():
            return _replied(session, recorded, data)
        case ToolStarted():
            return _tool_started(session, recorded, data)
        case ToolReturned():
            return _tool_returned(session, recorded, data)
        case RunCancelRequested():
            run = session.run(data.run)
            return _with(session, run, recorded, cancel=True) if run else session
        case RunEnded():
            run = session.run(data.run)
            ends = run is not None and has_edge(run.status, "run.ended", data.status)
            return _ended(session, run, recorded, data.status) if run and ends else session
        case Unknown():
            return session
        case _:
            assert_never(data)


def _opened(session: Session, opens: Opens) -> Session:
    return msgspec.structs.replace(
        session,
        agent=opens.agent,
        title_source=opens.title.source if opens.title else "derived",
        policy=opens.policy,
        one_shot=opens.one_shot,
    )


def _posted(session: Session, recorded: Recorded, data: MessagePosted) -> Session:
    if data.opens:
        session = _opened(session, data.opens)
    routing = data.routing
    messages = session.messages.add(data.message_id, routing.run if routing else 0)
    if routing is None:
        return msgspec.structs.replace(session, messages=messages)
    run = Run(
        n=routing.run,
        spec=routing.spec,
        message_ids=(data.message_id,),
        requested_seq=recorded.seq,
        requested_at=recorded.time,
        size=recorded.size,
    )
    return msgspec.structs.replace(session, messages=messages, runs=(*session.runs, run), last_run=routing.run)


def _withdrawn(session: Session, recorded: Recorded, data: MessageWithdrawn) -> Session:
    for run in session.runs:
        if data.message_id in run.message_ids:
            withdraws = not run.taken and has_edge(run.status, "message.withdrawn", "cancelled")
            return _ended(session, run, recorded, "cancelled") if withdraws else session
    return session


def _started(session: Session, recorded: Recorded, data: RunStarted) -> Session:
    run = session.run(data.run)
    if run is None or data.attempt <= run.attempt or not has_edge(run.status, "run.started", "running"):
        return session
    return _with(
        session,
        run,
        recorded,
        status="running",
        attempt=data.attempt,
        start_id=recorded.event.id,
        runner=data.runner,
        wake=data.wake,
        deadline=run.deadline if run.deadline is not None else recorded.time + run.limits.timeout,
        recoveries=run.recoveries + (run.status == "running"),
    )


def _released(session: Session, recorded: Recorded, data: RunReleased) -> Session:
    run = _at(session, data.run, data.attempt)
    releases = run is not None and has_edge(run.status, "run.released", "queued")
    return _with(session, run, recorded, status="queued") if run and releases else session


def _replied(session: Session, recorded: Recorded, data: ModelReplied) -> Session:
    run = _at(session, data.run, data.attempt)
    if run is None:
        return session
    return _with(
        session,
        run,
        recorded,
        steps=data.step,
        tool_calls=run.tool_calls + len(data.tool_calls),
        reply_seq=recorded.seq,
        open_calls=tuple(Call(call.id, call.name) for call in data.tool_calls),
        usage=run.usage + data.usage,
        recoveries=0,
    )


def _tool_started(session: Session, recorded: Recorded, data: ToolStarted) -> Session:
    run = _at(session, data.run, data.attempt)
    if run is None:
        return session
    calls = tuple(
        Call(call.id, call.name, data.attempt) if call.id == data.call_id else call for call in run.open_calls
    )
    return _with(session, run, recorded, open_calls=calls, recoveries=0)


def _tool_returned(session: Session, recorded: Recorded, data: ToolReturned) -> Session:
    run = _at(session, data.run, data.attempt)
    if run is None:
        return session
    calls = tuple(call for call in run.open_calls if call.id != data.call_id)
    # A call that is only settled is no progress: else a run that kills its runners could not end for it.
    recoveries = 0 if data.status in ("ok", "error") else run.recoveries
    return _with(session, run, recorded, open_calls=calls, recoveries=recoveries)


def _at(session: Session, n: int, attempt: int) -> Run | None:
    """The run, if this attempt is its current one."""
    run = session.run(n)
    return run if run and run.attempt == attempt else None


def _with(session: Session, run: Run, recorded: Recorded, **changes: object) -> Session:
    changed = msgspec.structs.replace(run, size=run.size + recorded.size, **changes)
    runs = tuple([changed if other is run else other for other in session.runs])
    return msgspec.structs.replace(session, runs=runs)


def _ended(session: Session, run: Run, recorded: Recorded, status: RunStatus) -> Session:
    runs = tuple([other for other in session.runs if other is not run])
    if not run.taken:
        return msgspec.structs.replace(session, runs=runs, last_end=status)
    turn = Turn(run.n, run.requested_seq, run.size + recorded.size)
    blocks = session.turn_blocks
    if blocks and len(blocks[-1]) < TURNS:
        blocks = (*blocks[:-1], (*blocks[-1], turn))
    else:
        blocks = (*blocks, (turn,))
    return msgspec.structs.replace(session, runs=runs, turn_blocks=blocks, last_end=status)


def _remember(session: Session, recorded: Recorded, key: str) -> Session:
    data = recorded.event.data
    digest = recorded.event.body_digest
    match data:
        case MessagePosted():
            run = data.routing.run if data.routing else 0
            receipt = Receipt(recorded.seq, digest, data.message_id, run, data.routed)
        case RunCancelRequested() | RunEnded():
            receipt = Receipt(recorded.seq, digest, run=data.run)
        case _:
            receipt = Receipt(recorded.seq, digest)
    if recorded.previous == 0:
        return msgspec.structs.replace(session, opening=(key, receipt))
    return msgspec.structs.replace(session, receipts=session.receipts.add(key, receipt))
