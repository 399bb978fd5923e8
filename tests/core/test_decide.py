"""What may be stored, rule by rule."""

from typing import Any

import msgspec
import pytest
from tests.core.scenario import (
    AGENTS,
    ANN,
    NOTHING,
    QUEUE,
    REJECT,
    WAKE,
    attached,
    cancel,
    cancel_requested,
    ended,
    failure,
    given,
    handover,
    notice,
    open_session,
    opened,
    origin,
    post,
    posted,
    queued,
    record,
    rejected,
    released,
    replied,
    returned,
    said,
    spec,
    start,
    started,
    title,
    tool_started,
    update,
    with_origin,
    withdraw,
    withdrawn,
)

from turnstream.ids import derive
from turnstream.session.events import (
    Due,
    MessagePosted,
    Opens,
    PolicyData,
    SessionOpened,
    SessionUpdated,
    Usage,
    Wake,
)

OTHER_WAKE = Wake(work=8, cause=50, delivery=1)
REDELIVERED = Wake(work=7, cause=20, delivery=2)

IDLE = (opened(), posted("m1", 1), started(1, 1, "m1"), ended(1))
QUEUED = (opened(), posted("m1", 1))
RUNNING = (*QUEUED, started(1, 1, "m1"))
CALLING = (*RUNNING, replied(1, 1, "a", "b"))
RELEASED = (*RUNNING, released(1))


# -- opening, changing, naming ----------------------------------------------------------------------------------------


def test_s01_one_message_is_four_events() -> None:
    turn = given().when(open_session()).then(opened(), wakes=())
    turn = turn.and_when(post("m1")).then(posted("m1", 1), wakes=("default",))
    turn = turn.and_when(start(started(1, 1, "m1"))).then(started(1, 1, "m1"), wakes=())
    turn = turn.and_when(record(ended(1, content="hi"))).then(ended(1, content="hi"), wakes=())
    assert not turn.session.runs
    assert turn.session.last_end == "completed"
    assert [turn.run for turn in turn.session.turns] == [1]


def test_a_session_opens_with_every_field_that_it_is_given() -> None:
    opens = Opens(agent="poet", title=title("T", "user"), metadata={"a": 1}, policy=QUEUE, one_shot=True)
    command = msgspec.structs.replace(open_session(), opens=opens)
    outcome = given().when(command).then(SessionOpened(**msgspec.structs.asdict(opens)))
    fields = {*Opens.__struct_fields__, "forked_from"}
    assert fields == set(SessionOpened.__struct_fields__), "a field that opening would drop"
    assert outcome.session.agent_name == "poet"
    assert outcome.session.one_shot


def test_a_session_that_is_there_stays_as_it_is() -> None:
    given(opened(agent="poet")).when(open_session(agent="painter")).then(NOTHING)


def test_opening_again_changes_the_fields_that_are_given() -> None:
    command = open_session(given=["agent", "policy"], agent="painter", policy=QUEUE)
    given(opened()).when(command).then(SessionUpdated(agent="painter", policy=QUEUE))


def test_a_message_opens_the_session_that_it_needs() -> None:
    opens = Opens(agent="poet", policy=QUEUE)
    outcome = given().when(post("m1", opens=opens)).then(posted("m1", 1, by=spec("poet", QUEUE), opens=opens))
    assert outcome.session.policy == QUEUE
    given(*IDLE).when(post("m2", opens=opens)).then(posted("m2", 2))


@pytest.mark.parametrize(
    "command",
    [update(agent="poet"), post("m1"), withdraw("m1"), cancel(1), start(started(1)), record(ended(1))],
    ids=repr,
)
def test_a_session_that_nobody_opened_is_not_found(command: object) -> None:
    given().when(command).then(rejected("not_found"))


def test_an_update_says_what_changes() -> None:
    given(opened()).when(update(metadata={})).then(SessionUpdated(metadata={}))
    given(opened()).when(update()).then(NOTHING)
    assert given(opened(), SessionUpdated(agent="poet")).session.agent == "poet"


RANKS = ["derived", "client", "agent", "user"]


