"""Where a server is, and what is said to it before anything else. `${NAME}` in a definition stands for what the
environment of the runner holds: it is put in here, when a connection is opened, so that no event and no definition ever
has it.

What was put in is kept from models, people and logs: whatever a server says is shown without it (`Hidden`).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Final
from urllib.parse import quote

import msgspec

from turnstream.agents.mcp import REFERENCE, McpServer
from turnstream_runner.mcp.failures import Unset
from turnstream_runner.shown import STRUCK

OPEN: Final = frozenset({"HOME", "HOSTNAME", "LANG", "LOGNAME", "PATH", "PWD", "SHELL", "TERM", "TMPDIR", "TZ", "USER"})
"""Variables that hold no secret, as everybody knows."""
SECRET_MIN: Final = 6
"""Characters; to strike out what is shorter would strike out everything."""
INHERITED: Final = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
"""What a server that is a process has of the runner's environment; else only what its definition says."""


class Hidden:
    """Values that are not to be shown, neither as they are nor as others write them."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        forms = {form for value in values for form in _forms(value) if len(form) >= SECRET_MIN}
        self._values = sorted(forms, key=len, reverse=True)

    def strike(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, STRUCK)
        return text


def _forms(value: str) -> Iterator[str]:
    """A value, without what is around it, line by line, in JSON and in an address."""
    for part in (value, value.strip(), *value.splitlines()):
        yield part
        yield json.dumps(part)[1:-1]
        yield json.dumps(part, ensure_ascii=False)[1:-1]
        yield quote(part, safe="")


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A server at an address, or one that `command` starts."""

    url: str = ""
    headers: dict[str, str] = {}
    command: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str | None = None
    hidden: Hidden


def found(server: McpServer, environment: Mapping[str, str]) -> Endpoint:
    """Where the server is. Raises `Unset`."""
    references = [
        name for value in (*server.headers.values(), *server.env.values()) for name in REFERENCE.findall(value)
    ]
    if missing := sorted({name for name in references if name not in environment}):
        raise Unset(f"the runner's environment does not have {', '.join(missing)}")

    def filled(values: Mapping[str, str]) -> dict[str, str]:
        return {name: REFERENCE.sub(lambda found: environment[found[1]], value) for name, value in values.items()}

    inherited = {name: environment[name] for name in INHERITED if name in environment}
    return Endpoint(
        url=server.url or "",
        headers=filled(server.headers),
        command=tuple(server.command or ()),
        env=inherited | filled(server.env),
        cwd=server.cwd,
        hidden=Hidden(environment[name] for name in references if name not in OPEN),
    )
