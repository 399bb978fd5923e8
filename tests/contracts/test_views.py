"""What the views promise, on every database: rows are folds of the log, whatever happens to whoever writes them."""

import asyncio
import random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import update
from tests.support.logs import Log, wander
from tests.support.views import LOG, Views, fresh, rows, rows_in_force
from tests.support.waiting import eventually

from turnstream.ids import SessionKey
from turnstream.session.events import MessageWithdrawn, RunReleased
from turnstream.session.fold import evolve
from turnstream.session.paths import around
from turnstream.session.state import Run, Session
from turnstream.views import generations, live_runs, runs, session_row, sessions
from turnstream.views.batch import Batch
from turnstream.views.database import CHECKPOINT, Checkpoint, Commits, Database, Gone, NotReady
from turnstream.views.generations import Overtaken, Writer
from turnstream.views.rows import Statement, plain


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), data=st.data())
async def test_s52_rows_are_the_same_however_the_log_is_cut_into_batches(
    database: Database, seed: int, data: st.DataObject
) -> None:
    entries = wander(random.Random(seed), 120).entries
    cuts = sorted(data.draw(st.sets(st.integers(1, len(entries) - 1), max_size=20)))
    await generations.prepare(database, LOG)
    at = await generations.create(database, LOG)
    writer = Writer(database, at)
    for begin, end in zip([0, *cuts], [*cuts, len(entries)], strict=True):
        if data.draw(st.booleans()):  # the projector died here: the next one knows only what was committed
            writer = Writer(database, Checkpoint(at.generation, writer.position, LOG))
        await writer.apply(entries[begin:end], entries[end - 1].seq)
    found = await rows(database, at.generation)
    assert found == await fresh(entries)
    assert any(found.values())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
async def test_s52_what_was_removed_from_the_log_leaves_no_trace(seed: int) -> None:
    """The rows of those who saw sessions live, and the rows made of what deletions have left of the log."""
    log = wander(random.Random(seed), 150)
    assert await fresh(log.entries) == await fresh(log.left)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_rows_say_of_status_and_runs_what_the_core_folds(seed: int) -> None:
    events = wander(random.Random(seed), 80).events
    folds: dict[SessionKey, Session] = {}
    batch = Batch(events)
    batch.fold()
    for recorded in events:
        key = recorded.event.key
        folds[key] = evolve(folds.get(key, Session(key=key)), recorded)
    for key, fold in folds.items():
        row = batch.sessions.get(str(key), session_row.NEW)
        if fold.deleted:
            assert bool(row.deleted) == (not fold.deleted.erased) and not row.live
            continue
        assert [(run.n, run.status, run.attempt, run.requests) for run in row.live] == [
            (run.n, run.status, run.attempt, tuple(request.k for request in run.for_people)) for run in fold.runs
        ]
        wanting = [run.n for run in fold.runs if run.status == "running" or run in fold.startable or _is_to_end(run)]
        assert [run.n for run in row.live if row.wants_runner(run.n)] == ([] if fold.copying else wanting)
        assert (row.seq, row.last_run, row.queue) == (fold.seq, fold.last_run, fold.last_queue)
        assert (row.children, row.unreported) == (fold.children, fold.unreported)
        there = [(child.run, child.k, child.session) for child in row.open_children]
        assert there == [(child.run, child.k, child.session) for child in fold.children]
        assert (row.agent, row.policy, row.one_shot) == (fold.agent, fold.policy, fold.one_shot)
        for run in fold.runs:
            kept = batch.runs[f"{key}.{run.n}"]
            assert kept.folded == _without_finished(run)
            assert (kept.status, kept.message_ids, kept.usage) == (run.status, run.message_ids, run.usage)


def _without_finished(run: Run) -> Run:
    """Of nodes that have finished, and of what is inside of them, the views keep nothing."""
    over = {visit.path for visit in run.visits if visit.port}
    visits = [visit for visit in run.visits if over.isdisjoint((visit.path, *around(visit.path)))]
    return msgspec.structs.replace(run, visits=tuple(visits))


def _is_to_end(run: Run) -> bool:
    return run.is_to_end and run.status == "queued"


