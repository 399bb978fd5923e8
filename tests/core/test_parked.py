"""A run that waits for its children alone is parked: it does not hold the turn. What may be done meanwhile, who comes
first behind it, and whom each event wakes."""

from typing import Any, Literal

import msgspec
import pytest
from tests.core.scenario import (
    INTERLEAVE,
    NOTHING,
    act,
    answer,
    answered,
    answers,
    ask,
    asks,
    came_out,
    cancel,
    cancel_requested,
    child,
    delete,
    deleted,
    drive,
    ended,
    expire,
    expired,
    given,
    left_over,
    opened,
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
    spec,
    start,
    started,
    steers,
    tell,
    update,
    waiting,
    with_origin,
    withdraw,
    withdrawn,
)

from turnstream.session.events import Due, Fact, Limits, OnMessageData, PolicyData, Spec
from turnstream.session.plan import End, Expire, Start, next_due
from turnstream.session.routing import WAITING_MAX

Parked = Literal["interleave", "queue", "reject"]
LOOSE = msgspec.structs.replace(INTERLEAVE, on_busy="queue", titles="client")
PATIENT = PolicyData(on_busy="queue", on_message=OnMessageData(parked="queue"), titles="client")
FIRM = PolicyData(on_message=OnMessageData(parked="reject"), titles="client")
BOTH = (ask("a", 1, kind="child"), ask("q", 2))
"""What a run waits for that has delegated and asks a person."""


def by(policy: PolicyData = LOOSE, agent: str = "default", **limits: Any) -> Spec:
    return spec(agent, policy, **limits)


def begun(policy: PolicyData = LOOSE, agent: str = "default", **limits: Any) -> tuple[Fact, ...]:
    return opened(policy=policy), posted("m1", 1, by=by(policy, agent, **limits)), started(1, 1, "m1")


def parked(policy: PolicyData = LOOSE, agent: str = "default", **limits: Any) -> tuple[Fact, ...]:
    """Run 1 waits for its child."""
    delegated = (asks(1, 1, a="child"), child(1, "a"), waiting(1, ask("a", kind="child")))
    return *begun(policy, agent, **limits), *delegated


def mixed(policy: PolicyData = LOOSE, agent: str = "default", **fields: Any) -> tuple[Fact, ...]:
    """Run 1 waits for its child and for an answer."""
    asked = waiting(1, BOTH[0], msgspec.structs.replace(BOTH[1], **fields))
    return *begun(policy, agent), asks(1, 1, a="child", q="question"), child(1, "a"), asked


SECOND = (posted("m2", 2, by=by()), started(2, 1, "m2"))
BACK = came_out(1, "a")


def startable(*facts: Fact) -> list[int]:
    return [run.n for run in given(*facts).session.startable]


# -- the turn ---------------------------------------------------------------------------------------------------------


def test_it_does_not_hold_the_turn() -> None:
    session = given(*parked()).session
    assert (session.holder, session.live, session.front) == (None, (), None)
    assert session.runs[0].parked


def test_beside_a_question_it_holds_the_turn_until_that_is_answered() -> None:
    waits = given(*mixed())
    assert waits.session.holder is waits.session.runs[0]
    for closing in (answered(1, 2, "x"), expired(1, 2), answers("m2", 1, q2="x")):
        session = given(*mixed(on_expiry="null"), closing).session
        assert session.holder is None and session.runs[0].parked, closing
    other = given(*mixed(), BACK).session
    assert other.holder is other.runs[0], "its child has ended, and it waits for a person"


def test_it_holds_the_turn_again_from_its_start() -> None:
    back = given(*parked(), BACK)
    assert (back.session.holder, [run.n for run in back.session.live]) == (None, [1])
    going_on = back.when(start(resumed(1, 2)))
    assert going_on.session.holder is going_on.session.runs[0]
    given_back = given(*parked(), BACK, resumed(1, 2), released(1, 2)).session
    assert given_back.holder is given_back.runs[0], "a run that is handed over keeps its turn"


