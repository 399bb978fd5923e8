"""Hosts whose clocks are hours off: order, durations and expiry go by the broker's time alone.

Each service runs under libfaketime (Debian: `apt-get install faketime`), five hours ahead or behind; where it is not
installed these tests are skipped. Monotonic clocks are left alone, as on a host whose clock is wrong.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.support.asking import Speaker, events, opened, outcome, say
from tests.support.deployment import Deployment, plan
from tests.support.follower import following
from tests.support.nats import run_alone
from tests.support.processes import Process, turnstream
from tests.support.waiting import eventually

from turnstream.broker.server import NatsServer

LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
AHEAD, BEHIND = "+5h", "-5h"
NEAR = 120_000
"""Milliseconds that two moments of one test may lie apart on a busy machine; hours are far more."""

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed (Debian: faketime)"),
]


def clock(offset: str) -> dict[str, str]:
    """The environment of a process whose clock is off by this much. Without the last variable a thread of Python waits
    up to 0.3 s for the interpreter's lock (libfaketime 0.9.10)."""
    return {
        "LD_PRELOAD": str(LIBRARY),
        "FAKETIME": offset,
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
    }


@pytest.fixture(scope="module")
def astray_standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("astray")
    (folder / "agents").mkdir()
    (folder / "agents" / "hasty.toml").write_text(
        'name = "hasty"\nmodel = "demo"\ncontrol.ask_user = true\nlimits.timeout = 2.0\n'
    )
    server = NatsServer(folder / "nats")
    run_alone(server.start())
    offsets = {"api-1": AHEAD, "api-2": BEHIND, "runner-1": AHEAD, "runner-2": BEHIND, "projector-1": AHEAD}
    clocks = {name: clock(offset) for name, offset in offsets.items()}
    made = plan(folder, server, *offsets, environments=clocks, agents_dir=folder / "agents", sweep_every=0.5)
    yield made
    made.clean_up()


@pytest.fixture
async def astray(astray_standing: Deployment) -> AsyncIterator[Deployment]:
    """Two API processes and two runners, one of each ahead and one behind; a projector that is ahead."""
    async with astray_standing.entered():
        yield astray_standing


def millis(date: str) -> int:
    return round(datetime.fromisoformat(date).timestamp() * 1000)


async def test_s60_order_and_durations_are_the_brokers(astray: Deployment, session: str) -> None:
    one, two = astray.apis
    began = time.time() * 1000
    await opened(one, session, policy={"on_busy": "queue", "titles": "derived"})
    runs: list[str] = []
    async with following(session, two.url) as follower:
        for n in range(6):
            speaker = astray.apis[n % 2]
            runs.append((await say(speaker, session, f"[wait 200ms][tool errand][then][say {n}]"))["run"])
        for n, run in enumerate(runs):
            assert (await outcome(one, run))["output"] == str(n)
        stored = await events(two, session)
        await follower.until("run.ended", count=6)
        assert follower.records == stored
    dates = [millis(event["storedat"]) for event in stored]
    assert dates == sorted(dates)
    assert abs(dates[0] - began) < NEAR and abs(dates[-1] - time.time() * 1000) < NEAR
    assert all(abs(millis(event["time"]) - millis(event["storedat"])) < NEAR for event in stored)
    last = stored[-1]["seq"]
    shown: dict[str, Any] = {}
    for run in runs:
        shown = (await two.ask("get_run", run=run, after=last)).body
        assert dates[0] <= shown["requested_at"] <= shown["started_at"] <= shown["ended_at"] <= dates[-1]
        assert 200 <= shown["ended_at"] - shown["started_at"] < NEAR
        steps = (await one.ask("read_steps", run=run)).body["items"]
        assert steps and all(0 <= step["ended_at"] - step["began_at"] < NEAR for step in steps)
    listed = (await one.ask("list_runs", session=session, since=shown["requested_at"])).body["items"]
    assert [run["id"] for run in listed] == [runs[-1]]


async def test_s60_a_deadline_comes_by_the_brokers_time(astray: Deployment, session: str) -> None:
    """Neither at once nor never, whichever runner has the run; what is done in time completes."""
    one, two = astray.apis
    hanging = [f"{session}-{n}" for n in range(8)]
    for n, name in enumerate(hanging):
        await opened(astray.apis[n % 2], name, agent="hasty")
    await asyncio.gather(*(say(astray.apis[n % 2], name, "[hang]") for n, name in enumerate(hanging)))
    await opened(one, session, agent="hasty")
    quick = (await say(two, session, "[wait 1s][say in time]"))["run"]
    assert (await outcome(one, quick))["output"] == "in time"
    owners: set[str] = set()
    for name in hanging:
        ended = await outcome(two, f"{name}.1")
        assert (ended["status"], ended["error"]["code"]) == ("timed_out", "deadline_exceeded")
        shown = (await one.ask("get_run", run=f"{name}.1", after=ended["seq"])).body
        assert 2000 <= shown["ended_at"] - shown["started_at"] < 30_000
        assert shown["deadline"] - shown["started_at"] == 2000
        owners |= {event["data"]["runner"] for event in await events(two, name) if event["type"] == "run.started"}
    assert len(owners) == 2, "a runner that is ahead and one that is behind"


