"""How a run ends that does not end by itself: cancelled, its client or its runner gone; and a turn tried again."""

from typing import Any

import msgspec
import pytest
from tests.core.scenario import (
    AGENTS,
    ANN,
    NOTHING,
    Given,
    answered,
    ask,
    asks,
    cancel,
    cancel_requested,
    drive,
    ended,
    failure,
    given,
    left_over,
    notice,
    opened,
    post,
    posted,
    queued,
    record,
    rejected,
    released,
    replied,
    requested,
    retry,
    returned,
    spec,
    start,
    started,
    steered,
    steers,
    waiting,
    with_origin,
    withdraw,
    withdrawn,
)

from turnstream.session.events import Fact, PolicyData, RunCancelRequested, Wake
from turnstream.session.plan import CallModel, End, Start

REDELIVERED = Wake(work=7, cause=20, delivery=2)
OTHER_WAKE = Wake(work=8, cause=50, delivery=1)
NEXT = drive(REDELIVERED, nonce="next")
QUEUED = (opened(), posted("m1", 1))
RUNNING = (*QUEUED, started(1, 1, "m1"))
QUESTION = (*RUNNING, asks(1, 1, a="question"), waiting(1, ask("a")))
GONE = failure("client_disconnected", "client disconnected mid-stream")


def with_policy(policy: PolicyData, *facts: Fact, durable: bool = False) -> Given:
    """A run, queued under this policy, and what came after."""
    return given(opened(policy=policy), posted("m1", 1, by=spec(policy=policy, durable=durable)), *facts)


# -- cancelling, in every state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "end"),
    [
        (QUEUED, ended(1, "cancelled", 0)),
        ((*QUEUED, steers("m2", 1)), ended(1, "cancelled", 0, leftover=left_over(2, "m2"))),
        ((*RUNNING, released(1)), ended(1, "cancelled", model="demo")),
        ((*RUNNING, replied(1, 1, "a"), released(1)), ended(1, "cancelled", model="demo", unfinished=("a",))),
        (QUESTION, ended(1, "cancelled", model="demo", unfinished=("a",))),
        ((*QUESTION, answered(1)), ended(1, "cancelled", model="demo", unfinished=("a",))),
    ],
    ids=["queued", "queued and steered", "given back", "given back with a call", "waiting", "answered"],
)
def test_s16_a_run_that_nobody_carries_out_is_cancelled_at_once(facts: tuple[Fact, ...], end: Fact) -> None:
    outcome = given(*facts).when(cancel(1)).then(end)
    outcome.and_when(cancel(1)).then(NOTHING)
    outcome.and_when(record(ended(1, "failed", attempt=1))).then(rejected("invalid_transition"))


@pytest.mark.parametrize("facts", [RUNNING, (*RUNNING, replied(1, 1, "a")), (*RUNNING, steers("m2", 1))])
def test_s16_a_run_that_is_carried_out_is_asked_to_end(facts: tuple[Fact, ...]) -> None:
    outcome = given(*facts).when(cancel(1, "enough"))
    outcome.then(RunCancelRequested(run=1, by=ANN, reason="enough"), wakes=("default",))
    outcome.and_when(cancel(1)).then(NOTHING)
    outcome.and_when(cancel(1, disconnected=True)).then(NOTHING)
    (end,) = outcome.given.planned()
    assert isinstance(end, End)
    assert (end.status, end.error) == ("cancelled", None)


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled", "timed_out"])
def test_s16_a_cancel_of_a_run_that_has_ended_changes_nothing(status: Any) -> None:
    given(*RUNNING, ended(1, status)).when(cancel(1)).then(NOTHING)
    given(*RUNNING, ended(1, status)).when(cancel(1, disconnected=True)).then(NOTHING)


