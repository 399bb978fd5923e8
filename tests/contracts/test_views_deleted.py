"""What the views show of a session that is deleted, at each step of its deletion, and what stays of it where."""

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.logs import Entry, Log, wander
from tests.support.views import LOG, Views, fresh, rows, rows_in_force

from turnstream.log import archive
from turnstream.session.events import (
    DeleteMode,
    Error,
    Fact,
    SessionDeleted,
    SessionErased,
    ToolCall,
    ToolReturned,
)
from turnstream.views import generations, history, live_runs, requests, runs, sessions, steps
from turnstream.views.batch import Archived, record
from turnstream.views.database import Checkpoint, Database
from turnstream.views.generations import Writer

MODES: tuple[DeleteMode, ...] = ("detach", "erase")


def spoken() -> Log:
    """A session with a turn that used a tool, one that failed and left something over, one that waits, one queued."""
    log = Log()
    log.open("s1", title={"text": "marzipan", "source": "user"}, metadata={"k": "marzipan"})
    log.say("s1", "marzipan")
    log.start("s1", 1)
    log.reply("s1", 1, ToolCall(id="c1", name="add", arguments='{"a":"marzipan"}'), reasoning="marzipan")
    log.time += 30
    log.report("s1", ToolReturned(run=1, attempt=1, call_id="c1", status="ok", output="marzipan", duration=20))
    log.end("s1", 1, "forty-two")
    log.say("s1", "marzipan")
    log.start("s1", 2)
    log.say("s1", "marzipan", busy="steer")
    log.end("s1", 2, "", status="failed", error=Error(code="model_error", message="503"))
    log.start("s1", 3)
    asks = ToolCall(id="c1", name="conversation_ask_user", arguments='{"question":"marzipan"}', asks="question")
    log.reply("s1", 3, asks, content="marzipan")
    log.ask("s1", 3, prompt="marzipan", choices=("marzipan",), expires_in=60_000)
    log.turn("s2", "hello", "still there")
    return log


async def nothing_of(db: Database, log: Log, name: str) -> None:
    """Whoever asks for the session finds none."""
    key = log.key(name)
    assert (await sessions.get(db, key))[0] is None
    assert [item.id for item in (await sessions.list_page(db, "default")).items] == ["s2"]
    assert (await history.page(db, key)).items == ()
    assert (await requests.list_page(db, "default", state=None)).items == ()
    assert (await requests.get(db, "default", f"{name}.3.q1"))[0] is None
    assert (await runs.list_page(db, "default", session=name)).items == ()


async def test_s29_the_runs_of_a_detached_session_stay(database: Database) -> None:
    log, views = spoken(), Views(database)
    await views.show(log.entries)
    before, _ = await runs.get(database, "default", "s1.1")
    log.time += 500
    log.delete("s1", "detach")
    deleted = log.seq
    await views.show(log.entries)
    await nothing_of(database, log, "s1")
    assert [one.deleted.mode for one in await sessions.deleted_before(database, log.time + 1, limit=5)] == ["detach"]
    listed = [run.id for run in (await runs.list_page(database, "default")).items]
    assert listed == ["s2.1", "s1.3", "s1.2", "s1.1"]
    waited, _ = await runs.get(database, "default", "s1.3")
    assert waited and (waited.status, waited.reason, waited.session) == ("cancelled", "session_deleted", None)
    assert (waited.ended_at, waited.seq, waited.open_requests) == (log.time, deleted, 0)
    assert await live_runs.due_before(database, log.time + 1_000_000, limit=5) == []
    log.erase("s1")
    await views.show(log.entries)
    await nothing_of(database, log, "s1")
    assert await sessions.deleted_before(database, log.time + 1, limit=5) == []
    assert [run.id for run in (await runs.list_page(database, "default")).items] == listed
    kept, _ = await runs.get(database, "default", "s1.1")
    assert kept and before
    assert (kept.session, kept.output, kept.status, kept.usage) == (None, "forty-two", "completed", before.usage)
    assert (kept.message_ids, kept.steps, kept.requested_at, kept.ended_at) == (
        before.message_ids,
        before.steps,
        before.requested_at,
        before.ended_at,
    )
    left, _ = await runs.get(database, "default", "s1.3")
    assert left and (left.status, left.trigger, left.reason) == ("cancelled", "leftover", "session_deleted")
    found = await steps.list_for(database, "default", "s1.1")
    assert found
    assert [(step.kind, step.name, step.status, step.arguments) for step in found.items] == [
        ("model", "demo", "ok", ""),
        ("tool", "add", "ok", ""),
        ("model", "demo", "ok", ""),
    ]
    assert (await rows_in_force(database))[1] == await fresh(log.left)


async def test_s29_of_an_erased_session_nothing_stays(database: Database) -> None:
    log, views = spoken(), Views(database)
    await views.show(log.entries)
    log.delete("s1", "erase")
    await views.show(log.entries)
    await nothing_of(database, log, "s1")
    assert [run.id for run in (await runs.list_page(database, "default")).items] == ["s2.1"]
    assert (await runs.get(database, "default", "s1.1"))[0] is None
    assert await steps.list_for(database, "default", "s1.1") is None
    log.erase("s1")
    await views.show(log.entries)
    _, found = await rows_in_force(database)
    assert {row[0] for name in ("sessions", "history", "requests") for row in found[name]} == {"default/s2"}
    assert {row[0] for name in ("runs", "steps") for row in found[name]} == {"default/s2.1"}
    assert found == await fresh(log.left)


