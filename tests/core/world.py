"""A whole Turnstream in memory, as far as the rules are concerned: one log with a guard, writers whose folds are old, a
`WORK` of wake-ups with leases that lapse, timers. Nothing runs by itself: a test says what happens next.

`Auditor` reads the log as an outsider would, event by event, and knows neither the fold nor the table of edges.
"""

from collections.abc import Callable, Mapping

import msgspec
from tests.core.scenario import AGENTS, KEY, origin

from turnstream.ids import derive
from turnstream.session.commands import (
    AnswerRequest,
    Command,
    EraseSession,
    ExpireRequest,
    Origin,
    RecordFact,
    RunFact,
    StartRun,
    TitleSession,
)
from turnstream.session.decide import decide
from turnstream.session.decision import Decision
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    Answers,
    Ask,
    Asks,
    Due,
    Error,
    Leftover,
    Limits,
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    PolicyData,
    Recorded,
    RequestAnswered,
    RequestExpired,
    RunCancelRequested,
    RunEnded,
    RunReleased,
    RunRequested,
    RunStarted,
    RunSteered,
    RunWaiting,
    SessionDeleted,
    SessionErased,
    ToolCall,
    ToolReturned,
    ToolStarted,
    Usage,
    Wake,
)
from turnstream.session.fold import evolve, fold
from turnstream.session.plan import (
    CallModel,
    CallTool,
    Drive,
    Effect,
    End,
    Entitle,
    Erase,
    Expire,
    Park,
    Return,
    RunEffect,
    Settle,
    Start,
    Steer,
    blocked_by,
    plan,
)
from turnstream.session.state import Session, request_id

SPECS = {
    name: msgspec.structs.replace(spec, limits=Limits(max_steps=4, max_tool_calls=8, timeout=1000))
    for name, spec in AGENTS.items()
}
SPECS["painter"] = msgspec.structs.replace(
    SPECS["painter"], limits=Limits(max_steps=9, max_same_calls=2, max_same_denials=1, max_tokens=40)
)
SPECS["poet"] = msgspec.structs.replace(SPECS["poet"], durable=True, policy=PolicyData(clock="wall"))
ASKED: Mapping[str, Asks] = {"q": "question", "Q": "question", "a": "approval", "A": "approval"}
"""What a call asks, by the first letter of its id."""
STEPS_MAX = 2_000
"""Far more effects than any story leaves to be done."""


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
        self.timers = [timer for timer in self.timers if timer[1].what not in decision.settled]
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
        match effect:
            case Start() if choice != 5:
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
            case Expire():
                words = self._origin(drive, derive(effect.key))
                return ExpireRequest(origin=words, run=effect.run, request=effect.request, now=self.now)
            case Erase():
                return EraseSession(origin=self._origin(drive, derive(effect.key)), events_removed=len(self.log))
            case Entitle():
                return TitleSession(
                    origin=self._origin(drive, derive(effect.key)), text="a title" if choice % 2 else None
                )
            case _:
                fact = _come_of(session, effect, choice)
                name = derive(effect.key, fact.attempt, type(fact).__name__, getattr(fact, "call_id", ""))
                run = session.run(fact.run)
                by = drive.taking(session, run) if run else None
                return RecordFact(origin=self._origin(drive, name), fact=fact, takes_over=by)

    def _origin(self, drive: Drive, event_id: str) -> Origin:
        return origin("", id=event_id, actor=drive.runner, time=self.now)

    def finish(self, writer: Writer) -> None:
        """One turn of a drive that has nothing to do: acknowledge, put off, or look for the wake-up that is in the
        way."""
        drive, wake_up = writer.drive, writer.wake_up
        assert drive is not None
        assert wake_up is not None
        held = [wake.work for wake in blocked_by(writer.session, drive) if wake.work not in drive.gone]
        if wake_up.deliveries != drive.wake.delivery:
            writer.stop()  # the lease has lapsed: it is for another to say what becomes of the wake-up
        elif drive.wake.work in held:
            wake_up.free = True
            writer.stop()
        elif gone := [work for work in held if work not in self.work]:
            writer.drive = msgspec.structs.replace(drive, gone=drive.gone.union(gone))
        else:
            self.acknowledge(writer)

    def run_to_the_end(self, *, timers: bool = True) -> None:
        """Every process dies; a new one takes what is in `WORK`, and what timers put there, and a person answers
        whatever is asked, until nothing is left. Its model never stops asking for tools."""
        for turn in range(STEPS_MAX):
            self._work_off(timers=timers)
            asked = [
                (run, request)
                for run in self.truth.runs
                for request in run.requests
                if request.expires_at is None or request.expires_at > self.now
            ]
            if not asked:
                return
            run, request = asked[turn % len(asked)]
            yes = {"answer": "yes"} if request.kind == "question" else {"approved": turn % 2 == 0}
            words = origin(self.name("answer"), time=self.now)
            answer = self.handle(Writer("person"), AnswerRequest(origin=words, run=run.n, request=request.k, **yes))
            assert isinstance(answer, Decision), f"{request} is open and cannot be answered: {answer!r}"
        raise AssertionError("it asks for ever")

    def _work_off(self, *, timers: bool) -> None:
        heir = Writer("heir")
        for turn in range(10_000):
            for wake_up in self.work.values():
                wake_up.free = True
            self.tick(0)  # what has fallen due by now
            if timers and not self.work and self.timers:
                self.tick(max(self.timers[0][0] - self.now, 0))
            if not self.work:
                return
            self.deliver(heir, self.work[min(self.work)] if turn % 2 else self.work[max(self.work)])
            self.catch_up(heir)
            self._drive_to_the_end(heir)
        raise AssertionError("it goes on for ever")

    def _drive_to_the_end(self, heir: Writer) -> None:
        for step in range(STEPS_MAX):
            if heir.drive is None:
                return
            effects = plan(heir.session, self.now, heir.drive)
            if not effects:
                assert not due(heir.session, self.now, heir.drive)
                self.finish(heir)
                continue
            for effect in effects:
                # Now and then a model asks something, and is never content with what it hears.
                answer = self.perform(heir, effect, choice=step % 3)
                assert isinstance(answer, Decision), f"{effect} is planned and refused: {answer!r}"
        raise AssertionError("one drive goes on for ever")


