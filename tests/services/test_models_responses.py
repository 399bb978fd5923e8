"""What is alone OpenAI's Responses' on the wire; the rest is in `tests/contracts/test_models.py`."""

import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from pydantic import SecretStr
from tests.support.providers import Exchange, peer
from tests.support.wires import Responses

from turnstream.session.messages import AssistantMessage, Message, ToolMessage, UserMessage
from turnstream.settings import ModelSettings
from turnstream_runner.models import openai
from turnstream_runner.models.openai import OpenAIResponses
from turnstream_runner.models.port import Item, ModelError, ModelRequest, ReasoningDelta, Reply, TextDelta, ToolSpec

TOOL = ToolSpec("w", "The weather.", {"type": "object", "properties": {}})


def request(*messages: Message, **fields: Any) -> ModelRequest:
    return ModelRequest(model="m", messages=messages or (UserMessage("hello"),), **fields)


async def items_of(base_url: str | None, asking: ModelRequest, model: str = "gpt-5") -> list[Item]:
    settings = ModelSettings(
        provider="openai", api="responses", model=model, base_url=base_url, api_key=SecretStr("sk-1")
    )
    made = OpenAIResponses(settings, environment={})
    try:
        async with aclosing(made.stream(asking)) as items:
            return [item async for item in items]
    finally:
        await made.close()


async def reply_of(base_url: str | None, asking: ModelRequest, model: str = "gpt-5") -> Reply:
    reply = (await items_of(base_url, asking, model))[-1]
    assert isinstance(reply, Reply)
    return reply


def says(
    script: Callable[[Responses], Awaitable[object]], finish: str = "stop"
) -> Callable[[Exchange], Awaitable[None]]:
    async def answer(exchange: Exchange) -> None:
        spoken = Responses(exchange)
        await spoken.begin()
        await script(spoken)
        await spoken.end(finish)

    return answer


async def ok(spoken: Responses) -> None:
    await spoken.say("ok")


def goes_on(first: Reply, opaque: tuple[bytes, ...], text: str | None = None) -> ModelRequest:
    results = tuple(ToolMessage(call.id, call.name, "sunny") for call in first.tool_calls)
    said = AssistantMessage(first.text if text is None else text, first.tool_calls)
    return request(UserMessage("?"), said, *results, opaque=opaque, tools=(TOOL,))


async def test_nothing_is_stored_and_what_is_kept_for_it_comes_with_the_reply() -> None:
    async with peer(says(ok)) as provider:
        await reply_of(provider.base_url, request())
        await reply_of(provider.base_url, request(), "gpt-4.1")
        reasons, does_not = (exchange.body for exchange in provider.seen)
    assert (reasons["store"], does_not["store"]) == (False, False)
    assert reasons["include"] == ["reasoning.encrypted_content"]
    assert "include" not in does_not
    assert not {"previous_response_id", "conversation"} & reasons.keys()


async def test_a_reply_goes_back_item_by_item_as_it_came() -> None:
    async def interleaved(spoken: Responses) -> None:
        await spoken.think("first ", "this", hidden="ZW5jMQ==")
        await spoken.say("Let me see. ")
        await spoken.ask("c1", "w", "{}")
        await spoken.think(hidden="ZW5jMg==")
        await spoken.ask("c2", "w", '{"a": 1}')

    async with peer(says(interleaved, "tool_calls")) as provider:
        first = await reply_of(provider.base_url, request(UserMessage("?"), tools=(TOOL,)))
        assert (first.text, first.reasoning, first.finish) == ("Let me see. ", "first this", "tool_calls")
        await reply_of(provider.base_url, goes_on(first, (first.opaque,)))
        said = provider.seen[-1].body["input"][1:6]
        assert [(item.get("type", "message"), item.get("id")) for item in said] == [
            ("reasoning", "rs_0"),
            ("message", "msg_1"),
            ("function_call", "fc_2"),
            ("reasoning", "rs_3"),
            ("function_call", "fc_4"),
        ]
        assert [item["encrypted_content"] for item in (said[0], said[3])] == ["ZW5jMQ==", "ZW5jMg=="]
        assert [item["summary"] for item in (said[0], said[3])] == [
            [{"text": "first this", "type": "summary_text"}],
            [],
        ]

        await reply_of(provider.base_url, goes_on(first, (first.opaque,), text="What became of it."))
        said = provider.seen[-1].body["input"][1:6]
        assert [item.get("type", "message") for item in said] == ["reasoning", "reasoning"] + ["message"] + [
            "function_call"
        ] * 2


