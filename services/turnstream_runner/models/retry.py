"""The one retry layer: a model that tries again. No provider's client below it retries by itself.

A call that fails before anything was streamed is tried again after a growing, jittered delay, or after the time that
the provider names. A stream that breaks in the middle is void: `Reset`, then the call again. A reply with nothing in it
is asked for twice more and then handed on as it is. What is not retryable, and the last failure, is raised.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import msgspec

from turnstream.session.events import Usage
from turnstream_runner.models.port import Item, Model, ModelError, ModelRequest, Reply, Reset


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """`tries` in all; delays in seconds: `first`, doubled up to `longest`. A provider that wants more than `patience`
    is not waited for. `empty_tries` is how often a reply may be empty."""

    tries: int = 4
    first: float = 0.5
    longest: float = 8.0
    patience: float = 60.0
    empty_tries: int = 3


DEFAULT = Backoff()


class Retrying:
    """`random` gives numbers in [0, 1): the jitter."""

    def __init__(
        self,
        model: Model,
        *,
        random: Callable[[], float],
        backoff: Backoff = DEFAULT,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._model = model
        self._random = random
        self._backoff = backoff
        self._sleep = sleep

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Item, None]:
        failures = empties = 0
        spent = Usage()
        while True:
            streamed = False
            this_try = msgspec.structs.replace(request, tries=failures + empties)
            try:
                async with aclosing(self._model.stream(this_try)) as items:
                    async for item in items:
                        if isinstance(item, Reply):
                            reply = item
                            break
                        streamed = True
                        yield item
                    else:
                        raise ModelError("the model ended without a reply")
            except ModelError as error:
                failures += 1
                reason, delay = error.message, self._delay(error, failures)
            else:
                empties += 1
                spent += reply.usage
                if not reply.is_empty or empties >= self._backoff.empty_tries:
                    yield msgspec.structs.replace(reply, usage=spent)
                    return
                reason, delay = "the reply was empty", 0.0
            if streamed:
                yield Reset(reason)
            await self._sleep(delay)

    def _delay(self, error: ModelError, failures: int) -> float:
        """Seconds until the next try. Raises the error where there is to be none."""
        backoff = self._backoff
        wanted = error.retry_after or 0.0
        if not error.retryable or failures >= backoff.tries or wanted > backoff.patience:
            raise error
        grown = min(backoff.first * 2 ** (failures - 1), backoff.longest)
        return max(wanted, grown * (0.5 + self._random() / 2))
