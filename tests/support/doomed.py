"""Runners that die at a point (`crashing.py`), as the tests start them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.waiting import eventually


class Runners:
    """Forks runners that die at a point."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self.folder = folder
        self._settings = settings
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TURNSTREAM_")}
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.support.crashing"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._made: list[Doomed] = []

    def start(self, queue: str, at: int | str) -> "Doomed":
        assert self._parent.stdin and self._parent.stdout
        log = self.folder / f"{queue}.{len(self._made)}.log"
        log.touch()
        order = {"settings": self._settings | {"TURNSTREAM_QUEUES": queue}, "at": at, "log": str(log)}
        self._parent.stdin.write(json.dumps(order) + "\n")
        self._parent.stdin.flush()
        self._made.append(Doomed(int(self._parent.stdout.readline()), log))
        return self._made[-1]

    def clean_up(self) -> None:
        for runner in self._made:
            runner.kill()
        self._parent.kill()
        self._parent.communicate()


class Doomed:
    """A runner that dies at its point."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self._log = log

    @property
    def dead(self) -> bool:
        return not Path(f"/proc/{self.pid}").exists()

    @property
    def points(self) -> list[str]:
        lines = self._log.read_text(errors="replace").splitlines()
        return [line.split(" ", 2)[2] for line in lines if line.startswith("point ")]

    async def ready(self) -> None:
        await eventually(lambda: "ready\n" in self._log.read_text(errors="replace"), 60, what="the start of a runner")

    @property
    def frozen(self) -> bool:
        return " T " in Path(f"/proc/{self.pid}/stat").read_text()

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
