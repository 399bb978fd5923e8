"""The sessions of an account, for lists and for one session's page.

How a list is paged: by (updated_at, id), both descending, which is a total order. A listing is *as of its first page*:
every session that was there then comes exactly once and in the order of then, wherever it has moved meanwhile, and is
shown as it is now; sessions opened later are not in it. The cursor names that position. A session that has moved is
placed by `moves`, which remembers where sessions stood during the last `MOVES` sequences of the log; a listing that
takes longer than that goes on as of the oldest position that is remembered. One-shot sessions are not listed.

What a row is and how events change it is in `session_row.py`. A session that is deleted is not there for anybody; its
row is kept, empty, until everything else of it is removed, for the sweep.
"""

import base64
from functools import lru_cache
from typing import Annotated

import msgspec
from sqlalchemy import BigInteger, Column, Index, MetaData, Select, SmallInteger, Table, Text, select, tuple_
from sqlalchemy import text as sql

from turnstream.ids import DEFAULT_AGENT, SessionKey, is_session, run_id
from turnstream.session.events import PlanItem, PolicyData, TitleSource
from turnstream.session.state import Copying
from turnstream.views.database import Database, Reader
from turnstream.views.rows import PAGE, Values, page_size, text
from turnstream.views.session_row import Gone, Row, Status

MOVES = 100_000
"""How many sequences back it is known where a session stood."""


class InvalidCursor(ValueError):
    """The cursor is none that a page of this list gave."""


class ParentView(msgspec.Struct, frozen=True, kw_only=True):
    """Call `call_id` of run `run`, which is in `session`."""

    session: str
    run: str
    call_id: str


class ForkedFrom(msgspec.Struct, frozen=True, kw_only=True):
    """What a session was forked from: a session, up to its event `seq`. That session may be gone by now."""

    session: str
    seq: int


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A session, for people and programs. Times are milliseconds since the epoch, by the broker's clock."""

    id: str
    title: str
    title_source: TitleSource
    status: Status
    agent: str
    active_run: str | None
    """The run that holds the turn, else the one that is next."""
    queued: int
    """Runs that wait behind the active one."""
    open_requests: tuple[str, ...]
    """Ids of the questions and approvals that nobody has answered."""
    last_run: int
    seq: int
    created_at: int
    updated_at: int
    metadata: dict[str, object]
    policy: PolicyData
    """As it was given to the session."""
    one_shot: bool
    parent: ParentView | None
    """Whoever delegated it; None also where that session is deleted."""
    plan: tuple[PlanItem, ...]
    """The checklist that the agent keeps."""
    forked_from: ForkedFrom | None
    copying: Copying | None
    """It is a fork that is not whole yet, and this is how far it is: so many events, up to that one of the other
    session. Nothing may be asked of it before it is whole."""


class SessionPage(msgspec.Struct, frozen=True):
    """`next` continues the list; `position` is the sequence that the page reflects."""

    items: tuple[SessionView, ...]
    next: str | None
    position: int


# --- the tables ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def table(generation: int) -> Table:
    name = f"sessions_{generation}"
    deleted, unsettled = sql("deleted_at IS NOT NULL"), sql("unsettled_at IS NOT NULL")
    parent, unlisted = sql("parent IS NOT NULL"), sql("listed = 0 AND deleted_at IS NULL")
    listed = ("account", "parent", "listed", "updated_at", "session")
    return Table(
        name,
        MetaData(),
        Column("key", text(), primary_key=True),
        Column("account", text(), nullable=False),
        Column("session", text(), nullable=False),
        Column("listed", SmallInteger, nullable=False),
        Column("updated_at", BigInteger, nullable=False),
        Column("seq", BigInteger, nullable=False),
        Column("status", text(), nullable=False),
        Column("agent", text(), nullable=False),
        Column("title", text(), nullable=False),
        Column("parent", text()),
        Column("deleted_at", BigInteger),
        Column("unsettled_at", BigInteger),
        Column("body", Text, nullable=False),
        Index(f"{name}_listed", "account", "listed", "updated_at", "session"),
        Index(f"{name}_unlisted", "updated_at", sqlite_where=unlisted, postgresql_where=unlisted),
        Index(f"{name}_parent", *listed, sqlite_where=parent, postgresql_where=parent),
        Index(f"{name}_unsettled", "unsettled_at", sqlite_where=unsettled, postgresql_where=unsettled),
        Index(f"{name}_deleted", "deleted_at", sqlite_where=deleted, postgresql_where=deleted),
    )


@lru_cache(maxsize=16)
def moves(generation: int) -> Table:
    """Where a session stood before the event `seq` moved it: its last event and time were `before_seq`, `before_at`."""
    return Table(
        f"moves_{generation}",
        MetaData(),
        Column("seq", BigInteger, primary_key=True, autoincrement=False),
        Column("account", text(), nullable=False),
        Column("key", text(), nullable=False),
        Column("before_seq", BigInteger, nullable=False),
        Column("before_at", BigInteger, nullable=False),
    )


