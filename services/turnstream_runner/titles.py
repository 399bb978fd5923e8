"""Finds a title for a session: one call of its model, without tools, on a digest of how it began.

It is nobody's turn: a title that cannot be had is no failure, and one that a person gives meanwhile stays.
"""

from collections.abc import Iterable
from contextlib import aclosing
from typing import Final

from turnstream.session.events import MessagePosted, ModelReplied, Recorded, RunEnded, Spec
from turnstream.session.history import UserMessage, text_of
from turnstream.telemetry import log
from turnstream_runner.models.port import TITLING, ModelError, ModelRequest, Reply, UnknownModel
from turnstream_runner.models.registry import Models

EVENTS: Final = 12
"""How many events of the session are told."""
SHARE: Final = 500
"""Characters of each."""
WORDS_MAX: Final = 8
LENGTH_MAX: Final = 64
"""Characters of a title."""


async def find(models: Models, spec: Spec, events: Iterable[Recorded], key: str) -> str | None:
    """A title by the model of a run; None if there is none to be had."""
    request = ModelRequest(
        model=spec.model,
        messages=(UserMessage(digest_of(events)),),
        instructions=TITLING,
        idempotency_key=key,
    )
    try:
        async with aclosing(models.resolve(spec.model).stream(request)) as items:
            async for item in items:
                if isinstance(item, Reply):
                    return title_of(item.text)
    except (ModelError, UnknownModel) as error:
        log.info("a session stays without a title of its agent's", key=key, error=error)
    except Exception:
        log.exception("the call for a title broke", key=key)
    return None


def digest_of(events: Iterable[Recorded]) -> str:
    """How a session began, a line each."""
    lines: list[str] = []
    for recorded, _ in zip(events, range(EVENTS), strict=False):
        match recorded.event.data:
            case MessagePosted() as posted:
                lines.append(f"user: {text_of(posted)[:SHARE]}")
            case ModelReplied() | RunEnded() as said if said.content:
                lines.append(f"assistant: {said.content[:SHARE]}")
            case _:
                pass
    return "\n".join(lines)


def title_of(text: str) -> str | None:
    """The first line of what a model said, at most eight words of it."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    words = line.strip().strip("\"'`*#.").split()[:WORDS_MAX]
    title = " ".join(words)
    while len(title) > LENGTH_MAX:
        words = words[:-1]
        title = " ".join(words) if words else title[:LENGTH_MAX]
    return title or None
