"""What every wire to a provider does, whichever provider it is: the same cases against each one's own format."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from pydantic import SecretStr
from tests.support.providers import Aimock, Exchange, peer
from tests.support.wires import WIRES, Spoken

from turnstream.session.events import Attachment, ToolCall, Usage
from turnstream.session.messages import AssistantMessage, Message, ToolMessage, UserMessage
from turnstream.settings import ModelSettings
from turnstream_runner.models.port import (
    Finish,
    Image,
    Item,
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
from turnstream_runner.models.retry import Backoff

KEY = "key-9c1d5e"
WEATHER = ToolSpec(
    "weather",
    "The weather in a city.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
)
Script = Callable[[Spoken], Awaitable[None]]
pytestmark = pytest.mark.parametrize("wire", WIRES, ids=[wire.name for wire in WIRES])


def request(*messages: Message, **fields: Any) -> ModelRequest:
    return ModelRequest(model="m", messages=messages or (UserMessage("hello"),), **fields)


def models(wire: type[Spoken], base_url: str, *, tries: int = 1, silence: float = 10.0, **settings: Any) -> Models:
    said = {**wire.settings, "model": wire.model, "api_key": SecretStr(KEY), **settings}
    made = ModelSettings(base_url=base_url, silence=silence, **said)
    return Models({"m": made}, backoff=Backoff(tries=tries, first=0.001), random=lambda: 0.0)


async def listen(made: Models, asking: ModelRequest, items: list[Item]) -> None:
    async with aclosing(made.resolve("m").stream(asking)) as stream:
        async for item in stream:
            items += [item]


async def asked(
    wire: type[Spoken], base_url: str, asking: ModelRequest | None = None, **options: Any
) -> tuple[Reply, list[Item]]:
    """The reply and the deltas before it."""
    made, items = models(wire, base_url, **options), list[Item]()
    try:
        await listen(made, asking or request(), items)
    finally:
        await made.close()
    reply = items.pop()
    assert isinstance(reply, Reply)
    return reply, items


async def failed(
    wire: type[Spoken], base_url: str, asking: ModelRequest | None = None, **options: Any
) -> tuple[ModelError, list[Item]]:
    """The error, and what was streamed before it."""
    made, items = models(wire, base_url, **options), list[Item]()
    try:
        with pytest.raises(ModelError) as caught:
            await listen(made, asking or request(), items)
    finally:
        await made.close()
    return caught.value, items


def text_of(items: list[Item]) -> str:
    return "".join(item.text for item in items if isinstance(item, TextDelta))


def reasoning_of(items: list[Item]) -> str:
    return "".join(item.text for item in items if isinstance(item, ReasoningDelta))


def answers(wire: type[Spoken], script: Script) -> Callable[[Exchange], Awaitable[None]]:
    """A peer's script that speaks this wire."""

    async def answer(exchange: Exchange) -> None:
        await script(wire(exchange))

    return answer


async def fine(spoken: Spoken) -> None:
    await spoken.begin()
    await spoken.say("ok")
    await spoken.end()


# --- what is said -----------------------------------------------------------------------------------------------------


async def test_text_and_reasoning_are_streamed_on_channels_of_their_own(wire: type[Spoken]) -> None:
    async def thinks(spoken: Spoken) -> None:
        await spoken.begin()
        await spoken.think("They ", "greet ", "me.", hidden="aGlkZGVu")
        await spoken.say("Grüße, ", "👩‍👩‍👧 ", "\u2028 done.")
        await spoken.end()

    async with peer(answers(wire, thinks)) as provider:
        reply, items = await asked(wire, provider.base_url)
    assert reply.text == text_of(items) == "Grüße, 👩‍👩‍👧 \u2028 done."
    assert reply.reasoning == reasoning_of(items) == "They greet me."
    assert [type(item) for item in items] == [ReasoningDelta] * 3 + [TextDelta] * 3
    assert reply.finish == "stop"


