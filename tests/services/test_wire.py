"""What travels beside the log, on a real server: wake-ups, timers, deltas, blobs."""

import asyncio
import base64
from collections.abc import AsyncIterator

import msgspec
import pytest
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.answers import check_stored
from turnstream.broker.connection import Broker
from turnstream.broker.errors import BrokerError, BrokerFault
from turnstream.broker.pull import Delivery, Pull
from turnstream.ids import SessionKey
from turnstream.session.events import Due
from turnstream.wire import live
from turnstream.wire.blobs import BlobLost, Blobs
from turnstream.wire.live import Delta, Live
from turnstream.wire.timers import Timers, parse_dues
from turnstream.wire.work import Work

CAUSE = subjects.CAUSE


@pytest.fixture
def key(account: str) -> SessionKey:
    return SessionKey(account, "s1")


@pytest.fixture
async def woken(nats: Broker, account: str) -> AsyncIterator[list[Delivery]]:
    """Every wake-up of the queue named like the account, as it comes. None is acked."""
    found: list[Delivery] = []
    pull = Pull(nats, subjects.runner_consumer(account, 30.0))

    async def take() -> None:
        async for deliveries in pull:
            found.extend(deliveries)

    task = asyncio.create_task(take())
    yield found
    await pull.close()
    await task
    await nats.api(f"CONSUMER.DELETE.WORK.runner-{account}")
    await nats.api("STREAM.PURGE.WORK", {"filter": subjects.work_of(account)})


# --- wake-ups -----------------------------------------------------------------------------------------------------


async def test_a_wake_up_names_its_session_and_its_cause(
    nats: Broker, account: str, key: SessionKey, woken: list[Delivery]
) -> None:
    await Work(nats).wake(account, key, 17)
    await eventually(lambda: woken)
    assert subjects.parse_work(woken[0].subject) == (account, key)
    assert woken[0].headers == {CAUSE: "17"}
    assert woken[0].data == b""


async def test_a_wake_up_is_repeated_only_without_a_message_id(
    nats: Broker, account: str, key: SessionKey, woken: list[Delivery]
) -> None:
    work = Work(nats)
    await work.wake(account, key, 1, message_id=f"{account}-1")
    await eventually(lambda: woken)
    woken[0].ack()
    await eventually(lambda: _gone(work, woken[0].seq, key))
    await work.wake(account, key, 1, message_id=f"{account}-1")
    await work.wake(account, key, 2)
    await work.wake(account, key, 2)
    await eventually(lambda: len(woken) == 3)
    assert [delivery.headers for delivery in woken] == [
        {CAUSE: "1", "Nats-Msg-Id": f"{account}-1"},
        {CAUSE: "2"},
        {CAUSE: "2"},
    ]


async def _gone(work: Work, seq: int, key: SessionKey) -> bool:
    return not await work.exists(seq, key)


async def test_a_wake_up_exists_until_it_is_acknowledged(
    nats: Broker, account: str, key: SessionKey, woken: list[Delivery]
) -> None:
    work = Work(nats)
    await work.wake(account, key, 1)
    await eventually(lambda: woken)
    seq = woken[0].seq
    assert await work.exists(seq, key)
    assert not await work.exists(seq, SessionKey(account, "s2")), "numbered anew, it would be another's"
    assert not await work.exists(seq + 1_000_000, key)
    woken[0].ack()
    await eventually(lambda: _gone(work, seq, key))


async def test_a_wake_up_that_is_not_stored_is_an_error(nats: Broker, key: SessionKey) -> None:
    with pytest.raises(BrokerFault):
        await Work(nats).wake("no.such.queue", key, 1)
    refusal = b'{"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"},"stream":"WORK"}'
    with pytest.raises(BrokerError, match="maximum messages exceeded"):
        check_stored("ts.work.q.a.s", refusal)
    check_stored("ts.work.q.a.s", b'{"stream":"WORK","seq":3}')


# --- timers -------------------------------------------------------------------------------------------------------


def test_dues_are_read_as_they_are_written() -> None:
    assert parse_dues("1500 default deadline;60000 gpu expiry") == [
        Due(1500, "default", "deadline"),
        Due(60000, "gpu", "expiry"),
    ]
    for nonsense in ("", "soon default deadline", "5 default", "5 a b c"):
        with pytest.raises(ValueError):
            parse_dues(nonsense)