def test_s35_it_waits_for_the_turn_that_has_begun_and_is_next() -> None:
    facts = (*parked(), *SECOND, queued("m3", 3, by=by()))
    assert startable(*facts) == []
    assert startable(*facts, BACK) == []
    given(*facts, BACK).when(start(resumed(1, 2))).then(rejected("invalid_transition", run="s1.1"))
    assert startable(*facts, BACK, ended(2)) == [1], "before what has not begun"
    assert startable(*facts, ended(2)) == [3]


def test_it_goes_on_before_a_run_that_has_not_begun() -> None:
    facts = (*parked(), posted("m2", 2, by=by()))
    assert startable(*facts) == [2]
    assert startable(*facts, BACK) == [1]
    given(*facts, BACK).when(start(started(2, 1, "m2"))).then(rejected("invalid_transition", run="s1.2"))
    assert startable(*facts, BACK, resumed(1, 2)) == []


def test_two_that_go_on_do_so_one_after_the_other() -> None:
    second = (*SECOND, asks(2, 1, a="child"), child(1, "a", 2), waiting(2, ask("a", run=2, kind="child")))
    facts = (*parked(), *second, came_out(1, "a", 2), BACK)
    assert startable(*facts) == [1, 2]
    (first,) = given(*facts).planned()
    assert isinstance(first, Start) and first.run == 1
    assert startable(*facts, resumed(1, 2)) == []
    assert startable(*facts, resumed(2, 2)) == []


def test_a_run_that_waits_for_nobody_goes_on_beside_the_others() -> None:
    parallel = msgspec.structs.replace(LOOSE, on_busy="parallel")
    beside = (posted("m2", 2, by=by(parallel)), started(2, 1, "m2"), asks(2, 1, a="child"), child(1, "a", 2))
    facts = (*begun(parallel), *beside, waiting(2, ask("a", run=2, kind="child")), came_out(1, "a", 2))
    assert startable(*facts) == [2]
    last = given(*facts, queued("m3", 3, by=by(parallel)), ended(1))
    assert [run.n for run in last.session.startable] == [2], "what is queued waits for all before it"


def test_a_run_that_waits_for_nobody_keeps_none_from_starting_that_was_there_before() -> None:
    parallel = msgspec.structs.replace(LOOSE, on_busy="parallel")
    beside = (posted("m3", 3, by=by(parallel)), started(3, 1, "m3"), asks(3, 1, a="child"), child(1, "a", 3))
    waits = (*begun(parallel), queued("m2", 2, by=by(parallel, "painter")), *beside)
    facts = (*waits, waiting(3, ask("a", run=3, kind="child")), came_out(1, "a", 3))
    outcome = given(*facts).when(record(ended(1))).then(ended(1), wakes=("gpu",))
    assert [run.n for run in outcome.session.startable] == [2, 3]


# -- what comes meanwhile ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [LOOSE, PolicyData(preset="memory"), PolicyData(preset="thread")])
def test_s35_a_message_starts_a_run_at_once(policy: PolicyData) -> None:
    scene = given(*parked(policy))
    outcome = scene.when(post("m2")).then(posted("m2", 2, by=by(policy)), wakes=("default",))
    assert [run.n for run in outcome.session.startable] == [2]
    assert outcome.session.runs[1].in_line
    foreign = scene.when(post("m2", author="user:bob"))
    assert foreign.decision.event.data.run == 2, "whoever it is of"


def test_s35_a_message_may_wait_for_the_children() -> None:
    outcome = given(*parked(PATIENT)).when(post("m2")).then(queued("m2", 2, by=by(PATIENT)), wakes=())
    assert [run.n for run in outcome.session.startable] == []
    over = (*parked(PATIENT), queued("m2", 2, by=by(PATIENT)))
    assert startable(*over, BACK) == [1]
    assert startable(*over, BACK, resumed(1, 2), ended(1, attempt=2)) == [2]


