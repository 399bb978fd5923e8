"""Attachments: bytes that are put into a session first and named by its messages then.

The bytes are a blob of the session. What a name means is one record, in the KV bucket `attachments` under
`<account>.<session>.<name>`: the contents that were put under it, the one put last being what the name alone means. A
reference (`Attachment`) is to one content, which never changes.

Whoever is about to store a message that names an attachment claims it first, and releases it where the message is
refused. What nobody has claimed expires, a time after something was put under its name or claimed the last time. Both
are guarded writes of the one record: a content is claimed, or it is gone, never both. A claim whose holder died stays:
then the bytes are garbage of their session, and go with it.

An upload is in the record before its first byte is stored, so that one that came to no end expires too.
"""

import base64
import hashlib
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

import msgspec

from turnstream import subjects
from turnstream.broker.answers import EXPECTED, WRONG_LAST, WRONG_LAST_RACE, Stored
from turnstream.broker.clock import parse_time
from turnstream.broker.connection import Broker
from turnstream.broker.declare import STREAM_NOT_FOUND, ensure_stream
from turnstream.broker.erasing import erase, following
from turnstream.broker.errors import BrokerError, BrokerFault, NoResponders
from turnstream.ids import SessionKey
from turnstream.session.events import Attachment, Blob
from turnstream.wire.blobs import Blobs

STREAM: Final = subjects.ATTACHMENTS
EVERY: Final = "$KV.attachments.>"
CONTENTS_MAX: Final = 100
"""Contents that one name may have."""
CLAIMS_MAX: Final = 8
"""Claims of one content that are told apart; with one more it is kept for good."""


class TooMany(Exception):
    """The name has as many contents as it may have."""


class Interrupted(BrokerFault):
    """The upload took too long, or its session was erased meanwhile: nothing of it is there."""


class _Content(msgspec.Struct, frozen=True, omit_defaults=True):
    """`ready`: the bytes are all there. `kept`: it is claimed for good."""

    attachment: Attachment
    ready: bool = False
    kept: bool = False
    claims: tuple[str, ...] = ()

    @property
    def claimed(self) -> bool:
        return self.kept or bool(self.claims)

    def claim(self, by: str) -> "_Content":
        if self.kept or by in self.claims:
            return self
        if len(self.claims) == CLAIMS_MAX:
            return msgspec.structs.replace(self, kept=True, claims=())
        return msgspec.structs.replace(self, claims=(*self.claims, by))

    def release(self, by: str) -> "_Content":
        return msgspec.structs.replace(self, claims=tuple([one for one in self.claims if one != by]))


_Record = tuple[_Content, ...]
_records = msgspec.json.Decoder(_Record)
_Change = Callable[[_Record], _Record | None]
"""The record as it is to be; None: as it is."""


