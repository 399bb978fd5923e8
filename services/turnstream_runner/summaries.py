"""Sums up the older part of a session: one call of its model, without tools, on a transcript of it.

It is nobody's turn: a summary that cannot be had is no failure, and then everything stays as it was said.
"""

from collections.abc import Iterable
from contextlib import aclosing
from typing import Final, assert_never

import msgspec

from turnstream.session import tokens
from turnstream.session.decide import SUMMARY_MAX
from turnstream.session.events import Spec, Usage
from turnstream.session.frames import defused
from turnstream.session.messages import AssistantMessage, Message, ToolMessage, UserMessage, cut
from turnstream.session.window import budget_of
from turnstream.telemetry import log
from turnstream_runner.models.port import SUMMARISING, ModelError, ModelRequest, Reply, UnknownModel
from turnstream_runner.models.registry import Models
from turnstream_runner.unicode import fit

SHARE: Final = 4096
"""Bytes of what one message says that are told, at most: half of it, again and again, until all of them fit."""
SHARE_MIN: Final = 128
NOTICE: Final = 100
"""Bytes of the notice that something was cut."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`text` is empty where none was to be had, for the reason in `fault`."""

    text: str = ""
    fault: str = ""
    usage: Usage = Usage()
    model: str = ""


def room(models: Models, spec: Spec) -> int:
    """Tokens that the model of a run takes of what it is to sum up."""
    try:
        context = models.context(spec.model)
    except UnknownModel:
        return 0
    budget = budget_of(spec.model, context, fixed=tokens.of_role(SUMMARISING, ()))
    return max(budget.tokens - budget.fixed - tokens.MESSAGE, 0)


async def find(models: Models, spec: Spec, messages: Iterable[Message], key: str) -> Summary:
    """A summary of the messages by the model of a run."""
    try:
        model = models.resolve(spec.model)
        request = ModelRequest(
            model=spec.model,
            messages=(UserMessage(transcript(messages, room(models, spec))),),
            instructions=SUMMARISING,
            idempotency_key=key,
        )
        async with aclosing(model.stream(request)) as items:
            async for item in items:
                if isinstance(item, Reply):
                    text = cut(fit(item.text).strip(), SUMMARY_MAX - NOTICE)
                    fault = "" if text else "the model said nothing"
                    return Summary(text=text, fault=fault, usage=item.usage, model=item.model)
    except (ModelError, UnknownModel) as error:
        return Summary(fault=str(error))
    except Exception as error:
        log.exception("the call for a summary broke", key=key)
        return Summary(fault=f"{type(error).__name__} in the call of model {spec.model}")
    return Summary(fault="the model ended without a reply")


def transcript(messages: Iterable[Message], most: int) -> str:
    """What was said and done, a paragraph each, in so many tokens at most: where it is too much, less of each message,
    and at last the oldest not at all."""
    said = [paragraph for message in messages for paragraph in _paragraphs(message)]
    share = SHARE
    while True:
        told = [f"{who}: {_told(who, text, share)}" for who, text in said]
        size = sum([tokens.of_text(paragraph) + 1 for paragraph in told])
        if size <= most or share <= SHARE_MIN:
            break
        share //= 2
    while told and size > most:
        size -= tokens.of_text(told.pop(0)) + 1
    return "\n\n".join(told)


def _told(who: str, text: str, share: int) -> str:
    """What people said is framed already where it has to be, unless it is cut in the middle of that."""
    short = cut(text, share)
    return short if who == "user" and short == text else defused(short)


def _paragraphs(message: Message) -> Iterable[tuple[str, str]]:
    match message:
        case UserMessage():
            yield "user", message.text
        case AssistantMessage():
            if message.text:
                yield "assistant", message.text
            yield from ((f"assistant calls {call.name}", call.arguments) for call in message.tool_calls)
        case ToolMessage():
            yield f"{message.name} returns", message.text
        case _:
            assert_never(message)
