"""Where a message goes: every value of every policy in every state of a session, preset by preset."""

from typing import Any

import msgspec
import pytest
from tests.core.scenario import (
    AGENTS,
    ANN,
    Given,
    answered,
    answers,
    ask,
    asks,
    attached,
    cancel_requested,
    ended,
    expired,
    given,
    notice,
    opened,
    passed_over,
    post,
    posted,
    queued,
    rejected,
    released,
    replied,
    spec,
    started,
    steers,
    waiting,
    with_origin,
)

from turnstream.session.events import Fact, MessagePosted, OnMessageData, Opens, PolicyData
from turnstream.session.policy import PRESETS

BOB = "user:bob"
BOT = "client:bot"

QUEUED = (posted("m1", 1),)
RUNNING = (*QUEUED, started(1, 1, "m1"))
QUESTION = (*RUNNING, asks(1, 1, a="question"), waiting(1, ask("a")))
APPROVAL = (*RUNNING, asks(1, 1, b="approval"), waiting(1, ask("b", kind="approval")))
BOTH = (*RUNNING, asks(1, 1, a="question", b="approval"), waiting(1, ask("a"), ask("b", 2, kind="approval")))

BUSY: dict[str, tuple[Fact, ...]] = {
    "queued": QUEUED,
    "running": RUNNING,
    "calling": (*RUNNING, replied(1, 1, "a")),
    "cancel requested": (*RUNNING, cancel_requested(1)),
    "given back": (*RUNNING, released(1)),
    "to be resumed": (*QUESTION, answered(1, 1, "blue")),
    "about to fail": (*BOTH, expired(1, 1)),
}
WAITING: dict[str, tuple[Fact, ...]] = {"a question": QUESTION, "an approval": APPROVAL, "both": BOTH}
LIVE = {**BUSY, **WAITING}
ON_BUSY = ["reject", "queue", "steer", "interrupt", "parallel"]
ON_QUESTION = ["answer", "reject", "queue", "parallel"]
ON_APPROVAL = ["reject", "decline", "parallel"]


def with_policy(policy: PolicyData, facts: tuple[Fact, ...] = ()) -> Given:
    return given(opened(policy=policy), *facts)


def on_message(**given_fields: Any) -> PolicyData:
    return PolicyData(on_message=OnMessageData(**given_fields))


def when_busy(on_busy: str, policy: PolicyData, run: int = 1) -> tuple[Any, tuple[str, ...] | None]:
    """Where a message `m2` goes while this run is live, and whom it wakes."""
    by = spec(policy=policy)
    match on_busy:
        case "reject":
            return rejected("run_active", run=f"s1.{run}"), None
        case "queue":
            return queued("m2", 2, by=by), ()
        case "steer":
            return steers("m2", run), ()
        case "interrupt":
            return queued("m2", 2, by=by, interrupts=run), ("default",)
        case _:
            return posted("m2", 2, by=by), ("default",)


# -- every value, in every state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_busy", ON_BUSY)
@pytest.mark.parametrize("author", [ANN, BOB, BOT])
def test_where_nothing_is_live_a_message_starts_a_run(on_busy: str, author: str) -> None:
    policy = PolicyData(on_busy=on_busy, on_message=OnMessageData(question="reject", approval="reject"))
    expected = posted("m2", 1, by=spec(policy=policy), author=author)
    with_policy(policy).when(post("m2", author=author)).then(expected, wakes=("default",))
    over = with_policy(policy, (*RUNNING, ended(1)))
    over.when(post("m2", author=author)).then(posted("m2", 2, by=spec(policy=policy), author=author))


@pytest.mark.parametrize("on_busy", ON_BUSY)
@pytest.mark.parametrize("state", BUSY)
@pytest.mark.parametrize("own", [False, True], ids=["session", "message"])
def test_s03_while_a_run_is_live_on_busy_decides(on_busy: str, state: str, own: bool) -> None:
    said = PolicyData(on_busy=on_busy)
    policy = PolicyData(on_busy="queue" if on_busy == "reject" else "reject") if own else said
    expected, wakes = when_busy(on_busy, policy)
    command = post("m2", policy=said) if own else post("m2")
    with_policy(policy, BUSY[state]).when(command).then(expected, wakes=wakes)


@pytest.mark.parametrize("on_busy", ON_BUSY)
@pytest.mark.parametrize("question", ON_QUESTION)
def test_s08_while_a_question_is_open_on_message_question_decides(on_busy: str, question: str) -> None:
    policy = msgspec.structs.replace(on_message(question=question), on_busy=on_busy)
    asked = with_policy(policy, QUESTION)
    match question:
        case "answer":
            asked.when(post("m2", "blue")).then(answers("m2", 1, "blue", q1="blue"), wakes=("default",))
        case "reject":
            asked.when(post("m2")).then(rejected("run_waiting", run="s1.1"))
        case "queue":
            asked.when(post("m2")).then(queued("m2", 2, by=spec(policy=policy)), wakes=())
        case _:
            asked.when(post("m2")).then(posted("m2", 2, by=spec(policy=policy)), wakes=("default",))


