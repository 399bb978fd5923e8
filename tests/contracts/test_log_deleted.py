"""What every log promises of a deleted session: in memory, on one server, and on a cluster of three."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import count

import pytest
from tests.contracts.events import decision, deleted, erased, fill, new_key, read
from tests.contracts.test_log import place, shared_cluster  # noqa: F401 - fixtures
from tests.support.nats import connect
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.declare import declare
from turnstream.broker.erasing import erase_message
from turnstream.broker.errors import BrokerError
from turnstream.ids import SessionKey
from turnstream.log.base import BrokenChain, Conflict, Log, LogError
from turnstream.log.feed import CaughtUp, Feed
from turnstream.log.handle import Sessions
from turnstream.log.jetstream import JetStreamLog
from turnstream.log.known import Known
from turnstream.log.memory import MemoryLog
from turnstream.session.commands import Origin, PostMessage, UpdateSession
from turnstream.session.errors import Rejected
from turnstream.session.events import NAMES, Opens, Part, Recorded, Title


@pytest.fixture
async def broker(place: tuple[str, str]) -> AsyncIterator[Broker | None]:  # noqa: F811
    kind, url = place
    if kind == "memory":
        yield None
        return
    broker = await connect(url)
    await declare(broker, replicas=3 if kind == "cluster" else 1)
    yield broker
    await broker.close()


@pytest.fixture
async def log(broker: Broker | None) -> Log:
    ticks = count(1_790_000_000_000)
    return JetStreamLog(broker, append_timeout=2) if broker else MemoryLog(lambda: next(ticks))


@pytest.fixture
def stored(broker: Broker | None) -> Broker:
    assert broker
    return broker


on_brokers = pytest.mark.parametrize("place", ["server", "cluster"], indirect=True)
"""What the log in memory keeps cannot be damaged."""


@pytest.fixture
def key(account: str) -> SessionKey:
    return new_key(account)


def sessions_of(log: Log) -> Sessions:
    return Sessions(log, now=lambda: 1, known=Known(keep_bytes=1 << 20))


def kinds(events: Sequence[Recorded]) -> list[str]:
    return [NAMES[type(recorded.event.data)] for recorded in events]  # pyright: ignore[reportArgumentType]


async def until_read(log: Log, key: SessionKey, after: int, wanted: list[str], *, times: int = 1) -> None:
    """In a cluster a replica may take its time; so many times one after the other, and none does any more."""

    async def so() -> bool:
        return all([kinds(await read(log, key, after)) == wanted for _ in range(times)])

    await eventually(so, what=f"{wanted} after {after}")


async def delete(log: Log, key: SessionKey, events: int = 5) -> tuple[list[int], int]:
    """A session of so many events, and its deletion."""
    seqs = await fill(log, key, events)
    return seqs, await log.append(key, deleted(key, events=events + 1), seqs[-1])


async def remove(broker: Broker, *seqs: int) -> None:
    """Takes events out of the stream."""
    for seq in seqs:
        await broker.api(f"STREAM.MSG.DELETE.{subjects.SESSIONS}", {"seq": seq})


async def test_a_deleted_log_may_begin_anywhere(log: Log, key: SessionKey) -> None:
    seqs, end = await delete(log, key)
    await log.overwrite(key)
    await log.overwrite(key)
    for after in (0, seqs[0], seqs[-1]):
        await until_read(log, key, after, ["session.deleted"])
    assert await log.last(key) == end
    assert await read(log, key, end) == []


@on_brokers
async def test_a_deleted_log_may_have_holes(log: Log, key: SessionKey, stored: Broker) -> None:
    """Its removal was begun and is not finished."""
    seqs, _ = await delete(log, key)
    for missing in (seqs[2], seqs[0]):
        await remove(stored, missing)
        await until_read(log, key, 0, ["session.deleted"])
    await until_read(log, key, seqs[3], ["message.posted", "session.deleted"])


@on_brokers
@pytest.mark.parametrize("position", [0, 2])
async def test_any_other_log_that_lost_events_is_refused(
    log: Log, key: SessionKey, stored: Broker, position: int
) -> None:
    seqs = await fill(log, key, 5)
    await remove(stored, seqs[position])

    async def refused() -> bool:
        try:
            await read(log, key)
        except BrokenChain as broken:
            return broken.seq == seqs[position + 1]
        return False

    await eventually(refused, what="a refusal")


async def test_only_a_deleted_log_is_overwritten(log: Log, key: SessionKey) -> None:
    with pytest.raises(LogError):
        await log.overwrite(key)
    seqs = await fill(log, key, 3)
    with pytest.raises(LogError):
        await log.overwrite(key)
    assert [recorded.seq for recorded in await read(log, key, at_least=seqs[-1])] == seqs


@pytest.mark.parametrize("overwritten", [True, False])
async def test_the_tombstone_takes_the_place_of_everything(log: Log, key: SessionKey, overwritten: bool) -> None:
    seqs, end = await delete(log, key)
    if overwritten:
        await log.overwrite(key)
    tombstone = await log.append(key, erased(key, removed=6), end)
    for after in (0, *seqs, end):
        await until_read(log, key, after, ["session.erased"])
    assert await read(log, key, tombstone) == []
    assert await log.last(key) == tombstone
    assert await log.append(key, erased(key, removed=6), end) == tombstone
    await log.overwrite(key)
    assert await log.last(key) == tombstone


async def test_the_tombstone_is_guarded(log: Log, key: SessionKey) -> None:
    seqs, end = await delete(log, key)
    for expected in (0, seqs[-1]):
        with pytest.raises(Conflict):
            await log.append(key, erased(key), expected)
    assert len(await read(log, key, at_least=end)) == 6


async def test_s31_a_late_writer_is_refused_whatever_it_expects(log: Log, key: SessionKey) -> None:
    seqs, end = await delete(log, key)
    expectations = (0, *seqs, end)
    late = [decision(key, f"late {expected}") for expected in expectations]
    again = [decision(key, f"{expected}-{n}") for n, expected in enumerate((0, *seqs[:-1]))]
    await log.overwrite(key)
    tombstone = await log.append(key, erased(key), end)
    for expected, one in (*zip(expectations, late, strict=True), *zip((0, *seqs[:-1]), again, strict=True)):
        with pytest.raises(Conflict):
            await log.append(key, one, expected)
    assert await log.last(key) == tombstone


@on_brokers
async def test_the_tombstone_of_an_erased_session_expires(stored: Broker, key: SessionKey, account: str) -> None:
    log = JetStreamLog(stored, append_timeout=2, tombstone=1)
    kept = SessionKey(account, "kept")
    _, end = await delete(log, key)
    await log.append(key, erased(key), end)
    _, end = await delete(log, kept)
    stays = await log.append(kept, erased(kept, "detach"), end)
    sessions = sessions_of(log)
    assert (await sessions.load(key)).deleted

    async def gone() -> bool:
        return await log.last(key) == 0

    await eventually(gone, what="the tombstone to expire")
    assert await log.last(kept) == stays
    first = await log.append(key, decision(key, "again"), 0)
    session = await sessions.load(key, first)
    assert session.exists and session.events == 1
    _, events = await sessions.events(key)
    assert [recorded.seq for recorded in events] == [first]


async def test_of_several_records_of_a_run_the_first_is_kept(log: Log, account: str) -> None:
    key, other = new_key(account), new_key(account)
    await log.archive(key, 2, b"two")
    await log.archive(key, 1, b"one")
    await log.archive(key, 2, b"another")
    await log.archive(other, 1, b"other")
    assert [entry async for entry in log.archives(key)] == [(2, b"two"), (1, b"one")]
    assert await read(log, key) == []


# --- readers that know more than there is ---------------------------------------------------------------------------


class Following:
    """What a feed delivers until it ends."""

    def __init__(self, feed: Feed) -> None:
        self.heard: list[str] = []
        self._task = asyncio.create_task(self._follow(feed))

    async def _follow(self, feed: Feed) -> None:
        async with feed:
            async for item in feed:
                self.heard.append("caught up" if isinstance(item, CaughtUp) else kinds([item])[0])

    async def live(self) -> None:
        await eventually(lambda: "caught up" in self.heard, what="the feed to be live")

    async def ended(self) -> list[str]:
        await asyncio.wait_for(self._task, 20)
        return self.heard


async def test_a_feed_ends_with_the_deletion(log: Log, key: SessionKey) -> None:
    seqs = await fill(log, key, 2)
    await until_read(log, key, 0, ["message.posted"] * 2, times=20)  # whichever replica is asked: none is behind
    following = Following(Feed(log, key, after=0))
    await following.live()
    await log.append(key, deleted(key), seqs[-1])
    assert await following.ended() == ["message.posted", "message.posted", "caught up", "session.deleted"]


async def test_a_feed_opened_later_delivers_what_is_there_and_ends(log: Log, key: SessionKey) -> None:
    seqs, end = await delete(log, key, 3)
    await read(log, key, at_least=end)
    assert await Following(Feed(log, key, after=0)).ended() == [*["message.posted"] * 3, "session.deleted"]
    assert await Following(Feed(log, key, after=seqs[1])).ended() == ["message.posted", "session.deleted"]
    await log.overwrite(key)
    await until_read(log, key, 0, ["session.deleted"])
    assert await Following(Feed(log, key, after=seqs[1])).ended() == ["session.deleted"]
    await log.append(key, erased(key), end)
    await until_read(log, key, 0, ["session.erased"])
    for after in (0, seqs[1], end):
        assert await Following(Feed(log, key, after=after)).ended() == ["session.erased"]


async def test_a_feed_that_missed_the_deletion_ends_with_the_tombstone(log: Log, key: SessionKey) -> None:
    """What it listens to lost everything until then."""
    seqs = await fill(log, key, 2)
    following = Following(Feed(Deaf(log), key, after=0, settle=0.2, idle=0.2))
    await following.live()
    end = await log.append(key, deleted(key), seqs[-1])
    await log.append(key, erased(key), end)
    assert (await following.ended())[-1] in ("session.deleted", "session.erased")


class Deaf:
    """A log whose subscriptions lose everything."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)

    async def subscribe(self, key: SessionKey, *_: object) -> object:
        return await self._log.subscribe(key, lambda _: None, lambda: None)


