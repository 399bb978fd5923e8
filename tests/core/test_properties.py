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
    answer,
    cancel,
    delete,
    open_session,
    origin,
    post,
    retry,
    title,
    update,
    with_origin,
    withdraw,
)
from tests.core.world import DONE, ENDS, FAILS, FITS, SPECS, World, Writer, call_of, due

from turnstream.session import commands, snapshot
from turnstream.session.commands import Command, EndChild, RecordFact, RunFact, StartRun, TakeOver
from turnstream.session.decision import Decision, deadline, expiry
from turnstream.session.events import (
    Ask,
    ChildEnded,
    ChildStarted,
    DeleteData,
    Error,
    ModelReplied,
    OnMessageData,
    Opens,
    Parent,
    PlanChanged,
    PolicyData,
    RunEnded,
    RunReleased,
    RunStarted,
    RunSteered,
    RunWaiting,
    ToolReturned,
    ToolStarted,
    Wake,
)
from turnstream.session.fold import fold
from turnstream.session.plan import BetweenEffect, CancelChild, Drive, TellParent, plan
from turnstream.session.state import Run, Session, request_id

T = TypeVar("T")
NOWHERE = Wake(work=0, cause=0, delivery=0)
NOBODY = Run(n=1, spec=SPECS["default"], message_ids=("m1",), author="user:ann", requested_seq=1, requested_at=1)
POLICIES = [
    PolicyData(on_busy="queue"),
    PolicyData(preset="strict"),
    PolicyData(preset="memory", on_busy="queue"),
    PolicyData(preset="memory"),
    PolicyData(preset="thread"),
    PolicyData(preset="thread", authors="mixed", on_disconnect="fail", recovery="resume"),
    PolicyData(preset="workspace", clock="wall", starters="people"),
    PolicyData(on_busy="interrupt", on_message=OnMessageData(question="queue", approval="decline")),
    PolicyData(on_busy="steer", on_message=OnMessageData(question="parallel"), delete=DeleteData(active="cancel")),
    PolicyData(on_busy="steer", on_message=OnMessageData(question="reject", approval="parallel"), recovery="fail"),
    PolicyData(on_busy="queue", on_message=OnMessageData(parked="queue"), delete=DeleteData(active="cancel")),
    PolicyData(on_busy="interrupt", on_message=OnMessageData(parked="interleave"), titles="derived"),
]
ORIGINS = [
    None,
    None,
    Parent(session="s0", run=3, call_id="a", k=1),
    Parent(session="s0", run=3, call_id="a", k=1, schema={"type": "array"}),
]
"""Who may have had a session opened: a client, or a run of another session."""
WORK = [0, 1, 1, 2, 3, 4, 4, 5, 6, 6, 7, DONE, DONE, DONE, DONE, FITS, FITS, FAILS]
"""What may come of an effect."""


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
        """A message whose id and key may have been used before."""
        message, agent = dice.of(["m1", "m2", "m3"]), dice.of([None, *AGENTS])
        self._ask(writer, post(message, policy=self._on_busy(dice), agent=agent, specs=SPECS, opens=Opens()), dice)

    def post_another(self, writer: Writer, dice: Dice) -> None:
        message = self.world.name("m").replace(" ", "-")
        off = dice.of([None, None, None, 0, 1])
        author = dice.of(["user:ann", "user:ann", "user:bob", "client:bot"])
        agent, kind = dice.of([None, None, None, "painter"]), dice.of(["message"] * 9 + ["notice"])
        text = dice.of(["yes", "yes", "maybe"])
        words = {"author": author, "policy": self._on_busy(dice), "agent": agent, "kind": kind, "specs": SPECS}
        command = with_origin(post(message, text, **words), time=self.world.now)
        expected = None if off is None else writer.session.seq + off
        self._ask(writer, with_origin(command, expected_seq=expected), dice)

    def _on_busy(self, dice: Dice) -> PolicyData:
        return PolicyData(on_busy=dice.of([None, None, "reject", "queue", "steer", "steer", "interrupt", "parallel"]))

    def withdraw(self, writer: Writer, dice: Dice) -> None:
        waiting = [message for run in self.world.truth.runs for message in (*run.message_ids, *run.steering)]
        self._ask(writer, withdraw(dice.of([*waiting, "m1", "m2"])), dice)

    def cancel(self, writer: Writer, dice: Dice) -> None:
        live = [run.n for run in self.world.truth.runs]
        self._ask(writer, cancel(dice.of([*live, *live, 1, 2, 99]), disconnected=dice.of([True, False])), dice)

    def answer(self, writer: Writer, dice: Dice) -> None:
        asked = [(run.n, request) for run in self.world.truth.runs for request in run.for_people]
        run, request = dice.of(asked) if asked and dice.of([1, 1, 1, 0]) else (dice.of([1, 2, 99]), None)
        k = request.k if request else dice.of([None, 1, 2])
        fits = {"answer": "yes"} if request and request.kind == "question" else {"approved": dice.of([True, False])}
        wrong = {"answer": dice.of(["maybe", None, 5]), "approved": dice.of([None, True])}
        command = answer(run, k=k, at=self.world.now, **dice.of([fits, fits, wrong]))
        self._ask(writer, command, dice)

    def retry(self, writer: Writer, dice: Dice) -> None:
        self._ask(writer, retry(), dice)

    def act(self, writer: Writer, dice: Dice) -> None:
        action, author = call_of(dice.of(["t1", "t1", "c1", "p1", "k1", "q1"])), dice.of(["user:ann", "client:bot"])
        tools = {key: {action.name: ""} for key in SPECS}
        command = commands.Act(origin=origin("act"), action=action, author=author, specs=SPECS, tools=tools)
        self._ask(writer, command, dice)

    def end_child(self, writer: Writer, dice: Dice) -> None:
        """It tells its parent, again too, and whatever has become of that."""
        born = [child for child in self.world.children.values() if child.opened]
        if born:
            child = dice.of([*born, *[child for child in born if not child.told] * 3])
            self.world.end_child(writer, child, dice.of(ENDS), key=dice.of([True, False]))

    def change_policy(self, writer: Writer, dice: Dice) -> None:
        self._ask(writer, update(policy=dice.of(POLICIES)), dice)

    def delete(self, writer: Writer, dice: Dice) -> None:
        if dice.of([0] * 9 + [1]):
            words = {"mode": dice.of([None, "erase", "detach"]), "active": dice.of([None, "cancel", "reject"])}
            self._ask(writer, delete(**words), dice)

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
        effects = writer.plan(self.world.now)
        if not effects:
            self.world.catch_up(writer)
            effects = writer.plan(self.world.now)
        if not effects:
            assert not due(writer.session, self.world.now, writer.drive, writer.done)
            self.world.finish(writer)
            return
        effect, fresh = dice.of(effects), writer.session.seq == self.world.last
        answer = self.world.perform(writer, effect, choice=dice.of(WORK))
        stored = isinstance(answer, Decision) or isinstance(effect, BetweenEffect)
        assert stored or not fresh, f"{effect} is planned and refused: {answer!r}"

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
        self.world.die(writer)
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
        if isinstance(fact, ChildEnded):
            if isinstance(self.world.handle(writer, EndChild(origin=words, ended=fact)), Decision):
                self.world.children[fact.run, fact.k].status = fact.status
        elif isinstance(fact, RunStarted):
            gone = frozenset({dice.of([1, 2, 3]), dice.of([4, 5, 6])})
            self.world.handle(writer, StartRun(origin=words, started=fact, gone=gone))
        else:
            by = TakeOver(wake_of(dice), frozenset({dice.of([1, 2, 3]), dice.of([4, 5, 6])}))
            self.world.handle(writer, RecordFact(origin=words, fact=fact, takes_over=dice.of([None, by])))


