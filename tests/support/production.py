"""NATS as it is deployed: the configurations of `deploy/nats/` on real servers, and a tenant's program.

Fixtures: `configurations` a copy of them with a second tenant, `production` a single server made of it.
"""

import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.support.waiting import eventually

from turnstream.broker.server import find_nats_server

DEPLOY = Path(__file__).parents[2] / "deploy" / "nats"
SECRETS = {
    "TURNSTREAM_NATS_PASSWORD": "services-secret",
    "NATS_PROGRAMS_PASSWORD": "programs-secret",
    "NATS_ADMIN_PASSWORD": "admin-secret",
    "NATS_ROUTE_PASSWORD": "route-secret",
    "NATS_ROUTES": '["nats-route://route:route-secret@nats-1:6222"]',
}


class Production:
    """A server as deployed, but for its addresses and its store."""

    def __init__(self, configurations: Path, name: str, folder: Path, route: str = "", routes: str = "") -> None:
        shutil.copytree(configurations, folder)
        addresses = {"0.0.0.0:4222": "127.0.0.1:-1", "127.0.0.1:8222": "127.0.0.1:-1", "0.0.0.0:6222": route}
        for path in folder.iterdir():
            text = path.read_text().replace('"/data"', f'"{folder}"')
            for old, new in addresses.items():
                text = text.replace(f'"{old}"', f'"{new}"')
            path.write_text(text + (f'ports_file_dir: "{folder}"\n' if path.name == name else ""))
        self._folder = folder
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [find_nats_server(), "-c", str(folder / name)],
            env=os.environ | SECRETS | {"NATS_ROUTES": routes},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.url = ""
        self.monitoring = ""

    def ready(self) -> bool:
        if self._process.poll() is not None:
            pytest.fail((self._folder / "log").read_text())
        for path in self._folder.glob("*.ports"):
            ports = msgspec.json.decode(path.read_bytes() or b"{}", type=dict[str, list[str]])
            self.url, self.monitoring = ports["nats"][0], ports["monitoring"][0]
        return bool(self.url)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


@pytest.fixture
def configurations(tmp_path: Path) -> Path:
    """`deploy/nats/`, with a second tenant added as its comment says."""
    folder = Path(shutil.copytree(DEPLOY, tmp_path / "nats"))
    tenants = folder / "tenants.conf"
    text = tenants.read_text()
    tenants.write_text(text + "\n" + text.replace("default", "rival"))
    return folder


@pytest.fixture
async def production(configurations: Path, tmp_path: Path) -> AsyncIterator[Production]:
    server = Production(configurations, "single.conf", tmp_path / "store")
    try:
        await eventually(server.ready)
        yield server
    finally:
        server.kill()


class Program:
    """A tenant's program on a plain NATS client: what it hears, and what it is refused."""

    def __init__(self) -> None:
        self.nc = Client()
        self.heard: list[Msg] = []
        self.refused: list[str] = []

    async def connect(self, url: str, user: str, password: str = "programs-secret") -> None:
        async def refused(error: Exception) -> None:
            self.refused.append(str(error))

        await self.nc.connect(url, user=user, password=password, error_cb=refused)

    async def listen(self, subject: str) -> None:
        async def hear(message: Msg) -> None:
            self.heard.append(message)

        await self.nc.subscribe(subject, cb=hear)
        await self.nc.flush()
