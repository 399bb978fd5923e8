"""Tests do not sleep: they wait for a condition."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def eventually(
    condition: Callable[[], T | Awaitable[T]], timeout: float = 10.0, *, every: float = 0.02, what: str = ""
) -> T:
    """The first true value of `condition` (a plain or an async function). Fails after `timeout` seconds.

    An `AssertionError` inside the condition counts as "not yet", and is shown if it stays so.
    """
    deadline = time.monotonic() + timeout
    while True:
        failure: AssertionError | None = None
        value = None
        try:
            answer = condition()
            value = await answer if inspect.isawaitable(answer) else answer
        except AssertionError as error:
            failure = error
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(
                f"{what or inspect.getdoc(condition) or condition} did not hold within {timeout} s; last: {value!r}"
            ) from failure
        await asyncio.sleep(every)
