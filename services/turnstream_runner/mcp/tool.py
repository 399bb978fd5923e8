"""One tool of a server, as `Tools` calls it: its arguments are held against the server's schema before anything is
sent, and whatever comes of the call is a result."""

from functools import lru_cache
from typing import Any, Final

import msgspec
from jsonschema_rs import RegexOptions, ValidationError, Validator, validator_for

from turnstream.agents import ToolContext
from turnstream.agents.mcp import tool_name
from turnstream_runner.mcp.connection import Listed
from turnstream_runner.mcp.failures import Ended, Failed, Refused
from turnstream_runner.mcp.servers import Place, Servers
from turnstream_runner.tools.port import ToolResult, Unfit

FAULTS_MAX: Final = 10
SCHEMA_MAX: Final = 65_536
"""Bytes of a schema that can be used."""
PATTERN_BYTES: Final = 256 * 1024
"""Bytes of a regular expression as it is compiled."""
PERHAPS: Final = "; whether it was done is not known"


class ServerTool:
    """`name` is what the model calls it by. Raises `Unfit` for a schema that arguments cannot be held against."""

    exclusive = False
    approval = False

    def __init__(self, servers: Servers, place: Place, tool: Listed, name: str) -> None:
        self.name = name
        self.listed = tool_name(place.name, tool.name)
        self.description = tool.description
        self.schema = tool.schema if tool.schema.get("type") == "object" else {**tool.schema, "type": "object"}
        self.idempotent = tool.name in place.server.idempotent
        self.timeout = place.server.timeout
        self._servers = servers
        self._place = place
        self._tool = tool.name
        self._validator = _validator(msgspec.json.encode(self.schema))

    def read(self, arguments: str) -> dict[str, Any]:
        try:
            given = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Unfit(f"the arguments are no JSON: {error}") from None
        if not isinstance(given, dict):
            raise Unfit("the arguments are no JSON object")
        faults: list[str] = []
        for error in self._validator.iter_errors(given):
            if len(faults) == FAULTS_MAX:
                faults.append("and more")
                break
            faults.append(_said(error))
        if faults:
            raise Unfit(f"the arguments do not fit: {'; '.join(faults)}")
        return given

    async def call(self, given: dict[str, Any], context: ToolContext) -> ToolResult:
        try:
            text, is_json = await self._servers.call(self._place, self._tool, given)
            return ToolResult(status="ok", output=text, json=is_json)
        except Refused as error:
            return ToolResult(status="error", error=str(error))
        except Ended as error:
            perhaps = "" if error.undone or self.idempotent else PERHAPS
            return ToolResult(status="error", error=f"MCP server {self._place.name}: {error}{perhaps}")
        except Failed as error:
            return ToolResult(status="error", error=f"MCP server {self._place.name}: {error}")


def _said(error: ValidationError) -> str:
    path = ".".join(str(part)[:100] for part in error.instance_path)
    return f"{path}: {error.message[:200]}" if path else error.message[:200]


@lru_cache(maxsize=1024)
def _validator(schema: bytes) -> Validator:
    """Raises `Unfit`. What a schema refers to is looked for in itself alone."""
    if len(schema) > SCHEMA_MAX:
        raise Unfit(f"the schema of its arguments has {len(schema)} bytes, more than {SCHEMA_MAX}")
    options = RegexOptions(size_limit=PATTERN_BYTES, dfa_size_limit=PATTERN_BYTES)
    try:
        return validator_for(schema.decode(), mask="it", pattern_options=options, offline=True)
    except ValueError as error:
        raise Unfit(f"the schema of its arguments is none: {str(error)[:200]}") from None
