"""The feed: every event once, in order, whatever is lost on the way."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from itertools import count

import pytest
from tests.contracts.events import assert_whole, decision, fill, new_key, read
from tests.support.nats import connect, freeze, thaw
from tests.support.proxy import Proxy, proxy
from tests.support.waiting import eventually

from turnstream.broker.connection import Broker
from turnstream.broker.server import NatsServer
from turnstream.ids import SessionKey
from turnstream.log.base import BrokenChain, Listener, Log, LogError, Subscription, Unavailable
from turnstream.log.feed import HEARD_MAX, CaughtUp, Feed
from turnstream.log.jetstream import JetStreamLog
from turnstream.log.memory import MemoryLog
from turnstream.session.events import Recorded

KEY = SessionKey("default", "s1")
NEVER = 3600.0


class Lossy(MemoryLog):
    """A log in memory whose listeners hear only what `hears` lets through; `says_lost` tells them of a loss."""

    def __init__(self) -> None:
        ticks = count(1_790_000_000_000)
        super().__init__(lambda: next(ticks))
        self.hears: Callable[[Recorded], bool] = lambda recorded: True
        self.says_lost: list[Callable[[], None]] = []
        self.failures = 0
        self.while_reading: Callable[[], None] = lambda: None
        self.shown_up_to = 1_000_000
        self.reads = 0
        self.closed = 0

    async def subscribe(self, key: SessionKey, on_event: Listener, on_lost: Callable[[], None]) -> Subscription:
        self.says_lost.append(on_lost)
        inner = await super().subscribe(key, lambda heard: on_event(heard) if self.hears(heard) else None, on_lost)
        return _Counting(self, inner)

    async def read(self, key: SessionKey, after: int = 0, *, at_least: int = 0) -> AsyncIterator[list[Recorded]]:
        self.reads += 1
        if self.failures:
            self.failures -= 1
            raise Unavailable("no answer")
        shown = max(self.shown_up_to, at_least)
        async for page in super().read(key, after, at_least=at_least):
            self.while_reading()
            if page := [recorded for recorded in page if recorded.seq <= shown]:
                yield page


class _Counting:
    def __init__(self, log: Lossy, inner: Subscription) -> None:
        self._log = log
        self._inner = inner

    async def close(self) -> None:
        self._log.closed += 1
        await self._inner.close()


class Reader:
    """Reads a feed in a task of its own."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.events: list[Recorded] = []
        self.caught_up: int | None = None
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for item in self.feed:
            if isinstance(item, CaughtUp):
                assert self.caught_up is None
                self.caught_up = item.seq
            else:
                self.events.append(item)

    @property
    def seqs(self) -> list[int]:
        return [recorded.seq for recorded in self.events]

    async def until(self, seq: int, timeout: float = 10.0) -> list[int]:
        """All sequences, once this one has come."""

        def there() -> bool:
            if self._task.done():
                self._task.result()
            return seq in self.seqs or seq == self.caught_up

        await eventually(there, timeout, every=0.005, what=f"event {seq} on the feed")
        return self.seqs

    async def end(self) -> None:
        await self.feed.close()
        await self._task


@pytest.fixture
def memory() -> Lossy:
    return Lossy()


@pytest.fixture
def key(account: str) -> SessionKey:
    return new_key(account)


@pytest.fixture
async def log(nats: Broker) -> JetStreamLog:
    return JetStreamLog(nats)


def quiet(log: Log, after: int = 0, key: SessionKey = KEY) -> Feed:
    """A feed that never looks by itself."""
    return Feed(log, key, after=after, settle=NEVER, idle=NEVER)


# -- the algorithm, on a log in memory -------------------------------------------------------------------------------


async def test_a_feed_is_the_log_then_caught_up_then_live(memory: Lossy) -> None:
    before = await fill(memory, KEY, 3)
    async with quiet(memory) as feed:
        items = [await anext(feed) for _ in range(4)]
        assert items == [*await read(memory, KEY), CaughtUp(before[-1])]
        (live,) = await fill(memory, KEY, 1, before[-1])
        assert [await anext(feed)] == await read(memory, KEY, before[-1])
        assert live > before[-1]
    assert memory.closed == 1


async def test_a_feed_begins_behind_a_sequence(memory: Lossy) -> None:
    seqs = await fill(memory, KEY, 5)
    for index, after in enumerate([0, *seqs]):
        reader = Reader(quiet(memory, after))
        assert await reader.until(seqs[-1]) == seqs[index:]
        assert reader.caught_up == seqs[-1]
        await reader.end()


async def test_a_feed_of_a_session_that_does_not_exist_waits_for_it(memory: Lossy) -> None:
    async with quiet(memory) as feed:
        assert await anext(feed) == CaughtUp(0)
        (first,) = await fill(memory, KEY, 1)
        item = await anext(feed)
        assert isinstance(item, Recorded)
        assert item.seq == first