@pytest.mark.parametrize("on_busy", ON_BUSY)
@pytest.mark.parametrize("approval", ON_APPROVAL)
@pytest.mark.parametrize("question", ON_QUESTION)
@pytest.mark.parametrize("state", ["an approval", "both"])
def test_s11_while_an_approval_is_open_on_message_approval_decides(
    on_busy: str, approval: str, question: str, state: str
) -> None:
    policy = msgspec.structs.replace(on_message(question=question, approval=approval), on_busy=on_busy)
    asked = with_policy(policy, WAITING[state])
    match approval:
        case "reject":
            asked.when(post("m2")).then(rejected("run_waiting", run="s1.1"))
        case "decline" if state == "both":
            outcome = asked.when(post("m2", "leave it")).then(answers("m2", 1, "leave it", q2=None), wakes=())
            assert [request.k for request in outcome.session.runs[0].requests] == [1], "the question stays open"
        case "decline":
            asked.when(post("m2", "no")).then(answers("m2", 1, "no", q1=None), wakes=("default",))
        case _:
            asked.when(post("m2")).then(posted("m2", 2, by=spec(policy=policy)), wakes=("default",))


@pytest.mark.parametrize("state", WAITING)
def test_a_message_s_own_on_busy_says_nothing_of_a_run_that_waits(state: str) -> None:
    for on_busy in ON_BUSY:
        outcome = with_policy(on_message(question="reject"), WAITING[state]).when(
            post("m2", policy=PolicyData(on_busy=on_busy))
        )
        outcome.then(rejected("run_waiting"))


# -- preset by preset -------------------------------------------------------------------------------------------------

BUSY_BY_PRESET = {"strict": "reject", "memory": "parallel", "thread": "steer", "workspace": "queue"}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("state", BUSY)
def test_s03_a_second_message_preset_by_preset(preset: Any, state: str) -> None:
    policy = PolicyData(preset=preset)
    expected, _ = when_busy(BUSY_BY_PRESET[preset], policy)
    with_policy(policy, BUSY[state]).when(post("m2")).then(expected)


@pytest.mark.parametrize("preset", PRESETS)
def test_s08_a_message_to_a_question_preset_by_preset(preset: Any) -> None:
    policy = PolicyData(preset=preset)
    parallel = posted("m2", 2, "blue", by=spec(policy=policy))
    expected = parallel if preset == "memory" else answers("m2", 1, "blue", q1="blue")
    outcome = with_policy(policy, QUESTION).when(post("m2", "blue")).then(expected)
    assert bool(outcome.session.runs[0].requests) == (preset == "memory")


@pytest.mark.parametrize("preset", PRESETS)
def test_s11_a_message_to_an_approval_preset_by_preset(preset: Any) -> None:
    policy = PolicyData(preset=preset)
    expected: dict[str, object] = {
        "strict": rejected("run_waiting", run="s1.1"),
        "memory": posted("m2", 2, by=spec(policy=policy)),
        "thread": answers("m2", 1, q1=None),
        "workspace": rejected("run_waiting", run="s1.1"),
    }
    with_policy(policy, APPROVAL).when(post("m2")).then(expected[preset])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("preset", PRESETS)
def test_s46_a_second_author_preset_by_preset(preset: Any) -> None:
    policy = PolicyData(preset=preset)
    busy = with_policy(policy, RUNNING).when(post("m2", author=BOB))
    expected: dict[str, object] = {
        "strict": rejected("run_active"),
        "memory": posted("m2", 2, by=spec(policy=policy), author=BOB),
        "thread": queued("m2", 2, by=spec(policy=policy), author=BOB),
        "workspace": queued("m2", 2, by=spec(policy=policy), author=BOB),
    }
    busy.then(expected[preset])  # pyright: ignore[reportArgumentType]


# -- the message's own word -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [(), RUNNING, QUESTION])
def test_a_session_can_forbid_a_message_to_say_on_busy_itself(state: tuple[Fact, ...]) -> None:
    policy = PolicyData(on_busy="queue", message_on_busy="refuse")
    session = with_policy(policy, state)
    session.when(post("m2", policy=PolicyData(on_busy="queue"))).then(rejected("invalid", field="on_busy"))
    assert session.when(post("m2")).decision


