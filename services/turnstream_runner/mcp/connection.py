"""One dialog with one server, from its beginning to its end. It belongs to a task of its own: whoever asks may be
cancelled, and the dialog goes on; whatever breaks in it ends here and is known to everybody else as a reason.

A connection that is lost stays lost: another one is opened in its place (`servers`).
"""

import asyncio
import importlib
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec

from turnstream.telemetry import log
from turnstream_runner.mcp.content import Shown
from turnstream_runner.mcp.endpoint import Endpoint
from turnstream_runner.mcp.failures import Ended, Failed
from turnstream_runner.shown import shown

if TYPE_CHECKING:
    from turnstream_runner.mcp.dialog import Dialog

CLOSING: Final = 5.0
"""Seconds that the end of a dialog may take."""
SETTLING: Final = 1.0
"""Seconds in which a connection that broke says why."""
CALM: Final = 1.0
"""Seconds between two looks at the tools of a server that says again and again that it has others."""


CLOSED: Final = "the connection was closed"
_VAGUE: Final = frozenset({"", CLOSED, "Connection closed"})


class Listed(msgspec.Struct, frozen=True):
    """A tool as its server describes it; `schema` is the JSON Schema of its arguments."""

    name: str
    description: str
    schema: dict[str, Any]


class Connection:
    """`timeout`: seconds that the server has to begin, and to say which tools it has."""

    def __init__(self, name: str, make: Callable[[], Endpoint], *, timeout: float, lost: Callable[[], None]) -> None:
        self.name = name
        self.reason = ""
        """Why it is lost; empty while it is not."""
        self.users = 0
        self.used = 0.0
        """Loop time of the last use."""
        self.tools: tuple[Listed, ...] = ()
        self.looked = 0.0
        """Loop time at which the tools were listed."""
        self.was_open = False
        self.is_unwanted = False
        """It was closed because nobody needs it."""
        self._make = make
        self._timeout = timeout
        self._on_lost = lost
        self._dialog: Dialog | None = None
        self._scope: anyio.CancelScope | None = None
        self._open = asyncio.Event()
        self._closing = asyncio.Event()
        self._changed = asyncio.Event()
        self._owner = asyncio.create_task(self._own(), name=f"MCP server {name}")

    @property
    def is_lost(self) -> bool:
        return bool(self.reason)

    @property
    def is_open(self) -> bool:
        return self.was_open and not self.reason

    async def opened(self) -> None:
        """Waits until it is open. Raises `Ended`."""
        await self._open.wait()
        if self.reason:
            raise Ended(self.reason, undone=True)

    async def call(self, name: str, arguments: dict[str, Any]) -> Shown:
        """Raises `Refused`, `Failed`, `Ended`."""
        async with self._using() as dialog:
            return await dialog.call(name, arguments)

    async def look(self) -> None:
        """Lists the tools anew. Raises `Failed`, `Ended`."""
        async with self._using() as dialog:
            try:
                async with asyncio.timeout(self._timeout):
                    self.tools = await dialog.tools()
            except TimeoutError:
                raise Failed(f"it did not say within {self._timeout:g} s which tools it has") from None
            self.looked = asyncio.get_running_loop().time()

    def look_again(self) -> None:
        """Lists the tools anew, beside whatever else there is to do."""
        self._changed.set()

    async def close(self) -> None:
        """Takes some seconds at most."""
        self.is_unwanted = not self.is_lost
        self._lose(CLOSED)
        if self._scope and not self.was_open:
            self._scope.cancel()
        await asyncio.wait((self._owner,), timeout=2 * CLOSING)

    @asynccontextmanager
    async def _using(self) -> "AsyncGenerator[Dialog, None]":
        await self.opened()
        assert self._dialog is not None
        self.users += 1
        try:
            yield self._dialog
        except Ended as error:
            self._lose(str(error))
            await asyncio.wait((self._owner,), timeout=SETTLING)
            raise Ended(self.reason, undone=error.undone) from None
        finally:
            self.users -= 1
            self.used = asyncio.get_running_loop().time()

    def _lose(self, reason: str) -> None:
        """The first reason is kept, but for one that says nothing."""
        if self.reason in _VAGUE:
            self.reason = reason or CLOSED
        self._closing.set()

    async def _own(self) -> None:
        try:
            endpoint = self._make()
            dialog = await asyncio.to_thread(importlib.import_module, "turnstream_runner.mcp.dialog")
            with anyio.CancelScope(deadline=anyio.current_time() + self._timeout) as scope:
                self._scope = scope
                talk = dialog.held(self.name, endpoint, ended=self._lose, changed=self._changed.set)
                async with talk as self._dialog:
                    await self._serve(scope)
            if scope.cancelled_caught:
                self._lose(f"it did not answer within {self._timeout:g} s")
        except ImportError:
            self._lose("this runner has no MCP library: `pip install turnstream[mcp]`")
        except Failed as error:
            self._lose(str(error))
        except Exception as error:
            log.exception("a connection to an MCP server broke", server=self.name)
            self._lose(shown(error))
        finally:
            self._dialog = None
            self._lose(CLOSED)
            self._open.set()
            self._on_lost()

    async def _serve(self, scope: anyio.CancelScope) -> None:
        """Keeps the dialog until it is to end."""
        assert self._dialog is not None
        self.tools = await self._dialog.tools()
        self.looked = self.used = asyncio.get_running_loop().time()
        self.was_open = True
        scope.deadline = math.inf
        self._open.set()
        looking = asyncio.create_task(self._keep_looking())
        try:
            await self._closing.wait()
        finally:
            looking.cancel()
            scope.deadline = anyio.current_time() + CLOSING

    async def _keep_looking(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self.look()
            except Failed as error:
                log.warning("the tools of an MCP server cannot be listed anew", server=self.name, error=str(error))
            await asyncio.sleep(CALM)