def _decide(command: Command, session: Session) -> Decision | Rejected | None:
    try:
        return decide(command, session)
    except Rejected as refusal:
        return refusal


def _told(answer: Decision | Rejected | None) -> object:
    return (answer.code, answer.message, answer.details) if isinstance(answer, Rejected) else answer


def _come_of(session: Session, effect: RunEffect, choice: int) -> RunFact:
    """What a model, a tool or a person may say to it."""
    run = session.run(effect.run)
    assert run is not None
    n, attempt = effect.run, run.attempt
    match effect:
        case Start():
            error = Error(code="agent_not_found", message="gone")
            return RunEnded(run=n, attempt=attempt, status="failed", error=error)
        case CallModel() if choice < 4:
            names = (["t1"], ["t1", "q1"], ["a1", "q2", "t2"], ["c1", "c2"])[choice]
            arguments = f'{{"n":{effect.step % 3}}}'
            calls = tuple(
                [ToolCall(id=name, name=name, arguments=arguments, asks=ASKED.get(name[0])) for name in names]
            )
            usage = Usage(output_tokens=5)
            return ModelReplied(run=n, attempt=attempt, step=effect.step, tool_calls=calls, usage=usage)
        case CallModel():
            return RunEnded(run=n, attempt=attempt, status="completed" if choice == 4 else "failed", content="done")
        case CallTool() if effect.call.id[0] in "ca" and not effect.call.started:
            return ToolStarted(run=n, attempt=attempt, call_id=effect.call.id)
        case CallTool():
            return ToolReturned(run=n, attempt=attempt, call_id=effect.call.id, status="error" if choice == 3 else "ok")
        case Settle():
            return ToolReturned(run=n, attempt=attempt, call_id=effect.call.id, status="uncertain")
        case Return():
            status = "ok" if effect.call.asks == "question" else "denied"
            return ToolReturned(run=n, attempt=attempt, call_id=effect.call.id, status=status)
        case Steer():
            return RunSteered(run=n, attempt=attempt, message_ids=effect.message_ids)
        case Park() if choice == 5:
            return ToolReturned(run=n, attempt=attempt, call_id=effect.calls[0].id, status="error", error="unclear")
        case Park():
            asks = tuple(
                [
                    Ask(
                        request=request_id(session, n, number),
                        kind=call.asks or "question",
                        call_id=call.id,
                        prompt="well?",
                        choices=("yes", "no") if choice == 3 else (),
                        expires_in=(50, 500, None, 2000, 50)[choice],
                        on_expiry=("null", "default", "null", "fail", "fail")[choice],
                    )
                    for number, call in enumerate(effect.calls, effect.first)
                ]
            )
            return RunWaiting(run=n, attempt=attempt, requests=asks)
        case End():
            return RunEnded(run=n, attempt=attempt, status=effect.status, error=effect.error)
        case Expire():
            raise AssertionError("a command of its own")


