"""Finds a title for a session: one call of its model, without tools, on a digest of how it began.

It is nobody's turn: a title that cannot be had is no failure, and one that a person gives meanwhile stays.
"""

import asyncio
from collections.abc import Iterable
from contextlib import aclosing
from typing import Final

from turnstream.session.events import (
    MessagePosted,
    ModelReplied,
    Recorded,
    RunEnded,
    RunStarted,
    RunSteered,
    Spec,
    Usage,
)
from turnstream.session.messages import UserMessage, text_of
from turnstream.telemetry import log
from turnstream_runner.models.port import TITLING, ModelError, ModelRequest, Reply, UnknownModel
from turnstream_runner.models.registry import Models
from turnstream_runner.unicode import fit

EVENTS: Final = 12
"""How many events of the session are told."""
SHARE: Final = 500
"""Characters of each."""
WORDS_MAX: Final = 8
LENGTH_MAX: Final = 64
"""Characters of a title."""
PATIENCE: Final = 60.0
"""Seconds that the call may take."""


async def find(models: Models, spec: Spec, events: Iterable[Recorded], key: str) -> tuple[str | None, Usage]:
    """A title by the model of a run, None if there is none to be had; and what the call used."""
    request = ModelRequest(
        model=spec.model,
        messages=(UserMessage(digest_of(events)),),
        instructions=TITLING,
        idempotency_key=key,
    )
    try:
        async with asyncio.timeout(PATIENCE), aclosing(models.resolve(spec.model).stream(request)) as items:
            async for item in items:
                if isinstance(item, Reply):
                    return title_of(item.text), item.usage
    except (ModelError, UnknownModel, TimeoutError) as error:
        log.info("a session stays without a title of its agent's", key=key, error=str(error) or type(error).__name__)
    except Exception:
        log.exception("the call for a title broke", key=key)
    return None, Usage()


def digest_of(events: Iterable[Recorded]) -> str:
    """How a session began, a line each: what its turns took and what they answered."""
    lines: list[str] = []
    said: dict[str, str] = {}
    for recorded, _ in zip(events, range(EVENTS), strict=False):
        match recorded.event.data:
            case MessagePosted() as posted:
                said[posted.message_id] = _told(posted)
            case RunStarted() | RunSteered() as takes:
                lines += [f"user: {said.pop(name)}" for name in takes.message_ids if name in said]
            case ModelReplied() | RunEnded() as replied if replied.content:
                lines.append(f"assistant: {replied.content[:SHARE]}")
            case _:
                pass
    return "\n".join(lines)


def _told(posted: MessagePosted) -> str:
    names = [f"[attached: {attachment.name}]" for attachment in posted.attachments]
    return " ".join([text_of(posted), *names])[:SHARE].strip()


def title_of(text: str) -> str | None:
    """The first line of what a model said, at most eight words of it."""
    line = next((line for line in fit(text).splitlines() if line.strip()), "")
    shown = "".join(character if character.isprintable() else " " for character in line)
    words = shown.strip().strip("\"'`*#.").split()[:WORDS_MAX]
    title = " ".join(words)
    while len(title) > LENGTH_MAX:
        words = words[:-1]
        title = " ".join(words) if words else title[:LENGTH_MAX]
    return title or None
