"""The two pull loops: `Pull` for a durable consumer with acks, `OrderedPull` for a stream from a sequence on."""

from collections.abc import Iterable, Mapping
from typing import Final

from turnstream.broker.connection import Broker
from turnstream.broker.declare import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND, ensure_consumer, ensure_stream
from turnstream.broker.delivery import Delivery
from turnstream.broker.errors import BrokerError, BrokerFault, StreamBehind
from turnstream.broker.puller import Puller
from turnstream.subjects import Consumer
from turnstream.telemetry import get_logger

__all__ = ["Delivery", "OrderedPull", "Pull"]

_LOOK: Final = 2.0
"""Seconds to wait for an answer of the API before asking again."""

log = get_logger()


class Pull(Puller):
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


class OrderedPull(Puller):
    """A stream's messages after sequence `after`, each once and in order, through an ephemeral consumer without acks.

    A reader also gets what comes within `linger` seconds, until nothing comes for a tenth of that or a whole `batch` is
    there: fewer, larger batches.
    `headers_only`: without what the messages say, whose size is then in the header `Nats-Msg-Size`.

    Iterating raises `StreamBehind` where the stream ends before `after`.
    """

    def __init__(
        self,
        broker: Broker,
        stream: str,
        filters: Iterable[str],
        after: int,
        *,
        batch: int = 500,
        linger: float = 0.0,
        headers_only: bool = False,
    ) -> None:
        super().__init__(broker, linger)
        self._headers_only = headers_only
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
            "headers_only": self._headers_only,
        }
        self._name = name
        self._consumer_seq = 0
        body: dict[str, object] = {"stream_name": self._stream, "config": config, "action": "create"}
        await self._broker.api(f"CONSUMER.CREATE.{self._stream}.{name}", body)
        return f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{name}"

    async def _check_end(self) -> None:
        last = (await self._broker.stream(self._stream, _LOOK)).state.last_seq
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
