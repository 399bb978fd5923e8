"""What the model sees: whole pairs, nothing twice, the current turn last, every character as it was said."""

import msgspec
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st
from tests.core.scenario import (
    WAKE,
    ended,
    event_of,
    failure,
    handover,
    notice,
    opened,
    posted,
    queued,
    record_as,
    released,
    replied,
    returned,
    started,
    tool_started,
    withdrawn,
)

from turnstream.ids import SessionKey
from turnstream.session.events import Blob, Fact, MessagePosted, Part, Recorded, ToolCall, Wake
from turnstream.session.history import (
    INTERRUPTED,
    RESULT_MAX,
    RUNNING,
    AssistantMessage,
    Message,
    ToolMessage,
    UserMessage,
    build,
    cut,
)
from turnstream.session.state import Session, evolve

REDELIVERED = Wake(work=WAKE.work, cause=WAKE.cause, delivery=2)


def log(*facts: Fact) -> list[Recorded]:
    session = Session(key=SessionKey("default", "s1"))
    events: list[Recorded] = []
    for n, fact in enumerate(facts):
        events.append(record_as(session, event_of(fact, n)))
        session = evolve(session, events[-1])
    return events


def seen(*facts: Fact, run: int | None = None) -> list[Message]:
    return list(build(log(*facts), run))


def turn(n: int, text: str, answer: str) -> tuple[Fact, ...]:
    return (posted(f"m{n}", n, text), started(n, 1, f"m{n}"), ended(n, content=answer))


def call(call_id: str) -> ToolCall:
    return ToolCall(id=call_id, name="look", arguments="{}")


# -- what is there ----------------------------------------------------------------------------------------------------


def test_s02_the_second_turn_sees_the_first() -> None:
    assert seen(opened(), *turn(1, "hi", "hello"), posted("m2", 2, "more"), started(2, 1, "m2"), run=2) == [
        UserMessage("hi"),
        AssistantMessage("hello"),
        UserMessage("more"),
    ]


def test_a_message_stands_where_its_run_took_it() -> None:
    facts = (posted("m1", 1, "one"), queued("m2", 2, "two"), started(1, 1, "m1"), ended(1, content="1"))
    assert seen(*facts) == [UserMessage("one"), AssistantMessage("1")], "nobody has taken the second yet"
    assert seen(*facts, started(2, 1, "m2"), run=2)[2:] == [UserMessage("two")]


def test_what_nobody_took_is_not_there() -> None:
    refused = ended(2, "failed", 0, error=failure("agent_not_found"))
    facts = (opened(), posted("m1", 1), withdrawn("m1", 1), posted("m2", 2), refused)
    assert seen(*facts, *turn(3, "hi", "hello")) == [UserMessage("hi"), AssistantMessage("hello")]


def test_s18_recovery_and_handover_say_nothing_twice() -> None:
    facts = (
        posted("m1", 1, "hi"),
        started(1, 1, "m1"),
        started(1, 2, wake=REDELIVERED),
        released(1, 2),
        handover(1, 3),
    )
    assert seen(*facts, run=1) == [UserMessage("hi")]


@pytest.mark.parametrize("status", ["failed", "cancelled", "timed_out"])
def test_a_turn_that_did_not_complete_keeps_what_was_said_and_done(status: str) -> None:
    facts = (
        posted("m1", 1, "hi"),
        started(1, 1, "m1"),
        replied(1, 1, "a", text="let me look"),
        returned(1, "a", output="x"),
    )
    over = ended(1, status, content="so far", error=failure("model_error", "secret detail"), reasoning="hm")
    assert seen(*facts, over) == [
        UserMessage("hi"),
        AssistantMessage("let me look", (call("a"),)),
        ToolMessage("a", "look", "x"),
        AssistantMessage("so far"),
    ]


def test_s26_reasoning_and_errors_never_appear() -> None:
    reply = msgspec.structs.replace(replied(1, 1, "a"), reasoning="SECRET")
    over = ended(1, "failed", reasoning="SECRET", error=failure("model_error", "SECRET"), note="SECRET")
    assert "SECRET" not in repr(seen(posted("m1", 1), started(1, 1, "m1"), reply, returned(1, "a"), over))


