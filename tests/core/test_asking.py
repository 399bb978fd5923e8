"""What a run waits for: asking, answering, approving, expiry, and how it goes on."""

from typing import Any

import pytest
from tests.core.scenario import (
    ANN,
    DRIVE,
    NOTHING,
    RUNNER,
    WAKE,
    Given,
    answer,
    answered,
    answers,
    approve,
    ask,
    asks,
    cancel,
    cancel_requested,
    drive,
    ended,
    expire,
    expired,
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
    resumed,
    returned,
    spec,
    start,
    started,
    steered,
    steers,
    tool_started,
    waiting,
    with_origin,
    withdraw,
    withdrawn,
)

from turnstream.session.events import Due, Fact, OnMessageData, PolicyData, RunWaiting, Wake
from turnstream.session.plan import CallModel, CallTool, End, Expire, Park, Return, Settle, Start, Steer, next_due
from turnstream.session.state import Run

OTHER = drive(Wake(work=8, cause=50, delivery=1), nonce="other")
BOB = "user:bob"
RUNNING = (opened(), posted("m1", 1), started(1, 1, "m1"))
QUESTION = (*RUNNING, asks(1, 1, a="question"))
APPROVAL = (*RUNNING, asks(1, 1, b="approval"))
BOTH = (*RUNNING, asks(1, 1, a="question", b="approval", c=None))
ASK_BOTH = waiting(1, ask("a", 1), ask("b", 2, kind="approval"))
WAITING = (*QUESTION, waiting(1, ask("a")))
APPROVING = (*APPROVAL, waiting(1, ask("b", kind="approval")))
OPEN = (*BOTH, returned(1, "c"), ASK_BOTH)


def run_of(session: Given, n: int = 1) -> Run:
    run = session.session.run(n)
    assert run is not None
    return run


def waits_with(*requests: Any, policy: PolicyData | None = None, **limits: Any) -> Given:
    """A run that waits for these."""
    calls = {request.call_id: request.kind for request in requests}
    by = spec(policy=policy or PolicyData(), **limits)
    return given(opened(), posted("m1", 1, by=by), started(1, 1, "m1"), asks(1, 1, **calls), waiting(1, *requests))


# -- asking -----------------------------------------------------------------------------------------------------------


def test_everything_that_needs_no_person_is_done_first_and_then_all_is_asked_at_once() -> None:
    (call,) = given(*BOTH).planned()
    assert isinstance(call, CallTool)
    assert call.call.id == "c"
    (park,) = given(*BOTH, returned(1, "c")).planned()
    assert isinstance(park, Park)
    assert [one.id for one in park.calls] == ["a", "b"]
    assert (park.first, park.key) == (1, "default/s1.1:1:wait:1")
    outcome = given(*BOTH, returned(1, "c")).when(record(ASK_BOTH)).then(ASK_BOTH, wakes=())
    assert outcome.session.runs[0].status == "waiting"
    assert outcome.given.planned() == (), "nobody works while a person thinks"
    assert outcome.given.planned(OTHER) == ()


def test_requests_of_a_run_are_numbered_on() -> None:
    facts = (*WAITING, answered(1, 1, "x"), resumed(1, 2), returned(1, "a", 2), asks(1, 2, 2, a="question"))
    (park,) = given(*facts).planned()
    assert isinstance(park, Park)
    assert (park.first, park.key) == (2, "default/s1.1:2:wait:2")
    given(*facts).when(record(waiting(1, ask("a", 1), attempt=2))).then(rejected("invalid", field="requests"))
    given(*facts).when(record(waiting(1, ask("a", 2), attempt=2))).then(waiting(1, ask("a", 2), attempt=2))


@pytest.mark.parametrize(
    ("facts", "fact"),
    [
        (BOTH, ASK_BOTH),
        (RUNNING, waiting(1, ask("a"))),
        ((*RUNNING, replied(1, 1, "a")), waiting(1, ask("a"))),
        ((*QUESTION, cancel_requested(1)), waiting(1, ask("a"))),
        ((*QUESTION, released(1)), waiting(1, ask("a"))),
        (WAITING, waiting(1, ask("a", 2))),
        ((*WAITING, answered(1), resumed(1, 2)), waiting(1, ask("a", 2), attempt=2)),
    ],
    ids=["a free call", "no call", "asks nothing", "cancelled", "given back", "waits already", "answered already"],
)
def test_what_is_not_to_be_asked_is_not_asked(facts: tuple[Fact, ...], fact: RunWaiting) -> None:
    given(*facts).when(record(fact)).then(rejected("invalid_transition", run="s1.1"))


