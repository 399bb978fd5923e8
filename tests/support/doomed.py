"""Runners that die at a point (`crashing.py`), as the tests start them; and the ground on which they do."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tests.support.asking import NoAnswer, Speaker, events, insist, opened, types
from tests.support.deployment import Deployment, plan
from tests.support.nats import run_alone
from tests.support.waiting import eventually

from turnstream.broker.server import NatsServer

T = TypeVar("T")
AT_ONCE = 8
ENDS = ("completed", "failed", "cancelled", "timed_out")
Answers = Mapping[str, Mapping[str, object]]
"""What a person answers, by the kind of what is asked."""


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


class Told:
    """What the log tells of one run, and of those that it started. `first`: the runner that was to die."""

    def __init__(self, stored: list[dict[str, Any]], first: Doomed) -> None:
        self.stored = stored
        self.first = first
        self.children: list[Told] = []

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event["data"] for event in self.stored if event["type"] == kind]


class Ground:
    """A deployment in which runners die. `effects` counts what its tools have done, by session and tool."""

    def __init__(self, deployment: Deployment, runners: Runners) -> None:
        self.deployment = deployment
        self.runners = runners

    @property
    def api(self) -> Speaker:
        return self.deployment.apis[0]

    @property
    def effects(self) -> Counter[tuple[str, ...]]:
        lines = (self.runners.folder / "effects").read_text().splitlines()
        return Counter(tuple(line.split()[:2]) for line in lines if line.strip())

    @contextlib.asynccontextmanager
    async def entered(self) -> AsyncIterator["Ground"]:
        async with self.deployment.entered():
            yield self

    async def carried_out(self, queue: str, session: str, at: int, said: str, answers: Answers | None = None) -> Told:
        """One run whose runner dies at this point, and is followed by one that lives."""
        first = self.runners.start(queue, at)
        await opened(self.api, session, agent=queue, policy={"titles": "client"})
        posted = await insist([self.api], "post_message", session=session, content=said, message_id="m1")
        run = posted.body["run"]
        second: Doomed | None = None
        answered = not answers

        async def over() -> bool:
            nonlocal second, answered
            if at and second is None and first.dead:
                second = self.runners.start(queue, 0)
            try:
                state = (await self.api.ask("wait_run", run=run, timeout=0)).body.get("status")
            except NoAnswer:
                return False
            if state == "waiting" and answers and not answered:
                answered = await self._answer(session, run, answers)
            return state in ENDS and await self._told(session)

        await eventually(over, 120, every=0.05, what=f"the end of {run}, whose runner dies at point {at}")
        told = Told(await events(self.api, session), first)
        for child in told.of("child.started"):
            told.children.append(Told(await events(self.api, child["child_session"]), first))
        (second or first).kill()
        return told

    async def _answer(self, session: str, run: str, answers: Answers) -> bool:
        """Whether a person was asked: a run may wait for its sub-agent alone."""
        waits = [event["data"] for event in await events(self.api, session) if event["type"] == "run.waiting"]
        asks = [ask for ask in waits[-1]["requests"] if ask["kind"] in answers]
        for ask in asks:
            told = await insist([self.api], "answer_run", run=run, request=ask["request"], **answers[ask["kind"]])
            assert told.status in (200, 202), told
        return bool(asks)

    async def _told(self, session: str) -> bool:
        """Whether every child has ended, and says itself that this was told."""
        stored = await events(self.api, session)
        children = [event["data"]["child_session"] for event in stored if event["type"] == "child.started"]
        return all([(await types(self.api, child))[-1:] == ["run.reported"] for child in children])


@contextlib.contextmanager
def laid_out(
    folder: Path,
    agents: Mapping[str, str],
    *services: str,
    environment: Mapping[str, str] | None = None,
    **settings: object,
) -> Iterator[Ground]:
    """A ground with these services, and these agents by the names of their files; `effects.py` has their tools."""
    (folder / "agents").mkdir()
    for name, text in agents.items():
        (folder / "agents" / name).write_text(text)
    root = str(Path(__file__).parents[2])
    shared = {"EFFECTS": str(folder / "effects"), "PYTHONPATH": root, **(environment or {})}
    said = {"agents_dir": folder / "agents", "modules": "tests.support.effects", "lease": 1.0, **settings}
    server = NatsServer(folder / "nats")
    run_alone(server.start())
    made = plan(folder, server, *services, environments=dict.fromkeys(services, shared), **said)
    own = {f"TURNSTREAM_{name.upper()}": str(value) for name, value in made[services[0]].settings.items()}
    runners = Runners(folder, own | shared)
    try:
        yield Ground(made, runners)
    finally:
        runners.clean_up()
        made.clean_up()


async def in_turn(work: Callable[[int], Awaitable[T]], points: Iterable[int]) -> list[T]:
    """What the work comes to at each of these points; some are worked on at once."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(at: int) -> T:
        async with slots:
            return await work(at)

    return await asyncio.gather(*(one(at) for at in points))