async def test_several_tools_are_asked_for_in_one_step(wire: type[Spoken]) -> None:
    async def asks(spoken: Spoken) -> None:
        await spoken.begin()
        await spoken.say("I look.")
        await spoken.ask("call_a", "weather", '{"ci', 'ty": "Os', 'lo"}')
        await spoken.ask("call_b", "weather", '{"city": "Wien"}')
        await spoken.ask("call_c", "time")
        await spoken.end("tool_calls")

    async with peer(answers(wire, asks)) as provider:
        reply, _ = await asked(wire, provider.base_url, request(tools=(WEATHER,)))
    assert (reply.text, reply.finish) == ("I look.", "tool_calls")
    assert [(call.id, call.name) for call in reply.tool_calls] == [
        ("call_a", "weather"),
        ("call_b", "weather"),
        ("call_c", "time"),
    ]
    assert [json.loads(call.arguments) for call in reply.tool_calls[:2]] == [{"city": "Oslo"}, {"city": "Wien"}]
    assert reply.tool_calls[2].arguments in ("", "{}")


@pytest.mark.parametrize("finish", ["stop", "length", "content_filter"])
async def test_why_an_answer_ends(wire: type[Spoken], finish: Finish) -> None:
    async def says(spoken: Spoken) -> None:
        await spoken.begin()
        await spoken.say("so far")
        await spoken.end(finish)

    async with peer(answers(wire, says)) as provider:
        reply, _ = await asked(wire, provider.base_url)
    assert (reply.text, reply.finish) == ("so far", finish)


async def test_tokens_are_counted_cached_and_reasoned_ones_among_them(wire: type[Spoken]) -> None:
    usage = Usage(input_tokens=2100, output_tokens=90, cached_tokens=1600, reasoning_tokens=40)

    async def counts(spoken: Spoken) -> None:
        await spoken.begin(usage)
        await spoken.say("ok")
        await spoken.end()

    async with peer(answers(wire, counts)) as provider:
        reply, _ = await asked(wire, provider.base_url)
        assert reply.usage == usage
        priced, _ = await asked(wire, provider.base_url, input_price=2, cached_price=1, output_price=10)
    assert priced.usage.cost == 500 * 2 + 1600 * 1 + 90 * 10


# --- what is asked ----------------------------------------------------------------------------------------------------

CALLS = (
    ToolCall(id="call_a", name="weather", arguments='{"city": "Oslo"}'),
    ToolCall(id="call_b", name="t", arguments=""),
)
CONVERSATION = (
    UserMessage("weather?"),
    AssistantMessage("I look.", CALLS),
    ToolMessage("call_a", "weather", "-4"),
    ToolMessage("call_b", "t", "error: no such tool", is_error=True),
    UserMessage("in short, please"),
)


async def test_a_conversation_is_sent_as_it_was(wire: type[Spoken]) -> None:
    async with peer(answers(wire, fine)) as provider:
        await asked(wire, provider.base_url, request(*CONVERSATION, instructions="Be brief.", tools=(WEATHER,)))
        [sent] = provider.seen
    assert wire.texts(sent.body) == [
        ("system", "Be brief."),
        ("user", "weather?"),
        ("assistant", "I look."),
        ("call", "call_a"),
        ("call", "call_b"),
        ("result", "call_a"),
        ("result", "call_b"),
        ("user", "in short, please"),
    ]
    assert KEY in {sent.headers.get("x-api-key"), sent.headers.get("authorization", "").removeprefix("Bearer ")}
    assert KEY not in json.dumps(sent.body)


async def test_images_stand_where_they_were_attached(wire: type[Spoken]) -> None:
    files = tuple(
        Attachment(name=name, media_type=kind, size=5, sha256="", blob=name)
        for name, kind in (("a.png", "image/png"), ("b.txt", "text/plain"))
    )
    shown = (Shown(image=Image("image/png", b"\x89PNG\r\n\x1a\n...")), Shown(text="a < b"))
    async with peer(answers(wire, fine)) as provider:
        await asked(wire, provider.base_url, request(UserMessage("look", files), shown=shown))
        [sent] = provider.seen
    assert wire.texts(sent.body) == [
        ("user", 'look\n<attachment name="a.png" type="image/png" size="5"/>'),
        ("user", "<image>"),
        ("user", '<attachment name="b.txt" type="text/plain" size="5">\na < b\n</attachment>'),
    ]
    assert "iVBORw0KGgouLi4=" in json.dumps(sent.body)


