"""Drives without a broker: the log in memory, models that a test holds in its hand, fakes of what lies beside the log.

`World` is one log that any number of runners work on. Each drive has folds of its own, as in a process of its own.
"""

import asyncio
import hashlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
from tests.support.snapshots import Store
from tests.support.strict import Strict

from turnstream.agents import Agent, Agents, Tool
from turnstream.ids import SessionKey, derive
from turnstream.log.base import PAGE, Unavailable
from turnstream.log.handle import Handled, Sessions
from turnstream.log.known import Known
from turnstream.log.memory import MemoryLog
from turnstream.log.snapshots import Snapshotter
from turnstream.roster import Roster
from turnstream.session.commands import CancelRun, Command, Origin, PostMessage, WithdrawMessage
from turnstream.session.decision import Decision
from turnstream.session.events import (
    Attachment,
    Blob,
    Event,
    Fact,
    Opens,
    Part,
    PolicyData,
    Recorded,
    Spec,
    ToolCall,
    Unknown,
    Wake,
)
from turnstream.session.plan import Drive as Identity
from turnstream.session.state import Session
from turnstream.settings import Settings
from turnstream.wire.blobs import BlobLost
from turnstream.wire.checkpoints import Entry
from turnstream.wire.live import Kind
from turnstream_runner.copying import Copier
from turnstream_runner.drive import Drive, Outcome
from turnstream_runner.equipment import Equipment
from turnstream_runner.models.port import Item, ModelError, ModelRequest, Reply, TextDelta, UnknownModel
from turnstream_runner.roles import Roles
from turnstream_runner.room import Room
from turnstream_runner.tools.registry import Tools

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
Script = Callable[[ModelRequest], AsyncGenerator[Item, None]]
SETTINGS = Settings()


class CountingLog(MemoryLog):
    """Counts what is asked of it, and can be away."""

    def __init__(self, now: Callable[[], int]) -> None:
        super().__init__(now)
        self.appends = 0
        self.reads = 0
        self.shown: list[int] = []
        """The sequences of the events that were given to readers."""
        self.lose_answers = 0
        """So many appends are stored and answered with `Unavailable`."""
        self.away = False
        self.away_for: set[str] = set()
        """Sessions that cannot be read or written."""

    async def append(self, key: SessionKey, decision: Decision, expected: int) -> int:
        self.appends += 1
        if self.away or key.session in self.away_for:
            raise Unavailable("away")
        seq = await super().append(key, decision, expected)
        if self.lose_answers:
            self.lose_answers -= 1
            raise Unavailable("the answer was lost")
        return seq

    async def read(
        self, key: SessionKey, after: int = 0, *, at_least: int = 0, page: int = PAGE
    ) -> AsyncIterator[list[Recorded]]:
        self.reads += 1
        if self.away or key.session in self.away_for:
            raise Unavailable("away")
        async for some in super().read(key, after, at_least=at_least, page=page):
            self.shown += [recorded.seq for recorded in some]
            yield some

    async def at(self, key: SessionKey, seq: int) -> Recorded | None:
        self.shown.append(seq)
        return await super().at(key, seq)


class FakeWork:
    """`WORK`, as far as drives ask: which wake-ups are there."""

    def __init__(self) -> None:
        self.there: set[int] = set()
        self.asked: list[int] = []

    async def exists(self, work: int, key: SessionKey) -> bool:
        self.asked.append(work)
        return work in self.there


class FakeSpeech:
    def __init__(self, said: list[tuple[int, int, Kind, str]], attempt: int) -> None:
        self._said = said
        self._attempt = attempt

    async def say(self, step: int, kind: Kind, text: str, path: str = "") -> None:
        self._said.append((self._attempt, step, kind, text))

    mark = say

    async def flush(self) -> None: ...

    async def finish(self, step: int, path: str = "") -> None: ...

    def silence(self) -> None: ...


class FakeLive:
    """What was said: attempt, step, kind, text."""

    def __init__(self) -> None:
        self.said: list[tuple[int, int, Kind, str]] = []

    def speak(self, key: SessionKey, run: int, attempt: int) -> FakeSpeech:
        return FakeSpeech(self.said, attempt)


