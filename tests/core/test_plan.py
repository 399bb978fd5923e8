"""What there is to do, for whom, and with which keys."""

from typing import Any

import pytest
from tests.core.scenario import (
    AGENTS,
    DRIVE,
    KEY,
    WAKE,
    Given,
    cancel_requested,
    drive,
    ended,
    given,
    handover,
    opened,
    posted,
    queued,
    released,
    replied,
    returned,
    spec,
    started,
    tool_started,
    withdrawn,
)

from turnstream.ids import derive
from turnstream.session.events import Error, Fact, Limits, SessionUpdated, Title, ToolCall, Wake
from turnstream.session.plan import CallModel, CallTool, Drive, End, Settle, Start, blocked_by, next_due
from turnstream.session.state import Call, call_digest

OTHER_WAKE = Wake(work=8, cause=50, delivery=1)
OTHER = drive(OTHER_WAKE, nonce="other")
REDELIVERED = Wake(work=7, cause=20, delivery=2)
NEXT = drive(REDELIVERED, nonce="next")

QUEUED = (opened(), posted("m1", 1))
RUNNING = (*QUEUED, started(1, 1, "m1"))
CALLING = (*RUNNING, replied(1, 1, "a", "b"))
IDLE = (*RUNNING, ended(1))
TITLED = SessionUpdated(title=Title(text="Walls", source="agent"))


def call(name: str, **fields: Any) -> Call:
    """An open call as it folds from `replied`."""
    return Call(name, "look", call_digest(ToolCall(id=name, name="look", arguments="{}")), **fields)


def limited(*facts: Fact, **limits: int) -> Given:
    return given(opened(), posted("m1", 1, by=spec(**limits)), started(1, 1, "m1"), *facts)


def test_a_queued_run_is_started() -> None:
    start = Start(key="default/s1.1:start:1", run=1, attempt=1, trigger="message", message_ids=("m1",))
    assert given(*QUEUED).planned() == (start,)
    assert given(*QUEUED).planned(OTHER) == (start,)


def test_a21_an_accepted_message_is_in_the_log_and_any_drive_starts_it() -> None:
    """Whoever was to start it may die at any moment before: nothing but the log is needed."""
    for nonce in ("first", "second", "third"):
        (start,) = given(*QUEUED).planned(drive(nonce=nonce))
        assert isinstance(start, Start)
        assert (start.run, start.attempt, start.message_ids) == (1, 1, ("m1",))


@pytest.mark.parametrize("facts", [(), (opened(),), (*IDLE, TITLED), (*QUEUED, withdrawn("m1", 1))])
def test_nothing_is_planned_where_nothing_waits(facts: tuple[Fact, ...]) -> None:
    assert given(*facts).planned() == ()


def test_a_drive_calls_the_model_for_its_own_attempt() -> None:
    assert given(*RUNNING).planned() == (CallModel(key="default/s1.1:1", run=1, attempt=1, step=1),)
    assert given(*CALLING, returned(1, "a"), returned(1, "b")).planned() == (
        CallModel(key="default/s1.1:2", run=1, attempt=1, step=2),
    )


def test_the_calls_of_a_step_are_made_together() -> None:
    calling = given(*CALLING)
    seq = calling.session.seq
    assert calling.planned() == (
        CallTool(key="default/s1.1:1:a", run=1, attempt=1, step=1, call=call("a", seq=seq)),
        CallTool(key="default/s1.1:1:b", run=1, attempt=1, step=1, call=call("b", seq=seq)),
    )
    begun = given(*CALLING, tool_started(1, "a"), returned(1, "b")).planned()
    assert [effect.key for effect in begun] == ["default/s1.1:1:a"], "what was begun is still planned by its own drive"


def test_a_run_of_another_drive_is_left_alone() -> None:
    for facts in (RUNNING, CALLING, (*RUNNING, cancel_requested(1))):
        assert given(*facts).planned(OTHER) == ()
        assert given(*facts).planned(drive(WAKE, nonce="twin")) == (), "one delivery of a wake-up is one drive"
        assert given(*facts, queued("m2", 2)).planned(OTHER) == ()


def test_a72_the_next_step_is_planned_from_the_log_alone() -> None:
    """The runner died just after the last result was stored."""
    recovered = given(*CALLING, returned(1, "a"), returned(1, "b"), started(1, 2, wake=REDELIVERED))
    assert recovered.planned() == (CallModel(key="default/s1.1:2", run=1, attempt=2, step=2),)
    drained = given(*RUNNING, queued("m2", 2), queued("m3", 3), ended(1))
    assert [effect.run for effect in drained.planned()] == [2]


# -- taking over ------------------------------------------------------------------------------------------------------


def test_s18_the_same_wake_up_delivered_again_plans_a_recovery() -> None:
    start = Start(key="default/s1.1:start:2", run=1, attempt=2, trigger="recovery", message_ids=())
    assert given(*RUNNING).planned(NEXT) == (start,)
    assert given(*CALLING).planned(NEXT) == (start,)
    assert given(*RUNNING).planned(drive(OTHER_WAKE, nonce="other", gone=[7])) == (start,)


