"""When something in flight has taken long enough to be minded. Until then nothing is done about it: most calls are over
in a moment."""

import asyncio
from collections.abc import Callable
from typing import Final

PATIENCE: Final = 0.025
"""Seconds that something may be in flight."""
LATE: Final = 0.005
"""Seconds by which the loop is late when it is busy: what is in flight then has not had its chance to end."""
INDULGENCE: Final = 10
"""How often a busy loop prolongs the patience."""


class Patience:
    """Calls `lost` when it is over. It begins anew after that."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Does nothing where it has begun already."""
        if self._timer is None:
            self._wait(INDULGENCE)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, left: int) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE
        self._timer = loop.call_at(until, self._over, until, left)

    def _over(self, until: float, left: int) -> None:
        self._timer = None
        if left and asyncio.get_running_loop().time() > until + LATE:
            self._wait(left - 1)
        else:
            self._lost()
