"""From a command to a stored event: load, decide, append; on a conflict fold the tail and decide again.

What is `Known` of a session is never trusted blindly: a decision made on it is stored only if the log agrees (the
guard), and a refusal is only believed on a fold that is known to be the newest. So two processes need nothing of each
other, and forgetting a session costs time, never correctness.

Not here: what may be stored (`turnstream.session.decide`), and who listens (`feed.py`).
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable

import msgspec

from turnstream.ids import SessionKey
from turnstream.log import codec
from turnstream.log.base import BrokenChain, Conflict, Log, Unavailable
from turnstream.log.folding import fold_page
from turnstream.log.known import Known, reach, seq_of
from turnstream.log.snapshots import EVERY, Snapshotter
from turnstream.session.commands import Command
from turnstream.session.decide import decide
from turnstream.session.decision import Decision
from turnstream.session.errors import Rejected
from turnstream.session.events import Recorded, SessionDeleted, SessionErased
from turnstream.session.fold import evolve
from turnstream.session.state import Session

ATTEMPTS = 100
"""How often one command is decided. Each conflict is another writer's success, so nobody comes near by honest means."""
PAUSE = 0.05
"""Seconds before a session is read again of which the log knows less than was folded."""


class Handled(msgspec.Struct, frozen=True):
    """The session after a command, and the event that the command stored; None where the session said so already."""

    session: Session
    recorded: Recorded | None


