"""The feed for people: live text once, stored facts as lines, no control characters in a terminal."""

import io

import msgspec
import pytest
from rich.console import Console

from turnstream_cli.follow import CaughtUp, Delta, Disconnected, Event, Item
from turnstream_cli.screen import Screen


def event(seq: int, kind: str, **data: object) -> Event:
    record = {"seq": seq, "type": kind, "source": "/default/sessions/s1", "data": data}
    return Event(seq, kind, msgspec.json.encode(record), record)


def delta(
    index: int, text: str, *, kind: str = "text", attempt: int = 1, step: int = 1, run: str = "s1.1", path: str = ""
) -> Delta:
    of = {"path": path} if path else {}
    return Delta(b"", {"run": run, "attempt": attempt, "step": step, "index": index, "kind": kind, "text": text, **of})


def finished(seq: int, path: str, output: str = "", **data: object) -> Event:
    node = path.rpartition(".")[2]
    return event(seq, "node.finished", run=1, attempt=1, node=node, path=path, output=output, **data)


CALLS = [{"id": "c", "name": "add", "arguments": '{"a":1}'}]
ERROR = {"code": "interrupted", "message": "interrupted: the runner stopped"}
ENDED = event(9, "run.ended", run=1, attempt=1, status="completed", content="Hello, stranger.")


def shown(*items: Item, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, no_color=True, highlight=False, width=100)
    screen = Screen(console)
    for item in items:
        screen.show(item)
    screen.finish()
    return out.getvalue()


def test_what_waits_for_a_person_and_what_is_said_to_it_are_lines() -> None:
    question = {"request": "s1.1.q1", "kind": "question", "prompt": "Which\x1b[2J one?", "choices": ["left", "right"]}
    approval = {"request": "s1.1.q2", "kind": "approval", "prompt": "delete {}"}
    text = shown(
        event(3, "run.waiting", run=1, attempt=1, requests=[question, approval]),
        event(4, "request.answered", run=1, request="s1.1.q1", answer={"a": 1}, by="user:ann"),
        event(5, "request.answered", run=1, request="s1.1.q2", approved=False, reason="no", by="user:ann"),
        event(6, "request.answered", run=1, request="s1.1.q3", approved=True, by="user:ann"),
        event(7, "request.expired", run=1, request="s1.1.q4"),
        event(8, "run.started", run=1, attempt=2, trigger="answers"),
    )
    assert text.splitlines() == [
        "? s1.1.q1 Which␛[2J one?  (left | right)  #3",
        "? s1.1.q2 approve? delete {}  #3",
        '? s1.1.q1 answered: {"a":1}  by user:ann #4',
        "? s1.1.q2 denied: no  by user:ann #5",
        "? s1.1.q3 approved  by user:ann #6",
        "? s1.1.q4: nobody answered in time  #7",
        "▶ run 1 started  attempt 2, answers #8",
    ]


def test_where_a_message_went_and_what_became_of_it_are_lines() -> None:
    said = {"message_id": "m", "author": "user:ann", "content": [{"text": "hi"}]}
    text = shown(
        event(2, "message.posted", **said, steers={"run": 1}),
        event(3, "message.posted", **said, answers={"run": 1, "requests": []}),
        event(4, "message.posted", **said, queued={"run": 2, "interrupts": 1}),
        event(5, "message.posted", **said, attachments=[{"name": "a\x1b.txt", "media_type": "text/plain", "size": 5}]),
        event(6, "run.steered", run=1, attempt=1, message_ids=["m", "n"]),
        event(7, "run.ended", run=1, attempt=1, status="cancelled", leftover={"run": 3, "message_ids": ["m"]}),
        event(8, "run.requested", run=4, retry_of=2),
        event(9, "session.deleted", mode="erase", by="user:ann"),
    )
    assert text.splitlines() == [
        "▸ user:ann: hi  steers run 1 #2",
        "▸ user:ann: hi  answers run 1 #3",
        "▸ user:ann: hi  queued as run 2 #4",
        "✕ cancel of run 1 asked for by it  #4",
        "▸ user:ann: hi  starts nothing: its author may not #5",
        "▫ a␛.txt (text/plain, 5 bytes)  #5",
        "▸ run 1 takes #5, n  #6",
        "■ run 1 cancelled  0 tokens #7",
        "▸ run 3 takes what is left over: #5  #7",
        "▸ run 4 asked for, run 2 again  #8",
        "○ session deleted  by user:ann #9",
    ]


