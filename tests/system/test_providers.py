"""One conversation with several providers, over the API of a whole Turnstream: what was said goes from one to the next,
what a provider keeps for itself goes to nobody, and not to itself in a later run."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.support.asking import OverHttp, events, opened, outcome, say
from tests.support.processes import Process, Spawn
from tests.support.providers import Exchange, Peer, peer
from tests.support.wires import WIRES, Spoken

from turnstream.session.events import Usage

pytestmark = pytest.mark.system

KEY = "key-4f1b77"
BY_PATH = {"/v1/chat/completions": "chat", "/v1/responses": "responses", "/v1/messages": "anthropic"}
SPOKEN = {wire.name: wire for wire in WIRES}
ENDLESS = "go on and on"
PROMPT = "[think THOUGHT of demo]"


def spoken_by(exchange: Exchange) -> Spoken:
    return SPOKEN[BY_PATH[exchange.path]](exchange)


async def everybody(exchange: Exchange) -> None:
    """Thinks, calls `add` in its first step, and then says what it came to. With the same ids every time."""
    spoken = spoken_by(exchange)
    last = spoken.texts(exchange.body)[-1]
    await spoken.begin(Usage(input_tokens=50, output_tokens=20, cached_tokens=30, reasoning_tokens=10))
    if last == ("user", ENDLESS):
        await half(spoken)
    await spoken.think(f"THOUGHT of {spoken.name}", hidden=f"HIDDEN-{spoken.name}")
    if last[0] == "result":
        await spoken.say(f"{spoken.name} says ", "three.")
        await spoken.end()
    else:
        await spoken.say("One moment.")
        await spoken.ask("call-1-1", "add", '{"a": 1, ', '"b": 2}')
        await spoken.ask(f"functions.add:{spoken.name}", "add", '{"a": 2, "b": 2}')
        await spoken.end("tool_calls")


async def half(spoken: Spoken) -> None:
    """As much of an answer as there is when the first piece of its text is; and then nothing."""
    chunk = spoken.exchange.chunk

    async def until(data: bytes) -> None:
        await chunk(data)
        if b"half of" in data:
            await asyncio.Event().wait()

    spoken.exchange.chunk = until
    await spoken.say("half of ")


@asynccontextmanager
async def turnstream(spawn: Spawn, provider: Peer) -> AsyncIterator[tuple[OverHttp, Process]]:
    """All of it in one process, which knows each wire as a model of that name."""
    settings: dict[str, Any] = {"http_port": 0, "nats_port": 0}
    for wire in WIRES:
        said = {**wire.settings, "model": wire.model, "base_url": provider.base_url, "api_key": KEY}
        settings |= {f"models__{wire.name}__{name}": value for name, value in said.items()}
    process = spawn("dev", "--nats-port", "0", "--port", "0", **settings)
    line = await process.until_logged("http://", 60)
    api = OverHttp("http://" + line.partition("http://")[2].split()[0].rstrip('/".,'))
    try:
        yield api, process
    finally:
        await api.close()


async def turn(api: OverHttp, session: str, text: str, model: str) -> dict[str, Any]:
    run = (await say(api, session, text, model=model))["run"]
    return await outcome(api, run)


async def test_a_conversation_goes_from_one_provider_to_the_next(spawn: Spawn) -> None:
    models = ["demo", "chat", "responses", "anthropic"] * 2
    async with peer(everybody) as provider, turnstream(spawn, provider) as (api, process):
        await opened(api, "talk", policy={"titles": "none", "history": {"window": "all"}})
        for n, model in enumerate(models, 1):
            text = f'{PROMPT} [tool add {{"a":1,"b":2}}]' if model == "demo" else f"and again, {n}"
            end = await turn(api, "talk", text, model)
            assert end["status"] == "completed", end
            assert end["output"] == ("add returned 3" if model == "demo" else f"{model} says three.")
        assert len(provider.seen) == 2 * 6
        for n, exchange in enumerate(provider.seen):
            name = BY_PATH[exchange.path]
            assert name == [model for model in models if model != "demo"][n // 2]
            is_later_step = n % 2 == 1
            own = f"THOUGHT of {name}" if name == "chat" else f"HIDDEN-{name}"
            assert spoken_by(exchange).hidden(exchange.body) == [own] * is_later_step
            sent = json.dumps(exchange.body).replace(PROMPT, "")
            assert not [m for m in set(models) - {name} if f"THOUGHT of {m}" in sent or f"HIDDEN-{m}" in sent]
        last = spoken_by(exchange).texts(exchange.body)
        said = [text for who, text in last if who == "assistant"]
        assert [text for text in said if "says three." in text or "returned" in text] == [
            "add returned 3",
            "chat says three.",
            "responses says three.",
            "anthropic says three.",
            "add returned 3",
            "chat says three.",
            "responses says three.",
        ]
        calls = [name for kind, name in last if kind == "call"]
        assert len(calls) == len(set(calls)) == 2 + 6 * 2
        stored = await events(api, "talk")
        ends = [event["data"] for event in stored if event["type"] == "run.ended"]
        thoughts = [end["reasoning"] for end in ends if "reasoning" in end]
        assert thoughts == [f"THOUGHT of {model}" for model in models if model != "demo"]
        assert "HIDDEN" not in json.dumps(stored)
        assert KEY not in json.dumps(stored) + process.log


@pytest.mark.parametrize("model", SPOKEN)
async def test_what_a_cancelled_answer_had_said_is_kept_and_its_provider_left(spawn: Spawn, model: str) -> None:
    async with peer(everybody) as provider, turnstream(spawn, provider) as (api, process):
        await opened(api, "talk", policy={"titles": "none"})
        run = (await say(api, "talk", ENDLESS, model=model))["run"]
        async with api.http.stream("GET", "/v1/sessions/talk/events", headers={"Accept": "text/event-stream"}) as feed:
            async for line in feed.aiter_lines():
                if "half of" in line:
                    break
        assert (await api.ask("cancel_run", run=run)).status in (200, 202)
        end = await outcome(api, run)
        assert (end["status"], (await events(api, "talk"))[-1]["data"]["content"]) == ("cancelled", "half of ")
        await asyncio.wait_for(provider.gone.wait(), 20)
        assert KEY not in process.log
