"""Reads a session's events for callers who name any number as the place to go on from.

The log's own `read` takes the sequence of an event of the session; a caller's cursor may be any number, for sequences
skip: "after 7" is after event 5 where the session has 5 and 9.
"""

from collections.abc import AsyncIterator

from turnstream.ids import SessionKey
from turnstream.log.base import BrokenChain, Log
from turnstream.session.events import Recorded


async def read_after(log: Log, key: SessionKey, after: int, *, at_least: int = 0) -> AsyncIterator[list[Recorded]]:
    """Pages of the events behind this number, up to the last one there is now. `at_least`: one that is known to be
    there."""
    try:
        async for page in log.read(key, after, at_least=at_least):
            yield page
    except BrokenChain as broken:
        if broken.found != after or not broken.previous < after < broken.seq:
            raise
        async for page in log.read(key, broken.previous, at_least=at_least):
            yield page


async def event_at(log: Log, key: SessionKey, seq: int) -> Recorded | None:
    """The event of the session that has this sequence."""
    async for page in read_after(log, key, seq - 1):
        return page[0] if page[0].seq == seq else None
    return None
