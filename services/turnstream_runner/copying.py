"""Makes a fork whole: reads what the other session has up to an event, and stores each event in the fork, in order.

Each event is a command of its own, decided on the fork as it is: so it may be done again from anywhere, by several at
once, and each event is there once. How far it is, the fork itself says. What an event has in the object store is put
among the fork's own before the event that names it, so that it stays when the other session goes.

Not here: what becomes of an event on its way, and when the fork is whole (`turnstream.session.forking`).
"""

from collections.abc import Sequence
from functools import partial

from turnstream.ids import SessionKey, derive
from turnstream.log.base import BrokenChain
from turnstream.log.handle import Sessions
from turnstream.session.commands import DeleteSession
from turnstream.session.events import Attachment, Blob, Fact, MessagePosted, Recorded, Unknown
from turnstream.session.forking import Places, blobs_of, copy_of, place_of
from turnstream.session.plan import Copy
from turnstream.telemetry import get_logger
from turnstream.wire.attachments import Attachments
from turnstream.wire.blobs import BlobLost, Blobs
from turnstream_runner.few import HELD, Few
from turnstream_runner.ledger import Ledger, persist

log = get_logger()


class _Gone(Exception):
    """The session that is copied is not there any more."""


class Copier:
    """Copies sessions of one broker, few at once: the events of a long one are many appends in a row."""

    def __init__(self, sessions: Sessions, blobs: Blobs, attachments: Attachments, slots: int = 4 * HELD) -> None:
        self._sessions = sessions
        self._blobs = blobs
        self._attachments = attachments
        self._few = Few(slots)

    @property
    def full(self) -> bool:
        """Whether another session had better come again in a moment."""
        return self._few.full

    async def copy(self, ledger: Ledger, effect: Copy) -> None:
        """Copies what is missing, however long the broker is away meanwhile. Where the other session is deleted, the
        fork is too, for good: what was said there is to be nowhere. Raises `LogError`, `Undrivable`."""
        async with self._few.turn():
            ledger.forget_events()
            places = Places()
            try:
                while (copying := ledger.session.copying) and copying.seq != effect.forked_from.through:
                    if places.last != ledger.session.seq:
                        await persist(lambda: self._learn(ledger, places))
                    await self._copy(ledger, effect, copying.seq, places)
            except _Gone:
                origin = ledger.own_origin(derive(effect.key, "gone"))
                command = DeleteSession(origin=origin, specs={}, mode="erase", active="cancel")
                await ledger.store(effect.key, command)

    async def _copy(self, ledger: Ledger, effect: Copy, after: int, places: Places) -> None:
        """One page, or a part of it where somebody else copies, too. Raises `_Gone`, and as `copy`."""
        key = ledger.key
        source = SessionKey(key.account, effect.forked_from.session)
        for recorded in await persist(lambda: self._page(source, after, effect.forked_from.through)):
            command, blobs = copy_of(recorded, source, key, places), blobs_of(recorded.event.data)
            for blob in blobs:
                await self._copy_blob(source, key, blob)
            if isinstance(command.data, MessagePosted):
                await self._keep(key, command.data.attachments)
            stored = await ledger.store(effect.key, command)
            if not isinstance(stored, Recorded):
                if blobs and ledger.session.deleted:  # whoever removes the fork may be done with what lies beside it
                    await self._take_back(key, blobs, command.data)
                return
            places.add(recorded.seq, stored.seq)

    async def _page(self, source: SessionKey, after: int, through: int) -> Sequence[Recorded]:
        """The next events up to `through`. Raises `_Gone`, `LogError`."""
        if await self._sessions.log.last(source) < through:
            raise _Gone
        try:
            async for page in self._sessions.log.read(source, after, at_least=through):
                found = [recorded for recorded in page if recorded.seq <= through]
                if not found or found[0].previous != after:  # a deletion alone, or another session of this id
                    raise _Gone
                return found
        except BrokenChain as broken:
            if broken.previous or broken.seq <= through:
                raise
        raise _Gone  # another session has the id by now

    async def _learn(self, ledger: Ledger, places: Places) -> None:
        """Takes in what was copied by others, or before."""
        async for page in self._sessions.log.read(ledger.key, places.last, at_least=ledger.session.seq):
            for recorded in page:
                if recorded.event.copied:
                    places.add(recorded.event.copied.seq, recorded.seq)

    async def _copy_blob(self, source: SessionKey, key: SessionKey, blob: Blob) -> None:
        """Raises `_Gone`. What is lost to the other session is lost to the fork, too: its event says what it said."""
        data = await persist(lambda: self._read_blob(blob))
        if data is not None:
            await persist(lambda: self._blobs.put(key, place_of(blob.sha256), data))
        elif (await persist(lambda: self._sessions.load(source))).exists:
            log.warning("a fork lacks what is lost", account=key.account, session=key.session, blob=blob.name)
        else:
            raise _Gone

    async def _keep(self, key: SessionKey, attachments: Sequence[Attachment]) -> None:
        for attachment in attachments:
            await persist(partial(self._attachments.keep, key, attachment))

    async def _take_back(self, key: SessionKey, blobs: Sequence[Blob], data: Fact | Unknown) -> None:
        for blob in blobs:
            await persist(partial(self._blobs.remove, key, place_of(blob.sha256)))
        for attachment in data.attachments if isinstance(data, MessagePosted) else ():
            await persist(partial(self._attachments.remove, key, attachment))

    async def _read_blob(self, blob: Blob) -> bytes | None:
        """None: it is not there, or not what it was."""
        try:
            return await self._blobs.get(blob)
        except BlobLost:
            return None
