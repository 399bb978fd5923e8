"""The runner's own small web page: whether it is healthy, its metrics, and the sessions that it cannot drive.

GET /healthz   204, or 500 while the broker does not answer
GET /metrics   Prometheus' text
GET /stuck     the sessions that cannot be driven, as JSON
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import uvicorn
from faststream.asgi import AsgiFastStream, AsgiResponse, get, make_ping_asgi

from turnstream.broker.connection import Broker
from turnstream.telemetry import metrics
from turnstream_runner.runner import Stuck

Scope = dict[str, Any]


def application(broker: Broker, stuck: Callable[[], list[Stuck]]) -> AsgiFastStream:
    """The FastStream application with its pages."""

    @get
    async def show_metrics(scope: Scope) -> AsgiResponse:
        return AsgiResponse(metrics.expose(), 200, {"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    @get
    async def show_stuck(scope: Scope) -> AsgiResponse:
        return AsgiResponse(msgspec.json.encode({"items": stuck()}), 200, {"content-type": "application/json"})

    pages = [
        ("/healthz", make_ping_asgi(broker.faststream, timeout=2.0)),
        ("/metrics", show_metrics),
        ("/stuck", show_stuck),
    ]
    return AsgiFastStream(broker.faststream, asgi_routes=pages, logger=None)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals are the program's affair."""
        yield


@asynccontextmanager
async def served(app: AsgiFastStream, host: str, port: int | None) -> AsyncGenerator[None]:
    """Serves the pages while the block runs, if there is a port to serve them on. Raises `OSError` if it is taken."""
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
