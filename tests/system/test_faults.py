"""What dies and what gets lost between real processes: the broker under load, runners just behind an answer, answers on
their way, and a log that takes no more. What was acknowledged is there, once; nobody was told what is not.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from nats.aio.msg import Msg
from tests.support.asking import Answer, NoAnswer, OverHttp, events, insist, opened, outcome, say, types
from tests.support.deployment import Deployment
from tests.support.follower import following
from tests.support.load import Load
from tests.support.proxy import proxy
from tests.support.waiting import eventually

from turnstream.broker.connection import Broker

pytestmark = pytest.mark.system


class Listener:
    """A program that listens to the broker's feed subjects: everything that was published there."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, bytes]] = []

    async def listen(self, broker: Broker) -> None:
        async def hear(message: Msg) -> None:
            seq = int((message.headers or {})["Nats-Sequence"])
            self.heard.append((message.subject.rpartition(".")[2], seq, message.data))

        await broker.subscribe("ts.feed.default.*", hear)

    def of(self, session: str) -> dict[int, Any]:
        """What was heard of a session, by sequence."""
        return {seq: msgspec.json.decode(data) for name, seq, data in self.heard if name == session}


def only_what_is_stored(listener: Listener, session: str, stored: list[dict[str, Any]]) -> None:
    """Whatever was published of a session is in its log."""
    by_seq = {event["seq"]: event for event in stored}
    for seq, event in listener.of(session).items():
        assert by_seq[seq] == event | {"seq": seq, "storedat": by_seq[seq]["storedat"]}


async def test_s51_a67_a_broker_that_is_killed_under_load_loses_nothing_acknowledged(
    deployment: Deployment, session: str
) -> None:
    """Twice, with kill -9. The services reconnect by themselves; nobody was told anything that is not stored."""
    assert deployment.broker and deployment.server
    pids = {name: service.pid for name, service in deployment.services.items()}
    listener = Listener()
    await listener.listen(deployment.broker)
    prompt = '[tool add {{"a":1,"b":0}}][then][wait 20ms][say {}]'
    load = Load(deployment, [f"{session}-{n}" for n in range(6)], prompt)
    async with load.going_on():
        await load.until(30)
        deployment.server.kill()
        await deployment.server.start()
        await load.until(80)
        deployment.server.kill()
        await says_that_it_cannot(deployment.apis[0], load.sessions[0])
        await deployment.server.start()
        await load.until(120)
        for name, stored in (await load.made_up()).items():
            only_what_is_stored(listener, name, stored)
    assert {name: service.pid for name, service in deployment.services.items() if service.running} == pids
    await deployment.check()


async def says_that_it_cannot(api: OverHttp, session: str) -> None:
    """While the broker is away."""
    answer = await api.ask("post_message", session=session, content="echo nobody hears this")
    assert (answer.status, answer.body["code"], answer.body["retry_after"]) == (503, "unavailable", 1)
    assert (await api.http.get("/healthz")).status_code == 200
    assert (await api.http.get("/readyz")).status_code == 503


@asynccontextmanager
async def full(broker: Broker) -> AsyncIterator[None]:
    """The log takes no more, as with a full disk."""
    info: Any = await broker.api("STREAM.INFO.SESSIONS")
    config = info["config"]
    limits = {"max_msgs": info["state"]["messages"], "discard": "new"}
    await broker.api("STREAM.UPDATE.SESSIONS", config | limits)
    try:
        yield
    finally:
        await broker.api("STREAM.UPDATE.SESSIONS", config)


async def test_a67_what_the_log_refuses_nobody_was_told(deployment: Deployment, session: str) -> None:
    """A limit of the stream is hit in the middle of a run. When there is room again, everything goes on."""
    one, two = deployment.apis
    assert deployment.broker
    await opened(one, session, policy={"on_busy": "queue"})
    listener = Listener()
    await listener.listen(deployment.broker)
    async with following(session, one.url) as follower, following(session, two.url) as other:
        await say(one, session, "[slow 10 50ms]")
        await follower.until("run.started")
        async with full(deployment.broker):
            await eventually(lambda: len(follower.text(f"{session}.1").split()) == 10, 30, what="all it says")
            body = {"session": session, "content": "echo second", "message_id": "m2"}
            refused = await asyncio.gather(*(api.ask("post_message", **body) for api in (one, two)))
            assert [(answer.status, answer.body["code"]) for answer in refused] == [(503, "unavailable")] * 2
            await follower.until("run.started")
            held = await types(two, session)
            assert held == ["session.opened", "message.posted", "run.started"]
            assert [frame.event for frame in follower.events] == held
        taken = await insist([one, two], "post_message", **body)
        assert taken.status in (200, 202)
        assert (await outcome(two, f"{session}.1"))["status"] == "completed"
        assert (await outcome(two, taken.body["run"]))["output"] == "second"
        for each in (follower, other):
            await each.until("run.ended", count=2)
        stored = await events(one, session)
        assert [event["type"] for event in stored].count("message.posted") == 2
        assert follower.records == other.records == stored
        only_what_is_stored(listener, session, stored)
    await deployment.check()


