"""Turns a second and a turn's time, over HTTP, with everything in one process and an instant model.

The process under test is `turnstream dev` against a nats-server of its own; this process only makes load: raw HTTP/1.1
over kept connections, and the end of each turn is seen on the session's feed over NATS.
"""

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.bench.figures import Figure, median, raw_rate
from tests.support.nats import connect
from tests.support.processes import Process, turnstream

from turnstream.broker.connection import Broker
from turnstream.broker.server import NatsServer

IN_FLIGHT = 64
PAUSE = 0.03
"""Seconds after which nothing of a turn is left to do."""
PAYLOAD = b'{"text":"' + b"x" * 400 + b'"}'


class Http:
    """One kept connection; one request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        return self._streams

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        reader, writer = await self.open()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in answer.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        return int(answer[9:12]), await reader.readexactly(length)

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            with contextlib.suppress(OSError):
                await self._streams[1].wait_closed()


class Ends:
    """Resolves a future when the session's run has ended, as seen on the NATS feed."""

    def __init__(self) -> None:
        self.waiting: dict[str, asyncio.Future[None]] = {}

    async def open(self, broker: Broker) -> None:
        def take(message: Msg) -> None:
            if message.headers and message.headers.get("ts-type") == "run.ended":
                future = self.waiting.pop(message.subject.rsplit(".", 1)[1], None)
                if future and not future.done():
                    future.set_result(None)

        await broker.listen("ts.feed.default.*", take)
        await broker.nc.flush()

    def of(self, session: str) -> asyncio.Future[None]:
        future = self.waiting[session] = asyncio.get_running_loop().create_future()
        return future