def test_a_run_that_is_being_cancelled_and_is_given_back_is_ended_by_anybody() -> None:
    session = given(*RUNNING, cancel_requested(1), released(1))
    (end,) = session.planned(NEXT)
    assert isinstance(end, End)
    session.when(start(started(1, 2, wake=REDELIVERED))).then(rejected("invalid_transition"))
    session.when(record(ended(1, "cancelled"))).then(ended(1, "cancelled"))


# -- the client is gone -----------------------------------------------------------------------------------------------

DETACH, FAIL = PolicyData(on_disconnect="detach"), PolicyData(on_disconnect="fail")


@pytest.mark.parametrize("preset", ["strict", "thread", "workspace", "memory"])
def test_s24_a_client_that_goes_away_preset_by_preset(preset: Any) -> None:
    policy = PolicyData(preset=preset)
    outcome = with_policy(policy, started(1, 1, "m1")).when(cancel(1, disconnected=True))
    if preset != "memory":
        outcome.then(NOTHING)
        return
    outcome.then(RunCancelRequested(run=1, by=ANN, error="client_disconnected"), wakes=("default",))


def test_s24_a_run_fails_whose_client_went_away() -> None:
    outcome = with_policy(FAIL, started(1, 1, "m1"), replied(1, 1, "a")).when(cancel(1, disconnected=True))
    (end,) = outcome.given.planned()
    assert isinstance(end, End)
    assert (end.status, end.error) == ("failed", GONE)
    for other in (
        ended(1),
        ended(1, "cancelled"),
        ended(1, "failed"),
        ended(1, "failed", error=failure("model_error")),
    ):
        outcome.and_when(record(other)).then(rejected("invalid_transition"))
    outcome.and_when(record(ended(1, "failed", error=GONE))).then(ended(1, "failed", error=GONE, unfinished=("a",)))
    outcome.and_when(cancel(1)).then(NOTHING)
    (by_other,) = outcome.given.planned(NEXT)
    assert isinstance(by_other, End)
    assert by_other.attempt == 1, "no new attempt is begun to end it"


def test_s24_one_that_nobody_carries_out_fails_at_once() -> None:
    with_policy(FAIL).when(cancel(1, disconnected=True)).then(ended(1, "failed", 0, error=GONE))
    released_ = with_policy(FAIL, started(1, 1, "m1"), released(1))
    released_.when(cancel(1, disconnected=True)).then(ended(1, "failed", error=GONE, model="demo"))


def test_a_run_that_waits_for_a_person_waits_for_whoever_comes_back() -> None:
    waits = with_policy(FAIL, started(1, 1, "m1"), asks(1, 1, a="question"), waiting(1, ask("a")))
    waits.when(cancel(1, disconnected=True)).then(NOTHING)
    waits.when(cancel(1)).then(ended(1, "cancelled", model="demo", unfinished=("a",)))


def test_what_the_policy_was_when_the_run_was_requested_counts() -> None:
    session = given(opened(policy=FAIL), posted("m1", 1, by=spec(policy=DETACH)), started(1, 1, "m1"))
    session.when(cancel(1, disconnected=True)).then(NOTHING)


# -- the runner is gone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "durable", "resumes"),
    [
        (PolicyData(), False, True),
        (PolicyData(recovery="resume"), False, True),
        (PolicyData(recovery="fail"), False, False),
        (PolicyData(recovery="fail"), True, False),
        (PolicyData(recovery="durable"), False, False),
        (PolicyData(recovery="durable"), True, True),
        (PolicyData(preset="strict"), False, True),
        (PolicyData(preset="memory"), False, False),
        (PolicyData(preset="memory"), True, True),
        (PolicyData(preset="thread"), True, False),
        (PolicyData(preset="workspace"), False, True),
    ],
)
def test_s18_what_becomes_of_a_run_whose_runner_stopped(policy: PolicyData, durable: bool, resumes: bool) -> None:
    session = with_policy(policy, started(1, 1, "m1"), replied(1, 1, "a"), durable=durable)
    (effect,) = session.planned(NEXT)
    again = start(started(1, 2, wake=REDELIVERED), nonce="next")
    if resumes:
        assert isinstance(effect, Start)
        session.when(again).then(again.started)
        return
    assert isinstance(effect, End)
    why = "interrupted: the runner stopped while the run was in flight"
    assert effect.error == msgspec.structs.replace(failure("interrupted", why), retryable=True)
    assert effect.attempt == 1
    session.when(again).then(rejected("invalid_transition"))
    over = ended(1, "failed", error=effect.error, unfinished=("a",))
    said = ended(1, "failed", error=effect.error)
    session.when(record(said, taking=REDELIVERED)).then(over)
    session.when(record(said)).then(rejected("invalid_transition"))
    session.when(record(said, taking=OTHER_WAKE)).then(rejected("fenced"))


