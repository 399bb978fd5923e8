"""Our messages and tools in pydantic-ai's terms. The same messages always give the same request, and more of them give
the same beginning, so that a provider's prompt cache hits. Reasoning is not in them: what a provider wants back within
a run is in the request's opaque items (`sent_back.py`).

A conversation may have been with other models before. So ids of tool calls are spelt as every provider takes them, and
none is there twice.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

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
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from turnstream.ids import digest
from turnstream.session import attachments
from turnstream.session.events import Attachment
from turnstream.session.messages import AssistantMessage, ToolMessage, UserMessage
from turnstream_runner.models.port import ModelRequest, Shown, ToolSpec
from turnstream_runner.models.sent_back import Call, SentBack, Text, Thought, read

_CALL_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")
"""What all take: Anthropic these characters alone, OpenAI's chat completions no more of them."""


class Manner(NamedTuple):
    """What providers differ in. `blanks`: a text may be blank. `failures`: a tool's failure is said beside its
    result."""

    blanks: bool = True
    failures: bool = False


def messages(request: ModelRequest, manner: Manner, *, system: str, source: str) -> list[ModelMessage]:
    """What stands between two answers of the model is one prompt; instructions come first of all. `system` is what
    pydantic-ai calls the provider, `source` where opaque items have to be from."""
    found: list[ModelMessage] = []
    pending: list[ModelRequestPart] = [SystemPromptPart(request.instructions)] if request.instructions else []
    replies = sum(isinstance(message, AssistantMessage) for message in request.messages)
    opaque = iter((b"",) * (replies - len(request.opaque)) + request.opaque)
    attached = iter(request.attached())
    ids = _CallIds()
    for message in request.messages:
        match message:
            case UserMessage():
                pending.append(UserPromptPart(_prompt(*next(attached))))
            case ToolMessage():
                pending.append(_returned(message, ids.of(message.call_id), manner))
            case AssistantMessage():
                back = read(next(opaque), source)
                text = message.text if manner.blanks or message.text.strip() else ""
                if not text and not message.tool_calls:
                    continue
                if pending:
                    found.append(Prompt(pending))
                    pending = []
                calls = [ToolCallPart(call.name, call.arguments, ids.new(call.id)) for call in message.tool_calls]
                found.append(ModelResponse(list(_said(text, calls, back, system))))
    if pending:
        found.append(Prompt(pending))
    return found


class _CallIds:
    """Ids as they are sent: each is its own where it can be."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._latest: dict[str, str] = {}

    def new(self, name: str) -> str:
        sent, again = name, 0
        while not _CALL_ID.fullmatch(sent) or sent in self._used:
            sent = f"call_{digest(f'{again} {name}'.encode())[:24]}"
            again += 1
        self._used.add(sent)
        self._latest[name] = sent
        return sent

    def of(self, name: str) -> str:
        """The call of this name that was the last."""
        return self._latest.get(name, name)


def _returned(message: ToolMessage, call_id: str, manner: Manner) -> ToolReturnPart:
    text = message.text if manner.blanks or message.text.strip() else []
    outcome = "failed" if message.is_error and manner.failures else "success"
    return ToolReturnPart(tool_name=message.name, content=text, tool_call_id=call_id, outcome=outcome)


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


def settings(request: ModelRequest) -> ModelSettings:
    """What is said in the same way everywhere. The provider sees a digest of the step's key, not which session it
    is."""
    found = ModelSettings()
    if request.idempotency_key:
        found["extra_headers"] = {"Idempotency-Key": digest(request.idempotency_key.encode())}
    for name in request.params.keys() & _ALIKE:
        found[name] = request.params[name]
    if "stop" in request.params:
        found["stop_sequences"] = list(request.params["stop"])
    return found


_ALIKE: Final = frozenset(
    {"temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "parallel_tool_calls"}
)


def _said(text: str, calls: Sequence[ToolCallPart], back: SentBack | None, system: str) -> Iterator[ModelResponsePart]:
    """A reply, with what it came with where that is known: in its order, or first of all where the rest of the reply is
    not as it was."""
    is_whole = back is not None and back.is_of(text, len(calls))
    parts = back.parts if back else ()
    at = 0
    rest = iter(calls)
    for part in parts:
        match part:
            case Thought():
                yield ThinkingPart(
                    part.text,
                    id=part.id,
                    signature=part.signature,
                    provider_name=system,
                    provider_details=part.details,
                )
            case Text(length=length) if is_whole:
                if length:
                    yield TextPart(
                        text[at : at + length], id=part.id, provider_name=system, provider_details=part.details
                    )
                at += length
            case Call() if is_whole:
                call = next(rest)
                yield ToolCallPart(
                    call.tool_name,
                    call.args,
                    call.tool_call_id,
                    id=part.id,
                    provider_name=system,
                    provider_details=part.details,
                )
            case _:
                pass
    if text[at:]:
        yield TextPart(text[at:])
    yield from rest
