"""A whole Turnstream in memory, as far as the rules are concerned: one log with a guard, writers whose folds are old, a
`WORK` of wake-ups with leases that lapse, timers. Nothing runs by itself: a test says what happens next.

`Auditor` reads the log as an outsider would, event by event, and knows neither the fold nor the table of edges.
"""

from collections.abc import Callable

import msgspec
from tests.core.scenario import AGENTS, KEY, origin

from turnstream.ids import derive
from turnstream.session.commands import Command, Origin, RecordFact, RunFact, StartRun
from turnstream.session.decide import Decision, decide
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    Due,
    Error,
    Limits,
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    Recorded,
    RunCancelRequested,
    RunEnded,
    RunReleased,
    RunStarted,
    ToolCall,
    ToolReturned,
    ToolStarted,
    Usage,
    Wake,
)
from turnstream.session.plan import CallModel, CallTool, Drive, Effect, End, Settle, Start, blocked_by, plan
from turnstream.session.state import Session, evolve, fold

SPECS = {
    name: msgspec.structs.replace(spec, limits=Limits(max_steps=3, max_tool_calls=5, timeout=1000))
    for name, spec in AGENTS.items()
}


class WakeUp(msgspec.Struct):
    """A message in `WORK`. `free`: nobody holds its lease."""

    seq: int
    queue: str
    cause: int
    deliveries: int = 0
    free: bool = True


class Writer:
    """A process: a fold that may be old, and at most one drive."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.session = Session(key=KEY)
        self.drive: Drive | None = None
        self.wake_up: WakeUp | None = None

    def stop(self) -> None:
        self.drive = self.wake_up = None


class World:
    def __init__(self) -> None:
        self.log: list[Recorded] = []
        self.now = 1_000
        self.work: dict[int, WakeUp] = {}
        self.timers: list[tuple[int, Due, int]] = []
        self.auditor = Auditor()
        self.named = 0
        self._work_seq = 0
        self._truth = Session(key=KEY)

    @property
    def last(self) -> int:
        return self.log[-1].seq if self.log else 0

    @property
    def truth(self) -> Session:
        """The whole log, folded anew after each event."""
        if self._truth.seq != self.last:
            self._truth = fold(Session(key=KEY), self.log)
        return self._truth

    def name(self, what: str) -> str:
        """A name that nothing else has."""
        self.named += 1
        return f"{what} {self.named}"

    # -- the log ------------------------------------------------------------------------------------------------------

    def catch_up(self, writer: Writer) -> None:
        writer.session = fold(writer.session, [event for event in self.log if event.seq > writer.session.seq])
        assert writer.session == self.truth, "a prefix and the rest fold to what all of it folds to"

    def handle(self, writer: Writer, command: Command) -> Decision | Rejected | None:
        """Decide, append behind the guard, on a refusal fold the tail and decide again. A refusal is believed on a
        fold that was just read."""
        for _ in range(3):
            answer = _decide(command, writer.session)
            if isinstance(answer, Decision) and writer.session.seq == self.last:
                self._append(writer, answer)
                return answer
            if writer.session.seq == self.last:
                return answer
            self.catch_up(writer)
            assert _told(_decide(command, writer.session)) == _told(_decide(command, self.truth))
        raise AssertionError("nobody else wrote meanwhile")

    def _append(self, writer: Writer, decision: Decision) -> None:
        self.now += 1
        seq = self.last + 1 + self.now % 3
        recorded = Recorded(seq=seq, previous=self.last, time=self.now, size=100, event=decision.event)
        self.log.append(recorded)
        writer.session = evolve(writer.session, recorded)
        self.auditor.read(recorded)
        for queue in decision.wakes:
            self.wake(queue, seq)
        self.timers += [(recorded.time + due.after, due, seq) for due in decision.dues]

    # -- wake-ups -----------------------------------------------------------------------------------------------------

    def wake(self, queue: str, cause: int) -> None:
        self._work_seq += 1
        self.work[self._work_seq] = WakeUp(self._work_seq, queue, cause)

    def tick(self, millis: int) -> None:
        self.now += millis
        for timer in [timer for timer in self.timers if timer[0] <= self.now]:
            self.timers.remove(timer)
            self.wake(timer[1].queue, timer[2])

    def deliver(self, writer: Writer, wake_up: WakeUp) -> None:
        """The writer begins to drive. It has read the log at least to the wake-up's cause."""
        wake_up.free = False
        wake_up.deliveries += 1
        wake = Wake(work=wake_up.seq, cause=wake_up.cause, delivery=wake_up.deliveries)
        nonce = self.name("nonce")
        writer.drive = Drive(runner=writer.name, nonce=nonce, queue=wake_up.queue, wake=wake)
        writer.wake_up = wake_up
        if writer.session.seq < wake_up.cause:
            self.catch_up(writer)

    def acknowledge(self, writer: Writer) -> None:
        assert writer.wake_up
        self.work.pop(writer.wake_up.seq, None)
        writer.stop()

    # -- driving ------------------------------------------------------------------------------------------------------

    def perform(self, writer: Writer, effect: Effect, choice: int = 0) -> Decision | Rejected | None:
        """Does what is planned and reports what came of it; `choice` says what."""
        drive = writer.drive
        assert drive is not None
        command = self.report(drive, writer.session, effect, choice)
        return self.handle(writer, command)

    def report(self, drive: Drive, session: Session, effect: Effect, choice: int) -> Command:
        run = session.run(effect.run)
        if isinstance(effect, Start) and (choice != 3 or (run and run.open_calls)):
            started = RunStarted(
                run=effect.run,
                attempt=effect.attempt,
                runner=drive.runner,
                wake=drive.wake,
                trigger=effect.trigger,
                message_ids=effect.message_ids,
            )
            name = drive.start_id(session, effect.run, effect.attempt)
            return StartRun(origin=self._origin(drive, name), started=started, gone=drive.gone)
        fact = _come_of(session, effect, choice)
        name = derive(effect.key, fact.attempt, type(fact).__name__)
        return RecordFact(origin=self._origin(drive, name), fact=fact)

    def _origin(self, drive: Drive, event_id: str) -> Origin:
        return origin("", id=event_id, actor=drive.runner, time=self.now)

    def finish(self, writer: Writer) -> None:
        """One turn of a drive that has nothing to do: acknowledge, put off, or look for the wake-up that is in the
        way."""
        drive, wake_up = writer.drive, writer.wake_up
        assert drive is not None
        assert wake_up is not None
        held = blocked_by(writer.session, drive)
        if wake_up.deliveries != drive.wake.delivery:
            writer.stop()  # the lease has lapsed: it is for another to say what becomes of the wake-up
        elif held is None or held.work in drive.gone:
            self.acknowledge(writer)
        elif held.work == drive.wake.work:
            wake_up.free = True
            writer.stop()
        elif held.work in self.work:
            self.acknowledge(writer)
        else:
            writer.drive = msgspec.structs.replace(drive, gone=drive.gone | {held.work})

    def run_to_the_end(self, *, timers: bool = True) -> None:
        """Every process dies; a new one takes what is in `WORK`, and what timers put there, until nothing is left. Its
        model never stops asking for tools."""
        heir = Writer("heir")
        for turn in range(10_000):
            for wake_up in self.work.values():
                wake_up.free = True
            if timers and not self.work and self.timers:
                self.tick(max(self.timers[0][0] - self.now, 0))
            if not self.work:
                return
            self.deliver(heir, self.work[min(self.work)] if turn % 2 else self.work[max(self.work)])
            self.catch_up(heir)
            self._drive_to_the_end(heir)
        raise AssertionError("it goes on for ever")

    def _drive_to_the_end(self, heir: Writer) -> None:
        while heir.drive:
            effects = plan(heir.session, self.now, heir.drive)
            if not effects:
                assert not due(heir.session, self.now, heir.drive)
                self.finish(heir)
                continue
            for effect in effects:
                answer = self.perform(heir, effect, choice=0)
                assert isinstance(answer, Decision), f"{effect} is planned and refused: {answer!r}"


