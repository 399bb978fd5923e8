"""Asks a running Turnstream, over HTTP or over NATS: the same questions, the same answers.

Black box: knows the table of operations (where each one is found) and nothing else of the services.
"""

import asyncio
import base64
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import httpx

from turnstream.broker.connection import Broker
from turnstream.broker.errors import BrokerFault
from turnstream_api.operations import OPERATIONS

TIMEOUT = 60.0
"""Seconds: machines that run tests are busy."""
_BY_NAME = {operation.name: operation for operation in OPERATIONS}


class Answer(NamedTuple):
    status: int
    body: dict[str, Any]
    replayed: bool


class NoAnswer(Exception):
    """Nobody answered, or the answer was lost on its way."""


class Speaker(Protocol):
    async def ask(self, operation: str, /, *, key: str | None = None, **fields: Any) -> Answer:
        """`key`: the idempotency key. Raises `NoAnswer`."""
        ...


class OverHttp:
    """Asks one API process."""

    def __init__(self, url: str, *, secret: str = "") -> None:
        self.url = url
        self.headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(
            base_url=url, timeout=TIMEOUT, trust_env=False, limits=limits, headers=self.headers
        )

    async def ask(self, operation: str, /, *, key: str | None = None, **fields: Any) -> Answer:
        row = _BY_NAME[operation]
        path = row.path.format_map({name: quote(str(value), safe="") for name, value in fields.items()})
        rest = {name: value for name, value in fields.items() if f"{{{name}}}" not in row.path}
        query = {name: rest.pop(name) for name in tuple(rest) if name in row.in_query}
        headers = {"Idempotency-Key": key} if key else {}
        sent: dict[str, Any] = {"json": rest} if row.has_body else {}
        if row.takes_bytes:
            sent = {"content": base64.b64decode(rest["content"])}
            headers["Content-Type"] = rest.get("media_type", "application/octet-stream")
        try:
            answer = await self.http.request(row.method, path, params=query, headers=headers, **sent)
        except httpx.TransportError as error:
            raise NoAnswer(f"{operation} at {self.url}: {error!r}") from error
        if row.gives_bytes and answer.is_success:
            body = {"media_type": answer.headers["content-type"], "content": base64.b64encode(answer.content).decode()}
        else:
            body = answer.json() if answer.content else {}
        return Answer(answer.status_code, body, "idempotency-replayed" in answer.headers)

    async def close(self) -> None:
        await self.http.aclose()


class OverNats:
    """Asks whichever API process the broker chooses."""

    def __init__(self, broker: Broker, account: str = "default", *, timeout: float = TIMEOUT) -> None:
        self._broker = broker
        self._account = account
        self._timeout = timeout

    async def ask(self, operation: str, /, *, key: str | None = None, **fields: Any) -> Answer:
        headers = {"Idempotency-Key": key} if key else {}
        subject = f"ts.api.{self._account}.{operation}"
        try:
            message = await self._broker.request(subject, json.dumps(fields).encode(), headers, timeout=self._timeout)
        except BrokerFault as error:
            raise NoAnswer(f"{operation} over NATS: {error!r}") from error
        said: Mapping[str, str] = message.headers or {}
        status = said.get("Nats-Service-Error-Code") or said.get("Status-Code") or "200"
        return Answer(int(status), json.loads(message.data or b"{}"), said.get("Idempotency-Replayed") == "true")


async def say(speaker: Speaker, session: str, text: str, **fields: Any) -> dict[str, Any]:
    """Posts a message, which must be taken."""
    answer = await speaker.ask("post_message", session=session, content=text, **fields)
    assert answer.status == 202, answer
    return answer.body


async def put(speaker: Speaker, session: str, name: str, data: bytes, media_type: str = "text/plain") -> dict[str, Any]:
    """Puts an attachment into a session, which must take it."""
    content = base64.b64encode(data).decode()
    answer = await speaker.ask("put_attachment", session=session, name=name, content=content, media_type=media_type)
    assert answer.status in (200, 201), answer
    return answer.body


async def opened(speaker: Speaker, session: str, **fields: Any) -> None:
    answer = await speaker.ask("open_session", id=session, **fields)
    assert answer.status == 201, answer


async def outcome(speaker: Speaker, run: str, *, timeout: float = TIMEOUT) -> dict[str, Any]:
    """How a run ended, once it has."""
    answer = await speaker.ask("wait_run", run=run, timeout=timeout)
    assert answer.status == 200 and "outcome" in answer.body, answer
    return answer.body["outcome"]


async def events(speaker: Speaker, session: str, *, after: int = 0) -> list[dict[str, Any]]:
    """What the log holds of a session, page by page."""
    found: list[dict[str, Any]] = []
    while True:
        answer = await speaker.ask("read_events", session=session, after=after, limit=200)
        assert answer.status == 200, answer
        found += answer.body["events"]
        after = answer.body["seq"]
        if not answer.body["more"]:
            return found


async def types(speaker: Speaker, session: str) -> list[str]:
    return [event["type"] for event in await events(speaker, session)]


async def insist(
    speakers: Sequence[Speaker],
    operation: str,
    /,
    *,
    done: Callable[[], bool] = lambda: False,
    lost: list[str] | None = None,
    **fields: Any,
) -> Answer:
    """Asks one after the other until one gives an answer that is no failure of the service (5xx). What is asked must be
    safe to repeat: a read, or a write with a key or a message id. `lost` is told of each question whose answer is not
    known: it may still have its effect. Raises `NoAnswer` once `done`."""
    turn = 0
    while True:
        with contextlib.suppress(NoAnswer):
            answer = await speakers[turn % len(speakers)].ask(operation, **fields)
            if answer.status < 500:
                return answer
            assert answer.status == 503, answer
        if lost is not None:
            lost.append(operation)
        if done():
            raise NoAnswer(f"{operation}: nobody answered in time")
        turn += 1
        await asyncio.sleep(0.05)
