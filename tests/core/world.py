"""A whole Turnstream in memory, as far as the rules are concerned: one log with a guard, writers whose folds are old, a
`WORK` of wake-ups with leases that lapse, timers, the sessions of its children as far as it can tell them, and a parent
that is told. Nothing runs by itself: a test says what happens next.
"""

from collections.abc import Mapping

import msgspec
from tests.core.auditor import Auditor
from tests.core.scenario import AGENTS, KEY, origin

from turnstream.ids import derive
from turnstream.session.commands import (
    AnswerRequest,
    Command,
    EndChild,
    EraseSession,
    ExpireRequest,
    Origin,
    RecordFact,
    ReportRun,
    RunFact,
    StartRun,
    TitleSession,
)
from turnstream.session.decide import MAX_CHILDREN, decide
from turnstream.session.decision import Decision
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    UPDATE_PLAN,
    Ask,
    Asks,
    ChildEnded,
    ChildStarted,
    Due,
    EndStatus,
    Error,
    Limits,
    ModelReplied,
    PlanChanged,
    PlanItem,
    PolicyData,
    Recorded,
    RunEnded,
    RunStarted,
    RunSteered,
    RunWaiting,
    ToolCall,
    ToolReturned,
    ToolStarted,
    Usage,
    Wake,
)
from turnstream.session.fold import evolve, fold
from turnstream.session.plan import (
    BetweenEffect,
    CallModel,
    CallTool,
    CancelChild,
    Detach,
    Drive,
    DropChild,
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
    StartChild,
    Steer,
    TellParent,
    blocked_by,
    plan,
)
from turnstream.session.policy import resolve
from turnstream.session.state import Session, request_id

SPECS = {
    name: msgspec.structs.replace(spec, limits=Limits(max_steps=4, max_tool_calls=8, timeout=1000))
    for name, spec in AGENTS.items()
}
SPECS["painter"] = msgspec.structs.replace(
    SPECS["painter"], limits=Limits(max_steps=9, max_same_calls=2, max_same_denials=1, max_tokens=40)
)
SPECS["poet"] = msgspec.structs.replace(SPECS["poet"], durable=True, policy=PolicyData(clock="wall"))
ASKED: Mapping[str, Asks] = {"q": "question", "a": "approval", "k": "child", "d": "child"}
"""What a call asks, by the first letter of its id; nobody waits for a child of `d`."""
CALLS = (
    ("t1",),
    ("t1", "q1"),
    ("a1", "q2", "t2"),
    ("c1", "c2"),
    ("k1", "k2", "t1"),
    ("k1", "q1"),
    ("p1", "d1", "k1"),
    ("p1", "a1", "k2", "d1"),
)
"""What a model may ask for at once."""
DONE, FAILS, FITS = len(CALLS), len(CALLS) + 1, len(CALLS) + 2
"""The choices by which it comes to an end: with an answer, with none, with one that fits a schema."""
ENDS: tuple[EndStatus, ...] = ("completed", "failed", "cancelled", "timed_out")
STEPS_MAX = 2_000
"""Far more effects than any story leaves to be done."""


class WakeUp(msgspec.Struct):
    """A message in `WORK`. `free`: nobody holds its lease."""

    seq: int
    queue: str
    cause: int
    deliveries: int = 0
    free: bool = True


class Offspring(msgspec.Struct):
    """A child, as its own session has it. `opened`: that is there. `status`: how its run has ended. `told`: how often
    its parent has been."""

    started: ChildStarted
    opened: bool = False
    status: EndStatus | None = None
    told: int = 0