@pytest.mark.parametrize("policy", [FIRM, PolicyData(preset="strict"), NOTHING])
def test_s35_a_message_may_be_refused(policy: PolicyData | None) -> None:
    facts = parked(policy or PolicyData())
    scene = given(*facts)
    scene.when(post("m2")).then(rejected("run_active", run="s1.1"))
    scene.when(post("m2", policy=PolicyData(on_busy="steer"))).then(rejected("run_active", run="s1.1"))
    scene.when(post("m2", kind="notice")).then(msgspec.structs.replace(posted("m2", 2), kind="notice", starts=None))


def test_what_a_message_says_of_a_busy_session_means_nothing_to_one_that_is_not() -> None:
    for on_busy in ("reject", "queue", "steer", "interrupt", "parallel"):
        policy = PolicyData(on_busy=on_busy)  # pyright: ignore[reportArgumentType]
        given(*parked()).when(post("m2", policy=policy)).then(posted("m2", 2, by=by()))


def test_it_is_the_new_runs_policy_that_says_whether_it_waits() -> None:
    """Both ways of saying so agree: the run that a message starts is not held by what an older one was told."""
    loosened = given(*parked(PATIENT)).when(update(policy=LOOSE)).and_when(post("m2"))
    loosened.then(posted("m2", 2, by=by()), wakes=("default",))
    assert [run.n for run in loosened.session.startable] == [2]
    tightened = given(*parked()).when(update(policy=PATIENT)).and_when(post("m2"))
    tightened.then(queued("m2", 2, by=by(PATIENT)), wakes=())
    assert [run.n for run in tightened.session.startable] == []
    tightened.and_when(cancel(1)).then(ended(1, "cancelled", model="demo", unfinished=("a",)), wakes=("default",))


def test_an_agents_policy_says_whether_its_run_waits() -> None:
    agents = {"default": by(), "poet": by(PATIENT, "poet")}
    scene = given(opened(), *parked()[1:])
    scene.when(post("m2", agent="poet", specs=agents)).then(queued("m2", 2, by=by(PATIENT, "poet")))
    scene.when(post("m2", specs=agents)).then(posted("m2", 2, by=by()))


def test_what_is_queued_behind_it_starts_when_it_parks() -> None:
    waits = (*begun(), queued("m2", 2, by=by(agent="painter")), asks(1, 1, a="child"), child(1, "a"))
    parks = waiting(1, ask("a", kind="child"))
    outcome = given(*waits).when(record(parks)).then(parks, wakes=("gpu",))
    assert [run.n for run in outcome.session.startable] == [2]


def test_what_is_queued_behind_it_may_be_told_to_wait() -> None:
    waits = (*begun(PATIENT), queued("m2", 2, by=by(PATIENT, "painter")), asks(1, 1, a="child"), child(1, "a"))
    outcome = given(*waits).when(record(waiting(1, ask("a", kind="child"))))
    assert outcome.decision.wakes == () and outcome.session.startable == ()


def test_who_steers_or_interrupts_means_the_run_that_holds_the_turn() -> None:
    facts = (*parked(), *SECOND)
    given(*facts).when(post("m3", policy=PolicyData(on_busy="steer"))).then(steers("m3", 2))
    interrupt = post("m3", policy=PolicyData(on_busy="interrupt"))
    given(*facts).when(interrupt).then(queued("m3", 3, by=by(), interrupts=2))
    given(*facts).when(post("m3", policy=PolicyData(on_busy="reject"))).then(rejected("run_active", run="s1.2"))


def test_who_steers_or_interrupts_means_else_the_one_that_is_to_go_on() -> None:
    """A run that was left over stands before it, and does not go before it."""
    leaves = (*parked(), *SECOND, steers("m3", 2), ended(2, "failed", leftover=left_over(3, "m3", by=by())))
    assert [run.n for run in given(*leaves).session.runs] == [3, 1]
    back = given(*leaves, BACK)
    assert [run.n for run in back.session.startable] == [1]
    back.when(post("m4", policy=PolicyData(on_busy="steer"))).then(steers("m4", 1))
    back.when(post("m4", policy=PolicyData(on_busy="interrupt"))).then(queued("m4", 4, by=by(), interrupts=1))


