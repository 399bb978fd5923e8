"""What is too large for an event: bytes in the object store, named `<account>/<session>/<name>`.

The event keeps a `Blob` (name, size, SHA-256) and the head of the text. A blob is put before the event that names it,
so an event never names one that is not there; one that no event names (the append was refused) is garbage of its
session.

The pieces of a blob lie on a subject that names its session, so that everything of a session can be found and erased,
garbage too, without looking at others'. Any client of object stores (ADR-20) reads them.
"""

import base64
import hashlib
import uuid
from collections.abc import AsyncGenerator
from typing import Final

import msgspec

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.declare import STREAM_NOT_FOUND, ensure_stream
from turnstream.broker.erasing import erase, following
from turnstream.broker.errors import BrokerError, BrokerFault
from turnstream.ids import SessionKey
from turnstream.session.events import Blob

STREAM: Final = f"OBJ_{subjects.BLOBS}"
PIECE: Final = 128 * 1024
"""Bytes of one piece."""


class BlobLost(BrokerFault):
    """The blob is not in the object store, or not the bytes that its event describes."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"blob {name}: {why}")
        self.name = name


class _Options(msgspec.Struct, frozen=True):
    max_chunk_size: int = PIECE


class _About(msgspec.Struct, frozen=True, kw_only=True):
    """What a client reads first."""

    name: str
    options: _Options = _Options()
    bucket: str = subjects.BLOBS
    nuid: str
    size: int
    chunks: int
    digest: str


class Blobs:
    """The object store of blobs."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def put(self, key: SessionKey, name: str, data: bytes) -> Blob:
        """Stores the bytes under this name, in place of what was there. Raises `BrokerFault`. Where that is because
        somebody deleted the object store, it is there again, empty, at the next attempt."""
        path, place = f"{key}/{name}", _token(name)
        pieces = subjects.chunks(key, f"{place}.{uuid.uuid4().hex}")
        starts = range(0, max(len(data), 1), PIECE)
        about = _About(
            name=path,
            nuid=pieces.removeprefix(subjects.CHUNKS),
            size=len(data),
            chunks=len(starts),
            digest=f"SHA-256={_base64(hashlib.sha256(data).digest())}",
        )
        try:
            before = await self._broker.message(STREAM, {"last_by_subj": _meta(path)})
            for start in starts:
                await self._broker.store(pieces, data[start : start + PIECE])
            await self._broker.store(_meta(path), msgspec.json.encode(about))
            if before is not None:  # in place, but not by a rollup: that would leave bytes that nobody finds any more
                earlier = msgspec.json.decode(before.data, type=_About).nuid
                await erase(self._broker, STREAM, subjects.CHUNKS + earlier)
                await erase(self._broker, STREAM, _meta(path), before=before.seq + 1)
        except BrokerFault:
            await ensure_stream(self._broker, STREAM)
            raise
        return Blob(name=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())

    async def get(self, blob: Blob) -> bytes:
        """The bytes that the event describes. Raises `BlobLost`, `BrokerFault`."""
        return b"".join([piece async for piece in self.read(blob)])

    async def read(self, blob: Blob) -> AsyncGenerator[bytes, None]:
        """The same piece by piece. That they are other bytes may turn out only at the end. Raises as `get`."""
        about = await self._about(blob.name)
        if about is None or about.size != blob.size:
            raise BlobLost(blob.name, "not there" if about is None else "not the bytes that its event describes")
        digest, size, after = hashlib.sha256(), 0, 0
        while size < blob.size:
            piece = await following(self._broker, STREAM, subjects.CHUNKS + about.nuid, after)
            if piece is None:
                raise BlobLost(blob.name, "not whole")
            after = piece.seq
            size += len(piece.data)
            digest.update(piece.data)
            yield piece.data
        if size != blob.size or digest.hexdigest() != blob.sha256:
            raise BlobLost(blob.name, "not the bytes that its event describes")

    async def erase(self, key: SessionKey, keep: frozenset[str] = frozenset()) -> None:
        """Erases everything of a session but the blobs of these names, whatever put it there. Raises `BrokerFault`."""
        kept = {_token(name.removeprefix(f"{key}/")) for name in keep}
        after = 0
        everything = subjects.chunks(key, ">")
        while found := await following(self._broker, STREAM, everything, after):
            place = found.subject.rsplit(".", 2)[1]
            after = found.seq
            if place not in kept:
                await self._erase(key, place)

    async def remove(self, key: SessionKey, name: str) -> None:
        """Erases a blob that no event names. Raises `BrokerFault`."""
        await self._erase(key, _token(name))

    async def _erase(self, key: SessionKey, place: str) -> None:
        await erase(self._broker, STREAM, _meta(f"{key}/{_name(place)}"))
        await erase(self._broker, STREAM, subjects.chunks(key, f"{place}.*"))

    async def _about(self, path: str) -> _About | None:
        try:
            found = await self._broker.message(STREAM, {"last_by_subj": _meta(path)})
        except BrokerError as error:
            if error.err_code != STREAM_NOT_FOUND:
                raise
            await ensure_stream(self._broker, STREAM)
            return None
        return msgspec.json.decode(found.data, type=_About) if found else None


def _meta(path: str) -> str:
    """The subject of what a client reads first."""
    return f"$O.{subjects.BLOBS}.M.{_base64(path.encode())}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()


def _token(name: str) -> str:
    """The name as one token of a subject."""
    return _base64(name.encode()).rstrip("=")


def _name(token: str) -> str:
    return base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