CLAIMS = [
    ModelReplied,
    ToolStarted,
    ToolReturned,
    ChildStarted,
    PlanChanged,
    RunReleased,
    RunSteered,
    RunWaiting,
    RunEnded,
    RunStarted,
    ChildEnded,
]


def wake_of(dice: Dice) -> Wake:
    return Wake(work=dice.of([1, 2, 3]), cause=dice.of([1, 5, 9]), delivery=dice.of([1, 2, 3]))


def claim(session: Session, dice: Dice) -> RunFact | RunStarted | ChildEnded:
    """What somebody might say of a run: not far from what is so, and mostly untrue."""
    run = dice.of(session.runs or [NOBODY])
    n, attempt = dice.of([run.n, run.n, run.n, run.n + 1, 1]), run.attempt + dice.of([0, 0, 0, -1, 1])
    call = dice.of([call.id for call in run.open_calls] or ["c0", "c1"])
    match dice.of(CLAIMS):
        case kind if kind is RunEnded:
            status = dice.of(["completed", "failed", "failed", "failed", "cancelled", "timed_out"])
            code = dice.of([None, "interrupted", "max_attempts_exceeded"]) if status == "failed" else None
            error = Error(code=code, message="?") if code else None
            return RunEnded(run=n, attempt=attempt, status=status, error=error)
        case kind if kind is RunReleased:
            return RunReleased(run=n, attempt=attempt)
        case kind if kind is ModelReplied:
            names = [f"{dice.of(['c', 'q', 'a', 'k', 'd', 'p'])}{i}" for i in range(dice.of([0, 1, 2]))]
            calls = tuple([call_of(name) for name in names])
            return ModelReplied(run=n, attempt=attempt, step=run.steps + dice.of([1, 1, 0, 2]), tool_calls=calls)
        case kind if kind is ToolStarted:
            return ToolStarted(run=n, attempt=attempt, call_id=call)
        case kind if kind is ToolReturned:
            status = dice.of(["ok", "error", "denied", "uncertain"])
            return ToolReturned(run=n, attempt=attempt, call_id=call, status=status)
        case kind if kind is ChildStarted:
            k = run.children + dice.of([1, 1, 0, 2, 9])
            name = session.key.child(n, k).session
            spec = SPECS["poet"]
            return ChildStarted(
                run=n, attempt=attempt, call_id=call, k=k, child_session=name, wait=dice.of([True, False]), spec=spec
            )
        case kind if kind is ChildEnded:
            return ChildEnded(run=n, call_id=call, k=dice.of([1, 2, 3]), status=dice.of(ENDS))
        case kind if kind is PlanChanged:
            return PlanChanged(run=n, attempt=attempt, call_id=call, items=())
        case kind if kind is RunSteered:
            names = dice.of([run.steering, run.steering[1:], run.message_ids])
            return RunSteered(run=n, attempt=attempt, message_ids=names)
        case kind if kind is RunWaiting:
            asks = tuple(
                Ask(
                    request=request_id(session, n, run.asked + k),
                    kind=one.asks or "question",
                    call_id=one.id,
                    prompt="?",
                )
                for k, one in enumerate(run.open_calls, 1)
            )
            return RunWaiting(run=n, attempt=attempt, requests=asks[: dice.of([1, 2, 3])])
        case _:
            wake = wake_of(dice)
            trigger, names = dice.of([run.next_start(), ("message", run.message_ids), ("recovery", ())])
            return RunStarted(run=n, attempt=attempt + 1, runner="?", wake=wake, trigger=trigger, message_ids=names)


