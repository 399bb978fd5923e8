"""Services on a broker of three servers, R3, that loses its leaders: nothing acknowledged is lost, nothing happens
twice, and whoever asks again is served."""

import functools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.deployment import Deployment, plan
from tests.support.load import Load
from tests.support.nats import Cluster
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.errors import BrokerFault
from turnstream.broker.server import NatsServer

pytestmark = [pytest.mark.system, pytest.mark.slow]


@pytest.fixture
async def replicated(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Deployment]:
    (tmp_path / "services").mkdir()
    names = ("api-1", "api-2", "runner-1", "runner-2", "projector-1")
    deployment = plan(tmp_path / "services", cluster.url, *names, replicas=3)
    try:
        async with deployment.entered():
            yield deployment
    finally:
        deployment.clean_up()


async def leader_of(cluster: Cluster, broker: Broker, stream: str, consumer: str) -> NatsServer | None:
    """None while there is none."""
    try:
        return await cluster.leader(broker, stream, consumer)
    except (BrokerFault, StopIteration):
        return None


async def test_s51_a61_leaders_that_are_killed_cost_nothing_acknowledged(
    replicated: Deployment, cluster: Cluster, session: str
) -> None:
    assert replicated.broker
    pids = {name: service.pid for name, service in replicated.services.items()}
    load = Load(replicated, [f"{session}-{n}" for n in range(4)], "[wait 30ms][say {}]")
    leaders = (
        (subjects.SESSIONS, ""),
        (subjects.WORK, "runner-default"),
        (subjects.SESSIONS, subjects.DISPATCH.name),
    )
    async with load.going_on():
        for stream, consumer in leaders:
            await load.until(load.count + 30)
            look = functools.partial(leader_of, cluster, replicated.broker, stream, consumer)
            leader = await eventually(look, 60, what=f"a leader of {stream} {consumer}")
            assert leader
            leader.kill()
            await load.until(load.count + 10)
            await leader.start()
        await load.until(load.count + 30)
        await load.made_up()
    assert {name: service.pid for name, service in replicated.services.items() if service.running} == pids
    await replicated.check()
