"""FastStream's `NatsBroker` over a client that never gives up.

What nats-py and FastStream do by themselves and this does not: close for good when the server says `-ERR` (it has too
many connections, say); stay connected without a reader after a fault in it; give up reconnecting because an error
callback raised; wait without end for a frozen server to take what was buffered; drain the connection, which others
still use, when the application stops.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final
from urllib.parse import urlsplit

from faststream.nats import NatsBroker
from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error, UnexpectedEOF

from turnstream.broker.parser import SafeParser
from turnstream.telemetry import get_logger

RETRY: Final = 0.25
"""Seconds between two attempts to reach the same server."""
PING: Final = 5
"""Seconds between pings; a server that owes more than two answers is left for another."""
_FLUSH: Final = 2.0
"""Seconds that a publisher waits for room in a full send buffer."""
_CROWD: Final = 3
"""Commands in one turn of the loop from which on those of the next turn go to the socket together: a system call each
was a tenth of a turn's CPU time where many run at once (2026-12, tests/bench/bench_turns.py)."""
_UNSENT: Final = 64 * 1024
"""Bytes that the socket has not taken yet, above which it is waited for."""
_SOON: Final = 0.002
"""Seconds that what is in no hurry waits for something else to go to the socket with."""
_GOODBYE: Final = 2.0
"""Seconds that closing waits for the server to take what is buffered."""

log = get_logger()