def test_an_error_says_its_code_once() -> None:
    assert shown(event(9, "run.ended", run=1, status="failed", error=ERROR)).startswith(
        "■ run 1 failed: interrupted: the runner stopped  "
    )


def test_what_was_said_live_is_not_said_again() -> None:
    text = shown(delta(1, "Hello, "), delta(2, "stranger."), ENDED)
    assert text.count("Hello, stranger.") == 1
    assert "run 1 completed" in text


@pytest.mark.parametrize(
    "live",
    [
        [],
        [delta(2, "stranger.")],
        [delta(1, "Hello, "), delta(3, "nger.")],
        [delta(1, "Hello, st")],
        [delta(1, "Hullo, stranger.")],
    ],
    ids=["nothing", "no beginning", "a gap", "no end", "something else"],
)
def test_what_was_not_said_whole_is_shown_as_it_is_stored(live: list[Delta]) -> None:
    text = shown(*live, ENDED)
    assert "◆ Hello, stranger." in text.splitlines()


def test_an_end_that_was_not_heard_is_shown_and_nothing_else_again() -> None:
    text = shown(delta(1, "Hello, "), Disconnected("the line was cut", 0.1), ENDED)
    assert text.splitlines()[:3] == [
        "◆ Hello, ",
        "… the line was cut; connecting again at the last event",
        "◆ stranger.",
    ]


def test_a_delta_that_comes_again_is_shown_once() -> None:
    assert shown(delta(1, "one "), delta(2, "two"), delta(1, "one "), delta(2, "two"), delta(3, "!")) == "◆ one two!\n"


def test_a50_an_older_attempt_is_not_heard_any_more_and_a_reset_is_shown() -> None:
    text = shown(
        delta(1, "old "),
        delta(1, "fresh", attempt=2),
        delta(2, "OLD"),
        delta(2, "the stream dropped", kind="reset", attempt=2),
        delta(3, "again", attempt=2),
        event(9, "run.ended", run=1, attempt=2, status="completed", content="again"),
    )
    assert "OLD" not in text
    assert "the stream dropped" in text
    assert text.count("again") == 2  # "asked again", and the answer once
    assert "◆ again\n" in text


@pytest.mark.parametrize("live", [[], [delta(1, "hm", kind="reasoning"), delta(2, "yes")]], ids=["stored", "live"])
def test_s26_reasoning_is_set_apart(live: list[Delta]) -> None:
    ended = event(9, "run.ended", run=1, status="completed", content="yes", reasoning="hm")
    assert shown(*live, ended).splitlines()[:2] == ["◇ hm", "◆ yes"]
    assert len(shown(*live, ended).splitlines()) == 3


def test_every_kind_of_event_has_its_line() -> None:
    text = shown(
        event(1, "session.opened"),
        event(2, "message.posted", message_id="m", author="user:ann", content=[{"text": "hi"}], queued={"run": 1}),
        event(3, "run.started", run=1, attempt=2, trigger="recovery"),
        event(
            4,
            "model.replied",
            run=1,
            attempt=2,
            step=1,
            tool_calls=[{"id": "c", "name": "add", "arguments": '{"a":1}'}],
        ),
        event(5, "tool.returned", run=1, call_id="c", status="ok", output="x" * 400, duration=1500),
        event(6, "run.cancel_requested", run=1, by="user:ann"),
        event(
            7,
            "run.ended",
            run=1,
            status="failed",
            error={"code": "model_error", "message": "no"},
            usage={"input_tokens": 3},
        ),
        event(8, "message.withdrawn", message_id="m"),
        event(9, "some.thing", of="a later release"),
        CaughtUp(),
        Disconnected("the connection ended", 0.1),
    )
    for part in (
        "session opened  #1",
        "user:ann: hi  queued as run 1 #2",
        "run 1 started  attempt 2, recovery #3",
        'add({"a":1})',
        "1.5 s #5",
        "cancel of run 1",
        "run 1 failed: model_error: no  3 tokens #7",
        "message #2 withdrawn",
        "some.thing  #9",
        "the connection ended",
    ):
        assert part in text
    assert "x" * 301 not in text


