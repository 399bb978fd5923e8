"""The projector service: log to views, the sweep, and what expires, wired together. Nothing is decided here."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack

from turnstream.broker.pages import application
from turnstream.broker.service import connect, first, unless
from turnstream.log.handle import Sessions
from turnstream.log.jetstream import JetStreamLog
from turnstream.settings import Settings
from turnstream.views.database import Commits, Database
from turnstream.wire.attachments import Attachments
from turnstream.wire.blobs import Blobs
from turnstream.wire.work import Work
from turnstream_projector.expiry import Expiry
from turnstream_projector.passing import Passing
from turnstream_projector.project import Projector
from turnstream_projector.sweep import Sweep


async def serve(
    settings: Settings,
    *,
    stop: asyncio.Event,
    ready: Callable[[], None] | None = None,
    commits: Commits | None = None,
) -> None:
    """Runs until `stop` is set; calls `ready` once the views are there and the log is being read. Whoever reads views
    in the same process hears of commits through `commits`.

    Raises `AnotherLog` or `StreamBehind` where the views are of another log than this, `BrokerFault` where streams
    cannot be made as declared."""
    async with AsyncExitStack() as stack:
        broker = await unless(stop, connect(settings, name="turnstream-projector", monotonic=time.monotonic))
        if broker is None:
            return
        stack.push_async_callback(broker.close)
        database = Database(settings.database)
        stack.push_async_callback(database.close)
        await stack.enter_async_context(application(broker, settings.health_host, settings.health_port))
        projector = Projector(broker, database, on_commit=commits.announce if commits else None)
        sweep = Sweep(database, Work(broker), broker.clock, every=settings.sweep_every, after=settings.sweep_after)
        expiry = Expiry(
            Attachments(broker, Blobs(broker)),
            broker.clock,
            every=settings.sweep_every,
            after=settings.attachment_expires,
        )
        loops = {"projector": projector.run(ready), "sweep": sweep.run(), "expiry": expiry.run()}
        if settings.one_shot_expires is not None:
            journal = JetStreamLog(broker, append_timeout=settings.append_timeout)
            passing = Passing(
                database,
                Sessions(journal, now=broker.clock.now),
                broker.clock,
                every=settings.sweep_every,
                after=settings.one_shot_expires,
            )
            loops["passing"] = passing.run()
        await _work(loops, stop)


async def _work(loops: Mapping[str, Coroutine[None, None, None]], stop: asyncio.Event) -> None:
    """Projects, sweeps and removes until `stop` is set, or until a part fails: then its error is raised."""
    tasks = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
    stopped = asyncio.create_task(stop.wait())
    try:
        await first(stopped, *tasks)
    finally:
        stopped.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
