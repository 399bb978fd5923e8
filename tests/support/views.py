"""Views for tests: written from a list of events, compared row by row."""

from collections.abc import Sequence

from tests.support.logs import Entry

from turnstream.views import generations
from turnstream.views.database import Checkpoint, Database

Rows = dict[str, list[tuple[object, ...]]]
LOG = "log"


async def rows(db: Database, generation: int) -> Rows:
    """Every row of a generation, the tables by their names without the number."""
    found: Rows = {}
    async with db.connection() as connection:
        for table in generations.tables(generation):
            statement = table.select().order_by(*table.primary_key)
            found[table.name.rpartition("_")[0]] = [tuple(row) for row in await connection.execute(statement)]
    return found


async def rows_in_force(db: Database) -> tuple[Checkpoint, Rows]:
    at = await db.checkpoint()
    return at, await rows(db, at.generation)


async def fresh(events: Sequence[Entry]) -> Rows:
    """The rows of a rebuild of these events, in one batch."""
    db = Database("sqlite+aiosqlite:///:memory:")
    try:
        at = await generations.prepare(db, LOG)
        await generations.Writer(db, at).apply(events, events[-1].seq if events else 0)
        return await rows(db, at.generation)
    finally:
        await db.close()


class Views:
    """A database of views that takes in a log, step by step, as a projector would."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self._writer: generations.Writer | None = None

    async def show(self, events: Sequence[Entry]) -> None:
        """Takes in what it has not got of these."""
        if self._writer is None:
            self._writer = generations.Writer(self.db, await generations.prepare(self.db, LOG))
        new = [entry for entry in events if entry.seq > self._writer.position]
        if new:
            await self._writer.apply(new, new[-1].seq)
