"""What a process knows of sessions between two looks at them: bounded, and true until the log says otherwise.

Services of one process share it: what one of them has stored the others need not read, and they write to a session one
after the other instead of refusing each other.
"""

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from turnstream.ids import SessionKey
from turnstream.session.events import Recorded
from turnstream.session.state import Session

CAPACITY: Final = 20_000
"""Folds that are kept."""
KEEP_BYTES: Final = 64 * 1024 * 1024
"""Bytes of events that a service keeps beside them, so that a session's next turn, and a second look at its history,
read only what is new."""


class Known:
    """`capacity`: how many folds are kept. `keep_bytes`: how many bytes of events are kept beside them. Of both, what
    was used longest ago goes first."""

    def __init__(self, *, capacity: int = CAPACITY, keep_bytes: int = 0) -> None:
        self.folds = Folds(capacity)
        self.kept = Kept(keep_bytes)
        self._writers: dict[SessionKey, _Writers] = {}

    @asynccontextmanager
    async def writing(self, key: SessionKey) -> AsyncGenerator[None]:
        """One append of a session is in flight, the others wait in line."""
        writers = self._writers.get(key)
        if writers is None:
            writers = self._writers[key] = _Writers()
        writers.count += 1
        try:
            async with writers.lock:
                yield
        finally:
            writers.count -= 1
            if not writers.count:
                del self._writers[key]

    def clear(self) -> None:
        self.folds.clear()
        self.kept.clear()


class _Writers:
    """Who writes to one session in this process: one append in flight, the others wait in line."""

    __slots__ = ("count", "lock")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.count = 0


class Folds:
    """The newest fold known of each session, up to a number of sessions."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()

    def get(self, key: SessionKey) -> Session | None:
        session = self._sessions.get(key)
        if session is not None:
            self._sessions.move_to_end(key)
        return session

    def keep(self, session: Session) -> Session:
        """Answers with the newest fold known, which may be one that another task has read meanwhile."""
        known = self.get(session.key)
        if known is not None and known.seq >= session.seq:
            return known
        if session.seq:
            self._sessions[session.key] = session
            if len(self._sessions) > self._capacity:
                self._sessions.popitem(last=False)
        return session

    def drop(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)

    def clear(self) -> None:
        self._sessions.clear()


class Kept:
    """The newest events of some sessions, without a gap, up to a number of payload bytes."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._size = 0
        self._events: OrderedDict[SessionKey, list[Recorded]] = OrderedDict()
        self._sizes: dict[SessionKey, int] = {}

    def get(self, key: SessionKey) -> list[Recorded]:
        """The caller's own copy."""
        events = self._events.get(key)
        if events is None:
            return []
        self._events.move_to_end(key)
        return events.copy()

    def keep(self, key: SessionKey, events: list[Recorded]) -> None:
        """In the place of what was kept of the session."""
        self.drop(key)
        if events and self._budget:
            self._events[key] = events.copy()
            self._grow(key, sum([recorded.size for recorded in events]))

    def extend(self, key: SessionKey, read: list[Recorded]) -> None:
        """If anything is kept of the session, with these too. What they do not follow is kept no longer."""
        events = self._events.get(key)
        if events and read and read[-1].seq > events[-1].seq:
            new = read[bisect_right(read, events[-1].seq, key=seq_of) :]
            if new[0].previous != events[-1].seq:
                self.drop(key)
                return
            events += new
            self._grow(key, sum([recorded.size for recorded in new]))

    def add(self, key: SessionKey, recorded: Recorded) -> None:
        events = self._events.get(key)
        if events is None:
            if recorded.previous or not self._budget:
                return
            events = self._events[key] = []
        elif events[-1].seq != recorded.previous:
            return
        events.append(recorded)
        self._grow(key, recorded.size)

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._events

    def drop(self, key: SessionKey) -> None:
        if self._events.pop(key, None) is not None:
            self._size -= self._sizes.pop(key)

    def clear(self) -> None:
        self._events.clear()
        self._sizes.clear()
        self._size = 0

    def _grow(self, key: SessionKey, size: int) -> None:
        self._sizes[key] = self._sizes.get(key, 0) + size
        self._size += size
        self._events.move_to_end(key)
        while self._size > self._budget:
            self.drop(next(iter(self._events)))


def seq_of(recorded: Recorded) -> int:
    return recorded.seq


def reach(events: Sequence[Recorded], since: int) -> bool:
    """Whether they begin with the event of this sequence or before it; 0: with the session's first."""
    return bool(events) and (events[0].seq <= since or not events[0].previous)
