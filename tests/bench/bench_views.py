"""The views: how fast they are built from a log, and what a page of a list costs among many sessions.

Run alone: `python -m tests.bench.bench_views [throughput|pages]`; it starts a server of its own.
"""

import asyncio
import gc
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from tests.bench.figures import Figure, median
from tests.support.logs import Log, publish
from tests.support.nats import connect

from turnstream.broker.connection import Broker
from turnstream.broker.declare import declare
from turnstream.broker.server import NatsServer
from turnstream.session.events import Recorded
from turnstream.views import generations, sessions
from turnstream.views.database import Database
from turnstream.views.generations import Writer
from turnstream_projector import reading
from turnstream_projector.project import Projector

EVENTS = 200_000
SESSIONS = 3_000
"""Sessions that the log's turns are spread over."""
QUESTION = "Hello there, what is the capital of France, and why is it that city and no other? " * 3
ANSWER = "The capital of France is Paris. " * 12


def turns(events: int, spread: int) -> list[Recorded]:
    """A log of whole turns (three events each) in random order of sessions."""
    log, rng = Log(), random.Random(1)
    while log.seq < events:
        log.time += 1
        log.turn(f"s{rng.randrange(spread)}", QUESTION, ANSWER)
    return log.events


@asynccontextmanager
async def log_of(folder: Path, events: int) -> AsyncIterator[tuple[Broker, int]]:
    """A broker that holds so many events, and the last one's sequence."""
    server = NatsServer(folder / "nats")
    await server.start()
    broker = await connect(server.url)
    try:
        await declare(broker, replicas=1)
        last = await _publish(broker, events)
        gc.collect()
        yield broker, last
    finally:
        await broker.close()
        await server.stop()


async def _publish(broker: Broker, events: int) -> int:
    """Nothing of what is made here outlives this: the collector would have to look at it again and again."""
    made = turns(events, SESSIONS)
    await publish(broker, made)
    return made[-1].seq


async def bare(broker: Broker, last: int) -> float:
    """Events a second of a pipelined pull that only decodes."""
    began = time.perf_counter()
    pull = reading.follow(broker, 0)
    async for deliveries in pull:
        for delivery in deliveries:
            reading.read(delivery)
        if deliveries[-1].seq == last:
            break
    taken = time.perf_counter() - began
    await pull.close()
    return last / taken


async def projected(broker: Broker, last: int, file: Path) -> float:
    """Events a second from stored bytes to committed rows in SQLite."""
    database = Database(f"sqlite+aiosqlite:///{file}")
    done = asyncio.Event()

    def on_commit(position: int) -> None:
        if position >= last:
            done.set()

    projector = Projector(broker, database, on_commit=on_commit)
    began = time.perf_counter()
    task = asyncio.create_task(projector.run())
    await done.wait()
    taken = time.perf_counter() - began
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await database.close()
    return last / taken


async def views_throughput(events: int = EVENTS, rounds: int = 3) -> Figure:
    """Events a second into SQLite views ÷ events a second of a bare pull that only decodes, of the same log."""
    ratios: list[float] = []
    speeds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="turnstream-bench-") as folder:
        async with log_of(Path(folder), events) as (broker, last):
            for number in range(rounds):
                before = await bare(broker, last)
                speed = await projected(broker, last, Path(folder) / f"views-{number}.db")
                after = await bare(broker, last)
                speeds.append(speed)
                ratios.append(speed / ((before + after) / 2))
    details: dict[str, float | str] = {"events a second into the views": round(median(speeds))}
    return Figure(value=median(ratios), bound=0.3, kind="at_least", details=details)


async def filled(file: Path, count: int) -> Database:
    """The views of an account with so many sessions, a tenth of them touched again."""
    database = Database(f"sqlite+aiosqlite:///{file}")
    writer = Writer(database, await generations.prepare(database, "bench"))
    log, rng = Log(), random.Random(2)

    async def write() -> None:
        if log.entries:
            await writer.apply(log.entries, log.seq)
            log.entries.clear()

    for number in range(count):
        log.time += rng.randrange(3)
        log.open(f"s{number:06}", title={"text": f"Session {number}", "source": "user"})
        if number % 10 == 0:
            log.turn(f"s{rng.randrange(number + 1):06}")
        if len(log.entries) >= 4000:
            await write()
    await write()
    return database


class Pager:
    """Reads pages of 50, from the first to the twentieth, again and again, and notes how long each took."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cursor: str | None = None
        self._read = 0
        self.times: list[float] = []

    async def read(self) -> None:
        began = time.perf_counter()
        page = await sessions.list_page(self._database, "default", limit=50, cursor=self._cursor)
        self.times.append(time.perf_counter() - began)
        assert page.items
        self._read += 1
        self._cursor = page.next if self._read % 20 else None


async def list_page(many: int = 100_000, few: int = 1_000, rounds: int = 5) -> Figure:
    """95th percentile of a page of 50 among 100,000 sessions ÷ among 1,000. The two are read by turns, so that whatever
    else the machine does slows both."""
    ratios: list[float] = []
    large: list[float] = []
    with tempfile.TemporaryDirectory(prefix="turnstream-bench-") as folder:
        big, small = await filled(Path(folder) / "many.db", many), await filled(Path(folder) / "few.db", few)
        for _ in range(rounds):
            pagers = [Pager(database) for database in (big, small)]
            for _ in range(300):
                for pager in pagers:
                    await pager.read()
            p95s = [percentile(pager.times, 0.95) for pager in pagers]
            large.append(p95s[0])
            ratios.append(p95s[0] / p95s[1])
        await big.close()
        await small.close()
    details: dict[str, float | str] = {"p95 among many, ms": round(median(large) * 1000, 2)}
    return Figure(value=median(ratios), bound=2.0, kind="at_most", details=details)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def main(wanted: list[str]) -> None:
    for name, figure in (("throughput", views_throughput), ("pages", list_page)):
        if not wanted or name in wanted:
            found = await figure()
            print(name, msgspec.json.encode(found).decode(), "ok" if found.ok else "NOT ok")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