async def test_ids_of_other_providers_are_spelt_as_this_one_takes_them(wire: type[Spoken]) -> None:
    ids = ["call-1-1", "call-1-1", "functions.weather:0", "x" * 100, "ünï|fc_1"]
    turns: list[Message] = []
    for n, name in enumerate(ids):
        call = ToolCall(id=name, name="weather", arguments="{}")
        turns += [UserMessage(f"{n}?"), AssistantMessage("", (call,)), ToolMessage(name, "weather", f"{n}")]
    async with peer(answers(wire, fine)) as provider:
        for _ in range(2):
            await asked(wire, provider.base_url, request(*turns, tools=(WEATHER,)))
        first, again = (wire.texts(exchange.body) for exchange in provider.seen)
    calls = [name for kind, name in first if kind == "call"]
    assert first == again
    assert calls == [name for kind, name in first if kind == "result"]
    assert len(set(calls)) == len(ids)
    assert calls[0] == "call-1-1"
    assert all(len(name) <= 40 and name.replace("-", "_").replace("_", "a").isalnum() for name in calls)


async def test_s02_the_front_of_the_prompt_stays_the_same(wire: type[Spoken]) -> None:
    later = (*CONVERSATION, AssistantMessage("Cold."), UserMessage("thanks"))
    async with peer(answers(wire, fine)) as provider:
        for messages in (CONVERSATION, later, later):
            await asked(wire, provider.base_url, request(*messages, instructions="Be brief.", tools=(WEATHER,)))
        one, two, three = (exchange.body for exchange in provider.seen)
    assert two == three
    assert one["tools"] == two["tools"]
    assert wire.texts(two)[: len(wire.texts(one))] == wire.texts(one)


# --- what comes back within a run -------------------------------------------------------------------------------------


async def reasons_and_asks(spoken: Spoken) -> None:
    """Thinks and asks for a tool until it is told what the tool says."""
    await spoken.begin()
    if any(kind == "result" for kind, _ in spoken.texts(spoken.exchange.body)):
        await spoken.say("done")
        await spoken.end()
        return
    await spoken.think("SECRET-", "THOUGHT", hidden="c2lnbmVk")
    await spoken.say("I look.")
    await spoken.ask("call_a", "weather", "{}")
    await spoken.end("tool_calls")


def goes_on(first: Reply, opaque: tuple[bytes, ...]) -> ModelRequest:
    """The next step of the run, after an earlier turn."""
    [call] = first.tool_calls
    earlier = (UserMessage("hi"), AssistantMessage("hello"), UserMessage("weather?"))
    result = ToolMessage(call.id, call.name, "sunny")
    return request(*earlier, AssistantMessage(first.text, (call,)), result, opaque=opaque, tools=(WEATHER,))


async def test_what_the_provider_wants_back_goes_back_and_only_then(wire: type[Spoken]) -> None:
    async with peer(answers(wire, reasons_and_asks)) as provider, peer(answers(wire, reasons_and_asks)) as other:
        first, _ = await asked(wire, provider.base_url, request(tools=(WEATHER,)))
        assert first.reasoning == "SECRET-THOUGHT"
        await asked(wire, provider.base_url, goes_on(first, (first.opaque,)))
        wanted = wire.hidden(provider.seen[-1].body)
        assert wanted == ["SECRET-THOUGHT" if wire.name == "chat" else "c2lnbmVk"]
        for nothing in ((), (b"",), (b"nonsense",), (b"{}",)):
            await asked(wire, provider.base_url, goes_on(first, nothing))
            assert "SECRET-THOUGHT" not in json.dumps(provider.seen[-1].body)
            assert wire.hidden(provider.seen[-1].body) == []
        await asked(wire, provider.base_url, goes_on(first, (first.opaque,)), model="another-model")
        await asked(wire, other.base_url, goes_on(first, (first.opaque,)))
        for sent in (provider.seen[-1], other.seen[-1]):
            assert "SECRET-THOUGHT" not in json.dumps(sent.body)
            assert wire.hidden(sent.body) == []


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        ("400 Bad Request", "invalid_request_error", False),
        ("401 Unauthorized", "authentication_error", False),
        ("404 Not Found", "not_found_error", False),
        ("429 Too Many", "rate_limit_error", True),
        ("500 Oops", "api_error", True),
        ("503 Down", "api_error", True),
        ("529 Overloaded", "overloaded_error", True),
    ],
)
async def test_what_is_retried_and_by_whom(wire: type[Spoken], status: str, kind: str, retryable: bool) -> None:
    async def refuses(exchange: Exchange) -> None:
        await exchange.status(status, wire.error(f"because of {KEY}", kind=kind))

    async with peer(refuses) as provider:
        error, items = await failed(wire, provider.base_url, tries=3)
        assert len(provider.seen) == (3 if retryable else 1), "the client below must not retry by itself"
    assert items == []
    assert (error.retryable, error.code) == (retryable, "model_error")
    assert error.message == f"the provider answered {status.split()[0]}: because of ***"