async def test_what_is_stored_while_the_backlog_is_read_comes_once(memory: Lossy) -> None:
    """Heard, and perhaps read too."""
    before = await fill(memory, KEY, 600)
    written: list[asyncio.Task[list[int]]] = []

    def write() -> None:
        expected = memory._events[KEY][-1].seq
        task = asyncio.create_task(fill(memory, KEY, 1, expected))
        written.append(task)

    memory.while_reading = write
    reader = Reader(quiet(memory))
    await reader.until(before[-1])
    memory.while_reading = lambda: None
    await asyncio.gather(*written, return_exceptions=True)
    last = await memory.last(KEY)
    assert await reader.until(last) == [recorded.seq for recorded in await read(memory, KEY)]
    assert last > before[-1]
    await reader.end()


async def test_a69_a_lost_notification_is_made_good_by_the_next(memory: Lossy) -> None:
    reader = Reader(quiet(memory))
    await reader.until(0)
    memory.hears = lambda recorded: False
    lost = await fill(memory, KEY, 3)
    memory.hears = lambda recorded: True
    (heard,) = await fill(memory, KEY, 1, lost[-1])
    assert await reader.until(heard) == [*lost, heard]
    await reader.end()


async def test_what_was_heard_is_read_even_where_a_replica_lags(memory: Lossy) -> None:
    memory.shown_up_to = 0
    reader = Reader(quiet(memory))
    await reader.until(0)
    memory.hears = lambda recorded: recorded.seq == 2
    seqs = await fill(memory, KEY, 2)
    assert await reader.until(seqs[-1]) == seqs
    await reader.end()


async def test_what_was_read_and_heard_costs_no_other_read(memory: Lossy) -> None:
    before = await fill(memory, KEY, 1)

    def write() -> None:
        memory.while_reading = lambda: None
        for listener in memory._listeners[KEY].values():
            listener(memory._events[KEY][0])

    memory.while_reading = write
    reader = Reader(quiet(memory))
    await reader.until(before[-1])
    (live,) = await fill(memory, KEY, 1, before[-1])
    assert await reader.until(live) == [*before, live]
    assert memory.reads == 1
    await reader.end()


@pytest.mark.parametrize(("settle", "idle"), [(0.05, NEVER), (0.05, 0.05)])
async def test_a69_a_lost_notification_is_made_good_without_a_next(memory: Lossy, settle: float, idle: float) -> None:
    memory.hears = lambda recorded: False
    reader = Reader(Feed(memory, KEY, after=0, settle=settle, idle=idle))
    await reader.until(0)
    expected = 0
    for _ in range(3 if idle < NEVER else 1):
        (expected,) = await fill(memory, KEY, 1, expected)
        await reader.until(expected)
    await reader.end()


async def test_a_loss_that_is_noticed_is_read_at_once(memory: Lossy) -> None:
    memory.hears = lambda recorded: False
    reader = Reader(quiet(memory))
    await reader.until(0)
    lost = await fill(memory, KEY, 3)
    (says_lost,) = memory.says_lost
    says_lost()
    assert await reader.until(lost[-1]) == lost
    await reader.end()


async def test_a_loss_while_the_log_is_read_is_read_again(memory: Lossy) -> None:
    memory.hears = lambda recorded: False
    before = await fill(memory, KEY, 10)

    def write_and_lose() -> None:
        memory.while_reading = lambda: None
        task = asyncio.ensure_future(fill(memory, KEY, 1, before[-1]))
        task.add_done_callback(lambda _: memory.says_lost[0]())

    memory.while_reading = write_and_lose
    reader = Reader(quiet(memory))
    await reader.until(before[-1])
    await eventually(lambda: len(reader.events) == 11)
    assert_whole(reader.events)
    await reader.end()


async def test_a_feed_that_hears_too_much_reads(memory: Lossy) -> None:
    """More than it keeps while nobody takes anything from it."""
    feed = quiet(memory)
    assert await anext(feed) == CaughtUp(0)
    seqs = await fill(memory, KEY, 2 * HEARD_MAX + 100)
    assert len(feed._heard) <= HEARD_MAX
    reader = Reader(feed)
    assert await reader.until(seqs[-1]) == seqs
    await reader.end()


async def test_a_busy_feed_does_not_look_while_events_follow_each_other(memory: Lossy) -> None:
    reader = Reader(Feed(memory, KEY, after=0, settle=0.0, idle=0.2))
    await reader.until(0)
    await eventually(lambda: memory.reads == 2)
    expected = 0
    for _ in range(30):
        (expected,) = await fill(memory, KEY, 1, expected)
        await reader.until(expected)
        await asyncio.sleep(0.01)
    assert memory.reads <= 3
    await reader.end()


