"""Sub-agents, from both sides: the run that delegates, and the session that it is delegated to."""

from typing import Any

import msgspec
import pytest
from tests.core.scenario import (
    AGENTS,
    NOTHING,
    Given,
    answered,
    ask,
    asks,
    cancel,
    cancel_requested,
    ended,
    given,
    opened,
    origin,
    post,
    posted,
    record,
    rejected,
    resumed,
    returned,
    spec,
    started,
    waiting,
)

from turnstream.session.commands import EndChild, ReportRun
from turnstream.session.events import (
    ChildEnded,
    ChildStarted,
    Fact,
    Opens,
    Parent,
    PolicyData,
    RunReported,
    Usage,
)
from turnstream.session.plan import CancelChild, Detach, Park, Return, Start, StartChild, TellParent

POET = AGENTS["poet"]


def child(k: int, call: str, run: int = 1, *, wait: bool = True, attempt: int = 1) -> ChildStarted:
    return ChildStarted(
        run=run, attempt=attempt, call_id=call, k=k, child_session=f"s1--{run}-{k}", wait=wait, spec=POET
    )


def came_out(k: int, call: str, run: int = 1, status: Any = "completed", **fields: Any) -> ChildEnded:
    return ChildEnded(run=run, call_id=call, k=k, status=status, **fields)


def tell(ended: ChildEnded) -> EndChild:
    return EndChild(origin=origin("tell"), ended=ended)


UNTITLED = PolicyData(titles="client")
ASKS = (opened(), posted("m1", 1, by=spec(policy=UNTITLED)), started(1, 1, "m1"), asks(1, 1, a="child", b="child"))
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


def test_what_a_child_used_is_the_runs() -> None:
    usage = Usage(input_tokens=5, output_tokens=7)
    assert given(*PARKED, came_out(1, "a", usage=usage)).session.runs[0].usage == usage


def test_a_child_that_ends_before_the_run_parks_is_not_waited_for() -> None:
    scene = given(*INTENDED, came_out(1, "a"), came_out(2, "b"))
    assert names(scene) == [Return, Return]


def test_a_parked_run_does_not_hold_the_turn() -> None:
    scene = given(*PARKED)
    assert scene.session.holder is None and scene.session.live == ()


@pytest.mark.parametrize(("parked", "routed"), [("interleave", "started"), ("queue", "queued"), ("reject", None)])
def test_s35_a_message_to_a_parked_session(parked: Any, routed: str | None) -> None:
    policy = msgspec.convert({"on_message": {"parked": parked}}, PolicyData)
    scene = given(opened(policy=policy), posted("m1", 1, by=spec(policy=policy)), *PARKED[2:])
    if routed is None:
        scene.when(post("m2")).then(rejected("run_active"))
        return
    session = scene.when(post("m2")).session
    assert session.runs[1].n == 2
    assert [run.n for run in session.startable] == ([2] if routed == "started" else [])


INTERLEAVED = msgspec.convert({"on_message": {"parked": "interleave"}}, PolicyData)


def interleaved(*facts: Fact) -> Given:
    """A parked run, and a second one that has begun meanwhile."""
    whole = (opened(policy=INTERLEAVED), posted("m1", 1, by=spec(policy=INTERLEAVED)), *PARKED[2:])
    second = (posted("m2", 2, by=spec(policy=INTERLEAVED)), started(2, 1, "m2"))
    return given(*whole, *second, *facts)


def test_s35_the_resume_follows_the_turn_that_has_begun() -> None:
    scene = interleaved(came_out(1, "a"), came_out(2, "b"))
    assert [run.n for run in scene.session.startable] == []
    after = interleaved(came_out(1, "a"), came_out(2, "b"), ended(2))
    assert [run.n for run in after.session.startable] == [1]


def test_a_run_that_resumes_goes_before_one_that_never_started() -> None:
    whole = (opened(policy=INTERLEAVED), posted("m1", 1, by=spec(policy=INTERLEAVED)), *PARKED[2:])
    scene = given(*whole, came_out(1, "a"), posted("m2", 2, by=spec(policy=INTERLEAVED)), came_out(2, "b"))
    assert [run.n for run in scene.session.startable] == [1]


def test_beside_a_question_it_holds_the_turn_until_that_is_answered() -> None:
    mixed = (*ASKS[:3], asks(1, 1, a="child", q="question"), child(1, "a"))
    scene = given(*mixed, waiting(1, ask("a", 1, kind="child"), ask("q", 2)))
    assert scene.session.holder is not None
    assert given(*mixed, waiting(1, ask("a", 1, kind="child"), ask("q", 2)), answered(1, 2, "x")).session.holder is None


def test_nobody_waits_for_a_detached_child() -> None:
    scene = given(*ASKS[:3], asks(1, 1, a="child"), child(1, "a", wait=False))
    (detach,) = scene.planned()
    assert isinstance(detach, Detach)
    fact = returned(1, "a", output="running")
    scene.when(record(fact)).then(fact)
    done = came_out(1, "a", output="done")
    gone_on = given(*ASKS[:3], asks(1, 1, a="child"), child(1, "a", wait=False), fact)
    gone_on.when(tell(done)).then(msgspec.structs.replace(done, late=True))


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


# -- the child ------------------------------------------------------------------------------------------------------

PARENT = Parent(session="s0", run=3, call_id="a", k=1)
BRIEF = posted("brief", 1, opens=Opens(parent=PARENT))


def test_a_child_tells_its_parent_when_its_run_has_ended() -> None:
    assert given(BRIEF).session.parent == PARENT
    scene = given(BRIEF, started(1, 1, "brief"), ended(1))
    (effect,) = scene.planned()
    assert isinstance(effect, TellParent) and effect.parent == PARENT
    report = ReportRun(origin=origin("report"), run=1, told=True)
    scene.when(report).then(RunReported(run=1, told=True))
    done = given(BRIEF, started(1, 1, "brief"), ended(1), RunReported(run=1))
    assert done.planned() == ()
    done.when(report).then(NOTHING)


def test_a_later_turn_of_a_child_is_nobodys_business() -> None:
    told = (BRIEF, started(1, 1, "brief"), ended(1), RunReported(run=1))
    assert given(*told, posted("m2", 2), started(2, 1, "m2"), ended(2)).planned() == ()


def test_a_child_that_is_cancelled_before_it_starts_tells_its_parent() -> None:
    assert given(BRIEF).when(cancel(1)).decision.wakes == ("default",)


def test_a_child_starts_whoever_may_start_turns_of_other_sessions() -> None:
    people = spec(policy=PolicyData(starters="people"))
    opens = Opens(agent="default", parent=Parent(session="s0", run=1, call_id="a", k=1))
    by_agent = post("brief", author="agent:boss", specs={"default": people}, opens=opens)
    routed = given().when(by_agent).decision.event.data  # pyright: ignore
    assert routed.routed == "started"
