"""What is alone chat completions' on the wire, whoever speaks them; the rest is in `tests/contracts/test_models.py`."""

import base64
import json
from contextlib import aclosing
from typing import Any

import pytest
from pydantic import SecretStr
from tests.support.providers import Aimock, Exchange, peer, strict

from turnstream.session.events import Attachment, ToolCall
from turnstream.session.messages import AssistantMessage, Message, ToolMessage, UserMessage
from turnstream.settings import ModelSettings
from turnstream_runner.models.openai import OpenAIChat
from turnstream_runner.models.port import (
    Image,
    Item,
    Model,
    ModelError,
    ModelRequest,
    ReasoningDelta,
    Reply,
    Shown,
    TextDelta,
    ToolSpec,
)
from turnstream_runner.models.registry import Models

WEATHER = ToolSpec(
    "weather",
    "The weather in a city.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
)


def request(*messages: Message, **fields: Any) -> ModelRequest:
    return ModelRequest(model="local", messages=messages or (UserMessage("hello"),), **fields)


def chat(base_url: str, model: str = "gpt-4.1-mini") -> OpenAIChat:
    settings = ModelSettings(provider="openai", model=model, base_url=base_url, api_key=SecretStr("sk-test-1"))
    return OpenAIChat(settings, environment={})


async def asked(model: Model, asking: ModelRequest) -> list[Item]:
    async with aclosing(model.stream(asking)) as items:
        return [item async for item in items]


async def answer(base_url: str, asking: ModelRequest, **named: str) -> tuple[Reply, list[Item]]:
    """The reply and the deltas before it, of one try."""
    model = chat(base_url, **named)
    try:
        items = await asked(model, asking)
    finally:
        await model.close()
    reply = items[-1]
    assert isinstance(reply, Reply)
    return reply, items[:-1]


async def failure(base_url: str, asking: ModelRequest) -> tuple[ModelError, list[Item]]:
    """The error of one try, and what was streamed before it."""
    model, items = chat(base_url), list[Item]()

    async def listen() -> None:
        async with aclosing(model.stream(asking)) as stream:
            async for item in stream:
                items.append(item)

    try:
        with pytest.raises(ModelError) as caught:
            await listen()
    finally:
        await model.close()
    return caught.value, items


def text_of(items: list[Item]) -> str:
    return "".join(item.text for item in items if isinstance(item, TextDelta))


def reasoning_of(items: list[Item]) -> str:
    return "".join(item.text for item in items if isinstance(item, ReasoningDelta))


# --- against aimock ---------------------------------------------------------------------------------------------------


async def test_several_tool_calls_at_once_and_their_results(aimock: Aimock) -> None:
    calls = [
        {"id": "call_a", "name": "weather", "arguments": '{"city":"Oslo"}'},
        {"id": "call_b", "name": "weather", "arguments": '{"city":"Wien"}'},
    ]
    aimock.answer(
        {"match": {"hasToolResult": True}, "response": {"content": "Cold, and warm."}},
        {"match": {"userMessage": "weather?"}, "response": {"content": "I look.", "toolCalls": calls}},
    )
    first, _ = await answer(aimock.base_url, request(UserMessage("weather?"), tools=(WEATHER,)))
    assert first.finish == "tool_calls"
    assert first.text == "I look."
    assert [(call.id, call.name, json.loads(call.arguments)) for call in first.tool_calls] == [
        ("call_a", "weather", {"city": "Oslo"}),
        ("call_b", "weather", {"city": "Wien"}),
    ]

    second, _ = await answer(
        aimock.base_url,
        request(
            UserMessage("weather?"),
            AssistantMessage(first.text, first.tool_calls),
            ToolMessage("call_a", "weather", "-4"),
            ToolMessage("call_b", "weather", "error: no such city", is_error=True),
            tools=(WEATHER,),
        ),
    )
    assert second.text == "Cold, and warm."
    assert second.finish == "stop"
    sent = aimock.requests()[-1]
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in sent["messages"][1]["tool_calls"]] == ["call_a", "call_b"]
    assert [(part["tool_call_id"], part["content"]) for part in sent["messages"][2:]] == [
        ("call_a", "-4"),
        ("call_b", "error: no such city"),
    ]
    assert sent["tools"][0]["function"] == {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": WEATHER.schema,
    } | {key: value for key, value in sent["tools"][0]["function"].items() if key == "strict"}


