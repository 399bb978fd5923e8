"""What the runs of an account have asked of people: questions and approvals, and what was said to them.

`get` gives one request by its id (`<run>.q<k>`), `list_page` a page of them, newest first: by the sequence of the event
that asked, and by their number in the run where it asked several; nothing ever moves in that order. Which of them are
listed is said by `state`, `session`, `run` and `kind`, as they are now; without a `state` all are.

A request is open until it is answered (`answered`; an approval is `approved` or `denied`), its time is over (`expired`)
or its run ends without it (`closed`). The requests of a deleted session are gone.
"""

import re
from functools import lru_cache
from typing import Literal

import msgspec
from sqlalchemy import BigInteger, Column, Index, Integer, MetaData, Table, Text, select, tuple_
from sqlalchemy import text as sql

from turnstream.ids import SessionKey, parse_run_id, run_id
from turnstream.session.events import (
    Answered,
    Asks,
    MessagePosted,
    OnExpiry,
    Recorded,
    RequestAnswered,
    RequestExpired,
    RunWaiting,
)
from turnstream.session.state import Run
from turnstream.views import run_row
from turnstream.views.database import Database, Reader
from turnstream.views.rows import PAGE, Values, page_size, text
from turnstream.views.sessions import InvalidCursor

_CURSOR = re.compile(r"([0-9]{1,18})\.([0-9]{1,9})")

Kind = Literal["question", "approval"]
"""What a person is asked. That a run waits for sub-agents too is no request of anybody."""
State = Literal["open", "answered", "approved", "denied", "expired", "closed"]


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """A request, for people and programs. Times are milliseconds since the epoch, by the broker's clock."""

    id: str
    session: str
    run: str
    kind: Kind
    state: State
    call_id: str
    tool: str
    """The tool whose call waits for this: for a question the one that asks."""
    path: str
    """Of the node of a graph that asks; empty outside of one."""
    prompt: str
    schema: dict[str, object] | None
    """A JSON Schema of the answer."""
    choices: tuple[str, ...]
    """The only answers that do; none: any."""
    digest: str
    """Of the tool, its schema and the arguments that an approval is for."""
    asked_at: int
    expires_at: int | None
    on_expiry: OnExpiry
    answer: object
    """To a question that is answered."""
    reason: str
    """Why an approval was denied, if anything was said."""
    by: str | None
    """Who answered."""
    closed_at: int | None
    seq: int
    """The last event of the request."""


class RequestPage(msgspec.Struct, frozen=True):
    """`next` continues the list; `position` is the sequence that the page reflects."""

    items: tuple[RequestView, ...]
    next: str | None
    position: int


# --- the row ------------------------------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What the fold keeps of the `k`th request of run `n`."""

    n: int
    k: int
    kind: Kind
    call_id: str
    tool: str
    path: str = ""
    prompt: str
    schema: dict[str, object] | None = None
    choices: tuple[str, ...] = ()
    digest: str = ""
    asked_seq: int
    asked_at: int
    expires_at: int | None = None
    on_expiry: OnExpiry = "fail"
    state: State = "open"
    answer: object = None
    reason: str = ""
    by: str | None = None
    closed_at: int | None = None
    seq: int


def asked(recorded: Recorded, data: RunWaiting, run: Run, row: run_row.Row) -> list[Row]:
    """What a run asks of people: `run` as it stands now, `row` as it was."""
    tools = {call.id: call.name for call in row.open_calls}
    return [
        Row(
            n=run.n,
            k=request.k,
            kind=kind,
            call_id=ask.call_id,
            tool=tools.get(ask.call_id, ""),
            path=ask.path,
            prompt=ask.prompt,
            schema=ask.schema,
            choices=ask.choices,
            digest=ask.digest,
            asked_seq=recorded.seq,
            asked_at=recorded.time,
            expires_at=request.expires_at,
            on_expiry=ask.on_expiry,
            seq=recorded.seq,
        )
        for request, ask in zip(run.requests, data.requests, strict=True)
        if (kind := kind_of(ask.kind))
    ]


def kind_of(asks: Asks) -> Kind | None:
    """None of what no person is asked."""
    return None if asks == "child" else asks


def id_of(session: str, row: Row) -> str:
    return f"{run_id(session, row.n)}.q{row.k}"


def close(row: Row, recorded: Recorded) -> Row:
    """The row of an open request after the event that closed it."""
    data = recorded.event.data
    changes: dict[str, object] = {"state": "closed"}
    match data:
        case RequestAnswered():
            state = "answered" if data.approved is None else "approved" if data.approved else "denied"
            changes = {"state": state, "answer": data.answer, "reason": data.reason, "by": data.by}
        case RequestExpired():
            changes = {"state": "expired"}
        case MessagePosted():
            answered = data.answers.requests if data.answers else ()
            name = id_of(recorded.event.key.session, row)
            said = next((said for said in answered if said.request == name), None)
            changes = {**_said(said, data), "by": data.author} if said else changes
        case _:  # whatever else ended the run
            pass
    return msgspec.structs.replace(row, closed_at=recorded.time, seq=recorded.seq, **changes)


