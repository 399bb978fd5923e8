"""Carries out one effect towards the outside: a model call, a tool call. What comes of it is a fact; storing facts and
deciding what to do next are not done here.

A call always comes to a fact, also when it fails for good; only being cancelled leaves none.
"""

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from typing import assert_never

import msgspec

from turnstream.agents import ToolContext
from turnstream.ids import SessionKey, digest
from turnstream.session.events import Error, Failure, ModelReplied, RunEnded, ToolCall, Window
from turnstream.session.messages import Message
from turnstream.session.paths import place
from turnstream.session.plan import CallModel, CallTool
from turnstream.session.state import Run
from turnstream.telemetry import log, model_span
from turnstream.wire.live import Speech
from turnstream_runner.models.port import (
    Item,
    ModelError,
    ModelRequest,
    ReasoningDelta,
    Reply,
    Reset,
    Shown,
    TextDelta,
    UnknownModel,
)
from turnstream_runner.models.registry import Models
from turnstream_runner.results import Came, Result, result
from turnstream_runner.roles import Role
from turnstream_runner.tools.registry import Tools
from turnstream_runner.unicode import fit

NOTES = {
    "length": "no answer: the model hit the token limit; raise max_tokens",
    "content_filter": "no answer: the provider's content filter withheld it",
}
"""Why an answer is empty by rule, by how the model finished."""
NOTHING = "no answer: the model said nothing at all, asked again and again"
CALL_ID_MAX = 128


class Partial:
    """What a model call has said so far."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def clear(self) -> None:
        self._text.clear()
        self._reasoning.clear()

    def add_text(self, text: str) -> None:
        self._text.append(text)

    def add_reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def replace(self, reply: Reply) -> None:
        self._text, self._reasoning = [reply.text], [reply.reasoning]


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a run, or of a node of its graph. `shown` is what is attached to the messages, `opaque` what belongs
    to its earlier replies, `used` are the ids of the calls that they asked for: a run uses none twice."""

    key: SessionKey
    run: Run
    effect: CallModel
    model: str
    role: Role
    messages: tuple[Message, ...]
    shown: tuple[Shown, ...] = ()
    window: Window | None = None
    opaque: tuple[bytes, ...] = ()
    used: Collection[str]
    traceparent: str | None

    async def perform(self, models: Models, speech: Speech, partial: Partial) -> tuple[ModelReplied | RunEnded, bytes]:
        """The fact, and what the provider wants back with it. What the model says goes to `speech` and `partial` as it
        comes."""
        clock = asyncio.get_running_loop().time
        began = clock()
        run_id = self.key.run(self.run.n)
        model = self.model
        try:
            request = ModelRequest(
                model=model,
                messages=self.messages,
                shown=self.shown,
                opaque=self.opaque,
                instructions=self.role.instructions,
                tools=self.role.specs,
                params=self.role.params,
                idempotency_key=self.effect.key,
            )
            with model_span(model, self.key.session, run_id, self.traceparent):
                resolved = models.resolve(model, with_prices=self.run.limits.max_cost is not None)
                async with aclosing(resolved.stream(request)) as items:
                    reply = await self._listen(items, speech, partial)
        except ModelError as error:
            return self._failed(error.code, error.message, retryable=error.retryable), b""
        except UnknownModel as error:
            return self._failed("model_error", str(error)), b""
        except Exception as error:
            log.exception("a model call broke", account=self.key.account, session=self.key.session, run=run_id)
            return self._failed("internal_error", f"{type(error).__name__} in the call of model {model}"), b""
        return self._fact(reply, round((clock() - began) * 1000)), reply.opaque

    async def _listen(self, items: AsyncGenerator[Item, None], speech: Speech, partial: Partial) -> Reply:
        step, path = self.effect.step, self.effect.path
        partial.clear()
        try:
            async for item in items:
                match item:
                    case TextDelta():
                        partial.add_text(item.text)
                        await speech.say(step, "text", item.text, path)
                    case ReasoningDelta():
                        partial.add_reasoning(item.text)
                        await speech.say(step, "reasoning", item.text, path)
                    case Reset():
                        partial.clear()
                        await speech.mark(step, "reset", item.reason, path)
                    case Reply():
                        partial.replace(item)
                        await speech.finish(step, path)
                        return item
                    case _:
                        assert_never(item)
        finally:
            await speech.flush()
        raise ModelError("the model ended without a reply")

    def _fact(self, reply: Reply, duration: int) -> ModelReplied | RunEnded:
        run, effect = self.run, self.effect
        if reply.tool_calls:
            return ModelReplied(
                run=run.n,
                attempt=effect.attempt,
                **place(effect.path),
                step=effect.step,
                content=reply.text,
                reasoning=reply.reasoning,
                tool_calls=self._calls(reply),
                usage=reply.usage,
                finish=reply.finish,
                model=reply.model,
                duration=duration,
                window=self.window,
            )
        ended = RunEnded(
            run=run.n,
            attempt=effect.attempt,
            status="completed",
            content=reply.text,
            reasoning=reply.reasoning,
            note="" if reply.text else NOTES.get(reply.finish, ""),
            finish=reply.finish,
            step_usage=reply.usage,
            model=reply.model,
            duration=duration,
            window=self.window,
        )
        if reply.is_empty and run.policy.empty == "note":
            return msgspec.structs.replace(ended, note=NOTHING)
        if reply.is_empty:
            error = Error(code="empty_reply", message="the model said nothing at all, asked again and again")
            return msgspec.structs.replace(ended, status="failed", error=error)
        return ended

    def _calls(self, reply: Reply) -> tuple[ToolCall, ...]:
        # Nodes that work side by side do not know of each other's calls.
        prefix = f"{digest(self.effect.path.encode())[:6]}-" if self.effect.path else ""
        calls = distinct(reply.tool_calls, self.effect.step, self.used, prefix)
        return tuple([msgspec.structs.replace(call, asks=self.role.asks(call.name)) for call in calls])

    def _failed(self, code: Failure, message: str, *, retryable: bool = False) -> RunEnded:
        error = Error(code=code, message=message, retryable=retryable)
        return RunEnded(run=self.run.n, attempt=self.effect.attempt, status="failed", error=error, model=self.model)


def distinct(calls: Sequence[ToolCall], step: int, used: Collection[str], prefix: str = "") -> tuple[ToolCall, ...]:
    """The calls, each with an id of its own, behind the prefix: a provider may give none, or the same ones in every
    step."""
    seen = set(used)
    found: list[ToolCall] = []
    for number, call in enumerate(calls, 1):
        name = f"{prefix}{fit(call.id)}" if call.id and len(call.id) <= CALL_ID_MAX - len(prefix) else ""
        if not name or name in seen:
            name = f"{prefix}call-{step}-{number}"
        while name in seen:
            name += "-"
        seen.add(name)
        found.append(msgspec.structs.replace(call, id=name))
    return tuple(found)


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call of a run."""

    key: SessionKey
    effect: CallTool
    arguments: str

    async def perform(self, tools: Tools) -> Result:
        clock = asyncio.get_running_loop().time
        began = clock()
        effect = self.effect
        context = ToolContext(
            account=self.key.account,
            session=self.key.session,
            run=self.key.run(effect.run),
            attempt=effect.attempt,
            call_id=effect.call.id,
            idempotency_key=effect.key,
        )
        returned = await tools.call(effect.call.name, self.arguments, context)
        came = Came(
            status=returned.status,
            output=returned.output,
            json=returned.json,
            error=returned.error,
            duration=round((clock() - began) * 1000),
        )
        return result(effect, effect.call, came)