@pytest.mark.parametrize(("status", "kind"), [("429 Too Many", "rate_limit_error"), ("503 Down", "api_error")])
async def test_a_provider_says_how_long_to_wait(wire: type[Spoken], status: str, kind: str) -> None:
    async def limits(exchange: Exchange) -> None:
        await exchange.status(status, wire.error("slow down", kind=kind), retry_after="61")

    async with peer(limits) as provider:
        error, _ = await failed(wire, provider.base_url, tries=3)
        assert len(provider.seen) == 1, "that is longer than anybody waits"
    assert (error.retryable, error.retry_after) == (True, 61.0)


async def test_a_provider_that_says_not_to_retry_is_believed(wire: type[Spoken]) -> None:
    async def refuses(exchange: Exchange) -> None:
        await exchange.status("503 Down", wire.error("for long"), x_should_retry="false")

    async with peer(refuses) as provider:
        error, _ = await failed(wire, provider.base_url, tries=3)
        assert len(provider.seen) == 1
    assert not error.retryable


TOO_LONG = {
    "chat": [("context_length_exceeded", "This model's maximum context length is 8192 tokens.")],
    "responses": [("context_length_exceeded", "Your input exceeds the context window of this model.")],
    "anthropic": [
        (None, "prompt is too long: 210000 tokens > 200000 maximum"),
        (None, "input length and `max_tokens` exceed context limit: 190000 + 64000 > 200000"),
    ],
}


async def test_a_prompt_that_is_too_long(wire: type[Spoken]) -> None:
    for code, message in TOO_LONG[wire.name]:

        async def refuses(exchange: Exchange, code: str | None = code, message: str = message) -> None:
            body = wire.error(message, kind="invalid_request_error", code=code)
            await exchange.status("400 Bad Request", body)

        async with peer(refuses) as provider:
            error, _ = await failed(wire, provider.base_url, tries=3)
            assert len(provider.seen) == 1
        assert (error.code, error.retryable) == ("context_overflow", False), message


async def half(spoken: Spoken, then: Callable[[], Awaitable[object]], *, asks: bool = False) -> None:
    """A text, or a call of a tool, and then something else in the middle of it."""

    class Cut(Exception):
        pass

    chunk, said = spoken.exchange.chunk, 0

    async def counted(data: bytes) -> None:
        nonlocal said
        await chunk(data)
        said += b"half of " in data
        if said:
            raise Cut

    await spoken.begin()
    spoken.exchange.chunk = counted
    try:
        await (spoken.ask("call_a", "weather", '{"city": "half of ', 'it"}') if asks else spoken.say("half of "))
    except Cut:
        spoken.exchange.chunk = chunk
        await then()


async def test_s23_a50_a_stream_that_drops_is_void_and_tried_again(wire: type[Spoken]) -> None:
    tries = 0

    async def drops(spoken: Spoken) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            await half(spoken, _nothing)  # the connection closes
        else:
            await spoken.begin()
            await spoken.say("whole")
            await spoken.end()

    async with peer(answers(wire, drops)) as provider:
        reply, items = await asked(wire, provider.base_url, tries=2)
    at = next(n for n, item in enumerate(items) if isinstance(item, Reset))
    assert (text_of(items[:at]), text_of(items[at:]), reply.text) == ("half of ", "whole", "whole")


async def _nothing() -> None:
    pass


