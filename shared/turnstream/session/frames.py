"""Frames: what we put around words in what a model sees, so that it knows whose they are and what they are.

    <message from="user:ann">…</message>      what one of several people says
    <notice from="…">…</notice>               what happened, and asks for nothing
    <user_action verb="…">…</user_action>     what a person did, and <user_action_result verb="…"> what came of it
    <child_result session="…" status="…">…    what came of a sub-agent that nobody waited for
    <misfit>…</misfit>                        why the answer before is none
    <summary>…</summary>                      what stands for everything before
    <plan_state>…</plan_state>                what is still to be done
    <window_context>…</window_context>        what the sender's window showed
    <attachment name="…" type="…" size="…">…  what came with a message

No word that is put into a frame can close it, and none outside of one can look as if it opened or closed one: whoever
shows a model what others say asks `looks_framed` first. For whoever adds a frame: its tag belongs into `TAGS`.
"""

import re
from html import escape
from typing import Final, Literal, get_args

Tag = Literal[
    "message",
    "notice",
    "user_action",
    "user_action_result",
    "child_result",
    "misfit",
    "summary",
    "plan_state",
    "window_context",
    "attachment",
]
TAGS: Final[tuple[Tag, ...]] = get_args(Tag)
_LOOKS: Final = re.compile(rf"<(?=\s*/?\s*({'|'.join(TAGS)})\b)", re.IGNORECASE)


def looks_framed(text: str) -> bool:
    """Whether it holds what looks as if it opened or closed a frame."""
    return _LOOKS.search(text) is not None


def defused(text: str) -> str:
    """The text with nothing in it that looks as if it opened or closed a frame, and else as it is: files hold markup
    and code, which nobody reads well when all of it is escaped."""
    return _LOOKS.sub("&lt;", text)


def frame(tag: Tag, text: str, **attributes: str) -> str:
    """The text in a frame, escaped. An attribute that is a word of Python has a `_` behind it."""
    return wrapped(tag, escape(text, quote=False), **attributes)


def wrapped(tag: Tag, text: str, **attributes: str) -> str:
    """The same with a text that is safe as it is."""
    return f"<{tag}{_said(attributes)}>{text}</{tag}>"


def empty(tag: Tag, **attributes: str) -> str:
    """A frame with nothing in it but what it says itself."""
    return f"<{tag}{_said(attributes)}/>"


def _said(attributes: dict[str, str]) -> str:
    return "".join(f' {name.rstrip("_")}="{escape(value)}"' for name, value in attributes.items())