@pytest.mark.parametrize(
    "fact",
    [
        waiting(1),
        waiting(1, ask("a", 1)),
        waiting(1, ask("a", 1), ask("a", 2)),
        waiting(1, ask("a", 1), ask("z", 2, kind="approval")),
        waiting(1, ask("a", 1), ask("b", 3, kind="approval")),
        waiting(1, ask("a", 2), ask("b", 1, kind="approval")),
        waiting(1, ask("a", 1, kind="approval"), ask("b", 2, kind="question")),
        waiting(1, ask("a", 1, schema={"type": "text"}), ask("b", 2, kind="approval")),
    ],
    ids=["none", "one of two", "one twice", "another", "a gap", "turned round", "other kinds", "no schema"],
)
def test_one_request_is_stored_for_each_call_that_asks(fact: RunWaiting) -> None:
    session = given(*BOTH, returned(1, "c"))
    session.when(record(fact)).then(rejected("invalid", field="requests"))


def test_a_call_that_cannot_be_asked_for_returns_an_error_and_the_rest_is_asked() -> None:
    session = given(*BOTH, returned(1, "c"))
    for status in ("ok", "denied", "uncertain"):
        session.when(record(returned(1, "a", status=status))).then(rejected("invalid_transition"))
        session.when(record(returned(1, "b", status=status))).then(rejected("invalid_transition"))
    failed = session.when(record(returned(1, "a", status="error"))).then(returned(1, "a", status="error"))
    (park,) = failed.given.planned()
    assert isinstance(park, Park)
    assert [call.id for call in park.calls] == ["b"]


def test_a_run_that_waits_does_nothing_and_completes_nothing() -> None:
    session = given(*WAITING)
    for fact in (replied(1, 2, "x"), returned(1, "a"), tool_started(1, "a"), steered(1, "m2"), released(1), ended(1)):
        session.when(record(fact)).then(rejected("invalid_transition", run="s1.1"))
    session.when(start(started(1, 2))).then(rejected("invalid_transition"))


def test_a_waiting_run_holds_the_turn() -> None:
    session = given(*WAITING, queued("m2", 2))
    assert session.session.holder is run_of(session)
    assert session.session.startable == ()
    session.when(start(started(2, 1, "m2"))).then(rejected("invalid_transition"))
    goes_on = given(*WAITING, queued("m2", 2), answered(1))
    assert [run.n for run in goes_on.session.startable] == [1]


# -- answering --------------------------------------------------------------------------------------------------------


def test_an_answer_names_its_request_or_means_the_only_one() -> None:
    session = given(*WAITING)
    session.when(answer(1, "blue")).then(answered(1, 1, "blue"), wakes=("default",))
    session.when(answer(1, "blue", k=1)).then(answered(1, 1, "blue"), wakes=("default",))
    open_ = given(*OPEN)
    open_.when(answer(1, "blue")).then(rejected("invalid", field="request"))
    given(*OPEN, answered(1, 2, approved=True)).when(answer(1, "blue")).then(answered(1, 1, "blue"))


def test_s10_a_run_waits_until_its_last_request_is_closed() -> None:
    first = given(*OPEN).when(answer(1, "blue", k=1)).then(answered(1, 1, "blue"), wakes=())
    assert first.session.runs[0].status == "waiting"
    assert first.given.planned() == ()
    second = first.and_when(approve(1)).then(answered(1, 2, approved=True), wakes=("default",))
    assert second.session.runs[0].status == "queued"
    (go_on,) = second.given.planned(OTHER)
    assert isinstance(go_on, Start)
    assert (go_on.trigger, go_on.attempt, go_on.message_ids) == ("answers", 2, ())


