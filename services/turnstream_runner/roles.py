"""An agent as a runner carries it out. What an agent says of itself is in `turnstream.agents`."""

from collections.abc import Iterable, Iterator

import msgspec

from turnstream.agents import Agent, Agents, Control
from turnstream.session import tokens
from turnstream.session.events import ASK_USER, DELEGATE, Asks, Spec
from turnstream.session.window import Budget, budget_of
from turnstream_runner.checklist import CHECKLIST
from turnstream_runner.models.port import ToolSpec
from turnstream_runner.orders import DELEGATION
from turnstream_runner.requests import QUESTION
from turnstream_runner.tools.registry import Tools


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """An agent with its tools, and with what the model is told of them."""

    agent: Agent
    tools: Tools
    specs: tuple[ToolSpec, ...]
    params: dict[str, object]
    fixed: int
    """Tokens that instructions and tools have in every prompt."""

    def budget(self, model: str, context: int) -> Budget:
        """What a prompt may have for a model that takes so many tokens."""
        return budget_of(model, context, answer=self.agent.params.max_tokens, fixed=self.fixed)

    def asks(self, name: str) -> Asks | None:
        """What a person has to say before a call of this tool can return."""
        if name == ASK_USER and self.agent.control.ask_user:
            return "question"
        if name == DELEGATE and self.agent.control.delegate:
            return "child"
        said = self.agent.approval.get(name)
        needs = self.tools.needs_approval(name) if said is None else said == "always"
        return "approval" if needs and self.tools.has(name) else None


class Roles:
    """The role of each agent that a run has pinned. A definition never changes, so each is made once."""

    def __init__(self, agents: Agents, tools: Tools) -> None:
        self._agents = agents
        self._tools = tools
        self._roles: dict[tuple[str, str, tuple[str, ...] | None], Role] = {}

    def get(self, spec: Spec) -> Role | None:
        """None: this runner does not have the very agent that the run has pinned."""
        name = (spec.agent, spec.digest, spec.tools)
        role = self._roles.get(name)
        if role is None and (agent := self._agents.get(spec.agent, spec.digest)):
            tools = self._tools.only(self.tools_of(spec))
            specs = (*_control(agent.control), *tools.specs())
            role = self._roles[name] = Role(
                agent=agent, tools=tools, specs=specs, params=agent.params.given(), fixed=_fixed(agent, specs)
            )
        return role

    def tools_of(self, spec: Spec) -> tuple[str, ...]:
        """Names of the tools that a run may use."""
        agent = self._agents.get(spec.agent, spec.digest)
        names = agent.tool_names if agent else ()
        return names if spec.tools is None else tuple([name for name in names if name in spec.tools])


def _fixed(agent: Agent, specs: Iterable[ToolSpec]) -> int:
    tools = [(spec.name, spec.description, msgspec.json.encode(spec.schema).decode()) for spec in specs]
    return tokens.of_role(agent.instructions, tools)


def _control(control: Control) -> Iterator[ToolSpec]:
    if control.ask_user:
        yield QUESTION
    if control.delegate:
        yield DELEGATION
    if control.plan:
        yield CHECKLIST
