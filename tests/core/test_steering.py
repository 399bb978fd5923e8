"""Messages that reach a run on its way: taken before the next model call, too late, withdrawn; and what interrupts."""

from typing import Any

import msgspec
import pytest
from tests.core.scenario import (
    AGENTS,
    NOTHING,
    WAKE,
    Given,
    cancel,
    cancel_requested,
    drive,
    ended,
    failure,
    given,
    left_over,
    opened,
    post,
    posted,
    queued,
    record,
    rejected,
    released,
    replied,
    returned,
    spec,
    start,
    started,
    steered,
    steers,
    withdraw,
    withdrawn,
)

from turnstream.session.events import Fact, PolicyData, Usage, Wake
from turnstream.session.plan import CallModel, CallTool, End, Start, Steer
from turnstream.session.state import Run

STEER = PolicyData(on_busy="steer")
REDELIVERED = drive(Wake(work=7, cause=20, delivery=2), nonce="next")
RUNNING = (opened(policy=STEER), posted("m1", 1), started(1, 1, "m1"))
STEERED = (*RUNNING, steers("m2", 1), steers("m3", 1))
ANSWER = replied(1, 1, text="hi")


def run_of(session: Given, n: int = 1) -> Run:
    run = session.session.run(n)
    assert run is not None
    return run


# -- in time ----------------------------------------------------------------------------------------------------------


def test_s03_a_steering_message_is_taken_before_the_next_model_call() -> None:
    effect = Steer(key="default/s1.1:0:steer:m3", run=1, attempt=1, message_ids=("m2", "m3"))
    session = given(*STEERED)
    assert session.planned() == (effect,)
    outcome = session.when(record(steered(1, "m2", "m3"))).then(steered(1, "m2", "m3"), wakes=())
    assert run_of(outcome.given).message_ids == ("m1", "m2", "m3")
    assert run_of(outcome.given).steering == ()
    assert [type(effect) for effect in outcome.given.planned()] == [CallModel]


def test_a_message_that_comes_while_the_model_is_called_is_taken_before_the_call_after() -> None:
    called = given(*RUNNING, steers("m2", 1), replied(1, 1, "a"))
    assert [type(effect) for effect in called.planned()] == [CallTool], "a result stands behind its call"
    called.when(record(steered(1, "m2"))).then(rejected("invalid_transition"))
    done = called.when(record(returned(1, "a"))).given
    assert [type(effect) for effect in done.planned()] == [Steer]
    done.when(record(steered(1, "m2"))).then(steered(1, "m2"))


def test_the_oldest_are_taken_first_and_each_once() -> None:
    session = given(*STEERED)
    session.when(record(steered(1, "m3"))).then(rejected("invalid_transition"))
    session.when(record(steered(1))).then(rejected("invalid_transition"))
    session.when(record(steered(1, "m2", "m4"))).then(rejected("invalid_transition"))
    one = session.when(record(steered(1, "m2"))).then(steered(1, "m2"))
    one.and_when(record(steered(1, "m2"))).then(rejected("invalid_transition"))
    one.and_when(record(steered(1, "m3"))).then(steered(1, "m3"))


def test_nothing_steers_a_run_that_is_not_running_or_is_to_end() -> None:
    given(*STEERED, released(1)).when(record(steered(1, "m2"))).then(rejected("invalid_transition"))
    given(*STEERED, cancel_requested(1)).when(record(steered(1, "m2"))).then(rejected("invalid_transition"))
    given(*STEERED, started(1, 2)).when(record(steered(1, "m2"))).then(rejected("fenced"))


def test_what_came_before_the_start_steers_it_and_is_not_named_by_it() -> None:
    session = given(*RUNNING[:2], steers("m2", 1))
    (effect,) = session.planned()
    assert isinstance(effect, Start)
    assert effect.message_ids == ("m1",)
    begun = session.when(start(started(1, 1, "m1"))).then(started(1, 1, "m1"))
    assert [type(effect) for effect in begun.given.planned()] == [Steer]


