"""The runs of an account: what was asked of whom, how it stands, what came of it.

Runs are listed newest first by the sequence of the event that asked for them: a total order in which nothing ever
moves. The row of a run that has not ended also holds what the sweep needs (its wake-up, its deadline) and the tool
calls that are open; the row of a run that has ended never changes again."""

from functools import lru_cache
from typing import assert_never

import msgspec
from sqlalchemy import BigInteger, Column, Index, MetaData, Table, Text, func, select
from sqlalchemy import text as sql

from turnstream.ids import SessionKey, parse_run_id, run_id
from turnstream.session.events import (
    Blob,
    Error,
    Fact,
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    Recorded,
    RunCancelRequested,
    RunEnded,
    RunReleased,
    RunStarted,
    RunStatus,
    SessionOpened,
    SessionUpdated,
    Spec,
    Starts,
    ToolReturned,
    ToolStarted,
    Trigger,
    Unknown,
    Usage,
    Wake,
)
from turnstream.session.state import has_edge
from turnstream.views import sessions
from turnstream.views.database import Database, Reader
from turnstream.views.rows import PAGE, Values, page_size, text


class Attempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One start of the run by a runner. `ended_at` is when it was known to be over: the next start, a release, the
    end."""

    attempt: int
    runner: str
    trigger: Trigger
    started_at: int
    ended_at: int | None = None


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    by: str
    reason: str
    at: int


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The final answer. What is too large for an event is in `blob`; `content` then holds its head."""

    content: str = ""
    reasoning: str = ""
    blob: Blob | None = None


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """A run, for people and programs. Times are milliseconds since the epoch, by the broker's clock. `output` is there
    where one run is asked for, not in lists."""

    id: str
    session: str
    status: RunStatus
    agent: str
    version: str
    digest: str
    model: str
    queue: str
    message_ids: tuple[str, ...]
    attempts: int
    starts: tuple[Attempt, ...]
    steps: int
    tool_calls: int
    usage: Usage
    cancel_requested: CancelRequest | None
    reason: str
    error: Error | None
    note: str
    requested_at: int
    started_at: int | None
    ended_at: int | None
    deadline: int | None
    requested_seq: int
    seq: int
    """The last event of the run."""
    output: Output | None


class RunPage(msgspec.Struct, frozen=True):
    """`next` continues the list; `position` is the sequence that the page reflects."""

    items: tuple[RunView, ...]
    next: str | None
    position: int


# --- the row ------------------------------------------------------------------------------------------------------


class OpenCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tool call that has no result yet. `asked_at`: when the model asked for it; `started_at` 0: not stored."""

    id: str
    name: str
    arguments: str
    asked_at: int
    started_at: int = 0


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What the fold keeps of a run."""

    n: int
    spec: Spec
    message_ids: tuple[str, ...]
    requested_seq: int
    requested_at: int
    seq: int
    changed_at: int
    """Time of the run's last event."""
    status: RunStatus = "queued"
    model: str = ""
    attempt: int = 0
    starts: tuple[Attempt, ...] = ()
    started_at: int | None = None
    ended_at: int | None = None
    deadline: int | None = None
    live_since: int | None = None
    """When it was queued or started last; None once it has ended."""
    wake: Wake | None = None
    steps: int = 0
    tool_calls: int = 0
    open_calls: tuple[OpenCall, ...] = ()
    usage: Usage = Usage()
    cancel: CancelRequest | None = None
    reason: str = ""
    error: Error | None = None
    note: str = ""

    @property
    def live(self) -> bool:
        return self.live_since is not None

    def find(self, call_id: str) -> OpenCall | None:
        return next((call for call in self.open_calls if call.id == call_id), None)


def about(data: Fact | Unknown) -> int | str | None:
    """Number of the run that a fact names; a message that is withdrawn names it by its own id."""
    match data:
        case MessageWithdrawn():
            return data.message_id
        case MessagePosted() | SessionOpened() | SessionUpdated() | Unknown():
            return None
        case _:
            return data.run


