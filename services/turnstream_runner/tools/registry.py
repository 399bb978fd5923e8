"""Carries out one tool call. Whatever happens in it is a result that the model sees: arguments that do not fit, an
exception, a time-out, an unknown tool. Only the cancellation of the caller comes out as what it is.

Functions that are not async run in threads of their own: one that never returns holds up nobody, not even the
interpreter's end. Nothing of an exception but its kind and first line is shown, and no credentials.
"""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ValidationError

from turnstream.agents import Tool, ToolContext, ToolError
from turnstream.ids import digest
from turnstream.telemetry import log
from turnstream_runner.models.port import ToolSpec
from turnstream_runner.shown import shown
from turnstream_runner.tools.gate import Gate
from turnstream_runner.tools.output import described, printed
from turnstream_runner.tools.threads import in_thread
from turnstream_runner.unicode import fit

AnyTool = Tool[..., Any]
ERROR_MAX = 4096
"""Characters of an error that the model sees."""
GRACE = 1.0
"""Seconds that a cancelled function gets to clean up before nobody waits for it any more."""


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["ok", "error"]
    output: str = ""
    error: str = ""


class Tools:
    """Tools by name. A runner has one with all; each run gets those of its agent, by `only`."""

    def __init__(self, tools: Mapping[str, AnyTool]) -> None:
        self._tools = dict(tools)
        self._gates: dict[str, Gate] = {}
        self._leaving: set[asyncio.Task[ToolResult]] = set()

    def only(self, names: Iterable[str]) -> "Tools":
        """Nothing but these: what a model names besides them does not exist for it."""
        some = Tools({name: self._tools[name] for name in names if name in self._tools})
        some._gates, some._leaving = self._gates, self._leaving
        return some

    def specs(self) -> tuple[ToolSpec, ...]:
        """What a model is told of the tools, in their order."""
        return tuple(ToolSpec(tool.name, tool.description, tool.schema) for tool in self._tools.values())

    def is_idempotent(self, name: str) -> bool:
        """Whether a call may be repeated. A tool that is not there has no effect at all."""
        return name not in self._tools or self._tools[name].idempotent

    def has(self, name: str) -> bool:
        return name in self._tools

    def needs_approval(self, name: str) -> bool:
        """What the tool says of itself."""
        return name in self._tools and self._tools[name].approval

    def fingerprint(self, name: str, arguments: str) -> str:
        """What an approval is bound to: the tool, the schema of its arguments, and the arguments."""
        schema = msgspec.json.encode(self._tools[name].schema, order="sorted") if name in self._tools else b""
        return digest(b"\x00".join((name.encode(), schema, fit(arguments).encode())))

    def fault(self, name: str, arguments: str) -> str:
        """Why a call cannot be carried out; empty if it can."""
        read = self._read(name, arguments)
        return read if isinstance(read, str) else ""

    @asynccontextmanager
    async def turn(self, name: str, run: str) -> AsyncGenerator[None, None]:
        """Waits until this call may begin beside the other calls of `run`, named with its account: an exclusive tool
        runs alone. Held around the whole call, and around whatever is stored before it."""
        tool = self._tools.get(name)
        gate = self._gates.setdefault(run, Gate())
        try:
            async with gate.entered(alone=tool is not None and tool.exclusive):
                yield
        finally:
            if gate.is_idle:
                self._gates.pop(run, None)

    async def call(self, name: str, arguments: str, context: ToolContext) -> ToolResult:
        """Calls the tool with arguments in JSON as the model wrote them."""
        read = self._read(name, arguments)
        if isinstance(read, str):
            return _error(read)
        tool = self._tools[name]
        task = asyncio.create_task(_performed(tool, _given(tool, read, context)), name=f"tool {name}")
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
            return task.result()
        log.debug("tool.timeout", tool=name, account=context.account, run=context.run, gone=task.done())
        return _error(f"the tool took longer than {tool.timeout:g} s and was given up")

    def _read(self, name: str, arguments: str) -> BaseModel | str:
        """The arguments, or why the tool cannot be called with them."""
        tool = self._tools.get(name)
        if tool is None:
            return f"there is no tool {name[:64]!r}; there are: {', '.join(sorted(self._tools))}"
        try:
            return tool.arguments.model_validate_json(fit(arguments).strip() or "{}")
        except ValidationError as error:
            return f"the arguments do not fit: {described(error)}"
        except Exception as error:  # a validator of the tool's own
            return shown(error)


def _given(tool: AnyTool, arguments: BaseModel, context: ToolContext) -> dict[str, Any]:
    given = {name: getattr(arguments, field) for field, name in tool.names.items()}
    if tool.context:
        given[tool.context] = context
    return given


async def _performed(tool: AnyTool, given: dict[str, Any]) -> ToolResult:
    try:
        return ToolResult(status="ok", output=await _output(tool, given))
    except ToolError as error:
        return _error(fit(str(error)))
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
        return _error(shown(error))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a tool must not end the runner
        log.debug("tool.failed", tool=tool.name, error=shown(error))
        return _error(shown(error))


async def _output(tool: AnyTool, given: dict[str, Any]) -> str:
    if tool.is_async:
        return printed(await tool.function(**given))

    def call() -> Any:
        value = tool.function(**given)
        return value if inspect.isawaitable(value) else printed(value)

    value = await in_thread(call, f"tool {tool.name}")
    return printed(await value) if inspect.isawaitable(value) else value


def _error(message: str) -> ToolResult:
    return ToolResult(status="error", error=message if len(message) <= ERROR_MAX else f"{message[:ERROR_MAX]}…")
