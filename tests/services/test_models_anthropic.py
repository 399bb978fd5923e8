"""What is Anthropic's alone on the wire to it; the rest is in `tests/contracts/test_models.py`."""

import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import pytest
from pydantic import SecretStr
from tests.support.providers import Exchange, peer
from tests.support.wires import Messages

from turnstream.session.events import ToolCall, Usage
from turnstream.session.messages import AssistantMessage, Message, ToolMessage, UserMessage
from turnstream.settings import ModelSettings
from turnstream_runner.models import anthropic
from turnstream_runner.models.anthropic import AnthropicMessages
from turnstream_runner.models.port import ModelError, ModelRequest, ReasoningDelta, Reply, ToolSpec
from turnstream_runner.models.registry import Models

TOOL = ToolSpec("w", "The weather.", {"type": "object", "properties": {}})
OLD, NEW = "claude-haiku-4-5", "claude-opus-5"
"""One that thinks by a budget of tokens, and one that thinks by effort."""


def request(*messages: Message, **fields: Any) -> ModelRequest:
    return ModelRequest(model="m", messages=messages or (UserMessage("hello"),), **fields)


def settings(base_url: str | None, model: str = OLD) -> ModelSettings:
    return ModelSettings(provider="anthropic", model=model, base_url=base_url, api_key=SecretStr("sk-ant-1"))


async def reply_of(base_url: str | None, asking: ModelRequest, model: str = OLD) -> Reply:
    made = AnthropicMessages(settings(base_url, model), environment={})
    try:
        async with aclosing(made.stream(asking)) as items:
            found = [item async for item in items]
    finally:
        await made.close()
    reply = found[-1]
    assert isinstance(reply, Reply)
    assert reply.reasoning == "".join(item.text for item in found if isinstance(item, ReasoningDelta))
    return reply


def says(
    script: Callable[[Messages], Awaitable[object]], finish: str = "stop"
) -> Callable[[Exchange], Awaitable[None]]:
    async def answer(exchange: Exchange) -> None:
        spoken = Messages(exchange)
        await spoken.begin()
        await script(spoken)
        await spoken.end(finish)

    return answer


async def ok(spoken: Messages) -> None:
    await spoken.say("ok")


async def sent(asking: ModelRequest, model: str = OLD) -> dict[str, Any]:
    """The body of a request."""
    async with peer(says(ok)) as provider:
        await reply_of(provider.base_url, asking, model)
        return provider.seen[0].body


def called(*ids: str, text: str = "") -> AssistantMessage:
    return AssistantMessage(text, tuple(ToolCall(id=name, name="w", arguments="{}") for name in ids))


# --- how a conversation is written ------------------------------------------------------------------------------------


async def test_nothing_blank_is_sent() -> None:
    turn = (UserMessage("?"), called("c1", text=" \n"), ToolMessage("c1", "w", ""))
    body = await sent(request(*turn, AssistantMessage("\n"), UserMessage("well?"), tools=(TOOL,)))
    assert [[block["type"] for block in message["content"]] for message in body["messages"]] == [
        ["text"],
        ["tool_use"],
        ["tool_result", "text"],
    ]
    assert body["messages"][2]["content"][0]["content"] in ("", [])


async def test_a_tool_that_failed_says_so_beside_its_result() -> None:
    results = (ToolMessage("c1", "w", "sunny"), ToolMessage("c2", "w", "error: no city", is_error=True))
    body = await sent(request(UserMessage("?"), called("c1", "c2"), *results, tools=(TOOL,)))
    first, second = body["messages"][2]["content"]
    assert (first["is_error"], second["is_error"]) == (False, True)
    assert second["content"] == [{"type": "text", "text": "error: no city"} | _mark(second["content"][0])]


def _mark(block: Mapping[str, Any]) -> dict[str, Any]:
    return {"cache_control": block["cache_control"]} if "cache_control" in block else {}