def test_what_steered_it_before_it_parked_is_its_prompt_when_it_goes_on() -> None:
    delegated = (asks(1, 1, a="child"), child(1, "a"), waiting(1, ask("a", kind="child")))
    facts = (*begun(), steers("m2", 1), *delegated)
    given(*facts, BACK).when(start(resumed(1, 2, "m2"))).then(resumed(1, 2, "m2"))
    given(*facts).when(withdraw("m2")).then(withdrawn("m2"))
    over = given(*facts).when(cancel(1))
    over.then(ended(1, "cancelled", model="demo", unfinished=("a",), leftover=left_over(2, "m2", by=by())))
    assert over.decision.wakes == ("default",)


def test_an_interrupted_run_that_was_to_go_on_is_ended() -> None:
    facts = (*parked(), BACK, queued("m2", 2, by=by(), interrupts=1))
    (end,) = given(*facts).planned()
    assert isinstance(end, End) and (end.run, end.status) == (1, "cancelled")
    assert startable(*facts) == []
    assert startable(*facts, ended(1, "cancelled")) == [2]


def test_an_action_waits_like_a_message() -> None:
    beside = given(*parked()).when(act())
    assert [run.n for run in beside.session.startable] == [2]
    behind = given(*parked(PATIENT)).when(act())
    assert behind.decision.wakes == () and behind.session.startable == ()
    given(*parked(FIRM)).when(act()).then(rejected("run_active", run="s1.1"))


FAILED = (*SECOND, ended(2, "failed"))


def test_s27_a_turn_that_failed_meanwhile_is_tried_again() -> None:
    outcome = given(*parked(), *FAILED).when(retry())
    outcome.then(requested(3, "m2", retry_of=2, by=by()), wakes=("default",))
    assert [run.n for run in outcome.session.startable] == [3]
    firm = given(*parked(), *FAILED).when(update(policy=FIRM)).and_when(retry())
    firm.then(rejected("run_active", run="s1.1"))
    patient = given(*parked(), *FAILED).when(update(policy=PATIENT)).and_when(retry())
    assert patient.decision.wakes == () and patient.session.startable == ()


def test_s28_the_turn_to_try_again_is_the_latest_and_over() -> None:
    first = (opened(policy=LOOSE), posted("m0", 1, by=by()), started(1, 1, "m0"), ended(1, "failed"))
    second = (*SECOND, asks(2, 1, a="child"), child(1, "a", 2), waiting(2, ask("a", run=2, kind="child")))
    given(*first, *second).when(retry()).then(rejected("nothing_to_retry"))
    given(*first, *second, came_out(1, "a", 2)).when(retry()).then(rejected("run_active", run="s1.2"))
    given(*first, *second, ended(2, "cancelled")).when(retry()).then(rejected("nothing_to_retry"))


def test_what_waits_is_bounded_while_it_is_parked() -> None:
    waits = [queued(f"w{n}", n, by=by(PATIENT)) for n in range(2, WAITING_MAX + 2)]
    full = given(*parked(PATIENT), *waits)
    full.when(post("more")).then(rejected("run_active", run="s1.1"))


# -- people and children ----------------------------------------------------------------------------------------------


def test_a_message_answers_the_questions_and_its_run_waits_on() -> None:
    answer_ = answers("m2", 1, "x", q2="x")
    outcome = given(*mixed()).when(post("m2", "x")).then(answer_, wakes=())
    (run,) = outcome.session.runs
    assert (run.status, [request.k for request in run.requests], run.replies) == ("waiting", [1], ("m2",))
    back = outcome.and_when(tell(BACK)).then(BACK, wakes=("default",))
    (begin,) = back.given.planned()
    assert isinstance(begin, Start) and (begin.trigger, begin.message_ids) == ("answers", ("m2",))


