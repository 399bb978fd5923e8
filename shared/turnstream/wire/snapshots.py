"""Where snapshots of sessions lie: the KV bucket `snapshots`, under `<account>.<session>`.

What is in one is the core's affair (`turnstream.session.snapshot`), when one is made and believed the log's
(`turnstream.log.snapshots`). None is ever required: what cannot be stored or read is not there, and nobody waits long
for it.

A snapshot is written behind the one that its writer has seen, or not at all. So the mark that ends a session's
snapshots, written behind whatever was there, keeps out every writer who began before it, however long he was frozen.
What a snapshot replaces is erased: it names people.
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
from turnstream.broker.errors import BrokerError, BrokerFault, NoResponders
from turnstream.ids import SessionKey
from turnstream.telemetry import get_logger

STREAM: Final = subjects.SNAPSHOTS
TIMEOUT: Final = 0.5
"""Seconds that whoever opens a session waits for its snapshot; then he does without."""
AGAIN: Final = 10.0
"""Seconds without looking for any after one did not come in time."""
PATIENCE: Final = 10.0
"""Seconds that storing one may take."""
TOMBSTONE: Final = 7 * 86400

_OTHERS: Final = (10071, 10164)
"""Error codes: another message is the last one of its subject."""
_LAST: Final = "Nats-Expected-Last-Subject-Sequence"
_TTL: Final = "Nats-TTL"
_SEQ: Final = "Nats-Sequence"

log = get_logger()


class _Ack(msgspec.Struct):
    seq: int


_acks = msgspec.json.Decoder(_Ack)


class Snapshots:
    """The bucket of snapshots. Only `erase` raises. `tombstone`: seconds for which the end of a session's snapshots is
    marked, longer than any writer can be frozen."""

    def __init__(self, broker: Broker, *, tombstone: int = TOMBSTONE) -> None:
        self._broker = broker
        self._tombstone = tombstone
        self._clock = asyncio.get_running_loop().time
        self._not_before = 0.0

    async def get(self, key: SessionKey) -> tuple[bytes, int] | None:
        """The newest snapshot and its revision; no bytes, and 0, where there is none. None: that cannot be told."""
        if self._clock() < self._not_before:
            return None
        try:
            path = f"$JS.API.DIRECT.GET.{STREAM}.{subjects.snapshot(key)}"
            found = await self._broker.request(path, timeout=TIMEOUT)
        except BrokerFault as error:
            self._not_before = self._clock() + AGAIN
            log.warning("a snapshot cannot be read", account=key.account, session=key.session, error=error)
            return None
        headers = found.headers or {}
        return (found.data, int(headers[_SEQ])) if _SEQ in headers else (b"", 0)

    async def put(self, key: SessionKey, data: bytes, revision: int) -> None:
        """Stores a snapshot behind the revision that was seen, if that is still the newest, and erases what it
        replaces."""
        subject = subjects.snapshot(key)
        try:
            async with asyncio.timeout(PATIENCE):
                answer = (await self._broker.request(subject, data, {_LAST: str(revision)})).data
                check_stored(subject, answer)
                await erase(self._broker, STREAM, subject, before=_acks.decode(answer).seq)
        except (BrokerFault, TimeoutError) as error:
            if not isinstance(error, BrokerError) or error.err_code not in _OTHERS:
                await self._tell(key, error)

    async def erase(self, key: SessionKey) -> None:
        """Erases the snapshots of a session that is over, and keeps out those that somebody is about to store. Raises
        `BrokerFault`."""
        subject = subjects.snapshot(key)
        try:
            answer = (await self._broker.request(subject, b"", {_TTL: f"{self._tombstone}s"})).data
        except NoResponders:
            await ensure_stream(self._broker, STREAM)
            raise
        check_stored(subject, answer)
        await erase(self._broker, STREAM, subject, before=_acks.decode(answer).seq)

    async def _tell(self, key: SessionKey, error: Exception) -> None:
        """The bucket may have been deleted: then it is there again, empty, next time."""
        log.warning("a snapshot is not stored", account=key.account, session=key.session, error=error)
        with suppress(BrokerFault, TimeoutError):
            async with asyncio.timeout(TIMEOUT):
                await ensure_stream(self._broker, STREAM)