def test_a22_a_runner_that_dies_between_start_and_first_fact_is_replaced() -> None:
    assert [type(effect) for effect in given(*RUNNING).planned(NEXT)] == [Start]
    assert given(*RUNNING, started(1, 2, wake=REDELIVERED)).planned() == (
        CallModel(key="default/s1.1:1", run=1, attempt=2, step=1),
    )


def test_s18_a_recovery_repeats_the_effects_with_the_same_keys() -> None:
    before = given(*CALLING).planned()
    after = given(*CALLING, started(1, 2, wake=REDELIVERED)).planned()
    assert [effect.key for effect in after] == [effect.key for effect in before]
    assert {effect.attempt for effect in after} == {2}


def test_s19_a_tool_in_flight_at_a_crash_is_uncertain() -> None:
    a, b = given(*CALLING, tool_started(1, "a"), started(1, 2, wake=REDELIVERED)).planned()
    assert isinstance(a, Settle)
    assert (a.call.id, a.attempt, a.key) == ("a", 2, "default/s1.1:1:a:uncertain")
    assert isinstance(b, CallTool), "nothing was begun: it is called under the same key"


def test_a_tool_in_flight_at_a_handover_is_uncertain_too() -> None:
    effects = given(*CALLING, tool_started(1, "a"), released(1), handover(1, 2)).planned()
    assert [type(effect) for effect in effects] == [Settle, CallTool]


def test_s21_every_attempt_dies() -> None:
    deaths = [started(1, n, wake=Wake(work=7, cause=20, delivery=n)) for n in (2, 3, 4)]
    fifth = drive(Wake(work=7, cause=20, delivery=5), nonce="fifth")
    assert [type(effect) for effect in given(*RUNNING, *deaths[:2]).planned(fifth)] == [Start]
    (end,) = given(*RUNNING, *deaths).planned(fifth)
    assert isinstance(end, End)
    assert (end.status, end.attempt) == ("failed", 4)
    assert end.error is not None
    assert end.error.code == "max_attempts_exceeded"


@pytest.mark.parametrize(
    "progress",
    [replied(1, 1, "a", attempt=4), tool_started(1, "b", 4), returned(1, "b", 4)],
    ids=lambda fact: type(fact).__name__,
)
def test_s57_only_recoveries_without_a_new_fact_count(progress: Fact) -> None:
    deaths = [started(1, n, wake=Wake(work=7, cause=20, delivery=n)) for n in (2, 3, 4)]
    fifth = drive(Wake(work=7, cause=20, delivery=5), nonce="fifth")
    before = RUNNING if type(progress).__name__ == "ModelReplied" else CALLING
    assert [type(effect) for effect in given(*before, *deaths, progress).planned(fifth)] == [Start]


def test_a20_a_run_that_every_attempt_of_died_ends_with_its_calls() -> None:
    deaths = [started(1, n, wake=Wake(work=7, cause=20, delivery=n)) for n in (2, 3, 4)]
    fifth = drive(Wake(work=7, cause=20, delivery=5), nonce="fifth")
    (end,) = given(*CALLING, *deaths).planned(fifth)
    assert isinstance(end, End)
    assert end.attempt == 4, "no new attempt is begun to end a run"
    assert end.error is not None
    assert end.error.code == "max_attempts_exceeded"


# -- giving back ------------------------------------------------------------------------------------------------------


def test_a_run_given_back_is_resumed_before_what_is_queued() -> None:
    effects = given(*RUNNING, queued("m2", 2), released(1)).planned(OTHER)
    assert effects == (Start(key="default/s1.1:start:2", run=1, attempt=2, trigger="handover", message_ids=()),)


def test_a_run_given_back_is_no_longer_its_drives() -> None:
    assert [type(effect) for effect in given(*RUNNING, released(1)).planned()] == [Start]


# -- ending -----------------------------------------------------------------------------------------------------------


def test_s16_a_cancelled_run_ends_and_calls_nothing() -> None:
    end = End(key="default/s1.1:0:end:cancelled", run=1, attempt=1, status="cancelled")
    assert given(*RUNNING, cancel_requested(1)).planned() == (end,)
    assert given(*CALLING, returned(1, "b"), tool_started(1, "a"), cancel_requested(1)).planned() == (end,)
    assert given(*CALLING, cancel_requested(1), returned(1, "a"), returned(1, "b")).planned() == (end,)


def test_a_cancelled_run_whose_runner_died_ends_without_a_new_attempt() -> None:
    (end,) = given(*RUNNING, cancel_requested(1)).planned(NEXT)
    assert isinstance(end, End)
    assert (end.status, end.attempt) == ("cancelled", 1)