async def test_what_every_request_begins_with_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = request(
        UserMessage("hello"), instructions="Be brief.", tools=(TOOL, ToolSpec("x", "", {"type": "object"}))
    )
    mark = {"type": "ephemeral", "ttl": "5m"}
    async with peer(says(ok)) as provider:
        await reply_of(provider.base_url, asking)
        monkeypatch.setattr(anthropic, "ADDRESS", provider.base_url)
        await reply_of(None, asking)
        other, own = (exchange.body for exchange in provider.seen)
    for body in (other, own):
        assert body["system"] == [{"type": "text", "text": "Be brief.", "cache_control": mark}]
        assert [tool.get("cache_control") for tool in body["tools"]] == [None, mark]
    assert other["messages"][-1]["content"][-1]["cache_control"] == mark
    assert "cache_control" not in other
    assert own["cache_control"] == mark
    assert "cache_control" not in json.dumps(own["messages"])


async def test_an_address_is_taken_with_and_without_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "somebody-elses")
    async with peer(says(ok)) as provider:
        for base_url in (provider.base_url, provider.base_url + "/", provider.base_url.removesuffix("/v1")):
            await reply_of(base_url, request())
        assert {exchange.path for exchange in provider.seen} == {"/v1/messages"}
        keys = {(exchange.headers["x-api-key"], exchange.headers["authorization"]) for exchange in provider.seen}
        assert keys == {("sk-ant-1", "Bearer sk-ant-1")}


async def test_what_goes_into_the_cache_has_a_price_of_its_own() -> None:
    async def caches(exchange: Exchange) -> None:
        spoken = Messages(exchange)
        await exchange.begin()
        usage = {"input_tokens": 100, "cache_creation_input_tokens": 2000, "cache_read_input_tokens": 3000}
        message = {"id": "m", "type": "message", "role": "assistant", "model": NEW, "content": [], "stop_reason": None}
        await spoken._event("message_start", message={**message, "usage": {**usage, "output_tokens": 1}})
        await spoken.say("ok")
        delta = {"stop_reason": "end_turn", "stop_sequence": None}
        await spoken._event("message_delta", delta=delta, usage={"output_tokens": 10})
        await spoken._event("message_stop")
        await exchange.raw(b"0\r\n\r\n")

    async with peer(caches) as provider:
        prices = {"input_price": 4, "cached_price": 1, "caching_price": 5, "output_price": 20}
        made = ModelSettings.model_validate({**settings(provider.base_url).model_dump(), **prices})
        models = Models({"m": made, "alike": made.model_copy(update={"caching_price": None})})
        own, alike = [
            [item async for item in models.resolve(name).stream(request())][-1].usage for name in ("m", "alike")
        ]
        await models.close()
    assert own == Usage(input_tokens=5100, output_tokens=10, cached_tokens=3000, cost=400 + 10_000 + 3000 + 200)
    assert alike.cost == 400 + 8000 + 3000 + 200


# --- what is set ------------------------------------------------------------------------------------------------------


async def test_what_the_agent_sets_is_sent() -> None:
    params = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 99, "stop": ("END",), "parallel_tool_calls": False}
    body = await sent(request(params=params, tools=(TOOL,), idempotency_key="acme/secret.1:1"))
    assert {name: body[name] for name in ("temperature", "top_p", "max_tokens", "stop_sequences")} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 99,
        "stop_sequences": ["END"],
    }
    assert body["tool_choice"] == {"type": "auto", "disable_parallel_tool_use": True}


async def test_what_a_model_does_not_take_is_for_its_provider_to_refuse() -> None:
    assert (await sent(request(params={"temperature": 0.5}), NEW))["temperature"] == 0.5


async def test_an_answer_may_be_as_long_as_the_model_can_make_it() -> None:
    assert (await sent(request()))["max_tokens"] == 64_000
    assert (await sent(request(), "some-other-model"))["max_tokens"] > 4_096


@pytest.mark.parametrize(
    ("params", "budget"),
    [
        ({"reasoning_effort": "low"}, 2_048),
        ({"reasoning_effort": "medium"}, 10_000),
        ({"reasoning_effort": "medium", "max_tokens": 5_000}, 2_500),
        ({"reasoning_effort": "high", "max_tokens": 2_048}, 1_024),
        ({"reasoning_effort": "high", "reasoning_summary": True}, 16_384),
        ({"reasoning_effort": "none"}, None),
        ({"reasoning_summary": True}, None),
        ({}, None),
    ],
)
async def test_a_budget_to_think_leaves_room_for_the_answer(params: dict[str, Any], budget: int | None) -> None:
    body = await sent(request(params=params))
    shown = {"display": "summarized"} if params.get("reasoning_summary") else {}
    assert body.get("thinking") == ({"type": "enabled", "budget_tokens": budget, **shown} if budget else None)


