"""What definitions are made of: the terms that an agent and the nodes of its graph both use."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Final, Literal, LiteralString, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    PositiveInt,
    StringConstraints,
    ValidationError,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from turnstream import schemas
from turnstream.agents.tool import NAME as TOOL_NAME
from turnstream.ids import NAME

COST_UNIT: Final = 1_000_000
"""What a run's costs are counted in, parts of the currency."""
TIMEOUT_MAX: Final = 366 * 86_400
"""Seconds."""
TEXT_MAX: Final = 1 << 20
"""Characters of a text. pydantic looks into a text only where something is to be measured, and one that is none (JSON
can escape half a character) has to be found where it is read: it has no digest."""
JSON_DEPTH: Final = 64
"""Levels of a JSON value in a definition."""
Place = tuple[str | int, ...]
"""Where something is, inside what is looked at."""


class Definition(BaseModel):
    """Immutable, and exactly as it is written: nothing is converted, no field is passed over."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        str_max_length=TEXT_MAX,
        serialize_by_alias=True,
    )


def fault(message: str) -> PydanticCustomError:
    return PydanticCustomError("fault", "{message}", {"message": message})


def refusal(
    faults: Iterable[tuple[Place, str]],
    besides: Sequence[InitErrorDetails] = (),
    kind: Literal["fault", "as_written"] = "fault",
) -> ValidationError:
    """What a validator raises that has found several things wrong, each at its own place. `as_written`: the places are
    those that people know, without the types of nodes that pydantic puts in."""
    lines = [
        InitErrorDetails(type=PydanticCustomError(kind, "{message}", {"message": message}), loc=place, input=None)
        for place, message in faults
    ]
    return ValidationError.from_exception_data("Definition", [*besides, *lines])


def lines_of(error: ValidationError) -> list[InitErrorDetails]:
    """What was wrong, to be raised again together with more."""
    return [
        InitErrorDetails(
            type=PydanticCustomError(cast(LiteralString, line["type"]), "{message}", {"message": line["msg"]}),
            loc=line["loc"],
            input=None,
        )
        for line in error.errors(include_url=False, include_context=False, include_input=False)
    ]


def _json(value: object) -> object:
    """Raises for what JSON could not hold: times of TOML, numbers that are none."""
    if faults := list(not_json(value)):
        raise refusal(faults)
    return value


def not_json(value: object, place: Place = (), levels: int = JSON_DEPTH) -> Iterable[tuple[Place, str]]:
    """What in a value JSON could not hold."""
    if not levels:
        yield place, f"more than {JSON_DEPTH} levels deep"
    elif isinstance(value, Mapping):
        for key, inner in cast("Mapping[object, object]", value).items():
            if not isinstance(key, str):
                yield place, f"{key!r} is no key of an object: it is not a text"
            elif not _is_unicode(key):
                yield place, f"{key!r} is no key of an object: it has characters that no text has"
            else:
                yield from not_json(inner, (*place, key), levels - 1)
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(cast("list[object]", value)):
            yield from not_json(inner, (*place, i), levels - 1)
    elif not (value is None or isinstance(value, (str, bool, int, float))):
        yield place, f"a {type(value).__name__} is nothing that JSON has"
    elif isinstance(value, float) and not math.isfinite(value):
        yield place, f"{value} is no number that JSON has"
    elif isinstance(value, str) and not _is_unicode(value):
        yield place, "has characters that no text has"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise fault("is not an object")
    return cast("dict[str, object]", _json(dict(cast("Mapping[str, object]", value))))


def _schema(value: object) -> dict[str, object]:
    schema = _object(value)
    if found := schemas.fault_of(schema):
        raise fault(f"is no schema that can be used: {found}")
    return schema


def _no_name_twice(names: Sequence[str]) -> Sequence[str]:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PydanticCustomError("twice", "named twice: {names}", {"names": ", ".join(twice)})
    return tuple(names)


Name = Annotated[str, StringConstraints(pattern=f"^{NAME.pattern}$")]
ToolName = Annotated[str, StringConstraints(pattern=f"^{TOOL_NAME.pattern}$")]
Said = Annotated[str, StringConstraints(min_length=1)]
"""A text that says something."""
Seconds = Annotated[float, Field(gt=0, le=TIMEOUT_MAX)]
Json = Annotated[object, PlainValidator(_json)]
JsonObject = Annotated[Mapping[str, object], PlainValidator(_object)]
Schema = Annotated[Mapping[str, object], PlainValidator(_schema)]
"""A JSON Schema, draft 2020-12, such as `turnstream.schemas` takes."""
Unique = AfterValidator(_no_name_twice)
Fixed = AfterValidator(cast("Callable[[Sequence[object]], tuple[object, ...]]", tuple))
"""However it was given, it is a tuple, and so equal to what is read back."""


class Params(Definition):
    """How the model is asked. What is absent is left to the provider; what the model's API does not have
    (`turnstream.agents.PARAMS`) is refused, and what the model itself does not take is refused by its provider."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: PositiveInt | None = None
    """Of one model call."""
    seed: int | None = None
    stop: Sequence[str] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    reasoning_summary: bool | None = None
    """Whether the provider is asked for its reasoning in words, where it would keep it to itself."""
    parallel_tool_calls: bool | None = None

    def given(self) -> dict[str, object]:
        return self.model_dump(exclude_none=True)


class Control(Definition):
    """What the model may do besides calling tools: ask a person (`conversation_ask_user`), have another agent do
    something (`delegate`), keep a checklist (`update_plan`)."""

    ask_user: bool = False
    delegate: bool = False
    plan: bool = False


class Limits(Definition):
    """What one run may use. `timeout` is in seconds, from the run's first start; `max_cost` is in the currency that the
    models' prices are in. `max_same_calls` calls of one tool with the same arguments end a run, and so do
    `max_same_denials` denials of them."""

    max_steps: PositiveInt = 32
    max_model_calls: PositiveInt = 32
    max_tool_calls: Annotated[int, Field(ge=0)] = 64
    max_tokens: PositiveInt | None = None
    timeout: Seconds = 600.0
    max_cost: Annotated[float, Field(ge=1 / COST_UNIT, le=1e9)] | None = None
    max_same_calls: Annotated[int, Field(ge=2)] = 5
    max_same_denials: Annotated[int, Field(ge=2)] = 3


def as_json(value: object) -> str:
    """The one way in which a value of a graph is written as text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
