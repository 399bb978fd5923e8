"""The backstop: wakes runs that everybody has forgotten.

Every wake-up comes from the log, but dispatch can be deleted, `WORK` wiped, a timer lost. So, now and then, the runs
that have been queued or running for long are looked at. One is woken if no wake-up for its session is waiting in
`WORK`: a queued one that is next in line, a running one whose own wake-up is gone (its runner is gone too) or whose
deadline has passed. The wake-up has no message id, so the broker cannot take it for one that was there before; getting
one for nothing is harmless."""

import asyncio
from typing import Final

from turnstream.broker.clock import BrokerClock
from turnstream.broker.errors import BrokerFault
from turnstream.telemetry import get_logger, metrics
from turnstream.views import runs
from turnstream.views.database import Database, ViewsError
from turnstream.wire.work import Work

PAGE: Final = 500

log = get_logger()


class Sweep:
    """`after`: age in seconds of a run before it is looked at; `every`: seconds between two looks."""

    def __init__(self, database: Database, work: Work, clock: BrokerClock, *, every: float, after: float) -> None:
        self._database = database
        self._work = work
        self._clock = clock
        self._every = every
        self._after = after

    async def run(self) -> None:
        """Sweeps until it is cancelled."""
        while True:
            await asyncio.sleep(self._every)
            try:
                await self.once()
            except (ViewsError, BrokerFault) as error:
                log.warning("the sweep could not be done", error=str(error))

    async def once(self) -> int:
        """Looks at every run that is old enough; how many were woken. Raises `ViewsError`, `BrokerFault`."""
        now = self._clock.now()
        before = now - round(self._after * 1000)
        woken = 0
        place = (0, "")
        while page := await runs.live_before(self._database, before, place, limit=PAGE):
            for run in page:
                if await self._is_forgotten(run, now):
                    await self._wake(run)
                    woken += 1
            last = page[-1]
            place = (last.row.live_since or 0, runs.key_of(last.key, last.row.n))
        return woken

    async def _is_forgotten(self, run: runs.LiveRun, now: int) -> bool:
        row = run.row
        if not run.is_next:
            return False
        waiting = await self._work.waiting(row.spec.queue, run.key)
        overdue = row.status == "running" and row.deadline is not None and row.deadline <= now
        return waiting is None or (overdue and row.wake is not None and waiting == row.wake.work)

    async def _wake(self, run: runs.LiveRun) -> None:
        row = run.row
        log.info(
            "woke a forgotten run",
            account=run.key.account,
            session=run.key.session,
            run=run.key.run(row.n),
            status=row.status,
            queue=row.spec.queue,
        )
        await self._work.wake(row.spec.queue, run.key, row.seq)
        metrics.swept.inc()