def test_s09_the_first_answer_wins_and_the_same_again_is_nothing() -> None:
    first = given(*WAITING).when(answer(1, "blue"))
    first.and_when(answer(1, "blue")).then(NOTHING)
    first.and_when(answer(1, "blue", k=1, reason="really")).then(NOTHING)
    first.and_when(answer(1, "red")).then(rejected("already_answered", request="s1.1.q1"))
    first.and_when(approve(1)).then(rejected("already_answered"))
    over = given(*WAITING, answered(1, 1, {"a": 1, "b": [2]}), resumed(1, 2), returned(1, "a", 2), ended(1, attempt=2))
    over.when(answer(1, {"b": [2], "a": 1})).then(NOTHING)
    over.when(answer(1, {"b": [2], "a": 2})).then(rejected("already_answered"))


def test_s12_approve_twice_and_approve_then_deny() -> None:
    first = given(*APPROVING).when(approve(1)).then(answered(1, approved=True), wakes=("default",))
    first.and_when(approve(1)).then(NOTHING)
    first.and_when(approve(1, False)).then(rejected("already_answered"))
    denied = given(*APPROVING).when(approve(1, False, reason="no")).then(answered(1, approved=False, reason="no"))
    denied.and_when(approve(1, False, reason="never")).then(NOTHING)
    denied.and_when(approve(1)).then(rejected("already_answered"))


def test_who_answered_is_in_the_event() -> None:
    given(*WAITING).when(with_origin(answer(1, "x"), actor=BOB)).then(answered(1, 1, "x", by=BOB))


def test_an_answer_is_of_the_kind_that_is_asked_for() -> None:
    given(*WAITING).when(approve(1)).then(rejected("invalid", field="approved"))
    given(*APPROVING).when(answer(1, "yes")).then(rejected("invalid", field="approved"))
    given(*APPROVING).when(approve(1, answer="yes")).then(rejected("invalid", field="answer"))


def test_s13_an_answer_that_does_not_fit_is_refused_and_names_the_part() -> None:
    schema = {"type": "object", "required": ["city"], "properties": {"zip": {"type": "integer"}}}
    session = waits_with(ask("a", schema=schema))
    session.when(answer(1, {})).then(rejected("invalid", field="answer.city"))
    session.when(answer(1, {"city": "x", "zip": "1"})).then(rejected("invalid", field="answer.zip"))
    session.when(answer(1, "x")).then(rejected("invalid", field="answer"))
    session.when(answer(1, {"city": "x"})).then(answered(1, 1, {"city": "x"}))
    chooses = waits_with(ask("a", choices=("red", "blue")))
    chooses.when(answer(1, "green")).then(rejected("invalid", field="answer"))
    chooses.when(answer(1, "red")).then(answered(1, 1, "red"))


def test_what_is_not_there_is_not_found() -> None:
    given(*WAITING).when(answer(2, "x")).then(rejected("not_found"))
    given(*WAITING).when(answer(0, "x")).then(rejected("not_found"))
    given(*WAITING).when(answer(1, "x", k=2)).then(rejected("not_found"))
    given(*RUNNING).when(answer(1, "x", k=1)).then(rejected("not_found"))
    given().when(answer(1, "x")).then(rejected("not_found"))


@pytest.mark.parametrize(
    "facts",
    [
        RUNNING[:2],
        RUNNING,
        QUESTION,
        (*RUNNING, released(1)),
        (*RUNNING, ended(1)),
        (*RUNNING, ended(1, "failed")),
        (*OPEN, answered(1, 1), answered(1, 2, approved=True)),
    ],
    ids=["queued", "running", "before it is asked", "given back", "completed", "failed", "several are closed"],
)
def test_a_run_that_waits_for_nothing_takes_no_answer(facts: tuple[Fact, ...]) -> None:
    given(*facts).when(answer(1, "x")).then(rejected("not_waiting", run="s1.1"))


def test_a_request_ends_with_its_run() -> None:
    for status in ("cancelled", "failed", "timed_out"):
        over = given(*OPEN, ended(1, status))
        over.when(answer(1, "x", k=1)).then(rejected("request_closed", request="s1.1.q1"))
        over.when(approve(1, k=2)).then(rejected("request_closed", request="s1.1.q2"))
    given(*WAITING, ended(1, "failed")).when(answer(1, "x")).then(rejected("request_closed"))
    given(*WAITING, answered(1, 1, "x"), ended(1, "cancelled")).when(answer(1, "x")).then(NOTHING)


