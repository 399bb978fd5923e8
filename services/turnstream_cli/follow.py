"""Follows a session's feed for as long as it takes: a connection that ends is opened again at the last sequence seen.

The end of a connection means nothing. Only a terminal event ends a run, so whoever follows one run goes on until its
`run.ended` is there, however often a proxy, a laptop's lid or a restarting server cuts the line.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec

from turnstream_cli.client import Client, Refused
from turnstream_cli.exits import CommandError, Exit
from turnstream_cli.sse import Frame, Frames

_BACKOFF = (0.1, 0.3, 1.0, 2.0, 5.0)


class Event(msgspec.Struct, frozen=True):
    """A stored event: `raw` as it was sent, `record` decoded."""

    seq: int
    type: str
    raw: bytes
    record: dict[str, Any]

    @property
    def data(self) -> dict[str, Any]:
        return self.record.get("data", {})


class Delta(msgspec.Struct, frozen=True):
    """Something live that is not stored: text as it is made."""

    raw: bytes
    record: dict[str, Any]


class CaughtUp(msgspec.Struct, frozen=True):
    """Everything that was stored when the connection was made has been shown; what follows is live."""


class Disconnected(msgspec.Struct, frozen=True):
    """The connection ended; it is opened again after `retry_in` seconds."""

    reason: str
    retry_in: float


Item = Event | Delta | CaughtUp | Disconnected


async def follow(client: Client, session: str, *, after: int = 0, deltas: bool = True) -> AsyncGenerator[Item, None]:
    """The session's events after this sequence, each once and in order, without end.

    Raises `CommandError` if the first connection cannot be made, if the API refuses one, or if the cursor is ahead of
    the log. Close the iterator to stop.
    """
    cursor, failures, ever = after, 0, False
    while True:
        reason = "the connection ended"
        try:
            async with contextlib.aclosing(_connection(client, session, cursor, deltas)) as items:
                async for item in items:
                    ever, failures = True, 0
                    match item:
                        case Event():
                            if item.seq <= cursor:
                                continue
                            cursor = item.seq
                        case str():
                            reason = item
                            break
                        case _:
                            pass
                    yield item
        except httpx.TransportError as error:
            if not ever:
                raise client.unreachable(error) from None
            reason = str(error) or type(error).__name__
        except Refused as refused:
            if refused.status < 500 and refused.status != 429:
                raise
            if not ever and failures == len(_BACKOFF):
                raise
            reason = str(refused)
        delay = _BACKOFF[min(failures, len(_BACKOFF) - 1)]
        failures += 1
        yield Disconnected(reason, delay)
        await asyncio.sleep(delay)


async def _connection(client: Client, session: str, cursor: int, deltas: bool) -> AsyncGenerator[Item | str, None]:
    """What one connection brings; a `str` is the reason why the server ends it."""
    params = {"after": str(cursor), "deltas": "true" if deltas else "false"}
    headers = {"Accept": "text/event-stream", "Last-Event-ID": str(cursor)}
    frames = Frames()
    async with client.stream(f"/v1/sessions/{session}/events", params, headers) as answer:
        async for chunk in answer.aiter_bytes():
            for frame in frames.feed(chunk):
                if (item := _item(frame, cursor)) is not None:
                    yield item


def _item(frame: Frame, cursor: int) -> Item | str | None:
    if frame.id is not None:
        record = msgspec.json.decode(frame.data, type=dict[str, Any])
        return Event(int(frame.id), record["type"], frame.data, record)
    match frame.event:
        case "delta":
            return Delta(frame.data, msgspec.json.decode(frame.data, type=dict[str, Any]))
        case "caught-up":
            return CaughtUp()
        case "overflow":
            return "this reader was too slow"
        case "bye":
            return "the server is shutting down"
        case "reset":
            raise CommandError(
                f"sequence {cursor} is ahead of the session's log: {frame.data.decode()}; start again from there",
                Exit.REFUSED,
            )
        case _:  # of a later release
            return None
