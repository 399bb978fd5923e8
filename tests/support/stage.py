"""Runners on a real server, in this process: each as in a process of its own, with a model and tools that a test holds
in its hand. `stage` is the fixture: a client of the log, and what starts runners.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from tests.support.client import Client
from tests.support.driving import Script, ScriptedModels, echo
from tests.support.nats import connect
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.agents import Agent, Agents, Tool
from turnstream.broker.connection import Broker
from turnstream.broker.declare import declare
from turnstream.broker.pull import Pull
from turnstream.broker.server import NatsServer
from turnstream.ids import derive
from turnstream.log.handle import Handled, Sessions
from turnstream.log.jetstream import JetStreamLog
from turnstream.log.known import Known
from turnstream.roster import Roster
from turnstream.session.commands import AnswerRequest, Command, Origin, PostMessage, RetrySession, WithdrawMessage
from turnstream.session.events import Opens, Part, PolicyData, RunWaiting, Spec
from turnstream.session.policy import merged, parse_policy
from turnstream.settings import Settings
from turnstream.wire.attachments import Attachments
from turnstream.wire.blobs import Blobs
from turnstream.wire.checkpoints import Checkpoints
from turnstream.wire.live import Live
from turnstream.wire.timers import Timers
from turnstream.wire.work import Work
from turnstream_runner.copying import Copier
from turnstream_runner.dispatch import SLOTS, Dispatch
from turnstream_runner.equipment import Equipment
from turnstream_runner.erase import Eraser
from turnstream_runner.leases import Leases
from turnstream_runner.mcp.servers import Servers
from turnstream_runner.models.registry import Models
from turnstream_runner.roles import Roles
from turnstream_runner.room import Room
from turnstream_runner.runner import Runner
from turnstream_runner.tools.registry import Tools

LEASE = 1.0
_serial = itertools.count(1)


class Actor:
    """One runner: alone on its connection."""

    def __init__(self, broker: Broker, equipment: Equipment, models: ScriptedModels, slots: int) -> None:
        self.models = models
        self.runner = Runner(
            equipment,
            Leases(LEASE, time.monotonic, lambda: broker.nc.is_connected),
            nonce=lambda: f"nonce-{next(_serial)}",
        )
        self._broker = broker
        self._pull = Pull(broker, subjects.runner_consumer("default", LEASE), slots=slots)
        self._tasks = [
            asyncio.create_task(self.runner.run("default", self._pull)),
            asyncio.create_task(self.runner.leases.keep()),
        ]
        self._is_gone = False

    async def leave(self) -> None:
        """What a runner does that is told to stop."""
        if not self._is_gone:
            self.runner.stop_taking()
            await self._pull.close()
            await self.runner.drain(1.0)
            await self._go()

    async def die(self) -> None:
        """What `kill -9` does: nothing more comes of it, and nobody is told."""
        for task in (*self._tasks, *self.runner._drives.values()):
            task.cancel()
        await self._go()

    async def _go(self) -> None:
        self._is_gone = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._broker.close()


class Stage(Client):
    """Messages of `user:ann`, unless said otherwise, to sessions whose policy the test says."""

    def __init__(self, broker: Broker, url: str) -> None:
        super().__init__(broker)
        self.work = Work(broker)
        self.timers = Timers(broker)
        self.checkpoints = Checkpoints(broker)
        self._url = url
        self._actors: list[Actor] = []
        self._carrier = Dispatch(Pull(broker, subjects.DISPATCH, slots=SLOTS), self.work, self.timers, hold=0.0)
        self._carrying = asyncio.create_task(self._carrier.run())

    async def actor(
        self,
        script: Script = echo,
        *,
        tools: Sequence[Tool[..., Any]] = (),
        models: Models | None = None,
        slots: int = 64,
        servers: Servers | None = None,
        **agent: Any,
    ) -> Actor:
        """A runner that knows one agent, `default`, with these tools and fields."""
        if "limits" in agent or "control" in agent or "params" in agent:
            said = {"name": "default", "model": "scripted", "tools": [tool.name for tool in tools], **agent}
            chosen = Agent.model_validate(said)
        else:
            chosen = Agent(name="default", model=agent.pop("model", "scripted"), tools=list(tools), **agent)
        known = Agents({chosen.name: chosen}, {tool.name: tool for tool in tools})
        spec = msgspec.convert(chosen.pinned(), Spec)
        untitled = PolicyData(titles="client")  # no call of the model for that
        self.specs["default"] = msgspec.structs.replace(spec, policy=merged(untitled, parse_policy(chosen.policy)))
        broker = await connect(self._url)
        scripted: Any = models or ScriptedModels(script)
        journal = JetStreamLog(broker)
        sessions = Sessions(journal, now=broker.clock.now, known=Known(keep_bytes=1 << 20))
        blobs = Blobs(broker)
        roster = Roster(known, self.specs, Settings())
        equipment = Equipment(
            runner=f"r{next(_serial)}",
            sessions=sessions,
            roles=Roles(roster, Tools(known.tools)),
            roster=roster,
            servers=servers or Servers(),
            models=scripted,
            work=Work(broker),
            live=Live(broker),
            blobs=blobs,
            checkpoints=Checkpoints(broker),
            eraser=Eraser(broker, journal),
            copier=Copier(sessions, blobs, Attachments(broker, blobs)),
            room=Room(512 * 1024),
            now=broker.clock.now,
        )
        self._actors.append(Actor(broker, equipment, scripted, slots))
        return self._actors[-1]

    # --- what people do ---------------------------------------------------------------------------------------------

    async def say(
        self,
        text: str = "hello",
        session: str = "s1",
        *,
        name: str = "",
        author: str = "user:ann",
        on_busy: Any = None,
        **policy: Any,
    ) -> Handled:
        """Says something; `policy` is the session's, where this opens it."""
        n = next(_serial)
        command = PostMessage(
            origin=self.origin(),
            message_id=name or f"m{n}",
            author=author,
            content=(Part(text=text),),
            specs=self.specs,
            policy=PolicyData(on_busy=on_busy),
            opens=Opens(policy=parse_policy(policy)),
        )
        return await self.do(command, session)

    async def answer(self, answer: object = None, *, run: int = 1, k: int | None = None, **fields: Any) -> Handled:
        return await self.do(AnswerRequest(origin=self.origin(), run=run, request=k, answer=answer, **fields))

    async def approve(self, approved: bool = True, **fields: Any) -> Handled:
        return await self.answer(approved=approved, **fields)

    async def withdraw(self, message: str) -> Handled:
        return await self.do(WithdrawMessage(origin=self.origin(), message_id=message))

    async def retry(self) -> Handled:
        return await self.do(RetrySession(origin=self.origin(), specs=self.specs))

    async def do(self, command: Command, session: str = "s1") -> Handled:
        return await self.sessions.handle(self.key(session), command)

    def origin(self) -> Origin:
        return Origin(id=derive("stage", next(_serial)), actor="user:ann", time=self.now)

    # --- what there is ----------------------------------------------------------------------------------------------

    @property
    def now(self) -> int:
        """Broker time in milliseconds."""
        return self.broker.clock.now()

    async def until_time(self, at: int) -> None:
        """Waits for a broker time in milliseconds."""
        await eventually(lambda: self.now >= at, what=f"the time {at}")

    async def found(self, kind: type[Any], session: str = "s1") -> list[Any]:
        """The facts of this kind, oldest first."""
        return [fact for fact in await self.facts(session) if isinstance(fact, kind)]

    async def waiting(self, session: str = "s1", *, count: int = 1) -> RunWaiting:
        """What the run asks, once it waits for the `count`th time."""
        await self.until("run.waiting", session, count=count)
        return (await self.found(RunWaiting, session))[count - 1]

    async def heard(self, actor: Actor, session: str = "s1") -> None:
        """Waits until the runner's drive of the session knows everything that the log has."""

        async def knows() -> bool:
            last = (await self.sessions.load(self.key(session))).seq
            return any(drive._session.seq >= last for drive in actor.runner._drives if drive.key.session == session)

        await eventually(knows, what="the drive knows what the log has")

    async def idle(self) -> None:
        """Waits until no wake-up is there, neither waiting nor with a runner."""
        consumer = f"CONSUMER.INFO.{subjects.WORK}.runner-default"

        async def none() -> bool:
            info: Mapping[str, Any] = await self.broker.api(consumer)
            return info["num_pending"] == 0 and info["num_ack_pending"] == 0

        await eventually(none, what="no wake-up")

    async def close(self) -> None:
        for actor in self._actors:
            await actor.leave()
        await self._carrier.close()
        await self._carrying
        await self.broker.close()


@pytest.fixture
async def stage(own_nats: NatsServer) -> AsyncIterator[Stage]:
    broker = await connect(own_nats.url)
    await declare(broker, replicas=1, consumers=(subjects.DISPATCH, subjects.runner_consumer("default", LEASE)))
    set_up = Stage(broker, own_nats.url)
    yield set_up
    await set_up.close()
