"""A whole Turnstream for tests: a broker of its own, and each service in a process of its own.

The processes are made once for all tests (they take seconds to start, and share nothing but sessions that no two tests
name alike); a test may kill whatever it likes: what is not there any more when it ends is started again.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.asking import OverHttp, OverNats
from tests.support.nats import connect, free_ports, run_alone
from tests.support.processes import Process, turnstream

from turnstream.broker.connection import Broker
from turnstream.broker.server import NatsServer
from turnstream.settings import Settings
from turnstream.views.database import Database
from turnstream_projector.fsck import Report, fsck

LEASE = 2.0
_serial = itertools.count(1)
START = 90.0
"""Seconds that a busy machine may need to start a service."""


class Service:
    """A service's place: one process at a time, the same settings each time, a log for each."""

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: Mapping[str, object],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.command = name.partition("-")[0]
        self.settings = dict(settings)
        self._environment = dict(environment or {})
        self._folder = folder
        self._made: list[Process] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings['http_port']}"

    @property
    def process(self) -> Process:
        return self._made[-1]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return bool(self._made) and self.process.running

    @property
    def logs(self) -> str:
        """Of all its processes."""
        return "".join(process.log for process in self._made)

    def start(self) -> None:
        variables = {f"TURNSTREAM_{key.upper()}": str(value) for key, value in self.settings.items()}
        name = f"{self.name}.{len(self._made) + 1}"
        self._made.append(Process(turnstream(self.command), variables | self._environment, self._folder, name))

    async def ready(self) -> None:
        await self.process.until_logged('"event": "ready"', START)

    async def restart(self) -> None:
        """Starts it if it is not there, and waits until it takes work."""
        if not self.running:
            self.start()
        await self.ready()

    def kill(self) -> None:
        self.process.kill()

    async def stop(self) -> int:
        return await self.process.stop(timeout=60)

    def clean_up(self) -> None:
        for process in self._made:
            process.clean_up()


@dataclasses.dataclass
class Deployment:
    """`speakers`: over HTTP to each API process, and over NATS."""

    url: str
    services: dict[str, Service]
    database: str
    server: NatsServer | None = None
    """None: it stands somewhere else."""
    credentials: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """User and password of the services."""
    apis: list[OverHttp] = dataclasses.field(default_factory=list)
    broker: Broker | None = None

    @property
    def runners(self) -> list[Service]:
        return [service for service in self.services.values() if service.command == "runner"]

    @property
    def urls(self) -> list[str]:
        return [service.url for service in self.services.values() if service.command == "api"]

    @property
    def nats(self) -> OverNats:
        assert self.broker
        return OverNats(self.broker)

    def __getitem__(self, name: str) -> Service:
        return self.services[name]

    async def heal(self) -> None:
        """Everything is there and takes work."""
        if self.server:
            await self.server.start()
        for service in self.services.values():
            if not service.running:
                service.start()
        await asyncio.gather(*(service.ready() for service in self.services.values()))

    @asynccontextmanager
    async def entered(self) -> AsyncIterator["Deployment"]:
        """Connections of this event loop."""
        await self.heal()
        self.broker = await connect(self.url, **self.credentials)
        self.apis = [OverHttp(url) for url in self.urls]
        try:
            yield self
        finally:
            for api in self.apis:
                await api.close()
            await self.broker.close()

    async def fsck(self) -> Report:
        """Checks log and views, once the views show everything that is stored now."""
        assert self.broker
        last: Any = (await self.broker.api("STREAM.INFO.SESSIONS"))["state"]
        database = Database(self.database)
        try:
            await _wait_for(database, last["last_seq"])
            return await fsck(self.broker, database)
        finally:
            await database.close()

    async def check(self) -> None:
        """Log and views are as they must be."""
        report = await self.fsck()
        assert report.findings == ()
        assert report.events

    def clean_up(self) -> None:
        for service in self.services.values():
            service.clean_up()
        if self.server:
            run_alone(self.server.stop())


async def _wait_for(database: Database, seq: int) -> None:
    async with asyncio.timeout(60):
        while not await database.wait_for(seq, 1.0):
            pass


def plan(
    folder: Path,
    server: NatsServer | str,
    *names: str,
    user: str = "",
    password: str = "",
    environments: Mapping[str, Mapping[str, str]] | None = None,
    **settings: object,
) -> Deployment:
    """A deployment, not started. A service's kind is its name up to the first hyphen. `server`: one that it starts and
    stops, or the address of another."""
    url = server if isinstance(server, str) else server.url
    common: dict[str, object] = {
        "nats_url": url,
        "nats_user": user,
        "nats_password": password,
        "data_dir": folder,
        "lease": LEASE,
        "sweep_every": 60.0,  # seldom: it must not hide that a wake-up is lost
        "after_timeout": 30.0,
        "append_timeout": 3.0,
    }
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    services = {
        name: Service(name, folder, common | {"http_port": ports[name]} | settings, (environments or {}).get(name))
        for name in names
    }
    return Deployment(
        url,
        services,
        Settings(data_dir=folder, database_url=str(settings.get("database_url", ""))).database,
        server=None if isinstance(server, str) else server,
        credentials={"user": user, "password": password} if user else {},
    )


@pytest.fixture(scope="session")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    server = NatsServer(folder / "nats")
    run_alone(server.start())
    made = plan(folder, server, "api-1", "api-2", "runner-1", "runner-2", "projector-1")
    yield made
    made.clean_up()


@pytest.fixture
async def deployment(standing: Deployment) -> AsyncIterator[Deployment]:
    """Two API processes, two runners and a projector, all of them there."""
    async with standing.entered():
        yield standing


@pytest.fixture
def session(request: pytest.FixtureRequest) -> str:
    """A session's id that no other test has: it begins with the id in the test's name."""
    return f"{request.node.name.split('_')[1]}-{next(_serial)}"