class Attachments:
    """The attachments of every session."""

    def __init__(self, broker: Broker, blobs: Blobs) -> None:
        self._broker = broker
        self._blobs = blobs

    async def put(self, key: SessionKey, name: str, media_type: str, data: bytes) -> tuple[Attachment, bool]:
        """Puts a content under a name, from now on what the name alone means. False: it was there before. Raises
        `TooMany`, `BrokerFault`."""
        place = f"attachments/{uuid.uuid4().hex}"
        own = Attachment(
            name=name,
            media_type=media_type,
            size=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            blob=f"{key}/{place}",
        )

        def begin(record: _Record) -> _Record:
            if found := _same(record, own):
                return _last(record, found)
            if len(record) >= CONTENTS_MAX:
                raise TooMany(f"there are {len(record)} contents under the name {name} already")
            return (*record, _Content(own))

        record = await self._change(key, name, begin)
        if there := _same(record, own):
            return there.attachment, False
        try:
            await self._blobs.put(key, place, data)
            record = await self._change(key, name, lambda record: _ended(record, own))
        except BaseException:
            with suppress(BrokerFault):
                await self._drop(key, name, [own])
            raise
        there = _same(record, own)
        if there is None or there.attachment != own:  # it expired meanwhile, or another was faster
            await self._drop(key, name, [own])
        if there is None:
            raise Interrupted(f"{key}: the upload of {name} was given up")
        return there.attachment, there.attachment == own

    async def find(self, key: SessionKey, name: str, sha256: str | None = None) -> Attachment | None:
        """What the name means now, or the content of this digest under it. Raises `BrokerFault`."""
        _, record = await self._read(key, name)
        found = _find(record, sha256)
        return found.attachment if found else None

    async def claim(self, key: SessionKey, name: str, sha256: str | None, by: str) -> Attachment | None:
        """The same, and it does not expire any more. `by` names the claim. Raises `BrokerFault`."""

        def claimed(record: _Record) -> _Record | None:
            found = _find(record, sha256)
            if found is None or found.claim(by) is found:
                return None
            return tuple([one.claim(by) if one is found else one for one in record])

        found = _find(await self._change(key, name, claimed), sha256)
        return found.attachment if found else None

    async def keep(self, key: SessionKey, attachment: Attachment) -> None:
        """Takes a content in whose bytes are there already, claimed for good, and without changing what the name alone
        means if it is there. Raises `BrokerFault`."""

        def kept(record: _Record) -> _Record | None:
            if any(one.attachment == attachment for one in record):
                return None
            return (*record, _Content(attachment, ready=True, kept=True))

        await self._change(key, attachment.name, kept)

    async def release(self, key: SessionKey, attachments: Iterable[Attachment], by: str) -> None:
        """Takes claims back. Raises `BrokerFault`."""
        for attachment in attachments:

            def released(record: _Record, attachment: Attachment = attachment) -> _Record | None:
                after = tuple([one.release(by) if one.attachment == attachment else one for one in record])
                return None if after == record else after

            await self._change(key, attachment.name, released)

    async def remove(self, key: SessionKey, attachment: Attachment) -> None:
        """Removes a content, claimed or not. Raises `BrokerFault`."""
        await self._drop(key, attachment.name, [attachment])

    async def expire(self, before: int, after: int = 0) -> tuple[int, int]:
        """Removes what nobody has claimed under names of which nothing was heard since `before`, in milliseconds of
        broker time. How many contents that were, and the record up to which it has looked, the next call's `after`.
        Raises `BrokerFault`."""
        removed = 0
        if await self._end() < after:  # the bucket was made anew
            after = 0
        while (found := await following(self._broker, STREAM, EVERY, after)) and parse_time(found.time) < before:
            removed += await self._expire(found)
            after = found.seq
        return removed, after

    async def erase(self, key: SessionKey) -> None:
        """Erases the records of a session; the bytes are its blobs. Raises `BrokerFault`."""
        await erase(self._broker, STREAM, subjects.attachment(key, "*"))

    async def _expire(self, found: Stored) -> int:
        key, token = subjects.parse_attachment(found.subject)
        record = _records.decode(found.data) if found.data else ()
        expired = [one.attachment for one in record if not one.claimed]
        if not expired:
            return 0
        name = expired[0].name

        def closed(record: _Record) -> _Record:
            return tuple([one if one.claimed else msgspec.structs.replace(one, ready=False) for one in record])

        # What nobody can claim any more can be removed, by whoever finds it, however long that takes.
        if not await self._write(key, token, found, closed(record)):
            return 0
        await self._drop(key, name, expired)
        return len(expired)

    async def _drop(self, key: SessionKey, name: str, attachments: Iterable[Attachment]) -> None:
        """Removes contents that nobody can claim, bytes first: what is left in the record is found again."""
        blobs = {attachment.blob for attachment in attachments}
        for blob in blobs:
            await self._blobs.remove(key, blob.removeprefix(f"{key}/"))

        def dropped(record: _Record) -> _Record | None:
            after = tuple([one for one in record if one.attachment.blob not in blobs])
            return None if len(after) == len(record) else after

        await self._change(key, name, dropped)

    # --- one record -------------------------------------------------------------------------------------------------

    async def _change(self, key: SessionKey, name: str, change: _Change) -> _Record:
        """The record as it is then."""
        token = _token(name)
        while True:
            found, record = await self._read(key, name)
            after = change(record)
            if after is None:
                return record
            if await self._write(key, token, found, after):
                return after

    async def _end(self) -> int:
        try:
            return (await self._broker.stream(STREAM)).state.last_seq
        except BrokerError as error:
            await self._made_again(error)
            return 0

    async def _made_again(self, error: BrokerError) -> None:
        """The bucket is there again, empty, if it was not. Raises any other error."""
        if error.err_code != STREAM_NOT_FOUND:
            raise error
        await ensure_stream(self._broker, STREAM)

    async def _read(self, key: SessionKey, name: str) -> tuple[Stored | None, _Record]:
        try:
            found = await self._broker.message(STREAM, {"last_by_subj": subjects.attachment(key, _token(name))})
        except BrokerError as error:
            await self._made_again(error)
            found = None
        return found, _records.decode(found.data) if found and found.data else ()

    async def _write(self, key: SessionKey, token: str, found: Stored | None, record: _Record) -> bool:
        """False: it is not as it was found. A record of nothing is none."""
        subject = subjects.attachment(key, token)
        headers = {EXPECTED: str(found.seq if found else 0)}
        try:
            await self._broker.store(subject, msgspec.json.encode(record) if record else b"", headers)
        except BrokerError as error:
            if error.err_code in (WRONG_LAST, WRONG_LAST_RACE):
                return False
            raise
        except NoResponders:
            await ensure_stream(self._broker, STREAM)
            raise
        if found:
            await erase(self._broker, STREAM, subject, before=found.seq + 1)
        if not record and (last := await self._broker.message(STREAM, {"last_by_subj": subject})) and not last.data:
            await erase(self._broker, STREAM, subject, before=last.seq + 1)
        return True


def _find(record: _Record, sha256: str | None) -> _Content | None:
    """The content put last, of those whose bytes are there."""
    found = (one for one in reversed(record) if one.ready and sha256 in (None, one.attachment.sha256))
    return next(found, None)


def _same(record: _Record, own: Attachment) -> _Content | None:
    """What has the same bytes, and is of the same type."""
    return next(
        (
            one
            for one in record
            if one.ready and (one.attachment.sha256, one.attachment.media_type) == (own.sha256, own.media_type)
        ),
        None,
    )


def _last(record: _Record, content: _Content) -> _Record:
    return (*[one for one in record if one is not content], content)


def _ended(record: _Record, own: Attachment) -> _Record | None:
    """With the upload that came to its end, unless it is not wanted any more."""
    mine = next((one for one in record if one.attachment == own), None)
    if mine is None or _same(record, own):
        return None
    return (*[one for one in record if one is not mine], msgspec.structs.replace(mine, ready=True))


def _token(name: str) -> str:
    """The name as one token of a subject."""
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def blob_of(attachment: Attachment) -> Blob:
    return Blob(name=attachment.blob, size=attachment.size, sha256=attachment.sha256)
