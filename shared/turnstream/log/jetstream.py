"""The log on NATS JetStream: a session is one subject of the stream `SESSIONS`, an event one message on it.

The only module that knows what JetStream says of an append, and the only writer to a session's subject. Every append
carries the sequence it was decided on (`Nats-Expected-Last-Subject-Sequence`); there is no unguarded write. An answer
that does not say clearly whether the event is stored (none at all, a lost race, a duplicate) is settled by asking the
stream's leader what stands behind that sequence: our event's id there is success, another's is a `Conflict`, nothing is
a reason to publish the same guarded message again, which can be stored only once however often it is sent.

Reads may be answered by a replica that lags; the guard, `at_least` and `last` make that harmless.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import lru_cache
from typing import Final, TypeVar

import msgspec
from nats.aio.msg import Msg

from turnstream import ids, subjects
from turnstream.broker.answers import EXPECTED, WRONG_LAST, WRONG_LAST_RACE, Refusal, Stored
from turnstream.broker.clock import parse_time
from turnstream.broker.connection import Broker
from turnstream.broker.erasing import erase
from turnstream.broker.errors import BrokerClosed, BrokerError, BrokerFault, BrokerTimeout
from turnstream.ids import SessionKey
from turnstream.log import archive, codec
from turnstream.log.base import PAGE, BrokenChain, Conflict, Listener, LogError, Unavailable
from turnstream.log.messages import UNGUARDED, Republished, recorded_of
from turnstream.log.replies import STATUS, Replies
from turnstream.session.decision import Decision
from turnstream.session.events import NAMES, Recorded, SessionDeleted, SessionErased

T = TypeVar("T")

PAGE_BYTES: Final = 1024 * 1024
RETRY: Final = 2.0
"""Seconds without an answer after which an append or a read is settled or asked again."""
MOMENT: Final = 0.05
"""Seconds that the last question waits at least."""
PAUSES: Final = (0.0, 0.005, 0.02, 0.05, 0.1, 0.2)
"""Seconds before each try after the first; the last one stands for all further ones."""

TOMBSTONE: Final = 7 * 86400

PENDING: Final = "Nats-Num-Pending"
ROLLUP: Final = "Nats-Rollup"
TTL: Final = "Nats-TTL"

IN_FLIGHT: Final = 10158
"""A message of this id is being stored."""

DELETED, ERASED = NAMES[SessionDeleted], NAMES[SessionErased]

_DIRECT = f"$JS.API.DIRECT.GET.{subjects.SESSIONS}"
_END, _NONE = "204", "404"
_UNCLEAR = (WRONG_LAST, WRONG_LAST_RACE, IN_FLIGHT)
_NAMED = re.compile(r"wrong last sequence: (\d+)")


class JetStreamLog:
    """`append_timeout`: seconds after which an append whose fate is not known, or a read that nobody answers, is
    `Unavailable`. `tombstone`: seconds that `session.erased` stands in the way of late writers, where the session was
    deleted with everything that it had; it has to be longer than any writer can be frozen."""

    def __init__(self, broker: Broker, *, append_timeout: float = 5.0, tombstone: int = TOMBSTONE) -> None:
        self._broker = broker
        self._replies = Replies(broker)
        self._timeout = append_timeout
        self._tombstone = tombstone

    async def append(self, key: SessionKey, decision: Decision, expected: int) -> int:
        subject = _subject(key)
        payload = codec.encode(decision.event)
        head = _head(decision, expected, self._tombstone)
        if len(head) + len(payload) > self._broker.nc.max_payload:
            raise LogError(f"{key}: an event of {len(payload)} bytes is more than the broker takes")
        write = _Write(key, decision.event.id, subject, head, payload, expected)
        tries = _Tries(self._timeout)
        ack = await self._publish(write, tries)
        if ack is not None and ack.error is None and not ack.duplicate:
            return ack.seq
        return await self._insist(write, ack, tries)

    async def read(
        self, key: SessionKey, after: int = 0, *, at_least: int = 0, page: int = PAGE
    ) -> AsyncIterator[list[Recorded]]:
        subject = _subject(key)
        last, doubted = after, False
        tries = _Tries(self._timeout)
        while True:
            messages, left = await self._page(key, subject, last, page)
            try:
                events = _linked(key, messages, last)
            except BrokenChain as broken:
                if doubted:
                    yield [await self._deletion(key, broken)]
                    return
                doubted = True  # the line may have lost a message of the answer, and then it is whole the next time
                continue
            if events:
                self._broker.clock.observe(events[-1].time)
                last, doubted = events[-1].seq, False
                yield events
                tries = _Tries(self._timeout)
            if left:
                continue
            if last >= at_least:
                return
            if not await tries.another():
                raise Unavailable(f"{key}: event {at_least} is stored, but the broker shows none after {last}")

    async def at(self, key: SessionKey, seq: int) -> Recorded | None:
        found = await self._stored(key, {"seq": seq})
        return _recorded(found) if found and found.subject == _subject(key) else None

    async def last(self, key: SessionKey) -> int:
        found = await self._last(key)
        return found.seq if found else 0

    async def subscribe(self, key: SessionKey, on_event: Listener, on_lost: Callable[[], None]) -> Republished:
        subscription = Republished(self._broker, subjects.feed(key), on_event, on_lost)
        await subscription.open()
        return subscription

    async def overwrite(self, key: SessionKey) -> None:
        subject = _subject(key)
        found = await self._last(key)
        if found is None or _header(found, subjects.TYPE) not in (DELETED, ERASED):
            raise LogError(f"{key}: is not deleted, nothing of it is removed")
        await self._asked(key, erase(self._broker, subjects.SESSIONS, subject, before=found.seq))

    async def archive(self, key: SessionKey, run: int, record: bytes) -> None:
        headers = {EXPECTED: "0", subjects.TYPE: archive.TYPE}
        if len(record) + archive.HEAD_MAX > self._broker.nc.max_payload:
            raise LogError(f"{key}: a record of {len(record)} bytes is more than the broker takes")
        answer = await self._asked(key, self._broker.request(subjects.archive(key, run), record, headers))
        error = _acks.decode(answer.data).error
        if error and error.err_code != WRONG_LAST:  # that is: there is one
            raise Unavailable(f"{key}: the record of run {run} was refused: {error.description}")

    async def archives(self, key: SessionKey) -> AsyncIterator[tuple[int, bytes]]:
        after = 0
        while True:
            which: dict[str, object] = {"seq": after + 1, "next_by_subj": subjects.archive(key, "*")}
            found = await self._asked(key, self._broker.message(subjects.SESSIONS, which))
            if found is None:
                return
            yield subjects.parse_archive(found.subject)[1], found.data
            after = found.seq

    async def _last(self, key: SessionKey) -> Stored | None:
        """The session's last event, by the leader's word."""
        return await self._stored(key, {"last_by_subj": _subject(key)})

    async def _stored(self, key: SessionKey, which: dict[str, object]) -> Stored | None:
        tries = _Tries(self._timeout)
        while True:
            try:
                return await self._ask_leader(key, which, tries.patience)
            except Unavailable:
                if not await tries.another():
                    raise

    async def _deletion(self, key: SessionKey, broken: BrokenChain) -> Recorded:
        """The last event of a log that does not hang together, if it says why. Raises `broken` else."""
        found = await self._last(key)
        if found is None or _header(found, subjects.TYPE) not in (DELETED, ERASED):
            raise broken
        return _recorded(found)

    async def _insist(self, write: "_Write", ack: "_Ack | None", tries: "_Tries") -> int:
        """Finds out what became of an append, and repeats it while nothing stands behind its `expected`."""
        while (seq := await self._settle(write, ack, tries)) is None:
            if not await tries.another():
                reason = ack.error.description if ack and ack.error else "no answer"
                raise Unavailable(f"{write.key}: whether event {write.id} is stored is not known ({reason})")
            ack = await self._publish(write, tries)
            if ack is not None and ack.error is None and not ack.duplicate:
                return ack.seq
        return seq

    async def _publish(self, write: "_Write", tries: "_Tries") -> "_Ack | None":
        try:
            answer = await self._replies.one(write.subject, write.head, write.payload, tries.patience)
        except BrokerClosed as error:
            raise _closed(write.key) from error
        return answer and _acks.decode(answer.data)

    async def _settle(self, write: "_Write", ack: "_Ack | None", tries: "_Tries") -> int | None:
        """The event's sequence if it is stored, None if nothing is behind `expected`. Raises `Conflict`, or `LogError`
        where the broker refused the event as such."""
        error = ack.error if ack else None
        if error and error.code < 500 and error.err_code not in _UNCLEAR:
            raise LogError(f"{write.key}: the broker refused event {write.id}: {error.description}")
        earlier = ack.seq if ack and ack.duplicate and ack.seq <= write.expected else None
        behind: dict[str, object] = {"seq": write.expected + 1, "next_by_subj": write.subject}
        try:
            found = await self._ask_leader(write.key, {"seq": earlier} if earlier else behind, tries.patience)
        except Unavailable:
            return None
        if found is not None and found.subject == write.subject and _header(found, subjects.MESSAGE_ID) == write.id:
            return found.seq
        if earlier and found is not None:
            raise LogError(f"{write.key}: the id {write.id} belongs to another event, {earlier}")
        if earlier:  # it was stored once and has been removed
            raise Conflict(write.key, write.expected)
        named = error and error.last
        if found is not None or (named is not None and named < write.expected):
            raise Conflict(write.key, write.expected, named)
        return None

    async def _ask_leader(self, key: SessionKey, which: dict[str, object], timeout: float) -> Stored | None:
        return await self._asked(key, self._broker.message(subjects.SESSIONS, which, timeout))

    async def _asked(self, key: SessionKey, question: Awaitable[T]) -> T:
        """The broker's answer. Raises `Unavailable`, `LogError`."""
        try:
            return await question
        except (BrokerError, BrokerTimeout) as error:
            raise Unavailable(f"{key}: {error}") from error
        except BrokerClosed as error:
            raise _closed(key) from error
        except BrokerFault as error:
            raise LogError(f"{key}: {error}") from error

    async def _page(self, key: SessionKey, subject: str, after: int, count: int) -> tuple[list[Msg], int]:
        """The next messages, at most `count`, and how many there are behind them."""
        which = f'{{"seq":{after + 1},"next_by_subj":"{subject}","batch":{count},"max_bytes":{PAGE_BYTES}}}'.encode()
        tries = _Tries(self._timeout)
        while (messages := await self._several(key, which, tries.patience)) is None:
            if not await tries.another():
                raise Unavailable(f"{key}: the broker did not answer")
        end = messages.pop()
        status = end.headers[STATUS] if end.headers else ""
        if status == _NONE:
            return [], 0
        if status != _END:
            raise LogError(f"{key}: the broker cannot read after {after}: {end.headers}")
        return messages, int(end.headers[PENDING]) if end.headers else 0

    async def _several(self, key: SessionKey, which: bytes, timeout: float) -> list[Msg] | None:
        try:
            return await self._replies.several(_DIRECT, which, timeout)
        except BrokerClosed as error:
            raise _closed(key) from error


