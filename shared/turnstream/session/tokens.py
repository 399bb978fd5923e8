"""How many tokens something has, where no provider has counted them: rather too many than too few.

Of English a token has about four bytes, of code and numbers about three, of other scripts fewer; what looks random
(keys, base64) may have more than is estimated here. A provider's own count replaces the estimate as soon as there is
one (`window.py`).
"""

from collections.abc import Iterable
from typing import Final

from turnstream.session import attachments
from turnstream.session.events import Attachment
from turnstream.session.messages import AssistantMessage, Message, UserMessage

MESSAGE: Final = 8
"""What a message takes beside its text."""
CALL: Final = 16
"""The same of a tool call, or of the definition of a tool."""


ATTACHED: Final = 48
"""The same of what is attached to a message."""
IMAGE: Final = 1_600
"""What an image takes, however large: providers make it smaller."""


def of_text(text: str) -> int:
    """A token for three bytes of ASCII, for two bytes of other characters, for one byte of those that have four."""
    if text.isascii():
        return (len(text) + 2) // 3
    size = len(text.encode(errors="replace"))
    plain = len(text.encode("ascii", "ignore"))
    astral = len(text.encode("utf-16-le", "replace")) // 2 - len(text)
    return (plain + 2) // 3 + (size - plain + 1) // 2 + 2 * astral


def of_message(message: Message) -> int:
    beside = 0
    if isinstance(message, AssistantMessage):
        beside = sum([CALL + of_text(call.name) + of_text(call.arguments) for call in message.tool_calls])
    elif isinstance(message, UserMessage):
        beside = sum(map(_of_attachment, message.attachments))
    return MESSAGE + of_text(message.text) + beside


def _of_attachment(attachment: Attachment) -> int:
    named = ATTACHED + of_text(attachment.name)
    if attachments.kind_of(attachment.media_type) == "image":
        return named + IMAGE
    return named + attachments.weight(attachment) // 2  # in whatever script it is


def of_messages(messages: Iterable[Message]) -> int:
    return sum(map(of_message, messages))


def of_role(instructions: str, tools: Iterable[tuple[str, str, str]]) -> int:
    """What comes with every prompt: instructions, and of each tool its name, description and schema (JSON text)."""
    defined = [CALL + of_text(name) + of_text(about) + of_text(schema) for name, about, schema in tools]
    return (MESSAGE + of_text(instructions) if instructions else 0) + sum(defined)
