"""Log to views: batch by batch, as soon as there is anything, for ever.

The position lives in the database, beside the rows: there is nothing to acknowledge and no side effect, so a projector
may die at any point and two at once do no harm. Whoever finds that another one has moved the checkpoint lets that one
work and stands by until the checkpoint has not moved for a while."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from turnstream.broker.clock import BrokerClock
from turnstream.broker.connection import Broker
from turnstream.broker.errors import BrokerFault, StreamBehind
from turnstream.broker.pull import Delivery, OrderedPull
from turnstream.telemetry import get_logger, metrics
from turnstream.views import generations
from turnstream.views.database import VERSION, Checkpoint, Database, Gone, ViewsError
from turnstream.views.generations import Overtaken, Writer
from turnstream_projector import reading
from turnstream_projector.rebuild import rebuild

LOOK: Final = 2.0
"""Seconds between two looks at whether the views are still there."""
STANDBY: Final = 1.0
"""Seconds without a move of the checkpoint after which a projector that stands by tries again."""
LINGER: Final = 0.05
"""Seconds that events are gathered in at most, for as long as they follow closely: an instant turn is one transaction
then instead of three, and is over before its views are written; and so are several turns that follow one on the
other."""
_RETRY: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
"""Seconds before the database is tried again; the last one repeats."""

log = get_logger()


class AnotherLog(Exception):
    """The views in this database were made of another log. `turnstream rebuild` makes them of this one."""

    def __init__(self, views: str, found: str) -> None:
        super().__init__(
            f"the views were made of a log that began at {views}, this one began at {found}: run `turnstream rebuild`"
        )


class Projector:
    """Keeps the views of one database up with the log. `on_commit` hears of each position that was committed."""

    def __init__(self, broker: Broker, database: Database, *, on_commit: Callable[[int], None] | None = None) -> None:
        self._broker = broker
        self._database = database
        self._on_commit = on_commit
        self._failures = 0
        self._generation = 0
        self.position = 0

    async def run(self, ready: Callable[[], None] | None = None) -> None:
        """Runs until it is cancelled; calls `ready` once the views are there and the log is being read.

        A database or broker that is away is waited for. Raises `AnotherLog`, `StreamBehind`.
        """
        while True:
            try:
                at = await self._open()
                if ready:
                    ready()
                    ready = None
                await self._follow(Writer(self._database, at))
            except Overtaken as overtaken:
                log.info("another projector is ahead; standing by", reason=str(overtaken))
                await self._stand_by()
            except StreamBehind:
                raise
            except (ViewsError, BrokerFault) as error:
                await self._wait(error)

    async def _open(self) -> Checkpoint:
        found = (await reading.extent(self._broker)).log
        at = await generations.prepare(self._database, found)
        self._generation = at.generation
        if at.log != found:
            raise AnotherLog(at.log, found)
        if at.version != VERSION:
            log.warning("the views are of another release and are made anew", found=at.version, version=VERSION)
            at = await rebuild(self._broker, self._database)
            self._generation = at.generation
        self.position = at.position
        return at

    async def _follow(self, writer: Writer) -> None:
        pull = reading.follow(self._broker, writer.position, linger=LINGER)
        looking = asyncio.create_task(self._look_after(writer.generation, pull), name="views")
        try:
            async for deliveries in pull:
                await self._apply(writer, deliveries)
        finally:
            looking.cancel()
            await pull.close()

    async def _look_after(self, generation: int, pull: OrderedPull) -> None:
        """Ends the pull once the views are not there any more, also while no event comes that could not be written."""
        there = True
        while there:
            await asyncio.sleep(LOOK)
            try:
                there = generation in [at.generation for at in await generations.checkpoints(self._database)]
            except Gone:
                there = False
            except ViewsError:
                pass  # whoever writes says so
        await pull.close()

    async def _apply(self, writer: Writer, deliveries: Sequence[Delivery]) -> None:
        last = deliveries[-1]
        writing = asyncio.create_task(writer.apply(reading.entries_of(deliveries), last.seq))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:  # a batch that has begun is finished, and its connection given back
            await writing
            raise
        self._failures = 0
        self.position = last.seq
        if self._on_commit:
            self._on_commit(last.seq)
        metrics.projected.inc(len(deliveries))
        metrics.projection_lag.set(last.pending)
        metrics.projection_seconds.set(age(self._broker.clock, last.time))

    async def _stand_by(self) -> None:
        """Waits until the one in front has been still for a while, be it a projector or a rebuild. A generation that a
        rebuild has put in force is followed at once."""
        before: list[Checkpoint] = []
        while True:
            try:
                now = await generations.checkpoints(self._database)
            except Gone:  # the one in front has nothing to write into
                return
            except ViewsError as error:
                await self._wait(error)
                continue
            if now == before or self._generation not in [at.generation for at in now]:
                return
            before = now
            await asyncio.sleep(STANDBY)

    async def _wait(self, error: Exception) -> None:
        pause = _RETRY[min(self._failures, len(_RETRY) - 1)]
        self._failures += 1
        log.warning("the projector cannot go on now", error=str(error), position=self.position, retry_in=pause)
        await asyncio.sleep(pause)


def age(clock: BrokerClock, millis: int) -> float:
    """Seconds since this broker time."""
    return max(0.0, (clock.now() - millis) / 1000)
