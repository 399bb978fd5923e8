import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
import pytest

from turnstream.session.events import Usage
from turnstream.session.messages import UserMessage
from turnstream.settings import ModelSettings
from turnstream_runner.models.demo import DemoModel
from turnstream_runner.models.port import Item, ModelError, ModelRequest, Reply, Reset, TextDelta, UnknownModel
from turnstream_runner.models.registry import Models
from turnstream_runner.models.retry import Backoff, Retrying

REQUEST = ModelRequest(model="m", messages=(UserMessage("hello"),), idempotency_key="k")
DOWN = ModelError("down", retryable=True)
Play = Sequence[Item | ModelError]


class Scripted:
    """Plays one list of items a try."""

    def __init__(self, *plays: Play) -> None:
        self._plays = list(plays)
        self.requests: list[ModelRequest] = []
        self.open = 0

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Item, None]:
        self.requests.append(request)
        self.open += 1
        try:
            for item in self._plays.pop(0):
                if isinstance(item, ModelError):
                    raise item
                yield item
        finally:
            self.open -= 1


class Retried:
    def __init__(self, *plays: Play, backoff: Backoff | None = None, random: float = 0.0) -> None:
        self.model = Scripted(*plays)
        self.waits: list[float] = []
        backoff = backoff or Backoff(tries=3, first=1.0, longest=4.0)
        self._retrying = Retrying(self.model, random=lambda: random, backoff=backoff, sleep=self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    async def items(self) -> list[Item]:
        async with aclosing(self._retrying.stream(REQUEST)) as stream:
            return [item async for item in stream]


def tokens(output: int) -> Usage:
    return Usage(input_tokens=1, output_tokens=output)


async def test_what_works_is_handed_on() -> None:
    retried = Retried([TextDelta("hi"), Reply(text="hi", usage=tokens(1))])
    assert await retried.items() == [TextDelta("hi"), Reply(text="hi", usage=tokens(1))]
    assert retried.waits == []


async def test_s22_a_failure_before_the_stream_is_tried_again_and_leaves_no_mark() -> None:
    retried = Retried([DOWN], [DOWN], [Reply(text="hi")])
    assert await retried.items() == [Reply(text="hi")]
    assert retried.waits == [0.5, 1.0]
    assert [request.tries for request in retried.model.requests] == [0, 1, 2]
    assert {request.idempotency_key for request in retried.model.requests} == {"k"}


async def test_s22_the_last_failure_is_raised() -> None:
    retried = Retried([DOWN], [DOWN], [DOWN], [DOWN], backoff=Backoff())
    with pytest.raises(ModelError, match="down"):
        await retried.items()
    assert len(retried.model.requests) == 4


async def test_what_is_not_retryable_is_raised_at_once() -> None:
    retried = Retried([ModelError("bad request")])
    with pytest.raises(ModelError, match="bad request"):
        await retried.items()
    assert retried.waits == []


async def test_s23_a_broken_stream_is_void() -> None:
    retried = Retried([TextDelta("wrong"), DOWN], [TextDelta("hi"), Reply(text="hi")])
    assert await retried.items() == [TextDelta("wrong"), Reset("down"), TextDelta("hi"), Reply(text="hi")]


async def test_delays_grow_up_to_the_longest_and_are_jittered() -> None:
    plays: list[Play] = [[DOWN]] * 5
    steady = Retried(*plays, [Reply(text="hi")], backoff=Backoff(tries=6, first=1.0, longest=4.0), random=0.999)
    await steady.items()
    assert [round(wait, 2) for wait in steady.waits] == [1.0, 2.0, 4.0, 4.0, 4.0]
    early = Retried(*plays, [Reply(text="hi")], backoff=Backoff(tries=6, first=1.0, longest=4.0))
    await early.items()
    assert early.waits == [0.5, 1.0, 2.0, 2.0, 2.0]


async def test_the_time_that_the_provider_names_is_waited_for_but_not_for_ever() -> None:
    retried = Retried([ModelError("slow down", retryable=True, retry_after=9)], [Reply(text="hi")])
    await retried.items()
    assert retried.waits == [9]
    impatient = Retried([ModelError("tomorrow", retryable=True, retry_after=86_400)])
    with pytest.raises(ModelError, match="tomorrow"):
        await impatient.items()


async def test_an_empty_reply_is_asked_for_twice_more_and_paid_for() -> None:
    empty = Reply(usage=tokens(2))
    assert await Retried([empty], [empty], [Reply(text="hi", usage=tokens(3))]).items() == [
        Reply(text="hi", usage=Usage(input_tokens=3, output_tokens=7))
    ]
    [last] = await Retried([empty], [empty], [empty]).items()
    assert isinstance(last, Reply)
    assert last.is_empty


async def test_a_reply_that_is_empty_by_the_token_limit_is_not_asked_for_again() -> None:
    retried = Retried([Reply(finish="length", reasoning="hm")])
    assert await retried.items() == [Reply(finish="length", reasoning="hm")]


async def test_a_model_that_ends_without_a_reply_has_failed() -> None:
    with pytest.raises(ModelError, match="without a reply"):
        await Retried([TextDelta("hi")]).items()


async def test_every_try_is_closed_before_the_next() -> None:
    retried = Retried([TextDelta("a"), DOWN], [TextDelta("b"), Reply(text="b"), TextDelta("never")])
    async with aclosing(retried._retrying.stream(REQUEST)) as stream:
        async for item in stream:
            assert retried.model.open == (0 if isinstance(item, Reset | Reply) else 1)
    assert retried.model.open == 0


async def test_closing_stops_a_wait() -> None:
    retrying = Retrying(Scripted([TextDelta("a"), DOWN]), random=lambda: 0, backoff=Backoff(first=3600, longest=3600))

    async def listen() -> None:
        async with aclosing(retrying.stream(REQUEST)) as stream:
            async for item in stream:
                if isinstance(item, Reset):
                    broken.set()

    broken = asyncio.Event()
    listening = asyncio.create_task(listen())
    await broken.wait()
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening


# --- names ------------------------------------------------------------------------------------------------------------


async def test_the_demo_model_goes_by_its_name_and_by_logical_ones() -> None:
    models = Models({"play": ModelSettings(provider="demo")})
    await models.prepare(["demo", "no-such-model"])
    for name in ("demo", "play"):
        request = msgspec.structs.replace(REQUEST, messages=(UserMessage("[say hi]"),))
        async with aclosing(models.resolve(name).stream(request)) as stream:
            assert [item async for item in stream][-1].text == "hi"
    await models.close()


@pytest.mark.parametrize("name", ["", "gpt-5", "openai:", "anthropic:", "Demo"])
def test_an_unknown_name_says_which_there_are(name: str) -> None:
    with pytest.raises(UnknownModel, match=r"known: demo, openai:<id>, anthropic:<id>"):
        Models({}).resolve(name)


async def test_the_demo_model_recovers_behind_the_retry_layer() -> None:
    """What `[drop]` and `[fail 503 2]` are for."""
    retrying = Retrying(DemoModel(), random=lambda: 0.0, backoff=Backoff(first=0.001))
    for prompt in ("[drop] [say one two]", "[fail 503 2] [say one two]"):
        request = msgspec.structs.replace(REQUEST, messages=(UserMessage(prompt),))
        async with aclosing(retrying.stream(request)) as stream:
            items = [item async for item in stream]
        assert items[-1].text == "one two"
        assert any(isinstance(item, Reset) for item in items) is prompt.startswith("[drop]")