async def test_what_the_agent_sets_is_sent(aimock: Aimock) -> None:
    aimock.answer({"match": {"userMessage": "hello"}, "response": {"content": "ok"}})
    params = {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 99,
        "seed": 7,
        "stop": ("END",),
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "parallel_tool_calls": False,
    }
    asking = request(params=params, instructions="Be brief.", tools=(WEATHER,), idempotency_key="acme/s.1:1")
    await answer(aimock.base_url, asking)
    sent = aimock.requests()[-1]
    assert {key: sent[key] for key in ("temperature", "top_p", "seed", "stop")} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["END"],
    }
    assert 99 in (sent.get("max_tokens"), sent.get("max_completion_tokens"))
    assert sent["parallel_tool_calls"] is False
    assert sent["stream_options"] == {"include_usage": True}
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}


async def test_s02_the_front_of_the_prompt_stays_the_same_to_the_byte(aimock: Aimock) -> None:
    call = ToolCall(id="call_a", name="weather", arguments='{"city": "Oslo"}')
    first = (UserMessage("one"), AssistantMessage("", (call,)), ToolMessage("call_a", "weather", "-4"))
    later = (*first, AssistantMessage("It is cold."), UserMessage("two"))
    aimock.answer({"match": {}, "response": {"content": "ok"}})
    for messages in (first, later, later):
        await answer(aimock.base_url, request(*messages, instructions="Be brief.", tools=(WEATHER,)))
    one, two, three = aimock.requests()
    assert two == three
    assert two["tools"] == one["tools"]
    assert json.dumps(two["messages"]).startswith(json.dumps(one["messages"])[:-1])


# --- what is attached ------------------------------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n..."


def attached(name: str, media_type: str = "text/plain", size: int = 5) -> Attachment:
    return Attachment(name=name, media_type=media_type, size=size, sha256="", blob=name)


async def sent(asking: ModelRequest) -> list[dict[str, Any]]:
    """The messages as a strict provider gets them."""
    async with peer(strict) as provider:
        reply, _ = await answer(provider.base_url, asking)
        assert reply.text == "ok"
        return provider.seen[0].body["messages"]


async def test_an_image_is_a_part_of_its_message_between_what_is_said() -> None:
    files = (attached("a.png", "image/png", 11), attached("b.pdf", "application/pdf"), attached("c.txt"))
    shown = (Shown(image=Image("image/png", PNG)), Shown(), Shown(text="a < b"))
    (message,) = await sent(request(UserMessage("look", files), shown=shown))
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    named = '<attachment name="b.pdf" type="application/pdf" size="5"/>'
    text = '<attachment name="c.txt" type="text/plain" size="5">\na < b\n</attachment>'
    assert message == {
        "role": "user",
        "content": [
            {"type": "text", "text": 'look\n<attachment name="a.png" type="image/png" size="11"/>'},
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": f"{named}\n{text}"},
        ],
    }


@pytest.mark.parametrize("text", ["look", ""])
async def test_what_is_no_image_is_text(text: str) -> None:
    lost, image = Shown(missing=True), attached("a.png", "image/png")
    (message,) = await sent(request(UserMessage(text, (attached("a"), image)), shown=(lost, Shown())))
    gone = '<attachment name="a" type="text/plain" size="5" missing="true"/>'
    expected = "\n".join(filter(None, [text, gone, '<attachment name="a.png" type="image/png" size="5"/>']))
    assert message == {"role": "user", "content": expected}


async def test_s02_with_attachments_too_the_front_of_the_prompt_stays_the_same_to_the_byte() -> None:
    files = (attached("a.png", "image/png"), attached("b.txt"))
    shown = (Shown(image=Image("image/png", PNG)), Shown(text="hello"))
    first = (UserMessage("one", files),)
    later = (*first, AssistantMessage("I see."), UserMessage("", files))
    one = await sent(request(*first, shown=shown))
    two = await sent(request(*later, shown=shown * 2))
    assert json.dumps(two).startswith(json.dumps(one)[:-1])
    assert two[-1]["content"][1:] == one[0]["content"][1:]


