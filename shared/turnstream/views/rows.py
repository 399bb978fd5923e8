"""What the tables of all views have in common: text, documents, and statements over many rows.

A row is a few columns that are filtered and ordered by, and a `body`: one JSON document with everything else, so that
a new field is no migration. The statements are SQLAlchemy Core, compiled once for each dialect, table and number of
rows and then run as they are: compiling them for every batch would cost more than the database does.

Several rows go into one statement, not into `executemany`: SQLite's driver lets go of the interpreter lock once a
statement, and in a process that is busy otherwise it has to wait for the lock each time.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Column,
    Dialect,
    MetaData,
    Select,
    String,
    Table,
    Text,
    UpdateBase,
    bindparam,
    or_,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

Value = str | int | None
Values = tuple[Value, ...]
"""The values of one row, in the order of the table's columns."""


class Statement(NamedTuple):
    """In the words of the driver, with the values for its places."""

    sql: str
    values: Values


SIZES = (1024, 256, 64, 16, 4, 1)
"""How many rows a statement may have: few numbers, so that every statement is prepared once."""
KEYS = SIZES[1:]
"""How many keys a statement may look for."""

PAGE = 50
"""Items of a page whose reader names no number."""
PAGE_MAX = 200

_VALUES = re.compile(r"(.* VALUES )(\(.*\))( ON CONFLICT .*)", re.DOTALL)
_NUMBERED = re.compile(r"\$([0-9]+)")


def text() -> String:
    """Text that both databases compare byte by byte: PostgreSQL would follow its locale."""
    return String().with_variant(String(collation="C"), "postgresql")


def documents(name: str) -> Table:
    """A table of nothing but documents, each with the sequence of its event in a list that has a key."""
    return Table(
        name,
        MetaData(),
        Column("key", text(), primary_key=True),
        Column("seq", BigInteger, primary_key=True, autoincrement=False),
        Column("body", Text, nullable=False),
    )


def places(table: Table, wanted: Sequence[tuple[str, int]]) -> Iterator[Select[str, int, str]]:
    """Statements that ask for the documents at these places, by key and sequence."""
    for start, size in chunks(len(wanted), KEYS):
        at = [(table.c.key == key) & (table.c.seq == seq) for key, seq in wanted[start : start + size]]
        yield select(table.c.key, table.c.seq, table.c.body).where(or_(*at))


def page_size(limit: int) -> int:
    return max(1, min(limit, PAGE_MAX))


def chunks(count: int, sizes: Sequence[int] = SIZES) -> Iterator[tuple[int, int]]:
    """Start and length of the statements that `count` rows are split into."""
    start = 0
    for size in sizes:
        while count - start >= size:
            yield start, size
            start += size


@lru_cache(maxsize=64)
def _upsert_one(dialect: Dialect, table: Table) -> tuple[str, str, str]:
    """The statement for one row: what comes before its values, these, what comes behind."""
    keys = [column.name for column in table.primary_key]
    insert = postgresql.insert(table) if dialect.name == "postgresql" else sqlite.insert(table)
    names = table.columns.keys()
    rest = {name: insert.excluded[name] for name in names if name not in keys}
    statement = insert.values({name: bindparam(name) for name in names})
    whole = str(statement.on_conflict_do_update(index_elements=keys, set_=rest).compile(dialect=dialect))
    match = _VALUES.fullmatch(whole)
    assert match, "an INSERT has values"
    return match[1], match[2], match[3]


@lru_cache(maxsize=512)
def _upsert(dialect: Dialect, table: Table, rows: int) -> str:
    """The statement for so many rows. SQLAlchemy takes 0.1 s to compile a thousand of them; PostgreSQL's parameters are
    numbered, so each row's have to count on."""
    head, values, tail = _upsert_one(dialect, table)
    width = len(table.columns)

    def numbered(row: int) -> str:
        return _NUMBERED.sub(lambda match: f"${int(match[1]) + row * width}", values)

    return head + ", ".join(numbered(row) for row in range(rows)) + tail


def upsert(dialect: Dialect, table: Table, rows: Sequence[Values]) -> Iterator[Statement]:
    """Inserts these rows, or overwrites the ones that are there. No key may occur twice."""
    for start, size in chunks(len(rows)):
        yield Statement(_upsert(dialect, table, size), tuple(chain.from_iterable(rows[start : start + size])))


def plain(dialect: Dialect, statement: UpdateBase) -> Statement:
    """The statement as the driver gets it."""
    compiled = statement.compile(dialect=dialect, compile_kwargs={"render_postcompile": True})
    return Statement(str(compiled), tuple([compiled.params[name] for name in compiled.positiontup or ()]))


@lru_cache(maxsize=64)
def _bodies(dialect: Dialect, table: Table, keys: int) -> str:
    wanted: list[BindParameter[str]] = [bindparam(f"key_{n}") for n in range(keys)]
    statement = select(table.c.key, table.c.body).where(table.c.key.in_(wanted))
    return str(statement.compile(dialect=dialect))


async def bodies(connection: AsyncConnection, table: Table, keys: Sequence[str]) -> list[tuple[str, str]]:
    """Key and document of the rows with these keys, as far as they exist."""
    found: list[tuple[str, str]] = []
    for start, size in chunks(len(keys), KEYS):
        sql = _bodies(connection.dialect, table, size)
        result = await connection.exec_driver_sql(sql, tuple(keys[start : start + size]))
        found += [(row.key, row.body) for row in result]
    return found
