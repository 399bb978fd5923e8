"""What a run's model is shown of what came with the messages: the bytes, read once a run and bounded, as texts and
images. What each is, and how much of it is shown, is in `turnstream.session.attachments`.

Bytes that are lost fail no run: the model is told.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

from turnstream.ids import SessionKey
from turnstream.session import attachments as rules
from turnstream.session.events import Attachment
from turnstream.session.messages import Message, UserMessage
from turnstream.telemetry import get_logger
from turnstream.wire.attachments import blob_of
from turnstream.wire.blobs import BlobLost, Blobs
from turnstream_runner.ledger import persist
from turnstream_runner.models.port import Image, Shown

AT_ONCE: Final = 4
"""Attachments that one run reads at once."""

log = get_logger()


class Attached:
    """Of one attempt. Holds as much as one prompt shows (`rules.SHOWN_MAX`), and what is being read."""

    def __init__(self, blobs: Blobs, key: SessionKey) -> None:
        self._blobs = blobs
        self._key = key
        self._read: dict[str, Shown] = {}
        """By the name of the blob."""

    async def of(self, messages: Iterable[Message], *, images: bool) -> tuple[Shown, ...]:
        """One for each attachment of the messages, in their order, however long the broker is away. `images`: they are
        shown, not only named."""
        every = [one for message in messages if isinstance(message, UserMessage) for one in message.attachments]
        if not every:
            return ()
        kinds = ("text", "image") if images else ("text",)
        first = rules.left_out(every)
        wanted = {one.blob: one for one in every[first:] if rules.kind_of(one.media_type) in kinds}
        self._read = {name: shown for name, shown in self._read.items() if name in wanted}
        slots = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            for name in wanted.keys() - self._read.keys():
                tasks.create_task(self._take(wanted[name], slots))
        return tuple([self._read.get(one.blob, Shown()) if n >= first else Shown() for n, one in enumerate(every)])

    async def _take(self, attachment: Attachment, slots: asyncio.Semaphore) -> None:
        async with slots:
            data = await persist(lambda: self._bytes(attachment))
        self._read[attachment.blob] = Shown(missing=True) if data is None else _shown(attachment, data)

    async def _bytes(self, attachment: Attachment) -> bytes | None:
        try:
            return await self._blobs.get(blob_of(attachment))
        except BlobLost as lost:
            log.warning("an attachment is lost", account=self._key.account, session=self._key.session, error=lost)
            return None


def _shown(attachment: Attachment, data: bytes) -> Shown:
    if rules.kind_of(attachment.media_type) == "text":
        return Shown(text=rules.text_of(attachment, data))
    kind = rules.image_type(data)
    return Shown(image=Image(kind, data)) if kind else Shown()
