"""A fork has what another session has up to an event, and nothing of that goes on in it."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from tests.core.scenario import (
    AGENTS,
    KEY,
    NOTHING,
    QUEUE,
    Given,
    answer,
    answered,
    answers,
    ask,
    asks,
    cancel,
    cancel_requested,
    delete,
    drive,
    ended,
    erase,
    event_of,
    expire,
    given,
    open_session,
    opened,
    origin,
    post,
    posted,
    queued,
    record,
    rejected,
    replied,
    retry,
    returned,
    start,
    started,
    steers,
    title,
    update,
    waiting,
    with_origin,
    withdraw,
)
from tests.core.test_properties import FOUL, POLICIES, Act, play, stories

from turnstream.ids import SessionKey, derive
from turnstream.session.commands import CloseFork, Command, CopyEvent, ForkSession
from turnstream.session.decide import decide
from turnstream.session.events import (
    Answers,
    Blob,
    ChildEnded,
    ChildStarted,
    Copied,
    Fact,
    ForkedFrom,
    HistoryCompacted,
    Leftover,
    MessagePosted,
    ModelReplied,
    Opens,
    Parent,
    PolicyData,
    Recorded,
    RunEnded,
    SessionDeleted,
    SessionForked,
    SessionOpened,
    ToolCall,
    Unknown,
    Window,
)
from turnstream.session.fold import evolve, fold
from turnstream.session.forking import Places, copy_of
from turnstream.session.history import build
from turnstream.session.plan import Close, Copy, Erase, blocked_by, next_due
from turnstream.session.recent import Recent
from turnstream.session.state import REMEMBERED, Compacted, Copying, Session

FORK = SessionKey("default", "f1")
BEHIND = 10_000
"""What the sequences of a fork are above those of its source."""
NOW = 77_000
IDLE = (opened(), posted("m1", 1), started(1, 1, "m1"), ended(1))
RUNNING = (opened(policy=QUEUE), posted("m1", 1), started(1, 1, "m1"), replied(1, 1, "a"))
WAITING = (*RUNNING[:3], asks(1, 1, a="question"), waiting(1, ask("a", expires_in=500)))
DRIVE = drive()


def log_of(*facts: Fact | Unknown, key: SessionKey = KEY) -> list[Recorded]:
    """A log of these facts, each with an idempotency key of its own."""
    log: list[Recorded] = []
    for n, fact in enumerate(facts, 1):
        event = msgspec.structs.replace(event_of(fact, n), key=key, idempotency_key=f"k{n}", body_digest=f"b{n}")
        log.append(Recorded(seq=10 * n, previous=10 * (n - 1), time=10 * n, size=100, event=event))
    return log


def fork(through: int, source: str = "s1", **given_to: Any) -> ForkSession:
    words = tuple(given_to)
    forked_from = ForkedFrom(session=source, through=through, queue="default", given=words)
    return ForkSession(origin=origin("fork"), opens=Opens(**given_to), forked_from=forked_from)


class Forking:
    """A fork of a log as somebody makes it, command by command."""

    def __init__(
        self, log: list[Recorded], through: int | None = None, key: SessionKey = FORK, **given_to: Any
    ) -> None:
        self.source = log[0].event.key
        self.prefix = [recorded for recorded in log if through is None or recorded.seq <= through]
        self.session = Session(key=key)
        self.log: list[Recorded] = []
        self.do(fork(self.prefix[-1].seq, self.source.session, **given_to))

    def do(self, command: Command) -> "Forking":
        decision = decide(command, self.session)
        assert decision is not None
        event = decision.event
        seq = BEHIND + event.copied.seq if event.copied else self.session.seq + 1 if self.log else BEHIND
        recorded = Recorded(seq=seq, previous=self.session.seq, time=event.stored_at(NOW), size=100, event=event)
        assert not (event.copied and (decision.wakes or decision.dues or decision.settled)), "a copy asks for nothing"
        self.log.append(recorded)
        self.session = evolve(self.session, recorded)
        return self

    @property
    def places(self) -> Places:
        places = Places()
        for recorded in self.log:
            if recorded.event.copied:
                places.add(recorded.event.copied.seq, recorded.seq)
        return places

    def copy(self, count: int | None = None) -> "Forking":
        for recorded in self.prefix[:count]:
            self.do(copy_of(recorded, self.source, self.session.key, self.places))
        return self

    def close(self) -> "Forking":
        while effects := Given(self.session).planned(DRIVE, now=NOW):
            (effect,) = effects
            assert isinstance(effect, Close)
            self.do(CloseFork(origin=origin(effect.key), run=effect.run))
            if not effect.run:
                return self
        raise AssertionError("it is never whole")

    @property
    def given(self) -> Given:
        return Given(self.session)

    def own(self) -> list[Fact | Unknown]:
        """What is in it beside copies, behind the first event."""
        return [recorded.event.data for recorded in self.log[1:] if not recorded.event.copied]


def whole(*facts: Fact | Unknown, through: int | None = None, **given_to: Any) -> Forking:
    return Forking(log_of(*facts), through, **given_to).copy().close()


# -- opening one ------------------------------------------------------------------------------------------------------


def test_a_fork_says_what_it_is_of_and_wakes_whoever_copies() -> None:
    command = fork(40, title=title("Another way", "client"), policy=QUEUE)
    of = ForkedFrom(session="s1", through=40, queue="default", given=("title", "policy"))
    outcome = given().when(command)
    outcome.then(SessionOpened(title=command.opens.title, policy=QUEUE, forked_from=of), wakes=("default",))
    assert outcome.session.copying == Copying()


def test_a_fork_takes_nobody_s_place() -> None:
    given(*IDLE).when(fork(10)).then(rejected("already_exists", field="id"))
    given(*IDLE, SessionDeleted(mode="detach", by="user:ann")).when(fork(10)).then(rejected("not_found"))


def test_the_same_fork_again_changes_nothing_and_another_one_by_its_key_is_refused() -> None:
    keyed = with_origin(fork(40), idempotency_key="k", body_digest="b")
    outcome = given().when(keyed)
    outcome.and_when(keyed).then(NOTHING)
    outcome.and_when(with_origin(keyed, body_digest="c")).then(rejected("key_reused"))
    outcome.and_when(fork(40)).then(rejected("already_exists"))


# -- while it is copied -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("facts", [IDLE, RUNNING, WAITING], ids=["idle", "running", "waiting"])
@pytest.mark.parametrize("copied", [0, 2, None], ids=["nothing", "some", "everything"])
@pytest.mark.parametrize(
    "command",
    [
        post("m9"),
        post("m9", opens=Opens()),
        post("n9", kind="notice"),
        open_session(),
        open_session(given=["agent"], agent="poet"),
        update(agent="poet"),
        withdraw("m1"),
        cancel(1),
        cancel(1, disconnected=True),
        answer(1, "x"),
        expire(1, now=10**9),
        retry(),
        erase(),
        start(started(1, 1, "m1")),
        start(started(1, 2), gone=[7]),
        record(returned(1, "a")),
        record(ended(1)),
        with_origin(post("m9"), expected_seq=1),
    ],
    ids=lambda command: type(command).__name__,
)
def test_before_it_is_whole_nothing_may_be_asked_of_it(
    facts: tuple[Fact, ...], copied: int | None, command: Command
) -> None:
    Forking(log_of(*facts)).copy(copied).given.when(command).then(rejected("session_copying"))


@pytest.mark.parametrize("facts", [IDLE, RUNNING, WAITING], ids=["idle", "running", "waiting"])
def test_before_it_is_whole_nothing_goes_on_in_it(facts: tuple[Fact, ...]) -> None:
    forking = Forking(log_of(*facts))
    late = drive(nonce="other", gone=[7])
    for count in range(len(facts)):
        effects = forking.given.planned(late, now=10**9)
        assert [type(effect) for effect in effects] == [Copy]
        assert forking.given.planned(drive(queue="gpu"), now=10**9) == ()
        assert next_due(forking.session, late) is None
        assert blocked_by(forking.session, late) == ()
        assert forking.session.copying == Copying(10 * count, count)
        forking.do(copy_of(forking.prefix[count], KEY, FORK, Places()))
    assert [type(effect) for effect in forking.given.planned(late, now=10**9)] == [Close]


def test_each_event_is_copied_once_and_in_order() -> None:
    forking = Forking(log_of(*IDLE), 30)
    copies = [copy_of(recorded, KEY, FORK, Places()) for recorded in log_of(*IDLE)]
    forking.given.when(copies[1]).then(rejected("invalid", field="copied"))
    forking.do(copies[0]).do(copies[1])
    forking.given.when(copies[0]).then(NOTHING)
    forking.given.when(copies[1]).then(NOTHING)
    elsewhere = msgspec.structs.replace(copies[2], copied=Copied("s2", 30, 30))
    forking.given.when(elsewhere).then(rejected("invalid", field="copied"))
    forking.given.when(CloseFork(origin=origin("close"), run=0)).then(rejected("session_copying"))
    forking.do(copies[2])
    forking.given.when(copies[3]).then(rejected("invalid", field="copied"))
    forking.close().given.when(copies[3]).then(NOTHING)
    forking.given.when(CloseFork(origin=origin("close"), run=0)).then(NOTHING)


def test_a_deletion_is_not_copied() -> None:
    log = log_of(*IDLE, SessionDeleted(mode="erase", by="user:ann"))
    forking = Forking(log).copy(4)
    forking.given.when(copy_of(log[4], KEY, FORK, Places())).then(rejected("invalid", field="data"))


@pytest.mark.parametrize("copied", [0, 3, None], ids=["nothing", "some", "everything"])
def test_it_may_be_deleted_meanwhile_whatever_its_policy_says(copied: int | None) -> None:
    strict = (opened(policy=PolicyData(preset="strict")), *delegating())
    forking = Forking(log_of(*strict)).copy(copied)
    deletion = forking.given.when(delete(active="reject"))
    assert isinstance(deletion.decision.event.data, SessionDeleted)
    assert deletion.decision.settled == ()
    after = Given(deletion.session)
    assert [type(effect) for effect in after.planned(DRIVE, now=NOW)] == [Erase], "no sub-agent of it is called off"
    after.when(copy_of(forking.prefix[-1], KEY, FORK, Places())).then(rejected("not_found"))


# -- what is copied ---------------------------------------------------------------------------------------------------


def delegating() -> tuple[Fact, ...]:
    call = ToolCall(id="d", name="delegate", arguments="{}", asks="child")
    child = ChildStarted(run=1, attempt=1, call_id="d", k=1, child_session="s1--1-1", spec=AGENTS["poet"])
    reply = ModelReplied(run=1, attempt=1, step=1, tool_calls=(call,))
    return (posted("m1", 1), started(1, 1, "m1"), reply, child, waiting(1, ask("d", kind="child")))


def test_a_copy_names_the_fork_where_it_named_the_session_and_nothing_else() -> None:
    blob = Blob(name="default/s1--1-1/1.1.end", size=5, sha256="ab")
    placed = Blob(name="default/f1/forked/ab", size=5, sha256="ab")
    for fact, copy in (
        (waiting(1, ask("a")), waiting(1, msgspec.structs.replace(ask("a"), request="f1.1.q1"))),
        (answered(1, 2, "x"), msgspec.structs.replace(answered(1, 2, "x"), request="f1.1.q2")),
        (ended(1, blob=blob), ended(1, blob=placed)),
        (returned(1, "a", blob=blob), returned(1, "a", blob=placed)),
        (
            ChildEnded(run=1, call_id="d", k=1, status="completed", blob=blob),
            ChildEnded(run=1, call_id="d", k=1, status="completed", blob=placed),
        ),
        (opened(one_shot=True, parent=Parent(session="p", run=1, call_id="c", k=1)), opened()),
        (posted("m1", 1, opens=Opens(one_shot=True)), posted("m1", 1, opens=Opens())),
        (delegating()[3], delegating()[3]),
        (posted("m1", 1, "see s1.1.q1"), posted("m1", 1, "see s1.1.q1")),
    ):
        assert copy_of(log_of(fact)[0], KEY, FORK, Places()).data == copy
    original = answers("m2", 1, q1="s1.1.q1")
    assert original.answers
    (said,) = original.answers.requests
    copied = copy_of(log_of(original)[0], KEY, FORK, Places()).data
    assert isinstance(copied, MessagePosted)
    assert copied.answers == Answers(run=1, requests=(msgspec.structs.replace(said, request="f1.1.q1"),))
    assert msgspec.structs.replace(copied, answers=original.answers) == original


def test_a_copy_names_places_in_the_fork_where_it_named_places_in_the_session() -> None:
    shown = Window(since=40, inner=15, tokens=7)
    facts = (*IDLE, posted("m2", 2), started(2, 1, "m2"), replied(2, 1, "a"), ended(2, window=shown))
    summary = HistoryCompacted(through=40, summary="They greeted.")
    forking = Forking(log_of(*facts, summary)).copy()
    end, compacted = [recorded.event.data for recorded in forking.log[-2:]]
    assert end == ended(2, window=Window(since=40 + BEHIND, inner=20 + BEHIND, tokens=7)), "between two: at the next"
    assert compacted == HistoryCompacted(through=40 + BEHIND, summary="They greeted.")
    assert forking.session.compacted == Compacted(90 + BEHIND, 40 + BEHIND)
    first = copy_of(log_of(ended(1, window=Window(tokens=3)))[0], KEY, FORK, Places())
    assert first.data == ended(1, window=Window(tokens=3))


def test_a_copy_is_as_its_original_was_said_and_dated_and_has_an_id_and_no_key() -> None:
    original = log_of(*IDLE)[3]
    event = msgspec.structs.replace(
        original.event, actor="user:bob", time=7, cause="c", correlation="r", traceparent="t"
    )
    command = copy_of(msgspec.structs.replace(original, event=event), KEY, FORK, Places())
    forking = Forking(log_of(*IDLE)).copy(3).do(command)
    copy = forking.log[-1]
    assert copy.time == original.time
    assert copy.event == msgspec.structs.replace(
        event,
        id=derive("default/f1", "copy of", event.id),
        key=FORK,
        idempotency_key=None,
        body_digest=None,
        copied=Copied("s1", 40, 40),
    )


def test_what_the_fork_is_given_stands_whatever_is_copied() -> None:
    facts = (
        opened(policy=PolicyData(preset="thread"), title=title("Old", "user"), agent="poet"),
        *IDLE[1:],
    )
    later = update(policy=PolicyData(preset="memory"), title=title("Older", "user"), agent="painter")
    updated = given(*facts).when(later).decision.event.data
    kept = whole(*facts, updated).session
    assert (kept.policy.preset, kept.title_source, kept.agent) == ("memory", "user", "painter")
    changed = whole(*facts, updated, policy=QUEUE, title=title("New", "client")).session
    assert (changed.policy, changed.title_source, changed.agent) == (QUEUE, "client", "painter")
    opening = posted("m1", 1, opens=Opens(policy=PolicyData(preset="memory")))
    assert whole(opening, policy=QUEUE).session.policy == QUEUE
    renamed = Given(changed).when(update(policy=PolicyData(preset="strict"))).session
    assert renamed.policy.preset == "strict", "once it is whole, it is changed like any"


def test_a_key_of_the_source_is_none_of_the_fork() -> None:
    fork_session = whole(*IDLE)
    assert fork_session.session.receipt("k2") is None
    keyed = with_origin(post("m2"), idempotency_key="k2", body_digest="another")
    assert fork_session.given.when(keyed).decision.event.data.run == 2
    fork_session.given.when(post("m1")).then(rejected("already_exists"))


# -- what was live ----------------------------------------------------------------------------------------------------


def cancelled(run: int = 1, attempt: int = 1, **fields: Any) -> RunEnded:
    model = "demo" if attempt else ""
    return ended(run, "cancelled", attempt, **{"reason": "forked", "model": model, **fields})


@pytest.mark.parametrize(
    ("facts", "own"),
    [
        (IDLE, []),
        (RUNNING, [cancelled(unfinished=("a",))]),
        (RUNNING[:2], [cancelled(attempt=0)]),
        (WAITING, [cancelled(unfinished=("a",))]),
        ((*RUNNING, queued("m2", 2)), [cancelled(unfinished=("a",)), cancelled(2, 0)]),
        ((*RUNNING, cancel_requested(1)), [cancelled(unfinished=("a",))]),
    ],
    ids=["idle", "running", "queued", "waiting", "queued behind", "cancelled"],
)
def test_what_had_not_ended_is_cancelled_in_the_fork(facts: tuple[Fact, ...], own: list[Fact]) -> None:
    forking = whole(*facts)
    assert forking.own() == [*own, SessionForked(events=len(facts))]
    assert forking.session.runs == ()
    assert forking.session.copying is None
    assert forking.given.when(post("m9")).decision.event.data.starts.run == forking.session.last_run + 1


def test_steering_that_nobody_had_taken_is_settled() -> None:
    forking = whole(*RUNNING, steers("m2", 1))
    left = Leftover(run=2, spec=AGENTS["default"], message_ids=("m2",))
    assert forking.own() == [
        cancelled(unfinished=("a",), leftover=left),
        cancelled(2, 0),
        SessionForked(events=5),
    ]
    forking.given.when(withdraw("m2")).then(rejected("not_queued"))


def test_a_run_whose_client_was_gone_ends_as_it_was_about_to() -> None:
    gone = msgspec.structs.replace(cancel_requested(1), error="client_disconnected")
    (end, _) = whole(*RUNNING, gone).own()
    assert isinstance(end, RunEnded)
    assert (end.status, end.error and end.error.code) == ("failed", "client_disconnected")


def test_sub_agents_are_the_other_session_s() -> None:
    forking = whole(opened(title=title("T", "user")), *delegating())
    assert forking.session.children == ()
    assert forking.given.planned(DRIVE, now=NOW) == ()
    gone = forking.given.when(delete(mode="erase", active="cancel"))
    assert [type(effect) for effect in Given(gone.session).planned(DRIVE, now=NOW)] == [Erase]


def test_a_sub_agent_that_had_ended_is_told_of_as_it_was() -> None:
    told = ChildEnded(run=1, call_id="d", k=1, status="completed", output="done")
    forking = Forking(log_of(opened(), *delegating(), told)).copy()
    (run,) = forking.session.runs
    assert (run.status, run.resume) == ("queued", "answers")
    assert forking.session.closed.get("f1.1.q1") is not None


def test_a_fork_of_a_sub_agent_s_session_is_a_session_of_its_own() -> None:
    parent = Parent(session="p", run=1, call_id="c", k=1, schema={"type": "integer"})
    forking = whole(opened(parent=parent, title=title("T", "user")), *RUNNING[1:3])
    assert forking.session.parent is None
    assert not forking.session.unreported
    assert forking.given.planned(DRIVE, now=NOW) == ()


def test_whoever_looks_after_it_from_then_on_is_woken_if_it_is_another() -> None:
    facts = (opened(), posted("m1", 1, by=AGENTS["painter"]), started(1, 1, "m1"), ended(1))
    forking = Forking(log_of(*facts)).copy()
    forking.given.when(CloseFork(origin=origin("close"), run=0)).then(SessionForked(events=4), wakes=("gpu",))
    same = Forking(log_of(*IDLE)).copy()
    same.given.when(CloseFork(origin=origin("close"), run=0)).then(SessionForked(events=4), wakes=())


# -- forks of forks ---------------------------------------------------------------------------------------------------


def test_a_fork_of_a_fork_has_what_that_one_has() -> None:
    first = whole(*RUNNING)
    second = Forking(first.log, key=SessionKey("default", "f2"))
    second.copy().close()
    assert second.own() == [SessionForked(events=len(first.log))]
    assert second.session.forked_from == ForkedFrom(session="f1", through=first.session.seq)
    assert [recorded.time for recorded in second.log[2:6]] == [10, 20, 30, 40], "dated as they were from the first"
    assert build(second.session, second.log) == build(first.session, first.log)


def test_a_fork_may_end_where_another_one_was_not_whole() -> None:
    first = whole(*RUNNING)
    second = Forking(first.log, first.log[3].seq, key=SessionKey("default", "f2")).copy().close()
    assert second.own() == [cancelled(), SessionForked(events=4)]


# -- whatever happened ------------------------------------------------------------------------------------------------

SEQUENCES = {
    "seq",
    "since",
    "begun",
    "end",
    "inner",
    "through",
    "steered_since",
    "several_since",
    "unshown_since",
    "requested_seq",
    "reply_seq",
    "closed_seq",
    "asked_seq",
    "plan_seq",
}
"""Fields of the folded state that are sequences."""


def as_in_the_fork(found: Any) -> Any:
    """What was folded of the source, with the fork's names and sequences."""
    if isinstance(found, SessionKey):
        return FORK
    if isinstance(found, msgspec.Struct):
        changes = {name: as_in_the_fork(getattr(found, name)) for name in found.__struct_fields__}
        changes |= {name: changes[name] + BEHIND for name in SEQUENCES & changes.keys() if changes[name]}
        if changes.get("start_id"):
            changes["start_id"] = derive(str(FORK), "copy of", changes["start_id"])
        return msgspec.structs.replace(found, **changes)
    if isinstance(found, tuple):
        return tuple([as_in_the_fork(one) for one in found])
    if isinstance(found, dict):
        return {key.replace("s1.", "f1."): as_in_the_fork(one) for key, one in found.items()}
    return found


