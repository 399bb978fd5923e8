"""The sessions of an account, for lists and for one session's page.

How a list is paged: by (updated_at, id), both descending, which is a total order. A listing is *as of its first page*:
every session that was there then comes exactly once and in the order of then, wherever it has moved meanwhile, and is
shown as it is now; sessions opened later are not in it. The cursor names that position. A session that has moved is
placed by `moves`, which remembers where sessions stood during the last `MOVES` sequences of the log; a listing that
takes longer than that goes on as of the oldest position that is remembered. One-shot sessions are not listed.

`status`: `busy` while a run is queued or running, else `error` if the run that ended last failed, else `idle`.
"""

import base64
from functools import lru_cache
from typing import Annotated, Literal, assert_never

import msgspec
from sqlalchemy import BigInteger, Column, Index, MetaData, Select, SmallInteger, Table, Text, select, tuple_

from turnstream.ids import DEFAULT_AGENT, SessionKey, is_session
from turnstream.session.events import (
    Fact,
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    Opens,
    PolicyData,
    Recorded,
    RunCancelRequested,
    RunEnded,
    RunReleased,
    RunStarted,
    RunStatus,
    SessionOpened,
    SessionUpdated,
    TitleSource,
    ToolReturned,
    ToolStarted,
    Unknown,
)
from turnstream.session.state import has_edge
from turnstream.views.database import Database, Reader
from turnstream.views.rows import PAGE, Values, page_size, text

Status = Literal["busy", "error", "idle"]
TITLE = 64
"""Characters of a derived title."""
MOVES = 100_000
"""How many sequences back it is known where a session stood."""


class InvalidCursor(ValueError):
    """The cursor is none that a page of this list gave."""


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A session, for people and programs. Times are milliseconds since the epoch, by the broker's clock."""

    id: str
    title: str
    title_source: TitleSource
    status: Status
    agent: str
    active_run: str | None
    """The run that is running, else the one that is next."""
    queued: int
    """Runs that wait behind the active one."""
    last_run: int
    seq: int
    created_at: int
    updated_at: int
    metadata: dict[str, object]
    policy: PolicyData
    one_shot: bool


class SessionPage(msgspec.Struct, frozen=True):
    """`next` continues the list; `position` is the sequence that the page reflects."""

    items: tuple[SessionView, ...]
    next: str | None
    position: int


# --- the row ------------------------------------------------------------------------------------------------------


