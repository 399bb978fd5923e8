"""What every log promises: in memory, on one server, and on a cluster of three."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest
from tests.contracts.events import assert_whole, decision, event_id, fill, new_key, read, write
from tests.support.nats import Cluster, connect, run_alone

from turnstream.broker.declare import declare
from turnstream.ids import SessionKey
from turnstream.log import codec
from turnstream.log.base import PAGE, Conflict, Log, Unavailable
from turnstream.log.jetstream import JetStreamLog
from turnstream.log.memory import MemoryLog
from turnstream.session.events import Recorded


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three servers for all tests that harm none of them."""
    cluster = Cluster(tmp_path_factory.mktemp("shared-cluster"))
    run_alone(cluster.start())
    yield cluster
    run_alone(cluster.stop())


@pytest.fixture(params=["memory", "server", "cluster"])
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """What keeps the log, and its address."""
    match request.param:
        case "server":
            return request.param, request.getfixturevalue("nats_url")
        case "cluster":
            return request.param, request.getfixturevalue("shared_cluster").url
        case _:
            return request.param, ""


@pytest.fixture
async def log(place: tuple[str, str]) -> AsyncIterator[Log]:
    kind, url = place
    if kind == "memory":
        ticks = count(1_790_000_000_000)
        yield MemoryLog(lambda: next(ticks))
        return
    broker = await connect(url)
    await declare(broker, replicas=3 if kind == "cluster" else 1)
    yield JetStreamLog(broker, append_timeout=1)
    await broker.close()


@pytest.fixture
def key(account: str) -> SessionKey:
    return new_key(account)


async def test_what_is_appended_is_read(log: Log, key: SessionKey) -> None:
    first = await log.append(key, decision(key, 1), 0)
    second = await log.append(key, decision(key, 2), first)
    assert 0 < first < second
    events = await read(log, key, at_least=second)
    assert [(recorded.seq, recorded.previous) for recorded in events] == [(first, 0), (second, first)]
    assert [recorded.event for recorded in events] == [decision(key, n).event for n in (1, 2)]
    for recorded in events:
        assert recorded.payload == codec.encode(recorded.event)
        assert recorded.size == len(recorded.payload)
        assert recorded.time > 1_700_000_000_000


async def test_reading_begins_behind_a_sequence(log: Log, key: SessionKey) -> None:
    seqs = await fill(log, key, 5)
    for index, seq in enumerate(seqs):
        assert [recorded.seq for recorded in await read(log, key, seq, at_least=seqs[-1])] == seqs[index + 1 :]


async def test_an_event_is_found_by_its_sequence(log: Log, key: SessionKey) -> None:
    seqs = await fill(log, key, 3)
    other = SessionKey(key.account, f"{key.session}-other")
    (another,) = await fill(log, other, 1)
    for recorded in await read(log, key, at_least=seqs[-1]):
        assert await log.at(key, recorded.seq) == recorded
    assert await log.at(key, another) is None, "it is another session's"
    assert await log.at(key, another + 1000) is None
    assert await log.at(other, another) is not None


async def test_a_long_session_is_read_in_pages(log: Log, key: SessionKey) -> None:
    seqs = await fill(log, key, 2 * PAGE + 10)
    pages = [page async for page in log.read(key, at_least=seqs[-1])]
    assert [recorded.seq for page in pages for recorded in page] == seqs
    assert all(len(page) <= PAGE for page in pages)
    small = [page async for page in log.read(key, at_least=seqs[-1], page=7)]
    assert all(len(page) <= 7 for page in small) and [one.seq for page in small for one in page] == seqs
    assert_whole([recorded for page in pages for recorded in page])


async def test_large_events_are_read(log: Log, key: SessionKey) -> None:
    seqs = await fill(log, key, 5, text="x" * 500_000)
    assert [recorded.seq for recorded in await read(log, key, at_least=seqs[-1])] == seqs


async def test_a_session_that_does_not_exist_is_empty(log: Log, key: SessionKey) -> None:
    assert await read(log, key) == []
    assert await log.last(key) == 0


async def test_the_last_sequence_is_known(log: Log, key: SessionKey) -> None:
    seqs = await fill(log, key, 3)
    assert await log.last(key) == seqs[-1]


async def test_sessions_and_accounts_are_apart(log: Log, account: str) -> None:
    keys = [SessionKey(account, "one"), SessionKey(account, "two"), SessionKey(f"{account}x", "one")]
    for _ in range(3):
        for key in keys:
            await log.append(key, decision(key, await log.last(key)), await log.last(key))
    for key in keys:
        events = await read(log, key, at_least=await log.last(key))
        assert len(events) == 3
        assert {recorded.event.key for recorded in events} == {key}
        assert_whole(events)