def test_what_steered_a_run_that_is_recovered_or_handed_over_stays_taken() -> None:
    taken = (*STEERED, steered(1, "m2", "m3"))
    (recovery,) = given(*taken).planned(REDELIVERED)
    assert isinstance(recovery, Start)
    assert (recovery.trigger, recovery.message_ids) == ("recovery", ())
    (handover,) = given(*taken, released(1)).planned(REDELIVERED)
    assert isinstance(handover, Start)
    assert (handover.trigger, handover.message_ids) == ("handover", ())
    waits = given(*STEERED, started(1, 2))
    assert run_of(waits).steering == ("m2", "m3"), "what no attempt has taken is still there"


# -- at the end -------------------------------------------------------------------------------------------------------


def test_an_answer_is_one_more_reply_while_a_message_is_there() -> None:
    session = given(*STEERED)
    over = ended(1, content="hi", reasoning="hm", finish="stop", model="demo-1", step_usage=Usage(output_tokens=3))
    reply = replied(1, 1, text="hi", tokens=3)
    reply = msgspec.structs.replace(reply, reasoning="hm", finish="stop", model="demo-1")
    outcome = session.when(record(over)).then(reply, wakes=())
    assert [type(effect) for effect in outcome.given.planned()] == [Steer]
    goes_on = outcome.and_when(record(steered(1, "m2", "m3")))
    assert goes_on.given.planned() == (CallModel(key="default/s1.1:2", run=1, attempt=1, step=2),)
    goes_on.and_when(record(replied(1, 2, "a"))).then(replied(1, 2, "a"))
    total = msgspec.structs.replace(over, usage=Usage(output_tokens=6))
    goes_on.and_when(record(over)).then(total)


def test_if_the_message_is_withdrawn_that_reply_was_the_answer() -> None:
    session = given(*RUNNING, steers("m2", 1), ANSWER)
    session.when(record(ended(1, content="hi"))).then(rejected("invalid_transition"))
    session.when(record(replied(1, 2, "a"))).then(rejected("invalid_transition"))
    alone = session.when(withdraw("m2")).then(withdrawn("m2"), wakes=())
    (end,) = alone.given.planned()
    assert end == End(key="default/s1.1:0:end:answered:50", run=1, attempt=1, status="completed", answer_seq=50)
    alone.and_when(record(replied(1, 2, "a"))).then(rejected("invalid_transition"))
    alone.and_when(record(ended(1, content="hi"))).then(ended(1, content="hi"))
    again = alone.and_when(post("m3")).then(steers("m3", 1))
    again.and_when(record(ended(1, content="hi"))).then(rejected("invalid_transition"))
    assert [type(effect) for effect in again.given.planned()] == [Steer]


@pytest.mark.parametrize("status", ["failed", "cancelled", "timed_out"])
def test_another_end_leaves_what_it_has_not_taken_to_the_next_run(status: Any) -> None:
    outcome = given(*STEERED, steered(1, "m2")).when(record(ended(1, status)))
    outcome.then(ended(1, status, leftover=left_over(2, "m3")), wakes=())
    (effect,) = outcome.given.planned()
    assert isinstance(effect, Start)
    assert (effect.run, effect.trigger, effect.message_ids) == (2, "leftover", ("m3",))


def test_a_spent_limit_leaves_it_over_too() -> None:
    by = spec(policy=STEER, max_steps=1)
    session = given(opened(policy=STEER), posted("m1", 1, by=by), started(1, 1, "m1"), steers("m2", 1))
    over = ended(1, content="hi", leftover=left_over(2, "m2", by=by))
    session.when(record(ended(1, content="hi"))).then(over)


def test_all_that_is_left_over_is_one_run_and_the_next_one() -> None:
    facts = (*STEERED, queued("m4", 2), ended(1, "failed", leftover=left_over(3, "m2", "m3")))
    session = given(*facts)
    assert [run.n for run in session.session.runs] == [3, 2]
    assert [run.n for run in session.session.startable] == [3]
    session.when(start(started(2, 1, "m4"))).then(rejected("invalid_transition"))
    begun = session.when(start(msgspec.structs.replace(started(3, 1, "m2", "m3"), trigger="leftover")))
    begun.and_when(record(ended(3))).and_when(start(started(2, 1, "m4"))).then(started(2, 1, "m4"))