async def test_too_little_room_to_think_is_refused_before_anybody_is_asked() -> None:
    async with peer(says(ok)) as provider:
        with pytest.raises(ModelError, match="needs `max_tokens` of 2048 or more, or none"):
            await reply_of(provider.base_url, request(params={"reasoning_effort": "low", "max_tokens": 2_047}))
        assert provider.seen == []


@pytest.mark.parametrize(
    ("params", "thinking", "effort"),
    [
        ({"reasoning_effort": "high", "max_tokens": 100}, {"type": "adaptive"}, "high"),
        (
            {"reasoning_effort": "minimal", "reasoning_summary": True},
            {"type": "adaptive", "display": "summarized"},
            "low",
        ),
        ({"reasoning_summary": True}, {"type": "adaptive", "display": "summarized"}, None),
        ({"reasoning_effort": "none"}, {"type": "disabled"}, None),
        ({}, None, None),
    ],
)
async def test_a_new_model_thinks_by_effort(
    params: dict[str, Any], thinking: dict[str, str] | None, effort: str | None
) -> None:
    body = await sent(request(params=params), NEW)
    assert body.get("thinking") == thinking
    assert (body.get("output_config") or {}).get("effort") == effort


# --- what it wants back -----------------------------------------------------------------------------------------------


async def interleaved(spoken: Messages) -> None:
    """Thinks before each tool that it asks for."""
    await spoken.redact("cmVkYWN0ZWQ=")
    await spoken.think("first ", "this", hidden="c2lnMQ==")
    await spoken.say("Let me see. ")
    await spoken.ask("c1", "w", "{}")
    await spoken.think("then that", hidden="c2lnMg==")
    await spoken.say("And also.")
    await spoken.ask("c2", "w", '{"a": ', "1}")


def goes_on(first: Reply, opaque: tuple[bytes, ...], **fields: Any) -> ModelRequest:
    results = tuple(ToolMessage(call.id, call.name, "sunny") for call in first.tool_calls)
    messages = (UserMessage("?"), AssistantMessage(first.text, first.tool_calls), *results)
    return request(*messages, opaque=opaque, tools=(TOOL,), **fields)


async def test_a_reply_goes_back_block_by_block_as_it_came() -> None:
    async with peer(says(interleaved, "tool_calls")) as provider:
        first = await reply_of(provider.base_url, request(UserMessage("?"), tools=(TOOL,)))
        assert (first.text, first.reasoning) == ("Let me see. And also.", "first thisthen that")
        await reply_of(provider.base_url, goes_on(first, (first.opaque,), params={"reasoning_effort": "low"}))
        assert provider.seen[-1].body["messages"][1]["content"] == [
            {"type": "redacted_thinking", "data": "cmVkYWN0ZWQ="},
            {"type": "thinking", "thinking": "first this", "signature": "c2lnMQ=="},
            {"type": "text", "text": "Let me see. "},
            {"type": "tool_use", "id": "c1", "name": "w", "input": {}},
            {"type": "thinking", "thinking": "then that", "signature": "c2lnMg=="},
            {"type": "text", "text": "And also."},
            {"type": "tool_use", "id": "c2", "name": "w", "input": {"a": 1}},
        ]


async def test_a_turn_whose_thinking_is_lost_goes_on_without_and_the_next_one_thinks_again() -> None:
    effort = {"reasoning_effort": "low"}
    async with peer(says(interleaved, "tool_calls")) as provider:
        first = await reply_of(provider.base_url, request(UserMessage("?"), tools=(TOOL,), params=effort))
        lost = goes_on(first, (b"",), params=effort)
        await reply_of(provider.base_url, lost)
        assert "thinking" not in provider.seen[-1].body
        await reply_of(provider.base_url, goes_on(first, (first.opaque,), params=effort))
        assert provider.seen[-1].body["thinking"]["type"] == "enabled"
        later = (*lost.messages, AssistantMessage("Sunny."), UserMessage("And now?"))
        await reply_of(provider.base_url, request(*later, tools=(TOOL,), params=effort))
        assert provider.seen[-1].body["thinking"]["type"] == "enabled"
        await reply_of(provider.base_url, lost, NEW)
        assert provider.seen[-1].body["thinking"]["type"] == "adaptive"