@pytest.mark.parametrize("there", RANKS)
@pytest.mark.parametrize("new", RANKS)
def test_a_title_never_replaces_one_of_a_higher_source(there: str, new: str) -> None:
    session = given(opened(title=title("old", there)))
    session_by_update = given(opened(), SessionUpdated(title=title("old", there)))
    stored = SessionUpdated(title=title("new", new)) if RANKS.index(new) >= RANKS.index(there) else NOTHING
    session.when(update(title=title("new", new))).then(stored)
    session_by_update.when(update(title=title("new", new))).then(stored)


def test_a_late_title_loses_but_the_rest_of_the_update_is_stored() -> None:
    session = given(opened(title=title("mine", "user")))
    session.when(update(title=title("late", "agent"), agent="poet")).then(SessionUpdated(agent="poet"))
    session.when(open_session(given=["title"], title=title("late", "client"))).then(NOTHING)


# -- where a message goes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [QUEUED, RUNNING, CALLING, RELEASED, (*RUNNING, cancel_requested(1))])
def test_s03_strict_refuses_a_second_message_and_names_the_run(live: tuple) -> None:
    given(*live).when(post("m2")).then(rejected("run_active", run="s1.1"))


def test_s03_a_refusal_names_the_run_that_holds_the_turn() -> None:
    session = given(
        opened(), posted("m1", 1), queued("m2", 2), withdrawn("m1", 1), started(2, 1, "m2"), queued("m3", 3)
    )
    session.when(post("m4")).then(rejected("run_active", run="s1.2"))


@pytest.mark.parametrize("live", [QUEUED, RUNNING, CALLING, RELEASED])
def test_s03_queue_lets_it_wait_for_its_turn(live: tuple) -> None:
    session = given(opened(policy=QUEUE), *live[1:])
    outcome = session.when(post("m2")).then(queued("m2", 2, by=spec(policy=QUEUE)), wakes=())
    outcome.and_when(post("m3")).then(queued("m3", 3, by=spec(policy=QUEUE)), wakes=())


def test_s03_queued_messages_run_in_order_one_at_a_time() -> None:
    session = given(opened(), posted("m1", 1), queued("m2", 2), queued("m3", 3))
    session.when(start(started(2, 1, "m2"))).then(rejected("invalid_transition"))
    turn = session.when(start(started(1, 1, "m1")))
    turn.and_when(start(started(2, 1, "m2"))).then(rejected("invalid_transition"))
    turn = turn.and_when(record(ended(1))).and_when(start(started(2, 1, "m2"))).then(started(2, 1, "m2"))
    turn = turn.and_when(record(ended(2))).and_when(start(started(3, 1, "m3"))).then(started(3, 1, "m3"))


def test_a_message_carries_its_own_on_busy() -> None:
    given(opened(policy=QUEUE), *RUNNING[1:]).when(post("m2", policy=REJECT)).then(rejected("run_active"))
    given(*RUNNING).when(post("m2", policy=QUEUE)).then(queued("m2", 2))


def test_the_policy_of_a_session_can_be_changed() -> None:
    changed = given(*RUNNING, SessionUpdated(policy=QUEUE))
    changed.when(post("m2")).then(queued("m2", 2, by=spec(policy=QUEUE)))
    given(opened(policy=QUEUE), *RUNNING[1:], SessionUpdated(policy=PolicyData())).when(post("m2")).then(
        rejected("run_active")
    )


def test_s05_a_message_while_a_run_ends_is_accepted_or_refused() -> None:
    before = given(*RUNNING)
    before.when(post("m2")).then(rejected("run_active"))
    before.when(record(ended(1))).and_when(post("m2")).then(posted("m2", 2), wakes=("default",))


@pytest.mark.parametrize("session", [IDLE, QUEUED, RUNNING])
def test_a_notice_starts_nothing(session: tuple) -> None:
    given(*session).when(post("n1", "by the way", kind="notice")).then(notice("n1"), wakes=())


@pytest.mark.parametrize("text", ["", " ", "\n\t "])
@pytest.mark.parametrize("kind", ["message", "notice"])
def test_a_message_has_something_to_say(text: str, kind: str) -> None:
    given(opened()).when(post("m1", text, kind=kind)).then(rejected("invalid", field="content"))
    given(opened()).when(post("m1", kind=kind, content=())).then(rejected("invalid", field="content"))


