"""Which messages a run carries: `run.started` names those that it takes, `run.steered` those that come later.

So a reader finds the turn of a message with one look, and what nothing names steered no one and starts none.
"""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from tests.core.scenario import (
    answer,
    answers,
    ask,
    asks,
    ended,
    given,
    handover,
    left_over,
    notice,
    opened,
    passed_over,
    post,
    posted,
    queued,
    record,
    rejected,
    released,
    requested,
    resumed,
    retry,
    returned,
    start,
    started,
    steered,
    steers,
    waiting,
    withdraw,
    withdrawn,
)
from tests.core.test_properties import FAIR, POLICIES, Act, play, stories

from turnstream.session.events import Fact, PolicyData, RunRequested, RunStarted, RunSteered

RUNNING = (opened(), posted("m1", 1), started(1, 1, "m1"))
WAITING = (*RUNNING, asks(1, 1, a="question"), waiting(1, ask("a")))


def turns_of(facts: Sequence[Fact], message: str) -> list[int]:
    """The runs whose turns carry a message, as a reader of the log finds them who knows nothing else."""
    return [fact.run for fact in facts if isinstance(fact, RunStarted | RunSteered) and message in fact.message_ids]


def test_s53_a_new_run_names_the_message_that_starts_it() -> None:
    begun = given(opened()).when(post("m1")).and_when(start(started(1, 1, "m1"))).then(started(1, 1, "m1"))
    assert begun.session.runs[0].message_ids == ("m1",)


def test_s53_messages_that_reach_the_run_later_are_not_named_by_its_start() -> None:
    facts = (*RUNNING[:2], steers("m2", 1), started(1, 1, "m1"), steers("m3", 1), steered(1, "m2", "m3"))
    assert [turns_of(facts, name) for name in ("m1", "m2", "m3")] == [[1], [1], [1]]
    starts = [fact.message_ids for fact in facts if isinstance(fact, RunStarted)]
    assert starts == [("m1",)]


def test_s53_each_way_to_start_an_attempt_names_what_it_takes() -> None:
    talked = PolicyData(on_busy="steer")
    by_reply = given(opened(policy=talked), *WAITING[1:]).when(post("m2", "x"))
    by_answer = given(opened(policy=talked), *WAITING[1:]).when(answer(1, "x")).and_when(post("m3"))
    ways = {
        "message": given(*RUNNING[:2]),
        "reply": by_reply.given,
        "answers": by_answer.given,
        "recovery": given(*RUNNING),
        "handover": given(*RUNNING, released(1)),
        "leftover": given(*RUNNING, steers("m2", 1), ended(1, "failed", leftover=left_over(2, "m2"))),
        "retry": given(*RUNNING, ended(1, "failed"), requested(2, "m1", retry_of=1)),
    }
    found = {name: session.session.runs[0].next_start() for name, session in ways.items()}
    assert found == {
        "message": ("message", ("m1",)),
        "reply": ("reply", ("m2",)),
        "answers": ("answers", ("m3",)),
        "recovery": ("recovery", ()),
        "handover": ("handover", ()),
        "leftover": ("leftover", ("m2",)),
        "retry": ("retry", ("m1",)),
    }


def test_a_start_of_an_older_release_names_nothing_and_takes_its_message_all_the_same() -> None:
    nameless = RunStarted(run=1, attempt=1, runner="runner:old", wake=started(1).wake)
    session = given(opened(), posted("m1", 1), nameless)
    assert session.session.runs[0].message_ids == ("m1",)
    session.when(withdraw("m1")).then(rejected("not_queued"))
    over = session.when(record(ended(1, "failed")))
    over.and_when(retry()).then(requested(2, "m1", retry_of=1))


def test_a_message_is_named_once_however_often_its_run_starts() -> None:
    facts = (*RUNNING, started(1, 2), released(1, 2), handover(1, 3), steers("m2", 1), steered(1, "m2", attempt=3))
    assert turns_of(facts, "m1") == [1]
    assert turns_of(facts, "m2") == [1]


def test_what_nothing_names_steered_no_one_and_starts_none() -> None:
    facts = (
        *RUNNING,
        notice("n1"),
        passed_over("m2"),
        steers("m3", 1),
        withdrawn("m3"),
        queued("m4", 2),
        ended(2, "cancelled", 0),
        queued("m5", 3),
        withdrawn("m5", 3),
        ended(1),
    )
    assert [turns_of(facts, name) for name in ("n1", "m2", "m3", "m4", "m5")] == [[]] * 5
    session = given(*facts).session
    assert session.runs == (), "and nobody will take them"


def test_a_message_that_answered_is_named_by_the_start_that_it_brought_about() -> None:
    facts = (*WAITING, answers("m2", 1, q1="x"), resumed(1, 2, "m2", by="reply"), returned(1, "a", 2))
    assert turns_of(facts, "m2") == [1]
    cancelled = (*WAITING, answers("m2", 1, q1="x"), ended(1, "cancelled"))
    assert turns_of(cancelled, "m2") == []
    assert given(*cancelled).session.runs == ()


@pytest.mark.parametrize("status", ["failed", "timed_out"])
def test_a_turn_that_is_tried_again_names_its_messages_again(status: str) -> None:
    again = RunStarted(run=2, attempt=1, runner="r", wake=started(1).wake, trigger="retry", message_ids=("m1",))
    facts = (*RUNNING, ended(1, status), requested(2, "m1", retry_of=1), again)
    assert turns_of(facts, "m1") == [1, 2]


@settings(max_examples=60)
@for_all(stories(FAIR), st.sampled_from(POLICIES))
def test_s53_whatever_happens_each_message_is_named_once_a_try_or_never(
    story: list[tuple[Act, int, int]], policy: PolicyData
) -> None:
    world = play(story, policy)
    world.run_to_the_end(timers=False)
    facts = [recorded.event.data for recorded in world.log]
    tries: dict[int, int] = {fact.run: fact.retry_of for fact in facts if isinstance(fact, RunRequested)}
    for name, fate in world.auditor.fate.items():
        turns = turns_of([fact for fact in facts if isinstance(fact, RunStarted | RunSteered)], name)
        assert all(tries.get(later) == earlier for earlier, later in pairwise(turns))
        if fate == "taken":
            assert turns
        if fate in ("settled", "none"):
            assert turns == []
