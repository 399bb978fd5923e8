"""Posting to a session of 50,000 events over posting to one of three, each by an API process that has not seen it.

Each measured post is the first request of a process of its own, `turnstream api`, which is ready and to which a
connection is open: what is timed is the request alone. Old and fresh take turns. The old session has the snapshots that
the product makes, and goes on in other processes: the posts find the last one at every age that it may have, from just
made to just before the next, evenly.
"""

import asyncio
import itertools
import json
import tempfile
import time
from pathlib import Path

import httpx
from tests.bench.bench_log import connect, new_key, turn
from tests.bench.bench_turns import Http
from tests.bench.figures import Figure, median
from tests.support.api import free_port
from tests.support.processes import Process, turnstream
from tests.support.waiting import eventually

from turnstream.broker.connection import Broker
from turnstream.broker.server import NatsServer
from turnstream.ids import SessionKey
from turnstream.log.handle import Sessions
from turnstream.log.jetstream import JetStreamLog
from turnstream.log.snapshots import EVERY, Snapshotter
from turnstream.session import snapshot
from turnstream.wire.snapshots import Snapshots

EVENTS = 50_000
ROUNDS = 11


class Talk:
    """A session that goes on, turn by turn, without anybody who makes snapshots of it."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.log = JetStreamLog(broker)
        self.key = SessionKey("default", new_key().session)
        self.seq = 0
        self.turns = 0

    async def go_on(self, events: int) -> None:
        """By whole turns, of three events each."""
        for _ in range(events // 3):
            self.turns += 1
            for decision in turn(self.key, self.turns):
                self.seq = await self.log.append(self.key, decision, self.seq)

    async def carry_out(self, posted: int) -> None:
        """The run of the message that lies at this sequence."""
        self.seq = posted
        self.turns += 1
        for decision in turn(self.key, self.turns)[1:]:
            self.seq = await self.log.append(self.key, decision, self.seq)

    async def take_snapshot(self) -> int:
        """Its bytes."""
        store = Snapshots(self.broker)
        sessions = Sessions(self.log, now=self.broker.clock.now, snapshots=Snapshotter(self.log, store))
        await sessions.load(self.key)

        async def taken() -> int:
            data, _ = await store.get(self.key) or (b"", 0)
            found = snapshot.decode(data, self.key)
            return len(data) if found and found.seq == self.seq else 0

        size = await eventually(taken, what="the snapshot")
        await sessions.close()
        return size


class Cold:
    """Starts an API process for each post."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._url = url
        self._numbers = itertools.count()

    async def post(self, session: str) -> tuple[float, int]:
        """Seconds that it took, and the sequence of the event."""
        port = free_port()
        settings = {
            "TURNSTREAM_NATS_URL": self._url,
            "TURNSTREAM_HTTP_PORT": str(port),
            "TURNSTREAM_DATA_DIR": str(self._folder),
        }
        process = Process(turnstream("api"), settings, self._folder, f"api-{next(self._numbers)}")
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as ready:
                while not await _answers(ready):
                    await asyncio.sleep(0.05)
            http = Http(port)
            await http.open()
            began = time.perf_counter()
            status, answer = await http.post(f"/v1/sessions/{session}/messages", b'{"content":"hello"}')
            taken = time.perf_counter() - began
            await http.close()
            if status != 202:
                raise AssertionError(f"{status}: {answer!r}")
            return taken, json.loads(answer)["seq"]
        finally:
            await process.stop()
            process.clean_up()


async def _answers(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/readyz")).status_code == 200
    except httpx.TransportError:
        return False


async def old(events: int = EVENTS, rounds: int = ROUNDS) -> dict[str, Figure]:
    """`old_session_post`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = NatsServer(folder / "nats")
        await server.start()
        broker = await connect(server.url)
        try:
            return {"old_session_post": await _old_session_post(broker, Cold(folder, server.url), events, rounds)}
        finally:
            await broker.close()
            await server.stop()


async def _old_session_post(broker: Broker, cold: Cold, events: int, rounds: int) -> Figure:
    talk = Talk(broker)
    await talk.go_on(events)
    olds: list[float] = []
    freshes: list[float] = []
    size = 0
    for number in range(rounds):
        await talk.go_on(EVERY + 3)
        size = await talk.take_snapshot()
        await talk.go_on(round((number + 0.5) / rounds * EVERY))
        taken, posted = await cold.post(talk.key.session)
        await talk.carry_out(posted)
        olds.append(taken)
        other = Talk(broker)
        await other.go_on(3)
        freshes.append((await cold.post(other.key.session))[0])
    details: dict[str, float | str] = {
        "old_ms": median(olds) * 1000,
        "fresh_ms": median(freshes) * 1000,
        "slowest_old_ms": max(olds) * 1000,
        "snapshot_kib": size / 1024,
    }
    return Figure(value=median(olds) / median(freshes), bound=3, kind="at_most", details=details)