def concerned(session: sessions.Row, data: Fact | Unknown) -> sessions.Live | None:
    """The live run of the session that this fact is about."""
    named = about(data)
    return session.queued_for(named) if isinstance(named, str) else session.find(named) if named else None


def requested(recorded: Recorded, data: MessagePosted, routing: Starts) -> Row:
    """The row of the run that a message starts or waits for."""
    return Row(
        n=routing.run,
        spec=routing.spec,
        message_ids=(data.message_id,),
        requested_seq=recorded.seq,
        requested_at=recorded.time,
        seq=recorded.seq,
        changed_at=recorded.time,
        live_since=recorded.time,
    )


def fold(row: Row, recorded: Recorded) -> Row:
    """The run's row after a fact that is about it; the same one where that changes nothing (a fact of an older attempt,
    a second end). Follows `turnstream.session.state.evolve`."""
    if not row.live:
        return row
    data = recorded.event.data
    now = recorded.time
    changes: dict[str, object] | None = None
    match data:
        case RunStarted():
            if data.attempt > row.attempt and has_edge(row.status, "run.started", "running"):
                changes = _started(row, data, now)
        case RunEnded():
            if has_edge(row.status, "run.ended", data.status):
                changes = _ended(row, data, now)
        case ModelReplied():
            if row.attempt == data.attempt:
                changes = _replied(row, data, now)
        case ToolReturned():
            if row.attempt == data.attempt:
                changes = {"open_calls": tuple(call for call in row.open_calls if call.id != data.call_id)}
        case ToolStarted():
            if row.attempt == data.attempt:
                changes = {"open_calls": tuple(_begun(call, data.call_id, now) for call in row.open_calls)}
        case RunReleased():
            if row.attempt == data.attempt and has_edge(row.status, "run.released", "queued"):
                changes = {"status": "queued", "live_since": now, "starts": _over(row.starts, now)}
        case RunCancelRequested():
            changes = {"cancel": CancelRequest(by=data.by, reason=data.reason, at=now)}
        case MessageWithdrawn():
            changes = {"status": "cancelled", "ended_at": now, "live_since": None, "reason": "message withdrawn"}
        case MessagePosted() | SessionOpened() | SessionUpdated() | Unknown():
            pass
        case _:
            assert_never(data)
    if changes is None:
        return row
    return msgspec.structs.replace(row, seq=recorded.seq, changed_at=now, **changes)


def _started(row: Row, data: RunStarted, now: int) -> dict[str, object]:
    attempt = Attempt(attempt=data.attempt, runner=data.runner, trigger=data.trigger, started_at=now)
    return {
        "status": "running",
        "attempt": data.attempt,
        "starts": (*_over(row.starts, now), attempt),
        "model": data.model or row.model,
        "wake": data.wake,
        "started_at": row.started_at if row.started_at is not None else now,
        "deadline": row.deadline if row.deadline is not None else now + row.spec.limits.timeout,
        "live_since": now,
    }


def _ended(row: Row, data: RunEnded, now: int) -> dict[str, object]:
    return {
        "status": data.status,
        "ended_at": now,
        "live_since": None,
        "starts": _over(row.starts, now),
        "model": data.model or row.model,
        "usage": data.usage,
        "reason": data.reason,
        "error": data.error,
        "note": data.note,
        "open_calls": (),
    }


def _replied(row: Row, data: ModelReplied, now: int) -> dict[str, object]:
    return {
        "steps": data.step,
        "tool_calls": row.tool_calls + len(data.tool_calls),
        "open_calls": tuple(OpenCall(call.id, call.name, call.arguments, now) for call in data.tool_calls),
        "usage": row.usage + data.usage,
        "model": data.model or row.model,
    }


def _begun(call: OpenCall, call_id: str, now: int) -> OpenCall:
    return msgspec.structs.replace(call, started_at=now) if call.id == call_id else call


