"""Which model a name leads to, and what of the providers' libraries has to be there for it."""

import subprocess
import sys
from textwrap import dedent

import pytest
from pydantic import SecretStr, ValidationError
from tests.support.providers import peer
from tests.support.wires import WIRES, Spoken

from turnstream.agents import context_of, lookup
from turnstream.session.messages import UserMessage
from turnstream.settings import ModelSettings
from turnstream_runner.models.port import ModelError, ModelRequest, Reply
from turnstream_runner.models.registry import Models
from turnstream_runner.models.retry import Backoff

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "anthropic": "/v1/messages"}
SERVER = "http://127.0.0.1:1/v1"


@pytest.mark.parametrize(
    ("said", "wire"),
    [
        ({"provider": "openai"}, "responses"),
        ({"provider": "openai", "base_url": SERVER}, "chat"),
        ({"provider": "openai", "api": "chat"}, "chat"),
        ({"provider": "openai", "api": "responses", "base_url": SERVER}, "responses"),
        ({"provider": "anthropic"}, "anthropic"),
        ({"provider": "anthropic", "base_url": SERVER}, "anthropic"),
        ({"provider": "demo"}, "demo"),
    ],
)
def test_how_a_model_is_asked(said: dict[str, str], wire: str) -> None:
    assert ModelSettings.model_validate({"model": "m", **said}).wire == wire


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ({"provider": "anthropic"}, "a model of provider 'anthropic' needs `model`"),
        ({"provider": "anthropic", "model": "m", "api": "chat"}, "`api` is of models of provider 'openai'"),
        ({"provider": "openai", "model": "m", "api": "completions"}, "Input should be 'responses' or 'chat'"),
    ],
)
def test_what_makes_no_sense_is_refused(said: dict[str, str], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        ModelSettings.model_validate(said)


def test_names_of_providers() -> None:
    openai, anthropic = lookup("openai:gpt-5", {}), lookup("anthropic:claude-opus-5", {})
    assert (openai.wire, openai.model, openai.api_key_env) == ("responses", "gpt-5", "OPENAI_API_KEY")
    assert (anthropic.wire, anthropic.model, anthropic.api_key_env) == (
        "anthropic",
        "claude-opus-5",
        "ANTHROPIC_API_KEY",
    )
    assert (context_of(openai), context_of(anthropic)) == (272_000, 200_000)


@pytest.mark.parametrize("wire", WIRES)
async def test_a_logical_name_leads_to_its_address_with_its_key(
    wire: type[Spoken], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "key-of-the-environment")

    async def fine(spoken: Spoken) -> None:
        await spoken.begin()
        await spoken.say("here")
        await spoken.end()

    async with peer(lambda exchange: fine(wire(exchange))) as provider:
        said = {**wire.settings, "model": "some/model", "base_url": provider.base_url, "api_key_env": "THE_KEY"}
        models = Models({"local": ModelSettings.model_validate(said)})
        assert models.resolve("local") is models.resolve("local")
        items = [item async for item in models.resolve("local").stream(ModelRequest(model="local", messages=(HELLO,)))]
        await models.close()
        [seen] = provider.seen
    assert isinstance(items[-1], Reply)
    assert items[-1].text == "here"
    assert (seen.path, seen.body["model"]) == (PATHS[wire.name], "some/model")
    assert seen.headers["authorization"] == "Bearer key-of-the-environment"


HELLO = UserMessage("hello")


@pytest.mark.parametrize("wire", WIRES)
async def test_what_an_api_does_not_have_is_refused_before_anybody_is_asked(wire: type[Spoken]) -> None:
    missing = {"chat": "reasoning_summary", "responses": "seed", "anthropic": "frequency_penalty"}[wire.name]
    said = {**wire.settings, "model": wire.model, "base_url": SERVER, "api_key": SecretStr("k")}
    models = Models({"m": ModelSettings.model_validate(said)}, backoff=Backoff(tries=1))
    asking = ModelRequest(model="m", messages=(HELLO,), params={"temperature": 0.5, missing: 1})
    with pytest.raises(ModelError, match=f"has no {missing}: leave it out of the agent's `params`") as caught:
        [item async for item in models.resolve("m").stream(asking)]
    assert not caught.value.retryable
    await models.close()


@pytest.mark.parametrize(("there", "away"), [("openai", "anthropic"), ("anthropic", "openai")])
def test_one_provider_needs_nothing_of_the_other(there: str, away: str) -> None:
    """And none is loaded before it is asked for."""
    script = f"""
        import asyncio, sys
        sys.modules["{away}"] = None
        from turnstream.settings import ModelSettings
        from turnstream_runner.models.port import ModelError
        from turnstream_runner.models.registry import Models

        async def main():
            both = ("{there}", "{away}")
            models = Models({{name: ModelSettings(provider=name, model="m", api_key="k") for name in both}})
            assert not {{"openai", "anthropic", "pydantic_ai"}} & {{name for name, it in sys.modules.items() if it}}
            await models.prepare(["demo"])
            models.resolve("{there}")
            try:
                models.resolve("{away}")
            except ModelError as error:
                print(error)
            await models.close()

        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"a model of this kind needs `pip install turnstream[{away}]`: ")
