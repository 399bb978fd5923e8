"""Reads a session's events for callers who name any number as the place to go on from.

The log's own `read` takes the sequence of an event of the session; a caller's cursor may be any number, for sequences
skip: "after 7" is after event 5 where the session has 5 and 9.
"""

from collections.abc import AsyncIterator

from turnstream.ids import SessionKey
from turnstream.log.base import PAGE, BrokenChain, Log
from turnstream.session.events import Recorded


async def read_after(
    log: Log, key: SessionKey, after: int, *, at_least: int = 0, page: int = PAGE
) -> AsyncIterator[list[Recorded]]:
    """Pages of the events behind this number, up to the last one there is now; see `Log.read`."""
    try:
        async for events in log.read(key, after, at_least=at_least, page=page):
            yield events
    except BrokenChain as broken:
        if broken.found != after or not broken.previous < after < broken.seq:
            raise
        async for events in log.read(key, broken.previous, at_least=at_least, page=page):
            yield events
