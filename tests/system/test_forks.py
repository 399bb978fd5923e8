"""Forks with real processes: whoever writes, and whoever is killed meanwhile, each is an exact prefix of its source."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tests.support.asking import NoAnswer, Speaker, events, insist, opened, outcome, say
from tests.support.deployment import Deployment
from tests.support.doomed import Ground, in_turn, laid_out
from tests.support.waiting import eventually
from tests.system.test_cli import Home, home

from turnstream.session.events import Blob
from turnstream.wire.blobs import BlobLost, Blobs

pytestmark = pytest.mark.system
__all__ = ["home"]

LINES = 24
"""More forks than a small one has appends: each has a queue of its own."""
HANG = "[hang]"
QUESTION = '[tool conversation_ask_user {"question":"which one?"}]'


@pytest.fixture(params=["http", "nats"])
def speaker(request: pytest.FixtureRequest, deployment: Deployment) -> Speaker:
    return deployment.apis[0] if request.param == "http" else deployment.nats


async def forked(speaker: Speaker, source: str, **fields: Any) -> dict[str, Any]:
    """A fork that is whole."""
    answer = await speaker.ask("fork_session", session=source, **{"wait": 60.0, **fields})
    assert answer.status in (200, 201), answer
    assert answer.body["whole"]
    return answer.body


def told(stored: list[dict[str, Any]], session: str) -> list[dict[str, Any]]:
    """What events say, whichever session they are of: all but ids, keys, numbers, and what says that one is a copy; of
    blobs all but their names."""
    own = {"seq", "id", "source", "idempotencykey", "bodydigest", "copyof", "copytime"}
    found = json.loads(json.dumps(stored).replace(f'"{session}.', '".'))
    for event in found:
        if blob := event["data"].get("blob"):
            blob["name"] = ""
    return [{name: value for name, value in event.items() if name not in own} for event in found]


async def check_prefix(speaker: Speaker, fork: dict[str, Any]) -> None:
    """Its copies are the source's events up to the named one, in order, each once, said and dated as there; what it has
    beside them ends what was live."""
    source, through = fork["from"]["session"], fork["from"]["seq"]
    prefix = [event for event in await events(speaker, source) if event["seq"] <= through]
    stored = await events(speaker, fork["session"])
    copies = [event for event in stored if "copyof" in event]
    assert [event["copyof"] for event in copies] == [f"{source}/{event['seq']}" for event in prefix]
    assert told(copies, fork["session"]) == told(prefix, source)
    assert stored[0]["type"] == "session.opened"
    assert stored[0]["data"]["forked_from"]["through"] == through
    assert stored[1 : len(copies) + 1] == copies
    ends = stored[len(copies) + 1 :]
    last = next(place for place, event in enumerate(ends) if event["type"] == "session.forked")
    assert {(event["type"], event["data"]["reason"]) for event in ends[:last]} <= {("run.ended", "forked")}
    assert ends[last]["data"] == {"events": len(prefix)}


# --- while others write -------------------------------------------------------------------------------------------


async def test_a62_forks_made_while_others_write_are_exact_prefixes(deployment: Deployment, session: str) -> None:
    ways: list[Speaker] = [*deployment.apis, deployment.nats]
    await opened(ways[0], session, policy={"on_busy": "queue"})
    over = asyncio.Event()

    async def writing(speaker: Speaker, name: str) -> None:
        for n in itertools.count():
            if over.is_set():
                return
            kind = "notice" if n % 3 else "message"
            await speaker.ask(
                "post_message", session=session, content=f"echo {name} {n}", kind=kind, message_id=f"{name}-{n}"
            )

    async def forking(speaker: Speaker, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for n in range(6):
            # now, and at a sequence that is named: the last one that whoever forks has seen, or a place before it
            last = (await speaker.ask("read_queue", session=session)).body["seq"]
            at = {} if n % 2 else {"at": last - n}
            found.append(await forked(speaker, session, key=f"{name}-{n}", **at))
            if at:
                assert found[-1]["from"]["seq"] <= last - n
        return found

    writers = [asyncio.create_task(writing(speaker, f"w{n}")) for n, speaker in enumerate(ways)]
    forks = await asyncio.gather(*(forking(speaker, f"f{n}") for n, speaker in enumerate(ways)))
    over.set()
    await asyncio.gather(*writers)
    for fork in itertools.chain.from_iterable(forks):
        await check_prefix(ways[0], fork)
    await deployment.check()


async def test_one_fork_asked_for_many_times_at_once_is_one(deployment: Deployment, session: str) -> None:
    one, two = deployment.apis
    await opened(one, session)
    await say(one, session, "echo Hello", wait=30)
    made = await asyncio.gather(
        *(speaker.ask("fork_session", session=session, key="k", wait=60.0) for speaker in (one, two) * 10)
    )
    assert len({str(answer.body) for answer in made}) == 1
    assert sorted(answer.status for answer in made) == [*[200] * 19, 201]
    await check_prefix(one, made[0].body)


# --- what is live, and what it leaves behind ----------------------------------------------------------------------


async def test_a_fork_of_a_session_that_waits_goes_its_own_way(speaker: Speaker, session: str) -> None:
    await opened(speaker, session, policy={"on_busy": "queue"})
    await say(speaker, session, "echo before", wait=30)
    waiting = (await say(speaker, session, QUESTION, wait=30))["run"]
    fork = await forked(speaker, session)
    await check_prefix(speaker, fork)
    name = fork["session"]
    assert [run["status"] for run in (await listed(speaker, name))] == ["cancelled", "completed"]
    late = await speaker.ask("answer_run", run=f"{name}.2", answer="left")
    assert (late.status, late.body["code"]) == (409, "request_closed")
    again = await say(speaker, name, "echo another way", wait=30)
    assert (again["run"], again["outcome"]["output"]) == (f"{name}.3", "another way")
    assert (await speaker.ask("answer_run", run=waiting, answer="left")).status == 202
    assert (await outcome(speaker, waiting))["status"] == "completed"
    second = await forked(speaker, name, at=fork["seq"])
    await check_prefix(speaker, second)


async def listed(speaker: Speaker, session: str) -> list[dict[str, Any]]:
    """Its runs in the views, once these show everything."""
    last = (await speaker.ask("read_queue", session=session)).body["seq"]
    return (await speaker.ask("list_runs", session=session, after=last)).body["items"]


async def test_a_fork_of_a_session_that_runs_leaves_it_alone(deployment: Deployment, session: str) -> None:
    api = deployment.apis[0]
    await opened(api, session)
    run = (await say(api, session, HANG))["run"]

    async def running() -> bool:
        return (await api.ask("wait_run", run=run, timeout=0)).body["status"] == "running"

    await eventually(running, 60, what=f"the start of {run}")
    fork = await forked(api, session)
    await check_prefix(api, fork)
    assert await running()
    assert (await api.ask("get_session", session=fork["session"], after=fork["seq"])).body["status"] == "idle"
    assert (await api.ask("cancel_run", run=run)).status == 202
    await deployment.check()


async def test_a62_what_lies_beside_the_log_survives_its_source_and_goes_with_the_fork(
    deployment: Deployment, session: str
) -> None:
    api = deployment.apis[0]
    assert deployment.broker
    blobs = Blobs(deployment.broker)
    text = "x" * 300_000
    await opened(api, session, policy={"delete": {"mode": "erase", "active": "cancel"}})
    await say(api, session, f'[tool repeat {{"text": "{text[:1000]}", "times": 600}}] [then] [say done]', wait=60)
    fork = await forked(api, session)
    found = [Blob(**event["data"]["blob"]) for event in await events(api, fork["session"]) if event["data"].get("blob")]
    assert found
    assert (await api.ask("delete_session", session=session, wait=60.0)).status == 204
    for blob in found:
        assert blob.name.startswith(f"default/{fork['session']}/")
        assert len(await blobs.get(blob)) == blob.size
    assert (await say(api, fork["session"], "echo still here", wait=30))["outcome"]["output"] == "still here"
    assert (await api.ask("delete_session", session=fork["session"], mode="erase", wait=60.0)).status == 204
    for blob in found:
        with pytest.raises(BlobLost):
            await blobs.get(blob)
    await deployment.check()


# --- whoever is killed --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    agents = {f"line-{n}.toml": f'model = "demo"\nqueue = "line-{n}"\n' for n in range(LINES)}
    with laid_out(tmp_path_factory.mktemp("forks"), agents, "api-1", "projector-1", event_max=8192) as ground:
        yield ground


@pytest.fixture
async def ground(made: Ground) -> AsyncIterator[Ground]:
    async with made.entered():
        yield made


async def made_whole(ground: Ground, line: int, at: int) -> list[str]:
    """A fork whose runner dies at this point, and is followed by one that lives; the points that there were."""
    queue, session = f"line-{line}", f"a62-{line}"
    api, runners = ground.api, ground.runners
    await opened(api, session, agent=queue, policy={"on_busy": "queue"})
    first = runners.start(queue, 0)
    await say(api, session, f"echo {'x' * 6000}", wait=60)
    first.kill()
    await say(api, session, "echo not begun")
    doomed = runners.start(queue, at)
    asking = asyncio.create_task(api.ask("fork_session", session=session, id=f"{session}-fork", wait=60.0))
    if at:
        await eventually(lambda: doomed.dead or asking.done(), 60, what=f"the death of a runner at point {at}")
    heir = runners.start(queue, 0) if at else doomed
    answer = await asking
    assert answer.status == 201, (at, answer)
    await check_prefix(api, answer.body)
    for runner in (doomed, heir):
        runner.kill()
    return doomed.points


async def test_a62_killed_at_any_append_a_fork_is_made_whole_by_the_next(ground: Ground) -> None:
    # What else that runner does is not of the fork: the turn that had not begun there goes on in the source.
    points = [point for point in await made_whole(ground, 0, 0) if "model call" not in point]
    assert {"before a blob", "after a blob", "before session.forked", "after run.ended"} <= set(points)
    await in_turn(lambda at: made_whole(ground, at, at), range(1, min(len(points), LINES - 1) + 1))
    await ground.deployment.check()


async def test_a62_an_api_that_is_killed_leaves_a_fork_that_another_answers_for(
    deployment: Deployment, session: str
) -> None:
    one, two = deployment.apis
    await opened(one, session)
    for n in range(30):
        await one.ask("post_message", session=session, content=f"note {n}", kind="notice")
    for n in range(4):
        asking = asyncio.create_task(one.ask("fork_session", session=session, key=f"k{n}", wait=60.0))
        await asyncio.sleep(0.004 * n)
        deployment["api-1"].kill()
        try:
            await asking
        except NoAnswer:
            pass
        answer = await insist([two], "fork_session", session=session, key=f"k{n}", wait=60.0)
        assert answer.status in (200, 201), answer
        await check_prefix(two, answer.body)
        await deployment["api-1"].restart()
    await deployment.check()


# --- the command line ---------------------------------------------------------------------------------------------


async def test_a_session_is_forked_from_the_command_line(home: Home) -> None:
    await home.dev()
    await home.run("send", "s1", "echo one")
    await home.run("send", "s1", "echo two")
    said = await home.run("fork", "s1", "--as", "f1")
    assert "session f1 is a fork of s1 up to #" in said.out
    assert "one" in (await home.run("history", "f1")).out
    again = await home.run("fork", "s1", "--as", "f1", "--at", "1", expect=4)
    assert "already_exists" in again.err
    beyond = await home.run("fork", "s1", "--at", "999999", expect=4)
    assert "the last event of session s1" in beyond.err
