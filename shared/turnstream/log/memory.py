"""The log in a list: for tests and examples. It keeps the same bytes that the broker would, so nothing is hidden by it.

Not durable, not shared between processes; listeners are called back before `append` returns.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import AsyncIterator, Callable

from turnstream.ids import SessionKey
from turnstream.log import codec
from turnstream.log.base import PAGE, Conflict, Listener, LogError, Unavailable
from turnstream.session.decision import Decision
from turnstream.session.events import Recorded, SessionDeleted, SessionErased


class MemorySubscription:
    def __init__(self, listeners: dict[object, Listener], on_event: Listener) -> None:
        self._listeners = listeners
        listeners[self] = on_event

    async def close(self) -> None:
        self._listeners.pop(self, None)


class MemoryLog:
    """`now` gives the time, in milliseconds, that stands in for the broker's."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._last = 0
        self._events: dict[SessionKey, list[Recorded]] = defaultdict(list)
        self._seqs: dict[tuple[SessionKey, str], int] = {}
        self._archives: dict[SessionKey, dict[int, bytes]] = defaultdict(dict)
        self._listeners: dict[SessionKey, dict[object, Listener]] = defaultdict(dict)

    async def append(self, key: SessionKey, decision: Decision, expected: int) -> int:
        event = decision.event
        if (seq := self._seqs.get((key, event.id))) is not None:
            return seq
        events = self._events[key]
        last = events[-1].seq if events else 0
        if last != expected:
            raise Conflict(key, expected, last)
        self._last += 1
        recorded = codec.decode(codec.encode(event), seq=self._last, previous=last, time=self._now())
        if isinstance(event.data, SessionErased):
            self._remove(key, len(events))
        events.append(recorded)
        self._seqs[key, event.id] = recorded.seq
        for on_event in tuple(self._listeners[key].values()):
            on_event(recorded)
        return recorded.seq

    async def read(
        self, key: SessionKey, after: int = 0, *, at_least: int = 0, page: int = PAGE
    ) -> AsyncIterator[list[Recorded]]:
        events = self._events.get(key, [])
        if at_least > max(after, events[-1].seq if events else 0):
            raise Unavailable(f"{key}: no event {at_least}")
        behind = events[bisect_right(events, after, key=lambda recorded: recorded.seq) :]
        for start in range(0, len(behind), page):
            yield behind[start : start + page]

    async def at(self, key: SessionKey, seq: int) -> Recorded | None:
        return next((recorded for recorded in self._events.get(key, []) if recorded.seq == seq), None)

    async def last(self, key: SessionKey) -> int:
        events = self._events.get(key)
        return events[-1].seq if events else 0

    async def subscribe(self, key: SessionKey, on_event: Listener, on_lost: Callable[[], None]) -> MemorySubscription:
        """Loses nothing, so `on_lost` is never called."""
        return MemorySubscription(self._listeners[key], on_event)

    async def overwrite(self, key: SessionKey) -> None:
        events = self._events[key]
        if not events or not isinstance(events[-1].event.data, SessionDeleted | SessionErased):
            raise LogError(f"{key}: is not deleted, nothing of it is removed")
        self._remove(key, len(events) - 1)

    async def archive(self, key: SessionKey, run: int, record: bytes) -> None:
        self._archives[key].setdefault(run, record)

    async def archives(self, key: SessionKey) -> AsyncIterator[tuple[int, bytes]]:
        for entry in tuple(self._archives[key].items()):
            yield entry

    def _remove(self, key: SessionKey, count: int) -> None:
        for recorded in self._events[key][:count]:
            del self._seqs[key, recorded.event.id]
        del self._events[key][:count]
