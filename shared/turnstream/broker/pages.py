"""The small web page of a service that has no other: whether it is healthy, its metrics, and what it adds.

GET /healthz   204, or 500 while the broker does not answer
GET /metrics   Prometheus' text
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from faststream.asgi import AsgiFastStream, AsgiResponse, get, make_ping_asgi
from faststream.asgi.handlers import GetHandler
from faststream.asgi.types import Scope

from turnstream.broker.connection import Broker
from turnstream.telemetry import metrics


@asynccontextmanager
async def application(
    broker: Broker, host: str, port: int | None, more: Mapping[str, Callable[[], bytes]] | None = None
) -> AsyncGenerator[None]:
    """The service as a FastStream application while the block runs, its pages served if there is a port to serve them
    on. `more`: pages of JSON, by path. Raises `OSError` if the port is taken."""
    pages = [
        ("/healthz", make_ping_asgi(broker.faststream, timeout=2.0)),
        ("/metrics", _page("text/plain; version=0.0.4; charset=utf-8", metrics.expose)),
        *((path, _page("application/json", make)) for path, make in (more or {}).items()),
    ]
    app = AsgiFastStream(broker.faststream, asgi_routes=pages, logger=None)
    await app.start()
    try:
        async with _served(app, host, port):
            yield
    finally:
        await app.stop()


def _page(kind: str, make: Callable[[], bytes]) -> GetHandler:
    @get
    async def page(_: Scope) -> AsgiResponse:
        return AsgiResponse(make(), 200, {"content-type": kind})

    return page


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals are the program's affair."""
        yield


@asynccontextmanager
async def _served(app: AsgiFastStream, host: str, port: int | None) -> AsyncGenerator[None]:
    if port is None:
        yield
        return
    # Listening by ourselves: a port that is taken is an OSError, where uvicorn would end the process.
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    server = _Server(
        uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1)
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task
