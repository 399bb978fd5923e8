"""What a runner does to few sessions at once, because it takes long and keeps everybody else waiting a little."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

AT_ONCE: Final = 1
"""Sessions that one process does it to at once."""
HELD: Final = 16
"""Sessions that may wait for their turn at most, each of them in a slot that a run could have: a quarter of those."""


class Few:
    """`slots`: how many sessions the process drives at once, for whatever."""

    def __init__(self, slots: int) -> None:
        self._room = max(1, min(HELD, slots // 4))
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._held = 0

    @property
    def full(self) -> bool:
        """Whether another session had better come again in a moment."""
        return self._held >= self._room

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None]:
        """Waits for a turn, and has it."""
        self._held += 1
        try:
            async with self._turn:
                yield
        finally:
            self._held -= 1