def test_an_answer_by_a_message_and_an_answer_are_the_same() -> None:
    by_message = given(*WAITING).when(post("m2", "blue")).then(answers("m2", 1, "blue", q1="blue"))
    by_message.and_when(answer(1, "blue")).then(NOTHING)
    by_message.and_when(answer(1, "red")).then(rejected("already_answered"))
    declined = given(*APPROVING, answers("m2", 1, q1=None))
    declined.when(approve(1, False)).then(NOTHING)
    declined.when(approve(1)).then(rejected("already_answered"))
    answered_first = given(*WAITING, answered(1, 1, "blue"))
    answered_first.when(post("m2", "blue")).then(rejected("run_active"))


def test_only_what_is_said_after_the_question_answers_it() -> None:
    facts = (*QUESTION, steers("m2", 1, "blue"), queued("m3", 2), waiting(1, ask("a")))
    session = given(*facts)
    assert session.session.runs[0].status == "waiting"
    session.when(withdraw("m2")).then(withdrawn("m2"))


# -- expiry -----------------------------------------------------------------------------------------------------------


def test_a_request_that_expires_asks_for_a_timer_of_its_own() -> None:
    by = spec("painter")
    session = given(opened(), posted("m1", 1, by=by), started(1, 1, "m1"), asks(1, 1, a="question", b="approval"))
    fact = waiting(1, ask("a", 1, expires_in=500), ask("b", 2, kind="approval"))
    outcome = session.when(record(fact)).then(fact)
    assert outcome.decision.dues == (Due(500, "gpu", "expiry-1-1"),)
    assert outcome.decision.settled == ("deadline-1",)
    asked = outcome.session.runs[0].requests
    assert [request.expires_at for request in asked] == [outcome.session.seq + 500, None]
    closed = outcome.and_when(answer(1, "x", k=1))
    assert closed.decision.settled == ("expiry-1-1",)
    assert outcome.and_when(approve(1, k=2)).decision.settled == ()
    assert outcome.and_when(cancel(1)).decision.settled == ("expiry-1-1",)


def test_a_message_that_answers_settles_the_timers_of_what_it_closes() -> None:
    two = waits_with(ask("a", 1, expires_in=500), ask("b", 2, expires_in=900))
    assert two.when(post("m2", "x")).decision.settled == ("expiry-1-1", "expiry-1-2")


def test_s14_an_answer_in_time_wins_and_one_after_it_loses() -> None:
    session = waits_with(ask("a", expires_in=500))
    over = session.session.seq + 500
    assert next_due(session.session, DRIVE) == over
    session.when(answer(1, "x", at=over - 1)).then(answered(1, 1, "x"))
    session.when(answer(1, "x", at=over)).then(rejected("request_expired", request="s1.1.q1"))
    session.when(expire(1, now=over - 1)).then(rejected("invalid_transition"))
    assert session.planned(now=over - 1) == ()
    (effect,) = session.planned(OTHER, now=over)
    assert effect == Expire(key="default/s1.1:0:expire:1", run=1, request=1)
    outcome = session.when(expire(1, now=over)).then(expired(1), wakes=())
    assert outcome.decision.settled == ("expiry-1-1",)
    outcome.and_when(answer(1, "x", at=over)).then(rejected("request_expired"))
    outcome.and_when(expire(1, now=over)).then(NOTHING)
    session.when(answer(1, "x")).and_when(expire(1, now=over)).then(NOTHING)


def test_what_never_expires_never_expires() -> None:
    session = waits_with(ask("a"))
    assert session.planned(now=10**15) == ()
    assert next_due(session.session, DRIVE) is None
    session.when(expire(1, now=10**15)).then(rejected("invalid_transition"))
    session.when(answer(1, "x", at=10**15)).then(answered(1, 1, "x"))
    session.when(expire(7, now=1)).then(NOTHING)


@pytest.mark.parametrize("on_expiry", ["default", "null"])
def test_s14_a_question_that_has_a_way_out_takes_it(on_expiry: str) -> None:
    session = waits_with(ask("a", expires_in=500, on_expiry=on_expiry, default="red"))
    over = session.when(expire(1, now=10**6)).then(expired(1))
    (go_on,) = over.given.planned(OTHER, now=10**6)
    assert isinstance(go_on, Start)
    assert (go_on.trigger, go_on.message_ids) == ("answers", ())
    resumed_ = over.and_when(start(resumed(1, 2)))
    (effect,) = resumed_.given.planned()
    assert isinstance(effect, Return)
    assert (effect.call.closed, effect.call.closed_seq) == ("expired", over.session.seq)
    resumed_.and_when(record(returned(1, "a", 2, output="red"))).then(returned(1, "a", 2, output="red"))


