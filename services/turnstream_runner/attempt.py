"""One attempt of a run, as the drive that has started it carries it out: an effect in, the fact that came of it out.

What is stored, and in which order, is the drive's affair, but for what has to be in the log before a tool is called.
What is to be done is not decided here.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from turnstream.agents.evaluate import Unfit
from turnstream.broker.errors import BrokerFault
from turnstream.ids import SessionKey, derive, digest
from turnstream.session import history, window
from turnstream.session.commands import RunFact
from turnstream.session.events import (
    UPDATE_PLAN,
    Ask,
    Asks,
    Blob,
    Error,
    ModelReplied,
    NodeFinished,
    NodeStarted,
    PlanChanged,
    Recorded,
    RunEnded,
    RunWaiting,
    ToolCall,
    ToolStarted,
)
from turnstream.session.paths import name_of, place
from turnstream.session.plan import CallModel, CallTool, End, Park, Return, RunNode
from turnstream.session.state import Call, Run, request_id
from turnstream.session.window import Budget
from turnstream_runner import checklist, delegation, requests
from turnstream_runner.attached import Attached
from turnstream_runner.delegation import Delegation
from turnstream_runner.equipment import Equipment
from turnstream_runner.ledger import Ledger, persist
from turnstream_runner.mcp.offer import WAIT, Offer
from turnstream_runner.models.port import UnknownModel
from turnstream_runner.nodes import Nodes
from turnstream_runner.opaque import Opaque
from turnstream_runner.orders import order_of
from turnstream_runner.perform import ModelCall, Partial, ToolUse
from turnstream_runner.results import Came, Result, result
from turnstream_runner.roles import Role
from turnstream_runner.room import Put
from turnstream_runner.tools.registry import Tools

NOT_APPROVED: Final = "what was approved is not what would run now: the tool has changed since"

NOBODY_ASKED: Final = "a person has to be asked first, and was not: the tool has changed since; ask for it again"


class Attempt:
    """`partial` is what the model has said in the step that is under way. A call of `drain` lets no tool begin."""

    def __init__(self, equipment: Equipment, ledger: Ledger, run: Run, number: int, role: Role) -> None:
        self.n = run.n
        self.partial = Partial()
        self._attached = Attached(equipment.blobs, ledger.key)
        self.opaque = Opaque(equipment.checkpoints, ledger.key, run, is_new=number == 1)
        self._equipment = equipment
        self._ledger = ledger
        self._role = role
        self._offers: dict[str, Offer] = {}
        """By the node's name."""
        self._speech = equipment.live.speak(ledger.key, run.n, number)
        self._delegation = Delegation(equipment, ledger)
        self._nodes = Nodes(ledger, equipment.blobs, role, run, number, asks=self._asks_of_node) if role.graph else None
        self._by_person = run.trigger == "action"
        """Whoever calls the tool himself need not be asked."""
        self._draining = False

    def drain(self) -> None:
        self._draining = True

    def fall_silent(self) -> None:
        """The run is another's now."""
        self._speech.silence()

    async def call_model(self, effect: CallModel, run: Run) -> RunFact:
        """What its provider wants back with this reply lies in the checkpoint before the reply is stored."""
        if not effect.path:
            return await self._call_model(effect, run, await self._offer("").for_model(), run.spec.model)
        try:
            prompt = await self._graph.prompt(effect.path)
        except Unfit as fault:
            return self._graph.failed(effect.path, str(fault))
        role = await self._offer(effect.path).for_model()
        return await self._call_model(effect, run, role, self._graph.model(effect.path), prompt)

    async def _call_model(
        self, effect: CallModel, run: Run, role: Role, model: str, prompt: history.Prompt | None = None
    ) -> RunFact:
        budget = self._budget(role, model)
        wanted = window.needs(self._ledger.session, run, run.policy, budget)
        session, events = await self._ledger.shown(wanted)
        story = self._equipment.stories.tell(session, events, run.policy, wanted.since)
        view = history.build(session, events, run.n, run.policy, budget, story, prompt)
        if not view.fits:
            return await self._of_node(effect, _too_much(effect, run, model, view))
        replies = [recorded for recorded in events if _is_reply(recorded, run.n, effect.path)] if run.steps else []
        call = ModelCall(
            key=self._ledger.key,
            run=run,
            effect=effect,
            model=model,
            role=role,
            messages=view.messages,
            window=view.window if run.policy.history_window == "fit" or run.policy.history_compaction == "on" else None,
            shown=await self._attached.of(view.messages, images=self._equipment.models.shows_images(model)),
            opaque=await self.opaque.of([recorded for recorded in replies if recorded.seq in view.replies]),
            used=_call_ids(replies),
            traceparent=(await self._ledger.request(run)).traceparent,
        )
        del events, replies, view
        partial = Partial() if effect.path else self.partial
        fact, opaque = await call.perform(self._equipment.models, self._speech, partial)
        event_id = derive(effect.key, effect.attempt)
        if isinstance(fact, RunEnded) and not effect.path:
            self.opaque.hold(event_id, opaque)
            return await self._equipment.room.for_end(fact, self.put(f"{run.n}.{effect.attempt}.{effect.step}"))
        fact = await self._of_node(effect, fact)
        if isinstance(fact, NodeFinished):
            return await self._equipment.room.for_result(fact, self.put(_name(effect.attempt, effect.key)))
        await self.opaque.keep(event_id, opaque)
        return self._equipment.room.for_reply(fact)

    async def _of_node(
        self, effect: CallModel, fact: ModelReplied | RunEnded
    ) -> ModelReplied | NodeFinished | RunEnded:
        """What a model call of a node comes to: it ends the node, never the run."""
        return await self._graph.said(effect, fact) if effect.path and isinstance(fact, RunEnded) else fact

    async def run_node(self, effect: RunNode) -> RunFact:
        fact, room = await self._graph.run(effect), self._equipment.room
        match fact:
            case NodeFinished():
                return await room.for_result(fact, self.put(_name(effect.attempt, effect.key)))
            case NodeStarted(call=ToolCall() as call) if not room.takes(call.arguments):
                size = len(call.arguments.encode())
                return self._graph.failed(effect.path, f"the arguments have {size} bytes, which is too much")
            case NodeStarted() | RunEnded():
                return fact

    def _offer(self, path: str) -> Offer:
        """What a node of the graph has of its servers, or the agent itself."""
        name = name_of(path)
        if name not in self._offers:
            role = self._graph.role(path) if path else self._role
            self._offers[name] = Offer(self._equipment.servers, role, self._ledger.key.account)
        return self._offers[name]

    async def _asks_of_node(self, path: str, name: str) -> Asks | None:
        return (await self._offer(path).for_call(name)).asks(name)

    def _budget(self, role: Role, model: str) -> Budget | None:
        """None: nothing is known of the model."""
        try:
            return role.budget(model, self._equipment.models.context(model))
        except UnknownModel:
            return None

    async def call_tool(self, effect: CallTool) -> RunFact | None:
        """None: nothing came of it, for the runner shut down before the call's turn, or the run is not this attempt's
        any more."""
        offer = self._offer(effect.call.path)
        call = await self._ledger.call(effect.call)
        if call.name == UPDATE_PLAN and offer.base.agent.control.plan:
            return await self._keep_checklist(effect, call)
        role = await offer.for_call(call.name, fresh=bool(effect.call.asks))
        tools = role.tools
        async with tools.turn(call.name, f"{self._ledger.key.account}/{self._ledger.key.run(effect.run)}"):
            if self._draining:
                return None
            if effect.call.asks is None and role.asks(call.name) and not self._by_person:
                return result(effect, effect.call, Came(status="error", error=NOBODY_ASKED))
            if effect.call.asks and not await self._is_still_approved(effect, call, tools):
                return result(effect, effect.call, Came(status="denied", error=NOT_APPROVED))
            if not tools.is_idempotent(call.name) and effect.call.started != effect.attempt:
                fact = ToolStarted(run=effect.run, attempt=effect.attempt, call_id=call.id, **place(effect.call.path))
                if not await self._ledger.record(effect.key, derive(effect.key, effect.attempt, "started"), fact):
                    return None
            about = msgspec.json.encode({"call_id": call.id, "name": call.name}).decode()
            await self._speech.mark(effect.step, "tool", about, effect.call.path)
            fact = await ToolUse(key=self._ledger.key, effect=effect, arguments=call.arguments).perform(tools)
        return await self._equipment.room.for_result(fact, self.put(_name(effect.attempt, effect.key)))

    async def _keep_checklist(self, effect: CallTool, call: ToolCall) -> Result | None:
        """The checklist is a fact of its own, before the call's result."""
        try:
            items = checklist.items_of(call.arguments)
        except ValueError as error:
            return result(effect, effect.call, Came(status="error", error=str(error)))
        fact = PlanChanged(
            run=effect.run, attempt=effect.attempt, call_id=call.id, items=items, **place(effect.call.path)
        )
        if not await self._ledger.record(effect.key, derive(effect.key, effect.attempt, "plan"), fact):
            return None
        return result(effect, effect.call, Came(output=checklist.NOTED))

    async def ask(self, effect: Park) -> RunWaiting | Result | None:
        """Everything that the run waits for, people and children that are there; or the error of a call that cannot be
        asked for. None: a child has ended meanwhile."""
        asks: list[Ask] = []
        for number, open_call in enumerate(effect.calls, effect.first):
            call = await self._ledger.call(open_call)
            if open_call.child:
                child = self._ledger.session.child(effect.run, open_call.child)
                if child is None:
                    return None
                await self._delegation.open(child)
                request = request_id(self._ledger.session, effect.run, number)
                asks.append(
                    Ask(request=request, kind="child", call_id=call.id, prompt=child.session, **place(open_call.path))
                )
                continue
            role = await self._offer(open_call.path).for_call(call.name, wait=WAIT)
            try:
                asks.append(self._ask(role, open_call, call, request_id(self._ledger.session, effect.run, number)))
            except ValueError as error:
                return result(effect, open_call, Came(status="error", error=str(error)))
        return RunWaiting(run=effect.run, attempt=effect.attempt, requests=tuple(asks))

    async def take_answer(self, effect: Return) -> Result:
        """What came of a request or a child, as the result of the call."""
        closed = await self._ledger.at(effect.call.closed_seq)
        if effect.call.child:
            return delegation.told(effect, closed, order_of(await self._ledger.call(effect.call)))
        came = requests.came_of(await self._ledger.ask(effect.run, effect.call), closed)
        fact = result(effect, effect.call, came)
        return await self._equipment.room.for_result(fact, self.put(_name(effect.attempt, effect.key)))

    def put(self, name: str) -> Put:
        return put(self._equipment, self._ledger.key, name)

    def _ask(self, role: Role, open_call: Call, call: ToolCall, request: str) -> Ask:
        """Raises `ValueError`."""
        if call.asks == "question":
            return requests.question(call, request, open_call.path)
        tools = role.tools
        if fault := tools.fault(call.name, call.arguments):
            raise ValueError(fault)
        bound_to = tools.fingerprint(call.name, call.arguments)
        timeout = role.agent.approval_timeout
        return requests.approval(call, request, open_call.path, digest=bound_to, timeout=timeout)

    async def _is_still_approved(self, effect: CallTool, call: ToolCall, tools: Tools) -> bool:
        """What cannot be reached is not called either, so it makes no difference what it is by now."""
        ask = await self._ledger.ask(effect.run, effect.call)
        return tools.is_absent(call.name) or ask.digest == tools.fingerprint(call.name, call.arguments)

    async def end(self, effect: End) -> RunEnded:
        """The end of a graph that is gone through."""
        return await self._graph.end(effect)

    @property
    def _graph(self) -> Nodes:
        assert self._nodes is not None  # what is planned of a graph is planned where there is one
        return self._nodes


