"""Log to views on a real broker: projectors that die, freeze, race; views made anew while everything goes on."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import text
from tests.support.logs import SPECS, Entry, Log, publish, wander
from tests.support.nats import connect
from tests.support.processes import Spawn
from tests.support.views import fresh, rows_in_force
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.declare import declare
from turnstream.broker.errors import StreamBehind
from turnstream.broker.server import NatsServer
from turnstream.ids import derive
from turnstream.log.handle import Sessions
from turnstream.log.jetstream import JetStreamLog
from turnstream.session.commands import DeleteSession, EraseSession, Origin
from turnstream.session.events import DeleteMode, Recorded
from turnstream.views import generations, runs, sessions
from turnstream.views.database import Database, NotReady
from turnstream_projector import project, reading
from turnstream_projector.fsck import fsck
from turnstream_projector.project import AnotherLog, Projector
from turnstream_projector.rebuild import Progress, rebuild
from turnstream_runner.erase import Eraser


@contextlib.asynccontextmanager
async def projecting(broker: Broker, database: Database) -> AsyncIterator[Projector]:
    projector = Projector(broker, database)
    task = asyncio.create_task(projector.run())
    try:
        yield projector
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def turns(count: int, sessions: int = 5) -> list[Recorded]:
    log = Log()
    rng = random.Random(count)
    for _ in range(count):
        log.time += 7
        log.turn(f"s{rng.randrange(sessions)}", "hello", "hi " * rng.randrange(50))
    return log.events


async def stored(broker: Broker) -> list[Entry]:
    """Everything in the log that can be read, as the broker dated it."""
    last = (await reading.extent(broker)).last
    entries: list[Entry] = []
    pull = reading.follow(broker, 0)
    async for deliveries in pull:
        entries += reading.entries_of(deliveries)
        if deliveries[-1].seq >= last:
            break
    await pull.close()
    return entries


async def shows(broker: Broker, database: Database, events: Sequence[Entry], timeout: float = 60) -> None:
    """Waits until the views are as far as these events, the log's last, and are what a rebuild of the log gives."""
    assert await database.wait_for(events[-1].seq, timeout)
    at, found = await rows_in_force(database)
    assert at.position == events[-1].seq
    assert found == await fresh(await stored(broker))


async def test_the_views_follow_the_log(broker: Broker, database: Database) -> None:
    events = wander(random.Random(1), 200).entries
    await publish(broker, events[:120])
    async with projecting(broker, database):
        await shows(broker, database, events[:120])
        await publish(broker, events[120:])
        await shows(broker, database, events)


@pytest.mark.system
async def test_s52_a_projector_killed_at_any_point_doubles_and_loses_nothing(
    own_nats: NatsServer, broker: Broker, database: Database, database_url: str, spawn: Spawn
) -> None:
    events = turns(3000, sessions=40)
    places = {"nats_url": own_nats.url, "database_url": database_url}
    rng = random.Random(7)
    storing = asyncio.create_task(publish(broker, events))
    for step in range(3):
        process = spawn("projector", name=f"projector-{step}", **places)
        goal = len(events) * (step + 1) // 5 + rng.randrange(400)
        assert await database.wait_for(goal, 60), process.log[-2000:]
        process.kill()  # in the middle of some batch
    await storing
    spawn("projector", name="last", **places)
    await shows(broker, database, events)


async def test_s52_two_projectors_at_once_do_no_harm(
    broker: Broker, own_nats: NatsServer, database: Database, database_url: str
) -> None:
    events = turns(600)
    other_broker, other_database = await connect(own_nats.url), Database(database_url)
    async with projecting(broker, database), projecting(other_broker, other_database):
        for begin in range(0, len(events), 100):
            await publish(broker, events[begin : begin + 100])
        await shows(broker, database, events)
    await other_broker.close()
    await other_database.close()


@pytest.mark.system
async def test_s52_a_projector_that_stands_by_takes_over(
    own_nats: NatsServer, broker: Broker, database: Database, database_url: str, spawn: Spawn
) -> None:
    events = turns(300)
    places = {"nats_url": own_nats.url, "database_url": database_url}
    first, second = spawn("projector", name="one", **places), spawn("projector", name="two", **places)
    await publish(broker, events[:450])
    assert await database.wait_for(450, 60)
    first.kill()
    await publish(broker, events[450:600])
    assert await database.wait_for(600, 30)
    third = spawn("projector", name="three", **places)
    second.freeze()
    await publish(broker, events[600:])
    await third.until_logged("projector")
    assert await database.wait_for(900, 30)
    second.thaw()  # in whatever it was
    await shows(broker, database, events)
    assert [await second.stop(), await third.stop()] == [0, 0]


