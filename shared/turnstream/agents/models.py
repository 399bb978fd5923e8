"""What the name of a model means: `demo`, `openai:<id>`, or a logical name that the settings map to a provider."""

from collections.abc import Mapping

from turnstream.settings import ModelSettings

DEMO = "demo"
OPENAI = "openai:"
LATER = ("anthropic:",)
"""Providers that are known and not there yet."""


def lookup(name: str, logical: Mapping[str, ModelSettings]) -> ModelSettings:
    """The provider behind a name. Raises LookupError with a message for people.

    `openai:<id>` is asked with the key in the environment variable `OPENAI_API_KEY`.
    """
    if name in logical:
        return logical[name]
    if name == DEMO:
        return ModelSettings(provider="demo")
    if name.startswith(OPENAI) and name != OPENAI:
        return ModelSettings(provider="openai", model=name.removeprefix(OPENAI), api_key_env="OPENAI_API_KEY")
    if name.startswith(LATER):
        raise LookupError(f"model {name!r} is not available in this release")
    known = ", ".join((DEMO, f"{OPENAI}<id>", *sorted(logical)))
    raise LookupError(f"unknown model {name!r}; known: {known}")
