"""The whole log as events, for projector, rebuild and fsck."""

from collections.abc import Sequence
from typing import Final

import msgspec

from turnstream import subjects
from turnstream.broker.answers import EXPECTED
from turnstream.broker.connection import Broker
from turnstream.broker.pull import Delivery, OrderedPull
from turnstream.log import archive, codec
from turnstream.log.base import Unreadable
from turnstream.log.messages import UNGUARDED
from turnstream.session.events import Recorded
from turnstream.telemetry import get_logger
from turnstream.views.batch import Archived

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
    """The events and the records of runs behind this sequence, and then every one that is stored."""
    return OrderedPull(broker, subjects.SESSIONS, [subjects.RECORD], after, batch=BATCH, linger=linger)


def read(delivery: Delivery) -> Recorded | Archived:
    """The event, or the record of a run, of a message. Raises `Unreadable`, also for one that lies on another session's
    subject."""
    if subjects.is_archive(delivery.subject):
        return _archived(delivery)
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


def _archived(delivery: Delivery) -> Archived:
    key, n = subjects.parse_archive(delivery.subject)
    run, events = archive.decode(delivery.data, delivery.seq)
    others = {recorded.event.key for recorded in events} - {key}
    if run != n or others:
        raise Unreadable(delivery.seq, f"a record of another run lies on {delivery.subject}")
    return Archived(seq=delivery.seq, key=key, run=run, events=events)


def entries_of(deliveries: Sequence[Delivery]) -> list[Recorded | Archived]:
    """What these messages hold. What cannot be read is passed over: one bad message must not stop every view.
    `fsck` names it."""
    entries: list[Recorded | Archived] = []
    for delivery in deliveries:
        try:
            entries.append(read(delivery))
        except Unreadable as error:
            log.error("an event cannot be read and is passed over", seq=delivery.seq, error=str(error))
    return entries