class FakeBlobs:
    def __init__(self) -> None:
        self.there: dict[str, bytes] = {}
        self.gets: list[str] = []

    async def get(self, blob: Blob) -> bytes:
        self.gets.append(blob.name)
        if blob.name not in self.there:
            raise BlobLost(blob.name, "not there")
        return self.there[blob.name]

    async def put(self, key: SessionKey, name: str, data: bytes) -> Blob:
        self.there[f"{key}/{name}"] = data
        return Blob(name=f"{key}/{name}", size=len(data), sha256=hashlib.sha256(data).hexdigest())

    async def remove(self, key: SessionKey, name: str) -> None:
        self.there.pop(f"{key}/{name}", None)


class FakeAttachments:
    """What is kept of a session, by its name."""

    def __init__(self) -> None:
        self.there: dict[tuple[SessionKey, str], Attachment] = {}

    async def keep(self, key: SessionKey, attachment: Attachment) -> None:
        self.there[key, attachment.name] = attachment

    async def remove(self, key: SessionKey, attachment: Attachment) -> None:
        self.there.pop((key, attachment.name), None)


class FakeCheckpoints:
    """Items of runs: session, run, name. `away`: what cannot be reached."""

    def __init__(self) -> None:
        self.there: dict[tuple[SessionKey, int, str], bytes] = {}
        self.away = False
        self.gets = 0

    async def put(self, key: SessionKey, run: int, name: str, item: bytes) -> Entry:
        if self.away:
            return Entry(name, item)
        self.there[key, run, name] = item
        return Entry(name, item, len(self.there))

    async def get(self, key: SessionKey, run: int) -> list[Entry]:
        self.gets += 1
        there = () if self.away else tuple(self.there.items())
        return [Entry(name, item, 1) for (where, n, name), item in there if (where, n) == (key, run)]

    async def drop(self, key: SessionKey, run: int, *, before: int | None = None) -> None:
        if not self.away and before is None:
            self.there = {where: item for where, item in self.there.items() if where[:2] != (key, run)}


class FakeEraser:
    """Removes what the log has of a session; `held` keeps it from that."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self.held: asyncio.Event | None = None
        self.full = False
        self.begun = 0
        self.erased: list[tuple[SessionKey, int]] = []

    async def erase(self, session: Session, work: int) -> None:
        self.begun += 1
        if self.held:
            await self.held.wait()
        await self._log.overwrite(session.key)
        self.erased.append((session.key, work))


class ScriptedModels:
    """One model for every name: `script` answers each request. Keeps the requests, and takes none that a provider would
    refuse (`strict.py`)."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._strict = Strict()
        self.requests: list[ModelRequest] = []
        self.images = True
        self.closed = 0
        self.takes = 128_000
        """Tokens."""

    def resolve(self, name: str, *, with_prices: bool = False) -> "ScriptedModels":
        if name == "unknown":
            raise UnknownModel("unknown model 'unknown'")
        return self

    def shows_images(self, name: str) -> bool:
        return self.images

    def context(self, name: str) -> int:
        if name == "unknown":
            raise UnknownModel("unknown model 'unknown'")
        return self.takes

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Item, None]:
        self.requests.append(request)
        self._strict.begins(request)
        try:
            async for item in self.script(request):
                if isinstance(item, Reply):
                    self._strict.gives(request, item)
                yield item
        finally:
            self._strict.ends(request)
            self.closed += 1


async def echo(request: ModelRequest) -> AsyncGenerator[Item, None]:
    """Says what was said last."""
    text = request.messages[-1].text
    yield TextDelta(text)
    yield Reply(text=text, model="scripted")


def says(*items: Item) -> Script:
    """The same items, whatever is asked."""

    async def script(request: ModelRequest) -> AsyncGenerator[Item, None]:
        for item in items:
            yield item

    return script


def fails(message: str, *, retryable: bool = False) -> Script:
    async def script(request: ModelRequest) -> AsyncGenerator[Item, None]:
        raise ModelError(message, retryable=retryable)
        yield

    return script


def asks_once(*calls: ToolCall, then: str = "done") -> Script:
    """Asks for these tools, and answers once it sees results."""

    async def script(request: ModelRequest) -> AsyncGenerator[Item, None]:
        if getattr(request.messages[-1], "call_id", None):
            yield Reply(text=then)
        else:
            yield Reply(tool_calls=calls, finish="tool_calls")

    return script


