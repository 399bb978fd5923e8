"""Feeds of real API processes over lines that are cut, processes that are killed, and clients that go away.

A cut connection costs nothing: the run goes on, and a client that comes back with its cursor, to whichever process,
holds exactly what the log holds.
"""

import asyncio
import contextlib
import json
import random
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from tests.support.asking import OverHttp, events, opened, outcome, say, types
from tests.support.deployment import Deployment
from tests.support.follower import Follower, following
from tests.support.processes import Spawn
from tests.support.proxy import Proxy, proxy
from tests.support.waiting import eventually

from turnstream_cli.sse import Frame, Frames

pytestmark = pytest.mark.system


async def is_the_log(follower: Follower, api: OverHttp) -> None:
    """It holds the whole log, each event once, in order."""
    stored = await events(api, follower.session)
    assert follower.ids == [event["seq"] for event in stored]
    assert follower.records == stored


@asynccontextmanager
async def streaming(url: str, session: str, text: str) -> AsyncIterator[AsyncIterator[Frame]]:
    """Posts a message and streams its run."""
    async with (
        httpx.AsyncClient(trust_env=False, timeout=60) as http,
        http.stream(
            "POST",
            f"{url}/v1/sessions/{session}/messages",
            json={"content": text},
            headers={"Accept": "text/event-stream"},
        ) as answer,
    ):
        assert answer.status_code == 200
        frames = Frames()

        async def come() -> AsyncIterator[Frame]:
            async for chunk in answer.aiter_raw():
                for frame in frames.feed(chunk):
                    yield frame

        yield come()


async def test_s24_a_client_that_leaves_the_stream_ends_nothing(deployment: Deployment, session: str) -> None:
    """It leaves in order, in the middle of the answer."""
    one, two = deployment.apis
    await opened(one, session)
    async with streaming(one.url, session, "[slow 30 40ms]") as frames:
        async for frame in frames:
            if frame.event == "delta":
                break
    ended = await outcome(two, f"{session}.1")
    assert (ended["status"], len(ended["output"].split())) == ("completed", 30)


async def test_s24_a77_a_line_that_breaks_while_a_tool_is_silent_ends_nothing(
    deployment: Deployment, session: str
) -> None:
    """The API is sent RST."""
    one, two = deployment.apis
    await opened(one, session)
    prompt = '[tool errand {"seconds": 2}][then][say The errand is done.]'

    async def watch(line: Proxy) -> None:
        async with streaming(line.url, session, prompt) as frames:
            async for frame in frames:
                if frame.event == "tool.started":
                    line.cut()

    async with proxy(one.url) as line:
        with pytest.raises(httpx.TransportError):
            await watch(line)
    ended = await outcome(two, f"{session}.1")
    assert (ended["status"], ended["output"]) == ("completed", "The errand is done.")
    assert "run.cancel_requested" not in await types(two, session)
    (returned,) = [event for event in await events(two, session) if event["type"] == "tool.returned"]
    assert returned["data"]["status"] == "ok"


async def test_s40_a75_a_stream_cut_anywhere_goes_on_at_its_sequence(deployment: Deployment, session: str) -> None:
    """After any number of bytes, each time at another API process, while three turns go on."""
    one, two = deployment.apis
    rng = random.Random(40)
    await opened(one, session, policy={"on_busy": "queue"})

    def length() -> int:
        return rng.randrange(300, 3000)

    async with (
        proxy(one.url, length=length) as first,
        proxy(two.url, length=length, resets=True) as second,
        following(session, first.url, second.url) as follower,
    ):
        for n in range(3):
            await say(one, session, f'[tool add {{"a":{n},"b":1}}][tool errand][then][slow 40 20ms]')
        await outcome(two, f"{session}.3")
        await follower.until("run.ended", count=3)
        assert first.ended + second.ended >= 10
    await is_the_log(follower, one)


async def test_a68_a_life_of_half_a_second_a_connection_is_long_enough(
    deployment: Deployment, session: str, spawn: Spawn
) -> None:
    """Whatever is sent on it: heartbeats do not help. Also `turnstream send` sees no end but the run's."""
    one, two = deployment.apis
    await opened(one, session, policy={"titles": "derived"})  # the answer is the last event
    async with proxy(one.url, life=0.5) as line, following(session, line.url) as follower:
        sending = spawn("send", session, "[slow 60 50ms]", url=line.url)
        await follower.until("run.ended")
        assert await sending.ended() == 0, sending.log
        assert follower.connections >= 4 and line.ended >= 6
    await is_the_log(follower, two)
    answer = follower.records[-1]["data"]["content"].split()
    assert len(answer) == 60 and re.findall(r"word\d+", sending.log) == answer, sending.log


