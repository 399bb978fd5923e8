"""The broker's time, told without asking for it: no host's clock decides anything.

Two kinds of observation, both in milliseconds since the epoch. A message's time stamp is a lower bound, for the message
may have been stored long ago. A time stamp in the answer to a request was just written, so it sets the clock either way.
In between the host's monotonic clock goes on. The clock never runs backwards.
"""

from collections.abc import Callable
from datetime import datetime

_EPOCH_OFFSET = "+00:00"


class BrokerClock:
    def __init__(self, monotonic: Callable[[], float]) -> None:
        """`monotonic`: seconds from any origin, never set back."""
        self._monotonic = monotonic
        self._offset: float | None = None
        self._floor = 0

    @property
    def seeded(self) -> bool:
        """Whether any time stamp was seen."""
        return self._offset is not None

    def observe(self, millis: int) -> None:
        """A message's time stamp was seen: it is at least this late."""
        offset = millis - self._monotonic() * 1000
        if self._offset is None or offset > self._offset:
            self._offset = offset
        if millis > self._floor:
            self._floor = millis

    def anchor(self, millis: int) -> None:
        """The broker has just said what time it is."""
        self._offset = millis - self._monotonic() * 1000

    def now(self) -> int:
        """Milliseconds since the epoch. Raises `RuntimeError` before the first observation."""
        if self._offset is None:
            raise RuntimeError("the broker's time is not known yet")
        now = int(self._offset + self._monotonic() * 1000)
        if now > self._floor:
            self._floor = now
        return self._floor


def parse_time(text: str) -> int:
    """Milliseconds of an RFC 3339 time stamp as the server prints it (UTC or with an offset, up to nanoseconds)."""
    seconds, dot, rest = text.partition(".")
    if not dot:
        return int(datetime.fromisoformat(text.replace("Z", _EPOCH_OFFSET)).timestamp()) * 1000
    digits = len(rest) - len(rest.lstrip("0123456789"))
    zone = rest[digits:].replace("Z", _EPOCH_OFFSET)
    return int(datetime.fromisoformat(seconds + zone).timestamp()) * 1000 + int(rest[:digits].ljust(3, "0")[:3])
