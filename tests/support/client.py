"""A client of the log itself: posts messages and reads events, without an API in between."""

import itertools
import os
from collections.abc import Sequence

import msgspec
import pytest
from tests.support.waiting import eventually

from turnstream import agents
from turnstream.broker.connection import Broker
from turnstream.ids import SessionKey, derive
from turnstream.log.handle import Handled, Sessions
from turnstream.log.jetstream import JetStreamLog
from turnstream.session.commands import CancelRun, Origin, PostMessage
from turnstream.session.events import (
    Event,
    Fact,
    Opens,
    Part,
    PolicyData,
    RunEnded,
    RunStarted,
    Spec,
    Unknown,
)

_serial = itertools.count(1)


class Client:
    """Talks to sessions of one account."""

    def __init__(self, broker: Broker, *, account: str = "acme") -> None:
        self.account = account
        self.broker = broker
        self.sessions = Sessions(JetStreamLog(broker), now=broker.clock.now)
        self.specs: dict[str, Spec] = {}
        """What messages may name."""
        self.know(agents.load())

    def know(self, known: agents.Agents) -> None:
        untitled = PolicyData(titles="client")  # no call of the model for that
        for agent in known:
            spec = msgspec.convert(agent.pinned(), Spec)
            self.specs[agent.name] = msgspec.structs.replace(spec, policy=untitled)

    def key(self, session: str) -> SessionKey:
        return SessionKey(self.account, session)

    async def post(self, text: str, session: str = "s1", *, agent: str = "default") -> Handled:
        """Says something; queued if the session is busy."""
        n = next(_serial)
        command = PostMessage(
            origin=self._origin(n),
            message_id=f"m{n}",
            author="user:ann",
            content=(Part(text=text),),
            specs=self.specs,
            agent=agent,
            policy=PolicyData(on_busy="queue"),
            opens=Opens(),
        )
        return await self.sessions.handle(self.key(session), command)

    async def cancel(self, run: int, session: str = "s1") -> Handled:
        command = CancelRun(origin=self._origin(next(_serial)), run=run)
        return await self.sessions.handle(self.key(session), command)

    async def events(self, session: str = "s1") -> list[Event]:
        pages = self.sessions.log.read(self.key(session))
        return [recorded.event async for page in pages for recorded in page]

    async def facts(self, session: str = "s1") -> list[Fact | Unknown]:
        return [event.data for event in await self.events(session)]

    async def types(self, session: str = "s1") -> list[str]:
        return [event.type for event in await self.events(session)]

    async def starts(self, session: str = "s1") -> list[RunStarted]:
        return [fact for fact in await self.facts(session) if isinstance(fact, RunStarted)]

    async def ends(self, session: str = "s1") -> dict[int, RunEnded]:
        """The terminal event of each run that has ended. Fails if a run has two."""
        ends = [fact for fact in await self.facts(session) if isinstance(fact, RunEnded)]
        assert len({end.run for end in ends}) == len(ends), ends
        return {end.run: end for end in ends}

    async def until(self, kind: str, session: str = "s1", *, count: int = 1, timeout: float = 30.0) -> None:
        """Waits until the session has so many events of a type."""

        async def there() -> bool:
            return (await self.types(session)).count(kind) >= count

        await eventually(there, timeout, what=f"{count} {kind} in {session}")

    async def end(self, session: str = "s1", *, run: int = 1, timeout: float = 30.0) -> RunEnded:
        """The end of a run, once it has come."""

        async def there() -> RunEnded | None:
            return (await self.ends(session)).get(run)

        ended = await eventually(there, timeout, what=f"the end of {session}.{run}")
        assert ended is not None
        return ended

    async def all_ended(self, sessions: Sequence[str], *, runs: int = 1, timeout: float = 60.0) -> None:
        """Waits until each of these sessions has this many ended runs."""
        left = list(sessions)

        async def none_left() -> bool:
            while left and len(await self.ends(left[-1])) >= runs:
                left.pop()
            return not left

        await eventually(none_left, timeout, every=0.05, what=f"the end of every run in {len(sessions)} sessions")

    def _origin(self, n: int) -> Origin:
        return Origin(id=derive("client", os.getpid(), n), actor="user:ann", time=self.broker.clock.now())


@pytest.fixture
async def client(broker: Broker) -> Client:
    return Client(broker)
