import asyncio
import time
from typing import Any

import pytest
from tests.support.beds import Bed, Reader
from tests.support.nats import connect
from tests.support.proxy import proxy
from tests.support.waiting import eventually

from turnstream.broker import puller as pulls
from turnstream.broker.connection import Broker
from turnstream.broker.declare import ensure_consumer
from turnstream.broker.errors import BrokerClosed, BrokerFault
from turnstream.broker.pull import Delivery, Pull
from turnstream.broker.server import NatsServer
from turnstream.subjects import Consumer


async def test_gives_what_there_is_without_waiting_for_more(bed: Bed):
    pull = bed.pull(batch=256)
    await bed.publish(1)
    started = time.monotonic()
    assert [int(delivery.data) for delivery in await anext(pull)] == [1]
    for body in range(2, 50):
        await bed.publish(body)
        (delivery,) = await anext(pull)
        assert int(delivery.data) == body
    assert time.monotonic() - started < 5, "50 deliveries, each far quicker than a request's expiry"
    await pull.close()


async def test_delivers_everything_once_in_order_and_says_what_it_is(bed: Bed):
    before = bed.broker.clock.now()
    for start in range(0, 3000, 500):
        await bed.publish(*range(start, start + 500))
    reader = Reader(bed.pull(batch=100))
    await eventually(lambda: len(reader.seen) == 3000)
    assert [delivery.seq for delivery in reader.seen] == list(range(1, 3001))
    assert {delivery.delivery for delivery in reader.seen} == {1}
    assert reader.seen[-1].pending == 0
    assert reader.seen[0].pending == 2999
    assert reader.seen[0].subject == f"{bed.name}.x"
    assert all(before - 1000 <= delivery.time <= bed.broker.clock.now() for delivery in reader.seen)
    await eventually(lambda: _settled(bed))
    await reader.close()


async def _settled(bed: Bed) -> bool:
    info = await bed.info()
    return info["num_ack_pending"] == 0 and info["ack_floor"]["stream_seq"] == info["delivered"]["stream_seq"]


async def test_headers_and_headers_only(nats: Broker, bed: Bed):
    await nats.request(f"{bed.name}.x", b"12345", headers={"ts-type": "run.ended"})
    bed.consumer = Consumer(stream=bed.name, name="c", headers_only=True, filters=(f"{bed.name}.x",))
    pull = bed.pull()
    (delivery,) = await anext(pull)
    assert (delivery.data, delivery.headers) == (b"", {"ts-type": "run.ended", "Nats-Msg-Size": "5"})
    await pull.close()


async def say(delivery: Delivery, word: str) -> None:
    match word:
        case "ack":
            delivery.ack()
        case "nak":
            await delivery.nak()
        case _:
            await delivery.term()


@pytest.mark.parametrize(("word", "on_its_way"), [("ack", False), ("nak", False), ("term", False), ("ack", True)])
async def test_what_is_said_while_the_connection_is_away_is_not_heard_later(
    bed: Bed, nats_url: str, word: str, on_its_way: bool
):
    """By then the message is in other hands, and the server obeys a word about an old delivery too. `on_its_way`: it
    was said a moment before."""
    bed.consumer = Consumer(stream=bed.name, name="c", ack_wait=1)
    async with proxy(nats_url) as line:
        broker = await connect(line.url)
        pull = Pull(broker, bed.consumer)
        await bed.publish(1)
        (old,) = await anext(pull)
        line.listening = False
        if on_its_way:
            await say(old, word)
        line.cut()
        await eventually(lambda: not broker.nc.is_connected)
        if not on_its_way:
            await say(old, word)
        await pull.close()
        others = bed.pull()
        (taken,) = await anext(others)
        assert (taken.delivery, old.delivery) == (2, 1)
        line.listening = True
        await eventually(lambda: broker.nc.is_connected)
        await broker.nc.flush()
        more = asyncio.create_task(anext(others))
        done, _ = await asyncio.wait([more], timeout=0.5)
        assert not done, "it is in our hands"
        assert (await bed.info())["num_ack_pending"] == 1
        more.cancel()
        await others.close()
        await broker.close()


