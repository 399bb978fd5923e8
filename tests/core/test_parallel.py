"""Several runs of one session at a time."""

from tests.core.scenario import (
    AGENTS,
    DRIVE,
    WAKE,
    Given,
    answered,
    ask,
    asks,
    cancel,
    drive,
    ended,
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
    resumed,
    returned,
    spec,
    start,
    started,
    steers,
    waiting,
)

from turnstream.session.events import PolicyData, Wake
from turnstream.session.plan import CallModel, CallTool, End, Entitle, Start, blocked_by

PARALLEL = PolicyData(on_busy="parallel")
SECOND = Wake(work=8, cause=30, delivery=1)
OTHER = drive(SECOND, nonce="n2")
BEGIN = (opened(policy=PARALLEL), posted("m1", 1), posted("m2", 2))


def both_running() -> Given:
    """Run 1 by one drive, run 2 by the other."""
    first = given(*BEGIN, started(1, 1, "m1"))
    return first.when(start(started(2, 1, "m2", wake=SECOND), nonce="n2")).given


def test_s03_two_runs_run_and_each_drive_minds_its_own() -> None:
    session = both_running()
    assert [run.status for run in session.session.runs] == ["running", "running"]
    assert session.planned(DRIVE) == (CallModel(key="default/s1.1:1", run=1, attempt=1, step=1),)
    assert session.planned(OTHER) == (CallModel(key="default/s1.2:1", run=2, attempt=1, step=1),)
    done = session.when(record(ended(2))).then(ended(2), wakes=())
    assert done.given.planned(OTHER) == (Entitle(key="default/s1:title", run=2, spec=spec()),), "and nothing of run 1"
    done.and_when(record(ended(1))).then(ended(1))


def test_a_drive_carries_out_one_run_at_a_time() -> None:
    begun = given(*BEGIN, started(1, 1, "m1"))
    assert [effect.run for effect in begun.planned(DRIVE)] == [1]
    assert [effect.run for effect in begun.planned(OTHER)] == [2]
    after = begun.when(record(ended(1))).given
    assert [(type(effect), effect.run) for effect in after.planned(DRIVE)] == [(Start, 2)]


def test_each_start_wakes_its_queue() -> None:
    by = spec("painter", PARALLEL)
    given(*BEGIN[:2]).when(post("m2", agent="painter")).then(posted("m2", 2, by=by), wakes=("gpu",))


def test_s18_one_of_two_runs_is_taken_over_and_the_other_left_alone() -> None:
    session = both_running()
    again = drive(Wake(work=7, cause=20, delivery=2), nonce="again")
    assert [(type(effect), effect.run) for effect in session.planned(again)] == [(Start, 1)]
    assert blocked_by(session.session, again) == (WAKE, SECOND)
    session.when(start(started(2, 2, wake=Wake(work=7, cause=20, delivery=2)), nonce="x")).then(rejected("fenced"))
    third = drive(Wake(work=9, cause=40, delivery=1), nonce="third")
    assert session.planned(third) == ()
    assert blocked_by(session.session, third) == (WAKE, SECOND)
    gone = drive(Wake(work=9, cause=40, delivery=1), nonce="third", gone=[8])
    assert [(type(effect), effect.run) for effect in session.planned(gone)] == [(Start, 2)]


def test_cancelling_one_leaves_the_other() -> None:
    session = both_running()
    outcome = session.when(cancel(1))
    assert [(type(effect), effect.run) for effect in outcome.given.planned(DRIVE)] == [(End, 1)]
    assert [(type(effect), effect.run) for effect in outcome.given.planned(OTHER)] == [(CallModel, 2)]


def test_what_is_queued_waits_for_all_of_them() -> None:
    facts = (*BEGIN, started(1, 1, "m1"), started(2, 1, "m2"), queued("m3", 3, by=AGENTS["painter"]))
    session = given(*facts)
    first = session.when(record(ended(1))).then(ended(1), wakes=())
    assert first.session.startable == ()
    first.and_when(start(started(3, 1, "m3"))).then(rejected("invalid_transition"))
    first.and_when(record(ended(2))).then(ended(2), wakes=("gpu",))
    second = session.when(record(ended(2))).then(ended(2), wakes=())
    second.and_when(record(ended(1))).then(ended(1), wakes=("gpu",))


def test_a_run_that_goes_on_waits_for_nobody() -> None:
    asked = (asks(1, 1, a="question"), waiting(1, ask("a")))
    session = given(*BEGIN, started(1, 1, "m1"), *asked, started(2, 1, "m2"), answered(1))
    assert [run.n for run in session.session.startable] == [1]
    released_ = given(*BEGIN, started(1, 1, "m1"), started(2, 1, "m2"), released(1))
    assert [run.n for run in released_.session.startable] == [1]


def test_a_run_that_goes_on_does_not_wait_for_what_another_left_over() -> None:
    """Run 2 waits; run 3, beside it, fails and leaves something over, which goes before whatever is in line."""
    asked = (asks(2, 1, a="question"), waiting(2, ask("a", run=2)))
    front = (opened(), posted("m1", 1), queued("m2", 2), ended(1, "cancelled", 0), started(2, 1, "m2"), *asked)
    beside = (posted("m3", 3), steers("m4", 3), ended(3, "failed", 0, leftover=left_over(4, "m4")), answered(2))
    session = given(*front, *beside)
    assert [run.n for run in session.session.runs] == [4, 2]
    assert [run.n for run in session.session.startable] == [4, 2]
    session.when(start(resumed(2, 2))).then(resumed(2, 2))


def test_calls_of_two_runs_do_not_mix() -> None:
    facts = (*BEGIN, started(1, 1, "m1"), started(2, 1, "m2"), replied(1, 1, "a"), replied(2, 1, "a"))
    session = given(*facts)
    assert [(type(effect), effect.key) for effect in session.planned(DRIVE)] == [(CallTool, "default/s1.1:1:a")]
    one = session.when(record(returned(1, "a"))).then(returned(1, "a"))
    runs = {run.n: [call.id for call in run.open_calls] for run in one.session.runs}
    assert runs == {1: [], 2: ["a"]}


def test_a_message_that_steers_steers_the_first() -> None:
    session = given(*BEGIN, started(2, 1, "m2"))
    session.when(post("m3", policy=PolicyData(on_busy="steer"))).then(steers("m3", 2))
    both = given(*BEGIN, started(1, 1, "m1"), started(2, 1, "m2"))
    both.when(post("m3", policy=PolicyData(on_busy="steer"))).then(steers("m3", 1))
    both.when(post("m3", policy=PolicyData(on_busy="reject"))).then(rejected("run_active", run="s1.1"))