def test_s14_a_question_that_has_none_fails_the_run() -> None:
    both = waits_with(ask("a", expires_in=500), ask("b", 2))
    over = both.when(expire(1, now=10**6)).then(expired(1))
    (end,) = over.given.planned(OTHER, now=10**6)
    assert isinstance(end, End)
    assert (end.status, end.error) == ("failed", failure("request_expired", "nobody answered in time"))
    over.and_when(answer(1, "x", k=2)).then(rejected("request_closed", run="s1.1"))
    over.and_when(record(ended(1, "failed", error=end.error))).then(
        ended(1, "failed", error=end.error, unfinished=("a", "b"))
    )
    alone = waits_with(ask("a", expires_in=500)).when(expire(1, now=10**6))
    alone.and_when(start(resumed(1, 2))).then(rejected("invalid_transition"))
    assert [type(effect) for effect in alone.given.planned(OTHER, now=10**6)] == [End]


@pytest.mark.parametrize("on_expiry", ["fail", "default", "null"])
def test_an_approval_that_expires_is_a_denial(on_expiry: str) -> None:
    session = waits_with(ask("b", kind="approval", expires_in=500, on_expiry=on_expiry, default=True))
    over = session.when(expire(1, now=10**6)).and_when(start(resumed(1, 2)))
    (effect,) = over.given.planned()
    assert isinstance(effect, Return)
    for status in ("ok", "error", "uncertain"):
        over.and_when(record(returned(1, "b", 2, status))).then(rejected("invalid_transition"))
    over.and_when(record(tool_started(1, "b", 2))).then(rejected("invalid_transition"))
    over.and_when(record(returned(1, "b", 2, "denied"))).then(returned(1, "b", 2, "denied"))


# -- going on ---------------------------------------------------------------------------------------------------------


def test_s53_a_run_resumed_by_a_reply_names_that_message() -> None:
    session = given(*WAITING, answers("m2", 1, "blue", q1="blue"))
    (go_on,) = session.planned(OTHER)
    assert isinstance(go_on, Start)
    assert (go_on.trigger, go_on.message_ids) == ("reply", ("m2",))
    session.when(start(resumed(1, 2, by="reply"))).then(rejected("invalid", field="message_ids"))
    session.when(start(resumed(1, 2, "m2"))).then(rejected("invalid", field="trigger"))
    session.when(start(resumed(1, 2, "m2", by="reply"))).then(resumed(1, 2, "m2", by="reply"))


def test_s53_a_run_resumed_once_its_requests_are_answered_names_what_it_takes_as_its_prompt() -> None:
    steer = PolicyData(on_busy="steer")
    answered_ = given(opened(policy=steer), *WAITING[1:], answered(1, 1, "x"))
    assert run_of(answered_).next_start() == ("answers", ())
    talked = answered_.when(post("m2")).then(steers("m2", 1)).and_when(post("m3")).then(steers("m3", 1))
    assert run_of(talked.given).next_start() == ("answers", ("m2", "m3"))
    talked.and_when(start(resumed(1, 2, "m3"))).then(rejected("invalid", field="message_ids"))
    talked.and_when(start(resumed(1, 2, "m1"))).then(rejected("invalid", field="message_ids"))
    all_ = talked.and_when(start(resumed(1, 2, "m2", "m3"))).then(resumed(1, 2, "m2", "m3"))
    assert run_of(all_.given).steering == ()
    late = talked.and_when(start(resumed(1, 2, "m2"))).then(resumed(1, 2, "m2"))
    assert run_of(late.given).steering == ("m3",), "it came too late for the start, and steers"


def test_s53_a_message_that_declined_is_named_when_the_rest_is_answered_otherwise() -> None:
    decline = OnMessageData(approval="decline")
    session = given(opened(policy=PolicyData(on_message=decline)), *OPEN[1:])
    declined = session.when(post("m2", "no")).then(answers("m2", 1, "no", q2=None), wakes=())
    by_answer = declined.and_when(answer(1, "x"))
    assert run_of(by_answer.given).next_start() == ("answers", ("m2",))
    by_answer.and_when(start(resumed(1, 2))).then(rejected("invalid", field="message_ids"))
    by_reply = declined.and_when(post("m3", "x"))
    assert run_of(by_reply.given).next_start() == ("reply", ("m2", "m3"))


