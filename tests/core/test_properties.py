"""Whatever two writers do, in whatever order: what is always true of a session.

A story is a list of steps. In each, one of two processes acts as a client, as a runner, or as somebody who says what is
not so, on a fold that may be old; leases lapse, processes die, wake-ups are lost. `World` checks each step, and at the
end somebody carries out whatever is left.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import given as for_all
from hypothesis import note, settings
from hypothesis import strategies as st
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
from turnstream.session.plan import plan
from turnstream.session.state import Run, Session, fold

T = TypeVar("T")
NOBODY = Run(n=1, spec=SPECS["default"], message_ids=("m1",), author="user:ann", requested_seq=1, requested_at=1)


class Dice:
    """Makes choices out of one number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def of(self, choices: Sequence[T]) -> T:
        self._number, index = divmod(self._number, len(choices))
        return choices[index]


class Players:
    def __init__(self, world: World) -> None:
        self.world = world
        self.writers = [Writer("one"), Writer("two")]

    # -- clients ------------------------------------------------------------------------------------------------------

    def post(self, writer: Writer, dice: Dice) -> None:
        """A message whose id, key and policy may have been used before."""
        policy = dice.of([QUEUE, QUEUE, REJECT, PolicyData()])
        message, agent = dice.of(["m1", "m2", "m3"]), dice.of([None, *AGENTS])
        self._ask(writer, post(message, policy=policy, agent=agent, specs=SPECS, opens=Opens()), dice)

    def post_another(self, writer: Writer, dice: Dice) -> None:
        message = self.world.name("m").replace(" ", "-")
        off = dice.of([None, None, None, 0, 1])
        command = post(message, policy=QUEUE, agent=dice.of([None, None, "painter"]), specs=SPECS)
        expected = None if off is None else writer.session.seq + off
        self._ask(writer, with_origin(command, expected_seq=expected), dice)

    def withdraw(self, writer: Writer, dice: Dice) -> None:
        queued = [message for run in self.world.truth.runs for message in run.message_ids]
        self._ask(writer, withdraw(dice.of([*queued, "m1", "m2"])), dice)

    def cancel(self, writer: Writer, dice: Dice) -> None:
        live = [run.n for run in self.world.truth.runs]
        self._ask(writer, cancel(dice.of([*live, *live, 1, 2, 99])), dice)

    def name(self, writer: Writer, dice: Dice) -> None:
        self._ask(writer, update(title=title("t", dice.of(["client", "agent", "user"]))), dice)

    def _ask(self, writer: Writer, command: Command, dice: Dice) -> None:
        key, body = dice.of([None, None, None, "k1", "k2"]), dice.of(["b1", "b2"])
        words = {"idempotency_key": key, "body_digest": body} if key else {}
        before = self.world.last
        answer = self.world.handle(writer, with_origin(command, id=self.world.name("command"), **words))
        assert (self.world.last != before) == isinstance(answer, Decision), "only what is decided is stored"

    # -- runners ------------------------------------------------------------------------------------------------------

    def deliver(self, writer: Writer, dice: Dice) -> None:
        free = [wake_up for wake_up in self.world.work.values() if wake_up.free]
        if free and not writer.drive:
            self.world.deliver(writer, dice.of(free))

    def work(self, writer: Writer, dice: Dice) -> None:
        for _ in range(dice.of([1, 2, 3])):
            if writer.drive:
                self._work(writer, dice)

    def _work(self, writer: Writer, dice: Dice) -> None:
        assert writer.drive
        effects = plan(writer.session, self.world.now, writer.drive)
        if not effects:
            self.world.catch_up(writer)
            effects = plan(writer.session, self.world.now, writer.drive)
        if not effects:
            assert not due(writer.session, self.world.now, writer.drive)
            self.world.finish(writer)
            return
        effect, fresh = dice.of(effects), writer.session.seq == self.world.last
        answer = self.world.perform(writer, effect, choice=dice.of([0, 0, 1, 1, 2, 3]))
        assert isinstance(answer, Decision) or not fresh, f"{effect} is planned and refused: {answer!r}"

    def give_back(self, writer: Writer, dice: Dice) -> None:
        drive, session = writer.drive, writer.session
        for run in session.runs:
            if drive and drive.owns(session, run):
                fact = RunReleased(run=run.n, attempt=run.attempt)
                command = RecordFact(origin=origin(self.world.name("release")), fact=fact)
                if isinstance(self.world.handle(writer, command), Decision):
                    self.world.acknowledge(writer)

    def lapse(self, writer: Writer, dice: Dice) -> None:
        """A lease is not renewed: the wake-up is delivered again, and its drive does not know."""
        held = [wake_up for wake_up in self.world.work.values() if not wake_up.free]
        if held:
            dice.of(held).free = True

    def die(self, writer: Writer, dice: Dice) -> None:
        if writer.wake_up:
            writer.wake_up.free = True
        self.writers[self.writers.index(writer)] = Writer(writer.name)

    def tick(self, writer: Writer, dice: Dice) -> None:
        self.world.tick(dice.of([1, 100, 100, 2000]))

    def read(self, writer: Writer, dice: Dice) -> None:
        self.world.catch_up(writer)

    # -- whoever spoils it --------------------------------------------------------------------------------------------

    def lose(self, writer: Writer, dice: Dice) -> None:
        """A wake-up is gone; whoever works on it does not know."""
        if self.world.work:
            del self.world.work[dice.of(list(self.world.work))]

    def claim(self, writer: Writer, dice: Dice) -> None:
        fact = claim(self.world.truth, dice)
        words = origin(self.world.name("claim"))
        if isinstance(fact, RunStarted):
            gone = frozenset({dice.of([1, 2, 3]), dice.of([4, 5, 6])})
            self.world.handle(writer, StartRun(origin=words, started=fact, gone=gone))
        else:
            self.world.handle(writer, RecordFact(origin=words, fact=fact))