@pytest.mark.parametrize("kind", ["message", "notice"])
def test_s32_an_attachment_is_something_to_say(kind: Any) -> None:
    sent = post("m1", "", kind=kind, attachments=(attached(),), context="page 3")
    event = given(opened()).when(sent).decision.event
    assert isinstance(event.data, MessagePosted)
    assert (event.data.attachments, event.data.context) == ((attached(),), "page 3")
    assert event.data.content == said("")
    alone = post("m1", "", kind=kind, context="page 3")
    given(opened()).when(alone).then(rejected("invalid", field="content"))


def test_a_message_names_its_agent_and_model() -> None:
    session = given(opened(agent="poet"))
    session.when(post("m1")).then(posted("m1", 1, by=AGENTS["poet"]))
    named = session.when(post("m1", agent="painter", model="big"))
    named.then(posted("m1", 1, by=msgspec.structs.replace(AGENTS["painter"], model="big")), wakes=("gpu",))


def test_an_unknown_agent_is_refused_at_the_entrance() -> None:
    given(opened()).when(post("m1", agent="nobody")).then(rejected("agent_not_found", field="agent"))
    given(opened(agent="gone")).when(post("m1")).then(rejected("agent_not_found"))
    given().when(post("m1", opens=Opens(agent="nobody"))).then(rejected("agent_not_found"))


@pytest.mark.parametrize("session", [QUEUED, RUNNING, IDLE, (opened(), notice("m1")), (*QUEUED, withdrawn("m1", 1))])
@pytest.mark.parametrize("kind", ["message", "notice"])
def test_a_message_id_is_used_once(session: tuple, kind: str) -> None:
    given(*session).when(post("m1", kind=kind, policy=QUEUE)).then(rejected("already_exists", field="message_id"))


# -- repeats ----------------------------------------------------------------------------------------------------------

KEYED = {"idempotency_key": "k", "body_digest": "b"}


def test_s06_the_same_key_again_has_one_effect() -> None:
    command = with_origin(post("m1"), **KEYED)
    first = given(opened()).when(command).then(posted("m1", 1))
    again = first.and_when(with_origin(post("m1"), id="another try", **KEYED)).then(NOTHING)
    receipt = again.session.receipt("k")
    assert receipt is not None
    assert (receipt.message_id, receipt.run, receipt.routed) == ("m1", 1, "started")
    assert receipt.seq == first.session.seq


def test_s07_the_same_key_with_another_body_is_refused() -> None:
    first = given(opened()).when(with_origin(post("m1"), **KEYED))
    other = with_origin(post("m2", "something else"), idempotency_key="k", body_digest="c")
    first.and_when(other).then(rejected("key_reused", seq=first.session.seq))


def test_a_repeat_is_seen_before_the_guard_and_the_routing() -> None:
    first = given(opened()).when(with_origin(post("m1"), **KEYED))
    first.and_when(with_origin(post("m1"), expected_seq=10, **KEYED)).then(NOTHING)


@pytest.mark.parametrize(
    ("session", "command", "run", "routed"),
    [
        ((opened(policy=QUEUE), *RUNNING[1:]), post("m2"), 2, "queued"),
        (IDLE, post("n1", kind="notice"), 0, "none"),
        (RUNNING, cancel(1), 1, None),
        (QUEUED, cancel(1), 1, None),
        (QUEUED, withdraw("m1"), 0, None),
        (IDLE, update(agent="poet"), 0, None),
    ],
    ids=["queued", "notice", "cancel running", "cancel queued", "withdraw", "update"],
)
def test_a_receipt_holds_the_first_answer(session: tuple, command: object, run: int, routed: str | None) -> None:
    outcome = given(*session).when(with_origin(command, **KEYED))
    receipt = outcome.session.receipt("k")
    assert receipt is not None
    assert (receipt.run, receipt.routed, receipt.seq) == (run, routed, outcome.session.seq)
    outcome.and_when(with_origin(command, id="again", **KEYED)).then(NOTHING)


def test_a_refused_command_leaves_no_receipt() -> None:
    refused = given(*RUNNING).when(with_origin(post("m2"), **KEYED)).then(rejected("run_active"))
    refused.and_when(record(ended(1))).and_when(with_origin(post("m2"), **KEYED)).then(posted("m2", 2))


