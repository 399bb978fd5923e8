"""The definition of an agent: who answers, with which model, instructions, tools and limits.

Immutable and content-addressed: `digest` is of everything that was said, so the same content has the same digest
wherever it came from, and a field that a later release adds changes none. Durations are seconds here, because people
write them; the pinned form has milliseconds.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Final, Literal, cast

from pydantic import Field, PlainValidator, ValidationError, ValidationInfo, field_serializer, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from turnstream.agents import references
from turnstream.agents.errors import AgentsError, Fault
from turnstream.agents.graph import Graph, WholeGraph
from turnstream.agents.mcp import SEPARATOR, McpServer, ServerName
from turnstream.agents.nodes import TYPES, LlmNode, McpNode, Node, asks_model
from turnstream.agents.terms import (
    COST_UNIT,
    Control,
    Definition,
    JsonObject,
    Limits,
    Name,
    Params,
    Place,
    Schema,
    Seconds,
    refusal,
)
from turnstream.agents.tool import NAME as TOOL_NAME
from turnstream.agents.tool import Tool
from turnstream.ids import digest

AnyTool = Tool[..., object]
_NO_MODEL: Final = "no_model"


def _tool_or_name(value: object) -> str | AnyTool:
    if isinstance(value, Tool):
        return cast(AnyTool, value)
    if isinstance(value, str) and TOOL_NAME.fullmatch(value):
        return value
    raise PydanticCustomError("tool", "neither the name of a tool nor a tool")


class Agent(Definition):
    """Who answers. `tools` are names of registered tools, or the tools themselves; `mcp` are servers that bring more,
    by the names that they have here. `output` is a JSON Schema that the final answer has to fit. With a `graph` it is
    the graph that answers, and the rest is what its nodes use unless they say otherwise.

    `approval` says of a tool whether a person has to approve its calls, in place of what the tool itself says; a
    server's tool is `<server>__<tool>`. One that nobody decides on within `approval_timeout` seconds is denied.
    `policy` holds fields of a session's policy. A `durable` agent's runs go on after a crash under the policy
    `recovery = "durable"`."""

    name: Name
    description: str = ""
    model: str = ""
    """Only an agent whose graph asks no model, or names one wherever it does, has none."""
    instructions: str = ""
    params: Params = Params()
    tools: Sequence[Annotated[str | AnyTool, PlainValidator(_tool_or_name)]] = ()
    mcp: Mapping[ServerName, McpServer] = {}
    control: Control = Control()
    output: Schema | None = None
    graph: Annotated[WholeGraph | None, Field(validate_default=True)] = None
    approval: Mapping[str, Literal["always", "never"]] = {}
    approval_timeout: Seconds | None = None
    policy: JsonObject = {}
    durable: bool = False
    limits: Limits = Limits()
    queue: Name = "default"

    @field_validator("tools")
    @classmethod
    def _no_tool_twice(cls, tools: Sequence[str | AnyTool]) -> Sequence[str | AnyTool]:
        names = [_name_of(tool) for tool in tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise PydanticCustomError("twice", "named twice: {names}", {"names": ", ".join(twice)})
        return tuple(tools)

    @field_validator("graph")
    @classmethod
    def _has_what_it_uses(cls, graph: Graph | None, info: ValidationInfo) -> Graph | None:
        model, servers = info.data.get("model"), cast("Mapping[str, McpServer] | None", info.data.get("mcp"))
        if graph is None:
            if model == "":
                raise PydanticCustomError(_NO_MODEL, "model: field required")
            return None
        faults = list(references.faults_of(graph))
        for place, node in graph.walk():
            if model == "" and asks_model(node) and node.model is None:
                faults.append(((*place, "model"), "no model: neither the node nor the agent names one"))
            if servers is not None:
                faults += [((*place, *inner), message) for inner, message in _unknown_servers(node, servers)]
        if faults:
            raise refusal(faults, kind="as_written")
        return graph

    @field_validator("approval")
    @classmethod
    def _approves_own_tools(cls, approval: Mapping[str, str], info: ValidationInfo) -> Mapping[str, str]:
        if not {"tools", "mcp", "graph"} <= info.data.keys():
            return approval  # what is wrong with these is said already
        tools = {_name_of(tool) for tool in cast("Sequence[str | AnyTool]", info.data["tools"])}
        graph, servers = cast("Graph | None", info.data["graph"]), cast("Mapping[str, McpServer]", info.data["mcp"])
        tools |= {tool for _, tool in graph.tools()} if graph else set()
        unknown = [name for name in sorted(approval) if name not in tools and not _is_of(name, servers)]
        if unknown:
            raise PydanticCustomError("approval", "no tool of this agent: {names}", {"names": ", ".join(unknown)})
        return approval

    @field_serializer("tools")
    def _dump_tools(self, tools: Sequence[str | AnyTool]) -> list[str]:
        return [_name_of(tool) for tool in tools]

    @property
    def tool_names(self) -> tuple[str, ...]:
        return tuple(_name_of(tool) for tool in self.tools)

    @property
    def own_tools(self) -> tuple[AnyTool, ...]:
        """The tools that were given as such, not by name."""
        return tuple(tool for tool in self.tools if isinstance(tool, Tool))

    def topology(self) -> dict[str, object] | None:
        """The graph as the core walks it, if there is one."""
        return None if self.graph is None else self.graph.topology()

    @cached_property
    def digest(self) -> str:
        said = self.model_dump(mode="json", exclude_defaults=True)
        return digest(json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())

    @property
    def version(self) -> str:
        """What it is called where nobody gave it a version."""
        return self.digest[:12]

    def pinned(self) -> dict[str, object]:
        """What a run pins when it is requested: the fields of `turnstream.session.events.Spec`, by its names and in its
        units, so that `msgspec.convert(agent.pinned(), Spec)` makes one."""
        limits = self.limits
        return {
            "agent": self.name,
            "version": self.version,
            "digest": self.digest,
            "model": self.model,
            "queue": self.queue,
            "limits": {
                "max_steps": limits.max_steps,
                "max_model_calls": limits.max_model_calls,
                "max_tool_calls": limits.max_tool_calls,
                "max_tokens": limits.max_tokens,
                "timeout": max(1, round(limits.timeout * 1000)),
                "max_cost": None if limits.max_cost is None else round(limits.max_cost * COST_UNIT),
                "max_same_calls": limits.max_same_calls,
                "max_same_denials": limits.max_same_denials,
            },
            "durable": self.durable,
            "graph": self.graph is not None,
            "output": self.output,
        }


def define(where: str, data: Mapping[str, object]) -> Agent:
    """The agent that `data` says. Raises `AgentsError` with every fault in it."""
    try:
        return Agent.model_validate(data)
    except ValidationError as error:
        raise AgentsError(faults_of(where, error)) from None


def faults_of(where: str, error: ValidationError) -> list[Fault]:
    return [_fault(where, detail) for detail in error.errors(include_url=False, include_context=False)]


def _fault(where: str, detail: ErrorDetails) -> Fault:
    place = detail["loc"] if detail["type"] == "as_written" else _path(detail["loc"])
    path = ".".join(str(part) for part in place)
    match detail["type"]:
        case "extra_forbidden":
            return Fault(where, path, "unknown field")
        case "union_tag_not_found":
            return Fault(where, f"{path}.type", f"field required, one of {', '.join(TYPES)}")
        case "union_tag_invalid":
            return Fault(where, f"{path}.type", f"unknown type of node; known: {', '.join(TYPES)}")
        case kind if kind == _NO_MODEL:
            return Fault(where, "model", "field required")
        case kind if detail["loc"][:1] == ("approval",) and kind != "approval":
            return Fault(where, path, """say it of each tool: `approval = {add = "always"}`, or "never\"""")
        case _:
            return Fault(where, path, detail["msg"][:1].lower() + detail["msg"][1:])


