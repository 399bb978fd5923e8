import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from nats.aio.msg import Msg
from tests.support.beds import Bed, Reader
from tests.support.waiting import eventually

from turnstream.broker import puller as pulls
from turnstream.broker.errors import StreamBehind
from turnstream.broker.pull import OrderedPull
from turnstream.broker.server import NatsServer


def ordered(bed: Bed, after: int = 0, **options: Any) -> OrderedPull:
    return OrderedPull(bed.broker, bed.name, [f"{bed.name}.x"], after, **options)


def lose(bed: Bed, monkeypatch: pytest.MonkeyPatch, which: Callable[[int], bool]) -> list[int]:
    """Deliveries for which `which(how many came before)` holds do not arrive. What is lost so far."""
    real = bed.broker.listen
    lost: list[int] = []
    count = 0

    async def listen(subject: str, hear: Callable[[Msg], None]) -> Any:
        def lossy(message: Msg) -> None:
            nonlocal count
            if message.reply:
                count += 1
                if which(count):
                    lost.append(int(message.data))
                    return
            hear(message)

        return await real(subject, lossy)

    monkeypatch.setattr(bed.broker, "listen", listen)
    return lost


async def consumers(bed: Bed) -> int:
    state = (await bed.broker.api(f"STREAM.INFO.{bed.name}"))["state"]
    assert isinstance(state, dict)
    return state["consumer_count"]


async def test_reads_everything_after_a_sequence_once_and_in_order(bed: Bed):
    for start in range(0, 2000, 500):
        await bed.publish(*range(start, start + 500))
    reader = Reader(ordered(bed, after=700, batch=64), ack=False)
    await eventually(lambda: len(reader.seen) == 1300)
    assert [delivery.seq for delivery in reader.seen] == list(range(701, 2001))
    assert reader.seen[-1].pending == 0
    await bed.publish(2000)
    await reader.until(2000)
    assert len(reader.seen) == 1301
    await reader.close()


async def test_reads_only_what_it_is_asked_for(bed: Bed):
    await bed.broker.request(f"{bed.name}.other", b"0")
    await bed.publish(1)
    await bed.broker.request(f"{bed.name}.other", b"2")
    await bed.publish(3)
    reader = Reader(ordered(bed), ack=False)
    await reader.until(1, 3)
    assert reader.bodies == [1, 3]
    await reader.close()


async def test_a_reader_that_waited_gets_what_comes_within_its_linger_too(bed: Bed):
    pull = ordered(bed, linger=0.5)
    first = asyncio.ensure_future(anext(pull))
    await eventually(lambda: consumers(bed))
    await bed.publish(1)
    await bed.publish(2)
    assert [int(delivery.data) for delivery in await first] == [1, 2]
    await pull.close()


async def test_a_reader_that_comes_late_lingers_too_unless_there_is_plenty(bed: Bed):
    pull = ordered(bed, batch=4, linger=0.5)
    first = asyncio.ensure_future(anext(pull))
    await eventually(lambda: consumers(bed))
    await bed.publish(1)
    assert len(await first) == 1
    await bed.publish(2)
    await eventually(lambda: pull._ready)
    late = asyncio.ensure_future(anext(pull))
    await bed.publish(3)
    assert [int(delivery.data) for delivery in await late] == [2, 3]
    await bed.publish(*range(4, 12))
    await eventually(lambda: len(pull._ready) >= 4)
    began = asyncio.get_running_loop().time()
    assert len(await anext(pull)) >= 4
    assert asyncio.get_running_loop().time() - began < 0.5
    await pull.close()


async def test_a_reader_lingers_no_longer_than_something_comes(bed: Bed):
    pull = ordered(bed, linger=5.0)
    first = asyncio.ensure_future(anext(pull))
    await eventually(lambda: consumers(bed))
    await bed.publish(1)
    assert len(await asyncio.wait_for(first, 3.0)) == 1, "a tenth of that is enough where nothing more comes"
    await pull.close()


async def test_a_reader_lingers_for_so_long_whatever_comes(bed: Bed):
    pull = ordered(bed, linger=1.0)
    first = asyncio.ensure_future(anext(pull))
    await eventually(lambda: consumers(bed))
    sent = 0
    while not first.done() and sent < 400:
        await bed.publish(sent)
        sent += 1
        await asyncio.sleep(0.01)
    assert 1 < len(await first) <= sent < 400
    await pull.close()


