"""The broker's time, told without asking for it: no host's clock decides anything.

Two kinds of observation, both in milliseconds since the epoch. A message's time stamp is a lower bound, for it may have
been stored long ago. A time stamp in a prompt answer was just written, so it sets the clock either way. In between the
host's monotonic clock goes on. The clock never runs backwards. Here is also how times are written.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PROMPT: Final = 0.1
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


def format_time(millis: int) -> str:
    """RFC 3339 in UTC with milliseconds."""
    seconds, rest = divmod(millis, 1000)
    return f"{_format_second(seconds)}.{rest:03d}Z"


def parse_time(text: str) -> int:
    """Milliseconds since the epoch of an RFC 3339 time, any finer part cut off. Raises `ValueError`."""
    if text[-1:] == "Z" and text[19:20] in (".", "Z"):
        return _parse_second(text[:19]) + int(text[20:-1][:3].ljust(3, "0"))
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text}: no time zone")
    return (moment - _EPOCH) // timedelta(milliseconds=1)


@lru_cache(maxsize=256)
def _format_second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


@lru_cache(maxsize=256)
def _parse_second(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1000
