"""What a tool of a server returned, as the text that the model sees.

Texts are shown as they are, one below the other; what cannot be shown as text is named, never dumped. Structured
content is shown as JSON, unless the text says the same already, as the protocol wants it to. A list is a list, also
where there is a text for each of its elements.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from turnstream_runner.tools.output import printed

if TYPE_CHECKING:
    from mcp.types import CallToolResult, ContentBlock


class Shown(NamedTuple):
    """`json`: the text is a JSON value."""

    text: str
    json: bool


def shown(result: "CallToolResult") -> Shown:
    """Raises `ValueError` for more than a result may have."""
    content, structured = result.content, result.structured_content
    texts = [block.text for block in content if _is_text(block)]
    value = _bare(structured)
    if isinstance(value, list) and value in (texts, _read(texts)):
        content, texts, structured = [block for block in content if not _is_text(block)], [], value
    parts = [_part(block) for block in content]
    if structured is not None and not (texts == [value] or _read(texts) in ([structured], [value])):
        parts.append(printed(structured))
    text = printed("\n".join(part for part in parts if part))
    return Shown(text, len(parts) == 1 and structured is not None and not isinstance(value, str))


def _bare(structured: object) -> object:
    """A server that has only a value to return, or a list of them, wraps it: `{"result": value}`."""
    return structured["result"] if isinstance(structured, dict) and set(structured) == {"result"} else structured


def _is_text(block: "ContentBlock") -> bool:
    return block.type == "text"


def _part(block: "ContentBlock") -> str:
    match block.type:
        case "text":
            return block.text
        case "image" | "audio":
            return f"[{block.type}, {block.mime_type}, {_bytes(block.data)} bytes: not shown]"
        case "resource_link":
            return f"[resource {block.name}: {block.uri}]"
        case "resource":
            inner = block.resource
            kind = inner.mime_type or "of unknown type"
            if (text := getattr(inner, "text", None)) is not None:
                return f"[resource {inner.uri}, {kind}]\n{text}"
            return f"[resource {inner.uri}, {kind}, {_bytes(inner.blob)} bytes: not shown]"
        case other:
            return f"[{other}: not shown]"


def _bytes(encoded: str) -> int:
    """How many bytes some base64 stands for."""
    return len(encoded) * 3 // 4 - encoded[-2:].count("=")


def _read(texts: Sequence[str]) -> list[Any] | None:
    """What the texts say in JSON."""
    try:
        return [json.loads(text) for text in texts]
    except (ValueError, RecursionError):
        return None
