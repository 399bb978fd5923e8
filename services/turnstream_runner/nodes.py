"""The nodes of one attempt's graph: how each begins, what it gives, what the run comes to. What reaches them is in
`reach.py`; what comes next is planned.
"""

from asyncio import to_thread
from collections.abc import Awaitable, Callable, Mapping
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
    Error,
    ModelReplied,
    NodeFinished,
    NodeStarted,
    RunEnded,
    ToolCall,
)
from turnstream.session.graph import ERR, Graph, Walk
from turnstream.session.history import NO_OUTPUT, Prompt
from turnstream.session.limits import MISFITS_MAX
from turnstream.session.paths import name_of, place
from turnstream.session.plan import CallModel, End, RunNode
from turnstream.session.state import Run
from turnstream.wire.blobs import Blobs
from turnstream_runner.ledger import Ledger
from turnstream_runner.reach import Reach
from turnstream_runner.roles import Role

LAST: Final = "the condition did not hold in {n} iterations: this is what the last one gave"
Decided = NodeStarted | NodeFinished | RunEnded


class Nodes:
    """Of one attempt. `asks` says what a call of a tool by a node asks of a person before."""

    def __init__(
        self,
        ledger: Ledger,
        blobs: Blobs,
        role: Role,
        run: Run,
        attempt: int,
        *,
        asks: Callable[[str, str], Awaitable[Asks | None]],
    ) -> None:
        assert role.graph is not None and role.agent.graph is not None
        nodes = {str(place[-1]): node for place, node in role.agent.graph.walk()}
        self._reach = Reach(ledger, blobs, run, role.graph, nodes)
        self._role = role
        self._graph: Graph = role.graph
        self._n = run.n
        self._attempt = attempt
        self._asks = asks

    def node(self, path: str) -> Node:
        return self._reach.nodes[name_of(path)]

    async def run(self, effect: RunNode) -> Decided:
        """What a node does next for which nobody has to be waited for."""
        path, node = effect.path, self.node(effect.path)
        try:
            scope = await self._reach.scope(path)
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
                    return self._started(path, items=len(await self._reach.elements(path, node)))
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
        text = await to_thread(evaluate.prompt, node, await self._reach.scope(path))
        return Prompt(path, text, alone=isinstance(node, GuardrailNode))

    def model(self, path: str) -> str:
        """The node's own, or that of the run."""
        node = self.node(path)
        return (node.model if isinstance(node, LlmNode | GuardrailNode) else None) or self._reach.run.spec.model

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
                value = await self._reach.arrived(path)
            except Unfit as fault:
                error = str(fault)
        elif isinstance(node, LlmNode) and node.output is not None and ended.content:
            try:
                value = answers.read_json(ended.content, _json(node.output))
            except Rejected as misfit:
                if self._reach.run.visit(path).misfits + 1 < MISFITS_MAX:
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
        if failed := await self._reach.failure(path, items - 1):
            return self.failed(path, f"iteration {items}: {failed}")
        value = await self._reach.came_of(path, items - 1)
        if await to_thread(evaluate.until, node, msgspec.structs.replace(scope, input=value)):
            return self._finished(path, value)
        if items >= node.max_iterations:
            return msgspec.structs.replace(self._finished(path, value), note=LAST.format(n=items))
        return self._started(path, items=items + 1)

    async def _collected(self, path: str, node: MapNode, items: int) -> NodeFinished:
        """With `fail_fast` the others may not be over."""
        values: list[object] = []
        for i in range(items):
            if not (failed := await self._reach.failure(path, i)):
                values.append(await self._reach.came_of(path, i))
            elif node.on_error == "fail_fast":
                return self.failed(path, f"element {i}: {failed}")
            else:
                values.append({"error": failed})
        return self._finished(path, values)

    # --- the run's end ----------------------------------------------------------------------------------------------

    async def end(self, effect: End) -> RunEnded:
        """What has reached the output node, or why there is nothing."""
        ended = RunEnded(run=effect.run, attempt=effect.attempt, status="completed")
        if effect.output:
            finished = await self._reach.end_of(effect.output)
            ended = msgspec.structs.replace(ended, content=finished.output, blob=finished.blob)
        if ended.content:
            return ended
        return msgspec.structs.replace(ended, note=await self._why_empty(effect.output or ""), finish=NO_OUTPUT)

    async def _why_empty(self, output: str) -> str:
        walk = Walk(self._graph, self._reach.visits)
        if not any(node.kind == "output" for node in self._graph.nodes):
            return "the graph declares no output node"
        if output:
            return await self._gave_nothing(walk, output)
        for node in walk.failed():
            return f"node {node.id} failed: {(await self._reach.end_of(node.id)).error}"
        return "no output node was reached"

    async def _gave_nothing(self, walk: Walk, name: str) -> str:
        """The first node on the way to this one that gave nothing."""
        while edge := next(filter(walk.delivers, self._graph.edges_to(name)), None):
            name = edge.source
            if walk.graph.node(name).kind not in ("router", "guardrail"):
                break
        if (await self._reach.end_of(name)).finish == "length":
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