@settings(max_examples=60)
@for_all(stories(FOUL), st.sampled_from(POLICIES), st.data())
def test_a62_whatever_happened_a_fork_folds_to_what_the_prefix_folds_to(
    story: list[tuple[Act, int, int]], policy: PolicyData, data: st.DataObject
) -> None:
    alive = [recorded for recorded in play(story, policy).log if not is_deletion(recorded)]
    through = data.draw(st.sampled_from([recorded.seq for recorded in alive]))
    forking = Forking(alive, through).copy()
    prefix = fold(Session(key=KEY), forking.prefix)
    assert forking.session == msgspec.structs.replace(
        as_in_the_fork(prefix),
        events=prefix.events + 1,
        opened_at=NOW,
        receipts=Recent(REMEMBERED),
        opening=None,
        forked_from=ForkedFrom(session="s1", through=through),
        copying=Copying(through, len(forking.prefix)),
    )
    assert build(forking.session, forking.log) == build(prefix, forking.prefix)
    live = {run.n for run in forking.session.runs}
    forking.close()
    assert forking.session.runs == ()
    assert forking.session.turns[: len(prefix.turns)] == as_in_the_fork(prefix.turns), "what had ended stays as it was"
    assert live <= ended_runs(forking.own()), "and the rest ends once"
    assert forking.given.when(post("another")).decision.event.data.starts is not None


