"""The API as processes: two of them at once, killed, told to stop with streams open, behind a proxy that loses
answers."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.support.api import Hand, free_port
from tests.support.processes import Process, Spawn
from tests.support.waiting import eventually

from turnstream.broker.connection import Broker
from turnstream.ids import SessionKey
from turnstream.log.jetstream import JetStreamLog
from turnstream.session.events import MessagePosted

pytestmark = pytest.mark.system


class Served:
    """An API process and a client for it."""

    def __init__(self, process: Process, port: int) -> None:
        self.process = process
        self.port = port
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            timeout=30,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )

    async def up(self) -> None:
        async def answers() -> bool:
            assert self.process.running, self.process.log[-2000:]
            try:
                return (await self.http.get("/readyz")).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(answers, timeout=30, every=0.1)


class Start:
    """Starts API processes of one account."""

    def __init__(self, spawn: Spawn, url: str, account: str) -> None:
        self._spawn, self._url, self._account = spawn, url, account
        self.started: list[Served] = []

    async def __call__(self, port: int | None = None, **settings: object) -> Served:
        port = port or free_port()
        process = self._spawn("api", nats_url=self._url, http_port=port, account=self._account, **settings)
        served = Served(process, port)
        self.started.append(served)
        await served.up()
        return served


@pytest.fixture
async def start(spawn: Spawn, nats: Broker, nats_url: str, account: str) -> AsyncIterator[Start]:
    starter = Start(spawn, nats_url, account)
    yield starter
    for served in starter.started:
        await served.http.aclose()


async def posted(nats: Broker, account: str, session: str) -> list[MessagePosted]:
    pages = [page async for page in JetStreamLog(nats).read(SessionKey(account, session))]
    events = [recorded.event.data for page in pages for recorded in page]
    return [data for data in events if isinstance(data, MessagePosted)]


@pytest.fixture
async def two(start: Start) -> tuple[Served, Served]:
    one, other = await asyncio.gather(start(), start())
    return one, other


async def test_s04_twelve_messages_at_once_through_two_processes(
    two: tuple[Served, Served], nats: Broker, account: str
) -> None:
    one, other = two
    await one.http.post("/v1/sessions", json={"id": "strict"})
    await one.http.post("/v1/sessions", json={"id": "queue", "policy": {"on_busy": "queue"}})

    async def say(n: int, session: str) -> httpx.Response:
        served = (one, other)[n % 2]
        return await served.http.post(f"/v1/sessions/{session}/messages", json={"content": f"message {n}"})

    strict = await asyncio.gather(*(say(n, "strict") for n in range(12)))
    codes = sorted(answer.status_code for answer in strict)
    assert codes == [202] + [409] * 11
    refusals = [answer.json() for answer in strict if answer.status_code == 409]
    assert {(problem["code"], problem["run"]) for problem in refusals} == {("run_active", "strict.1")}
    assert len(await posted(nats, account, "strict")) == 1

    queued = await asyncio.gather(*(say(n, "queue") for n in range(12)))
    assert {answer.status_code for answer in queued} == {202}
    stored = await posted(nats, account, "queue")
    runs = [(data.starts or data.queued) for data in stored]
    assert [routing.run for routing in runs if routing] == list(range(1, 13))
    assert sorted(data.content[0].text for data in stored) == sorted(f"message {n}" for n in range(12))


@pytest.mark.parametrize(("path", "body"), [("/v1/sessions/s1/messages", "content"), ("/v1/runs", "input")])
async def test_a56_fifty_with_one_key_through_two_processes_are_one(
    two: tuple[Served, Served], nats: Broker, account: str, path: str, body: str
) -> None:
    one, other = two
    await one.http.post("/v1/sessions", json={"id": "s1"})

    async def ask(n: int) -> httpx.Response:
        served = (one, other)[n % 2]
        return await served.http.post(path, json={body: "hello"}, headers={"Idempotency-Key": "only-once"})

    answers = await asyncio.gather(*(ask(n) for n in range(50)))
    first = answers[0].json()
    assert all(answer.json() == first for answer in answers)
    assert sorted(answer.status_code for answer in answers) == [200] * 49 + [202]
    replayed = [answer.headers.get("idempotency-replayed") for answer in answers if answer.status_code == 200]
    assert replayed == ["true"] * 49
    assert len(await posted(nats, account, first["session"])) == 1


@contextlib.asynccontextmanager
async def lossy(port: int, lose: list[bytes]) -> AsyncIterator[int]:
    """A proxy that passes a request on and then cuts the connection instead of passing the answer back, once for each
    entry of `lose` that stands in the request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in request.split(b"\r\n") if line[:15].lower() == b"content-length:"), 0
            )
            up_writer.write(request + await reader.readexactly(length))
            answer = await up_reader.readuntil(b"\r\n\r\n")
            for mark in lose:
                if mark in request:
                    lose.remove(mark)
                    return
            writer.write(answer)
            while chunk := await up_reader.read(65536):
                writer.write(chunk)
                await writer.drain()
        finally:
            writer.close()
            up_writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_a56_a_lost_answer_is_asked_for_again(start: Start, nats: Broker, account: str) -> None:
    served = await start()
    lose = [b"key-a", b"key-b"]
    async with lossy(served.port, lose) as port, httpx.AsyncClient(trust_env=False) as http:
        for key, path, body in (
            ("key-a", "/v1/sessions", {"title": "made once"}),
            ("key-b", "/v1/runs", {"input": "hello"}),
        ):
            url, headers = f"http://127.0.0.1:{port}{path}", {"Idempotency-Key": key, "Connection": "close"}
            with pytest.raises(httpx.TransportError):
                await http.post(url, json=body, headers=headers)
            again = await http.post(url, json=body, headers=headers)
            assert again.status_code == 200 and again.headers["idempotency-replayed"] == "true"
            session = again.json()["session"]
            pages = [page async for page in JetStreamLog(nats).read(SessionKey(account, session))]
            assert sum(map(len, pages)) == 1
    assert lose == []


