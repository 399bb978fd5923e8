"""FastStream's `NatsBroker` over a client that never gives up.

What nats-py and FastStream do by themselves and this does not: close for good when the server says `-ERR` (it has too many
connections, say); stay connected without a reader after a fault in it; give up reconnecting because an error callback
raised; wait without end for a frozen server to take what was buffered; drain the connection, which others still use,
when the application stops.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from faststream.nats import NatsBroker
from nats.aio.client import Client
from nats.errors import Error, UnexpectedEOF

from turnstream.telemetry import get_logger

_RETRY: Final = 0.25
"""Seconds between two attempts to reach the same server."""
_PING: Final = 10
"""Seconds between pings; a server that misses two is left for another."""

log = get_logger()


class TenaciousClient(Client):
    """A client that reconnects whatever happens, until it is closed."""

    async def _process_err(self, err_msg: str) -> None:
        """Reports what the server says. A server that means to end the connection ends it, and that reconnects."""
        error = Error(f"nats: {err_msg.strip(chr(39))}")
        self._err = error
        await self._error_cb(error)

    async def _read_loop(self) -> None:
        await super()._read_loop()
        task = asyncio.current_task()
        if self.is_connected and self._reading_task is task and task and not task.cancelling():
            await self._process_op_err(UnexpectedEOF())

    async def _attempt_reconnect(self) -> None:
        writer = getattr(self._transport, "_io_writer", None)
        if isinstance(writer, asyncio.StreamWriter):
            writer.transport.abort()
        while True:
            try:
                return await super()._attempt_reconnect()
            except Exception as error:
                log.error("reconnecting failed in an unforeseen way", reason=repr(error))
                await asyncio.sleep(_RETRY)


class Shell(NatsBroker):
    """The connection as FastStream sees it. Its `stop` ends the application's subscribers only."""

    def __init__(self, url: str, *, name: str, user: str, password: str, creds: Path | None) -> None:
        servers = [part.strip() for part in url.split(",") if part.strip()]
        super().__init__(servers, name=name, logger=None, apply_types=False)
        self.address = ",".join(urlsplit(server).netloc.rpartition("@")[2] or server for server in servers)
        self.trouble = ""
        """What went wrong last."""
        self._connected = False
        self._down = False
        self._on_error: Callable[[Exception], None] = _ignore
        self._on_reconnect: Callable[[], None] = _nothing
        self._options: dict[str, Any] = {
            "servers": servers,
            "name": name,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": _RETRY,
            "ping_interval": _PING,
            "max_outstanding_pings": 2,
            "error_cb": self._report,
            "disconnected_cb": self._disconnected,
            "reconnected_cb": self._reconnected,
        }
        if user:
            self._options |= {"user": user, "password": password}
        if creds:
            self._options["user_credentials"] = str(creds)

    def listen(self, *, on_error: Callable[[Exception], None], on_reconnect: Callable[[], None]) -> None:
        """Who hears of errors and reconnects."""
        self._on_error, self._on_reconnect = on_error, on_reconnect

    async def _connect(self) -> Client:
        client = TenaciousClient()
        try:
            await client.connect(**self._options)
        except BaseException:
            await client.close()
            raise
        self._connected = True
        self.config.connect(client)
        return client

    async def stop(self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None) -> None:
        """Stops the application's subscribers; the connection stays."""
        connection, self._connection = self._connection, None
        try:
            await super().stop(exc_type, exc_val, exc_tb)
        finally:
            self._connection = connection
            if connection is not None:
                self.config.connect(connection)

    async def disconnect(self) -> None:
        """Sends what is buffered and closes the connection."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()
            self.config.disconnect()

    async def _report(self, error: Exception) -> None:
        self.trouble = str(error) or repr(error)
        if not self._connected and "authorization" in self.trouble.lower():
            raise error
        log.debug("nats", reason=self.trouble)
        self._on_error(error)

    async def _disconnected(self) -> None:
        if self._connected and not self._down and self._connection is not None:
            self._down = True
            log.warning("lost the connection to the broker", address=self.address, reason=self.trouble)

    async def _reconnected(self) -> None:
        self._down = False
        log.info("connected to the broker again", address=self.address)
        self._on_reconnect()


def _ignore(error: Exception) -> None:
    """Nobody listens yet."""


def _nothing() -> None:
    """Nobody listens yet."""