_encoder = msgspec.json.Encoder()
_rows = msgspec.json.Decoder(Row)


def values(key: SessionKey, row: Row) -> Values:
    return (
        f"{key.account}/{key.session}",
        key.account,
        key.session,
        1 if row.listed else 0,
        row.updated_at,
        row.seq,
        row.status,
        row.agent or DEFAULT_AGENT,
        _folded(row.title),
        row.parent.session if row.parent else None,
        row.deleted.at if row.deleted else None,
        row.updated_at if row.unsettled else None,
        _encoder.encode(row).decode(),
    )


def parse(body: str) -> Row:
    return _rows.decode(body)


def _folded(title: str) -> str:
    """A title as it is searched: PostgreSQL's text cannot hold a NUL, and neither database folds case beyond ASCII
    alike."""
    return title.casefold().replace("\0", "")


# --- how it is asked ----------------------------------------------------------------------------------------------


async def get(db: Database, key: SessionKey) -> tuple[SessionView | None, int]:
    """The session, or None if the views do not have it (any more), and the position that this reflects."""

    async def work(reader: Reader) -> tuple[SessionView | None, int]:
        sessions = table(reader.generation)
        wanted = [sessions.c.key == str(key), sessions.c.deleted_at.is_(None)]
        found = await reader.rows(select(sessions.c.session, sessions.c.body).where(*wanted))
        views = await _views(reader, key.account, [(row.session, row.body) for row in found])
        return (views[0] if views else None), reader.position

    return await db.read(work)


class Unsettled(msgspec.Struct, frozen=True):
    """A session with something to do that is of no run that has not ended: see `Row.unsettled`."""

    key: SessionKey
    row: Row


async def unsettled_before(
    db: Database, before: int, after: tuple[int, str] = (0, ""), *, limit: int
) -> list[Unsettled]:
    """Sessions that nothing has happened in since this time, and that have something to do with others, in the order of
    (time, key) behind `after`. Raises `ViewsError`."""
    rows = await _before(db, "unsettled_at", "unsettled_at IS NOT NULL", before, after, limit)
    return [Unsettled(key, row) for key, row in rows]


async def one_shots_before(
    db: Database, before: int, after: tuple[int, str] = (0, ""), *, limit: int
) -> list[tuple[SessionKey, Row]]:
    """Sessions of one-shot runs that nothing has happened in since this time, in the order of (time, key) behind
    `after`. Raises `ViewsError`."""
    return await _before(db, "updated_at", "listed = 0 AND deleted_at IS NULL", before, after, limit)


class Unfinished(msgspec.Struct, frozen=True):
    """A deleted session of which something is left."""

    key: SessionKey
    row: Row
    deleted: Gone


async def deleted_before(
    db: Database, before: int, after: tuple[int, str] = (0, ""), *, limit: int
) -> list[Unfinished]:
    """Sessions that were deleted before this time and of which something is left, in the order of (time, key) behind
    `after`. Raises `ViewsError`."""
    rows = await _before(db, "deleted_at", "deleted_at IS NOT NULL", before, after, limit)
    return [Unfinished(key, row, row.deleted) for key, row in rows if row.deleted]


async def _before(
    db: Database, column: str, which: str, before: int, after: tuple[int, str], limit: int
) -> list[tuple[SessionKey, Row]]:
    """Of these sessions those with a time in this column that is over, in the order of (time, key) behind `after`.
    `which` is SQL that an index has."""

    async def work(reader: Reader) -> list[tuple[SessionKey, Row]]:
        sessions = table(reader.generation)
        at, key = sessions.c[column], sessions.c.key
        statement = (
            select(sessions.c.account, sessions.c.session, sessions.c.body)
            .where(sql(which), at < before)
            .where((at > after[0]) | ((at == after[0]) & (key > after[1])))
            .order_by(at, key)
            .limit(limit)
        )
        return [(SessionKey(row.account, row.session), parse(row.body)) for row in await reader.rows(statement)]

    return await db.read(work)


Sequence = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _Cursor(msgspec.Struct, frozen=True, array_like=True):
    as_of: Sequence
    updated_at: Sequence
    session: str


