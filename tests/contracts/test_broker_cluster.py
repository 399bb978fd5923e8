"""The broker's rooms on three servers: leaders die, freeze and step down."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import msgspec
import pytest
from tests.support.beds import Bed, Reader
from tests.support.nats import Cluster, connect, freeze, thaw
from tests.support.waiting import eventually

from turnstream.broker.connection import Broker
from turnstream.broker.declare import declare
from turnstream.broker.errors import BrokerFault
from turnstream.broker.pull import OrderedPull
from turnstream.broker.server import NatsServer
from turnstream.subjects import DISPATCH, STREAMS, Stream


@pytest.fixture
async def broker(cluster: Cluster) -> AsyncIterator[Broker]:
    broker = await connect(cluster.url, ping=0.5)
    yield broker
    await broker.close()


@pytest.fixture
async def bed(broker: Broker) -> Bed:
    bed = Bed(broker)
    # What a dying server was sent for us comes again after `ack_wait`.
    bed.consumer = msgspec.structs.replace(bed.consumer, ack_wait=3)
    await declare(broker, replicas=3, streams=[bed.stream], consumers=[bed.consumer], keys=(), objects=())
    return bed


class Writer:
    """Publishes numbers one after the other, each until it is acknowledged; a number can be stored twice."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self.acknowledged: list[int] = []
        self.task = asyncio.create_task(self._write())

    async def _write(self) -> None:
        number = 0
        while True:
            try:
                await self.bed.broker.request(f"{self.bed.name}.x", b"%d" % number, timeout=1)
            except BrokerFault:
                await asyncio.sleep(0.02)
                continue
            self.acknowledged.append(number)
            number += 1

    async def until(self, count: int) -> None:
        await eventually(lambda: len(self.acknowledged) >= count, 40, what=f"{count} acknowledged writes")

    async def stop(self) -> set[int]:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        return set(self.acknowledged)


async def test_everything_is_declared_with_three_replicas(cluster: Cluster, broker: Broker):
    await asyncio.gather(*(declare(broker, replicas=3, consumers=[DISPATCH]) for _ in range(3)))
    for name in (*(stream.name for stream in STREAMS), "KV_keys", "OBJ_blobs"):
        config = (await broker.api(f"STREAM.INFO.{name}"))["config"]
        assert isinstance(config, dict)
        assert config["num_replicas"] == 3, name


async def test_replicas_are_added_and_taken_away(broker: Broker):
    stream = Stream(name="S", subjects=("s.>",))
    await declare(broker, replicas=1, streams=[stream], keys=(), objects=())
    await broker.request("s.1", b"kept")
    for replicas in (3, 1):
        await declare(broker, replicas=replicas, streams=[stream], keys=(), objects=())
        info = await eventually(lambda: _info(broker))
        assert isinstance(info["config"], dict)
        assert isinstance(info["state"], dict)
        assert (info["config"]["num_replicas"], info["state"]["messages"]) == (replicas, 1)


async def _info(broker: Broker) -> dict[str, object]:
    try:
        return await broker.api("STREAM.INFO.S", timeout=1)
    except BrokerFault:
        return {}


@pytest.mark.parametrize(
    "victim",
    ["stream", pytest.param("consumer", marks=pytest.mark.slow), pytest.param("connection", marks=pytest.mark.slow)],
)
async def test_pulls_outlive_a_killed_leader(cluster: Cluster, bed: Bed, victim: str):
    reader = Reader(bed.pull(slots=None))
    ordered = Reader(OrderedPull(bed.broker, bed.name, [f"{bed.name}.>"], 0), ack=False)
    writer = Writer(bed)
    await writer.until(200)
    match victim:
        case "stream":
            server = await cluster.leader(bed.broker, bed.name)
        case "consumer":
            server = await cluster.leader(bed.broker, bed.name, "c")
        case _:
            server = _connected(cluster, bed.broker)
    before = len(writer.acknowledged)
    server.kill()
    await writer.until(before + 200)
    await server.start()
    numbers = await writer.stop()
    await reader.until(*numbers, timeout=30)
    await ordered.until(*numbers, timeout=30)
    sequences = [delivery.seq for delivery in ordered.seen]
    assert sequences == sorted(set(sequences)), "in order, none twice"
    assert sequences == list(range(1, len(sequences) + 1)), "none left out"
    await reader.close()
    await ordered.close()


async def test_leaders_step_down_again_and_again(cluster: Cluster, bed: Bed):
    reader = Reader(bed.pull(slots=8))
    releasing = asyncio.create_task(_release(reader))
    writer = Writer(bed)
    for round in range(3):
        await writer.until((round + 1) * 50)
        await bed.broker.api(f"CONSUMER.LEADER.STEPDOWN.{bed.name}.c")
        await writer.until(len(writer.acknowledged) + 20)
        await bed.broker.api(f"STREAM.LEADER.STEPDOWN.{bed.name}")
    await writer.until(250)
    numbers = await writer.stop()
    await reader.until(*numbers, timeout=30)
    assert bed.broker.nc.stats["reconnects"] == 0
    releasing.cancel()
    await asyncio.gather(releasing, return_exceptions=True)
    await reader.close()


def _unreleased(reader: Reader, released: int) -> int:
    return len(reader.seen) - released


async def _release(reader: Reader) -> None:
    """Gives back the slots of what has been read and acked."""
    released = 0
    while True:
        ready = await eventually(partial(_unreleased, reader, released), 30)
        reader.pull.release(ready)  # type: ignore[union-attr]
        released += ready


@pytest.mark.slow
async def test_a_frozen_leader_is_left_for_another(cluster: Cluster, bed: Bed):
    leader = await cluster.leader(bed.broker, bed.name)
    bed.broker = await connect(leader.url, ping=0.5)  # it learns of the others from this one
    reader = Reader(bed.pull())
    await bed.publish(1)
    await reader.until(1)
    freeze(leader)
    writer = Writer(bed)
    await writer.until(20)
    numbers = await writer.stop()
    await reader.until(*numbers, timeout=30)
    assert _connected(cluster, bed.broker) is not leader
    thaw(leader)
    await reader.close()
    await bed.broker.close()


def _connected(cluster: Cluster, broker: Broker) -> NatsServer:
    url = broker.nc.connected_url
    assert url
    return next(server for server in cluster.servers if server.url.endswith(f":{url.port}"))
