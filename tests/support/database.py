"""Databases for tests of the views: every one of them runs on SQLite and on PostgreSQL.

`TEST_DATABASE` says on which: `sqlite`, `postgres`, the URL of a PostgreSQL server (a database is made there for the
run and dropped again), or `both`, the default. `postgres` is started from the programs that are installed (Debian:
`apt-get install postgresql`), listening on a socket in a temporary folder; where there are none, its tests are skipped.
"""

import asyncio
import functools
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
from tests.support.nats import run_alone

from turnstream.views.database import Database

OWNER = "postgres"
"""PostgreSQL refuses to run as root: then it runs as this user."""


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
    """The address of a PostgreSQL database that only this test run uses."""
    choice = choose()
    if choice.url:
        server, _, query = choice.url.partition("?")
        base = server.rpartition("/")[0] if server.count("/") > 2 else server
        yield from _own_database(base, f"?{query}" if query else "")
        return
    if choice.programs is None:
        pytest.skip(choice.reason)
    folder = Path(tempfile.mkdtemp(prefix="ts-pg-"))
    server = _start(choice.programs, folder)
    try:
        yield from _own_database(f"postgresql://{OWNER}@", f"?host={folder}")
    finally:
        server.send_signal(signal.SIGINT)  # "fast": rolls back what is open
        server.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def _own_database(base: str, query: str) -> Iterator[str]:
    name = f"turnstream_test_{os.getpid()}"
    home = f"{base}/postgres{query}"
    run_alone(_run(home, f"CREATE DATABASE {name} TEMPLATE template0"))
    yield f"{base}/{name}{query}"
    run_alone(_run(home, f"DROP DATABASE {name} WITH (FORCE)"))


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
def _place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param not in choose().wanted:
        pytest.skip(f"TEST_DATABASE={os.environ.get('TEST_DATABASE')}")
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'views.db'}"
    return request.getfixturevalue("postgres_url")


@pytest.fixture
async def database_url(_place: str) -> str:
    """The SQLAlchemy URL of an empty database; the test runs once on each kind."""
    if _place.startswith("sqlite"):
        return _place.replace("sqlite://", "sqlite+aiosqlite://")
    await _run(_place, "DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return _place.replace("postgresql://", "postgresql+asyncpg://")


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """An empty database of views, on each kind."""
    db = Database(database_url)
    yield db
    await db.close()


async def _run(url: str, statements: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await asyncio.wait_for(connection.execute(statements), 30)
    finally:
        await connection.close()
