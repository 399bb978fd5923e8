"""The API service in this process on a real broker, a projector beside it, and a hand that plays the runner."""

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.support.waiting import eventually

from turnstream.broker.connection import Broker
from turnstream.ids import SessionKey, uuid7
from turnstream.log.handle import Handled, Sessions
from turnstream.log.jetstream import JetStreamLog
from turnstream.session.commands import (
    CancelRun,
    CloseFork,
    DeleteSession,
    Origin,
    PostMessage,
    RecordFact,
    RunFact,
    StartRun,
)
from turnstream.session.events import (
    Ask,
    ModelReplied,
    Part,
    Recorded,
    RunEnded,
    RunStarted,
    RunWaiting,
    ToolCall,
    ToolReturned,
    Wake,
)
from turnstream.session.forking import Places, copy_of
from turnstream.settings import Settings
from turnstream_cli.sse import Frame, Frames

_wakes = itertools.count(1)


class Hand:
    """Plays the runner: stores what one would, with what the test says it answered."""

    def __init__(self, broker: Broker, account: str) -> None:
        self.sessions = Sessions(JetStreamLog(broker), now=broker.clock.now)
        self._now = broker.clock.now
        self._account = account

    def key(self, session: str) -> SessionKey:
        return SessionKey(self._account, session)

    async def start(self, run: str) -> Handled:
        session, _, n = run.rpartition(".")
        state = await self.sessions.load(self.key(session))
        live = state.run(int(n))
        assert live is not None, f"{run} has ended"
        trigger, names = live.next_start()
        wake = Wake(work=next(_wakes), cause=live.requested_seq, delivery=1)
        started = RunStarted(
            run=live.n, attempt=live.attempt + 1, runner="hand", wake=wake, trigger=trigger, message_ids=names
        )
        return await self.sessions.handle(self.key(session), StartRun(origin=self._origin(), started=started))

    async def say(self, run: str, fact: RunFact) -> Handled:
        session = run.rpartition(".")[0]
        return await self.sessions.handle(self.key(session), RecordFact(origin=self._origin(), fact=fact))

    async def end(self, run: str, content: str = "done", **more: Any) -> Handled:
        """Ends a run that was started."""
        session, _, n = run.rpartition(".")
        live = (await self.sessions.load(self.key(session))).run(int(n))
        assert live is not None, f"{run} has ended"
        fields = {"status": "completed", "content": content} | more
        return await self.say(run, RunEnded(run=live.n, attempt=live.attempt, **fields))

    async def ask(self, run: str, *asks: Mapping[str, Any]) -> list[str]:
        """Makes a run that was started ask and wait: each is an `Ask`'s fields, `{"kind": "approval"}` at least. The
        requests' ids."""
        session, _, n = run.rpartition(".")
        live = (await self.sessions.load(self.key(session))).run(int(n))
        assert live is not None, f"{run} has ended"
        step = live.steps + 1
        calls = tuple(
            ToolCall(id=f"c{step}-{k}", name="ask", arguments=f'{{"k": {k}}}', asks=ask.get("kind", "question"))
            for k, ask in enumerate(asks)
        )
        await self.say(run, ModelReplied(run=live.n, attempt=live.attempt, step=step, tool_calls=calls))
        names = [f"{run}.q{live.asked + k}" for k in range(1, len(asks) + 1)]
        requests = tuple(
            Ask(request=name, call_id=call.id, **{"kind": "question", "prompt": "Which one?"} | dict(ask))
            for name, call, ask in zip(names, calls, asks, strict=True)
        )
        await self.say(run, RunWaiting(run=live.n, attempt=live.attempt, requests=requests))
        return names

    async def resume(self, run: str) -> None:
        """Starts a run whose requests are closed, and gives each call what was said."""
        session, _, n = run.rpartition(".")
        await self.start(run)
        live = (await self.sessions.load(self.key(session))).run(int(n))
        assert live is not None
        for call in live.open_calls:
            status = "denied" if call.asks == "approval" and call.closed != "approved" else "ok"
            fact = ToolReturned(run=live.n, attempt=live.attempt, call_id=call.id, status=status)
            await self.say(run, fact)

    async def cancel(self, run: str, **origin: str) -> Handled:
        """As a request would whose `Origin` has these fields."""
        session, _, n = run.rpartition(".")
        by = msgspec.structs.replace(self._origin(), **origin)
        return await self.sessions.handle(self.key(session), CancelRun(origin=by, run=int(n)))

    async def delete(self, session: str) -> Handled:
        command = DeleteSession(origin=self._origin(), specs={}, active="cancel")
        return await self.sessions.handle(self.key(session), command)

    async def copy(self, session: str, count: int | None = None) -> None:
        """Makes a fork whole; with `count`, copies so many events of the other session and no more."""
        key = self.key(session)
        fork = await self.sessions.load(key)
        assert fork.forked_from
        source = self.key(fork.forked_from.session)
        places, through = Places(), fork.forked_from.through
        for copy in await self._events(key):
            if copy.event.copied:
                places.add(copy.event.copied.seq, copy.seq)
        for recorded in (await self._events(source))[:count]:
            if recorded.seq <= through:
                handled = await self.sessions.handle(key, copy_of(recorded, source, key, places))
                if handled.recorded:
                    places.add(recorded.seq, handled.recorded.seq)
        if count is not None:
            return
        while (fork := await self.sessions.load(key)).copying:
            run = fork.runs[0].n if fork.runs else 0
            await self.sessions.handle(key, CloseFork(origin=self._origin(), run=run))

    async def _events(self, key: SessionKey) -> list[Recorded]:
        return [recorded async for page in self.sessions.log.read(key) for recorded in page]

    async def notices(self, session: str, count: int, text: str = "notice") -> list[int]:
        """Appends so many events; their sequences."""
        found: list[int] = []
        for n in range(count):
            command = PostMessage(
                origin=self._origin(),
                message_id=f"n-{next(_wakes)}",
                author="user:hand",
                kind="notice",
                content=(Part(text=f"{text} {n}"),),
                specs={},
            )
            handled = await self.sessions.handle(self.key(session), command)
            assert handled.recorded is not None
            found.append(handled.recorded.seq)
        return found

    async def carry_out(self, run: str, content: str = "done", **more: Any) -> Handled:
        await self.start(run)
        return await self.end(run, content, **more)

    def _origin(self) -> Origin:
        return Origin(id=uuid7(self._now(), next(_wakes).to_bytes(10, "big")), actor="runner:hand", time=self._now())


