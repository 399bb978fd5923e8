"""Our messages and tools in pydantic-ai's terms. The same messages always give the same request, and more of them give
the same beginning, so that a provider's prompt cache hits. Reasoning is not in them: it goes back to no provider.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_ai.messages import (
    ModelMessage,
    ModelRequestPart,
    ModelResponse,
    ModelResponsePart,
    SystemPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.messages import ModelRequest as Prompt
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModelSettings
from pydantic_ai.tools import ToolDefinition

from turnstream.ids import digest
from turnstream.session.history import AssistantMessage, ToolMessage, UserMessage
from turnstream_runner.models.port import ModelRequest, ToolSpec


def messages(request: ModelRequest) -> list[ModelMessage]:
    """What stands between two answers of the model is one prompt; instructions come first of all."""
    found: list[ModelMessage] = []
    pending: list[ModelRequestPart] = [SystemPromptPart(request.instructions)] if request.instructions else []
    for message in request.messages:
        match message:
            case UserMessage(text=text):
                pending.append(UserPromptPart(text))
            case ToolMessage(call_id=call_id, name=name, text=text):
                pending.append(ToolReturnPart(tool_name=name, content=text, tool_call_id=call_id))
            case AssistantMessage():
                if pending:
                    found.append(Prompt(pending))
                    pending = []
                found.append(ModelResponse(_said(message)))
    if pending:
        found.append(Prompt(pending))
    return found


def parameters(tools: Iterable[ToolSpec]) -> ModelRequestParameters:
    definitions = [
        ToolDefinition(name=tool.name, description=tool.description, parameters_json_schema=tool.schema)
        for tool in tools
    ]
    return ModelRequestParameters(function_tools=definitions)


def settings(request: ModelRequest) -> OpenAIChatModelSettings:
    """The provider sees a digest of the step's key, not which session it is."""
    found = OpenAIChatModelSettings()
    if request.idempotency_key:
        found["extra_headers"] = {"Idempotency-Key": digest(request.idempotency_key.encode())}
    _take(found, request.params)
    return found


def _take(found: OpenAIChatModelSettings, params: Mapping[str, Any]) -> None:
    for name, value in params.items():
        match name:
            case "temperature" | "top_p" | "max_tokens" | "seed" | "presence_penalty" | "frequency_penalty":
                found[name] = value
            case "parallel_tool_calls":
                found["parallel_tool_calls"] = value
            case "stop":
                found["stop_sequences"] = list(value)
            case "reasoning_effort":
                found["openai_reasoning_effort"] = value
            case _:
                raise ValueError(f"a model is not asked with {name!r}")


def _said(message: AssistantMessage) -> Sequence[ModelResponsePart]:
    parts: list[ModelResponsePart] = [TextPart(message.text)] if message.text else []
    parts += [ToolCallPart(call.name, call.arguments, call.id) for call in message.tool_calls]
    return parts