Act = Callable[[Players, Writer, Dice], None]
FAIR: list[Act] = [
    *[Players.work] * 10,
    *[Players.deliver] * 5,
    *[Players.post_another] * 4,
    *[Players.answer] * 2,
    *[Players.end_child] * 2,
    Players.act,
    Players.post,
    Players.withdraw,
    Players.cancel,
    Players.retry,
    Players.change_policy,
    Players.delete,
    Players.name,
    Players.give_back,
    Players.lapse,
    Players.die,
    Players.tick,
    Players.read,
]
FOUL: list[Act] = [*FAIR, *[Players.claim] * 5, Players.lose]


def stories(acts: list[Act]) -> st.SearchStrategy[list[tuple[Act, int, int]]]:
    # Of bytes, for of integers small ones are preferred: dice that mostly show one.
    number = st.binary(min_size=8, max_size=8).map(int.from_bytes)
    step = st.tuples(st.sampled_from(acts), st.integers(0, 1), number)
    return st.lists(step, min_size=30, max_size=90)


def play(story: list[tuple[Act, int, int]], policy: PolicyData, parent: Parent | None = None) -> World:
    world = World()
    players = Players(world)
    opens = Opens(policy=policy, parent=parent)
    brief = post("brief", "maybe", author="agent:boss", opens=opens, specs=SPECS)
    world.handle(players.writers[0], brief if parent else open_session(policy=policy))
    for act, who, number in story:
        note(f"{act.__name__} by {players.writers[who].name}")
        act(players, players.writers[who], Dice(number))
        check(world)
    for recorded in world.log:
        note(repr(recorded.event.data))
    return world


