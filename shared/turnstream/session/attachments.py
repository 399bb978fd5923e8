"""What attachments are to a model: which are shown to it as text, which as images, which are only named, and how much
of them. The bytes are not here, only what follows from a reference and from them, always in the same way: a turn's
prompt begins as the one before it.
"""

import codecs
import re
import unicodedata
from collections.abc import Sequence
from typing import Final, Literal

from turnstream.session import frames
from turnstream.session.events import Attachment
from turnstream.session.messages import cut

NAME_MAX: Final = 128
"""Characters of a name."""
MANY: Final = 32
"""Attachments of one message."""
TEXT_MAX: Final = 64 * 1024
"""Bytes of UTF-8 of one text that the model sees; the rest is cut with a notice."""
SHOWN_MAX: Final = 16 * 1024 * 1024
"""Bytes of all texts and images of one prompt."""
SHOWN_STEP: Final = 8 * 1024 * 1024
"""Bytes by which the oldest are left out where there are more, so that a prompt seldom begins otherwise."""
IMAGES: Final = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})

Kind = Literal["text", "image", "reference"]

_TEXTS: Final = re.compile(
    r"text/.+|.+\+(json|xml|yaml)|application/"
    r"(json|jsonl|x-ndjson|json5|xml|xhtml|yaml|x-yaml|toml|csv|sql|graphql|javascript|x-javascript|typescript|x-sh"
    r"|x-httpd-php|x-tex|rtf)"
)
_CHARSET: Final = re.compile(r""";\s*charset\s*=\s*"?([A-Za-z0-9._-]{1,32})"?""", re.IGNORECASE)
_CHARSETS: Final = frozenset(
    {"utf-8", "utf-16", "utf-16-le", "utf-16-be", "iso8859-1", "iso8859-2", "iso8859-15", "cp1250", "cp1251", "cp1252"}
    | {"koi8-r", "shift_jis", "euc_jp", "gb2312", "gbk", "gb18030", "big5", "euc_kr"}
)
"""Python knows others that are no writing, or take for ever."""
_REFUSED: Final = frozenset({"Cc", "Cs", "Cn", "Zl", "Zp"})
_TURNS: Final = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""What turns the direction of writing: a name would look like another."""


def fault_of(name: str) -> str | None:
    """Why a name cannot be one, if so."""
    if not 0 < len(name) <= NAME_MAX:
        return f"1 to {NAME_MAX} characters"
    if name in (".", "..") or "/" in name or "\\" in name:
        return "a name is no path"
    if name != name.strip():
        return "white space around it"
    if "\ufffd" in name or any(unicodedata.category(one) in _REFUSED or one in _TURNS for one in name):
        return "characters that no name has"
    return None


def normal(name: str) -> str:
    """The one spelling of a name: what looks the same is the same (NFC)."""
    return unicodedata.normalize("NFC", name)


def kind_of(media_type: str) -> Kind:
    essence = media_type.partition(";")[0].strip().lower()
    if essence in IMAGES:
        return "image"
    return "text" if _TEXTS.fullmatch(essence) else "reference"


def weight(attachment: Attachment) -> int:
    """Bytes that it takes in a prompt, at most, beside its name."""
    match kind_of(attachment.media_type):
        case "text":
            return min(attachment.size, TEXT_MAX)
        case "image":
            return attachment.size
        case "reference":
            return 0


def left_out(attachments: Sequence[Attachment]) -> int:
    """How many of these, the oldest first, a prompt only names, for there is too much behind them."""
    weights = [weight(one) for one in attachments]
    over = sum(weights) - SHOWN_MAX
    least = -(-over // SHOWN_STEP) * SHOWN_STEP if over > 0 else 0
    count = 0
    while least > 0:
        least -= weights[count]
        count += 1
    return count


def image_type(data: bytes) -> str | None:
    """What kind of image the bytes are, whatever they are said to be: a provider refuses what is another."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def text_of(attachment: Attachment, data: bytes) -> str | None:
    """What the bytes say, None where they are no text after all."""
    charset = _CHARSET.search(attachment.media_type)
    text = _decoded(data, charset[1] if charset else "utf-8")
    return None if text is None or "\0" in text else cut(text, TEXT_MAX)


def _decoded(data: bytes, charset: str) -> str | None:
    try:
        codec = codecs.lookup(charset).name
        codec = "utf-8" if codec == "ascii" else codec
        return data.decode(codec).removeprefix("\ufeff") if codec in _CHARSETS else None
    except (LookupError, UnicodeError):
        return None


def named(attachment: Attachment, text: str | None = None, *, missing: bool = False) -> str:
    """How a model is told of it: its name, and what it says, or that it is not there any more."""
    about = {"name": attachment.name, "type": attachment.media_type, "size": str(attachment.size)}
    if missing:
        about["missing"] = "true"
    if text is None:
        return frames.empty("attachment", **about)
    return frames.wrapped("attachment", f"\n{frames.defused(text)}\n", **about)