def claim(session: Session, dice: Dice) -> RunFact | RunStarted:
    """What somebody might say of a run: not far from what is so, and mostly untrue."""
    run = dice.of(session.runs or [NOBODY])
    n, attempt = dice.of([run.n, run.n, run.n, run.n + 1, 1]), run.attempt + dice.of([0, 0, 0, -1, 1])
    call = dice.of([call.id for call in run.open_calls] or ["c0", "c1"])
    match dice.of([ModelReplied, ToolStarted, ToolReturned, RunReleased, RunEnded, RunEnded, RunStarted, RunStarted]):
        case kind if kind is RunEnded:
            return RunEnded(run=n, attempt=attempt, status=dice.of(["completed", "failed", "cancelled", "timed_out"]))
        case kind if kind is RunReleased:
            return RunReleased(run=n, attempt=attempt)
        case kind if kind is ModelReplied:
            calls = tuple(ToolCall(id=f"c{i}", name="look", arguments="{}") for i in range(dice.of([0, 1, 2])))
            return ModelReplied(run=n, attempt=attempt, step=run.steps + dice.of([1, 1, 0, 2]), tool_calls=calls)
        case kind if kind is ToolStarted:
            return ToolStarted(run=n, attempt=attempt, call_id=call)
        case kind if kind is ToolReturned:
            return ToolReturned(run=n, attempt=attempt, call_id=call, status=dice.of(["ok", "error", "uncertain"]))
        case _:
            wake = Wake(work=dice.of([1, 2, 3]), cause=dice.of([1, 5, 9]), delivery=dice.of([1, 2, 3]))
            trigger, names = dice.of([run.next_start(), ("message", run.message_ids), ("recovery", ())])
            return RunStarted(run=n, attempt=attempt + 1, runner="?", wake=wake, trigger=trigger, message_ids=names)


Act = Callable[[Players, Writer, Dice], None]
FAIR: list[Act] = [
    *[Players.work] * 7,
    *[Players.deliver] * 4,
    *[Players.post_another] * 2,
    Players.post,
    Players.withdraw,
    Players.cancel,
    Players.name,
    Players.give_back,
    Players.lapse,
    Players.die,
    Players.tick,
    Players.read,
]
FOUL: list[Act] = [*FAIR, *[Players.claim] * 4, Players.lose]


def stories(acts: list[Act]) -> st.SearchStrategy[list[tuple[Act, int, int]]]:
    step = st.tuples(st.sampled_from(acts), st.integers(0, 1), st.integers(0, 2**40))
    return st.lists(step, min_size=30, max_size=90)


def play(story: list[tuple[Act, int, int]]) -> World:
    world = World()
    players = Players(world)
    world.handle(players.writers[0], open_session(policy=QUEUE))
    for act, who, number in story:
        note(f"{act.__name__} by {players.writers[who].name}")
        act(players, players.writers[who], Dice(number))
        check(world)
    for recorded in world.log:
        note(repr(recorded.event.data))
    return world


def check(world: World) -> None:
    truth, auditor = world.truth, world.auditor
    running = [run.n for run in truth.runs if run.status == "running"]
    assert running == ([auditor.holder] if auditor.holder else []), "one run at most holds the turn"
    assert {run.n for run in truth.runs} == set(auditor.requested) - auditor.over
    assert {call.id for run in truth.runs for call in run.open_calls if run.n == auditor.holder} == (
        auditor.open.get(auditor.holder or 0, set())
    )


@settings(max_examples=100)
@for_all(stories(FAIR))
def test_every_run_ends_and_nobody_need_sweep(story: list[tuple[Act, int, int]]) -> None:
    """The events name all whom to wake: as long as no wake-up is lost, no timer and no sweep is needed to end every
    run."""
    world = play(story)
    world.run_to_the_end(timers=False)
    assert world.truth.runs == (), "a run that nobody was woken for"


@settings(max_examples=100)
@for_all(stories(FOUL))
def test_every_run_ends_whatever_is_lost_and_whoever_lies(story: list[tuple[Act, int, int]]) -> None:
    world = play(story)
    world.run_to_the_end()
    for _ in range(20):
        for queue in sorted({run.spec.queue for run in world.truth.runs}):
            world.wake(queue, world.last)  # what the sweep does
            world.run_to_the_end()
    assert world.truth.runs == ()


@settings(max_examples=40)
@for_all(stories(FOUL), st.data())
def test_any_prefix_and_the_rest_fold_to_the_same(story: list[tuple[Act, int, int]], data: st.DataObject) -> None:
    log = play(story).log
    middle = data.draw(st.integers(0, len(log)))
    assert fold(fold(Session(key=KEY), log[:middle]), log[middle:]) == fold(Session(key=KEY), log)