def test_a_message_that_answers_last_is_the_reply() -> None:
    outcome = given(*mixed(), BACK).when(post("m2", "x")).then(answers("m2", 1, "x", q2="x"), wakes=("default",))
    (begin,) = outcome.given.planned()
    assert isinstance(begin, Start) and (begin.trigger, begin.message_ids) == ("reply", ("m2",))


def test_a_message_declines_the_approvals_alone() -> None:
    policy = PolicyData(on_busy="queue", on_message=OnMessageData(approval="decline", parked="interleave"))
    asked = (asks(1, 1, a="child", b="approval"), child(1, "a"))
    waits = waiting(1, ask("a", 1, kind="child"), ask("b", 2, kind="approval"))
    given(*begun(policy), *asked, waits).when(post("m2", "no")).then(answers("m2", 1, "no", q2=None), wakes=())


def test_an_answer_lets_start_what_waits_while_the_children_run() -> None:
    waits = (*mixed(), queued("m2", 2, by=by(agent="painter")))
    for closing in (answer(1, "x"), answer(1, "x", k=2), post("m3", "x")):
        outcome = given(*waits).when(closing)
        assert outcome.decision.wakes == ("gpu",), closing
        assert [run.n for run in outcome.session.startable] == [2]
    patient = (*mixed(PATIENT), queued("m2", 2, by=by(PATIENT, "painter")))
    assert given(*patient).when(answer(1, "x")).decision.wakes == ()
    two = waiting(1, *BOTH, ask("r", 3))
    asked = (*begun(), asks(1, 1, a="child", q="question", r="question"), child(1, "a"), two)
    one = given(*asked, queued("m2", 2, by=by(agent="painter"))).when(answer(1, "x", k=2))
    assert one.decision.wakes == () and one.session.holder is not None, "there is another question"


def test_an_expiry_lets_start_what_waits_while_the_children_run() -> None:
    facts = mixed(expires_in=50, on_expiry="null")
    over = given(*facts, queued("m2", 2, by=by(agent="painter")))
    asked_at = given(*facts).session.seq
    outcome = over.when(expire(1, 2, now=asked_at + 50)).then(expired(1, 2), wakes=("gpu",))
    assert [run.n for run in outcome.session.startable] == [2]
    own = given(*facts, queued("m2", 2, by=by())).when(expire(1, 2, now=asked_at + 50))
    assert own.decision.wakes == (), "the drive that reports it goes on with that"


def test_an_expiry_that_fails_the_run_ends_it_and_its_children() -> None:
    facts = (*mixed(expires_in=50, on_expiry="fail"), expired(1, 2))
    (end,) = given(*facts).planned()
    assert isinstance(end, End) and end.error and end.error.code == "request_expired"
    given(*facts, BACK).when(start(resumed(1, 2))).then(rejected("invalid_transition"))


def test_nobody_answers_for_a_child() -> None:
    given(*mixed()).when(answer(1, "x", k=1)).then(rejected("invalid", field="request"))
    given(*mixed(), BACK).when(answer(1, "x", k=1)).then(rejected("invalid", field="request"))
    given(*mixed(), ended(1, "failed")).when(answer(1, "x", k=1)).then(rejected("invalid", field="request"))
    given(*parked()).when(answer(1, "x")).then(rejected("not_waiting", run="s1.1"))
    given(*parked(), BACK).when(answer(1, "x")).then(rejected("not_waiting", run="s1.1"))


@pytest.mark.parametrize("more", [(), (BACK,), (BACK, resumed(1, 2))], ids=["waiting", "to go on", "gone on"])
def test_s09_the_first_answer_wins_whatever_the_children_do(more: tuple[Fact, ...]) -> None:
    scene = given(*mixed(), answered(1, 2, "x"), *more)
    for k in (None, 2):
        scene.when(answer(1, "x", k=k)).then(NOTHING)
        scene.when(answer(1, "y", k=k)).then(rejected("already_answered", request="s1.1.q2"))


