"""What runs cost that wait for a person: memory of the runner for each, and the time until one goes on once it is
answered. Each waits in a session of its own, with a timer.

A runner remembers the folds of a bounded number of sessions, whatever became of them. So the memory is what waiting
runs add after as many runs that have ended. Stated, not bounded.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.figures import median
from tests.support.client import Client
from tests.support.processes import Process, turnstream

from turnstream.broker.connection import Broker
from turnstream.broker.declare import declare
from turnstream.broker.server import NatsServer
from turnstream.ids import derive
from turnstream.session.commands import AnswerRequest, Origin
from turnstream.session.events import Recorded, RequestAnswered, RunEnded, RunStarted

RUNS = 10_000
WOKEN = 200
"""How many of them are answered, one after the other."""
IN_FLIGHT = 64
ASK = '[ask Well? {"expires_in": 86400}]'


class Runner:
    """A runner in a process of its own."""

    def __init__(self, server: NatsServer, folder: Path, name: str) -> None:
        settings = {"TURNSTREAM_NATS_URL": server.url, "TURNSTREAM_LOG_LEVEL": "warning"}
        self.process = Process(turnstream("runner"), settings, folder, name)

    def kib(self) -> float:
        """Memory that it has now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1024

    async def stop(self) -> None:
        await self.process.stop(60)
        self.process.clean_up()


async def turn_each(client: Client, sessions: Sequence[str], text: str, until: str) -> None:
    """Says this in every session, and waits until each has an event of the type."""
    left = list(sessions)

    async def work() -> None:
        while left:
            session = left.pop()
            await client.post(text, session)
            await client.until(until, session, timeout=120)

    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))


async def milliseconds_to_wake(client: Client, sessions: Sequence[str]) -> tuple[float, float]:
    """From an answer that is stored to the start that it causes, and to the run's end, by the broker's time stamps."""
    starts: list[float] = []
    ends: list[float] = []
    for n, session in enumerate(sessions):
        origin = Origin(id=derive("answer", session, n), actor="user:ann", time=client.broker.clock.now())
        await client.sessions.handle(client.key(session), AnswerRequest(origin=origin, run=1, answer="yes"))
        await client.end(session)
        recorded = [one async for page in client.sessions.log.read(client.key(session)) for one in page]
        answered = _last(recorded, RequestAnswered)
        starts.append(_last(recorded, RunStarted) - answered)
        ends.append(_last(recorded, RunEnded) - answered)
    return median(starts), median(ends)


def _last(recorded: Sequence[Recorded], kind: type[object]) -> int:
    return next(one.time for one in reversed(recorded) if isinstance(one.event.data, kind))


async def waiting(runs: int = RUNS) -> dict[str, float | str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = NatsServer(folder / "nats")
        await server.start()
        broker = await Broker.connect(server.url, name="bench", monotonic=time.monotonic)
        await declare(broker, replicas=1)
        client = Client(broker, account="default")
        runner = Runner(server, folder, "runner")
        try:
            idle = await _settled(runner)
            await turn_each(client, [f"ended-{n}" for n in range(runs)], "echo done", "run.ended")
            remembered = await _settled(runner)
            sessions = [f"waits-{n}" for n in range(runs)]
            began = time.perf_counter()
            await turn_each(client, sessions, ASK, "run.waiting")
            asked = time.perf_counter() - began
            all_wait = await _settled(runner)
            warm = await milliseconds_to_wake(client, sessions[-WOKEN:])
            await runner.stop()
            runner = Runner(server, folder, "runner-2")
            cold = await milliseconds_to_wake(client, sessions[:WOKEN])
        finally:
            await runner.stop()
            await broker.close()
            await server.stop()
    return {
        "waiting_runs_memory_kib": (all_wait - remembered) / runs,
        "remembered_sessions_memory_kib": (remembered - idle) / runs,
        "runner_memory_mib": all_wait / 1024,
        "waiting_runs_asked_per_s": runs / asked,
        "wake_waiting_ms": warm[0],
        "wake_waiting_end_ms": warm[1],
        "wake_waiting_new_runner_ms": cold[0],
    }


async def _settled(runner: Runner) -> float:
    """The runner's memory once it changes no more: what it does behind its answers is done."""
    last = -1.0
    while abs((now := runner.kib()) - last) > 64:
        last = now
        await asyncio.sleep(1)
    return now