async def test_waits_at_the_end_of_the_stream(bed: Bed):
    await bed.publish(1, 2, 3)
    reader = Reader(ordered(bed, after=3), ack=False)
    await bed.publish(4)
    await reader.until(4)
    assert reader.bodies == [4]
    await reader.close()


async def test_lost_deliveries_are_noticed_and_read_again(bed: Bed, monkeypatch: pytest.MonkeyPatch):
    lost = lose(bed, monkeypatch, lambda count: count in (5, 6, 500, 900))
    for start in range(0, 1000, 500):
        await bed.publish(*range(start, start + 500))
    reader = Reader(ordered(bed, batch=100), ack=False)
    await eventually(lambda: len(reader.seen) >= 1000)
    assert len(lost) >= 3
    assert [delivery.seq for delivery in reader.seen] == list(range(1, 1001))
    await reader.close()


async def test_a_lost_last_delivery_is_noticed_by_the_heartbeat(bed: Bed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pulls, "_HEARTBEAT", 0.2)
    lost = lose(bed, monkeypatch, lambda count: count == 3)
    await bed.publish(1)
    reader = Reader(ordered(bed), ack=False)
    await reader.until(1)
    await bed.publish(2)
    await bed.publish(3)
    await reader.until(3, timeout=5)
    assert lost == [3]
    assert reader.bodies == [1, 2, 3]
    await reader.close()


async def test_a_deleted_consumer_is_made_again_and_none_is_left_behind(bed: Bed):
    await bed.publish(1)
    reader = Reader(ordered(bed), ack=False)
    await reader.until(1)
    names = (await bed.broker.api(f"CONSUMER.NAMES.{bed.name}"))["consumers"]
    assert isinstance(names, list)
    await bed.broker.api(f"CONSUMER.DELETE.{bed.name}.{names[0]}")
    await bed.publish(2)
    await reader.until(2)
    assert reader.bodies == [1, 2]
    assert await consumers(bed) == 1
    await reader.close()
    assert await consumers(bed) == 0


async def test_s51_a_killed_server_costs_nothing_and_doubles_nothing(own_bed: Bed, own_nats: NatsServer):
    await own_bed.publish(*range(300))
    reader = Reader(ordered(own_bed, batch=50), ack=False)
    await reader.until(299)
    own_nats.kill()
    await own_nats.start()
    await eventually(lambda: own_bed.broker.nc.is_connected)
    await own_bed.publish(*range(300, 400))
    await reader.until(399)
    assert [delivery.seq for delivery in reader.seen] == list(range(1, 401))
    await reader.close()


async def test_a_stream_that_is_shorter_than_what_was_read_is_an_error(bed: Bed):
    await bed.publish(1, 2, 3)
    with pytest.raises(StreamBehind, match="ends at 3, but 7 has been read") as caught:
        await anext(ordered(bed, after=7))
    assert (caught.value.last, caught.value.after) == (3, 7)


async def test_a_leader_that_does_not_know_its_end_yet_is_asked_again(bed: Bed, monkeypatch: pytest.MonkeyPatch):
    await bed.publish(1, 2, 3)
    pull = ordered(bed, after=2)
    real = pull._check_end
    looks = 0

    async def check() -> None:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise StreamBehind(bed.name, 2, 0)
        await real()

    monkeypatch.setattr(pull, "_check_end", check)
    assert [delivery.seq for delivery in await anext(pull)] == [3]
    await pull.close()


async def test_a_stream_that_was_deleted_under_it_is_an_error(bed: Bed):
    await bed.publish(1, 2, 3)
    reader = Reader(ordered(bed), ack=False)
    await reader.until(3)
    await bed.broker.api(f"STREAM.DELETE.{bed.name}")
    with pytest.raises(StreamBehind):
        await asyncio.wait_for(reader.task, 10)
    await reader.pull.close()


async def test_a_slow_reader_is_not_flooded(bed: Bed):
    for start in range(0, 1000, 500):
        await bed.publish(*range(start, start + 500))
    pull = ordered(bed, batch=10)
    total = 0
    while total < 1000:
        deliveries = await anext(pull)
        assert len(deliveries) <= 20
        total += len(deliveries)
        for _ in range(5):
            await asyncio.sleep(0)
    await pull.close()
