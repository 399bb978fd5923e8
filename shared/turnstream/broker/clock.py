"""The broker's time, told without asking for it: no host's clock decides anything.

Two kinds of observation, both in milliseconds since the epoch. A message's time stamp is a lower bound, for it may have
been stored long ago. A time stamp in a prompt answer was just written, so it sets the clock either way. In between the
host's monotonic clock goes on. The clock never runs backwards.
"""

from collections.abc import Callable
from datetime import datetime

_PROMPT = 0.1
"""Seconds within which an answer has to come to set the clock back."""


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

    def anchor(self, millis: int, asked: float) -> None:
        """The broker said what time it is, in the answer to a question of `asked` (monotonic seconds).

        A slow answer says no more than a message does.
        """
        now = self._monotonic()
        if now - asked > _PROMPT:
            self.observe(millis)
        else:
            self._offset = millis - now * 1000

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
        return int(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()) * 1000
    digits = len(rest) - len(rest.lstrip("0123456789"))
    zone = rest[digits:].replace("Z", "+00:00")
    return int(datetime.fromisoformat(seconds + zone).timestamp()) * 1000 + int(rest[:digits].ljust(3, "0")[:3])
