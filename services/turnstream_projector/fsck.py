"""Is the log whole, and do the views say what it says?

The log is read once, from its first event. Each session's events are held against the rules (`rules.py`), and all of
them are folded anew into a scratch database, whose rows must then equal the views' byte for byte. Both sides stand
still: the views are read as one state, the log up to the sequence that this state reflects. Only a session that is
deleted meanwhile does not: what was found of it is dropped, for its log was being removed."""

import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from sqlalchemy import Table, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from turnstream.broker.connection import Broker
from turnstream.broker.pull import Delivery
from turnstream.ids import SessionKey
from turnstream.log.base import Unreadable
from turnstream.session.events import Recorded, SessionDeleted, SessionErased
from turnstream.views import generations
from turnstream.views.batch import Archived
from turnstream.views.database import Checkpoint, Database, NotReady, checkpoint_of
from turnstream.views.generations import Writer
from turnstream_projector import reading
from turnstream_projector.findings import Finding, Findings
from turnstream_projector.rebuild import Progress
from turnstream_projector.rules import Checker

_PAGE: Final = 1000


class Report(msgspec.Struct, frozen=True):
    """`position`: the sequence up to which log and views were compared, None where there are no views. `events`: how
    many were read."""

    findings: tuple[Finding, ...]
    events: int
    position: int | None


async def fsck(broker: Broker, database: Database, *, on_progress: Callable[[Progress], None] | None = None) -> Report:
    """Checks log and views. Raises `ViewsError`, `BrokerFault`."""
    extent = await reading.extent(broker)
    findings = Findings()
    checker = Checker(findings)
    with tempfile.TemporaryDirectory(prefix="turnstream-fsck-") as folder:
        scratch = Database(f"sqlite+aiosqlite:///{Path(folder) / 'views.db'}")
        try:
            async with database.connection() as connection:
                at = await _position(connection)
                writer = Writer(scratch, await generations.prepare(scratch, extent.log))
                events = await _read(broker, extent, checker, findings, writer, at, on_progress)
                checker.finish()
                if at and _comparable(at, extent, findings):
                    await _compare(connection, at, scratch, writer, findings)
        finally:
            await scratch.close()
    await _forget_deleted(broker, findings, behind=min(extent.last, at.position) if at else extent.last)
    return Report(findings.all, events, at.position if at else None)


async def _forget_deleted(broker: Broker, findings: Findings, *, behind: int) -> None:
    """Drops what was found of sessions that were deleted behind this sequence."""
    last = (await reading.extent(broker)).last
    if not findings.suspects or last <= behind:
        return
    pull = reading.follow(broker, behind)
    try:
        async for deliveries in pull:
            for entry in reading.entries_of(deliveries):
                if isinstance(entry, Recorded) and isinstance(entry.event.data, SessionDeleted | SessionErased):
                    findings.forget(entry.event.key)
            if deliveries[-1].seq >= last or not deliveries[-1].pending:
                return
    finally:
        await pull.close()


async def _position(connection: AsyncConnection) -> Checkpoint | None:
    try:
        return await checkpoint_of(connection)
    except NotReady:
        return None


def _comparable(at: Checkpoint, extent: reading.Extent, findings: Findings) -> bool:
    if at.log != extent.log:
        findings.add(
            "another_log", "views", None, f"made of a log that began at {at.log}, this one began at {extent.log}"
        )
        return False
    if at.position > extent.last:
        findings.add("views_ahead", "views", at.position, f"the log ends at {extent.last}")
        return False
    return True


async def _read(
    broker: Broker,
    extent: reading.Extent,
    checker: Checker,
    findings: Findings,
    writer: Writer,
    at: Checkpoint | None,
    on_progress: Callable[[Progress], None] | None,
) -> int:
    """Checks every event there was at the beginning, and folds those that the views reflect."""
    if not extent.events:
        return 0
    count = 0
    pull = reading.follow(broker, 0)
    try:
        async for deliveries in pull:
            entries = _checked(deliveries, checker, findings)
            if at and writer.position < at.position:
                reflected = [entry for entry in entries if entry.seq <= at.position]
                await writer.apply(reflected, min(deliveries[-1].seq, at.position))
            count += len(deliveries)
            last = deliveries[-1]
            if on_progress:
                on_progress(Progress(last.seq, extent.last, count))
            if last.seq >= extent.last or not last.pending:
                return count
    finally:
        await pull.close()
    return count


def _checked(deliveries: Sequence[Delivery], checker: Checker, findings: Findings) -> list[Recorded | Archived]:
    """What these messages hold; what is wrong with any of them is in the findings."""
    entries: list[Recorded | Archived] = []
    for delivery in deliveries:
        try:
            entry = reading.read(delivery)
        except Unreadable as error:
            findings.add("unreadable", delivery.subject, delivery.seq, error.why)
            continue
        if not isinstance(entry, Archived):
            checker.check(entry)
        entries.append(entry)
    return entries


async def _compare(
    connection: AsyncConnection, at: Checkpoint, scratch: Database, writer: Writer, findings: Findings
) -> None:
    async with scratch.connection() as fresh:
        for found, wanted in zip(generations.tables(at.generation), generations.tables(writer.generation), strict=True):
            await _compare_table(_rows(connection, found), _rows(fresh, wanted), wanted, findings)


Cells = tuple[Any, ...]


async def _rows(connection: AsyncConnection, table: Table) -> AsyncGenerator[Cells]:
    """Every row, in the order of the primary key, a page at a time."""
    keys = list(table.primary_key)
    width = len(keys)
    last: Cells | None = None
    while True:
        statement = select(table).order_by(*keys).limit(_PAGE)
        if last:
            statement = statement.where(tuple_(*keys) > tuple_(*last[:width]))
        page = (await connection.execute(statement)).all()
        for row in page:
            yield tuple(row)
        if len(page) < _PAGE:
            return
        last = tuple(page[-1])


async def _compare_table(
    found: AsyncGenerator[Cells], wanted: AsyncGenerator[Cells], table: Table, findings: Findings
) -> None:
    width = len(table.primary_key)
    view = table.name.rpartition("_")[0]
    names = table.columns.keys()
    row, fold = await anext(found, None), await anext(wanted, None)
    while row or fold:
        if row and (not fold or row[:width] < fold[:width]):
            message = "no event of the log gives this row"
            findings.add("row_extra", _where(view, row, width), _seq(row, names), message, _session(row, names))
            row = await anext(found, None)
        elif fold and (not row or fold[:width] < row[:width]):
            message = "the log gives this row, and the view does not have it"
            findings.add("row_missing", _where(view, fold, width), _seq(fold, names), message, _session(fold, names))
            fold = await anext(wanted, None)
        elif row and fold:
            if row != fold:
                differ = ", ".join(name for name, one, two in zip(names, row, fold, strict=True) if one != two)
                message = f"not what the log gives: {differ}"
                findings.add(
                    "row_differs", _where(view, fold, width), _seq(fold, names), message, _session(fold, names)
                )
            row, fold = await anext(found, None), await anext(wanted, None)


def _where(view: str, row: Cells, width: int) -> str:
    return f"{view} {' '.join(map(str, row[:width]))}"


def _seq(row: Cells, names: Sequence[str]) -> int:
    return row[names.index("seq")]


def _session(row: Cells, names: Sequence[str]) -> SessionKey:
    """Whose row it is: every key begins with the session's."""
    account, _, rest = str(row[names.index("key")]).partition("/")
    return SessionKey(account, rest.partition(".")[0])