async def test_a_timer_wakes_at_its_time_and_never_earlier(
    nats: Broker, account: str, key: SessionKey, woken: list[Delivery]
) -> None:
    at = nats.clock.now() + 400
    await Timers(nats).put(key, seq=9, at_ms=at, queue=account, what="deadline")
    await eventually(lambda: woken)
    assert woken[0].time >= at
    assert subjects.parse_work(woken[0].subject) == (account, key)
    assert woken[0].headers and woken[0].headers[CAUSE] == "9"


async def test_a_timer_in_the_past_goes_off_at_once(
    nats: Broker, account: str, key: SessionKey, woken: list[Delivery]
) -> None:
    await Timers(nats).put(key, seq=9, at_ms=nats.clock.now() - 86_400_000, queue=account, what="deadline")
    await eventually(lambda: woken, 3)


async def test_a_timer_put_again_goes_off_once_and_one_taken_back_not_at_all(
    nats: Broker, account: str, key: SessionKey, woken: list[Delivery]
) -> None:
    timers = Timers(nats)
    at = nats.clock.now() + 300
    for _ in range(3):
        await timers.put(key, seq=1, at_ms=at, queue=account, what="deadline-1")
    await timers.put(key, seq=2, at_ms=at, queue=account, what="deadline-2")
    await timers.drop(key, "deadline-2")
    await timers.put(key, seq=3, at_ms=at + 300, queue=account, what="deadline-3")
    await eventually(lambda: len(woken) >= 2)
    assert [(delivery.headers or {})[CAUSE] for delivery in woken] == ["1", "3"]


# --- deltas -------------------------------------------------------------------------------------------------------


class Heard:
    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def __call__(self, delta: Delta) -> None:
        self.deltas.append(delta)

    @property
    def texts(self) -> list[tuple[str, str]]:
        return [(delta.kind, delta.text) for delta in self.deltas]


@pytest.fixture
async def heard(nats: Broker, key: SessionKey) -> AsyncIterator[Heard]:
    found = Heard()
    listening = await Live(nats).listen(key, found)
    await nats.nc.flush()
    yield found
    await listening.unsubscribe()


async def test_deltas_of_a_kind_are_gathered_and_numbered(nats: Broker, key: SessionKey, heard: Heard) -> None:
    speech = Live(nats).speak(key, 3, attempt=2)
    for text in ("think", "ing"):
        await speech.say(1, "reasoning", text)
    for text in ("Hel", "lo, ", "wörld"):
        await speech.say(1, "text", text)
    await speech.mark(1, "reset", "dropped")
    await speech.say(1, "text", "again")
    await speech.flush()
    await eventually(lambda: len(heard.deltas) == 4)
    assert heard.deltas == [
        Delta(3, 2, 1, 1, "reasoning", "thinking"),
        Delta(3, 2, 1, 2, "text", "Hello, wörld"),
        Delta(3, 2, 1, 3, "reset", "dropped"),
        Delta(3, 2, 1, 4, "text", "again"),
    ]


async def test_a_model_that_pauses_is_heard_all_the_same(nats: Broker, key: SessionKey, heard: Heard) -> None:
    speech = Live(nats).speak(key, 1, attempt=1)
    await speech.say(1, "text", "slow")
    await eventually(lambda: heard.texts == [("text", "slow")], 2)


async def test_much_text_is_sent_at_once_and_in_pieces_that_a_message_holds(
    nats: Broker, key: SessionKey, heard: Heard
) -> None:
    speech = Live(nats).speak(key, 1, attempt=1)
    text = "ä" * (2 * live.PIECE + 5)
    await speech.say(1, "text", text)
    await eventually(lambda: len(heard.deltas) == 3)
    assert "".join(delta.text for delta in heard.deltas) == text
    assert [delta.index for delta in heard.deltas] == [1, 2, 3]


async def test_a_step_that_is_over_at_once_says_nothing_beside_the_log(
    nats: Broker, key: SessionKey, heard: Heard
) -> None:
    speech = Live(nats).speak(key, 1, attempt=1)
    await speech.say(1, "text", "instant")
    await speech.finish(1)
    await speech.say(2, "text", "a")
    await speech.flush()
    await speech.say(2, "text", "b")
    await speech.finish(2)
    await eventually(lambda: len(heard.deltas) == 2)
    assert [(delta.step, delta.index, delta.text) for delta in heard.deltas] == [(2, 1, "a"), (2, 2, "b")]


