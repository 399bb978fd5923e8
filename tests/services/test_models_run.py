"""Whole runs against a provider on the wire: from the message to the stored end, with a real client in between."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import SecretStr
from tests.support.driving import World
from tests.support.providers import Aimock

from turnstream.agents import Agent, load
from turnstream.session.events import ModelReplied, RunEnded, ToolReturned
from turnstream.settings import ModelSettings
from turnstream_runner.models.registry import Models
from turnstream_runner.models.retry import Backoff


@pytest.fixture
async def world(aimock: Aimock) -> AsyncIterator[World]:
    """An agent whose model is aimock."""
    tools = list(load().tools.values())
    agent = Agent(name="default", model="local", instructions="Be brief.", tools=tools)
    made = World(tools=tools, agent=agent)
    local = ModelSettings(provider="openai", model="o3", base_url=aimock.base_url, api_key=SecretStr("sk-wire-1"))
    models = Models({"local": local}, backoff=Backoff(tries=3, first=0.01))
    made.models = models
    yield made
    await models.close()


async def turn(world: World, text: str, work: int = 1) -> RunEnded:
    await world.post(text)
    await world.drive(work=work).outcome()
    end = (await world.facts())[-1]
    assert isinstance(end, RunEnded)
    return end


def answers(text: str, **more: Any) -> dict[str, Any]:
    return {"match": {"userMessage": "hello"}, "response": {"content": text}, **more}


async def test_s22_a_provider_that_is_down_fails_the_run_and_the_session_goes_on(world: World, aimock: Aimock) -> None:
    down = {"error": {"message": "upstream is down", "type": "server_error"}, "status": 503}
    aimock.answer({"match": {"userMessage": "hello"}, "response": down})
    end = await turn(world, "hello")
    assert (end.status, end.content) == ("failed", "")
    assert end.error is not None
    assert (end.error.code, end.error.retryable) == ("model_error", True)
    assert "upstream is down" in end.error.message
    assert len(aimock.requests()) == 3

    aimock.answer(answers("Hi."))
    assert (await turn(world, "hello again", work=2)).content == "Hi."
    assert "upstream is down" not in json.dumps(aimock.requests()), "errors are not shown to the model"


async def test_s23_a50_a_dropped_stream_leaves_one_answer_and_a_reset_marker(world: World, aimock: Aimock) -> None:
    whole = "one two three four five six seven eight nine ten"
    first = answers("WRONG " + whole, chunkSize=5, truncateAfterChunks=6, latency=10)
    first["match"]["sequenceIndex"] = 0
    aimock.answer(first, answers(whole, chunkSize=5))
    end = await turn(world, "hello")
    assert (end.status, end.content) == ("completed", whole)
    kinds = [kind for _, _, kind, _ in world.live.said]
    assert kinds.count("reset") == 1
    at = kinds.index("reset")
    before, after = (
        "".join(text for _, _, kind, text in some if kind == "text")
        for some in (world.live.said[:at], world.live.said[at:])
    )
    assert before.startswith("WRONG")
    assert after == whole


async def test_s26_reasoning_is_kept_apart_and_never_sent_in_a_later_run(world: World, aimock: Aimock) -> None:
    reply = answers("Good day.")
    reply["response"]["reasoning"] = "SECRET-THOUGHT"
    aimock.answer(reply)
    end = await turn(world, "hello")
    assert (end.content, end.reasoning) == ("Good day.", "SECRET-THOUGHT")
    said = {kind: text for _, _, kind, text in world.live.said}
    assert said == {"reasoning": "SECRET-THOUGHT", "text": "Good day."}
    await turn(world, "hello again", work=2)
    assert len(aimock.requests()) == 2
    assert "SECRET-THOUGHT" not in json.dumps(aimock.requests())


async def test_tools_are_called_and_the_answer_is_made_of_their_results(world: World, aimock: Aimock) -> None:
    calls = [{"id": f"call_{n}", "name": "add", "arguments": json.dumps({"a": n, "b": 1})} for n in (1, 2)]
    aimock.answer(
        {"match": {"hasToolResult": True}, "response": {"content": "Two and three."}},
        {"match": {"userMessage": "hello"}, "response": {"toolCalls": calls}},
    )
    end = await turn(world, "hello")
    assert (end.status, end.content) == ("completed", "Two and three.")
    facts = await world.facts()
    [replied] = [fact for fact in facts if isinstance(fact, ModelReplied)]
    assert [call.id for call in replied.tool_calls] == ["call_1", "call_2"]
    returned = {fact.call_id: fact.output for fact in facts if isinstance(fact, ToolReturned)}
    assert returned == {"call_1": "2", "call_2": "3"}
    sent = aimock.requests()[-1]["messages"]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool", "tool"]
    assert [message["content"] for message in sent[3:]] == ["2", "3"]


async def test_a_key_that_is_refused_is_in_no_event(world: World, aimock: Aimock) -> None:
    refused = {"error": {"message": "Incorrect API key provided: sk-wire-1", "type": "auth"}, "status": 401}
    aimock.answer({"match": {"userMessage": "hello"}, "response": refused})
    end = await turn(world, "hello")
    assert end.status == "failed"
    assert len(aimock.requests()) == 1
    assert "sk-wire-1" not in str(await world.events())
