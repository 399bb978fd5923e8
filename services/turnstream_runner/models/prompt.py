"""Our messages and tools in pydantic-ai's terms. The same messages always give the same request, and more of them give
the same beginning, so that a provider's prompt cache hits. Reasoning is not in them: what a provider wants back within
a run is in the request's opaque items (`sent_back.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic_ai.messages import (
    BinaryContent,
    ModelMessage,
    ModelRequestPart,
    ModelResponse,
    ModelResponsePart,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserContent,
    UserPromptPart,
)
from pydantic_ai.messages import ModelRequest as Prompt
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModelSettings
from pydantic_ai.tools import ToolDefinition

from turnstream.ids import digest
from turnstream.session import attachments
from turnstream.session.events import Attachment
from turnstream.session.messages import AssistantMessage, ToolMessage, UserMessage
from turnstream_runner.models.port import ModelRequest, Shown, ToolSpec
from turnstream_runner.models.sent_back import SentBack, read


def messages(request: ModelRequest, *, system: str = "", source: str = "") -> list[ModelMessage]:
    """What stands between two answers of the model is one prompt; instructions come first of all. `system` is what
    pydantic-ai calls the provider, `source` where opaque items have to be from."""
    found: list[ModelMessage] = []
    pending: list[ModelRequestPart] = [SystemPromptPart(request.instructions)] if request.instructions else []
    replies = sum(isinstance(message, AssistantMessage) for message in request.messages)
    opaque = iter((b"",) * (replies - len(request.opaque)) + request.opaque)
    attached = iter(request.attached())
    for message in request.messages:
        match message:
            case UserMessage():
                pending.append(UserPromptPart(_prompt(*next(attached))))
            case ToolMessage(call_id=call_id, name=name, text=text):
                pending.append(ToolReturnPart(tool_name=name, content=text, tool_call_id=call_id))
            case AssistantMessage():
                if pending:
                    found.append(Prompt(pending))
                    pending = []
                found.append(ModelResponse(_said(message, read(next(opaque), source), system)))
    if pending:
        found.append(Prompt(pending))
    return found


def _prompt(message: UserMessage, attached: Sequence[tuple[Attachment, Shown]]) -> str | list[UserContent]:
    """What a person says, and then what came with it: texts as one, images where they stand."""
    parts: list[UserContent] = []
    texts = [message.text] if message.text else []
    for attachment, shown in attached:
        texts.append(attachments.named(attachment, shown.text, missing=shown.missing))
        if shown.image:
            image = BinaryContent(data=shown.image.data, media_type=shown.image.media_type)
            parts += ["\n".join(texts), image]
            texts = []
    text = "\n".join(texts)
    return [*parts, text] if parts and text else parts or text


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


def _said(message: AssistantMessage, back: SentBack | None, system: str) -> Sequence[ModelResponsePart]:
    thinking = back.thinking if back else {}
    parts: list[ModelResponsePart] = [
        ThinkingPart(text, id=field, provider_name=system) for field, text in thinking.items()
    ]
    parts += [TextPart(message.text)] if message.text else []
    for number, call in enumerate(message.tool_calls):
        details = back.calls[number] if back and number < len(back.calls) else None
        part = ToolCallPart(call.name, call.arguments, call.id)
        if details:
            part = replace(part, provider_name=system, provider_details=details)
        parts.append(part)
    return parts