async def test_who_is_silenced_says_nothing_more(nats: Broker, key: SessionKey, heard: Heard) -> None:
    lives = Live(nats)
    fenced = lives.speak(key, 1, attempt=1)
    await fenced.mark(1, "tool", "first")
    await fenced.say(1, "text", "gathered")
    fenced.silence()
    await fenced.flush()
    await fenced.mark(1, "reset", "more")
    await lives.speak(key, 1, attempt=2).mark(1, "tool", "second")
    await eventually(lambda: len(heard.deltas) >= 2)
    assert heard.texts == [("tool", "first"), ("tool", "second")]


async def test_steps_are_not_mixed(nats: Broker, key: SessionKey, heard: Heard) -> None:
    speech = Live(nats).speak(key, 1, attempt=1)
    await speech.say(1, "text", "one")
    await speech.say(2, "text", "two")
    await speech.flush()
    await eventually(lambda: len(heard.deltas) == 2)
    assert [(delta.step, delta.text) for delta in heard.deltas] == [(1, "one"), (2, "two")]


async def test_several_nodes_speak_at_once_and_are_not_mixed(nats: Broker, key: SessionKey, heard: Heard) -> None:
    speech = Live(nats).speak(key, 1, attempt=1)
    for left, right in (("Hel", "Good"), ("lo", "bye")):
        await speech.say(1, "text", left, "each[0].draft")
        await speech.say(1, "text", right, "each[1].draft")
    await speech.mark(1, "tool", "look", "each[1].draft")
    await speech.flush()
    await speech.say(2, "text", "!", "each[0].draft")
    await speech.finish(1, "each[1].draft")
    await speech.flush()
    await eventually(lambda: len(heard.deltas) == 4)
    assert heard.deltas == [
        Delta(1, 1, 1, 1, "text", "Goodbye", "each[1].draft"),
        Delta(1, 1, 1, 2, "tool", "look", "each[1].draft"),
        Delta(1, 1, 1, 3, "text", "Hello", "each[0].draft"),
        Delta(1, 1, 2, 4, "text", "!", "each[0].draft"),
    ]


async def test_a_node_that_is_over_at_once_does_not_silence_the_others(
    nats: Broker, key: SessionKey, heard: Heard
) -> None:
    speech = Live(nats).speak(key, 1, attempt=1)
    await speech.say(1, "text", "slow", "a")
    await speech.say(1, "text", "instant", "b")
    await speech.finish(1, "b")
    await eventually(lambda: [(delta.path, delta.text) for delta in heard.deltas] == [("a", "slow")], 2)


async def test_who_comes_late_reads_what_is_kept_of_the_newest_attempt(nats: Broker, key: SessionKey) -> None:
    lives = Live(nats)
    for attempt in (1, 2):
        speech = lives.speak(key, 1, attempt)
        for n in range(1500):
            await speech.mark(1, "tool", f"{attempt}.{n}")
    other = lives.speak(key, 2, 1)
    await other.mark(1, "tool", "other")
    deltas = await eventually(lambda: _all(lives, key, 1500))
    assert [delta.text for delta in deltas] == [f"2.{n}" for n in range(1500)]
    assert await lives.read(key, 7) == []


async def _all(lives: Live, key: SessionKey, count: int) -> list[Delta]:
    found = await lives.read(key, 1)
    return found if len(found) == count else []


@pytest.mark.parametrize(
    "headers",
    [None, {}, {"attempt": "1", "step": "1", "index": "1", "kind": "rumour"}, {"attempt": "x", "kind": "text"}],
)
async def test_nonsense_is_not_heard(nats: Broker, key: SessionKey, heard: Heard, headers: dict[str, str]) -> None:
    await nats.publish(subjects.delta(key, 1), b"boo", headers=headers)
    await nats.publish(f"ts.delta.{key.account}.{key.session}.x", b"boo", headers=headers)
    speech = Live(nats).speak(key, 1, attempt=1)
    await speech.mark(1, "reset", "last")
    await eventually(lambda: heard.deltas)
    assert heard.texts == [("reset", "last")]