class Sessions:
    """`known`: what is kept of sessions between two looks; several `Sessions` of one process may share it. `now`: the
    broker's time in milliseconds; dates an event that was just appended. `on_append` is told the seconds from the
    command to the stored event. `snapshots`: without them a session that is not known is read from its first event."""

    def __init__(
        self,
        log: Log,
        *,
        now: Callable[[], int],
        known: Known | None = None,
        snapshots: Snapshotter | None = None,
        on_append: Callable[[float], None] | None = None,
        on_conflict: Callable[[], None] | None = None,
    ) -> None:
        self.log = log
        self._now = now
        self._on_append = on_append
        self._on_conflict = on_conflict
        self._known = known or Known()
        self._folds = self._known.folds
        self._kept = self._known.kept
        self._snapshots = snapshots

    async def load(self, key: SessionKey, at_least: int = 0) -> Session:
        """The session as of this read: what was folded before, and the tail. `at_least` is a sequence known to be
        stored. A session that does not exist has `seq` 0. Raises `LogError`."""
        return (await self._load(key, at_least, hold=False))[0]

    async def latest(self, key: SessionKey, at_least: int = 0) -> tuple[Session, list[Recorded]]:
        """The session as of this read, and its newest events, as many as are at hand: all of one that is short. What
        this process has appended itself has no payload, and its time is an estimate. Raises `LogError`."""
        session, read = await self._load(key, at_least, hold=True)
        events = self._kept.get(key)
        if events and events[-1].seq == session.seq:
            return session, events
        if not read or read[-1].seq != session.seq:
            return session, []
        if not session.deleted:
            self._kept.keep(key, read)
        return session, read

    def recall(self, key: SessionKey, at_least: int) -> tuple[Session, list[Recorded]] | None:
        """As `latest`, without looking, where what is known reaches the event at this sequence: there may be newer
        ones, of which whoever writes will hear."""
        session, events = self._folds.get(key), self._kept.get(key)
        if session is None or not events or session.seq != events[-1].seq or session.seq < at_least:
            return None
        return session, events

    async def events(self, key: SessionKey, at_least: int = 0, since: int = 0) -> tuple[Session, list[Recorded]]:
        """The session as of this read, and all of its events, oldest first, from the one with sequence `since` on (0:
        from the first). Otherwise as `latest`."""
        session, events = await self.latest(key, at_least)
        if session.seq and not reach(events, since):
            session, events = await self._since(session, since)
        return session, events[bisect_left(events, since, key=seq_of) :]

    async def handle(self, key: SessionKey, command: Command, *, fresh: bool = False) -> Handled:
        """Decides and stores. `fresh`: nobody else can know this session's id yet, so there is nothing to read.

        Raises `Rejected`; `Unavailable` if the broker does not say in time whether the event is stored (the same
        command again has at most one effect); `LogError`.
        """
        async with self._known.writing(key):
            return await self._handle(key, command, fresh)

    def fold(self, key: SessionKey, recorded: Recorded) -> None:
        """Takes in an event that came by the feed, if it is the direct successor of what is held."""
        session = self._folds.get(key)
        if session is not None and session.seq == recorded.previous:
            self._keep(evolve(session, recorded))
        if isinstance(recorded.event.data, SessionDeleted | SessionErased):
            self._kept.drop(key)
        else:
            self._kept.add(key, recorded)

    def forget(self) -> None:
        """Drops everything. After a reconnect the log may have lost its newest events (a power loss where the broker
        does not sync each write), and what was folded from them is no longer true."""
        self._known.clear()
        if self._snapshots:
            self._snapshots.forget()

    async def close(self) -> None:
        """Ends what is done in the background."""
        if self._snapshots:
            await self._snapshots.close()

    async def _load(self, key: SessionKey, at_least: int, *, hold: bool) -> tuple[Session, list[Recorded]]:
        """The session, and with `hold` the events at its end that were read for that."""
        try:
            return await self._read(key, at_least, hold)
        except BrokenChain as broken:
            self._forget_another(key, broken)
            return await self._read(key, at_least, hold)

    async def _read(self, key: SessionKey, at_least: int, hold: bool) -> tuple[Session, list[Recorded]]:
        session = self._folds.get(key) or Session(key=key)
        if not session.seq and reach(events := self._kept.get(key), 0):  # they outlived their fold
            session = await fold_page(session, events)
        session, read = await self._read_on(session, at_least, hold or key in self._kept)
        if session.deleted:
            self._kept.drop(key)
        else:
            self._kept.extend(key, read)
        return self._keep(session), read

    async def _read_on(self, session: Session, at_least: int, hold: bool) -> tuple[Session, list[Recorded]]:
        """A session that is not known, and one of which much is new, goes on from its snapshot: its first events lie
        where the broker has not looked for long."""
        read: list[Recorded] = []
        if session.seq and self._snapshots:
            async for page in self.log.read(session.key, session.seq, at_least=at_least, page=EVERY):
                session = await fold_page(session, page)
                read += page if hold else ()
                if len(page) == EVERY:
                    break
            else:
                return session, read
        if self._snapshots and (resumed := await self._snapshots.resume(session, at_least, hold=hold)):
            return resumed
        async for page in self.log.read(session.key, session.seq, at_least=at_least):
            session = await fold_page(session, page)
            read += page if hold else ()
        return session, read

    async def _since(self, session: Session, since: int) -> tuple[Session, list[Recorded]]:
        """The same session or a newer one, and its events from this one on; of one that is being removed, what is left
        of them."""
        key = session.key
        first = await self.log.at(key, since) if since else None
        events = [first] if first else []
        async for page in self.log.read(key, since if first else 0, at_least=session.seq):
            session = await fold_page(session, page)
            events += page
        self._keep(session)
        if session.deleted:
            self._kept.drop(key)
        else:
            self._kept.keep(key, events)
        return session, events

    def _keep(self, session: Session) -> Session:
        """Answers with the newest fold known."""
        session = self._folds.keep(session)
        if self._snapshots:
            self._snapshots.note(session)
        return session

    def _forget_another(self, key: SessionKey, broken: BrokenChain) -> None:
        """Drops what is known of an erased session whose id another one has by now. Raises `broken` else."""
        if broken.previous or not broken.found:
            raise broken
        self._drop(key)

    def _drop(self, key: SessionKey) -> None:
        self._folds.drop(key)
        self._kept.drop(key)

    async def _handle(self, key: SessionKey, command: Command, fresh: bool) -> Handled:
        clock = asyncio.get_running_loop().time
        began = clock()
        session = self._folds.get(key) or (Session(key=key) if fresh else await self.load(key))
        confirmed = False
        for _ in range(ATTEMPTS):
            decision = _decide(command, session, confirmed)
            if decision is None and confirmed:
                return Handled(session, None)
            if decision is None:
                session, confirmed = await self._confirmed(session), True
                continue
            try:
                seq = await self.log.append(key, decision, session.seq)
            except Conflict as conflict:
                if self._on_conflict:
                    self._on_conflict()
                last = conflict.last if conflict.last is not None else await self.log.last(key)
                session, confirmed = await self._reload(session, last), True
                continue
            if seq <= session.seq:
                return Handled(session, None)
            if self._on_append:
                self._on_append(clock() - began)
            return self._appended(session, decision, seq)
        raise Unavailable(f"{key}: {ATTEMPTS} times in a row another writer was first")

    async def _confirmed(self, session: Session) -> Session:
        """The session as of now. Mostly others have written since it was folded: what is new is read while the log's
        end is asked for."""
        last, newer = await asyncio.gather(self.log.last(session.key), self.load(session.key))
        return newer if session.seq <= last <= newer.seq else await self._reload(session, last)

    async def _reload(self, session: Session, last: int) -> Session:
        """The session as of its event `last` or later."""
        if last == session.seq:
            return session
        if last < session.seq:  # the log has lost what was folded, or a new leader does not know its end yet
            self._drop(session.key)
            await asyncio.sleep(PAUSE)
        return await self.load(session.key, last)

    def _appended(self, session: Session, decision: Decision, seq: int) -> Handled:
        event = decision.event
        time, size = event.stored_at(self._now()), len(codec.encode(event))
        recorded = Recorded(seq=seq, previous=session.seq, time=time, size=size, event=event)
        session = evolve(session, recorded)
        self._keep(session)
        if session.deleted:
            self._kept.drop(session.key)
        else:
            self._kept.add(session.key, recorded)
        return Handled(session, recorded)


def _decide(command: Command, session: Session, confirmed: bool) -> Decision | None:
    """None: the session says so already; or it refuses, as far as is known without asking."""
    try:
        return decide(command, session)
    except Rejected:
        if confirmed:
            raise
        return None
