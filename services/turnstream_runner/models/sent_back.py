"""What a provider wants back with a reply in later calls of the same run: its reasoning, where that came in a field of
its own, encrypted or signed, and what stood beside its texts and tool calls (ids, phases, thought signatures), in the
order that it all came in.

As bytes it names where it came from: another address, interface or model is not sent it.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from pydantic_ai.messages import ModelResponse, TextPart, ThinkingPart, ToolCallPart

from turnstream_runner.unicode import fit

TAGGED = "content"
"""What pydantic-ai calls the field of reasoning that came between tags."""


class Thought(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="thought"):
    text: str = ""
    id: str | None = None
    signature: str | None = None
    details: dict[str, Any] | None = None


class Text(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="text"):
    """So many characters of the reply's text."""

    length: int
    id: str | None = None
    details: dict[str, Any] | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="call"):
    """The next of the reply's tool calls."""

    id: str | None = None
    details: dict[str, Any] | None = None


class SentBack(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    parts: tuple[Thought | Text | Call, ...]

    @property
    def has_thoughts(self) -> bool:
        return any(isinstance(part, Thought) for part in self.parts)

    def is_of(self, text: str, calls: int) -> bool:
        """Whether its parts make up a reply of this text and so many calls."""
        lengths = sum(part.length for part in self.parts if isinstance(part, Text))
        return lengths == len(text) and calls == sum(isinstance(part, Call) for part in self.parts)


def taken(response: ModelResponse, source: str, keeps: Callable[[ThinkingPart], bool]) -> bytes:
    """What a response came with; empty for nothing that is wanted back."""
    parts: list[Thought | Text | Call] = []
    for part in response.parts:
        match part:
            case ThinkingPart() if keeps(part):
                details = part.provider_details
                parts.append(Thought(text=part.content, id=part.id, signature=part.signature, details=details))
            case TextPart():
                phase = (part.provider_details or {}).get("phase")
                details = {"phase": phase} if phase else None
                parts.append(Text(length=len(fit(part.content)), id=part.id, details=details))
            case ToolCallPart():
                parts.append(Call(id=part.id, details=part.provider_details))
            case _:
                pass
    if not any(isinstance(part, Thought) or part.details for part in parts):
        return b""
    try:
        return msgspec.json.encode(SentBack(source=source, parts=tuple(parts)))
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
