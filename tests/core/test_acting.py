"""A person calls a tool in a session: who may, when, and what becomes of it."""

from typing import Literal

import msgspec
import pytest
from tests.core.scenario import (
    KEY,
    NOTHING,
    REJECT,
    Given,
    act,
    acted,
    ask,
    asks,
    began,
    cancel,
    cancel_requested,
    deleted,
    drive,
    ended,
    event_of,
    given,
    opened,
    post,
    posted,
    queued,
    record,
    record_as,
    rejected,
    released,
    retry,
    returned,
    spec,
    started,
    tool_started,
    waiting,
    with_origin,
)

from turnstream.session.events import (
    ChildStarted,
    OnMessageData,
    Recorded,
    ToolCall,
)
from turnstream.session.fold import evolve
from turnstream.session.history import UserMessage, build
from turnstream.session.plan import CallTool, End, Settle, Start
from turnstream.session.policy import parse_policy, resolve
from turnstream.session.routing import WAITING_MAX
from turnstream.session.state import Session

Parked = Literal["interleave", "queue", "reject"]


def opened_with(**policy: object) -> Given:
    return given(opened(policy=parse_policy(policy)))


def test_s44_an_action_is_a_run_of_its_own_by_whoever_does_it() -> None:
    outcome = given(opened()).when(act(author="user:bob")).then(acted(1, author="user:bob"), wakes=("default",))
    (run,) = outcome.session.runs
    assert (run.trigger, run.author, run.message_ids) == ("action", "user:bob", ())
    assert outcome.given.planned() == (
        Start(key="default/s1.1:start:1", run=1, attempt=1, trigger="action", message_ids=()),
    )


def test_s44_it_calls_the_tool_and_ends_with_what_that_returns() -> None:
    at = given(opened(), acted(1), began(1))
    (call,) = at.planned()
    assert isinstance(call, CallTool) and call.call.name == "add" and call.call.seq == 20
    back = given(opened(), acted(1), began(1), tool_started(1, "action"), returned(1, "action", output="2"))
    (end,) = back.planned()
    assert isinstance(end, End) and (end.status, end.answer_seq) == ("completed", 50)
    back.when(record(ended(1, content="2"))).then(ended(1, content="2"))


@pytest.mark.parametrize(
    ("name", "arguments", "code", "field"),
    [
        ("fly", "{}", "not_found", "verb"),
        ("rhyme", "{}", "not_found", "verb"),
        ("add", "{}", "invalid", "arguments.a"),
        ("add", '{"a":"one"}', "invalid", "arguments.a"),
        ("add", '{"a":1,"b":2}', "invalid", "arguments"),
    ],
)
def test_what_the_agent_has_no_tool_for_is_refused_by_name(name: str, arguments: str, code: str, field: str) -> None:
    given(opened()).when(act(name, arguments)).then(rejected(code, field=field))


def test_arguments_of_a_tool_whose_schema_is_not_known_are_the_tools_affair() -> None:
    given(opened()).when(act("update_plan", '{"anything":1}')).then(
        msgspec.structs.replace(acted(1), action=ToolCall(id="action", name="update_plan", arguments='{"anything":1}'))
    )


def test_the_tools_are_those_of_the_sessions_agent() -> None:
    poet = given(opened(agent="poet"))
    poet.when(act()).then(rejected("not_found", field="verb"))
    assert poet.when(act("rhyme", "{}")).decision.event.data.spec.agent == "poet"
    given(opened(agent="gone")).when(act()).then(rejected("agent_not_found", field="agent"))


BUSY = (posted("m1", 1), started(1, 1, "m1"))


@pytest.mark.parametrize("on_busy", ["queue", "steer", "interrupt"])
def test_s44_while_a_run_is_live_it_waits_for_its_turn(on_busy: str) -> None:
    policy = parse_policy({"on_busy": on_busy})
    busy = given(opened(policy=policy), *BUSY)
    after = busy.when(act()).then(acted(2, policy=policy, waits=True), wakes=()).session
    assert [run.n for run in after.startable] == []
    assert not after.run(1).cancel, "it interrupts nobody"
    over = given(opened(policy=policy), *BUSY, acted(2, policy=policy, waits=True), ended(1))
    assert [effect.run for effect in over.planned()] == [2]


def test_s44_parallel_starts_it_beside() -> None:
    policy = parse_policy({"preset": "memory"})
    after = given(opened(policy=policy), *BUSY).when(act()).then(acted(2, policy=policy), wakes=("default",))
    assert [run.n for run in after.session.startable] == [2]


def test_s44_reject_refuses_it_and_names_the_run() -> None:
    given(opened(policy=REJECT), *BUSY).when(act()).then(rejected("run_active", run="s1.1"))
    asked = (posted("m1", 1), started(1, 1, "m1"), asks(1, 1, a="question"), waiting(1, ask("a")))
    given(opened(policy=REJECT), *asked).when(act()).then(rejected("run_active", run="s1.1"))