async def test_nak_comes_again_later_term_never_progress_holds_on(bed: Bed):
    bed.consumer = Consumer(stream=bed.name, name="c", ack_wait=1)
    await bed.publish(1)
    await bed.publish(2)
    await bed.publish(3)
    pull = bed.pull()
    got: list[Delivery] = []
    while len(got) < 3:
        got += await anext(pull)
    again, never, held = got
    await never.term()
    await again.nak(0.3)
    asked = time.monotonic()
    repeats = asyncio.create_task(anext(pull))
    while not repeats.done():
        await held.progress()
        await asyncio.wait([repeats], timeout=0.2)
    (repeat,) = repeats.result()
    assert (int(repeat.data), repeat.delivery) == (1, 2)
    assert time.monotonic() - asked >= 0.29
    repeat.ack()
    await held.nak()
    (repeat,) = await anext(pull)
    assert (int(repeat.data), repeat.delivery) == (3, 2)
    (lapsed,) = await anext(pull)
    assert (int(lapsed.data), lapsed.delivery) == (3, 3), "ack_wait is over: it comes again"
    lapsed.ack()
    await pull.close()


class TestSlots:
    async def test_never_more_than_the_free_ones_are_out(self, bed: Bed):
        await bed.publish(*range(10))
        pull = bed.pull(slots=3)
        held: list[Delivery] = []
        while len(held) < 3:
            held += await anext(pull)
        waiting = asyncio.create_task(anext(pull))
        assert (await bed.info())["num_ack_pending"] == 3
        held[0].ack()
        await bed.publish(10)
        assert not waiting.done(), "an ack frees no slot"
        pull.release()
        (fourth,) = await waiting
        assert int(fourth.data) == 3
        assert (await bed.info())["num_ack_pending"] == 3
        await pull.close()

    @pytest.mark.parametrize("slots", [1, 2, 7, 64])
    async def test_the_account_holds_under_load(self, bed: Bed, slots: int):
        total = 600
        for start in range(0, total, 200):
            await bed.publish(*range(start, start + 200))
        pull = bed.pull(slots=slots)
        working: set[asyncio.Task[None]] = set()
        peak = 0
        done: list[int] = []

        async def work(delivery: Delivery) -> None:
            for _ in range(delivery.seq % 5):
                await asyncio.sleep(0)
            delivery.ack()
            done.append(int(delivery.data))
            pull.release()

        def start(delivery: Delivery) -> None:
            task = asyncio.create_task(work(delivery))
            working.add(task)
            task.add_done_callback(working.discard)

        sent, taken = bed.broker.nc.stats["out_msgs"], 0
        async for deliveries in pull:
            taken += len(deliveries)
            for delivery in deliveries:
                start(delivery)
            peak = max(peak, len(working))
            if taken >= total:
                break
        await asyncio.gather(*working)
        assert peak <= slots
        assert sorted(done) == list(range(total))
        requests = bed.broker.nc.stats["out_msgs"] - sent - total
        assert requests <= (total // 4 if slots == 64 else total + 5), "several free slots are asked for at once"
        await pull.close()

    async def test_a_slot_is_not_lost_when_requests_expire(self, bed: Bed, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(pulls, "_EXPIRES", 0.15)
        monkeypatch.setattr(pulls, "_HEARTBEAT", 0.05)
        pull = bed.pull(slots=2)
        for body in range(6):
            waiting = asyncio.create_task(anext(pull))
            await asyncio.wait([waiting], timeout=0.2)  # longer than a request lives
            assert not waiting.done()
            await bed.publish(body)
            (delivery,) = await waiting
            assert int(delivery.data) == body
            delivery.ack()
            pull.release()
        assert pull.restarts == 0
        await pull.close()

    async def test_more_than_is_held_cannot_be_released(self, bed: Bed):
        pull = bed.pull(slots=2)
        with pytest.raises(ValueError, match="cannot release 1 slots, 0 are held"):
            pull.release()
        await pull.close()


async def test_a_cancelled_reader_loses_nothing(bed: Bed):
    pull = bed.pull(slots=5)
    seen: list[int] = []

    async def publish() -> None:
        for body in range(300):
            await bed.publish(body)

    publishing = asyncio.create_task(publish())
    spins = 0
    while len(seen) < 300:
        reading = asyncio.create_task(anext(pull))
        for _ in range(spins % 7):
            await asyncio.sleep(0)
        spins += 1
        if spins % 50 == 0:
            await asyncio.wait([reading], timeout=0.5)
        reading.cancel()
        try:
            for delivery in await reading:
                seen.append(int(delivery.data))
                delivery.ack()
                pull.release()
        except asyncio.CancelledError:
            continue
    await publishing
    assert seen == list(range(300))
    await pull.close()


async def test_closing_ends_the_iteration(bed: Bed):
    reader = Reader(bed.pull())
    await bed.publish(1)
    await reader.until(1)
    await reader.close()
    assert [deliveries async for deliveries in reader.pull] == []
    await eventually(lambda: _nobody_waits(bed))


async def _nobody_waits(bed: Bed) -> bool:
    return (await bed.info())["num_waiting"] == 0


async def test_an_idle_pull_is_quiet(bed: Bed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pulls, "_EXPIRES", 0.4)
    monkeypatch.setattr(pulls, "_HEARTBEAT", 0.1)
    reader = Reader(bed.pull())
    await bed.publish(1)
    await reader.until(1)
    sent, cpu, started = bed.broker.nc.stats["out_msgs"], time.process_time(), time.monotonic()
    await asyncio.wait([reader.task], timeout=1.2)
    elapsed = time.monotonic() - started
    assert bed.broker.nc.stats["out_msgs"] - sent <= elapsed / 0.4 + 2, "one request an expiry"
    assert (time.process_time() - cpu) / elapsed < 0.1
    assert reader.pull.restarts == 0
    await bed.publish(2)
    await reader.until(2)
    await reader.close()


class TestWatchdog:
    @pytest.fixture
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Patience that ends at 0.5 s instead of 2."""
        monkeypatch.setattr(pulls, "_RETRY", (0.05, 0.1, 0.2, 0.5))

    async def test_s56_a_deleted_consumer_is_made_again(self, bed: Bed):
        reader = Reader(bed.pull())
        await bed.publish(1)
        await reader.until(1)
        for body in (2, 3, 4):
            await bed.broker.api(f"CONSUMER.DELETE.{bed.name}.c")
            await bed.publish(body)
            await reader.until(body)
        assert reader.pull.restarts == 3
        await reader.close()

    async def test_s56_a_deleted_stream_is_made_again(self, bed: Bed):
        reader = Reader(bed.pull())
        await bed.publish(1)
        await reader.until(1)
        await bed.broker.api(f"STREAM.DELETE.{bed.name}")
        await eventually(lambda: _published(bed, 2))
        await reader.until(2)
        await reader.close()

    async def test_a_consumer_that_is_deleted_all_the_time_costs_little(self, bed: Bed, quick: None):
        reader = Reader(bed.pull())
        await bed.publish(1)
        await reader.until(1)
        started = time.monotonic()
        deletions = 0
        while time.monotonic() - started < 1:
            await eventually(lambda: _exists(bed))
            await bed.broker.api(f"CONSUMER.DELETE.{bed.name}.c")
            deletions += 1
        assert deletions < 8, "each comes back later than the one before"
        await bed.publish(2)
        await reader.until(2)
        await reader.close()

    async def test_a_stream_that_stays_away_costs_little(self, bed: Bed, quick: None):
        reader = Reader(bed.pull())
        await bed.publish(1)
        await reader.until(1)
        bed.broker.declared.pop(bed.name)
        await bed.broker.api(f"STREAM.DELETE.{bed.name}")
        sent, cpu, started = bed.broker.nc.stats["out_msgs"], time.process_time(), time.monotonic()
        await asyncio.wait([reader.task], timeout=1.2)
        elapsed = time.monotonic() - started
        assert bed.broker.nc.stats["out_msgs"] - sent < 20
        assert (time.process_time() - cpu) / elapsed < 0.15
        await bed.declare()
        await bed.publish(2)
        await reader.until(2)
        await reader.close()

    async def test_a_refused_request_is_repeated_with_patience(self, bed: Bed, quick: None, monkeypatch):
        monkeypatch.setattr(pulls, "_EXPIRES", 1.0)
        monkeypatch.setattr(pulls, "_HEARTBEAT", 0.9)  # 400: more than half of the request's life
        sent = bed.broker.nc.stats["out_msgs"]
        reader = Reader(bed.pull())
        await asyncio.wait([reader.task], timeout=1.2)
        assert 1 <= reader.pull.restarts <= 8
        assert bed.broker.nc.stats["out_msgs"] - sent < 40
        monkeypatch.setattr(pulls, "_HEARTBEAT", 0.2)
        await bed.publish(1)
        await reader.until(1)
        await reader.close()

    async def test_silence_is_noticed(self, own_bed: Bed, monkeypatch: pytest.MonkeyPatch):
        """The server forgets the request and says nothing, as one does that lost its leadership while cut off."""
        monkeypatch.setattr(pulls, "_HEARTBEAT", 0.2)
        real = own_bed.broker.publish
        lost: list[str] = []

        async def publish(subject: str, *arguments: Any, **options: Any) -> None:
            if "MSG.NEXT" in subject and not lost:
                lost.append(subject)
            else:
                await real(subject, *arguments, **options)

        monkeypatch.setattr(own_bed.broker, "publish", publish)
        reader = Reader(own_bed.pull())
        await own_bed.publish(1)
        await reader.until(1)
        assert lost
        assert reader.pull.restarts == 1
        await reader.close()

    async def test_s51_a_killed_server_costs_no_message(self, own_bed: Bed, own_nats: NatsServer):
        reader = Reader(own_bed.pull(slots=None))
        await own_bed.publish(*range(100))
        await reader.until(*range(100))
        own_nats.kill()
        await own_nats.start()
        await eventually(lambda: own_bed.broker.nc.is_connected)
        await own_bed.publish(*range(100, 200))
        await reader.until(*range(200))
        assert sorted(set(reader.bodies)) == list(range(200))
        # Acks of the last moments were not on disk: those come again, and the server does not even count it.
        assert len(reader.seen) <= 300
        assert sorted(reader.bodies)[-100:] == list(range(100, 200))
        await reader.close()

    async def test_slots_survive_a_killed_server(self, own_bed: Bed, own_nats: NatsServer):
        own_bed.consumer = Consumer(stream=own_bed.name, name="c", ack_wait=1, max_ack_pending=-1)
        await own_bed.publish(*range(50))
        pull = own_bed.pull(slots=4)
        held: list[Delivery] = []
        while len(held) < 4:
            held += await anext(pull)
        own_nats.kill()
        await own_nats.start()
        waiting = asyncio.create_task(anext(pull))
        await eventually(lambda: pull.restarts == 1)
        await eventually(lambda: own_bed.broker.nc.is_connected)
        done, _ = await asyncio.wait([waiting], timeout=1.5)  # longer than ack_wait: the server has enough to send
        assert not done, "all slots are held"
        pull.release(2)
        assert len(await waiting) <= 2
        await pull.close()

    async def test_a_closed_connection_ends_the_reading(self, own_bed: Bed, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(pulls, "_HEARTBEAT", 0.1)
        reader = Reader(own_bed.pull())
        await own_bed.publish(1)
        await reader.until(1)
        await own_bed.broker.close()
        with pytest.raises(BrokerClosed):
            await asyncio.wait_for(reader.task, 10)
        with pytest.raises(BrokerClosed):
            await anext(reader.pull)

    async def test_a_fault_that_nobody_foresaw_does_not_end_it(self, bed: Bed, monkeypatch: pytest.MonkeyPatch):
        failed: list[object] = []

        async def fail(*said: object) -> None:
            failed.append(said)
            monkeypatch.undo()
            raise ZeroDivisionError

        monkeypatch.setattr("turnstream.broker.pull.ensure_consumer", fail)
        reader = Reader(bed.pull())
        await bed.publish(1)
        await reader.until(1)
        assert failed
        await reader.close()


async def test_what_arrives_while_the_request_is_being_sent_is_not_left_lying(bed: Bed, monkeypatch):
    real = bed.broker.publish
    pull = bed.pull()
    await bed.publish(1)

    async def publish(subject: str, *arguments: Any, **options: Any) -> None:
        await real(subject, *arguments, **options)
        if "MSG.NEXT" in subject:
            await eventually(lambda: pull._ready)

    monkeypatch.setattr(bed.broker, "publish", publish)
    (delivery,) = await asyncio.wait_for(anext(pull), 1)
    assert int(delivery.data) == 1
    await pull.close()


async def _published(bed: Bed, body: int) -> bool:
    try:
        await bed.publish(body)
    except BrokerFault:
        return False
    return True


async def _exists(bed: Bed) -> bool:
    try:
        return bool(await bed.info())
    except BrokerFault:
        return False


async def test_two_pulls_share_a_consumer(bed: Bed):
    readers = [Reader(bed.pull(slots=None, batch=4)) for _ in range(2)]
    for start in range(0, 400, 40):
        await bed.publish(*range(start, start + 40))
    await eventually(lambda: sum(len(reader.seen) for reader in readers) == 400)
    assert sorted(readers[0].bodies + readers[1].bodies) == list(range(400))
    assert all(reader.seen for reader in readers)
    for reader in readers:
        await reader.close()


async def test_it_takes_a_consumer_as_it_is_declared(bed: Bed):
    await ensure_consumer(bed.broker, Consumer(stream=bed.name, name="c", ack_wait=3))
    reader = Reader(bed.pull())
    await bed.publish(1)
    await reader.until(1)
    assert (await bed.info())["config"]["ack_wait"] == 30e9
    await reader.close()