async def test_whoever_speaks_right_behind_a_result_ends_no_turn() -> None:
    """A message that steers, or the next one after a turn that failed there."""
    effort = {"reasoning_effort": "low"}
    async with peer(says(interleaved, "tool_calls")) as provider:
        first = await reply_of(provider.base_url, request(UserMessage("?"), tools=(TOOL,), params=effort))
        for opaque, thinks in (((first.opaque,), True), ((b"",), False), ((), False)):
            asking = goes_on(first, opaque, params=effort)
            for said in (("In short.",), ("In short.", "Please.")):
                spoken = (*asking.messages, *map(UserMessage, said))
                await reply_of(provider.base_url, request(*spoken, opaque=opaque, tools=(TOOL,), params=effort))
                assert ("thinking" in provider.seen[-1].body) is thinks


async def test_an_answer_that_is_not_sent_ends_no_turn() -> None:
    """A blank one, behind a result: what is said next is in one message with it."""
    effort = {"reasoning_effort": "low"}
    async with peer(says(interleaved, "tool_calls")) as provider:
        first = await reply_of(provider.base_url, request(UserMessage("?"), tools=(TOOL,), params=effort))
        messages = (*goes_on(first, ()).messages, AssistantMessage(" \n"), UserMessage("Well?"))
        await reply_of(provider.base_url, request(*messages, tools=(TOOL,), params=effort))
        assert "thinking" not in provider.seen[-1].body


async def test_a_turn_that_thought_once_goes_on_thinking() -> None:
    """Its later steps need not have thought."""
    effort = {"reasoning_effort": "low"}
    async with peer(says(interleaved, "tool_calls")) as provider:
        first = await reply_of(provider.base_url, request(UserMessage("?"), tools=(TOOL,), params=effort))
        asking = goes_on(first, (first.opaque, b""), params=effort)
        more = (*asking.messages, called("c3"), ToolMessage("c3", "w", "sunny"))
        await reply_of(provider.base_url, request(*more, opaque=asking.opaque, tools=(TOOL,), params=effort))
        assert provider.seen[-1].body["thinking"]["type"] == "enabled"


# --- how it ends ------------------------------------------------------------------------------------------------------


async def test_a_refusal_is_told_in_its_words() -> None:
    async def refuses(exchange: Exchange) -> None:
        spoken = Messages(exchange)
        await spoken.begin()
        details = {"type": "refusal", "category": "cyber", "explanation": "I cannot help with that."}
        delta = {"stop_reason": "refusal", "stop_sequence": None, "stop_details": details}
        await spoken._event("message_delta", delta=delta, usage={"output_tokens": 1})
        await spoken._event("message_stop")
        await exchange.raw(b"0\r\n\r\n")

    async with peer(refuses) as provider:
        reply = await reply_of(provider.base_url, request())
    assert (reply.text, reply.finish) == ("I cannot help with that.", "content_filter")


@pytest.mark.parametrize(
    ("reason", "finish"),
    [("stop_sequence", "stop"), ("model_context_window_exceeded", "length"), ("pause_turn", "other")],
)
async def test_other_ends(reason: str, finish: str) -> None:
    async def ends(exchange: Exchange) -> None:
        spoken = Messages(exchange)
        await spoken.begin()
        await spoken.say("so far")
        await spoken._event("message_delta", delta={"stop_reason": reason}, usage={"output_tokens": 1})
        await spoken._event("message_stop")
        await exchange.raw(b"0\r\n\r\n")

    async with peer(ends) as provider:
        assert (await reply_of(provider.base_url, request())).finish == finish


def test_without_a_key_nobody_is_asked() -> None:
    asked = ModelSettings(provider="anthropic", model=NEW, api_key_env="ANTHROPIC_API_KEY")
    with pytest.raises(ModelError, match="set the environment variable ANTHROPIC_API_KEY"):
        AnthropicMessages(asked, environment={})
