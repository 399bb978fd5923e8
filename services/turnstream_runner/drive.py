"""The drive of one session by one wake-up: perform what is planned and not yet in flight, report each result as a
command, plan again; done when nothing is planned.

What there is to do is `plan`'s affair and what may be stored is `decide`'s. A cancel, a deadline, another runner that
took over are not handled here case by case: the plan changes, and what is in flight and no longer planned is called
off. A drive whose run is another's now stops and sends nothing. A drive that dies loses nothing but its time.

An instant turn costs one read and two appends. Only when something is in flight for longer than `PATIENCE` does the
drive follow the session's feed and set an alarm for the deadline.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from enum import Enum, auto
from typing import Any, Final

import msgspec

from turnstream.ids import SessionKey, derive, digest
from turnstream.log.handle import Sessions
from turnstream.session import history
from turnstream.session.commands import RecordFact, RunFact, StartRun
from turnstream.session.events import (
    Blob,
    Error,
    ModelReplied,
    Recorded,
    RunEnded,
    RunReleased,
    RunStarted,
    ToolReturned,
    ToolStarted,
)
from turnstream.session.plan import CallModel, CallTool, Effect, End, Settle, Start, blocked_by, close, next_due, plan
from turnstream.session.plan import Drive as Identity
from turnstream.session.state import Run, Session
from turnstream.telemetry import metrics
from turnstream.wire.blobs import Blobs
from turnstream.wire.live import Live, Speech
from turnstream.wire.work import Work
from turnstream_runner.ledger import Ledger, persist
from turnstream_runner.models.registry import Models
from turnstream_runner.perform import ModelCall, Partial, Role, Roles, ToolUse
from turnstream_runner.room import Put, Room

PATIENCE: Final = 0.025
"""Seconds that something may be in flight before the drive follows the feed."""
LATE: Final = 0.005
"""Seconds by which the loop is late when it is busy: what is in flight then has not had its chance to end."""
INDULGENCE: Final = 10
"""How often a busy loop prolongs the drive's patience."""
CALL_OFF: Final = 1.0
"""Seconds that what is called off gets to stop."""


class Outcome(Enum):
    """How a drive ends, and so what becomes of its wake-up."""

    DONE = auto()
    """Nothing is left to do, or somebody else is at it: acknowledge."""
    HELD = auto()
    """The run is held by another delivery of this very wake-up: put off by one lease."""
    FENCED = auto()
    """The run that this drive had started is another's now: send nothing."""
    HANDED_BACK = auto()
    """The runner shuts down and nothing was started: deliver again at once."""


class Equipment(msgspec.Struct, frozen=True, kw_only=True):
    """What every drive of a runner works with. `now` is the broker's time in milliseconds."""

    runner: str
    sessions: Sessions
    roles: Roles
    models: Models
    work: Work
    live: Live
    blobs: Blobs
    room: Room
    now: Callable[[], int]


