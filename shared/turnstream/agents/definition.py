"""The definition of an agent: who answers, with which model, instructions, tools and limits.

Immutable and content-addressed: `digest` is of everything that was said, so the same content has the same digest
wherever it came from, and a field that a later release adds changes none. Durations are seconds here, because people
write them; the pinned form has milliseconds.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Final, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    PositiveInt,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from turnstream.agents.errors import AgentsError, Fault
from turnstream.agents.tool import NAME as TOOL_NAME
from turnstream.agents.tool import Tool
from turnstream.ids import NAME, digest

LATER: Final = frozenset({"mcp", "output", "graph"})
"""Fields of an agent that are known and not there yet."""
COST_UNIT: Final = 1_000_000
"""What a run's costs are counted in, parts of the currency."""
NOT_AVAILABLE: Final = "not available in this release"

Name = Annotated[str, StringConstraints(pattern=f"^{NAME.pattern}$")]
AnyTool = Tool[..., object]


def _tool_or_name(value: object) -> str | AnyTool:
    if isinstance(value, Tool):
        return cast(AnyTool, value)
    if isinstance(value, str) and TOOL_NAME.fullmatch(value):
        return value
    raise PydanticCustomError("tool", "neither the name of a tool nor a tool")


class _Definition(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _refuse(data: object, later: frozenset[str]) -> object:
    if isinstance(data, Mapping) and (found := sorted(later & cast(Mapping[str, object], data).keys())):
        raise PydanticCustomError("later", "{fields}: " + NOT_AVAILABLE, {"fields": ", ".join(found)})
    return cast(object, data)


class Params(_Definition):
    """How the model is asked. What is absent is left to the provider."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: PositiveInt | None = None
    """Of one model call."""
    seed: int | None = None
    stop: Sequence[str] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    parallel_tool_calls: bool | None = None

    def given(self) -> dict[str, object]:
        return self.model_dump(exclude_none=True)


class Control(_Definition):
    """What the model may do besides calling tools: ask a person (`conversation_ask_user`), have another agent do
    something (`delegate`), keep a checklist (`update_plan`)."""

    ask_user: bool = False
    delegate: bool = False
    plan: bool = False


class Limits(_Definition):
    """What one run may use. `timeout` is in seconds, from the run's first start; `max_cost` is in the currency that the
    models' prices are in. `max_same_calls` calls of one tool with the same arguments end a run, and so do
    `max_same_denials` denials of them."""

    max_steps: PositiveInt = 32
    max_model_calls: PositiveInt = 32
    max_tool_calls: Annotated[int, Field(ge=0)] = 64
    max_tokens: PositiveInt | None = None
    timeout: Annotated[float, Field(gt=0, le=366 * 86_400)] = 600.0
    max_cost: Annotated[float, Field(ge=1 / COST_UNIT, le=1e9)] | None = None
    max_same_calls: Annotated[int, Field(ge=2)] = 5
    max_same_denials: Annotated[int, Field(ge=2)] = 3


class Agent(_Definition):
    """Who answers. `tools` are names of registered tools, or the tools themselves. `approval` says of a tool whether a
    person has to approve its calls, in place of what the tool itself says; one that nobody decides on within
    `approval_timeout` seconds is denied. `policy` holds fields of a session's policy. A `durable` agent's runs go on
    after a crash under the policy `recovery = "durable"`."""

    name: Name
    description: str = ""
    model: Annotated[str, StringConstraints(min_length=1)]
    instructions: str = ""
    params: Params = Params()
    tools: Sequence[Annotated[str | AnyTool, PlainValidator(_tool_or_name)]] = ()
    control: Control = Control()
    approval: Mapping[str, Literal["always", "never"]] = {}
    approval_timeout: Annotated[float, Field(gt=0, le=366 * 86_400)] | None = None
    policy: Mapping[str, object] = {}
    durable: bool = False
    limits: Limits = Limits()
    queue: Name = "default"

    @model_validator(mode="before")
    @classmethod
    def _refuse_later(cls, data: object) -> object:
        return _refuse(data, LATER)

    @field_validator("tools")
    @classmethod
    def _no_tool_twice(cls, tools: Sequence[str | AnyTool]) -> Sequence[str | AnyTool]:
        names = [_name_of(tool) for tool in tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise PydanticCustomError("twice", "named twice: {names}", {"names": ", ".join(twice)})
        return tuple(tools)

    @field_validator("approval")
    @classmethod
    def _approves_own_tools(cls, approval: Mapping[str, str], info: ValidationInfo) -> Mapping[str, str]:
        tools = cast("Sequence[str | AnyTool] | None", info.data.get("tools"))
        if tools is not None and (unknown := sorted(set(approval) - {_name_of(tool) for tool in tools})):
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

    @cached_property
    def digest(self) -> str:
        said = self.model_dump(mode="json", exclude_defaults=True)
        return digest(json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())

    def pinned(self) -> dict[str, object]:
        """What a run pins when it is requested: the fields of `turnstream.session.events.Spec`, by its names and in its
        units, so that `msgspec.convert(agent.pinned(), Spec)` makes one."""
        whole = self.digest
        limits = self.limits
        return {
            "agent": self.name,
            "version": whole[:12],
            "digest": whole,
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
        }


def define(where: str, data: Mapping[str, object]) -> Agent:
    """The agent that `data` says. Raises `AgentsError` with every fault in it."""
    rest = dict(data)
    faults = [Fault(where, field, NOT_AVAILABLE) for field in sorted(LATER & rest.keys())]
    rest = {name: value for name, value in rest.items() if name not in LATER}
    try:
        agent = Agent.model_validate(rest)
    except ValidationError as error:
        raise AgentsError([*faults, *faults_of(where, error)]) from None
    if faults:
        raise AgentsError(faults)
    return agent


def faults_of(where: str, error: ValidationError) -> list[Fault]:
    return [_fault(where, detail) for detail in error.errors(include_url=False, include_context=False)]


def _fault(where: str, detail: ErrorDetails) -> Fault:
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return Fault(where, path, "unknown field")
    if detail["loc"][:1] == ("approval",) and detail["type"] != "approval":
        return Fault(where, path, """say it of each tool: `approval = {add = "always"}`, or "never\"""")
    return Fault(where, path, detail["msg"][:1].lower() + detail["msg"][1:])


def _name_of(tool: str | AnyTool) -> str:
    return tool if isinstance(tool, str) else tool.name
