"""Two messages at once, whatever the policy; feeds that come and go; runners that hang: a session is never stuck."""

import asyncio
import contextlib
import random
from typing import Any

import httpx
import pytest
from tests.support.asking import events, opened, outcome, say
from tests.support.deployment import Deployment
from tests.support.follower import following
from tests.support.waiting import eventually

pytestmark = pytest.mark.system

ROUTED = {
    "reject": {"started"},
    "queue": {"started", "queued"},
    "steer": {"started", "steered"},
    "interrupt": {"started", "queued"},
    "parallel": {"started"},
}


def overlaps(stored: list[dict[str, Any]]) -> bool:
    """Whether two runs were ever running at once."""
    running: set[int] = set()
    for event in stored:
        run = event["data"].get("run")
        if event["type"] == "run.started":
            running.add(run)
        elif event["type"] in ("run.ended", "run.waiting", "run.released"):
            running.discard(run)
        if len(running) > 1:
            return True
    return False


@pytest.mark.parametrize("on_busy", sorted(ROUTED))
async def test_a11_a13_two_messages_close_together_go_where_the_policy_says(
    deployment: Deployment, session: str, on_busy: str
) -> None:
    one, two = deployment.apis
    names = [f"{session}-{n}" for n in range(20)]
    rng = random.Random(on_busy)

    async def pair(name: str) -> None:
        await opened(one, name, policy={"on_busy": on_busy})
        first = asyncio.create_task(one.ask("post_message", session=name, content="[wait 60ms][say one]"))
        await asyncio.sleep(rng.random() * 0.12)
        second = await two.ask("post_message", session=name, content="echo two")
        answers = [await first, second]
        for answer in answers:
            if answer.status == 202:
                assert answer.body["routed"] in ROUTED[on_busy]
            else:
                assert (on_busy, answer.status, answer.body["code"]) == ("reject", 409, "run_active")
        for answer in answers:
            if answer.status == 202:
                await outcome(two, answer.body["run"])
        stored = await events(one, name)
        assert overlaps(stored) <= (on_busy == "parallel")

    await asyncio.gather(*map(pair, names))
    await deployment.check()


async def test_a14_an_idle_session_always_accepts_however_feeds_come_and_go(
    deployment: Deployment, session: str
) -> None:
    one, two = deployment.apis
    await opened(one, session)
    stop = asyncio.Event()

    async def flaky() -> None:
        rng = random.Random(14)
        async with httpx.AsyncClient(trust_env=False) as http:
            while not stop.is_set():
                url = f"{rng.choice((one, two)).url}/v1/sessions/{session}/events"
                with contextlib.suppress(httpx.TransportError):
                    async with http.stream("GET", url, headers={"Accept": "text/event-stream"}) as answer:
                        async for _ in answer.aiter_raw():
                            if rng.random() < 0.5:
                                break

    flapping = [asyncio.create_task(flaky()) for _ in range(5)]
    for n in range(25):
        ended = await outcome(one, (await say(two, session, f"[slow 3 5ms][say {n}]"))["run"])
        shown = (await one.ask("get_session", session=session, after=ended["seq"])).body
        assert shown["status"] == "idle"
    stop.set()
    await asyncio.gather(*flapping)


async def test_a07_a_feed_is_taken_up_again_after_any_time(deployment: Deployment, session: str) -> None:
    """A run waits for a person; its follower is away meanwhile, and so is everything else for a while."""
    one, two = deployment.apis
    await opened(one, session)
    async with following(session, one.url) as follower:
        run = (await say(one, session, '[tool conversation_ask_user {"question":"Well?"}]'))["run"]
        await follower.until("run.waiting")
        cursor, before = follower.cursor, follower.records
    assert deployment.server
    for service in deployment.services.values():
        service.kill()
    deployment.server.kill()
    await deployment.heal()
    assert (await two.ask("answer_run", run=run, answer="here I am")).status == 202
    await outcome(two, run)
    async with following(session, two.url, after=cursor) as again:
        await again.until("run.ended")
        assert before + again.records == await events(one, session)


async def test_a63_a72_a_runner_that_hangs_holds_no_session(deployment: Deployment, session: str) -> None:
    """It is frozen for good, right behind a tool's result; others go on with its runs and with what is queued."""
    one, two = deployment.apis
    names = [f"{session}-{n}" for n in range(8)]
    for name in names:
        await opened(one, name, policy={"on_busy": "queue"})
    runs = [(await say(one, name, '[tool add {"a":1,"b":2}][then][wait 1s][say done]'))["run"] for name in names]
    for name in names:
        await say(two, name, "echo behind")

    async def returned() -> bool:
        return all([any(e["type"] == "tool.returned" for e in await events(one, name)) for name in names])

    await eventually(returned, 60, what="a result of each tool")
    victim = deployment.runners[0]
    victim.process.freeze()
    try:
        for run in runs:
            assert (await outcome(two, run))["output"] == "done"
        for name in names:
            assert (await outcome(one, f"{name}.2"))["output"] == "behind"
    finally:
        victim.process.thaw()
    await deployment.check()
