"""A client that streams its run and goes away: what becomes of the run is the policy's word (`on_disconnect`), and only
a client that is really gone counts."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any, Literal, cast

import pytest
from tests.support.api import Running
from tests.support.waiting import eventually

from turnstream.session.events import Error, ModelReplied, ToolCall, ToolReturned

FAIL: dict[str, Any] = {"on_disconnect": "fail", "on_busy": "parallel"}
Cut = Literal["FIN", "RST"]
cuts = pytest.mark.parametrize("cut", ["FIN", "RST"])


class Client:
    """A bare connection that asks for a stream of server-sent events."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        """Sends the request and reads until the stream has caught up."""
        content = json.dumps(body).encode() if body is not None else b""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self.writer.write(head.encode() + content)
        await self.reader.readuntil(b"event: caught-up")

    async def until(self, text: str) -> None:
        await self.reader.readuntil(text.encode())

    def cut(self, how: Cut) -> None:
        if how == "RST":
            bare = self.writer.get_extra_info("socket")
            bare.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class Place:
    """An API, and clients that stream from it."""

    def __init__(self, api: Running) -> None:
        self.api = api
        self.clients: list[Client] = []

    async def client(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.api.settings.http_port))
        self.clients.append(client)
        return client

    async def attached(self, session: str, **policy: Any) -> Client:
        """A client that has posted to a new session, and streams its run, which has begun."""
        await self.api.open(session, policy={**FAIL, **policy})
        client = await self.client()
        await client.ask("POST", f"/v1/sessions/{session}/messages", {"content": "hello"})
        await self.api.hand.start(f"{session}.1")
        return client

    async def until_open(self, count: int) -> None:
        """Until the API knows that only so many streams are open."""

        async def known() -> bool:
            return await metric(self.api, "turnstream_feed_listeners") == count

        await eventually(known)


@pytest.fixture
async def place(api: Running) -> AsyncIterator[Place]:
    place = Place(api)
    yield place
    for client in place.clients:
        client.writer.close()
        with contextlib.suppress(OSError):
            await client.writer.wait_closed()


async def metric(api: Running, name: str) -> float:
    shown = (await api.http.get("/metrics")).text
    return float(next(line for line in shown.splitlines() if line.startswith(f"{name} ")).rpartition(" ")[2])


async def status(api: Running, run: str) -> str:
    return (await api.http.get(f"/v1/runs/{run}/wait?timeout=0")).json()["status"]


async def cancels(api: Running, session: str) -> list[dict[str, Any]]:
    page = (await api.http.get(f"/v1/sessions/{session}/events?types=run.cancel_requested,run.ended")).json()
    return [event["data"] for event in page["events"]]


@cuts
async def test_s24_a_run_whose_client_is_gone_fails_and_another_goes_on(place: Place, cut: Cut) -> None:
    api = place.api
    leaves, stays = await place.attached("leaves"), await place.attached("stays")
    leaves.cut(cut)
    await eventually(lambda: cancels(api, "leaves"))
    (cancel,) = await cancels(api, "leaves")
    assert cancel["error"] == "client_disconnected" and cancel["by"] == "client:http"
    error = Error(code="client_disconnected", message="client disconnected mid-stream")
    await api.hand.end("leaves.1", status="failed", error=error)
    assert await status(api, "leaves.1") == "failed"
    assert await cancels(api, "stays") == [] and await status(api, "stays.1") == "running"
    await api.hand.end("stays.1", "still here")
    await stays.until("still here")
    assert (await api.say("leaves", "again"))["routed"] == "started", "the session is free"


@cuts
async def test_a_run_that_no_runner_has_begun_ends_at_once(place: Place, cut: Cut) -> None:
    client = await place.client()
    await client.ask("POST", "/v1/runs", {"input": "x", "session": "s1", "policy": FAIL})
    client.cut(cut)
    ended = await place.api.http.get("/v1/runs/s1.1/wait?timeout=20")
    outcome = ended.json()["outcome"]
    assert outcome["status"] == "failed" and outcome["error"]["code"] == "client_disconnected"


@cuts
async def test_a77_the_run_goes_on_where_the_policy_lets_it(place: Place, cut: Cut) -> None:
    """The default. A GET feed that is cut says nothing of any run, whatever the policy."""
    api = place.api
    detached, watched = await place.attached("detached", on_disconnect="detach"), await place.attached("watched")
    feed = await place.client()
    await feed.ask("GET", "/v1/sessions/watched/events")
    await place.until_open(3)
    detached.cut(cut)
    feed.cut(cut)
    await place.until_open(1)
    await api.hand.end("detached.1", "whole")
    assert (await api.http.get("/v1/runs/detached.1/wait?timeout=5")).json()["outcome"]["output"] == "whole"
    assert await cancels(api, "watched") == []
    await api.hand.end("watched.1")
    await watched.until("event: run.ended")


async def test_a_client_that_has_seen_the_end_may_go(place: Place) -> None:
    client = await place.attached("s1")
    await place.api.hand.end("s1.1")
    await client.until("event: run.ended")
    client.cut("RST")
    await place.until_open(0)
    assert [one["status"] for one in await cancels(place.api, "s1")] == ["completed"]


async def test_who_steers_a_run_does_not_end_it_by_going(place: Place) -> None:
    await place.attached("s1")
    second = await place.client()
    await second.ask("POST", "/v1/sessions/s1/messages", {"content": "and this", "on_busy": "steer"})
    await place.until_open(2)
    second.cut("RST")
    await place.until_open(1)
    assert await cancels(place.api, "s1") == []


async def test_a_server_that_shuts_down_is_no_client_that_is_gone(place: Place) -> None:
    client = await place.attached("s1")
    await place.api.stop()
    await client.until("event: bye")
    client.cut("RST")
    await place.api.start()
    assert await cancels(place.api, "s1") == [] and await status(place.api, "s1.1") == "running"


async def test_a_reader_that_is_too_slow_is_no_client_that_is_gone(place: Place) -> None:
    """It is dropped with `overflow`; the run goes on."""
    api = place.api
    before = await metric(api, "turnstream_feed_overflows_total")
    client = await place.attached("s1")
    cast("asyncio.Transport", client.writer.transport).pause_reading()
    for step in range(1, 40):
        call = ToolCall(id=f"c{step}", name="repeat", arguments=json.dumps({"step": step}))
        await api.hand.say("s1.1", ModelReplied(run=1, attempt=1, step=step, tool_calls=(call,)))
        returned = ToolReturned(run=1, attempt=1, call_id=call.id, status="ok", output="x" * 400_000)
        await api.hand.say("s1.1", returned)

    async def dropped() -> bool:
        return await metric(api, "turnstream_feed_overflows_total") > before

    await eventually(dropped)
    client.cut("RST")
    await place.until_open(0)
    assert await cancels(api, "s1") == [] and await status(api, "s1.1") == "running"