def post(key: SessionKey, name: str, *, opens: Opens | None = None) -> PostMessage:
    return PostMessage(
        origin=Origin(id=f"{key}-{name}", actor="user:ann", time=1),
        message_id=name,
        author="user:ann",
        kind="notice",
        content=(Part(text="hello"),),
        specs={},
        opens=opens,
    )


@pytest.mark.parametrize("seen", ["alive", "deleted"])
@pytest.mark.parametrize("left", ["whole", "overwritten", "tombstone"])
async def test_a_process_with_an_older_fold_comes_out_right(log: Log, key: SessionKey, seen: str, left: str) -> None:
    ours, theirs = sessions_of(log), sessions_of(log)
    await ours.handle(key, post(key, "m1", opens=Opens()))
    last = (await ours.handle(key, post(key, "m2"))).session.seq
    await theirs.events(key, last)
    end = await log.append(key, deleted(key, events=3), last)
    if seen == "deleted":
        await theirs.events(key, end)
    at_least = end
    if left != "whole":
        await log.overwrite(key)
    if left == "tombstone":
        at_least = await log.append(key, erased(key, removed=3), end)
    await read(log, key, at_least=at_least)
    with pytest.raises(Rejected) as refusal:
        await theirs.handle(key, post(key, "m3", opens=Opens()))
    assert refusal.value.code == "not_found"
    session, events = await theirs.events(key)
    assert (session.seq, session.exists, session.deleted is not None) == (at_least, False, True)
    assert session.deleted and session.deleted.events == 3
    if left != "whole":
        await until_read(log, key, 0, ["session.erased" if left == "tombstone" else "session.deleted"])
        assert [recorded.seq for recorded in (await theirs.events(key))[1]] == [at_least]
    else:
        assert events[-1].seq == end
    assert await log.last(key) == at_least


