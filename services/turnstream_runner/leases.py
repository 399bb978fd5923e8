"""The leases of one runner: as long as it works on a wake-up, it tells the broker so.

A lease is an un-acknowledged wake-up; `+WPI` renews it. Every third of a lease all are renewed in one go, however long
a fold or a call takes. A lease that was not renewed in time (the process was frozen, the loop was held up, the
connection was away) may be another runner's by now and is not renewed blindly: its holder is told to look at the log
first.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from turnstream.broker.errors import BrokerFault
from turnstream.broker.pull import Delivery


class Lease:
    """One wake-up that this runner works on. `on_doubt` is called when it was not renewed in time."""

    __slots__ = ("delivery", "doubtful", "on_doubt", "renewed")

    def __init__(self, delivery: Delivery, now: float) -> None:
        self.delivery = delivery
        self.renewed = now
        self.doubtful = False
        self.on_doubt: Callable[[], None] = _ignore


class Leases:
    """`length` is in seconds, as is what `monotonic` reads; `connected` says whether the broker can hear a renewal."""

    def __init__(self, length: float, monotonic: Callable[[], float], connected: Callable[[], bool]) -> None:
        self.length = length
        self._monotonic = monotonic
        self._connected = connected
        self._held: dict[int, Lease] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, work: object) -> bool:
        """Whether this runner works on the wake-up with this sequence."""
        return work in self._held

    def hold(self, delivery: Delivery) -> Lease | None:
        """Holds the lease of a wake-up. None if it is held already: then this delivery of it is as good as a renewal,
        and whoever works on it is told to look at the log."""
        if held := self._held.get(delivery.seq):
            held.delivery = delivery
            held.renewed = self._monotonic()
            held.doubtful = True
            held.on_doubt()
            return None
        lease = self._held[delivery.seq] = Lease(delivery, self._monotonic())
        return lease

    def drop(self, lease: Lease) -> None:
        self._held.pop(lease.delivery.seq, None)

    async def confirm(self, lease: Lease) -> None:
        """The holder has looked at the log: the lease is still its own."""
        lease.doubtful = False
        await self._renew(lease)

    async def keep(self) -> None:
        """Renews for ever."""
        while True:
            await asyncio.sleep(self.length / 3)
            for lease in tuple(self._held.values()):
                if lease.doubtful:
                    continue
                if self._monotonic() - lease.renewed > self.length:
                    lease.doubtful = True
                    lease.on_doubt()
                else:
                    await self._renew(lease)

    async def _renew(self, lease: Lease) -> None:
        if self._connected():
            with suppress(BrokerFault):
                await lease.delivery.progress()
                lease.renewed = self._monotonic()


def _ignore() -> None:
    """Nobody has asked to be told yet."""