def _over(starts: tuple[Attempt, ...], now: int) -> tuple[Attempt, ...]:
    """The last attempt is over now, if it was not before."""
    if not starts or starts[-1].ended_at is not None:
        return starts
    return (*starts[:-1], msgspec.structs.replace(starts[-1], ended_at=now))


def output(data: Fact | Unknown) -> Output | None:
    """What the run has to show for itself, if this fact is its end."""
    if not isinstance(data, RunEnded) or not (data.content or data.reasoning or data.blob):
        return None
    return Output(content=data.content, reasoning=data.reasoning, blob=data.blob)


# --- the table ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def table(generation: int) -> Table:
    name = f"runs_{generation}"
    live, not_completed = sql("live_since IS NOT NULL"), sql("status <> 'completed'")
    return Table(
        name,
        MetaData(),
        Column("key", text(), primary_key=True),
        Column("account", text(), nullable=False),
        Column("session", text(), nullable=False),
        Column("seq", BigInteger, nullable=False),
        Column("status", text(), nullable=False),
        Column("agent", text(), nullable=False),
        Column("requested_at", BigInteger, nullable=False),
        Column("live_since", BigInteger),
        Column("body", Text, nullable=False),
        Column("output", Text),
        Index(f"{name}_listed", "account", "seq"),
        Index(f"{name}_session", "account", "session", "seq"),
        # Few runs are live, few have not gone well: these two stay small however many runs there are.
        Index(f"{name}_live", "live_since", sqlite_where=live, postgresql_where=live),
        Index(f"{name}_status", "account", "status", "seq", sqlite_where=not_completed, postgresql_where=not_completed),
    )


_encoder = msgspec.json.Encoder()
_rows = msgspec.json.Decoder(Row)
_outputs = msgspec.json.Decoder(Output)


def key_of(key: SessionKey, n: int) -> str:
    """The key of the run's row: `<account>/<session>.<n>`."""
    return f"{key.account}/{key.session}.{n}"


def values(key: SessionKey, row: Row, said: Output | None) -> Values:
    return (
        key_of(key, row.n),
        key.account,
        key.session,
        row.requested_seq,
        row.status,
        row.spec.agent,
        row.requested_at,
        row.live_since,
        _encoder.encode(row).decode(),
        _encoder.encode(said).decode() if said else None,
    )


def parse(body: str) -> Row:
    return _rows.decode(body)


# --- how it is asked ----------------------------------------------------------------------------------------------


async def get(db: Database, account: str, run: str) -> tuple[RunView | None, int]:
    """The run with its output, or None if the views do not have it, and the position that this reflects."""
    parsed = parse_run_id(run)

    async def work(reader: Reader) -> tuple[RunView | None, int]:
        if parsed is None:
            return None, reader.position
        runs = table(reader.generation)
        wanted = runs.c.key == key_of(SessionKey(account, parsed[0]), parsed[1])
        found = await reader.rows(select(runs.c.session, runs.c.body, runs.c.output).where(wanted))
        return (_view(found[0].session, found[0].body, found[0].output) if found else None), reader.position

    return await db.read(work)


async def list_page(
    db: Database,
    account: str,
    *,
    limit: int = PAGE,
    cursor: str | None = None,
    session: str | None = None,
    status: RunStatus | None = None,
    agent: str | None = None,
    since: int | None = None,
) -> RunPage:
    """A page of at most `limit` runs, the newest first. `since`: those requested at or after this time, in
    milliseconds. Raises `InvalidCursor`, `ViewsError`."""
    limit = page_size(limit)
    before = _parse_cursor(cursor) if cursor else None

    async def work(reader: Reader) -> RunPage:
        runs = table(reader.generation)
        wanted = [runs.c.account == account]
        if session is not None:
            wanted.append(runs.c.session == session.replace("\0", "?"))
        if status is not None:
            wanted.append(runs.c.status == status)
            if status != "completed":
                wanted.append(sql("status <> 'completed'"))  # pyright: ignore[reportArgumentType]
        if agent is not None:
            wanted.append(runs.c.agent == agent.replace("\0", "?"))
        if since is not None:
            wanted.append(runs.c.requested_at >= since)
        if before is not None:
            wanted.append(runs.c.seq < before)
        statement = select(runs.c.seq, runs.c.session, runs.c.body).where(*wanted)
        found = await reader.rows(statement.order_by(runs.c.seq.desc()).limit(limit + 1))
        items = tuple(_view(row.session, row.body, None) for row in found[:limit])
        return RunPage(items, str(found[limit - 1].seq) if len(found) > limit else None, reader.position)

    return await db.read(work)