class Running:
    """`nc`: nats-py's own client, for what is compared with; `broker`: whatever else there is to be said or heard."""

    def __init__(self, process: Process, port: int, nc: Client, broker: Broker) -> None:
        self.process = process
        self.port = port
        self.nc = nc
        self.broker = broker

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def everything(sync_interval: str | None = None) -> AsyncIterator[Running]:
    """`turnstream dev` in one process, on a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder) / "nats", sync_interval=sync_interval)
        await server.start()
        settings = {
            "TURNSTREAM_NATS_URL": server.url,
            "TURNSTREAM_HTTP_PORT": "0",
            "TURNSTREAM_DATA_DIR": folder,
            "TURNSTREAM_LOG_LEVEL": "warning",
            "TURNSTREAM_RUNNER_SLOTS": "256",
        }
        process = Process(turnstream("dev"), settings, Path(folder), "dev")
        try:
            line = await process.until_logged("http://", 60)
            port = int(line.split("http://", 1)[1].split("/")[0].split()[0].rsplit(":", 1)[1])
            nc, broker = await nats.connect(server.url), await connect(server.url)
            try:
                yield Running(process, port, nc, broker)
            finally:
                await nc.close()
                await broker.close()
        finally:
            process.clean_up()
            await server.stop()


async def turns_rate(running: Running, ends: Ends, seconds: float, label: str) -> tuple[float, float]:
    """Turns a second with 64 sessions in flight, and CPU milliseconds of the process a turn."""
    stop = time.perf_counter() + seconds
    done = 0

    async def worker(number: int) -> None:
        nonlocal done
        http = Http(running.port)
        turn = 0
        while time.perf_counter() < stop:
            session = f"{label}-{number}-{turn // 10}"
            turn += 1
            ended = ends.of(session)
            status, answer = await http.post("/v1/runs", json.dumps({"session": session, "input": "hello"}).encode())
            if status not in (200, 201, 202):
                raise AssertionError(f"{status}: {answer!r}")
            await asyncio.wait_for(ended, 30)
            done += 1
        await http.close()

    cpu = running.cpu_seconds()
    began = time.perf_counter()
    await asyncio.gather(*(worker(number) for number in range(IN_FLIGHT)))
    elapsed = time.perf_counter() - began
    return done / elapsed, (running.cpu_seconds() - cpu) / done * 1000


async def one_turn(running: Running, ends: Ends, http: Http, session: str) -> None:
    ended = ends.of(session)
    status, answer = await http.post(f"/v1/sessions/{session}/messages", b'{"content":"hello"}')
    if status not in (200, 202):
        raise AssertionError(f"{status}: {answer!r}")
    await asyncio.wait_for(ended, 30)


async def baseline(nc: Client) -> None:
    js = nc.jetstream()
    await js.add_stream(name="BASELINE", subjects=["baseline.>"], duplicate_window=120, allow_direct=True)


async def turns(rounds: int = 3, sync_interval: str | None = None) -> dict[str, Figure]:
    """`turn_throughput` and `turn_latency`."""
    async with everything(sync_interval) as running:
        ends = Ends()
        await ends.open(running.broker)
        await baseline(running.nc)
        await turns_rate(running, ends, 1, "warm")
        return {
            "turn_throughput": await _throughput(running, ends, rounds),
            "turn_latency": await _latency(running, ends, rounds),
        }


async def _throughput(running: Running, ends: Ends, rounds: int) -> Figure:
    ratios: list[float] = []
    rates: list[float] = []
    cpus: list[float] = []
    for number in range(rounds):
        raw = await raw_rate(running.nc, "baseline.x", PAYLOAD)
        rate, cpu = await turns_rate(running, ends, 4, f"r{number}")
        rates.append(rate)
        cpus.append(cpu)
        ratios.append(rate / (raw / 4))
    details: dict[str, float | str] = {"turns_per_s": median(rates), "cpu_ms_a_turn": median(cpus)}
    return Figure(value=median(ratios), bound=0.12, kind="at_least", details=details)


async def _latency(running: Running, ends: Ends, rounds: int) -> Figure:
    """One turn after the other ÷ one publish after the other, each round in a session of its own. Besides: the same
    where each of them comes after a pause in which what was before it is done."""
    js = running.nc.jetstream()
    http = Http(running.port)

    async def seconds(count: int, once: Callable[[], Awaitable[object]], pause: float) -> float:
        taken: list[float] = []
        for _ in range(count):
            if pause:
                await asyncio.sleep(pause)
            began = time.perf_counter()
            await once()
            taken.append(time.perf_counter() - began)
        return median(taken)

    ratios: dict[float, list[float]] = {0: [], PAUSE: []}
    turns: list[float] = []
    publishes: list[float] = []
    for number in range(rounds):
        for pause, found in ratios.items():
            session = f"{'paused' if pause else 'idle'}-{number}"
            await http.post("/v1/sessions", json.dumps({"id": session}).encode())
            await one_turn(running, ends, http, session)
            publish = await seconds(300, lambda: js.publish("baseline.x", PAYLOAD), pause)
            turn = await seconds(100, partial(one_turn, running, ends, http, session), pause)
            found.append(turn / publish)
            if not pause:
                turns.append(turn * 1000)
                publishes.append(publish * 1000)
    await http.close()
    details: dict[str, float | str] = {
        "turn_ms": median(turns),
        "publish_ms": median(publishes),
        "after_a_pause": median(ratios[PAUSE]),
        "dispatch_delay_ms": await dispatch_delay(running),
    }
    return Figure(value=median(ratios[0]), bound=12, kind="at_most", details=details)


async def dispatch_delay(running: Running, count: int = 50) -> float:
    """Milliseconds from a message on the feed (stored) until its wake-up has reached a runner, which is when its
    `run.started` names it: the difference of the broker's time stamps."""
    delays: list[float] = []
    http = Http(running.port)
    for _ in range(count):
        status, answer = await http.post("/v1/runs?wait=10", b'{"input":"hello"}')
        assert status in (200, 202), answer
        session = json.loads(answer)["session"]
        posted, started = await _times(running, session)
        delays.append(started - posted)
    await http.close()
    return median(delays)


async def _times(running: Running, session: str) -> tuple[float, float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(f"GET /v1/sessions/{session}/events HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    body = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    times = {event["type"]: datetime.fromisoformat(event["storedat"]) for event in json.loads(body)["events"]}
    return times["message.posted"].timestamp() * 1000, times["run.started"].timestamp() * 1000
