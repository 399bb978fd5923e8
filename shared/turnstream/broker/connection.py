"""The one connection that a process has to NATS.

FastStream's `NatsBroker` makes it, so a service's FastStream application and our own readers share it:
`Broker.faststream` is handed to the application, which starts and stops its subscribers and leaves the connection to
whoever built `Broker`.

The connection is made again for ever, whatever the server said before it went away. Requests are lean: a future and one
timer, no task a request. One that cannot be answered any more (the connection is lost, the server's permissions refuse
it) fails at once instead of timing out.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, Self, TypeVar, cast

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error, SlowConsumerError
from nats.js.api import Header

from turnstream.broker.answers import NO_MESSAGE, Refusal, Stored, StreamInfo, check_stored, refused
from turnstream.broker.clock import BrokerClock, parse_time
from turnstream.broker.errors import BrokerClosed, BrokerDenied, BrokerError, BrokerFault, BrokerTimeout, NoResponders
from turnstream.broker.shell import PING, Listening, Shell, TenaciousClient
from turnstream.telemetry import get_logger, metrics

REQUEST_TIMEOUT: Final = 5.0
_PATIENCE: Final = 3.0
"""Seconds without a server before it is said that we wait for one."""
_RESYNC: Final = 60.0
"""Seconds between two looks at the broker's clock; a host's monotonic clock drifts by milliseconds in that time."""

log = get_logger()

_Callback = TypeVar("_Callback")


class Broker:
    """A connection, its clock and its pending requests. Built by `Broker.connect`."""

    def __init__(self, shell: Shell, nc: Client, monotonic: Callable[[], float]) -> None:
        self.faststream = shell
        self.nc = nc
        self.clock = BrokerClock(monotonic)
        self.denied = 0
        """How often the server's permissions refused something."""
        self.dropped = 0
        """How many messages subscriptions of this connection lost because they were too slow."""
        self.declared: dict[str, dict[str, object]] = {}
        """The streams declared through this connection, buckets too: what may be made again."""
        self._monotonic = monotonic
        self._loop = asyncio.get_running_loop()
        self._inbox = nc.new_inbox() + "."
        self._next = 0
        self._waiting: dict[str, tuple[asyncio.Future[Msg], str]] = {}
        self._reconnected: dict[object, Callable[[], None]] = {}
        self._slow: dict[object, Callable[[str], None]] = {}
        self._clock_task: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        monotonic: Callable[[], float],
        user: str = "",
        password: str = "",
        creds: Path | None = None,
        timeout: float | None = None,
        ping: float = PING,
    ) -> Self:
        """Connects to one of the servers in `url` (separated by commas) and learns the broker's time.

        Waits for a server as long as it takes, or `timeout` seconds: then `BrokerTimeout`. `BrokerDenied`: the server
        does not know this user. `ping`: seconds; a server that is silent for three times as long is left for another.
        """
        shell = Shell(url, name=name, user=user, password=password, creds=creds, ping=ping)
        try:
            waiting = asyncio.get_running_loop().call_later(_PATIENCE, _say_waiting, shell)
            try:
                async with asyncio.timeout(timeout):
                    nc = await shell.connect()
            finally:
                waiting.cancel()
        except TimeoutError:
            raise BrokerTimeout(shell.address, f"no server answers: {shell.trouble or 'unreachable'}") from None
        except Error as error:
            if "authorization" in str(error).lower():
                raise BrokerDenied(shell.address, str(error)) from error
            raise BrokerFault(f"{shell.address}: {error}") from error
        broker = cls(shell, nc, monotonic)
        shell.listen(broker._on_error, broker._on_disconnect, broker._on_reconnect)
        await broker.listen(broker._inbox + "*", broker._on_answer)
        await broker._look_at_clock()
        broker._clock_task = asyncio.create_task(broker._keep_clock(), name="broker-clock")
        return broker

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout: float = REQUEST_TIMEOUT,
    ) -> Msg:
        """Publishes and waits `timeout` seconds for one answer.

        Raises `BrokerTimeout`, `NoResponders`, `BrokerDenied`, `BrokerClosed`.
        """
        if self._closed:
            raise BrokerClosed(subject)
        self._next += 1
        token = str(self._next)
        future: asyncio.Future[Msg] = self._loop.create_future()
        self._waiting[token] = future, subject
        timer = self._loop.call_later(timeout, self._expire, token, timeout)
        try:
            await self.publish(subject, payload, headers=headers, reply=self._inbox + token)
            return await future
        finally:
            timer.cancel()
            self._waiting.pop(token, None)

    async def publish(
        self, subject: str, payload: bytes = b"", *, headers: Mapping[str, str] | None = None, reply: str = ""
    ) -> None:
        """Publishes without waiting for anything. Raises `BrokerTimeout` where nothing more can be buffered."""
        try:
            await self.nc.publish(subject, payload, reply, cast("dict[str, str] | None", headers))
        except Error as error:
            raise BrokerClosed(subject) if self._closed else BrokerTimeout(subject, str(error)) from error

    def mention(self, subject: str, payload: bytes = b"") -> None:
        """Publishes in a moment, where nobody waits for it; while the connection is away, not at all."""
        assert isinstance(self.nc, TenaciousClient)
        if self.nc.is_connected:
            self.nc.mention(subject, payload)

    async def subscribe(self, subject: str, callback: Callable[[Msg], Awaitable[None]]) -> Subscription:
        """Calls back for each message, one after the other, until `unsubscribe()`; a reconnect may cost some."""
        return await self.nc.subscribe(subject, cb=callback)  # pyright: ignore[reportUnknownMemberType]

    async def listen(self, subject: str, hear: Callable[[Msg], None]) -> Listening:
        """The same at once, as each message is read from the socket: `hear` has to be quick."""
        assert isinstance(self.nc, TenaciousClient)
        return await self.nc.listen(subject, hear)

    async def api(
        self, operation: str, body: Mapping[str, object] | None = None, timeout: float = REQUEST_TIMEOUT
    ) -> dict[str, object]:
        """Asks JetStream's API (`$JS.API.<operation>`). Raises `BrokerError` and what `request` raises."""
        asked = self._monotonic()
        payload = b"" if body is None else msgspec.json.encode(body)
        answer = await self.request(f"$JS.API.{operation}", payload, timeout=timeout)
        result = msgspec.json.decode(answer.data, type=dict[str, object])
        if error := result.get("error"):
            raise refused(msgspec.convert(error, Refusal), operation)
        if isinstance(stamp := result.get("ts"), str):
            self.clock.anchor(parse_time(stamp), asked)
        return result

    async def store(self, subject: str, payload: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """Publishes to a stream and returns when the message is stored. Raises as `api` does."""
        check_stored(subject, (await self.request(subject, payload, headers)).data)

    async def message(
        self, stream: str, which: Mapping[str, object], timeout: float = REQUEST_TIMEOUT
    ) -> Stored | None:
        """The message that `which` names (`seq`, `last_by_subj`, `next_by_subj`), if the stream has one, by the word of
        its leader: a replica may lag. Raises as `api` does."""
        try:
            answer = await self.api(f"STREAM.MSG.GET.{stream}", which, timeout=timeout)
        except BrokerError as error:
            if error.err_code == NO_MESSAGE:
                return None
            raise
        return msgspec.convert(answer["message"], Stored)

    async def stream(self, name: str, timeout: float = REQUEST_TIMEOUT) -> StreamInfo:
        """How a stream stands. Raises as `api` does."""
        return msgspec.convert(await self.api(f"STREAM.INFO.{name}", timeout=timeout), StreamInfo)

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back after each reconnect: messages may have been lost. Returns what removes the callback."""
        return _register(self._reconnected, callback)

    def on_slow(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Calls back with a subscription's subject when that subscription lost a message because it was too slow."""
        return _register(self._slow, callback)

    @property
    def closed(self) -> bool:
        return self._closed

    async def close(self) -> None:
        """Ends the connection; whoever waits for an answer gets `BrokerClosed`."""
        if self._closed:
            return
        self._closed = True
        if self._clock_task:
            self._clock_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._clock_task
        for future, subject in self._waiting.values():
            _fail(future, BrokerClosed(subject))
        await self.faststream.disconnect()

    def _on_answer(self, message: Msg) -> None:
        entry = self._waiting.get(message.subject[len(self._inbox) :])
        if entry is None or entry[0].done():
            return
        future, subject = entry
        if message.headers and not message.data and message.headers.get(Header.STATUS) == "503":
            future.set_exception(NoResponders(subject))
        else:
            future.set_result(message)

    def _expire(self, token: str, timeout: float) -> None:
        if entry := self._waiting.get(token):
            _fail(entry[0], BrokerTimeout(entry[1], f"no answer within {timeout:g} s"))

    def _on_disconnect(self) -> None:
        """What was asked for on the lost connection will not be answered."""
        for future, subject in self._waiting.values():
            _fail(future, BrokerTimeout(subject, "the connection was lost before the answer came"))

    def _on_reconnect(self) -> None:
        metrics.reconnects.inc()
        for callback in tuple(self._reconnected.values()):
            callback()

    def _on_error(self, error: Exception) -> None:
        """What nats-py reports beside the calls themselves."""
        if isinstance(error, SlowConsumerError):
            self.dropped += 1
            log.warning("a subscription is too slow and lost a message", subject=error.sub.subject)
            for callback in tuple(self._slow.values()):
                callback(error.sub.subject)
        elif "permissions violation" in (text := str(error)):
            self._refuse(text)

    def _refuse(self, text: str) -> None:
        """Fails the requests that the server has just refused; nats-py has lower-cased the subject that it names."""
        self.denied += 1
        metrics.denied.inc()
        log.error("the broker's permissions refuse this", reason=text)
        if "for publish" not in text:
            return
        subject = text.partition('"')[2].partition('"')[0]
        for future, asked in self._waiting.values():
            if asked.lower() == subject:
                _fail(future, BrokerDenied(asked, text))

    async def _look_at_clock(self) -> None:
        """Asks the server for its time. Who may not ask sets the clock by the first message that is seen."""
        asked = self._monotonic()
        try:
            answer = await self.request("$SYS.REQ.USER.INFO")
            self.clock.anchor(parse_time(msgspec.json.decode(answer.data, type=_UserInfo).server.time), asked)
        except (BrokerTimeout, BrokerDenied, msgspec.DecodeError) as error:
            log.warning("the broker does not tell its time", error=error)

    async def _keep_clock(self) -> None:
        while True:
            await asyncio.sleep(_RESYNC)
            await self._look_at_clock()


class _ServerTime(msgspec.Struct):
    time: str


class _UserInfo(msgspec.Struct):
    server: _ServerTime


def _fail(future: asyncio.Future[Msg], error: BrokerFault) -> None:
    if not future.done():
        future.set_exception(error)


def _register(registry: dict[object, _Callback], callback: _Callback) -> Callable[[], None]:
    token = object()
    registry[token] = callback

    def remove() -> None:
        registry.pop(token, None)

    return remove


def _say_waiting(shell: Shell) -> None:
    log.warning("no NATS server answers yet; trying on", address=shell.address, reason=shell.trouble or "unreachable")
