"""How every service begins, with a connection to the broker and everything on it made as declared, and when it ends."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import TypeVar

from turnstream.broker.connection import Broker
from turnstream.broker.declare import declare
from turnstream.settings import Settings
from turnstream.subjects import Consumer

T = TypeVar("T")


async def connect(
    settings: Settings,
    *,
    name: str,
    monotonic: Callable[[], float],
    consumers: Iterable[Consumer] = (),
    timeout: float | None = None,
) -> Broker:
    """Connects to the server that the settings name, waits for it as `Broker.connect` does, and makes streams, buckets
    and these consumers. Raises `BrokerFault`."""
    broker = await Broker.connect(
        settings.nats_url,
        name=name,
        monotonic=monotonic,
        user=settings.nats_user,
        password=settings.nats_password.get_secret_value(),
        creds=settings.nats_creds,
        timeout=timeout,
    )
    try:
        await declare(broker, replicas=settings.replicas, consumers=consumers)
    except BaseException:
        await broker.close()
        raise
    return broker


async def first(*tasks: "asyncio.Task[object]") -> None:
    """Waits for the first of these to end, and raises its error if it failed."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def unless(stop: asyncio.Event, work: Coroutine[object, object, T]) -> T | None:
    """What the work comes to; None if `stop` is set first."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        stopped.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
