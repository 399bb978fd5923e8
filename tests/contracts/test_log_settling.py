"""Answers of the broker that do not say whether an event is stored: JetStreamLog finds out, and stores it once."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from nats.aio.msg import Msg
from tests.contracts.events import assert_whole, decision, fill, new_key, read
from tests.support.nats import connect, freeze, thaw
from tests.support.proxy import Proxy, proxy
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.answers import EXPECTED
from turnstream.broker.connection import Broker
from turnstream.broker.server import NatsServer
from turnstream.ids import SessionKey
from turnstream.log import codec, jetstream
from turnstream.log.base import BrokenChain, Conflict, LogError, Unavailable, Unreadable
from turnstream.log.jetstream import JetStreamLog
from turnstream.log.messages import UNGUARDED
from turnstream.session.events import Due


@pytest.fixture
def key(account: str) -> SessionKey:
    return new_key(account)


@pytest.fixture
async def log(nats: Broker) -> JetStreamLog:
    return JetStreamLog(nats, append_timeout=2)


async def change_stream(broker: Broker, **changes: object) -> None:
    info: Any = await broker.api(f"STREAM.INFO.{subjects.SESSIONS}")
    await broker.api(f"STREAM.UPDATE.{subjects.SESSIONS}", info["config"] | changes)


@pytest.fixture
async def line(nats: Broker, nats_url: str) -> AsyncIterator[Proxy]:
    """A line to the server that can be disturbed."""
    async with proxy(nats_url) as line:
        yield line


@pytest.fixture
async def far(line: Proxy) -> AsyncIterator[JetStreamLog]:
    """A log at the end of that line."""
    broker = await connect(line.url)
    yield JetStreamLog(broker, append_timeout=5)
    await broker.close()


async def test_an_ack_that_a_cut_line_lost_is_found_in_the_log(
    line: Proxy, far: JetStreamLog, log: JetStreamLog, key: SessionKey
) -> None:
    (first,) = await fill(far, key, 1)
    line.swallow()
    appending = asyncio.create_task(far.append(key, decision(key, "x"), first))
    await line.swallowed.wait()
    line.cut()
    seq = await appending
    assert [recorded.seq for recorded in await read(log, key)] == [first, seq]
    assert line.connections == 2


async def test_an_ack_that_never_came_is_found_in_the_log(
    line: Proxy, far: JetStreamLog, log: JetStreamLog, key: SessionKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream, "RETRY", 0.2)
    (first,) = await fill(far, key, 1)
    line.swallow()
    appending = asyncio.create_task(far.append(key, decision(key, "x"), first))
    await line.swallowed.wait()
    await eventually(lambda: read(log, key, first), what="the event in the log")
    line.swallowing = False
    seq = await appending
    assert [recorded.seq for recorded in await read(log, key)] == [first, seq]
    assert line.connections == 1


async def test_an_append_is_not_stored_twice_however_often_the_line_is_cut(
    line: Proxy, far: JetStreamLog, log: JetStreamLog, key: SessionKey
) -> None:
    async def write() -> list[int]:
        seq, stored = 0, []
        for number in range(200):
            seq = await far.append(key, decision(key, number), seq)
            stored.append(seq)
        return stored

    writing = asyncio.create_task(write())
    for _ in range(5):
        line.swallow()
        await asyncio.wait({writing, asyncio.create_task(line.swallowed.wait())}, return_when=asyncio.FIRST_COMPLETED)
        line.cut()
        connections = line.connections
        await eventually(lambda before=connections: line.connections > before or writing.done())
    seqs = await writing
    events = await read(log, key)
    assert [recorded.seq for recorded in events] == seqs
    assert_whole(events)


async def test_a_lost_race_is_a_conflict_also_where_the_answer_was_lost(
    line: Proxy, far: JetStreamLog, log: JetStreamLog, key: SessionKey
) -> None:
    (first,) = await fill(log, key, 1)
    await far.last(key)
    (second,) = await fill(log, key, 1, first)
    line.swallow()
    appending = asyncio.create_task(far.append(key, decision(key, "x"), first))
    await line.swallowed.wait()
    line.cut()
    with pytest.raises(Conflict):
        await appending
    assert [recorded.seq for recorded in await read(log, key)] == [first, second]


async def test_nothing_is_stored_after_unavailable_without_a_connection(
    line: Proxy, log: JetStreamLog, key: SessionKey
) -> None:
    """What cannot be sent is not kept to be sent later."""
    broker = await connect(line.url)
    far = JetStreamLog(broker, append_timeout=0.3)
    (first,) = await fill(far, key, 1)
    line.listening = False
    line.cut()
    await eventually(lambda: not broker.nc.is_connected)
    with pytest.raises(Unavailable):
        await far.append(key, decision(key, "x"), first)
    line.listening = True
    await eventually(lambda: broker.nc.is_connected)
    second = await far.append(key, decision(key, "y"), first)
    assert [recorded.seq for recorded in await read(log, key)] == [first, second]
    await broker.close()


async def test_a_frozen_server_stores_once(
    own_nats: NatsServer, broker: Broker, key: SessionKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream, "RETRY", 0.2)
    log = JetStreamLog(broker, append_timeout=5)
    (first,) = await fill(log, key, 1)
    freeze(own_nats)
    appending = asyncio.create_task(log.append(key, decision(key, "x"), first))
    done, _ = await asyncio.wait({appending}, timeout=1.0)
    assert not done
    thaw(own_nats)
    seq = await appending
    assert [recorded.seq for recorded in await read(log, key)] == [first, seq]


async def test_a_server_that_stays_frozen_is_unavailable(own_nats: NatsServer, broker: Broker, key: SessionKey) -> None:
    log = JetStreamLog(broker, append_timeout=0.5)
    freeze(own_nats)
    began = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable):
        await log.append(key, decision(key, "x"), 0)
    with pytest.raises(Unavailable):
        await read(log, key)
    with pytest.raises(Unavailable):
        await log.last(key)
    assert asyncio.get_running_loop().time() - began < 2.5
    thaw(own_nats)
    seq = await log.append(key, decision(key, "x"), 0)
    assert [recorded.seq for recorded in await read(log, key)] == [seq]


async def test_a_stream_that_is_not_there_is_unavailable(own_nats: NatsServer, key: SessionKey) -> None:
    broker = await connect(own_nats.url)
    log = JetStreamLog(broker, append_timeout=0.5)
    for failing in (log.append(key, decision(key, "x"), 0), read(log, key), log.last(key)):
        with pytest.raises(Unavailable):
            await failing
    await broker.close()


async def test_a67_what_a_full_stream_refuses_is_not_there(broker: Broker, key: SessionKey) -> None:
    await change_stream(broker, max_bytes=20_000, discard="new")
    log = JetStreamLog(broker, append_timeout=0.3)
    stored: list[int] = []

    async def write() -> None:
        for number in range(1000):
            stored.append(await log.append(key, decision(key, number, "x" * 1000), stored[-1] if stored else 0))

    with pytest.raises(Unavailable, match="maximum bytes"):
        await write()
    events = await read(log, key)
    assert [recorded.seq for recorded in events] == stored
    assert_whole(events)


async def test_an_event_larger_than_the_broker_takes_is_refused_before_it_is_sent(
    log: JetStreamLog, nats: Broker, key: SessionKey
) -> None:
    with pytest.raises(LogError, match="more than the broker takes"):
        await log.append(key, decision(key, "x", "x" * 2_000_000), 0)
    assert nats.nc.is_connected
    assert await log.last(key) == 0


async def test_events_as_large_as_the_broker_takes_are_read(log: JetStreamLog, key: SessionKey) -> None:
    """Each alone fills a page."""
    seq = 0
    for number in range(3):
        seq = await log.append(key, decision(key, number, "x" * (1024 * 1024 - 1000)), seq)
    events = await read(log, key)
    assert [recorded.seq for recorded in events][2:] == [seq]
    assert_whole(events)


async def test_an_event_that_the_stream_refuses_is_an_error(broker: Broker, key: SessionKey) -> None:
    await change_stream(broker, max_msg_size=2000)
    log = JetStreamLog(broker)
    with pytest.raises(LogError, match="refused") as refusal:
        await log.append(key, decision(key, "x", "x" * 3000), 0)
    assert not isinstance(refusal.value, Unavailable)


async def test_a_header_cannot_be_smuggled_in(log: JetStreamLog, key: SessionKey) -> None:
    due = Due(5, "default", "deadline\r\nts-wake: other")
    with pytest.raises(ValueError, match="line break"):
        await log.append(key, decision(key, 1, dues=(due,)), 0)
    assert await log.last(key) == 0


async def test_a_session_that_has_no_subject_is_refused(log: JetStreamLog) -> None:
    for key in (SessionKey("a.b", "s"), SessionKey("a", "*"), SessionKey("a", "s\r\nPUB x 0"), SessionKey("", "s")):
        with pytest.raises(ValueError, match="names no session"):
            await log.append(key, decision(key, 1), 0)
        with pytest.raises(ValueError, match="names no session"):
            await read(log, key)


async def test_the_headers_say_what_the_event_asks_of_others(log: JetStreamLog, nats: Broker, key: SessionKey) -> None:
    dues = (Due(600, "gpu", "deadline"), Due(5, "default", "expiry"))
    written = decision(key, 1, dues=dues)
    seq = await log.append(key, written, 0)
    got = await nats.request(f"$JS.API.DIRECT.GET.{subjects.SESSIONS}", b'{"seq":%d}' % seq)
    assert got.headers
    assert {name: got.headers[name] for name in (EXPECTED, "Nats-Msg-Id", "ts-type", "ts-wake", "ts-due")} == {
        EXPECTED: "0",
        "Nats-Msg-Id": written.event.id,
        "ts-type": "message.posted",
        "ts-wake": "default",
        "ts-due": "5 default expiry;600 gpu deadline",
    }


async def test_an_unguarded_write_breaks_the_chain(log: JetStreamLog, nats: Broker, key: SessionKey) -> None:
    (first,) = await fill(log, key, 1)
    foreign = codec.encode(decision(key, "foreign").event)
    await nats.request(subjects.session(key), foreign)
    with pytest.raises(BrokenChain) as broken:
        await read(log, key)
    assert (broken.value.key, broken.value.previous, broken.value.found) == (key, UNGUARDED, first)


async def test_a_missing_event_breaks_the_chain(log: JetStreamLog, nats: Broker, key: SessionKey) -> None:
    first, second, third = await fill(log, key, 3)
    await nats.api(f"STREAM.MSG.DELETE.{subjects.SESSIONS}", {"seq": second})
    with pytest.raises(BrokenChain) as broken:
        await read(log, key)
    assert (broken.value.seq, broken.value.previous, broken.value.found) == (third, second, first)
    with pytest.raises(BrokenChain):
        await read(log, key, first)
    assert await read(log, key, third) == []


async def test_a_message_that_the_line_lost_breaks_no_chain(
    log: JetStreamLog, key: SessionKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page without one of its messages: it is asked for again before the chain is called broken."""
    seqs = await fill(log, key, 5)
    several, losses = log._replies.several, [2]

    async def lossy(subject: str, payload: bytes, timeout: float) -> list[Msg] | None:
        messages = await several(subject, payload, timeout)
        if messages and losses:
            del messages[losses.pop()]
        return messages

    monkeypatch.setattr(log._replies, "several", lossy)
    assert [recorded.seq for recorded in await read(log, key)] == seqs
    assert not losses


