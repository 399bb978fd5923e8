"""OpenAI-compatible chat, through pydantic-ai's model classes: one streamed request a call. Nothing of pydantic-ai is
stored, and its agents and retries are not used.

A stream that ends without saying why it ended has broken: its text is not taken for an answer.
"""

import os
from collections.abc import AsyncGenerator, Mapping

from openai import AsyncOpenAI, Timeout
from pydantic_ai.direct import model_request_stream
from pydantic_ai.exceptions import (
    AgentRunError,
    ModelAPIError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelQuotaExceededError,
    ModelRequestRejectedError,
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
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider
from pydantic_core import to_json

from turnstream.ids import digest
from turnstream.session.events import ToolCall, Usage
from turnstream.settings import ModelSettings
from turnstream_runner.models import prompt
from turnstream_runner.models.port import Finish, Item, ModelError, ModelRequest, ReasoningDelta, Reply, TextDelta
from turnstream_runner.models.sent_back import taken
from turnstream_runner.shown import STRUCK, line, shown
from turnstream_runner.unicode import Joined, fit

CONNECT = 10.0
"""Seconds to connect in."""
NO_KEY = "none"
"""What is sent where a server at an address of its own needs no key: the client insists on one."""
FINISHES: Mapping[str | None, Finish] = {
    "stop": "stop",
    "length": "length",
    "tool_call": "tool_calls",
    "content_filter": "content_filter",
}
RETRYABLE = frozenset({408, 409, 425, 429})
CALLS_MAX = 256
"""Tools that one reply may ask for; the call is given up at the next, for what reads them takes the square of that."""


class OpenAIChat:
    """A model of the port, at one address with one key. Raises `ModelError` where there is no key."""

    def __init__(self, settings: ModelSettings, *, environment: Mapping[str, str] = os.environ) -> None:
        self._key = _key(settings, environment)
        timeout = Timeout(settings.silence, connect=CONNECT)
        # One retry layer, ours: the client's is off.
        self._client = AsyncOpenAI(api_key=self._key, base_url=settings.base_url, max_retries=0, timeout=timeout)
        provider = (
            OpenAICompatibleProvider("openai-compatible", openai_client=self._client)
            if settings.base_url
            else OpenAIProvider(openai_client=self._client)
        )
        profile = OpenAIModelProfile(openai_chat_streaming_requires_finish_reason=True)
        self._model = OpenAIChatModel(settings.model, provider=provider, profile=profile)
        self._source = digest(f"{settings.base_url or ''} {settings.model}".encode())

    async def close(self) -> None:
        await self._client.close()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Item, None]:
        text, reasoning = Joined(), Joined()
        calls = 0
        asked = model_request_stream(
            self._model,
            prompt.messages(request, system=self._model.system, source=self._source),
            model_settings=prompt.settings(request),
            model_request_parameters=prompt.parameters(request.tools),
            instrument=False,
        )
        try:
            async with asked as stream:
                async for event in stream:
                    calls += isinstance(event, PartStartEvent) and isinstance(event.part, ToolCallPart)
                    if calls > CALLS_MAX:
                        raise ModelError(f"the model asked for more than {CALLS_MAX} tools in one reply")
                    said, thought = _said(event)
                    if said and (piece := text.feed(said)):
                        yield TextDelta(piece)
                    if thought and (piece := reasoning.feed(thought)):
                        yield ReasoningDelta(piece)
                response = stream.get()
                reply = _reply(response, taken(response, self._source))
        except AgentRunError as error:
            raise self._error(error) from None
        if rest := text.end():
            yield TextDelta(rest)
        yield reply

    def _error(self, error: AgentRunError) -> ModelError:
        message = _message(error)
        if self._key != NO_KEY:
            message = message.replace(self._key, STRUCK)
        retry_after = error.retry_after if isinstance(error, ModelAPIError) else None
        code = "context_overflow" if isinstance(error, ModelContextWindowExceededError) else "model_error"
        return ModelError(message, code=code, retryable=_is_retryable(error), retry_after=retry_after)


def _key(settings: ModelSettings, environment: Mapping[str, str]) -> str:
    if settings.api_key and (key := settings.api_key.get_secret_value()):
        return key
    if settings.api_key_env and (key := environment.get(settings.api_key_env)):
        return key
    if settings.base_url:
        return NO_KEY
    where = f"the environment variable {settings.api_key_env}" if settings.api_key_env else "`api_key`"
    raise ModelError(f"there is no key for model {settings.model!r}: set {where}")


def _said(event: ModelResponseStreamEvent) -> tuple[str, str]:
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
    refusal = (response.provider_details or {}).get("refusal")
    usage = response.usage
    return Reply(
        text=text or fit(refusal or ""),
        reasoning=fit("".join(part.content for part in parts if isinstance(part, ThinkingPart))),
        tool_calls=tuple(_call(part) for part in parts if isinstance(part, ToolCallPart)),
        usage=Usage(
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            reasoning_tokens=usage.details.get("reasoning_tokens", 0),
            cached_tokens=usage.cache_read_tokens,
        ),
        finish=FINISHES.get(response.finish_reason, "other"),
        model=fit(response.model_name or ""),
        opaque=opaque,
    )


def _call(part: ToolCallPart) -> ToolCall:
    arguments = part.args if isinstance(part.args, str) else to_json(part.args or {}).decode()
    return ToolCall(id=fit(part.tool_call_id), name=fit(part.tool_name), arguments=fit(arguments))


def _is_retryable(error: AgentRunError) -> bool:
    match error:
        case ModelQuotaExceededError() | ModelRequestRejectedError():
            return False
        case ModelHTTPError():
            hint = error.provider_retry_hint
            return (error.status_code >= 500 or error.status_code in RETRYABLE) if hint is None else hint
        case _:
            return True


def _message(error: AgentRunError) -> str:
    if not isinstance(error, ModelHTTPError):
        return line(str(error)) or shown(error)
    body = error.body
    said = body.get("message") if isinstance(body, dict) else body
    return line(f"the provider answered {error.status_code}" + (f": {said}" if isinstance(said, str) else ""))
