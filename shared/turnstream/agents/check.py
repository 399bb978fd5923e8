"""What only holds between definitions: that each tool, model and agent that one names is there.

For whoever takes a definition in: from a file, a module, or over the API.
"""

from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import suppress

from turnstream.agents.definition import Agent
from turnstream.agents.errors import Fault
from turnstream.agents.models import lookup, unsaid
from turnstream.agents.nodes import LlmNode, asks_model
from turnstream.agents.terms import Params, Place
from turnstream.agents.tool import RESERVED
from turnstream.settings import ModelSettings


def check(
    where: str,
    agent: Agent,
    tools: Collection[str],
    models: Mapping[str, ModelSettings],
    agents: Container[str],
) -> list[Fault]:
    """Every fault of a definition that is right in itself. `tools` are those that are known, `models` the logical model
    names, `agents` holds the agents that there are, as `name` and as `name@version`: of a definition's own, see
    `Graph.agents`. An agent counts as known to itself."""
    faults = [*_models(agent, models), *_params(agent, models), *_tools(agent, tools), *_agents(agent, agents)]
    return [Fault(where, ".".join(map(str, place)), message) for place, message in faults]


def _models(agent: Agent, models: Mapping[str, ModelSettings]) -> Iterator[tuple[Place, str]]:
    named: list[tuple[Place, str]] = [(("model",), agent.model)] if agent.model else []
    for place, node in agent.graph.walk() if agent.graph else ():
        if asks_model(node) and node.model is not None:
            named.append((("graph", *place, "model"), node.model))
    for place, name in named:
        try:
            lookup(name, models)
        except LookupError as error:
            yield place, str(error)
        model = models.get(name)
        if agent.limits.max_cost is not None and not (model and model.has_prices):
            yield ("limits", "max_cost"), f"model {name!r} has no prices: they are settings of a logical model"


def _params(agent: Agent, models: Mapping[str, ModelSettings]) -> Iterator[tuple[Place, str]]:
    asked: list[tuple[Place, str | None, Params]] = [((), agent.model, agent.params)]
    for place, node in agent.graph.walk() if agent.graph else ():
        own = node.params if isinstance(node, LlmNode) else None
        if asks_model(node) and (node.model or own):
            asked.append((("graph", *place), node.model or agent.model, own or agent.params))
    for place, name, params in asked:
        with suppress(LookupError):  # told of above
            if name and (fault := unsaid(lookup(name, models), params.given())):
                yield (*place, "params"), f"{fault}, through which model {name!r} is asked"


def _tools(agent: Agent, known: Collection[str]) -> Iterator[tuple[Place, str]]:
    named: list[tuple[Place, str]] = [(("tools", i), name) for i, name in enumerate(agent.tool_names)]
    named += [(("graph", *place), name) for place, name in agent.graph.tools()] if agent.graph else []
    for place, name in named:
        if name in RESERVED:
            yield place, f"{name!r} is not named here; say `control = {{{RESERVED[name][0]} = true}}`"
        elif name not in known:
            yield place, f"unknown tool {name!r}; known: {', '.join(sorted(known))}"


def _agents(agent: Agent, known: Container[str]) -> Iterator[tuple[Place, str]]:
    for place, ref in agent.graph.agents() if agent.graph else ():
        if ref != agent.name and ref not in known:
            yield ("graph", *place), f"unknown agent {ref!r}"