def test_receipts_the_opening_one_is_kept_for_ever_and_a_thousand_others() -> None:
    outcome = given().when(with_origin(open_session(), idempotency_key="open", body_digest="b"))
    for n in range(1200):
        outcome = outcome.and_when(with_origin(update(agent="poet"), idempotency_key=f"k{n}", body_digest="b"))
    assert outcome.session.receipt("open") is not None
    assert all(outcome.session.receipt(f"k{n}") for n in range(200, 1200))
    assert outcome.session.receipt("k0") is None
    repeat = with_origin(open_session(), id="again", idempotency_key="open", body_digest="other")
    outcome.and_when(repeat).then(rejected("key_reused", seq=10))


def test_s55_a_write_that_expects_another_sequence_is_refused() -> None:
    session = given(*IDLE)
    session.when(with_origin(post("m2"), expected_seq=30)).then(rejected("session_moved", seq=40))
    session.when(with_origin(post("m2"), expected_seq=40)).then(posted("m2", 2))
    session.when(with_origin(update(agent="poet"), expected_seq=0)).then(rejected("session_moved"))
    given().when(with_origin(open_session(), expected_seq=0)).then(opened())
    given().when(with_origin(post("m1"), expected_seq=3)).then(rejected("not_found"))


# -- withdrawing ------------------------------------------------------------------------------------------------------


def test_a_queued_message_can_be_withdrawn_until_a_run_takes_it() -> None:
    session = given(opened(), posted("m1", 1), queued("m2", 2))
    outcome = session.when(withdraw("m2")).then(withdrawn("m2", 2), wakes=())
    assert [run.n for run in outcome.session.runs] == [1]
    assert outcome.session.last_end == "cancelled"
    assert outcome.session.turns == ()


@pytest.mark.parametrize("session", [RUNNING, RELEASED, IDLE, (opened(), notice("m1"))])
def test_a_message_that_waits_for_nothing_cannot_be_withdrawn(session: tuple) -> None:
    given(*session).when(withdraw("m1")).then(rejected("not_queued"))


def test_a_message_that_was_withdrawn_stays_so() -> None:
    outcome = given(*QUEUED).when(withdraw("m1"))
    outcome.and_when(with_origin(withdraw("m1"), id="again", idempotency_key="k")).then(NOTHING)
    outcome.and_when(post("m1")).then(rejected("already_exists"))
    late = given(*RUNNING, withdrawn("m1"))
    late.when(withdraw("m1")).then(rejected("not_queued", run="s1.1"))


def test_a_message_that_was_never_posted_cannot_be_withdrawn() -> None:
    given(*QUEUED).when(withdraw("m9")).then(rejected("not_found"))


def test_withdrawing_the_front_wakes_the_queue_of_the_next() -> None:
    session = given(opened(), posted("m1", 1), queued("m2", 2, by=AGENTS["painter"]))
    session.when(withdraw("m1")).then(withdrawn("m1", 1), wakes=("gpu",))
    given(opened(), posted("m1", 1), queued("m2", 2)).when(withdraw("m1")).then(withdrawn("m1", 1), wakes=("default",))


# -- cancelling -------------------------------------------------------------------------------------------------------


def test_s16_a_queued_run_is_cancelled_at_once() -> None:
    outcome = given(*QUEUED).when(cancel(1, "no need"))
    outcome.then(ended(1, "cancelled", attempt=0, reason="no need"), wakes=())
    outcome.and_when(cancel(1)).then(NOTHING)


def test_s16_a_running_run_is_asked_to_end() -> None:
    outcome = given(*RUNNING).when(cancel(1)).then(cancel_requested(1), wakes=("default",))
    outcome.and_when(cancel(1)).then(NOTHING)
    outcome.and_when(record(ended(1, "cancelled"))).then(ended(1, "cancelled"))


def test_s16_a_run_that_has_ended_stays_as_it_is() -> None:
    given(*IDLE).when(cancel(1)).then(NOTHING)


def test_a_run_that_never_was_cannot_be_cancelled() -> None:
    given(*IDLE).when(cancel(2)).then(rejected("not_found"))
    given(*IDLE).when(cancel(0)).then(rejected("not_found"))