def test_s47_an_answer_that_was_stored_resumes_the_run_whoever_does_it() -> None:
    """The runner, the API and the broker may all die meanwhile: the log says it."""
    facts = (*WAITING, answers("m2", 1, "blue", q1="blue"))
    for nonce in ("first", "second"):
        (go_on,) = given(*facts).planned(drive(WAKE, nonce=nonce))
        assert isinstance(go_on, Start)
        assert go_on.trigger == "reply"
    dead = given(*facts, resumed(1, 2, "m2", by="reply"))
    again = drive(Wake(work=7, cause=20, delivery=2), nonce="again")
    (recovery,) = dead.planned(again)
    assert isinstance(recovery, Start)
    assert (recovery.trigger, recovery.message_ids) == ("recovery", ()), "earlier attempts' messages stay taken"


def test_an_answer_becomes_the_result_of_its_call_and_then_the_model_is_called() -> None:
    session = given(*WAITING, answered(1, 1, "x"), resumed(1, 2))
    (effect,) = session.planned()
    assert isinstance(effect, Return)
    assert (effect.key, effect.call.closed, effect.call.closed_seq) == ("default/s1.1:1:a", "answered", 60)
    for status in ("denied", "uncertain", "interrupted"):
        session.when(record(returned(1, "a", 2, status))).then(rejected("invalid_transition"))
    session.when(record(tool_started(1, "a", 2))).then(rejected("invalid_transition"))
    (model,) = session.when(record(returned(1, "a", 2))).given.planned()
    assert model == CallModel(key="default/s1.1:2", run=1, attempt=2, step=2)


def test_s12_a_call_that_was_approved_is_carried_out_once() -> None:
    session = given(*APPROVING, answered(1, approved=True), resumed(1, 2))
    (effect,) = session.planned()
    assert isinstance(effect, CallTool)
    assert effect.key == "default/s1.1:1:b"
    begun = session.when(record(tool_started(1, "b", 2))).then(tool_started(1, "b", 2))
    begun.and_when(record(tool_started(1, "b", 2))).then(rejected("invalid_transition"))
    begun.and_when(record(returned(1, "b", 2))).then(returned(1, "b", 2))
    session.when(record(returned(1, "b", 2, "denied"))).then(returned(1, "b", 2, "denied"))


def test_s19_an_approved_call_that_was_begun_by_a_dead_attempt_is_uncertain() -> None:
    facts = (*APPROVING, answered(1, approved=True), resumed(1, 2), tool_started(1, "b", 2))
    later = given(*facts, started(1, 3, wake=Wake(work=7, cause=20, delivery=2)))
    (effect,) = later.planned()
    assert isinstance(effect, Settle)
    later.when(record(returned(1, "b", 3))).then(rejected("invalid_transition"))


def test_a_call_that_nobody_has_approved_is_not_carried_out() -> None:
    asked = given(*APPROVAL)
    asked.when(record(tool_started(1, "b"))).then(rejected("invalid_transition"))
    asked.when(record(returned(1, "b"))).then(rejected("invalid_transition"))
    denied = given(*APPROVING, answered(1, approved=False), resumed(1, 2))
    (effect,) = denied.planned()
    assert isinstance(effect, Return)
    denied.when(record(tool_started(1, "b", 2))).then(rejected("invalid_transition"))
    denied.when(record(returned(1, "b", 2))).then(rejected("invalid_transition"))
    denied.when(record(returned(1, "b", 2, "denied"))).then(returned(1, "b", 2, "denied"))


def test_a_runner_that_dies_on_the_way_changes_nothing() -> None:
    facts = (*OPEN, answered(1, 1, "x"), answered(1, 2, approved=True), resumed(1, 2))
    first = given(*facts).planned()
    again = given(*facts, started(1, 3, wake=Wake(work=7, cause=20, delivery=2))).planned()
    assert [(type(effect), effect.key) for effect in first] == [(type(effect), effect.key) for effect in again]


