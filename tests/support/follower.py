"""A client of the feed that is never done: whatever happens to its connection, it comes back with its cursor.

It keeps everything as it came, so that a frame that comes twice, too early or not at all is seen.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
from tests.support.waiting import eventually

from turnstream_cli.sse import Frame, Frames

PAUSE = 0.05
"""Seconds before it comes back."""


class Follower:
    """`urls` are tried in turn, one for each connection."""

    def __init__(
        self,
        session: str,
        *urls: str,
        after: int = 0,
        deltas: bool = True,
        types: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.session = session
        self.urls = itertools.cycle(urls)
        self.cursor = after
        self.events: list[Frame] = []
        """Stored events, as they came."""
        self.deltas: list[dict[str, Any]] = []
        self.marks: list[Frame] = []
        """`caught-up`, `bye` and their like."""
        self.connections = 0
        """How many were answered."""
        self.refused: list[int] = []
        """Statuses other than 200."""
        self._query = {"deltas": "true" if deltas else "false", **({"types": types} if types else {})}
        self._headers = dict(headers or {})

    @property
    def ids(self) -> list[int]:
        return [int(frame.id) for frame in self.events if frame.id]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(frame.data) for frame in self.events]

    @property
    def caught_up(self) -> int:
        """On how many connections it has read all that was stored."""
        return sum(mark.event == "caught-up" for mark in self.marks)

    def text(self, run: str, attempt: int = 1) -> str:
        """What it heard the run say, of its last step."""
        mine = [delta for delta in self.deltas if delta["run"] == run and delta["attempt"] == attempt]
        last = max((delta["step"] for delta in mine), default=0)
        return "".join(delta["text"] for delta in mine if delta["step"] == last and delta["kind"] == "text")

    def count(self, kind: str) -> int:
        return sum(frame.event == kind for frame in self.events)

    async def until(self, kind: str, *, count: int = 1, timeout: float = 60.0) -> None:
        """Waits for so many events of a type."""
        await eventually(lambda: self.count(kind) >= count, timeout, what=f"{count} {kind} on {self.session}'s feed")

    async def until_seq(self, seq: int, *, timeout: float = 60.0) -> None:
        await eventually(lambda: self.cursor >= seq, timeout, what=f"event {seq} on {self.session}'s feed")

    async def run(self) -> None:
        """Follows until it is cancelled."""
        timeout = httpx.Timeout(10, read=30)
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(trust_env=False, timeout=timeout, limits=limits) as http:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    await self._connection(http, next(self.urls))
                await asyncio.sleep(PAUSE)

    async def _connection(self, http: httpx.AsyncClient, url: str) -> None:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(self.cursor), **self._headers}
        path = f"{url}/v1/sessions/{self.session}/events"
        frames = Frames()
        async with http.stream("GET", path, params=self._query, headers=headers) as answer:
            if answer.status_code != 200:
                self.refused.append(answer.status_code)
                return
            self.connections += 1
            async for chunk in answer.aiter_raw():
                for frame in frames.feed(chunk):
                    self._take(frame)

    def _take(self, frame: Frame) -> None:
        if frame.id is not None:
            self.events.append(frame)
            self.cursor = int(frame.id)
        elif frame.event == "delta":
            self.deltas.append(json.loads(frame.data))
        else:
            self.marks.append(frame)


@asynccontextmanager
async def following(session: str, *urls: str, **options: Any) -> AsyncIterator[Follower]:
    """A follower at work, which has read what is stored."""
    follower = Follower(session, *urls, **options)
    task = asyncio.create_task(follower.run(), name=f"follower of {session}")
    try:
        await eventually(lambda: follower.caught_up or task.done(), 60, what="a first connection to the feed")
        yield follower
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
