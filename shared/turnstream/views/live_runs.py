"""The runs that have not ended: which want a runner, which have something fall due, how many there are.

Asked of the view of runs, for the sweep and for whoever looks after the whole."""

import msgspec
from sqlalchemy import func, select
from sqlalchemy import text as sql

from turnstream.ids import SessionKey
from turnstream.views import runs, sessions
from turnstream.views.database import Database, Reader
from turnstream.views.run_row import Row
from turnstream.views.session_row import Row as SessionRow


class LiveRun(msgspec.Struct, frozen=True):
    """A run that has not ended. `wants_runner`: it is being carried out, or may start, or is to end."""

    key: SessionKey
    row: Row
    wants_runner: bool


async def live_before(
    db: Database, before: int, after: tuple[int, str] = (0, ""), *, limit: int, account: str | None = None
) -> list[LiveRun]:
    """Runs of one account, or of all, that were queued, or started last, before this time, in the order of (time, key)
    behind `after`. One that waits for a person is none of them. Raises `ViewsError`."""

    async def work(reader: Reader) -> list[LiveRun]:
        table = runs.table(reader.generation)
        statement = (
            select(table.c.account, table.c.session, table.c.body)
            .where(sql("live_since IS NOT NULL"), table.c.live_since < before, table.c.status != "waiting")
            .where((table.c.live_since > after[0]) | ((table.c.live_since == after[0]) & (table.c.key > after[1])))
            .order_by(table.c.live_since, table.c.key)
            .limit(limit)
        )
        if account is not None:
            statement = statement.where(table.c.account == account)
        found = [(SessionKey(row.account, row.session), runs.parse(row.body)) for row in await reader.rows(statement)]
        # Each session once: it names its live runs, so one with many would be many times large.
        bodies = await reader.bodies(sessions.table(reader.generation), sorted({str(key) for key, _ in found}))
        owners = {key: sessions.parse(body) for key, body in bodies.items()}
        return [LiveRun(key, row, _wants_runner(owners.get(str(key)), row)) for key, row in found]

    return await db.read(work)


def _wants_runner(session: SessionRow | None, row: Row) -> bool:
    return session is not None and session.wants_runner(row.n)


class DueRun(msgspec.Struct, frozen=True):
    """A run that waits for a person, and what has fallen due meanwhile."""

    key: SessionKey
    row: Row
    due: int


async def due_before(db: Database, before: int, after: tuple[int, str] = (0, ""), *, limit: int) -> list[DueRun]:
    """Runs that wait, and whose deadline, or the time of a request, was over before this time, in the order of (time,
    key) behind `after`. Raises `ViewsError`."""

    async def work(reader: Reader) -> list[DueRun]:
        table = runs.table(reader.generation)
        statement = (
            select(table.c.account, table.c.session, table.c.due, table.c.body)
            .where(sql("due IS NOT NULL"), table.c.due < before)
            .where((table.c.due > after[0]) | ((table.c.due == after[0]) & (table.c.key > after[1])))
            .order_by(table.c.due, table.c.key)
            .limit(limit)
        )
        rows = await reader.rows(statement)
        return [DueRun(SessionKey(row.account, row.session), runs.parse(row.body), row.due) for row in rows]

    return await db.read(work)


class LiveRuns(msgspec.Struct, frozen=True):
    """How many runs of an account have not ended; `oldest_queued_at` is in milliseconds."""

    queued: int
    running: int
    waiting: int
    oldest_queued_at: int | None


async def count_live(db: Database, account: str | None = None) -> LiveRuns:
    """The live runs of one account, or of all."""

    async def work(reader: Reader) -> LiveRuns:
        table = runs.table(reader.generation)
        statement = select(table.c.status, func.count().label("many"), func.min(table.c.live_since).label("oldest"))
        statement = statement.where(sql("live_since IS NOT NULL")).group_by(table.c.status)
        if account is not None:
            statement = statement.where(table.c.account == account)
        found = {row.status: (row.many, row.oldest) for row in await reader.rows(statement)}
        queued, oldest = found.get("queued", (0, None))
        running, waiting = (found.get(status, (0, None))[0] for status in ("running", "waiting"))
        return LiveRuns(queued, running, waiting, oldest)

    return await db.read(work)
