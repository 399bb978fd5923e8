"""A summary in the place of what is old: when one is made, of what, and what it never takes."""

from typing import Any

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st
from tests.core.scenario import (
    DRIVE,
    Given,
    ask,
    asks,
    drive,
    ended,
    given,
    notice,
    opened,
    origin,
    posted,
    queued,
    rejected,
    replied,
    resumed,
    returned,
    spec,
    started,
    waiting,
)
from tests.core.test_children import came_out, child
from tests.core.test_history import conversations, log, whole
from tests.core.test_window import Talk

from turnstream.session import history
from turnstream.session.commands import CompactHistory
from turnstream.session.decide import SUMMARY_MAX
from turnstream.session.events import (
    Fact,
    HistoryCompacted,
    HistoryData,
    PolicyData,
    Recorded,
    Usage,
    Window,
)
from turnstream.session.fold import fold
from turnstream.session.messages import UserMessage
from turnstream.session.plan import CallModel, Compact, Start, aside
from turnstream.session.policy import resolve
from turnstream.session.state import Session

ON = PolicyData(history=HistoryData(compaction="on"), titles="client")
POLICY = resolve(ON)
BY = spec(policy=ON)
FULL = Window(tokens=900, budget=1000)
ROOMY = Window(tokens=100, budget=1000)


def turn(n: int, window: Window | None = None, **fields: Any) -> tuple[Fact, ...]:
    """Three events of a hundred bytes."""
    return (
        posted(f"m{n}", n, f"say {n}", by=BY),
        started(n, 1, f"m{n}"),
        ended(n, content=f"said {n}", window=window, **fields),
    )


def compact(through: int, summary: str = "S", **fields: Any) -> CompactHistory:
    return CompactHistory(origin=origin(f"compact {through}"), through=through, summary=summary, **fields)


def planned(*facts: Fact) -> list[int]:
    """Up to where it is summed up, if it is."""
    return [effect.through for effect in given(*facts).planned() if isinstance(effect, Compact)]


FOUR = (*turn(1), *turn(2), *turn(3), *turn(4, FULL))
"""Their ends have the sequences 30, 60, 90, 120."""


# -- when -------------------------------------------------------------------------------------------------------------


def test_behind_a_turn_that_leaves_little_room_the_older_ones_are_summed_up() -> None:
    assert planned(*FOUR) == [90], "a quarter stays as it was said"
    assert planned(*turn(1), *turn(2), *turn(3), *turn(4, ROOMY)) == []
    assert planned(*turn(1, FULL)) == [], "there is nothing older"
    assert planned(*turn(1), *turn(2, FULL)) == [30]


@pytest.mark.parametrize(
    ("window", "usage", "crowded"),
    [
        (Window(tokens=749, budget=1000), Usage(), False),
        (Window(tokens=750, budget=1000), Usage(), True),
        (Window(tokens=100, budget=1000), Usage(input_tokens=700, output_tokens=50), True),
        (Window(tokens=900, budget=1000), Usage(input_tokens=700, output_tokens=49), False),
        (Window(tokens=10, budget=1000, since=30), Usage(), True),
        (Window(tokens=10, budget=1000, inner=30), Usage(), True),
        (Window(), Usage(input_tokens=700), False),
        (None, Usage(input_tokens=700), False),
    ],
)
def test_little_room_is_a_quarter_of_the_budget_by_the_provider_s_count(
    window: Window | None, usage: Usage, crowded: bool
) -> None:
    facts = (*turn(1), *turn(2, window, step_usage=usage))
    assert planned(*facts) == ([30] if crowded else [])


def test_it_is_made_behind_turns_and_goes_on_beside_those_that_begin_meanwhile() -> None:
    (made,) = given(*FOUR).planned()
    going = (*FOUR, posted("m5", 5, by=BY))
    assert [type(effect) for effect in given(*going).planned()] == [Start]
    running = (*going, started(5, 1, "m5"))
    assert [type(effect) for effect in given(*running).planned()] == [CallModel]
    for facts in (going, running):
        assert aside(given(*facts).session, DRIVE) == (made,), "the turn before it stays"
    assert not given(*FOUR).planned(drive(queue="gpu"))


def test_where_the_policy_does_not_ask_for_it_nothing_is_summed_up() -> None:
    off = (posted("m2", 2), started(2, 1, "m2"), ended(2, window=FULL))
    assert planned(*turn(1), *off) == []


def test_a35_that_there_is_no_summary_is_stored_and_it_is_tried_again_behind_a_later_turn() -> None:
    scene = given(*FOUR).when(compact(90, "", fault="503")).then(HistoryCompacted(through=90, fault="503")).given
    assert scene.planned() == ()
    failed = (*FOUR, HistoryCompacted(through=90, fault="503"))
    assert planned(*failed, *turn(5, ROOMY)) == [], "there is room"
    assert planned(*failed, *turn(5, FULL)) == [90]
    before, after = (given(*facts).planned()[0].key for facts in (FOUR, (*failed, *turn(5, FULL))))
    assert before != after


