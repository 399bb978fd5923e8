"""Folding what was read of a log: page by page, and others get the event loop in between."""

import asyncio
from collections.abc import Sequence

from turnstream.session.events import Recorded
from turnstream.session.fold import fold
from turnstream.session.state import Session

SLICE = 64
"""Events that are folded before others get the event loop, which is under a millisecond (tests/bench/bench_log.py)."""


async def fold_page(session: Session, page: Sequence[Recorded]) -> Session:
    """Leaves out what is folded already. What follows nothing and is newer is another session of an id that was
    erased."""
    if page and not page[0].previous and page[0].seq > session.seq:
        session = Session(key=session.key)
    if page and page[0].seq <= session.seq:
        page = [recorded for recorded in page if recorded.seq > session.seq]
    for start in range(0, len(page), SLICE):
        session = fold(session, page[start : start + SLICE])
        if len(page) > SLICE:
            await asyncio.sleep(0)
    return session
