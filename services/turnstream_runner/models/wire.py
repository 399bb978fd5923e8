"""A model of the port over one of pydantic-ai's model classes: one streamed request a call. Nothing of pydantic-ai is
stored, and its agents and retries are not used. What differs from one provider's interface to the next is in
`openai.py` and `anthropic.py`.

A stream that ends without saying why it ended has broken: its text is not taken for an answer.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from typing import ClassVar, Final

from pydantic_ai.direct import model_request_stream
from pydantic_ai.exceptions import (
    AgentRunError,
    ModelAPIError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelQuotaExceededError,
    ModelRequestRejectedError,
    UserError,
)
from pydantic_ai.messages import (
    ModelResponse,
    ModelResponseStreamEvent,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ThinkingPart,
    ThinkingPartDelta,
    ToolCallPart,
)
from pydantic_ai.models import Model
from pydantic_ai.settings import ModelSettings as Said
from pydantic_core import to_json

from turnstream.agents import unsaid
from turnstream.ids import digest
from turnstream.session.events import ToolCall, Usage
from turnstream.settings import ModelSettings
from turnstream_runner.models import prompt
from turnstream_runner.models.port import Finish, Item, ModelError, ModelRequest, ReasoningDelta, Reply, TextDelta
from turnstream_runner.models.sent_back import taken
from turnstream_runner.shown import STRUCK, line, shown
from turnstream_runner.unicode import Joined, fit

CONNECT: Final = 10.0
"""Seconds to connect in."""
NO_KEY: Final = "none"
"""What is sent where a server at an address of its own needs no key: the clients insist on one."""
FINISHES: Final[Mapping[str | None, Finish]] = {
    "stop": "stop",
    "length": "length",
    "tool_call": "tool_calls",
    "content_filter": "content_filter",
}
RETRYABLE: Final = frozenset({408, 409, 425, 429})
CALLS_MAX: Final = 256
"""Tools that one reply may ask for; the call is given up at the next, for what reads them takes the square of that."""


class Wire(ABC):
    """A model at one address with one key, which the error messages are kept clear of."""

    manner: ClassVar[prompt.Manner] = prompt.Manner()
    overflows: ClassVar[tuple[str, ...]] = ()
    """How else the provider says that a prompt is too long."""

    def __init__(self, model: Model, settings: ModelSettings, key: str) -> None:
        self._model = model
        self._settings = settings
        self._key = key
        self._source = digest(f"{settings.wire} {settings.base_url or ''} {settings.model}".encode())

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def _said(self, request: ModelRequest) -> Said:
        """How the model is asked."""

    @abstractmethod
    def _keeps(self, part: ThinkingPart) -> bool:
        """Whether the provider wants this back in later calls of the run."""

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Item, None]:
        if fault := unsaid(self._settings, request.params):
            raise ModelError(f"{fault}: leave it out of the agent's `params`, or ask another model")
        text, reasoning = Joined(), Joined()
        calls = 0
        asked = model_request_stream(
            self._model,
            prompt.messages(request, self.manner, system=self._model.system, source=self._source),
            model_settings=self._said(request),
            model_request_parameters=prompt.parameters(request.tools),
            instrument=False,
        )
        try:
            async with asked as stream:
                async for event in stream:
                    calls += isinstance(event, PartStartEvent) and isinstance(event.part, ToolCallPart)
                    if calls > CALLS_MAX:
                        raise ModelError(f"the model asked for more than {CALLS_MAX} tools in one reply")
                    said, thought = _heard(event)
                    if said and (piece := text.feed(said)):
                        yield TextDelta(piece)
                    if thought and (piece := reasoning.feed(thought)):
                        yield ReasoningDelta(piece)
                reply = self._reply(stream.get())
        except (AgentRunError, UserError) as error:
            raise self._error(error) from None
        if rest := text.end():
            yield TextDelta(rest)
        yield reply

    def _reply(self, response: ModelResponse) -> Reply:
        details = response.provider_details or {}
        if response.finish_reason == "error" or not (response.finish_reason or details.get("finish_reason")):
            raise ModelError("the provider's stream ended before its answer did", retryable=True)
        return _reply(response, taken(response, self._source, self._keeps))

    def _error(self, error: AgentRunError | UserError) -> ModelError:
        message = _message(error)
        if self._key != NO_KEY:
            message = message.replace(self._key, STRUCK)
        too_long = isinstance(error, ModelContextWindowExceededError) or (
            isinstance(error, ModelHTTPError) and any(words in message for words in self.overflows)
        )
        return ModelError(
            message,
            code="context_overflow" if too_long else "model_error",
            retryable=not too_long and _is_retryable(error),
            retry_after=error.retry_after if isinstance(error, ModelAPIError) else None,
        )


def key_of(settings: ModelSettings, environment: Mapping[str, str]) -> str:
    """Raises `ModelError` where there is none."""
    if settings.api_key and (key := settings.api_key.get_secret_value()):
        return key
    if settings.api_key_env and (key := environment.get(settings.api_key_env)):
        return key
    if settings.base_url:
        return NO_KEY
    where = f"the environment variable {settings.api_key_env}" if settings.api_key_env else "`api_key`"
    raise ModelError(f"there is no key for model {settings.model!r}: set {where}")


def _heard(event: ModelResponseStreamEvent) -> tuple[str, str]:
    """What an event adds to the text and to the reasoning."""
    match event:
        case PartStartEvent(part=TextPart(content=content)):
            return content, ""
        case PartDeltaEvent(delta=TextPartDelta(content_delta=content)):
            return content, ""
        case PartStartEvent(part=ThinkingPart(content=content)):
            return "", content
        case PartDeltaEvent(delta=ThinkingPartDelta(content_delta=content)):
            return "", content or ""
        case _:
            return "", ""


def _reply(response: ModelResponse, opaque: bytes) -> Reply:
    parts = response.parts
    text = fit("".join(part.content for part in parts if isinstance(part, TextPart)))
    calls = tuple(_call(part) for part in parts if isinstance(part, ToolCallPart))
    refusal = (response.provider_details or {}).get("refusal")
    finish = FINISHES.get(response.finish_reason, "other")
    usage = response.usage
    return Reply(
        text=text or fit(refusal or ""),
        reasoning=fit("".join(part.content for part in parts if isinstance(part, ThinkingPart))),
        tool_calls=calls,
        usage=Usage(
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            reasoning_tokens=usage.details.get("reasoning_tokens", 0) or usage.details.get("thinking_tokens", 0),
            cached_tokens=usage.cache_read_tokens,
        ),
        finish="tool_calls" if calls and finish == "stop" else finish,
        model=fit(response.model_name or ""),
        opaque=opaque,
        caching_tokens=usage.cache_write_tokens,
    )


def _call(part: ToolCallPart) -> ToolCall:
    arguments = part.args if isinstance(part.args, str) else to_json(part.args or {}).decode()
    return ToolCall(id=fit(part.tool_call_id), name=fit(part.tool_name), arguments=fit(arguments))


def _is_retryable(error: AgentRunError | UserError) -> bool:
    match error:
        case ModelQuotaExceededError() | ModelRequestRejectedError() | UserError():
            return False
        case ModelHTTPError():
            hint = error.provider_retry_hint
            return (error.status_code >= 500 or error.status_code in RETRYABLE) if hint is None else hint
        case _:
            return True


def _message(error: AgentRunError | UserError) -> str:
    if not isinstance(error, ModelHTTPError):
        return line(str(error)) or shown(error)
    body = error.body.get("error", error.body) if isinstance(error.body, dict) else error.body
    said = body.get("message") if isinstance(body, dict) else body
    return line(f"the provider answered {error.status_code}" + (f": {said}" if isinstance(said, str) else ""))