async def list_page(
    db: Database,
    account: str,
    *,
    limit: int = PAGE,
    cursor: str | None = None,
    status: Status | None = None,
    agent: str | None = None,
    parent: str | None = None,
    q: str | None = None,
) -> SessionPage:
    """A page of at most `limit` sessions, the one that changed last first (see the module). The filters look at a
    session as it is now; `q` is a part of the title, in whatever case; `parent` a session that is not deleted. Raises
    `InvalidCursor`, `ViewsError`."""
    limit = page_size(limit)
    after = _parse_cursor(cursor) if cursor else None

    async def work(reader: Reader) -> SessionPage:
        sessions = table(reader.generation)
        wanted = [sessions.c.account == account, sessions.c.listed == 1]
        if status:
            wanted.append(sessions.c.status == status)
        if agent:
            wanted.append(sessions.c.agent == agent.replace("\0", "?"))
        if parent:
            name = f"{account}/{parent}".replace("\0", "?")
            there = select(sessions.c.key).where(sessions.c.key == name, sessions.c.deleted_at.is_(None))
            if not await reader.rows(there):
                return SessionPage((), None, reader.position)
            wanted.append(sessions.c.parent == parent)
        if q:
            wanted.append(sessions.c.title.contains(_folded(q), autoescape=True))
        as_of = max(after.as_of, reader.position - MOVES) if after else reader.position
        found: list[tuple[int, str, str]] = []
        for statement in _statements(reader.generation, as_of, after):
            statement = statement.where(*wanted).limit(limit + 1)
            found += [(row.at, row.session, row.body) for row in await reader.rows(statement)]
        found.sort(reverse=True)
        items = await _views(reader, account, [(session, body) for _, session, body in found[:limit]])
        more = len(found) > limit
        last = found[limit - 1] if more else None
        return SessionPage(items, _cursor(as_of, last[0], last[1]) if last else None, reader.position)

    return await db.read(work)


def _statements(generation: int, as_of: int, after: _Cursor | None) -> list[Select[int, str, str]]:
    """The sessions that have not changed since `as_of`, by where they stand; and those that have, by where they
    stood."""
    sessions = table(generation)
    if after is None:
        columns = select(sessions.c.updated_at.label("at"), sessions.c.session, sessions.c.body)
        return [columns.order_by(sessions.c.updated_at.desc(), sessions.c.session.desc())]
    stands = tuple_(sessions.c.updated_at, sessions.c.session)
    still = (
        select(sessions.c.updated_at.label("at"), sessions.c.session, sessions.c.body)
        .where(stands < tuple_(after.updated_at, after.session), sessions.c.seq <= as_of)
        .order_by(sessions.c.updated_at.desc(), sessions.c.session.desc())
    )
    left = moves(generation)
    stood = tuple_(left.c.before_at, sessions.c.session)
    moved = (
        select(left.c.before_at.label("at"), sessions.c.session, sessions.c.body)
        .join(sessions, left.c.key == sessions.c.key)
        .where(left.c.seq > as_of, left.c.before_seq <= as_of, stood < tuple_(after.updated_at, after.session))
        .order_by(left.c.before_at.desc(), sessions.c.session.desc())
    )
    return [still, moved]


def _cursor(as_of: int, updated_at: int, session: str) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(_Cursor(as_of, updated_at, session))).decode().rstrip("=")


def _parse_cursor(cursor: str) -> _Cursor:
    try:
        parsed = msgspec.json.decode(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)), type=_Cursor)
    except (ValueError, msgspec.MsgspecError):
        parsed = None
    if parsed is None or not is_session(parsed.session):
        raise InvalidCursor("this cursor was not given by a page of this list")
    return parsed


async def _views(reader: Reader, account: str, found: list[tuple[str, str]]) -> tuple[SessionView, ...]:
    rows = [(session, parse(body)) for session, body in found]
    parents = {f"{account}/{row.parent.session}" for _, row in rows if row.parent}
    bodies = await reader.bodies(table(reader.generation), sorted(parents)) if parents else {}
    there = {key.partition("/")[2] for key, body in bodies.items() if parse(body).deleted is None}
    return tuple([_view(session, row, there) for session, row in rows])


def _view(session: str, row: Row, there: set[str]) -> SessionView:
    """`there`: sessions that are not deleted."""
    parent, forked = row.parent if row.parent and row.parent.session in there else None, row.forked_from
    active = row.active()
    return SessionView(
        id=session,
        title=row.title,
        title_source=row.title_source,
        status=row.status,
        agent=row.agent or DEFAULT_AGENT,
        active_run=f"{session}.{active.n}" if active else None,
        queued=sum(run.status == "queued" and run is not active for run in row.going_on),
        open_requests=tuple(f"{session}.{run.n}.q{k}" for run in row.going_on for k in run.requests),
        last_run=row.last_run,
        seq=row.seq,
        created_at=row.created_at,
        updated_at=row.updated_at,
        metadata=row.metadata,
        policy=row.policy,
        one_shot=row.one_shot,
        parent=parent
        and ParentView(session=parent.session, run=run_id(parent.session, parent.run), call_id=parent.call_id),
        plan=row.plan,
        forked_from=forked and ForkedFrom(session=forked.session, seq=forked.through),
        copying=row.copying,
    )
