"""Who may be in a room: any number together, or one alone."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Gate:
    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._inside = 0
        self._is_taken = False
        self._users = 0

    @property
    def is_idle(self) -> bool:
        """Nobody is inside or waits."""
        return not self._users

    @asynccontextmanager
    async def entered(self, *, alone: bool) -> AsyncGenerator[None, None]:
        self._users += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._is_taken and not (alone and self._inside))
                self._inside += 1
                self._is_taken = alone
            try:
                yield
            finally:
                self._inside -= 1
                self._is_taken = False
                async with self._changed:
                    self._changed.notify_all()
        finally:
            self._users -= 1
