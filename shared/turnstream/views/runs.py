"""The runs of an account: what was asked of whom, how it stands, what came of it.

Runs are listed newest first by the sequence of the event that asked for them: a total order in which nothing ever
moves. What a row is and how events change it is in `run_row.py`. The runs of a session that was deleted and kept its
runs stay, with what they gave; they belong to no session then."""

from functools import lru_cache

import msgspec
from sqlalchemy import BigInteger, Column, Index, MetaData, SmallInteger, Table, Text, select
from sqlalchemy import text as sql

from turnstream.ids import SessionKey, child_id, parse_run_id, root_of, run_id
from turnstream.session.events import Blob, Error, Fact, Requested, RunEnded, RunStatus, Unknown, Usage
from turnstream.session.state import Run
from turnstream.views import sessions
from turnstream.views.database import Database, Reader
from turnstream.views.rows import PAGE, Values, page_size, text
from turnstream.views.run_row import Attempt, CancelRequest, Row


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What the event that ended a run says of its answer, by the event's own words."""

    content: str = ""
    reasoning: str = ""
    blob: Blob | None = None


def output(data: Fact | Unknown) -> Output | None:
    """What the run has to show for itself, if this fact is its end."""
    if not isinstance(data, RunEnded) or not (data.content or data.reasoning or data.blob):
        return None
    return Output(content=data.content, reasoning=data.reasoning, blob=data.blob)


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """A run, for people and programs. Times are milliseconds since the epoch, by the broker's clock.

    `output` is the final answer, or what there was of it: the `content` of `run.ended`. What is too large for an event
    is in `blob`, and `output` holds its head. All three, `reasoning` too, are there where one run is asked for, not in
    lists."""

    id: str
    session: str | None
    """None: it was deleted, and its runs were kept."""
    status: RunStatus
    trigger: Requested
    """Why it is there."""
    retry_of: str | None
    copied_from: str | None
    """The run of which this one tells, where its session is a fork and it went before that: what it used was used
    there."""
    parent: str | None
    """The run that delegated it, by its call `call_id`."""
    call_id: str | None
    root: str | None
    """The run at the top of the tree that it is a part of; None where nobody delegated it."""
    agent: str
    version: str
    digest: str
    model: str
    queue: str
    message_ids: tuple[str, ...]
    """The messages that it has taken, oldest first; before it starts, those that it will."""
    attempts: int
    starts: tuple[Attempt, ...]
    steps: int
    tool_calls: int
    open_requests: int
    """Questions and approvals that nobody has answered."""
    children: int
    """How many sub-agents it has had."""
    open_children: tuple[str, ...]
    """The runs of sub-agents that it waits for."""
    unfinished: tuple[str, ...]
    """Ids of the tool calls that ended with it, without a result."""
    usage: Usage
    """That of the sub-agents that have ended before it is included."""
    cancel_requested: CancelRequest | None
    reason: str
    error: Error | None
    note: str
    requested_at: int
    started_at: int | None
    ended_at: int | None
    deadline: int | None
    """When its time is over; None while it waits, if its clock stands then."""
    requested_seq: int
    seq: int
    """The last event of the run."""
    leftover: str | None
    """The run that takes the messages which reached this one too late."""
    output: str | None
    reasoning: str
    blob: Blob | None


class RunPage(msgspec.Struct, frozen=True):
    """`next` continues the list; `position` is the sequence that the page reflects."""

    items: tuple[RunView, ...]
    next: str | None
    position: int


# --- the table ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def table(generation: int) -> Table:
    name = f"runs_{generation}"
    live, due = sql("live_since IS NOT NULL"), sql("due IS NOT NULL")
    not_completed = sql("status <> 'completed'")
    parent, root = sql("parent IS NOT NULL"), sql("root IS NOT NULL")
    return Table(
        name,
        MetaData(),
        Column("key", text(), primary_key=True),
        Column("account", text(), nullable=False),
        Column("session", text()),
        Column("archived", SmallInteger, nullable=False),
        Column("seq", BigInteger, nullable=False),
        Column("status", text(), nullable=False),
        Column("agent", text(), nullable=False),
        Column("parent", text()),
        Column("root", text()),
        Column("requested_at", BigInteger, nullable=False),
        Column("live_since", BigInteger),
        Column("due", BigInteger),
        Column("body", Text, nullable=False),
        Column("output", Text),
        Index(f"{name}_listed", "account", "seq"),
        Index(f"{name}_session", "account", "session", "seq"),
        # Few runs are live, few have not gone well, few were delegated: these stay small however many runs there are.
        Index(f"{name}_live", "live_since", sqlite_where=live, postgresql_where=live),
        Index(f"{name}_due", "due", sqlite_where=due, postgresql_where=due),
        Index(f"{name}_parent", "account", "parent", "seq", sqlite_where=parent, postgresql_where=parent),
        Index(f"{name}_root", "account", "root", "seq", sqlite_where=root, postgresql_where=root),
        Index(f"{name}_status", "account", "status", "seq", sqlite_where=not_completed, postgresql_where=not_completed),
    )


