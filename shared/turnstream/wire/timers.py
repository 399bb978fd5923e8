"""Timers: a wake-up that is to come at a time, kept by the broker as a schedule in `WORK`.

A timer is a copy of what an event's `ts-due` header says; losing one, or getting it late or twice, is harmless (the
sweep looks after runs that are overdue). It wakes, it decides nothing: what is due is told by the fold.
"""

from turnstream import subjects
from turnstream.broker.clock import format_time
from turnstream.broker.connection import Broker
from turnstream.broker.erasing import forget
from turnstream.ids import SessionKey
from turnstream.session.events import Due


def parse_dues(header: str) -> list[Due]:
    """The dues of a `ts-due` header. Raises `ValueError`."""
    dues: list[Due] = []
    for text in header.split(";"):
        after, queue, what = text.split()
        dues.append(Due(int(after), queue, what))
    return dues


class Timers:
    """The schedules in `WORK`."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def put(self, key: SessionKey, *, seq: int, at_ms: int, queue: str, what: str) -> None:
        """Wakes `queue` for this session at this broker time, in milliseconds, because of event `seq`.

        `what` names it within the session: putting it again replaces it. One that is overdue goes off at once.
        Returns when the timer is stored. Raises `BrokerFault`.
        """
        headers = {
            "Nats-Schedule": f"@at {format_time(at_ms)}",
            "Nats-Schedule-Target": subjects.work(queue, key),
            subjects.CAUSE: str(seq),
        }
        await self._broker.store(subjects.timer(key, what), b"", headers)

    async def drop(self, key: SessionKey, what: str) -> None:
        """Takes the timer back, if it is still there; `*`: all of the session. Raises `BrokerFault`."""
        await forget(self._broker, subjects.WORK, subjects.timer(key, what))
