"""What a policy and the limits make of a run, on a real server: crashes, loops, denials, empty replies, costs, clients
that go away, and turns that are tried again."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from tests.support.driving import Latch, asks_once, call, echo, fails, says
from tests.support.stage import Actor, Stage

from turnstream.agents import tool
from turnstream.session.commands import CancelRun
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    Error,
    ModelReplied,
    RunCancelRequested,
    RunEnded,
    RunWaiting,
    ToolReturned,
    Usage,
)
from turnstream.session.messages import AssistantMessage, ToolMessage, UserMessage
from turnstream.settings import ModelSettings
from turnstream_runner.models.port import ModelRequest, Reply
from turnstream_runner.models.registry import Models


@tool(idempotent=True)
def look(at: str = "") -> str:
    "Looks."
    return f"seen {at}"


@tool(approval=True)
def pay() -> str:
    "Pays."
    return "paid"


async def crashed(stage: Stage, actor: Actor, **policy: Any) -> None:
    """A run whose runner has died in a model call."""
    actor.models.script = latch = Latch("half")
    await stage.say(**policy)
    await latch.reached.wait()
    await actor.die()


# --- recovery ---------------------------------------------------------------------------------------------------------


async def test_s18_a_run_whose_runner_dies_fails_where_runs_do_not_go_on(stage: Stage) -> None:
    await crashed(stage, await stage.actor(), preset="thread")
    actor = await stage.actor()
    end = await stage.end()
    assert (end.status, end.attempt) == ("failed", 1)
    assert end.error == Error(
        code="interrupted", message="interrupted: the runner stopped while the run was in flight", retryable=True
    )
    await stage.say("next")
    assert (await stage.end(run=2)).content == "next"
    assert actor.models.requests[-1].messages == (UserMessage("hello"), UserMessage("next")), "it stays taken"


@pytest.mark.parametrize("durable", [True, False])
async def test_s18_a_run_of_a_durable_agent_goes_on(stage: Stage, durable: bool) -> None:
    await crashed(stage, await stage.actor(durable=durable), preset="memory")
    await stage.actor(durable=durable)
    end = await stage.end()
    assert (end.status, end.attempt) == (("completed", 2) if durable else ("failed", 1))


async def test_s19_a_call_that_was_under_way_is_closed_for_the_next_run(stage: Stage) -> None:
    begun = asyncio.Event()

    @tool
    async def errand() -> str:
        begun.set()
        await asyncio.Event().wait()
        return "never"

    first = await stage.actor(asks_once(call("errand")), tools=[errand])
    await stage.say(preset="thread")
    await begun.wait()
    await first.die()
    second = await stage.actor(tools=[errand])
    end = await stage.end()
    assert (end.error and end.error.code, end.unfinished) == ("interrupted", ("errand",))
    await stage.say("next")
    await stage.end(run=2)
    _, _, result, _ = second.models.requests[-1].messages
    assert isinstance(result, ToolMessage)
    assert "may or may not have taken effect" in result.text


# --- limits -----------------------------------------------------------------------------------------------------------


async def test_a_run_that_asks_for_the_same_call_again_and_again_is_a_loop(stage: Stage) -> None:
    spellings = iter(['{"at": "x"}', '{ "at":"x" }', '{"at":"x"}\n', '{"at": "y"}', '{"at":"\\u0078"}', '{"at":"x"}'])

    async def script(request: ModelRequest):  # type: ignore[no-untyped-def]
        yield Reply(tool_calls=(call("look", next(spellings)),))

    await stage.actor(script, tools=[look])
    await stage.say()
    end = await stage.end()
    assert (end.status, end.error and end.error.code) == ("failed", "tool_loop_detected")
    assert len(await stage.found(ToolReturned)) == 5, "the fifth of the same is not called any more"
    assert len(end.unfinished) == 1


async def test_a_run_whose_same_call_is_denied_again_and_again_ends(stage: Stage) -> None:
    async def script(request: ModelRequest):  # type: ignore[no-untyped-def]
        yield Reply(tool_calls=(call("pay"),))

    actor = await stage.actor(script, tools=[pay])
    await stage.say()
    for n in range(1, 4):
        await stage.waiting(count=n)
        await stage.approve(False, k=n, reason="no")
    end = await stage.end()
    assert (end.status, end.error and end.error.code) == ("failed", "repeated_denial")
    assert len(actor.models.requests) == 3


@pytest.mark.parametrize("status", ["failed", "completed"])
async def test_s25_nothing_at_all_is_what_the_policy_says(stage: Stage, status: str) -> None:
    actor = await stage.actor(says(Reply()))
    await stage.say(empty="fail" if status == "failed" else "note")
    end = await stage.end()
    assert (end.status, end.content) == (status, "")
    assert (end.error and end.error.code, end.note) == (
        ("empty_reply", "")
        if status == "failed"
        else (None, "no answer: the model said nothing at all, asked again and again")
    )
    actor.models.script = echo
    await stage.say("next")
    await stage.end(run=2)
    assert actor.models.requests[-1].messages == (UserMessage("hello"), UserMessage("next"))


def priced() -> Models:
    """The demo model, with prices: of a million tokens, 2 to read them and 8 to write them."""
    settings = ModelSettings(provider="demo", input_price=2.0, output_price=8.0)
    return Models({"priced": settings, "free": ModelSettings(provider="demo")})


async def test_a_run_that_has_cost_too_much_calls_its_model_no_more(stage: Stage) -> None:
    """`[say …]` of 4000 bytes are 1000 tokens, which cost 8,000 millionths."""
    await stage.actor(models=priced(), model="priced", tools=[look], limits={"max_cost": 0.015})
    text = f"[say {'x' * 4000}] [tool look {{}}]"
    await stage.say(f"{text} [then] {text} [then] [say unreached]")
    end = await stage.end()
    assert (end.status, end.error and end.error.code) == ("failed", "budget_exceeded")
    assert end.error and end.error.message == "it cost more than 0.015"
    replies = await stage.found(ModelReplied)
    assert len(replies) == 2
    costs = [reply.usage.input_tokens * 2 + reply.usage.output_tokens * 8 for reply in replies]
    assert [reply.usage.cost for reply in replies] == costs
    assert end.usage.cost == sum(costs) > 15_000


async def test_what_is_answered_may_have_cost_too_much(stage: Stage) -> None:
    await stage.actor(models=priced(), model="priced", limits={"max_cost": 0.000001})
    await stage.say("[say all of it]")
    end = await stage.end()
    assert (end.status, end.content) == ("completed", "all of it")
    assert end.usage.cost > 1


@pytest.mark.parametrize("model", ["free", "demo"])
async def test_a_run_whose_cost_is_limited_is_not_asked_of_a_model_without_prices(stage: Stage, model: str) -> None:
    """A message may name another model than the agent's."""
    await stage.actor(models=priced(), model="priced", limits={"max_cost": 1.0})
    stage.specs["default"] = msgspec.structs.replace(stage.specs["default"], model=model)
    await stage.say("hello")
    end = await stage.end()
    assert end.error == Error(
        code="model_error", message=f"the cost of the run is limited, and model {model!r} has no prices"
    )