class Latch:
    """A model that says something, waits until `let_go`, and answers."""

    def __init__(self, *said: str, answer: str = "answer") -> None:
        self.reached = asyncio.Event()
        self.held = asyncio.Event()
        self._said = said
        self._answer = answer

    def let_go(self) -> None:
        self.held.set()

    async def __call__(self, request: ModelRequest) -> AsyncGenerator[Item, None]:
        for text in self._said:
            yield TextDelta(text)
        self.reached.set()
        await self.held.wait()
        yield Reply(text=self._answer)


class Jealous:
    """A model that gives an opaque item with every reply, and will have it back in that place, in that run, and nowhere
    else: `faults` says what it was sent that it should not have been. Asks for the tool `look` `steps` times, then
    answers. `size`: bytes of an item."""

    def __init__(self, steps: int = 2, *, size: int = 0) -> None:
        self.steps = steps
        self.faults: list[str] = []
        self.sent_back: dict[str, list[bool]] = {}
        """By step: which of the earlier items were there."""
        self._size = size

    def given(self, run: str, step: int) -> bytes:
        return f"{run} {step} secret ".encode().ljust(self._size, b"x")

    async def __call__(self, request: ModelRequest) -> AsyncGenerator[Item, None]:
        run, _, step = request.idempotency_key.rpartition(":")
        if len(request.opaque) != int(step) - 1:
            self.faults.append(f"{request.idempotency_key}: {len(request.opaque)} items")
        for place, item in enumerate(request.opaque, 1):
            if item and item != self.given(run, place):
                self.faults.append(f"{request.idempotency_key}: {item[:80]!r} in place {place}")
        self.sent_back[request.idempotency_key] = [bool(item) for item in request.opaque]
        item = self.given(run, int(step))
        if int(step) <= self.steps:
            asked = ToolCall(id=f"look-{step}", name="look", arguments=f'{{"at": "{step}"}}')
            yield Reply(text=f"step {step}", tool_calls=(asked,), opaque=item)
        else:
            yield Reply(text="done", opaque=item)


class Running:
    """A drive under way. `outcome` waits for its end."""

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self.confirmed = 0
        self.task = asyncio.create_task(drive.run())

    async def outcome(self, timeout: float = 10.0) -> Outcome:
        return await asyncio.wait_for(asyncio.shield(self.task), timeout)

    async def die(self) -> None:
        """What `kill -9` does: nothing more comes of it."""
        self.task.cancel()
        await asyncio.wait((self.task,))