def test_what_is_summed_up_is_planned_no_more() -> None:
    done = (*FOUR, HistoryCompacted(through=90, summary="S"))
    assert planned(*done) == []
    more = (*done, *turn(5, Window(tokens=300, budget=1000, since=91)))
    assert planned(*more) == [], "a window that begins behind the summary is not cut"
    assert planned(*more, *turn(6, FULL)) == [160]
    assert planned(*more, *turn(6, Window(tokens=300, budget=1000, since=120))) == [160]


# -- what -------------------------------------------------------------------------------------------------------------


def test_only_the_end_of_a_turn_that_is_over_for_good_is_summed_up_to() -> None:
    scene = given(*FOUR)
    for through in (0, 1, 20, 29, 31, 121, 999):
        scene.when(compact(through)).then(rejected("invalid", field="through"))
    for through in (30, 60, 90, 120):
        scene.when(compact(through)).then(HistoryCompacted(through=through, summary="S"))


def test_nothing_is_summed_up_twice_or_taken_back() -> None:
    scene = given(*FOUR, HistoryCompacted(through=60, summary="S"))
    for through in (30, 60):
        scene.when(compact(through)).then(rejected("invalid", field="through"))
    scene.when(compact(90)).then(HistoryCompacted(through=90, summary="S"))


