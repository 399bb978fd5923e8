"""A turn with two tool calls, a question and an approval, and one that delegates, whose runner is killed (-9) before
and after all it does.

Wherever that is, the run ends the same way: what must not happen twice has not, or is said to be uncertain; each call
has one result, the person was asked once, and there is one end, also of each child, and it is told once.
"""

from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.support.asking import events, insist, opened, types
from tests.support.doomed import Ground, Told, in_turn, laid_out
from tests.support.waiting import eventually

pytestmark = pytest.mark.system

PROMPT = (
    "[tool again {}][tool once {}]"
    '[tool conversation_ask_user {"question":"Which one?","choices":["left","right"]}][tool approved {}]'
    "[then][say all is done]"
)
ANSWERS = {"question": {"answer": "left"}, "approval": {"approved": True}}
DELEGATES = (
    '[delegate [wait 1s][tool again {}]][delegate echo beside {"wait":false}][tool again {}][then][say all is done]'
)
LINES = 40
"""More runs than there are points: each has a queue of its own."""
FAMILIES = 90
"""The same of runs that delegate."""


def agent(queue: str) -> str:
    lines = (
        'model = "demo"',
        'tools = ["again", "once", "approved"]',
        "control = {ask_user = true, delegate = true}",
        f'queue = "{queue}"',
    )
    return "\n".join(lines)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    queues = [*(f"line-{n}" for n in range(LINES)), *(f"family-{n}" for n in range(FAMILIES))]
    agents = {f"{queue}.toml": agent(queue) for queue in queues}
    with laid_out(tmp_path_factory.mktemp("crashes"), agents, "api-1", "projector-1") as ground:
        yield ground


@pytest.fixture
async def ground(made: Ground) -> AsyncIterator[Ground]:
    async with made.entered():
        yield made


def results(told: Told) -> dict[str, str]:
    names = {call["id"]: call["name"] for reply in told.of("model.replied") for call in reply["tool_calls"]}
    found = Counter(returned["call_id"] for returned in told.of("tool.returned"))
    assert set(found) == set(names) and set(found.values()) == {1}, "one result for each call"
    return {names[returned["call_id"]]: returned["status"] for returned in told.of("tool.returned")}


async def test_s18_s19_a27_a64_a72_killed_at_any_point_a_turn_ends_the_same_way(ground: Ground) -> None:
    whole = await ground.carried_out("line-0", "s18-0", 0, PROMPT, ANSWERS)
    points = whole.first.points
    appended = ["run.started", "model.replied", "tool.returned", "run.waiting", "run.ended"]
    assert {f"{when} {kind}" for when in ("before", "after") for kind in appended} <= set(points)
    assert 30 <= len(points) < LINES, points
    assert set(results(whole).values()) == {"ok"}

    async def killed(at: int) -> Told:
        return await ground.carried_out(f"line-{at}", f"s18-{at}", at, PROMPT, ANSWERS)

    stories = await in_turn(killed, range(1, len(points) + 1))
    effects = ground.effects
    for at, story in enumerate(stories, 1):
        where = f"killed at point {at}, {points[at - 1]}"
        (ended,) = story.of("run.ended")
        assert (ended["status"], ended["content"]) == ("completed", "all is done"), where
        assert len(story.of("run.waiting")) == 1, where
        assert len(story.of("request.answered")) == 2, where
        assert len(story.of("model.replied")) == 1, where
        came_to = results(story)
        assert came_to["again"] == came_to["conversation_ask_user"] == "ok", where
        for name in ("once", "approved"):
            done = effects[f"s18-{at}", name]
            assert done <= 1, f"{where}: {name} happened {done} times"
            assert came_to[name] == "uncertain" or (came_to[name] == "ok" and done == 1), where
        assert len(story.of("run.started")) >= 2, where
    await ground.deployment.check()


async def test_a47_s37_killed_at_any_point_a_run_that_delegates_ends_the_same_way_and_so_do_its_children(
    ground: Ground,
) -> None:
    whole = await ground.carried_out("family-0", "a47-0", 0, DELEGATES)
    points = whole.first.points
    appended = ("child.started", "message.posted", "run.waiting", "child.ended", "run.reported")
    assert {f"{when} {kind}" for when in ("before", "after") for kind in appended} <= set(points)
    assert 45 <= len(points) < FAMILIES, points

    async def killed(at: int) -> Told:
        return await ground.carried_out(f"family-{at}", f"a47-{at}", at, DELEGATES)

    stories = await in_turn(killed, range(1, len(points) + 1))
    for at, story in enumerate(stories, 1):
        reached = story.first.points
        where = f"killed at point {at}, {reached[-1]}"
        assert story.first.dead and len(reached) <= at, where
        (ended,) = story.of("run.ended")
        assert (ended["status"], ended["content"]) == ("completed", "all is done"), where
        assert set(results(story).values()) == {"ok"}, where
        assert len(story.of("run.waiting")) <= 1, where
        intents = [(intent["k"], intent["child_session"]) for intent in story.of("child.started")]
        assert intents == [(1, f"a47-{at}--1-1"), (2, f"a47-{at}--1-2")], where
        told = sorted((end["k"], end["status"]) for end in story.of("child.ended"))
        assert told == [(1, "completed"), (2, "completed")], where
        for child, said in zip(story.children, ("again returned again", "beside"), strict=True):
            assert len(child.of("message.posted")) == len(child.of("run.reported")) == 1, where
            (end,) = child.of("run.ended")
            assert (end["status"], end["content"]) == ("completed", said), where
    await ground.deployment.check()


@pytest.mark.parametrize(("n", "point"), [(1, "after child.started"), (2, "before message.posted")])
async def test_s58_a_starter_frozen_between_intent_and_opening_of_a_child_comes_too_late(
    ground: Ground, n: int, point: str
) -> None:
    api, (session, queue) = ground.api, (f"s58-{n}", f"family-{FAMILIES - n}")
    frozen = ground.runners.start(queue, point)
    await opened(api, session, agent=queue, policy={"titles": "client"})
    posted = await insist([api], "post_message", session=session, content="[delegate echo hi]", message_id="m1")
    await eventually(lambda: frozen.frozen, 60, what="the frozen starter")
    assert (await api.ask("get_session", session=f"{session}--1-1")).status == 404
    assert (await api.ask("cancel_run", run=posted.body["run"])).body["state"] == "requested"
    other = ground.runners.start(queue, 0)

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
    parent, child = (Told(stored, frozen) for stored in after.values())
    assert [end["status"] for end in (*parent.of("run.ended"), *child.of("run.ended"))] == ["cancelled"] * 2
    assert child.of("run.started") == [] and len(child.of("message.posted")) == 1
    frozen.kill()
    await ground.deployment.check()
