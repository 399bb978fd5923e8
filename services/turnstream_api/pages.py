"""Pages that are no operation of an account: health, metrics, the descriptions of the interface.

/healthz        this process runs
/readyz         it can do its work: the broker answers, the API keys are known
/metrics        for Prometheus
/openapi.json  /docs  /asyncapi.json; the docs are also what a bare address shows
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from starlette.types import Receive, Scope, Send

from turnstream.broker.errors import BrokerFault
from turnstream.telemetry import Metrics
from turnstream_api.api import Api
from turnstream_api.errors import Problem
from turnstream_api.http import JSON, read_head, send_problem, send_whole
from turnstream_api.keys import Keys


class Health(msgspec.Struct, frozen=True):
    status: str
    detail: str = ""


HTML = b"text/html; charset=utf-8"
TEXT = b"text/plain; version=0.0.4; charset=utf-8"

Made = tuple[int, bytes, bytes]
"""Status, content type, body."""


class Page:
    """One address, read only."""

    def __init__(self, api: Api, make: Callable[[], Awaitable[Made]]) -> None:
        self._api = api
        self._make = make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = read_head(scope, self._api.request_id).request_id
        if scope["method"] not in ("GET", "HEAD"):
            problem = Problem("method_not_allowed", f"{scope['method']} is not possible here")
            await send_problem(send, problem, request_id, (b"allow", b"GET, HEAD"))
            return
        status, kind, body = await self._make()
        await send_whole(send, status, kind, body, request_id)


def pages(api: Api, keys: Keys, metrics: Metrics, documents: dict[str, bytes]) -> dict[str, Page]:
    """By path. `documents`: JSON descriptions, by path."""

    async def healthz() -> Made:
        return 200, JSON, msgspec.json.encode(Health("ok"))

    async def readyz() -> Made:
        missing = await _missing(api, keys)
        return (
            (503 if missing else 200),
            JSON,
            msgspec.json.encode(Health("not ready" if missing else "ready", missing)),
        )

    async def shown() -> Made:
        return 200, TEXT, metrics.expose()

    async def docs() -> Made:
        return 200, HTML, _DOCS.read_bytes()

    found = {"/": docs, "/docs": docs, "/healthz": healthz, "/readyz": readyz, "/metrics": shown}
    for path, document in documents.items():
        found[path] = _fixed(document)
    return {path: Page(api, make) for path, make in found.items()}


def _fixed(document: bytes) -> Callable[[], Awaitable[Made]]:
    async def make() -> Made:
        return 200, JSON, document

    return make


async def _missing(api: Api, keys: Keys) -> str:
    """What is not there yet; nothing if all is."""
    if not keys.loaded:
        return "the API keys are not known yet"
    if not api.broker.nc.is_connected:
        return "there is no connection to the broker"
    try:
        await api.last_seq()
    except BrokerFault as error:
        return f"the broker does not answer: {error}"
    return ""


_DOCS = Path(__file__).with_name("docs.html")
