"""What the pull loops share: deliveries as soon as there are any, as many as the reader has room for, for ever.

They ask with raw `MSG.NEXT` requests and keep so much asked for that the server does not wait for the next one while
the reader has room. They watch: whatever may have cost a delivery or a request (a reconnect, a consumer or stream that
somebody deleted, a new leader, a server that fell silent) ends in a fresh start on a fresh reply subject, so what was
asked for earlier cannot come through any more.

Rules for whoever edits this: `_out` counts what the server may still send on the present reply subject; it is never too
low. It sinks by a delivery, by a status that ends a request (which says how much of it was left), and by a request's
deadline. Nothing may be awaited between the moment the deliveries leave `_ready` and the moment the reader has them.
"""

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Final

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error
from nats.js.api import Header

from turnstream.broker.connection import Broker
from turnstream.broker.delivery import Delivery, about
from turnstream.broker.errors import BrokerClosed, BrokerFault, StreamBehind
from turnstream.broker.shell import Listening
from turnstream.telemetry import get_logger

_EXPIRES: Final = 5.0
"""Seconds that a request stays with the server. Short, for the requests of a reader that is frozen, or that was
connected to a server that is, still draw messages, and these come again only after the consumer's `ack_wait`."""
_HEARTBEAT: Final = 1.5
"""Seconds of silence after which the server says that it is alive."""
_SILENT_BEATS: Final = 2
"""Heartbeats that may be missed, while something is asked for, before the request counts as lost."""
_RETRY: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds between attempts to start again; the last one repeats."""

_CALM: Final = 10.0
"""Seconds after a start from which the next one is not a repetition, and need not wait."""
_MOMENT: Final = 0.1
"""Of the time that a reader lingers at most: as long as that nothing must have come."""
_SURE: Final = 5
"""How often a stream must look too short before it is believed: a new leader may not know its end at once."""

log = get_logger()


class _Request(msgspec.Struct):
    """One `MSG.NEXT`: how many it asked for, and the loop time at which the server has certainly forgotten it."""

    count: int
    deadline: float


class Puller:
    """What both pulls share: credit, statuses, the watchdog, iteration."""

    def __init__(self, broker: Broker, linger: float = 0.0) -> None:
        self._broker = broker
        self._linger = linger
        self._loop = asyncio.get_running_loop()
        self._ready: list[Delivery] = []
        self._out = 0
        self._requests: dict[str, _Request] = {}
        self._next_request = 0
        self._inbox = ""
        self._next_subject = ""
        self._subscription: Listening | None = None
        self._silent = 0
        self._waiter: asyncio.Future[None] | None = None
        self._failure: BrokerFault | None = None
        self._closed = False
        self._restarting: asyncio.Task[None] | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._remove_hook = broker.on_reconnect(self._on_reconnect)
        self._started = -_CALM
        self._attempt = 0
        self.restarts = 0
        """How often it had to start anew."""

    def __aiter__(self) -> AsyncIterator[list[Delivery]]:
        return self

    async def __anext__(self) -> list[Delivery]:
        """Everything that has arrived, at least one delivery, and what comes while it lingers. Ends after `close`. One
        reader at a time."""
        if self._subscription is None and self._restarting is None and self._failure is None:
            self._restart("start")
        while not self._ready:
            if self._failure:
                raise self._failure
            if self._closed:
                raise StopAsyncIteration
            # Before the request, for what it brings may come while it is still being sent.
            waiter = self._waiter = self._loop.create_future()
            try:
                await self._fill(self._room())
                await waiter
            finally:
                self._waiter = None
        if self._linger:
            await self._gather()
        # Before the deliveries leave their place, so that a reader that is cancelled here finds them again.
        await self._fill(self._room_after_taking())
        ready, self._ready = self._ready, []
        self._take(len(ready))
        self._broker.clock.observe(ready[-1].time)
        return ready

    async def _gather(self) -> None:
        """Until nothing comes for a moment, or half of what there is room for is taken."""
        end = self._loop.time() + self._linger
        before = 0
        while before < len(self._ready) and self._room() * 2 > self._room_after_taking() and self._loop.time() < end:
            before = len(self._ready)
            await asyncio.sleep(self._linger * _MOMENT)

    async def close(self) -> None:
        """Ends the iteration. What was delivered and not acked comes again after the consumer's `ack_wait`."""
        if self._closed:
            return
        self._closed = True
        self._remove_hook()
        if self._ticker:
            self._ticker.cancel()
        if self._restarting:
            self._restarting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restarting
        await self._end_subscription()
        self._wake()

    @abstractmethod
    def _room(self) -> int:
        """How many deliveries may be asked for at the same time now."""

    @abstractmethod
    def _room_after_taking(self) -> int:
        """The same once the reader has taken what is here."""

    def _take(self, count: int) -> None:
        """The reader takes so many."""

    @abstractmethod
    async def _prepare(self) -> str:
        """Makes sure of the consumer; the subject of its `MSG.NEXT` requests."""

    def _accept(self, about: list[str]) -> bool:
        """Whether the reader shall see this delivery."""
        return True

    def _on_heartbeat(self, headers: Mapping[str, str]) -> None:
        """Looks at what a heartbeat says about the consumer."""

    async def _fill(self, room: int) -> None:
        """Asks for as much as there is room for, once half of the room is free."""
        if self._subscription is None or self._out * 2 > room or room <= self._out:
            return
        count = room - self._out
        self._next_request += 1
        token = str(self._next_request)
        self._requests[token] = _Request(count, self._loop.time() + _EXPIRES + 2 * _HEARTBEAT)
        if not self._out:
            self._silent = 0
        self._out += count
        body = b'{"batch":%d,"expires":%d,"idle_heartbeat":%d}' % (count, _EXPIRES * 1e9, _HEARTBEAT * 1e9)
        with contextlib.suppress(BrokerFault):
            await self._broker.publish(self._next_subject, body, reply=self._inbox + token)

    def _on_message(self, message: Msg) -> None:
        self._silent = 0
        if message.reply:
            self._out = max(self._out - 1, 0)
            parts = about(message.reply)
            if self._accept(parts):
                self._ready.append(Delivery(self._broker, message, parts))
                if self._waiter and not self._waiter.done():
                    self._waiter.set_result(None)
        else:
            self._on_status(message)

    def _on_status(self, message: Msg) -> None:
        headers = message.headers or {}
        status = headers.get(Header.STATUS, "")
        if status == "100":
            self._on_heartbeat(headers)
            return
        request = self._requests.pop(message.subject[len(self._inbox) :], None)
        if request:
            self._out -= min(int(headers.get("Nats-Pending-Messages") or request.count), self._out)
        if status in ("404", "408"):
            self._wake_to_fill()
        else:
            self._restart(f"{status} {headers.get(Header.DESCRIPTION, '').strip()}")

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    def _on_reconnect(self) -> None:
        if self._subscription:
            self._restart("reconnect")

    def _tick(self) -> None:
        """Every heartbeat: forgets requests that the server has forgotten, and notices silence."""
        if self._broker.closed:
            self._fail(BrokerClosed(repr(self)))
            return
        now = self._loop.time()
        self._ticker = self._loop.call_later(_HEARTBEAT, self._tick)
        for token in [token for token, request in self._requests.items() if request.deadline < now]:
            del self._requests[token]
        self._out = min(self._out, sum(request.count for request in self._requests.values()))
        self._silent += 1
        if self._out and self._silent > _SILENT_BEATS and self._broker.nc.is_connected:
            self._restart("silence")
        else:
            self._wake_to_fill()

    def _wake_to_fill(self) -> None:
        if self._out < self._room() and self._out * 2 <= self._room():
            self._wake()

    def _restart(self, reason: str) -> None:
        if self._closed or self._restarting:
            return
        if reason != "start":
            self.restarts += 1
        if reason not in ("start", "reconnect"):
            log.warning("pull starts again", reason=reason, pull=repr(self))
        self._restarting = self._loop.create_task(self._start_again(), name="pull-restart")

    async def _start_again(self) -> None:
        await self._end_subscription()
        if self._loop.time() - self._started > _CALM:
            self._attempt = 0
        behind = 0
        while self._failure is None:
            if self._attempt:
                await asyncio.sleep(_RETRY[min(self._attempt, len(_RETRY)) - 1])
            self._attempt += 1
            try:
                self._next_subject = await self._prepare()
                await self._begin()
                break
            except BrokerClosed as fault:
                self._fail(fault)
            except StreamBehind as fault:
                behind += 1
                if behind == _SURE:
                    self._fail(fault)
            except Exception as fault:
                if self._attempt % 30 == 1:
                    foreseen = isinstance(fault, BrokerFault | Error)
                    log.warning("pull cannot start yet", error=fault, exc_info=not foreseen, pull=repr(self))
        self._restarting = None
        self._wake()

    def _fail(self, fault: BrokerFault) -> None:
        """The reader gets this once it has taken what is here."""
        self._failure = fault
        self._wake()

    async def _begin(self) -> None:
        self._inbox = self._broker.nc.new_inbox() + "."
        self._requests.clear()
        self._out = 0
        self._silent = 0
        self._started = self._loop.time()
        self._subscription = await self._broker.listen(self._inbox + "*", self._on_message)
        if self._ticker is None:
            self._ticker = self._loop.call_later(_HEARTBEAT, self._tick)

    async def _end_subscription(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription:
            with contextlib.suppress(Error):
                await subscription.unsubscribe()
