"""Generations: a set of tables with a checkpoint of its own. One is in force; a rebuild makes the next one beside it.

The tables of generation 3 are `sessions_3`, `runs_3`, …; what is in force is one row in `active`. The same on both
databases. Rows and checkpoint are written in one transaction that begins by moving the checkpoint from the position
that the writer knows: where that changes nothing, somebody else has written, and the whole batch is given up. On
PostgreSQL that first statement is also the lock that two writers of one generation queue up for; on SQLite the
transaction holds the only write lock. A generation whose checkpoint is gone is dead: its writer stops, its tables may
be dropped by anybody."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from sqlalchemy import (
    ColumnElement,
    Connection,
    Dialect,
    Table,
    UpdateBase,
    delete,
    func,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy import text as sql
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import DropTable

from turnstream.session.events import Recorded
from turnstream.views import history, requests, runs, sessions, steps
from turnstream.views.batch import Archived, Batch
from turnstream.views.cache import Cache
from turnstream.views.database import ACTIVE, CHECKPOINT, IN_FORCE, META, VERSION, Checkpoint, Database, Gone
from turnstream.views.rows import Statement, bodies, chunks, places, plain, upsert

_TABLE = re.compile(r"(?:sessions|moves|runs|requests|history|steps)_([0-9]+)")
_LOCK = 0x7475726E
"""PostgreSQL's advisory lock for making and dropping tables."""


class Overtaken(Exception):
    """Another writer has moved the checkpoint, or the generation is gone. Nothing of the batch was written."""


def tables(generation: int) -> tuple[Table, ...]:
    """Every table of a generation."""
    views = (sessions.table, sessions.moves, runs.table, requests.table, history.table, steps.table)
    return tuple(view(generation) for view in views)


async def prepare(db: Database, log: str) -> Checkpoint:
    """Makes the first generation where there is none; answers with the one in force. `log` names the log it is made
    of."""
    db.make_folder()
    async with db.transaction() as connection:
        await _lock(connection)
        await connection.run_sync(META.create_all)
        row = (await connection.execute(IN_FORCE)).one_or_none()
        if row is not None:
            return Checkpoint(row.generation, row.position, row.log, row.version)
        first = await _create(connection, await _next_number(connection), log)
        await connection.execute(delete(ACTIVE))
        await connection.execute(insert(ACTIVE).values(id=1, generation=first.generation))
        return first


async def create(db: Database, log: str) -> Checkpoint:
    """Makes an empty generation beside the one in force, and drops what an earlier rebuild left unfinished."""
    async with db.transaction() as connection:
        await _lock(connection)
        # The number is chosen before anything is dropped: none is ever used again, for its writer may still live.
        number = await _next_number(connection)
        await _drop_all_but(connection, await _in_force(connection))
        return await _create(connection, number, log)


async def flip(db: Database, to: Checkpoint) -> bool:
    """Puts generation `to` in force if it is as far as the one that is, and lets that one die. False: it is behind.
    Where the one in force is of another log, its position says nothing and does not count. Raises `Overtaken`."""
    async with db.transaction() as connection:
        await _lock(connection)
        # Whoever writes the old generation is waited for, and finds its checkpoint gone.
        both = select(CHECKPOINT).order_by(CHECKPOINT.c.generation).with_for_update()
        known = {row.generation: Checkpoint(*row) for row in await connection.execute(both)}
        next_one, current = known.get(to.generation), known.get(await _in_force(connection))
        if next_one is None:
            raise Overtaken(f"generation {to.generation} is gone: another rebuild has begun")
        comparable = current and (current.log, current.version) == (next_one.log, next_one.version)
        if current and comparable and current.position > next_one.position:
            return False
        await connection.execute(update(ACTIVE).values(generation=to.generation))
        await connection.execute(delete(CHECKPOINT).where(CHECKPOINT.c.generation != to.generation))
        return True


async def checkpoints(db: Database) -> list[Checkpoint]:
    """Every generation that is not dead: the one in force, and one that a rebuild makes."""
    async with db.connection() as connection:
        rows = await connection.execute(select(CHECKPOINT).order_by(CHECKPOINT.c.generation))
        return [Checkpoint(*row) for row in rows]


