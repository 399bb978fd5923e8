"""What a model is sent: messages of three kinds, and nothing of any provider's."""

import msgspec

from turnstream.session.events import Attachment, MessagePosted, ToolCall


class UserMessage(msgspec.Struct, frozen=True, tag="user", omit_defaults=True):
    """What came with it is there as references."""

    text: str
    attachments: tuple[Attachment, ...] = ()


class AssistantMessage(msgspec.Struct, frozen=True, tag="assistant"):
    text: str
    tool_calls: tuple[ToolCall, ...] = ()


class ToolMessage(msgspec.Struct, frozen=True, tag="tool"):
    """The result of the call `call_id` of the assistant message before it."""

    call_id: str
    name: str
    text: str
    is_error: bool = False


Message = UserMessage | AssistantMessage | ToolMessage


def text_of(posted: MessagePosted) -> str:
    return "\n".join([part.text for part in posted.content])


def cut(text: str, limit: int) -> str:
    """The first `limit` bytes of UTF-8 at most, cut between characters, and behind them a notice of what is missing."""
    if len(text) * 4 <= limit:
        return text
    data = text.encode()
    if len(data) <= limit:
        return text
    head = data[:limit].decode(errors="ignore")
    return f"{head}\n[cut: {len(data) - len(head.encode())} of {len(data)} bytes left out]"
