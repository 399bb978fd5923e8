"""What the log costs, against nats-py's own publish. Each figure is a ratio of two medians from one run."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path

from tests.bench.figures import Figure

from turnstream import subjects
from turnstream.broker.answers import EXPECTED
from turnstream.broker.connection import Broker
from turnstream.broker.declare import declare
from turnstream.broker.server import NatsServer
from turnstream.ids import SessionKey, derive
from turnstream.log import codec
from turnstream.log.handle import Sessions
from turnstream.log.jetstream import JetStreamLog
from turnstream.session.decision import Decision
from turnstream.session.events import (
    Event,
    Limits,
    MessagePosted,
    Part,
    RunEnded,
    RunStarted,
    Spec,
    Starts,
    Usage,
    Wake,
)

ROUNDS = 7
FLIGHT = 64
_numbers = count(time.time_ns())

Append = Callable[[SessionKey, Decision, int], Awaitable[int]]


def new_key() -> SessionKey:
    return SessionKey("bench", f"s{next(_numbers)}")


def message(key: SessionKey) -> Decision:
    """A message of 300 characters that starts a run."""
    number = next(_numbers)
    spec = Spec(agent="default", version="1", digest="d" * 32, model="demo")
    data = MessagePosted(
        message_id=f"m{number}", author="user:ann", content=(Part(text="x" * 300),), starts=Starts(run=1, spec=spec)
    )
    event = Event(id=derive("bench", number), key=key, data=data, actor="user:ann", time=1_700_000_000_000)
    return Decision(event, ("default",))


def turns(key: SessionKey, events: int) -> list[Decision]:
    """Whole turns of three events each, as many as fit."""
    return [decision for n in range(1, events // 3 + 1) for decision in turn(key, n)]


def turn(key: SessionKey, n: int) -> list[Decision]:
    spec = Spec(agent="default", version="1", digest="d" * 32, model="demo", limits=Limits())
    posted = MessagePosted(
        message_id=f"m{n}", author="user:ann", content=(Part(text="x" * 200),), starts=Starts(run=n, spec=spec)
    )
    wake = Wake(work=n, cause=n, delivery=1)
    started = RunStarted(run=n, attempt=1, runner="r", wake=wake, message_ids=(f"m{n}",), model="demo")
    ended = RunEnded(run=n, attempt=1, status="completed", content="y" * 200, usage=Usage(input_tokens=5))
    return [
        Decision(
            Event(
                id=derive(str(key), n, codec.NAMES[type(data)]),
                key=key,
                data=data,
                actor="user:ann",
                time=1_700_000_000_000,
                idempotency_key=f"{n:032x}" if data is posted else None,
                body_digest="b" * 32 if data is posted else None,
            )
        )
        for data in (posted, started, ended)
    ]


async def connect(url: str) -> Broker:
    broker = await Broker.connect(url, name="bench", monotonic=time.monotonic)
    await declare(broker, replicas=1)
    return broker


def publisher(broker: Broker) -> Append:
    """The baseline: `js.publish` of the same bytes with the same headers, encoding included."""
    js = broker.nc.jetstream()

    async def publish(key: SessionKey, decision: Decision, expected: int) -> int:
        headers = codec.headers(decision) | {EXPECTED: str(expected)}
        return (await js.publish(subjects.session(key), codec.encode(decision.event), headers=headers)).seq

    return publish


async def _write(append: Append, events: int) -> None:
    key, seq = new_key(), 0
    for _ in range(events):
        seq = await append(key, message(key), seq)


async def _rate(append: Append) -> float:
    each = 60
    began = time.perf_counter()
    await asyncio.gather(*(_write(append, each) for _ in range(FLIGHT)))
    return FLIGHT * each / (time.perf_counter() - began)


async def _latency(append: Append) -> float:
    key, seq, taken = new_key(), 0, []
    for _ in range(400):
        decision = message(key)
        began = time.perf_counter()
        seq = await append(key, decision, seq)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


async def _compare(url: str, measure: Callable[[Append], Awaitable[float]]) -> float:
    """Ours ÷ theirs: the median of rounds that alternate, after one that warms up."""
    ours, theirs = await connect(url), await connect(url)
    log, publish = JetStreamLog(ours), publisher(theirs)
    await measure(log.append), await measure(publish)
    ratios = [await measure(log.append) / await measure(publish) for _ in range(ROUNDS)]
    await ours.close()
    await theirs.close()
    return statistics.median(ratios)


async def append_throughput(url: str) -> Figure:
    """Guarded appends a second at 64 in flight ÷ `js.publish`."""
    return Figure(value=await _compare(url, _rate), bound=0.95, kind="at_least")


async def append_latency(url: str) -> Figure:
    """Median of one append ÷ median of one `js.publish`."""
    return Figure(value=await _compare(url, _latency), bound=1.1, kind="at_most")


async def _filled(log: JetStreamLog, events: int) -> tuple[SessionKey, int]:
    key, seq = new_key(), 0
    for decision in turns(key, events):
        seq = await log.append(key, decision, seq)
    return key, seq


async def tail_read(url: str) -> Figure:
    """Refresh of a cached session of 10,000 events after one append ÷ the same with 10 events."""
    broker = await connect(url)
    log = JetStreamLog(broker)
    sessions = Sessions(log, now=broker.clock.now)
    long, short = await _filled(log, 9_999), await _filled(log, 9)
    for key, _ in (long, short):
        await sessions.load(key)
    ratios = []
    for _ in range(ROUNDS):
        medians = []
        for index, (key, seq) in enumerate((long, short)):
            taken = []
            for _ in range(50):
                seq = await log.append(key, message(key), seq)
                began = time.perf_counter()
                await sessions.load(key)
                taken.append(time.perf_counter() - began)
            medians.append(statistics.median(taken))
            long, short = ((key, seq), short) if index == 0 else (long, (key, seq))
        ratios.append(medians[0] / medians[1])
    await broker.close()
    details = {"cold_fold_of_10000_events_ms": await cold_fold(url)}
    return Figure(value=statistics.median(ratios), bound=2, kind="at_most", details=details)


async def cold_fold(url: str) -> float:
    """Milliseconds to read and fold a session of 10,000 events that nobody has cached. Stated, not bounded."""
    broker = await connect(url)
    log = JetStreamLog(broker)
    key, _ = await _filled(log, 9_999)
    taken = []
    for _ in range(3):
        sessions = Sessions(log, now=broker.clock.now)
        began = time.perf_counter()
        await sessions.load(key)
        taken.append((time.perf_counter() - began) * 1000)
    await broker.close()
    return statistics.median(taken)


async def figures() -> dict[str, Figure]:
    """`append_throughput`, `append_latency`, `tail_read`, on a server of their own."""
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder) / "nats")
        await server.start()
        try:
            return {
                "append_throughput": await append_throughput(server.url),
                "append_latency": await append_latency(server.url),
                "tail_read": await tail_read(server.url),
            }
        finally:
            await server.stop()
