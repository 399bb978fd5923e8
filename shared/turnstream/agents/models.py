"""What the name of a model means: `demo`, `openai:<id>`, `anthropic:<id>`, or a logical name that the settings map to a
provider; and what a model can be told of how to answer.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from turnstream.settings import ModelSettings, Wire

DEMO = "demo"
CONTEXTS = {
    "gpt-5": 272_000,
    "gpt-4.1": 1_000_000,
    "gpt-4o": 128_000,
    "gpt-4-turbo": 128_000,
    "gpt-4": 8_192,
    "gpt-3.5": 16_385,
    "o1": 128_000,
    "o3": 200_000,
    "o4": 200_000,
    "gpt-oss": 131_072,
    "claude": 200_000,
}
"""Tokens that the provider's own models take, by how their names begin: of those that begin so, the smallest."""
DEMO_CONTEXT = 128_000
UNKNOWN_CONTEXT = 32_000
"""What most servers give a model that they have been told nothing about, or more."""
OPENAI = "openai:"
ANTHROPIC = "anthropic:"
_EVERYWHERE: Final = frozenset({"temperature", "top_p", "max_tokens", "reasoning_effort", "parallel_tool_calls"})
_CHAT: Final = _EVERYWHERE | {"seed", "stop", "presence_penalty", "frequency_penalty"}
PARAMS: Final[Mapping[Wire, frozenset[str]]] = {
    "responses": _EVERYWHERE | {"reasoning_summary"},
    "chat": _CHAT,
    "anthropic": _EVERYWHERE | {"reasoning_summary", "stop"},
    "demo": _CHAT | {"reasoning_summary"},
}
"""What of `turnstream.agents.Params` can be said on each wire. What cannot is refused, never left out."""
NAMES: Final[Mapping[Wire, str]] = {
    "responses": "OpenAI's Responses API",
    "chat": "the chat completions API",
    "anthropic": "Anthropic's Messages API",
    "demo": "the demo model",
}


def context_of(model: ModelSettings) -> int:
    """Tokens that a model takes, its answer included: as the settings say, else what is known of it."""
    if model.context is not None:
        return model.context
    if model.provider == "demo":
        return DEMO_CONTEXT
    name = model.model.rpartition("/")[2]
    known = [prefix for prefix in CONTEXTS if name.startswith(prefix)]
    return CONTEXTS[max(known, key=len)] if known else UNKNOWN_CONTEXT


def lookup(name: str, logical: Mapping[str, ModelSettings]) -> ModelSettings:
    """The provider behind a name. Raises LookupError with a message for people.

    `openai:<id>` is asked with the key in the environment variable `OPENAI_API_KEY`, `anthropic:<id>` with the one in
    `ANTHROPIC_API_KEY`.
    """
    if name in logical:
        return logical[name]
    if name == DEMO:
        return ModelSettings(provider="demo")
    if name.startswith(OPENAI) and name != OPENAI:
        return ModelSettings(provider="openai", model=name.removeprefix(OPENAI), api_key_env="OPENAI_API_KEY")
    if name.startswith(ANTHROPIC) and name != ANTHROPIC:
        return ModelSettings(provider="anthropic", model=name.removeprefix(ANTHROPIC), api_key_env="ANTHROPIC_API_KEY")
    known = ", ".join((DEMO, f"{OPENAI}<id>", f"{ANTHROPIC}<id>", *sorted(logical)))
    raise LookupError(f"unknown model {name!r}; known: {known}")


def unsaid(model: ModelSettings, params: Iterable[str]) -> str | None:
    """What is wrong with asking this model with these params: None for nothing."""
    missing = sorted(set(params) - PARAMS[model.wire])
    return f"{NAMES[model.wire]} has no {', '.join(missing)}" if missing else None
