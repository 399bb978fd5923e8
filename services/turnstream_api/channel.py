"""The feed of one session, shared by everybody who watches it.

It follows the log (`turnstream.log.feed`) from a sequence on, makes each frame once and hands the same bytes to every
listener: several frames in one piece where they come faster than they are handed on. A listener reads what is stored by
itself, at its own pace, and joins where its reading ends; nothing is buffered for it meanwhile.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from turnstream.broker.errors import BrokerFault
from turnstream.ids import SessionKey
from turnstream.log.base import LogError
from turnstream.session.events import Recorded
from turnstream.telemetry import get_logger
from turnstream.wire.live import Delta, Listening
from turnstream_api.frames import DELETED, Filter, Frame, delta_frame, event_frame
from turnstream_api.listener import Ending, Listener
from turnstream_api.speech import Speech

log = get_logger()

RECENT = 256
"""Frames that a channel keeps at most, for listeners who are about to join."""


class Follow(Protocol):
    """Each event of a session once and in order, as it is stored: `turnstream.log.feed.Feed`. What is no event (the
    mark that all there was has been read) is passed over."""

    def __aiter__(self) -> AsyncIterator[object]: ...
    async def close(self) -> None: ...


class LiveSource(Protocol):
    """The deltas of a session: `turnstream.wire.live.Live`."""

    async def listen(self, key: SessionKey, on_delta: Callable[[Delta], None]) -> Listening: ...
    async def read(self, key: SessionKey, run: int) -> list[Delta]: ...


class Channel:
    """`seq`: the last event it knows of. `budget`: bytes that a listener can hold; a quarter of it is kept of recent
    frames, and of each run's speech. `on_idle` is called when the last watcher has left, `on_event` for each
    event."""

    def __init__(
        self,
        key: SessionKey,
        seq: int,
        feed: Follow,
        *,
        budget: int,
        on_event: Callable[[SessionKey, Recorded], None],
        on_idle: Callable[["Channel"], None],
    ) -> None:
        self.key = key
        self.seq = seq
        self.closed = False
        self._feed = feed
        self._budget = budget
        self._on_event = on_event
        self._on_idle = on_idle
        self._listeners: set[Listener] = set()
        self._waiters: dict[asyncio.Future[Recorded | None], Filter] = {}
        self._recent: deque[Frame] = deque()
        self._recent_size = 0
        self._pending: list[Frame] = []
        self._speeches: dict[int, Speech] = {}
        self._over: deque[int] = deque(maxlen=RECENT)
        self._held: list[Delta] | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._listening: Listening | None = None
        self._following = asyncio.create_task(self._follow(), name=f"feed {key}")

    @property
    def watched(self) -> bool:
        return bool(self._listeners or self._waiters)

    # --- who watches ----------------------------------------------------------------------------------------------

    def join(self, listener: Listener, after: int) -> bool:
        """From here on the listener, which has read up to `after`, gets what comes. False: it has more to read
        first."""
        if self.closed:
            listener.end("bye")
            return True
        self._flush()
        if after < self.seq:
            if not self._recent or self._recent[0].previous > after:
                return False
            hand(listener, [frame for frame in self._recent if frame.seq > after])
        listener.ahead = after
        self._listeners.add(listener)
        return True

    def leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        if not self.watched:
            self._on_idle(self)

    def catch_up(self, listener: Listener) -> None:
        """Gives what runs are saying at this moment."""
        said = [frame for speech in self._speeches.values() for frame in speech.frames]
        if said:
            hand(listener, said)

    def wait(self, run: Filter) -> asyncio.Future[Recorded | None]:
        """The event that ends the run, or by which it waits for a person, if it comes after `seq`; None if the channel
        closes before."""
        future: asyncio.Future[Recorded | None] = asyncio.get_running_loop().create_future()
        if self.closed:
            future.set_result(None)
        else:
            self._waiters[future] = run
            future.add_done_callback(self._no_longer_waited)
        return future

    def _no_longer_waited(self, future: asyncio.Future[Recorded | None]) -> None:
        self._waiters.pop(future, None)
        if not self.watched:
            self._on_idle(self)

    # --- what comes -----------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        try:
            async for item in self._feed:
                if isinstance(item, Recorded):
                    self._take(item)
        except (LogError, BrokerFault) as error:
            log.error("cannot follow the session", account=self.key.account, session=self.key.session, error=error)
        finally:
            self._end("bye")

    def _take(self, recorded: Recorded) -> None:
        frame = event_frame(recorded)
        self.seq = frame.seq
        self._on_event(self.key, recorded)
        self._recent.append(frame)
        self._recent_size += len(frame.data)
        while len(self._recent) > RECENT or self._recent_size > self._budget // 4:
            self._recent_size -= len(self._recent.popleft().data)
        self._settle_speech(frame)
        for future, run in tuple(self._waiters.items()):
            if run.settles(frame) and not future.done():
                future.set_result(recorded)
        self._put(frame)

    def _settle_speech(self, frame: Frame) -> None:
        """What a run has said of a step is in the event that ends the step, or the node."""
        match frame.type:
            case "run.ended":
                self._speeches.pop(frame.run, None)
                self._over.append(frame.run)
            case "model.replied" | "node.finished":
                if speech := self._speeches.get(frame.run):
                    speech.forget(frame.path, frame.step or None)
            case _:
                pass

    def _put(self, frame: Frame) -> None:
        if not self._listeners:
            return
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(frame)

    def _flush(self) -> None:
        frames = self._pending
        if not frames:
            return
        self._pending = []
        first = next((frame.seq for frame in frames if frame.seq), 0)
        deleted = any(frame.type in DELETED for frame in frames)
        joined: dict[Filter, tuple[bytes, int]] = {}
        for listener in tuple(self._listeners):
            if listener.filter.run or (first and listener.ahead >= first):
                hand(listener, frames)
            else:
                if listener.filter not in joined:
                    joined[listener.filter] = join_frames([f for f in frames if listener.filter.wants(f)])
                data, seq = joined[listener.filter]
                if data:
                    listener.give(data, seq)
                if deleted:
                    listener.over()
            if listener.ending:
                self._listeners.discard(listener)

    # --- deltas ---------------------------------------------------------------------------------------------------

    async def hear(self, live: LiveSource, running: Callable[[], Awaitable[Sequence[int]]]) -> None:
        """Listens to deltas too, from what the runs that are running (`running`: their numbers) have said so far."""
        if self._hearing is None:
            self._hearing = asyncio.create_task(self._hear(live, running), name=f"deltas {self.key}")
        await asyncio.shield(self._hearing)

    async def _hear(self, live: LiveSource, running: Callable[[], Awaitable[Sequence[int]]]) -> None:
        self._held = []
        try:
            self._listening = await live.listen(self.key, self._on_delta)
            for run in await running():
                for delta in await live.read(self.key, run):
                    self._take_delta(delta)
        except (LogError, BrokerFault) as error:  # without what was said before: its text comes with the step's event
            log.warning("cannot read deltas", account=self.key.account, session=self.key.session, error=error)
        held, self._held = self._held, None
        for delta in held:
            self._take_delta(delta)

    def _on_delta(self, delta: Delta) -> None:
        if self._held is None:
            self._take_delta(delta)
        else:
            self._held.append(delta)

    def _take_delta(self, delta: Delta) -> None:
        speech = self._speeches.get(delta.run)
        if speech is None or speech.attempt < delta.attempt:
            if delta.run in self._over:
                return
            speech = self._speeches[delta.run] = Speech(delta.attempt)
        if delta.attempt < speech.attempt or delta.index <= speech.index:
            return
        speech.index = delta.index
        frame = delta_frame(self.key, delta)
        speech.add(frame, self._budget // 4)
        self._put(frame)

    # --- the end --------------------------------------------------------------------------------------------------

    def _end(self, ending: Ending) -> None:
        self.closed = True
        self._flush()
        for listener in self._listeners:
            listener.end(ending)
        self._listeners.clear()
        for future in tuple(self._waiters):
            if not future.done():
                future.set_result(None)

    async def close(self) -> None:
        self._end("bye")
        tasks = [task for task in (self._following, self._hearing) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._feed.close()
        if self._listening:
            await self._listening.unsubscribe()


def hand(listener: Listener, frames: Sequence[Frame]) -> None:
    """Gives one listener what it wants of these, up to the end of its run."""
    wanted: list[Frame] = []
    for frame in frames:
        if frame.seq and frame.seq <= listener.ahead:
            continue
        if listener.filter.wants(frame):
            wanted.append(frame)
        if listener.filter.ends(frame):
            data, seq = join_frames(wanted)
            if data:
                listener.give(data, seq)
            listener.over()
            return
    data, seq = join_frames(wanted)
    if data:
        listener.give(data, seq)


def join_frames(frames: Sequence[Frame]) -> tuple[bytes, int]:
    if len(frames) == 1:
        return frames[0].data, frames[0].seq
    return b"".join([frame.data for frame in frames]), max((frame.seq for frame in frames), default=0)
