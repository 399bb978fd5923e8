"""The checklist that a model keeps by `update_plan`: a fact of the session, stored before the call returns."""

import msgspec
import pytest
from tests.core.scenario import (
    Given,
    acted,
    answered,
    ask,
    asks,
    began,
    cancel_requested,
    given,
    keeps,
    noted,
    opened,
    posted,
    record,
    rejected,
    released,
    replied,
    resumed,
    returned,
    started,
    waiting,
    with_origin,
)

from turnstream.session.events import UPDATE_PLAN, Fact, ModelReplied, ToolCall
from turnstream.session.plan import CallTool

BEGUN = (opened(), posted("m1", 1), started(1, 1, "m1"))
KEEPING = (*BEGUN, keeps(1, 1, "p"))
ASKS_FIRST = ModelReplied(
    run=1, attempt=1, step=1, tool_calls=(ToolCall(id="p", name=UPDATE_PLAN, arguments="{}", asks="approval"),)
)
ITEMS = noted(1, "p", "look around", "paint")


def test_it_is_stored_before_its_call_returns() -> None:
    (call,) = given(*KEEPING).planned()
    assert isinstance(call, CallTool) and call.call.name == UPDATE_PLAN
    outcome = given(*KEEPING).when(record(ITEMS)).then(ITEMS, wakes=())
    (again,) = outcome.given.planned()
    assert isinstance(again, CallTool), "the call has no result yet"
    outcome.and_when(record(returned(1, "p", output="noted"))).then(returned(1, "p", output="noted"))


@pytest.mark.parametrize(
    "facts",
    [
        BEGUN,
        (*BEGUN, replied(1, 1, "p")),
        (*BEGUN, asks(1, 1, p="approval")),
        (*BEGUN, ASKS_FIRST),
        (*KEEPING, returned(1, "p")),
        (*KEEPING, released(1)),
        (*KEEPING, cancel_requested(1)),
    ],
    ids=["no call", "another tool", "one that asks", "a person is asked first", "returned", "given back", "to end"],
)
def test_it_changes_by_a_running_runs_call_alone(facts: tuple[Fact, ...]) -> None:
    given(*facts).when(record(ITEMS)).then(rejected("invalid_transition", run="s1.1"))


def test_it_changes_once_a_person_has_agreed() -> None:
    asked = (*BEGUN, ASKS_FIRST, waiting(1, ask("p", kind="approval")), answered(1, approved=True), resumed(1, 2))
    again = noted(1, "p", "look around", attempt=2)
    given(*asked).when(record(again)).then(again)


def test_an_older_attempt_does_not_change_it() -> None:
    given(*KEEPING, started(1, 2)).when(record(ITEMS)).then(rejected("fenced"))


def test_who_takes_the_run_over_stores_it_again() -> None:
    again = noted(1, "p", "look around", "paint", attempt=2)
    scene = given(*KEEPING, ITEMS, started(1, 2))
    assert [type(effect) for effect in scene.planned()] == [CallTool]
    scene.when(record(again)).then(again)
    assert scene.when(record(again)).session.runs[0].recoveries == 1, "what is done again is no new fact"


def test_the_session_knows_where_it_is_and_not_what_it_says() -> None:
    scene = given(*KEEPING)
    assert scene.session.plan_seq == 0
    session = given(*KEEPING, ITEMS).session
    assert session.plan_seq == session.seq and "paint" not in repr(session)
    later = given(*KEEPING, ITEMS, noted(1, "p")).session
    assert later.plan_seq == later.seq


def test_it_belongs_to_its_turn() -> None:
    def size(scene: Given) -> int:
        return scene.session.runs[0].size

    assert size(given(*KEEPING, ITEMS)) == size(given(*KEEPING)) + 100


def test_a_person_may_keep_it() -> None:
    call = ToolCall(id="action", name=UPDATE_PLAN, arguments="{}")
    does = msgspec.structs.replace(acted(1), action=call)
    fact = noted(1, "action", "look around")
    given(opened(), does, began(1)).when(record(fact)).then(fact)


def test_a_repeat_is_guarded_like_everything() -> None:
    given(*KEEPING).when(with_origin(record(ITEMS), expected_seq=3)).then(rejected("session_moved"))