def test_a_run_given_back_is_cancelled_at_once_with_the_calls_that_are_open() -> None:
    given(*RELEASED).when(cancel(1)).then(ended(1, "cancelled", model="demo"))
    outcome = given(*CALLING, released(1)).when(cancel(1))
    outcome.then(ended(1, "cancelled", model="demo", unfinished=("a", "b")), wakes=())


def test_cancelling_the_front_wakes_the_queue_of_the_next() -> None:
    session = given(opened(), posted("m1", 1), queued("m2", 2, by=AGENTS["painter"]))
    session.when(cancel(1)).then(ended(1, "cancelled", attempt=0), wakes=("gpu",))
    session.when(cancel(2)).then(ended(2, "cancelled", attempt=0), wakes=())


def test_a16_after_a_cancel_nothing_else_is_accepted() -> None:
    asked = given(*RUNNING, cancel_requested(1))
    for status in ("completed", "failed", "timed_out"):
        asked.when(record(ended(1, status))).then(rejected("invalid_transition", run="s1.1"))
    asked.when(record(replied(1, 1, "a"))).then(rejected("invalid_transition"))
    asked.when(start(started(1, 2, wake=REDELIVERED))).then(rejected("invalid_transition"))
    calling = given(*CALLING, cancel_requested(1))
    calling.when(record(tool_started(1, "a"))).then(rejected("invalid_transition"))
    calling.when(record(ended(1, "cancelled"))).then(ended(1, "cancelled", unfinished=("a", "b")))
    settled = calling.when(record(returned(1, "a"))).then(returned(1, "a"))
    settled.and_when(record(ended(1, "cancelled"))).then(ended(1, "cancelled", unfinished=("b",)))


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled", "timed_out"])
def test_a16_the_first_end_wins(status: str) -> None:
    over = given(*RUNNING, ended(1, status))
    for late in ("completed", "failed", "cancelled", "timed_out"):
        over.when(record(ended(1, late))).then(rejected("invalid_transition", run="s1.1"))
    over.when(cancel(1)).then(NOTHING)


def test_a17_a_cancel_before_the_start_means_it_never_starts() -> None:
    cancelled = given(*QUEUED).when(cancel(1))
    cancelled.and_when(start(started(1, 1, "m1"))).then(rejected("invalid_transition"))


# -- starting ---------------------------------------------------------------------------------------------------------


def test_the_first_start_sets_the_deadline_and_asks_for_a_timer() -> None:
    session = given(opened(), posted("m1", 1, by=spec("painter", timeout=5000)))
    outcome = session.when(start(started(1, 1, "m1"))).then(started(1, 1, "m1"))
    assert outcome.decision.dues == (Due(5000, "gpu", "deadline-1"),)
    run = outcome.session.run(1)
    assert run is not None
    assert run.deadline == outcome.session.seq + 5000, "milliseconds after the event's broker time"
    again = outcome.and_when(start(started(1, 2, wake=REDELIVERED)))
    assert again.decision.dues == ()
    later = again.session.run(1)
    assert later is not None
    assert later.deadline == run.deadline, "the clock runs from the first start"


def test_a_start_names_what_it_takes() -> None:
    given(*QUEUED).when(start(started(1, 1))).then(rejected("invalid", field="message_ids"))
    given(*QUEUED).when(start(started(1, 1, "m1", "m2"))).then(rejected("invalid", field="message_ids"))
    given(*QUEUED).when(start(msgspec.structs.replace(started(1, 1, "m1"), trigger="handover"))).then(
        rejected("invalid", field="trigger")
    )
    repeated = msgspec.structs.replace(started(1, 2, "m1", wake=REDELIVERED), trigger="recovery")
    given(*RUNNING).when(start(repeated)).then(rejected("invalid", field="message_ids"))


def test_s49_the_same_start_again_is_said_already() -> None:
    first = given(*QUEUED).when(start(started(1, 1, "m1")))
    first.and_when(start(started(1, 1, "m1"))).then(NOTHING)


