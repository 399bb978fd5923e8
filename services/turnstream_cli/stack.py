"""Everything in one process: the embedded NATS server if none is named, and the services beside each other on one loop.

The parts know nothing of it: each service gets the settings and an event that says stop, as in a process of its own.
"""

import asyncio
import contextlib
import errno
import gc
import importlib
import os
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Protocol

from turnstream.broker.server import NatsServer, ServerFailed
from turnstream.settings import Settings
from turnstream.telemetry import log
from turnstream_cli.exits import CommandError, Exit


class Serve(Protocol):
    """A service's `serve`: runs until `stop` is set, calls `ready` once it takes work."""

    def __call__(
        self, settings: Settings, *, stop: asyncio.Event, ready: Callable[[], None] | None = None
    ) -> Awaitable[None]: ...


SERVICES = ("api", "runner", "projector")


def service(name: str, **shared: object) -> Serve:
    """A service's `serve`; only what it needs is imported."""
    serve: Serve = importlib.import_module(f"turnstream_{name}.app").serve
    return partial(serve, **shared) if shared else serve


def together(*names: str) -> dict[str, Serve]:
    """Services for one process: the API hears of the projector's commits without asking the database, and API and
    runner know of each other's events without reading them."""
    from turnstream.log.known import KEEP_BYTES, Known
    from turnstream.views.database import Commits

    commits, known = Commits(), Known(keep_bytes=KEEP_BYTES)
    shared: dict[str, dict[str, object]] = {
        "api": {"commits": commits, "known": known},
        "runner": {"known": known},
        "projector": {"commits": commits},
    }
    return {name: service(name, **shared[name]) for name in names}


@asynccontextmanager
async def broker(settings: Settings) -> AsyncGenerator[Settings]:
    """The settings with a NATS server in them: the one they name, else the embedded one on the data directory.

    The embedded server is started again if it dies. Raises `CommandError` if it does not start.
    """
    if settings.nats_url:
        yield settings
        return
    server = NatsServer(
        settings.data_dir / "nats", port=settings.nats_port or None, sync_interval=settings.sync_interval
    )
    try:
        await server.start()
    except ServerFailed as error:
        raise CommandError(str(error), Exit.UNREACHABLE) from None
    watch = asyncio.create_task(_keep(server))
    try:
        yield settings.model_copy(update={"nats_url": server.url})
    finally:
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        await server.stop()


async def _keep(server: NatsServer) -> None:
    while True:
        await asyncio.sleep(0.5)
        if not server.running:
            log.error("the embedded nats-server is gone; starting it again", log_tail=server.log_tail(3))
            try:
                await server.start()
            except ServerFailed as error:
                log.error("the embedded nats-server does not start", error=error)


@asynccontextmanager
async def serving(settings: Settings, parts: Mapping[str, Serve], stop: asyncio.Event) -> AsyncGenerator[None]:
    """Runs the services until the block ends or `stop` is set; the block is entered once all of them take work.

    A service that fails, or ends by itself, sets `stop`; its error is raised when all have ended.
    """
    waiting = set(parts)
    ready = asyncio.Event()

    def is_ready(name: str) -> None:
        waiting.discard(name)
        if not waiting:
            ready.set()

    async def run(name: str, serve: Serve) -> None:
        try:
            await serve(settings, stop=stop, ready=partial(is_ready, name))
            if not stop.is_set():
                raise CommandError(f"the service {name} ended by itself")
        finally:
            stop.set()

    tasks = [asyncio.create_task(run(name, serve), name=name) for name, serve in parts.items()]
    try:
        await first_of(ready, stop)
        if stop.is_set():
            raise Stopped
        _calm_collector()
        yield
    finally:
        stop.set()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result


def _calm_collector() -> None:
    """What is there by now stays: the garbage collector need not look at it again and again, and what a turn allocates
    is mostly gone before it looks. It was a fifth of a runner's CPU time (2026-11-30, instant turns)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


class Stopped(Exception):
    """Asked to stop before everything was up."""


async def first_of(*events: asyncio.Event) -> None:
    """Waits until one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


@contextmanager
def stop_on_signals(stop: asyncio.Event) -> Generator[None]:
    """SIGINT and SIGTERM set `stop`; a second one ends the process at once."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(Exit.INTERRUPTED)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def free_port(host: str, port: int, *, what: str, how: str) -> int:
    """The port if it is free, any free one for 0. Raises `CommandError`: which port, what for, and what to do."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            raise CommandError(f"port {port} on {host}, for {what}, {reason}; {how}", Exit.USAGE) from None
        return probe.getsockname()[1]
