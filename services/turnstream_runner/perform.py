"""Carries out one effect towards the outside: a model call, a tool call. What comes of it is a fact; storing facts and
deciding what to do next are not done here.

A call always comes to a fact, also when it fails for good; only being cancelled leaves none.
"""

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from typing import assert_never

import msgspec

from turnstream.agents import Agent, Agents, ToolContext
from turnstream.ids import SessionKey
from turnstream.session.events import Error, Failure, ModelReplied, RunEnded, Spec, ToolCall, ToolReturned
from turnstream.session.history import Message
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
    TextDelta,
    ToolSpec,
    UnknownModel,
)
from turnstream_runner.models.registry import Models
from turnstream_runner.tools.registry import Tools
from turnstream_runner.unicode import fit

NOTES = {
    "length": "no answer: the model hit the token limit; raise max_tokens",
    "content_filter": "no answer: the provider's content filter withheld it",
}
"""Why an answer is empty by rule, by how the model finished."""
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


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """An agent as this runner carries it out: with its tools, and with what the model is told of them."""

    agent: Agent
    tools: Tools
    specs: tuple[ToolSpec, ...]
    params: dict[str, object]


class Roles:
    """The role of each agent that a run has pinned. A definition never changes, so each is made once."""

    def __init__(self, agents: Agents, tools: Tools) -> None:
        self._agents = agents
        self._tools = tools
        self._roles: dict[tuple[str, str], Role] = {}

    def get(self, spec: Spec) -> Role | None:
        """None: this runner does not have the very agent that the run has pinned."""
        role = self._roles.get((spec.agent, spec.digest))
        if role is None and (agent := self._agents.get(spec.agent, spec.digest)):
            tools = self._tools.only(agent.tool_names)
            role = Role(agent=agent, tools=tools, specs=tools.specs(), params=agent.params.given())
            self._roles[spec.agent, spec.digest] = role
        return role


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a run. `used` are the ids of the calls of earlier steps: a run uses none twice."""

    key: SessionKey
    run: Run
    effect: CallModel
    role: Role
    messages: tuple[Message, ...]
    used: Collection[str]
    traceparent: str | None

    async def perform(self, models: Models, speech: Speech, partial: Partial) -> ModelReplied | RunEnded:
        """What the model says goes to `speech` and `partial` as it comes."""
        clock = asyncio.get_running_loop().time
        began = clock()
        run_id = self.key.run(self.run.n)
        model = self.run.spec.model
        try:
            request = ModelRequest(
                model=model,
                messages=self.messages,
                instructions=self.role.agent.instructions,
                tools=self.role.specs,
                params=self.role.params,
                idempotency_key=self.effect.key,
            )
            with model_span(model, self.key.session, run_id, self.traceparent):
                async with aclosing(models.resolve(model).stream(request)) as items:
                    reply = await self._listen(items, speech, partial)
        except ModelError as error:
            return self._failed(error.code, error.message, retryable=error.retryable)
        except UnknownModel as error:
            return self._failed("model_error", str(error))
        except Exception as error:
            log.exception("a model call broke", account=self.key.account, session=self.key.session, run=run_id)
            return self._failed("internal_error", f"{type(error).__name__} in the call of model {model}")
        return self._fact(reply, round((clock() - began) * 1000))

    async def _listen(self, items: AsyncGenerator[Item, None], speech: Speech, partial: Partial) -> Reply:
        step = self.effect.step
        partial.clear()
        try:
            async for item in items:
                match item:
                    case TextDelta():
                        partial.add_text(item.text)
                        await speech.say(step, "text", item.text)
                    case ReasoningDelta():
                        partial.add_reasoning(item.text)
                        await speech.say(step, "reasoning", item.text)
                    case Reset():
                        partial.clear()
                        await speech.mark(step, "reset", item.reason)
                    case Reply():
                        partial.replace(item)
                        await speech.finish(step)
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
                step=effect.step,
                content=reply.text,
                reasoning=reply.reasoning,
                tool_calls=distinct(reply.tool_calls, effect.step, self.used),
                usage=reply.usage,
                finish=reply.finish,
                model=reply.model,
                duration=duration,
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
        )
        if reply.is_empty:
            error = Error(code="empty_reply", message="the model said nothing at all, asked again and again")
            return msgspec.structs.replace(ended, status="failed", error=error)
        return ended

    def _failed(self, code: Failure, message: str, *, retryable: bool = False) -> RunEnded:
        error = Error(code=code, message=message, retryable=retryable)
        return RunEnded(
            run=self.run.n, attempt=self.effect.attempt, status="failed", error=error, model=self.run.spec.model
        )


def distinct(calls: Sequence[ToolCall], step: int, used: Collection[str]) -> tuple[ToolCall, ...]:
    """The calls, each with an id of its own: a provider may give none, or the same ones in every step."""
    seen = set(used)
    found: list[ToolCall] = []
    for number, call in enumerate(calls, 1):
        name = fit(call.id) if len(call.id) <= CALL_ID_MAX else ""
        if not name or name in seen:
            name = f"call-{step}-{number}"
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

    async def perform(self, tools: Tools) -> ToolReturned:
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
        result = await tools.call(effect.call.name, self.arguments, context)
        return ToolReturned(
            run=effect.run,
            attempt=effect.attempt,
            call_id=effect.call.id,
            status=result.status,
            output=result.output,
            error=result.error,
            duration=round((clock() - began) * 1000),
        )
