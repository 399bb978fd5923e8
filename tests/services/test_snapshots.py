"""Snapshots on a real broker: what lies in the bucket, who may write there and when, and that nothing needs them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.contracts.events import deleted, erased, fill, new_key, read
from tests.contracts.test_log import shared_cluster  # noqa: F401 - a fixture
from tests.support.nats import connect, freeze, thaw
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.declare import declare
from turnstream.broker.errors import BrokerFault
from turnstream.broker.server import NatsServer
from turnstream.ids import SessionKey
from turnstream.log.handle import Sessions
from turnstream.log.jetstream import JetStreamLog
from turnstream.log.snapshots import EVERY, Snapshotter
from turnstream.session import snapshot
from turnstream.session.fold import fold
from turnstream.session.state import Session
from turnstream.wire.snapshots import TIMEOUT, Snapshots
from turnstream_runner.erase import Eraser

STREAM = subjects.SNAPSHOTS


@pytest.fixture
def key(account: str) -> SessionKey:
    return new_key(account)


@pytest.fixture(params=[1, 3])
def place(request: pytest.FixtureRequest) -> tuple[str, int]:
    """A broker's address, and how many servers it has, each of which keeps a copy."""
    if request.param == 1:
        return request.getfixturevalue("nats_url"), 1
    return request.getfixturevalue("shared_cluster").url, 3


@pytest.fixture
async def somewhere(place: tuple[str, int]) -> AsyncIterator[Broker]:
    url, replicas = place
    broker = await connect(url)
    await declare(broker, replicas=replicas)
    yield broker
    await broker.close()


async def newest(broker: Broker, key: SessionKey) -> tuple[bytes, int]:
    """What `Snapshots.get` comes to, by the word of the bucket's leader: a replica may lag."""
    found = await broker.message(STREAM, {"last_by_subj": subjects.snapshot(key)})
    return (found.data, found.seq) if found else (b"", 0)


async def stored(broker: Broker, key: SessionKey) -> int:
    """How many messages there are of this session."""
    answer = await broker.api(f"STREAM.INFO.{STREAM}", {"subjects_filter": subjects.snapshot(key)})
    state = answer["state"]
    assert isinstance(state, dict)
    return sum((state.get("subjects") or {}).values())


def holds(folder: Path, word: bytes) -> bool:
    return any(word in file.read_bytes() for file in folder.rglob("*") if file.is_file())


# --- the bucket ------------------------------------------------------------------------------------------------------


async def test_the_newest_snapshot_is_found_and_replaces_the_others(nats: Broker, key: SessionKey) -> None:
    snapshots = Snapshots(nats)
    other = SessionKey(key.account, f"{key.session}-1")
    assert await snapshots.get(key) == (b"", 0)
    await snapshots.put(key, b"one", 0)
    await snapshots.put(other, b"other", 0)
    data, revision = await snapshots.get(key) or (b"", 0)
    assert (data, revision > 0) == (b"one", True)
    await snapshots.put(key, b"two\0\xff\r\n", revision)
    data, later = await snapshots.get(key) or (b"", 0)
    assert (data, later > revision) == (b"two\0\xff\r\n", True)
    assert await stored(nats, key) == 1
    assert (await snapshots.get(other) or (b"", 0))[0] == b"other"


async def test_who_has_not_seen_the_newest_writes_nothing(somewhere: Broker, key: SessionKey) -> None:
    snapshots = Snapshots(somewhere)
    for data, revision in ((b"one", 0), (b"late", 0), (b"ahead", 1 << 40)):
        await snapshots.put(key, data, revision)
    assert (await newest(somewhere, key))[0] == b"one"
    await snapshots.put(key, b"two", (await newest(somewhere, key))[1])
    assert (await newest(somewhere, key))[0] == b"two" and await stored(somewhere, key) == 1

    async def everywhere() -> bool:
        return await snapshots.get(key) == await newest(somewhere, key)

    await eventually(everywhere)


