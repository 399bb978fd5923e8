"""Sub-agents as the run has them that delegates: what it intends, what it waits for, what becomes of them."""

from typing import Any

import msgspec
import pytest
from tests.core.scenario import (
    NOTHING,
    Given,
    ask,
    asks,
    came_out,
    cancel,
    cancel_requested,
    child,
    deleted,
    drive,
    ended,
    erase,
    given,
    opened,
    post,
    posted,
    record,
    rejected,
    released,
    resumed,
    returned,
    spec,
    started,
    tell,
    waiting,
    with_origin,
)

from turnstream.session.events import ChildStarted, Fact, PolicyData, RunEnded, Usage, Wake
from turnstream.session.plan import (
    CallModel,
    CancelChild,
    Detach,
    DropChild,
    End,
    Entitle,
    Erase,
    Park,
    Return,
    Start,
    StartChild,
)

UNTITLED = PolicyData(titles="client")
BEGUN = (opened(), posted("m1", 1, by=spec(policy=UNTITLED)), started(1, 1, "m1"))
ASKS = (*BEGUN, asks(1, 1, a="child", b="child"))
INTENDED = (*ASKS, child(1, "a"), child(2, "b"))
PARKED = (*INTENDED, waiting(1, ask("a", 1, kind="child"), ask("b", 2, kind="child")))


def names(scene: Given, *args: Any) -> list[type]:
    return [type(effect) for effect in scene.planned(*args)]


def test_each_call_is_an_intent_first() -> None:
    planned = given(*ASKS).planned()
    assert [(type(effect), effect.call.id, effect.k) for effect in planned if isinstance(effect, StartChild)] == [
        (StartChild, "a", 1),
        (StartChild, "b", 1),
    ]
    assert names(given(*ASKS, child(1, "a"))) == [StartChild]


def test_then_the_run_parks_on_both() -> None:
    (park,) = given(*INTENDED).planned()
    assert isinstance(park, Park) and [call.id for call in park.calls] == ["a", "b"]
    given(*INTENDED).when(record(PARKED[-1])).then(PARKED[-1])


def test_it_does_not_park_on_a_child_that_was_not_started() -> None:
    given(*ASKS).when(record(PARKED[-1])).then(rejected("invalid_transition"))


@pytest.mark.parametrize(
    ("facts", "fact"),
    [
        ((*BEGUN, asks(1, 1, a=None)), child(1, "a")),
        ((*BEGUN, asks(1, 1, a="question")), child(1, "a")),
        (ASKS, child(1, "c")),
        ((*ASKS, released(1)), child(1, "a")),
        ((*ASKS, cancel_requested(1)), child(1, "a")),
    ],
    ids=["asks nothing", "asks a person", "unknown", "not running", "to end"],
)
def test_only_a_running_runs_call_that_delegates_has_a_child(facts: tuple[Fact, ...], fact: ChildStarted) -> None:
    given(*facts).when(record(fact)).then(rejected("invalid_transition"))


def test_an_older_attempt_has_no_child() -> None:
    given(*ASKS, started(1, 2)).when(record(child(1, "a"))).then(rejected("fenced"))


def test_a_run_has_ten_children_at_most() -> None:
    calls = {f"c{n}": "child" for n in range(1, 12)}
    ten = (*BEGUN, asks(1, 1, **calls), *(child(n, f"c{n}") for n in range(1, 10)))
    given(*ten).when(record(child(10, "c10"))).then(child(10, "c10"))
    given(*ten, child(10, "c10")).when(record(child(11, "c11"))).then(rejected("invalid_transition"))
    error = returned(1, "c11", status="error", error="ten at most")
    given(*ten, child(10, "c10")).when(record(error)).then(error)


def test_a_second_child_of_a_number_that_is_read_is_ignored() -> None:
    once = given(*ASKS, child(1, "a")).session
    twice = given(*ASKS, child(1, "a"), child(1, "b", by="painter")).session
    assert (twice.children, twice.runs, twice.delegated) == (once.children, once.runs, once.delegated)


def test_children_of_all_runs_and_steps_have_numbers_of_their_own() -> None:
    first = (*INTENDED, came_out(1, "a"), returned(1, "a"), came_out(2, "b"), returned(1, "b"))
    scene = given(*first, asks(1, 2, a="child"))
    (intent,) = scene.planned()
    assert isinstance(intent, StartChild) and (intent.k, intent.key) == (3, "default/s1.1:2:a:child")
    assert scene.when(record(child(3, "a"))).session.delegated == ((1, 3),)