def check(world: World) -> None:
    """What is folded is what an outsider makes of the log."""
    truth, auditor = world.truth, world.auditor
    assert [run.n for run in truth.runs] == auditor.line
    assert {run.n for run in truth.runs if run.status == "running"} == auditor.running
    assert {run.n for run in truth.runs if run.status == "waiting"} == auditor.waiting
    assert {run.n for run in truth.runs if run.parked} == {
        run for run in auditor.line if auditor.parks(run)
    } | auditor.resumed
    assert {run.n for run in truth.runs if run.cancel} == set(auditor.cancelled) & auditor.live
    assert [run.n for run in truth.live] == auditor.busy
    assert bool(truth.deleted) == auditor.deleted
    for run in truth.runs:
        assert {call.id for call in run.open_calls} == auditor.open.get(run.n, set())
        names = [request_id(truth, run.n, request.k) for request in run.requests]
        assert names == [name for name, asked in auditor.requests.items() if asked[0] == run.n]
        waits = [] if run.taken or run.trigger == "retry" else list(run.message_ids)
        assert {*waits, *run.steering} == {name for name, n in auditor.waits.items() if n == run.n}
        assert run.usage == auditor.usage[run.n]
    if not (truth.deleted and truth.deleted.erased):
        check_the_family(world)
    check_the_timers(world)


def check_the_family(world: World) -> None:
    """Nobody is left alone, and nobody uninformed: until that is done it is anybody's to do."""
    truth, auditor = world.truth, world.auditor
    assert {(child.run, child.k) for child in truth.children} == set(auditor.children)
    planned = plan(truth, world.now, Drive(runner="anybody", nonce="x", queue="?", wake=NOWHERE))
    cancels = {(effect.run, effect.child.k) for effect in planned if isinstance(effect, CancelChild)}
    assert cancels == {name for name in auditor.children if name in auditor.doomed}
    tells = [effect.parent for effect in planned if isinstance(effect, TellParent)]
    assert tells == ([auditor.parent] if auditor.reported is False else [])
    assert auditor.reported is not True or world.parent_told


def check_the_timers(world: World) -> None:
    """What falls due is what was said to, and nothing else."""
    runs = world.truth.runs
    wanted = {(deadline(run), run.deadline) for run in runs if run.deadline is not None}
    wanted |= {
        (expiry(run.n, one.k), one.expires_at) for run in runs for one in run.requests if one.expires_at is not None
    }
    assert {(due.what, at) for at, due, _ in world.timers} == {one for one in wanted if one not in world.fired}


