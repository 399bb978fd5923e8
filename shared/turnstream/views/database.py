"""The database of the views: one engine, reads of the generation in force, waiting for a position.

SQLite (`sqlite+aiosqlite`) and PostgreSQL (`postgresql+asyncpg`) get the same statements. A read sees one state: the
generation that is in force, the checkpoint's position, and rows as of exactly that position. Who makes and writes
generations is `generations.py`; a process that only reads never writes here, not even a table.

    ViewsError
     ├─ Unavailable   the database does not answer
     ├─ NotReady      no projector of this release has made the views yet
     └─ Gone          the generation has been dropped
"""

import asyncio
import contextlib
import heapq
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Executable,
    Integer,
    MetaData,
    Row,
    Table,
    event,
    select,
)
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, DisconnectionError, OperationalError, ProgrammingError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from turnstream.views.rows import Statement, bodies, text

VERSION: Final = 7
"""Counts up whenever a table or a fold changes: views of another version are made anew by the projector."""

META = MetaData()
CHECKPOINT = Table(
    "checkpoint",
    META,
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("position", BigInteger, nullable=False),
    Column("log", text(), nullable=False),
    Column("version", Integer, nullable=False),
)
"""A generation, the sequence of the last event in its rows, which log that is a sequence of, what folded it."""
ACTIVE = Table(
    "active",
    META,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("generation", Integer, nullable=False),
)
"""One row: the generation in force."""

IN_FORCE = select(CHECKPOINT).join(ACTIVE, ACTIVE.c.generation == CHECKPOINT.c.generation)

_FIRST_POLL: Final = 0.003
_LAST_POLL: Final = 0.05
_LAST_QUERY: Final = 2.0
"""Seconds that closing waits for a query that is under way."""
_BUSY_TIMEOUT: Final = 10_000
"""Milliseconds that a writer of SQLite waits for another one."""
_SCRUB_TIMEOUT: Final = 100
"""Milliseconds that whoever reads is waited for before what was deleted stays in the log for a while."""
_UNDEFINED_TABLE: Final = "42P01"
"""PostgreSQL's SQLSTATE."""
_NO_TABLE: Final = "no such table"
"""SQLite's words."""

T = TypeVar("T")


class ViewsError(Exception):
    """The views could not do what was asked."""


class Unavailable(ViewsError):
    """The database does not answer."""


class NotReady(ViewsError):
    """No projector of this release has made the views in this database yet."""


class Gone(ViewsError):
    """A table is not there: its generation has been dropped, after another one was put in force."""


class Checkpoint(msgspec.Struct, frozen=True):
    """`log` tells one log from another: sequences of different logs do not compare. `version`: see `VERSION`."""

    generation: int
    position: int
    log: str
    version: int = VERSION


