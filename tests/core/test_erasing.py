"""A session that is deleted is not there, ends every run, and is erased by whoever is woken."""

from typing import Any

import pytest
from tests.core.scenario import (
    AGENTS,
    KEY,
    NOTHING,
    Given,
    answer,
    ask,
    asks,
    cancel,
    delete,
    drive,
    ended,
    erase,
    event_of,
    expire,
    given,
    notice,
    open_session,
    opened,
    post,
    posted,
    queued,
    record,
    record_as,
    rejected,
    replied,
    retry,
    returned,
    spec,
    start,
    started,
    steers,
    update,
    waiting,
    with_origin,
    withdraw,
)

from turnstream.session.events import (
    DeleteData,
    Fact,
    Opens,
    PolicyData,
    Recorded,
    SessionDeleted,
    SessionErased,
    Wake,
)
from turnstream.session.fold import evolve
from turnstream.session.plan import Erase, blocked_by, next_due
from turnstream.session.state import Session

CANCEL = PolicyData(delete=DeleteData(active="cancel"))
IDLE = (opened(), posted("m1", 1), started(1, 1, "m1"), ended(1))
RUNNING = (opened(), posted("m1", 1), started(1, 1, "m1"), steers("m2", 1), replied(1, 1, "a"))
WAITING = (*RUNNING[:3], asks(1, 1, a="question"), waiting(1, ask("a", expires_in=500)))
OTHER = drive(Wake(work=9, cause=1, delivery=1), nonce="other")


def gone(mode: Any = "erase", *, last_run: int = 1, events: int = 5, queue: str = "default") -> SessionDeleted:
    return SessionDeleted(mode=mode, by="user:ann", queue=queue, last_run=last_run, events=events)


def erased(mode: Any = "erase", *, removed: int, at: int, last_run: int = 1) -> SessionErased:
    return SessionErased(mode=mode, by="user:ann", events_removed=removed, last_run=last_run, deleted_at=at)


# -- deleting ---------------------------------------------------------------------------------------------------------


def test_s29_an_idle_session_is_deleted() -> None:
    outcome = given(*IDLE).when(delete()).then(gone(), wakes=("default",))
    assert not outcome.session.exists
    assert outcome.session.seq == 50


@pytest.mark.parametrize("preset", ["strict", "memory", "thread", "workspace"])
def test_s30_a_session_with_a_live_run_preset_by_preset(preset: Any) -> None:
    facts = (opened(policy=PolicyData(preset=preset)), *RUNNING[1:])
    for past in (facts[:2], facts, (*facts[:3], *WAITING[3:])):
        outcome = given(*past).when(delete())
        if preset == "strict":
            outcome.then(rejected("run_active", run="s1.1"))
        else:
            outcome.then(gone("detach", events=len(past) + 1))


def test_a_caller_says_what_becomes_of_it() -> None:
    session = given(*RUNNING)
    session.when(delete(active="cancel")).then(gone(events=6))
    session.when(delete(active="cancel", mode="detach")).then(gone("detach", events=6))
    cancels = given(opened(policy=CANCEL), *RUNNING[1:])
    cancels.when(delete()).then(gone(events=6))
    cancels.when(delete(active="reject")).then(rejected("run_active"))


def test_the_agent_s_policy_has_a_word() -> None:
    agents = {**AGENTS, "default": spec(policy=PolicyData(delete=DeleteData(mode="detach", active="cancel")))}
    given(*RUNNING).when(delete(specs=agents)).then(gone("detach", events=6))
    strict = given(opened(policy=PolicyData(preset="strict")), *RUNNING[1:])
    strict.when(delete(specs=agents)).then(rejected("run_active"))


@pytest.mark.parametrize("facts", [RUNNING[:2], RUNNING, WAITING], ids=["queued", "running", "waiting"])
def test_deleting_ends_every_run_and_everything_that_falls_due(facts: tuple[Fact, ...]) -> None:
    session = given(*facts, queued("m3", 2))
    outcome = session.when(delete(active="cancel"))
    assert outcome.session.runs == ()
    assert outcome.session.last_end == "cancelled"
    due = ("expiry-1-1",) if facts is WAITING else ("deadline-1",) if facts is RUNNING else ()
    assert outcome.decision.settled == due
    assert next_due(outcome.session, OTHER) is None
    assert blocked_by(outcome.session, OTHER) == ()


def test_a_session_that_never_was_cannot_be_deleted() -> None:
    given().when(delete()).then(rejected("not_found"))
    given().when(erase()).then(rejected("not_found"))
    given(*IDLE).when(erase()).then(rejected("invalid_transition"))


# -- afterwards -------------------------------------------------------------------------------------------------------

DELETED = {mode: (*WAITING, gone(mode, events=6)) for mode in ("detach", "erase")}
TOMBSTONE = {mode: (*DELETED[mode], erased(mode, removed=6, at=60)) for mode in ("detach", "erase")}


@pytest.mark.parametrize("facts", [*DELETED.values(), *TOMBSTONE.values()], ids=["detach", "erase", "both", "all"])
@pytest.mark.parametrize(
    "command",
    [
        post("m9"),
        post("m9", opens=Opens()),
        post("n9", kind="notice"),
        open_session(),
        update(agent="poet"),
        withdraw("m1"),
        cancel(1),
        cancel(1, disconnected=True),
        answer(1, "x"),
        expire(1, now=10**9),
        retry(),
        start(started(1, 2)),
        start(started(1, 2), gone=[7]),
        record(returned(1, "a")),
        record(replied(1, 2, "a")),
        record(ended(1, "cancelled")),
    ],
    ids=lambda command: type(command).__name__,
)
def test_s31_everything_else_is_refused(facts: tuple[Fact, ...], command: Any) -> None:
    outcome = given(*facts).when(command).then(rejected("not_found"))
    assert str(outcome.answer) in {
        "session s1 was deleted; its runs stay readable, and its id stays taken",
        "session s1 was deleted; the id of an erased session is free again once its tombstone has expired",
    }
    assert outcome.session.deleted
    assert ("erased" in str(outcome.answer)) == (outcome.session.deleted.mode == "erase")


