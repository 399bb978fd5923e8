"""Views made by real projectors, on each kind of database, while these are killed and views are rebuilt under them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.asking import opened, outcome, say
from tests.support.deployment import Deployment, plan
from tests.support.processes import Process, turnstream
from tests.support.waiting import eventually

from turnstream.broker.server import NatsServer

pytestmark = pytest.mark.system


@pytest.fixture
async def projected(own_nats: NatsServer, database_url: str, tmp_path: Path) -> AsyncIterator[Deployment]:
    """Two projectors on one database."""
    (tmp_path / "services").mkdir()
    names = ("api-1", "runner-1", "projector-1", "projector-2")
    deployment = plan(tmp_path / "services", own_nats.url, *names, database_url=database_url)
    try:
        async with deployment.entered():
            yield deployment
    finally:
        deployment.clean_up()


async def test_s52_projectors_that_die_and_rebuilds_lose_and_double_nothing(
    projected: Deployment, session: str, tmp_path: Path
) -> None:
    """Whoever writes reads his own writes all the time; in the end the rows are what a fresh rebuild gives."""
    (api,) = projected.apis
    over = asyncio.Event()
    done: list[str] = []

    async def write(name: str) -> None:
        await opened(api, name)
        while not over.is_set():
            text = f"{len(done)}"
            run = (await say(api, name, f'[tool add {{"a":1,"b":{text}}}][then][say {text}]'))["run"]
            ended = await outcome(api, run)
            shown = await api.ask("get_run", run=run, after=ended["seq"])
            assert shown.status == 200 and shown.body["output"] == text, shown
            listed = await api.ask("list_runs", session=name, after=ended["seq"], limit=1)
            assert [one["id"] for one in listed.body["items"]] == [run]
            done.append(run)

    writing = [asyncio.create_task(write(f"{session}-{n}")) for n in range(4)]
    names = [name for name in projected.services if name.startswith("projector")]

    async def more() -> None:
        """Some turns more."""
        enough = len(done) + 12
        await eventually(lambda: len(done) >= enough or any(task.done() for task in writing), 60)

    for name in names:
        await more()
        projected[name].kill()
        await more()
        projected[name].start()
    variables = {f"TURNSTREAM_{key.upper()}": str(value) for key, value in projected["api-1"].settings.items()}
    for n, killed in enumerate((True, False)):
        rebuild = Process(turnstream("rebuild"), variables, tmp_path, f"rebuild-{n}")
        await more()
        if killed:
            rebuild.kill()
        else:
            assert await rebuild.ended(60) == 0, rebuild.log
    await more()
    over.set()
    await asyncio.gather(*writing)
    assert all(projected[name].running for name in names)
    await projected.check()
