"""The connections of one runner to MCP servers.

A connection is opened when a run first needs it, and shared by all runs of the same account and agent as long as the
server is defined the same: a process for each run would cost a second and 50 MB each. So whatever a server keeps of its
connection it keeps for all of them, and loses when the connection is closed: after a while without use, when it breaks,
and when the runner stops. A server that has to know whose turn it is is told by arguments.

A server that cannot be reached is left alone for a while, longer each time, but for calls of its tools.
"""

import asyncio
import importlib
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from turnstream.agents.mcp import McpServer
from turnstream.ids import digest
from turnstream.telemetry import log
from turnstream_runner.mcp.connection import Connection, Listed
from turnstream_runner.mcp.content import Shown
from turnstream_runner.mcp.endpoint import found
from turnstream_runner.mcp.failures import Ended, Failed

OPENING: Final = 30.0
"""Seconds that a server has to begin, or more if its calls have more: one that is installed first takes its time. Who
waits for it waits less."""
IDLE: Final = 300.0
"""Seconds without use after which a connection is closed."""
PROCESSES_MAX: Final = 32
"""Servers that are processes of this runner."""
CONNECTIONS_MAX: Final = 256
AGE: Final = 60.0
"""Seconds after which the tools of a server are listed anew, for the runs that come then."""
AGAIN: Final = 2.0
AGAIN_MAX: Final = 60.0
"""Seconds until a server that could not be reached is tried again: first, and at most."""
BRIEFLY: Final = 1.0
"""Seconds that is waited for a server that could not be reached the last time."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A server as one agent of one account has it. `key` names it among all."""

    name: str
    server: McpServer
    key: str


def place(account: str, agent: str, name: str, server: McpServer) -> Place:
    said = digest(server.model_dump_json().encode())
    return Place(name=name, server=server, key=f"{account}/{agent}/{name}/{said}")


class Trouble(msgspec.Struct, frozen=True):
    """A server could not be reached: why, for the how manyth time, and until what loop time it is left alone."""

    reason: str
    count: int
    until: float


class Servers:
    """`environment` is what definitions refer to. `opening`, `idle`: seconds."""

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        *,
        opening: float = OPENING,
        idle: float = IDLE,
        processes: int = PROCESSES_MAX,
        connections: int = CONNECTIONS_MAX,
    ) -> None:
        self._environment = environment
        self._opening = opening
        self._idle = idle
        self._processes_max = processes
        self._connections_max = connections
        self._there: dict[str, tuple[Place, Connection]] = {}
        self._trouble: dict[str, Trouble] = {}
        self._room = asyncio.Lock()
        self._minding: asyncio.Task[None] | None = None
        self._closed = False

    async def prepare(self) -> None:
        """Loads the library, so that no run has to wait for it. That it is not there is an error of the run that needs
        it, not of the start."""
        with suppress(ImportError):
            await asyncio.to_thread(importlib.import_module, "turnstream_runner.mcp.dialog")

    async def tools(
        self, place: Place, *, wait: float, fresh: bool = False, insist: bool = False
    ) -> tuple[Listed, ...]:
        """The tools that the server has, as they were listed when it was connected, or not much later; `fresh`: as they
        are now. Waits so many seconds; `insist`: also for a server that could not be reached a moment ago. Raises
        `Failed`."""
        in_trouble = place.key in self._trouble
        connection = await self._connection(place, insist=insist)
        if not connection.is_open:
            patience = min(wait, BRIEFLY) if in_trouble and not insist else wait
            try:
                async with asyncio.timeout(patience):
                    await connection.opened()
            except TimeoutError:
                raise Failed(f"it has not answered within {patience:g} s") from None
        if fresh:
            await connection.look()
        elif asyncio.get_running_loop().time() - connection.looked > AGE:
            connection.look_again()
        return connection.tools

    async def call(self, place: Place, tool: str, arguments: dict[str, Any]) -> Shown:
        """What a tool returned. Waits as long as it takes. Raises `Refused`, `Failed`, `Ended`."""
        connection = await self._connection(place, insist=True)
        was_open = connection.is_open
        try:
            return await connection.call(tool, arguments)
        except Ended as error:
            if not (error.undone and was_open):
                raise
        return await (await self._connection(place, insist=True)).call(tool, arguments)

    async def close(self) -> None:
        self._closed = True
        if self._minding:
            self._minding.cancel()
        await asyncio.gather(*[connection.close() for _, connection in tuple(self._there.values())])

    async def _connection(self, place: Place, *, insist: bool) -> Connection:
        """One that is open, or about to be. Raises `Failed`."""
        if found := self._kept(place):
            return found
        trouble = self._trouble.get(place.key)
        if trouble and not insist and asyncio.get_running_loop().time() < trouble.until:
            raise Failed(trouble.reason)
        async with self._room:
            if found := self._kept(place):
                return found
            await self._make_room(place)
            return self._begin(place)

    def _kept(self, place: Place) -> Connection | None:
        if self._closed:
            raise Failed("the runner shuts down")
        _, connection = self._there.get(place.key, (None, None))
        return connection if connection and not connection.is_lost else None

    def _begin(self, place: Place) -> Connection:
        if self._closed:
            raise Failed("the runner shuts down")

        def lost() -> None:
            self._note(place, connection)

        timeout = max(place.server.timeout, self._opening)
        connection = Connection(place.name, lambda: found(place.server, self._environment), timeout=timeout, lost=lost)
        self._there[place.key] = place, connection
        if self._minding is None or self._minding.done():
            self._minding = asyncio.create_task(self._mind())
        return connection

    def _note(self, place: Place, connection: Connection) -> None:
        """A connection is at its end."""
        if self._there.get(place.key, (None, None))[1] is connection:
            del self._there[place.key]
        if connection.was_open:
            self._trouble.pop(place.key, None)
        elif not connection.is_unwanted:
            before = self._trouble.get(place.key)
            count = before.count + 1 if before else 1
            until = asyncio.get_running_loop().time() + min(AGAIN * 2 ** (min(count, 16) - 1), AGAIN_MAX)
            self._trouble[place.key] = Trouble(connection.reason, count, until)
        if not connection.is_unwanted:
            what = "an MCP server is gone" if connection.was_open else "an MCP server cannot be reached"
            log.warning(what, server=place.name, account=place.key.partition("/")[0], reason=connection.reason)

    async def _make_room(self, place: Place) -> None:
        """Closes what was not used for longest, where there are too many. Raises `Failed`."""
        if len(self._there) >= self._connections_max:
            await self._close_one(process=False)
        if place.server.command and sum(1 for there, _ in self._there.values() if there.server.command) >= (
            self._processes_max
        ):
            await self._close_one(process=True)

    async def _close_one(self, *, process: bool) -> None:
        idle = [
            (connection.used, place.key, connection)
            for place, connection in self._there.values()
            if connection.is_open and not connection.users and (place.server.command or not process)
        ]
        if not idle:
            raise Failed("this runner speaks to as many MCP servers as it may")
        await min(idle, key=lambda one: one[:2])[2].close()

    async def _mind(self) -> None:
        """Closes what is not used, until nothing is left."""
        while self._there:
            await asyncio.sleep(self._idle / 4)
            now = asyncio.get_running_loop().time()
            old = [
                connection
                for _, connection in self._there.values()
                if connection.is_open and not connection.users and now - connection.used > self._idle
            ]
            await asyncio.gather(*[connection.close() for connection in old])
