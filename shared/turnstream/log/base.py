"""The log of a session: append, read, listen. What every implementation promises, and how it fails.

    LogError
     ├─ Conflict      the session has moved: fold the tail and decide again
     ├─ BrokenChain   an event does not follow the one before it
     ├─ Unreadable    an event's bytes are not what this release can read
     └─ Unavailable   the broker did not answer in time; whether an append was stored is not known

The contract suite in `tests/contracts/` runs against every implementation.
"""

from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol

from turnstream.ids import SessionKey
from turnstream.session.decision import Decision
from turnstream.session.events import Recorded

PAGE: Final = 256
"""Events in one page of a read, and so the longest that decoding holds the event loop: about a millisecond."""


class LogError(Exception):
    """The log could not do what was asked."""


class Conflict(LogError):
    """The session has moved past `expected`; `last` is its last sequence where the broker says so."""

    def __init__(self, key: SessionKey, expected: int, last: int | None = None) -> None:
        super().__init__(f"{key}: expected sequence {expected}, found {last if last is not None else 'another'}")
        self.key = key
        self.expected = expected
        self.last = last


class BrokenChain(LogError):
    """The event at `seq` names `previous` as the one before it, but the one before it is `found`."""

    def __init__(self, key: SessionKey, seq: int, previous: int, found: int) -> None:
        super().__init__(f"{key}: event {seq} follows {previous}, but the event before it is {found}")
        self.key = key
        self.seq = seq
        self.previous = previous
        self.found = found


class Unreadable(LogError):
    """The event at `seq` is not a record that this release can read: not ours, damaged, or of a newer release."""

    def __init__(self, seq: int, why: str) -> None:
        super().__init__(f"event {seq} cannot be read: {why}")
        self.seq = seq
        self.why = why


class Unavailable(LogError):
    """The broker did not answer in time. Asking again with the same command id has at most one effect."""


Listener = Callable[[Recorded], None]


class Subscription(Protocol):
    """Hints that a session has new events. It may lose some: whoever listens reads what is missing (`feed.py`)."""

    async def close(self) -> None: ...


class Log(Protocol):
    """A log that holds `session.deleted` as its last event may begin anywhere and have holes, for what came before is
    being removed; `session.erased` stands alone. Any other log is read whole or not at all."""

    async def append(self, key: SessionKey, decision: Decision, expected: int) -> int:
        """Stores the event behind sequence `expected` (0: it is the session's first) and answers with its sequence.

        `session.erased` takes the place of everything before it, in the same write, and begins the chain anew: it
        follows whatever a reader has seen. Storing the same event again answers with the sequence that it has. Raises
        `Conflict` if another event is there, `Unavailable` if the broker did not say in time.
        """
        ...

    def read(
        self, key: SessionKey, after: int = 0, *, at_least: int = 0, page: int = PAGE
    ) -> AsyncIterator[list[Recorded]]:
        """The events after this sequence, oldest first, in pages of at most `page`, up to the last one there is now.

        `after` is the sequence of an event of this session, or 0. `at_least`: a sequence known to be stored; a
        replica that lags is asked again until it has it. Of a deleted session whose events are being removed it is
        the last one alone. Raises `BrokenChain`, `Unreadable`, `Unavailable`.
        """
        ...

    async def at(self, key: SessionKey, seq: int) -> Recorded | None:
        """The event of this sequence, None if the session has none there, by the word of who orders appends. Raises
        `Unreadable`, `Unavailable`."""
        ...

    async def last(self, key: SessionKey) -> int:
        """Sequence of the session's last event, 0 if there is none, by the word of who orders appends: unlike a read it
        never lags. Raises `Unavailable`."""
        ...

    async def subscribe(self, key: SessionKey, on_event: Listener, on_lost: Callable[[], None]) -> Subscription:
        """Calls back for each event stored from now on, in order. Some may be lost: `on_lost` is called where that is
        noticed (a reconnect, a slow listener), but not every loss is. Whatever is stored after this returns is called
        back, lost, or found by a read that begins after it. Raises `Unavailable`."""
        ...

    async def overwrite(self, key: SessionKey) -> None:
        """Removes every event before the session's last, which has to be `session.deleted`, and leaves nothing of their
        bytes. May be done again after it failed anywhere, or was done by another. Raises `Unavailable`, and `LogError`
        for any other log."""
        ...

    async def archive(self, key: SessionKey, run: int, record: bytes) -> None:
        """Keeps a record of a run beside the log, for good: of several of one run the first. Raises `Unavailable`."""
        ...

    def archives(self, key: SessionKey) -> AsyncIterator[tuple[int, bytes]]:
        """The runs of which records are kept, and these. Raises `Unavailable`."""
        ...
