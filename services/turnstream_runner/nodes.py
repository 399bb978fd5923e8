"""The nodes of one attempt's graph: what reaches each, how it begins, what it gives. What comes next is planned.

Nothing is remembered here that is not in the log: what a node has given is read from its `node.finished`, and whatever
is made of that is made again in the same way by the next attempt.
"""

import json
from asyncio import to_thread
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, assert_never, cast

import msgspec

from turnstream.agents import evaluate
from turnstream.agents.evaluate import Scope, Unfit
from turnstream.agents.mcp import tool_name
from turnstream.agents.nodes import (
    AgentNode,
    GuardrailNode,
    HumanNode,
    InputNode,
    LlmNode,
    LoopNode,
    MapNode,
    McpNode,
    Node,
    OutputNode,
    RouterNode,
    ToolNode,
)
from turnstream.session import answers
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    ASK_USER,
    DELEGATE,
    Asks,
    Blob,
    Error,
    MessagePosted,
    ModelReplied,
    NodeFinished,
    NodeStarted,
    RunEnded,
    ToolCall,
)
from turnstream.session.graph import ERR, Graph, Walk
from turnstream.session.history import NO_OUTPUT, Prompt
from turnstream.session.limits import MISFITS_MAX
from turnstream.session.messages import text_of
from turnstream.session.paths import around, name_of, outer_of, place
from turnstream.session.plan import CallModel, End, RunNode
from turnstream.session.state import Run, Visit
from turnstream.wire.blobs import BlobLost, Blobs
from turnstream_runner.ledger import Ledger, persist
from turnstream_runner.roles import Role

ITEMS_MAX: Final = 1000
"""Elements that a map goes through."""
LAST: Final = "the condition did not hold in {n} iterations: this is what the last one gave"
Decided = NodeStarted | NodeFinished | RunEnded