async def drop_dead(db: Database) -> None:
    """Drops the tables of every generation that has no checkpoint (any more)."""
    async with db.transaction() as connection:
        await _lock(connection)
        alive = set((await connection.execute(select(CHECKPOINT.c.generation))).scalars())
        await _drop_tables(connection, alive)


class Writer:
    """Writes events into one generation, behind the position it is at. Not for two tasks at once.

    Rows are loaded and folded before the transaction begins, so that the write lock is held for the writing alone. They
    are as of the writer's position, or the transaction's first statement finds that they are not.
    """

    def __init__(self, db: Database, at: Checkpoint) -> None:
        self._db = db
        self._cache = Cache()
        self._unscrubbed = False
        self.generation = at.generation
        self.position = at.position

    async def apply(self, entries: Iterable[Recorded | Archived], position: int) -> None:
        """Writes these events and records, in the order of the log, and moves the checkpoint to `position`, the
        sequence up to which the log was read. All of it or nothing. Raises `Overtaken`, `Unavailable`."""
        batch = Batch(entries)
        try:
            await self._load(batch)
            batch.fold()
            if not await self._db.write(list(self._statements(batch, position))):
                raise Overtaken(f"generation {self.generation} is not at {self.position} any more")
        except BaseException:
            self._cache.clear()
            raise
        self._cache.keep(batch)
        self.position = position
        self._unscrubbed = self._unscrubbed or batch.deletes
        if self._unscrubbed:
            self._unscrubbed = not await self._db.scrub()

    async def _load(self, batch: Batch) -> None:
        missing: list[str] = []
        for key in batch.sessions_before():
            if row := self._cache.sessions.get(key):
                batch.sessions[key] = row
            else:
                missing.append(key)
        for key, body in await self._bodies(sessions.table(self.generation), missing):
            batch.sessions[key] = sessions.parse(body)
        missing = []
        for key in batch.runs_before():
            if row := self._cache.runs.get(key):
                batch.runs[key] = row
            else:
                missing.append(key)
        for key, body in await self._bodies(runs.table(self.generation), missing):
            batch.runs[key] = runs.parse(body)
        for key, body in await self._bodies(requests.table(self.generation), batch.requests_before()):
            batch.requests[key] = requests.parse(body)
        places_missing: list[tuple[str, int]] = []
        for place in batch.items_before():
            if item := self._cache.items.get(place):
                batch.items[place] = item
            else:
                places_missing.append(place)
        for place, body in await self._items(places_missing):
            batch.items[place] = history.parse(body)

    async def _bodies(self, table: Table, keys: Sequence[str]) -> list[tuple[str, str]]:
        if not keys:
            return []
        try:
            async with self._db.connection() as connection:
                return await bodies(connection, table, keys)
        except Gone as error:
            raise Overtaken(f"generation {self.generation} is gone") from error

    async def _items(self, wanted: Sequence[tuple[str, int]]) -> list[tuple[tuple[str, int], str]]:
        if not wanted:
            return []
        found: list[tuple[tuple[str, int], str]] = []
        try:
            async with self._db.connection() as connection:
                for statement in places(history.table(self.generation), wanted):
                    found += [((row.key, row.seq), row.body) for row in await connection.execute(statement)]
        except Gone as error:
            raise Overtaken(f"generation {self.generation} is gone") from error
        return found

    def _statements(self, batch: Batch, position: int) -> Iterator[Statement]:
        """The first moves the checkpoint, from where this writer has left it."""
        generation, dialect = self.generation, self._db.engine.dialect
        yield Statement(_advance(dialect), (position, generation, self.position))
        yield from (plain(dialect, statement) for statement in self._removals(batch))
        yield from upsert(dialect, sessions.table(generation), batch.session_rows())
        yield from upsert(dialect, runs.table(generation), batch.run_rows())
        yield from upsert(dialect, requests.table(generation), batch.request_rows())
        yield from upsert(dialect, history.table(generation), batch.item_rows())
        yield from upsert(dialect, steps.table(generation), batch.step_rows())
        items = history.table(generation)
        for key, seq in batch.items_gone():
            yield plain(dialect, delete(items).where(items.c.key == key, items.c.seq == seq))
        moves, oldest = sessions.moves(generation), position - sessions.MOVES
        yield from upsert(dialect, moves, batch.move_rows(oldest))
        yield Statement(_forget(dialect, moves), (oldest,))

    def _removals(self, batch: Batch) -> Iterator[UpdateBase]:
        """Removes what was there and is deleted now."""
        generation = self.generation
        ran, did = runs.table(generation), steps.table(generation)
        said, asked = history.table(generation), requests.table(generation)
        for name in sorted(batch.emptied):
            recorded = select(ran.c.key).where(_of_runs(ran, name), ran.c.archived == 1)
            yield delete(did).where(_of_runs(did, name), did.c.key.not_in(recorded))
            yield delete(asked).where(_of_runs(asked, name))
            yield delete(said).where(said.c.key == name)
        for name in sorted(batch.emptied - batch.runless):
            yield update(ran).where(_of_runs(ran, name)).values(session=None)
        for name in sorted(batch.runless):
            yield delete(ran).where(_of_runs(ran, name))
        for name in sorted(batch.erased):
            yield delete(ran).where(_of_runs(ran, name), ran.c.archived == 0)
        for key in sorted(batch.archived):
            yield delete(did).where(did.c.key == key)
        for table, names in ((sessions.moves(generation), batch.emptied), (sessions.table(generation), batch.erased)):
            wanted = sorted(names)
            for start, size in chunks(len(wanted)):
                yield delete(table).where(table.c.key.in_(wanted[start : start + size]))