@pytest.mark.parametrize("facts", [DELETED, TOMBSTONE], ids=["deleted", "erased"])
def test_s29_a_second_delete(facts: dict[str, tuple[Fact, ...]]) -> None:
    for mode in (None, "erase", "detach"):
        given(*facts["detach"]).when(delete(mode=mode)).then(rejected("not_found"))
        given(*facts["erase"]).when(delete(mode=mode)).then(NOTHING)


def test_the_repeat_of_a_delete_is_answered_as_the_first() -> None:
    keyed = with_origin(delete(mode="detach"), idempotency_key="k", body_digest="b")
    first = given(*IDLE).when(keyed).then(gone("detach"))
    first.and_when(with_origin(keyed, id="again")).then(NOTHING)
    first.and_when(with_origin(keyed, id="again", body_digest="c")).then(rejected("not_found"))
    tombstone = first.and_when(erase(5))
    tombstone.and_when(with_origin(keyed, id="again")).then(NOTHING)
    tombstone.and_when(delete()).then(rejected("not_found"))
    first.and_when(with_origin(post("m9"), idempotency_key="k", body_digest="b")).then(rejected("not_found"))


def test_a_repeat_of_what_came_before_is_not_found() -> None:
    keyed = with_origin(post("m2"), idempotency_key="k", body_digest="b")
    first = given(*IDLE).when(keyed)
    deleted = first.and_when(delete(active="cancel"))
    deleted.and_when(with_origin(keyed, id="again")).then(rejected("not_found"))


def test_whoever_is_woken_of_the_last_queue_erases_it() -> None:
    session = given(opened(), posted("m1", 1, by=AGENTS["painter"]))
    outcome = session.when(delete(active="cancel")).then(gone(events=3, queue="gpu"), wakes=("gpu",))
    assert outcome.given.planned(OTHER) == ()
    painter = drive(Wake(work=9, cause=1, delivery=1), nonce="other", queue="gpu")
    effect = Erase(key="default/s1:erase", run=0, mode="erase")
    assert outcome.given.planned(painter) == (effect,)
    assert outcome.given.planned(painter, now=10**12) == (effect,)
    over = outcome.and_when(erase(3))
    assert over.given.planned(painter) == (), "it repeats until it is erased"


def test_what_is_left_is_a_tombstone_without_content() -> None:
    session = given(*DELETED["erase"])
    tombstone = erased(removed=6, at=60)
    outcome = session.when(erase(6)).then(tombstone, wakes=())
    outcome.and_when(erase(6)).then(NOTHING)
    state = outcome.session
    assert (state.last_run, state.seq, state.exists) == (1, 70, False)
    assert (state.turns, state.runs, state.last_ended, state.opening) == ((), (), None, None)
    assert "m1" not in repr(state)


def test_a_tombstone_folds_alone() -> None:
    """It has removed what was before it: nothing is known of its session but that it was deleted."""
    tombstone = event_of(erased(removed=6, at=60), 0)
    alone = evolve(Session(key=KEY), Recorded(seq=70, previous=60, time=70, size=100, event=tombstone))
    behind = evolve(given(*DELETED["erase"]).session, Recorded(seq=70, previous=60, time=70, size=1, event=tombstone))
    assert alone == behind
    Given(alone).when(post("m9", opens=Opens())).then(rejected("not_found"))
    Given(alone).when(delete()).then(NOTHING)
    Given(alone).when(erase()).then(NOTHING)


@pytest.mark.parametrize("cut", range(6))
def test_the_rest_of_a_session_that_is_being_erased_folds_to_a_deleted_one(cut: int) -> None:
    """Its log may begin anywhere: what was overwritten is not there."""
    session = Session(key=KEY)
    for n, fact in list(enumerate(DELETED["erase"]))[cut:]:
        session = evolve(session, record_as(session, event_of(fact, n)))
    rest = Given(session)
    assert not session.exists
    assert session.runs == ()
    assert [type(effect) for effect in rest.planned()] == [Erase]
    outcome = rest.when(erase(6))
    outcome.then(erased(removed=6, at=session.deleted.at if session.deleted else 0))
    rest.when(post("m9")).then(rejected("not_found"))


def test_whoever_is_to_erase_it_is_known_though_the_run_that_said_so_is_gone() -> None:
    session = evolve(Session(key=KEY), record_as(Session(key=KEY), event_of(gone(last_run=3, queue="gpu"), 9)))
    assert (session.last_run, session.last_queue) == (3, "gpu")
    painter = drive(Wake(work=9, cause=1, delivery=1), nonce="other", queue="gpu")
    assert [type(effect) for effect in Given(session).planned(painter)] == [Erase]
    assert Given(session).planned(OTHER) == ()


def test_what_a_slow_writer_stored_after_all_changes_nothing() -> None:
    """The guard keeps it out; if it is ever read, it is ignored."""
    deleted = given(*DELETED["erase"]).session
    for fact in (posted("m9", 2), started(1, 2), ended(1), opened(), notice("n9")):
        after = evolve(deleted, record_as(deleted, event_of(fact, 99)))
        assert (after.runs, after.exists, after.deleted) == ((), False, deleted.deleted)


def test_a_write_that_expects_what_is_gone_is_not_found_either() -> None:
    given(*DELETED["erase"]).when(with_origin(post("m9"), expected_seq=50)).then(rejected("not_found"))