def test_s57_ten_questions_in_one_run() -> None:
    session = given(opened(), posted("m1", 1), started(1, 1, "m1"))
    for n in range(1, 11):
        turn = session.when(record(asks(1, n, n, a="question"))).and_when(record(waiting(1, ask("a", n), attempt=n)))
        turn = turn.and_when(answer(1, n)).and_when(start(resumed(1, n + 1)))
        session = turn.and_when(record(returned(1, "a", n + 1))).given
    run = run_of(session)
    assert (run.asked, run.attempt, run.recoveries, run.requests) == (10, 11, 0, ())
    session.when(answer(1, 3, k=3)).then(NOTHING)
    session.when(answer(1, 4, k=3)).then(rejected("already_answered"))


# -- the clock --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", ["running", "wall"])
def test_the_clock_of_a_run_that_waits(clock: Any) -> None:
    policy = PolicyData(clock=clock)
    session = waits_with(ask("a"), policy=policy, timeout=5000)
    begun_at, asked_at = 30, session.session.seq
    run = run_of(session)
    if clock == "wall":
        assert run.deadline == begun_at + 5000
        (end,) = session.planned(OTHER, now=begun_at + 5000)
        assert isinstance(end, End)
        assert end.status == "timed_out"
        assert next_due(session.session, DRIVE) == begun_at + 5000
        go_on = session.when(answer(1, "x")).and_when(start(resumed(1, 2)))
        assert go_on.decision.dues == ()
        assert run_of(go_on.given).deadline == begun_at + 5000
        return
    left = 5000 - (asked_at - begun_at)
    assert (run.deadline, run.left) == (None, left)
    assert session.planned(OTHER, now=10**12) == ()
    go_on = session.when(answer(1, "x")).and_when(start(resumed(1, 2)))
    assert go_on.decision.dues == (Due(left, "default", "deadline-1"),)
    assert run_of(go_on.given).deadline == go_on.session.seq + left


def test_asking_settles_the_deadline_only_where_the_clock_stands() -> None:
    for clock, settled in (("running", ("deadline-1",)), ("wall", ())):
        policy = PolicyData(clock=clock)  # pyright: ignore[reportArgumentType]
        facts = (posted("m1", 1, by=spec(policy=policy)), started(1, 1, "m1"), asks(1, 1, a="question"))
        assert given(opened(), *facts).when(record(waiting(1, ask("a")))).decision.settled == settled


def test_time_that_has_run_out_before_it_waits_runs_out_when_it_goes_on() -> None:
    session = waits_with(ask("a"), timeout=5)
    assert run_of(session).left == 0
    go_on = session.when(answer(1, "x")).and_when(start(resumed(1, 2)))
    (end,) = go_on.given.planned(now=go_on.session.seq)
    assert isinstance(end, End)
    assert end.status == "timed_out"


# -- ending while it waits --------------------------------------------------------------------------------------------


def test_s16_a_run_that_waits_is_cancelled_at_once() -> None:
    session = given(*OPEN, queued("m2", 2))
    outcome = session.when(cancel(1, "enough"))
    outcome.then(ended(1, "cancelled", reason="enough", model="demo", unfinished=("a", "b")), wakes=("default",))
    outcome.and_when(answer(1, "x", k=1)).then(rejected("request_closed"))


def test_what_steered_a_run_that_ends_while_it_waits_is_the_next_run() -> None:
    session = given(*QUESTION, steers("m2", 1), waiting(1, ask("a")))
    outcome = session.when(cancel(1))
    expected = ended(1, "cancelled", model="demo", unfinished=("a",), leftover=left_over(2, "m2"))
    outcome.then(expected, wakes=("default",))
    (effect,) = outcome.given.planned()
    assert isinstance(effect, Start)
    assert (effect.run, effect.trigger, effect.message_ids) == (2, "leftover", ("m2",))


def test_steering_is_taken_after_the_answer_s_result() -> None:
    session = given(*WAITING, answers("m2", 1, q1="x"), steers("m3", 1), resumed(1, 2, "m2", by="reply"))
    (effect,) = session.planned()
    assert isinstance(effect, Return)
    (then,) = session.when(record(returned(1, "a", 2))).given.planned()
    assert isinstance(then, Steer)
    assert then.message_ids == ("m3",)


def test_a_start_of_a_drive_is_its_own_actor_s() -> None:
    outcome = given(*WAITING, answered(1)).when(start(resumed(1, 2)))
    assert outcome.decision.event.actor == RUNNER
    assert given(*WAITING).when(answer(1)).decision.event.actor == ANN