def test_a_summary_is_not_longer_than_may_be() -> None:
    given(*FOUR).when(compact(90, "é" * (SUMMARY_MAX // 2))).then(
        HistoryCompacted(through=90, summary="é" * (SUMMARY_MAX // 2))
    )
    given(*FOUR).when(compact(90, "é" * (SUMMARY_MAX // 2 + 1))).then(rejected("invalid", field="summary"))


PENDING = (
    posted("m1", 1, by=BY),
    started(1, 1, "m1"),
    asks(1, 1, a="approval"),
    waiting(1, ask("a", kind="approval")),
)
PARKED = (
    posted("m1", 1, by=BY),
    started(1, 1, "m1"),
    asks(1, 1, a="child"),
    child(1, "a"),
    waiting(1, ask("a", kind="child")),
)


@pytest.mark.parametrize(
    "held",
    [
        PENDING,
        PARKED,
        (posted("m1", 1, by=BY), started(1, 1, "m1")),
        (posted("m1", 1, by=BY),),
        (*PENDING, resumed(1, 2)),
    ],
)
def test_a34_what_has_not_ended_is_never_summed_up(held: tuple[Fact, ...]) -> None:
    """An open request, a run that waits for its sub-agents, one that runs, one that has not begun."""
    scene = given(*turn(2), *held, *turn(3), *turn(4), *turn(5, FULL))
    ends = [turn.end for turn in scene.session.turns]
    assert [effect.through for effect in aside(scene.session, DRIVE) if isinstance(effect, Compact)] == [ends[0]]
    for end in ends[1:]:
        scene.when(compact(end)).then(rejected("invalid", field="through"))


def test_a34_a_request_is_answered_behind_a_summary_and_its_turn_is_whole() -> None:
    facts = (*turn(2), *PENDING, *turn(3), HistoryCompacted(through=30, summary="S"))
    facts = (*facts, resumed(1, 2), returned(1, "a", 2, output="done"))
    shown = history.build(given(*facts).session, log(*facts), 1, POLICY).messages
    assert [message.text for message in shown] == ["<summary>S</summary>", "say 3", "said 3", "hello", "", "done"]


def test_a_turn_that_began_before_the_end_of_another_keeps_it_from_being_summed_up() -> None:
    facts = (*turn(1)[:2], queued("m2", 2, by=BY), turn(1)[2], started(2, 1, "m2"), ended(2, window=FULL))
    scene = given(*facts, *turn(3, FULL))
    first, second, _ = (turn.end for turn in scene.session.turns)
    scene.when(compact(first)).then(rejected("invalid", field="through"))
    scene.when(compact(second)).then(HistoryCompacted(through=second, summary="S"))


@pytest.mark.parametrize("waits", [notice("n1"), came_out(1, "a", 1, late=True)])
def test_what_waits_to_be_shown_is_not_summed_up(waits: Fact) -> None:
    facts = (posted("m1", 1, by=BY), started(1, 1, "m1"), asks(1, 1, a="child"), child(1, "a", wait=False))
    facts = (*facts, returned(1, "a"), waits, ended(1), *turn(2)[:1])
    scene = given(*facts)
    scene.when(compact(scene.session.turns[0].end)).then(rejected("invalid", field="through"))
    begun = given(*facts, started(2, 1, "m2"))
    begun.when(compact(begun.session.turns[0].end)).then(rejected("invalid", field="through"))


# -- what is seen -----------------------------------------------------------------------------------------------------

OLD = (opened(), *turn(1), *turn(2), HistoryCompacted(through=40, summary="They <said> 1."), *turn(3))
NOW = (*OLD, posted("m4", 4, "say 4", by=BY), started(4, 1, "m4"))


def seen(*facts: Fact, policy: PolicyData = ON) -> list[str]:
    view = history.build(given(*facts).session, log(*facts), given(*facts).session.last_run, resolve(policy))
    return [message.text for message in view.messages]


def test_the_summary_stands_for_everything_up_to_where_it_goes() -> None:
    assert seen(*NOW) == ["<summary>They &lt;said&gt; 1.</summary>", *["say 2", "said 2", "say 3", "said 3", "say 4"]]


def test_without_compaction_everything_is_as_it_was_said() -> None:
    assert seen(*NOW, policy=PolicyData()) == ["say 1", "said 1", "say 2", "said 2", "say 3", "said 3", "say 4"]


def test_a35_without_a_summary_everything_is_as_it_was_said() -> None:
    facts = (*turn(1), *turn(2), HistoryCompacted(through=30, fault="503"), *turn(3))
    assert seen(*facts, posted("m4", 4, "say 4"), started(4, 1, "m4")) == seen(*NOW, policy=PolicyData())


def test_the_next_summary_is_made_of_the_last_one_and_what_came_since() -> None:
    facts = (*NOW, ended(4, content="said 4"))
    session, events = given(*facts).session, log(*facts)
    _, made_of = history.summed_up(session, events, 110, POLICY, 1000)
    wanted = ["<summary>They &lt;said&gt; 1.</summary>", "say 2", "said 2", "say 3", "said 3"]
    assert [message.text for message in made_of] == wanted
    _, first = history.summed_up(given(*FOUR).session, log(*FOUR), 60, POLICY, 1000)
    assert [message.text for message in first] == ["say 1", "said 1", "say 2", "said 2"]


@pytest.mark.parametrize(("most", "through"), [(1000, 90), (60, 90), (59, 60), (40, 60), (39, 30), (0, 30)])
def test_what_is_more_than_the_model_takes_is_summed_up_bit_by_bit(most: int, through: int) -> None:
    end, made_of = history.summed_up(given(*FOUR).session, log(*FOUR), 90, POLICY, most)
    assert end == through
    assert len(made_of) == through / 15


def test_a_window_that_is_full_all_the_same_is_cut_behind_the_summary() -> None:
    talk = Talk(400, policy=POLICY)
    for n in range(1, 40):
        talk.turn(n, "x" * 100, "y" * 100)
        if n == 20:
            talk.say(HistoryCompacted(through=talk.session.turns[-2].end, summary="S"))
    for view in talk.views[20:]:
        assert view.messages[0] == UserMessage("<summary>S</summary>")
        assert view.tokens <= 400
    assert talk.read[-1] < 30


def test_a_summary_gives_way_to_the_message() -> None:
    talk = Talk(200, policy=POLICY)
    talk.turn(1)
    talk.say(HistoryCompacted(through=talk.session.turns[-1].end, summary="S" * 300))
    view = talk.turn(2, "x" * 500)
    assert view.messages == (UserMessage("x" * 500),) and view.fits
    assert talk.turn(3).messages[0] == UserMessage(f"<summary>{'S' * 300}</summary>")


@for_all(conversations(), st.data())
def test_whatever_is_summed_up_no_pair_is_parted_and_nothing_that_goes_on_is_lost(
    facts: tuple[Fact, ...], data: st.DataObject
) -> None:
    """Summed up, as often as anybody may, up to any border."""
    talk = Talk(100_000, policy=POLICY)
    for fact in facts:
        talk.say(fact)
        borders = [turn.end for turn in talk.session.borders()]
        scene = Given(talk.session)
        through = data.draw(st.sampled_from([0, *borders]))
        outcome = scene.when(compact(through))
        before = talk.session.compacted.through if talk.session.compacted else 0
        if through > before:
            talk.say(outcome.decision.event.data)  # type: ignore[arg-type]
        for run in talk.session.runs:
            if run.taken:
                view = talk.ask(run.n)
                whole_view = history.build(talk.session, talk.events, run.n)
                assert view.messages[-1:] == whole_view.messages[-1:]
                assert whole(list(view.messages))


def test_what_a_summary_is_made_of_is_whole_however_it_is_read() -> None:
    facts = (*turn(1), notice("n1"), posted("m2", 2, by=BY), started(2, 1, "m2"), replied(2, 1, "a"))
    facts = (*facts, returned(2, "a", output="x"), ended(2, content="said 2"), *turn(3, FULL))
    events: list[Recorded] = log(*facts)
    session = fold(Session(key=events[0].event.key), events)
    _, made_of = history.summed_up(session, events, session.turns[1].end, POLICY, 1000)
    assert [type(message).__name__[0] for message in made_of] == ["U", "A", "U", "U", "A", "T", "A"]
    assert whole(list(made_of))