class Running:
    """An API that answers at `http`; `stop` ends it as a shutdown does."""

    def __init__(self, settings: Settings, account: str, broker: Broker) -> None:
        self.settings = settings
        self.account = account
        self.broker = broker
        self.url = f"http://127.0.0.1:{settings.http_port}"
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=self.url, timeout=20, trust_env=False, limits=limits)
        self.hand = Hand(broker, account)
        self._stop = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        from turnstream_api.app import serve

        ready = asyncio.Event()
        self._stop.clear()
        self._serving = asyncio.create_task(serve(self.settings, stop=self._stop, ready=ready.set))
        await eventually(lambda: ready.is_set() or self._serving is None or self._serving.done())
        if self._serving.done():
            self._serving.result()

    async def stop(self) -> None:
        self._stop.set()
        if self._serving is not None:
            serving, self._serving = self._serving, None
            await serving

    async def close(self) -> None:
        await self.http.aclose()
        await self.stop()

    # --- asking ---------------------------------------------------------------------------------------------------

    async def post(self, path: str, body: Mapping[str, Any] | None = None, **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body or {}, headers={k.replace("_", "-"): v for k, v in headers.items()})

    async def say(self, session: str, text: str = "hello", **fields: Any) -> dict[str, Any]:
        """Posts a message, which must be taken."""
        answer = await self.post(f"/v1/sessions/{session}/messages", {"content": text, **fields})
        assert answer.status_code == 202, answer.text
        return answer.json()

    async def open(self, session: str, **fields: Any) -> None:
        answer = await self.post("/v1/sessions", {"id": session, **fields})
        assert answer.status_code == 201, answer.text

    async def turn(self, session: str, text: str = "hello", answer: str = "done") -> str:
        """A whole turn; its run."""
        run = (await self.say(session, text))["run"]
        await self.hand.carry_out(run, answer)
        return run

    @contextlib.asynccontextmanager
    async def feed(
        self, session: str, /, *, method: str = "GET", path: str = "", **given: Any
    ) -> AsyncIterator["Feed"]:
        """An open stream of the session's events; `given` are headers, query parameters and a JSON body."""
        headers = {"Accept": "text/event-stream", **given.pop("headers", {})}
        body = given.pop("json", None)
        target = path or f"/v1/sessions/{session}/events"
        async with self.http.stream(
            method, target, headers=headers, params=given, json=body, timeout=httpx.Timeout(20, read=20)
        ) as answer:
            yield Feed(answer)


class Feed:
    """What comes on a stream, frame by frame."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self.status = answer.status_code
        self._chunks = answer.aiter_raw() if self.status == 200 else None
        self._frames = Frames()
        self._ready: list[Frame] = []
        self.seen: list[Frame] = []

    async def next(self) -> Frame:
        """The next frame. Raises `StopAsyncIteration` at the end of the stream."""
        assert self._chunks is not None, self.status
        while not self._ready:
            self._ready += self._frames.feed(await anext(self._chunks))
        frame = self._ready.pop(0)
        self.seen.append(frame)
        return frame

    async def until(self, event: str) -> Frame:
        while (frame := await self.next()).event != event:
            pass
        return frame

    async def rest(self) -> list[Frame]:
        """Everything up to the end of the stream."""
        found: list[Frame] = []
        with contextlib.suppress(StopAsyncIteration):
            while True:
                found.append(await self.next())
        return found

    @property
    def ids(self) -> list[int]:
        return [int(frame.id) for frame in self.seen if frame.id is not None]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def api_settings(url: str, folder: Path, account: str, **given: Any) -> Settings:
    given = {"http_port": free_port(), "account": account, "data_dir": folder, "after_timeout": 5.0} | given
    return Settings(nats_url=url, **given)


@pytest.fixture
async def api(nats: Broker, nats_url: str, account: str, tmp_path: Path) -> AsyncIterator[Running]:
    """One API process's worth, on the shared broker, in an account of its own."""
    running = Running(api_settings(nats_url, tmp_path, account), account, nats)
    await running.start()
    yield running
    await running.close()


@pytest.fixture
async def viewed(api: Running) -> AsyncIterator[Running]:
    """The same, with a projector beside it."""
    from turnstream_projector.app import serve

    stop, ready = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(serve(api.settings, stop=stop, ready=ready.set))
    await eventually(lambda: ready.is_set() or serving.done())
    if serving.done():
        serving.result()
    yield api
    stop.set()
    await serving
