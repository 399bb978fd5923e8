"""Deletes the sessions of one-shot runs for good, a time after the last that happened in them. One whose run has not
ended stays."""

import asyncio
from typing import Final

from turnstream.broker.clock import BrokerClock
from turnstream.ids import SessionKey, derive
from turnstream.log.base import LogError
from turnstream.log.handle import Sessions
from turnstream.session.commands import DeleteSession, Origin
from turnstream.session.errors import Rejected
from turnstream.telemetry import get_logger
from turnstream.views import sessions
from turnstream.views.database import Database, ViewsError

ACTOR: Final = "system"
PAGE: Final = 500

log = get_logger()


class Passing:
    """`after`: seconds that one is kept; `every`: seconds between two looks."""

    def __init__(
        self, database: Database, journal: Sessions, clock: BrokerClock, *, every: float, after: float
    ) -> None:
        self._database = database
        self._sessions = journal
        self._clock = clock
        self._every = every
        self._after = after

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(self._every)
            try:
                await self.once()
            except (ViewsError, LogError) as error:
                log.warning("one-shot runs that are old are not deleted", error=str(error))

    async def once(self) -> int:
        """How many were deleted. Raises `ViewsError`, `LogError`."""
        deleted, place = 0, (0, "")
        before = self._clock.now() - round(self._after * 1000)
        while page := await sessions.one_shots_before(self._database, before, place, limit=PAGE):
            for key, row in page:
                deleted += not row.live and await self._delete(key, row.seq)
            place = (page[-1][1].updated_at, str(page[-1][0]))
        if deleted:
            log.info("deleted one-shot runs that are old", count=deleted)
        return deleted

    async def _delete(self, key: SessionKey, seq: int) -> bool:
        """Unless something has happened in it meanwhile."""
        origin = Origin(id=derive(str(key), seq, "passed"), actor=ACTOR, time=self._clock.now(), expected_seq=seq)
        try:
            await self._sessions.handle(key, DeleteSession(origin=origin, specs={}, mode="erase", active="reject"))
        except Rejected:
            return False
        return True