@pytest.mark.parametrize("status", ["ok", "denied", "uncertain"])
def test_a_call_without_a_child_returns_an_error_at_most(status: Any) -> None:
    given(*ASKS).when(record(returned(1, "a", status=status))).then(rejected("invalid_transition"))
    error = returned(1, "a", status="error", error="there is no such agent")
    given(*ASKS).when(record(error)).then(error)


@pytest.mark.parametrize("status", ["ok", "error", "denied", "uncertain"])
def test_a_call_returns_when_its_child_has_ended_and_not_before(status: Any) -> None:
    fact = returned(1, "a", status=status)
    given(*INTENDED).when(record(fact)).then(rejected("invalid_transition"))
    fits = status in ("ok", "error")
    over = given(*INTENDED, came_out(1, "a"))
    over.when(record(fact)).then(fact if fits else rejected("invalid_transition"))


def test_it_does_not_end_well_before_its_children() -> None:
    given(*INTENDED).when(record(ended(1))).then(rejected("invalid_transition"))
    given(*INTENDED).when(record(ended(1, "failed"))).then(ended(1, "failed", unfinished=("a", "b")))


def test_it_parks_on_each_child_as_what_it_is() -> None:
    given(*INTENDED).when(record(waiting(1, ask("a", 1), ask("b", 2, kind="child")))).then(rejected("invalid"))
    given(*INTENDED).when(record(waiting(1, ask("a", 1, kind="child")))).then(rejected("invalid"))
    scene = given(*INTENDED, came_out(1, "a"))
    scene.when(record(PARKED[-1])).then(rejected("invalid_transition"))
    alone = waiting(1, ask("b", 1, kind="child"))
    given(*INTENDED, came_out(1, "a"), returned(1, "a")).when(record(alone)).then(alone)


def test_s37_a_runner_that_dies_behind_the_intent_is_followed_by_one_that_parks() -> None:
    """The child may be there or not: who parks opens it, and a second intent is not stored."""
    again = Wake(work=7, cause=20, delivery=2)
    (start,) = given(*INTENDED).planned(drive(again, nonce="next"))
    assert isinstance(start, Start) and start.trigger == "recovery"
    scene = given(*INTENDED, started(1, 2, wake=again))
    assert names(scene) == [Park]
    scene.when(record(child(3, "a", attempt=2))).then(rejected("invalid_transition"))
    let_go = (*BEGUN, asks(1, 1, a="child"), child(1, "a", wait=False), started(1, 2, wake=again))
    assert names(given(*let_go)) == [Detach]


def test_a47_children_are_a_new_fact_so_that_only_recoveries_in_vain_count() -> None:
    tried = (*ASKS, started(1, 2), started(1, 3))
    assert given(*tried).session.runs[0].recoveries == 2
    assert given(*tried, child(1, "a", attempt=3)).session.runs[0].recoveries == 0


def test_s39_two_drives_begin_one_child() -> None:
    first = given(*ASKS).when(record(child(1, "a")))
    first.and_when(record(child(1, "a"))).then(rejected("invalid_transition"))


def test_a_child_is_started_once_and_in_turn() -> None:
    given(*ASKS, child(1, "a")).when(record(child(2, "a"))).then(rejected("invalid_transition"))
    given(*ASKS).when(record(child(2, "a"))).then(rejected("invalid_transition"))


def test_s34_it_resumes_once_when_the_last_has_ended() -> None:
    one = (*PARKED, came_out(1, "a", output="a poem"))
    assert given(*one).planned() == ()
    scene = given(*one, came_out(2, "b", status="failed"))
    (start,) = scene.planned()
    assert isinstance(start, Start) and (start.trigger, start.message_ids) == ("answers", ())
    going_on = given(*one, came_out(2, "b", status="failed"), resumed(1, 2))
    assert [type(effect) for effect in going_on.planned()] == [Return, Return]


def test_the_last_to_end_wakes_the_parent() -> None:
    given(*PARKED).when(tell(came_out(1, "a"))).then(came_out(1, "a"), wakes=())
    scene = given(*PARKED, came_out(1, "a"))
    scene.when(tell(came_out(2, "b"))).then(came_out(2, "b"), wakes=("default",))


