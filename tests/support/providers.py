"""Providers on loopback for tests of the model wires.

`aimock` is a server that speaks as OpenAI and Anthropic do (npm, pinned in `aimock/package-lock.json`), installed on
first use. Where there is no node its tests are skipped; where there is one they run or fail. `Peer` is a bare socket
for what no decent server does: silence, broken bytes, a stream cut anywhere; and it sees when a client goes.
"""

import asyncio
import base64
import json
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.strict import FAULTS, faults_on_the_wire

_FOLDER = Path(__file__).parent / "aimock"
_PACKAGE = _FOLDER / "node_modules" / "@copilotkit" / "aimock"
_LISTENING = "listening on "
LAST = "connection: close"
"""Each answer of a peer is the last of its connection: a client that does not know would ask on one that is going."""


class Aimock:
    """`answer` says what it answers from now on; `requests` is what it was asked since."""

    def __init__(self, url: str) -> None:
        self.base_url = f"{url}/v1"
        self._control = httpx.Client(base_url=f"{url}/__aimock", timeout=10)

    def answer(self, *fixtures: Mapping[str, Any]) -> None:
        self._look()
        self._control.post("/reset").raise_for_status()
        self._control.post("/fixtures", json={"fixtures": fixtures}).raise_for_status()

    def requests(self) -> list[dict[str, Any]]:
        entries = self._control.get("/journal").raise_for_status().json()
        return [entry["body"] for entry in entries]

    def close(self) -> None:
        self._look()
        self._control.close()

    def _look(self) -> None:
        """Of other requests than for chat completions it keeps only what it makes of them."""
        entries = self._control.get("/journal").raise_for_status().json()
        asked = [entry["body"] for entry in entries if entry["path"].endswith("/chat/completions")]
        FAULTS.extend(fault for body in asked for fault in faults_on_the_wire(body))


@pytest.fixture(scope="session")
def aimock_server() -> Iterator[str]:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("no node: the wire to a provider is not tested against aimock")
    _install(npm)
    arguments = [node, str(_PACKAGE / "dist" / "cli.js"), "--port", "0", "--fixtures", str(_FOLDER / "package.json")]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    printed: list[str] = []
    for line in process.stdout:
        printed.append(line)
        if _LISTENING in line:
            break
    else:
        pytest.fail(f"aimock did not start:\n{''.join(printed)}")
    # What it prints later must not fill the pipe.
    rest = threading.Thread(target=process.stdout.read, daemon=True)
    rest.start()
    yield printed[-1].partition(_LISTENING)[2].strip()
    process.terminate()
    process.wait(10)
    rest.join(10)
    process.stdout.close()


@pytest.fixture
def aimock(aimock_server: str) -> Iterator[Aimock]:
    peer = Aimock(aimock_server)
    yield peer
    peer.close()


def _install(npm: str) -> None:
    wanted = json.loads((_FOLDER / "package.json").read_text())["dependencies"]["@copilotkit/aimock"]
    manifest = _PACKAGE / "package.json"
    if manifest.exists() and json.loads(manifest.read_text())["version"] == wanted:
        return
    installed = subprocess.run(
        [npm, "ci", "--ignore-scripts"], cwd=_FOLDER, capture_output=True, text=True, timeout=180, check=False
    )
    if installed.returncode:
        pytest.fail(f"aimock could not be installed:\n{installed.stdout}{installed.stderr}")


class Exchange:
    """One request that a peer was sent. The answer is written piece by piece."""

    def __init__(self, path: str, headers: dict[str, str], body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.path = path
        self.headers = headers
        self.body = body
        self._writer = writer

    async def status(self, status: str, body: str = "", **headers: str) -> None:
        """A whole answer."""
        lines = [f"HTTP/1.1 {status}", f"content-length: {len(body.encode())}", "content-type: application/json", LAST]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.raw("\r\n".join([*lines, "", body]).encode())

    async def begin(self, content_type: str = "text/event-stream") -> None:
        """The head of a stream."""
        lines = ["HTTP/1.1 200 OK", f"content-type: {content_type}", "transfer-encoding: chunked", LAST]
        await self.raw("\r\n".join([*lines, "", ""]).encode())

    async def say(self, delta: Mapping[str, Any], finish: str | None = None) -> None:
        """One chunk of a chat completion."""
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        chunk = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        await self.chunk(f"data: {json.dumps(chunk)}\n\n".encode())

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        """The orderly end of a stream."""
        await self.chunk(b"data: [DONE]\n\n")
        await self.raw(b"0\r\n\r\n")

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()


Script = Callable[[Exchange], Awaitable[None]]


async def strict(exchange: Exchange) -> None:
    """Answers `ok`, or 400 as OpenAI does for messages that are not as its reference says."""
    if faults := [fault for message in exchange.body["messages"] if (fault := _fault(message))]:
        await exchange.status("400 Bad Request", json.dumps({"error": {"message": faults[0], "type": "invalid"}}))
        return
    await exchange.begin()
    await exchange.say({"role": "assistant", "content": "ok"})
    await exchange.say({}, finish="stop")
    await exchange.end()


def _fault(message: Mapping[str, Any]) -> str | None:
    keys = {"assistant": {"role", "content", "tool_calls"}, "tool": {"role", "content", "tool_call_id"}}
    if message.keys() - keys.get(message["role"], {"role", "content"}):
        return f"unknown field of a {message['role']} message"
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return None
    if message["role"] != "user" or not isinstance(content, list) or not content:
        return "no content"
    return next((fault for part in content if (fault := _fault_of_part(part))), None)


def _fault_of_part(part: Mapping[str, Any]) -> str | None:
    match part:
        case {"type": "text", "text": str(text), **rest} if text and not rest:
            return None
        case {"type": "image_url", "image_url": {"url": str(url), **more}, **rest} if not rest and not more:
            head, _, data = url.partition(";base64,")
            known = head in {f"data:image/{kind}" for kind in ("png", "jpeg", "gif", "webp")}
            return None if known and base64.b64decode(data, validate=True) else "no image"
        case _:
            return "no part"


class Peer:
    """`seen` are the requests so far; `gone` is set when a client has closed its connection before it was answered."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._connections: set[asyncio.Task[None]] = set()
        self.seen: list[Exchange] = []
        self.gone = asyncio.Event()
        self.base_url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(connection)
        with suppress(asyncio.CancelledError):
            await connection

    async def close(self) -> None:
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = json.loads(await reader.readexactly(int(headers["content-length"])))
            exchange = Exchange(head[0].split()[1], headers, body, writer)
            self.seen.append(exchange)
            FAULTS.extend(faults_on_the_wire(body, exchange.path))
            await self._answer(exchange, reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, exchange: Exchange, reader: asyncio.StreamReader) -> None:
        answering = asyncio.ensure_future(self._script(exchange))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            done, _ = await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if leaving in done:
                self.gone.set()
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)


@asynccontextmanager
async def peer(script: Script) -> AsyncIterator[Peer]:
    """A peer that answers each request by the script; when the script returns, it closes the connection."""
    serving = Peer(script)
    server = await asyncio.start_server(serving.serve, "127.0.0.1", 0)
    serving.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield serving
    finally:
        server.close()
        await serving.close()