def test_s18_a_run_that_goes_on_by_itself_is_not_ended_as_interrupted() -> None:
    said = record(ended(1, "failed", error=failure("interrupted")), taking=REDELIVERED)
    given(*RUNNING).when(said).then(rejected("invalid_transition"))
    fails = PolicyData(recovery="fail")
    with_policy(fails, started(1, 1, "m1"), released(1)).when(said).then(rejected("invalid_transition"))


def test_a_runner_that_gives_its_run_back_has_not_stopped() -> None:
    session = with_policy(PolicyData(recovery="fail"), started(1, 1, "m1"), released(1))
    (effect,) = session.planned(NEXT)
    assert isinstance(effect, Start)
    assert effect.trigger == "handover"


def test_s18_the_messages_of_an_interrupted_run_stay_taken() -> None:
    session = with_policy(
        PolicyData(recovery="fail", on_busy="steer"), started(1, 1, "m1"), steers("m2", 1), steered(1, "m2")
    )
    over = session.when(record(ended(1, "failed", error=failure("interrupted")), taking=REDELIVERED))
    over.then(ended(1, "failed", error=failure("interrupted")))
    over.and_when(withdraw("m1")).then(rejected("not_queued"))
    over.and_when(withdraw("m2")).then(rejected("not_queued"))


# -- trying again -----------------------------------------------------------------------------------------------------

FAILED = (*RUNNING, ended(1, "failed", error=failure("model_error")))


@pytest.mark.parametrize("status", ["failed", "timed_out"])
def test_s27_a_turn_that_failed_is_tried_again_with_the_same_messages(status: Any) -> None:
    session = given(*RUNNING, steers("m2", 1), steered(1, "m2"), ended(1, status))
    outcome = session.when(retry()).then(requested(2, "m1", "m2", retry_of=1), wakes=("default",))
    (effect,) = outcome.given.planned()
    assert isinstance(effect, Start)
    assert (effect.run, effect.trigger, effect.message_ids) == (2, "retry", ("m1", "m2"))
    begun = outcome.and_when(start(msgspec.structs.replace(started(2, 1, "m1", "m2"), trigger="retry")))
    assert begun.given.planned() == (CallModel(key="default/s1.2:1", run=2, attempt=1, step=1),)


def test_s27_a_retry_that_fails_can_be_tried_again() -> None:
    again = msgspec.structs.replace(started(2, 1, "m1"), trigger="retry")
    session = given(*FAILED, requested(2, "m1", retry_of=1), again, ended(2, "failed"))
    session.when(retry()).then(requested(3, "m1", retry_of=2))


def test_s28_nothing_is_tried_again_where_nothing_failed() -> None:
    for facts in ((opened(),), (*RUNNING, ended(1)), (*RUNNING, ended(1, "cancelled")), (*QUEUED, withdrawn("m1", 1))):
        given(*facts).when(retry()).then(rejected("nothing_to_retry"))
    later = given(*FAILED, posted("m2", 2), started(2, 1, "m2"), ended(2))
    later.when(retry()).then(rejected("nothing_to_retry"))
    given().when(retry()).then(rejected("not_found"))


