"""An agent as a runner carries it out. What an agent says of itself is in `turnstream.agents`."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from turnstream.agents import Agent, Control
from turnstream.agents.mcp import SEPARATOR, McpServer
from turnstream.agents.nodes import GuardrailNode, LlmNode, McpNode, Node, ToolNode
from turnstream.ids import digest
from turnstream.roster import Edition, Roster, pin_of
from turnstream.session import tokens
from turnstream.session.events import ASK_USER, DELEGATE, Asks, Spec
from turnstream.session.graph import Graph
from turnstream.session.window import Budget, budget_of
from turnstream.wire.agents import Pin
from turnstream_runner.checklist import CHECKLIST
from turnstream_runner.models.port import ToolSpec
from turnstream_runner.orders import DELEGATION, fitting
from turnstream_runner.requests import QUESTION
from turnstream_runner.tools.port import Callee
from turnstream_runner.tools.registry import Tools

ROLES: Final = 10_000
"""Roles that a runner keeps."""
UNREACHABLE: Final = (
    "Some of your tools cannot be reached at the moment and are not listed: those whose names begin with {names}. Do"
    " without them; where that is not possible, say so."
)
"""What a model is told besides its instructions."""


VERDICT: Final = "You check what you are shown. Answer with one word and nothing else: allow, or block."
"""What the model of a guardrail is told."""


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """An agent with its tools, and with what the model is told of them. `servers`: the MCP servers that the run may
    use; their tools come to the role in an attempt."""

    agent: Agent
    servers: Mapping[str, McpServer] = {}
    instructions: str
    tools: Tools
    specs: tuple[ToolSpec, ...]
    params: dict[str, object]
    fixed: int
    """Tokens that instructions and tools have in every prompt."""
    graph: Graph | None = None
    nodes: "Mapping[str, Role]" = {}
    """As whom each node of the graph speaks and calls, by its name."""
    pins: Mapping[str, Pin] = {}
    """The very versions of the agents that the graph names, by node."""

    def budget(self, model: str, context: int) -> Budget:
        """What a prompt may have for a model that takes so many tokens."""
        return budget_of(model, context, answer=self.agent.params.max_tokens, fixed=self.fixed)

    def asks(self, name: str) -> Asks | None:
        """What a person has to say before a call of this tool can return."""
        if name == ASK_USER and self.agent.control.ask_user:
            return "question"
        if name == DELEGATE and self.agent.control.delegate:
            return "child"
        said = self.agent.approval.get(self.tools.listed(name))
        needs = self.tools.needs_approval(name) if said is None else said == "always"
        return "approval" if needs and self.tools.has(name) else None

    def with_servers(self, some: Sequence[Callee], absent: Mapping[str, str]) -> "Role":
        """The role with these tools of its servers. `absent`: what names of tools that cannot be had now begin with,
        and why they cannot."""
        specs = (*self.specs, *[ToolSpec(tool.name, tool.description, tool.schema) for tool in some])
        instructions = self.instructions
        if absent:
            names = ", ".join(f"{prefix}…" for prefix in absent)
            instructions = f"{instructions}\n\n{UNREACHABLE.format(names=names)}".lstrip()
        return msgspec.structs.replace(
            self,
            instructions=instructions,
            tools=self.tools.besides(some, absent),
            specs=specs,
            fixed=_fixed(instructions, specs),
        )


class Roles:
    """The role of each agent that a run has pinned. A definition never changes, so a role is made once, unless so many
    are needed that the one used longest ago has to go."""

    def __init__(self, roster: Roster, tools: Tools) -> None:
        self._roster = roster
        self._tools = tools
        self._roles: OrderedDict[tuple[str, str, str, str, tuple[str, ...] | None], Role] = OrderedDict()

    async def get(self, account: str, spec: Spec) -> Role | None:
        """None: there is no such agent as the run has pinned. Raises `BrokerFault`."""
        name = (account, spec.agent, spec.version, spec.digest, spec.tools)
        role = self._roles.get(name)
        if role is not None:
            self._roles.move_to_end(name)
            return role
        edition = await self._roster.pinned(account, pin_of(spec))
        if edition is None:
            return None
        role = self._roles[name] = self._whole(edition, spec)
        if len(self._roles) > ROLES:
            self._roles.popitem(last=False)
        return role

    def _whole(self, edition: Edition, spec: Spec) -> Role:
        agent = edition.agent
        role = self._made(agent, spec)
        if agent.graph is None:
            return role
        nodes = {str(place[-1]): self._made(_as(agent, node), spec) for place, node in agent.graph.walk()}
        graph = msgspec.convert(agent.graph.topology(), Graph)
        return msgspec.structs.replace(role, graph=graph, nodes=nodes, pins=edition.pins)

    def _made(self, agent: Agent, spec: Spec) -> Role:
        tools = self._tools.only(_allowed(agent, spec))
        specs = (*_control(agent.control), *tools.specs())
        instructions = agent.instructions
        if agent.output is not None:
            instructions = f"{instructions}\n\n{fitting(agent.output)}".lstrip()
        return Role(
            agent=agent,
            servers=_servers(agent, spec),
            instructions=instructions,
            tools=tools,
            specs=specs,
            params=agent.params.given(),
            fixed=_fixed(instructions, specs),
        )

    async def tools_of(self, account: str, spec: Spec) -> tuple[str, ...]:
        """Names of the tools that a run may use, and of what it may use of MCP servers. Raises `BrokerFault`."""
        edition = await self._roster.pinned(account, pin_of(spec))
        return _allowed(edition.agent, spec) if edition else ()


def _as(agent: Agent, node: Node) -> Agent:
    """The agent as far as a node has to do with it. What a node that speaks does not say is the agent's."""
    nothing = {"graph": None, "output": None, "tools": (), "mcp": {}, "control": Control()}
    match node:
        case LlmNode():
            said = {"model": node.model, "instructions": node.instructions, "params": node.params}
            said |= {"tools": node.tools, "control": node.control}
            said |= {"mcp": None if node.mcp is None else {name: agent.mcp[name] for name in node.mcp}}
            changes = {name: value for name, value in said.items() if value is not None}
            return agent.model_copy(update={"graph": None, "output": node.output, **changes})
        case GuardrailNode():
            model = {"model": node.model} if node.model else {}
            return agent.model_copy(update={**nothing, "instructions": VERDICT, **model})
        case ToolNode():
            return agent.model_copy(update={**nothing, "tools": (node.tool,)})
        case McpNode():
            return agent.model_copy(update={**nothing, "mcp": {node.server: agent.mcp[node.server]}})
        case _:
            return agent.model_copy(update=nothing)


def _allowed(agent: Agent, spec: Spec) -> tuple[str, ...]:
    names = (*agent.tool_names, *[_whole(name, server) for name, server in agent.mcp.items()])
    return names if spec.tools is None else tuple([name for name in names if name in spec.tools])


def _servers(agent: Agent, spec: Spec) -> dict[str, McpServer]:
    return {
        name: server for name, server in agent.mcp.items() if spec.tools is None or _whole(name, server) in spec.tools
    }


def _whole(name: str, server: McpServer) -> str:
    """The tools of a server as one name: another agent has them too if it says the very same of the server."""
    return f"{name}{SEPARATOR}*:{digest(server.model_dump_json().encode())[:16]}"


def _fixed(instructions: str, specs: Iterable[ToolSpec]) -> int:
    tools = [(spec.name, spec.description, msgspec.json.encode(spec.schema).decode()) for spec in specs]
    return tokens.of_role(instructions, tools)


def _control(control: Control) -> Iterator[ToolSpec]:
    if control.ask_user:
        yield QUESTION
    if control.delegate:
        yield DELEGATION
    if control.plan:
        yield CHECKLIST
