"""What a run of each agent carries out: the agents that are known, with the policy that the server and the agent say.

Not here: what an agent is (`turnstream.agents`), what a policy means (`turnstream.session.policy`).
"""

from collections.abc import Iterable

import msgspec

from turnstream.agents import Agent, AgentsError, Fault
from turnstream.session.errors import Rejected
from turnstream.session.events import PolicyData, Spec
from turnstream.session.policy import merged, parse_policy
from turnstream.settings import Settings, SettingsError


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


def specs_of(settings: Settings, known: Iterable[Agent]) -> dict[str, Spec]:
    """By agent. Raises `AgentsError` with every fault, `SettingsError`."""
    server = server_policy(settings)
    specs: dict[str, Spec] = {}
    faults: list[Fault] = []
    for agent in known:
        try:
            policy = merged(server, parse_policy(agent.policy))
            specs[agent.name] = msgspec.structs.replace(msgspec.convert(agent.pinned(), Spec), policy=policy)
        except Rejected as error:
            faults.append(Fault(f"agent {agent.name}", str(error.details["field"]), error.message))
    if faults:
        raise AgentsError(faults)
    return specs
