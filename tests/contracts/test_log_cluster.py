"""The log on three servers that replicate: leaders are killed while writers race, followers lag behind."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TypeVar

import pytest
from msgspec import Struct, convert
from tests.contracts.events import assert_whole, decision, deleted, erased, event_id, fill, new_key, read, write
from tests.core.scenario import cancel, post, with_origin
from tests.support.nats import Cluster, connect, freeze, thaw
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.declare import declare
from turnstream.broker.errors import BrokerFault
from turnstream.broker.server import NatsServer
from turnstream.ids import SessionKey, derive
from turnstream.log.base import Conflict, LogError, Unavailable
from turnstream.log.feed import CaughtUp, Feed
from turnstream.log.handle import Sessions
from turnstream.log.jetstream import JetStreamLog
from turnstream.session.events import Opens, Recorded

T = TypeVar("T")

WRITERS = 6


@pytest.fixture
def keys(account: str) -> list[SessionKey]:
    return [new_key(account) for _ in range(3)]


async def connect_to(server: NatsServer) -> Broker:
    return await connect(server.url)


async def replicated(cluster: Cluster) -> Broker:
    broker = await connect(cluster.url)
    await declare(broker, replicas=3)
    return broker


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
async def test_a61_no_acked_append_is_lost_or_stored_twice_when_leaders_are_killed(
    cluster: Cluster, keys: list[SessionKey], kills: int
) -> None:
    """Writers race on a few sessions, listeners follow them, and whoever leads the stream is killed (-9)."""
    broker = await replicated(cluster)
    connections = [await connect_to(server) for server in cluster.servers]
    acked: dict[SessionKey, dict[str, int]] = {key: {} for key in keys}
    names = count()

    async def more(appends: int, what: str) -> None:
        enough = sum(map(len, acked.values())) + appends
        await eventually(lambda: sum(map(len, acked.values())) > enough, 60, what=what)

    done = asyncio.Event()

    async def writer(number: int) -> None:
        log = JetStreamLog(connections[number % 3], append_timeout=2)
        seqs = dict.fromkeys(keys, 0)
        while not done.is_set():
            name = next(names)
            key = keys[name % len(keys)]
            seqs[key] = acked[key][event_id(key, name)] = await write(log, key, name, seqs[key])

    followed: dict[SessionKey, list[Recorded]] = {key: [] for key in keys}

    async def follow(feed: Feed, key: SessionKey) -> None:
        async for item in feed:
            followed[key] += [] if isinstance(item, CaughtUp) else [item]

    feeds = [Feed(JetStreamLog(connections[n]), key, after=0, idle=0.5) for n, key in enumerate(keys)]
    following = [asyncio.create_task(follow(feed, key)) for feed, key in zip(feeds, keys, strict=True)]
    writing = [asyncio.create_task(writer(n)) for n in range(WRITERS)]
    for _ in range(kills):
        await more(300, "appends")
        leader = await cluster.leader(broker, subjects.SESSIONS)
        leader.kill()
        await more(300, "appends without the old leader")
        await leader.start()
    done.set()
    await asyncio.gather(*writing)
    log = JetStreamLog(broker)
    for key in keys:
        events = await read(log, key, at_least=max(acked[key].values()))
        assert_whole(events)
        assert {recorded.event.id: recorded.seq for recorded in events} == acked[key]
        await eventually(lambda key=key, events=events: len(followed[key]) == len(events), 20)
        assert followed[key] == events
    for feed in feeds:
        await feed.close()
    await asyncio.gather(*following)
    for each in (broker, *connections):
        await each.close()


async def test_the_same_append_through_every_server_at_once_has_one_effect(
    cluster: Cluster, keys: list[SessionKey]
) -> None:
    """The answers that only a cluster gives: an id that is in flight, a lost race that names no sequence."""
    broker = await replicated(cluster)
    logs = [JetStreamLog(await connect_to(server)) for server in cluster.servers]
    key, seq = keys[0], 0
    for number in range(20):
        same = decision(key, number)
        answers = await asyncio.gather(*(logs[n % 3].append(key, same, seq) for n in range(12)))
        assert len(set(answers)) == 1
        seq = answers[0]
    events = await read(logs[0], key, at_least=seq)
    assert len(events) == 20
    assert_whole(events)
    for log in logs:
        await log._broker.close()
    await broker.close()


async def test_a_follower_that_lags_hides_nothing_and_refuses_nothing(cluster: Cluster, keys: list[SessionKey]) -> None:
    """One server misses what the others store. Once it answers again, a process connected to it reads what is known to
    be stored, and refuses nobody by what it does not know."""
    broker = await replicated(cluster)
    leader = await cluster.leader(broker, subjects.SESSIONS)
    follower = cluster.others(leader)[0]
    near, far = await connect_to(leader), await connect_to(follower)
    log, lagging = JetStreamLog(near), JetStreamLog(far)
    key, other = keys[0], keys[1]
    (first,) = await fill(log, key, 1)
    assert await read(lagging, key, at_least=first)
    sessions = Sessions(log, now=near.clock.now)
    opening = with_origin(post("m1", opens=Opens()), id=derive(str(other), 1))
    await sessions.handle(other, opening)
    behind = Sessions(lagging, now=far.clock.now)
    assert (await behind.load(other, at_least=(await sessions.load(other)).seq)).runs

    freeze(follower)
    seqs = await fill(log, key, 500, first)
    await sessions.handle(other, with_origin(cancel(1), id=derive(str(other), 2)))
    thaw(follower)
    accepted = await behind.handle(other, with_origin(post("m2"), id=derive(str(other), 3)))
    assert accepted.session.last_run == 2
    assert [recorded.seq for recorded in await read(lagging, key, at_least=seqs[-1])] == [first, *seqs]
    for each in (broker, near, far):
        await each.close()


async def test_without_a_majority_nothing_is_stored_and_nothing_is_lost(
    cluster: Cluster, keys: list[SessionKey]
) -> None:
    broker = await replicated(cluster)
    leader = await cluster.leader(broker, subjects.SESSIONS)
    near = await connect_to(leader)
    log = JetStreamLog(near, append_timeout=1)
    key = keys[0]
    (first,) = await fill(log, key, 1)
    for other in cluster.others(leader):
        freeze(other)
    with pytest.raises(Unavailable):
        await log.append(key, decision(key, "x"), first)
    for other in cluster.others(leader):
        thaw(other)
    patient = JetStreamLog(near, append_timeout=20)
    second = await patient.append(key, decision(key, "x"), first)
    assert [recorded.seq for recorded in await read(patient, key, at_least=second)] == [first, second]
    await near.close()
    await broker.close()


async def test_s31_s59_a_session_is_removed_for_good_while_leaders_are_killed(
    cluster: Cluster, keys: list[SessionKey]
) -> None:
    """Each server comes to the tombstone alone, and nobody who writes late gets past it, wherever he asks."""
    broker = await replicated(cluster)
    log = JetStreamLog(broker, append_timeout=2)
    key = keys[0]
    seqs = await fill(log, key, 60, text="marzipan")
    end = await log.append(key, deleted(key, events=61), seqs[-1])

    async def until_done(work: Callable[[], Awaitable[T]]) -> T:
        async def done() -> tuple[T] | None:
            try:
                return (await work(),)
            except (Unavailable, LogError):
                return None

        return (await eventually(done, 60, what="a leader that does it"))[0]

    async def events_left() -> int:
        subject = subjects.session(key)
        info = await broker.api("STREAM.INFO.SESSIONS", {"subjects_filter": subject}, timeout=1)
        return convert(info["state"], _State).subjects.get(subject, 0)

    overwriting = asyncio.create_task(until_done(lambda: log.overwrite(key)))
    await eventually(lambda: _less(events_left, 40), 30, what="a part of it to be removed")
    leader = await cluster.leader(broker, subjects.SESSIONS)
    leader.kill()
    await overwriting
    tombstone = await until_done(lambda: log.append(key, erased(key, removed=61), end))
    await leader.start()
    for server in cluster.servers:
        connection = await connect_to(server)
        there = JetStreamLog(connection, append_timeout=3)
        for after in (0, seqs[10], end):
            found = await until_done(lambda there=there, after=after: read(there, key, after, at_least=tombstone))
            assert [recorded.seq for recorded in found] == [tombstone]
        for expected in (0, seqs[0], seqs[-1], end):
            with pytest.raises(Conflict):
                await there.append(key, decision(key, f"late {expected}"), expected)
        await connection.close()
    assert await log.last(key) == tombstone
    await broker.close()


async def _less(amount: Callable[[], Awaitable[int]], than: int) -> bool:
    with contextlib.suppress(BrokerFault):
        return 0 < await amount() < than
    return False


class _State(Struct):
    subjects: dict[str, int] = {}