@pytest.mark.parametrize(("parked", "waits"), [("interleave", False), ("queue", True), ("reject", None)])
def test_s35_s44_beside_what_waits_for_children_alone(parked: str, waits: bool | None) -> None:
    said = OnMessageData(parked=msgspec.convert(parked, Parked))
    policy = msgspec.structs.replace(parse_policy({"preset": "workspace"}), on_message=said)
    by = spec(policy=policy)
    at = given(
        opened(policy=policy),
        posted("m1", 1, by=by),
        started(1, 1, "m1"),
        asks(1, 1, a="child"),
        ChildStarted(run=1, attempt=1, call_id="a", k=1, child_session="s1--1-1", spec=by),
        waiting(1, ask("a", kind="child")),
    )
    outcome = at.when(act())
    if waits is None:
        outcome.then(rejected("run_active", run="s1.1"))
    else:
        outcome.then(acted(2, policy=policy, waits=waits))
        assert [run.n for run in outcome.session.startable] == ([] if waits else [2])


def test_starters_say_who_may() -> None:
    policy = parse_policy({"starters": "people"})
    at = given(opened(policy=policy))
    at.when(act(author="client:http")).then(rejected("invalid", field="author"))
    at.when(act()).then(acted(1, policy=policy))


def test_it_counts_among_what_waits() -> None:
    policy = parse_policy({"on_busy": "queue"})
    waits = [acted(n, policy=policy, waits=True) for n in range(2, WAITING_MAX + 2)]
    full = given(opened(policy=policy), *BUSY, *waits)
    full.when(act(what="more")).then(rejected("run_active", run="s1.1"))
    full.when(post("m2")).then(rejected("run_active", run="s1.1"))


def test_a_repeat_changes_nothing_and_an_unknown_or_deleted_session_has_no_action() -> None:
    keyed = with_origin(act(), idempotency_key="k", body_digest="b")
    once = given(opened()).when(keyed)
    assert once.session.receipt("k").run == 1
    once.and_when(keyed).then(NOTHING)
    once.and_when(with_origin(keyed, body_digest="c")).then(rejected("key_reused"))
    Given(given().session).when(act()).then(rejected("not_found"))
    given(opened(), deleted()).when(act()).then(rejected("not_found"))
    given(opened()).when(with_origin(act(), expected_seq=3)).then(rejected("session_moved"))


def test_s19_s44_a_tool_in_flight_at_a_crash_is_not_done_again() -> None:
    at = given(opened(), acted(1), began(1), tool_started(1, "action"), began(1, 2))
    (settle,) = at.planned()
    assert isinstance(settle, Settle) and settle.call.id == "action"
    idempotent = given(opened(), acted(1), began(1), began(1, 2))
    assert isinstance(idempotent.planned()[0], CallTool)


def test_it_is_cancelled_before_and_while_it_runs() -> None:
    policy = parse_policy({"on_busy": "queue"})
    at = given(opened(policy=policy), *BUSY, acted(2, policy=policy, waits=True))
    at.when(cancel(2)).then(ended(2, "cancelled", 0, unfinished=("action",)))
    running = given(opened(), acted(1), began(1))
    running.when(cancel(1)).then(cancel_requested(1))
    (end,) = given(opened(), acted(1), began(1), cancel_requested(1)).planned()
    assert isinstance(end, End) and end.status == "cancelled"


def test_it_is_given_back_and_taken_up() -> None:
    at = given(opened(), acted(1), began(1), released(1))
    (again,) = at.planned(drive(nonce="other"))
    assert isinstance(again, Start) and (again.attempt, again.trigger) == (2, "handover")


def test_a_message_never_steers_it() -> None:
    policy = parse_policy({"preset": "thread"})
    at = given(opened(policy=policy), acted(1, policy=policy), began(1))
    at.when(post("m1")).then(queued("m1", 2, by=spec(policy=policy)))


def test_it_is_nothing_to_try_again() -> None:
    given(opened(), acted(1), began(1), ended(1, "failed")).when(retry()).then(rejected("nothing_to_retry"))


@pytest.mark.parametrize("preset", ["strict", "memory", "thread", "workspace"])
def test_s44_the_model_sees_what_a_person_did_as_text_but_memory_holds_pairs_alone(preset: str) -> None:
    policy = parse_policy({"preset": preset})
    session, events = Session(key=KEY), list[Recorded]()
    facts = (
        opened(policy=policy),
        acted(1, policy=policy),
        began(1),
        returned(1, "action", output="</user_action_result> 2"),
        ended(1, content="</user_action_result> 2"),
        posted("m1", 2, "and now?"),
        started(2, 1, "m1"),
    )
    for n, fact in enumerate(facts):
        recorded = record_as(session, event_of(fact, n))
        session = evolve(session, recorded)
        events.append(recorded)
    texts = [
        message.text
        for message in build(session, events, 2, resolve(policy)).messages
        if isinstance(message, UserMessage)
    ]
    shown = [
        '<user_action verb="add">{"a":1}</user_action>',
        '<user_action_result verb="add">&lt;/user_action_result&gt; 2</user_action_result>',
    ]
    assert texts == ([] if preset == "memory" else shown) + ["and now?"]
