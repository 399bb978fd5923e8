"""What is wrong with a definition that somebody wants to save, all of it at once; and the very versions of the agents
that it names, which a run of it starts whatever is saved after it.
"""

from collections.abc import Mapping

from turnstream.agents import Agent, AgentsError, Fault, check, define
from turnstream.ids import agent_id
from turnstream.roster.edition import named_by, pin_of
from turnstream.roster.roster import Roster
from turnstream.specs import server_policy, spec_of
from turnstream.wire.agents import Pin


async def judge(
    roster: Roster, account: str, name: str, version: str, definition: Mapping[str, object]
) -> tuple[Agent, dict[str, Pin]]:
    """The agent, and the pins of its graph, by node. Raises `AgentsError` with every fault, `BrokerFault`."""
    where = agent_id(name, version)
    faults: list[Fault] = []
    if (said := definition.get("name", name)) != name:
        faults.append(Fault(where, "name", f"says {said!r}, and is to be saved as {name!r}"))
    try:
        agent = define(where, {**definition, "name": name})
    except AgentsError as error:
        raise AgentsError([*faults, *error.faults]) from None
    pins = await _pins(roster, account, agent, version)
    known = {ref for node, ref in named_by(agent) if node in pins}
    faults += check(where, agent, roster.local.tools, roster.settings.models, known)
    try:
        spec_of(agent, server_policy(roster.settings))
    except AgentsError as error:
        faults += error.faults
    if faults:
        raise AgentsError(faults)
    return agent, pins


async def _pins(roster: Roster, account: str, agent: Agent, version: str) -> dict[str, Pin]:
    """Of the nodes whose agent is there. By its own name an agent means this very version of itself."""
    offered = roster.of(account)
    itself = Pin(agent=agent.name, version=version, digest=agent.digest)
    pins: dict[str, Pin] = {}
    for node, ref in named_by(agent):
        if ref in (agent.name, agent_id(agent.name, version)):
            pins[node] = itself
        elif edition := await offered.find(ref):
            pins[node] = pin_of(edition.spec)
    return pins