async def test_an_append_behind_another_event_is_a_conflict(log: Log, key: SessionKey) -> None:
    first, second = await fill(log, key, 2)
    for expected in (0, first):
        with pytest.raises(Conflict) as conflict:
            await log.append(key, decision(key, "late"), expected)
        assert (conflict.value.key, conflict.value.expected) == (key, expected)
        assert conflict.value.last in (second, None)
    assert len(await read(log, key, at_least=second)) == 2


async def test_an_append_ahead_of_the_log_is_a_conflict(log: Log, key: SessionKey) -> None:
    """The writer has folded events that the log has lost."""
    (only,) = await fill(log, key, 1)
    with pytest.raises(Conflict) as conflict:
        await log.append(key, decision(key, "ahead"), only + 1000)
    assert conflict.value.last == only


async def test_an_append_to_nothing_that_expects_something_is_a_conflict(log: Log, key: SessionKey) -> None:
    with pytest.raises(Conflict) as conflict:
        await log.append(key, decision(key, 1), 1000)
    assert conflict.value.last == 0


async def test_the_same_append_again_has_one_effect(log: Log, key: SessionKey) -> None:
    (first,) = await fill(log, key, 1)
    second = await log.append(key, decision(key, 2), first)
    assert await log.append(key, decision(key, 2), first) == second
    third = await log.append(key, decision(key, 3), second)
    assert await log.append(key, decision(key, 2), first) == second
    assert await log.append(key, decision(key, 2), third) == second
    assert [recorded.seq for recorded in await read(log, key, at_least=third)] == [first, second, third]


async def test_the_same_append_many_times_at_once_has_one_effect(log: Log, key: SessionKey) -> None:
    (first,) = await fill(log, key, 1)
    seqs = await asyncio.gather(*(log.append(key, decision(key, 2), first) for _ in range(20)))
    assert len(set(seqs)) == 1
    assert [recorded.seq for recorded in await read(log, key, at_least=seqs[0])] == [first, seqs[0]]


async def test_of_many_appends_behind_one_event_one_is_stored(log: Log, key: SessionKey) -> None:
    (first,) = await fill(log, key, 1)
    answers = await asyncio.gather(
        *(log.append(key, decision(key, f"w{n}"), first) for n in range(20)), return_exceptions=True
    )
    stored = [answer for answer in answers if isinstance(answer, int)]
    assert len(stored) == 1
    assert all(isinstance(answer, int | Conflict) for answer in answers)
    assert [recorded.seq for recorded in await read(log, key, at_least=stored[0])] == [first, stored[0]]


async def test_racing_writers_lose_nothing(log: Log, key: SessionKey) -> None:
    each = 25

    async def writer(name: str) -> dict[str, int]:
        seq, stored = 0, {}
        for number in range(each):
            seq = stored[event_id(key, f"{name}-{number}")] = await write(log, key, f"{name}-{number}", seq)
        return stored

    acked: dict[str, int] = {}
    for stored in await asyncio.gather(*(writer(name) for name in "abcd")):
        acked |= stored
    events = await read(log, key, at_least=max(acked.values()))
    assert_whole(events)
    assert {recorded.event.id: recorded.seq for recorded in events} == acked


async def test_a_sequence_that_is_not_stored_is_not_shown(log: Log, key: SessionKey) -> None:
    (first,) = await fill(log, key, 1)
    with pytest.raises(Unavailable):
        await read(log, key, at_least=first + 1_000_000)


async def test_a_listener_hears_what_is_stored_from_now_on(log: Log, key: SessionKey) -> None:
    before = await fill(log, key, 2)
    heard: list[Recorded] = []
    enough = asyncio.Event()

    def hear(recorded: Recorded) -> None:
        heard.append(recorded)
        if len(heard) == 3:
            enough.set()

    subscription = await log.subscribe(key, hear, lambda: None)
    tail = await read(log, key, before[-1])
    after = await fill(log, key, 3, before[-1])
    await asyncio.wait_for(enough.wait(), 5)
    assert tail == []
    assert heard == await read(log, key, before[-1], at_least=after[-1])
    await subscription.close()
    last = await fill(log, key, 1, after[-1])
    await read(log, key, at_least=last[-1])
    assert len(heard) == 3