class TenaciousClient(Client):
    """A client that reconnects whatever happens, until it is closed. No message cuts it off, whatever is in it."""

    def __init__(self) -> None:
        super().__init__()
        self._ps = SafeParser(self, self._process_msg)
        self._hearers: dict[int, Callable[[Msg], None]] = {}
        self._turn: asyncio.Handle | None = None
        """What ends this turn of the loop, where something was said in it."""
        self._crowded = False
        self._soon: list[bytes] = []
        """What is in no hurry."""
        self._timer: asyncio.TimerHandle | None = None
        """What says it at the latest."""

    def mention(self, subject: str, payload: bytes) -> None:
        """Publishes in a moment, with whatever else is said by then: a system call less. A connection that is lost by
        then takes it along."""
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        self._soon.append(f"PUB {subject} {len(payload)}\r\n".encode() + payload + b"\r\n")
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SOON, self._say_soon)

    async def listen(self, subject: str, hear: Callable[[Msg], None]) -> "Listening":
        """Calls back for each message as it is read, before anything else is done: `hear` has to be quick. A message
        of `subscribe` is put in a queue, whose reader gets it two turns of the loop later."""
        subscription = await self.subscribe(subject, cb=_unheard)  # pyright: ignore[reportUnknownMemberType]
        self._hearers[subscription._id] = hear  # pyright: ignore[reportPrivateUsage]
        return Listening(self._hearers, subscription)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        hear = self._hearers.get(sid)
        if hear is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        try:
            hear(self._build_message(sid, subject, reply, data, await self._process_headers(headers)))
        except Exception as error:
            await self._error_cb(error)

    async def _process_err(self, err_msg: str) -> None:
        """Reports what the server says. If it means to end the connection it ends it, and that reconnects."""
        error = Error(f"nats: {err_msg.strip(chr(39))}")
        self._err = error
        await self._error_cb(error)

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        """nats-py looks at each letter: half the cost of reading an event (2026-11, tests/bench/bench_log.py)."""
        headers: dict[str, str] = {}
        for line in raw.decode("utf-8", "replace").split("\r\n"):
            name, colon, value = line.partition(":")
            if colon:
                headers[name.strip()] = value.strip()
        return headers

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        """What is not built as headers says nothing: anybody may send it, and the server takes it."""
        try:
            return await super()._process_headers(headers)  # pyright: ignore[reportUnknownMemberType]
        except (IndexError, UnicodeDecodeError):
            return None

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        """A subject that is not UTF-8 names nothing of ours."""
        return Msg(
            _client=self,
            subject=subject.decode(errors="replace"),
            reply=reply.decode(errors="replace"),
            data=data,
            headers=headers,
            _sid=sid,
        )

    async def _process_op_err(self, e: Exception) -> None:
        """Says why the connection is given up, which nats-py does for some reasons only."""
        if self.is_connected:
            await self._error_cb(e)
        await super()._process_op_err(e)

    async def _read_loop(self) -> None:
        await super()._read_loop()
        task = asyncio.current_task()
        reading = task is self._reading_task  # pyright: ignore[reportUnknownMemberType]
        if self.is_connected and reading and task and not task.cancelling():
            await self._process_op_err(UnexpectedEOF())

    async def _attempt_reconnect(self) -> None:
        self.abort()
        self._soon.clear()
        while True:
            try:
                return await super()._attempt_reconnect()
            except Exception as error:
                log.error("reconnecting failed in an unforeseen way", error=error, exc_info=True)
                await asyncio.sleep(RETRY)

    async def _connect_to_server(self, s: Srv) -> None:
        """An attempt that failed after it had a socket would leave that open."""
        self.abort()
        await super()._connect_to_server(s)

    def _write(self) -> bool:
        """Gives what is pending to the socket: at once, or, where there is much to say, at the end of this turn of the
        loop. False: the socket takes nothing now, and has to be waited for."""
        if self._turn is not None:
            return True
        said = len(self._pending)
        if not self._crowded and not self._give():
            return False
        self._turn = asyncio.get_running_loop().call_soon(self._end_turn, 0 if self._crowded else said)
        return True

    def _end_turn(self, said: int) -> None:
        """`said`: how many commands went to the socket in this turn."""
        self._turn = None
        self._crowded = said + len(self._pending) >= _CROWD
        self._give_or_wait()

    def _say_soon(self) -> None:
        self._timer = None
        if self.is_connected:
            self._take_soon()
            self._give_or_wait()

    def _take_soon(self) -> None:
        self._pending += self._soon
        self._pending_data_size += sum([len(command) for command in self._soon])
        self._soon.clear()

    def _give_or_wait(self) -> None:
        """Where the socket takes nothing now, nats-py's task waits for it."""
        queue = self._flush_queue
        with suppress(RuntimeError):
            if self._pending and not self._give() and self.is_connected and queue is not None and queue.empty():
                queue.put_nowait(asyncio.Future())

    def _give(self) -> bool:
        writer = getattr(self._transport, "_io_writer", None)
        if not self.is_connected or not isinstance(writer, asyncio.StreamWriter):
            return False
        if writer.transport.get_write_buffer_size() > _UNSENT:
            return False
        self._take_soon()
        writer.writelines(self._pending)
        self._pending, self._pending_data_size = [], 0
        return True

    async def _send_ping(self, future: asyncio.Future[object] | None = None) -> None:
        """nats-py's goes to the socket before what is pending, so that `flush` would not wait for it."""
        with suppress(RuntimeError):
            self._give()
        await super()._send_ping(future)  # pyright: ignore[reportUnknownMemberType]

    async def _flush_pending(self, force_flush: bool = False) -> object:
        """At once; nats-py has a task for it, which comes to it a turn of the loop later, and is for a socket that has
        to be waited for. uvloop raises where the socket is lost already and nobody has noticed yet: what is pending
        stays pending."""
        try:
            if not force_flush and self._write():
                return None
            return await super()._flush_pending(force_flush)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        except RuntimeError:
            return None

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        """Where the socket is lost nothing can be sent any more; nats-py tries, fails and leaves its tasks behind."""
        self._take_soon()
        try:
            await super()._close(status, do_cbs)
        except (Error, OSError, RuntimeError):
            pass
        except asyncio.CancelledError:  # of a reconnect, which is given up, and waits for the same socket's end
            if (task := asyncio.current_task()) and task.cancelling():
                raise
        finally:
            if self._timer:
                self._timer.cancel()
            for subscription in self._subs.values():
                if waiting := subscription._wait_for_msgs_task:  # pyright: ignore[reportPrivateUsage]
                    waiting.cancel()
            self._subs.clear()
            self.abort()

    def abort(self) -> None:
        """Drops the socket and whatever it has buffered."""
        writer = getattr(self._transport, "_io_writer", None)
        if isinstance(writer, asyncio.StreamWriter):
            writer.transport.abort()


