"""A TCP proxy in front of a server, to lose what the server says, or to cut the line."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class Proxy:
    """`swallowing`: what the server says is taken and thrown away. `listening`: new connections are let in."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 4222
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.url = ""
        self.swallowing = False
        self.listening = True
        self.swallowed = asyncio.Event()
        """Set when something was swallowed."""
        self.connections = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def swallow(self) -> None:
        self.swallowed.clear()
        self.swallowing = True

    def cut(self) -> None:
        """Ends every connection, and swallows no more."""
        self.swallowing = False
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.listening:
            writer.transport.abort()
            return
        self.connections += 1
        upstream_reader, upstream_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, upstream_writer}
        pumps = [
            asyncio.create_task(self._pump(reader, upstream_writer, from_server=False)),
            asyncio.create_task(self._pump(upstream_reader, writer, from_server=True)),
        ]
        self._tasks.update(pumps)
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for each in (writer, upstream_writer):
            each.transport.abort()
        await asyncio.gather(*pumps, return_exceptions=True)
        self._writers -= {writer, upstream_writer}
        self._tasks.difference_update(pumps)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_server: bool) -> None:
        while data := await reader.read(65536):
            if from_server and self.swallowing:
                self.swallowed.set()
                continue
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def proxy(target: str) -> AsyncIterator[Proxy]:
    running = Proxy(target)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()