class Writer:
    """A process: a fold that may be old, and at most one drive, with what that has done to other sessions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.session = Session(key=KEY)
        self.drive: Drive | None = None
        self.wake_up: WakeUp | None = None
        self.done: set[str] = set()

    def stop(self) -> None:
        self.drive = self.wake_up = None
        self.done = set()

    def plan(self, now: int) -> tuple[Effect, ...]:
        """What its drive is to do and has not done. A session is erased when everybody else has been told."""
        assert self.drive
        effects = [effect for effect in plan(self.session, now, self.drive) if effect.key not in self.done]
        between = [effect for effect in effects if isinstance(effect, BetweenEffect)]
        return tuple(between or effects) if self.session.deleted else tuple(effects)


class World:
    def __init__(self) -> None:
        self.log: list[Recorded] = []
        self.now = 1_000
        self.work: dict[int, WakeUp] = {}
        self.timers: list[tuple[int, Due, int]] = []
        self.fired: set[tuple[str, int]] = set()
        """What has fallen due, and when."""
        self.auditor = Auditor()
        self.children: dict[tuple[int, int], Offspring] = {}
        self.parent_told = 0
        """How often whoever delegated this session has been told."""
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
        if isinstance(data := recorded.event.data, ChildStarted):
            self.children[data.run, data.k] = Offspring(data)
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
            self.fired.add((timer[1].what, timer[0]))
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

    def die(self, writer: Writer) -> None:
        """Its wake-up is delivered again."""
        if writer.wake_up:
            writer.wake_up.free = True
        writer.stop()

    def acknowledge(self, writer: Writer) -> None:
        assert writer.wake_up
        self.work.pop(writer.wake_up.seq, None)
        writer.stop()

    # -- children -----------------------------------------------------------------------------------------------------

    def end_child(self, writer: Writer, child: Offspring, status: EndStatus, *, key: bool = True) -> None:
        """It ends, if it has not, and tells its parent."""
        child.status = child.status or status
        child.told += 1
        started = child.started
        name = derive(started.child_session, "tell")
        words = origin("", id=name, time=self.now, **({"idempotency_key": name, "body_digest": name} if key else {}))
        ended = ChildEnded(
            run=started.run,
            call_id=started.call_id,
            k=started.k,
            status=child.status,
            output="maybe",
            usage=Usage(output_tokens=3),
        )
        answer = self.handle(writer, EndChild(origin=words, ended=ended))
        assert not isinstance(answer, Rejected) or answer.code == "not_found"

    # -- driving ------------------------------------------------------------------------------------------------------

    def perform(self, writer: Writer, effect: Effect, choice: int = 0) -> Decision | Rejected | None:
        """Does what is planned and reports what came of it; `choice` says what. What is done to other sessions is no
        fact here: None."""
        drive = writer.drive
        assert drive is not None
        if isinstance(effect, BetweenEffect):
            self._perform_between(writer, effect, choice)
            return None
        if isinstance(effect, Park | Detach):  # nobody waits for a child that was never opened
            for call in effect.calls if isinstance(effect, Park) else (effect.call,):
                if call.child:
                    self.children[effect.run, call.child].opened = True
        command = self.report(drive, writer.session, effect, choice)
        answer = self.handle(writer, command)
        if isinstance(effect, StartChild) and choice % 2 and (child := self.children.get((effect.run, effect.k))):
            child.opened = True
        return answer

    def _perform_between(self, writer: Writer, effect: BetweenEffect, choice: int) -> None:
        drive = writer.drive
        assert drive is not None
        writer.done.add(effect.key)
        match effect:
            case CancelChild():
                child = self.children[effect.run, effect.child.k]
                child.opened = True
                child.status = child.status or "cancelled"
            case DropChild():
                (child,) = [one for one in self.children.values() if one.started.child_session == effect.session]
                child.status = child.status or "cancelled"
            case TellParent():
                self.parent_told += 1
                if choice == 5:
                    self.die(writer)
                elif not writer.session.deleted:
                    words = self._origin(drive, derive(effect.key, "told"))
                    self.handle(writer, ReportRun(origin=words, run=effect.run, told=choice % 2 == 0))

    def report(self, drive: Drive, session: Session, effect: RunEffect | Entitle | Erase, choice: int) -> Command:
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
                text = "a title" if choice % 2 else None
                return TitleSession(origin=self._origin(drive, derive(effect.key)), text=text)
            case _:
                fact = _come_of(session, effect, choice)
                name = derive(effect.key, fact.attempt, type(fact).__name__, getattr(fact, "call_id", ""))
                if isinstance(fact, PlanChanged):  # a model may change it as often as it likes
                    name = self.name("plan")
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
        """Every process dies; a new one takes what is in `WORK`, and what timers put there, a person answers whatever
        is asked, and children end, until nothing is left. Its model never stops asking for tools."""
        for turn in range(STEPS_MAX):
            self._work_off(timers=timers)
            born = [child for child in self.children.values() if child.opened and not child.told]
            if born and turn % 2:
                self.end_child(Writer("child"), born[turn % len(born)], ENDS[turn % len(ENDS)])
                continue
            asked = [
                (run, request)
                for run in self.truth.runs
                for request in run.for_people
                if request.expires_at is None or request.expires_at > self.now
            ]
            if not asked and not born:
                return
            if not asked:
                continue
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
            effects = heir.plan(self.now)
            if not effects:
                assert not due(heir.session, self.now, heir.drive, heir.done)
                self.finish(heir)
                continue
            for effect in effects:
                # Now and then a model asks something, and is never content with what it hears.
                answer = self.perform(heir, effect, choice=(0, 1, 2, 4, 6, 7)[step % 6])
                done = isinstance(answer, Decision) or isinstance(effect, BetweenEffect)
                assert done, f"{effect} is planned and refused: {answer!r}"
                if isinstance(effect, StartChild):
                    break  # the next one's number is another now
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
        case CallModel() if choice < len(CALLS):
            arguments = f'{{"n":{effect.step % 3}}}'
            calls = tuple([call_of(name, arguments) for name in CALLS[choice]])
            usage = Usage(output_tokens=5)
            return ModelReplied(run=n, attempt=attempt, step=effect.step, tool_calls=calls, usage=usage)
        case CallModel():
            status, content = "failed" if choice == FAILS else "completed", "[]" if choice == FITS else "done"
            return RunEnded(run=n, attempt=attempt, status=status, content=content, step_usage=Usage(output_tokens=2))
        case CallTool() if effect.call.name == UPDATE_PLAN and choice % 2:
            items = (PlanItem(id="1", text="maybe"),) * (choice % 3)
            return PlanChanged(run=n, attempt=attempt, call_id=effect.call.id, items=items)
        case CallTool() if effect.call.id[0] in "ca" and not effect.call.started:
            return ToolStarted(run=n, attempt=attempt, call_id=effect.call.id)
        case CallTool():
            return ToolReturned(run=n, attempt=attempt, call_id=effect.call.id, status="error" if choice == 3 else "ok")
        case Settle():
            return ToolReturned(run=n, attempt=attempt, call_id=effect.call.id, status="uncertain")
        case StartChild() if choice == 5 or effect.k > MAX_CHILDREN:
            return ToolReturned(run=n, attempt=attempt, call_id=effect.call.id, status="error", error="unclear")
        case StartChild():
            return ChildStarted(
                run=n,
                attempt=attempt,
                call_id=effect.call.id,
                k=effect.k,
                child_session=session.key.child(n, effect.k).session,
                wait=effect.call.id[0] == "k",
                spec=SPECS["painter"],
            )
        case Detach():
            return ToolReturned(run=n, attempt=attempt, call_id=effect.call.id, status="ok", output="running")
        case Return():
            status = "denied" if effect.call.asks == "approval" else "ok"
            return ToolReturned(run=n, attempt=attempt, call_id=effect.call.id, status=status)
        case Steer():
            return RunSteered(run=n, attempt=attempt, message_ids=effect.message_ids)
        case Park() if choice == 5 and not effect.calls[0].child:
            return ToolReturned(run=n, attempt=attempt, call_id=effect.calls[0].id, status="error", error="unclear")
        case Park():
            asks = tuple(
                [
                    Ask(request=request_id(session, n, number), kind="child", call_id=call.id, prompt="it")
                    if call.child
                    else Ask(
                        request=request_id(session, n, number),
                        kind=call.asks or "question",
                        call_id=call.id,
                        prompt="well?",
                        choices=("yes", "no") if choice == 3 else (),
                        expires_in=(50, 500, None, 2000, 50)[choice % 5],
                        on_expiry=("null", "default", "null", "fail", "fail")[choice % 5],
                    )
                    for number, call in enumerate(effect.calls, effect.first)
                ]
            )
            return RunWaiting(run=n, attempt=attempt, requests=asks)
        case End():
            return RunEnded(run=n, attempt=attempt, status=effect.status, error=effect.error)
        case Expire():
            raise AssertionError("a command of its own")


def call_of(name: str, arguments: str = "{}") -> ToolCall:
    tool = UPDATE_PLAN if name[0] == "p" else name
    return ToolCall(id=name, name=tool, arguments=arguments, asks=ASKED.get(name[0]))


def due(session: Session, now: int, drive: Drive, done: set[str]) -> list[str]:
    """What is wanted of this drive, told without the plan: of runs, of the session itself, and of other sessions, if it
    has not done that."""
    told = session.parent is None or not session.unreported or bool(done)
    wanting = ["parent"] if not told else []
    wanting += ["child" for child in session.children if child.cancel and not done]
    if session.deleted:
        return [*wanting, "erase"] if session.last_queue == drive.queue and not session.deleted.erased else wanting
    held = any(run.attempt and run.in_line and not run.parked for run in session.runs)
    resumed = any(run.parked and run.in_line and run.status == "queued" for run in session.runs)
    for position, run in enumerate(session.runs):
        late = run.deadline is not None and run.deadline <= now
        wake, before = run.wake, session.runs[:position]
        if run.spec.queue != drive.queue:
            continue
        if run.status == "running" and wake is not None:
            own = run.start_id == drive.start_id(session, run.n, run.attempt)
            again = wake.work == drive.wake.work and wake.delivery < drive.wake.delivery
            wants = own or again or wake.work in drive.gone
        elif run.status == "waiting":
            expires = [request.expires_at for request in run.requests if request.expires_at is not None]
            wants = late or run.is_to_end or min(expires, default=now + 1) <= now
        elif run.parked:
            wants = run.cancel or late or not run.in_line or not held
        else:
            waiting = all(other.parked and other.status == "waiting" for other in before)
            passes = waiting and run.policy.on_message_parked == "interleave"
            first = not held and not resumed and (passes or not before)
            wants = run.cancel or run.attempt > 0 or not run.in_line or first
        wanting += [f"run {run.n}"] if wants else []
    last = session.last_ended
    if not wanting and last and session.spoken and session.last_queue == drive.queue:
        derived = session.title_source == "derived" and not session.untitled and session.parent is None
        wanting += ["title"] if derived and resolve(last.spec.policy).titles == "derived_then_agent" else []
    return wanting
