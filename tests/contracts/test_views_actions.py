"""What the views show of what people do by themselves."""

from tests.contracts.test_views_waiting import run_of, waterfall
from tests.support.logs import Log
from tests.support.views import Views

from turnstream.session.commands import CancelRun
from turnstream.session.events import ToolReturned, ToolStarted
from turnstream.views import history
from turnstream.views.database import Database


async def transcript(db: Database, log: Log) -> list[tuple[str, str]]:
    page = await history.page(db, log.key("s1"))
    return [(type(item).__name__, getattr(item, "run", "")) for item in page.items]


async def test_s44_an_action_is_shown_with_its_result_and_as_the_persons(database: Database) -> None:
    log, views = Log(), Views(database)
    log.open("s1")
    assert log.act("s1", author="user:ann") == 1
    log.start("s1", 1)
    await views.show(log.entries)
    assert await waterfall(database, "s1.1") == [("tool", "add", "running")]
    log.report("s1", ToolStarted(run=1, attempt=1, call_id="action"))
    log.report("s1", ToolReturned(run=1, attempt=1, call_id="action", status="ok", output="2"))
    await views.show(log.entries)
    assert await waterfall(database, "s1.1") == [("tool", "add", "ok")], "and no model"
    log.end("s1", 1, "2", duration=0)
    await views.show(log.entries)
    action, result, end = (await history.page(database, log.key("s1"))).items
    assert isinstance(action, history.Action) and isinstance(result, history.ToolResult)
    assert (action.author, action.name, action.arguments) == ("user:ann", "add", '{"a":1}')
    assert (result.call_id, result.name, result.output) == (action.call_id, "add", "2")
    assert isinstance(end, history.Reply) and (end.status, end.content) == ("completed", "")
    run = await run_of(database, "s1.1")
    assert (run.trigger, run.output, run.tool_calls, run.steps) == ("action", "2", 1, 0)
    assert await waterfall(database, "s1.1") == [("tool", "add", "ok")]


async def test_an_action_that_never_began_is_not_in_the_transcript(database: Database) -> None:
    log, views = Log(), Views(database)
    log.open("s1", policy={"on_busy": "queue"})
    log.say("s1", "hello")
    assert log.act("s1") == 2
    await views.show(log.entries)
    assert ("Action", "s1.2") in await transcript(database, log)
    log.do("s1", CancelRun(origin=log.origin(), run=2))
    await views.show(log.entries)
    assert await transcript(database, log) == [("Message", "s1.1")]
    assert (await run_of(database, "s1.2")).status == "cancelled"


async def test_an_action_that_is_cancelled_while_it_runs_is_shown_without_a_result(database: Database) -> None:
    log, views = Log(), Views(database)
    log.open("s1")
    log.act("s1")
    log.start("s1", 1)
    log.do("s1", CancelRun(origin=log.origin(), run=1))
    log.end("s1", 1, "", status="cancelled", duration=0)
    await views.show(log.entries)
    action, end = (await history.page(database, log.key("s1"))).items
    assert isinstance(action, history.Action) and isinstance(end, history.Reply)
    assert [call.call_id for call in end.unfinished] == ["action"]
    assert await waterfall(database, "s1.1") == [("tool", "add", "interrupted")]


async def test_a38_of_an_action_in_a_deleted_session_only_how_it_went_is_kept(database: Database) -> None:
    log, views = Log(), Views(database)
    log.open("s1")
    log.act("s1", arguments='{"word":"marzipan"}')
    log.start("s1", 1)
    log.report("s1", ToolReturned(run=1, attempt=1, call_id="action", status="ok", output="2"))
    log.end("s1", 1, "2", duration=0)
    log.delete("s1", "detach")
    log.erase("s1")
    await views.show(log.left)
    run = await run_of(database, "s1.1")
    assert (run.session, run.trigger, run.output) == (None, "action", "2")
    assert await waterfall(database, "s1.1") == [("tool", "add", "ok")]
    kept = next(entry for entry in log.entries if hasattr(entry, "events"))
    assert b"marzipan" not in b"".join(event.payload for event in kept.events) and "ann" not in str(kept)