def test_a_cost_is_of_what_was_read_what_was_cached_and_what_was_written() -> None:
    async def cost(usage: Usage, **prices: float) -> int:
        models = Models({"m": ModelSettings(provider="demo", **prices)})
        models._make = lambda _: _Uses(usage)  # type: ignore[method-assign]
        items = [item async for item in models.resolve("m").stream(ModelRequest(model="m", messages=()))]
        reply = items[-1]
        assert isinstance(reply, Reply)
        return reply.usage.cost

    used = Usage(input_tokens=1000, cached_tokens=600, output_tokens=10)
    assert asyncio.run(cost(used, input_price=2, output_price=8)) == 2080
    assert asyncio.run(cost(used, input_price=2, cached_price=0.5, output_price=8)) == 400 * 2 + 300 + 80
    assert asyncio.run(cost(used, input_price=0, cached_price=0, output_price=0.04)) == 0
    odd = Usage(input_tokens=1, cached_tokens=5)
    assert asyncio.run(cost(odd, input_price=2, cached_price=1, output_price=8)) == 1


class _Uses:
    def __init__(self, usage: Usage) -> None:
        self._usage = usage

    async def stream(self, request: ModelRequest):  # type: ignore[no-untyped-def]
        yield Reply(text="x", usage=self._usage)


# --- clients that go away ---------------------------------------------------------------------------------------------


async def disconnect(stage: Stage) -> bool:
    """The client that streams run 1 goes away. Whether that is stored."""
    handled = await stage.do(CancelRun(origin=stage.origin(), run=1, disconnected=True))
    return handled.recorded is not None


async def test_s24_a_client_that_goes_away_ends_its_run_and_what_was_said_is_kept(stage: Stage) -> None:
    latch = Latch("half an ", "answer")
    actor = await stage.actor(latch)
    await stage.say(preset="memory")
    await latch.reached.wait()
    assert await disconnect(stage)
    end = await stage.end()
    assert (end.status, end.content, end.attempt) == ("failed", "half an answer", 1)
    assert end.error == Error(code="client_disconnected", message="client disconnected mid-stream")
    assert actor.models.closed == 1
    assert len(await stage.found(RunCancelRequested)) == 1


