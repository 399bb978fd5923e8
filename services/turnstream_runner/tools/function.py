"""A function of Python, called as a tool. What it returns and raises is a result.

One that is not async runs in a thread of its own: one that never returns holds up nobody, not even the interpreter's
end. Nothing of an exception but its kind and first line is shown, and no credentials.
"""

import asyncio
import inspect
from typing import Any

from pydantic import BaseModel, ValidationError

from turnstream.agents import Tool, ToolContext, ToolError
from turnstream.telemetry import log
from turnstream_runner.shown import shown
from turnstream_runner.tools.output import described, printed
from turnstream_runner.tools.port import ToolResult, Unfit
from turnstream_runner.tools.threads import in_thread
from turnstream_runner.unicode import fit

AnyTool = Tool[..., Any]


class Function:
    def __init__(self, tool: AnyTool) -> None:
        self._tool = tool
        self.name = self.listed = tool.name
        self.description = tool.description
        self.schema = tool.schema
        self.idempotent = tool.idempotent
        self.timeout = tool.timeout
        self.exclusive = tool.exclusive
        self.approval = tool.approval

    def read(self, arguments: str) -> BaseModel:
        try:
            return self._tool.arguments.model_validate_json(arguments)
        except ValidationError as error:
            raise Unfit(f"the arguments do not fit: {described(error)}") from None
        except Exception as error:  # a validator of the tool's own
            raise Unfit(shown(error)) from None

    async def call(self, given: BaseModel, context: ToolContext) -> ToolResult:
        try:
            output, is_json = await self._output(self._given(given, context))
            return ToolResult(status="ok", output=output, json=is_json)
        except ToolError as error:
            return ToolResult(status="error", error=fit(str(error)))
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return ToolResult(status="error", error=shown(error))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: a tool must not end the runner
            log.debug("tool.failed", tool=self.name, error=shown(error))
            return ToolResult(status="error", error=shown(error))

    def _given(self, arguments: BaseModel, context: ToolContext) -> dict[str, Any]:
        given = {name: getattr(arguments, field) for field, name in self._tool.names.items()}
        if self._tool.context:
            given[self._tool.context] = context
        return given

    async def _output(self, given: dict[str, Any]) -> tuple[str, bool]:
        """The text, and whether it is JSON."""
        function = self._tool.function
        if self._tool.is_async:
            return _written(await function(**given))

        def call() -> Any:
            value = function(**given)
            return value if inspect.isawaitable(value) else _written(value)

        value = await in_thread(call, f"tool {self.name}")
        return _written(await value) if inspect.isawaitable(value) else value


def _written(value: object) -> tuple[str, bool]:
    return printed(value), not isinstance(value, (str, bytes, bytearray, memoryview))