@pytest.mark.parametrize("how", ["ends", "fails", "bytes", "json"])
async def test_a_stream_that_breaks_is_no_answer(wire: type[Spoken], how: str) -> None:
    async def breaks(spoken: Spoken) -> None:
        async def then() -> None:
            match how:
                case "fails":
                    await spoken.broken()
                case "bytes":
                    await spoken.exchange.chunk(b"data: {\xff\xfe\n\n")
                case "json":
                    await spoken.exchange.chunk(b"event: ping\ndata: {not json\n\n")
                case _:
                    pass
            await spoken.exchange.raw(b"0\r\n\r\n")

        await half(spoken, then)

    async with peer(answers(wire, breaks)) as provider:
        error, items = await failed(wire, provider.base_url)
    assert text_of(items) == "half of "
    assert (error.retryable, error.code) == (True, "model_error")
    assert "half of" not in error.message


async def test_a_call_that_is_cut_off_is_no_call(wire: type[Spoken]) -> None:
    async def cuts(spoken: Spoken) -> None:
        await half(spoken, _nothing, asks=True)

    async with peer(answers(wire, cuts)) as provider:
        error, items = await failed(wire, provider.base_url, request(tools=(WEATHER,)))
    assert (items, error.retryable) == ([], True)


async def test_a_200_that_is_no_stream_is_no_answer(wire: type[Spoken]) -> None:
    async def page(exchange: Exchange) -> None:
        await exchange.begin("text/html")
        await exchange.chunk(b"<html>Bad gateway</html>")
        await exchange.raw(b"0\r\n\r\n")

    async with peer(page) as provider:
        error, items = await failed(wire, provider.base_url)
    assert (items, error.retryable) == ([], True)


@pytest.mark.parametrize("streamed", [False, True])
async def test_silence_is_given_up(wire: type[Spoken], streamed: bool) -> None:
    async def silent(spoken: Spoken) -> None:
        if streamed:
            await half(spoken, asyncio.Event().wait)
        await asyncio.Event().wait()

    async with peer(answers(wire, silent)) as provider:
        error, items = await failed(wire, provider.base_url, silence=0.2)
        await asyncio.wait_for(provider.gone.wait(), 5)
    assert (text_of(items), error.retryable) == ("half of " if streamed else "", True)


async def test_an_answer_may_take_longer_than_the_longest_silence(wire: type[Spoken]) -> None:
    async def slow(spoken: Spoken) -> None:
        await spoken.begin()
        for piece in "done":
            await asyncio.sleep(0.15)
            await spoken.say(piece)
        await spoken.end()

    async with peer(answers(wire, slow)) as provider:
        reply, _ = await asked(wire, provider.base_url, silence=0.5)
    assert reply.text == "done"


async def test_nobody_listens(wire: type[Spoken]) -> None:
    async with peer(answers(wire, fine)) as provider:
        base_url = provider.base_url
    error, _ = await failed(wire, base_url)
    assert error.retryable


@pytest.mark.parametrize("streamed", [False, True])
async def test_cancelling_closes_the_connection(wire: type[Spoken], streamed: bool) -> None:
    async def endless(spoken: Spoken) -> None:
        if streamed:
            await half(spoken, asyncio.Event().wait)
        await asyncio.Event().wait()

    async with peer(answers(wire, endless)) as provider:
        made, items = models(wire, provider.base_url), list[Item]()
        listening = asyncio.create_task(listen(made, request(), items))
        while not (items if streamed else provider.seen):
            await asyncio.sleep(0)
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
        await asyncio.wait_for(provider.gone.wait(), 5)
        await made.close()
    assert text_of(items) == ("half of " if streamed else "")


async def test_closing_the_iterator_closes_the_connection(wire: type[Spoken]) -> None:
    async def endless(spoken: Spoken) -> None:
        await half(spoken, asyncio.Event().wait)

    async with peer(answers(wire, endless)) as provider:
        made = models(wire, provider.base_url)
        async with aclosing(made.resolve("m").stream(request())) as items:
            assert await anext(items) == TextDelta("half of ")
        await asyncio.wait_for(provider.gone.wait(), 5)
        await made.close()


async def test_a37_text_that_is_no_unicode_is_made_fit(wire: type[Spoken]) -> None:
    async def cuts(spoken: Spoken) -> None:
        await spoken.begin()
        await spoken.say("a \ud83d", "\ude00 b \udc00 c\0", "\ud83d")
        await spoken.end()

    async with peer(answers(wire, cuts)) as provider:
        reply, items = await asked(wire, provider.base_url)
    assert reply.text == text_of(items) == "a 😀 b \ufffd c\ufffd\ufffd"


