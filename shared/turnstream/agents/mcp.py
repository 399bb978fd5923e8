"""The MCP servers of an agent, as data: where each is, and which of its tools may be used. Who speaks to them is the
runner.

A definition never holds a secret: what goes into a header, or into the environment of a server that is started, is a
reference to the runner's own environment, `${NAME}`, and is filled in only where the server is spoken to.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Self

from pydantic import StringConstraints, model_validator

from turnstream.agents.terms import Definition, Fixed, Place, Said, Seconds, Unique, refusal

SEPARATOR: Final = "__"
"""Between a server and its tool, in the name by which a model asks for it."""
REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

ServerName = Annotated[str, StringConstraints(pattern=r"^[a-z](_?[a-z0-9-])*$", max_length=32)]
McpTool = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_./-]{1,128}$")]
_Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_Header = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]+$")]
_ONE = re.compile(rf"(?:[A-Za-z][A-Za-z-]{{0,15}} )?{REFERENCE.pattern}")


class McpServer(Definition):
    """A server: `url` of one that is there (streamable HTTP), or the `command` that starts one. `tools`: which of its
    tools may be used, all if absent. `timeout`: seconds that a call gets. `idempotent`: tools whose calls may be
    repeated after a crash."""

    url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#]+[^\s#]*$", max_length=2048)] | None = None
    headers: Mapping[_Header, str] = {}
    command: Annotated[Sequence[Said], Fixed] | None = None
    env: Mapping[_Variable, str] = {}
    cwd: Said | None = None
    tools: Annotated[Sequence[McpTool], Unique] | None = None
    timeout: Seconds = 60.0
    idempotent: Annotated[Sequence[McpTool], Unique] = ()

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if faults := [*self._misplaced(), *self._plain()]:
            raise refusal(faults)
        return self

    def _misplaced(self) -> list[tuple[Place, str]]:
        faults: list[tuple[Place, str]] = []
        if (self.url is None) == (not self.command):
            faults.append(((), "either `url` or `command`, and not both"))
        elif self.url is None and self.headers:
            faults.append((("headers",), "go with `url`"))
        elif self.url is not None:
            faults += [((name,), "goes with `command`") for name in ("env", "cwd") if getattr(self, name)]
        if self.tools is not None and (missing := sorted(set(self.idempotent) - set(self.tools))):
            faults.append((("idempotent",), f"not among `tools`: {', '.join(missing)}"))
        return faults

    def _plain(self) -> list[tuple[Place, str]]:
        """Values that are not references: what could be a secret is never written into a definition."""
        given = {("headers", name): value for name, value in self.headers.items()}
        given |= {("env", name): value for name, value in self.env.items()}
        what = "names what the runner's environment holds: `${NAME}`, with one word before it at most: `Bearer ${NAME}`"
        return [(place, what) for place, value in given.items() if not _ONE.fullmatch(value)]

    def may_use(self, tool: str) -> bool:
        return self.tools is None or tool in self.tools


def tool_name(server: str, tool: str) -> str:
    """The name by which a tool of a server is asked for, and approved."""
    return f"{server}{SEPARATOR}{tool}"