def test_s49_of_two_starts_of_one_attempt_one_is_refused() -> None:
    first = given(*QUEUED).when(start(started(1, 1, "m1")))
    first.and_when(start(started(1, 1, "m1"), nonce="other")).then(rejected("fenced"))


def test_no_attempt_is_skipped() -> None:
    given(*QUEUED).when(start(started(1, 2, "m1"))).then(rejected("fenced"))
    given(*RUNNING).when(start(started(1, 3, wake=REDELIVERED))).then(rejected("fenced"))
    given(*RELEASED).when(start(handover(1, 3, OTHER_WAKE))).then(rejected("fenced"))


def test_s49_another_wake_up_leaves_a_live_run_alone() -> None:
    given(*RUNNING).when(start(started(1, 2, wake=OTHER_WAKE))).then(rejected("fenced"))
    given(*RUNNING).when(start(started(1, 2, wake=WAKE))).then(rejected("fenced"))
    given(*RUNNING).when(start(started(1, 2, wake=OTHER_WAKE), gone=[8, 9])).then(rejected("fenced"))


def test_s18_the_same_wake_up_delivered_again_takes_over() -> None:
    taken = given(*RUNNING).when(start(started(1, 2, wake=REDELIVERED))).then(started(1, 2, wake=REDELIVERED))
    taken.and_when(record(ended(1, attempt=2, content="hi"))).then(ended(1, attempt=2, content="hi"))


def test_s18_a_runner_whose_wake_up_is_gone_is_taken_over() -> None:
    given(*RUNNING).when(start(started(1, 2, wake=OTHER_WAKE), gone=[7])).then(started(1, 2, wake=OTHER_WAKE))


def test_s56_a_wake_up_of_another_cause_under_the_same_number_means_that_work_was_wiped() -> None:
    again = Wake(work=7, cause=400, delivery=1)
    given(*RUNNING).when(start(started(1, 2, wake=again))).then(started(1, 2, wake=again))


def test_a25_of_two_recoverers_one_is_refused() -> None:
    first = given(*RUNNING).when(start(started(1, 2, wake=REDELIVERED), nonce="a"))
    first.and_when(start(started(1, 2, wake=OTHER_WAKE), gone=[7], nonce="b")).then(rejected("fenced"))


def test_s21_a_fourth_recovery_without_a_new_fact_is_refused() -> None:
    facts = [*RUNNING, *(started(1, n, wake=Wake(work=7, cause=20, delivery=n)) for n in (2, 3, 4))]
    fourth = start(started(1, 5, wake=Wake(work=7, cause=20, delivery=5)))
    given(*facts[:-1]).when(start(facts[-1])).then(facts[-1])
    given(*facts).when(fourth).then(rejected("invalid_transition"))
    given(*facts, replied(1, 1, "a", attempt=4)).when(fourth).then(fourth.started)
    died = ended(1, "failed", 4, error=failure("max_attempts_exceeded"))
    given(*facts).when(record(died)).then(rejected("invalid_transition"))
    given(*facts).when(record(died, taking=OTHER_WAKE)).then(rejected("fenced"))
    over = given(*facts).when(record(died, taking=OTHER_WAKE, gone=[7])).then(died)
    over.and_when(post("m2")).then(posted("m2", 2))


def test_s21_a_call_that_is_only_settled_is_no_progress() -> None:
    """Else a run whose tool kills its runner would not end for it."""
    wakes = [Wake(work=7, cause=20, delivery=n) for n in range(6)]
    facts = (*CALLING, tool_started(1, "a"), started(1, 2, wake=wakes[2]), returned(1, "a", 2, "uncertain"))
    facts = (*facts, started(1, 3, wake=wakes[3]), started(1, 4, wake=wakes[4]))
    given(*facts).when(start(started(1, 5, wake=wakes[5]))).then(rejected("invalid_transition"))
    done = (*facts[:-2], returned(1, "b", 2), *facts[-2:])
    given(*done).when(start(started(1, 5, wake=wakes[5]))).then(started(1, 5, wake=wakes[5]))


def test_a25_a_run_that_went_on_is_not_failed_for_too_many_attempts() -> None:
    late = record(ended(1, "failed", error=failure("max_attempts_exceeded")), taking=REDELIVERED)
    given(*RUNNING).when(late).then(rejected("fenced"))


