"""A turn with two tool calls, a question and an approval, and one that delegates, whose runner is killed (-9) before
and after all it does.

Wherever that is, the run ends the same way: what must not happen twice has not, or is said to be uncertain; each call
has one result, the person was asked once, and there is one end, also of each child, and it is told once.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.asking import NoAnswer, Speaker, events, insist, opened, types
from tests.support.deployment import Deployment, plan
from tests.support.doomed import Doomed, Runners
from tests.support.nats import run_alone
from tests.support.waiting import eventually

from turnstream.broker.server import NatsServer

pytestmark = pytest.mark.system

PROMPT = (
    "[tool again {}][tool once {}]"
    '[tool conversation_ask_user {"question":"Which one?","choices":["left","right"]}][tool approved {}]'
    "[then][say all is done]"
)
DELEGATES = (
    '[delegate [wait 1s][tool again {}]][delegate echo beside {"wait":false}][tool again {}][then][say all is done]'
)
LINES = 40
"""More runs than there are points: each has a queue of its own."""
FAMILIES = 90
"""The same of runs that delegate."""
AT_ONCE = 8


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Runners]]:
    """An API and a projector, agents with a queue each, and what forks their runners."""
    folder = tmp_path_factory.mktemp("crashes")
    agents = folder / "agents"
    agents.mkdir()
    for name in [*(f"line-{n}" for n in range(LINES)), *(f"family-{n}" for n in range(FAMILIES))]:
        lines = (
            'model = "demo"',
            'tools = ["again", "once", "approved"]',
            "control = {ask_user = true, delegate = true}",
            f'queue = "{name}"',
        )
        (agents / f"{name}.toml").write_text("\n".join(lines))
    shared: dict[str, object] = {"agents_dir": agents, "modules": "tests.support.effects", "lease": 1.0}
    server = NatsServer(folder / "nats")
    run_alone(server.start())
    effects = {"EFFECTS": str(folder / "effects"), "PYTHONPATH": str(Path(__file__).parents[2])}
    names = ("api-1", "projector-1")
    made = plan(folder, server, *names, environments=dict.fromkeys(names, effects), **shared)
    settings = {f"TURNSTREAM_{name.upper()}": str(value) for name, value in made["api-1"].settings.items()}
    runners = Runners(folder, settings | effects)
    yield made, runners
    runners.clean_up()
    made.clean_up()


@pytest.fixture
async def beds(ground: tuple[Deployment, Runners]) -> AsyncIterator[tuple[Deployment, Runners]]:
    async with ground[0].entered():
        yield ground


async def carried_out(
    deployment: Deployment, runners: Runners, queue: str, session: str, at: int, prompt: str = PROMPT
) -> "Story":
    """One turn whose runner dies at this point, and is followed by one that lives."""
    api = deployment.apis[0]
    first = runners.start(queue, at)
    await opened(api, session, agent=queue, policy={"titles": "client"})
    posted = await insist([api], "post_message", session=session, content=prompt, message_id="m1")
    run = posted.body["run"]
    second: Doomed | None = None
    answered = False

    async def over() -> bool:
        nonlocal second, answered
        if at and second is None and first.dead:
            second = runners.start(queue, 0)
        try:
            state = (await api.ask("wait_run", run=run, timeout=0)).body.get("status")
        except NoAnswer:
            return False
        if state == "waiting" and prompt == PROMPT and not answered:
            await answer(deployment, run)
            answered = True
        return state in ("completed", "failed", "cancelled", "timed_out") and await _told(api, session)

    await eventually(over, 120, every=0.05, what=f"the end of {run}, whose runner dies at point {at}")
    story = Story(await events(api, session), first)
    for child in story.of("child.started"):
        story.children.append(Story(await events(api, child["child_session"]), first))
    (second or first).kill()
    return story


async def _told(api: Speaker, session: str) -> bool:
    """Whether every child has ended, and says itself that this was told."""
    stored = await events(api, session)
    children = [event["data"]["child_session"] for event in stored if event["type"] == "child.started"]
    return all([await types(api, child) and (await types(api, child))[-1] == "run.reported" for child in children])


async def answer(deployment: Deployment, run: str) -> None:
    api = deployment.apis[0]
    for number, said in ((1, {"answer": "left"}), (2, {"approved": True})):
        told = await insist([api], "answer_run", run=run, request=f"{run}.q{number}", **said)
        assert told.status in (200, 202), told


class Story:
    """What the log tells of one turn."""

    def __init__(self, stored: list[dict[str, Any]], first: Doomed) -> None:
        self.stored = stored
        self.first = first
        self.children: list[Story] = []

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event["data"] for event in self.stored if event["type"] == kind]

    @property
    def results(self) -> dict[str, str]:
        names = {call["id"]: call["name"] for reply in self.of("model.replied") for call in reply["tool_calls"]}
        found = Counter(returned["call_id"] for returned in self.of("tool.returned"))
        assert set(found) == set(names) and set(found.values()) == {1}, "one result for each call"
        return {names[returned["call_id"]]: returned["status"] for returned in self.of("tool.returned")}


async def test_s18_s19_a27_a64_a72_killed_at_any_point_a_turn_ends_the_same_way(
    beds: tuple[Deployment, Runners],
) -> None:
    deployment, runners = beds
    whole = await carried_out(deployment, runners, "line-0", "s18-0", 0)
    points = whole.first.points
    appended = ["run.started", "model.replied", "tool.returned", "run.waiting", "run.ended"]
    assert {f"{when} {kind}" for when in ("before", "after") for kind in appended} <= set(points)
    assert 30 <= len(points) < LINES, points
    assert set(whole.results.values()) == {"ok"}
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(at: int) -> Story:
        async with slots:
            return await carried_out(deployment, runners, f"line-{at}", f"s18-{at}", at)

    stories = await asyncio.gather(*(one(at) for at in range(1, len(points) + 1)))
    effects = Counter(
        tuple(line.split()[:2]) for line in (runners.folder / "effects").read_text().splitlines() if line.strip()
    )
    for at, story in enumerate(stories, 1):
        where = f"killed at point {at}, {points[at - 1]}"
        (ended,) = story.of("run.ended")
        assert (ended["status"], ended["content"]) == ("completed", "all is done"), where
        assert len(story.of("run.waiting")) == 1, where
        assert len(story.of("request.answered")) == 2, where
        assert len(story.of("model.replied")) == 1, where
        results = story.results
        assert results["again"] == results["conversation_ask_user"] == "ok", where
        for name in ("once", "approved"):
            done = effects[f"s18-{at}", name]
            assert done <= 1, f"{where}: {name} happened {done} times"
            assert results[name] == "uncertain" or (results[name] == "ok" and done == 1), where
        assert len(story.of("run.started")) >= 2, where
    await deployment.check()


@pytest.mark.slow
async def test_a47_s37_killed_at_any_point_a_run_that_delegates_ends_the_same_way_and_so_do_its_children(
    beds: tuple[Deployment, Runners],
) -> None:
    deployment, runners = beds
    whole = await carried_out(deployment, runners, "family-0", "a47-0", 0, DELEGATES)
    points = whole.first.points
    appended = ("child.started", "message.posted", "run.waiting", "child.ended", "run.reported")
    assert {f"{when} {kind}" for when in ("before", "after") for kind in appended} <= set(points)
    assert 45 <= len(points) < FAMILIES, points
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(at: int) -> Story:
        async with slots:
            return await carried_out(deployment, runners, f"family-{at}", f"a47-{at}", at, DELEGATES)

    stories = await asyncio.gather(*(one(at) for at in range(1, len(points) + 1)))
    for at, story in enumerate(stories, 1):
        reached = story.first.points
        where = f"killed at point {at}, {reached[-1]}"
        assert story.first.dead and len(reached) <= at, where
        (ended,) = story.of("run.ended")
        assert (ended["status"], ended["content"]) == ("completed", "all is done"), where
        assert set(story.results.values()) == {"ok"}, where
        assert len(story.of("run.waiting")) <= 1, where
        intents = [(intent["k"], intent["child_session"]) for intent in story.of("child.started")]
        assert intents == [(1, f"a47-{at}--1-1"), (2, f"a47-{at}--1-2")], where
        told = sorted((end["k"], end["status"]) for end in story.of("child.ended"))
        assert told == [(1, "completed"), (2, "completed")], where
        for child, said in zip(story.children, ("again returned again", "beside"), strict=True):
            assert len(child.of("message.posted")) == len(child.of("run.reported")) == 1, where
            (end,) = child.of("run.ended")
            assert (end["status"], end["content"]) == ("completed", said), where
    await deployment.check()


@pytest.mark.parametrize(("n", "point"), [(1, "after child.started"), (2, "before message.posted")])
async def test_s58_a_starter_frozen_between_intent_and_opening_of_a_child_comes_too_late(
    beds: tuple[Deployment, Runners], n: int, point: str
) -> None:
    deployment, runners = beds
    api, (session, queue) = deployment.apis[0], (f"s58-{n}", f"family-{FAMILIES - n}")
    frozen = runners.start(queue, point)
    await opened(api, session, agent=queue, policy={"titles": "client"})
    posted = await insist([api], "post_message", session=session, content="[delegate echo hi]", message_id="m1")
    await eventually(lambda: frozen.frozen, 60, what="the frozen starter")
    assert (await api.ask("get_session", session=f"{session}--1-1")).status == 404
    assert (await api.ask("cancel_run", run=posted.body["run"])).body["state"] == "requested"
    other = runners.start(queue, 0)

    async def over() -> bool:
        mine, its = await types(api, session), await types(api, f"{session}--1-1")
        return {"child.ended", "run.ended"} <= set(mine) and "run.reported" in its

    await eventually(over, 60, what="the end of the run and of its child")
    before = {name: await events(api, name) for name in (session, f"{session}--1-1")}
    other.kill()
    frozen.thaw()
    later = f"{session}-later"
    await opened(api, later, agent=queue)
    await insist([api], "post_message", session=later, content="echo awake", message_id="m1")

    async def awake() -> bool:
        return (await api.ask("wait_run", run=f"{later}.1", timeout=0)).body["status"] == "completed"

    await eventually(awake, 60, what="the thawed runner works on")
    after = {name: await events(api, name) for name in before}
    assert after == before, "nothing of what the frozen one meant to do is stored"
    parent, child = (Story(stored, frozen) for stored in after.values())
    assert [end["status"] for end in (*parent.of("run.ended"), *child.of("run.ended"))] == ["cancelled"] * 2
    assert child.of("run.started") == [] and len(child.of("message.posted")) == 1
    frozen.kill()
    await deployment.check()
