"""What people and programs get from the views: lists and their pages, one session, one run, transcript, waterfall."""

import itertools

import pytest
from tests.support.logs import BEGIN, Log
from tests.support.views import Views

from turnstream.ids import SessionKey
from turnstream.session.commands import CancelRun, RecordFact, UpdateSession, WithdrawMessage
from turnstream.session.events import (
    Error,
    ModelReplied,
    Part,
    Title,
    ToolCall,
    ToolReturned,
    ToolStarted,
    Unknown,
    Usage,
)
from turnstream.views import history, runs, sessions, steps
from turnstream.views.database import Database
from turnstream.views.sessions import InvalidCursor


async def pages(db: Database, limit: int, between=None, **filters: object) -> list[list[str]]:  # pyright: ignore
    """Every page of the list; `between` is awaited with the number of pages read so far."""
    found: list[list[str]] = []
    cursor: str | None = None
    for read in itertools.count(1):
        page = await sessions.list_page(db, "default", limit=limit, cursor=cursor, **filters)  # pyright: ignore
        found.append([item.id for item in page.items])
        cursor = page.next
        if cursor is None:
            return found
        if between:
            await between(read)
    raise AssertionError


@pytest.mark.parametrize("touched", ["seen", "unseen", "every", "twice"])
async def test_s43_a40_a_listing_gives_each_session_once_whatever_moves(database: Database, touched: str) -> None:
    log = Log()
    names = [f"s{n:03}" for n in range(205)]
    for name in names:
        log.open(name)  # all of them at one time
    views = Views(database)
    await views.show(log.events)

    async def between(read: int) -> None:
        log.time += 1000
        match touched:
            case "seen" if read == 1:
                log.say("s204", "hello")
            case "unseen" if read == 1:
                log.say("s000", "hello")
            case "every":
                log.say(names[read * 7 % 205], "hello")
                log.open(f"new{read}")
            case "twice" if read < 4:
                log.say("s100", "hello")
            case _:
                return
        await views.show(log.events)

    found = list(itertools.chain.from_iterable(await pages(database, 2, between)))
    assert found == sorted(names, reverse=True)


async def test_a41_a_session_that_moves_between_pages_is_still_seen(database: Database) -> None:
    log = Log()
    for n in range(1, 8):
        log.time += 10
        log.open(f"s{n}")
    views = Views(database)
    await views.show(log.events)

    async def between(read: int) -> None:
        if read == 1:
            log.time += 10
            log.do("s5", UpdateSession(origin=log.origin(), metadata={"touched": True}))
            await views.show(log.events)

    assert await pages(database, 2, between) == [["s7", "s6"], ["s5", "s4"], ["s3", "s2"], ["s1"]]
    assert (await pages(database, 2))[0] == ["s5", "s7"]  # a new listing has it on top