@pytest.mark.parametrize("status", ["failed", "cancelled", "timed_out"])
def test_whoever_may_not_take_a_run_over_does_not_end_it(status: Any) -> None:
    end = ended(1, status, error=failure("deadline_exceeded"))
    given(*RUNNING).when(record(end, taking=OTHER_WAKE)).then(rejected("fenced"))
    given(*RUNNING).when(record(end, taking=WAKE)).then(rejected("fenced"))
    given(*RUNNING).when(record(end, taking=REDELIVERED)).then(end)
    given(*RUNNING).when(record(end, taking=OTHER_WAKE, gone=[7])).then(end)
    given(*RELEASED).when(record(end, taking=OTHER_WAKE)).then(end)


def test_a_run_given_back_is_started_again_and_first_in_line() -> None:
    session = given(*RELEASED, queued("m2", 2))
    session.when(start(started(2, 1, "m2"))).then(rejected("invalid_transition"))
    taken = session.when(start(handover(1, 2, OTHER_WAKE))).then(handover(1, 2, OTHER_WAKE))
    run = taken.session.run(1)
    assert run is not None
    assert run.recoveries == 0, "a handover does not count"


def test_giving_a_run_back_wakes_its_queue() -> None:
    given(*RUNNING).when(record(released(1))).then(released(1), wakes=("default",))
    given(*RELEASED).when(record(released(1))).then(rejected("invalid_transition"))
    given(*QUEUED).when(record(released(1, attempt=0))).then(rejected("invalid_transition"))


# -- what an attempt reports ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fact",
    [replied(1, 1, "a"), tool_started(1, "a"), returned(1, "a"), released(1), ended(1), ended(1, "failed")],
    ids=lambda fact: type(fact).__name__,
)
def test_s20_a24_a_fact_of_an_older_attempt_is_fenced(fact: object) -> None:
    taken_over = started(1, 2, wake=REDELIVERED)
    given(*RUNNING, taken_over).when(record(fact)).then(rejected("fenced"))
    given(*CALLING, taken_over).when(record(fact)).then(rejected("fenced"))
    given(*RUNNING, taken_over, ended(1, attempt=2)).when(record(fact)).then(rejected("invalid_transition"))
    given(*QUEUED).when(record(fact)).then(rejected("fenced"))


def test_a_fact_of_a_run_that_never_was_is_not_found() -> None:
    given(*RUNNING).when(record(ended(2))).then(rejected("not_found"))


def test_steps_are_numbered_and_ask_for_tools() -> None:
    running = given(*RUNNING)
    running.when(record(replied(1, 1, "a"))).then(replied(1, 1, "a"), wakes=())
    running.when(record(replied(1, 2, "a"))).then(rejected("invalid_transition"))
    running.when(record(replied(1, 1))).then(rejected("invalid", field="tool_calls"))
    running.when(record(replied(1, 1, "a", "a"))).then(rejected("invalid", field="tool_calls"))
    given(*CALLING).when(record(replied(1, 2, "c"))).then(rejected("invalid_transition"))
    given(*RELEASED).when(record(replied(1, 1, "a"))).then(rejected("invalid_transition"))


def test_each_call_has_one_result() -> None:
    calling = given(*CALLING)
    first = calling.when(record(returned(1, "a", output="x"))).then(returned(1, "a", output="x"))
    first.and_when(record(returned(1, "a", status="error"))).then(rejected("invalid_transition"))
    calling.when(record(returned(1, "z"))).then(rejected("invalid_transition"))
    both = first.and_when(record(returned(1, "b")))
    both.and_when(record(replied(1, 2, "a"))).then(replied(1, 2, "a")).and_when(record(returned(1, "a"))).then(
        returned(1, "a")
    )


def test_a_run_with_an_open_call_does_not_complete_and_another_end_closes_it() -> None:
    given(*CALLING).when(record(ended(1))).then(rejected("invalid_transition"))
    for status in ("failed", "timed_out", "cancelled"):
        over = ended(1, status, unfinished=("a", "b"))
        given(*CALLING).when(record(ended(1, status))).then(over)
        given(*CALLING).when(record(ended(1, status, unfinished=("x",)))).then(over)
    half = given(*CALLING, returned(1, "a")).when(record(ended(1, "failed")))
    half.then(ended(1, "failed", unfinished=("b",)))


