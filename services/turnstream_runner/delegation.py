"""Sub-agents: what a run delegates, the session that is opened for it, and what is told of its end.

Two logs and no transaction across them. The intent is stored first, in the parent; everything after it may be done
again, by whoever comes next, and has one effect. Nothing here decides what to do.
"""

from contextlib import suppress
from typing import Final

import msgspec

from turnstream.ids import CHILD, SESSION_MAX, SessionKey, agent_id, derive, digest
from turnstream.session.commands import CancelRun, DeleteSession, EndChild, Origin, PostMessage
from turnstream.session.decide import MAX_CHILDREN
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    ChildEnded,
    ChildStarted,
    Limits,
    MessageWithdrawn,
    ModelReplied,
    NodeFinished,
    Opens,
    Parent,
    Part,
    Recorded,
    RunEnded,
    SessionDeleted,
    Spec,
)
from turnstream.session.paths import name_of, place
from turnstream.session.plan import Detach, Return, StartChild
from turnstream.session.state import Child, Run, Session
from turnstream_runner.equipment import Equipment
from turnstream_runner.ledger import Asking, Ledger, calls_of, persist
from turnstream_runner.orders import Order, order_of
from turnstream_runner.results import Came, Result, result

DEPTH_MAX: Final = 3
"""Levels of sub-agents below a session that a person opened."""
BRIEF: Final = "brief"
"""Id of the message that tells a child what to do."""
GONE: Final = "what was to be done is not known any more: the session that delegated it is deleted"


class Delegation:
    """What one drive does for the children of its session, and for the parent."""

    def __init__(self, equipment: Equipment, ledger: Ledger) -> None:
        self._equipment = equipment
        self._ledger = ledger

    # --- the parent's side ------------------------------------------------------------------------------------------

    async def intend(self, effect: StartChild, run: Run) -> ChildStarted | Result:
        """The intent, or the error of a call that delegates nothing that can be done."""
        call = await self._ledger.call(effect.call)
        key = self._ledger.key
        try:
            order = order_of(call)
            spec = await self._spec(run, order, effect.call.path if effect.call.is_node else "")
            session = key.child(run.n, effect.k).session
            if effect.k > MAX_CHILDREN:
                raise ValueError(f"a run has {MAX_CHILDREN} sub-agents at most")
            if key.session.count(CHILD) >= DEPTH_MAX or len(session) > SESSION_MAX:
                raise ValueError(f"sub-agents of sub-agents end {DEPTH_MAX} levels down")
        except ValueError as error:
            return result(effect, effect.call, Came(status="error", error=str(error)))
        return ChildStarted(
            run=effect.run,
            attempt=effect.attempt,
            **place(effect.call.path),
            call_id=call.id,
            k=effect.k,
            child_session=session,
            wait=order.wait,
            brief=digest(order.brief.encode()),
            spec=spec,
        )

    async def _spec(self, run: Run, order: Order, node: str) -> Spec:
        """What the child carries out: with no tool that the parent has not, and no more than the parent has left. An
        agent that a graph names has its own tools, but for what the run may not use. Raises `ValueError`."""
        account, roles = self._ledger.key.account, self._equipment.roles
        spec = await self._pinned(run, node) if node else None
        spec = spec or await self._meant(run, order)
        its = await persist(lambda: roles.tools_of(account, spec))
        if node:
            mine = its if run.spec.tools is None else run.spec.tools
        else:
            mine = await persist(lambda: roles.tools_of(account, run.spec))
        return msgspec.structs.replace(
            spec,
            model=spec.model if order.agent else run.spec.model,
            limits=_left(run, order.within(spec.limits), self._equipment.now()),
            tools=tuple(tool for tool in its if tool in mine),
        )

    async def _pinned(self, run: Run, node: str) -> Spec | None:
        """The very version that was there when the graph was saved, also where it is deleted by now."""
        account, roles, roster = self._ledger.key.account, self._equipment.roles, self._equipment.roster
        role = await persist(lambda: roles.get(account, run.spec))
        pin = role.pins.get(name_of(node)) if role else None
        found = await persist(lambda: roster.pinned(account, pin)) if pin else None
        return found.spec if found else None

    async def _meant(self, run: Run, order: Order) -> Spec:
        """What whoever is named would carry out; one like the parent is the same version of it, if that is still to be
        had. Raises `ValueError`."""
        account, roster = self._ledger.key.account, self._equipment.roster
        name = order.agent or run.spec.agent
        for wanted in (name,) if order.agent else (agent_id(name, run.spec.version), name):
            if found := await persist(lambda wanted=wanted: roster.find(account, wanted)):
                return found.spec
        raise ValueError(f"agent: there is no {name[:64]!r}; there are: {', '.join(roster.listed(account))}")

    async def open(self, child: Child) -> Session:
        """Opens the child's session, if it is not there; answers with what it is now."""
        key = self._key(child)
        session = await persist(lambda: self._equipment.sessions.load(key))
        if session.seq:
            return session
        order = await self._order(child)
        parent = self._ledger.key
        author = f"agent:{self._author(child)}"
        command = PostMessage(
            origin=await self._opening(child, author),
            message_id=BRIEF,
            author=author,
            content=(Part(text=order.said if order else GONE),),
            specs={child.spec.agent: child.spec},
            agent=child.spec.agent,
            opens=Opens(
                agent=child.spec.agent,
                parent=Parent(
                    session=parent.session,
                    run=child.run,
                    call_id=child.call_id,
                    k=child.k,
                    schema=order.schema if order else None,
                ),
            ),
        )
        try:
            return (await persist(lambda: self._equipment.sessions.handle(key, command))).session
        except Rejected:  # somebody else has opened it, and more has happened since
            return await persist(lambda: self._equipment.sessions.load(key))

    async def detach(self, effect: Detach) -> Result | None:
        """The child goes on by itself; the call returns its name. None: it has ended meanwhile."""
        child = self._ledger.session.child(effect.run, effect.call.child)
        if child is None:
            return None
        await self.open(child)
        output = msgspec.json.encode({"status": "running", "session": child.session}).decode()
        return result(effect, effect.call, Came(output=output))

    async def cancel(self, child: Child) -> None:
        """Ends a child; one that is not there yet is opened and ended, so that whoever was about to open it comes too
        late. It tells itself what it came to."""
        await self.open(child)
        origin = self._origin(self._ledger.key.run(child.run), child.k, "cancel")
        command = CancelRun(origin=origin, run=1, reason="whoever delegated it has ended")
        with suppress(Rejected):  # it is deleted, and tells that
            await persist(lambda: self._equipment.sessions.handle(self._key(child), command))

    async def drop(self, session: str) -> None:
        """Deletes the session of a child for good; that it is not there is no error."""
        key = SessionKey(self._ledger.key.account, session)
        origin = self._ledger.own_origin(derive(str(key), "drop"))
        command = DeleteSession(origin=origin, specs={}, mode="erase", active="cancel")
        with suppress(Rejected):
            await persist(lambda: self._equipment.sessions.handle(key, command))

    # --- the child's side -------------------------------------------------------------------------------------------

    async def tell(self, parent: Parent) -> bool:
        """Tells the parent how run 1 ended. False: there is no such session any more."""
        key = SessionKey(self._ledger.key.account, parent.session)
        command = EndChild(
            origin=self._origin(self._ledger.key.run(1), parent.k, "tell"), ended=await self._ended(parent)
        )
        try:
            await persist(lambda: self._equipment.sessions.handle(key, command))
        except Rejected:
            return False
        return True

    async def _ended(self, parent: Parent) -> ChildEnded:
        told = ChildEnded(run=parent.run, call_id=parent.call_id, k=parent.k, status="cancelled")
        for recorded in await self._ledger.events():
            match recorded.event.data:
                case ModelReplied(run=1) | NodeFinished(run=1) | ChildEnded(run=1) as used:
                    told = msgspec.structs.replace(told, usage=told.usage + used.usage)
                case RunEnded(run=1) as ended:
                    return msgspec.structs.replace(
                        told,
                        status=ended.status,
                        output=ended.content,
                        blob=ended.blob,
                        error=ended.error,
                        usage=ended.usage,
                    )
                case MessageWithdrawn(run=1) | SessionDeleted():
                    return told
                case _:
                    pass
        return told

    # --- both -------------------------------------------------------------------------------------------------------

    async def _order(self, child: Child) -> Order | None:
        """What the child was to do; None: that is not in the log any more."""
        run = self._ledger.session.run(child.run)
        since = run.requested_seq if run else self._ledger.session.before_end(child.run)
        for recorded in reversed(await self._ledger.events(since)):
            data = recorded.event.data
            if isinstance(data, Asking) and data.run == child.run:
                for call in calls_of(data):
                    if call.id == child.call_id:
                        return order_of(call)
        return None

    def _author(self, child: Child) -> str:
        run = self._ledger.session.run(child.run)
        return run.spec.agent if run else self._ledger.session.agent_name

    def _key(self, child: Child) -> SessionKey:
        return SessionKey(self._ledger.key.account, child.session)

    async def _opening(self, child: Child, author: str) -> Origin:
        """Whoever has asked for the run that delegates has asked for this too."""
        origin = self._origin(self._ledger.key.run(child.run), child.k, "open", author)
        run = self._ledger.session.run(child.run)
        if run is None:
            return origin
        asked = await self._ledger.origin(run, origin.id)
        return msgspec.structs.replace(
            origin, cause=asked.cause, correlation=asked.correlation, traceparent=asked.traceparent
        )

    def _origin(self, run: str, k: int, what: str, author: str = "") -> Origin:
        """One effect, however often it is done."""
        name = derive(self._ledger.key.account, run, k, what)
        origin = self._ledger.own_origin(name)
        return msgspec.structs.replace(origin, idempotency_key=name, body_digest=name, actor=author or origin.actor)