async def test_what_is_no_event_is_named(log: JetStreamLog, nats: Broker, key: SessionKey) -> None:
    (first,) = await fill(log, key, 1)
    await nats.request(subjects.session(key), b"hello", {EXPECTED: str(first)})
    with pytest.raises(Unreadable) as unreadable:
        await read(log, key)
    assert unreadable.value.seq == await log.last(key)


async def test_a_message_id_that_belongs_to_another_event_is_an_error(
    log: JetStreamLog, nats: Broker, account: str
) -> None:
    """Ids are derived from the session, so this takes a writer that makes them otherwise."""
    one, two = new_key(account), new_key(account)
    same = decision(one, 1)
    await log.append(one, same, 0)
    (first,) = await fill(log, two, 1)
    with pytest.raises(LogError, match="belongs to another"):
        await log.append(two, same, first)
    assert await log.last(two) == first


async def test_a_closed_connection_is_an_error(nats_url: str, key: SessionKey) -> None:
    broker = await connect(nats_url)
    log = JetStreamLog(broker)
    await broker.close()
    append, subscribe = log.append(key, decision(key, 1), 0), log.subscribe(key, print, print)
    for failing in (append, read(log, key), log.last(key), subscribe):
        with pytest.raises(LogError) as error:
            await failing
        assert not isinstance(error.value, Unavailable)