def test_a_cancelled_run_that_was_given_back_ends_and_then_the_next_starts() -> None:
    facts = (*CALLING, queued("m2", 2), released(1), cancel_requested(1))
    assert [type(effect) for effect in given(*facts).planned(OTHER)] == [End]
    assert [effect.run for effect in given(*facts, ended(1, "cancelled")).planned(OTHER)] == [2]


def test_a_run_ends_at_its_deadline() -> None:
    running = limited(timeout=5000)
    due = next_due(running.session, DRIVE)
    assert due == running.session.seq + 5000
    assert next_due(running.session, OTHER) is None
    assert [type(effect) for effect in running.planned(now=due - 1)] == [CallModel]
    (end,) = running.planned(now=due)
    assert end == End(
        key="default/s1.1:0:end:timed_out",
        run=1,
        attempt=1,
        status="timed_out",
        error=Error(code="deadline_exceeded", message="the run took longer than 5 s"),
    )
    assert running.planned(OTHER, now=due) == (), "it is its own drive that ends it"
    assert [type(effect) for effect in running.planned(NEXT, now=due)] == [End], "or whoever takes over"


def test_a_run_given_back_ends_at_its_deadline_too() -> None:
    released_run = limited(released(1), timeout=5000)
    assert [type(effect) for effect in released_run.planned(OTHER, now=10**9)] == [End]


def test_nothing_falls_due_where_no_run_was_started() -> None:
    assert next_due(given(*QUEUED).session, DRIVE) is None
    assert next_due(given(*IDLE).session, DRIVE) is None


@pytest.mark.parametrize(
    ("limits", "facts", "code"),
    [
        ({"max_steps": 1}, (replied(1, 1, "a"),), "max_steps_exceeded"),
        ({"max_steps": 2}, (replied(1, 1, "a"), returned(1, "a"), replied(1, 2, "a")), "max_steps_exceeded"),
        ({"max_model_calls": 1}, (replied(1, 1, "a"),), "budget_exceeded"),
        ({"max_tool_calls": 1}, (replied(1, 1, "a", "b"),), "budget_exceeded"),
        ({"max_tokens": 9}, (replied(1, 1, "a", tokens=10),), "budget_exceeded"),
    ],
)
def test_a_spent_limit_fails_the_run_whatever_was_asked_for(
    limits: dict[str, int], facts: tuple[Fact, ...], code: str
) -> None:
    (end,) = limited(*facts, **limits).planned()
    assert isinstance(end, End)
    assert end.status == "failed"
    assert end.error is not None
    assert end.error.code == code


def test_a_limit_that_is_not_spent_stops_nothing() -> None:
    limits = {"max_steps": 2, "max_model_calls": 2, "max_tool_calls": 2, "max_tokens": 10}
    spending = limited(replied(1, 1, "a", "b", tokens=10), **limits)
    assert [type(effect) for effect in spending.planned()] == [CallTool, CallTool]
    done = limited(replied(1, 1, "a", "b", tokens=10), returned(1, "a"), returned(1, "b"), **limits)
    assert [type(effect) for effect in done.planned()] == [CallModel]
    assert Limits() == Limits(max_steps=32, max_model_calls=32, max_tool_calls=64, timeout=600_000)


# -- queues -----------------------------------------------------------------------------------------------------------

PAINTING = (opened(), posted("m1", 1, by=AGENTS["painter"]), started(1, 1, "m1"))
GPU = drive(REDELIVERED, nonce="gpu", queue="gpu")


def test_a_drive_plans_for_its_own_queue_alone() -> None:
    waiting = given(*PAINTING[:2])
    assert waiting.planned() == ()
    assert [type(effect) for effect in waiting.planned(GPU)] == [Start]
    for facts in (PAINTING, (*PAINTING, cancel_requested(1))):
        assert given(*facts).planned(drive(OTHER_WAKE, nonce="other", gone=[7])) == ()
        assert [type(effect) for effect in given(*facts).planned(GPU)] != []


def test_a_drive_looks_for_the_wake_up_that_blocks_it() -> None:
    assert blocked_by(given(*RUNNING).session, OTHER) == (WAKE,)
    assert blocked_by(given(*RUNNING, queued("m2", 2)).session, OTHER) == (WAKE,)
    assert blocked_by(given(*RUNNING).session, DRIVE) == ()
    assert blocked_by(given(*QUEUED).session, OTHER) == ()
    assert blocked_by(given(*PAINTING, queued("m2", 2)).session, OTHER) == (), "the end of that run wakes this queue"


# -- drives -----------------------------------------------------------------------------------------------------------


def test_two_drives_that_start_one_attempt_are_never_taken_for_one() -> None:
    session = given(*QUEUED).session
    one, two = (Drive(runner="r", nonce=nonce, queue="default", wake=WAKE) for nonce in ("a", "b"))
    assert one.start_id(session, 1, 1) == derive("default", KEY.run(1), 1, "a")
    assert len({d.start_id(session, run, attempt) for d in (one, two) for run in (1, 2) for attempt in (1, 2)}) == 8
