"""The wire to an OpenAI-compatible provider: aimock where a real server can do it, a bare socket where none would."""

import asyncio
import base64
import json
from contextlib import aclosing
from typing import Any

import pytest
from pydantic import SecretStr
from tests.support.providers import Aimock, Exchange, peer, strict

from turnstream.session.events import Attachment, ToolCall, Usage
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
    Reset,
    Shown,
    TextDelta,
    ToolSpec,
)
from turnstream_runner.models.registry import Models
from turnstream_runner.models.retry import Backoff, Retrying

WEATHER = ToolSpec(
    "weather",
    "The weather in a city.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
)


def request(*messages: Message, **fields: Any) -> ModelRequest:
    return ModelRequest(model="local", messages=messages or (UserMessage("hello"),), **fields)


def chat(base_url: str, *, silence: float = 10.0, model: str = "gpt-4.1-mini", key: str = "sk-test-1") -> OpenAIChat:
    settings = ModelSettings(provider="openai", model=model, base_url=base_url, api_key=SecretStr(key), silence=silence)
    return OpenAIChat(settings, environment={})


async def asked(model: Model, asking: ModelRequest) -> list[Item]:
    async with aclosing(model.stream(asking)) as items:
        return [item async for item in items]


async def answer(base_url: str, asking: ModelRequest, **options: Any) -> tuple[Reply, list[Item]]:
    """The reply and the deltas before it, of one try."""
    model = chat(base_url, **options)
    try:
        items = await asked(model, asking)
    finally:
        await model.close()
    reply = items[-1]
    assert isinstance(reply, Reply)
    return reply, items[:-1]


async def failure(base_url: str, asking: ModelRequest, **options: Any) -> tuple[ModelError, list[Item]]:
    """The error of one try, and what was streamed before it."""
    model = chat(base_url, **options)
    items: list[Item] = []

    async def listen() -> None:
        nonlocal items
        async with aclosing(model.stream(asking)) as stream:
            async for item in stream:
                items += [item]

    try:
        with pytest.raises(ModelError) as caught:
            await listen()
    finally:
        await model.close()
    return caught.value, items