def test_s19_a_call_that_was_begun_by_an_older_attempt_is_never_begun_again() -> None:
    taken_over = given(*CALLING, tool_started(1, "a"), started(1, 2, wake=REDELIVERED))
    taken_over.when(record(tool_started(1, "a", attempt=2))).then(rejected("invalid_transition"))
    taken_over.when(record(returned(1, "a", 2, "ok"))).then(rejected("invalid_transition"))
    taken_over.when(record(returned(1, "a", 2, "uncertain"))).then(returned(1, "a", 2, "uncertain"))
    taken_over.when(record(tool_started(1, "b", attempt=2))).then(tool_started(1, "b", attempt=2))


def test_a_call_is_begun_once_and_only_while_its_run_runs() -> None:
    begun = given(*CALLING).when(record(tool_started(1, "a"))).then(tool_started(1, "a"), wakes=())
    begun.and_when(record(tool_started(1, "a"))).then(rejected("invalid_transition"))
    given(*CALLING, released(1)).when(record(tool_started(1, "a"))).then(rejected("invalid_transition"))
    given(*RUNNING).when(record(tool_started(1, "a"))).then(rejected("invalid_transition"))


def test_an_end_states_the_usage_of_the_whole_run() -> None:
    calling = given(*RUNNING, replied(1, 1, "a", tokens=5), returned(1, "a"))
    last = ended(1, step_usage=Usage(output_tokens=3, reasoning_tokens=1), usage=Usage(output_tokens=99))
    whole = msgspec.structs.replace(last, usage=Usage(output_tokens=8, reasoning_tokens=1))
    calling.when(record(last)).then(whole)


def test_the_end_of_a_run_wakes_the_next_one_of_another_queue() -> None:
    session = (opened(), posted("m1", 1), queued("m2", 2, by=AGENTS["painter"]), started(1, 1, "m1"))
    given(*session).when(record(ended(1))).then(ended(1), wakes=("gpu",))


def test_the_end_of_a_run_leaves_its_own_queue_to_the_drive_that_ends_it() -> None:
    given(*RUNNING, queued("m2", 2)).when(record(ended(1))).then(ended(1), wakes=())


def test_s45_a_turn_that_fails_before_it_starts_takes_nothing() -> None:
    gone = ended(1, "failed", attempt=0, error=failure("agent_not_found"))
    failed = given(*QUEUED).when(record(gone)).then(gone)
    assert failed.session.turns == ()
    assert failed.session.last_end == "failed"
    failed.and_when(start(started(1, 1, "m1"))).then(rejected("invalid_transition"))
    failed.and_when(post("m2")).then(posted("m2", 2), wakes=("default",))


def test_a_run_that_never_started_does_not_complete() -> None:
    given(*QUEUED).when(record(ended(1, "completed", attempt=0))).then(rejected("invalid_transition"))


def test_a15_what_is_queued_survives_the_end_of_the_run_in_front() -> None:
    for status in ("completed", "failed", "cancelled", "timed_out"):
        over = given(*RUNNING, queued("m2", 2), queued("m3", 3)).when(record(ended(1, status)))
        over.and_when(start(started(2, 1, "m2"))).then(started(2, 1, "m2"))


# -- circumstances ----------------------------------------------------------------------------------------------------


def test_an_event_carries_the_circumstances_of_its_command() -> None:
    words = {
        "id": derive("x"),
        "actor": "client:k1",
        "time": 123,
        "idempotency_key": "k",
        "body_digest": "b",
        "cause": "c",
        "correlation": "r",
        "traceparent": "t",
    }
    event = given(opened()).when(with_origin(post("m1"), **words)).decision.event
    assert {name: getattr(event, name) for name in words} == words
    assert event.type == "message.posted"


def test_deciding_again_gives_the_same_event() -> None:
    session = given(opened())
    assert session.when(post("m1")).decision == session.when(post("m1")).decision
    assert origin("post m1").id == session.when(post("m1")).decision.event.id
    assert session.when(post("m1", content=said("x"), author="user:bob")).decision.event.actor == ANN