def test_an_agent_s_policy_lies_below_the_session_s() -> None:
    agents = {**AGENTS, "default": spec(policy=PolicyData(on_busy="queue", clock="wall"))}
    both = PolicyData(on_busy="steer", clock="wall")
    given(opened(), *RUNNING).when(post("m2", specs=agents)).then(queued("m2", 2, by=agents["default"]))
    with_policy(PolicyData(on_busy="steer"), RUNNING).when(post("m2", specs=agents)).then(steers("m2", 1))
    first = with_policy(PolicyData(on_busy="steer")).when(post("m1", specs=agents))
    first.then(posted("m1", 1, by=spec(policy=both)))


def test_what_a_message_says_for_itself_is_not_pinned() -> None:
    outcome = given(opened(), *RUNNING).when(post("m2", policy=PolicyData(on_busy="parallel")))
    outcome.then(posted("m2", 2))
    outcome.and_when(post("m3")).then(rejected("run_active"))


# -- authors ----------------------------------------------------------------------------------------------------------

SINGLE = PolicyData(on_busy="steer", authors="single", on_message=OnMessageData(approval="decline"))


@pytest.mark.parametrize("state", ["queued", "running", "calling", "given back", "to be resumed"])
def test_s46_of_a_single_author_s_run_another_author_waits_for_the_next(state: str) -> None:
    session = with_policy(SINGLE, BUSY[state])
    session.when(post("m2", author=BOB)).then(queued("m2", 2, by=spec(policy=SINGLE), author=BOB))
    session.when(post("m2")).then(steers("m2", 1))


@pytest.mark.parametrize("state", WAITING)
def test_s46_another_author_answers_nothing(state: str) -> None:
    session = with_policy(SINGLE, WAITING[state])
    session.when(post("m2", author=BOB)).then(queued("m2", 2, by=spec(policy=SINGLE), author=BOB))
    assert isinstance(session.when(post("m2")).decision.event.data, MessagePosted)


def test_whose_run_it_is_is_who_started_it() -> None:
    mixed = PolicyData(on_busy="steer")
    facts = (*RUNNING, steers("m2", 1, author=BOB))
    with_policy(mixed, facts).when(post("m3", author=BOT)).then(steers("m3", 1, author=BOT))
    bobs = (*RUNNING, queued("m2", 2, author=BOB), ended(1), started(2, 1, "m2"))
    with_policy(SINGLE, bobs).when(post("m3", author=BOB)).then(steers("m3", 2, author=BOB))
    with_policy(SINGLE, bobs).when(post("m3")).then(queued("m3", 3, by=spec(policy=SINGLE)))


# -- starters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_busy", ON_BUSY)
@pytest.mark.parametrize("state", ["idle", *LIVE])
@pytest.mark.parametrize("starters", ["people", (ANN,)])
def test_a_message_of_whoever_may_not_start_a_turn_is_passed_over(on_busy: str, state: str, starters: Any) -> None:
    policy = PolicyData(on_busy=on_busy, starters=starters)
    session = with_policy(policy, LIVE.get(state, ()))
    session.when(post("m2", author=BOT)).then(passed_over("m2", author=BOT), wakes=())


def test_whoever_may_start_a_turn_may() -> None:
    for starters, author in (("people", BOB), ((BOT, ANN), BOT), ("any", BOT)):
        policy = PolicyData(starters=starters)  # pyright: ignore[reportArgumentType]
        outcome = with_policy(policy).when(post("m1", author=author))
        outcome.then(posted("m1", 1, by=spec(policy=policy), author=author))


def test_a_message_that_is_passed_over_opens_its_session() -> None:
    opens = Opens(policy=PolicyData(starters="people"))
    outcome = given().when(post("m1", author=BOT, opens=opens))
    outcome.then(msgspec.structs.replace(passed_over("m1", author=BOT), opens=opens))
    assert outcome.session.exists


# -- notices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["idle", *LIVE])
@pytest.mark.parametrize("preset", PRESETS)
def test_s15_a_notice_goes_nowhere(state: str, preset: Any) -> None:
    session = with_policy(PolicyData(preset=preset), LIVE.get(state, ()))
    outcome = session.when(post("n1", "by the way", kind="notice")).then(notice("n1"), wakes=())
    assert outcome.session.runs == session.session.runs


# -- agents -----------------------------------------------------------------------------------------------------------


def test_a_message_for_another_agent_or_model_does_not_steer() -> None:
    session = given(opened(policy=PolicyData(on_busy="steer")), *RUNNING)
    by = spec("painter", PolicyData(on_busy="steer"))
    session.when(post("m2", agent="painter")).then(queued("m2", 2, by=by), wakes=())
    model = msgspec.structs.replace(spec(policy=PolicyData(on_busy="steer")), model="big")
    session.when(post("m2", model="big")).then(queued("m2", 2, by=model))
    session.when(post("m2", agent="default")).then(steers("m2", 1))