def put(equipment: Equipment, key: SessionKey, name: str) -> Put:
    """Puts bytes into the object store under this name of a session. It names the attempt: what a fenced one puts is in
    nobody's way."""

    async def store(data: bytes) -> Blob:
        try:
            return await persist(lambda: equipment.blobs.put(key, name, data))
        except asyncio.CancelledError:  # nothing will name it, and its session may be deleted
            with suppress(BrokerFault):
                await equipment.blobs.remove(key, name)
            raise

    return store


def _too_much(effect: CallModel, run: Run, model: str, view: history.View) -> RunEnded:
    """What has to be in the prompt is more than the model takes: it is not asked."""
    message = f"what has to be said has about {view.tokens} tokens, and model {model} takes {view.window.budget}"
    error = Error(code="context_overflow", message=message)
    return RunEnded(run=run.n, attempt=effect.attempt, status="failed", error=error, model=model)


def _is_reply(recorded: Recorded, run: int, path: str) -> bool:
    data = recorded.event.data
    return isinstance(data, ModelReplied) and data.run == run and data.path == path


def _name(attempt: int, effect: str) -> str:
    """Of what is put into the object store for an effect: another attempt puts it elsewhere."""
    return f"{attempt}.{digest(effect.encode())[:32]}"


def _call_ids(replies: Sequence[Recorded]) -> frozenset[str]:
    """The ids of all calls of a run so far."""
    return frozenset(
        call.id
        for recorded in replies
        if isinstance(recorded.event.data, ModelReplied)
        for call in recorded.event.data.tool_calls
    )
