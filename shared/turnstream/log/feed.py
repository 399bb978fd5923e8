"""One session's events, live: all of them after a sequence, each once, in order, for as long as somebody listens.

A deleted session's feed ends: it delivers what is still there and `session.deleted`, or, where everything has been
removed, `session.erased` alone, and then nothing more.

The one algorithm, for the API, the runner's watcher and the client: subscribe, read from N, drop what was read, fill
gaps; read the tail again after a second (in a cluster a subscription takes a moment to reach every server), after every
reconnect or loss, and every 15 s while idle: the last event of a session has no successor that would show it missing.

What a subscription says is only ever a hint where to look. An event is delivered if it follows the last one delivered;
where it does not, the log is read. So nothing is delivered that is not stored.

Not here: how one feed is shared by many listeners, and what a listener that is too slow is told.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Final, Self

import msgspec

from turnstream.ids import SessionKey
from turnstream.log.base import Log, Subscription, Unavailable
from turnstream.session.events import Recorded, SessionDeleted, SessionErased

HEARD_MAX: Final = 1024
"""Events heard and not yet taken; more than these are left to a read."""
AGAIN: Final = 0.5
"""Seconds before a read that the broker did not answer is tried again."""


class CaughtUp(msgspec.Struct, frozen=True):
    """The feed has delivered all there was when it was opened: `seq` is the last one, and what follows is live."""

    seq: int


class Feed:
    """`after`: the sequence of an event of the session, or 0 for all. `idle` and `settle` are seconds.

    Iterating gives events, and `CaughtUp` once, unless the session's deletion ends it before. It raises `Unavailable`
    only until then; later the feed goes on trying. Any other `LogError` ends it. For one reader; `close` may come from
    anywhere and ends the iteration.
    """

    def __init__(self, log: Log, key: SessionKey, *, after: int, idle: float = 15.0, settle: float = 1.0) -> None:
        self._log = log
        self._key = key
        self._last = after
        self._idle = idle
        self._settle = settle
        self._settled = False
        self._loop = asyncio.get_running_loop()
        self._heard: deque[Recorded] = deque()
        self._ready: deque[Recorded | CaughtUp] = deque()
        self._pages: AsyncIterator[list[Recorded]] | None = None
        self._must_read = True
        self._known = 0
        """A sequence that was heard of and not delivered: a read goes at least as far."""
        self._caught_up = False
        self._over = False
        """The session is deleted: what is ready is the last."""
        self._closed = False
        self._subscription: Subscription | None = None
        self._wake = asyncio.Event()
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Recorded | CaughtUp:
        while not self._closed:
            if self._ready:
                return self._ready.popleft()
            if self._over:
                break
            await self._advance()
        await self.close()
        raise StopAsyncIteration

    async def close(self) -> None:
        self._closed = True
        self._wake.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            await subscription.close()

    async def _advance(self) -> None:
        if self._timer is None:
            await self._listen()
        elif self._must_read or self._pages is not None:
            await self._read_page()
        elif self._heard:
            self._follow()
        else:
            self._wake.clear()
            await self._wake.wait()

    async def _listen(self) -> None:
        self._timer = self._loop.call_later(self._settle, self._tick)
        subscription = await self._log.subscribe(self._key, self._hear, self._lose)
        if self._closed:
            await subscription.close()
        else:
            self._subscription = subscription

    async def _read_page(self) -> None:
        if self._pages is None:
            self._must_read = False  # from here on: what is lost while reading has to be read again
            self._pages = self._log.read(self._key, self._last, at_least=self._known)
        try:
            page = await anext(self._pages, None)
        except Unavailable:
            self._pages = None
            if not self._caught_up:
                raise
            self._loop.call_later(AGAIN, self._lose)
            return
        if page is not None:
            for recorded in page:
                self._deliver(recorded)
            return
        self._pages = None
        if not self._caught_up:
            self._caught_up = True
            self._ready.append(CaughtUp(self._last))

    def _follow(self) -> None:
        """Delivers what was heard as far as it follows what was delivered."""
        while self._heard:
            recorded = self._heard.popleft()
            if recorded.seq <= self._last:
                continue
            if recorded.previous != self._last:
                self._known = recorded.seq
                self._must_read = True
                return
            self._deliver(recorded)
        if self._settled:
            self._due = self._loop.time() + self._idle

    def _deliver(self, recorded: Recorded) -> None:
        if not self._over:
            self._ready.append(recorded)
            self._last = recorded.seq
            self._over = isinstance(recorded.event.data, SessionDeleted | SessionErased)

    def _hear(self, recorded: Recorded) -> None:
        if len(self._heard) >= HEARD_MAX:
            self._heard.clear()
            self._known = recorded.seq
            self._must_read = True
        else:
            self._heard.append(recorded)
        self._wake.set()

    def _lose(self) -> None:
        self._must_read = True
        self._wake.set()

    def _tick(self) -> None:
        """Looks at the log once after `settle`, then whenever nothing came for `idle` seconds."""
        now = self._loop.time()
        self._settled = True
        if now >= self._due:
            self._due = now + self._idle
            self._lose()
        self._timer = self._loop.call_at(self._due, self._tick)