def told(effect: Return, closing: Recorded, order: Order) -> Result:
    """What a child came to, as the result of the call that delegated it."""
    ended = closing.event.data
    assert isinstance(ended, ChildEnded)
    if ended.status == "completed":
        came = Came(output=ended.output, json=order.schema is not None)
        return msgspec.structs.replace(result(effect, effect.call, came), blob=ended.blob)
    how, why = f"child_{ended.status}", "it was cancelled"
    if ended.error:
        why = ended.error.message if ended.error.code == how else f"{ended.error.code}: {ended.error.message}"
    return result(effect, effect.call, Came(status="error", error=f"{how}: {why}"))


def _left(run: Run, limits: Limits, now: int) -> Limits:
    mine = run.limits
    used = run.usage
    time = limits.timeout if run.deadline is None else max(run.deadline - now, 1)
    return msgspec.structs.replace(
        limits,
        max_steps=min(limits.max_steps, max(mine.max_steps - run.steps, 1)),
        max_model_calls=min(limits.max_model_calls, max(mine.max_model_calls - run.steps, 1)),
        max_tool_calls=min(limits.max_tool_calls, max(mine.max_tool_calls - run.tool_calls, 0)),
        max_tokens=_least(limits.max_tokens, mine.max_tokens, used.total),
        max_cost=_least(limits.max_cost, mine.max_cost, used.cost),
        timeout=min(limits.timeout, time),
    )


def _least(its: int | None, mine: int | None, used: int) -> int | None:
    if mine is None:
        return its
    left = max(mine - used, 1)
    return left if its is None else min(its, left)