def _decide(command: Command, session: Session) -> Decision | Rejected | None:
    try:
        return decide(command, session)
    except Rejected as refusal:
        return refusal


def _told(answer: Decision | Rejected | None) -> object:
    return (answer.code, answer.message, answer.details) if isinstance(answer, Rejected) else answer


def _come_of(session: Session, effect: Effect, choice: int) -> RunFact:
    """What a model or tool may answer. A tool whose call's id is odd is not idempotent."""
    match effect:
        case Start():
            run = session.run(effect.run)
            assert run is not None
            error = Error(code="agent_not_found", message="gone")
            return RunEnded(run=effect.run, attempt=run.attempt, status="failed", error=error)
        case CallModel() if choice in (0, 1):
            calls = tuple(ToolCall(id=f"c{n}", name="look", arguments="{}") for n in range(1 + choice))
            usage = Usage(output_tokens=5)
            return ModelReplied(run=effect.run, attempt=effect.attempt, step=effect.step, tool_calls=calls, usage=usage)
        case CallModel():
            status = "completed" if choice == 2 else "failed"
            return RunEnded(run=effect.run, attempt=effect.attempt, status=status)
        case CallTool() if effect.call.id == "c1" and not effect.call.started:
            return ToolStarted(run=effect.run, attempt=effect.attempt, call_id=effect.call.id)
        case CallTool():
            status = "error" if choice == 3 else "ok"
            return ToolReturned(run=effect.run, attempt=effect.attempt, call_id=effect.call.id, status=status)
        case Settle():
            return ToolReturned(run=effect.run, attempt=effect.attempt, call_id=effect.call.id, status=effect.status)
        case End():
            return RunEnded(run=effect.run, attempt=effect.attempt, status=effect.status, error=effect.error)