def test_of_what_is_left_over_the_end_wakes_the_queue() -> None:
    by = AGENTS["painter"]
    facts = (opened(policy=STEER), posted("m1", 1, by=by), steers("m2", 1))
    outcome = (
        given(*facts).when(cancel(1)).then(ended(1, "cancelled", 0, leftover=left_over(2, "m2", by=by)), wakes=("gpu",))
    )
    assert outcome.decision.event.type == "run.ended"


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
def test_a_message_causes_one_run_of_its_own_at_most(status: Any) -> None:
    """When the run that takes the leftovers ends, they are settled, however it ends."""
    takes = msgspec.structs.replace(started(2, 1, "m2"), trigger="leftover")
    facts = (*RUNNING, steers("m2", 1), ended(1, "failed", leftover=left_over(2, "m2")), takes)
    given(*facts).when(record(ended(2, status))).then(ended(2, status))
    never = given(*facts[:-1]).when(record(ended(2, "failed", 0, error=failure("agent_not_found"))))
    never.then(ended(2, "failed", 0, error=failure("agent_not_found")))
    steered_again = given(*facts, steers("m3", 2)).when(record(ended(2, "failed")))
    steered_again.then(ended(2, "failed", leftover=left_over(3, "m3")))


def test_a_message_that_comes_when_the_run_has_ended_starts_the_next() -> None:
    outcome = given(*RUNNING).when(record(ended(1))).and_when(post("m2"))
    outcome.then(posted("m2", 2, by=spec(policy=STEER)), wakes=("default",))


# -- withdrawing ------------------------------------------------------------------------------------------------------


def test_what_steers_can_be_withdrawn_until_it_is_taken() -> None:
    session = given(*STEERED)
    outcome = session.when(withdraw("m2")).then(withdrawn("m2"), wakes=())
    assert run_of(outcome.given).steering == ("m3",)
    outcome.and_when(withdraw("m2")).then(NOTHING)
    taken = session.when(record(steered(1, "m2", "m3")))
    taken.and_when(withdraw("m2")).then(rejected("not_queued"))
    session.when(withdraw("m1")).then(rejected("not_queued"))


def test_a_run_whose_message_is_withdrawn_is_for_what_steers_it() -> None:
    session = given(*RUNNING[:2], steers("m2", 1), steers("m3", 1))
    outcome = session.when(withdraw("m1")).then(withdrawn("m1"), wakes=())
    (effect,) = outcome.given.planned()
    assert isinstance(effect, Start)
    assert effect.message_ids == ("m2", "m3")
    last = outcome.and_when(withdraw("m2")).then(withdrawn("m2")).and_when(withdraw("m3"))
    last.then(withdrawn("m3", 1))
    assert last.session.runs == ()


def test_what_is_left_over_can_be_withdrawn_from_the_run_that_is_to_take_it() -> None:
    session = given(*STEERED, ended(1, "failed", leftover=left_over(2, "m2", "m3")))
    one = session.when(withdraw("m2")).then(withdrawn("m2"))
    assert run_of(one.given, 2).message_ids == ("m3",)
    one.and_when(withdraw("m3")).then(withdrawn("m3", 2))


# -- interrupting -----------------------------------------------------------------------------------------------------

INTERRUPT = PolicyData(on_busy="interrupt")


def test_a_message_that_interrupts_cancels_the_run_and_is_the_next() -> None:
    by = spec(policy=INTERRUPT)
    session = given(opened(policy=INTERRUPT), *RUNNING[1:])
    outcome = session.when(post("m2", "stop")).then(queued("m2", 2, "stop", by=by, interrupts=1), wakes=("default",))
    assert run_of(outcome.given).cancel
    (end,) = outcome.given.planned()
    assert isinstance(end, End)
    assert (end.run, end.status) == (1, "cancelled")
    outcome.and_when(record(ended(1))).then(rejected("invalid_transition"))
    outcome.and_when(start(started(2, 1, "m2"))).then(rejected("invalid_transition"))
    after = outcome.and_when(record(ended(1, "cancelled", content="so far")))
    after.then(ended(1, "cancelled", content="so far"))
    after.and_when(start(started(2, 1, "m2"))).then(started(2, 1, "m2"))


@pytest.mark.parametrize("facts", [(), (started(1, 1, "m1"), released(1))], ids=["queued", "given back"])
def test_a_run_that_nobody_carries_out_is_ended_by_whoever_is_woken(facts: tuple[Fact, ...]) -> None:
    session = given(opened(policy=INTERRUPT), posted("m1", 1), *facts, queued("m2", 2, interrupts=1))
    assert session.session.startable == ()
    (end,) = session.planned(drive(WAKE, nonce="other"))
    assert isinstance(end, End)
    assert (end.run, end.attempt, end.status) == (1, len(facts) and 1, "cancelled")


