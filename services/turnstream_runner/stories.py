"""What the events of each session tell, told on from call to call: a call costs what is new, not what the session is
long. Bounded; what is not there any more is told from the beginning.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Final

from turnstream.ids import SessionKey
from turnstream.session.events import Recorded
from turnstream.session.policy import Policy
from turnstream.session.state import Session
from turnstream.session.story import Story

BUDGET: Final = 64 * 1024 * 1024
"""Bytes of events that are told. Most of them are at hand anyway, beside the folds."""


class _Told:
    """A story, how it is told, since which sequence, and up to which event."""

    def __init__(self, session: Session, policy: Policy, since: int) -> None:
        self.story = Story(policy, session.several_since)
        self.size = 0
        self._how = _how(session, policy)
        self._since = since
        self._last: Recorded | None = None

    def goes_on(self, session: Session, events: Sequence[Recorded], policy: Policy, since: int) -> int | None:
        """Where in these events what is new begins; None: they are not what was told, and more. An event names the one
        before it and has an id that no other has, so the last one stands for all."""
        last = self._last
        if last is None or self._since > since or self._how != _how(session, policy):
            return None
        place = bisect_left(events, last.seq, key=_seq)
        return place + 1 if place < len(events) and events[place].event.id == last.event.id else None

    def hear(self, events: Sequence[Recorded], begin: int) -> int:
        """How many bytes were new."""
        before = self.size
        for recorded in islice(events, begin, None):
            self.story.hear(recorded)
            self.size += recorded.size
            self._last = recorded
        return self.size - before


class Stories:
    """`budget`: bytes of events; what was told longest ago goes first."""

    def __init__(self, budget: int = BUDGET) -> None:
        self._budget = budget
        self._size = 0
        self._told: OrderedDict[SessionKey, _Told] = OrderedDict()

    def tell(self, session: Session, events: Sequence[Recorded], policy: Policy, since: int) -> Story:
        """What the events of a session tell, from the one with sequence `since` on, or from an earlier one."""
        key = session.key
        told = self._told.get(key)
        begin = told.goes_on(session, events, policy, since) if told else None
        if told is None or begin is None:
            self._drop(key)
            told = self._told[key] = _Told(session, policy, since)
            begin = bisect_left(events, since, key=_seq)
        self._told.move_to_end(key)
        self._size += told.hear(events, begin)
        while self._size > self._budget:
            self._drop(next(iter(self._told)))
        return told.story

    def _drop(self, key: SessionKey) -> None:
        if told := self._told.pop(key, None):
            self._size -= told.size


def _how(session: Session, policy: Policy) -> tuple[object, ...]:
    return policy.history_turns, policy.authors, session.several_since


def _seq(recorded: Recorded) -> int:
    return recorded.seq
