"""How long `turnstream dev` takes to be ready: on an empty store, and on one of a million events whose views are there.

Stated, not bounded.
"""

import asyncio
import tempfile
import time
from pathlib import Path

from tests.bench.bench_log import new_key, turns
from tests.support.processes import Process, turnstream

from turnstream.broker.connection import Broker
from turnstream.broker.declare import declare
from turnstream.broker.server import NatsServer
from turnstream.log.jetstream import JetStreamLog

EVENTS = 1_000_000
SESSION_EVENTS = 300


async def seconds_to_ready(folder: Path, name: str) -> float:
    settings = {"TURNSTREAM_DATA_DIR": str(folder), "TURNSTREAM_HTTP_PORT": "0", "TURNSTREAM_NATS_PORT": "0"}
    began = time.perf_counter()
    process = Process(turnstream("dev"), settings, folder, name)
    try:
        await process.until_logged("http://", 600)
        return time.perf_counter() - began
    finally:
        await process.stop(120)
        process.clean_up()


async def fill(folder: Path, events: int) -> None:
    """Writes so many events through the log, 64 sessions at a time."""
    server = NatsServer(folder / "nats")
    await server.start()
    broker = await Broker.connect(server.url, name="bench", monotonic=time.monotonic)
    await declare(broker, replicas=1)
    log = JetStreamLog(broker)
    left = events // SESSION_EVENTS

    async def write() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            key, seq = new_key(), 0
            for decision in turns(key, SESSION_EVENTS):
                seq = await log.append(key, decision, seq)

    await asyncio.gather(*(write() for _ in range(64)))
    await broker.close()
    await server.stop()


async def starts(events: int = EVENTS) -> dict[str, float | str]:
    with tempfile.TemporaryDirectory() as name:
        empty, full = Path(name) / "empty", Path(name) / "full"
        empty.mkdir()
        full.mkdir()
        first = await seconds_to_ready(empty, "dev-empty")
        await fill(full, events)
        return {
            "start_empty_s": first,
            "start_again_s": await seconds_to_ready(empty, "dev-again"),
            f"start_{events}_events_s": await seconds_to_ready(full, "dev-full"),
        }
