"""Stored events as NATS messages: what their headers say, and how they come by themselves once they are stored.

A direct get and the republished feed give the same headers: the event's number, its time, and the sequence that its
writer expected before it, which is the link to the event before.
"""

import contextlib
from collections.abc import Callable
from typing import Final

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error

from turnstream.broker.answers import EXPECTED
from turnstream.broker.clock import parse_time
from turnstream.broker.connection import Broker
from turnstream.log import codec
from turnstream.log.base import Listener, LogError, Unreadable
from turnstream.session.events import Recorded

SEQ: Final = "Nats-Sequence"
TIME: Final = "Nats-Time-Stamp"
UNGUARDED: Final = -1
"""Stands for the link of a message that has none: it follows nothing."""


def recorded_of(message: Msg) -> Recorded:
    """The event of a message that the server gave as stored. Raises `Unreadable`."""
    headers = message.headers or {}
    try:
        seq, time = int(headers[SEQ]), parse_time(headers[TIME])
        previous = int(headers.get(EXPECTED, UNGUARDED))
    except (KeyError, ValueError) as error:
        raise Unreadable(0, f"{message.subject}: {error!r} in {headers}") from error
    return codec.decode(message.data, seq=seq, previous=previous, time=time)


class Republished:
    """The subscription of a session's feed subject, on which the stream republishes what it has stored."""

    def __init__(self, broker: Broker, subject: str, on_event: Listener, on_lost: Callable[[], None]) -> None:
        self._broker = broker
        self._subject = subject
        self._on_event = on_event
        self._on_lost = on_lost
        self._subscription: Subscription | None = None
        self._ignore = (broker.on_reconnect(on_lost), broker.on_slow(self._on_slow))

    async def open(self) -> None:
        try:
            self._subscription = await self._broker.subscribe(self._subject, self._take)
        except Error as error:
            await self.close()
            raise LogError(f"{self._subject}: {error}") from error

    async def close(self) -> None:
        for ignore in self._ignore:
            ignore()
        if self._subscription is not None and not self._broker.nc.is_closed:
            subscription, self._subscription = self._subscription, None
            with contextlib.suppress(Error):  # a connection that is just being closed
                await subscription.unsubscribe()

    async def _take(self, message: Msg) -> None:
        try:
            recorded = recorded_of(message)
        except LogError:  # whoever reads it from the log is told
            self._on_lost()
        else:
            self._broker.clock.observe(recorded.time)
            self._on_event(recorded)

    def _on_slow(self, subject: str) -> None:
        if subject == self._subject:
            self._on_lost()
