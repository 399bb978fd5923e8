"""Databases for tests of the views: every one of them runs on SQLite and on PostgreSQL.

`TEST_DATABASE` says on which: `sqlite`, `postgres`, the URL of a PostgreSQL server (a database is made there for each
test and dropped again), or `both`, the default. `postgres` is started from the programs that are installed (Debian:
`apt-get install postgresql`), listening on a socket in a temporary folder; where there are none, its tests are skipped.
"""

import asyncio
import functools
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import asyncpg
import pytest

from turnstream.views.database import Database

OWNER = "postgres"
"""PostgreSQL refuses to run as root: then it runs as this user."""
_names = itertools.count(1)


class Choice(NamedTuple):
    """Where PostgreSQL comes from. Without a URL and programs there is none, for the reason given."""

    wanted: tuple[str, ...]
    url: str = ""
    programs: Path | None = None
    reason: str = ""


@functools.cache
def choose() -> Choice:
    wanted = os.environ.get("TEST_DATABASE", "both")
    if wanted == "sqlite":
        return Choice(("sqlite",))
    if "://" in wanted:
        return Choice(("postgres",), url=wanted)
    if wanted not in ("both", "postgres"):
        raise pytest.UsageError(f"TEST_DATABASE={wanted}: must be both, sqlite, postgres or postgresql://…")
    kinds = ("sqlite", "postgres") if wanted == "both" else ("postgres",)
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres")) or [shutil.which("postgres")]
    if found[-1] is not None:
        return Choice(kinds, programs=Path(found[-1]).parent)
    if wanted == "postgres":
        raise pytest.UsageError("TEST_DATABASE=postgres: its programs are not installed")
    return Choice(kinds, reason="PostgreSQL's programs are not installed")


def pytest_report_header() -> str:
    choice = choose()
    postgres = choice.url or choice.programs or choice.reason
    return f"databases: {', '.join(choice.wanted)}" + (f" (postgres: {postgres})" if postgres else "")


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL server's address, without a database."""
    choice = choose()
    if choice.url:
        yield choice.url.rpartition("/")[0] if choice.url.count("/") > 2 else choice.url
        return
    if choice.programs is None:
        pytest.skip(choice.reason)
    folder = Path(tempfile.mkdtemp(prefix="ts-pg-"))
    server = _start(choice.programs, folder)
    try:
        yield f"postgresql://{OWNER}@/?host={folder}"
    finally:
        server.send_signal(signal.SIGINT)  # "fast": rolls back what is open
        server.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def _start(programs: Path, folder: Path) -> subprocess.Popen[bytes]:
    user: dict[str, object] = {}
    if os.getuid() == 0:
        owner = pwd.getpwnam(OWNER)
        os.chown(folder, owner.pw_uid, owner.pw_gid)
        user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
    data = folder / "data"
    initdb = [
        programs / "initdb",
        "-D",
        data,
        "-U",
        OWNER,
        "-A",
        "trust",
        "-E",
        "UTF8",
        "--locale=C.UTF-8",
        "--no-sync",
    ]
    subprocess.run(initdb, check=True, capture_output=True, cwd=folder, timeout=120, **user)  # pyright: ignore
    arguments = [programs / "postgres", "-D", data, "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(arguments, stdout=log, stderr=log, cwd=folder, **user)  # pyright: ignore
    ready = [programs / "pg_isready", "-q", "-h", folder, "-U", OWNER]
    deadline = time.monotonic() + 60
    while subprocess.run(ready, check=False).returncode:
        if server.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"PostgreSQL did not start:\n{(folder / 'log').read_text()[-2000:]}")
    return server


@pytest.fixture(params=["sqlite", "postgres"])
async def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """The SQLAlchemy URL of an empty database; the test runs once on each kind."""
    if request.param not in choose().wanted:
        pytest.skip(f"TEST_DATABASE={os.environ.get('TEST_DATABASE')}")
    if request.param == "sqlite":
        yield f"sqlite+aiosqlite:///{tmp_path / 'views.db'}"
        return
    server: str = request.getfixturevalue("postgres_url")
    name = f"ts_{os.getpid()}_{next(_names)}"
    await _run(server, f"CREATE DATABASE {name} TEMPLATE template0")
    base, _, query = server.partition("?")
    yield f"{base.rstrip('/')}/{name}".replace("postgresql://", "postgresql+asyncpg://") + (
        f"?{query}" if query else ""
    )
    await _run(server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """An empty database of views, on each kind."""
    db = Database(database_url)
    yield db
    await db.close()


async def _run(server: str, statement: str) -> None:
    base, _, query = server.partition("?")
    connection = await asyncpg.connect(f"{base.rstrip('/')}/postgres" + (f"?{query}" if query else ""))
    try:
        await asyncio.wait_for(connection.execute(statement), 30)
    finally:
        await connection.close()
