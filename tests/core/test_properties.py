"""Whatever two writers do, in whatever order: what is always true of a session.

The machine plays clients, runners whose leases lapse, and a broker that loses wake-ups, on folds that are old; `World`
checks each step, and at the end somebody carries out whatever is left.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.core.scenario import (
    AGENTS,
    KEY,
    QUEUE,
    REJECT,
    cancel,
    open_session,
    origin,
    post,
    title,
    update,
    with_origin,
    withdraw,
)
from tests.core.world import SPECS, World, Writer, due

from turnstream.session.commands import Command, RecordFact, RunFact, StartRun
from turnstream.session.decide import Decision
from turnstream.session.events import (
    EndStatus,
    ModelReplied,
    Opens,
    PolicyData,
    RunEnded,
    RunReleased,
    RunStarted,
    ToolCall,
    ToolReturned,
    ToolStarted,
    Wake,
)
from turnstream.session.plan import Drive, plan
from turnstream.session.state import Run, Session, fold

WHO = st.integers(0, 1)
RUNS = st.integers(0, 4)
MESSAGES = st.sampled_from(["m1", "m2", "m3", "m4"])
KEYS = st.sampled_from([None, None, None, "k1", "k2"])
BODIES = st.sampled_from(["b1", "b2"])
POLICIES = st.sampled_from([QUEUE, QUEUE, REJECT, PolicyData()])
CHOICES = st.sampled_from([0, 0, 1, 1, 2, 2, 3])
EXPECTED = st.sampled_from([None, None, None, 0, 1])
STATUSES: list[EndStatus] = ["completed", "failed", "cancelled", "timed_out"]


@st.composite
def claims(draw: st.DrawFn, session: Session) -> RunFact | RunStarted:
    """What somebody might say of a run: not far from what is so, and mostly untrue."""
    run = draw(st.sampled_from(session.runs or [NOBODY]))
    n, attempt = draw(st.sampled_from([run.n, run.n, run.n, run.n + 1, 1])), run.attempt + draw(st.integers(-1, 1))
    call = draw(st.sampled_from([call.id for call in run.open_calls] or ["c0", "c1"]))
    calls = tuple(ToolCall(id=f"c{i}", name="look", arguments="{}") for i in range(draw(st.integers(0, 2))))
    match draw(st.integers(0, 5)):
        case 0:
            return RunEnded(run=n, attempt=attempt, status=draw(st.sampled_from(STATUSES)))
        case 1:
            return RunReleased(run=n, attempt=attempt)
        case 2:
            return ModelReplied(run=n, attempt=attempt, step=run.steps + draw(st.integers(0, 2)), tool_calls=calls)
        case 3:
            return ToolStarted(run=n, attempt=attempt, call_id=call)
        case 4:
            status = draw(st.sampled_from(["ok", "error", "uncertain"]))
            return ToolReturned(run=n, attempt=attempt, call_id=call, status=status)
        case _:
            wake = Wake(work=draw(st.integers(1, 3)), cause=draw(st.integers(1, 9)), delivery=draw(st.integers(1, 3)))
            trigger, names = draw(st.sampled_from([run.next_start(), ("message", run.message_ids), ("recovery", ())]))
            return RunStarted(run=n, attempt=run.attempt + 1, runner="?", wake=wake, trigger=trigger, message_ids=names)


NOBODY = Run(n=1, spec=SPECS["default"], message_ids=("m1",), requested_seq=1, requested_at=1)


class TwoWriters(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.writers = [Writer("one"), Writer("two")]
        self.lost = False

    # -- clients ------------------------------------------------------------------------------------------------------

    @initialize(who=WHO)
    def open(self, who: int) -> None:
        assert isinstance(self.world.handle(self.writers[who], open_session(policy=QUEUE)), Decision)

    @rule(who=WHO, message=MESSAGES, policy=POLICIES, key=KEYS, body=BODIES, agent=st.sampled_from([None, *AGENTS]))
    def post(self, who: int, message: str, policy: PolicyData, key: str | None, body: str, agent: str | None) -> None:
        command = post(message, policy=policy, agent=agent, specs=SPECS, opens=Opens())
        self._ask(who, command, key, body)

    @rule(who=WHO, key=KEYS, body=BODIES, expected=EXPECTED)
    def post_new(self, who: int, key: str | None, body: str, expected: int | None) -> None:
        message = self.world.name("m").replace(" ", "-")
        command = post(message, policy=QUEUE, specs=SPECS)
        seq = None if expected is None else self.writers[who].session.seq + expected
        self._ask(who, with_origin(command, expected_seq=seq), key, body)

    @rule(who=WHO, message=MESSAGES, key=KEYS, body=BODIES)
    def withdraw(self, who: int, message: str, key: str | None, body: str) -> None:
        self._ask(who, withdraw(message), key, body)

    @rule(who=WHO, run=RUNS, key=KEYS, body=BODIES)
    def cancel(self, who: int, run: int, key: str | None, body: str) -> None:
        self._ask(who, cancel(run), key, body)

    @rule(who=WHO, source=st.sampled_from(["client", "agent", "user"]), key=KEYS, body=BODIES)
    def name(self, who: int, source: str, key: str | None, body: str) -> None:
        self._ask(who, update(title=title("t", source)), key, body)

    def _ask(self, who: int, command: Command, key: str | None, body: str) -> None:
        words = {"idempotency_key": key, "body_digest": body} if key else {}
        command = with_origin(command, id=self.world.name("command"), **words)
        before = self.world.last
        answer = self.world.handle(self.writers[who], command)
        assert (self.world.last != before) == isinstance(answer, Decision), "only what is decided is stored"

    # -- runners ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(wake_up.free for wake_up in self.world.work.values()))
    @rule(who=WHO, data=st.data())
    def deliver(self, who: int, data: st.DataObject) -> None:
        free = [wake_up for wake_up in self.world.work.values() if wake_up.free]
        self.world.deliver(self.writers[who], data.draw(st.sampled_from(free)))

    @precondition(lambda self: any(writer.drive for writer in self.writers))
    @rule(who=WHO, choices=st.lists(CHOICES, min_size=1, max_size=5), data=st.data())
    def work(self, who: int, choices: list[int], data: st.DataObject) -> None:
        writer = self.writers[who] if self.writers[who].drive else self.writers[1 - who]
        for choice in choices:
            if writer.drive:
                self._work(writer, writer.drive, choice, data)

    def _work(self, writer: Writer, drive: Drive, choice: int, data: st.DataObject) -> None:
        effects = plan(writer.session, self.world.now, drive)
        if not effects:
            self.world.catch_up(writer)
            effects = plan(writer.session, self.world.now, drive)
        if not effects:
            assert not due(writer.session, self.world.now, drive)
            self.world.finish(writer)
            return
        effect = data.draw(st.sampled_from(effects))
        fresh = writer.session.seq == self.world.last
        answer = self.world.perform(writer, effect, choice)
        assert isinstance(answer, Decision) or not fresh, f"{effect} is planned and refused: {answer!r}"

    @precondition(lambda self: any(writer.drive for writer in self.writers))
    @rule(who=WHO)
    def give_back(self, who: int) -> None:
        writer = self.writers[who]
        owned = [run for run in writer.session.runs if writer.drive and writer.drive.owns(writer.session, run)]
        for run in owned:
            fact = RunReleased(run=run.n, attempt=run.attempt)
            command = RecordFact(origin=origin(self.world.name("release")), fact=fact)
            answer = self.world.handle(writer, command)
            if isinstance(answer, Decision):
                self.world.acknowledge(writer)

    @rule(data=st.data())
    def lapse(self, data: st.DataObject) -> None:
        """A lease is not renewed: the wake-up is delivered again, and its drive does not know."""
        held = [wake_up for wake_up in self.world.work.values() if not wake_up.free]
        if held:
            data.draw(st.sampled_from(held)).free = True

    @rule(who=WHO)
    def die(self, who: int) -> None:
        writer = self.writers[who]
        if writer.wake_up and writer.wake_up.seq in self.world.work:
            writer.wake_up.free = True
        self.writers[who] = Writer(writer.name)

    @precondition(lambda self: self.world.work)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A wake-up is gone; whoever works on it does not know."""
        del self.world.work[data.draw(st.sampled_from(sorted(self.world.work)))]
        self.lost = True

    @rule(millis=st.sampled_from([1, 100, 2000]))
    def tick(self, millis: int) -> None:
        self.world.tick(millis)

    @rule(who=WHO)
    def read(self, who: int) -> None:
        self.world.catch_up(self.writers[who])

    # -- whoever tells anything ---------------------------------------------------------------------------------------

    @rule(who=WHO, data=st.data(), gone=st.frozensets(st.integers(1, 5)))
    def claim(self, who: int, data: st.DataObject, gone: frozenset[int]) -> None:
        fact = data.draw(claims(self.world.truth))
        words = origin(self.world.name("claim"), time=self.world.now)
        if isinstance(fact, RunStarted):
            command = StartRun(origin=words, started=fact, gone=gone)
        else:
            command = RecordFact(origin=words, fact=fact)
        if isinstance(self.world.handle(self.writers[who], command), Decision):
            self.lost = True  # who acts in another's name may leave nobody to go on

    # -- always -------------------------------------------------------------------------------------------------------

    @invariant()
    def at_most_one_run_holds_the_turn(self) -> None:
        running = [run.n for run in self.world.truth.runs if run.status == "running"]
        assert running == ([self.world.auditor.holder] if self.world.auditor.holder else [])

    @invariant()
    def what_is_live_is_what_has_not_ended(self) -> None:
        auditor = self.world.auditor
        assert {run.n for run in self.world.truth.runs} == set(auditor.requested) - auditor.over

    @invariant()
    def any_prefix_and_the_rest_fold_to_the_same(self) -> None:
        middle = len(self.world.log) // 2
        half = fold(Session(key=KEY), self.world.log[:middle])
        assert fold(half, self.world.log[middle:]) == self.world.truth

    def teardown(self) -> None:
        world = self.world
        world.run_to_the_end()
        if self.lost:
            for queue in sorted({run.spec.queue for run in world.truth.runs}):
                self._sweep(queue)
        assert world.truth.runs == (), "a run that nobody was woken for"

    def _sweep(self, queue: str) -> None:
        """What the sweep does: wakes who is queued or running too long."""
        for _ in range(20):
            self.world.wake(queue, self.world.last)
            self.world.run_to_the_end()


TwoWriters.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTwoWriters = pytest.mark.filterwarnings("default")(TwoWriters.TestCase)