async def test_a_listing_older_than_what_is_remembered_goes_on(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MOVES", 4)
    log = Log()
    for n in range(1, 6):
        log.time += 10
        log.open(f"s{n}")
    views = Views(database)
    await views.show(log.events)

    async def between(read: int) -> None:
        if read == 1:
            log.time += 10
            log.do("s1", UpdateSession(origin=log.origin(), metadata={"n": 1}))
            for n in range(6):
                log.open(f"later{n}")
            await views.show(log.events)

    assert await pages(database, 2, between) == [["s5", "s4"], ["s3", "s2"]]


async def test_a42_a_list_has_one_total_order(database: Database) -> None:
    log = Log()
    for n in range(50):
        log.open(f"s{n * 7919 % 50:02}")
    views = Views(database)
    await views.show(log.events)
    first = await pages(database, 50)
    for limit in (1, 3, 49):
        assert list(itertools.chain.from_iterable(await pages(database, limit))) == first[0]
    assert first[0] == sorted(first[0], reverse=True)


async def test_one_shot_sessions_and_other_accounts_are_not_listed(database: Database) -> None:
    log = Log()
    log.open("s1")
    log.open("once", one_shot=True)
    log.account = "other"
    log.open("s2")
    await Views(database).show(log.events)
    assert await pages(database, 10) == [["s1"]]
    shown, position = await sessions.get(database, SessionKey("default", "once"))
    assert shown and shown.one_shot
    assert position == 3
    assert (await sessions.get(database, SessionKey("default", "s2")))[0] is None


async def test_filters_look_at_a_session_as_it_is_now(database: Database) -> None:
    log = Log()
    log.open("idle", title={"text": "100% Größe_A", "source": "user"})
    log.say("busy", "What about the GRÖSSE of it?")
    log.say("failed", "hello", agent="painter")
    log.start("failed", 1)
    log.end("failed", 1, "", status="failed", error=Error(code="model_error", message="503"))
    log.open("painted", agent="painter")
    await Views(database).show(log.events)
    for status in ("idle", "busy", "error"):
        found = await pages(database, 10, status=status)
        assert found == {"idle": [["painted", "idle"]], "busy": [["busy"]], "error": [["failed"]]}[status]
    assert await pages(database, 10, agent="painter") == [["painted"]]
    assert await pages(database, 10, agent="nobody\0") == [[]]
    assert await pages(database, 10, q="größe") == [["idle", "busy"]]
    assert await pages(database, 10, q="100%") == [["idle"]]
    assert await pages(database, 10, q="größe_a") == [["idle"]]
    assert await pages(database, 10, q="g_öße\0%") == [[]]


async def test_a_cursor_that_no_page_gave_is_refused(database: Database) -> None:
    log = Log()
    log.open("s1")
    await Views(database).show(log.events)
    big, negative, nul = "WzEsMTAwMDAwMDAwMDAwMDAwMDAwMDAsInMiXQ", "Wy0xLDEsInMiXQ", "WzEsMiwiXHUwMDAwIl0"
    for cursor in ("x", "é", "e30", big, negative, nul):
        with pytest.raises(InvalidCursor):
            await sessions.list_page(database, "default", cursor=cursor)
        with pytest.raises(InvalidCursor):
            await runs.list_page(database, "default", cursor=cursor)
    assert (await sessions.list_page(database, "default", cursor="")).items


async def test_a_session_as_its_events_made_it(database: Database) -> None:
    log = Log()
    log.say("s1", "  What is\n the capital \0 of " + "x" * 100)
    log.time += 5
    log.say("s1", "and then?")
    log.start("s1", 1)
    views = Views(database)
    await views.show(log.events)
    shown, position = await sessions.get(database, log.key("s1"))
    assert shown
    assert shown.title == ("What is the capital \0 of " + "x" * 100)[:64]
    assert (shown.title_source, shown.status, shown.active_run, shown.queued) == ("derived", "busy", "s1.1", 1)
    assert (shown.created_at, shown.updated_at, shown.seq, position) == (BEGIN, BEGIN + 5, 3, 3)
    log.do("s1", UpdateSession(origin=log.origin(), title=Title(text="France", source="user"), metadata={"a": [1]}))
    log.put("s1", Unknown(type="weather.changed", raw=b'{"items":[]}'))  # pyright: ignore
    log.end("s1", 1)
    await views.show(log.events)
    shown, _ = await sessions.get(database, log.key("s1"))
    assert shown
    assert (shown.title, shown.title_source, shown.metadata) == ("France", "user", {"a": [1]})
    assert (shown.status, shown.active_run, shown.queued, shown.last_run) == ("busy", "s1.2", 0, 2)
    log.start("s1", 2)
    log.end("s1", 2, "", status="failed", error=Error(code="empty_reply", message="nothing"))
    log.put("s1", Unknown(type="weather.changed", raw=b"{}"))  # pyright: ignore
    await views.show(log.events)
    shown, _ = await sessions.get(database, log.key("s1"))
    assert shown
    assert (shown.status, shown.active_run, shown.seq) == ("error", None, log.seq)


async def test_a55_s60_a_clock_that_goes_back_moves_no_session_back(database: Database) -> None:
    log = Log()
    log.open("s1")
    log.open("s2")
    log.time -= 3_600_000
    log.say("s1", "hello")
    await Views(database).show(log.events)
    shown, _ = await sessions.get(database, log.key("s1"))
    assert shown
    assert (shown.updated_at, shown.seq) == (BEGIN, 3)
    assert await pages(database, 10) == [["s2", "s1"]]


# --- runs -----------------------------------------------------------------------------------------------------------


async def test_runs_are_listed_newest_first(database: Database) -> None:
    log = Log()
    for n in range(5):
        log.time += 1000
        log.turn(f"s{n % 2}")
    log.say("s1", "wait", agent="painter")
    views = Views(database)
    await views.show(log.events)
    everything = ["s1.3", "s0.3", "s1.2", "s0.2", "s1.1", "s0.1"]
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = await runs.list_page(database, "default", limit=2, cursor=cursor)
        found += [run.id for run in page.items]
        cursor = page.next
        if cursor is None:
            break
        log.say("s0", "more")  # newer ones do not disturb
        await views.show(log.events)
    assert found == everything

    async def ids(**filters: object) -> list[str]:
        return [run.id for run in (await runs.list_page(database, "default", **filters)).items]  # pyright: ignore

    assert await ids(session="s1") == ["s1.3", "s1.2", "s1.1"]
    assert await ids(status="completed", session="s0") == ["s0.3", "s0.2", "s0.1"]
    assert await ids(status="queued", agent="painter") == ["s1.3"]
    assert await ids(status="running") == []
    assert "s1.1" not in await ids(since=BEGIN + 3000) and "s0.2" in await ids(since=BEGIN + 3000)
    assert await ids(session="nobody\0") == []


async def test_a_run_as_its_events_made_it(database: Database) -> None:
    log = Log()
    log.say("s1", "hello", message="m1")
    log.time += 100
    log.start("s1", 1, work=70)
    log.time += 100
    log.start("s1", 1, work=71)
    views = Views(database)
    await views.show(log.events)
    shown, _ = await runs.get(database, "default", "s1.1")
    assert shown
    assert (shown.status, shown.attempts, shown.started_at, shown.ended_at) == ("running", 2, BEGIN + 100, None)
    assert [(start.trigger, start.ended_at) for start in shown.starts] == [("message", BEGIN + 200), ("recovery", None)]
    assert shown.deadline == BEGIN + 100 + 600_000
    log.do("s1", CancelRun(origin=log.origin("user:bob"), run=1, reason="enough"))
    log.end("s1", 1, "half", status="cancelled", reason="enough", reasoning="hm", model="demo-2")
    await views.show(log.events)
    shown, _ = await runs.get(database, "default", "s1.1")
    assert shown and shown.cancel_requested and shown.output
    assert (shown.cancel_requested.by, shown.cancel_requested.reason, shown.reason) == ("user:bob", "enough", "enough")
    assert (shown.status, shown.message_ids, shown.agent, shown.model) == ("cancelled", ("m1",), "default", "demo-2")
    assert (shown.output, shown.reasoning) == ("half", "hm")
    assert shown.usage == Usage(output_tokens=3)
    for other in ("s1.2", "s1", "s1.0", "s1.1\0", "x.1"):
        assert (await runs.get(database, "default", other))[0] is None
    assert (await runs.get(database, "other", "s1.1"))[0] is None


# --- the transcript and the waterfall ---------------------------------------------------------------------------------


def _with_tools(log: Log) -> None:
    log.say("s1", "add", message="m1")
    log.time += 10
    log.start("s1", 1)
    calls = (ToolCall(id="c1", name="add", arguments="{}"), ToolCall(id="c2", name="shout", arguments='{"a":1}'))
    log.time += 300
    reply = ModelReplied(
        run=1,
        attempt=1,
        step=1,
        content="let me see",
        reasoning="hm",
        tool_calls=calls,
        usage=Usage(input_tokens=9),
        duration=250,
    )
    log.do("s1", RecordFact(origin=log.origin(), fact=reply))
    log.time += 10
    log.do("s1", RecordFact(origin=log.origin(), fact=ToolStarted(run=1, attempt=1, call_id="c2")))
    log.time += 40
    returned = ToolReturned(run=1, attempt=1, call_id="c1", status="ok", output="42", duration=30)
    log.do("s1", RecordFact(origin=log.origin(), fact=returned))


async def test_the_transcript_is_what_people_said_and_saw(database: Database) -> None:
    log = Log()
    _with_tools(log)
    log.say("s1", "taken back", message="m2")
    log.say("s1", "cancelled before it starts", message="m3")
    views = Views(database)
    await views.show(log.events)
    page = await history.page(database, log.key("s1"))
    assert [type(item) for item in page.items] == [
        history.Message,
        history.Reply,
        history.ToolResult,
        history.Message,
        history.Message,
    ]
    log.do("s1", WithdrawMessage(origin=log.origin(), message_id="m2"))
    log.do("s1", CancelRun(origin=log.origin(), run=3))
    interrupted = ToolReturned(run=1, attempt=1, call_id="c2", status="error", error="no")
    log.do("s1", RecordFact(origin=log.origin(), fact=interrupted))
    log.end("s1", 1, "it is 42", reasoning="clear")
    await views.show(log.events)
    page = await history.page(database, log.key("s1"))
    said, reply, result, second, end = page.items
    assert isinstance(said, history.Message) and isinstance(reply, history.Reply)
    assert isinstance(result, history.ToolResult) and isinstance(second, history.ToolResult)
    assert isinstance(end, history.Reply)
    assert (said.author, said.content, said.run) == ("user:ann", (Part(text="add"),), "s1.1")
    assert (reply.content, reply.reasoning, [call.name for call in reply.tool_calls]) == (
        "let me see",
        "hm",
        ["add", "shout"],
    )
    assert (result.name, result.output, second.name, second.status) == ("add", "42", "shout", "error")
    assert (end.content, end.reasoning, end.status) == ("it is 42", "clear", "completed")
    assert page.next is None and page.position == log.seq
    first = await history.page(database, log.key("s1"), limit=2)
    rest = await history.page(database, log.key("s1"), first.next or 0, limit=3)
    assert (*first.items, *rest.items) == page.items and rest.next is None
    assert (await history.page(database, log.key("s9"))).items == ()


async def test_the_waterfall_shows_what_is_over_and_what_goes_on(database: Database) -> None:
    log = Log()
    _with_tools(log)
    views = Views(database)
    await views.show(log.events)
    found = await steps.list_for(database, "default", "s1.1")
    assert found
    model, add, shout = found.items
    assert (model.kind, model.step, model.status, model.began_at, model.ended_at) == (
        "model",
        1,
        "ok",
        BEGIN + 60,
        BEGIN + 310,
    )
    assert model.usage == Usage(input_tokens=9)
    assert (add.name, add.status, add.began_at, add.ended_at) == ("add", "ok", BEGIN + 330, BEGIN + 360)
    assert (shout.name, shout.status, shout.began_at, shout.ended_at) == ("shout", "running", BEGIN + 320, None)
    assert shout.arguments == '{"a":1}'
    log.time += 1000
    last = ToolReturned(run=1, attempt=1, call_id="c2", status="ok", output="A", duration=0)
    log.do("s1", RecordFact(origin=log.origin(), fact=last))
    await views.show(log.events)
    found = await steps.list_for(database, "default", "s1.1")
    assert found
    *_, shout, model = found.items
    assert (shout.status, shout.began_at, shout.ended_at) == ("ok", BEGIN + 320, log.time)
    assert (model.kind, model.step, model.status, model.began_at, model.seq) == ("model", 2, "running", log.time, 0)
    log.time += 500
    log.end("s1", 1, "done", duration=400)
    await views.show(log.events)
    found = await steps.list_for(database, "default", "s1.1")
    assert found
    assert [(step.kind, step.step, step.status) for step in found.items] == [
        ("model", 1, "ok"),
        ("tool", 1, "ok"),
        ("tool", 1, "ok"),
        ("model", 2, "ok"),
    ]
    assert (found.items[-1].began_at, found.items[-1].ended_at) == (log.time - 400, log.time)
    assert await steps.list_for(database, "default", "s1.9") is None
    assert await steps.list_for(database, "default", "nonsense") is None


async def test_a_notice_and_a_large_message_are_shown_as_they_are(database: Database) -> None:
    log = Log()
    text = "U+2028 \u2028 \x85 \0 🙂" * 3000
    log.say("s1", text)
    await Views(database).show(log.events)
    page = await history.page(database, log.key("s1"))
    (item,) = page.items
    assert isinstance(item, history.Message)
    assert item.content == (Part(text=text),)