def check_the_end(world: World) -> None:
    check(world)
    truth = world.truth
    assert truth.runs == (), "a run that nobody was woken for"
    assert truth.deleted is None or truth.deleted.erased, "a deletion that nobody was woken for"
    assert truth.children == (), "a child that nobody was woken for"
    assert not truth.unreported, "a parent that was not told"
    assert not world.auditor.waits, "a message that nothing became of"
    assert all(child.status for child in world.children.values()), "a child that does not end"
    if world.auditor.reported is not None:
        assert world.parent_told
    posted = world.auditor.fate
    assert set(posted.values()) <= {"taken", "settled", "answered", "none"}


@settings(max_examples=150)
@for_all(stories(FAIR), st.sampled_from(POLICIES), st.sampled_from(ORIGINS))
def test_every_run_ends_and_nobody_need_sweep(
    story: list[tuple[Act, int, int]], policy: PolicyData, parent: Parent | None
) -> None:
    """The events name all whom to wake: as long as no wake-up is lost, every question is answered and every child
    ends, no timer and no sweep is needed to end every run, to end every child that nobody waits for, and to tell the
    parent."""
    world = play(story, policy, parent)
    world.run_to_the_end(timers=False)
    check_the_end(world)


@settings(max_examples=100)
@for_all(stories(FOUL), st.sampled_from(POLICIES), st.sampled_from(ORIGINS))
def test_every_run_ends_whatever_is_lost_and_whoever_lies(
    story: list[tuple[Act, int, int]], policy: PolicyData, parent: Parent | None
) -> None:
    world = play(story, policy, parent)
    world.run_to_the_end()
    for _ in range(20):
        truth = world.truth
        looks_after = truth.deleted or truth.unreported or any(child.cancel for child in truth.children)
        queues = {run.spec.queue for run in truth.runs} | ({truth.last_queue} if looks_after else set())
        for queue in sorted(queues):
            world.wake(queue, world.last)  # what the sweep does
            world.run_to_the_end()
    check_the_end(world)


@settings(max_examples=40)
@for_all(stories(FOUL), st.sampled_from(POLICIES), st.sampled_from(ORIGINS), st.data())
def test_any_prefix_and_the_rest_fold_to_the_same(
    story: list[tuple[Act, int, int]], policy: PolicyData, parent: Parent | None, data: st.DataObject
) -> None:
    log = play(story, policy, parent).log
    middle = data.draw(st.integers(0, len(log)))
    assert fold(fold(Session(key=KEY), log[:middle]), log[middle:]) == fold(Session(key=KEY), log)


@settings(max_examples=60)
@for_all(stories(FOUL), st.sampled_from(POLICIES), st.sampled_from(ORIGINS), st.data())
def test_a_snapshot_of_any_prefix_and_the_rest_fold_to_the_same(
    story: list[tuple[Act, int, int]], policy: PolicyData, parent: Parent | None, data: st.DataObject
) -> None:
    log = play(story, policy, parent).log
    middle = data.draw(st.integers(1, len(log)))
    stored = snapshot.encode(fold(Session(key=KEY), log[:middle]), log[middle - 1])
    found = snapshot.decode(stored, KEY)
    assert found is not None
    assert fold(found.session, log[middle:]) == fold(Session(key=KEY), log)


@settings(max_examples=40)
@for_all(stories(FAIR), st.sampled_from(POLICIES), st.sampled_from(ORIGINS))
def test_a_folded_session_stays_small(
    story: list[tuple[Act, int, int]], policy: PolicyData, parent: Parent | None
) -> None:
    """Nothing that was said is in it but what an open request needs to judge an answer."""
    world = play(story, policy, parent)
    for run in world.truth.runs:
        assert len(run.requests) <= len(run.open_calls) <= 4
        assert run.status == "waiting" or not run.requests
    alive = {(child.run, child.k) for child in world.truth.children}
    assert len(alive) == len(world.truth.children)
    assert dict(world.truth.delegated) == world.auditor.born or world.auditor.deleted
    assert "maybe" not in repr(world.truth)
