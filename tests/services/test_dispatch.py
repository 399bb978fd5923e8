"""Dispatch on a real server: every event that asks for something gets it, whatever is killed or deleted on the way."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.nats import connect
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.declare import declare
from turnstream.broker.errors import BrokerError
from turnstream.broker.pull import Delivery, Pull
from turnstream.broker.server import NatsServer
from turnstream.ids import SessionKey, derive
from turnstream.log.jetstream import JetStreamLog
from turnstream.session.decision import Decision
from turnstream.session.events import Due, Event, SessionUpdated, Title
from turnstream.wire.timers import Timers
from turnstream.wire.work import Work
from turnstream_runner.dispatch import HOLD, SLOTS, Dispatch

KEY = SessionKey("acme", "s1")


@pytest.fixture
async def broker(own_nats: NatsServer) -> AsyncIterator[Broker]:
    broker = await connect(own_nats.url)
    await declare(broker, replicas=1, consumers=(subjects.DISPATCH,))
    yield broker
    await broker.close()


class Carrying:
    """A dispatch under way."""

    def __init__(self, broker: Broker, hold: float = HOLD) -> None:
        pull = Pull(broker, subjects.DISPATCH, slots=SLOTS)
        self.dispatch = Dispatch(pull, Work(broker), Timers(broker), hold=hold)
        self.task = asyncio.create_task(self.dispatch.run())

    async def close(self) -> None:
        await self.dispatch.close()
        await self.task


@pytest.fixture
async def carrying(broker: Broker) -> AsyncIterator[Carrying]:
    found = Carrying(broker)
    yield found
    await found.close()


class Writer:
    """Appends events that ask for something."""

    def __init__(self, broker: Broker) -> None:
        self._log = JetStreamLog(broker)
        self._last: dict[SessionKey, int] = {}

    async def append(
        self, *wakes: str, dues: tuple[Due, ...] = (), settled: tuple[str, ...] = (), key: SessionKey = KEY
    ) -> int:
        last = self._last.get(key, 0)
        data = SessionUpdated(title=Title(text="t", source="user"))
        event = Event(id=derive(str(key), last), key=key, data=data, actor="user:ann", time=0)
        self._last[key] = seq = await self._log.append(key, Decision(event, wakes, dues, settled), last)
        return seq


@pytest.fixture
async def writer(broker: Broker) -> Writer:
    return Writer(broker)


async def queued(broker: Broker, queue: str = "default") -> list[Delivery]:
    """Every wake-up of the queue, taken and acknowledged."""
    found: list[Delivery] = []
    pull = Pull(broker, subjects.runner_consumer(queue, 30.0))

    async def take() -> None:
        async for deliveries in pull:
            for delivery in deliveries:
                delivery.ack()
                found.append(delivery)

    task = asyncio.create_task(take())
    await eventually(lambda: found and found[-1].pending == 0)
    await pull.close()
    await task
    return found


async def carried(broker: Broker) -> bool:
    """Whether dispatch has acknowledged everything."""
    info: Any = await broker.api(f"CONSUMER.INFO.{subjects.SESSIONS}.{subjects.DISPATCH.name}")
    return info["num_pending"] == 0 and info["num_ack_pending"] == 0


def causes(deliveries: list[Delivery]) -> list[int]:
    return sorted(int((delivery.headers or {})[subjects.CAUSE]) for delivery in deliveries)


async def test_an_event_wakes_the_queues_that_it_names(broker: Broker, writer: Writer, carrying: Carrying) -> None:
    quiet = await writer.append()
    seq = await writer.append("default", "gpu")
    for queue in ("default", "gpu"):
        [delivery] = await queued(broker, queue)
        assert subjects.parse_work(delivery.subject) == (queue, KEY)
        assert delivery.headers == {subjects.CAUSE: str(seq), "Nats-Msg-Id": f"SESSIONS-{seq}-{queue}"}
    await eventually(lambda: carried(broker))
    assert quiet < seq


async def test_an_event_that_falls_due_gets_a_timer_by_the_broker_s_time(
    broker: Broker, writer: Writer, carrying: Carrying
) -> None:
    before = broker.clock.now()
    seq = await writer.append(dues=(Due(300, "default", "deadline"), Due(600, "gpu", "expiry")))
    for queue, after in (("default", 300), ("gpu", 600)):
        [delivery] = await queued(broker, queue)
        assert delivery.time >= before + after
        assert causes([delivery]) == [seq]


async def timers(broker: Broker) -> int:
    """How many timers lie in `WORK`."""
    info: Any = await broker.api(f"STREAM.INFO.{subjects.WORK}", {"subjects_filter": "ts.timer.>"})
    return len(info["state"].get("subjects") or {})


async def test_what_is_settled_in_a_moment_gets_no_timer(broker: Broker, writer: Writer, carrying: Carrying) -> None:
    await writer.append(dues=(Due(60_000, "default", "deadline-1"),))
    await writer.append(dues=(Due(60_000, "default", "deadline-2"),))
    await writer.append("default", settled=("deadline-1",))
    await queued(broker)
    info: Any = await broker.api(f"CONSUMER.INFO.{subjects.SESSIONS}.{subjects.DISPATCH.name}")
    assert info["num_ack_pending"] == 1, "the event of the second timer is not acknowledged before it is stored"
    assert await timers(broker) == 0
    await carrying.close()
    assert await timers(broker) == 1, "a dispatcher that closes stores what it has held back"
    assert await carried(broker)


async def test_a_stored_timer_is_taken_back_when_it_is_settled(broker: Broker, writer: Writer) -> None:
    carrying = Carrying(broker, hold=0.05)
    await writer.append(dues=(Due(60_000, "default", "deadline-1"),))
    await eventually(lambda: carried(broker))
    assert await timers(broker) == 1
    await writer.append(settled=("deadline-1",))
    await eventually(lambda: carried(broker))
    assert await timers(broker) == 0
    await carrying.close()


async def test_a_timer_that_another_dispatcher_stored_is_taken_back_too(broker: Broker, writer: Writer) -> None:
    """One that is gone since, say; its events are acknowledged when that is done."""
    first = Carrying(broker, hold=0.05)
    await writer.append(dues=(Due(60_000, "default", "expiry-1-1"),))
    await eventually(lambda: carried(broker))
    await first.close()
    second = Carrying(broker, hold=0.05)
    await writer.append(settled=("expiry-1-1",))
    await eventually(lambda: carried(broker))
    assert await timers(broker) == 0
    await second.close()


async def test_what_was_stored_while_nobody_dispatched_is_carried_later(broker: Broker, writer: Writer) -> None:
    seqs = [await writer.append("default") for _ in range(20)]
    carrying = Carrying(broker)
    assert causes(await queued(broker)) == seqs
    await carrying.close()


async def test_an_event_delivered_again_wakes_nobody_twice(broker: Broker, writer: Writer, carrying: Carrying) -> None:
    """As after a crash between storing the wake-up and acknowledging the event."""
    seqs = [await writer.append("default") for _ in range(5)]
    assert causes(await queued(broker)) == seqs
    await carrying.close()
    await broker.api(f"CONSUMER.DELETE.{subjects.SESSIONS}.{subjects.DISPATCH.name}")
    again = Carrying(broker)
    last = await writer.append("default")
    assert causes(await queued(broker)) == [last]
    await again.close()


async def test_two_dispatchers_share_the_work(broker: Broker, writer: Writer, carrying: Carrying) -> None:
    other = Carrying(broker)
    keys = [SessionKey("acme", f"s{n}") for n in range(50)]
    seqs = await asyncio.gather(*(writer.append("default", key=key) for key in keys))
    await eventually(lambda: carried(broker))
    assert causes(await queued(broker)) == sorted(seqs)
    await other.close()


async def test_s56_a_deleted_dispatch_consumer_is_there_again_and_nothing_is_forgotten(
    broker: Broker, writer: Writer, carrying: Carrying
) -> None:
    first = await writer.append("default")
    assert causes(await queued(broker)) == [first]
    await broker.api(f"CONSUMER.DELETE.{subjects.SESSIONS}.{subjects.DISPATCH.name}")
    second = await writer.append("default")
    assert causes(await queued(broker)) == [second]
    await eventually(lambda: carried(broker))


async def test_s56_a_work_stream_that_is_made_anew_is_filled_again(
    broker: Broker, writer: Writer, carrying: Carrying
) -> None:
    await broker.api(f"STREAM.DELETE.{subjects.WORK}")
    seq = await writer.append("default", dues=(Due(100, "gpu", "deadline"),))
    with pytest.raises(BrokerError):
        await broker.api(f"STREAM.INFO.{subjects.WORK}")
    assert causes(await queued(broker)) == [seq]
    assert causes(await queued(broker, "gpu")) == [seq]


async def test_a_server_that_is_killed_costs_no_wake_up(
    own_nats: NatsServer, broker: Broker, writer: Writer, carrying: Carrying
) -> None:
    keys = [SessionKey("acme", f"s{n}") for n in range(100)]
    seqs = await asyncio.gather(*(writer.append("default", key=key) for key in keys))
    own_nats.kill()
    await own_nats.start()
    found: set[int] = set()
    pull = Pull(broker, subjects.runner_consumer("default", 30.0))

    async def take() -> None:
        async for deliveries in pull:
            found.update(causes(deliveries))

    task = asyncio.create_task(take())
    await eventually(lambda: found == set(seqs), 30, what="every wake-up")
    await eventually(lambda: carried(broker), 30)
    await pull.close()
    await task


async def test_an_event_that_asks_for_nonsense_holds_up_nobody(
    broker: Broker, writer: Writer, carrying: Carrying
) -> None:
    answer = await broker.request(subjects.session(SessionKey("acme", "odd")), b"{}", {subjects.DUE: "soon"})
    assert b"error" not in answer.data
    seq = await writer.append("default")
    assert causes(await queued(broker)) == [seq]
    await eventually(lambda: carried(broker))


async def test_a_thousand_events_are_carried_with_many_in_flight(
    broker: Broker, writer: Writer, carrying: Carrying
) -> None:
    keys = [SessionKey("acme", f"s{n}") for n in range(1000)]
    seqs = await asyncio.gather(*(writer.append("default", key=key) for key in keys))
    await eventually(lambda: carried(broker))
    assert causes(await queued(broker)) == sorted(seqs)