def test_a_message_of_several_parts_is_one_text() -> None:
    message = MessagePosted(
        message_id="m1", author="a", content=(Part(text="one"), Part(text="two")), starts=posted("m1", 1).starts
    )
    assert seen(message, started(1, 1, "m1")) == [UserMessage("one\ntwo")]


# -- calls and results ------------------------------------------------------------------------------------------------

ASKED = (posted("m1", 1, "hi"), started(1, 1, "m1"), replied(1, 1, "a", "b"))


def test_results_stand_in_the_order_of_their_calls_wherever_they_landed() -> None:
    facts = (*ASKED, tool_started(1, "a"), returned(1, "b", output="B"), notice("n1"), returned(1, "a", output="A"))
    assert seen(*facts, ended(1, content="done")) == [
        UserMessage("hi"),
        AssistantMessage("", (call("a"), call("b"))),
        ToolMessage("a", "look", "A"),
        ToolMessage("b", "look", "B"),
        AssistantMessage("done"),
    ]


def test_two_steps_may_use_the_same_id() -> None:
    facts = (*ASKED, returned(1, "a", output="A1"), returned(1, "b", output="B1"))
    facts = (*facts, replied(1, 2, "a"), returned(1, "a", output="A2"))
    results = [message.text for message in seen(*facts) if isinstance(message, ToolMessage)]
    assert results == ["A1", "B1", "A2"]


def test_a_second_result_is_not_heard() -> None:
    facts = (
        *ASKED,
        returned(1, "a", output="first"),
        returned(1, "a", output="second"),
        returned(1, "z", output="none"),
    )
    assert [message.text for message in seen(*facts) if isinstance(message, ToolMessage)] == ["first", RUNNING]


def test_a_call_without_a_result_shows_a_placeholder() -> None:
    assert [m.text for m in seen(*ASKED) if isinstance(m, ToolMessage)] == [RUNNING, RUNNING]
    broken = [m for m in seen(*ASKED, ended(1, "failed")) if isinstance(m, ToolMessage)]
    assert [(m.text, m.is_error) for m in broken] == [(INTERRUPTED, True)] * 2


def test_s19_the_model_is_told_that_a_result_is_uncertain() -> None:
    facts = (
        *ASKED,
        returned(1, "a", status="uncertain", error="may have run"),
        returned(1, "b", status="error", error="no"),
    )
    assert [m for m in seen(*facts) if isinstance(m, ToolMessage)] == [
        ToolMessage("a", "look", "uncertain: may have run", is_error=True),
        ToolMessage("b", "look", "error: no", is_error=True),
    ]


def test_the_model_is_told_what_a_blob_leaves_out() -> None:
    blob = Blob(name="x", size=70_000, sha256="0")
    facts = (*ASKED, returned(1, "a", output="head", blob=blob), returned(1, "b", output="é" * RESULT_MAX, blob=blob))
    first, second = [m.text for m in seen(*facts) if isinstance(m, ToolMessage)]
    assert first == "head\n[cut: the whole has 70000 bytes]"
    assert second.endswith("\n[cut: the whole has 70000 bytes]")
    answer = seen(*facts, ended(1, content="head", blob=blob))[-1]
    assert answer == AssistantMessage("head\n[cut: the whole has 70000 bytes]")


# -- characters -------------------------------------------------------------------------------------------------------

ODD = "a\u2028b\u2029c\x85d\ve\ff\x1cg\x1dh\x1ei\r\nj\rk\tl\u0000m"


def test_a38_every_character_is_as_it_was_said() -> None:
    facts = (posted("m1", 1, ODD), started(1, 1, "m1"), replied(1, 1, "a", text=ODD), returned(1, "a", output=ODD))
    messages = seen(*facts, ended(1, content=ODD))
    assert [message.text for message in messages] == [ODD] * 4


