"""What a drive knows of its session, and how it writes to it: the fold, the events while they are at hand, whom a run
was requested by, and the feed once something takes long.

Nothing here decides what to do. A refusal is answered by reading: the caller plans again on what is true.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, Literal, TypeVar

from turnstream.broker.errors import BrokerFault
from turnstream.ids import SessionKey
from turnstream.log.base import LogError, Unavailable
from turnstream.log.feed import Feed
from turnstream.log.handle import Sessions
from turnstream.log.known import reach, seq_of
from turnstream.session.commands import Command, Origin, RecordFact, RunFact, TakeOver
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    Ask,
    Event,
    Fact,
    ModelReplied,
    NodeStarted,
    Recorded,
    RunRequested,
    RunWaiting,
    ToolCall,
    Unknown,
    Wake,
)
from turnstream.session.fold import evolve
from turnstream.session.state import Call, Run, Session, request_id
from turnstream.session.window import Needs
from turnstream.telemetry import get_logger

log = get_logger()

T = TypeVar("T")

REFUSALS: Final = 3
"""How often the same effect may be refused before its drive gives up: plan and decide do not agree."""
RETRY: Final = (0.1, 0.2, 0.5, 1.0)
"""Seconds between attempts to reach the broker; the last one repeats."""
TELL: Final = 30
"""Attempts between two warnings that it is not reached."""


Asking = ModelReplied | NodeStarted | RunRequested
"""What asks for calls: a model, a node that is one, or a person who does it by himself."""


class Undrivable(Exception):
    """What is planned for the session is refused, again and again."""


class Ledger:
    """`stir` is called when the feed brings something new; `actor` is who writes; `now` is the broker's time."""

    def __init__(
        self, sessions: Sessions, key: SessionKey, *, actor: str, now: Callable[[], int], stir: Callable[[], None]
    ) -> None:
        self.key = key
        self.session = Session(key=key)
        self._sessions = sessions
        self._actor = actor
        self._now = now
        self._stir = stir
        self._events: list[Recorded] | None = None
        """The newest events without a gap, up to the last one that is known; None: not at hand."""
        self._requests: dict[int, Event] = {}
        self._asking: dict[int, Asking] = {}
        """What asks for calls, by sequence."""
        self._refused: dict[str, int] = {}
        self._watch: asyncio.Task[None] | None = None

    async def open(self, wake: Wake) -> None:
        """Knows all that the wake-up is about. Where it was delivered before, what became of that is looked for in the
        log. Raises `LogError`."""
        known = self._sessions.recall(self.key, wake.cause) if wake.cause and wake.delivery == 1 else None
        self.session, self._events = known or await self._sessions.latest(self.key, wake.cause)

    async def look(self) -> None:
        """Reads what is new. Raises `LogError`."""
        self._take(await persist(lambda: self._sessions.load(self.key)))

    async def store(self, effect: str, command: Command) -> Recorded | Literal[True] | None:
        """Stores what the command asks for, however long the broker is away, and answers with the event, or True where
        the session said so already. None: it was refused, and the session is as it was just read. Raises `LogError`,
        `Undrivable`."""
        try:
            handled = await persist(lambda: self._sessions.handle(self.key, command))
        except Rejected as refusal:
            self._refused[effect] = refused = self._refused.get(effect, 0) + 1
            if refused == REFUSALS:
                raise Undrivable(f"{effect}: {refusal.message}") from refusal
            await self.look()
            return None
        recorded = handled.recorded
        if self._events is not None:
            if recorded and recorded.previous == self.session.seq:
                self._events.append(recorded)
            else:
                self._events = None
        if recorded and isinstance(recorded.event.data, ModelReplied | NodeStarted):
            self._asking[recorded.seq] = recorded.event.data
        self._take(handled.session)
        return recorded or True

    async def record(
        self, effect: str, event_id: str, fact: RunFact, takes_over: TakeOver | None = None
    ) -> Fact | Unknown | None:
        """Stores what an attempt did, and answers with what the log says of it: an answer may have become one more
        reply. None: it was refused, or its run has ended; the session is as it was just read. Raises as `store`."""
        run = self.session.run(fact.run)
        if run is None:
            return None
        origin = await self.origin(run, event_id)
        stored = await self.store(effect, RecordFact(origin=origin, fact=fact, takes_over=takes_over))
        if stored is True:  # by an append whose answer was lost
            events = await self.events(run.requested_seq)
            return next((recorded.event.data for recorded in reversed(events) if recorded.event.id == event_id), fact)
        return stored.event.data if stored else None

    async def events(self, since: int = 0) -> Sequence[Recorded]:
        """Every event of the session from the one with this sequence on (0: from the first), up to what is known of it
        at least."""
        events = self._events
        if events is None or not reach(events, since):
            session, events = await persist(lambda: self._sessions.events(self.key, self.session.seq, since))
            self._take(session)
            if session.seq == self.session.seq:  # else the feed was faster
                self._events = events
        return events[bisect_left(events, since, key=seq_of) :]

    async def first(self, count: int) -> Sequence[Recorded]:
        """So many events of the session at most, from its first on."""
        if self._events and reach(self._events, 0):
            return self._events[:count]
        return await persist(lambda: self._first(count))

    async def _first(self, count: int) -> Sequence[Recorded]:
        async for page in self._sessions.log.read(self.key, page=count):
            return page
        return ()

    async def at(self, seq: int) -> Recorded:
        """The event at this sequence."""
        events = self._events or []
        place = bisect_left(events, seq, key=seq_of)
        if place < len(events) and events[place].seq == seq:
            return events[place]
        found = await persist(lambda: self._sessions.log.at(self.key, seq))
        if found is None:
            raise LogError(f"{self.key}: event {seq} is not there any more")
        return found

    async def shown(self, needs: Needs) -> tuple[Session, Sequence[Recorded]]:
        """The session, and the events that a window of it is built of."""
        beside = [await self.at(seq) for seq in needs.beside]
        events = await self.events(needs.since)
        return self.session, [*beside, *events]

    def forget_events(self) -> None:
        """Something takes long: they need not be held so long."""
        self._events = None

    async def request(self, run: Run) -> Event:
        """The event that requested the run."""
        if run.n not in self._requests:
            self._requests[run.n] = (await self.at(run.requested_seq)).event
        return self._requests[run.n]

    async def call(self, call: Call) -> ToolCall:
        """A call as the model asked for it, as a node makes it, or the person who does it by himself."""
        data = self._asking.get(call.seq)
        if data is None:
            data = (await self.at(call.seq)).event.data
            assert isinstance(data, ModelReplied | NodeStarted | RunRequested)
            self._asking[call.seq] = data
        return next(asked for asked in calls_of(data) if asked.id == call.id)

    async def ask(self, run: int, call: Call) -> Ask:
        """What was asked for this call."""
        data = (await self.at(call.asked_seq)).event.data
        assert isinstance(data, RunWaiting)
        name = request_id(self.session, run, call.request)
        return next(ask for ask in data.requests if ask.request == name)

    async def origin(self, run: Run, event_id: str) -> Origin:
        """Whoever requested the run is the cause of all its facts."""
        request = await self.request(run)
        return Origin(
            id=event_id,
            actor=self._actor,
            time=self._now(),
            cause=request.id,
            correlation=request.correlation or request.id,
            traceparent=request.traceparent,
        )

    def own_origin(self, event_id: str) -> Origin:
        """Of what is done for the session and not for a run of it."""
        return Origin(id=event_id, actor=self._actor, time=self._now())

    def watch(self) -> None:
        """Follows the session's feed from now on."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._follow())
            self._watch.add_done_callback(lambda _: self._stir())

    def check_watch(self) -> None:
        """Raises what ended the feed."""
        if self._watch and self._watch.done():
            self._watch.result()

    async def close(self) -> None:
        if self._watch:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch

    async def _follow(self) -> None:
        while True:
            feed = Feed(self._sessions.log, self.key, after=self.session.seq)
            try:
                async for item in feed:
                    if isinstance(item, Recorded):
                        self._hear(item)
                await self.look()  # the session is deleted: nothing follows that anybody waits for
                return
            except Unavailable:
                await asyncio.sleep(RETRY[-1])
            finally:
                await feed.close()

    def _hear(self, recorded: Recorded) -> None:
        self._sessions.fold(self.key, recorded)
        if recorded.previous == self.session.seq:
            self._take(evolve(self.session, recorded))
            self._stir()

    def _take(self, session: Session) -> None:
        if session.seq > self.session.seq:
            self.session = session
            if self._events is not None and (not self._events or self._events[-1].seq != session.seq):
                self._events = None  # they do not show what the session knows


def calls_of(data: Asking) -> tuple[ToolCall, ...]:
    match data:
        case ModelReplied():
            return data.tool_calls
        case NodeStarted():
            return (data.call,) if data.call else ()
        case RunRequested():
            return (data.action,) if data.action else ()


async def persist(attempt: Callable[[], Awaitable[T]]) -> T:
    """Tries until the broker answers: what is asked has at most one effect."""
    tries = 0
    while True:
        try:
            return await attempt()
        except (Unavailable, BrokerFault) as error:
            if tries % TELL == TELL - 1:
                log.warning("the broker does not do what is asked of it; trying on", error=error)
            await asyncio.sleep(RETRY[min(tries, len(RETRY) - 1)])
            tries += 1