async def test_a_model_that_asks_for_tools_without_end_is_stopped(wire: type[Spoken]) -> None:
    async def asks(spoken: Spoken) -> None:
        await spoken.begin()
        for n in range(300):
            await spoken.ask(f"call_{n}", "weather", "{}")
        await spoken.end("tool_calls")

    async with peer(answers(wire, asks)) as provider:
        error, _ = await failed(wire, provider.base_url)
    assert error.message == "the model asked for more than 256 tools in one reply"


# --- against a server of somebody else's ------------------------------------------------------------------------------

TOOLS = [{"id": f"call_{n}", "name": "weather", "arguments": json.dumps({"city": n})} for n in ("a", "b")]


async def test_aimock_a_run_with_reasoning_and_tools(wire: type[Spoken], aimock: Aimock) -> None:
    said, usage = "Cold, and warm: 👩‍👩‍👧 \u2028 done.", {"prompt_tokens": 21, "completion_tokens": 9}
    aimock.answer(
        {"match": {"hasToolResult": True}, "response": {"content": said, "usage": usage}, "chunkSize": 5},
        {
            "match": {"userMessage": "weather?"},
            "response": {"content": "I look.", "toolCalls": TOOLS, "reasoning": "SECRET-THOUGHT"},
        },
    )
    first, items = await asked(wire, aimock.base_url, request(UserMessage("weather?"), tools=(WEATHER,)))
    assert (first.text, first.reasoning, first.finish) == ("I look.", "SECRET-THOUGHT", "tool_calls")
    assert (text_of(items), reasoning_of(items)) == (first.text, first.reasoning)
    assert [(call.id, call.name, json.loads(call.arguments)) for call in first.tool_calls] == [
        ("call_a", "weather", {"city": "a"}),
        ("call_b", "weather", {"city": "b"}),
    ]
    results = tuple(ToolMessage(call.id, call.name, "-4") for call in first.tool_calls)
    going_on = (UserMessage("weather?"), AssistantMessage(first.text, first.tool_calls), *results)
    second, items = await asked(
        wire, aimock.base_url, request(*going_on, opaque=(first.opaque,), instructions="Be brief.", tools=(WEATHER,))
    )
    assert second.text == text_of(items) == said
    assert sum(isinstance(item, TextDelta) for item in items) > 3
    assert (second.finish, second.usage.input_tokens, second.usage.output_tokens) == ("stop", 21, 9)
    later = (*going_on, AssistantMessage(said), UserMessage("weather? again"))
    await asked(wire, aimock.base_url, request(*later, tools=(WEATHER,)))
    assert "SECRET-THOUGHT" not in json.dumps(aimock.requests()[-1])


async def test_aimock_s22_503_and_429_are_retried_by_one_layer(wire: type[Spoken], aimock: Aimock) -> None:
    hello = {"userMessage": "hello"}
    down = {"error": {"message": "upstream is down", "type": "server_error"}, "status": 503}
    limited = {"error": {"message": "slow down", "type": "rate_limit_error"}, "status": 429, "retryAfter": 61}
    aimock.answer({"match": hello, "response": down})
    error, _ = await failed(wire, aimock.base_url, tries=3)
    assert (error.retryable, len(aimock.requests())) == (True, 3)
    assert "upstream is down" in error.message
    aimock.answer({"match": hello, "response": limited})
    error, _ = await failed(wire, aimock.base_url, tries=3)
    assert (error.retry_after, len(aimock.requests())) == (61.0, 1)


async def test_aimock_s23_a50_a_stream_that_drops_is_tried_again(wire: type[Spoken], aimock: Aimock) -> None:
    whole = "one two three four five six seven eight nine ten"
    hello = {"userMessage": "hello"}
    aimock.answer(
        {
            "match": {**hello, "sequenceIndex": 0},
            "response": {"content": "WRONG " + whole},
            "chunkSize": 5,
            "truncateAfterChunks": 8,
            "latency": 10,  # aimock destroys the socket: what was sent just before would be lost with it
        },
        {"match": hello, "response": {"content": whole}, "chunkSize": 5},
    )
    reply, items = await asked(wire, aimock.base_url, tries=2)
    [at] = [n for n, item in enumerate(items) if isinstance(item, Reset)]
    assert text_of(items[:at]).startswith("WRONG")
    assert reply.text == text_of(items[at:]) == whole