@pytest.mark.parametrize(
    "answers",
    [
        [b'{"error":{"code":400,"err_code":10164,"description":"wrong last sequence"}}'],
        [b'{"error":{"code":409,"err_code":10158,"description":"duplicate message id is in process"}}'] * 3,
        [b'{"error":{"code":503,"err_code":10077,"description":"maximum bytes exceeded"}}'],
        [b'{"stream":"SESSIONS","seq":0,"duplicate":true}'],
    ],
    ids=["lost race", "in flight", "store failed", "duplicate of nothing"],
)
async def test_an_unclear_answer_is_settled(
    log: JetStreamLog, key: SessionKey, monkeypatch: pytest.MonkeyPatch, answers: list[bytes]
) -> None:
    """The broker gives these answers and has stored nothing: the event is published until it is stored, once."""
    left, asked = list(answers), Counter[str]()
    publish = log._publish

    async def answer(write: jetstream._Write, tries: jetstream._Tries) -> jetstream._Ack | None:
        asked["publish"] += 1
        return jetstream._acks.decode(left.pop(0)) if left else await publish(write, tries)

    monkeypatch.setattr(log, "_publish", answer)
    seq = await log.append(key, decision(key, 1), 0)
    assert [recorded.seq for recorded in await read(log, key)] == [seq]
    assert asked["publish"] == len(answers) + 1