class Commits:
    """Carries the news of a commit to the readers of the same process, who would else have to ask the database."""

    def __init__(self) -> None:
        self._listeners: set[Callable[[int], None]] = set()

    def announce(self, position: int) -> None:
        for listener in self._listeners:
            listener(position)

    def listen(self, listener: Callable[[int], None]) -> Callable[[], None]:
        """Calls back for each position committed from now on; the answer ends that."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)


class Reader:
    """One state of the views: `position` is the sequence of the last event in them."""

    def __init__(self, connection: AsyncConnection, checkpoint: Checkpoint) -> None:
        self._connection = connection
        self.generation = checkpoint.generation
        self.position = checkpoint.position

    async def rows(self, statement: Executable) -> Sequence[Row[tuple[object, ...]]]:
        return (await self._connection.execute(statement)).all()

    async def bodies(self, table: Table, keys: Sequence[str]) -> dict[str, str]:
        """The documents of the rows with these keys, as far as they exist."""
        return dict(await bodies(self._connection, table, keys))


class Database:
    """The views' database. Nothing is opened before the first use; `close` ends it.

    With `commits`, a projector of the same process tells of its commits there, so that `wait_for` hears of them at
    once."""

    def __init__(self, url: str, *, commits: Commits | None = None) -> None:
        self.engine = _engine(url)
        self._position = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._waiters = 0
        self._poll: asyncio.Task[None] | None = None
        self._closed = False
        self._deaf = commits.listen(self._saw) if commits else None

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    def make_folder(self) -> None:
        """Makes the folder of SQLite's file, if there is a file."""
        file = self.engine.url.database
        if self.is_sqlite and file and file != ":memory:":
            Path(file).parent.mkdir(parents=True, exist_ok=True)

    async def close(self) -> None:
        if self._deaf:
            self._deaf()
        self._closed = True
        if self._poll and not self._poll.done():
            # A query is waited for, not cancelled: a connection that is being opened would be left behind.
            await asyncio.wait({self._poll}, timeout=_LAST_QUERY)
            self._poll.cancel()
        await self.engine.dispose()

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncGenerator[AsyncConnection]:
        """One transaction that writes; on SQLite it holds the write lock from its beginning. Raises `Unavailable`."""
        with _errors():
            async with self.engine.connect() as connection:
                await connection.execution_options(turnstream_write=True)
                async with connection.begin():
                    yield connection

    async def write(self, statements: Sequence[Statement]) -> bool:
        """All of them in one transaction, if the first one changes a row. False: it does not, and nothing is written.
        Raises `Unavailable`, `Gone`."""
        if not self.is_sqlite:
            async with self.transaction() as connection:
                for n, (sql, values) in enumerate(statements):
                    done = await connection.exec_driver_sql(sql, values)
                    if not n and done.rowcount != 1:
                        return False
            return True
        with _errors():
            async with self.engine.connect() as connection:
                raw = (await connection.get_raw_connection()).driver_connection
                assert raw is not None
                # One turn in the driver's thread; each statement by itself waits for the interpreter several times.
                return await raw._execute(_write, raw._conn, statements)

    async def scrub(self) -> bool:
        """Lets nothing of what was deleted stay in SQLite's write-ahead log; whether that could be done now: whoever
        reads is waited for, but not for long. Raises `Unavailable`."""
        if not self.is_sqlite:
            return True
        with _errors():
            async with self.engine.connect() as connection:
                raw = (await connection.get_raw_connection()).driver_connection
                assert raw is not None
                await raw.execute(f"PRAGMA busy_timeout = {_SCRUB_TIMEOUT}")
                try:
                    async with raw.execute("PRAGMA wal_checkpoint(TRUNCATE)") as cursor:
                        busy, *_ = await cursor.fetchone()
                finally:
                    await raw.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT}")
        return not busy

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncGenerator[AsyncConnection]:
        """One transaction that only reads, of one state. Raises `Unavailable`."""
        with _errors():
            async with self.engine.connect() as connection:
                if not self.is_sqlite:
                    await connection.execution_options(isolation_level="REPEATABLE READ")
                yield connection

    async def read(self, work: Callable[[Reader], Awaitable[T]]) -> T:
        """Reads one state. `work` is done again if its generation is dropped meanwhile (a rebuild has put another one
        in force). Raises `Unavailable`, `NotReady`."""
        try:
            return await self._read(work)
        except Gone:
            return await self._read(work)

    async def _read(self, work: Callable[[Reader], Awaitable[T]]) -> T:
        async with self.connection() as connection:
            checkpoint = await checkpoint_of(connection)
            self._saw(checkpoint.position)
            return await work(Reader(connection, checkpoint))

    async def checkpoint(self) -> Checkpoint:
        """The generation in force and how far it is."""
        async with self.connection() as connection:
            checkpoint = await checkpoint_of(connection)
        self._saw(checkpoint.position)
        return checkpoint

    async def wait_for(self, seq: int, timeout: float) -> bool:
        """Waits until the views show the event `seq`, at most `timeout` seconds; whether they do.

        Any number of waiters costs one query at a time. Raises `Unavailable`.
        """
        if self._position >= seq:
            return True
        done = asyncio.get_running_loop().create_future()
        self._waiters += 1
        heapq.heappush(self._waiting, (seq, self._waiters, done))
        if self._poll is None or self._poll.done():
            self._poll = asyncio.create_task(self._ask())
        try:
            async with asyncio.timeout(timeout):
                await done
        except TimeoutError:
            return False
        return True

    async def _ask(self) -> None:
        """Asks for the position while somebody waits, less and less often while it does not move; seldom where commits
        are heard of, for the projector may be in another process all the same."""
        first = _LAST_POLL if self._deaf else _FIRST_POLL
        pause = first
        while self._waiting and not self._closed:
            if self._waiting[0][2].done():
                heapq.heappop(self._waiting)
                continue
            before, waiters = self._position, self._waiters
            try:
                await self.checkpoint()
            except NotReady:
                pass
            except ViewsError as error:
                while self._waiting:
                    _settle(heapq.heappop(self._waiting)[2], error)
                return
            moved = self._position != before or self._waiters != waiters
            pause = first if moved else min(pause * 1.5, _LAST_POLL)
            if self._waiting:
                await asyncio.sleep(pause)

    def _saw(self, position: int) -> None:
        self._position = position
        while self._waiting and self._waiting[0][0] <= position:
            _settle(heapq.heappop(self._waiting)[2], None)


