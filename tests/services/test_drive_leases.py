"""Leases: kept while there is work, however long; not renewed blindly by who may have lost them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, cast

import pytest
from tests.support.waiting import eventually

from turnstream.broker.errors import BrokerTimeout
from turnstream.broker.pull import Delivery
from turnstream_runner.leases import Lease, Leases

LENGTH = 0.06


class FakeDelivery:
    def __init__(self, seq: int, delivery: int = 1) -> None:
        self.seq = seq
        self.delivery = delivery
        self.renewals = 0
        self.fails = False

    async def progress(self) -> None:
        if self.fails:
            raise BrokerTimeout("x", "away")
        self.renewals += 1


class Bench:
    """Leases with a clock and a connection that the test holds in its hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.connected = True
        self.ticks = 0
        self.leases = Leases(LENGTH, lambda: self.now, self.is_connected)
        self.doubts = 0

    def hold(self, delivery: FakeDelivery) -> Lease:
        lease = self.leases.hold(cast(Delivery, delivery))
        assert lease is not None
        lease.on_doubt = self.doubt
        return lease

    def is_connected(self) -> bool:
        self.ticks += 1
        return self.connected

    def doubt(self) -> None:
        self.doubts += 1


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    keeping = asyncio.create_task(bench.leases.keep())
    yield bench
    keeping.cancel()
    with suppress(asyncio.CancelledError):
        await keeping


def renewed(delivery: FakeDelivery, more: int = 2) -> Callable[[], bool]:
    before = delivery.renewals
    return lambda: delivery.renewals >= before + more


async def test_every_lease_is_renewed_until_it_is_dropped(bench: Bench) -> None:
    one, two = FakeDelivery(1), FakeDelivery(2)
    lease, _ = bench.hold(one), bench.hold(two)
    assert 1 in bench.leases
    await eventually(renewed(one))
    await eventually(renewed(two))
    bench.leases.drop(lease)
    assert 1 not in bench.leases
    count = one.renewals
    await eventually(renewed(two))
    assert one.renewals == count
    assert not bench.doubts


async def test_a_lease_that_was_not_renewed_in_time_is_doubted_and_not_renewed(bench: Bench) -> None:
    delivery, other = FakeDelivery(1), FakeDelivery(2)
    lease = bench.hold(delivery)
    bench.now += 2 * LENGTH
    await eventually(lambda: bench.doubts)
    assert lease.doubtful
    assert not delivery.renewals
    bench.hold(other)
    await eventually(renewed(other))
    assert not delivery.renewals, "it may be another's"
    assert bench.doubts == 1
    await bench.leases.confirm(lease)
    assert not lease.doubtful
    await eventually(renewed(delivery))


@pytest.mark.parametrize("away", ["disconnected", "failing"])
async def test_a_renewal_that_nobody_hears_does_not_count(bench: Bench, away: str) -> None:
    delivery = FakeDelivery(1)
    bench.hold(delivery)
    bench.connected = away != "disconnected"
    delivery.fails = away == "failing"
    bench.now += 0.7 * LENGTH
    await eventually(lambda: bench.ticks >= 3)
    assert not bench.doubts
    bench.now += 0.7 * LENGTH
    await eventually(lambda: bench.doubts)
    assert not delivery.renewals


async def test_a_wake_up_delivered_again_to_its_own_runner_makes_it_look(bench: Bench) -> None:
    first, second = FakeDelivery(1), FakeDelivery(1, delivery=2)
    lease = bench.hold(first)
    assert bench.leases.hold(cast(Delivery, second)) is None
    assert bench.doubts == 1
    assert cast(Any, lease.delivery) is second
    await bench.leases.confirm(lease)
    assert (first.renewals, second.renewals) == (0, 1)