def test_an_answer_to_a_run_that_ended_before_says_so() -> None:
    over = given(*mixed(), ended(1, "cancelled"))
    for k in (None, 2):
        over.when(answer(1, "x", k=k)).then(rejected("request_closed", request="s1.1.q2"))


# -- its end and its time ---------------------------------------------------------------------------------------------


def test_s36_it_is_cancelled_at_once_and_its_turn_is_free() -> None:
    scene = given(*parked(PATIENT), queued("m2", 2, by=by(PATIENT, "painter")))
    outcome = scene.when(cancel(1, "enough"))
    outcome.then(ended(1, "cancelled", reason="enough", model="demo", unfinished=("a",)), wakes=("gpu",))
    outcome.and_when(cancel(1)).then(NOTHING)
    outcome.and_when(start(resumed(1, 2))).then(rejected("invalid_transition"))


def test_a_client_that_leaves_ends_nothing_that_waits_for_children() -> None:
    policy = PolicyData(preset="memory")
    given(*parked(policy)).when(cancel(1, disconnected=True)).then(NOTHING)


def test_s30_a_session_in_which_something_waits_for_children_is_not_idle() -> None:
    given(*parked(PolicyData(preset="strict"))).when(delete()).then(rejected("run_active", run="s1.1"))
    gone = given(*parked()).when(delete(active="cancel"))
    assert gone.session.runs == () and gone.session.deleted


def test_a48_its_time_goes_on_while_it_waits_for_its_children_alone() -> None:
    started_at = given(*begun(timeout=500)).session.seq
    scene = given(*parked(timeout=500))
    assert scene.session.runs[0].deadline == started_at + 500
    assert next_due(scene.session, drive()) == started_at + 500
    assert scene.planned(now=started_at + 499) == ()
    (end,) = scene.planned(now=started_at + 500)
    assert isinstance(end, End) and (end.status, end.error and end.error.code) == ("timed_out", "deadline_exceeded")
    over = given(*parked(timeout=500), BACK)
    assert over.session.runs[0].deadline == started_at + 500


TIMED = (*begun(timeout=500), asks(1, 1, a="child", q="question"), child(1, "a"), waiting(1, *BOTH))


def test_a48_its_time_stands_while_a_person_is_asked_and_goes_on_with_the_answer() -> None:
    begun_at, asked_at = given(*TIMED[:3]).session.seq, given(*TIMED).session.seq
    left = 500 - (asked_at - begun_at)
    waits = given(*TIMED[:-1]).when(record(TIMED[-1]))
    assert waits.decision.settled == ("deadline-1",)
    assert waits.session.runs[0].deadline is None
    for closing in (answer(1, "x"), post("m2", "x")):
        outcome = waits.and_when(closing)
        assert outcome.decision.dues == (Due(left, "default", "deadline-1"),), closing
        assert outcome.session.runs[0].deadline == outcome.session.seq + left
    last = waits.and_when(tell(BACK)).and_when(answer(1, "x"))
    assert last.decision.dues == () and last.session.runs[0].deadline is None, "until it is started"
    again = last.and_when(start(resumed(1, 2)))
    assert again.decision.dues == (Due(left, "default", "deadline-1"),)


def test_a48_its_time_goes_on_when_nobody_has_answered() -> None:
    facts = (*TIMED[:-1], waiting(1, BOTH[0], ask("q", 2, expires_in=50, on_expiry="null")))
    asked_at = given(*facts).session.seq
    left = 500 - (asked_at - given(*TIMED[:3]).session.seq)
    outcome = given(*facts).when(expire(1, 2, now=asked_at + 50))
    assert outcome.decision.dues == (Due(left, "default", "deadline-1"),)
    assert outcome.decision.settled == ("expiry-1-2",)


def test_its_end_settles_the_time_that_went_on() -> None:
    scene = given(*TIMED, answered(1, 2, "x"))
    assert scene.when(cancel(1)).decision.settled == ("deadline-1",)
    going_on = given(*TIMED, answered(1, 2, "x"), BACK).when(start(resumed(1, 2)))
    assert going_on.decision.dues == (), "it falls due already"


