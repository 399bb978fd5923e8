"""The pull loop: deliveries as soon as there are any, as many as the reader has room for, for ever.

`Pull` reads a durable consumer with acks, `OrderedPull` reads a stream from a sequence on, without acks and without a
loss. Both ask with raw `MSG.NEXT` requests and keep so much asked for that the server does not wait for the next one
while the reader has room. Both watch: whatever may have cost a delivery or a request (a reconnect, a consumer or stream
that somebody deleted, a new leader, a server that fell silent) ends in a fresh start on a fresh reply subject, so what
was asked for earlier cannot come through any more.

Rules for whoever edits this: `_out` counts what the server may still send on the present reply subject; it is never too
low. It sinks by a delivery, by a status that ends a request (which says how much of it was left), and by a request's
deadline.
"""

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Final

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error
from nats.js.api import Header

from turnstream.broker.connection import Broker
from turnstream.broker.declare import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND, ensure_consumer, ensure_stream
from turnstream.broker.errors import BrokerError, BrokerFault, StreamBehind
from turnstream.subjects import Consumer
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

_LOOK: Final = 2.0
"""Seconds to wait for an answer of the API before asking again."""
_CALM: Final = 10.0
"""Seconds after a start from which the next one is not a repetition, and need not wait."""
_SURE: Final = 5
"""How often a stream must look too short before it is believed: a new leader may not know its end at once."""

log = get_logger()


class Delivery:
    """One message of a stream as a consumer hands it out."""

    __slots__ = ("_broker", "_reply", "data", "delivery", "headers", "pending", "seq", "subject", "time")

    def __init__(self, broker: Broker, message: Msg, about: list[str]) -> None:
        """`about`: the reply subject's parts, as `_about` gives them."""
        self._broker = broker
        self._reply = message.reply
        self.subject = message.subject
        self.data = message.data
        self.headers = message.headers
        self.delivery = int(about[0])
        """How often this message has been delivered, this time included."""
        self.seq = int(about[1])
        """Its sequence in the stream."""
        self.time = int(about[3][:-6])
        """When the stream stored it: milliseconds of the broker's time."""
        self.pending = int(about[4])
        """How many more there are for this consumer."""

    def __repr__(self) -> str:
        return f"<Delivery {self.subject} seq={self.seq} delivery={self.delivery}>"

    async def ack(self) -> None:
        """It is dealt with. Nobody says that the server has heard it: whoever acks must bear a redelivery."""
        await self._broker.publish(self._reply)

    async def nak(self, delay: float | None = None) -> None:
        """Deliver it again, at once or in `delay` seconds."""
        body = b'-NAK {"delay":%d}' % round(delay * 1e9) if delay else b"-NAK"
        await self._broker.publish(self._reply, body)

    async def progress(self) -> None:
        """It is being worked on: `ack_wait` begins anew."""
        await self._broker.publish(self._reply, b"+WPI")

    async def term(self) -> None:
        """Never deliver it again."""
        await self._broker.publish(self._reply, b"+TERM")


class _Request(msgspec.Struct):
    """One `MSG.NEXT`: how many it asked for, and the loop time at which the server has certainly forgotten it."""

    count: int
    deadline: float