def test_a_message_for_another_version_does_not_steer() -> None:
    session = given(opened(policy=PolicyData(on_busy="steer")), *RUNNING)
    specs = {"default": AGENTS["default"], "default@v1": AGENTS["default"]}
    other = msgspec.structs.replace(spec(policy=PolicyData(on_busy="steer")), version="v0", digest="d0")
    specs["default@v0"] = msgspec.structs.replace(AGENTS["default"], version="v0", digest="d0")
    session.when(post("m2", agent="default@v1", specs=specs)).then(steers("m2", 1))
    session.when(post("m2", agent="default@v0", specs=specs)).then(queued("m2", 2, by=other))


@pytest.mark.parametrize("field", ["agent", "model"])
def test_an_answer_takes_no_agent_and_no_model(field: str) -> None:
    session = given(opened(), *QUESTION)
    session.when(post("m2", **{field: "default"})).then(rejected("invalid", field=field))
    declining = with_policy(on_message(approval="decline"), APPROVAL)
    declining.when(post("m2", **{field: "default"})).then(rejected("invalid", field=field))


@pytest.mark.parametrize("state", ["idle", *LIVE])
def test_an_unknown_agent_is_refused_in_every_state(state: str) -> None:
    session = with_policy(PolicyData(on_busy="queue"), LIVE.get(state, ()))
    session.when(post("m2", agent="nobody")).then(rejected("agent_not_found", field="agent"))


def test_an_agent_that_is_gone_is_missed_only_by_a_run_that_needs_it() -> None:
    gone = {"poet": AGENTS["poet"]}
    session = with_policy(PolicyData(on_busy="steer"), RUNNING)
    session.when(post("m2", specs=gone)).then(steers("m2", 1))
    session.when(post("m2", specs=gone, policy=PolicyData(on_busy="queue"))).then(rejected("agent_not_found"))
    given(opened(), *QUESTION).when(post("m2", "x", specs=gone)).then(answers("m2", 1, "x", q1="x"))


# -- what a text must be ----------------------------------------------------------------------------------------------


def test_a_text_answers_every_open_question_or_none() -> None:
    two = (
        *RUNNING,
        asks(1, 1, a="question", b="question"),
        waiting(1, ask("a", 1, choices=("red", "blue")), ask("b", 2, schema={"type": "string", "maxLength": 4})),
    )
    session = given(opened(), *two)
    session.when(post("m2", "blue")).then(answers("m2", 1, "blue", q1="blue", q2="blue"), wakes=("default",))
    session.when(post("m2", "green")).then(rejected("invalid", field="content"))
    session.when(post("m2", "crimson")).then(rejected("invalid", field="content"))
    one_left = given(opened(), *two, answered(1, 1, "red"))
    one_left.when(post("m2", "any")).then(answers("m2", 1, "any", q2="any"), wakes=("default",))


def test_what_is_attached_to_an_answer_goes_with_it() -> None:
    sent = post("m2", "this one", attachments=(attached(),))
    said = answers("m2", 1, "this one", q1="this one")
    given(opened(), *QUESTION).when(sent).then(msgspec.structs.replace(said, attachments=(attached(),)))


def test_a_text_is_read_as_json_where_the_schema_wants_it() -> None:
    wants = (*RUNNING, asks(1, 1, a="question"), waiting(1, ask("a", schema={"type": "array", "minItems": 1})))
    session = given(opened(), *wants)
    session.when(post("m2", ' [1, "x"] ')).then(answers("m2", 1, ' [1, "x"] ', q1=[1, "x"]))
    session.when(post("m2", "[]")).then(rejected("invalid", field="content"))
    session.when(post("m2", "1, x")).then(rejected("invalid", field="content"))


def test_a_message_after_the_time_of_a_request_answers_nothing() -> None:
    """Until the expiry is stored, the run still waits."""
    facts = (*RUNNING, asks(1, 1, a="question"), waiting(1, ask("a", expires_in=100)))
    session = given(opened(), *facts)
    over = session.session.seq + 100
    session.when(with_origin(post("m2", "x"), time=over)).then(rejected("request_expired", request="s1.1.q1"))
    session.when(with_origin(post("m2", "x"), time=over - 1)).then(answers("m2", 1, "x", q1="x"))


def test_a_run_that_waits_is_answered_before_another_that_runs() -> None:
    """Where several are live: the one that has asked."""
    policy = PolicyData(on_busy="parallel")
    both = (*RUNNING, posted("m2", 2), started(2, 1, "m2"), asks(2, 1, a="question"), waiting(2, ask("a", run=2)))
    with_policy(policy, both).when(post("m3", "x")).then(answers("m3", 2, "x", q1="x"))
