"""Which version of each saved agent is current: kept in memory, and true within moments.

Whoever resolves a name for every turn asks here, and nobody else. What a version says is not kept here. A name takes
some hundred bytes.
"""

import asyncio
from typing import Final

import msgspec

from turnstream import ids, subjects
from turnstream.broker.connection import Broker
from turnstream.broker.delivery import Delivery
from turnstream.broker.errors import BrokerFault, StreamBehind
from turnstream.broker.pull import OrderedPull
from turnstream.telemetry import get_logger
from turnstream.wire.agents import EVERY, STREAM

RETRY: Final = 1.0
"""Seconds."""

log = get_logger()


class Name(msgspec.Struct):
    """What is known of an agent: the version that is current, empty if it is deleted, where that lies, and where the
    mark of its last deletion does."""

    version: str = ""
    seq: int = 0
    deleted: int = 0


class Names:
    """Every saved agent of every account, by name."""

    def __init__(self) -> None:
        self._accounts: dict[str, dict[str, Name]] = {}
        self._position = 0
        self._moved = asyncio.Event()
        self._loaded = asyncio.Event()

    def get(self, account: str, name: str) -> Name | None:
        return self._accounts.get(account, {}).get(name)

    def of(self, account: str) -> list[str]:
        """The agents of an account that are not deleted, by name."""
        return sorted(name for name, known in self._accounts.get(account, {}).items() if known.version)

    async def wait_loaded(self) -> None:
        await self._loaded.wait()

    async def reach(self, seq: int, timeout: float) -> bool:
        """Waits until everything is known that was stored up to this place. False: it was not in time."""
        try:
            async with asyncio.timeout(timeout):
                while self._position < seq:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            return False
        return True

    def take(self, account: str, name: str, version: str, seq: int) -> None:
        """A version or a mark that was stored, in whatever order one hears of them."""
        known = self._accounts.setdefault(account, {}).setdefault(name, Name())
        if version == subjects.DELETED:
            known.deleted = max(known.deleted, seq)
        elif seq > known.seq:
            known.version, known.seq = version, seq
        if known.deleted > known.seq:
            known.version = ""

    async def follow(self, broker: Broker) -> None:
        """Reads the bucket and follows it, for ever."""
        while True:
            pull = OrderedPull(broker, STREAM, [EVERY], self._position, headers_only=True)
            try:
                await self._reach_end(broker)
                async for deliveries in pull:
                    for delivery in deliveries:
                        self._hear(delivery)
                    self._move(deliveries[-1].seq)
                    if not deliveries[-1].pending:
                        self._loaded.set()
            except StreamBehind as error:  # the bucket was lost: no agent in it is one any more
                log.error("the saved agents are gone", error=error)
                self._accounts.clear()
                self._position = 0
            except BrokerFault as error:
                log.warning("the saved agents are looked at anew", error=error)
            finally:
                await pull.close()
            await asyncio.sleep(RETRY)

    async def _reach_end(self, broker: Broker) -> None:
        """Where nothing is behind what is known, nothing will come that says so."""
        if (await broker.stream(STREAM)).state.last_seq <= self._position:
            self._loaded.set()

    def _hear(self, delivery: Delivery) -> None:
        account, name, version = subjects.parse_agent(delivery.subject)
        if not ids.is_name(account) or not ids.is_name(name):
            return
        if (delivery.headers or {}).get("Nats-Msg-Size") == "0":  # emptied by hand: nobody knows what is current now
            self._accounts.get(account, {}).pop(name, None)
        elif version == subjects.DELETED or ids.is_version(version):
            self.take(account, name, version, delivery.seq)

    def _move(self, seq: int) -> None:
        self._position = seq
        self._moved.set()