async def test_nothing_is_left_of_what_was_replaced_or_erased(
    broker: Broker, own_nats: NatsServer, key: SessionKey
) -> None:
    snapshots = Snapshots(broker)
    for n in range(3):
        _, revision = await snapshots.get(key) or (b"", 0)
        await snapshots.put(key, b"marzipan %d" % n * 1000, revision)
    assert holds(own_nats.store, b"marzipan 2")
    assert not holds(own_nats.store, b"marzipan 1") and not holds(own_nats.store, b"marzipan 0")
    await snapshots.erase(key)
    assert not holds(own_nats.store, b"marzipan")
    assert await snapshots.get(key) != (b"", 0), "the mark that keeps out others"


async def test_a_writer_that_was_frozen_leaves_nothing_behind_an_erased_session(
    somewhere: Broker, key: SessionKey
) -> None:
    """Also where there was no snapshot yet; and who writes of the next session with that id is not kept out."""
    snapshots = Snapshots(somewhere)
    for before in (b"", b"one"):
        if before:
            await snapshots.put(key, before, (await newest(somewhere, key))[1])
        _, seen = await newest(somewhere, key)
        await snapshots.erase(key)
        await snapshots.put(key, b"late", seen)
        assert (await newest(somewhere, key))[0] == b"" and await stored(somewhere, key) == 1
        await snapshots.erase(key)
        assert await stored(somewhere, key) == 1, "again: as it was"
    await snapshots.put(key, b"of the next one", (await newest(somewhere, key))[1])
    assert (await newest(somewhere, key))[0] == b"of the next one"


async def test_the_mark_goes_with_the_tombstone(nats: Broker, key: SessionKey) -> None:
    await Snapshots(nats, tombstone=1).erase(key)
    assert await stored(nats, key) == 1

    async def gone() -> bool:
        return await stored(nats, key) == 0

    await eventually(gone, 20, what="the mark to go")
    assert await Snapshots(nats).get(key) == (b"", 0)


async def test_a_bucket_that_was_deleted_is_empty_and_there_again(broker: Broker, key: SessionKey) -> None:
    snapshots = Snapshots(broker)
    await snapshots.put(key, b"one", 0)
    await broker.api(f"STREAM.DELETE.{STREAM}")
    assert await snapshots.get(key) is None
    await snapshots.put(key, b"two", 0)
    await snapshots.put(key, b"three", 0)
    assert (await Snapshots(broker).get(key) or (b"", 0))[0] == b"three"
    await broker.api(f"STREAM.DELETE.{STREAM}")
    with pytest.raises(BrokerFault):
        await snapshots.erase(key)
    await snapshots.erase(key)
    assert await stored(broker, key) == 1


async def test_a_broker_that_does_not_answer_is_asked_once(
    broker: Broker, own_nats: NatsServer, key: SessionKey
) -> None:
    snapshots = Snapshots(broker)
    clock = asyncio.get_running_loop().time
    freeze(own_nats)
    began = clock()
    assert await snapshots.get(key) is None
    first = clock() - began
    for _ in range(20):
        assert await snapshots.get(key) is None
    assert first < 4 * TIMEOUT
    assert clock() - began < first + TIMEOUT
    thaw(own_nats)


# --- with a log ------------------------------------------------------------------------------------------------------