def _write(connection: sqlite3.Connection, statements: Sequence[Statement]) -> bool:
    connection.execute("BEGIN IMMEDIATE")
    try:
        first, *others = statements
        moves = connection.execute(*first).rowcount == 1
        for statement in others if moves else ():
            connection.execute(*statement)
        connection.execute("COMMIT" if moves else "ROLLBACK")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return moves


def _settle(future: asyncio.Future[None], error: ViewsError | None) -> None:
    if future.done():
        return
    if error:
        future.set_exception(Unavailable(str(error)))
    else:
        future.set_result(None)


async def checkpoint_of(connection: AsyncConnection) -> Checkpoint:
    """The generation in force. Raises `NotReady`."""
    try:
        row = (await connection.execute(IN_FORCE)).one_or_none()
    except (OperationalError, ProgrammingError) as error:
        if not _is_missing_table(error):
            raise
        row = None
    if row is None:
        raise NotReady("there are no views in this database yet: a projector makes them")
    if row.version != VERSION:
        raise NotReady("the views are of another release: a projector makes them anew")
    return Checkpoint(row.generation, row.position, row.log)


def _is_missing_table(error: DBAPIError) -> bool:
    """Whether a statement failed because its table is not there."""
    return getattr(error.orig, "sqlstate", None) == _UNDEFINED_TABLE or _NO_TABLE in str(error.orig)


@contextlib.contextmanager
def _errors() -> Generator[None]:
    try:
        yield
    except DBAPIError as error:
        raise (Gone if _is_missing_table(error) else Unavailable)(f"the views' database: {error}") from error
    except sqlite3.Error as error:
        raise (Gone if _NO_TABLE in str(error) else Unavailable)(f"the views' database: {error}") from error
    except (SQLAlchemyError, OSError) as error:
        raise Unavailable(f"the views' database: {error}") from error


def _engine(url: str) -> AsyncEngine:
    engine = create_async_engine(url, pool_pre_ping=not url.startswith("sqlite"))
    if engine.dialect.name == "sqlite":
        event.listen(engine.sync_engine, "connect", _on_connect)
        if (file := engine.url.database) and file != ":memory:":
            _watch_file(engine, Path(file))
        event.listen(engine.sync_engine, "begin", _on_begin)
    return engine


def _watch_file(engine: AsyncEngine, file: Path) -> None:
    """A connection to a file that somebody has deleted or replaced would go on with what nobody else sees: it is given
    up, and the next one is to the file that is there now."""

    def remember(_: DBAPIConnection, record: ConnectionPoolEntry) -> None:
        record.info["file"] = _identity(file)

    def check(_: DBAPIConnection, record: ConnectionPoolEntry, __: object) -> None:
        if record.info.get("file") != _identity(file):
            raise DisconnectionError(f"{file} is another file now")

    event.listen(engine.sync_engine, "connect", remember)
    event.listen(engine.sync_engine, "checkout", check)


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _on_connect(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    # The driver would open transactions by its own rules, and none for a read.
    connection.isolation_level = None  # pyright: ignore[reportAttributeAccessIssue]
    cursor = connection.cursor()
    # Readers do not wait for the writer, nor it for them. NORMAL: a commit is not synced by itself, so the last ones
    # can be lost with the machine's power, rows and checkpoint together, and the projector goes on from there. What is
    # deleted is overwritten, in the file too once the write-ahead log is copied into it.
    for pragma in (
        "page_size = 8192",
        f"busy_timeout = {_BUSY_TIMEOUT}",
        "journal_mode = WAL",
        "synchronous = NORMAL",
        "temp_store = MEMORY",
        "wal_autocheckpoint = 4000",
        "cache_size = -65536",
        "secure_delete = ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _on_begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("turnstream_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