def due(session: Session, now: int, drive: Drive) -> list[int]:
    """The runs that want something of this drive, told without the plan; 0 is the session itself."""
    if session.deleted:
        return [0] if session.last_queue == drive.queue and not session.deleted.erased else []
    wanting: list[int] = []
    for position, run in enumerate(session.runs):
        late = run.deadline is not None and run.deadline <= now
        wake = run.wake
        if run.spec.queue != drive.queue:
            continue
        if run.status == "running" and wake is not None:
            own = run.start_id == drive.start_id(session, run.n, run.attempt)
            again = wake.work == drive.wake.work and wake.delivery < drive.wake.delivery
            wants = own or again or wake.work in drive.gone
        elif run.status == "waiting":
            expires = [request.expires_at for request in run.requests if request.expires_at is not None]
            wants = late or run.is_to_end or min(expires, default=now + 1) <= now
        else:
            wants = run.cancel or run.attempt > 0 or not run.in_line or position == 0
        wanting += [run.n] if wants else []
    return wanting


class Auditor:
    """What must be true of any log, said once more and otherwise."""

    def __init__(self) -> None:
        self.seq = 0
        self.deleted = False
        self.deletion: str | None = None
        """The key of the command that deleted it."""
        self.line: list[int] = []
        """The runs that have not ended, in the order of their turns."""
        self.free: set[int] = set()
        """Runs that wait for nobody."""
        self.interrupting: dict[int, list[int]] = {}
        """The runs that came to interrupt each run."""
        self.parallel = False
        """Whether a run has come that waits for nobody though others were there."""
        self.running: set[int] = set()
        self.attempts: dict[int, int] = {}
        self.over: set[int] = set()
        self.cancelled: dict[int, str | None] = {}
        self.own: dict[int, list[str]] = {}
        """The messages that a run's first start takes."""
        self.retries: set[int] = set()
        self.waits: dict[str, int] = {}
        """The run that is to take each message."""
        self.fate: dict[str, str] = {}
        """What became of each message in the end."""
        self.replies: dict[int, list[str]] = {}
        """The messages that have answered, and that no start has named."""
        self.open: dict[int, set[str]] = {}
        """The calls that have no result."""
        self.begun: dict[tuple[int, str], int] = {}
        self.asked: dict[int, int] = {}
        self.requests: dict[str, tuple[int, Ask, int]] = {}
        """The open requests: their run, what they ask, and when."""
        self.keys: set[str] = set()
        self.ids: set[str] = set()

    @property
    def live(self) -> set[int]:
        return set(self.line)

    def read(self, recorded: Recorded) -> None:
        event = recorded.event
        assert recorded.previous == self.seq < recorded.seq
        self.seq = recorded.seq
        assert event.id not in self.ids, "an event is stored once"
        self.ids.add(event.id)
        data = event.data
        key = event.idempotency_key
        if isinstance(data, SessionErased):
            assert key == self.deletion, "what is left of a session knows the command that deleted it"
        elif key:
            assert key not in self.keys, "a key has one effect"
            self.keys.add(key)
        if isinstance(data, SessionDeleted):
            self.deletion = key
        assert not self.deleted or isinstance(data, SessionErased), "something is stored in a deleted session"
        run = getattr(data, "run", 0)
        assert run not in self.over, f"a fact of run {run} after its end"
        if isinstance(data, RunFact):
            assert data.attempt == self.attempts[run], "a fact of another attempt"
        read: Callable[..., None] | None = getattr(self, f"_{type(data).__name__}", None)
        if read:
            read(data)
        if isinstance(data, RunWaiting | RequestExpired):
            self._read_timed(data, recorded.time)
        assert len(set(self.line)) == len(self.line)
        assert set(self.waits.values()) <= self.live, "a message waits for a run that has ended"

    def _begin(self, run: int, names: list[str], *, behind: list[int] | None = None) -> None:
        """It is the last in line, or right behind the last of these that are there; where none is, the first."""
        assert run == len(self.attempts) + 1, "runs are numbered without gaps"
        self.attempts[run] = 0
        self.own[run] = names
        before = self.line if behind is None else [other for other in self.line if other in behind]
        self.line.insert(self.line.index(before[-1]) + 1 if before else 0, run)

    def _MessagePosted(self, data: MessagePosted) -> None:
        name = data.message_id
        assert name not in self.waits
        assert name not in self.fate
        ways = [way for way in (data.starts, data.queued, data.steers, data.answers) if way]
        assert len(ways) <= 1
        assert data.kind == "message" or not ways
        if not ways:
            self.fate[name] = "none"
        if data.answers:
            self._answers(name, data.answers)
        if data.steers:
            assert data.steers.run in self.live
            self.waits[name] = data.steers.run
        if data.starts or data.queued:
            run = data.run
            self.parallel |= bool(data.starts and self.line)
            self.free |= {run} if data.starts else set()
            assert data.starts or self.line, "it waits for nobody"
            interrupted = data.queued.interrupts if data.queued else 0
            if interrupted:
                begun = [other for other in self.line if self.attempts[other]]
                assert interrupted == (begun or self.line)[0], "it cancels what merely waits"
                self.cancelled.setdefault(interrupted, None)
                self.interrupting.setdefault(interrupted, []).append(run)
            self._begin(run, [name], behind=[interrupted] if interrupted else None)
            self.waits[name] = run

    def _answers(self, name: str, data: Answers) -> None:
        self.fate[name] = "answered"
        self.replies.setdefault(data.run, []).append(name)
        assert data.requests
        for one in data.requests:
            run, ask, _ = self.requests.pop(one.request)
            assert run == data.run
            assert one.declined == (ask.kind == "approval")
            assert not ask.choices or one.declined or one.answer in ask.choices

    def _MessageWithdrawn(self, data: MessageWithdrawn) -> None:
        run = self.waits.pop(data.message_id)
        self.fate[data.message_id] = "settled"
        if data.message_id in self.own[run]:
            assert self.attempts[run] == 0
            self.own[run].remove(data.message_id)
            if not self.own[run]:
                self.own[run] = [name for name, other in self.waits.items() if other == run]
        assert bool(data.run) == (not self.own[run])
        if data.run:
            assert data.run == run
            self._over(run)

    def _RunRequested(self, data: RunRequested) -> None:
        assert not self.line, "a turn is tried again while another is live"
        assert data.retry_of in self.over
        assert all(self.fate[name] in ("taken", "settled", "answered") for name in data.message_ids)
        self.retries.add(data.run)
        self.free.add(data.run)
        self._begin(data.run, list(data.message_ids))

    def _RunStarted(self, data: RunStarted) -> None:
        run = data.run
        assert data.attempt == self.attempts[run] + 1
        assert run not in self.cancelled, "a cancelled run is started again"
        assert not [name for name, (other, _, _) in self.requests.items() if other == run], "an open request"
        if data.attempt == 1:
            begun = {other for other in self.line if self.attempts[other]}
            assert run in self.free or self.line[0] == run, "it is not its turn"
            assert self.parallel or not begun, "two runs hold the turn"
            assert list(data.message_ids) == self.own[run]
            self._take(run, data.message_ids, again=run in self.retries)
        elif data.trigger == "reply":
            assert list(data.message_ids) == self.replies.pop(run)
        elif data.trigger == "answers":
            replies = self.replies.pop(run, [])
            assert list(data.message_ids[: len(replies)]) == replies
            self._take(run, data.message_ids[len(replies) :])
        else:
            assert data.message_ids == ()
            assert not self.replies.get(run)
        assert (data.trigger == "recovery") == (run in self.running)
        self.attempts[run] = data.attempt
        self.running.add(run)

    def _take(self, run: int, names: tuple[str, ...], *, again: bool = False) -> None:
        waiting = [name for name, other in self.waits.items() if other == run]
        for name in names:
            if again:
                self.fate[name] = "answered" if self.fate[name] == "answered" else "taken"
                continue
            assert self.waits.pop(name) == run, "it waits for another run"
            assert name not in self.fate, "a message is taken twice"
            self.fate[name] = "taken"
        assert again or list(names) == waiting[: len(names)], "the oldest are taken first"

    def _RunSteered(self, data: RunSteered) -> None:
        assert data.run in self.running
        assert data.run not in self.cancelled
        assert data.message_ids
        assert not self.open.get(data.run), "a message between a call and its result"
        self._take(data.run, data.message_ids)

    def _RunReleased(self, data: RunReleased) -> None:
        self.running.remove(data.run)

    def _ModelReplied(self, data: ModelReplied) -> None:
        assert data.run in self.running
        assert data.run not in self.cancelled
        assert not self.open.get(data.run), "a step before the results of the last one"
        self.open[data.run] = {call.id for call in data.tool_calls}
        assert len(self.open[data.run]) == len(data.tool_calls)
        assert data.tool_calls or data.run in self.waits.values(), "an answer is kept from its end by nothing"
        self.begun = {place: attempt for place, attempt in self.begun.items() if place[0] != data.run}

    def _ToolStarted(self, data: ToolStarted) -> None:
        assert data.run in self.running
        assert data.call_id in self.open[data.run]
        assert (data.run, data.call_id) not in self.begun, "begun twice"
        self.begun[data.run, data.call_id] = data.attempt

    def _ToolReturned(self, data: ToolReturned) -> None:
        assert data.run in self.running
        self.open[data.run].remove(data.call_id)
        if self.begun.get((data.run, data.call_id), data.attempt) < data.attempt:
            assert data.status in ("uncertain", "interrupted"), "a call of a dead attempt is told to be done"

    def _read_timed(self, data: RunWaiting | RequestExpired, now: int) -> None:
        if isinstance(data, RequestExpired):
            _, ask, asked_at = self.requests.pop(data.request)
            assert ask.expires_in is not None
            assert now >= asked_at + ask.expires_in, "it has expired too early"
            return
        run = data.run
        self.running.remove(run)
        assert run not in self.cancelled
        assert {ask.call_id for ask in data.requests} == self.open[run]
        for ask in data.requests:
            self.asked[run] = self.asked.get(run, 0) + 1
            assert ask.request == f"s1.{run}.q{self.asked[run]}"
            self.requests[ask.request] = (run, ask, now)

    def _RequestAnswered(self, data: RequestAnswered) -> None:
        run, ask, _ = self.requests.pop(data.request)
        assert run == data.run
        assert (data.approved is None) == (ask.kind == "question")
        assert not ask.choices or data.approved is not None or data.answer in ask.choices

    def _RunCancelRequested(self, data: RunCancelRequested) -> None:
        assert data.run in self.running
        assert data.run not in self.cancelled
        self.cancelled[data.run] = data.error

    def _RunEnded(self, data: RunEnded) -> None:
        run = data.run
        assert run in self.live
        code = data.error.code if data.error else None
        if run in self.cancelled:
            allowed = ("cancelled", None) if self.cancelled[run] is None else ("failed", self.cancelled[run])
            assert (data.status, code) == allowed
        assert set(data.unfinished) == self.open.get(run, set()), "every call ends in a result or with its run"
        assert data.status != "completed" or (run in self.running and not data.unfinished)
        steering = [name for name, other in self.waits.items() if other == run and name not in self.own[run]]
        left = data.leftover
        assert list(left.message_ids if left else ()) == steering, "what is left over is all that steered it"
        self._over(run, left)

    def _over(self, run: int, left: Leftover | None = None) -> None:
        self.over.add(run)
        self.line.remove(run)
        self.running.discard(run)
        self.requests = {name: found for name, found in self.requests.items() if found[0] != run}
        self.open.pop(run, None)
        if left:
            self._begin(left.run, list(left.message_ids), behind=self.interrupting.get(run, []))
        for name in [name for name, other in self.waits.items() if other == run]:
            if left and name in left.message_ids:
                self.waits[name] = left.run
            else:
                del self.waits[name]
                self.fate[name] = "settled"

    def _SessionDeleted(self, data: SessionDeleted) -> None:
        assert data.last_run == len(self.attempts)
        self.deleted = True
        for run in list(self.line):
            self._over(run)

    def _SessionErased(self, data: SessionErased) -> None:
        assert self.deleted
        assert data.last_run == len(self.attempts)