class Waits:
    """Instead of sleeping: how long it would have been."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


async def retried(base_url: str, asking: ModelRequest, **options: Any) -> tuple[list[Item], list[float]]:
    model, waits = chat(base_url, **options), Waits()
    try:
        items = await asked(Retrying(model, random=lambda: 0.0, backoff=Backoff(first=1.0), sleep=waits), asking)
    finally:
        await model.close()
    return items, waits.seconds


def text_of(items: list[Item]) -> str:
    return "".join(item.text for item in items if isinstance(item, TextDelta))


def reasoning_of(items: list[Item]) -> str:
    return "".join(item.text for item in items if isinstance(item, ReasoningDelta))


# --- against aimock ---------------------------------------------------------------------------------------------------


async def test_text_is_streamed_and_usage_counted(aimock: Aimock) -> None:
    said = "Grüße from a real server, in several pieces: 👩‍👩‍👧 \u2028 done."
    usage = {"prompt_tokens": 21, "completion_tokens": 9}
    aimock.answer({"match": {"userMessage": "hello"}, "response": {"content": said, "usage": usage}, "chunkSize": 5})
    reply, deltas = await answer(aimock.base_url, request(instructions="Be brief."))
    assert reply.text == text_of(deltas) == said
    assert len(deltas) > 3
    assert reply.finish == "stop"
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (21, 9)
    assert reply.reasoning == ""


async def test_s26_reasoning_has_its_own_channel_and_never_goes_back(aimock: Aimock) -> None:
    thought, said = "SECRET-THOUGHT: they greet me", "Good day."
    aimock.answer({"match": {"userMessage": "hello"}, "response": {"content": said, "reasoning": thought}})
    reply, deltas = await answer(aimock.base_url, request(), model="o3")
    assert reply.text == text_of(deltas) == said
    assert reply.reasoning == reasoning_of(deltas) == thought
    kinds = [type(item) for item in deltas]
    assert kinds.index(TextDelta) > kinds.index(ReasoningDelta)

    aimock.answer({"match": {"userMessage": "again"}, "response": {"content": "Yes."}})
    await answer(
        aimock.base_url, request(UserMessage("hello"), AssistantMessage(reply.text), UserMessage("again")), model="o3"
    )
    assert "SECRET-THOUGHT" not in json.dumps(aimock.requests())


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


async def test_s22_503_before_the_stream_is_retried_then_given_up(aimock: Aimock) -> None:
    error = {"error": {"message": "upstream is down", "type": "server_error"}, "status": 503}
    aimock.answer({"match": {"userMessage": "hello"}, "response": error})
    model, waits = chat(aimock.base_url), Waits()
    with pytest.raises(ModelError) as caught:
        await asked(Retrying(model, random=lambda: 0.0, backoff=Backoff(first=1.0), sleep=waits), request())
    await model.close()
    assert caught.value.retryable
    assert caught.value.code == "model_error"
    assert "503" in caught.value.message
    assert "upstream is down" in caught.value.message
    assert len(aimock.requests()) == 4, "one retry layer: four tries, not four times the SDK's"
    assert waits.seconds == [0.5, 1.0, 2.0]


async def test_429_is_retried_after_the_time_that_the_provider_names(aimock: Aimock) -> None:
    limited = {"error": {"message": "slow down", "type": "rate_limit_error"}, "status": 429, "retryAfter": 7}
    aimock.answer(
        {"match": {"userMessage": "hello", "sequenceIndex": 0}, "response": limited},
        {"match": {"userMessage": "hello"}, "response": {"content": "Here I am."}},
    )
    items, waits = await retried(aimock.base_url, request())
    assert items[-1].text == "Here I am."
    assert waits == [7.0]
    assert not any(isinstance(item, Reset) for item in items)


async def test_s23_a50_a_stream_that_drops_is_void_and_tried_again(aimock: Aimock) -> None:
    whole = "one two three four five six seven eight nine ten"
    aimock.answer(
        {
            "match": {"userMessage": "hello", "sequenceIndex": 0},
            "response": {"content": "WRONG " + whole},
            "chunkSize": 5,
            "truncateAfterChunks": 6,
            "latency": 10,  # aimock destroys the socket: what was sent just before would be lost with it
        },
        {"match": {"userMessage": "hello"}, "response": {"content": whole}, "chunkSize": 5},
    )
    items, _ = await retried(aimock.base_url, request())
    resets = [n for n, item in enumerate(items) if isinstance(item, Reset)]
    assert len(resets) == 1
    assert text_of(items[: resets[0]]).startswith("WRONG")
    assert text_of(items[resets[0] :]) == whole
    replies = [item for item in items if isinstance(item, Reply)]
    assert [reply.text for reply in replies] == [whole]


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


async def test_a_hang_is_given_up_after_the_longest_silence() -> None:
    async def silent(exchange: Exchange) -> None:
        await asyncio.Event().wait()

    async with peer(silent) as provider:
        error, items = await failure(provider.base_url, request(), silence=0.2)
        assert items == []
        assert error.retryable
        await asyncio.wait_for(provider.gone.wait(), 5)


async def test_a_stream_that_falls_silent_is_given_up() -> None:
    async def stalls(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.say({"content": "half"})
        await asyncio.Event().wait()

    async with peer(stalls) as provider:
        error, items = await failure(provider.base_url, request(), silence=0.2)
        assert text_of(items) == "half"
        assert error.retryable


async def test_a_slow_first_token_is_waited_for() -> None:
    go = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await go.wait()
        await exchange.begin()
        await exchange.say({"content": "at last"}, "stop")
        await exchange.end()

    async with peer(slow) as provider:
        model = chat(provider.base_url)
        waiting = asyncio.create_task(asked(model, request()))
        while not provider.seen:
            await asyncio.sleep(0)
        assert not waiting.done()
        go.set()
        items = await waiting
        await model.close()
        assert items[-1].text == "at last"


@pytest.mark.parametrize("streamed", [False, True])
async def test_cancelling_closes_the_connection(streamed: bool) -> None:
    async def endless(exchange: Exchange) -> None:
        if streamed:
            await exchange.begin()
            await exchange.say({"content": "half"})
        await asyncio.Event().wait()

    async with peer(endless) as provider:
        model = chat(provider.base_url)
        began = asyncio.Event()

        async def listen() -> None:
            async with aclosing(model.stream(request())) as items:
                async for _ in items:
                    began.set()

        listening = asyncio.create_task(listen())
        while not (began.is_set() if streamed else provider.seen):
            await asyncio.sleep(0)
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
        await asyncio.wait_for(provider.gone.wait(), 5)
        await model.close()


async def test_closing_the_iterator_closes_the_connection() -> None:
    async def endless(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.say({"content": "half"})
        await asyncio.Event().wait()

    async with peer(endless) as provider:
        model = chat(provider.base_url)
        async with aclosing(model.stream(request())) as items:
            assert await anext(items) == TextDelta("half")
        await asyncio.wait_for(provider.gone.wait(), 5)
        await model.close()


@pytest.mark.parametrize(
    "broken",
    [
        b"data: {\xff\xfe not utf-8\n\n",
        b"data: {not json\n\n",
        b'data: {"error": {"message": "worker died", "type": "server_error"}}\n\n',
        b"data: [DONE]\n\n",
    ],
    ids=["bytes", "json", "error event", "done without a finish"],
)
async def test_a_stream_that_breaks_is_retryable_and_no_answer(broken: bytes) -> None:
    async def breaks(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.say({"content": "half of "})
        await exchange.chunk(broken)
        await exchange.raw(b"0\r\n\r\n")

    async with peer(breaks) as provider:
        error, items = await failure(provider.base_url, request())
        assert text_of(items) == "half of "
        assert error.retryable
        assert "half of" not in error.message


async def test_a_200_that_is_no_stream_is_an_error() -> None:
    async def page(exchange: Exchange) -> None:
        await exchange.begin("text/html")
        await exchange.chunk(b"<html>Bad gateway</html>")
        await exchange.raw(b"0\r\n\r\n")

    async with peer(page) as provider:
        error, items = await failure(provider.base_url, request())
        assert items == []
        assert error.retryable


async def test_nobody_listens() -> None:
    async with peer(Exchange.end) as provider:
        base_url = provider.base_url
    error, _ = await failure(base_url, request())
    assert error.retryable


@pytest.mark.parametrize(
    ("status", "body", "retryable", "code"),
    [
        ("400 Bad Request", {"message": "bad temperature"}, False, "model_error"),
        ("401 Unauthorized", {"message": "Incorrect API key provided: sk-test-1"}, False, "model_error"),
        ("404 Not Found", {"message": "no such model", "code": "model_not_found"}, False, "model_error"),
        ("400 Bad Request", {"message": "too long", "code": "context_length_exceeded"}, False, "context_overflow"),
        ("429 Too Many", {"message": "pay first", "code": "insufficient_quota"}, False, "model_error"),
        ("429 Too Many", {"message": "slow down"}, True, "model_error"),
        ("500 Oops", {"message": "oops"}, True, "model_error"),
        ("529 Overloaded", {"message": "overloaded"}, True, "model_error"),
    ],
)
async def test_what_is_retried(status: str, body: dict[str, str], retryable: bool, code: str) -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.status(status, json.dumps({"error": body}))

    async with peer(refuse) as provider:
        error, _ = await failure(provider.base_url, request())
        assert len(provider.seen) == 1, "the client below must not retry by itself"
        assert error.retryable is retryable
        assert error.code == code
        assert status.split()[0] in error.message
        assert "sk-test-1" not in error.message


async def test_a_provider_that_says_not_to_retry_is_believed() -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.status("503 Down", "{}", x_should_retry="false")

    async with peer(refuse) as provider:
        error, _ = await failure(provider.base_url, request())
        assert not error.retryable


async def test_a37_a_character_cut_in_two_by_the_stream_is_whole() -> None:
    async def cuts(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.say({"content": "a \ud83d"})
        await exchange.say({"content": "\ude00 b \udc00 c\0"})
        await exchange.say({"content": "\ud83d"}, "stop")
        await exchange.end()

    async with peer(cuts) as provider:
        reply, deltas = await answer(provider.base_url, request())
        assert reply.text == text_of(deltas) == "a 😀 b \ufffd c\ufffd\ufffd"
        reply.text.encode()


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


async def test_cached_and_reasoning_tokens_are_counted() -> None:
    usage = {
        "prompt_tokens": 21,
        "completion_tokens": 9,
        "total_tokens": 30,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }

    async def counts(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.say({"content": "ok"}, "stop")
        last = {
            "id": "c1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [],
            "usage": usage,
        }
        await exchange.chunk(f"data: {json.dumps(last)}\n\n".encode())
        await exchange.end()

    async with peer(counts) as provider:
        reply, _ = await answer(provider.base_url, request())
        assert reply.usage == Usage(input_tokens=21, output_tokens=9, reasoning_tokens=4, cached_tokens=16)


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


async def test_what_one_provider_gave_goes_to_no_other() -> None:
    async with peer(reasons_and_asks) as provider, peer(reasons_and_asks) as other:
        first, _ = await answer(provider.base_url, request())
        await answer(other.base_url, goes_on(first, (first.opaque,)))
        await answer(provider.base_url, goes_on(first, (first.opaque,)), model="another")
        for sent in (other.seen[-1], provider.seen[-1]):
            assert "which city?" not in json.dumps(sent.body)


async def test_a_reply_with_nothing_to_send_back_has_no_opaque_item() -> None:
    async def plain(exchange: Exchange) -> None:
        await exchange.begin()
        for piece in ("<think>", "hm", "</think>", "four"):
            await exchange.say({"content": piece}, "stop" if piece == "four" else None)
        await exchange.end()

    async with peer(plain) as provider:
        reply, _ = await answer(provider.base_url, request())
        assert (reply.text, reply.reasoning, reply.opaque) == ("four", "hm", b"")