def _said(said: Answered, data: MessagePosted) -> dict[str, object]:
    if said.declined:
        return {"state": "denied", "reason": "\n".join(part.text for part in data.content)}
    return {"state": "answered", "answer": said.answer}


# --- the table ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def table(generation: int) -> Table:
    name = f"requests_{generation}"
    is_open = sql("state = 'open'")
    return Table(
        name,
        MetaData(),
        Column("key", text(), primary_key=True),
        Column("account", text(), nullable=False),
        Column("session", text(), nullable=False),
        Column("n", BigInteger, nullable=False),
        Column("seq", BigInteger, nullable=False),
        Column("k", Integer, nullable=False),
        Column("state", text(), nullable=False),
        Column("kind", text(), nullable=False),
        Column("body", Text, nullable=False),
        Index(f"{name}_listed", "account", "seq", "k"),
        Index(f"{name}_session", "account", "session", "seq", "k"),
        # Few requests are open, however many there are.
        Index(f"{name}_open", "account", "seq", "k", sqlite_where=is_open, postgresql_where=is_open),
    )


_encoder = msgspec.json.Encoder()
_rows = msgspec.json.Decoder(Row)


def key_of(key: SessionKey, n: int, k: int) -> str:
    """The key of the request's row: its account and its id."""
    return f"{key.account}/{run_id(key.session, n)}.q{k}"


def values(key: SessionKey, row: Row, *, goes_on: bool = True) -> Values:
    """`goes_on`: whether it is to be found among those that are open, if it is."""
    return (
        key_of(key, row.n, row.k),
        key.account,
        key.session,
        row.n,
        row.asked_seq,
        row.k,
        row.state if goes_on or row.state != "open" else "closed",
        row.kind,
        _encoder.encode(row).decode(),
    )


def parse(body: str) -> Row:
    return _rows.decode(body)


# --- how it is asked ----------------------------------------------------------------------------------------------


async def get(db: Database, account: str, request: str) -> tuple[RequestView | None, int]:
    """The request of this id, or None if the views do not have it, and the position that this reflects. Raises
    `ViewsError`."""

    async def work(reader: Reader) -> tuple[RequestView | None, int]:
        requests = table(reader.generation)
        wanted = requests.c.key == f"{account}/{request}".replace("\0", "?")
        found = await reader.rows(select(requests.c.session, requests.c.body).where(wanted))
        return (view(found[0].session, parse(found[0].body)) if found else None), reader.position

    return await db.read(work)


async def list_page(
    db: Database,
    account: str,
    *,
    limit: int = PAGE,
    cursor: str | None = None,
    state: State | None = "open",
    session: str | None = None,
    run: str | None = None,
    kind: Kind | None = None,
) -> RequestPage:
    """A page of at most `limit` requests, the newest first. Raises `InvalidCursor`, `ViewsError`."""
    limit = page_size(limit)
    before = _parse_cursor(cursor) if cursor else None
    of_run = parse_run_id(run) if run is not None else None

    async def work(reader: Reader) -> RequestPage:
        if run is not None and of_run is None:
            return RequestPage((), None, reader.position)
        requests = table(reader.generation)
        wanted = [requests.c.account == account]
        if state == "open":
            wanted.append(sql("state = 'open'"))  # pyright: ignore[reportArgumentType]
        elif state is not None:
            wanted.append(requests.c.state == state)
        if session is not None:
            wanted.append(requests.c.session == session.replace("\0", "?"))
        if of_run is not None:
            wanted += [requests.c.session == of_run[0], requests.c.n == of_run[1]]
        if kind is not None:
            wanted.append(requests.c.kind == kind)
        if before is not None:
            wanted.append(tuple_(requests.c.seq, requests.c.k) < tuple_(*before))
        statement = select(requests.c.seq, requests.c.k, requests.c.session, requests.c.body).where(*wanted)
        order = (requests.c.seq.desc(), requests.c.k.desc())
        found = await reader.rows(statement.order_by(*order).limit(limit + 1))
        items = tuple(view(row.session, parse(row.body)) for row in found[:limit])
        last = found[limit - 1] if len(found) > limit else None
        return RequestPage(items, f"{last.seq}.{last.k}" if last else None, reader.position)

    return await db.read(work)


def _parse_cursor(cursor: str) -> tuple[int, int]:
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise InvalidCursor("this cursor was not given by a page of this list")
    return int(match[1]), int(match[2])


def view(session: str, row: Row) -> RequestView:
    """The request, as it is shown."""
    return RequestView(
        id=id_of(session, row),
        session=session,
        run=run_id(session, row.n),
        kind=row.kind,
        state=row.state,
        call_id=row.call_id,
        tool=row.tool,
        path=row.path,
        prompt=row.prompt,
        schema=row.schema,
        choices=row.choices,
        digest=row.digest,
        asked_at=row.asked_at,
        expires_at=row.expires_at,
        on_expiry=row.on_expiry,
        answer=row.answer,
        reason=row.reason,
        by=row.by,
        closed_at=row.closed_at,
        seq=row.seq,
    )