async def test_a06_s40_an_api_that_is_killed_in_mid_feed_costs_nothing(deployment: Deployment, session: str) -> None:
    """Also A04: what is asked for after the restart, with any cursor, comes at once and ends with the mark."""
    one, two = deployment.apis
    killed = deployment["api-1"]
    await opened(two, session, policy={"on_busy": "queue"})
    async with following(session, killed.url) as follower, following(session, two.url) as witness:
        for n in range(12):
            await say(two, session, f"[wait 150ms][say {n}]")
        await follower.until("run.ended", count=2)
        killed.kill()
        seen = len(follower.events)
        await witness.until("run.ended", count=5)
        assert len(follower.events) == seen
        await killed.restart()
        await witness.until("run.ended", count=12)
        await follower.until("run.ended", count=12)
        assert follower.connections == 2
        await is_the_log(follower, one)
        assert follower.events == witness.events, "byte for byte"
    stored = witness.ids
    for cursor, missing in ((stored[-1], []), (0, stored), (-1, stored), (stored[7], stored[8:])):
        async with asyncio.timeout(5), following(session, killed.url, after=cursor) as late:
            assert late.ids == missing


async def test_a59_an_api_with_a_hundred_open_feeds_stops_within_seconds(deployment: Deployment, session: str) -> None:
    """Its clients go on at another, and lose nothing."""
    _, two = deployment.apis
    stopped = deployment["api-1"]
    await opened(two, session)
    run = (await say(two, session, "[slow 30 100ms]"))["run"]
    async with contextlib.AsyncExitStack() as stack:
        followers = [
            await stack.enter_async_context(following(session, stopped.url, two.url, deltas=n % 2 == 0))
            for n in range(100)
        ]
        began = time.monotonic()
        assert await stopped.stop() == 0
        took = time.monotonic() - began
        assert took < 10, "the grace of 5 s, on a busy machine"
        for follower in followers:
            assert follower.marks[-1].event == "bye" or follower.connections == 2
        assert (await outcome(two, run))["status"] == "completed"
        stored = await events(two, session)
        for follower in followers:
            await follower.until("run.ended")
            assert [mark.event for mark in follower.marks].count("bye") == 1
            assert follower.records == stored


async def test_a54_three_tabs_leave_room_for_requests(deployment: Deployment, session: str) -> None:
    """A browser gives a server six connections. A tab needs one long one, for everything: events and live text of
    each run."""
    one, _ = deployment.apis
    browser = httpx.Limits(max_connections=6, max_keepalive_connections=6)
    sessions = [f"{session}-{n}" for n in range(3)]
    async with httpx.AsyncClient(base_url=one.url, limits=browser, timeout=30, trust_env=False) as http:
        heard: dict[str, set[str]] = {name: set() for name in sessions}

        async def tab(name: str) -> None:
            frames = Frames()
            path = f"/v1/sessions/{name}/events"
            async with http.stream("GET", path, headers={"Accept": "text/event-stream"}) as answer:
                async for chunk in answer.aiter_raw():
                    heard[name] |= {frame.event for frame in frames.feed(chunk)}

        for name in sessions:
            await opened(one, name)
        tabs = [asyncio.create_task(tab(name)) for name in sessions]
        await eventually(lambda: all("caught-up" in seen for seen in heard.values()), 30)
        for _ in range(10):
            answers = await asyncio.gather(*(http.get(f"/v1/sessions/{name}/queue") for name in sessions * 2))
            assert {answer.status_code for answer in answers} == {200}
        for name in sessions:
            posted = await http.post(f"/v1/sessions/{name}/messages", json={"content": "[slow 5 20ms]"})
            assert posted.status_code == 202
        await eventually(lambda: all({"delta", "run.ended"} <= seen for seen in heard.values()), 30)
        for task in tabs:
            task.cancel()
        await asyncio.gather(*tabs, return_exceptions=True)


async def test_a78_what_is_replayed_comes_in_order_and_ends_with_a_mark(deployment: Deployment, session: str) -> None:
    """With a cursor and without, while turns go on: what was stored before the mark, what happens behind it."""
    one, two = deployment.apis
    await opened(one, session, policy={"on_busy": "queue"})
    for n in range(4):
        await outcome(one, (await say(two, session, f"echo {n}"))["run"])
    before = await events(two, session)
    busy = [(await say(one, session, f"[wait 200ms][say {n}]"))["run"] for n in range(4)]
    for cursor in (0, before[5]["seq"]):
        async with following(session, two.url, after=cursor) as follower:
            mark = follower.marks[0]
            assert mark.event == "caught-up" and mark.id is None
            replayed = [seq for seq in follower.ids if seq <= json.loads(mark.data)["seq"]]
            assert [seq for seq in replayed if seq <= before[-1]["seq"]] == [
                event["seq"] for event in before if event["seq"] > cursor
            ]
            await follower.until_seq(json.loads(mark.data)["seq"] + 1)
            assert follower.ids == sorted(set(follower.ids))
    await outcome(one, busy[-1])
