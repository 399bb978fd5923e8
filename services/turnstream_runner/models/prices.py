"""What a reply costs: a model that says so in its usage. What the prices are of is in
`turnstream.settings.ModelSettings`.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from turnstream.session.events import Usage
from turnstream.settings import ModelSettings
from turnstream_runner.models.port import Item, Model, ModelRequest, Reply


class Priced:
    """A model whose settings have prices."""

    def __init__(self, model: Model, settings: ModelSettings) -> None:
        self._model = model
        self._input = settings.input_price or 0.0
        self._cached = self._input if settings.cached_price is None else settings.cached_price
        self._caching = self._input if settings.caching_price is None else settings.caching_price
        self._output = settings.output_price or 0.0

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Item, None]:
        async with aclosing(self._model.stream(request)) as items:
            async for item in items:
                if isinstance(item, Reply):
                    usage = msgspec.structs.replace(item.usage, cost=self._cost(item.usage, item.caching_tokens))
                    item = msgspec.structs.replace(item, usage=usage)
                yield item

    def _cost(self, usage: Usage, caching: int) -> int:
        """In millionths: the price of a million tokens is as many millionths a token."""
        cached = min(usage.cached_tokens, usage.input_tokens)
        caching = min(caching, usage.input_tokens - cached)
        fresh = usage.input_tokens - cached - caching
        read = fresh * self._input + cached * self._cached + caching * self._caching
        return round(read + usage.output_tokens * self._output)