async def test_s60_a_question_is_over_by_the_brokers_time(astray: Deployment, session: str) -> None:
    """What is answered in time counts, what is not expires after its second, whoever is ahead or behind."""
    one, two = astray.apis
    prompt = '[tool conversation_ask_user {"question":"Well?","expires_in":%d,"on_expiry":"default","default":"late"}]'
    for n, speaker in enumerate((one, two)):
        name = f"{session}-{n}"
        await opened(speaker, name)
        run = (await say(speaker, name, prompt % 60))["run"]
        await eventually(lambda run=run: is_waiting(two, run), 60)
        answer = await (two, one)[n].ask("answer_run", run=run, answer="early")
        assert answer.status == 202, answer
        assert "early" in (await outcome(one, run))["output"]
        run = (await say(speaker, name, prompt % 1))["run"]
        await eventually(lambda run=run: is_over(two, run), 60)
        assert "late" in (await outcome(two, run))["output"]
        stored = await events(one, name)
        waited = [millis(event["storedat"]) for event in stored if event["type"] == "run.waiting"]
        (expired,) = [millis(event["storedat"]) for event in stored if event["type"] == "request.expired"]
        assert 1000 <= expired - waited[-1] < 30_000


@pytest.mark.parametrize("clock", ["running", "wall"])
async def test_a48_s60_the_time_a_person_takes(astray: Deployment, session: str, clock: str) -> None:
    """A run of two seconds at most is answered after three: its time stood meanwhile, unless the policy says no."""
    one, two = astray.apis
    await opened(one, session, agent="hasty", policy={"clock": clock})
    run = (await say(one, session, '[tool conversation_ask_user {"question":"Well?"}][then][say done]'))["run"]
    await eventually(lambda: is_waiting(two, run), 60)
    asked = time.monotonic()
    if clock == "wall":
        await eventually(lambda: is_over(two, run), 60)
        assert (await outcome(one, run))["status"] == "timed_out"
        return
    await eventually(lambda: time.monotonic() - asked > 3, 60)
    assert (await two.ask("answer_run", run=run, answer="here")).status == 202
    assert (await outcome(one, run))["output"] == "done"


async def is_over(speaker: Speaker, run: str) -> bool:
    return (await speaker.ask("wait_run", run=run, timeout=0)).body["status"] not in ("queued", "running", "waiting")


async def is_waiting(speaker: Speaker, run: str) -> bool:
    return (await speaker.ask("wait_run", run=run, timeout=0)).body["status"] == "waiting"


async def test_s60_a_run_longer_than_its_lease_is_one_attempt(astray: Deployment, session: str) -> None:
    """Leases are kept by monotonic time; the sweep, every half second, takes nobody for forgotten."""
    one, two = astray.apis
    names = [f"{session}-{n}" for n in range(6)]
    for n, name in enumerate(names):
        await opened(astray.apis[n % 2], name)
        await say(astray.apis[n % 2], name, "[wait 3s][say still here]")
    for name in names:
        assert (await outcome(one, f"{name}.1"))["output"] == "still here"
        stored = await events(two, name)
        assert [event["type"] for event in stored].count("run.started") == 1
    await astray.check()


async def test_a55_a_clients_clock_orders_nothing(astray: Deployment, session: str, tmp_path: Path) -> None:
    """`turnstream send` from a host that is ahead, then from one that is behind."""
    one, two = astray.apis
    for n, offset in enumerate((AHEAD, BEHIND)):
        environment = {"TURNSTREAM_URL": astray.urls[n % 2], **clock(offset)}
        sending = Process(turnstream("send", session, f"echo {n}"), environment, tmp_path, f"send-{n}")
        assert await sending.ended(60) == 0, sending.log
    stored = await events(one, session)
    said = [event["data"]["content"][0]["text"] for event in stored if event["type"] == "message.posted"]
    assert said == ["echo 0", "echo 1"]
    dates = [millis(event["storedat"]) for event in stored]
    assert dates == sorted(dates) and dates[-1] - dates[0] < NEAR
    items = (await two.ask("read_history", session=session, after=stored[-1]["seq"])).body["items"]
    assert [item["content"] for item in items if item["type"] == "reply"] == ["0", "1"]
    assert [item["time"] for item in items] == sorted(item["time"] for item in items)
