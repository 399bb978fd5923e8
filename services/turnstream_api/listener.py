"""Somebody who watches a session: what waits for it, and how much may.

Its writer takes bytes as fast as its peer reads; its channel gives them. One that holds more than its budget loses what
it holds and ends with `overflow`.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Literal

from turnstream_api.frames import Filter

PIECE = 64 * 1024
"""Bytes that are taken at once, unless one frame is larger."""

Ending = Literal["overflow", "ended", "deleted", "bye", "gone", "unauthorized"]
"""`ended`: its run has; `deleted`: its session is; `bye`: the server shuts down or cannot follow the log; `gone`: its
peer went away."""


class Listener:
    """`budget`: bytes that may wait for it. `owner`: id of the API key it came with. `on_overflow` is called when it is
    too slow."""

    __slots__ = (
        "_ending",
        "_on_overflow",
        "_pieces",
        "_size",
        "_waiter",
        "account",
        "ahead",
        "budget",
        "filter",
        "owner",
        "quiet",
        "sent",
    )

    def __init__(
        self, filter: Filter, *, budget: int, account: str, owner: str, on_overflow: Callable[[], None]
    ) -> None:
        self.filter = filter
        self.budget = budget
        self.account = account
        self.owner = owner
        self.sent = 0
        """The last sequence that was taken."""
        self.ahead = 0
        """Up to here it has read by itself."""
        self.quiet = True
        """Nothing was given since somebody looked."""
        self._pieces: deque[tuple[bytes, int]] = deque()
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._ending: Ending | None = None
        self._on_overflow = on_overflow

    @property
    def ending(self) -> Ending | None:
        return self._ending

    def give(self, data: bytes, seq: int) -> None:
        """Puts bytes in its line; `seq` is the last event among them, 0 if there is none."""
        if self._ending:
            return
        self.quiet = False
        if self._size and self._size + len(data) > self.budget:
            self._pieces.clear()
            self._size = 0
            self._on_overflow()
            self.end("overflow")
            return
        self._pieces.append((data, seq))
        self._size += len(data)
        self._wake()

    def end(self, ending: Ending) -> None:
        """Nothing more comes; what waits is still taken."""
        if self._ending is None:
            self._ending = ending
            self._wake()

    def over(self) -> None:
        """Nothing that it wants can follow."""
        self.end("ended" if self.filter.run else "deleted")

    async def take(self) -> bytes | None:
        """What waits, in one piece; None when nothing does and nothing more comes (see `ending`)."""
        while not self._pieces:
            if self._ending:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._ending == "gone":
            return None
        taken: list[bytes] = []
        size = 0
        while self._pieces and (not taken or size + len(self._pieces[0][0]) <= PIECE):
            data, seq = self._pieces.popleft()
            self.sent = seq or self.sent
            taken.append(data)
            size += len(data)
        self._size -= size
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)
