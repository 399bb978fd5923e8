"""The API service: wires log, views, feeds and entrances together, serves until it is told to stop.

At the end streams say good-bye first; then no new request is taken; then what is being worked on is waited for.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn
from faststream import FastStream
from starlette.types import ASGIApp

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.service import connect, first, unless
from turnstream.ids import SessionKey
from turnstream.log.feed import Feed
from turnstream.log.handle import Sessions
from turnstream.log.jetstream import JetStreamLog
from turnstream.log.known import KEEP_BYTES, Known
from turnstream.log.snapshots import Snapshotter
from turnstream.roster import Names, Roster
from turnstream.settings import Settings
from turnstream.specs import agents_of, specs_of
from turnstream.telemetry import get_logger, metrics
from turnstream.views.database import Commits, Database
from turnstream.wire.agents import SavedAgents
from turnstream.wire.inbox import Inbox
from turnstream.wire.live import Live
from turnstream.wire.snapshots import Snapshots
from turnstream_api import nats
from turnstream_api.api import Api
from turnstream_api.http import application
from turnstream_api.hub import Hub
from turnstream_api.inbox import Postbox
from turnstream_api.keys import Keys
from turnstream_api.openapi import asyncapi, openapi
from turnstream_api.pages import pages

log = get_logger()

GRACE = 5.0
"""Seconds that requests which are being worked on get at the end."""
SILENT_PEER = 30_000
"""Milliseconds after which a peer that takes none of what was sent to it is cut off."""


async def serve(
    settings: Settings,
    *,
    stop: asyncio.Event,
    ready: Callable[[], None] | None = None,
    commits: Commits | None = None,
    known: Known | None = None,
) -> None:
    """Runs until `stop` is set; calls `ready` once requests are answered. A projector of the same process tells of its
    commits through `commits`, and what a runner of the same process knows of sessions is in `known`.

    Raises `SettingsError` for a policy that cannot be had, `AgentsError` for definitions that cannot be used,
    `BrokerFault` where streams cannot be made as declared, `OSError` where the port cannot be had.
    """
    local = agents_of(settings)
    specs = specs_of(settings, local)
    async with contextlib.AsyncExitStack() as stack:
        consumers = (subjects.INBOX_CONSUMER,)
        connecting = connect(settings, name="turnstream-api", monotonic=time.monotonic, consumers=consumers)
        broker = await unless(stop, connecting)
        if broker is None:
            return
        stack.push_async_callback(broker.close)
        database = Database(settings.database, commits=commits)
        stack.push_async_callback(database.close)
        shared = known or Known(keep_bytes=KEEP_BYTES)
        names = Names()
        roster = Roster(local, specs, settings, SavedAgents(broker), names)
        api = assemble(settings, broker, database, roster, shared)
        stack.push_async_callback(api.sessions.close)
        keys = Keys(settings.account, on_change=lambda: api.hub.expel(keys.valid))
        await _work(settings, broker, api, keys, names, stop, ready)


def assemble(
    settings: Settings,
    broker: Broker,
    database: Database,
    roster: Roster,
    known: Known,
) -> Api:
    """The operations' hands, on a real broker."""
    journal = JetStreamLog(broker, append_timeout=settings.append_timeout)
    sessions = Sessions(
        journal,
        now=broker.clock.now,
        known=known,
        snapshots=Snapshotter(journal, Snapshots(broker)),
        on_append=metrics.appended,
        on_conflict=metrics.conflicts.inc,
    )
    broker.on_reconnect(sessions.forget)

    def follow(key: SessionKey, after: int) -> Feed:
        return Feed(journal, key, after=after)

    hub = Hub(
        sessions,
        follow=follow,
        live=Live(broker),
        heartbeat=settings.heartbeat,
        budget=settings.listener_buffer,
        metrics=metrics,
    )
    return Api(
        settings=settings,
        sessions=sessions,
        hub=hub,
        views=database,
        roster=roster,
        now=broker.clock.now,
        broker=broker,
    )


async def _work(
    settings: Settings,
    broker: Broker,
    api: Api,
    keys: Keys,
    names: Names,
    stop: asyncio.Event,
    ready: Callable[[], None] | None,
) -> None:
    """Answers requests and takes the inbox until `stop` is set, or until a part of it fails: then its error is
    raised."""
    shell = FastStream(broker.faststream, logger=None)
    await shell.start()
    inbox = Inbox(broker, Postbox(api).take, on_refused=metrics.inbox_refused.inc)
    documents = {"/openapi.json": openapi(), "/asyncapi.json": asyncapi()}
    listening = _listen(settings)
    server = Server(application(api, keys, metrics, pages(api, keys, metrics, documents)))
    parts = [
        asyncio.create_task(keys.follow(broker), name="api keys"),
        asyncio.create_task(names.follow(broker), name="saved agents"),
    ]
    stopped = asyncio.create_task(stop.wait())
    entrance: nats.NatsService | None = None
    try:
        await first(stopped, asyncio.create_task(_loaded(keys, names)), *parts)
        if not stopped.done():
            entrance = await nats.serve(broker, api, metrics)
            parts += [
                asyncio.create_task(inbox.run(), name="inbox"),
                asyncio.create_task(server.serve(sockets=[listening]), name="http"),
            ]
            await first(stopped, asyncio.create_task(server.wait_started()), *parts)
            if not stopped.done():
                host, port = listening.getsockname()[:2]
                log.info("listening", host=host, port=port)
                if ready:
                    ready()
            await first(stopped, *parts)
    finally:
        stopped.cancel()
        await api.hub.close()
        server.should_exit = True
        if entrance:
            await entrance.stop(GRACE)
        for part in parts:
            if part.get_name() != "http":
                part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        listening.close()
        await shell.stop()


async def _loaded(keys: Keys, names: Names) -> None:
    await keys.wait_loaded()
    await names.wait_loaded()


class Server(uvicorn.Server):
    """uvicorn on our socket; signals and the process are not its affair."""

    def __init__(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            loop="none",
            lifespan="off",
            ws="none",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=round(GRACE),
        )
        super().__init__(config)
        self._up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._up.set()

    async def wait_started(self) -> None:
        await self._up.wait()


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.http_host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # what is accepted inherits it
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_PEER)
        listening.bind((settings.http_host, settings.http_port))
        listening.listen(2048)
    except OSError:
        listening.close()
        raise
    listening.setblocking(False)
    return listening
