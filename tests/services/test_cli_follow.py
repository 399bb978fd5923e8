"""Following a feed over connections that do not last; asking for writes whose answers are lost."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import httpx
import pytest

from turnstream_cli import follow as follow_module
from turnstream_cli import talk
from turnstream_cli.client import Client, Connect, Refused, connected
from turnstream_cli.exits import CommandError, Exit
from turnstream_cli.follow import CaughtUp, Disconnected, Event, follow

Handler = Callable[["Request", asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class Request:
    def __init__(self, line: str, headers: dict[str, str], body: bytes) -> None:
        self.method, self.path, _ = line.split(" ")
        self.headers = headers
        self.body = body


class Server:
    """A server on loopback that keeps every request and answers as the test says."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.handler: Handler
        self.url = ""

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        request = Request(head[0], headers, await reader.readexactly(int(headers.get("content-length", 0))))
        self.requests.append(request)
        try:
            await self.handler(request, writer)
        finally:
            writer.close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_module, "_BACKOFF", (0.001,))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    fake = Server()
    listening = await asyncio.start_server(fake.accept, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening:
        yield fake


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with connected(Connect(url=server.url)) as client:
        yield client


def record(seq: int, kind: str, **data: object) -> bytes:
    return json.dumps({"seq": seq, "type": kind, "data": data}, ensure_ascii=False).encode()


EVENTS = {
    3: record(3, "message.posted", message_id="m1", starts={"run": 1}, content=[{"text": "\u2028 \u0085 \x7f"}]),
    5: record(5, "run.started", run=1, attempt=1),
    6: record(6, "model.replied", run=1, attempt=1, step=1, tool_calls=[{"id": "c", "name": "add", "arguments": "{}"}]),
    9: record(9, "tool.returned", run=1, attempt=1, call_id="c", status="ok", output="3"),
    12: record(12, "run.ended", run=1, attempt=1, status="completed", content="three"),
}


def frame(seq: int) -> bytes:
    return b"id: %d\nevent: x\ndata: %b\n\n" % (seq, EVENTS[seq])


def feed(*, at_a_time: int, cut: Callable[[asyncio.StreamWriter], None] | None = None) -> Handler:
    """Serves the events behind the cursor, a few on each connection, half a frame more, and ends the connection."""

    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        rest = [seq for seq in EVENTS if seq > int(request.headers["last-event-id"])]
        writer.write(HEAD + b": hello\n\n" + b"".join(map(frame, rest[:at_a_time])))
        if rest[at_a_time:]:
            writer.write(frame(rest[at_a_time])[:-9])
        await writer.drain()
        if cut:
            cut(writer)

    return handle


async def collect(client: Client, count: int, *, after: int = 0) -> list[follow_module.Item]:
    seen: list[follow_module.Item] = []
    async with aclosing(follow(client, "s1", after=after)) as items:
        async for item in items:
            seen.append(item)
            if sum(isinstance(one, Event) for one in seen) == count:
                return seen
    raise AssertionError("the feed ended")


@pytest.mark.parametrize("cut", [None, lambda writer: writer.transport.abort()], ids=["end", "reset"])
async def test_a08_a68_each_connection_begins_at_the_cursor_and_the_whole_is_complete(
    server: Server, client: Client, cut: Callable[[asyncio.StreamWriter], None] | None
) -> None:
    server.handler = feed(at_a_time=1, cut=cut)
    seen = await collect(client, len(EVENTS))
    assert [item.raw for item in seen if isinstance(item, Event)] == list(EVENTS.values())
    assert [request.headers["last-event-id"] for request in server.requests] == ["0", "3", "5", "6", "9"]
    assert sum(isinstance(item, Disconnected) for item in seen) == 4


async def test_a75_the_end_of_a_connection_is_not_the_end_of_a_run(
    server: Server, client: Client, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    server.handler = feed(at_a_time=1)
    assert await talk.watch_run(client, "s1.1", after=0, json=True, every=True) is Exit.OK
    assert capfdbinary.readouterr().out == b"".join(line + b"\n" for line in EVENTS.values())


async def test_an_event_that_comes_again_is_shown_once(server: Server, client: Client) -> None:
    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"".join(map(frame, EVENTS)))

    server.handler = handle
    seen = await collect(client, 2, after=6)
    assert [item.seq for item in seen if isinstance(item, Event)] == [9, 12]


@pytest.mark.parametrize(
    "ending", [b"event: bye\ndata:\n\n", b'event: overflow\ndata: {"seq":3}\n\n', b"event: new\n\n"]
)
async def test_the_servers_own_endings_lead_to_a_new_connection(server: Server, client: Client, ending: bytes) -> None:
    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        after = int(request.headers["last-event-id"])
        writer.write(HEAD + (frame(3) + b"event: caught-up\ndata: {}\n\n" + ending if after == 0 else frame(5)))

    server.handler = handle
    seen = await collect(client, 2)
    assert [type(item) for item in seen] == [Event, CaughtUp, Disconnected, Event]


async def test_a_server_that_is_away_for_a_while_is_asked_again(server: Server, client: Client) -> None:
    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) in (2, 3):
            writer.write(b"HTTP/1.1 503 Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            await feed(at_a_time=1)(request, writer)

    server.handler = handle
    seen = await collect(client, 2)
    assert [item.seq for item in seen if isinstance(item, Event)] == [3, 5]


async def test_a_refusal_ends_it(server: Server, client: Client) -> None:
    problem = b'{"title":"Not found","status":404,"code":"not_found","detail":"there is no session s1","run":"s1.1"}'

    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 404 No\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(problem), problem))

    server.handler = handle
    with pytest.raises(Refused, match=r"there is no session s1 \(not_found, run: s1\.1\)") as refused:
        await collect(client, 1)
    assert refused.value.code is Exit.REFUSED
    assert len(server.requests) == 1


