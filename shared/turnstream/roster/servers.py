"""Which MCP servers an agent may have that somebody saves.

Whoever writes the files that a runner reads may start what he likes there. Whoever may save an agent may not, for it
would be on the runner's machine and with its keys: so a saved agent has servers at addresses alone, and refers to no
variable of the runner's environment, unless the settings say otherwise.
"""

from collections.abc import Iterator

from turnstream.agents import Agent, Fault
from turnstream.agents.mcp import REFERENCE
from turnstream.settings import Settings


def server_faults(where: str, agent: Agent, settings: Settings) -> Iterator[Fault]:
    """What of them may not be."""
    for name, server in agent.mcp.items():
        if server.command and not settings.mcp_commands:
            what = "only agents in files and modules have servers that the runner starts (setting `mcp_commands`)"
            yield Fault(where, f"mcp.{name}.command", what)
        for field, values in (("headers", server.headers), ("env", server.env)):
            for key, value in values.items():
                for variable in REFERENCE.findall(value):
                    if variable not in settings.mcp_variables:
                        what = f"saved agents may not refer to {variable} (setting `mcp_variables`)"
                        yield Fault(where, f"mcp.{name}.{field}.{key}", what)
