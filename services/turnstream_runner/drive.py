"""The drive of one session by one wake-up: perform what is planned and not yet in flight, report each result as a
command, plan again; done when nothing is planned.

What there is to do is `plan`'s affair and what may be stored is `decide`'s. A cancel, a deadline, another runner that
took over are not handled here case by case: the plan changes, and what is in flight and no longer planned is called
off. A drive whose run is another's now stops and sends nothing. A drive that dies loses nothing but its time.

An instant turn costs two appends, and a read where the session is not known yet. Only when something is in flight for
longer than a moment (`patience`) does the drive follow the session's feed and set an alarm for the deadline.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from enum import Enum, auto
from typing import Any, Final, assert_never

import msgspec

from turnstream.ids import SessionKey, derive
from turnstream.session import history, window
from turnstream.session.commands import (
    CloseFork,
    CompactHistory,
    EraseSession,
    ExpireRequest,
    ReportRun,
    RunFact,
    StartRun,
    TitleSession,
)
from turnstream.session.events import (
    Blob,
    Error,
    ModelReplied,
    NodeFinished,
    RunEnded,
    RunReleased,
    RunStarted,
    RunSteered,
    RunWaiting,
    ToolReturned,
)
from turnstream.session.plan import (
    BetweenEffect,
    CallModel,
    CallTool,
    CancelChild,
    Close,
    Compact,
    Copy,
    Detach,
    DropChild,
    Effect,
    End,
    Entitle,
    Erase,
    Expire,
    Park,
    Return,
    RunNode,
    Settle,
    Start,
    StartChild,
    Steer,
    TellParent,
    aside,
    blocked_by,
    end,
    next_due,
    plan,
)
from turnstream.session.plan import Drive as Identity
from turnstream.session.policy import resolve
from turnstream.session.state import Run, Session
from turnstream.telemetry import metrics
from turnstream_runner import summaries, titles
from turnstream_runner.attempt import Attempt, put
from turnstream_runner.delegation import Delegation
from turnstream_runner.equipment import Equipment
from turnstream_runner.ledger import Ledger, persist
from turnstream_runner.patience import Patience
from turnstream_runner.perform import NOTES, NOTHING, Partial
from turnstream_runner.results import Came, result

NEAR: Final = 1000
"""Milliseconds until something falls due that are waited for at the end of a drive: its timer may have been early."""
UNCERTAIN: Final = "the runner stopped while this tool was running; it may or may not have taken effect"
AT_ONCE: Final = 32
"""Calls of one run that are under way side by side: the others wait."""
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
    BUSY = auto()
    """The runner removes as many deleted sessions, copies as many, or looks for as many titles and summaries, as it
    may: deliver again in a moment."""
    HANDED_BACK = auto()
    """The runner shuts down and nothing was started: deliver again at once."""


class Drive:
    """`is_here` says whether this very runner works on a wake-up. `confirm` tells whoever keeps the lease that the log
    was looked at and the run is still this drive's. `step_aside` makes room for turns, for one that looks for a title
    or a summary; False: too many do already."""

    def __init__(
        self,
        equipment: Equipment,
        key: SessionKey,
        identity: Identity,
        *,
        is_here: Callable[[int], bool],
        confirm: Callable[[], Awaitable[None]],
        step_aside: Callable[[], bool],
    ) -> None:
        self._equipment = equipment
        self._identity = identity
        self._is_here = is_here
        self._confirm = confirm
        self._step_aside = step_aside
        self.aside = False
        """It looks for a title or a summary and takes no turn's place; others do whatever else there is to do."""
        self._stir = asyncio.Event()
        self._ledger = Ledger(
            equipment.sessions,
            key,
            actor=f"runner:{equipment.runner}",
            now=equipment.now,
            stir=self._stir.set,
        )
        self._delegation = Delegation(equipment, self._ledger)
        self._done: set[str] = set()
        """What has been done to other sessions."""
        self._attempt: Attempt | None = None
        """Of the run that this drive has started, and that neither waits nor has ended or been released since."""
        self._in_flight: dict[str, asyncio.Task[RunFact | None]] = {}
        self._doubtful = False
        self._draining = False
        self._grace_over = False
        self._released = False
        self._patience = Patience(self._settle_down)
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
        if self._attempt:
            self._attempt.drain()
        self._stir.set()

    def end_grace(self) -> None:
        """Shut down: wait for tools no longer."""
        self._grace_over = True
        self._stir.set()

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Raises `LogError`, `Undrivable`, and whatever breaks."""
        try:
            await self._ledger.open(self._identity.wake)
            while True:
                self._stir.clear()
                await self._take_results()
                if self._doubtful:
                    await self._look()
                if self._attempt and not self._owns(self._attempt.n):
                    self._attempt.fall_silent()
                    if not self._session.deleted:
                        metrics.fenced.inc()
                        return Outcome.FENCED
                    self._attempt = None
                effects = self._plan()
                await self._call_off(effects)
                if await self._begin(effects):
                    continue
                if self._in_flight:
                    self._patience.begin()
                    await self._stir.wait()
                elif (outcome := await self._finish(effects)) is not None:
                    return outcome
        finally:
            await self._close()

    def _plan(self) -> Sequence[Effect]:
        if self.aside:
            return aside(self._session, self._identity)
        return plan(self._session, self._equipment.now(), self._identity)

    @property
    def _session(self) -> Session:
        return self._ledger.session

    def _owns(self, n: int) -> bool:
        run = self._session.run(n)
        return run is not None and self._identity.owns(self._session, run)

    async def _take_results(self) -> None:
        """Stores the facts that calls have come to. Raises what broke."""
        self._ledger.check_watch()
        for key, task in tuple(self._in_flight.items()):
            if task.done():
                del self._in_flight[key]
                if not task.cancelled() and (fact := task.result()) is not None:
                    await self._record(key, fact)

    async def _look(self) -> None:
        await self._ledger.look()
        if self._attempt and self._owns(self._attempt.n):
            self._doubtful = False
            await self._confirm()

    async def _call_off(self, effects: Sequence[Effect]) -> None:
        """Cancels what is in flight and no longer planned, or not to go on while the runner shuts down. A message that
        steers a run does not call its model off: the next call carries it."""
        planned = {effect.key: effect for effect in effects}
        steered = any(isinstance(effect, Steer) for effect in effects)
        off: list[str] = []
        for key in self._in_flight:
            effect = planned.get(key)
            may_go_on = isinstance(effect, CallTool) and not self._grace_over
            if (not may_go_on) if self._draining else (effect is None and not steered):
                off.append(key)
        if off:
            await self._cancel(off)

    async def _cancel(self, keys: Sequence[str]) -> None:
        """A call that does not stop in time is left to itself: what it comes to is not looked at."""
        tasks = [self._in_flight.pop(key) for key in keys]
        for task in tasks:
            task.cancel()
        done, _ = await asyncio.wait(tasks, timeout=CALL_OFF)
        for task in done:
            if not task.cancelled() and task.exception() is None and (fact := task.result()):
                await self._discard(fact)

    async def _begin(self, effects: Sequence[Effect]) -> bool:
        """Performs or launches what is planned and not in flight. True: something was stored, so plan again."""
        for effect in effects:
            if effect.key in self._in_flight:
                continue
            match effect:
                case Steer() if self._in_flight:
                    pass
                case Settle() | Return() | Steer() | Park() | StartChild() | Detach() | Expire() | End():
                    await self._do_at_once(effect)
                    return True
                case Start() if not self._draining:
                    await self._start(effect)
                    return True
                case CancelChild() | DropChild() | TellParent() if effect.key not in self._done:
                    await self._do_between(effect)
                    return True
                case Entitle() if not self._draining and self._is_aside():
                    self._launch(effect.key, self._entitle(effect))
                case Compact() if not self._draining and self._is_aside():
                    self._launch(effect.key, self._compact(effect))
                case Erase() if not self._draining and not self._equipment.eraser.full:
                    self._launch(effect.key, self._erase(effect))
                case Copy() if not self._draining and not self._equipment.copier.full:
                    self._launch(effect.key, self._copy(effect))
                case Close():
                    await self._close_fork(effect)
                    return True
                case CallModel() if not self._draining and self._has_room:
                    self._launch(effect.key, self._mine.call_model(effect, self._run(effect.run)))
                case RunNode() if not self._draining and self._has_room:
                    self._launch(effect.key, self._mine.run_node(effect))
                case CallTool() if not self._draining and self._has_room:
                    self._launch(effect.key, self._mine.call_tool(effect))
                case _:
                    pass
        return False

    @property
    def _has_room(self) -> bool:
        return len(self._in_flight) < AT_ONCE

    def _is_aside(self) -> bool:
        self.aside = self.aside or self._step_aside()
        return self.aside

    def _launch(self, key: str, call: Coroutine[Any, Any, RunFact | None]) -> None:
        task = asyncio.create_task(call)
        task.add_done_callback(lambda _: self._stir.set())
        self._in_flight[key] = task

    async def _finish(self, effects: Sequence[Effect]) -> Outcome | None:
        """Nothing is in flight and nothing can be begun. None: plan again."""
        if self._released or (self.aside and not effects):
            return Outcome.DONE
        if self._draining and self._attempt:
            await self._release(self._attempt.n)
            return None
        if self._draining and effects:
            return Outcome.HANDED_BACK
        if any(isinstance(effect, Erase | Entitle | Compact | Copy) for effect in effects):
            return Outcome.BUSY
        held = [wake.work for wake in blocked_by(self._session, self._identity)]
        if self._identity.wake.work in held:
            return Outcome.HELD
        gone = [work for work in held if work not in self._identity.gone and await self._is_gone(work)]
        if gone:
            self._identity = msgspec.structs.replace(self._identity, gone=self._identity.gone.union(gone))
            return None
        due = next_due(self._session, self._identity)
        wait = None if due is None else due - self._equipment.now()
        if wait is None or wait > NEAR:
            return Outcome.DONE
        await asyncio.sleep(max(wait, 1) / 1000)  # the timer went off, by its own clock, a little early
        await self._ledger.look()
        return None

    async def _is_gone(self, work: int) -> bool:
        """Whether nobody works on this wake-up any more."""
        return not self._is_here(work) and not await persist(lambda: self._equipment.work.exists(work, self.key))

    def _settle_down(self) -> None:
        """This takes longer: follow the feed, mind the deadline, hold nothing that can be read again."""
        if not self._in_flight:
            return
        self._ledger.forget_events()
        self._ledger.watch()
        self._disarm()
        run = self._session.run(self._attempt.n) if self._attempt else None
        if run and run.deadline is not None:
            wait = max(run.deadline - self._equipment.now(), 0) / 1000
            self._alarm = asyncio.get_running_loop().call_later(wait, self._stir.set)

    def _disarm(self) -> None:
        if self._alarm:
            self._alarm.cancel()
            self._alarm = None

    async def _close(self) -> None:
        self._patience.end()
        self._disarm()
        if self._in_flight:
            await self._cancel(tuple(self._in_flight))
        await self._ledger.close()

    # --- effects ----------------------------------------------------------------------------------------------------

    async def _start(self, effect: Start) -> None:
        run = self._run(effect.run)
        spec = run.spec
        role = await persist(lambda: self._equipment.roles.get(self.key.account, spec))
        if role is None:
            message = f"agent {spec.agent}, version {spec.version}, is not known to this runner"
            error = Error(code="agent_not_found", message=message)
            await self._end(end(self._session, run, "failed", error))
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
        if await self._ledger.store(effect.key, command) is None:
            return
        self._identity = msgspec.structs.replace(self._identity, graph=role.graph)
        self._attempt = Attempt(self._equipment, self._ledger, run, effect.attempt, role)
        if self._draining:
            self._attempt.drain()
        if not run.taken:
            metrics.queue_seconds.observe(max(self._equipment.now() - run.requested_at, 0) / 1000)
        elif effect.trigger == "recovery":
            metrics.recoveries.inc()

    async def _do_between(self, effect: BetweenEffect) -> None:
        """What is done to another session has no fact in this one: it is done once by each drive."""
        self._done.add(effect.key)
        match effect:
            case CancelChild():
                await self._delegation.cancel(effect.child)
            case DropChild():
                await self._delegation.drop(effect.session)
            case TellParent():
                told = await self._delegation.tell(effect.parent)
                if not self._session.deleted:
                    origin = self._ledger.own_origin(derive(effect.key, "told"))
                    await self._ledger.store(effect.key, ReportRun(origin=origin, run=effect.run, told=told))
            case _:
                assert_never(effect)
        await self._ledger.look()

    async def _entitle(self, effect: Entitle) -> None:
        """That none was found is a fact too, so that none is looked for at every wake-up."""
        events = await self._ledger.first(titles.EVENTS)
        text, usage = await titles.find(self._equipment.models, effect.spec, events, effect.key)
        origin = self._ledger.own_origin(derive(effect.key))
        await self._ledger.store(effect.key, TitleSession(origin=origin, text=text, usage=usage))

    async def _compact(self, effect: Compact) -> None:
        """That there is no summary is a fact too; it is tried again behind a later turn."""
        session, events = await self._ledger.shown(window.to_sum_up(self._session, effect.through))
        most = summaries.room(self._equipment.models, effect.spec)
        policy = resolve(effect.spec.policy)
        through, messages = history.summed_up(session, events, effect.through, policy, most)
        del session, events
        found = await summaries.find(self._equipment.models, effect.spec, messages, effect.key)
        command = CompactHistory(
            origin=self._ledger.own_origin(derive(effect.key)),
            through=through,
            summary=found.text,
            fault=found.fault,
            usage=found.usage,
            model=found.model,
        )
        await self._ledger.store(effect.key, command)

    async def _do_at_once(self, effect: Settle | Return | Steer | Park | StartChild | Detach | Expire | End) -> None:
        match effect:
            case StartChild():
                await self._record(effect.key, await self._delegation.intend(effect, self._run(effect.run)))
                if child := self._session.child(effect.run, effect.k):  # it need not wait until the run does
                    await self._delegation.open(child)
            case Detach():
                if fact := await self._delegation.detach(effect):
                    await self._record(effect.key, fact)
            case Settle():
                await self._record(effect.key, result(effect, effect.call, Came(status="uncertain", error=UNCERTAIN)))
            case Return():
                await self._record(effect.key, await self._mine.take_answer(effect))
            case Steer():
                fact = RunSteered(run=effect.run, attempt=effect.attempt, message_ids=effect.message_ids)
                await self._record(effect.key, fact)
            case Park():
                match await self._mine.ask(effect):
                    case None:
                        await self._ledger.look()
                    case RunWaiting() as waiting:
                        await self._record(effect.key, waiting)
                    case ToolReturned() as returned:
                        await self._record(f"{effect.key}:{returned.call_id}", returned)
                    case NodeFinished() as finished:
                        await self._record(f"{effect.key}:{finished.path}", finished)
            case Expire():
                origin = await self._ledger.origin(self._run(effect.run), derive(effect.key))
                now = self._equipment.now()
                command = ExpireRequest(origin=origin, run=effect.run, request=effect.request, now=now)
                await self._ledger.store(effect.key, command)
            case End():
                await self._end(effect)
            case _:
                assert_never(effect)

    async def _end(self, effect: End) -> None:
        """What the model had said by then is kept; what only the run needed is not."""
        attempt = self._attempt if self._attempt and self._attempt.n == effect.run else None
        run = self._run(effect.run)
        if effect.answer_seq:
            fact = await self._answer(effect)
        elif effect.output is not None:
            fact = await self._mine.end(effect)
        else:
            partial = attempt.partial if attempt else Partial()
            fact = RunEnded(
                run=effect.run,
                attempt=effect.attempt,
                status=effect.status,
                content=partial.text,
                reasoning=partial.reasoning,
                error=effect.error,
                model=run.spec.model,
            )
            name = f"{effect.run}.{effect.attempt}.end"
            fact = await self._equipment.room.for_end(fact, put(self._equipment, self.key, name))
        await self._record(effect.key, fact)

    async def _answer(self, effect: End) -> RunEnded:
        """The end by a reply that turned out to be the last: what it was to be followed by is not there any more."""
        replied = (await self._ledger.at(effect.answer_seq)).event.data
        if isinstance(replied, ToolReturned):  # of what a person did by himself
            return RunEnded(
                run=effect.run,
                attempt=effect.attempt,
                status=effect.status,
                content=replied.output or replied.error,
                blob=replied.blob,
            )
        assert isinstance(replied, ModelReplied)
        return RunEnded(
            run=effect.run,
            attempt=effect.attempt,
            status=effect.status,
            content=replied.content,
            reasoning=replied.reasoning,
            blob=replied.blob,
            note="" if replied.content else NOTES.get(replied.finish, NOTHING),
            finish=replied.finish,
            model=replied.model,
        )

    async def _release(self, n: int) -> None:
        run = self._run(n)
        key = f"{self.key.account}/{self.key.run(n)}:release:{run.attempt}"
        await self._record(key, RunReleased(run=n, attempt=run.attempt))

    async def _erase(self, effect: Erase) -> None:
        """That everything is removed is a fact too, so that it is not planned again."""
        deleted = self._session.deleted
        assert deleted is not None  # planned, so it is
        await self._equipment.eraser.erase(self._session, self._identity.wake.work)
        origin = self._ledger.own_origin(derive(effect.key, deleted.seq))
        await self._ledger.store(effect.key, EraseSession(origin=origin, events_removed=deleted.events))

    async def _copy(self, effect: Copy) -> None:
        """Each event that is copied is a fact of its own, so there is none to store that it is done."""
        await self._equipment.copier.copy(self._ledger, effect)

    async def _close_fork(self, effect: Close) -> None:
        origin = self._ledger.own_origin(derive(effect.key))
        await self._ledger.store(effect.key, CloseFork(origin=origin, run=effect.run))

    # --- what is stored ---------------------------------------------------------------------------------------------

    async def _record(self, effect: str, fact: RunFact) -> None:
        """Stores what an effect came to. Where it is refused, the session is as it was just read."""
        event_id = derive(effect, fact.attempt)
        run = self._session.run(fact.run)
        attempt = self._attempt if self._attempt and self._attempt.n == fact.run else None
        taking = self._identity.taking(self._session, run) if run else None
        stored = await self._ledger.record(effect, event_id, fact, taking)
        if stored is None:
            await self._discard(fact)
        match stored:
            case None if attempt and isinstance(fact, ModelReplied):
                await attempt.opaque.forget(event_id)
            case ModelReplied() if attempt:
                attempt.partial.clear()
                await attempt.opaque.keep_held(event_id)
            case RunWaiting():
                self._attempt = None
            case RunReleased():
                self._attempt = None
                self._released = True
            case RunEnded() as ended if run:
                self._count(run, ended)
                if attempt:
                    self._attempt = None
                    await attempt.opaque.drop()
                elif run.steps:
                    await self._equipment.checkpoints.drop(self.key, run.n)
            case _:
                pass

    async def _discard(self, fact: RunFact) -> None:
        """Leaves nothing of a fact that is not stored behind a deleted session: whoever removes that may be done."""
        match fact:
            case (
                ToolReturned(blob=Blob() as blob) | NodeFinished(blob=Blob() as blob) | RunEnded(blob=Blob() as blob)
            ) if self._session.deleted:
                name = blob.name.removeprefix(f"{self.key}/")
                await persist(lambda: self._equipment.blobs.remove(self.key, name))
            case _:
                pass

    def _count(self, run: Run, ended: RunEnded) -> None:
        metrics.turns.labels(outcome=ended.status).inc()
        if run.deadline is not None and run.left is None:
            began = run.deadline - run.limits.timeout
            metrics.turn_seconds.observe(max(self._equipment.now() - began, 0) / 1000)

    @property
    def _mine(self) -> Attempt:
        assert self._attempt is not None  # what is planned of a run that is carried out is planned for its own drive
        return self._attempt

    def _run(self, n: int) -> Run:
        run = self._session.run(n)
        assert run is not None  # planned, so there
        return run
