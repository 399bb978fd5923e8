"""What a run of each agent carries out: the agents that are known, with the policy that the server and the agent say;
and what a person may call of their tools.

Not here: what an agent is (`turnstream.agents`), what a policy means (`turnstream.session.policy`).
"""

from collections.abc import Iterable, Mapping

import msgspec

from turnstream import schemas
from turnstream.agents import Agent, Agents, AgentsError, Fault, load
from turnstream.agents.definition import AnyTool
from turnstream.agents.mcp import tool_name
from turnstream.agents.nodes import HumanNode
from turnstream.session.errors import Rejected
from turnstream.session.events import UPDATE_PLAN, PolicyData, Spec
from turnstream.session.policy import Policy, merged, parse_policy, resolve
from turnstream.settings import Settings, SettingsError


def agents_of(settings: Settings) -> Agents:
    """Every agent and tool that the settings name. Raises `AgentsError`."""
    return load(
        folder=settings.agents_dir,
        modules=settings.modules,
        models=settings.models,
        default_model=settings.default_model,
    )


def server_policy(settings: Settings) -> PolicyData:
    """What the settings say. Raises `SettingsError` naming the field."""
    said = dict(settings.policy)
    starters = said.get("starters")
    if isinstance(starters, str) and starters not in ("any", "people"):  # lists are written `a,b` in the environment
        said["starters"] = [name.strip() for name in starters.split(",")]
    try:
        return parse_policy(said)
    except Rejected as error:
        raise SettingsError(error.message) from None


def spec_of(agent: Agent, server: PolicyData, version: str = "") -> Spec:
    """Of one agent; `version`: what it was saved as. Raises `AgentsError`."""
    try:
        policy = merged(server, parse_policy(agent.policy))
    except Rejected as error:
        field = str(error.details["field"])
        raise AgentsError([Fault(f"agent {agent.name}", field, error.message.removeprefix(f"{field}: "))]) from None
    if faults := _forgotten(agent, resolve(policy)):
        raise AgentsError(faults)
    spec = msgspec.structs.replace(msgspec.convert(agent.pinned(), Spec), policy=policy)
    return msgspec.structs.replace(spec, version=version) if version else spec


def _forgotten(agent: Agent, policy: Policy) -> list[Fault]:
    """Nodes of a graph that ask a person, who may take long, where a run does not outlive its runner."""
    if agent.graph is None or agent.durable or policy.recovery == "resume":
        return []
    what = f"asks a person: under `recovery = {policy.recovery}` the agent has to be `durable`"
    places = [place for place, node in agent.graph.walk() if isinstance(node, HumanNode)]
    return [Fault(f"agent {agent.name}", ".".join(map(str, ("graph", *place))), what) for place in places]


def specs_of(settings: Settings, known: Iterable[Agent]) -> dict[str, Spec]:
    """By agent. Raises `AgentsError` with every fault, `SettingsError`."""
    server = server_policy(settings)
    specs: dict[str, Spec] = {}
    faults: list[Fault] = []
    for agent in known:
        try:
            specs[agent.name] = spec_of(agent, server)
        except AgentsError as error:
            faults += error.faults
    if faults:
        raise AgentsError(faults)
    return specs


def schemas_of(tools: Mapping[str, AnyTool]) -> dict[str, str]:
    """The JSON Schema of the arguments of each tool as text, empty where it cannot be held against them here (then the
    tool itself says what does not fit)."""
    texts = {name: msgspec.json.encode(tool.schema).decode() for name, tool in tools.items()}
    return {name: text if schemas.is_readable(text) else "" for name, text in texts.items()}


def tools_of(agent: Agent, known: Mapping[str, str]) -> dict[str, str]:
    """The tools of an agent that a person may call by himself, those of them that are `known`, with their schemas, and
    those that it names of its MCP servers, whose schemas only the servers have."""
    found = {name: known[name] for name in agent.tool_names if name in known}
    found |= {tool_name(name, tool): "" for name, server in agent.mcp.items() for tool in server.tools or ()}
    return found | ({UPDATE_PLAN: ""} if agent.control.plan else {})