class World:
    """A log, and what a runner needs beside it. `runner` names it; several worlds may share one log."""

    def __init__(
        self,
        script: Script = echo,
        *,
        tools: Sequence[Tool[..., Any]] = (),
        agent: Agent | None = None,
        event_max: int = 512 * 1024,
        account: str = "acme",
        shares: "World | None" = None,
    ) -> None:
        self.account = account
        self.log = shares.log if shares else CountingLog(self.now)
        self.work = shares.work if shares else FakeWork()
        self.live = FakeLive()
        self.blobs = shares.blobs if shares else FakeBlobs()
        self.attachments = shares.attachments if shares else FakeAttachments()
        self.checkpoints = shares.checkpoints if shares else FakeCheckpoints()
        self.eraser = shares.eraser if shares else FakeEraser(self.log)
        self.models = ScriptedModels(script)
        self.here: set[int] = set()
        self.may_step_aside = True
        chosen = agent or Agent(name="default", model="scripted", instructions="be kind", tools=list(tools))
        self.agents = Agents({chosen.name: chosen}, {tool.name: tool for tool in tools})
        untitled = PolicyData(titles="client")  # no call of the model for that
        self.spec = msgspec.structs.replace(msgspec.convert(chosen.pinned(), Spec), policy=untitled)
        self.sessions = Sessions(self.log, now=self.now)
        """The client's."""
        self._event_max = event_max
        self._serial = shares._serial if shares else itertools.count(1)
        self._messages = shares._messages if shares else itertools.count(1)

    @staticmethod
    def now() -> int:
        return time.monotonic_ns() // 1_000_000

    def key(self, session: str = "s1") -> SessionKey:
        return SessionKey(self.account, session)

    # --- what a client does -----------------------------------------------------------------------------------------

    async def post(
        self,
        text: str = "hello",
        session: str = "s1",
        *,
        on_busy: str = "queue",
        spec: Spec | None = None,
        attachments: Sequence[Attachment] = (),
        context: str = "",
    ) -> Handled:
        n = next(self._messages)
        policy = msgspec.convert({"on_busy": on_busy}, PolicyData)
        command = PostMessage(
            origin=self.origin(correlation=f"root-{n}"),
            message_id=f"m{n}",
            author="user:ann",
            content=(Part(text=text),),
            attachments=tuple(attachments),
            context=context,
            specs={"default": spec or self.spec},
            policy=policy,
            opens=Opens(),
        )
        return await self.do(command, session)

    async def cancel(self, run: int = 1, session: str = "s1") -> Handled:
        return await self.do(CancelRun(origin=self.origin(), run=run, reason="enough"), session)

    async def withdraw(self, message: str, session: str = "s1") -> Handled:
        return await self.do(WithdrawMessage(origin=self.origin(), message_id=message), session)

    async def do(self, command: Command, session: str = "s1") -> Handled:
        return await self.sessions.handle(self.key(session), command)

    def origin(self, **more: str) -> Origin:
        name = derive("test", next(self._serial))
        return Origin(id=name, actor="user:ann", time=self.now(), traceparent=TRACEPARENT, **more)

    # --- what a runner does -----------------------------------------------------------------------------------------

    def drive(
        self,
        session: str = "s1",
        *,
        work: int = 1,
        cause: int = 1,
        delivery: int = 1,
        queue: str = "default",
        known: Known | None = None,
        snapshots: Store | None = None,
    ) -> Running:
        """Begins to drive by this wake-up; `known` is what its process knows of sessions, nothing unless given."""
        n = next(self._serial)
        identity = Identity(
            runner=f"r{n}", nonce=f"nonce-{n}", queue=queue, wake=Wake(work=work, cause=cause, delivery=delivery)
        )
        self.work.there.add(work)

        async def confirm() -> None:
            running.confirmed += 1

        sessions = Sessions(
            self.log,
            now=self.now,
            known=known or Known(keep_bytes=1 << 20),
            snapshots=Snapshotter(self.log, snapshots) if snapshots else None,
        )
        specs = {agent.name: msgspec.convert(agent.pinned(), Spec) for agent in self.agents}
        roster = Roster(self.agents, specs, SETTINGS)
        equipment: Any = Equipment(
            runner=f"r{n}",
            sessions=sessions,
            roles=Roles(roster, Tools(self.agents.tools)),
            roster=roster,
            models=self.models,  # pyright: ignore
            work=self.work,  # pyright: ignore
            live=self.live,  # pyright: ignore
            blobs=self.blobs,  # pyright: ignore
            checkpoints=self.checkpoints,  # pyright: ignore
            eraser=self.eraser,  # pyright: ignore
            copier=Copier(sessions, self.blobs, self.attachments),  # pyright: ignore
            room=Room(self._event_max),
            now=self.now,
        )
        drive = Drive(
            equipment,
            self.key(session),
            identity,
            is_here=self.here.__contains__,
            confirm=confirm,
            step_aside=lambda: self.may_step_aside,
        )
        running = Running(drive)
        return running

    # --- what the log says ------------------------------------------------------------------------------------------

    async def events(self, session: str = "s1") -> list[Event]:
        return [recorded.event async for page in self.log.read(self.key(session)) for recorded in page]

    async def facts(self, session: str = "s1") -> list[Fact | Unknown]:
        return [event.data for event in await self.events(session)]

    async def types(self, session: str = "s1") -> list[str]:
        return [event.type for event in await self.events(session)]

    async def until_stored(self, kind: str, session: str = "s1", *, count: int = 1, timeout: float = 5.0) -> None:
        async def stored() -> None:
            while (await self.types(session)).count(kind) < count:
                await asyncio.sleep(0.002)

        await asyncio.wait_for(stored(), timeout)


def call(name: str, arguments: str = "{}", id: str = "") -> ToolCall:
    return ToolCall(id=id or name, name=name, arguments=arguments)
