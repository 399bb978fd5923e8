"""A stream with one consumer on it, and a reader that remembers: what tests of the pull loops play with."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.nats import connect
from tests.support.waiting import eventually

from turnstream.broker.connection import Broker
from turnstream.broker.declare import declare
from turnstream.broker.pull import Delivery, OrderedPull, Pull
from turnstream.broker.server import NatsServer
from turnstream.subjects import Consumer, Stream

_numbers = itertools.count(1)


class Bed:
    """A stream with one consumer on a server, and what it takes to play with them."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.name = f"P{os.getpid()}-{next(_numbers)}"
        self.stream = Stream(name=self.name, subjects=(f"{self.name}.>",))
        self.consumer = Consumer(stream=self.name, name="c", ack_wait=30, max_ack_pending=-1)

    async def declare(self) -> None:
        await declare(self.broker, replicas=1, streams=[self.stream], keys=(), objects=())

    async def publish(self, *bodies: int) -> None:
        await asyncio.gather(*(self.broker.request(f"{self.name}.x", b"%d" % body) for body in bodies))

    async def info(self) -> dict[str, Any]:
        return await self.broker.api(f"CONSUMER.INFO.{self.name}.c")

    def pull(self, **options: Any) -> Pull:
        return Pull(self.broker, self.consumer, **options)


@pytest.fixture
async def bed(nats: Broker) -> AsyncIterator[Bed]:
    bed = Bed(nats)
    await bed.declare()
    yield bed
    if bed.name in nats.declared:
        await nats.api(f"STREAM.DELETE.{bed.name}")


@pytest.fixture
async def own_bed(own_nats: NatsServer) -> AsyncIterator[Bed]:
    broker = await connect(own_nats.url)
    bed = Bed(broker)
    await bed.declare()
    yield bed
    await broker.close()


class Reader:
    """Reads a pull in the background, acks and remembers."""

    def __init__(self, pull: Pull | OrderedPull, ack: bool = True) -> None:
        self.pull = pull
        self.ack = ack
        self.seen: list[Delivery] = []
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for deliveries in self.pull:
            assert deliveries, "never an empty list"
            self.seen += deliveries
            if self.ack:
                for delivery in deliveries:
                    delivery.ack()

    @property
    def bodies(self) -> list[int]:
        return [int(delivery.data) for delivery in self.seen]

    async def until(self, *bodies: int, timeout: float = 10) -> None:
        await eventually(lambda: set(bodies) <= set(self.bodies), timeout, what=f"the arrival of {bodies[:5]}…")

    async def close(self) -> None:
        await self.pull.close()
        await self.task