class Live(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run that has not ended."""

    n: int
    status: RunStatus
    attempt: int
    message_id: str


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What the fold keeps of a session. `seq` 0: not folded yet."""

    seq: int = 0
    created_at: int = 0
    updated_at: int = 0
    title: str = ""
    title_source: TitleSource = "derived"
    agent: str | None = None
    metadata: dict[str, object] = {}
    policy: PolicyData = PolicyData()
    one_shot: bool = False
    live: tuple[Live, ...] = ()
    last_run: int = 0
    last_end: RunStatus | None = None

    @property
    def status(self) -> Status:
        return "busy" if self.live else "error" if self.last_end == "failed" else "idle"

    def active(self) -> Live | None:
        running = next((run for run in self.live if run.status == "running"), None)
        return running or min(self.live, key=lambda run: (run.attempt == 0, run.n), default=None)

    def find(self, n: int) -> Live | None:
        for run in self.live:
            if run.n == n:
                return run
        return None

    def queued_for(self, message_id: str) -> Live | None:
        """The run that this message waits for, if it can still be withdrawn."""
        run = next((run for run in self.live if run.message_id == message_id), None)
        withdraws = run and not run.attempt and has_edge(run.status, "message.withdrawn", "cancelled")
        return run if withdraws else None


NEW = Row()


def fold(row: Row, recorded: Recorded) -> Row:
    """The session's row after this event. Follows `turnstream.session.state.evolve` in what it takes and what it
    ignores."""
    changes = _changes(row, recorded.event.data)
    changes["seq"] = recorded.seq
    # A new leader's clock may be behind the old one's: a session never moves backwards for that.
    if recorded.time > row.updated_at:
        changes["updated_at"] = recorded.time
    if not row.created_at:
        changes["created_at"] = recorded.time
    return msgspec.structs.replace(row, **changes)


def _changes(row: Row, data: Fact | Unknown) -> dict[str, object]:
    match data:
        case MessagePosted():
            return _posted(row, data)
        case RunStarted():
            run = row.find(data.run)
            if run and data.attempt > run.attempt and has_edge(run.status, "run.started", "running"):
                return {"live": _with(row, Live(run.n, "running", data.attempt, run.message_id))}
        case RunEnded():
            if (run := row.find(data.run)) and has_edge(run.status, "run.ended", data.status):
                return {"live": _without(row, run), "last_end": data.status}
        case ModelReplied() | ToolStarted() | ToolReturned() | RunCancelRequested() | Unknown():
            pass
        case SessionOpened():
            return _opened(data)
        case SessionUpdated():
            return _updated(row, data)
        case MessageWithdrawn():
            if run := row.queued_for(data.message_id):
                return {"live": _without(row, run), "last_end": "cancelled"}
        case RunReleased():
            run = row.find(data.run)
            if run and data.attempt == run.attempt and has_edge(run.status, "run.released", "queued"):
                return {"live": _with(row, Live(run.n, "queued", run.attempt, run.message_id))}
        case _:
            assert_never(data)
    return {}


def _posted(row: Row, data: MessagePosted) -> dict[str, object]:
    changes = _opened(data.opens) if data.opens else {}
    source = changes.get("title_source", row.title_source)
    if source == "derived" and not row.title and data.kind == "message":
        changes["title"] = _derived(data)
    if routing := data.routing:
        changes["live"] = _with(row, Live(routing.run, "queued", 0, data.message_id))
        changes["last_run"] = routing.run
    return changes


def _opened(opens: Opens) -> dict[str, object]:
    changes: dict[str, object] = {
        "agent": opens.agent,
        "metadata": opens.metadata,
        "policy": opens.policy,
        "one_shot": opens.one_shot,
    }
    if opens.title:
        changes |= {"title": opens.title.text, "title_source": opens.title.source}
    return changes


def _updated(row: Row, data: SessionUpdated) -> dict[str, object]:
    changes: dict[str, object] = {}
    if data.title:
        changes |= {"title": data.title.text, "title_source": data.title.source}
    if data.agent is not None:
        changes["agent"] = data.agent
    if data.metadata is not None:
        changes["metadata"] = data.metadata
    if data.policy is not None:
        changes["policy"] = data.policy
    return changes


def _derived(data: MessagePosted) -> str:
    """The first text, its white space made single blanks, cut between characters."""
    for part in data.content:
        if words := part.text[: 16 * TITLE].split():
            return " ".join(words)[:TITLE].rstrip()
    return ""


def _with(row: Row, run: Live) -> tuple[Live, ...]:
    if row.find(run.n) is None:
        return (*row.live, run)
    return (run,) if len(row.live) == 1 else tuple(run if other.n == run.n else other for other in row.live)


def _without(row: Row, run: Live) -> tuple[Live, ...]:
    return () if len(row.live) == 1 else tuple(other for other in row.live if other.n != run.n)


# --- the tables ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def table(generation: int) -> Table:
    name = f"sessions_{generation}"
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
        Column("body", Text, nullable=False),
        Index(f"{name}_listed", "account", "listed", "updated_at", "session"),
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
        0 if row.one_shot else 1,
        row.updated_at,
        row.seq,
        row.status,
        row.agent or DEFAULT_AGENT,
        _folded(row.title),
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
    """The session, or None if the views do not have it, and the position that this reflects."""

    async def work(reader: Reader) -> tuple[SessionView | None, int]:
        sessions = table(reader.generation)
        found = await reader.rows(select(sessions.c.session, sessions.c.body).where(sessions.c.key == str(key)))
        return (_view(found[0].session, found[0].body) if found else None), reader.position

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
    q: str | None = None,
) -> SessionPage:
    """A page of at most `limit` sessions, the one that changed last first (see the module). The filters look at a
    session as it is now; `q` is a part of the title, in whatever case. Raises `InvalidCursor`, `ViewsError`."""
    limit = page_size(limit)
    after = _parse_cursor(cursor) if cursor else None

    async def work(reader: Reader) -> SessionPage:
        sessions = table(reader.generation)
        wanted = [sessions.c.account == account, sessions.c.listed == 1]
        if status:
            wanted.append(sessions.c.status == status)
        if agent:
            wanted.append(sessions.c.agent == agent.replace("\0", "?"))
        if q:
            wanted.append(sessions.c.title.contains(_folded(q), autoescape=True))
        as_of = max(after.as_of, reader.position - MOVES) if after else reader.position
        found: list[tuple[int, str, str]] = []
        for statement in _statements(reader.generation, as_of, after):
            statement = statement.where(*wanted).limit(limit + 1)
            found += [(row.at, row.session, row.body) for row in await reader.rows(statement)]
        found.sort(reverse=True)
        items = tuple(_view(session, body) for _, session, body in found[:limit])
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


def _view(session: str, body: str) -> SessionView:
    row = parse(body)
    active = row.active()
    return SessionView(
        id=session,
        title=row.title,
        title_source=row.title_source,
        status=row.status,
        agent=row.agent or DEFAULT_AGENT,
        active_run=f"{session}.{active.n}" if active else None,
        queued=max(0, len(row.live) - 1),
        last_run=row.last_run,
        seq=row.seq,
        created_at=row.created_at,
        updated_at=row.updated_at,
        metadata=row.metadata,
        policy=row.policy,
        one_shot=row.one_shot,
    )