def test_under_the_wall_clock_its_time_never_stands() -> None:
    wall = msgspec.structs.replace(LOOSE, clock="wall")
    started_at = given(*begun(wall)).session.seq
    limit = Limits().timeout
    for facts in (mixed(wall), (*mixed(wall), answered(1, 2, "x")), (*mixed(wall), answered(1, 2, "x"), BACK)):
        assert given(*facts).session.runs[0].deadline == started_at + limit
    assert given(*mixed(wall)).when(answer(1, "x")).decision.dues == ()


# -- whom an event wakes ----------------------------------------------------------------------------------------------


def test_the_last_child_wakes_its_run_if_that_may_go_on() -> None:
    given(*parked(agent="painter")).when(tell(BACK)).then(BACK, wakes=("gpu",))
    held = given(*parked(agent="painter"), *SECOND).when(tell(BACK)).then(BACK, wakes=())
    held.and_when(record(ended(2))).then(ended(2), wakes=("gpu",))
    given(*mixed(agent="painter")).when(tell(BACK)).then(BACK, wakes=())


def test_an_end_that_leaves_something_over_wakes_the_one_that_goes_before_it() -> None:
    leaves = (*parked(agent="painter"), *SECOND, steers("m3", 2), BACK)
    rest = left_over(3, "m3", by=by())
    outcome = given(*leaves).when(record(ended(2, "failed"))).then(ended(2, "failed", leftover=rest), wakes=("gpu",))
    assert [run.n for run in outcome.session.startable] == [1]
    going_on = given(*leaves, ended(2, "failed", leftover=rest), resumed(1, 2), returned(1, "a", 2))
    going_on.when(record(ended(1, attempt=2))).then(ended(1, attempt=2), wakes=("default",))


def test_the_run_that_goes_on_wakes_what_waited_for_it() -> None:
    facts = (*parked(agent="painter"), posted("m2", 2, by=by()), BACK, resumed(1, 2), returned(1, "a", 2))
    given(*facts).when(record(ended(1, attempt=2))).then(ended(1, attempt=2), wakes=("default",))
    again = (*facts, asks(1, 2, 2, a="child"), child(2, "a", attempt=2))
    parks = waiting(1, ask("a", 2, kind="child"), attempt=2)
    given(*again).when(record(parks)).then(parks, wakes=("default",))


def test_a_cancel_of_a_run_in_front_wakes_the_one_that_is_to_go_on() -> None:
    asked = (asks(2, 1, a="question"), waiting(2, ask("a", run=2)))
    facts = (*parked(agent="painter"), *SECOND, *asked, BACK)
    given(*facts).when(cancel(2)).then(ended(2, "cancelled", model="demo", unfinished=("a",)), wakes=("gpu",))


def test_an_expiry_is_planned_for_what_a_person_is_asked_alone() -> None:
    facts = mixed(expires_in=50, on_expiry="null")
    asked_at = given(*facts).session.seq
    (effect,) = given(*facts).planned(now=asked_at + 50)
    assert isinstance(effect, Expire) and effect.request == 2


def test_a_repeat_and_a_guard_are_looked_at_before_all_that() -> None:
    keyed = with_origin(post("m2"), idempotency_key="k", body_digest="b")
    given(*parked()).when(keyed).and_when(keyed).then(NOTHING)
    given(*parked(FIRM)).when(with_origin(post("m2"), expected_seq=3)).then(rejected("session_moved"))


def test_a_cancel_of_the_run_that_goes_on_waits_for_its_runner() -> None:
    facts = (*parked(), BACK, resumed(1, 2))
    given(*facts).when(cancel(1)).then(cancel_requested(1), wakes=("default",))


def test_nothing_is_told_to_a_run_of_a_deleted_session() -> None:
    given(*parked(), deleted()).when(tell(BACK)).then(rejected("not_found"))