class Listening:
    """What `TenaciousClient.listen` has begun."""

    def __init__(self, hearers: dict[int, Callable[[Msg], None]], subscription: Subscription) -> None:
        self._hearers = hearers
        self._subscription = subscription

    async def unsubscribe(self) -> None:
        """Nothing is heard any more. Raises nats-py's `Error` where the connection is closed."""
        self._hearers.pop(self._subscription._id, None)  # pyright: ignore[reportPrivateUsage]
        await self._subscription.unsubscribe()


async def _unheard(_: Msg) -> None:
    """A message that came between the subscription and its listener is there for nobody yet."""


class Shell(NatsBroker):
    """The connection as FastStream sees it. Its `stop` ends the application's subscribers only."""

    def __init__(self, url: str, *, name: str, user: str, password: str, creds: Path | None, ping: float) -> None:
        self._servers = [part.strip() for part in url.split(",") if part.strip()]
        # Its entries at `info`, two for each message, are left out by the level of the logger; faults are not.
        super().__init__(self._servers, logger=logging.getLogger("faststream"), apply_types=False)
        self._client_name = name
        self._user = user
        self._password = password
        self._creds = creds
        self._ping = ping
        self._established = False
        self._down = False
        self._on_error: Callable[[Exception], None] | None = None
        self._on_disconnect: Callable[[], None] | None = None
        self._on_reconnect: Callable[[], None] | None = None
        self.address = ",".join(urlsplit(server).netloc.rpartition("@")[2] or server for server in self._servers)
        """The servers, without user and password."""
        self.trouble = ""
        """What went wrong last."""

    def listen(
        self,
        on_error: Callable[[Exception], None],
        on_disconnect: Callable[[], None],
        on_reconnect: Callable[[], None],
    ) -> None:
        """Who hears of what happens to the connection."""
        self._on_error, self._on_disconnect, self._on_reconnect = on_error, on_disconnect, on_reconnect

    async def _connect(self) -> Client:
        client = TenaciousClient()
        try:
            await client.connect(
                self._servers,
                name=self._client_name,
                user=self._user or None,
                password=self._password or None,
                user_credentials=str(self._creds) if self._creds else None,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RETRY,  # pyright: ignore[reportArgumentType]
                ping_interval=self._ping,  # pyright: ignore[reportArgumentType]
                max_outstanding_pings=2,
                flush_timeout=_FLUSH,
                error_cb=self._report,
                disconnected_cb=self._disconnected,
                reconnected_cb=self._reconnected,
            )
        except BaseException:
            await client.close()
            raise
        self._established = True
        self.config.connect(client)
        return client

    async def stop(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        """Stops the application's subscribers; the connection stays."""
        connection, self._connection = self._connection, None
        try:
            await super().stop(exc_type, exc_val, exc_tb)
        finally:
            self._connection = connection
            if connection is not None:
                self.config.connect(connection)

    async def disconnect(self) -> None:
        """Sends what is buffered and closes the connection. A server that does not take it is not waited for."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        # nats-py waits for the socket's end without a limit; the socket is aborted where it does not come.
        abort = asyncio.get_running_loop().call_later(_GOODBYE, _abort, connection)
        try:
            await connection.close()
        finally:
            abort.cancel()
        self.config.disconnect()

    async def _report(self, error: Exception) -> None:
        self.trouble = str(error) or repr(error)
        if not self._established and "authorization" in self.trouble.lower():
            raise error
        if not isinstance(error, Error | OSError | TimeoutError):
            log.error("a callback failed", error=error, exc_info=error)
        if self._on_error:
            self._on_error(error)

    async def _disconnected(self) -> None:
        if self._established and not self._down and self._connection is not None:
            self._down = True
            log.warning("lost the connection to the broker", address=self.address, reason=self.trouble)
            if self._on_disconnect:
                self._on_disconnect()

    async def _reconnected(self) -> None:
        self._down = False
        log.info("connected to the broker again", address=self.address)
        if self._on_reconnect:
            self._on_reconnect()


def _abort(client: Client) -> None:
    if isinstance(client, TenaciousClient):
        client.abort()
