"""A TCP proxy in front of a server, to lose what the server says, or to cut the line in the ways that lines are cut."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class Proxy:
    """`swallowing`: what the server says is taken and thrown away. `listening`: new connections are let in.

    `life`: seconds after which every connection is ended, however much is said on it. `length`: called for each
    connection, how many bytes of the server it carries before it is ended. A connection that is ended so is closed in
    order, or reset towards both sides if `resets` is set.
    """

    def __init__(
        self,
        target: str,
        *,
        life: float | None = None,
        length: Callable[[], int] | None = None,
        resets: bool = False,
    ) -> None:
        parts = urlsplit(target)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 4222
        self._scheme = parts.scheme
        self._life = life
        self._length = length
        self._resets = resets
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.url = ""
        self.swallowing = False
        self.listening = True
        self.swallowed = asyncio.Event()
        """Set when something was swallowed."""
        self.connections = 0
        self.ended = 0
        """How many connections it has ended for their life or length."""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"{self._scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def swallow(self) -> None:
        self.swallowed.clear()
        self.swallowing = True

    def cut(self) -> None:
        """Ends every connection with a reset, and swallows no more."""
        self.swallowing = False
        self.reset(*self._writers)

    @staticmethod
    def reset(*writers: asyncio.StreamWriter) -> None:
        """Ends connections with RST: what waits to be sent is thrown away, and the peer gets an error."""
        for writer in writers:
            connection = writer.get_extra_info("socket")
            if connection is not None and connection.fileno() >= 0:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.listening:
            writer.transport.abort()
            return
        self.connections += 1
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:  # nobody is there now
            writer.transport.abort()
            return
        self._writers |= {writer, upstream_writer}
        length = self._length() if self._length else None
        pumps = [
            asyncio.create_task(self._pump(reader, upstream_writer, None)),
            asyncio.create_task(self._pump(upstream_reader, writer, length, from_server=True)),
        ]
        self._tasks.update(pumps)
        done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED, timeout=self._life)
        if not done or (length is not None and not pumps[1].cancelled() and _is_cut(pumps[1])):
            self.ended += 1
            if self._resets:
                self.reset(writer, upstream_writer)
        for each in (writer, upstream_writer):
            each.close()
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        self._writers -= {writer, upstream_writer}
        self._tasks.difference_update(pumps)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        left: int | None,
        *,
        from_server: bool = False,
    ) -> None:
        while data := await reader.read(65536):
            if from_server and self.swallowing:
                self.swallowed.set()
                continue
            if left is not None:
                data, left = data[:left], left - len(data)
            writer.write(data)
            await writer.drain()
            if left is not None and left <= 0:
                raise _LengthReached


class _LengthReached(Exception):
    pass


def _is_cut(pump: "asyncio.Task[None]") -> bool:
    return pump.done() and isinstance(pump.exception(), _LengthReached)


@asynccontextmanager
async def proxy(
    target: str, *, life: float | None = None, length: Callable[[], int] | None = None, resets: bool = False
) -> AsyncIterator[Proxy]:
    running = Proxy(target, life=life, length=length, resets=resets)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()
