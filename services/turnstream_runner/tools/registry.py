"""Carries out one tool call. Whatever happens in it is a result that the model sees: arguments that do not fit, an
exception, a time-out, an unknown tool. Only the cancellation of the caller comes out as what it is.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from turnstream.agents import Tool, ToolContext
from turnstream.ids import digest
from turnstream.telemetry import log
from turnstream_runner.models.port import ToolSpec
from turnstream_runner.tools.function import AnyTool, Function
from turnstream_runner.tools.gate import Gate
from turnstream_runner.tools.port import Callee, ToolResult, Unfit
from turnstream_runner.unicode import fit

ERROR_MAX = 4096
"""Characters of an error that the model sees."""
GRACE = 1.0
"""Seconds that a cancelled call gets to clean up before nobody waits for it any more."""


class Tools:
    """Tools by name. A runner has one with all functions; each run gets those of its agent, by `only`, and those of
    its agent's MCP servers, by `besides`."""

    def __init__(self, tools: Mapping[str, AnyTool | Callee]) -> None:
        self._tools: dict[str, Callee] = {
            name: Function(tool) if isinstance(tool, Tool) else tool for name, tool in tools.items()
        }
        self._listed = {tool.listed: tool for tool in self._tools.values()}
        self._absent: Mapping[str, str] = {}
        self._gates: dict[str, Gate] = {}
        self._leaving: set[asyncio.Task[ToolResult]] = set()

    def only(self, names: Iterable[str]) -> "Tools":
        """Nothing but these: what a model names besides them does not exist for it."""
        return self._like_this({name: self._tools[name] for name in names if name in self._tools})

    def besides(self, some: Iterable[Callee], absent: Mapping[str, str]) -> "Tools":
        """These too. `absent`: what names of tools that cannot be had now begin with, and why they cannot."""
        found = self._like_this(self._tools | {tool.name: tool for tool in some})
        found._absent = dict(absent)
        return found

    def _like_this(self, tools: Mapping[str, Callee]) -> "Tools":
        found = Tools(tools)
        found._gates, found._leaving = self._gates, self._leaving
        return found

    def specs(self) -> tuple[ToolSpec, ...]:
        """What a model is told of the tools, in their order."""
        return tuple(ToolSpec(tool.name, tool.description, tool.schema) for tool in self._tools.values())

    def is_idempotent(self, name: str) -> bool:
        """Whether a call may be repeated. A tool that is not there has no effect at all."""
        tool = self._find(name)
        return tool is None or tool.idempotent

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def is_absent(self, name: str) -> bool:
        """Whether it is a tool, or may be one, that cannot be had now."""
        return self._find(name) is None and bool(self._reason(name))

    def listed(self, name: str) -> str:
        """The name by which an agent's definition speaks of the tool."""
        tool = self._find(name)
        return tool.listed if tool else name

    def needs_approval(self, name: str) -> bool:
        """What the tool says of itself."""
        tool = self._find(name)
        return tool is not None and tool.approval

    def fingerprint(self, name: str, arguments: str) -> str:
        """What an approval is bound to: the tool, the schema of its arguments, and the arguments."""
        tool = self._find(name)
        schema = msgspec.json.encode(tool.schema, order="sorted") if tool else b""
        return digest(b"\x00".join((name.encode(), schema, fit(arguments).encode())))

    def fault(self, name: str, arguments: str) -> str:
        """Why a call cannot be carried out; empty if it can."""
        try:
            self._read(name, arguments)
        except Unfit as error:
            return str(error)
        return ""

    @asynccontextmanager
    async def turn(self, name: str, run: str) -> AsyncGenerator[None, None]:
        """Waits until this call may begin beside the other calls of `run`, named with its account: an exclusive tool
        runs alone. Held around the whole call, and around whatever is stored before it."""
        tool = self._find(name)
        gate = self._gates.setdefault(run, Gate())
        try:
            async with gate.entered(alone=tool is not None and tool.exclusive):
                yield
        finally:
            if gate.is_idle:
                self._gates.pop(run, None)

    async def call(self, name: str, arguments: str, context: ToolContext) -> ToolResult:
        """Calls the tool with arguments in JSON as the model wrote them."""
        try:
            tool, given = self._read(name, arguments)
        except Unfit as error:
            return _error(str(error))
        task = asyncio.create_task(tool.call(given, context), name=f"tool {name}")
        try:
            done, _ = await asyncio.wait((task,), timeout=tool.timeout)
            if not done:
                task.cancel()
                await asyncio.wait((task,), timeout=GRACE)
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            if not task.done():
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
        if done:
            result = task.result()
            return _error(result.error) if result.status == "error" else result
        log.debug("tool.timeout", tool=name, account=context.account, run=context.run, gone=task.done())
        return _error(f"the tool took longer than {tool.timeout:g} s and was given up")

    def _reason(self, name: str) -> str:
        """Why a tool cannot be had now; empty where it could, if it were one."""
        return next((reason for prefix, reason in self._absent.items() if name.startswith(prefix)), "")

    def _find(self, name: str) -> Callee | None:
        """A tool by the name that the model has for it, or that its agent's definition has."""
        return self._tools.get(name) or self._listed.get(name)

    def _read(self, name: str, arguments: str) -> tuple[Callee, Any]:
        """The tool and its arguments. Raises `Unfit` where it cannot be called with them."""
        tool = self._find(name)
        if tool is None:
            if reason := self._reason(name):
                raise Unfit(reason)
            raise Unfit(f"there is no tool {name[:64]!r}; there are: {', '.join(sorted(self._tools))}")
        return tool, tool.read(fit(arguments).strip() or "{}")


def _error(message: str) -> ToolResult:
    return ToolResult(status="error", error=message if len(message) <= ERROR_MAX else f"{message[:ERROR_MAX]}…")