class LiveRun(msgspec.Struct, frozen=True):
    """A run that has not ended. `is_next`: it is running, or is the one to start next in its session."""

    key: SessionKey
    row: Row
    is_next: bool


async def live_before(
    db: Database, before: int, after: tuple[int, str] = (0, ""), *, limit: int, account: str | None = None
) -> list[LiveRun]:
    """Runs of one account, or of all, that were queued, or started last, before this time, in the order of (time, key)
    behind `after`. Raises `ViewsError`."""

    async def work(reader: Reader) -> list[LiveRun]:
        runs = table(reader.generation)
        statement = (
            select(runs.c.account, runs.c.session, runs.c.body)
            .where(sql("live_since IS NOT NULL"), runs.c.live_since < before)
            .where((runs.c.live_since > after[0]) | ((runs.c.live_since == after[0]) & (runs.c.key > after[1])))
            .order_by(runs.c.live_since, runs.c.key)
            .limit(limit)
        )
        if account is not None:
            statement = statement.where(runs.c.account == account)
        found = [(SessionKey(row.account, row.session), parse(row.body)) for row in await reader.rows(statement)]
        # Each session once: it names its live runs, so one with many would be many times large.
        owners = await reader.bodies(sessions.table(reader.generation), sorted({str(key) for key, _ in found}))
        active = {key: sessions.parse(owner).active() for key, owner in owners.items()}
        return [LiveRun(key, row, _is(active.get(str(key)), row)) for key, row in found]

    return await db.read(work)


def _is(active: sessions.Live | None, row: Row) -> bool:
    return active is not None and active.n == row.n


class LiveRuns(msgspec.Struct, frozen=True):
    """How many runs of an account have not ended; `oldest_queued_at` is in milliseconds."""

    queued: int
    running: int
    oldest_queued_at: int | None


async def count_live(db: Database, account: str | None = None) -> LiveRuns:
    """The live runs of one account, or of all."""

    async def work(reader: Reader) -> LiveRuns:
        runs = table(reader.generation)
        statement = select(runs.c.status, func.count().label("runs"), func.min(runs.c.live_since).label("oldest"))
        statement = statement.where(sql("live_since IS NOT NULL")).group_by(runs.c.status)
        if account is not None:
            statement = statement.where(runs.c.account == account)
        found = {row.status: (row.runs, row.oldest) for row in await reader.rows(statement)}
        queued, oldest = found.get("queued", (0, None))
        return LiveRuns(queued, found.get("running", (0, None))[0], oldest)

    return await db.read(work)


def _parse_cursor(cursor: str) -> int:
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise sessions.InvalidCursor("this cursor was not given by a page of this list")
    return int(cursor)


def _view(session: str, body: str, said: str | None) -> RunView:
    row = parse(body)
    spec = row.spec
    return RunView(
        id=run_id(session, row.n),
        session=session,
        status=row.status,
        agent=spec.agent,
        version=spec.version,
        digest=spec.digest,
        model=row.model or spec.model,
        queue=spec.queue,
        message_ids=row.message_ids,
        attempts=row.attempt,
        starts=row.starts,
        steps=row.steps,
        tool_calls=row.tool_calls,
        usage=row.usage,
        cancel_requested=row.cancel,
        reason=row.reason,
        error=row.error,
        note=row.note,
        requested_at=row.requested_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        deadline=row.deadline,
        requested_seq=row.requested_seq,
        seq=row.seq,
        output=_outputs.decode(said) if said else None,
    )
