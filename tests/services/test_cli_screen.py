"""The feed for people: live text once, stored facts as lines, no control characters in a terminal."""

import io

import msgspec
import pytest
from rich.console import Console

from turnstream_cli.follow import CaughtUp, Delta, Disconnected, Event, Item
from turnstream_cli.screen import Screen


def event(seq: int, kind: str, **data: object) -> Event:
    record = {"seq": seq, "type": kind, "data": data}
    return Event(seq, kind, msgspec.json.encode(record), record)


def delta(index: int, text: str, *, kind: str = "text", attempt: int = 1, step: int = 1, run: str = "s1.1") -> Delta:
    return Delta(b"", {"run": run, "attempt": attempt, "step": step, "index": index, "kind": kind, "text": text})


CALLS = [{"id": "c", "name": "add", "arguments": '{"a":1}'}]
ERROR = {"code": "model_error", "message": "no"}
ENDED = event(9, "run.ended", run=1, attempt=1, status="completed", content="Hello, stranger.")


def shown(*items: Item, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, no_color=True, highlight=False, width=100)
    screen = Screen(console)
    for item in items:
        screen.show(item)
    screen.finish()
    return out.getvalue()


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
        "message m withdrawn",
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