def test_it_is_told_once() -> None:
    given(*PARKED, came_out(1, "a")).when(tell(came_out(1, "a"))).then(NOTHING)


def test_what_a_child_used_is_the_runs_and_counts_once() -> None:
    usage = Usage(input_tokens=5, output_tokens=7)
    scene = given(*PARKED, came_out(1, "a", usage=usage), came_out(1, "a", usage=usage))
    assert scene.session.runs[0].usage == usage
    ends = scene.when(cancel(1)).decision.event.data
    assert isinstance(ends, RunEnded) and ends.usage == usage


def test_what_its_children_used_may_be_more_than_it_has() -> None:
    limited = (opened(), posted("m1", 1, by=spec(policy=UNTITLED, max_tokens=10)), *PARKED[2:])
    usage = Usage(output_tokens=11)
    scene = given(*limited, came_out(1, "a", usage=usage), came_out(2, "b"))
    (end,) = scene.planned()
    assert isinstance(end, End) and end.error and end.error.code == "budget_exceeded"


def test_an_end_that_comes_late_costs_nobody_anything() -> None:
    late = came_out(1, "a", status="cancelled", usage=Usage(output_tokens=3))
    over = given(*PARKED, ended(1, "failed"))
    over.when(tell(late)).then(msgspec.structs.replace(late, late=True), wakes=())
    session = over.when(tell(late)).session
    assert [child.k for child in session.children] == [2] and session.runs == ()


def test_it_is_told_to_nobody_if_there_is_nobody() -> None:
    given().when(tell(came_out(1, "a"))).then(rejected("not_found"))
    given(*PARKED, deleted("detach")).when(tell(came_out(1, "a"))).then(rejected("not_found"))
    given(*PARKED).when(tell(came_out(3, "a"))).then(NOTHING)
    given(*PARKED).when(tell(came_out(1, "a", 2))).then(NOTHING)


def test_a_repeat_of_the_word_is_recognised_by_its_key() -> None:
    told = with_origin(tell(came_out(1, "a")), idempotency_key="k", body_digest="b")
    given(*PARKED).when(told).then(came_out(1, "a")).and_when(told).then(NOTHING)


def test_an_end_closes_the_call_of_its_own_run() -> None:
    """Providers number calls as they like."""
    second = (posted("m2", 2, by=spec(policy=UNTITLED)), started(2, 1, "m2"), asks(2, 1, a="child"), child(1, "a", 2))
    scene = given(*PARKED, *second, came_out(1, "a", 2))
    first, other = scene.session.runs
    assert [call.closed for call in first.open_calls] == [None, None]
    assert [call.closed for call in other.open_calls] == ["returned"]
    assert [child.run for child in scene.session.children] == [1, 1]


def test_an_end_answers_no_later_call_of_the_same_id() -> None:
    detached = (*BEGUN, asks(1, 1, a="child"), child(1, "a", wait=False), returned(1, "a", output="running"))
    asked = (*detached, asks(1, 2, a="question"), waiting(1, ask("a")))
    done = came_out(1, "a", output="done")
    outcome = given(*asked).when(tell(done)).then(msgspec.structs.replace(done, late=True), wakes=())
    (run,) = outcome.session.runs
    assert (run.status, [request.call_id for request in run.requests]) == ("waiting", ["a"])
    assert outcome.session.closed.get("s1.1.q1") is None


def test_a_child_that_ends_before_the_run_parks_is_not_waited_for() -> None:
    scene = given(*INTENDED, came_out(1, "a"), came_out(2, "b"))
    assert names(scene) == [Return, Return]


def test_nobody_waits_for_a_detached_child() -> None:
    scene = given(*BEGUN, asks(1, 1, a="child"), child(1, "a", wait=False))
    (detach,) = scene.planned()
    assert isinstance(detach, Detach)
    fact = returned(1, "a", output="running")
    scene.when(record(fact)).then(fact)
    done = came_out(1, "a", output="done")
    gone_on = given(*BEGUN, asks(1, 1, a="child"), child(1, "a", wait=False), fact)
    gone_on.when(tell(done)).then(msgspec.structs.replace(done, late=True), wakes=())