class _Puller:
    """What both pulls share: credit, statuses, the watchdog, iteration."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._loop = asyncio.get_running_loop()
        self._ready: list[Delivery] = []
        self._out = 0
        self._requests: dict[str, _Request] = {}
        self._next_request = 0
        self._inbox = ""
        self._subscription: Subscription | None = None
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
        """Everything that has arrived, at least one delivery. Ends after `close`. One reader at a time."""
        if self._subscription is None and self._restarting is None and not self._closed:
            self._restart("start")
        while not self._ready:
            if self._failure:
                raise self._failure
            if self._closed:
                raise StopAsyncIteration
            await self._fill(self._room())
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        # Before the deliveries leave their place, so that a reader that is cancelled here finds them again.
        await self._fill(self._room_after_taking())
        ready, self._ready = self._ready, []
        self._take(len(ready))
        self._broker.clock.observe(ready[-1].time)
        return ready

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

    _next_subject = ""

    async def _on_message(self, message: Msg) -> None:
        self._silent = 0
        if message.reply:
            self._out = max(self._out - 1, 0)
            about = _about(message.reply)
            if self._accept(about):
                self._ready.append(Delivery(self._broker, message, about))
                if self._waiter and not self._waiter.done():
                    self._waiter.set_result(None)
        else:
            await self._on_status(message)

    async def _on_status(self, message: Msg) -> None:
        headers = message.headers or {}
        status = headers.get(Header.STATUS, "")
        if status == "100":
            self._on_heartbeat(headers)
            return
        request = self._requests.pop(message.subject[len(self._inbox) :], None)
        if request:
            self._out -= min(int(headers.get("Nats-Pending-Messages") or request.count), self._out)
        if status in ("404", "408"):
            await self._fill(self._room())
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
        if self._out * 2 <= self._room():
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
        while True:
            if self._attempt:
                await asyncio.sleep(_RETRY[min(self._attempt, len(_RETRY)) - 1])
            self._attempt += 1
            try:
                self._next_subject = await self._prepare()
                await self._begin()
                break
            except (BrokerFault, Error) as fault:
                if isinstance(fault, StreamBehind) and self._attempt > _SURE:
                    self._failure = fault
                    break
                if self._attempt % 30 == 1:
                    log.warning("pull cannot start yet", error=fault, pull=repr(self))
        self._restarting = None
        self._wake()

    async def _begin(self) -> None:
        self._inbox = self._broker.nc.new_inbox() + "."
        self._requests.clear()
        self._out = 0
        self._silent = 0
        self._started = self._loop.time()
        self._subscription = await self._broker.subscribe(self._inbox + "*", self._on_message)
        if self._ticker is None:
            self._ticker = self._loop.call_later(_HEARTBEAT, self._tick)

    async def _end_subscription(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription:
            with contextlib.suppress(Error):
                await subscription.unsubscribe()


class Pull(_Puller):
    """The deliveries of a durable consumer.

    With `slots`, never more than the free ones are asked for: each delivery holds a slot until `release`. Without, at
    most two `batch`es wait here for the reader.
    """

    def __init__(self, broker: Broker, consumer: Consumer, *, batch: int = 256, slots: int | None = None) -> None:
        super().__init__(broker)
        self._consumer = consumer
        self._batch = batch
        self._slots = slots
        self._held = 0

    def __repr__(self) -> str:
        return f"Pull({self._consumer.stream}.{self._consumer.name})"

    def release(self, count: int = 1) -> None:
        """Gives slots back."""
        if self._slots is None or count > self._held:
            raise ValueError(f"cannot release {count} slots, {self._held} are held")
        self._held -= count
        self._wake_to_fill()

    def _room(self) -> int:
        if self._slots is None:
            return 2 * self._batch - len(self._ready)
        return self._slots - self._held - len(self._ready)

    def _room_after_taking(self) -> int:
        return 2 * self._batch if self._slots is None else self._room()

    def _take(self, count: int) -> None:
        if self._slots is not None:
            self._held += count

    async def _prepare(self) -> str:
        await ensure_consumer(self._broker, self._consumer)
        return f"$JS.API.CONSUMER.MSG.NEXT.{self._consumer.stream}.{self._consumer.name}"


class OrderedPull(_Puller):
    """A stream's messages after sequence `after`, each once and in order, through an ephemeral consumer without acks.

    Iterating raises `StreamBehind` where the stream ends before `after`.
    """

    def __init__(self, broker: Broker, stream: str, filters: Iterable[str], after: int, *, batch: int = 500) -> None:
        super().__init__(broker)
        self._stream = stream
        self._filters = list(filters)
        self._after = after
        self._batch = batch
        self._name = ""
        self._consumer_seq = 0

    def __repr__(self) -> str:
        return f"OrderedPull({self._stream}, after={self._after})"

    async def close(self) -> None:
        was_open = not self._closed
        await super().close()
        if was_open:
            await self._drop_consumer()

    def _room(self) -> int:
        return 2 * self._batch - len(self._ready)

    def _room_after_taking(self) -> int:
        return 2 * self._batch

    def _accept(self, about: list[str]) -> bool:
        consumer_seq = int(about[2])
        if consumer_seq != self._consumer_seq + 1:
            self._restart(f"delivery {consumer_seq} after {self._consumer_seq}")
            return False
        self._consumer_seq = consumer_seq
        self._after = int(about[1])
        return True

    def _on_heartbeat(self, headers: Mapping[str, str]) -> None:
        last = int(headers.get("Nats-Last-Consumer") or 0)
        if last > self._consumer_seq:
            self._restart(f"the last deliveries are missing ({last - self._consumer_seq})")

    async def _prepare(self) -> str:
        await self._drop_consumer()
        await ensure_stream(self._broker, self._stream)
        await self._check_end()
        name = self._broker.nc.new_inbox().rpartition(".")[2]
        config: dict[str, object] = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._after + 1,
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": round(60e9),
            "filter_subjects": self._filters,
        }
        self._name = name
        self._consumer_seq = 0
        body: dict[str, object] = {"stream_name": self._stream, "config": config, "action": "create"}
        await self._broker.api(f"CONSUMER.CREATE.{self._stream}.{name}", body)
        return f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{name}"

    async def _check_end(self) -> None:
        answer = await self._broker.api(f"STREAM.INFO.{self._stream}", timeout=_LOOK)
        last = msgspec.convert(answer["state"], _State).last_seq
        if last < self._after:
            raise StreamBehind(self._stream, self._after, last)

    async def _drop_consumer(self) -> None:
        name, self._name = self._name, ""
        if not name:
            return
        try:
            await self._broker.api(f"CONSUMER.DELETE.{self._stream}.{name}", timeout=_LOOK)
        except BrokerError as error:
            if error.err_code not in (CONSUMER_NOT_FOUND, STREAM_NOT_FOUND):
                log.warning("ordered consumer stays until it expires", reason=str(error))
        except BrokerFault:
            pass


def _about(reply: str) -> list[str]:
    """What an ack subject tells: delivery, stream sequence, consumer sequence, time (ns), pending.

    It is `$JS.ACK.[<domain>.<account>.]<stream>.<consumer>.` and these.
    """
    parts = reply.split(".")
    return parts[4:] if len(parts) == 9 else parts[6:11]


class _State(msgspec.Struct):
    last_seq: int
