"""One session's feed to many listeners: the API in a process of its own, listeners and writer in this one.

A listener is a socket that counts the frames it gets, so that what is measured is the server.
"""

import asyncio
import contextlib
import os
import re
import resource
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from tests.bench.figures import Figure, median
from tests.support.api import Hand, free_port
from tests.support.processes import Process, turnstream

from turnstream.broker.connection import Broker
from turnstream.broker.server import NatsServer

LISTENERS = 500
EVENTS = 600
_ID = re.compile(rb"\nid: ([0-9]+)")


class Listener(asyncio.Protocol):
    """Counts events; with `seen`, notes when each came."""

    def __init__(self, path: str) -> None:
        self._request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n".encode()
        self.count = 0
        self.wanted = 0
        self.done: asyncio.Future[None] | None = None
        self.caught_up = asyncio.get_running_loop().create_future()
        self.seen: dict[int, float] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.caught_up.done():
            if b"caught-up" in data:
                self.caught_up.set_result(None)
            return
        if self.seen is not None:
            now = time.time()
            for match in _ID.finditer(b"\n" + data):
                self.seen.setdefault(int(match[1]), now)
        self.count += data.count(b"\nevent: message.posted")
        if self.done and not self.done.done() and self.count >= self.wanted:
            self.done.set_result(None)

    def wait(self, count: int) -> asyncio.Future[None]:
        self.count, self.wanted = 0, count
        self.done = asyncio.get_running_loop().create_future()
        return self.done


class Running:
    def __init__(self, broker: Broker, process: Process, port: int) -> None:
        self.broker = broker
        self.process = process
        self.port = port
        self.hand = Hand(broker, "default")

    @contextlib.asynccontextmanager
    async def listening(self, session: str, count: int, after: int) -> AsyncIterator[list[Listener]]:
        path = f"/v1/sessions/{session}/events?after={after}"
        loop = asyncio.get_running_loop()
        listeners: list[Listener] = []
        for _ in range(count):
            _, listener = await loop.create_connection(lambda: Listener(path), "127.0.0.1", self.port)
            listeners.append(listener)
        await asyncio.gather(*(listener.caught_up for listener in listeners))
        try:
            yield listeners
        finally:
            for listener in listeners:
                if listener.transport:
                    listener.transport.close()

    def memory(self) -> float:
        """Peak of the API's resident memory, in MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Running]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder) / "nats")
        await server.start()
        port = free_port()
        settings = {"TURNSTREAM_NATS_URL": server.url, "TURNSTREAM_HTTP_PORT": str(port), "TURNSTREAM_DATA_DIR": folder}
        process = Process(turnstream("api"), settings, Path(folder), "api")
        broker = await Broker.connect(server.url, name="bench", monotonic=time.monotonic)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
                while not await _ready(http):
                    await asyncio.sleep(0.05)
                await http.post("/v1/sessions", json={"id": "feed"})
            yield Running(broker, process, port)
        finally:
            await broker.close()
            await process.stop()
            process.clean_up()
            await server.stop()


async def _ready(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/readyz")).status_code == 200
    except httpx.TransportError:
        return False


async def rate(running: Running, listeners: list[Listener], events: int) -> float:
    """Deliveries a second, from the first append to the last delivery."""
    began = time.perf_counter()
    done = [listener.wait(events) for listener in listeners]
    await running.hand.notices("feed", events)
    await asyncio.gather(*done)
    return events * len(listeners) / (time.perf_counter() - began)


async def delays(running: Running, listeners: list[Listener], events: int = 60) -> list[float]:
    """Seconds from the append of each event (a few at a time, not as fast as can be) until each listener has it."""
    for listener in listeners:
        listener.seen = {}
    appended: dict[int, float] = {}
    done = [listener.wait(events) for listener in listeners]
    for _ in range(events):
        began = time.time()
        (seq,) = await running.hand.notices("feed", 1)
        appended[seq] = began
        await asyncio.sleep(0.05)
    await asyncio.gather(*done)
    return [at - appended[seq] for listener in listeners for seq, at in (listener.seen or {}).items()]


async def fanout(rounds: int = 3) -> dict[str, Figure]:
    """`fanout`: deliveries a second to 500 listeners over those to one; the median of the rounds."""
    ones: list[float] = []
    manies: list[float] = []
    async with serving() as running:
        await running.hand.notices("feed", 50)
        last = (await running.hand.sessions.load(running.hand.key("feed"))).seq
        for _ in range(rounds):
            async with running.listening("feed", 1, last) as listeners:
                ones.append(await rate(running, listeners, EVENTS))
            last = (await running.hand.sessions.load(running.hand.key("feed"))).seq
            async with running.listening("feed", LISTENERS, last) as listeners:
                manies.append(await rate(running, listeners, EVENTS))
            last = (await running.hand.sessions.load(running.hand.key("feed"))).seq
        async with running.listening("feed", LISTENERS, last) as listeners:
            waits = sorted(await delays(running, listeners))
        last = (await running.hand.sessions.load(running.hand.key("feed"))).seq
        async with running.listening("feed", 2 * LISTENERS, last) as listeners:
            await rate(running, listeners, EVENTS)
            memory = running.memory()
    details: dict[str, float | str] = {
        "deliveries_per_s_one": median(ones),
        "deliveries_per_s_many": median(manies),
        "delay_p50_ms": statistics.median(waits) * 1000,
        "delay_p99_ms": waits[int(len(waits) * 0.99)] * 1000,
        "memory_mib_1000_listeners": memory,
        "cores": float(os.cpu_count() or 0),
    }
    value = median([many / one for many, one in zip(manies, ones, strict=True)])
    return {"fanout": Figure(value=value, bound=20, kind="at_least", details=details)}