class _Tries:
    """Tries of one thing, `timeout` seconds in all, with growing pauses between them."""

    __slots__ = ("_clock", "_deadline", "_pauses")

    def __init__(self, timeout: float) -> None:
        self._clock = asyncio.get_running_loop().time
        self._deadline = self._clock() + timeout
        self._pauses = 0

    @property
    def patience(self) -> float:
        """Seconds that the next question may wait for its answer."""
        return min(RETRY, max(self._deadline - self._clock(), MOMENT))

    async def another(self) -> bool:
        """Pauses before another try. False: the time is over."""
        pause = PAUSES[min(self._pauses, len(PAUSES) - 1)]
        self._pauses += 1
        if self._clock() + pause >= self._deadline:
            return False
        await asyncio.sleep(pause)
        return True


class _Write(msgspec.Struct):
    key: SessionKey
    id: str
    subject: str
    head: bytes
    payload: bytes
    expected: int


class _Fault(Refusal):
    @property
    def last(self) -> int | None:
        """The session's last sequence, where the broker names it."""
        match = _NAMED.search(self.description)
        return int(match[1]) if match else None


class _Ack(msgspec.Struct):
    seq: int = 0
    duplicate: bool = False
    error: _Fault | None = None


_acks = msgspec.json.Decoder(_Ack)


