"""An open stream of server-sent events: reads what is stored, joins the session's channel, writes until one side ends.

    events after the cursor … caught-up {seq} … deltas so far … events and deltas as they come
    at the end, one of:  overflow {seq} (too slow)   bye {seq, reason}   or nothing, where a run's stream has ended

A cursor ahead of the log gets `reset` with the true last sequence, and the stream goes on from there. Bytes that wait
are written in one piece; a peer that does not read stops its own stream only, and holds a bounded number of them.
"""

import asyncio

import msgspec
from starlette.types import Message, Receive, Send

from turnstream.broker.errors import BrokerFault
from turnstream.log.base import LogError
from turnstream.telemetry import get_logger
from turnstream_api.api import Api, Caller, Stream
from turnstream_api.channel import Channel
from turnstream_api.frames import CONTENT_TYPE, OPENING, control, event_frame
from turnstream_api.listener import PIECE, Listener
from turnstream_api.paging import read_after

log = get_logger()

HEADERS = [
    (b"content-type", CONTENT_TYPE.encode()),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


class At(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a stream stands: the data of `caught-up`, `reset`, `overflow` and `bye`."""

    seq: int
    reason: str | None = None


async def respond(
    api: Api, caller: Caller, stream: Stream, headers: list[tuple[bytes, bytes]], receive: Receive, send: Send
) -> None:
    """Answers with the stream, to its end. What fails before the first byte is raised, for the caller to say."""
    last = await _last(api, stream)
    listener = api.hub.enter(stream.filter, account=caller.account, owner=caller.key_id)
    watch = asyncio.create_task(_watch(receive, listener), name="sse peer")
    try:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS + headers})
        reset = control("reset", At(last)) if stream.after > last else b""
        await send(_piece(OPENING + stream.first + reset))
        await _write(api, stream, min(stream.after, last), listener, send)
        await send({"type": "http.response.body", "body": _farewell(listener), "more_body": False})
    finally:
        watch.cancel()
        api.hub.leave(listener)
    if stream.on_gone and listener.ending == "gone":
        await stream.on_gone()


async def _last(api: Api, stream: Stream) -> int:
    """The session's last sequence. Before a cursor is called wrong, who orders the appends is asked: a read may lag."""
    session = await api.sessions.load(stream.key)
    return session.seq if stream.after <= session.seq else await api.log.last(stream.key)


async def _write(api: Api, stream: Stream, after: int, listener: Listener, send: Send) -> None:
    channel: Channel | None = None
    joined = False
    try:
        if stream.over:
            listener.end("ended")
        while not joined and not listener.ending:
            after = await _replay(api, stream, after, channel.seq if channel else 0, listener, send)
            channel = api.hub.channel(await api.sessions.load(stream.key))
            if stream.filter.deltas:
                await api.hub.hear(channel)
            joined = _join(channel, after, listener)
        while (data := await listener.take()) is not None:
            await send(_piece(data))
    except (LogError, BrokerFault) as error:
        log.warning("a stream ends early", account=stream.key.account, session=stream.key.session, error=error)
        listener.end("bye")
    except Exception:
        log.exception("a stream failed", account=stream.key.account, session=stream.key.session)
        listener.end("bye")
    finally:
        if channel:
            channel.leave(listener)


async def _replay(api: Api, stream: Stream, after: int, at_least: int, listener: Listener, send: Send) -> int:
    """Sends what is stored, page by page, and answers with the last sequence read."""
    async for page in read_after(api.log, stream.key, after, at_least=at_least):
        piece: list[bytes] = []
        size = 0
        for frame in map(event_frame, page):
            if stream.filter.wants(frame):
                piece.append(frame.data)
                size += len(frame.data)
            if size >= PIECE:
                await send(_piece(b"".join(piece)))
                piece, size = [], 0
            if stream.filter.ends(frame):
                listener.over()
                break
        if piece:
            await send(_piece(b"".join(piece)))
        after = listener.sent = page[-1].seq
        if listener.ending:
            break
    return after


def _join(channel: Channel, after: int, listener: Listener) -> bool:
    """False where the channel has come further than what was read, and does not hold what lies between."""
    if not channel.join(listener, after):
        return False
    listener.give(control("caught-up", At(max(after, channel.seq))), 0)
    channel.catch_up(listener)
    return True


async def _watch(receive: Receive, listener: Listener) -> None:
    await gone(receive)
    listener.end("gone")


async def gone(receive: Receive) -> None:
    """Returns when the peer has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _piece(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


def _farewell(listener: Listener) -> bytes:
    match listener.ending:
        case "overflow":
            return control("overflow", At(listener.sent))
        case "bye":
            return control("bye", At(listener.sent, "shutdown"))
        case "unauthorized" | "deleted" as reason:
            return control("bye", At(listener.sent, reason))
        case _:
            return b""
