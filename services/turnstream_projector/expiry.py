"""Removes attachments that no message names, a time after they were put into their session."""

import asyncio

from turnstream.broker.clock import BrokerClock
from turnstream.broker.errors import BrokerFault
from turnstream.telemetry import get_logger
from turnstream.wire.attachments import Attachments

log = get_logger()


class Expiry:
    """`after`: seconds that one is kept; `every`: seconds between two looks. Each is looked at when it is old enough,
    and again only if something has become of it since."""

    def __init__(self, attachments: Attachments, clock: BrokerClock, *, every: float, after: float) -> None:
        self._attachments = attachments
        self._clock = clock
        self._every = every
        self._after = after
        self._seen = 0

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(self._every)
            try:
                await self.once()
            except BrokerFault as error:
                log.warning("attachments that no message names are not removed", error=str(error))

    async def once(self) -> int:
        """How many were removed. Raises `BrokerFault`."""
        before = self._clock.now() - round(self._after * 1000)
        removed, self._seen = await self._attachments.expire(before, self._seen)
        if removed:
            log.info("removed attachments that no message names", count=removed)
        return removed