async def test_s24_a_client_that_goes_away_is_nothing_to_a_run_that_goes_on(stage: Stage) -> None:
    latch = Latch(answer="whole")
    await stage.actor(latch)
    await stage.say(preset="thread")
    await latch.reached.wait()
    assert not await disconnect(stage)
    latch.let_go()
    assert (await stage.end()).content == "whole"


async def test_s24_a_run_that_waits_waits_for_whoever_comes_back(stage: Stage) -> None:
    asked = call("conversation_ask_user", json.dumps({"question": "?"}), id="ask")
    await stage.actor(asks_once(asked), control={"ask_user": True})
    await stage.say(preset="memory")
    await stage.waiting()
    assert not await disconnect(stage)
    await stage.answer("back")
    assert (await stage.end()).status == "completed"


# --- again ------------------------------------------------------------------------------------------------------------


async def test_s27_a_turn_that_failed_is_tried_again_without_its_error(stage: Stage) -> None:
    actor = await stage.actor(fails("the provider is down"))
    await stage.say("hello", name="m1")
    assert (await stage.end()).status == "failed"
    actor.models.script = echo
    await stage.retry()
    end = await stage.end(run=2)
    assert (end.status, end.content) == ("completed", "hello")
    started = (await stage.starts())[-1]
    assert (started.trigger, started.message_ids) == ("retry", ("m1",))
    assert actor.models.requests[-1].messages == (UserMessage("hello"),)
    await stage.say("next")
    await stage.end(run=3)
    expected = (UserMessage("hello"), AssistantMessage("hello"), UserMessage("next"))
    assert actor.models.requests[-1].messages == expected


async def test_s27_what_a_failed_turn_did_stays_and_its_message_is_shown_once(stage: Stage) -> None:
    async def script(request: ModelRequest):  # type: ignore[no-untyped-def]
        if isinstance(request.messages[-1], ToolMessage):
            async for item in fails("down")(request):
                yield item
        else:
            yield Reply(tool_calls=(call("look"),))

    actor = await stage.actor(script, tools=[look])
    await stage.say("hello")
    await stage.end()
    actor.models.script = says(Reply(text="done"))
    await stage.retry()
    await stage.end(run=2)
    shown = actor.models.requests[-1].messages
    assert [type(message) for message in shown] == [UserMessage, AssistantMessage, ToolMessage]
    assert not [message for message in shown if "down" in message.text]


async def test_s28_what_did_not_fail_is_not_tried_again(stage: Stage) -> None:
    await stage.actor()
    await stage.say("hello")
    await stage.end()
    with pytest.raises(Rejected) as refused:
        await stage.retry()
    assert refused.value.code == "nothing_to_retry"


async def test_a_question_of_a_turn_that_is_tried_again_is_asked_again(stage: Stage) -> None:
    asked = call("conversation_ask_user", json.dumps({"question": "?", "expires_in": 0.2}), id="ask")
    actor = await stage.actor(asks_once(asked), control={"ask_user": True})
    await stage.say("hello")
    assert (await stage.end()).error
    again = call("conversation_ask_user", json.dumps({"question": "now?"}), id="ask")

    async def script(request: ModelRequest):  # type: ignore[no-untyped-def]
        shown = [message.text for message in request.messages if isinstance(message, ToolMessage)]
        yield Reply(text="done") if "here" in shown else Reply(tool_calls=(again,))

    actor.models.script = script
    await stage.retry()
    [request] = (await stage.waiting(count=2)).requests
    assert request.request == "s1.2.q1"
    await stage.answer("here", run=2)
    assert (await stage.end(run=2)).content == "done"


# --- everything at once -----------------------------------------------------------------------------------------------


async def test_runs_that_ask_crash_and_are_steered_all_end_once(stage: Stage) -> None:
    """Ten sessions; their runners die one after the other while people answer."""
    asked = call("conversation_ask_user", json.dumps({"question": "?"}), id="ask")
    fields: dict[str, Any] = {"control": {"ask_user": True}, "tools": [look]}
    script = asks_once(asked, call("look"))
    actors = [await stage.actor(script, **fields) for _ in range(2)]
    names = [f"s{n}" for n in range(10)]
    for name in names:
        await stage.say("go", name)
    for name in names:
        await stage.waiting(name)
        await stage.say("the answer", name)
    await actors[0].die()
    actors.append(await stage.actor(script, **fields))
    await actors[1].die()
    for name in names:
        end = await stage.end(name)
        assert (end.status, end.content) == ("completed", "done")
        facts = await stage.facts(name)
        assert len([fact for fact in facts if isinstance(fact, RunEnded)]) == 1
        assert len([fact for fact in facts if isinstance(fact, RunWaiting)]) == 1
        assert len([fact for fact in facts if isinstance(fact, ToolReturned)]) == 2