async def test_a21_a_run_is_there_though_its_runner_dies_right_behind_the_answer(
    deployment: Deployment, session: str
) -> None:
    """Every runner is killed 0 to 50 ms after the 202."""
    one, two = deployment.apis
    rng = random.Random(21)
    for trial in range(2):
        names = [f"{session}-{trial}-{n}" for n in range(20)]
        await asyncio.gather(*(opened(one, name) for name in names))
        posted = await asyncio.gather(*(say(two, name, "[tool errand][then][say done]") for name in names))
        await asyncio.sleep(rng.random() * 0.05)
        for runner in deployment.runners:
            runner.kill()
        for answer in posted:
            known = await one.ask("wait_run", run=answer["run"], timeout=0)
            assert known.status == 200, "never absent"
        await asyncio.gather(*(runner.restart() for runner in deployment.runners))
        for name in names:
            ended = await outcome(two, f"{name}.1")
            assert (ended["status"], ended["output"]) == ("completed", "done")
            kinds = await types(one, name)
            assert kinds.count("message.posted") == kinds.count("run.ended") == kinds.count("tool.returned") == 1
    await deployment.check()


async def test_a56_an_answer_that_is_lost_is_had_by_asking_again(deployment: Deployment, session: str) -> None:
    """A proxy takes the 202. The same message, through the other API process: the same run."""
    one, two = deployment.apis
    await opened(one, session, policy={"titles": "derived"})

    async def lost(operation: str, **fields: Any) -> None:
        async with proxy(one.url) as line:
            through = OverHttp(line.url)
            line.swallow()
            asking = asyncio.create_task(through.ask(operation, **fields))
            await line.swallowed.wait()
            line.cut()
            with pytest.raises(NoAnswer):
                await asking
            await through.close()

    async def again(operation: str, **fields: Any) -> Answer:
        answer = await two.ask(operation, **fields)
        assert answer.status == 200 and answer.replayed, answer
        return answer

    message = {"session": session, "content": "echo once", "message_id": "m1"}
    await lost("post_message", **message)
    assert (await again("post_message", **message)).body["run"] == f"{session}.1"
    assert (await outcome(one, f"{session}.1"))["output"] == "once"
    keyed = {"key": f"k-{session}", "input": "echo alone"}
    await lost("start_run", **keyed)
    run = (await again("start_run", **keyed)).body["run"]
    assert (await outcome(one, run))["output"] == "alone"
    title = {"key": f"t-{session}", "session": session, "title": "named"}
    await lost("update_session", **title)
    await again("update_session", **title)
    assert await types(one, session) == [
        "session.opened",
        *("message.posted", "run.started", "run.ended", "session.updated"),
    ]


async def test_a76_a_caller_that_gives_up_leaves_a_run_that_ends_at_its_own_deadline(
    deployment: Deployment, session: str
) -> None:
    """How long the caller waits is his affair; the deadline is the agent's, and everybody sees the run until then."""
    one, two = deployment.apis
    hasty = {"model": "demo", "limits": {"timeout": 5.0}}
    assert (await one.ask("save_agent", name="hasty", version="v1", definition=hasty)).status == 201
    await opened(one, session, agent="hasty")
    async with httpx.AsyncClient(base_url=one.url, timeout=1.0, trust_env=False) as caller:
        with pytest.raises(httpx.ReadTimeout):
            await caller.post(f"/v1/sessions/{session}/messages?wait=60", json={"content": "[hang]"})
    run = f"{session}.1"

    async def at_work() -> bool:
        return run in [one["id"] for one in (await two.ask("list_runs", status="running")).body["items"]]

    await eventually(at_work, what="the run is in the list of those that are at work")
    ended = await outcome(two, run)
    assert (ended["status"], ended["error"]["code"]) == ("timed_out", "deadline_exceeded")
    shown = (await two.ask("get_run", run=run, after=ended["seq"])).body
    assert shown["deadline"] - shown["started_at"] == 5000
    assert (await one.ask("get_session", session=session)).body["status"] == "idle"