def _path(loc: Place) -> Iterator[str | int]:
    """As it is written: without what pydantic adds, the type of a node behind its id, and that it is about a key."""
    inside = loc[:1] == ("graph",)
    rest = list(reversed([part for part in loc if part != "[key]"]))
    while rest:
        yield (part := rest.pop())
        if inside and part == "nodes" and rest:
            yield rest.pop()
            if rest and rest[-1] in TYPES:
                rest.pop()
            inside = bool(rest) and rest[-1] == "graph"


def _unknown_servers(node: Node, servers: Mapping[str, McpServer]) -> Iterator[tuple[Place, str]]:
    known = ", ".join(servers) or "none"
    match node:
        case LlmNode(mcp=names) if names:
            for i, name in enumerate(names):
                if name not in servers:
                    yield ("mcp", i), f"unknown server {name!r}; the agent has {known}"
        case McpNode(server=name) if name not in servers:
            yield ("server",), f"unknown server {name!r}; the agent has {known}"
        case McpNode(server=name, tool=tool) if not servers[name].may_use(tool):
            yield ("tool",), f"{tool!r} is not among the tools of {name!r} that may be used"
        case _:
            pass


def _is_of(name: str, servers: Mapping[str, McpServer]) -> bool:
    server, _, tool = name.partition(SEPARATOR)
    return server in servers and servers[server].may_use(tool)


def _name_of(tool: str | AnyTool) -> str:
    return tool if isinstance(tool, str) else tool.name
