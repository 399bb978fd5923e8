"""What an OpenAI-compatible provider wants back with a reply in later calls of the same run: reasoning that came in a
field of its own (`reasoning_content` of DeepSeek, `reasoning` of vLLM and Ollama), and what stood at a tool call beside
the call (`extra_content`: the thought signatures of Gemini). Reasoning that came as text between tags is not of this
kind.

As bytes it names where it came from: another address or model is not sent it.
"""

from typing import Any

import msgspec
from pydantic_ai.messages import ModelResponse, ThinkingPart, ToolCallPart

TAGGED = "content"
"""What pydantic-ai calls the field of reasoning that came between tags."""


class SentBack(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`thinking` is by field; `calls` holds the details of each tool call, in their order."""

    source: str
    thinking: dict[str, str] = {}
    calls: tuple[dict[str, Any] | None, ...] = ()


def taken(response: ModelResponse, source: str) -> bytes:
    """What a response came with; empty for nothing."""
    thinking: dict[str, str] = {}
    for part in response.parts:
        if isinstance(part, ThinkingPart) and part.id and part.id != TAGGED and part.content:
            thinking[part.id] = thinking.get(part.id, "") + part.content
    calls = tuple(part.provider_details for part in response.parts if isinstance(part, ToolCallPart))
    if not thinking and not any(calls):
        return b""
    try:
        return msgspec.json.encode(SentBack(source=source, thinking=thinking, calls=calls if any(calls) else ()))
    except UnicodeEncodeError:  # half a character, which nobody could be sent
        return b""


def read(data: bytes, source: str) -> SentBack | None:
    """None for what came from elsewhere, or cannot be read."""
    if not data:
        return None
    try:
        found = msgspec.json.decode(data, type=SentBack)
    except msgspec.MsgspecError:
        return None
    return found if found.source == source else None
