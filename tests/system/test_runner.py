"""Runners as real processes on a real server: killed (-9), frozen, thawed, told to stop. What was accepted ends, once.

A run is short of nothing but its runner here: the lease is a second, the model is `demo`, the log is asked directly.
"""

import asyncio
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.client import Client
from tests.support.processes import Process, Spawn
from tests.support.waiting import eventually

from turnstream import agents, subjects
from turnstream.broker.pull import Pull
from turnstream.broker.server import NatsServer
from turnstream.session.events import ModelReplied, RunEnded, RunStarted, ToolReturned
from turnstream.wire.live import Delta, Live
from turnstream.wire.work import Work

pytestmark = pytest.mark.system

LEASE = 1.0
SLOW = "[slow 40 50ms]"
"""Two seconds of words."""


MODULE = """
import os, signal, time
from turnstream.agents import Agent, tool

@tool(idempotent=True)
def die() -> str:
    "Kills its runner."
    os.kill(os.getpid(), signal.SIGKILL)
    return ""

@tool
def compute(seconds: float) -> str:
    "Never gives up the processor by itself."
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return "computed"

odd = Agent(name="odd", model="demo", tools=[die, compute])
"""


@pytest.fixture
def start(own_nats: NatsServer, spawn: Spawn) -> Callable[..., Process]:
    """Starts a runner."""

    def begin(**settings: object) -> Process:
        return spawn("runner", **({"nats_url": own_nats.url, "lease": LEASE} | settings))

    return begin


