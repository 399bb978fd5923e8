"""The backstop: wakes what everybody has forgotten.

Every wake-up comes from the log, but dispatch can be deleted, `WORK` wiped, a timer lost. So, now and then, what has
been as it is for long is looked at. Where no wake-up for its session is waiting in `WORK`, somebody is woken for

    a run that is queued            if it may start
    a run that is being carried out  if its own wake-up is gone: its runner is gone too (or its deadline has passed)
    a run that waits for a person   if its deadline, or the time of a request, is over
    a session with sub-agents       if one of them is to be ended
    a session that is a sub-agent's if whoever delegated to it was not told that it has ended
    a session that is a fork        if it is not whole
    a session that is deleted       if something of it is left

and for nothing else: a run that waits may wait for months. The wake-up has no message id, so the broker cannot take it
for one that was there before; getting one for nothing is harmless."""

import asyncio
from typing import Final

from turnstream.broker.clock import BrokerClock
from turnstream.broker.errors import BrokerFault
from turnstream.ids import SessionKey
from turnstream.telemetry import get_logger, metrics
from turnstream.views import live_runs, runs, sessions
from turnstream.views.database import Database, ViewsError
from turnstream.wire.work import Work

PAGE: Final = 500

log = get_logger()


class Sweep:
    """`after`: seconds that something has been as it is before it is looked at; `every`: seconds between two looks."""

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
        """Looks at everything that is old enough; for how many somebody was woken. Raises `ViewsError`,
        `BrokerFault`."""
        now = self._clock.now()
        before = now - round(self._after * 1000)
        woken = await self._live(now, before) + await self._due(before)
        return woken + await self._unsettled(before) + await self._deleted(before)

    async def _live(self, now: int, before: int) -> int:
        woken, place = 0, (0, "")
        while page := await live_runs.live_before(self._database, before, place, limit=PAGE):
            for run in page:
                if await self._is_forgotten(run, now):
                    await self._wake(run.row.spec.queue, run.key, run.row.seq, run.row.n, run.row.status)
                    woken += 1
            last = page[-1]
            place = (last.row.live_since or 0, runs.key_of(last.key, last.row.n))
        return woken

    async def _is_forgotten(self, run: live_runs.LiveRun, now: int) -> bool:
        row = run.row
        if not run.wants_runner:
            return False
        waiting = await self._work.waiting(row.spec.queue, run.key)
        overdue = row.status == "running" and row.deadline is not None and row.deadline <= now
        return waiting is None or (overdue and row.wake is not None and waiting == row.wake.work)

    async def _due(self, before: int) -> int:
        woken, place = 0, (0, "")
        while page := await live_runs.due_before(self._database, before, place, limit=PAGE):
            for run in page:
                row = run.row
                if await self._work.waiting(row.spec.queue, run.key) is None:
                    await self._wake(row.spec.queue, run.key, row.seq, row.n, row.status)
                    woken += 1
            last = page[-1]
            place = (last.due, runs.key_of(last.key, last.row.n))
        return woken

    async def _unsettled(self, before: int) -> int:
        woken, place = 0, (0, "")
        while page := await sessions.unsettled_before(self._database, before, place, limit=PAGE):
            for session in page:
                row = session.row
                if await self._work.waiting(row.keeper, session.key) is None:
                    await self._wake(row.keeper, session.key, row.seq, row.last_run, "unsettled")
                    woken += 1
            place = (page[-1].row.updated_at, str(page[-1].key))
        return woken

    async def _deleted(self, before: int) -> int:
        woken, place = 0, (0, "")
        while page := await sessions.deleted_before(self._database, before, place, limit=PAGE):
            for session in page:
                queue = session.deleted.queue
                if await self._work.waiting(queue, session.key) is None:
                    await self._wake(queue, session.key, session.row.seq, session.deleted.last_run, "deleted")
                    woken += 1
            place = (page[-1].deleted.at, str(page[-1].key))
        return woken

    async def _wake(self, queue: str, key: SessionKey, seq: int, run: int, status: str) -> None:
        log.info(
            "woke what was forgotten",
            account=key.account,
            session=key.session,
            run=key.run(run) if run else None,
            status=status,
            queue=queue,
        )
        await self._work.wake(queue, key, seq)
        metrics.swept.inc()
