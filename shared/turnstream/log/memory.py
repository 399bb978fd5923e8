"""The log in a list: for tests and examples. It keeps the same bytes that the broker would, so nothing is hidden by it.

Not durable, not shared between processes; listeners are called back before `append` returns.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import AsyncIterator, Callable

from turnstream.ids import SessionKey
from turnstream.log import codec
from turnstream.log.base import PAGE, Conflict, Listener, Unavailable
from turnstream.session.decide import Decision
from turnstream.session.events import Recorded


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
        first, end = bisect_right(events, after, key=lambda recorded: recorded.seq), len(events)
        for start in range(first, end, page):
            yield events[start : min(start + page, end)]

    async def last(self, key: SessionKey) -> int:
        events = self._events.get(key)
        return events[-1].seq if events else 0

    async def subscribe(self, key: SessionKey, on_event: Listener, on_lost: Callable[[], None]) -> MemorySubscription:
        """Loses nothing, so `on_lost` is never called."""
        return MemorySubscription(self._listeners[key], on_event)