async def test_what_a_model_says_before_its_answer_goes_back_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    async def comments(spoken: Responses) -> None:
        item = {"type": "message", "id": "msg_0", "role": "assistant", "phase": "commentary", "status": "in_progress"}
        await spoken._added({**item, "content": []})
        place = {"item_id": "msg_0", "output_index": 0, "content_index": 0}
        await spoken._event("response.output_text.delta", **place, delta="I look.", logprobs=[])
        part = {"type": "output_text", "text": "I look.", "annotations": []}
        await spoken._done({**item, "content": [part], "status": "completed"})
        await spoken.ask("c1", "w", "{}")

    async with peer(says(comments, "tool_calls")) as provider:
        monkeypatch.setattr(openai, "ADDRESS", provider.base_url)
        first = await reply_of(None, request(UserMessage("?"), tools=(TOOL,)), "gpt-5.6")
        assert first.text == "I look."
        await reply_of(None, goes_on(first, (first.opaque,)), "gpt-5.6")
        assert provider.seen[-1].body["input"][1]["phase"] == "commentary"


async def test_open_models_give_their_reasoning_in_plain_words() -> None:
    async def thinks(spoken: Responses) -> None:
        item = {"type": "reasoning", "id": "rs_0", "summary": [], "content": []}
        await spoken._added(item)
        place = {"item_id": "rs_0", "output_index": 0, "content_index": 0}
        for piece in ("which ", "city?"):
            await spoken._event("response.reasoning_text.delta", **place, delta=piece)
        await spoken._done({**item, "content": [{"type": "reasoning_text", "text": "which city?"}]})
        await spoken.ask("c1", "w", "{}")

    async with peer(says(thinks, "tool_calls")) as provider:
        first = await reply_of(provider.base_url, request(UserMessage("?"), tools=(TOOL,)), "gpt-oss")
        await reply_of(provider.base_url, goes_on(first, (first.opaque,)), "gpt-oss")
        [reasoning] = [item for item in provider.seen[-1].body["input"] if item.get("type") == "reasoning"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "which city?"}]


async def test_a_refusal_is_told_in_its_words() -> None:
    async def refuses(spoken: Responses) -> None:
        await spoken.refuse("I cannot help with that.")

    async with peer(says(refuses)) as provider:
        reply = await reply_of(provider.base_url, request())
    assert (reply.text, reply.finish) == ("I cannot help with that.", "content_filter")


async def test_a_response_that_fails_is_no_answer() -> None:
    async def fails(exchange: Exchange) -> None:
        spoken = Responses(exchange)
        await spoken.begin()
        await spoken.say("half")
        error = {"code": "rate_limit_exceeded", "message": "slow down"}
        await spoken._event("response.failed", response={**spoken._response("failed"), "error": error})
        await exchange.raw(b"0\r\n\r\n")

    async with peer(fails) as provider:
        with pytest.raises(ModelError, match="slow down") as caught:
            await reply_of(provider.base_url, request())
    assert caught.value.retryable


async def test_what_the_agent_sets_is_sent() -> None:
    params = {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 99,
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "reasoning_summary": True,
    }
    async with peer(says(ok)) as provider:
        await reply_of(provider.base_url, request(params=params, tools=(TOOL,), instructions="Be brief."))
        body = provider.seen[0].body
    assert {name: body[name] for name in ("temperature", "top_p", "max_output_tokens", "parallel_tool_calls")} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 99,
        "parallel_tool_calls": False,
    }
    assert body["reasoning"] == {"effort": "low", "summary": "auto"}


async def test_s02_the_front_of_the_prompt_stays_the_same_to_the_byte() -> None:
    first = (UserMessage("one"), AssistantMessage("two"), UserMessage("three"))
    async with peer(says(ok)) as provider:
        for messages in (first, (*first, AssistantMessage("four"), UserMessage("five"))):
            await reply_of(provider.base_url, request(*messages, instructions="Be brief.", tools=(TOOL,)))
        one, two = (exchange.body for exchange in provider.seen)
    assert json.dumps(two["input"]).startswith(json.dumps(one["input"])[:-1])


async def test_the_environment_names_no_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1")
    async with peer(says(ok)) as provider:
        monkeypatch.setattr(openai, "ADDRESS", provider.base_url)
        assert (await reply_of(None, request())).text == "ok"
        assert provider.seen[0].path == "/v1/responses"


async def test_text_and_summary_come_as_they_are_said() -> None:
    async def thinks(spoken: Responses) -> None:
        await spoken.think("a", "b", hidden="ZW5j")
        await spoken.say("c", "d")

    async with peer(says(thinks)) as provider:
        items = await items_of(provider.base_url, request())
    assert items[:-1] == [ReasoningDelta("a"), ReasoningDelta("b"), TextDelta("c"), TextDelta("d")]