async def test_s52_a_rebuild_while_writes_and_reads_go_on(broker: Broker, database: Database) -> None:
    events = turns(1500)
    await publish(broker, events[:3000])
    seen: list[int] = []
    reading = True

    async def read() -> None:
        while reading:
            page = await sessions.list_page(database, "default")
            assert len(page.items) == 5
            seen.append(page.position)
            await asyncio.sleep(0)

    async with projecting(broker, database):
        await shows(broker, database, events[:3000])
        before = await database.checkpoint()
        reader = asyncio.create_task(read())
        steps: list[Progress] = []
        storing = asyncio.create_task(publish(broker, events[3000:]))
        at = await rebuild(broker, database, on_progress=steps.append)
        await storing
        assert at.generation != before.generation
        await shows(broker, database, events)
        reading = False
        await reader
    assert seen == sorted(seen) and len(seen) > 5
    assert steps[-1].position >= 3000 and [step.events for step in steps] == sorted(step.events for step in steps)
    async with database.connection() as connection:
        names = await connection.run_sync(generations.table_names)
    assert len(names) == 8  # one generation, `checkpoint` and `active`


async def test_s52_a_rebuild_that_dies_leaves_the_views_as_they_are(broker: Broker, database: Database) -> None:
    events = turns(900)
    await publish(broker, events[:2400])
    async with projecting(broker, database):
        await shows(broker, database, events[:2400])
        before = await database.checkpoint()

        def die(progress: Progress) -> None:
            raise ConnectionAbortedError

        with pytest.raises(ConnectionAbortedError):
            await rebuild(broker, database, on_progress=die)
        assert await database.checkpoint() == before
        await publish(broker, events[2400:])
        await shows(broker, database, events)
        after = await rebuild(broker, database)
        assert after.generation > before.generation + 1
        await shows(broker, database, events)


async def test_of_two_rebuilds_the_later_one_wins(broker: Broker, database: Database) -> None:
    events = turns(900)
    await publish(broker, events)
    begun = asyncio.Event()
    first = asyncio.create_task(rebuild(broker, database, on_progress=lambda _: begun.set()))
    await asyncio.wait((first, asyncio.create_task(begun.wait())), return_when=asyncio.FIRST_COMPLETED)
    await rebuild(broker, database)
    with contextlib.suppress(generations.Overtaken):
        await first
    await shows(broker, database, events)


async def test_a_rebuild_of_an_empty_log(broker: Broker, database: Database) -> None:
    at = await rebuild(broker, database)
    assert at.position == 0
    assert (await sessions.list_page(database, "default")).items == ()


async def test_a_message_that_is_no_event_stops_nobody(broker: Broker, database: Database) -> None:
    events = turns(3)
    await publish(broker, events)
    await broker.nc.publish(subjects.session(events[0].event.key), b"{not json")
    alien = turns(1)[0]
    await broker.nc.publish("ts.session.0.other.s1", alien.payload)
    await broker.nc.flush()
    async with projecting(broker, database):
        assert await database.wait_for(len(events) + 2, 30)
        _, found = await rows_in_force(database)
        wanted = await fresh(await stored(broker))
    assert found == wanted


async def test_views_of_another_log_are_refused_until_a_rebuild(
    broker: Broker, database: Database, own_nats: NatsServer
) -> None:
    events = turns(200)
    await publish(broker, events)
    async with projecting(broker, database):
        await shows(broker, database, events)
    await broker.api("STREAM.DELETE.SESSIONS")
    await declare(broker, replicas=1)
    with pytest.raises(AnotherLog, match="turnstream rebuild"):
        await Projector(broker, database).run()
    fewer = turns(50)
    await publish(broker, fewer)
    at = await rebuild(broker, database)
    assert at.position == fewer[-1].seq
    async with projecting(broker, database):
        _, found = await rows_in_force(database)
        assert found == await fresh(await stored(broker))


async def test_a_log_that_lost_its_end_is_no_log_to_follow(broker: Broker, database: Database) -> None:
    events = turns(5)
    await publish(broker, events)
    async with projecting(broker, database):
        await shows(broker, database, events)
    async with database.transaction() as connection:
        await connection.execute(text("UPDATE checkpoint SET position = 1000"))
    with pytest.raises(StreamBehind):
        await Projector(broker, database).run()


