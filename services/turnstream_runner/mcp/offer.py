"""Which tools of its agent's servers an attempt of a run has, and what the model is told of them.

What was once offered to the model in an attempt stays as it was, also when the server has other tools by now: a prompt
that begins the same is not paid for again, and an approval holds for what was approved. A server that does not say
within `WAIT` seconds which tools it has does not hold up the run: its tools are not offered, the model is told so, and
with the next step they are looked for again, without waiting.
"""

import asyncio
from collections.abc import Iterator
from typing import Final

from turnstream.agents.mcp import SEPARATOR
from turnstream.telemetry import log
from turnstream_runner.mcp.connection import Listed
from turnstream_runner.mcp.failures import Failed
from turnstream_runner.mcp.names import safe
from turnstream_runner.mcp.servers import Place, Servers, place
from turnstream_runner.mcp.tool import ServerTool
from turnstream_runner.roles import Role
from turnstream_runner.tools.port import Unfit

WAIT: Final = 8.0
"""Seconds that the first step of an attempt waits for lists of tools."""
AFTERWARDS: Final = 0.01
"""Seconds that a later one does."""


class Offer:
    """For one attempt. `base` is the role without its servers' tools."""

    def __init__(self, servers: Servers, base: Role, account: str) -> None:
        self._servers = servers
        self.base = base
        self._role = base
        self._places = {name: place(account, base.agent.name, name, server) for name, server in base.servers.items()}
        self._tools: dict[str, tuple[Listed, ...]] = {}
        self._absent: dict[str, str] = {}
        """Servers whose tools are not there, and why."""

    async def for_model(self) -> Role:
        """What the model is to be told now."""
        missing = [place for name, place in self._places.items() if name not in self._tools]
        if missing:
            looks = [self._look(place, AFTERWARDS if place.name in self._absent else WAIT) for place in missing]
            if any(await asyncio.gather(*looks)):
                self._role = self._made()
        return self._role

    async def for_call(self, name: str, *, fresh: bool = False, wait: float | None = None) -> Role:
        """What a call of this tool is carried out with. Waits for its server as long as a call may take, unless less is
        said. `fresh`: with the tool as the server describes it now."""
        where = self._places.get(name.partition(SEPARATOR)[0])
        if where and (fresh or where.name not in self._tools):
            patience = where.server.timeout if wait is None else wait
            if await self._look(where, patience, fresh=fresh, insist=True):
                self._role = self._made()
        return self._role

    async def _look(self, where: Place, wait: float, *, fresh: bool = False, insist: bool = False) -> bool:
        """Whether anything is new."""
        known = self._tools.get(where.name)
        try:
            self._tools[where.name] = await self._servers.tools(where, wait=wait, fresh=fresh, insist=insist)
        except Failed as error:
            reason = f"the tools of MCP server {where.name} cannot be had now: {error}"
            is_new = self._absent.get(where.name) != reason
            if where.name not in self._absent:
                log.warning("tools of an MCP server are not offered", server=where.name, reason=str(error))
            self._absent[where.name] = reason
            self._tools.pop(where.name, None)
            return is_new or known is not None
        self._absent.pop(where.name, None)
        return self._tools[where.name] is not known

    def _made(self) -> Role:
        absent = {f"{name}{SEPARATOR}": self._absent[name] for name in self._places if name in self._absent}
        some = tuple(self._server_tools())
        return self.base.with_servers(some, absent)

    def _server_tools(self) -> Iterator[ServerTool]:
        taken = {spec.name for spec in self.base.specs}
        for name, where in self._places.items():
            for listed in self._tools.get(name, ()):
                if not where.server.may_use(listed.name):
                    continue
                try:
                    tool = ServerTool(self._servers, where, listed, safe(name, listed.name, taken))
                except Unfit as error:
                    log.warning(
                        "a tool of an MCP server cannot be used", server=name, tool=listed.name, reason=str(error)
                    )
                    continue
                if tool.name not in taken:
                    taken.add(tool.name)
                    yield tool
