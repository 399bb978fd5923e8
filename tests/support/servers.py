"""MCP servers for tests: how they are defined, and what they have noted."""

import importlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import Process
from tests.support.waiting import eventually

from turnstream.agents.mcp import McpServer
from turnstream_runner.mcp.servers import Servers

HERE = Path(__file__).parent
SECRET = "correct-horse-battery"


def process(**said: Any) -> McpServer:
    """A server that the runner starts. It notes what it does, and knows a secret."""
    command = [sys.executable, str(HERE / "mcp_server.py"), "stdio"]
    return McpServer(command=command, env={"NOTES": "${NOTES}", "SECRET": "${SECRET}"}, **said)


def broken(kind: str, **said: Any) -> McpServer:
    """One that is not well."""
    command = [sys.executable, str(HERE / "mcp_broken.py"), kind]
    return McpServer(command=command, env={"NOTES": "${NOTES}"}, **said)


class Notes:
    """What servers have noted, a line for each thing, and when: by `time.monotonic`, which all processes share."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def noted(self) -> list[tuple[float, str]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [(float(time), line) for time, _, line in (whole.partition(" ") for whole in lines)]

    @property
    def lines(self) -> list[str]:
        return [line for _, line in self.noted]

    def count(self, line: str) -> int:
        return self.lines.count(line)

    async def until(self, line: str, timeout: float = 20.0) -> float:
        """When it was noted first."""

        def times() -> list[float]:
            return [time for time, noted in self.noted if noted == line]

        return (await eventually(times, timeout, what=f"{line!r} is noted"))[0]

    @property
    def pids(self) -> list[int]:
        """Of every server that was started, in order."""
        return [int(line.split()[1]) for line in self.lines if line.startswith("started ")]


def is_there(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for whom it concerns does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes(tmp_path / "notes")


@pytest.fixture
def environment(notes: Notes) -> dict[str, str]:
    """What the runner of a test has in its environment."""
    return {**os.environ, "NOTES": str(notes.path), "SECRET": SECRET, "KEY": "open-sesame"}


@pytest.fixture
async def servers(environment: dict[str, str]) -> AsyncIterator[Servers]:
    importlib.import_module("turnstream_runner.mcp.dialog")  # else the first test would wait for it
    some = Servers(environment)
    yield some
    await some.close()


@pytest.fixture
async def impatient(environment: dict[str, str]) -> AsyncIterator[Servers]:
    """They give a server two seconds to begin."""
    importlib.import_module("turnstream_runner.mcp.dialog")
    some = Servers(environment, opening=2.0)
    yield some
    await some.close()


class Web:
    """A server over HTTP, at one address, started and killed as the test wants."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._options: tuple[str, ...] = ()
        self._process: Process | None = None
        self.port = 0

    async def start(self, *options: str, program: str = "mcp_server.py") -> None:
        self._options = options or self._options
        port_file = self._folder / "port"
        port_file.unlink(missing_ok=True)
        arguments = [sys.executable, str(HERE / program), "http", str(port_file), *self._options]
        environment = self._environment | {"PORT": str(self.port)}
        self._process = Process(arguments, environment, self._folder, f"web-{len(list(self._folder.iterdir()))}")
        await eventually(port_file.exists, 30.0, what="the server listens")
        self.port = int(port_file.read_text())

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    def kill(self) -> None:
        if self._process:
            self._process.clean_up()

    def server(self, **said: Any) -> McpServer:
        headers = {"Authorization": "Bearer ${KEY}"}
        return McpServer(url=f"http://127.0.0.1:{self.port}/mcp", headers=headers, **said)


@pytest.fixture
async def web(tmp_path: Path, environment: dict[str, str]) -> AsyncIterator[Web]:
    one = Web(tmp_path, environment)
    yield one
    one.kill()