class House:
    """A log and a bucket; each `process` has a memory of its own."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.log = JetStreamLog(broker, append_timeout=2)
        self._made: list[Sessions] = []

    def process(self, store: Snapshots | None = None) -> Sessions:
        snapshotter = Snapshotter(self.log, store or Snapshots(self.broker))
        self._made.append(Sessions(self.log, now=self.broker.clock.now, snapshots=snapshotter))
        return self._made[-1]

    async def truth(self, key: SessionKey) -> Session:
        return fold(Session(key=key), await read(self.log, key, at_least=await self.log.last(key)))

    async def until_taken(self, key: SessionKey) -> snapshot.Snapshot:
        last = await self.log.last(key)

        async def taken() -> snapshot.Snapshot | None:
            data, _ = await Snapshots(self.broker).get(key) or (b"", 0)
            found = snapshot.decode(data, key)
            return found if found and found.seq == last else None

        return await eventually(taken, 20, what="a snapshot")

    async def close(self) -> None:
        for sessions in self._made:
            await sessions.close()


@pytest.fixture
async def house(broker: Broker) -> AsyncIterator[House]:
    house = House(broker)
    yield house
    await house.close()


async def test_processes_go_on_from_each_others_snapshots(house: House, key: SessionKey) -> None:
    seqs = await fill(house.log, key, 2 * EVERY)
    assert await house.process().load(key) == await house.truth(key)
    found = await house.until_taken(key)
    assert found.session == await house.truth(key)
    await fill(house.log, key, 10, seqs[-1])
    session, events = await house.process().latest(key)
    assert session == await house.truth(key)
    assert len(events) == 11, "no more was read than the event that it is of, and those behind it"


async def test_a_snapshot_outlives_the_broker_and_the_processes(
    house: House, own_nats: NatsServer, key: SessionKey
) -> None:
    seqs = await fill(house.log, key, EVERY)
    await house.process().load(key)
    found = await house.until_taken(key)
    own_nats.kill()
    await own_nats.start()
    await eventually(lambda: house.broker.nc.is_connected)
    await fill(house.log, key, 3, seqs[-1])
    sessions = house.process()
    assert await sessions.load(key) == await house.truth(key)
    assert found.session.events == EVERY


async def test_a_broker_that_is_killed_in_the_middle_of_it_costs_nothing_but_the_snapshot(
    house: House, own_nats: NatsServer, key: SessionKey
) -> None:
    seqs = await fill(house.log, key, 2 * EVERY)
    await house.process().load(key)
    own_nats.kill()
    await own_nats.start()
    await eventually(lambda: house.broker.nc.is_connected)
    await fill(house.log, key, EVERY, seqs[-1])
    assert await house.process().load(key) == await house.truth(key)
    await house.until_taken(key)


async def test_a_log_that_was_wiped_is_another_one(house: House, key: SessionKey) -> None:
    """Its sequences are issued again, and the snapshots that lie there are of its former life."""
    await fill(house.log, key, EVERY, text="the first life")
    await house.process().load(key)
    before = await house.until_taken(key)
    await house.broker.api("STREAM.DELETE.SESSIONS")
    await declare(house.broker, replicas=1)
    seqs = await fill(house.log, key, EVERY + 20, text="the second life")
    assert before.seq in seqs
    assert await house.process().load(key) == await house.truth(key) != before.session
    await house.until_taken(key)


class Slow(Snapshots):
    """A writer who is frozen after he has looked, until he is let go."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    async def put(self, key: SessionKey, data: bytes, revision: int) -> None:
        self.reached.set()
        await self.go_on.wait()
        await super().put(key, data, revision)


async def test_whoever_is_about_to_write_when_a_session_is_erased_comes_too_late(
    house: House, own_nats: NatsServer, key: SessionKey
) -> None:
    seqs = await fill(house.log, key, EVERY)
    store = Slow(house.broker)
    sessions = house.process(store)
    await sessions.load(key)
    await store.reached.wait()
    await house.log.append(key, deleted(key, "erase", EVERY + 1), seqs[-1])
    session = await house.process().load(key)
    await Eraser(house.broker, house.log).erase(session, 1)
    await house.log.append(key, erased(key), session.seq)
    store.go_on.set()
    assert sessions._snapshots
    await eventually(lambda: not sessions._snapshots._due, what="the writer to be done")
    data, mark = await Snapshots(house.broker).get(key) or (b"late", 0)
    assert data == b"" and mark
    assert not holds(own_nats.store, snapshot.FOLD_VERSION.encode())
    await fill(house.log, other := new_key(key.account), EVERY)
    await house.process().load(other)
    await house.until_taken(other)
    assert holds(own_nats.store, snapshot.FOLD_VERSION.encode()), "of a session that is there"