async def test_a59_a_process_told_to_stop_ends_within_seconds_and_readers_resume(start: Start, nats: Broker) -> None:
    served = await start()
    await served.http.post("/v1/sessions", json={"id": "s1"})
    hand = Hand(nats, start._account)
    made = await hand.notices("s1", 5)

    async def read(after: int, caught_up: asyncio.Event) -> tuple[list[int], str]:
        ids: list[int] = []
        last = ""
        url, headers = f"/v1/sessions/s1/events?after={after}", {"Accept": "text/event-stream"}
        async with served.http.stream("GET", url, headers=headers) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    ids.append(int(line[4:]))
                if line.startswith("event: "):
                    last = line[7:]
                    if last == "caught-up":
                        caught_up.set()
        return ids, last

    marks = [asyncio.Event() for _ in range(100)]
    reading = [asyncio.create_task(read(0, mark)) for mark in marks]
    await asyncio.gather(*(mark.wait() for mark in marks))
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await served.process.stop() == 0
    assert loop.time() - began < 8
    for ids, last in await asyncio.gather(*reading):
        assert ids[-5:] == made and last == "bye"
    later = await hand.notices("s1", 5)
    again = await start(served.port)
    page = (await again.http.get(f"/v1/sessions/s1/events?after={made[-1]}")).json()
    assert [event["seq"] for event in page["events"]] == later


@pytest.mark.slow
async def test_nothing_in_the_inbox_is_lost_or_taken_twice_when_the_api_is_killed(
    start: Start, nats: Broker, account: str
) -> None:
    """Killed again and again while messages come in."""
    rounds, each = 3, 210

    async def publish(first: int) -> None:
        for n in range(first, first + each):
            answer = await nats.request(f"ts.inbox.{account}.s{n % 7}", str(n).encode())
            assert "seq" in json.loads(answer.data)

    for turn in range(rounds):
        served = await start()
        before = await _count(nats, account)
        publishing = asyncio.create_task(publish(turn * each))
        await eventually(lambda enough=before + 20: _more(nats, account, enough), timeout=20)
        served.process.kill()
        await publishing
    await start()
    total = rounds * each

    async def all_there() -> bool:
        return await _count(nats, account) >= total

    # What was held when it was killed comes again once the broker's patience (30 s) has ended.
    await eventually(all_there, timeout=60, every=0.5)
    for session in range(7):
        texts = [data.content[0].text for data in await posted(nats, account, f"s{session}")]
        assert sorted(map(int, texts)) == list(range(session, total, 7))
    info: dict[str, Any] = await nats.api("STREAM.INFO.REFUSED", {"subjects_filter": f"ts.inbox-refused.{account}.>"})
    assert not info["state"].get("subjects")


async def _count(nats: Broker, account: str) -> int:
    return sum([len(await posted(nats, account, f"s{session}")) for session in range(7)])


async def _more(nats: Broker, account: str, enough: int) -> bool:
    return await _count(nats, account) >= enough