async def test_s41_a_cursor_ahead_of_the_log_is_an_error(server: Server, client: Client) -> None:
    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b'event: reset\ndata: {"seq":12}\n\n')

    server.handler = handle
    with pytest.raises(CommandError, match="ahead of the session's log"):
        await collect(client, 1, after=99)


async def test_nobody_there_is_one_clear_line() -> None:
    async with connected(Connect(url="http://127.0.0.1:9")) as client:
        for ask in (client.get("/v1/sessions"), client.post("/v1/sessions"), collect(client, 1)):
            with pytest.raises(CommandError, match=r"no Turnstream answers at http://127\.0\.0\.1:9") as unreachable:
                await ask
            assert unreachable.value.code is Exit.UNREACHABLE


async def test_a56_a_write_whose_answer_is_lost_is_repeated_with_its_key(server: Server, client: Client) -> None:
    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) < 3:
            writer.transport.abort()
        else:
            writer.write(b'HTTP/1.1 202 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\n{"seq":1}')

    server.handler = handle
    assert await client.post("/v1/sessions/s1/messages", {"content": "hi"}) == {"seq": 1}
    keys = {request.headers["idempotency-key"] for request in server.requests}
    assert (len(server.requests), len(keys)) == (3, 1)
    assert {request.body for request in server.requests} == {b'{"content":"hi"}'}


async def test_a_read_whose_answer_is_lost_fails_at_once(server: Server, client: Client) -> None:
    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    server.handler = handle
    with pytest.raises(CommandError):
        await client.get("/v1/sessions")
    assert len(server.requests) == 1


async def test_the_key_goes_along(server: Server) -> None:
    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")

    server.handler = handle
    async with connected(Connect(url=server.url + "/", key="ts_secret")) as client:
        await client.get("/v1/runs", limit=3, cursor=None, flag=True)
    (request,) = server.requests
    assert request.headers["authorization"] == "Bearer ts_secret"
    assert request.path == "/v1/runs?limit=3&flag=true"


async def test_a_read_timeout_is_no_read_of_the_end(server: Server, client: Client) -> None:
    """A line that died without a word is given up and opened again."""

    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 1:
            writer.write(HEAD + frame(3))
            await asyncio.Event().wait()
        await feed(at_a_time=1)(request, writer)

    server.handler = handle
    original = client.http.stream
    client.http.stream = lambda *a, **k: original(*a, **k | {"timeout": httpx.Timeout(5, read=0.05)})  # type: ignore[method-assign]
    seen = await collect(client, 2)
    assert [item.seq for item in seen if isinstance(item, Event)] == [3, 5]


@pytest.mark.parametrize(
    ("posted", "items", "said"),
    [
        ({"routed": "started", "run": "s1.1"}, [], "started s1.1 (#9)"),
        ({"routed": "queued", "run": "s1.2"}, [], "queued as s1.2, behind s1.1 (#9)"),
        (
            {"routed": "queued", "run": "s1.3"},
            [{"run": "s1.2", "seq": 8}, {"run": "s1.3", "seq": 9}, {"run": "s1.4", "seq": 10}],
            "queued as s1.3, behind s1.2 (#9)",
        ),
        ({"routed": "queued", "run": "s1.1"}, [], "queued as s1.1 (#9)"),
        ({"routed": "steered", "run": "s1.1"}, [], "steers s1.1 (#9)"),
        ({"routed": "answered", "run": "s1.1"}, [], "answers what s1.1 asks (#9)"),
        ({"routed": "none"}, [], "its author may not start a turn (#9)"),
    ],
)
async def test_send_says_where_a_message_went(
    server: Server,
    capsys: pytest.CaptureFixture[str],
    posted: dict[str, str],
    items: list[dict[str, object]],
    said: str,
) -> None:
    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        queue = {"active": "s1.1", "items": items}
        answer = {**posted, "session": "s1", "message": "m", "seq": 9} if request.method == "POST" else queue
        body = json.dumps(answer).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)

    server.handler = handle
    assert await talk.send("s1", "hi", author="user:ann", wait=False, connect=Connect(url=server.url)) == Exit.OK
    assert capsys.readouterr().out.endswith(said + "\n")
    assert json.loads(server.requests[0].body) == {"session": "s1", "input": "hi", "author": "user:ann"}
