"""All channels of a process: opens one for a session that somebody begins to watch, closes it when nobody does any
more.

One timer keeps every quiet stream alive. What is held is bounded: a channel for each watched session (plus a thousand
that were watched a moment ago), and a budget of bytes for each listener.
"""

import asyncio
from collections.abc import Callable

from turnstream.ids import SessionKey
from turnstream.log.handle import Sessions
from turnstream.session.events import Recorded
from turnstream.session.state import Session
from turnstream.telemetry import Metrics
from turnstream_api.channel import Channel, Follow, LiveSource
from turnstream_api.frames import KEEP_ALIVE, Filter, event_frame
from turnstream_api.listener import Listener

LINGER = 5.0
"""Seconds that a channel stays open when nobody watches any more."""
IDLE_CHANNELS = 1000
"""How many such channels there may be."""


class Hub:
    """`follow` opens the feed of a session behind a sequence. `heartbeat`: seconds, the longest silence on a stream.
    `budget`: bytes that a listener can hold."""

    def __init__(
        self,
        sessions: Sessions,
        *,
        follow: Callable[[SessionKey, int], Follow],
        live: LiveSource,
        heartbeat: float,
        budget: int,
        metrics: Metrics,
    ) -> None:
        self._sessions = sessions
        self._follow = follow
        self._live = live
        self._heartbeat = heartbeat
        self._budget = budget
        self._metrics = metrics
        self._channels: dict[SessionKey, Channel] = {}
        self._lingering: dict[SessionKey, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._streams: set[Listener] = set()
        self._ticker: asyncio.TimerHandle | None = None
        self.closed = False

    def channel(self, session: Session) -> Channel:
        """The channel of a session that was just read, opened behind `session.seq` if there is none."""
        key = session.key
        channel = self._channels.get(key)
        if channel is not None and channel.closed:  # its log could not be followed
            self._dismiss(channel)
            channel = None
        if channel is None:
            channel = self._channels[key] = Channel(
                key,
                session.seq,
                self._follow(key, session.seq),
                budget=self._budget,
                on_event=self._sessions.fold,
                on_idle=self._linger,
            )
        self._linger(channel)
        return channel

    async def hear(self, channel: Channel) -> None:
        """Makes the channel listen to deltas too."""

        async def running() -> list[int]:
            session = await self._sessions.load(channel.key)
            return [run.n for run in session.runs if run.status == "running"]

        await channel.hear(self._live, running)

    async def wait(self, session: Session, run: Filter, timeout: float) -> Recorded | None:
        """The event that ends a run that was live when the session was read, or by which it waits for a person; None
        if that does not come in time, or the server shuts down."""
        if self.closed:
            return None
        channel = self.channel(session)
        future = channel.wait(run)
        try:
            if channel.seq > session.seq and (found := await self._missed(session, run)):
                return found
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            return None
        finally:
            future.cancel()

    def enter(self, filter: Filter, *, account: str, owner: str) -> Listener:
        """A new stream's listener. Until it `leave`s it is kept alive, and told when the server shuts down."""
        listener = Listener(
            filter, budget=self._budget, account=account, owner=owner, on_overflow=self._metrics.overflows.inc
        )
        if self.closed:
            listener.end("bye")
        self._streams.add(listener)
        self._metrics.listeners.inc()
        if self._ticker is None and not self.closed:
            self._ticker = asyncio.get_running_loop().call_later(self._heartbeat, self._tick)
        return listener

    def leave(self, listener: Listener) -> None:
        self._streams.discard(listener)
        self._metrics.listeners.dec()

    def expel(self, valid: Callable[[str, str], bool]) -> None:
        """Ends the streams of those whose account and API key are not `valid` any more."""
        for listener in self._streams:
            if not valid(listener.account, listener.owner):
                listener.end("unauthorized")

    async def close(self) -> None:
        """Says good-bye to every stream and answers every waiter."""
        self.closed = True
        if self._ticker:
            self._ticker.cancel()
        for timer in self._lingering.values():
            timer.cancel()
        for listener in self._streams:
            listener.end("bye")
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()), *self._closing)

    async def _missed(self, session: Session, run: Filter) -> Recorded | None:
        """What is waited for, among what was stored since the session was read."""
        async for page in self._sessions.log.read(session.key, session.seq):
            for recorded in page:
                if run.settles(event_frame(recorded)):
                    return recorded
        return None

    def _tick(self) -> None:
        """Half a heartbeat at a time, so that no silence is longer than a heartbeat."""
        self._ticker = None
        if not self._streams or self.closed:
            return
        for listener in self._streams:
            if listener.quiet:
                listener.give(KEEP_ALIVE, 0)
            listener.quiet = True
        self._ticker = asyncio.get_running_loop().call_later(self._heartbeat / 2, self._tick)

    def _linger(self, channel: Channel) -> None:
        """Closes the channel in a while if nobody watches it then."""
        if timer := self._lingering.pop(channel.key, None):
            timer.cancel()
        if not self.closed:
            delay = LINGER if len(self._lingering) < IDLE_CHANNELS else 0
            loop = asyncio.get_running_loop()
            self._lingering[channel.key] = loop.call_later(delay, self._close_idle, channel)

    def _close_idle(self, channel: Channel) -> None:
        self._lingering.pop(channel.key, None)
        if channel.watched or self._channels.get(channel.key) is not channel:
            return
        self._dismiss(channel)

    def _dismiss(self, channel: Channel) -> None:
        del self._channels[channel.key]
        task = asyncio.create_task(channel.close(), name=f"close {channel.key}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
