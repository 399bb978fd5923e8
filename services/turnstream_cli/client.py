"""Asks a running Turnstream over HTTP. Every failure is a `CommandError` with one line that says what to do."""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
from cyclopts import Parameter

from turnstream_cli.exits import CommandError, Exit

SILENCE = 60.0
"""Seconds without a byte, keep-alives included, after which a stream counts as dead."""
_TRIES = 6
"""A write whose answer was lost is asked again, with the same key, over about six seconds."""


@Parameter(name="*")
@dataclass(frozen=True)
class Connect:
    """Where Turnstream is, and who asks."""

    url: Annotated[str | None, Parameter(env_var="TURNSTREAM_URL")] = None
    """Address of the API; default: the `turnstream dev` on this data directory, else the API's port (8080) here."""
    key: Annotated[str | None, Parameter(env_var="TURNSTREAM_API_KEY")] = None
    """API key; needed where keys exist."""


HERE = Connect()
"""What the environment says."""


class Refused(CommandError):
    """The API's problem document, in one line."""

    def __init__(self, problem: Mapping[str, Any], status: int, hint: str = "") -> None:
        text = problem.get("detail") or problem.get("title") or f"status {status}"
        known = {"type", "title", "status", "detail", "code", "request_id"}
        if status == 401:
            text = "an API key is needed, or this one is not valid: --key, or TURNSTREAM_API_KEY"
        extra = "".join(f", {name}: {value}" for name, value in problem.items() if name not in known)
        super().__init__(f"{text} ({problem.get('code') or status}{extra}){hint and f'; {hint}'}", Exit.REFUSED)
        self.status = status
        self.problem = problem

    def with_hint(self, hint: str) -> "Refused":
        """The same, and what to do."""
        return Refused(self.problem, self.status, hint)


class Client:
    """One conversation with the API. `post` and `delete` carry an idempotency key, so that a repeat has one effect; a
    repeated `put` has none anyway."""

    def __init__(self, http: httpx.AsyncClient, gone: str = "") -> None:
        """`gone`: why nobody answers, if that is known."""
        self.http = http
        self._gone = gone
        self.url = str(http.base_url).rstrip("/")

    async def get(self, path: str, **params: object) -> Any:
        return await self._ask("GET", path, params=params)

    async def post(self, path: str, body: Mapping[str, object] | None = None, **params: object) -> Any:
        return await self._ask("POST", path, params=params, body=body or {}, key=str(uuid.uuid4()))

    async def put(self, path: str, content: bytes, media_type: str) -> Any:
        return await self._ask("PUT", path, content=content, media_type=media_type)

    async def delete(self, path: str, **params: object) -> Any:
        return await self._ask("DELETE", path, params=params, key=str(uuid.uuid4()))

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, object] | None = None,
        body: Mapping[str, object] | None = None,
        key: str | None = None,
        content: bytes | None = None,
        media_type: str = "",
    ) -> Any:
        headers = {"Idempotency-Key": key} if key else {}
        headers |= {"Content-Type": media_type} if media_type else {}
        given = {name: _plain(value) for name, value in (params or {}).items() if value is not None}
        for attempt in range(1, _TRIES + 1):
            try:
                answer = await self.http.request(
                    method, path, params=given, json=body, content=content, headers=headers
                )
                break
            except httpx.TransportError as error:
                never_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) and attempt == 1
                if (key is None and content is None) or never_sent or attempt == _TRIES:
                    raise self.unreachable(error) from None
                await asyncio.sleep(0.1 * 2**attempt)
        return _body(answer)

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], headers: Mapping[str, str]
    ) -> AsyncGenerator[httpx.Response]:
        """An open stream of server-sent events. Raises `Refused`; transport errors are the caller's."""
        timeout = httpx.Timeout(10.0, read=SILENCE)
        async with self.http.stream("GET", path, params=params, headers=headers, timeout=timeout) as answer:
            if answer.status_code != 200:
                await answer.aread()
                _body(answer)
            yield answer

    def unreachable(self, error: Exception) -> CommandError:
        if self._gone:
            return CommandError(self._gone, Exit.UNREACHABLE)
        reason = str(error) or type(error).__name__
        return CommandError(
            f"no Turnstream answers at {self.url}: {reason}; start one with `turnstream dev`, or name yours with --url",
            Exit.UNREACHABLE,
        )


@asynccontextmanager
async def connected(connect: Connect, *, timeout: float = 30.0) -> AsyncGenerator[Client]:
    """A client for the given address, else the one of the `turnstream dev` on this data directory, else the port that
    the settings name on this machine."""
    url, gone = (connect.url, "") if connect.url else _here()
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--url must start with http:// or https://, not {url!r}", Exit.USAGE)
    headers = {"Authorization": f"Bearer {connect.key}"} if connect.key else {}
    # Loopback needs no proxy; anywhere else the environment's proxies hold.
    local = url.split("://", 1)[1].startswith(("127.", "localhost", "[::1]"))
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, trust_env=not local) as http:
        yield Client(http, gone)


def _here() -> tuple[str, str]:
    """The address, and why nobody answers there if nobody does. Raises `CommandError` while one is starting here."""
    from turnstream.settings import Settings, SettingsError, load
    from turnstream_cli.place import left_behind, read_addresses, taken

    try:
        settings = load()
    except SettingsError:  # a client needs none of them
        settings = Settings.model_construct()
    folder = settings.data_dir
    if addresses := read_addresses(folder):
        return addresses.http, ""
    if taken(folder):
        what = f"the Turnstream on the data directory {folder} is starting or stopping: it has no address yet"
        raise CommandError(f"{what}; try again, or name another with --url", Exit.UNREACHABLE)
    url, gone = f"http://127.0.0.1:{settings.http_port or 8080}", ""
    if old := left_behind(folder):
        gone = (
            f"the Turnstream on the data directory {folder} (process {old.pid} at {old.http}) has ended without"
            f" stopping, and none answers at {url} either; start it again with `turnstream dev`"
        )
    return url, gone


def _plain(value: object) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def _body(answer: httpx.Response) -> Any:
    try:
        body = answer.json() if answer.content else None
    except (json.JSONDecodeError, UnicodeDecodeError):
        body = None
    if answer.is_success:
        return body
    raise Refused(body if isinstance(body, dict) else {}, answer.status_code)