@pytest.mark.parametrize("character", ["a", "é", "€", "😀", "👩‍👩‍👧", "\u2028"])
@pytest.mark.parametrize("off", range(-4, 5))
def test_a37_a_result_is_cut_between_characters(character: str, off: int) -> None:
    size = len(character.encode())
    text = "x" * ((RESULT_MAX + off) % size) + character * ((RESULT_MAX + off) // size)
    assert len(text.encode()) == RESULT_MAX + off
    (shown,) = [m.text for m in seen(*ASKED, returned(1, "a", output=text)) if isinstance(m, ToolMessage)][:1]
    assert shown.encode().decode() == shown
    if off <= 0:
        assert shown == text
        return
    head, notice_of_cut = shown.split("\n[cut: ")
    kept = len(head.encode())
    assert text.startswith(head)
    assert RESULT_MAX - 3 <= kept <= RESULT_MAX
    assert notice_of_cut == f"{RESULT_MAX + off - kept} of {RESULT_MAX + off} bytes left out]"


@for_all(st.text(max_size=60), st.integers(0, 60))
def test_a37_cutting_keeps_the_longest_head_that_fits(text: str, limit: int) -> None:
    shown = cut(text, limit)
    if len(text.encode()) <= limit:
        assert shown == text
        return
    head, _, left_out = shown.rpartition("\n[cut: ")
    assert text.startswith(head)
    assert len(head.encode()) <= limit
    assert len(text[: len(head) + 1].encode()) > limit
    assert left_out == f"{len(text.encode()) - len(head.encode())} of {len(text.encode())} bytes left out]"


# -- any log ----------------------------------------------------------------------------------------------------------

TEXT = st.text(min_size=1, max_size=8)


@st.composite
def turns(draw: st.DrawFn) -> tuple[Fact, ...]:
    """The facts of some turns, one after the other, as `decide` would store them; the last may be unfinished."""
    facts: list[Fact] = [opened()]
    for n in range(1, draw(st.integers(1, 4)) + 1):
        facts += [posted(f"m{n}", n, draw(TEXT)), started(n, 1, f"m{n}")]
        for step in range(1, draw(st.integers(0, 3)) + 1):
            calls = draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True))
            facts.append(replied(n, step, *calls, text=draw(TEXT)))
            facts += [returned(n, call, output=draw(TEXT)) for call in draw(st.permutations(calls))]
            facts += draw(st.lists(st.just(notice(f"n{len(facts)}")), max_size=1))
        facts.append(ended(n, draw(st.sampled_from(["completed", "failed", "cancelled"])), content=draw(TEXT)))
    return tuple(facts[: draw(st.integers(1, len(facts)))])


def whole(messages: list[Message]) -> bool:
    """Whether every result stands directly behind the reply that asked for it, and every call has one."""
    waiting: list[str] = []
    for message in messages:
        match message:
            case ToolMessage():
                if not waiting or waiting.pop(0) != message.call_id:
                    return False
            case UserMessage() | AssistantMessage():
                if waiting:
                    return False
                waiting = [call.id for call in message.tool_calls] if isinstance(message, AssistantMessage) else []
    return not waiting


@for_all(turns())
def test_pairs_are_adjacent_and_whole(facts: tuple[Fact, ...]) -> None:
    assert whole(seen(*facts))


@for_all(turns())
def test_history_is_a_function_of_the_events(facts: tuple[Fact, ...]) -> None:
    events = log(*facts)
    first = build(events)
    assert build(iter(events)) == first
    assert build(tuple(events)) == first


@for_all(turns(), st.data())
def test_the_current_run_is_last_and_complete(facts: tuple[Fact, ...], data: st.DataObject) -> None:
    """Notices are left out: which turn shows one depends on which turns there are."""
    said = tuple(fact for fact in facts if not (isinstance(fact, MessagePosted) and fact.kind == "notice"))
    runs = [fact.starts.run for fact in said if isinstance(fact, MessagePosted) and fact.starts]
    run = data.draw(st.sampled_from(runs or [1]))
    messages, others = seen(*said, run=run), seen(*(fact for fact in said if getattr(fact, "run", 0) != run))
    alone = seen(*(fact for fact in said if getattr(fact, "run", run) == run))
    assert messages == [*others, *alone]


@for_all(turns())
def test_the_front_of_the_prompt_stays_as_it_is(facts: tuple[Fact, ...]) -> None:
    """A provider's cache hits: whatever is stored after a step only adds to what was shown at that step."""
    events, before = log(*facts), ()
    for n, event in enumerate(events, 1):
        now = build(events[:n])
        waits = RUNNING in {message.text for message in before}
        assert waits or now[: len(before)] == before, event
        before = now
