"""An agent as a runner carries it out. What an agent says of itself is in `turnstream.agents`."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from turnstream.agents import Agent, Control
from turnstream.agents.mcp import SEPARATOR, McpServer
from turnstream.ids import digest
from turnstream.roster import Roster, pin_of
from turnstream.session import tokens
from turnstream.session.events import ASK_USER, DELEGATE, Asks, Spec
from turnstream.session.window import Budget, budget_of
from turnstream.wire.agents import Pin
from turnstream_runner.checklist import CHECKLIST
from turnstream_runner.models.port import ToolSpec
from turnstream_runner.orders import DELEGATION
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
        instructions = self.agent.instructions
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
        agent, tools = edition.agent, self._tools.only(_allowed(edition.agent, spec))
        specs = (*_control(agent.control), *tools.specs())
        role = Role(
            agent=agent,
            servers=_servers(agent, spec),
            instructions=agent.instructions,
            tools=tools,
            specs=specs,
            params=agent.params.given(),
            fixed=_fixed(agent.instructions, specs),
            pins=edition.pins,
        )
        self._roles[name] = role
        if len(self._roles) > ROLES:
            self._roles.popitem(last=False)
        return role

    async def tools_of(self, account: str, spec: Spec) -> tuple[str, ...]:
        """Names of the tools that a run may use, and of what it may use of MCP servers. Raises `BrokerFault`."""
        edition = await self._roster.pinned(account, pin_of(spec))
        return _allowed(edition.agent, spec) if edition else ()


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