async def test_rows_ignore_what_the_core_ignores(database: Database) -> None:
    log = Log()
    log.say("s1", "one", message="m1")
    log.start("s1", 1)
    again = log.events[-1].event.data
    log.put("s1", RunReleased(run=1, attempt=1))
    views = Views(database)
    await views.show(log.events)
    before = await runs.get(database, "default", "s1.1")
    for strange in (again, RunReleased(run=1, attempt=1), MessageWithdrawn(message_id="m1", by="x", run=1)):
        log.put("s1", strange)
    await views.show(log.events)
    assert (await runs.get(database, "default", "s1.1"))[0] == before[0]
    session, _ = await sessions.get(database, log.key("s1"))
    assert session and (session.active_run, session.status) == ("s1.1", "busy")
    assert [(run.status, run.attempt) for run in log.sessions[log.key("s1")].runs] == [("queued", 1)]


async def test_s52_a_batch_that_fails_leaves_nothing(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    log.turn("s1")
    views = Views(database)
    await views.show(log.events)
    before = await rows_in_force(database)
    log.turn("s1")
    log.turn("s2")

    def die(*_: object) -> None:
        raise ConnectionError("gone")

    with monkeypatch.context() as patch:
        # The last thing a batch writes: everything else has been sent by then.
        patch.setattr("turnstream.views.batch.Batch.move_rows", die)
        with pytest.raises(Exception, match="gone"):
            await views.show(log.events)
    assert await rows_in_force(database) == before
    await views.show(log.events)
    assert (await rows_in_force(database))[1] == await fresh(log.events)


async def test_s52_of_two_writers_one_is_overtaken_and_writes_nothing(database: Database) -> None:
    log = Log()
    for n in range(6):
        log.turn(f"s{n % 2}")
    at = await generations.prepare(database, LOG)
    one, two = Writer(database, at), Writer(database, at)
    await one.apply(log.events[:5], 5)
    with pytest.raises(Overtaken):
        await two.apply(log.events[:9], 9)
    two = Writer(database, await database.checkpoint())
    await two.apply(log.events[5:11], 11)
    with pytest.raises(Overtaken):
        await one.apply(log.events[5:], log.events[-1].seq)
    await two.apply(log.events[11:], log.events[-1].seq)
    assert (await rows_in_force(database))[1] == await fresh(log.events)


async def test_a_write_that_fails_in_its_middle_leaves_nothing_and_holds_nothing_up(database: Database) -> None:
    at = await generations.prepare(database, LOG)
    move = update(CHECKPOINT).values(position=9).where(CHECKPOINT.c.generation == at.generation)
    statements = [plain(database.engine.dialect, move), Statement("INSERT INTO nowhere VALUES (1)", ())]
    with pytest.raises(Gone):
        await database.write(statements)
    assert await database.checkpoint() == at
    assert await database.write(statements[:1])
    assert (await database.checkpoint()).position == 9
    elsewhere = move.where(CHECKPOINT.c.position == 8)
    assert not await database.write([plain(database.engine.dialect, elsewhere), *statements])
    assert (await database.checkpoint()).position == 9


async def test_s52_writers_race_and_every_event_is_in_once(database: Database) -> None:
    log = Log()
    for n in range(40):
        log.turn(f"s{n % 3}")
    await generations.prepare(database, LOG)
    overtaken = 0

    async def write(step: int) -> None:
        nonlocal overtaken
        writer = Writer(database, await database.checkpoint())
        while writer.position < len(log.events):
            end = min(writer.position + step, len(log.events))
            try:
                await writer.apply(log.events[writer.position : end], end)
            except Overtaken:
                overtaken += 1
                writer = Writer(database, await database.checkpoint())

    await asyncio.gather(write(7), write(5), write(11))
    assert overtaken
    assert (await rows_in_force(database))[1] == await fresh(log.events)


async def test_a_generation_is_put_in_force_when_it_has_caught_up(database: Database) -> None:
    log = Log()
    log.turn("s1")
    views = Views(database)
    await views.show(log.events)
    old = await database.checkpoint()
    new = await generations.create(database, LOG)
    writer = Writer(database, new)
    await writer.apply(log.events[:2], 2)
    assert not await generations.flip(database, new)
    assert await database.checkpoint() == old
    await writer.apply(log.events[2:], 3)
    assert await generations.flip(database, new)
    await generations.drop_dead(database)
    assert (await database.checkpoint()).generation == new.generation
    log.turn("s1")
    with pytest.raises(Overtaken):  # whoever writes the old one stops
        await views.show(log.events)
    await writer.apply(log.events[3:], 6)
    assert (await rows_in_force(database))[1] == await fresh(log.events)


async def test_an_unfinished_generation_is_dropped_by_the_next_one(database: Database) -> None:
    log = Log()
    log.turn("s1")
    await Views(database).show(log.events)
    left = await generations.create(database, LOG)
    writer = Writer(database, left)
    await writer.apply(log.events, 3)
    new = await generations.create(database, LOG)
    assert new.generation > left.generation
    with pytest.raises(Overtaken):
        await writer.apply([], 4)
    with pytest.raises(Overtaken):
        await generations.flip(database, left)
    async with database.connection() as connection:
        names = await connection.run_sync(generations.table_names)
    assert not [name for name in names if name.endswith(f"_{left.generation}")]


async def test_a_read_whose_generation_is_dropped_meanwhile_is_done_again(database: Database) -> None:
    log = Log()
    log.turn("s1")
    await Views(database).show(log.events)
    seen: list[int] = []

    async def work(reader: object) -> int:
        generation: int = reader.generation  # pyright: ignore
        seen.append(generation)
        if len(seen) == 1:
            new = await generations.create(database, LOG)
            await Writer(database, new).apply(log.events, 3)
            await generations.flip(database, new)
            await generations.drop_dead(database)
        found = await reader.rows(sessions.table(generation).select())  # pyright: ignore
        return len(found)

    assert await asyncio.wait_for(database.read(work), 20) == 1


async def test_a_database_without_views_says_so(database: Database) -> None:
    with pytest.raises(NotReady):
        await sessions.list_page(database, "default")
    assert not await database.wait_for(1, 0.05)


async def test_wait_for_hears_of_a_commit_in_the_same_process_at_once(database_url: str) -> None:
    commits = Commits()
    db = Database(database_url, commits=commits)
    waiting = [asyncio.create_task(db.wait_for(seq, 20)) for seq in (5, 3, 9)]
    await asyncio.sleep(0)
    commits.announce(5)
    done = await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    assert waiting[0] in done[0] or waiting[1] in done[0]
    assert await waiting[0] and await waiting[1] and not waiting[2].done()
    waiting[2].cancel()
    await db.close()


async def test_wait_for_notices_a_projector_in_another_process(database: Database, database_url: str) -> None:
    log = Log()
    log.turn("s1")
    log.turn("s1")
    other = Database(database_url)  # as another process has it
    views = Views(other)
    await views.show(log.events[:3])
    queries = 0
    ask = database.checkpoint

    async def counted() -> Checkpoint:
        nonlocal queries
        queries += 1
        return await ask()

    database.checkpoint = counted  # pyright: ignore
    assert await database.wait_for(3, 10)
    waiting = [asyncio.create_task(database.wait_for(5, 10)) for _ in range(200)]
    assert not await database.wait_for(6, 0.1)
    assert queries < 60  # shared: 201 waiters do not ask 201 times
    await views.show(log.events)
    assert all(await asyncio.gather(*waiting))
    await eventually(lambda: database._poll is None or database._poll.done(), what="no poll without a waiter")
    await other.close()


async def test_a_waiter_that_gives_up_harms_no_other(database: Database) -> None:
    log = Log()
    log.turn("s1")
    gone = asyncio.create_task(database.wait_for(2, 10))
    stays = asyncio.create_task(database.wait_for(3, 10))
    await asyncio.sleep(0)
    gone.cancel()
    await Views(database).show(log.events)
    assert await stays


async def test_runs_that_are_live_are_counted(database: Database) -> None:
    log = Log()
    log.say("s1", "one")
    log.start("s1", 1)
    log.say("s1", "two")
    log.say("s2", "three")
    await Views(database).show(log.events)
    live = await live_runs.count_live(database, "default")
    assert (live.queued, live.running, live.waiting, live.oldest_queued_at) == (2, 1, 0, log.time)
    assert (await live_runs.count_live(database, "other")).queued == 0
    assert (await live_runs.count_live(database)).running == 1
    later = log.time + 1
    for account, count in (("default", 3), ("other", 0), (None, 3)):
        assert len(await live_runs.live_before(database, later, limit=10, account=account)) == count


async def test_of_many_live_runs_each_session_is_read_once(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    for n in range(40):
        log.say(f"s{n % 2}", "again")
    log.start("s1", 1)
    await Views(database).show(log.events)
    parsed: list[str] = []
    parse = sessions.parse

    def count(body: str) -> sessions.Row:
        parsed.append(body)
        return parse(body)

    monkeypatch.setattr(sessions, "parse", count)
    found = await live_runs.live_before(database, log.time + 1, limit=100)
    assert len(found) == 40 and len(parsed) == 2
    assert [(run.key.session, run.row.n) for run in found if run.wants_runner] == [("s0", 1), ("s1", 1)]