# --- against a bare socket --------------------------------------------------------------------------------------------


async def test_a_stream_that_is_done_without_a_finish_is_no_answer() -> None:
    async def breaks(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.say({"content": "half of "})
        await exchange.end()

    async with peer(breaks) as provider:
        error, items = await failure(provider.base_url, request())
        assert text_of(items) == "half of "
        assert error.retryable
        assert "half of" not in error.message


async def test_who_has_no_money_left_is_not_asked_again() -> None:
    async def refuses(exchange: Exchange) -> None:
        error = {"message": "pay first", "code": "insufficient_quota"}
        await exchange.status("429 Too Many", json.dumps({"error": error}))

    async with peer(refuses) as provider:
        error, _ = await failure(provider.base_url, request())
        assert (error.retryable, error.code) == (False, "model_error")


async def test_tool_calls_of_a_careless_provider_are_made_storable() -> None:
    async def careless(exchange: Exchange) -> None:
        await exchange.begin()
        for n, name in enumerate(("weather", "wea\ud800ther")):
            call = {"index": n, "type": "function", "function": {"name": name, "arguments": '{"city": "\ud83d"'}}
            await exchange.say({"tool_calls": [call]})
        await exchange.say({}, "tool_calls")
        await exchange.end()

    async with peer(careless) as provider:
        reply, _ = await answer(provider.base_url, request(tools=(WEATHER,)))
        assert [call.name for call in reply.tool_calls] == ["weather", "wea\ufffdther"]
        assert reply.tool_calls[0].arguments == '{"city": "\ufffd"'
        assert len({call.id for call in reply.tool_calls}) == 2


async def test_broken_arguments_of_an_earlier_call_are_sent_as_json() -> None:
    async def fine(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.say({"content": "ok"}, "stop")
        await exchange.end()

    call = ToolCall(id="c1", name="weather", arguments='{"city": ')
    async with peer(fine) as provider:
        asking = request(
            UserMessage("?"), AssistantMessage("", (call,)), ToolMessage("c1", "weather", "error: no JSON")
        )
        await answer(provider.base_url, asking)
        sent = provider.seen[0].body["messages"][1]["tool_calls"][0]["function"]["arguments"]
        assert isinstance(json.loads(sent), dict)


async def test_a_refusal_is_shown_and_ends_by_the_content_filter() -> None:
    async def refuses(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.say({"refusal": "I cannot help with that."})
        await exchange.say({}, "stop")
        await exchange.end()

    async with peer(refuses) as provider:
        reply, _ = await answer(provider.base_url, request())
        assert reply.text == "I cannot help with that."
        assert reply.finish == "content_filter"


async def test_thinking_tags_are_reasoning_not_text() -> None:
    async def tagged(exchange: Exchange) -> None:
        await exchange.begin()
        for piece in ("<think>", "hm, ", "hm", "</think>", "Good ", "day."):
            await exchange.say({"content": piece})
        await exchange.say({}, "stop")
        await exchange.end()

    async with peer(tagged) as provider:
        reply, deltas = await answer(provider.base_url, request())
        assert reply.text == text_of(deltas) == "Good day."
        assert reply.reasoning == reasoning_of(deltas) == "hm, hm"


async def test_the_provider_sees_the_key_of_the_step_not_the_session() -> None:
    async def fine(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.say({"content": "ok"}, "stop")
        await exchange.end()

    async with peer(fine) as provider:
        for key in ("acme/secret-session.1:1", "acme/secret-session.1:1", "acme/secret-session.1:2"):
            await answer(provider.base_url, request(idempotency_key=key))
        one, same, other = (exchange.headers["idempotency-key"] for exchange in provider.seen)
        assert one == same != other
        assert "secret-session" not in str([exchange.headers for exchange in provider.seen])
        assert provider.seen[0].headers["authorization"] == "Bearer sk-test-1"


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_model_without_a_key_says_where_to_put_it() -> None:
    models = Models({})
    with pytest.raises(ModelError, match="OPENAI_API_KEY"):
        OpenAIChat(ModelSettings(provider="openai", model="gpt-5", api_key_env="OPENAI_API_KEY"), environment={})
    with pytest.raises(LookupError, match="unknown model 'gpt-5'; known: demo, openai:<id>, anthropic:<id>"):
        models.resolve("gpt-5")


async def test_a_logical_name_leads_to_its_address(aimock: Aimock) -> None:
    aimock.answer({"match": {"userMessage": "hello"}, "response": {"content": "local"}})
    models = Models({"local": ModelSettings(provider="openai", model="qwen3", base_url=aimock.base_url)})
    assert models.resolve("local") is models.resolve("local")
    items = await asked(models.resolve("local"), request())
    await models.close()
    assert items[-1].text == "local"
    assert aimock.requests()[-1]["model"] == "qwen3"


# --- what goes back within a run --------------------------------------------------------------------------------------

SIGNED = {"google": {"thought_signature": "c2lnbmVk"}}


async def reasons_and_asks(exchange: Exchange) -> None:
    """Asks for two tools the first time, with all that a provider may want back; then answers."""
    await exchange.begin()
    if exchange.body["messages"][-1]["role"] == "tool":
        await exchange.say({"content": "done"}, "stop")
    else:
        await exchange.say({"role": "assistant", "reasoning_content": "which "})
        await exchange.say({"reasoning_content": "city?"})
        for index, extra in enumerate((SIGNED, None)):
            call = {"index": index, "id": f"c{index}", "type": "function", "function": {"name": "w", "arguments": "{}"}}
            await exchange.say({"tool_calls": [call | ({"extra_content": extra} if extra else {})]})
        await exchange.say({}, "tool_calls")
    await exchange.end()


def goes_on(first: Reply, opaque: tuple[bytes, ...]) -> ModelRequest:
    """The next step of the run. The calls have names of our own by then."""
    calls = tuple(ToolCall(id=f"ours-{call.id}", name=call.name, arguments=call.arguments) for call in first.tool_calls)
    results = tuple(ToolMessage(call.id, call.name, "sunny") for call in calls)
    earlier = (UserMessage("hi"), AssistantMessage("hello"), UserMessage("weather?"))
    return request(*earlier, AssistantMessage("", calls), *results, opaque=opaque)


async def test_what_a_provider_wants_back_goes_back_with_the_reply_that_it_came_with() -> None:
    async with peer(reasons_and_asks) as provider:
        first, _ = await answer(provider.base_url, request())
        assert (first.reasoning, len(first.tool_calls)) == ("which city?", 2)
        await answer(provider.base_url, goes_on(first, (first.opaque,)))
        hello, again = [message for message in provider.seen[-1].body["messages"] if message["role"] == "assistant"]
        assert again["reasoning_content"] == "which city?"
        assert [call.get("extra_content") for call in again["tool_calls"]] == [SIGNED, None]
        assert [call["id"] for call in again["tool_calls"]] == ["ours-c0", "ours-c1"]
        assert not {"reasoning_content", "tool_calls"} & hello.keys()


async def test_s26_nothing_goes_back_that_the_request_does_not_hold() -> None:
    async with peer(reasons_and_asks) as provider:
        first, _ = await answer(provider.base_url, request())
        for nothing in ((), (b"",), (b"nonsense",), (b"{}",)):
            reply, _ = await answer(provider.base_url, goes_on(first, nothing))
            assert reply.text == "done"
            sent = json.dumps(provider.seen[-1].body)
            assert "reasoning_content" not in sent
            assert "thought_signature" not in sent


async def test_a_reply_with_nothing_to_send_back_has_no_opaque_item() -> None:
    async def plain(exchange: Exchange) -> None:
        await exchange.begin()
        for piece in ("<think>", "hm", "</think>", "four"):
            await exchange.say({"content": piece}, "stop" if piece == "four" else None)
        await exchange.end()

    async with peer(plain) as provider:
        reply, _ = await answer(provider.base_url, request())
        assert (reply.text, reply.reasoning, reply.opaque) == ("four", "hm", b"")
