"""The views made anew from the log's first event, beside the ones in force, which go on being written and read.

Nothing is seen of the new generation until it is as far as the old one; then it is put in force in one transaction. A
rebuild that dies leaves the old one as it is; what it left behind, the next rebuild drops.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from turnstream.broker.connection import Broker
from turnstream.views import generations
from turnstream.views.database import Checkpoint, Database
from turnstream.views.generations import Overtaken, Writer
from turnstream_projector import reading

_BREATH: Final = 0.01
"""Seconds between two batches, so that the live projector gets at SQLite's one write lock."""


class Progress(msgspec.Struct, frozen=True):
    """`position` of about `last` is done; `events` so far."""

    position: int
    last: int
    events: int


async def rebuild(
    broker: Broker, database: Database, *, on_progress: Callable[[Progress], None] | None = None
) -> Checkpoint:
    """Builds the next generation and puts it in force; answers with its checkpoint.

    Raises `Overtaken` if another rebuild has begun meanwhile, `ViewsError`, `BrokerFault`.
    """
    extent = await reading.extent(broker)
    await generations.prepare(database, extent.log)
    at = await generations.create(database, extent.log)
    writer = Writer(database, at)
    if extent.events:
        await _build(broker, database, writer, at, extent, on_progress)
    else:
        await writer.apply([], extent.last)
        if not await generations.flip(database, at):
            raise Overtaken("the views in force are of a later event than the log holds")
    await generations.drop_dead(database)
    return await database.checkpoint()


async def _build(
    broker: Broker,
    database: Database,
    writer: Writer,
    at: Checkpoint,
    extent: reading.Extent,
    on_progress: Callable[[Progress], None] | None,
) -> None:
    events = 0
    pull = reading.follow(broker, 0)
    try:
        async for deliveries in pull:
            last = deliveries[-1]
            await writer.apply(reading.entries_of(deliveries), last.seq)
            events += len(deliveries)
            if on_progress:
                on_progress(Progress(last.seq, max(extent.last, last.seq + last.pending), events))
            if not last.pending and await generations.flip(database, at):
                return
            await asyncio.sleep(_BREATH)
    finally:
        await pull.close()
