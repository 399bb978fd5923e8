"""The models of one runner, by name. What a name means is in `turnstream.agents.models`.

A model is made when its name is first resolved, and kept. A provider's library is loaded only then, so a runner that
needs none does not have to have it.
"""

import asyncio
import importlib
import random as randomness
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, assert_never

from turnstream.agents import context_of, lookup
from turnstream.settings import ModelSettings
from turnstream_runner.models.demo import DemoModel
from turnstream_runner.models.port import Model, ModelError, UnknownModel
from turnstream_runner.models.prices import Priced
from turnstream_runner.models.retry import DEFAULT, Backoff, Retrying

if TYPE_CHECKING:
    from turnstream_runner.models.openai import OpenAIChat


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
        self._clients: list[OpenAIChat] = []

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
        if any(self._provider(name) == "openai" for name in wanted):
            with suppress(ImportError):
                await asyncio.to_thread(importlib.import_module, "turnstream_runner.models.openai")
        for name in wanted:
            with suppress(UnknownModel, ModelError):
                self.resolve(name)

    async def close(self) -> None:
        self._models.clear()
        while self._clients:
            await self._clients.pop().close()

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
        match settings.provider:
            case "demo":
                return DemoModel()
            case "openai":
                model = _openai(settings)
                self._clients.append(model)
                return model
            case other:
                assert_never(other)


def _openai(settings: ModelSettings) -> "OpenAIChat":
    try:
        from turnstream_runner.models.openai import OpenAIChat
    except ImportError as error:
        raise ModelError(f"a model of this kind needs `pip install turnstream[openai]`: {error}") from error
    return OpenAIChat(settings)