async def test_a_broker_that_does_not_answer_fails_a_feed_that_begins(memory: Lossy) -> None:
    memory.failures = 1
    feed = quiet(memory)
    with pytest.raises(Unavailable):
        await anext(feed)
    await feed.close()


async def test_a_broker_that_does_not_answer_delays_a_feed_that_goes_on(
    memory: Lossy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnstream.log.feed.AGAIN", 0.01)
    reader = Reader(quiet(memory))
    await reader.until(0)
    memory.hears = lambda recorded: False
    lost = await fill(memory, KEY, 2)
    memory.failures = 5
    memory.says_lost[0]()
    assert await reader.until(lost[-1]) == lost
    assert memory.failures == 0
    await reader.end()


async def test_a_broken_chain_ends_the_feed(memory: Lossy, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(key: SessionKey, after: int = 0, *, at_least: int = 0) -> AsyncIterator[list[Recorded]]:
        raise BrokenChain(key, 5, 3, 4)
        yield []

    async with quiet(memory) as feed:
        assert await anext(feed) == CaughtUp(0)
        monkeypatch.setattr(memory, "read", broken)
        memory.says_lost[0]()
        with pytest.raises(BrokenChain):
            await anext(feed)


async def test_closing_ends_whoever_waits(memory: Lossy) -> None:
    reader = Reader(quiet(memory))
    await reader.until(0)
    await reader.end()
    assert memory.closed == 1
    await fill(memory, KEY, 1)
    with pytest.raises(StopAsyncIteration):
        await anext(reader.feed)
    assert reader.events == []


# -- on a server -----------------------------------------------------------------------------------------------------


async def test_a01_a_burst_comes_once_in_order_and_resumes_anywhere(log: JetStreamLog, key: SessionKey) -> None:
    reader = Reader(quiet(log, key=key))
    await reader.until(0)
    seqs = await fill(log, key, 2000)
    assert await reader.until(seqs[-1]) == seqs
    assert_whole(reader.events)
    assert reader.events == await read(log, key)
    await reader.end()
    for cut in (1, 2, 999, 1000, 1998, 1999, 2000):
        resumed = Reader(quiet(log, seqs[cut - 1], key))
        assert await resumed.until(seqs[-1]) == seqs[cut:]
        await resumed.end()


async def test_a02_live_and_replay_meet_without_a_seam(nats_url: str, log: JetStreamLog, key: SessionKey) -> None:
    choose = random.Random(2)
    done = asyncio.Event()

    async def write() -> list[int]:
        seqs: list[int] = []
        while not done.is_set():
            seqs += await fill(log, key, 1, seqs[-1] if seqs else 0)
            await asyncio.sleep(0.002)
        return seqs

    writing = asyncio.create_task(write())
    broker = await connect(nats_url)
    listening = JetStreamLog(broker)
    readers: list[Reader] = []
    for _ in range(50):
        readers.append(Reader(quiet(listening, key=key)))
        await asyncio.sleep(choose.random() * 0.03)
    done.set()
    seqs = await writing
    for reader in readers:
        assert await reader.until(seqs[-1]) == seqs
        await reader.end()
    await broker.close()


async def test_a69_a_dead_subscription_is_made_good_in_bounded_time(
    nats_url: str, log: JetStreamLog, key: SessionKey
) -> None:
    """Only the way of the notifications is cut: the server forgets the subscription, the connection stays."""
    broker = await connect(nats_url)
    reader = Reader(Feed(JetStreamLog(broker), key, after=0, settle=0.1, idle=0.3))
    await reader.until(0)
    (sid,) = (sid for sid, sub in broker.nc._subs.items() if sub.subject.startswith("ts.feed."))
    await broker.nc._send_unsubscribe(sid)
    await broker.nc.flush()
    seqs = await fill(log, key, 5)
    assert await reader.until(seqs[-1], timeout=2) == seqs
    more = await fill(log, key, 5, seqs[-1])
    assert await reader.until(more[-1], timeout=2) == seqs + more
    await reader.end()
    await broker.close()


async def test_a70_a_backlog_of_many_pages_is_replayed_to_its_end_while_events_go_on(
    log: JetStreamLog, key: SessionKey
) -> None:
    seqs = await fill(log, key, 5000)
    reader = Reader(quiet(log, key=key))
    for _ in range(200):
        seqs += await fill(log, key, 1, seqs[-1])
    assert await reader.until(seqs[-1], timeout=20) == seqs
    assert reader.caught_up is not None
    seqs += await fill(log, key, 5, seqs[-1])
    assert await reader.until(seqs[-1]) == seqs
    await reader.end()


@pytest.fixture
async def line(nats: Broker, nats_url: str) -> AsyncIterator[Proxy]:
    """A line to the server that can be disturbed."""
    async with proxy(nats_url) as line:
        yield line


async def test_a02_a_feed_goes_on_over_reconnects(line: Proxy, log: JetStreamLog, key: SessionKey) -> None:
    broker = await connect(line.url)
    reader = Reader(quiet(JetStreamLog(broker), key=key))
    await reader.until(0)
    seqs: list[int] = []
    for connections in range(2, 7):
        line.swallow()
        seqs += await fill(log, key, 20, seqs[-1] if seqs else 0)
        line.cut()
        seqs += await fill(log, key, 20, seqs[-1])
        await eventually(lambda wanted=connections: line.connections == wanted)
    assert await reader.until(seqs[-1]) == seqs
    await reader.end()
    await broker.close()


async def test_a10_a_frame_that_is_lost_is_noticed_and_read(line: Proxy, log: JetStreamLog, key: SessionKey) -> None:
    """The cursor is the event's own number, and each event names the one before it."""
    broker = await connect(line.url)
    far = JetStreamLog(broker)
    heard: list[Recorded] = []
    subscription = await far.subscribe(key, heard.append, lambda: None)
    reader = Reader(quiet(far, key=key))
    await reader.until(0)
    (first,) = await fill(log, key, 1)
    await eventually(lambda: heard)
    line.swallow()
    (lost,) = await fill(log, key, 1, first)
    await line.swallowed.wait()
    line.swallowing = False
    (third,) = await fill(log, key, 1, lost)
    await eventually(lambda: len(heard) == 2)
    assert [(recorded.seq, recorded.previous) for recorded in heard] == [(first, 0), (third, lost)]
    assert await reader.until(third) == [first, lost, third]
    resumed = Reader(quiet(far, first, key))
    assert await resumed.until(third) == [lost, third]
    await subscription.close()
    await resumed.end()
    await reader.end()
    await broker.close()


async def test_a61_a_feed_goes_on_after_its_server_was_killed(
    own_nats: NatsServer, broker: Broker, key: SessionKey
) -> None:
    log = JetStreamLog(broker)
    reader = Reader(quiet(log, key=key))
    seqs = await fill(log, key, 20)
    for _ in range(2):
        await reader.until(seqs[-1])
        own_nats.kill()
        await own_nats.start()
        seqs += await fill(log, key, 20, seqs[-1])
    assert await reader.until(seqs[-1]) == seqs
    await reader.end()


async def test_a67_nothing_is_delivered_that_is_not_stored(
    own_nats: NatsServer, broker: Broker, key: SessionKey
) -> None:
    """The server is killed again and again under a writer; what a listener saw is what is there afterwards."""
    log = JetStreamLog(broker, append_timeout=10)
    listening = await connect(own_nats.url)
    reader = Reader(quiet(JetStreamLog(listening), key=key))
    await reader.until(0)
    done = asyncio.Event()

    async def write() -> list[int]:
        seqs: list[int] = []
        while not done.is_set():
            seqs.append(await log.append(key, decision(key, len(seqs)), seqs[-1] if seqs else 0))
        return seqs

    writing = asyncio.create_task(write())
    for _ in range(3):
        enough = len(reader.events) + 20
        await eventually(lambda enough=enough: len(reader.events) > enough)
        own_nats.kill()
        await own_nats.start()
    done.set()
    seqs = await writing
    assert await reader.until(seqs[-1]) == seqs
    assert reader.events == await read(log, key)
    assert_whole(reader.events)
    await reader.end()
    await listening.close()


async def test_a69_a_frozen_server_that_thaws_loses_nothing(
    own_nats: NatsServer, broker: Broker, key: SessionKey
) -> None:
    log = JetStreamLog(broker)
    reader = Reader(Feed(log, key, after=0, settle=0.05, idle=0.1))
    (first,) = await fill(log, key, 1)
    await reader.until(first)
    freeze(own_nats)
    writing = asyncio.create_task(fill(log, key, 3, first))
    await asyncio.wait({writing}, timeout=0.5)
    thaw(own_nats)
    seqs = await writing
    assert await reader.until(seqs[-1]) == [first, *seqs]
    await reader.end()


async def test_a_feed_ends_with_its_connection(nats_url: str, nats: Broker, key: SessionKey) -> None:
    broker = await connect(nats_url)
    feed = Feed(JetStreamLog(broker), key, after=0, settle=NEVER, idle=0.05)
    assert await anext(feed) == CaughtUp(0)
    await broker.close()
    feed._lose()
    with pytest.raises(LogError, match="closed"):
        await anext(feed)
    await feed.close()