def overwritten(log: Log, name: str, kept: int) -> list[Entry]:
    """The log as it is while what came before a session's deletion is being removed: `kept` of it are there yet."""
    key = log.key(name)
    own = [entry for entry in log.events if entry.event.key == key]
    end = next(n for n, entry in enumerate(own) if isinstance(entry.event.data, SessionDeleted))
    gone = {entry.seq for entry in own[: max(0, end - kept)]}
    return [entry for entry in log.entries if entry.seq not in gone]


def without(entries: list[Entry], kind: type[Fact]) -> list[Entry]:
    return [entry for entry in entries if isinstance(entry, Archived) or not isinstance(entry.event.data, kind)]


@pytest.mark.parametrize("mode", MODES)
async def test_rows_are_the_same_wherever_the_removal_stopped(mode: DeleteMode) -> None:
    log = spoken()
    log.delete("s1", mode)
    log.erase("s1")
    whole = log.entries
    log.entries = without(whole, SessionErased)
    before = await fresh(log.entries)
    for kept in range(15):
        assert await fresh(overwritten(log, "s1", kept)) == before
    log.entries = whole
    after = await fresh(whole)
    for kept in range(15):  # whoever reads meanwhile may see any of it, and also the end without the deletion
        entries = overwritten(log, "s1", kept)
        assert await fresh(entries) == after
        assert await fresh(without(entries, SessionDeleted)) == after


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), data=st.data())
async def test_s52_a_projector_that_lags_behind_removals_gets_the_same_rows(
    database: Database, seed: int, data: st.DataObject
) -> None:
    """It has read a part of the log when the rest of it is what deletions have left."""
    log = wander(random.Random(seed), 120, faults=False)
    read = data.draw(st.integers(0, len(log.entries)))
    seen = log.entries[:read]
    rest = [entry for entry in log.left if not seen or entry.seq > seen[-1].seq]
    await generations.prepare(database, LOG)
    at = await generations.create(database, LOG)
    writer = Writer(database, at)
    await writer.apply(seen, seen[-1].seq if seen else 0)
    writer = Writer(database, Checkpoint(at.generation, writer.position, LOG))
    for begin in range(0, len(rest), 5):
        await writer.apply(rest[begin : begin + 5], rest[begin : begin + 5][-1].seq)
    assert await rows(database, at.generation) == await fresh(log.left)


async def test_a_session_whose_tombstone_has_expired_may_be_opened_again(database: Database) -> None:
    log, views = spoken(), Views(database)
    log.delete("s1", "erase")
    log.erase("s1")
    await views.show(log.entries)
    log.sessions.pop(log.key("s1"))
    log.turn("s1", "anew", "and again")
    await views.show(log.entries)
    shown, _ = await sessions.get(database, log.key("s1"))
    assert shown and (shown.title, shown.last_run, shown.status) == ("anew", 1, "idle")
    page = await history.page(database, log.key("s1"))
    assert len(page.items) == 2
    assert (await rows_in_force(database))[1] == await fresh(log.left)


def test_a_record_that_was_too_large_gives_how_the_run_began_and_ended() -> None:
    log = spoken()
    key = log.key("s1")
    small = archive.encode(key, 1, archive.split(log.events)[1], 100)
    run, events = archive.decode(small, 99)
    row, output, did = record(Archived(seq=99, key=key, run=run, events=events))
    assert row and output
    assert (row.status, row.steps, output.content) == ("completed", 0, "forty-two")
    assert [step.kind for _, step in did] == ["model"]


def where(folder: Path) -> list[str]:
    """The files that hold what was said."""
    return [file.name for file in sorted(folder.iterdir()) if b"marzipan" in file.read_bytes()]


@pytest.mark.parametrize("mode", MODES)
async def test_s59_no_byte_of_what_was_said_stays_in_the_files(tmp_path: Path, mode: DeleteMode) -> None:
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'views.db'}")
    log, views = spoken(), Views(database)
    for n in range(200):
        log.turn("s3", f"marzipan {n} " * 50, "hi")
        log.turn("s2", "hello " * 50, "hi")
    await views.show(log.entries)
    assert where(tmp_path)
    for act in (lambda name: log.delete(name, mode), log.erase):
        for name in ("s1", "s3"):
            act(name)
        await views.show(log.entries)
        assert where(tmp_path) == []
    await database.close()


async def test_s59_the_files_are_cleaned_once_nobody_reads(tmp_path: Path) -> None:
    """Whoever reads what was there before keeps it there, and nobody waits for that."""
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'views.db'}")
    log, views = spoken(), Views(database)
    await views.show(log.entries)
    async with database.connection() as reader:
        generation = (await database.checkpoint()).generation
        await reader.execute(history.table(generation).select())
        log.delete("s1", "erase")
        await asyncio.wait_for(views.show(log.entries), 5)
        assert where(tmp_path)
    log.turn("s2")
    await views.show(log.entries)
    assert where(tmp_path) == []
    await database.close()