def _of_runs(table: Table, session: str) -> ColumnElement[bool]:
    """What belongs to any run of the session: its keys begin with the session's and a dot, and `/` follows the dot."""
    return (table.c.key > f"{session}.") & (table.c.key < f"{session}/")


@lru_cache
def _advance(dialect: Dialect) -> str:
    """Moves a checkpoint: to, generation, from."""
    at = CHECKPOINT.c
    moved = update(CHECKPOINT).values(position=0).where(at.generation == 0, at.position == 0)
    return plain(dialect, moved).sql


@lru_cache(maxsize=64)
def _forget(dialect: Dialect, moves: Table) -> str:
    """Drops the moves up to a sequence."""
    return plain(dialect, delete(moves).where(moves.c.seq <= 0)).sql


async def _next_number(connection: AsyncConnection) -> int:
    names = await connection.run_sync(table_names)
    taken = [int(match[1]) for name in names if (match := _TABLE.fullmatch(name))]
    highest = (await connection.execute(select(func.max(CHECKPOINT.c.generation)))).scalar()
    return max([*taken, highest or 0]) + 1


async def _create(connection: AsyncConnection, generation: int, log: str) -> Checkpoint:
    for table in tables(generation):
        await connection.run_sync(table.create)
    await connection.execute(insert(CHECKPOINT).values(generation=generation, position=0, log=log, version=VERSION))
    return Checkpoint(generation, 0, log)


async def _in_force(connection: AsyncConnection) -> int:
    return (await connection.execute(select(ACTIVE.c.generation))).scalar_one()


async def _drop_all_but(connection: AsyncConnection, generation: int) -> None:
    await connection.execute(delete(CHECKPOINT).where(CHECKPOINT.c.generation != generation))
    await _drop_tables(connection, {generation})


async def _drop_tables(connection: AsyncConnection, alive: set[int]) -> None:
    names = await connection.run_sync(table_names)
    dead = {int(match[1]) for name in names if (match := _TABLE.fullmatch(name))} - alive
    for generation in sorted(dead):
        for table in tables(generation):
            await connection.execute(DropTable(table, if_exists=True))


def table_names(connection: Connection) -> list[str]:
    """Every table of the database."""
    return inspect(connection).get_table_names()


async def _lock(connection: AsyncConnection) -> None:
    """One at a time makes and drops tables; on SQLite the transaction is that lock."""
    if connection.dialect.name == "postgresql":
        await connection.execute(sql("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