_encoder = msgspec.json.Encoder()
_rows = msgspec.json.Decoder(Row)
_outputs = msgspec.json.Decoder(Output)


def key_of(key: SessionKey, n: int) -> str:
    """The key of the run's row: `<account>/<session>.<n>`."""
    return f"{key.account}/{key.session}.{n}"


def name_of(key: str) -> tuple[str, str]:
    """Account and id of the run with this key."""
    account, _, run = key.partition("/")
    return account, run


def values(
    key: SessionKey,
    row: Row,
    said: Output | None,
    *,
    detached: bool = False,
    archived: bool = False,
    goes_on: bool = True,
) -> Values:
    """`goes_on`: whether it is to be found among those that have not ended, if it has not."""
    return (
        key_of(key, row.n),
        key.account,
        None if detached else key.session,
        1 if archived else 0,
        row.requested_seq,
        row.status,
        row.spec.agent,
        _parent_of(row),
        _root_of(key.session, row),
        row.requested_at,
        row.live_since if goes_on else None,
        row.due if goes_on else None,
        _encoder.encode(row).decode(),
        _encoder.encode(said).decode() if said else None,
    )


def _parent_of(row: Row) -> str | None:
    return run_id(row.parent.session, row.parent.run) if row.parent else None


def _root_of(session: str, row: Row) -> str | None:
    return root_of(session) if row.parent else None


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
        statement = select(runs.c.key, runs.c.session, runs.c.body, runs.c.output).where(wanted)
        found = [_view(*row) for row in await reader.rows(statement)]
        return (found[0] if found else None), reader.position

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
    parent: str | None = None,
    root: str | None = None,
    since: int | None = None,
) -> RunPage:
    """A page of at most `limit` runs, the newest first. `parent`: those that this run has delegated; `root`: those, and
    what they have delegated in turn. `since`: those requested at or after this time, in milliseconds. Raises
    `InvalidCursor`, `ViewsError`."""
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
        if parent is not None:
            wanted.append(runs.c.parent == parent.replace("\0", "?"))
        if root is not None:
            wanted.append(runs.c.root == root.replace("\0", "?"))
        if since is not None:
            wanted.append(runs.c.requested_at >= since)
        if before is not None:
            wanted.append(runs.c.seq < before)
        statement = select(runs.c.key, runs.c.session, runs.c.body, runs.c.seq).where(*wanted)
        found = await reader.rows(statement.order_by(runs.c.seq.desc()).limit(limit + 1))
        items = tuple(_view(row.key, row.session, row.body, None) for row in found[:limit])
        return RunPage(items, str(found[limit - 1].seq) if len(found) > limit else None, reader.position)

    return await db.read(work)


def _parse_cursor(cursor: str) -> int:
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise sessions.InvalidCursor("this cursor was not given by a page of this list")
    return int(cursor)


def _view(key: str, session: str | None, body: str, output: str | None) -> RunView:
    row = parse(body)
    spec = row.spec
    _, name = name_of(key)
    said = _outputs.decode(output) if output else Output()
    own = name.rpartition(".")[0]
    return RunView(
        id=name,
        session=session,
        status=row.status,
        trigger=row.trigger,
        retry_of=_other(name, row.retry_of),
        copied_from=run_id(row.copied_from, row.n) if row.copied_from else None,
        parent=_parent_of(row),
        call_id=row.parent.call_id if row.parent else None,
        root=_root_of(own, row),
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
        open_requests=len(row.folded.for_people) if row.folded else 0,
        children=row.children,
        open_children=_waits_for(own, row.folded) if row.folded else (),
        unfinished=row.unfinished,
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
        leftover=_other(name, row.leftover),
        output=said.content if output else None,
        reasoning=said.reasoning,
        blob=said.blob,
    )


def _waits_for(session: str, run: Run) -> tuple[str, ...]:
    """The runs of the children that a run waits for."""
    calls = {request.call_id for request in run.requests if request.kind == "child"}
    return tuple([run_id(child_id(session, run.n, call.child), 1) for call in run.open_calls if call.id in calls])


def _other(run: str, n: int) -> str | None:
    """The id of another run of the same session."""
    return run_id(run.rpartition(".")[0], n) if n else None