@pytest.fixture
def odd(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with an agent that has odd tools. Runners find it: they start in this folder."""
    (tmp_path / "odd.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    client.know(agents.load(modules=("odd",)))
    return "odd"


async def ready(*runners: Process) -> None:
    for runner in runners:
        await runner.until_logged("ready")


def owner(started: RunStarted, runners: list[Process]) -> Process:
    """The process that made this start."""
    return next(runner for runner in runners if started.runner.split("-")[-2] == str(runner.pid))


async def test_s18_a_runner_killed_in_a_model_call_is_followed_by_another(
    client: Client, start: Callable[..., Process]
) -> None:
    runners = [start(), start()]
    await ready(*runners)
    await client.post(SLOW)
    await client.until("run.started")
    [first] = await client.starts()
    owner(first, runners).kill()
    end = await client.end()
    assert (end.status, end.attempt) == ("completed", 2)
    assert await client.types() == ["message.posted", "run.started", "run.started", "run.ended"]
    second = (await client.starts())[1]
    assert (second.trigger, second.message_ids) == ("recovery", ())
    assert owner(second, runners).running


async def test_s20_a12_a24_nothing_is_stored_of_a_runner_that_was_frozen_past_its_lease(
    client: Client, start: Callable[..., Process]
) -> None:
    runners = [start(), start()]
    await ready(*runners)
    heard: list[Delta] = []
    listening = await Live(client.broker).listen(client.key("s1"), heard.append)
    await client.post(SLOW)
    await eventually(lambda: heard)
    frozen = owner((await client.starts())[0], runners)
    frozen.freeze()
    end = await client.end()
    assert end.attempt == 2
    seqs = await client.types()
    frozen.thaw()
    # The thawed runner works on: it is the only one left, and what it had begun is not its own any more.
    next(runner for runner in runners if runner is not frozen).kill()
    await client.post("echo and now?")
    assert (await client.end(run=2)).content == "and now?"
    assert await client.types() == [*seqs, "message.posted", "run.started", "run.ended"]
    assert owner((await client.starts())[-1], runners) is frozen
    await listening.unsubscribe()
    by_attempt = {delta.attempt: 0 for delta in heard}
    for delta in heard:
        assert delta.index == by_attempt[delta.attempt] + 1 or delta.attempt == 1, "no gap"
        by_attempt[delta.attempt] = delta.index


async def test_a_runner_that_stops_gives_its_runs_to_another_at_once(
    client: Client, start: Callable[..., Process]
) -> None:
    """With a lease of a minute: nobody waits for it to lapse."""
    first = start(lease=60, drain_grace=2)
    await ready(first)
    await client.post("[hang]", "talking")
    await client.post('[tool errand {"seconds": 1}][then][say errand done]', "busy")
    await client.post('[tool errand {"seconds": 60}][then][say never mind]', "endless")
    for session, kind in (("talking", "run.started"), ("busy", "tool.started"), ("endless", "tool.started")):
        await client.until(kind, session)
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await first.stop() == 0
    assert loop.time() - began < 6, "the grace of 2 s and a little more"
    second = start(lease=60)
    assert (await client.end("busy")).content == "errand done"
    assert (await client.end("endless")).content == "never mind"
    await client.until("run.started", "talking", count=2)
    await client.cancel(1, "talking")
    assert (await client.end("talking")).attempt == 2
    assert second.running
    statuses = {}
    for session in ("busy", "endless"):
        [returned] = [fact for fact in await client.facts(session) if isinstance(fact, ToolReturned)]
        statuses[session] = returned.status
    assert statuses == {"busy": "ok", "endless": "uncertain"}
    for session in ("talking", "busy", "endless"):
        assert "run.released" in await client.types(session)
        assert [started.trigger for started in await client.starts(session)] == ["message", "handover"]


async def test_a25_two_runners_started_over_a_hundred_orphans_make_one_new_attempt_each(
    client: Client, start: Callable[..., Process]
) -> None:
    dead = start(runner_slots=128)
    await ready(dead)
    sessions = [f"s{n}" for n in range(100)]
    await asyncio.gather(*(client.post("[wait 4s][say done]", session) for session in sessions))
    for session in sessions:
        await client.until("run.started", session)
    dead.kill()
    assert not [session for session in sessions if "run.ended" in await client.types(session)]
    runners = [start(runner_slots=128), start(runner_slots=128)]
    await client.all_ended(sessions)
    for session in sessions:
        assert await client.types(session) == ["message.posted", "run.started", "run.started", "run.ended"]
    assert all(runner.running for runner in runners)


async def test_a21_a22_a72_whatever_was_accepted_ends_once_however_often_runners_are_killed(
    client: Client, start: Callable[..., Process]
) -> None:
    """Runners are killed while messages are accepted, taken, answered, and while tools return; what is queued behind a
    run goes on with the next runner."""
    rng = random.Random(21)
    prompts = (
        "echo plain",
        '[tool add {"a": 1, "b": 2}][then][say added]',
        '[tool errand {"seconds": 0.02}][tool sleep {"seconds": 0.01}][then][say ran]',
        "[slow 3 10ms]",
    )
    sessions: list[str] = []
    survivor = start()
    await ready(survivor)
    for trial in range(4):
        victim, survivor = survivor, start()
        await ready(survivor)

        async def talk(session: str) -> None:
            for _ in range(2):
                await client.post(rng.choice(prompts), session)

        mine = [f"t{trial}-{n}" for n in range(40)]
        sessions += mine
        posting = asyncio.gather(*(talk(session) for session in mine))
        await client.until("message.posted", mine[rng.randrange(40)])
        await asyncio.sleep(rng.random() * 0.05)
        victim.kill()
        await posting
    await client.all_ended(sessions, runs=2)
    for session in sessions:
        facts = await client.facts(session)
        ends = await client.ends(session)
        assert {end.status for end in ends.values()} == {"completed"}, (session, [end.error for end in ends.values()])
        calls = [call.id for fact in facts if isinstance(fact, ModelReplied) for call in fact.tool_calls]
        results = [fact.call_id for fact in facts if isinstance(fact, ToolReturned)]
        assert sorted(calls) == sorted(results), session


async def test_a22_a_wake_up_that_was_taken_and_never_started_is_taken_again_within_the_lease(
    client: Client, start: Callable[..., Process]
) -> None:
    """A runner that dies between its claim and its first event is a reader that takes the wake-up and falls silent."""
    dispatcher = start(queues="other")
    await ready(dispatcher)
    pull = Pull(client.broker, subjects.runner_consumer("default", LEASE))
    await client.post("echo claimed")
    [claimed] = await anext(pull)
    await pull.close()
    assert claimed.delivery == 1
    runner = start()
    end = await client.end()
    assert (end.content, end.attempt) == ("claimed", 1)
    [started] = await client.starts()
    assert (started.wake.work, started.wake.delivery) == (claimed.seq, 2)
    assert runner.running


async def test_s49_wake_ups_without_number_make_one_attempt(client: Client, start: Callable[..., Process]) -> None:
    runners = [start(), start()]
    await ready(*runners)
    work = Work(client.broker)
    posted = await client.post(SLOW)
    await client.until("run.started")
    await asyncio.gather(*(work.wake("default", client.key("s1"), posted.session.seq) for _ in range(200)))
    assert (await client.end()).attempt == 1
    assert await client.types() == ["message.posted", "run.started", "run.ended"]


async def test_a73_a_turn_longer_than_many_leases_is_one_attempt(
    client: Client, start: Callable[..., Process], odd: str
) -> None:
    """A model call, an asynchronous tool, a tool in a thread that never gives up the processor: the lease is kept."""
    runners = [start(modules=odd), start(modules=odd)]
    await ready(*runners)
    await client.post('[wait 2s][tool sleep {"seconds": 1}][then][slow 20 50ms]')
    await client.post('[tool compute {"seconds": 3}][then][say computed]', "s2", agent=odd)
    for session in ("s1", "s2"):
        end = await client.end(session)
        assert (end.status, end.attempt) == ("completed", 1)
        assert len(await client.starts(session)) == 1


async def test_s21_a20_a_run_that_kills_each_of_its_runners_fails_and_frees_the_session(
    client: Client, start: Callable[..., Process], odd: str
) -> None:
    runners = [start(modules=odd) for _ in range(2)]
    await client.post("[tool die]", agent="odd")

    async def ended() -> bool:
        for n, runner in enumerate(runners):
            if not runner.running:
                runners[n] = start(modules=odd)
        return bool(await client.ends())

    await eventually(ended, 60, every=0.1)
    end = (await client.ends())[1]
    assert (end.status, end.attempt) == ("failed", 4)
    assert end.error and end.error.code == "max_attempts_exceeded"
    assert [started.trigger for started in await client.starts()] == ["message"] + ["recovery"] * 3
    await client.post("echo free", agent="odd")
    assert (await client.end(run=2)).content == "free"


async def test_s51_a_server_that_is_killed_costs_no_run(
    own_nats: NatsServer, client: Client, start: Callable[..., Process]
) -> None:
    runners = [start(), start()]
    await ready(*runners)
    sessions = [f"s{n}" for n in range(60)]
    posting = asyncio.gather(*(client.post("[slow 4 100ms]", session) for session in sessions))
    await client.until("run.started", "s5")
    own_nats.kill()
    await own_nats.start()
    await posting
    await client.all_ended(sessions)
    for session in sessions:
        assert (await client.end(session)).status == "completed"
    assert all(runner.running for runner in runners)


async def test_s56_runs_end_though_work_is_wiped_and_dispatch_is_deleted(
    client: Client, start: Callable[..., Process], spawn: Spawn, own_nats: NatsServer, tmp_path: Path
) -> None:
    """One run's wake-up is wiped before anybody takes it, one's while its runner dies, and one was never carried."""
    projector = spawn("projector", nats_url=own_nats.url, data_dir=tmp_path, sweep_every=0.3, sweep_after=0.3)
    doomed = start()
    await ready(projector, doomed)
    await client.post("[wait 60s]", "running")
    await client.until("run.started", "running")
    doomed.kill()
    await client.broker.api(f"STREAM.PURGE.{subjects.WORK}")
    await client.cancel(1, "running")
    await client.post("echo late", "running")
    await client.post("echo forgotten", "queued")
    await client.broker.api(f"CONSUMER.DELETE.{subjects.SESSIONS}.{subjects.DISPATCH.name}")
    await client.broker.api(f"STREAM.DELETE.{subjects.WORK}")
    runner = start()
    assert (await client.end("running")).status == "cancelled"
    assert (await client.end("running", run=2)).content == "late"
    assert (await client.end("queued")).content == "forgotten"
    assert runner.running


async def test_s56_a_deadline_whose_timer_is_lost_still_ends_the_run(
    client: Client, start: Callable[..., Process]
) -> None:
    """The drive minds the deadline itself; the timer is for when there is no drive."""
    runner = start()
    await ready(runner)
    spec = client.specs["default"]
    limits = type(spec.limits)(timeout=1500)
    client.specs["default"] = type(spec)(
        agent=spec.agent, version=spec.version, digest=spec.digest, model=spec.model, limits=limits
    )
    await client.post("[think so far][slow 200 50ms]")
    await client.until("run.started")
    await client.broker.api(f"STREAM.PURGE.{subjects.WORK}", {"filter": "ts.timer.>"})
    end = await client.end(timeout=10)
    assert isinstance(end, RunEnded)
    assert (end.status, end.reasoning) == ("timed_out", "so far")
    assert end.content