class Nodes:
    """Of one attempt, which holds what has been given by the nodes that others need. `asks` says what a call of a tool
    by a node asks of a person before."""

    def __init__(
        self,
        ledger: Ledger,
        blobs: Blobs,
        role: Role,
        n: int,
        attempt: int,
        *,
        asks: Callable[[str, str], Awaitable[Asks | None]],
    ) -> None:
        assert role.graph is not None and role.agent.graph is not None
        self._asks = asks
        self._ledger = ledger
        self._blobs = blobs
        self._role = role
        self._graph: Graph = role.graph
        self._nodes = {place[-1]: node for place, node in role.agent.graph.walk()}
        self._n = n
        self._attempt = attempt
        self._given: dict[str, object] = {}
        """By path."""

    def node(self, path: str) -> Node:
        return self._nodes[name_of(path)]

    async def run(self, effect: RunNode) -> Decided:
        """What a node does next for which nobody has to be waited for."""
        path, node = effect.path, self.node(effect.path)
        try:
            scope = await self._scope(path)
            if effect.visit.begun:
                return await self._go_on(effect, node, scope)
            match node:
                case InputNode() | OutputNode():
                    return self._finished(path, scope.input)
                case RouterNode():
                    return await self._routed(path, node, scope)
                case GuardrailNode():
                    allows = await to_thread(evaluate.allows, node, scope)
                    return self._finished(path, scope.input, "allow" if allows else "block")
                case MapNode():
                    return self._started(path, items=len(await self._elements(node, scope)))
                case LoopNode():
                    return self._started(path, items=1)
                case ToolNode() | McpNode() | HumanNode() | AgentNode():
                    return self._started(path, await self._call(path, node, scope))
                case LlmNode():
                    raise AssertionError(f"{path}: its model is called")
                case _:
                    assert_never(node)
        except Unfit as fault:
            return self.failed(path, str(fault))

    async def prompt(self, path: str) -> Prompt:
        """What the model of a node is asked; one that only checks knows of nothing else. Raises `Unfit`."""
        node = self.node(path)
        assert isinstance(node, LlmNode | GuardrailNode)
        text = await to_thread(evaluate.prompt, node, await self._scope(path))
        return Prompt(path, text, alone=isinstance(node, GuardrailNode))

    def model(self, path: str) -> str:
        """The node's own, or that of the run."""
        node = self.node(path)
        return (node.model if isinstance(node, LlmNode | GuardrailNode) else None) or self._run.spec.model

    def role(self, path: str) -> Role:
        """As whom a node speaks, and what it may call."""
        return self._role.nodes[name_of(path)]

    async def said(self, effect: CallModel, ended: RunEnded) -> NodeFinished | ModelReplied:
        """What the model's last word is for its node."""
        path, node = effect.path, self.node(effect.path)
        error, value, port = "", cast("object", ended.content), "out"
        if ended.error:
            error = f"{ended.error.code}: {ended.error.message}"
        elif isinstance(node, GuardrailNode):
            port, error = _verdict(ended.content)
            try:
                value = await self._arrived(path)
            except Unfit as fault:
                error = str(fault)
        elif isinstance(node, LlmNode) and node.output is not None and ended.content:
            try:
                value = answers.read_json(ended.content, _json(node.output))
            except Rejected as misfit:
                if self._run.visit(path).misfits + 1 < MISFITS_MAX:
                    return _misfit(effect, ended, misfit.message)
                error = f"{MISFITS_MAX} answers did not fit the schema; the last: {misfit.message}"
        finished = self.failed(path, error) if error else self._finished(path, value, port)
        return msgspec.structs.replace(
            finished,
            note=ended.note,
            reasoning=ended.reasoning,
            usage=ended.step_usage,
            finish=ended.finish,
            model=ended.model,
            duration=ended.duration,
        )

    # --- what nodes do ----------------------------------------------------------------------------------------------

    async def _call(self, path: str, node: ToolNode | McpNode | HumanNode | AgentNode, scope: Scope) -> ToolCall:
        match node:
            case ToolNode():
                name, arguments = node.tool, await to_thread(evaluate.arguments, node, scope)
            case McpNode():
                name, arguments = tool_name(node.server, node.tool), await to_thread(evaluate.arguments, node, scope)
            case HumanNode():
                return await self._asking(path, node, scope)
            case AgentNode():
                order = {
                    "brief": await to_thread(evaluate.prompt, node, scope),
                    "agent": self._pinned(path, node),
                    "schema": node.output,
                }
                return ToolCall(id=path, name=DELEGATE, arguments=_json(_said(order)), asks="child")
        return ToolCall(id=path, name=name, arguments=_json(arguments), asks=await self._asks(path, name))

    async def _asking(self, path: str, node: HumanNode, scope: Scope) -> ToolCall:
        asked: dict[str, object] = {
            "question": await to_thread(evaluate.prompt, node, scope),
            "choices": None if node.choices is None else list(node.choices),
            "schema": node.answer,
            "expires_in": node.timeout,
            "on_expiry": None if node.timeout is None else node.on_timeout,
            "default": node.default,
        }
        return ToolCall(id=path, name=ASK_USER, arguments=_json(_said(asked)), asks="question")

    def _pinned(self, path: str, node: AgentNode) -> str:
        """The very version that was there when the graph was saved."""
        pin = self._role.pins.get(name_of(path))
        return f"{node.agent.partition('@')[0]}@{pin.version}" if pin else node.agent

    async def _routed(self, path: str, node: RouterNode, scope: Scope) -> Decided:
        port = await to_thread(evaluate.route, node, scope)
        if port is None and not self._graph.holding(path).listens(name_of(path), "default"):
            message = f"node {path}: no rule holds, and nothing is connected to its port `default`"
            return RunEnded(
                run=self._n, attempt=self._attempt, status="failed", error=Error(code="no_route", message=message)
            )
        return self._finished(path, scope.input, port or "default")

    async def _go_on(self, effect: RunNode, node: Node, scope: Scope) -> Decided:
        """Of a map or a loop, once what is inside is over."""
        path, items = effect.path, effect.visit.items
        if isinstance(node, MapNode):
            return await self._collected(path, node, items)
        assert isinstance(node, LoopNode)
        if failed := await self._failure(path, items - 1):
            return self.failed(path, f"iteration {items}: {failed}")
        value = await self._came_of(path, items - 1)
        if await to_thread(evaluate.until, node, msgspec.structs.replace(scope, input=value)):
            return self._finished(path, value)
        if items >= node.max_iterations:
            return msgspec.structs.replace(self._finished(path, value), note=LAST.format(n=items))
        return self._started(path, items=items + 1)

    async def _collected(self, path: str, node: MapNode, items: int) -> NodeFinished:
        """With `fail_fast` the others may not be over."""
        values: list[object] = []
        for i in range(items):
            if not (failed := await self._failure(path, i)):
                values.append(await self._came_of(path, i))
            elif node.on_error == "fail_fast":
                return self.failed(path, f"element {i}: {failed}")
            else:
                values.append({"error": failed})
        return self._finished(path, values)

    async def _failure(self, path: str, i: int) -> str:
        """Why one way through the graph inside a node has failed, empty if it has not."""
        walk = self._inside(path, i)
        for node in walk.failed():
            return await self._error(walk.path(node))
        return ""

    async def _came_of(self, path: str, i: int) -> object:
        """What one way through the graph inside a node gave, as far as it has come."""
        walk = self._inside(path, i)
        for node in walk.outputs:
            if walk.state(node) == "finished":
                return await self._gave(walk.path(node))
        return None

    def _inside(self, path: str, i: int) -> Walk:
        inside = self._graph.node(path).graph
        assert inside is not None
        return Walk(inside, self._visits(), f"{path}[{i}].")

    # --- what reaches them ------------------------------------------------------------------------------------------

    async def _scope(self, path: str) -> Scope:
        key, run = self._ledger.key, self._run
        nodes: dict[str, object] = {}
        for outer in ("", *[f"{node}[{i}]." for node, i in around(path).items()]):
            for node in self._graph.holding(f"{outer}_").nodes:
                if self._run.visit(outer + node.id).port:
                    nodes[node.id] = await self._gave(outer + node.id)
        session = {"account": key.account, "id": key.session, "run": key.run(run.n), "author": run.author}
        return Scope(input=await self._arrived(path), nodes=nodes, session=session)

    async def _arrived(self, path: str) -> object:
        outer = outer_of(path)
        edges = self._graph.holding(path).edges_to(name_of(path))
        if not edges:
            return await self._put_in(path)
        walk = Walk(self._graph.holding(path), self._visits(), outer)
        delivered = [edge for edge in edges if walk.delivers(edge)]
        if edges[0].into == "all":
            return {edge.source: await self._gave(outer + edge.source) for edge in delivered}
        return await self._gave(outer + delivered[0].source)

    async def _put_in(self, path: str) -> object:
        """What the input node of a graph is given: what the run was asked, an element, what came of the iteration
        before."""
        inside = around(path)
        if not inside:
            return await self._asked()
        outer, number = inside.popitem()
        node = self.node(outer)
        if isinstance(node, MapNode):
            return (await self._elements(node, await self._scope(outer)))[number]
        return await self._came_of(outer, number - 1) if number else await self._arrived(outer)

    async def _elements(self, node: MapNode, scope: Scope) -> Sequence[object]:
        elements = await to_thread(evaluate.elements, node, scope)
        if len(elements) > ITEMS_MAX:
            raise Unfit(f"{len(elements)} elements, and {ITEMS_MAX} are allowed")
        return elements

    async def _asked(self) -> str:
        """What was said to the run."""
        run = self._run
        said: dict[str, str] = {}
        for recorded in await self._ledger.events(run.since):
            data = recorded.event.data
            if isinstance(data, MessagePosted) and data.message_id in run.message_ids:
                said.setdefault(data.message_id, text_of(data))
        return "\n\n".join([said[name] for name in run.message_ids if name in said])

    # --- what they have given ---------------------------------------------------------------------------------------

    async def _gave(self, path: str) -> object:
        if path not in self._given:
            self._given[path] = await self._value(await self._end_of(path))
        return self._given[path]

    async def _value(self, finished: NodeFinished) -> object:
        if finished.port == ERR:
            return {"error": finished.error}
        text = finished.output
        if blob := finished.blob:
            data = await persist(lambda: self._bytes(blob))
            if data is None:
                raise Unfit(f"what node {finished.path} gave is lost")
            text = data.decode()
        try:
            return json.loads(text) if finished.json else text
        except RecursionError:
            raise Unfit(f"what node {finished.path} gave is too deep") from None

    async def _bytes(self, blob: Blob) -> bytes | None:
        try:
            return await self._blobs.get(blob)
        except BlobLost:
            return None

    async def _end_of(self, path: str) -> NodeFinished:
        data = (await self._ledger.at(self._run.visit(path).seq)).event.data
        assert isinstance(data, NodeFinished)
        return data

    async def _error(self, path: str) -> str:
        return f"node {path}: {(await self._end_of(path)).error}"

    # --- the run's end ----------------------------------------------------------------------------------------------

    async def end(self, effect: End) -> RunEnded:
        """What has reached the output node, or why there is nothing."""
        ended = RunEnded(run=effect.run, attempt=effect.attempt, status="completed")
        if effect.output:
            finished = await self._end_of(effect.output)
            ended = msgspec.structs.replace(ended, content=finished.output, blob=finished.blob)
        if ended.content:
            return ended
        return msgspec.structs.replace(ended, note=await self._why_empty(effect.output or ""), finish=NO_OUTPUT)

    async def _why_empty(self, output: str) -> str:
        walk = Walk(self._graph, self._visits())
        if not any(node.kind == "output" for node in self._graph.nodes):
            return "the graph declares no output node"
        if output:
            return await self._gave_nothing(walk, output)
        for node in walk.failed():
            return f"node {node.id} failed: {(await self._end_of(node.id)).error}"
        return "no output node was reached"

    async def _gave_nothing(self, walk: Walk, name: str) -> str:
        """The first node on the way to this one that gave nothing."""
        while edge := next(filter(walk.delivers, self._graph.edges_to(name)), None):
            name = edge.source
            if walk.graph.node(name).kind not in ("router", "guardrail"):
                break
        if (await self._end_of(name)).finish == "length":
            return f"node {name} hit the token limit; raise max_tokens"
        return f"node {name} produced nothing"

    # --- facts ------------------------------------------------------------------------------------------------------

    def _started(self, path: str, call: ToolCall | None = None, items: int = 0) -> NodeStarted:
        return NodeStarted(run=self._n, attempt=self._attempt, **place(path), call=call, items=items)

    def _finished(self, path: str, value: object, port: str = "out") -> NodeFinished:
        text, is_json = evaluate.written(value)
        return NodeFinished(run=self._n, attempt=self._attempt, **place(path), port=port, output=text, json=is_json)

    def failed(self, path: str, error: str) -> NodeFinished:
        return NodeFinished(run=self._n, attempt=self._attempt, **place(path), port=ERR, error=error)

    @property
    def _run(self) -> Run:
        run = self._ledger.session.run(self._n)
        assert run is not None
        return run

    def _visits(self) -> Mapping[str, Visit]:
        return {visit.path: visit for visit in self._run.visits}


def _verdict(text: str) -> tuple[str, str]:
    """The port that a model has chosen, or the error that it has chosen none."""
    words = text.strip().strip("`\"'*.").lower()
    return (words, "") if words in ("allow", "block") else ("", f"the model said neither allow nor block: {text[:200]}")


def _misfit(effect: CallModel, ended: RunEnded, why: str) -> ModelReplied:
    """An answer that is none: the model is told why, and asked again."""
    return ModelReplied(
        run=effect.run,
        attempt=effect.attempt,
        **place(effect.path),
        step=effect.step,
        content=ended.content,
        reasoning=ended.reasoning,
        usage=ended.step_usage,
        finish=ended.finish,
        model=ended.model,
        duration=ended.duration,
        misfit=why,
    )


def _said(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