# --- blobs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 300_000])
async def test_a_blob_comes_back_as_it_was(nats: Broker, key: SessionKey, size: int) -> None:
    blobs = Blobs(nats)
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    blob = await blobs.put(key, "1.1.1", data)
    assert (blob.name, blob.size) == (f"{key.account}/s1/1.1.1", size)
    assert await blobs.get(blob) == data
    again = await blobs.put(key, "1.1.1", b"other")
    assert await blobs.get(again) == b"other"
    if size:
        with pytest.raises(BlobLost, match="not the bytes"):
            await blobs.get(blob)


async def test_a_blob_that_is_not_there_is_named(nats: Broker, key: SessionKey) -> None:
    blobs = Blobs(nats)
    blob = await blobs.put(key, "a", b"1")
    with pytest.raises(BlobLost, match="not there"):
        await blobs.get(msgspec.structs.replace(blob, name=f"{key}/b"))


async def test_a_client_of_object_stores_reads_blobs(nats: Broker, key: SessionKey) -> None:
    await Blobs(nats).put(key, "1.1.1", b"x" * 300_000)
    store = await nats.nc.jetstream().object_store("blobs")
    info = await store.get_info(f"{key}/1.1.1")
    assert (info.size, info.chunks) == (300_000, 3)
    assert (await store.get(f"{key}/1.1.1")).data == b"x" * 300_000


async def messages_of(nats: Broker, key: SessionKey) -> int:
    """How many messages there are in the object store of this session's blobs and of what describes them."""
    names = (await nats.api("STREAM.INFO.OBJ_blobs", {"subjects_filter": ">"}))["state"]
    found = 0
    for subject, count in msgspec.convert(names, _Subjects).subjects.items():
        token = subject.rsplit(".", 1)[1]
        described = base64.urlsafe_b64decode(token).decode() if ".M." in subject else ""
        if subject.startswith(f"$O.blobs.C.{key.account}.{key.session}.") or described.startswith(f"{key}/"):
            found += count
    return found


class _Subjects(msgspec.Struct):
    subjects: dict[str, int] = {}


async def test_everything_of_a_session_is_erased_but_what_is_kept(nats: Broker, key: SessionKey) -> None:
    blobs, other = Blobs(nats), SessionKey(key.account, "s1x")
    kept = await blobs.put(key, "2.1.1.a", b"kept" * 100_000)
    gone = [await blobs.put(key, name, b"gone" * 100_000) for name in ("1", "1.1.1", "2.1.1")]
    theirs = await blobs.put(other, "1", b"theirs")
    await nats.store(f"$O.blobs.C.{key.account}.{key.session}.MS45.half", b"a putting that did not come to its end")
    await blobs.erase(key, frozenset({kept.name}))
    assert await blobs.get(kept) == b"kept" * 100_000
    assert await blobs.get(theirs) == b"theirs"
    for blob in gone:
        with pytest.raises(BlobLost):
            await blobs.get(blob)
    assert await messages_of(nats, key) == 5, "four pieces and what describes them"
    await blobs.erase(key)
    await blobs.erase(key)
    assert await messages_of(nats, key) == 0
    assert await blobs.get(theirs) == b"theirs"


async def test_a_blob_that_no_event_names_is_removed(nats: Broker, key: SessionKey) -> None:
    blobs = Blobs(nats)
    await blobs.put(key, "1.1.1", b"gone")
    kept = await blobs.put(key, "1.1.2", b"kept")
    await blobs.remove(key, "1.1.1")
    assert await messages_of(nats, key) == 2
    assert await blobs.get(kept) == b"kept"


# --- what somebody deleted ----------------------------------------------------------------------------------------


async def test_s56_a_deleted_object_store_is_made_again(broker: Broker) -> None:
    key, blobs = SessionKey("acme", "s1"), Blobs(broker)
    await blobs.put(key, "a", b"1")
    await broker.api("STREAM.DELETE.OBJ_blobs")
    with pytest.raises(BrokerFault):
        await blobs.put(key, "b", b"2")
    assert await blobs.get(await blobs.put(key, "b", b"2")) == b"2"


async def test_s56_a_deleted_stream_of_deltas_is_made_again(broker: Broker) -> None:
    key, live = SessionKey("acme", "s1"), Live(broker)
    await broker.api("STREAM.DELETE.DELTAS")
    assert await live.read(key, 1) == []
    speech = live.speak(key, 1, attempt=1)
    await speech.say(1, "text", "hello")
    await speech.flush()
    assert [delta.text for delta in await eventually(lambda: live.read(key, 1))] == ["hello"]
