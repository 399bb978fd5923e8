"""Checkpoints: what only one run needs and nobody else may see, the opaque items that its model's provider wants back.
They lie beside the log, in the KV bucket `checkpoints` under `<account>.<session>.<run>`, never in it.

A run's checkpoint is a list: one message for each item, before it a name of the event that it belongs to. It ends with
the run; what nobody drops expires. Losing it costs quality, never correctness: what cannot be stored or read is not
there, and nobody waits long for it.
"""

import asyncio
from contextlib import suppress
from typing import Final

import msgspec

from turnstream import subjects
from turnstream.broker.answers import check_stored
from turnstream.broker.connection import Broker
from turnstream.broker.declare import ensure_stream
from turnstream.broker.erasing import erase
from turnstream.broker.errors import BrokerFault
from turnstream.ids import SessionKey
from turnstream.telemetry import get_logger

STREAM: Final = subjects.CHECKPOINTS
TIMEOUT: Final = 2.0
"""Seconds that one operation may take."""
BREAK: Final = b"\n"
"""Between a name and its item."""

log = get_logger()


class Entry(msgspec.Struct, frozen=True):
    """An item, and the event that it belongs to. `seq` is where it lies, 0 for one that could not be stored."""

    name: str
    item: bytes
    seq: int = 0


class _Ack(msgspec.Struct):
    seq: int


class Checkpoints:
    """The bucket of checkpoints. Only `erase` raises."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def put(self, key: SessionKey, run: int, name: str, item: bytes) -> Entry:
        """Adds an item to the run's checkpoint."""
        subject = subjects.checkpoint(key, run)
        try:
            async with asyncio.timeout(TIMEOUT):
                answer = (await self._broker.request(subject, name.encode() + BREAK + item)).data
            check_stored(subject, answer)
            return Entry(name, item, msgspec.json.decode(answer, type=_Ack).seq)
        except (BrokerFault, TimeoutError) as error:
            await self._tell("an opaque item is not kept", key, run, error)
            return Entry(name, item)

    async def get(self, key: SessionKey, run: int) -> list[Entry]:
        """The items of the run, the oldest first."""
        found: list[Entry] = []
        subject, after = subjects.checkpoint(key, run), 0
        try:
            async with asyncio.timeout(TIMEOUT):
                while stored := await self._broker.message(STREAM, {"seq": after + 1, "next_by_subj": subject}):
                    after = stored.seq
                    name, _, item = stored.data.partition(BREAK)
                    found.append(Entry(name.decode(errors="replace"), item, stored.seq))
        except (BrokerFault, TimeoutError) as error:
            await self._tell("opaque items cannot be read", key, run, error)
        return found

    async def drop(self, key: SessionKey, run: int, *, before: int | None = None) -> None:
        """Erases the items of the run; `before`: only those that lie before this one."""
        try:
            async with asyncio.timeout(TIMEOUT):
                await erase(self._broker, STREAM, subjects.checkpoint(key, run), before=before)
        except (BrokerFault, TimeoutError) as error:
            await self._tell("opaque items are left to expire", key, run, error)

    async def erase(self, key: SessionKey) -> None:
        """Erases the checkpoints of every run of a session. Raises `BrokerFault`."""
        await erase(self._broker, STREAM, subjects.checkpoint(key, "*"))

    async def _tell(self, what: str, key: SessionKey, run: int, error: Exception) -> None:
        """The bucket may have been deleted: then it is there again, empty, next time."""
        log.warning(what, account=key.account, session=key.session, run=key.run(run), error=error)
        with suppress(BrokerFault, TimeoutError):
            async with asyncio.timeout(TIMEOUT):
                await ensure_stream(self._broker, STREAM)