@pytest.mark.parametrize("live", [(posted("m2", 2),), (posted("m2", 2), started(2, 1, "m2"))])
def test_s28_nothing_is_tried_again_while_a_run_is_live(live: tuple[Fact, ...]) -> None:
    given(*FAILED, *live).when(retry()).then(rejected("run_active", run="s1.2"))
    given(*QUESTION).when(retry()).then(rejected("run_active", run="s1.1"))


def test_what_is_left_over_goes_before_trying_again() -> None:
    session = given(*RUNNING, steers("m2", 1), ended(1, "failed", leftover=left_over(2, "m2")))
    session.when(retry()).then(rejected("run_active", run="s1.2"))


def test_a_turn_that_failed_before_it_started_is_tried_again_too() -> None:
    session = given(*QUEUED, ended(1, "failed", 0, error=failure("agent_not_found")))
    session.when(retry()).then(requested(2, "m1", retry_of=1))


def test_a_retry_is_carried_out_by_what_the_agent_is_now() -> None:
    """With the same definition everything stays as it was for that turn, its model too."""
    big = msgspec.structs.replace(spec(), model="big")
    same = given(opened(), posted("m1", 1, by=big), started(1, 1, "m1"), ended(1, "failed"))
    same.when(retry()).then(requested(2, "m1", retry_of=1, by=big))
    old = msgspec.structs.replace(big, digest="d0", version="v0")
    other = given(opened(), posted("m1", 1, by=old), started(1, 1, "m1"), ended(1, "failed"))
    other.when(retry()).then(requested(2, "m1", retry_of=1))
    gone = msgspec.structs.replace(retry(), specs={"poet": AGENTS["poet"]})
    same.when(gone).then(rejected("agent_not_found", field="agent"))


def test_a_retry_keeps_the_version_that_the_session_names() -> None:
    old = msgspec.structs.replace(spec(), digest="d0", version="v0")
    specs = {**AGENTS, "default@v0": old}
    turn = (posted("m1", 1, by=old), started(1, 1, "m1"), ended(1, "failed"))
    command = msgspec.structs.replace(retry(), specs=specs)
    given(opened(agent="default@v0"), *turn).when(command).then(requested(2, "m1", retry_of=1, by=old))
    given(opened(agent="default"), *turn).when(command).then(requested(2, "m1", retry_of=1))
    given(opened(agent="default@v9"), *turn).when(command).then(requested(2, "m1", retry_of=1))
    given(opened(agent="default@v0"), *turn).when(retry()).then(rejected("agent_not_found", field="agent"))


def test_a_retry_takes_the_policy_of_the_session() -> None:
    wall = PolicyData(clock="wall")
    session = given(opened(policy=wall), *FAILED[1:])
    session.when(retry()).then(requested(2, "m1", retry_of=1, by=spec(policy=wall)))


def test_messages_of_a_retry_were_taken_and_cannot_be_withdrawn() -> None:
    session = given(*FAILED, requested(2, "m1", retry_of=1))
    session.when(withdraw("m1")).then(rejected("not_queued", run="s1.1"))
    session.when(cancel(2)).then(ended(2, "cancelled", 0))


def test_a_retry_under_a_key_has_one_effect() -> None:
    keyed = with_origin(retry(), idempotency_key="k", body_digest="b")
    first = given(*FAILED).when(keyed)
    first.and_when(with_origin(keyed, id="again")).then(NOTHING)
    receipt = first.session.receipt("k")
    assert receipt is not None
    assert receipt.run == 2


def test_a_retry_is_steered_and_queued_behind_as_any_run() -> None:
    steer = PolicyData(on_busy="steer")
    session = given(opened(policy=steer), *FAILED[1:], requested(2, "m1", retry_of=1))
    session.when(post("m2")).then(steers("m2", 2))
    session.when(post("m2", policy=PolicyData(on_busy="queue"))).then(queued("m2", 3, by=spec(policy=steer)))
    session.when(post("n1", "by the way", kind="notice")).then(notice("n1"))
    returned_early = record(returned(2, "a"))
    session.when(returned_early).then(rejected("fenced"))
