"""The checklist through drives: what is stored, and what becomes of it where a runner dies over it."""

import asyncio
import json
from typing import Any

import pytest
from tests.support.driving import World, asks_once, call

from turnstream.agents import Agent, Control
from turnstream.session.events import UPDATE_PLAN, Fact, PlanChanged, ToolReturned, Unknown
from turnstream_runner.checklist import ITEMS_MAX, TEXT_MAX

ITEMS = [{"text": "Boil water", "status": "completed"}, {"text": "Pour", "id": "p"}]


def world(items: object = ITEMS, **more: object) -> World:
    keeps = call(UPDATE_PLAN, json.dumps({"items": items, **more}), id="c")
    agent = Agent(name="default", model="scripted", control=Control(plan=True))
    return World(asks_once(keeps), agent=agent)


async def of(here: World, kind: type) -> list[Any]:
    facts: list[Fact | Unknown] = await here.facts()
    return [fact for fact in facts if isinstance(fact, kind)]


async def test_it_is_a_fact_before_the_calls_result() -> None:
    here = world()
    await here.post()
    await here.drive().outcome()
    types = await here.types()
    assert types.index("plan.changed") < types.index("tool.returned")
    (plan,) = await of(here, PlanChanged)
    assert [(item.id, item.text, item.status) for item in plan.items] == [
        ("1", "Boil water", "completed"),
        ("p", "Pour", "pending"),
    ]
    (returned,) = await of(here, ToolReturned)
    assert (returned.call_id, returned.status) == ("c", "ok")


async def test_a_runner_that_dies_between_the_two_leaves_one_result_and_the_same_list() -> None:
    here = world()
    await here.post()
    append = here.log.append

    async def dies(key: Any, decision: Any, expected: int) -> int:
        if isinstance(decision.event.data, ToolReturned):
            await dead.wait()
        return await append(key, decision, expected)

    dead = asyncio.Event()
    here.log.append = dies  # pyright: ignore[reportAttributeAccessIssue]
    running = here.drive()
    await here.until_stored("plan.changed")
    await running.die()
    here.log.append = append  # pyright: ignore[reportAttributeAccessIssue]
    assert not await of(here, ToolReturned)
    await here.drive(delivery=2).outcome()
    first, second = await of(here, PlanChanged)
    assert (first.items, first.attempt, second.attempt) == (second.items, 1, 2)
    assert len(await of(here, ToolReturned)) == 1
    assert (await here.types())[-1] == "run.ended"


@pytest.mark.parametrize(
    ("items", "more", "why"),
    [
        ("all", {}, "array"),
        ([{"mood": "good"}], {}, "mood"),
        ([{"text": "x", "status": "maybe"}], {}, "status"),
        ([{"text": "x" * (TEXT_MAX + 1)}], {}, str(TEXT_MAX)),
        ([{"text": "x"}] * (ITEMS_MAX + 1), {}, str(ITEMS_MAX)),
        (ITEMS, {"mood": "good"}, "mood"),
    ],
)
async def test_what_is_no_checklist_is_an_error_that_the_model_sees(items: object, more: Any, why: str) -> None:
    here = world(items, **more)
    await here.post()
    await here.drive().outcome()
    (returned,) = await of(here, ToolReturned)
    assert returned.status == "error" and why in returned.error
    assert not await of(here, PlanChanged)


async def test_an_agent_that_keeps_none_has_no_such_tool() -> None:
    here = World(asks_once(call(UPDATE_PLAN, json.dumps({"items": ITEMS}), id="c")))
    await here.post()
    await here.drive().outcome()
    (returned,) = await of(here, ToolReturned)
    assert returned.status == "error" and UPDATE_PLAN in returned.error
