"""An agent as a runner carries it out. What an agent says of itself is in `turnstream.agents`."""

import msgspec

from turnstream.agents import Agent, Agents
from turnstream.session.events import ASK_USER, Asks, Spec
from turnstream_runner.models.port import ToolSpec
from turnstream_runner.requests import QUESTION
from turnstream_runner.tools.registry import Tools


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """An agent with its tools, and with what the model is told of them."""

    agent: Agent
    tools: Tools
    specs: tuple[ToolSpec, ...]
    params: dict[str, object]

    def asks(self, name: str) -> Asks | None:
        """What a person has to say before a call of this tool can return."""
        if name == ASK_USER and self.agent.control.ask_user:
            return "question"
        said = self.agent.approval.get(name)
        needs = self.tools.needs_approval(name) if said is None else said == "always"
        return "approval" if needs and name in self.agent.tool_names else None


class Roles:
    """The role of each agent that a run has pinned. A definition never changes, so each is made once."""

    def __init__(self, agents: Agents, tools: Tools) -> None:
        self._agents = agents
        self._tools = tools
        self._roles: dict[tuple[str, str], Role] = {}

    def get(self, spec: Spec) -> Role | None:
        """None: this runner does not have the very agent that the run has pinned."""
        role = self._roles.get((spec.agent, spec.digest))
        if role is None and (agent := self._agents.get(spec.agent, spec.digest)):
            tools = self._tools.only(agent.tool_names)
            control = (QUESTION,) if agent.control.ask_user else ()
            role = Role(agent=agent, tools=tools, specs=(*control, *tools.specs()), params=agent.params.given())
            self._roles[spec.agent, spec.digest] = role
        return role
