"""What is wrong with a definition that somebody wants to save, all of it at once; and the very versions of the agents
that it names, which a run of it starts whatever is saved after it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from turnstream.agents import Agent, Agents, AgentsError, Fault, check, define, load
from turnstream.agents.load import files_in, read
from turnstream.agents.models import DEMO
from turnstream.ids import agent_id
from turnstream.roster.edition import named_by, pin_of
from turnstream.roster.roster import Roster
from turnstream.roster.servers import server_faults
from turnstream.session.events import PolicyData
from turnstream.settings import Settings
from turnstream.specs import server_policy, spec_of
from turnstream.wire.agents import Pin


async def judge(
    roster: Roster, account: str, name: str, version: str, definition: Mapping[str, object]
) -> tuple[Agent, dict[str, Pin]]:
    """The agent, and the pins of its graph, by node. What is saved already was judged then, whatever has become of what
    it names. Raises `AgentsError` with every fault, `BrokerFault`."""
    where = agent_id(name, version)
    faults: list[Fault] = []
    if (said := definition.get("name", name)) != name:
        faults.append(Fault(where, "name", f"says {said!r}, and is to be saved as {name!r}"))
    agent, wrong = _define(where, {**definition, "name": name})
    faults += wrong
    if agent is None:
        raise AgentsError(faults)
    there = None if faults else await roster.find(account, where)
    if there and there.saved and there.agent.digest == agent.digest:
        return agent, dict(there.pins)
    pins = await _pins(roster, account, agent, version)
    known = {ref for node, ref in named_by(agent) if node in pins}
    faults += check(where, agent, roster.local.tools, roster.settings.models, known)
    faults += server_faults(where, agent, roster.settings)
    faults += _policy_faults(agent, server_policy(roster.settings))
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


def _define(where: str, data: Mapping[str, object]) -> tuple[Agent | None, list[Fault]]:
    """The agent, and what is wrong with the definition in itself. Where something is, the agent is what the rest of it
    says, if that says anything, so that its faults are found too. What only goes with a field that is left out is left
    out as well."""
    wrong: list[Fault] = []
    while True:
        try:
            return define(where, data), wrong
        except AgentsError as error:
            wrong = wrong or list(error.faults)
            bad = {fault.path.partition(".")[0] for fault in error.faults}
        rest = {"model": DEMO} | {field: value for field, value in data.items() if field not in bad}
        if rest == data:
            return None, wrong
        data = rest


def faults_in(files: Iterable[Path], settings: Settings) -> list[Fault]:
    """Every fault of the definitions in these files. What is known are the tools, models and agents of the settings,
    and the agents of the files themselves. Raises `AgentsError` for faults of the settings' modules."""
    local = load(modules=settings.modules, models=settings.models, default_model=settings.default_model)
    faults: list[Fault] = []
    found: dict[str, Agent] = {}
    names: dict[str, str] = {}
    for file in files:
        where = str(file)
        try:
            agent, wrong = _define(where, read(file, where))
        except AgentsError as error:
            agent, wrong = None, list(error.faults)
        faults += wrong
        if agent is None:
            continue
        found[where] = agent
        if (first := names.setdefault(agent.name, where)) != where:
            faults.append(Fault(where, "name", f"agent {agent.name!r} is defined in {first} already"))
    known = Agents({agent.name: agent for agent in (*local, *_beside(settings), *found.values())}, local.tools)
    server = server_policy(settings)
    for where, agent in found.items():
        faults += check(where, agent, known.tools, settings.models, known)
        faults += [Fault(where, fault.path, fault.message) for fault in _policy_faults(agent, server)]
    return sorted(faults)


def _beside(settings: Settings) -> Iterator[Agent]:
    """The agents of the settings' folder; what is wrong with them is said when they are checked."""
    folder = settings.agents_dir
    for file in files_in(folder) if folder and folder.is_dir() else ():
        with suppress(AgentsError):
            yield define(file.name, read(file))


def _policy_faults(agent: Agent, server: PolicyData) -> tuple[Fault, ...]:
    try:
        spec_of(agent, server)
    except AgentsError as error:
        return error.faults
    return ()
