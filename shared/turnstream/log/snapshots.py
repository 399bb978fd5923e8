"""Snapshots of folds: which one is believed, and when one is written.

Nothing depends on them. Where there is none, or none that can be believed, a session is folded from its first event.

What is written is folded from the log for that purpose, from the snapshot before it on: what a process remembers may
hold its own estimates of the broker's time, which would become everybody's. It is written behind the snapshot that the
writer has seen, and only while the session is there, by the word of who orders appends: so none outlives its session
(`turnstream.wire.snapshots`).
"""

import asyncio
from collections import OrderedDict
from typing import Final, Protocol

from turnstream.ids import SessionKey
from turnstream.log.base import BrokenChain, Log
from turnstream.log.folding import fold_page
from turnstream.session.events import Recorded
from turnstream.session.snapshot import Snapshot, decode, encode
from turnstream.session.state import Session
from turnstream.telemetry import get_logger

EVERY: Final = 100
"""Events between two snapshots. In a session of 50,000, one costs the broker seven milliseconds and its writer five;
without it so many events are read in two and a half (measured 2026-12-01, tests/bench/bench_old.py)."""
SIZE_MAX: Final = 512 * 1024
"""Bytes of a snapshot. A session of 50,000 events needs 280 KiB (tests/core/test_snapshot.py), one of 140,000 this
much; of a longer one none is written."""
WAIT: Final = 1.0
"""Seconds that whoever opens a session waits for its snapshot at most."""
NEVER: Final = 1 << 62
"""Events that no session has."""
KNOWN_MAX: Final = 20_000
"""Sessions of which a process remembers when there was a snapshot."""
DUE_MAX: Final = 1000
"""Sessions that may wait for their snapshot; of others one is written when they have gone on."""

_logger = get_logger()


class Store(Protocol):
    """Where snapshots lie. Neither raises anything, nor takes long to say that there is none."""

    async def get(self, key: SessionKey) -> tuple[bytes, int] | None:
        """The newest snapshot, and its revision: no bytes, and 0, where there is none. None: that cannot be told."""
        ...

    async def put(self, key: SessionKey, data: bytes, revision: int) -> None:
        """Stores one in the place of the one with this revision, if that is the newest."""
        ...


class Snapshotter:
    """One process's hands on the snapshots of a log. One is written at a time, in the background."""

    def __init__(self, log: Log, store: Store) -> None:
        self._log = log
        self._store = store
        self._known: OrderedDict[SessionKey, int] = OrderedDict()
        """How many events the newest snapshot of a session is of, as far as is known."""
        self._due: dict[SessionKey, int] = {}
        self._writer: asyncio.Task[None] | None = None

    async def resume(self, session: Session, at_least: int, *, hold: bool) -> tuple[Session, list[Recorded]] | None:
        """The session as of now, and with `hold` the events behind the snapshot that it went on from. None: there is no
        snapshot that is further on, none that can be believed, or none that comes soon. Raises `LogError`."""
        try:
            async with asyncio.timeout(WAIT):
                held = await self._store.get(session.key)
        except TimeoutError:
            return None
        found = decode(held[0], session.key) if held else None
        if found is None or found.seq <= session.seq:
            return None
        resumed = await _resume(self._log, found, at_least, hold)
        if resumed:
            self._remember(session.key, found.session.events)
        return resumed

    def note(self, session: Session) -> None:
        """Has a snapshot written if the session has gone far beyond the last one."""
        if session.events < EVERY or session.deleted or session.events - self._known.get(session.key, 0) < EVERY:
            return
        if session.key not in self._due and len(self._due) < DUE_MAX:
            self._due[session.key] = session.events
            if self._writer is None or self._writer.done():
                self._writer = asyncio.create_task(self._write_all(), name="snapshots")

    def forget(self) -> None:
        """The log may have lost its end, and with it what the snapshots are of."""
        self._known.clear()

    async def close(self) -> None:
        if self._writer:
            self._writer.cancel()
            await asyncio.wait((self._writer,))

    def _remember(self, key: SessionKey, events: int) -> None:
        self._known[key] = events
        self._known.move_to_end(key)
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    async def _write_all(self) -> None:
        """Whatever becomes of it, none is written again before the session has gone on."""
        while self._due:
            key, events = next(iter(self._due.items()))
            try:
                events = await self._write(key, events)
            except Exception as error:
                _logger.warning("no snapshot is made", account=key.account, session=key.session, error=error)
            finally:
                self._remember(key, events)
                del self._due[key]

    async def _write(self, key: SessionKey, events: int) -> int:
        """Writes the snapshot of a session that has so many events, unless somebody else has; of how many there is one
        now."""
        held = await self._store.get(key)
        if held is None:
            return events
        data, revision = held
        found, last = decode(data, key), await self._log.last(key)
        resumed = await _resume(self._log, found, last, hold=True) if found else None
        if found and resumed and events - found.session.events < EVERY:
            return found.session.events
        session, read = resumed or await self._whole(key, last)
        if not read or session.deleted:
            return events
        data = encode(session, read[-1])
        if len(data) > SIZE_MAX:
            return NEVER
        await self._store.put(key, data, revision)
        return session.events

    async def _whole(self, key: SessionKey, at_least: int) -> tuple[Session, list[Recorded]]:
        """The session from its first event on, and its newest ones."""
        session, page = Session(key=key), list[Recorded]()
        async for page in self._log.read(key, at_least=at_least):
            session = await fold_page(session, page)
        return session, page


async def _resume(log: Log, found: Snapshot, at_least: int, hold: bool) -> tuple[Session, list[Recorded]] | None:
    """Reads from the event that the snapshot ends with. None: the log has another one there, or none."""
    session: Session | None = None
    read: list[Recorded] = []
    try:
        async for page in log.read(found.session.key, found.previous, at_least=at_least):
            if session is None and not found.is_of(page[0]):
                return None
            session = await fold_page(session or found.session, page)
            read += page if hold else ()
    except BrokenChain:
        if session is None:
            return None
        raise
    return (session, read) if session else None