def due(session: Session, now: int, drive: Drive) -> list[int]:
    """The runs that want something of this drive, told without the plan: what is its own, what it may take over, and
    what is first in line when nobody holds the turn."""
    mine = [run for run in session.runs if run.spec.queue == drive.queue]
    wanting = []
    for run in mine:
        wake = run.wake
        if run.status == "running" and wake is not None:
            own = run.start_id == drive.start_id(session, run.n, run.attempt)
            again = wake.work == drive.wake.work and wake.delivery < drive.wake.delivery
            if own or again or wake.work in drive.gone:
                wanting.append(run.n)
        elif not any(other.status == "running" for other in session.runs):
            late = run.deadline is not None and run.deadline <= now
            resumed = [other.n for other in session.runs if other.attempt]
            first = min(resumed or [other.n for other in session.runs])
            if run.n == first or (late and run.attempt):
                wanting.append(run.n)
    return wanting


class Auditor:
    """What must be true of any log, said once more and otherwise."""

    def __init__(self) -> None:
        self.seq = 0
        self.holder: int | None = None
        self.requested: dict[int, str] = {}
        self.attempts: dict[int, int] = {}
        self.over: set[int] = set()
        self.cancelled: set[int] = set()
        self.open: dict[int, set[str]] = {}
        self.begun: dict[tuple[int, str], int] = {}
        self.messages: set[str] = set()
        self.taken: set[str] = set()
        self.keys: set[str] = set()
        self.ids: set[str] = set()

    def read(self, recorded: Recorded) -> None:
        event = recorded.event
        assert recorded.previous == self.seq < recorded.seq
        self.seq = recorded.seq
        assert event.id not in self.ids, "an event is stored once"
        self.ids.add(event.id)
        if event.idempotency_key:
            assert event.idempotency_key not in self.keys, "a key has one effect"
            self.keys.add(event.idempotency_key)
        data = event.data
        run = getattr(data, "run", 0)
        assert run not in self.over, f"a fact of run {run} after its end"
        if isinstance(data, ModelReplied | ToolStarted | ToolReturned | RunReleased | RunEnded):
            assert data.attempt == self.attempts[run], "a fact of another attempt"
        read: Callable[..., None] | None = getattr(self, f"_{type(data).__name__}", None)
        if read:
            read(data)

    def _MessagePosted(self, data: MessagePosted) -> None:
        assert data.message_id not in self.messages
        self.messages.add(data.message_id)
        assert not (data.starts and data.queued)
        routing = data.starts or data.queued
        if routing is None:
            return
        assert data.kind == "message"
        live = set(self.requested) - self.over
        assert bool(live) == bool(data.queued), "a message starts a turn if and only if nothing is live"
        assert routing.run == len(self.requested) + 1, "runs are numbered without gaps"
        self.requested[routing.run] = data.message_id
        self.attempts[routing.run] = 0

    def _MessageWithdrawn(self, data: MessageWithdrawn) -> None:
        assert data.message_id == self.requested[data.run]
        assert data.message_id not in self.taken
        assert self.attempts[data.run] == 0
        self.over.add(data.run)

    def _RunStarted(self, data: RunStarted) -> None:
        assert data.attempt == self.attempts[data.run] + 1
        assert self.holder in (None, data.run), "two runs hold the turn"
        assert data.run not in self.cancelled, "a cancelled run is started again"
        if data.attempt == 1:
            earlier = {run for run in self.requested if run < data.run} - self.over
            assert not earlier, "a message has overtaken another"
            assert data.message_ids == (self.requested[data.run],)
            assert not set(data.message_ids) & self.taken
            self.taken |= set(data.message_ids)
        else:
            assert data.message_ids == ()
        self.attempts[data.run] = data.attempt
        self.holder = data.run

    def _RunReleased(self, data: RunReleased) -> None:
        assert self.holder == data.run
        self.holder = None

    def _ModelReplied(self, data: ModelReplied) -> None:
        assert self.holder == data.run
        assert data.run not in self.cancelled
        assert not self.open.get(data.run), "a step before the results of the last one"
        self.open[data.run] = {call.id for call in data.tool_calls}
        assert len(self.open[data.run]) == len(data.tool_calls) > 0
        self.begun = {place: attempt for place, attempt in self.begun.items() if place[0] != data.run}

    def _ToolStarted(self, data: ToolStarted) -> None:
        assert self.holder == data.run
        assert data.call_id in self.open[data.run]
        assert (data.run, data.call_id) not in self.begun, "begun twice"
        self.begun[data.run, data.call_id] = data.attempt

    def _ToolReturned(self, data: ToolReturned) -> None:
        self.open[data.run].remove(data.call_id)
        if self.begun.get((data.run, data.call_id), data.attempt) < data.attempt:
            assert data.status in ("uncertain", "interrupted"), "a call of a dead attempt is told to be done"

    def _RunCancelRequested(self, data: RunCancelRequested) -> None:
        assert data.run in self.requested
        assert data.run not in self.cancelled
        self.cancelled.add(data.run)

    def _RunEnded(self, data: RunEnded) -> None:
        assert data.run in self.requested
        assert not self.open.get(data.run), "a run ends with a call that has no result"
        assert data.status == "cancelled" or data.run not in self.cancelled
        assert data.status != "completed" or self.holder == data.run
        self.over.add(data.run)
        if self.holder == data.run:
            self.holder = None
