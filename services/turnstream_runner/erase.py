"""Removes a deleted session: everything that it has, in the log and beside it, but what is to be kept of its runs.

What it leaves is a log whose last and only event is `session.deleted`; that this is done is a fact of its own, which
the drive stores (`session.erased`). Until then it is planned again at every wake-up, so each step may be done twice,
and be given up anywhere: records of runs are stored once (the first one stays), and what is gone is no error. The order
matters in one place: nothing of the log goes before every run has its record. So a log that does not hold together is
one whose runs are all kept.

Not here: which bytes "erased" leaves (`turnstream.broker.erasing`), and what a record holds (`turnstream.log.archive`).
"""

from collections.abc import Sequence

from turnstream.broker.connection import Broker
from turnstream.ids import SessionKey
from turnstream.log import archive
from turnstream.log.base import Log, LogError
from turnstream.session.events import Recorded
from turnstream.session.state import Deleted, Session
from turnstream.telemetry import get_logger
from turnstream.wire import inbox
from turnstream.wire.attachments import Attachments
from turnstream.wire.blobs import Blobs
from turnstream.wire.checkpoints import Checkpoints
from turnstream.wire.live import Live
from turnstream.wire.snapshots import TOMBSTONE, Snapshots
from turnstream.wire.timers import Timers
from turnstream.wire.work import Work
from turnstream_runner.few import HELD, Few
from turnstream_runner.ledger import persist

log = get_logger()


class Eraser:
    """Removes whole sessions of one broker: few at once, for overwriting keeps everybody else's writes waiting.
    `tombstone`: seconds for which whoever was frozen can write no snapshot of one."""

    def __init__(self, broker: Broker, log: Log, slots: int = 4 * HELD, *, tombstone: int = TOMBSTONE) -> None:
        self._few = Few(slots)
        self._broker = broker
        self._log = log
        self._blobs = Blobs(broker)
        self._attachments = Attachments(broker, self._blobs)
        self._checkpoints = Checkpoints(broker)
        self._live = Live(broker)
        self._snapshots = Snapshots(broker, tombstone=tombstone)
        self._timers = Timers(broker)
        self._work = Work(broker)

    @property
    def full(self) -> bool:
        """Whether another session had better come again in a moment."""
        return self._few.full

    async def erase(self, session: Session, work: int) -> None:
        """Removes everything of a session that is deleted and not erased yet, for a wake-up with this sequence, however
        long the broker is away meanwhile. Raises `LogError`."""
        async with self._few.turn():
            await self._erase(session, work)

    async def _erase(self, session: Session, work: int) -> None:
        key, deleted = session.key, session.deleted
        assert deleted is not None
        kept = await self._keep_runs(session, deleted) if deleted.mode == "detach" else frozenset[str]()
        await self._remove_beside(key, kept, work)
        await persist(lambda: self._log.overwrite(key))
        await self._remove_beside(key, kept, work)  # what somebody was still at when the session was deleted
        log.info("erased a session", account=key.account, session=key.session, mode=deleted.mode, events=deleted.events)

    async def _keep_runs(self, session: Session, deleted: Deleted) -> frozenset[str]:
        """Stores a record of each run, and answers with the names of the blobs that these refer to."""
        key = session.key
        records = await persist(lambda: self._records(key))
        if len(records) < session.last_run:
            events = await persist(lambda: self._events(key, deleted.seq))
            if len(events) != deleted.events:
                raise LogError(f"{key}: {len(events)} of {deleted.events} events are there, and not every run is kept")
            limit = self._broker.nc.max_payload - archive.HEAD_MAX
            for n, own in archive.split(events).items():
                record = archive.encode(key, n, own, limit)
                await persist(lambda n=n, record=record: self._log.archive(key, n, record))
            records = await persist(lambda: self._records(key))
        return frozenset(name for record in records for name in archive.blobs(archive.decode(record, deleted.seq)[1]))

    async def _records(self, key: SessionKey) -> list[bytes]:
        return [record async for _, record in self._log.archives(key)]

    async def _events(self, key: SessionKey, last: int) -> Sequence[Recorded]:
        """Everything up to the deletion."""
        events = [recorded async for page in self._log.read(key, at_least=last) for recorded in page]
        return [recorded for recorded in events if recorded.seq <= last]

    async def _remove_beside(self, key: SessionKey, kept: frozenset[str], work: int) -> None:
        await persist(lambda: self._attachments.erase(key))
        await persist(lambda: self._blobs.erase(key, kept))
        await persist(lambda: self._checkpoints.erase(key))
        await persist(lambda: self._snapshots.erase(key))
        await persist(lambda: inbox.forget(self._broker, key))
        await persist(lambda: self._live.forget(key))
        await persist(lambda: self._timers.drop(key, "*"))
        await persist(lambda: self._work.drop(key, before=work))
