"""`@tool`: a Python function that a model may ask for, with the schema of its arguments, taken from its type hints.

Only the record is made here; the runner carries it out. A parameter annotated `ToolContext` is not the model's to give:
the runner fills it in. Everything that a schema cannot be made of is refused where the function is defined.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar, cast, overload

import msgspec
from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

P = ParamSpec("P")
R = TypeVar("R", covariant=True)

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
RESERVED = {
    "conversation_ask_user": ("ask_user", "asks a person"),
    "delegate": ("delegate", "delegates"),
    "update_plan": ("plan", "keeps a checklist"),
}
"""What a model asks for besides tools: the field of an agent's `control` that lets it, and what it does by it."""
TIMEOUT = 60.0
"""Seconds that a tool gets unless it says otherwise."""


class ToolContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool may know of the call it serves. `idempotency_key` is the same when the same call is repeated after a
    crash: give it to whatever the tool changes."""

    account: str
    session: str
    run: str
    attempt: int
    call_id: str
    idempotency_key: str


class ToolError(Exception):
    """Raised by a tool: the model is shown exactly this message."""


@dataclass(frozen=True, kw_only=True)
class Tool(Generic[P, R]):
    """A tool as defined. Called like the function it was made of, it is that function.

    `idempotent`: a call that was cut off by a crash may be repeated. `timeout` is in seconds. `exclusive`: never runs
    beside another call of its run. `approval`: a person has to approve each call before. `arguments` is the pydantic
    model of the arguments, its fields found under `names`; `context` names the parameter that takes the `ToolContext`.
    """

    name: str
    description: str
    function: Callable[P, R]
    idempotent: bool
    timeout: float
    exclusive: bool
    approval: bool
    is_async: bool
    arguments: type[BaseModel]
    names: dict[str, str]
    schema: dict[str, object]
    context: str | None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...


@overload
def tool(
    *,
    name: str = "",
    description: str = "",
    idempotent: bool = False,
    timeout: float = TIMEOUT,
    exclusive: bool = False,
    approval: bool = False,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...


def tool(
    function: Callable[P, R] | None = None,
    /,
    *,
    name: str = "",
    description: str = "",
    idempotent: bool = False,
    timeout: float = TIMEOUT,
    exclusive: bool = False,
    approval: bool = False,
) -> Tool[P, R] | Callable[[Callable[P, R]], Tool[P, R]]:
    """Makes a tool of a function, sync or async. Name and description are the function's own name and docstring unless
    given. Raises TypeError or ValueError for a function or option that does not do."""
    if not isinstance(approval, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"approval must be true or false, not {approval!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, not {timeout}")

    def make(function: Callable[P, R]) -> Tool[P, R]:
        label = name or getattr(function, "__name__", "")
        if not NAME.fullmatch(label):
            raise ValueError(f"{label!r} is no name for a tool: up to 64 letters, digits, '_' or '-'")
        if label in RESERVED:
            raise ValueError(f"{label!r} is no name for a tool: it is how a model {RESERVED[label][1]}")
        arguments, names, context = _arguments(label, function)
        return Tool(
            name=label,
            description=description or inspect.getdoc(function) or "",
            function=function,
            idempotent=idempotent,
            timeout=timeout,
            exclusive=exclusive,
            approval=approval,
            is_async=inspect.iscoroutinefunction(function),
            arguments=arguments,
            names=names,
            schema=_schema(label, arguments),
            context=context,
        )

    return make if function is None else make(function)


class _Schema(GenerateJsonSchema):
    """Without the titles that pydantic makes of names: they say nothing and cost tokens."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


def _arguments(label: str, function: Callable[..., object]) -> tuple[type[BaseModel], dict[str, str], str | None]:
    """The model of the arguments, the function's parameter name by field name, the parameter that takes the context.

    Fields have names of their own, so that a parameter may be called `json` or `copy`.
    """
    fields: dict[str, tuple[object, FieldInfo]] = {}
    names: dict[str, str] = {}
    context: str | None = None
    for parameter in _parameters(label, function):
        if parameter.annotation is ToolContext:
            if context is not None:
                raise TypeError(f"tool {label}: two parameters take the ToolContext")
            context = parameter.name
            continue
        field = f"argument_{len(names)}"
        names[field] = parameter.name
        given = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[field] = (parameter.annotation, Field(given, alias=parameter.name))
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    make = cast(Callable[..., type[BaseModel]], create_model)
    try:
        return make(label, __config__=config, **fields), names, context
    except PydanticUserError as error:
        raise TypeError(f"tool {label}: {_first_line(error)}") from error


def _parameters(label: str, function: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    except Exception as error:
        raise TypeError(f"tool {label}: its type hints cannot be read: {error}") from error
    for parameter in parameters:
        where = f"tool {label}: parameter {parameter.name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{where}: a tool's arguments have names; *, ** and positional-only ones do not do")
        if parameter.annotation is parameter.empty:
            raise TypeError(f"{where}: has no type hint")
        if isinstance(parameter.default, FieldInfo):
            raise TypeError(f"{where}: write Annotated[…, Field(…)] and a plain default")
    return parameters


def _schema(label: str, arguments: type[BaseModel]) -> dict[str, object]:
    try:
        schema = cast(dict[str, object], arguments.model_json_schema(schema_generator=_Schema))
    except PydanticUserError as error:
        raise TypeError(f"tool {label}: {_first_line(error)}") from error
    schema.pop("title", None)
    schema.pop("description", None)
    return schema


def _first_line(error: PydanticUserError) -> str:
    return error.message.partition("\n")[0]