def _header(stored: Stored, wanted: str) -> str:
    for line in stored.hdrs.decode(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name == wanted:
            return value.strip()
    return ""


def _recorded(stored: Stored) -> Recorded:
    previous = int(_header(stored, EXPECTED) or UNGUARDED)
    return codec.decode(stored.data, seq=stored.seq, previous=previous, time=parse_time(stored.time))


def _linked(key: SessionKey, messages: list[Msg], after: int) -> list[Recorded]:
    """Their events, each of which follows the one before it; `session.erased` follows anything. Raises
    `BrokenChain`."""
    page: list[Recorded] = []
    for message in messages:
        recorded = recorded_of(message)
        if recorded.previous != after and not isinstance(recorded.event.data, SessionErased):
            raise BrokenChain(key, recorded.seq, recorded.previous, after)
        page.append(recorded)
        after = recorded.seq
    return page


def _closed(key: SessionKey) -> LogError:
    return LogError(f"{key}: the connection to the broker has been closed")


@lru_cache(maxsize=65536)
def _subject(key: SessionKey) -> str:
    if not ids.is_name(key.account) or not ids.is_session(key.session):
        raise ValueError(f"{key} names no session")
    return subjects.session(key)


def _head(decision: Decision, expected: int, tombstone: int) -> bytes:
    headers = codec.headers(decision)
    erased = decision.event.data
    if isinstance(erased, SessionErased):
        headers[ROLLUP] = "sub"
        if erased.mode == "erase":
            headers[TTL] = f"{tombstone}s"
    lines = [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join(("NATS/1.0", f"{EXPECTED}: {expected}", *lines, "", ""))
    if head.count("\n") != len(lines) + 3:
        raise ValueError(f"{decision.event.key}: a header of event {decision.event.id!r} holds a line break")
    return head.encode()
