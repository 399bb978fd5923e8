"""The models of one runner, by name. What a name means is in `turnstream.agents.models`.

A model is made when its name is first resolved, and kept. A provider's library is loaded only then, so a runner that
needs none does not have to have it.
"""

import asyncio
import importlib
import random as randomness
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, assert_never

from turnstream.agents import context_of, lookup
from turnstream.settings import ModelSettings
from turnstream_runner.models.demo import DemoModel
from turnstream_runner.models.port import Model, ModelError, UnknownModel
from turnstream_runner.models.prices import Priced
from turnstream_runner.models.retry import DEFAULT, Backoff, Retrying

if TYPE_CHECKING:
    from turnstream_runner.models.wire import Wire

WIRES: Final[Mapping[str, str]] = {
    "openai": "turnstream_runner.models.openai",
    "anthropic": "turnstream_runner.models.anthropic",
}
"""The modules that load the providers' libraries."""


class Models:
    """Every model behind the retry layer. `close` gives connections back."""

    def __init__(
        self,
        logical: Mapping[str, ModelSettings],
        *,
        backoff: Backoff = DEFAULT,
        random: Callable[[], float] = randomness.random,
    ) -> None:
        self._logical = dict(logical)
        self._backoff = backoff
        self._random = random
        self._models: dict[str, Model] = {}
        self._wires: list[Wire] = []

    def resolve(self, name: str, *, with_prices: bool = False) -> Model:
        """The model of this name. Raises `UnknownModel`, and `ModelError` where it cannot be had for want of a key or a
        library, or, `with_prices`, of prices."""
        if name not in self._models:
            settings = self._settings(name)
            priced = Priced(self._make(settings), settings) if settings.has_prices else self._make(settings)
            self._models[name] = Retrying(priced, backoff=self._backoff, random=self._random)
        if with_prices and not self._settings(name).has_prices:
            raise ModelError(f"the cost of the run is limited, and model {name!r} has no prices")
        return self._models[name]

    def shows_images(self, name: str) -> bool:
        """Whether the model of this name takes images."""
        try:
            return lookup(name, self._logical).images
        except LookupError:
            return False

    def context(self, name: str) -> int:
        """Tokens that the model of this name takes. Raises `UnknownModel`."""
        return context_of(self._settings(name))

    async def prepare(self, names: Iterable[str]) -> None:
        """Makes these models, and loads what they and the logical names need, so that no call has to wait for it. One
        that cannot be had is an error of the call that asks for it, not of the start."""
        wanted = {*names, *self._logical}
        for module in {WIRES[provider] for name in wanted if (provider := self._provider(name)) in WIRES}:
            with suppress(ImportError):
                await asyncio.to_thread(importlib.import_module, module)
        for name in wanted:
            with suppress(UnknownModel, ModelError):
                self.resolve(name)

    async def close(self) -> None:
        self._models.clear()
        while self._wires:
            await self._wires.pop().close()

    def _provider(self, name: str) -> str | None:
        with suppress(LookupError):
            return lookup(name, self._logical).provider
        return None

    def _settings(self, name: str) -> ModelSettings:
        try:
            return lookup(name, self._logical)
        except LookupError as error:
            raise UnknownModel(str(error)) from None

    def _make(self, settings: ModelSettings) -> Model:
        if settings.provider == "demo":
            return DemoModel()
        try:
            wire = _wire(settings)
        except ImportError as error:
            needed = f"pip install turnstream[{settings.provider}]"
            raise ModelError(f"a model of this kind needs `{needed}`: {error}") from error
        self._wires.append(wire)
        return wire


def _wire(settings: ModelSettings) -> "Wire":
    """Raises `ImportError` where the provider's library is not there."""
    match settings.wire:
        case "chat":
            from turnstream_runner.models.openai import OpenAIChat

            return OpenAIChat(settings)
        case "responses":
            from turnstream_runner.models.openai import OpenAIResponses

            return OpenAIResponses(settings)
        case "anthropic":
            from turnstream_runner.models.anthropic import AnthropicMessages

            return AnthropicMessages(settings)
        case "demo":
            raise ValueError("the demo model is on no wire")
        case other:
            assert_never(other)
