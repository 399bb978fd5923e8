"""What a provider keeps for itself, within a run that one runner begins and another ends, on a real broker: it has it
back from the checkpoint as it gave it, and in no later run."""

import json
from typing import Any

import pytest
from pydantic import SecretStr
from tests.support.providers import Exchange, peer
from tests.support.stage import Stage
from tests.support.wires import WIRES, Spoken

from turnstream.agents import tool
from turnstream.session.events import ModelReplied, RunEnded
from turnstream.settings import ModelSettings
from turnstream_runner.models.registry import Models


@tool(approval=True)
def send(text: str) -> str:
    "Sends a text."
    return f"sent: {text}"


@pytest.mark.parametrize("wire", WIRES)
async def test_s26_who_goes_on_with_a_run_has_what_its_provider_wants_back(stage: Stage, wire: type[Spoken]) -> None:
    async def thinks(exchange: Exchange) -> None:
        spoken = wire(exchange)
        last = spoken.texts(exchange.body)[-1]
        await spoken.begin()
        await spoken.think("hm", hidden="aGlkZGVu")
        if last == ("user", "send it"):
            await spoken.say("Shall I?")
            await spoken.ask("toolu_1", "send", '{"text": "hi"}')
            await spoken.end("tool_calls")
        else:
            await spoken.say("It is done.")
            await spoken.end()

    async with peer(thinks) as provider:
        said = {**wire.settings, "model": wire.model, "base_url": provider.base_url, "api_key": SecretStr("k")}
        made = {"m": ModelSettings.model_validate(said)}
        runs: dict[str, Any] = {"model": "m", "tools": (send,), "params": {"reasoning_effort": "low"}}
        first = await stage.actor(models=Models(made), **runs)
        await stage.say("send it")
        await stage.waiting()
        await first.leave()
        second = Models(made)
        await stage.actor(models=second, **runs)
        await stage.approve()
        assert (await stage.end()).content == "It is done."
        await stage.say("thanks")
        await stage.until("run.ended", count=2)
        await second.close()
        own = "hm" if wire.name == "chat" else "aGlkZGVu"
        assert [wire.hidden(exchange.body) for exchange in provider.seen] == [[], [own], []]
        if wire.name == "anthropic":
            assert [exchange.body["thinking"]["type"] for exchange in provider.seen] == ["enabled"] * 3
    stored = [*await stage.found(ModelReplied), *await stage.found(RunEnded)]
    assert [fact.reasoning for fact in stored] == ["hm"] * 3
    assert "aGlkZGVu" not in json.dumps([str(fact) for fact in stored])
