"""A function in a thread of its own.

Not a pool: a function that never returns would take a place of the pool for ever, and be waited for when the
interpreter ends. A thread costs less than a tenth of a millisecond.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

R = TypeVar("R")


async def in_thread(function: Callable[[], R], name: str) -> R:
    """What the function returns or raises. Cancelled, nobody waits for it any more; the thread goes on to its end."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: Any, error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result((result, error))

    def run() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = context.run(function), None
        except BaseException as error:
            outcome = None, error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(deliver, *outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    result, error = await ended
    if error is not None:
        raise error
    return result
