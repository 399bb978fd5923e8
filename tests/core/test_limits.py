"""What a run may use, and how it ends when it has used it up."""

from typing import Any

import msgspec
import pytest
from tests.core.scenario import (
    Given,
    answered,
    ask,
    asks,
    ended,
    given,
    notice,
    opened,
    post,
    posted,
    queued,
    record,
    rejected,
    replied,
    resumed,
    returned,
    spec,
    started,
    steered,
    steers,
    waiting,
    withdraw,
    withdrawn,
)

from turnstream.session.events import Error, Fact, Limits, ModelReplied, PolicyData, ToolCall, Usage
from turnstream.session.limits import spent
from turnstream.session.plan import End
from turnstream.session.routing import ANSWERS_MAX, WAITING_MAX
from turnstream.session.state import REMEMBERED, call_digest


def limited(*facts: Fact, **limits: Any) -> Given:
    return given(opened(), posted("m1", 1, by=spec(**limits)), started(1, 1, "m1"), *facts)


def error_of(session: Given) -> Error | None:
    return spent(session.session.runs[0])


def says(step: int, *calls: tuple[str, str], attempt: int = 1, **fields: Any) -> ModelReplied:
    """A reply that calls tools: their names and arguments."""
    asked = tuple(ToolCall(id=f"c{n}", name=name, arguments=text) for n, (name, text) in enumerate(calls))
    return ModelReplied(run=1, attempt=attempt, step=step, tool_calls=asked, **fields)


def test_the_limits_of_an_agent_that_says_nothing() -> None:
    assert msgspec.structs.asdict(Limits()) == {
        "max_steps": 32,
        "max_model_calls": 32,
        "max_tool_calls": 64,
        "max_tokens": None,
        "timeout": 600_000,
        "max_cost": None,
        "max_same_calls": 5,
        "max_same_denials": 3,
    }


STEP = (replied(1, 1, "a", tokens=10), returned(1, "a"))


@pytest.mark.parametrize(
    ("limits", "facts", "code"),
    [
        ({"max_steps": 1}, STEP, "max_steps_exceeded"),
        ({"max_steps": 2}, STEP, None),
        ({"max_model_calls": 1}, STEP, "budget_exceeded"),
        ({"max_model_calls": 2}, STEP, None),
        ({"max_tool_calls": 1}, (replied(1, 1, "a", "b"),), "budget_exceeded"),
        ({"max_tool_calls": 2}, (replied(1, 1, "a", "b"),), None),
        ({"max_tokens": 9}, STEP, "budget_exceeded"),
        ({"max_tokens": 10}, STEP, None),
        ({"max_cost": 5}, (says(1, ("t", ""), usage=Usage(cost=6)),), "budget_exceeded"),
        ({"max_cost": 5}, (says(1, ("t", ""), usage=Usage(cost=5)),), None),
    ],
)
def test_a_limit_is_spent_when_it_is_exceeded(
    limits: dict[str, int], facts: tuple[Fact, ...], code: str | None
) -> None:
    session = limited(*facts, **limits)
    error = error_of(session)
    assert (error.code if error else None) == code
    ends = [effect for effect in session.planned() if isinstance(effect, End)]
    assert [(end.status, end.error) for end in ends] == ([("failed", error)] if code else [])


def test_nothing_is_spent_before_the_first_step() -> None:
    assert error_of(limited(max_steps=0, max_model_calls=0)) is None


def test_costs_add_up() -> None:
    facts = (says(1, ("t", "1"), usage=Usage(cost=3)), returned(1, "c0"), says(2, ("t", "2"), usage=Usage(cost=3)))
    assert error_of(limited(*facts, max_cost=6)) is None
    error = error_of(limited(*facts, max_cost=5))
    assert error == Error(code="budget_exceeded", message="it cost more than 5e-06")


def test_a_loop_is_five_identical_calls() -> None:
    facts: list[Fact] = []
    for step in range(1, 5):
        facts += [says(step, ("t", '{"a":1,"b":2}')), returned(1, "c0")]
    assert error_of(limited(*facts)) is None
    fifth = limited(*facts, says(5, ("t", '{ "b": 2, "a": 1 }')))
    error = error_of(fifth)
    assert error == Error(code="tool_loop_detected", message="the same call with the same arguments 5 times"), (
        "the order and spacing of arguments are nothing"
    )
    (end,) = fifth.planned()
    assert isinstance(end, End)
    fifth.when(record(ended(1, "failed", error=error))).then(ended(1, "failed", error=error, unfinished=("c0",)))
    assert error_of(limited(*facts, says(5, ("t", '{"a":1,"b":3}')))) is None
    assert error_of(limited(*facts, says(5, ("u", '{"a":1,"b":2}')))) is None
    assert error_of(limited(*facts, max_same_calls=4)) is not None