def test_a_detached_child_that_has_ended_is_what_its_call_returns() -> None:
    done, late = came_out(1, "a"), came_out(1, "a", late=True)
    given(*BEGUN, asks(1, 1, a="child"), child(1, "a", wait=False)).when(tell(done)).then(late, wakes=())
    scene = given(*BEGUN, asks(1, 1, a="child"), child(1, "a", wait=False), came_out(1, "a", late=True))
    (back,) = scene.planned()
    assert isinstance(back, Return)
    scene.when(record(returned(1, "a", output="done"))).then(returned(1, "a", output="done"))


@pytest.mark.parametrize("how", ["cancelled", "failed", "timed_out"])
def test_s36_what_ends_a_run_otherwise_ends_its_children(how: Any) -> None:
    scene = given(*PARKED, ended(1, how, unfinished=("a", "b")))
    assert [(type(effect), effect.child.k) for effect in scene.planned() if isinstance(effect, CancelChild)] == [
        (CancelChild, 1),
        (CancelChild, 2),
    ]
    told = (came_out(1, "a", status="cancelled"), came_out(2, "b", status="cancelled"))
    assert given(*PARKED, ended(1, how), *told).planned() == ()


def test_s36_a_cancel_of_a_parked_run_ends_it_at_once_and_wakes_who_ends_the_children() -> None:
    assert given(*PARKED).when(cancel(1)).decision.wakes == ("default",)


def test_a_cancel_of_a_running_one_ends_its_children_too() -> None:
    scene = given(*INTENDED, cancel_requested(1))
    assert [type(effect) for effect in scene.planned()][:2] == [CancelChild, CancelChild]


def test_s36_a_message_that_interrupts_ends_the_children() -> None:
    scene = given(*INTENDED).when(post("m2", policy=PolicyData(on_busy="interrupt"))).given
    assert names(scene)[:2] == [CancelChild, CancelChild]


def test_a_run_that_ends_well_leaves_alone_whom_it_let_go() -> None:
    done = (*BEGUN, asks(1, 1, a="child"), child(1, "a", wait=False), returned(1, "a"), ended(1))
    assert given(*done).planned() == ()
    assert [child.cancel for child in given(*done).session.children] == [False]
    assert [child.cancel for child in given(*done, deleted("detach")).session.children] == [True]


def test_whoever_is_woken_looks_after_the_children() -> None:
    """No agent is needed for it: it does not wait for the runners of one queue."""
    left = given(*PARKED, ended(1, "failed"))
    for queue in ("default", "gpu", "elsewhere"):
        assert names(left, drive(queue=queue)) == [CancelChild, CancelChild]
    running = given(*PARKED, ended(1, "failed"), posted("m2", 2), started(2, 1, "m2"))
    assert names(running) == [CancelChild, CancelChild, CallModel]


def test_children_that_are_to_end_keep_no_title_from_being_found() -> None:
    titled = (opened(), posted("m0", 1), started(1, 1, "m0"), ended(1), posted("m1", 2), started(2, 1, "m1"))
    left = given(*titled, asks(2, 1, a="child"), child(1, "a", 2), ended(2, "failed"))
    assert names(left) == [CancelChild, Entitle]


def test_s59_an_erased_session_takes_its_children_with_it_before_it_goes() -> None:
    """The second was never opened, and the first had ended and been told of."""
    one = (*INTENDED, came_out(1, "a"), returned(1, "a"), deleted("erase"))
    effects = given(*one).planned()
    assert [type(effect) for effect in effects] == [CancelChild, DropChild, DropChild, Erase]
    assert [effect.session for effect in effects if isinstance(effect, DropChild)] == ["s1--1-1", "s1--1-2"]
    assert names(given(*one), drive(queue="gpu")) == [CancelChild, DropChild, DropChild]


def test_s29_a_session_that_leaves_its_runs_leaves_its_children_too() -> None:
    assert names(given(*INTENDED, deleted("detach"))) == [CancelChild, CancelChild, Erase]
    ended_before = (*INTENDED, came_out(1, "a"), came_out(2, "b"), deleted("detach"))
    assert names(given(*ended_before)) == [Erase]


def test_a_deleted_session_is_erased_once_and_its_children_forgotten() -> None:
    gone = given(*INTENDED, deleted("erase")).when(erase(7)).given
    assert gone.planned() == () and gone.session.children == () and gone.session.delegated == ()
