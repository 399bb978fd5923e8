"""What is too large for an event: bytes in the object store, named `<account>/<session>/<name>`.

The event keeps a `Blob` (name, size, SHA-256) and the head of the text. A blob is put before the event that names it,
so an event never names one that is not there; one that no event names (the append was refused) is garbage of its
session.
"""

import hashlib
from typing import Final

import nats.errors
import nats.js.errors
from nats.js.object_store import ObjectStore

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.declare import ensure_stream
from turnstream.broker.errors import BrokerFault, BrokerTimeout
from turnstream.ids import SessionKey
from turnstream.session.events import Blob

STREAM: Final = f"OBJ_{subjects.BLOBS}"


class BlobLost(BrokerFault):
    """The blob is not in the object store, or not the bytes that its event describes."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"blob {name}: {why}")
        self.name = name


class Blobs:
    """The object store of blobs."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._store: ObjectStore | None = None

    async def put(self, key: SessionKey, name: str, data: bytes) -> Blob:
        """Stores the bytes under this name, in place of what was there. Raises `BrokerFault`. Where that is because
        somebody deleted the object store, it is there again, empty, at the next attempt."""
        path = f"{key}/{name}"
        try:
            await (await self._open()).put(path, data)
        except (nats.errors.Error, nats.js.errors.Error) as error:
            await ensure_stream(self._broker, STREAM)
            raise BrokerTimeout(path, str(error)) from error
        return Blob(name=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())

    async def get(self, blob: Blob) -> bytes:
        """The bytes that the event describes. Raises `BlobLost`, `BrokerFault`."""
        try:
            found = await (await self._open()).get(blob.name)
        except nats.js.errors.NotFoundError:
            raise BlobLost(blob.name, "not there") from None
        except (nats.errors.Error, nats.js.errors.Error) as error:
            raise BrokerTimeout(blob.name, str(error)) from error
        data = found.data or b""
        if len(data) != blob.size or hashlib.sha256(data).hexdigest() != blob.sha256:
            raise BlobLost(blob.name, "not the bytes that its event describes")
        return data

    async def _open(self) -> ObjectStore:
        if self._store is None:
            context = self._broker.nc.jetstream()  # pyright: ignore[reportUnknownMemberType]
            self._store = await context.object_store(subjects.BLOBS)
        return self._store