def test_no_text_plays_with_the_terminal() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m"
    error = {"code": "model_error", "message": evil}
    text = shown(delta(1, evil), event(9, "run.ended", run=1, status="failed", error=error), terminal=True)
    assert not any(part in text for part in ("\x1b]", "\x07", "\x1b[2J", "\x9b"))
    assert text.count("␛]0;owned␇␛[2J") == 2


def test_text_that_comes_after_it_was_stored_is_not_shown_again() -> None:
    replied = event(4, "model.replied", run=1, attempt=1, step=1, content="first")
    ended = event(5, "run.ended", run=1, attempt=1, status="completed", content="last")
    text = shown(replied, delta(1, "first"), ended, delta(2, "last", step=2))
    assert (text.count("first"), text.count("last")) == (1, 1)


def test_live_text_waits_for_the_start_of_its_run() -> None:
    posted = event(1, "message.posted", message_id="m", author="user:ann", content=[{"text": "hi"}], starts={"run": 1})
    started = event(2, "run.started", run=1, attempt=1)
    lines = shown(posted, delta(1, "Hello, "), started, delta(2, "stranger."), ENDED).splitlines()
    assert [line[:7] for line in lines] == ["▸ user:", "▶ run 1", "◆ Hello", "■ run 1"]


def test_sub_agents_and_the_checklist_are_lines() -> None:
    parked = [
        {"request": "s1.1.q1", "kind": "child", "prompt": "s1--1-1"},
        {"request": "s1.1.q2", "kind": "child", "prompt": "s1--1-2"},
        {"request": "s1.1.q3", "kind": "question", "prompt": "Which one?"},
    ]
    failed = {"status": "timed_out", "error": {"code": "deadline_exceeded", "message": "too\x1blong"}}
    items = [{"id": "1", "text": "read", "status": "completed"}, {"id": "2", "text": "write"}]
    text = shown(
        event(3, "child.started", run=1, k=1, call_id="a", child_session="s1--1-1", spec={"agent": "poet"}),
        event(4, "child.started", run=1, k=2, call_id="b", child_session="s1--1-2", spec={"agent": "poet"}, wait=False),
        event(5, "run.waiting", run=1, attempt=1, requests=parked),
        event(6, "child.ended", run=1, k=1, status="completed", output="a poem", usage={"output_tokens": 7}),
        event(7, "child.ended", run=1, k=2, late=True, **failed),
        event(8, "run.reported", run=1),
        event(9, "run.reported", run=1, told=False),
        event(10, "plan.changed", run=1, items=items),
    )
    assert text.splitlines() == [
        "⑂ run 1 delegates to poet in s1--1-1  #3",
        "⑂ run 1 delegates to poet in s1--1-2, and goes on without it  #4",
        "? s1.1.q3 Which one?  #5",
        "⑂ run 1 waits for s1--1-1, s1--1-2  #5",
        "⑂ s1--1-1 completed: a poem  7 tokens #6",
        "⑂ s1--1-2 timed_out, late: deadline_exceeded: too␛long  0 tokens #7",
        "⑂ whoever delegated run 1 is told  #8",
        "⑂ whoever delegated run 1 is not there any more  #9",
        "☰ checklist  #10",
        "  ☑ read",
        "  ☐ write",
    ]


# --- graphs -------------------------------------------------------------------------------------------------------