def line(session: Given) -> list[int]:
    """The runs in the order of their turns."""
    return [run.n for run in session.session.runs]


def test_who_interrupts_comes_before_whatever_was_queued_already() -> None:
    by = AGENTS["painter"]
    session = given(opened(policy=INTERRUPT), *RUNNING[1:], queued("m2", 2))
    outcome = session.when(post("m3", agent="painter"))
    outcome.then(queued("m3", 3, by=spec("painter", INTERRUPT), interrupts=1), wakes=(AGENTS["default"].queue,))
    assert line(outcome.given) == [1, 3, 2]
    after = outcome.and_when(record(ended(1, "cancelled"))).then(ended(1, "cancelled"), wakes=(by.queue,))
    after.and_when(start(started(2, 1, "m2"))).then(rejected("invalid_transition"))
    begun = after.and_when(start(started(3, 1, "m3"))).then(started(3, 1, "m3"))
    begun.and_when(record(ended(3))).and_when(start(started(2, 1, "m2"))).then(started(2, 1, "m2"))


def test_of_several_that_interrupt_one_run_the_newest_comes_first() -> None:
    session = given(opened(policy=INTERRUPT), *RUNNING[1:], queued("m2", 2), queued("m3", 3, interrupts=1))
    outcome = session.when(post("m4", author="user:bob"))
    outcome.then(queued("m4", 4, by=spec(policy=INTERRUPT), author="user:bob", interrupts=1))
    assert line(outcome.given) == [1, 4, 3, 2]
    assert [run.n for run in outcome.session.runs if run.cancel] == [1], "what merely waits is not cancelled"
    after = outcome.and_when(record(ended(1, "cancelled")))
    assert [run.n for run in after.session.startable] == [4]


def test_where_no_run_holds_the_turn_the_first_in_line_is_interrupted() -> None:
    facts = (posted("m1", 1), queued("m2", 2), ended(1, "cancelled", 0), queued("m3", 3))
    outcome = given(opened(policy=INTERRUPT), *facts).when(post("m4"))
    outcome.then(queued("m4", 4, by=spec(policy=INTERRUPT), interrupts=2))
    assert line(outcome.given) == [2, 4, 3]
    again = outcome.and_when(post("m5")).then(queued("m5", 5, by=spec(policy=INTERRUPT), interrupts=2))
    assert line(again.given) == [2, 5, 4, 3]
    assert [run.n for run in again.session.runs if run.cancel] == [2]


def test_of_runs_beside_each_other_the_first_is_interrupted() -> None:
    facts = (posted("m2", 2), started(2, 1, "m2"), queued("m3", 3))
    outcome = given(opened(policy=INTERRUPT), *RUNNING[1:], *facts).when(post("m4"))
    outcome.then(queued("m4", 4, by=spec(policy=INTERRUPT), interrupts=1))
    assert line(outcome.given) == [1, 4, 2, 3]


def test_what_had_steered_the_run_that_is_interrupted_comes_behind_what_interrupts_it() -> None:
    facts = (steers("m2", 1), queued("m3", 2, by=AGENTS["painter"], interrupts=1), queued("m4", 3), steers("m5", 1))
    session = given(opened(policy=STEER), *RUNNING[1:], *facts)
    after = session.when(record(ended(1, "cancelled")))
    after.then(ended(1, "cancelled", leftover=left_over(4, "m2", "m5")), wakes=(AGENTS["painter"].queue,))
    assert line(after.given) == [2, 4, 3]
    over = after.and_when(start(started(2, 1, "m3"))).and_when(record(ended(2)))
    assert [run.n for run in over.session.startable] == [4]


def test_what_is_left_over_comes_first_where_nothing_is_left_of_what_interrupted() -> None:
    facts = (steers("m2", 1), queued("m3", 2, interrupts=1), queued("m4", 3), withdrawn("m3", 2))
    after = given(opened(policy=STEER), *RUNNING[1:], *facts).when(record(ended(1, "cancelled")))
    assert line(after.given) == [4, 3]
