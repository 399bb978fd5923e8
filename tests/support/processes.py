"""Real processes for tests: started, watched, killed (-9), frozen and thawed."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest
from tests.support.waiting import eventually


def stop(pid: int) -> None:
    """Stops a child with SIGSTOP; when this returns, it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


class Process:
    """A child process in a session of its own; what it prints goes to `log_path`."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, name: str) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        # The parent's own settings must not leak into the child.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("TURNSTREAM_")}
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                arguments,
                env=inherited | {"PYTHONUNBUFFERED": "1"} | dict(environment),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    @property
    def running(self) -> bool:
        return self.exit_code is None

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    async def until_logged(self, text: str, timeout: float = 20.0) -> str:
        """The first line with this text. Fails at once if the process ends without it."""

        def look() -> str:
            ended = not self.running
            for line in self.log.splitlines():
                if text in line:
                    return line
            if ended:
                pytest.fail(f"{self.name} ended with code {self.exit_code}:\n{self.log[-4000:]}")
            return ""

        return await eventually(look, timeout, what=f"{self.name} logging {text!r}")

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP."""
        stop(self.pid)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    async def stop(self, timeout: float = 20.0) -> int:
        """SIGTERM; the exit code."""
        self.terminate()
        return await self.ended(timeout)

    async def ended(self, timeout: float = 20.0) -> int:
        await eventually(lambda: not self.running, timeout, what=f"the end of {self.name}")
        return self._process.returncode

    def clean_up(self) -> None:
        """Kills it and whatever it started in its session."""
        if self.running:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()


class Spawn(Protocol):
    def __call__(self, *arguments: str, name: str = "", **settings: object) -> Process: ...


def turnstream(*arguments: str) -> list[str]:
    """The command line of a `turnstream` command, run by this interpreter."""
    return [sys.executable, "-m", "turnstream_cli.main", *arguments]


@pytest.fixture
async def spawn(tmp_path: Path) -> AsyncIterator[Spawn]:
    """`spawn("api", nats_url=…, http_port=0)` starts `turnstream api` with these settings as environment variables."""
    started: list[Process] = []

    def start(*arguments: str, name: str = "", **settings: object) -> Process:
        environment = {f"TURNSTREAM_{key.upper()}": str(value) for key, value in settings.items()}
        name = name or f"{arguments[0]}-{len(started)}"
        process = Process(turnstream(*arguments), environment, tmp_path, name)
        started.append(process)
        return process

    yield start
    for process in started:
        process.clean_up()