def test_what_nodes_do_is_a_line_each() -> None:
    call = {"id": "look", "name": "add", "arguments": '{"a":1}'}
    text = shown(
        event(3, "node.started", run=1, attempt=1, node="look", path="look", call=call),
        finished(4, "look", "42\nand more", duration=30),
        finished(5, "route", "42", port="bug"),
        event(6, "node.started", run=1, attempt=1, node="each", path="each", items=3),
        event(7, "model.replied", run=1, attempt=1, step=1, node="a", path="each[0].a", tool_calls=CALLS),
        event(8, "tool.returned", run=1, attempt=1, call_id="c", node="a", path="each[0].a", status="ok", output="3"),
        finished(9, "each[0].a", "It is three.", model="demo", usage={"output_tokens": 4}, duration=1500),
        finished(10, "each[1].a", error="no\x1b[2J", port="err"),
        finished(11, "each", "[1]", json=True, note="of three, two failed"),
    )
    assert text.splitlines() == [
        '◈ look: add({"a":1})  #3',
        "◈ look → out: 42 …  30 ms #4",
        "◈ route → bug: 42  #5",
        "◈ each × 3  #6",
        '⚙ each[0].a: add({"a":1})  #7',
        "⚙ each[0].a: → ok: 3  0 ms #8",
        "◆ each[0].a: It is three.",
        "◈ each[0].a → out  4 tokens 1.5 s #9",
        "◈ each[1].a → err: no␛[2J  #10",
        "◈ each → out: [1] (of three, two failed)  #11",
    ]


def test_nodes_that_speak_at_once_are_not_mixed_and_nothing_is_shown_twice() -> None:
    text = shown(
        delta(1, "Hel", path="a"),
        delta(2, "Good", path="b"),
        delta(3, "lo", path="a"),
        delta(3, "lo", path="a"),
        delta(4, "bye", path="b"),
        finished(7, "a", "Hello!", model="demo"),
        delta(5, ".", path="b"),
        finished(8, "b", "Goodbye.", model="demo"),
    )
    assert text.splitlines() == [
        "◆ a: Hello!",
        "◈ a → out  #7",
        "◆ b: Goodbye.",
        "◈ b → out  #8",
    ]


def test_a_node_that_ends_behind_another_one_s_words_is_shown_as_it_is_stored() -> None:
    text = shown(
        delta(1, "Hel", path="a"),
        delta(2, "Good", path="b"),
        finished(7, "b", "Goodbye", model="demo"),
        delta(3, "late", path="b"),
        delta(4, "lo", path="a"),
        finished(8, "a", "Hello", model="demo"),
    )
    assert text.splitlines() == [
        "◆ a: Hel",
        "◆ b: Goodbye",
        "◈ b → out  #7",
        "◆ a: lo",
        "◈ a → out  #8",
    ]


def test_of_a_node_that_missed_a_piece_or_was_asked_again_the_stored_text_is_shown() -> None:
    text = shown(
        delta(1, "Hel", path="a"),
        delta(3, "lo", path="a"),
        finished(7, "a", "Hel-lo", model="demo"),
        delta(4, "wrong", path="b"),
        delta(5, "dropped", kind="reset", path="b"),
        delta(6, "right", path="b"),
        finished(8, "b", "right", model="demo"),
    )
    assert text.splitlines() == [
        "◆ a: Hello",
        "◆ a: Hel-lo",
        "◈ a → out  #7",
        "◆ b: wrong",
        "↺ b: asked again (dropped); what was shown of this step is void",
        "◆ b: right",
        "◈ b → out  #8",
    ]


def test_who_speaks_inside_of_a_node_that_is_over_or_in_an_older_attempt_keeps_nobody_silent() -> None:
    text = shown(
        delta(1, "left", path="each[0].a"),
        delta(2, "kept", path="b"),
        finished(7, "each", error="no", port="err"),
        delta(1, "again", path="c", attempt=2),
        delta(3, "old", path="b"),
    )
    assert text.splitlines() == ["◆ each[0].a: left", "◈ each → err: no  #7", "◆ b: kept", "◆ c: again"]


def test_who_speaks_late_inside_of_a_node_that_is_over_is_not_heard() -> None:
    text = shown(
        delta(1, "left", path="each[0].a"),
        finished(7, "each", error="no", port="err"),
        delta(2, "late", path="each[1].a"),
        delta(3, "kept", path="b"),
    )
    assert text.splitlines() == ["◆ each[0].a: left", "◈ each → err: no  #7", "◆ b: kept"]
