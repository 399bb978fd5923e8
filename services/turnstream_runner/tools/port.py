"""What `Tools` calls: functions of Python, and tools of MCP servers."""

from typing import Any, Literal, Protocol

import msgspec

from turnstream.agents import ToolContext


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """`json`: the output is a JSON value; else it is that text."""

    status: Literal["ok", "error"]
    output: str = ""
    json: bool = False
    error: str = ""


class Callee(Protocol):
    """A tool. `idempotent`: a call that was cut off by a crash may be repeated. `timeout` is in seconds. `exclusive`:
    never runs beside another call of its run. `approval`: it says of itself that a person has to approve each call;
    `listed` is the name by which an agent says so instead. `schema` is the JSON Schema of its arguments."""

    @property
    def name(self) -> str: ...
    @property
    def listed(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def schema(self) -> dict[str, Any]: ...
    @property
    def idempotent(self) -> bool: ...
    @property
    def timeout(self) -> float: ...
    @property
    def exclusive(self) -> bool: ...
    @property
    def approval(self) -> bool: ...

    def read(self, arguments: str) -> Any:
        """The arguments of a call, as they are given to `call`. Raises `Unfit`."""
        ...

    async def call(self, given: Any, context: ToolContext) -> ToolResult:
        """Raises nothing but for being cancelled."""
        ...


class Unfit(Exception):
    """The arguments of a call do not do. The message says why, and is shown to the model."""
