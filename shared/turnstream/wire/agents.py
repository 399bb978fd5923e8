"""Saved versions of agents: the KV bucket `agents`, one record a version, under `<account>.<name>.<version>`.

A version is stored once, and what it says never changes: what is saved again under it is the same, or refused. Which
version of a name is current is no record of its own: it is the one stored last. An agent that is deleted gets a mark
behind its versions (`<account>.<name>.=`): what lies before it is not offered any more, and stays for the runs that
have pinned it. So a version means the same for ever, and one that is saved once more is back.

What a definition says is the affair of `turnstream.agents`; here it is JSON.
"""

from typing import Final

import msgspec

from turnstream import subjects
from turnstream.broker.answers import EXPECTED, WRONG_LAST, WRONG_LAST_RACE, Stored, check_stored
from turnstream.broker.connection import Broker
from turnstream.broker.declare import STREAM_NOT_FOUND, ensure_stream
from turnstream.broker.erasing import following
from turnstream.broker.errors import BrokerError, NoResponders

STREAM: Final = subjects.AGENTS
EVERY: Final = subjects.agent("*", "*", "*")
"""Filter: every record and mark."""


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """The very version of another agent."""

    agent: str
    version: str
    digest: str


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A version. `definition` is as it was said; `pins`: what the agents that it names were when it was saved, by the
    node that names them; `saved_at` is broker time in milliseconds; `by`: who saved it."""

    definition: dict[str, object]
    digest: str
    pins: dict[str, Pin] = {}
    saved_at: int
    by: str


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """The mark of a deletion: when, in milliseconds of broker time, and by whom."""

    deleted_at: int
    by: str


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A version where it lies: `seq` tells which of several was stored last. `size`: bytes of the record."""

    account: str
    name: str
    version: str
    seq: int
    size: int
    saved: Saved


class VersionConflict(Exception):
    """The version is there, and says something else."""

    def __init__(self, found: Found) -> None:
        super().__init__(f"version {found.version} of agent {found.name} is there already, and says something else")
        self.found = found


class _Ack(msgspec.Struct):
    seq: int


_records = msgspec.json.Decoder(Saved)


class SavedAgents:
    """The bucket. Everything raises `BrokerFault`; what is read is as the bucket's leader has it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def get(self, account: str, name: str, version: str) -> Found | None:
        """A version, deleted or not: it takes one message."""
        return _found(await self._last(subjects.agent(account, name, version)))

    async def current(self, account: str, name: str) -> Found | None:
        """The version saved last: it takes one message. None: there is none, or the agent is deleted."""
        last = await self._last(subjects.agent(account, name, "*"))
        if last is None or _is_mark(last):
            return None
        # Something that is no record is behind it, which only a hand can have put there.
        return _found(last) or next(reversed(await self.versions(account, name)), None)

    async def mark(self, account: str, name: str) -> int:
        """The place of the mark that the agent was deleted; 0: it never was."""
        last = await self._last(subjects.agent(account, name, subjects.DELETED))
        return last.seq if last and last.data else 0

    async def versions(self, account: str, name: str) -> list[Found]:
        """Those that are not deleted, the one saved last at the end."""
        found: list[Found] = []
        after = 0
        while stored := await following(self._broker, STREAM, subjects.agent(account, name, "*"), after):
            after = stored.seq
            if _is_mark(stored):
                found.clear()
            elif one := _found(stored):
                found.append(one)
        return found

    async def put(self, account: str, name: str, version: str, saved: Saved) -> tuple[Found, bool]:
        """Stores a version. False: it was there before, and is not deleted. One that is back has the pins that it had.
        Raises `VersionConflict` too."""
        expected = 0
        while True:
            if stored := await self._store(account, name, version, msgspec.json.encode(saved), expected):
                seq, size = stored
                found = Found(account=account, name=name, version=version, seq=seq, size=size, saved=saved)
                return found, True
            last = await self._last(subjects.agent(account, name, version))
            there = _found(last)
            if there and there.saved.digest != saved.digest:
                raise VersionConflict(there)
            if there and await self.mark(account, name) < there.seq:
                return there, False
            if there:
                saved = msgspec.structs.replace(saved, pins=there.saved.pins)
            expected = last.seq if last else 0

    async def delete(self, account: str, name: str, deleted: Deleted) -> bool:
        """Marks what there is of an agent as deleted. False: nothing of it is there to be deleted."""
        while True:
            if await self.current(account, name) is None:
                return False
            before = await self._last(subjects.agent(account, name, subjects.DELETED))
            data = msgspec.json.encode(deleted)
            if await self._store(account, name, subjects.DELETED, data, before.seq if before else 0):
                return True

    async def last_seq(self) -> int:
        """The place of whatever was stored last, of all accounts."""
        try:
            return (await self._broker.stream(STREAM)).state.last_seq
        except BrokerError as error:
            await self._made_again(error)
            return 0

    async def _store(self, account: str, name: str, version: str, data: bytes, expected: int) -> tuple[int, int] | None:
        """Where it lies and its size; None: something else was stored there before."""
        subject = subjects.agent(account, name, version)
        try:
            answer = (await self._broker.request(subject, data, {EXPECTED: str(expected)})).data
            check_stored(subject, answer)
        except BrokerError as error:
            if error.err_code in (WRONG_LAST, WRONG_LAST_RACE):
                return None
            raise
        except NoResponders:
            await ensure_stream(self._broker, STREAM)
            raise
        return msgspec.json.decode(answer, type=_Ack).seq, len(data)

    async def _last(self, subject: str) -> Stored | None:
        try:
            return await self._broker.message(STREAM, {"last_by_subj": subject})
        except BrokerError as error:
            await self._made_again(error)
            return None

    async def _made_again(self, error: BrokerError) -> None:
        """The bucket is there again, empty, if it was not. Raises any other error."""
        if error.err_code != STREAM_NOT_FOUND:
            raise error
        await ensure_stream(self._broker, STREAM)


def _is_mark(stored: Stored) -> bool:
    return stored.subject.endswith(f".{subjects.DELETED}") and bool(stored.data)


def _found(stored: Stored | None) -> Found | None:
    """None also of a mark, and of what somebody else has written here, or emptied."""
    if stored is None:
        return None
    account, name, version = subjects.parse_agent(stored.subject)
    try:
        saved = _records.decode(stored.data)
    except msgspec.MsgspecError:
        return None
    return Found(account=account, name=name, version=version, seq=stored.seq, size=len(stored.data), saved=saved)
