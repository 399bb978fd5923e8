import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from tests.support.nats import IMAGE, connect, container, no_container
from tests.support.waiting import eventually

from turnstream.broker.declare import declare
from turnstream.broker.pull import Pull
from turnstream.broker.server import NatsServer, ServerFailed
from turnstream.subjects import DISPATCH

PARENT = """
import asyncio, pathlib, sys, time
from turnstream.broker.declare import declare
from turnstream.broker.pull import Pull
from turnstream.broker.server import NatsServer
server = NatsServer(pathlib.Path(sys.argv[1]))
asyncio.run(server.start())
print(server.pid, flush=True)
time.sleep(600)
"""


async def stored(server: NatsServer) -> int:
    broker = await connect(server.url)
    state = (await broker.api("STREAM.INFO.KEEP"))["state"]
    await broker.close()
    assert isinstance(state, dict)
    return state["messages"]


async def test_keeps_its_port_and_its_store_over_kill_and_restart(own_nats: NatsServer):
    broker = await connect(own_nats.url)
    await broker.api("STREAM.CREATE.KEEP", {"name": "KEEP", "subjects": ["keep"]})
    for n in range(100):
        await broker.request("keep", b"%d" % n)
    url, pid = own_nats.url, own_nats.pid
    own_nats.kill()
    assert not own_nats.running
    await own_nats.start()
    assert own_nats.url == url
    assert own_nats.pid != pid
    assert await stored(own_nats) == 100
    await own_nats.stop()
    await own_nats.start()
    assert (own_nats.url, await stored(own_nats)) == (url, 100)
    await broker.close()


async def test_starting_twice_is_starting_once(own_nats: NatsServer):
    pid = own_nats.pid
    await own_nats.start()
    assert own_nats.pid == pid
    await own_nats.stop()
    await own_nats.stop()
    own_nats.kill()


async def test_listens_on_the_loopback_interface_only(own_nats: NatsServer):
    async with httpx.AsyncClient() as client:
        varz = (await client.get(f"{own_nats.monitoring_url}/varz")).json()
    assert (varz["host"], varz["http_host"]) == ("127.0.0.1", "127.0.0.1")


async def test_takes_a_given_port_and_sync_interval(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = NatsServer(tmp_path / "nats", port=port, sync_interval="always")
    await server.start()
    assert urlsplit(server.url).port == port
    async with httpx.AsyncClient() as client:
        config = (await client.get(f"{server.monitoring_url}/jsz")).json()["config"]
    assert config["sync_always"] is True
    await server.stop()


async def test_a_taken_port_is_an_error_that_shows_the_servers_log(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = NatsServer(tmp_path / "nats", port=taken.getsockname()[1])
        with pytest.raises(ServerFailed, match=r"(?s)address already in use"):
            await server.start()
    assert not server.running


async def test_bad_settings_are_an_error(tmp_path: Path):
    server = NatsServer(tmp_path / "nats", config="jetstream { nonsense")
    with pytest.raises(ServerFailed, match="ended with code"):
        await server.start()


def test_has_no_address_before_it_was_started(tmp_path: Path):
    with pytest.raises(ServerFailed, match="not been started"):
        _ = NatsServer(tmp_path).url


class TestOneServerPerStore:
    @pytest.fixture
    async def second(self, own_nats: NatsServer) -> AsyncIterator[NatsServer]:
        second = NatsServer(own_nats.store)
        yield second
        await second.stop()

    async def test_another_one_is_refused(self, own_nats: NatsServer, second: NatsServer, monkeypatch):
        monkeypatch.setattr("turnstream.broker.server.LOCK_TIMEOUT", 0.1)
        with pytest.raises(ServerFailed, match="another nats-server uses"):
            await second.start()
        assert own_nats.running

    async def test_the_next_one_waits_for_the_end_of_the_first(self, own_nats: NatsServer, second: NatsServer):
        starting = asyncio.ensure_future(second.start())
        await asyncio.sleep(0)
        assert not starting.done()
        own_nats.kill()
        await starting
        assert second.running


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
async def test_ends_with_the_process_that_started_it(tmp_path: Path):
    command = (sys.executable, "-c", PARENT, str(tmp_path))
    parent = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert parent.stdout
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    await eventually(lambda: _is_gone(pid), what="the end of the orphaned server")
    successor = NatsServer(tmp_path)
    await successor.start()
    await successor.stop()


async def test_an_interrupt_at_the_terminal_does_not_reach_it(own_nats: NatsServer):
    assert own_nats.pid
    assert os.getpgid(own_nats.pid) != os.getpgid(os.getpid())


@pytest.mark.container
async def test_a_server_in_a_container_serves_as_well():
    if missing := no_container(IMAGE):
        pytest.skip(missing)
    with container() as address:
        broker = await connect(address)
        await declare(broker, replicas=1, consumers=[DISPATCH])
        await broker.request("ts.session.1.acc.s1", b"event")
        pull = Pull(broker, DISPATCH)
        assert [delivery.seq for delivery in await anext(pull)] == [1]
        await pull.close()
        await broker.close()


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIG_DFL)
    except ProcessLookupError:
        return True
    # Nobody may have reaped it where process 1 does not care for orphans.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