async def test_s51_the_broker_is_killed_and_started_again(
    own_nats: NatsServer, broker: Broker, database: Database
) -> None:
    events = turns(200)
    await publish(broker, events[:300])
    async with projecting(broker, database):
        await shows(broker, database, events[:300])
        own_nats.kill()
        await own_nats.start()
        await eventually(lambda: broker.nc.is_connected, 20, what="the broker connected again")
        await publish(broker, events[300:])
        await shows(broker, database, events)


async def test_a_database_that_goes_away_is_waited_for(broker: Broker, database: Database, database_url: str) -> None:
    events = turns(400)
    await publish(broker, events[:600])
    other = Database(database_url)
    async with projecting(broker, database):
        await shows(broker, other, events[:600])
        if other.is_sqlite:  # the only thing that keeps SQLite away: somebody else holds the lock
            async with other.transaction():
                await publish(broker, events[600:900])
        else:
            await publish(broker, events[600:900])
            async with other.transaction() as connection:
                others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
                await connection.execute(text(f"SELECT pg_terminate_backend(pid) {others}"))
        await publish(broker, events[900:])
        await shows(broker, other, events)
    await other.close()


async def test_a_deleted_database_is_made_anew(
    broker: Broker, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project, "LOOK", 0.05)
    events = turns(100)

    async def there_again() -> bool:
        with contextlib.suppress(NotReady):
            return (await database.checkpoint()).position == events[-1].seq
        return False

    await publish(broker, events)
    async with projecting(broker, database), projecting(broker, database):
        await shows(broker, database, events)
        if database.is_sqlite:
            for file in Path(database.engine.url.database or "").parent.glob("*.db*"):
                file.unlink()
        else:
            async with database.transaction() as connection:
                await connection.execute(text("DROP TABLE checkpoint, active"))
        await eventually(there_again, 20, what="new views")
        await shows(broker, database, events)


async def test_views_of_another_release_are_made_anew(broker: Broker, database: Database) -> None:
    events = turns(300)
    await publish(broker, events[:600])
    async with projecting(broker, database):
        await shows(broker, database, events[:600])
        before = await database.checkpoint()
    async with database.transaction() as connection:
        await connection.execute(text("UPDATE checkpoint SET version = 0"))
    with pytest.raises(NotReady, match="another release"):
        await sessions.list_page(database, "default")
    await publish(broker, events[600:])
    async with projecting(broker, database), projecting(broker, database):
        await shows(broker, database, events)
    assert (await database.checkpoint()).generation > before.generation


@pytest.mark.parametrize("mode", ["detach", "erase"])
async def test_sessions_that_are_deleted_leave_what_a_rebuild_of_the_rest_gives(
    broker: Broker, database: Database, mode: DeleteMode
) -> None:
    log = Log()
    for name in ("s1", "s2", "s3"):
        log.turn(name, "hello", "an answer")
        log.waits(name, "question", "approval", expires_in=60_000)
    store = JetStreamLog(broker)
    handler = Sessions(store, now=broker.clock.now)
    eraser = Eraser(broker, store)

    def origin(what: str) -> Origin:
        return msgspec.structs.replace(log.origin(), id=derive(what))

    async with projecting(broker, database):
        await publish(broker, log.events)
        assert await database.wait_for(log.seq, 30)
        for name in ("s1", "s3"):
            delete = DeleteSession(origin=origin(f"delete {name}"), specs=SPECS, mode=mode, active="cancel")
            deleted = (await handler.handle(log.key(name), delete)).session
            if name == "s1":  # the views show each of its steps, or none of the other's
                assert await database.wait_for(deleted.seq, 30)
            await eraser.erase(deleted, 1 << 40)
            await handler.handle(log.key(name), EraseSession(origin=origin(f"erase {name}"), events_removed=6))
        last = (await reading.extent(broker)).last
        assert await database.wait_for(last, 30)
        at, found = await rows_in_force(database)
        assert found == await fresh(await stored(broker))
        kept = {f"{name}.{n}" for name in ("s1", "s2", "s3") for n in (1, 2)}
        shown = await runs.list_page(database, "default")
        assert {run.id for run in shown.items} == (kept if mode == "detach" else {"s2.1", "s2.2"})
        assert {run.session for run in shown.items} == ({"s2", None} if mode == "detach" else {"s2"})
        assert (await fsck(broker, database)).findings == ()
    again = await rebuild(broker, database)
    assert again.generation != at.generation
    assert (await rows_in_force(database))[1] == found