def is_deletion(recorded: Recorded) -> bool:
    return recorded.event.type in ("session.deleted", "session.erased")


def ended_runs(facts: Iterable[Fact | Unknown]) -> set[int]:
    runs = [fact.run for fact in facts if isinstance(fact, RunEnded)]
    assert len(set(runs)) == len(runs)
    return set(runs)


@settings(max_examples=30)
@for_all(st.lists(st.integers(0, 5), min_size=10, max_size=40))
def test_a62_two_who_copy_at_once_copy_each_event_once(turns: list[int]) -> None:
    """Each has a place of its own from which it goes on, and may go back to what it has done before."""
    forking = Forking(log_of(*WAITING))
    copies: list[CopyEvent] = [copy_of(recorded, KEY, FORK, Places()) for recorded in forking.prefix]
    for place in [*turns, *range(len(copies))]:
        command = copies[place % len(copies)]
        if command.copied.seq <= (forking.session.copying or Copying()).seq:
            forking.given.when(command).then(NOTHING)
        elif command.behind == (forking.session.copying or Copying()).seq:
            forking.do(command)
        else:
            forking.given.when(command).then(rejected("invalid"))
    assert [recorded.event.copied.seq for recorded in forking.log[1:] if recorded.event.copied] == [10, 20, 30, 40, 50]