def test_calls_that_differ_in_between_count_all_the_same() -> None:
    facts: list[Fact] = []
    for step in range(1, 10):
        facts += [says(step, ("t", str(step % 2))), returned(1, "c0")]
    error = error_of(limited(*facts))
    assert error is not None
    assert error.code == "tool_loop_detected"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("{}", "", True),
        ("{}", " { } ", True),
        ('{"a":[1,2]}', '{"a":[2,1]}', False),
        ("not json", "not json", True),
        ("not json", "not  json", False),
        ('{"a":1}', '{"a":"1"}', False),
    ],
)
def test_what_makes_two_calls_the_same(one: str, other: str, same: bool) -> None:
    first, second = (call_digest(ToolCall(id=text, name="t", arguments=text)) for text in (one, other))
    assert (first == second) is same
    assert call_digest(ToolCall(id="x", name="u", arguments=one)) != first


def denials(count: int) -> list[Fact]:
    facts: list[Fact] = []
    for n in range(1, count + 1):
        facts += [
            asks(1, n, n, b="approval"),
            waiting(1, ask("b", n, kind="approval"), attempt=n),
            answered(1, n, approved=False),
            resumed(1, n + 1),
            returned(1, "b", n + 1, "denied"),
        ]
    return facts


def test_a_denial_is_a_result_and_the_run_goes_on_until_the_third_of_the_same_call() -> None:
    assert error_of(limited(*denials(2))) is None
    error = error_of(limited(*denials(3)))
    assert error == Error(code="repeated_denial", message="the same call was denied 3 times")
    assert error_of(limited(*denials(1), max_same_denials=1)) is not None


def test_a_spent_run_that_waits_ends_when_it_goes_on() -> None:
    asked, waits = asks(1, 1, b="approval"), waiting(1, ask("b", kind="approval"))
    assert [type(effect) for effect in limited(asked, max_steps=1).planned()] == [End], "nobody is asked for nothing"
    assert limited(asked, waits, max_steps=1).planned() == ()
    goes_on = limited(asked, waits, answered(1, approved=True), max_steps=1)
    assert [type(effect) for effect in goes_on.planned()] == [End]


def test_an_answer_is_no_step_too_many() -> None:
    """A reply that turned out to be the last ends the run as completed, whatever it has used."""
    session = limited(steers("m2", 1), replied(1, 1, text="hi"), max_steps=9)
    answered_run = msgspec.structs.replace(session.session.runs[0], steering=(), spec=spec(max_steps=1))
    waits = Given(msgspec.structs.replace(session.session, runs=(answered_run,)))
    (end,) = waits.planned()
    assert isinstance(end, End)
    assert end.status == "completed"


def test_so_many_messages_may_wait_and_no_more() -> None:
    """Whatever they wait for; one that is taken makes room."""
    policy = PolicyData(on_busy="steer")
    busy = (opened(policy=policy), posted("m1", 1, by=spec(policy=policy)), started(1, 1, "m1"))
    full = (*busy, *(steers(f"s{n}", 1) for n in range(WAITING_MAX)))
    assert given(*full).session.waiting == WAITING_MAX
    for on_busy in ("steer", "queue", "interrupt", "parallel"):
        command = post("late", policy=PolicyData(on_busy=on_busy))
        given(*full).when(command).then(rejected("run_active", run="s1.1"))
    assert given(*full, steered(1, "s0")).when(post("late")).decision


def test_a_message_that_waits_is_known_however_many_came_after_it() -> None:
    queue = PolicyData(on_busy="queue")
    facts = (opened(policy=queue), posted("m1", 1), started(1, 1, "m1"), queued("first", 2))
    later = tuple(notice(f"n{n}") for n in range(2 * REMEMBERED))
    scene = given(*facts, *later)
    assert scene.session.messages.get("first") is None, "it is forgotten"
    scene.when(post("first")).then(rejected("already_exists"))
    scene.when(withdraw("first")).then(withdrawn("first", 2))


def test_one_message_does_not_answer_more_than_fits_an_event() -> None:
    questions = {f"q{n}": "question" for n in range(20)}
    facts = (opened(), posted("m1", 1), started(1, 1, "m1"), asks(1, 1, **questions))
    waits = waiting(1, *(ask(f"q{n}", n + 1) for n in range(20)))
    scene = given(*facts, waits)
    scene.when(post("m2", "x" * (ANSWERS_MAX // 20 + 1))).then(rejected("invalid", field="content"))
    assert scene.when(post("m2", "x" * (ANSWERS_MAX // 20 - 2))).decision


def test_arguments_of_many_levels_are_told_apart_as_they_are_written() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    one, other = (ToolCall(id="a", name="look", arguments=text) for text in (deep, " " + deep))
    assert call_digest(one) != call_digest(other)
    flat = (ToolCall(id="a", name="look", arguments=text) for text in ('{"a":1,"b":2}', '{ "b": 2, "a": 1 }'))
    assert len({call_digest(call) for call in flat}) == 1
