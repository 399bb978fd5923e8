"""The whole log as events, for projector, rebuild and fsck."""

from collections.abc import Sequence
from typing import Final

import msgspec

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.pull import Delivery, OrderedPull
from turnstream.log import codec
from turnstream.log.base import Unreadable
from turnstream.log.messages import EXPECTED, UNGUARDED
from turnstream.session.events import Recorded
from turnstream.telemetry import get_logger

BATCH: Final = 2048
"""Events that are asked for at once; twice as many may be waiting."""

log = get_logger()


class Extent(msgspec.Struct, frozen=True):
    """Which log it is (the time at which its stream was made), its last sequence, and how many events it holds."""

    log: str
    last: int
    events: int


async def extent(broker: Broker) -> Extent:
    """Raises `BrokerFault`."""
    found = await broker.stream(subjects.SESSIONS)
    return Extent(found.created, found.state.last_seq, found.state.messages)


def follow(broker: Broker, after: int, *, linger: float = 0.0) -> OrderedPull:
    """The events behind this sequence, and then every one that is stored."""
    return OrderedPull(broker, subjects.SESSIONS, [subjects.EVENTS], after, batch=BATCH, linger=linger)


def read(delivery: Delivery) -> Recorded:
    """The event of a message. Raises `Unreadable`, also for one that lies on another session's subject."""
    headers = delivery.headers or {}
    try:
        previous = int(headers.get(EXPECTED, UNGUARDED))
    except ValueError:
        previous = UNGUARDED
    recorded = codec.decode(delivery.data, seq=delivery.seq, previous=previous, time=delivery.time)
    key = recorded.event.key
    if not delivery.subject.endswith(f".{key.account}.{key.session}"):
        raise Unreadable(delivery.seq, f"an event of {key} lies on {delivery.subject}")
    return recorded


def events_of(deliveries: Sequence[Delivery]) -> list[Recorded]:
    """The events of these messages. What cannot be read is passed over: one bad message must not stop every view.
    `fsck` names it."""
    events: list[Recorded] = []
    for delivery in deliveries:
        try:
            events.append(read(delivery))
        except Unreadable as error:
            log.error("an event cannot be read and is passed over", seq=delivery.seq, error=str(error))
    return events