async def test_nothing_that_was_said_is_kept_of_a_deleted_session(log: Log, key: SessionKey) -> None:
    """Neither by who deletes, nor by who hears of it, nor by who reads of it."""
    writer, hearer, reader = sessions_of(log), sessions_of(log), sessions_of(log)
    await writer.handle(key, post(key, "m1", opens=Opens()))
    for one in (hearer, reader):
        await one.events(key, await log.last(key))
    end = await log.append(key, deleted(key, events=2), await log.last(key))
    (recorded,) = await read(log, key, await _before(log, key, end), at_least=end)
    hearer.fold(key, recorded)
    await reader.load(key, end)
    title = UpdateSession(origin=Origin(id="t", actor="user:ann", time=1), title=Title(text="x", source="user"))
    with pytest.raises(Rejected):
        await writer.handle(key, title)
    await log.overwrite(key)
    await until_read(log, key, 0, ["session.deleted"])
    for one in (writer, hearer, reader):
        session, events = await one.events(key)
        assert kinds(events) == ["session.deleted"]
        assert session.deleted and session.deleted.events == 2


async def _before(log: Log, key: SessionKey, seq: int) -> int:
    return (await read(log, key, at_least=seq))[-1].previous


@on_brokers
async def test_a_message_that_is_not_there_is_no_error(stored: Broker, key: SessionKey) -> None:
    (seq,) = await fill(JetStreamLog(stored), key, 1)
    await erase_message(stored, subjects.SESSIONS, seq)
    await erase_message(stored, subjects.SESSIONS, seq)
    with pytest.raises(BrokerError):
        await erase_message(stored, "NOT_THERE", 1)