class Drive:
    """`is_here` says whether this very runner works on a wake-up. `confirm` tells whoever keeps the lease that the log
    was looked at and the run is still this drive's."""

    def __init__(
        self,
        equipment: Equipment,
        key: SessionKey,
        identity: Identity,
        *,
        is_here: Callable[[int], bool],
        confirm: Callable[[], Awaitable[None]],
    ) -> None:
        self._equipment = equipment
        self._identity = identity
        self._is_here = is_here
        self._confirm = confirm
        self._stir = asyncio.Event()
        self._ledger = Ledger(
            equipment.sessions,
            key,
            actor=f"runner:{equipment.runner}",
            now=equipment.now,
            stir=self._stir.set,
        )
        self._mine: int | None = None
        """The run that this drive has started and neither ended nor released."""
        self._role: Role | None = None
        self._speech: Speech | None = None
        self._partial = Partial()
        self._in_flight: dict[str, asyncio.Task[RunFact | None]] = {}
        self._doubtful = False
        self._draining = False
        self._grace_over = False
        self._released = False
        self._patience: asyncio.TimerHandle | None = None
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def key(self) -> SessionKey:
        return self._ledger.key

    # --- what others tell it ----------------------------------------------------------------------------------------

    def doubt(self) -> None:
        """The lease was not renewed in time: look at the log before going on."""
        self._doubtful = True
        self._stir.set()

    def drain(self) -> None:
        """Shut down: begin nothing, give up model calls, wait for tools."""
        self._draining = True
        self._stir.set()

    def end_grace(self) -> None:
        """Shut down: wait for tools no longer."""
        self._grace_over = True
        self._stir.set()

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Raises `LogError`, `Undrivable`, and whatever breaks."""
        try:
            await self._ledger.read(self._identity.wake.cause)
            while True:
                self._stir.clear()
                await self._take_results()
                if self._doubtful:
                    await self._look()
                if self._mine is not None and not self._owns(self._mine):
                    self._fall_silent()
                    return Outcome.FENCED
                effects = plan(self._session, self._equipment.now(), self._identity)
                await self._call_off(effects)
                if await self._begin(effects):
                    continue
                if self._in_flight:
                    self._be_patient()
                    await self._stir.wait()
                elif (outcome := await self._finish(effects)) is not None:
                    return outcome
        finally:
            await self._close()

    @property
    def _session(self) -> Session:
        return self._ledger.session

    def _owns(self, n: int) -> bool:
        run = self._session.run(n)
        return run is not None and self._identity.owns(self._session, run)

    def _fall_silent(self) -> None:
        metrics.fenced.inc()
        if self._speech:
            self._speech.silence()

    async def _take_results(self) -> None:
        """Stores the facts that calls have come to. Raises what broke."""
        self._ledger.check_watch()
        for key, task in tuple(self._in_flight.items()):
            if task.done():
                del self._in_flight[key]
                if not task.cancelled() and (fact := task.result()) is not None:
                    await self._record(key, derive(key, fact.attempt), fact)

    async def _look(self) -> None:
        await self._ledger.look()
        if self._mine is not None and self._owns(self._mine):
            self._doubtful = False
            await self._confirm()

    async def _call_off(self, effects: Sequence[Effect]) -> None:
        """Cancels what is in flight and no longer planned, or not to go on while the runner shuts down."""
        planned = {effect.key: effect for effect in effects}
        off: list[str] = []
        for key in self._in_flight:
            effect = planned.get(key)
            if effect is None or (self._draining and (self._grace_over or isinstance(effect, CallModel))):
                off.append(key)
        if off:
            await self._cancel(off)

    async def _cancel(self, keys: Sequence[str]) -> None:
        """A call that does not stop in time is left to itself: what it comes to is not looked at."""
        tasks = [self._in_flight.pop(key) for key in keys]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=CALL_OFF)

    async def _begin(self, effects: Sequence[Effect]) -> bool:
        """Performs or launches what is planned and not in flight. True: something was stored, so plan again."""
        for effect in effects:
            if effect.key in self._in_flight:
                continue
            match effect:
                case Settle():
                    await self._settle(effect)
                    return True
                case End():
                    await self._end(effect)
                    return True
                case Start() if not self._draining:
                    await self._start(effect)
                    return True
                case CallModel() if not self._draining:
                    self._launch(effect.key, self._call_model(effect))
                case CallTool() if not self._draining:
                    self._launch(effect.key, self._call_tool(effect))
                case _:
                    pass
        return False

    def _launch(self, key: str, call: Coroutine[Any, Any, RunFact | None]) -> None:
        task = asyncio.create_task(call)
        task.add_done_callback(lambda _: self._stir.set())
        self._in_flight[key] = task

    async def _finish(self, effects: Sequence[Effect]) -> Outcome | None:
        """Nothing is in flight and nothing can be begun. None: plan again."""
        if self._released:
            return Outcome.DONE
        if self._draining and self._mine is not None:
            await self._release(self._mine)
            return None
        if self._draining and effects:
            return Outcome.HANDED_BACK
        held = blocked_by(self._session, self._identity)
        if held is None or held.work in self._identity.gone:
            return Outcome.DONE
        if held.work == self._identity.wake.work:
            return Outcome.HELD
        if self._is_here(held.work) or await persist(lambda: self._equipment.work.exists(held.work, self.key)):
            return Outcome.DONE
        self._identity = msgspec.structs.replace(self._identity, gone=self._identity.gone | {held.work})
        return None

    def _be_patient(self, left: int = INDULGENCE) -> None:
        if self._patience is None:
            loop = asyncio.get_running_loop()
            until = loop.time() + PATIENCE
            self._patience = loop.call_at(until, self._lose_patience, until, left)

    def _lose_patience(self, until: float, left: int) -> None:
        self._patience = None
        if left and asyncio.get_running_loop().time() > until + LATE:
            self._be_patient(left - 1)
        elif self._in_flight:
            self._settle_down()

    def _settle_down(self) -> None:
        """This takes longer: follow the feed, mind the deadline, hold nothing that can be read again."""
        self._ledger.forget_events()
        self._ledger.watch()
        if self._alarm is None and (due := next_due(self._session)) is not None:
            wait = max(due - self._equipment.now(), 0) / 1000
            self._alarm = asyncio.get_running_loop().call_later(wait, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._stir.set()

    async def _close(self) -> None:
        for handle in (self._patience, self._alarm):
            if handle:
                handle.cancel()
        if self._in_flight:
            await self._cancel(tuple(self._in_flight))
        await self._ledger.close()

    # --- effects ----------------------------------------------------------------------------------------------------

    async def _start(self, effect: Start) -> None:
        run = self._run(effect.run)
        spec = run.spec
        role = self._equipment.roles.get(spec)
        if role is None:
            message = f"agent {spec.agent}, version {spec.version}, is not known to this runner"
            error = Error(code="agent_not_found", message=message)
            await self._begin(close(self._session, run, "failed", error))
            return
        started = RunStarted(
            run=run.n,
            attempt=effect.attempt,
            runner=self._identity.runner,
            wake=self._identity.wake,
            trigger=effect.trigger,
            message_ids=effect.message_ids,
            model=spec.model,
        )
        origin = await self._ledger.origin(run, self._identity.start_id(self._session, run.n, effect.attempt))
        command = StartRun(origin=origin, started=started, gone=self._identity.gone)
        if not await self._ledger.store(effect.key, command):
            return
        self._mine, self._role = run.n, role
        self._speech = self._equipment.live.speak(self.key, run.n, effect.attempt)
        self._partial = Partial()
        if effect.trigger == "message":
            metrics.queue_seconds.observe(max(self._equipment.now() - run.requested_at, 0) / 1000)
        elif effect.trigger == "recovery":
            metrics.recoveries.inc()

    async def _call_model(self, effect: CallModel) -> RunFact:
        run = self._run(effect.run)
        assert self._role is not None and self._speech is not None  # only a run of ours is called for
        events = await self._ledger.events()
        call = ModelCall(
            key=self.key,
            run=run,
            effect=effect,
            role=self._role,
            messages=history.build(events, run.n),
            used=_call_ids(events, run.n) if run.steps else (),
            traceparent=(await self._ledger.request(run)).traceparent,
        )
        del events
        fact = await call.perform(self._equipment.models, self._speech, self._partial)
        if isinstance(fact, ModelReplied):
            return self._equipment.room.for_reply(fact)
        return await self._equipment.room.for_end(fact, self._put(f"{run.n}.{effect.attempt}.{effect.step}"))

    async def _call_tool(self, effect: CallTool) -> RunFact | None:
        """None: the runner shut down before the call's turn came."""
        assert self._role is not None and self._speech is not None  # only a run of ours is called for
        tools = self._role.tools
        call = await self._ledger.call(effect.reply_seq, effect.call.id)
        async with tools.turn(call.name, f"{self.key.account}/{self.key.run(effect.run)}"):
            if self._draining:
                return None
            if not tools.is_idempotent(call.name) and effect.call.started != effect.attempt:
                fact = ToolStarted(run=effect.run, attempt=effect.attempt, call_id=call.id)
                if not await self._record(effect.key, derive(effect.key, effect.attempt, "started"), fact):
                    return None
            about = msgspec.json.encode({"call_id": call.id, "name": call.name}).decode()
            await self._speech.mark(effect.step, "tool", about)
            fact = await ToolUse(key=self.key, effect=effect, arguments=call.arguments).perform(tools)
        name = f"{effect.run}.{effect.attempt}.{effect.step}.{digest(call.id.encode())}"
        return await self._equipment.room.for_result(fact, self._put(name))

    async def _settle(self, effect: Settle) -> None:
        fact = ToolReturned(
            run=effect.run, attempt=effect.attempt, call_id=effect.call.id, status=effect.status, error=effect.why
        )
        await self._record(effect.key, derive(effect.key, effect.attempt), fact)

    async def _end(self, effect: End) -> None:
        """What the model had said by then is kept."""
        partial = self._partial if effect.run == self._mine else Partial()
        fact = RunEnded(
            run=effect.run,
            attempt=effect.attempt,
            status=effect.status,
            content=partial.text,
            reasoning=partial.reasoning,
            error=effect.error,
            model=self._run(effect.run).spec.model,
        )
        fact = await self._equipment.room.for_end(fact, self._put(f"{effect.run}.{effect.attempt}.end"))
        await self._record(effect.key, derive(effect.key, effect.attempt), fact)

    async def _release(self, n: int) -> None:
        run = self._run(n)
        key = f"{self.key.account}/{self.key.run(n)}:release:{run.attempt}"
        await self._record(key, derive(key), RunReleased(run=n, attempt=run.attempt))

    def _put(self, name: str) -> Put:
        """Names the attempt: what a fenced one puts is in nobody's way."""

        async def put(data: bytes) -> Blob:
            return await persist(lambda: self._equipment.blobs.put(self.key, name, data))

        return put

    async def _record(self, effect: str, event_id: str, fact: RunFact) -> bool:
        """False: refused; the session is as it was just read."""
        run = self._session.run(fact.run)
        if run is None:
            return False
        command = RecordFact(origin=await self._ledger.origin(run, event_id), fact=fact)
        if not await self._ledger.store(effect, command):
            return False
        match fact:
            case ModelReplied():
                self._partial.clear()
            case RunReleased():
                self._mine = None
                self._released = True
            case RunEnded():
                self._mine = None
                self._count(run, fact)
            case _:
                pass
        return True

    def _count(self, run: Run, ended: RunEnded) -> None:
        metrics.turns.labels(outcome=ended.status).inc()
        if run.deadline is not None:
            began = run.deadline - run.limits.timeout
            metrics.turn_seconds.observe(max(self._equipment.now() - began, 0) / 1000)

    def _run(self, n: int) -> Run:
        run = self._session.run(n)
        assert run is not None  # planned, so there
        return run


def _call_ids(events: Sequence[Recorded], run: int) -> frozenset[str]:
    """The ids of all calls of a run so far."""
    replies = (recorded.event.data for recorded in events)
    return frozenset(
        call.id for data in replies if isinstance(data, ModelReplied) and data.run == run for call in data.tool_calls
    )
