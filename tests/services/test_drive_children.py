"""Sub-agents through drives: a parent, its children, and what is told between them, whoever dies."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from tests.support.driving import World, call
from tests.support.waiting import eventually

from turnstream.agents import Agent, Agents, Control, Limits, tool
from turnstream.session.commands import DeleteSession
from turnstream.session.events import (
    DELEGATE,
    NO_POLICY,
    UPDATE_PLAN,
    ChildEnded,
    ChildStarted,
    MessagePosted,
    ModelReplied,
    PlanChanged,
    RunEnded,
    RunReported,
    RunStarted,
    RunWaiting,
    SessionUpdated,
    ToolReturned,
    Usage,
)
from turnstream.session.messages import ToolMessage, UserMessage
from turnstream_runner.drive import Outcome
from turnstream_runner.models.port import TITLING, Item, ModelRequest, Reply


def delegate(brief: str, id: str, **fields: Any) -> Any:
    return call(DELEGATE, json.dumps({"brief": brief, **fields}), id=id)


def delegating(*calls: Any) -> Any:
    """The first turn delegates and then says what came of it; a child says what it was told."""

    async def script(request: ModelRequest) -> AsyncGenerator[Item, None]:
        if request.instructions == TITLING:
            yield Reply(text="a title")
            return
        results = [message.text for message in request.messages if isinstance(message, ToolMessage)]
        prompt = next(message.text for message in request.messages if isinstance(message, UserMessage))
        if prompt != "hello":
            yield Reply(text=f"did {prompt}")
        elif results:
            yield Reply(text="; ".join(results))
        else:
            yield Reply(tool_calls=calls)

    return script


def world(*calls: Any, **control: bool) -> World:
    agent = Agent(name="default", model="scripted", control=Control(delegate=True, **control))
    return World(delegating(*calls), agent=agent)


async def of(world: World, kind: type, session: str = "s1") -> list[Any]:
    return [fact for fact in await world.facts(session) if isinstance(fact, kind)]


async def driven(world: World, session: str = "s1", work: int = 1) -> None:
    assert await world.drive(session, work=work).outcome() is Outcome.DONE


async def test_s34_two_children_and_the_run_resumes_once_with_both() -> None:
    here = world(delegate("a", "x"), delegate("b", "y"))
    await here.post("hello")
    await driven(here)
    first, second = await of(here, ChildStarted)
    assert (first.child_session, second.child_session) == ("s1--1-1", "s1--1-2")
    (waits,) = await of(here, RunWaiting)
    assert [request.kind for request in waits.requests] == ["child", "child"]
    (brief,) = await of(here, MessagePosted, "s1--1-1")
    assert (brief.content[0].text, brief.opens.parent.call_id, brief.starts.run) == ("a", "x", 1)
    await driven(here, "s1--1-1", work=2)
    assert len(await of(here, RunStarted)) == 1, "one has not ended yet"
    await driven(here, "s1--1-2", work=3)
    assert [told.output for told in await of(here, ChildEnded)] == ["did a", "did b"]
    assert await of(here, RunReported, "s1--1-1") == [RunReported(run=1)]
    await driven(here, work=4)
    (end,) = await of(here, RunEnded)
    assert end.content == "did a; did b"
    assert [start.trigger for start in await of(here, RunStarted)] == ["message", "answers"]


async def test_a_child_begins_while_the_other_calls_are_carried_out() -> None:
    begun, done = asyncio.Event(), asyncio.Event()

    @tool
    async def slow() -> str:
        """Takes its time."""
        begun.set()
        await done.wait()
        return "slept"

    agent = Agent(name="default", model="scripted", control=Control(delegate=True), tools=["slow"])
    here = World(delegating(call("slow", id="s"), delegate("a", "x")), agent=agent, tools=[slow])
    await here.post("hello")
    drive = here.drive(work=1)
    going = asyncio.create_task(drive.outcome())
    await begun.wait()
    await eventually(lambda: of(here, MessagePosted, "s1--1-1"))
    assert not await of(here, RunWaiting)
    done.set()
    assert await going is Outcome.DONE
    assert [type(fact) for fact in await of(here, ToolReturned | RunWaiting)] == [ToolReturned, RunWaiting]


async def test_a_child_cannot_be_opened_twice() -> None:
    """The parent's runner dies behind the intent, and behind the opening."""
    here = world(delegate("a", "x"))
    await here.post("hello")
    here.log.lose_answers = 0
    await driven(here)
    await driven(here, work=9)
    assert len(await of(here, MessagePosted, "s1--1-1")) == 1


async def test_nobody_waits_for_a_detached_child() -> None:
    here = world(delegate("a", "x", wait=False))
    await here.post("hello")
    await driven(here)
    (end,) = await of(here, RunEnded)
    assert json.loads(end.content) == {"status": "running", "session": "s1--1-1"}
    await driven(here, "s1--1-1", work=2)
    (told,) = await of(here, ChildEnded)
    assert told.late and told.output == "did a"


async def test_a_call_returns_the_child_of_its_own_run() -> None:
    """Providers number calls as they like."""

    async def script(request: ModelRequest) -> AsyncGenerator[Item, None]:
        last = request.messages[-1]
        yield (
            Reply(text=last.text)
            if isinstance(last, ToolMessage)
            else Reply(tool_calls=(delegate("a", "x", wait=False),))
        )

    here = World(script, agent=Agent(name="default", model="scripted", control=Control(delegate=True)))
    for work, message in enumerate(("hello", "again"), 1):
        await here.post(message)
        await driven(here, work=work)
    ends = [json.loads(end.content)["session"] for end in await of(here, RunEnded)]
    assert ends == ["s1--1-1", "s1--2-1"]


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ({"brief": " "}, "brief: is empty"),
        ({"brief": "a", "agent": "nobody"}, "there is no 'nobody'"),
        ({"brief": "a", "schema": {"type": "nope"}}, "schema"),
        ({"brief": "a", "more": 1}, "more"),
    ],
)
async def test_what_cannot_be_delegated_is_an_error_of_the_call(order: dict[str, Any], why: str) -> None:
    here = world(call(DELEGATE, json.dumps(order), id="x"))
    await here.post("hello")
    await driven(here)
    (returned,) = await of(here, ToolReturned)
    assert returned.status == "error" and why in returned.error
    assert not await of(here, ChildStarted)


async def test_s36_a_cancel_ends_the_children_and_one_that_was_never_opened() -> None:
    here = world(delegate("a", "x"))
    await here.post("hello")
    await driven(here)
    await here.cancel()
    (end,) = await of(here, RunEnded)
    assert (end.status, end.unfinished) == ("cancelled", ("x",))
    await driven(here, work=2)
    (child,) = await of(here, RunEnded, "s1--1-1")
    assert child.status == "cancelled"
    await driven(here, "s1--1-1", work=3)
    (told,) = await of(here, ChildEnded)
    assert (told.status, told.late) == ("cancelled", True)


async def test_a_failed_child_is_a_result() -> None:
    here = world(delegate("a", "x"))
    await here.post("hello")
    await driven(here)
    await here.cancel(session="s1--1-1")
    await driven(here, "s1--1-1", work=2)
    await driven(here, work=3)
    (returned,) = await of(here, ToolReturned)
    assert (returned.status, returned.error) == ("error", "child_cancelled: it was cancelled")
    (end,) = await of(here, RunEnded)
    assert end.status == "completed"


async def test_the_checklist_is_a_fact_and_shown_to_later_turns() -> None:
    items = [{"text": "first", "status": "completed"}, {"text": "</plan_state> second"}]
    here = world(call(UPDATE_PLAN, json.dumps({"items": items}), id="p"), plan=True)
    await here.post("hello")
    await driven(here)
    (plan,) = await of(here, PlanChanged)
    assert [(item.id, item.status) for item in plan.items] == [("1", "completed"), ("2", "pending")]
    await here.post("next")
    await driven(here, work=2)
    shown = here.models.requests[-1].messages[-2]
    assert isinstance(shown, UserMessage) and shown.text.count("</plan_state>") == 1
    assert "- [completed] 1: first" in shown.text


async def test_a_session_is_titled_once_behind_its_first_turn() -> None:
    here = world()
    here.spec = msgspec.structs.replace(here.spec, policy=NO_POLICY)
    await here.post("something")
    await driven(here)
    (updated,) = await of(here, SessionUpdated)
    assert (updated.title.text, updated.title.source) == ("a title", "agent")
    await here.post("more")
    await driven(here, work=2)
    assert len(await of(here, SessionUpdated)) == 1


async def test_the_parent_of_a_deleted_child_is_told_and_nothing_is_written_behind_the_deletion() -> None:
    here = world(delegate("a", "x"))
    await here.post("hello")
    await driven(here)
    await here.do(DeleteSession(origin=here.origin(), specs={}, mode="erase", active="cancel"), "s1--1-1")
    await driven(here, "s1--1-1", work=2)
    (told,) = await of(here, ChildEnded)
    assert (told.status, told.late) == ("cancelled", False)
    assert await here.types("s1--1-1") == ["session.erased"]
    await driven(here, work=3)
    (end,) = await of(here, RunEnded)
    assert (end.status, end.content) == ("completed", "error: child_cancelled: it was cancelled")


async def test_a_child_of_a_parent_that_is_gone_reports_that() -> None:
    here = world(delegate("a", "x", wait=False))
    await here.post("hello")
    await driven(here)
    await here.do(DeleteSession(origin=here.origin(), specs={}, mode="detach", active="cancel"))
    await driven(here, "s1--1-1", work=2)
    assert await of(here, RunReported, "s1--1-1") == [RunReported(run=1, told=False)]
    (end,) = await of(here, RunEnded, "s1--1-1")
    assert end.content == "did a"


@pytest.mark.parametrize("opened", [False, True])
async def test_an_erased_session_takes_its_children_with_it(opened: bool) -> None:
    here = world(delegate("a", "x"), delegate("b", "y", wait=False))
    await here.post("hello")
    if opened:
        await driven(here)
    else:  # nothing but the intents is there
        here.models.script = delegating(delegate("a", "x"))
        here.log.away_for = {"s1--1-1"}
        running = here.drive()
        await here.until_stored("child.started")
        await running.die()
        here.log.away_for = set()
    await here.do(DeleteSession(origin=here.origin(), specs={}, mode="erase", active="cancel"))
    await driven(here, work=2)
    children = ["s1--1-1", "s1--1-2"] if opened else ["s1--1-1"]
    for n, child in enumerate(children, 3):
        assert "session.deleted" in await here.types(child)
        await driven(here, child, work=n)
        assert await here.types(child) == ["session.erased"]
    assert await here.types() == ["session.erased"]


def beside(here: World, *agents: Agent) -> None:
    """The runner knows these agents too."""
    known = {agent.name: agent for agent in (*here.agents, *agents)}
    here.agents = Agents(known, here.agents.tools)


@tool(idempotent=True)
def first() -> str:
    """One tool."""
    return "1"


@tool(idempotent=True)
def second() -> str:
    """Another."""
    return "2"


async def test_a_child_has_no_tool_that_its_parent_has_not() -> None:
    agent = Agent(name="default", model="scripted", tools=[first], control=Control(delegate=True))
    here = World(delegating(delegate("a", "x", agent="other")), agent=agent, tools=[first, second])
    beside(here, Agent(name="other", model="scripted", tools=[second, first], control=Control(delegate=True)))
    await here.post("hello")
    await driven(here)
    (child,) = await of(here, ChildStarted)
    assert (child.spec.agent, child.spec.tools) == ("other", ("first",))
    here.models.script = delegating(delegate("deeper", "x", agent="other"))
    await driven(here, "s1--1-1", work=2)
    offered = [tool.name for tool in here.models.requests[-1].tools]
    assert "first" in offered and "second" not in offered


async def test_a_child_may_use_what_its_parent_has_left() -> None:
    limits = Limits(max_steps=5, max_model_calls=7, max_tool_calls=3, max_tokens=1000, timeout=60)
    agent = Agent(name="default", model="scripted", control=Control(delegate=True), limits=limits)
    call = delegate("a", "x", timeout=5)
    here = World(delegating(call), agent=agent)
    spent = Usage(input_tokens=300, output_tokens=100)

    async def script(request: ModelRequest) -> AsyncGenerator[Item, None]:
        yield Reply(tool_calls=(call,), usage=spent)

    here.models.script = script
    await here.post("hello")
    await driven(here)
    (child,) = await of(here, ChildStarted)
    left = child.spec.limits
    assert (left.max_steps, left.max_model_calls, left.max_tool_calls, left.max_tokens) == (4, 6, 2, 600)
    assert left.timeout == 5000


async def test_what_a_child_may_take_of_time_is_what_its_parent_has_left() -> None:
    agent = Agent(name="default", model="scripted", control=Control(delegate=True), limits=Limits(timeout=60))
    here = World(delegating(delegate("a", "x", timeout=3600)), agent=agent)
    await here.post("hello")
    await driven(here)
    (child,) = await of(here, ChildStarted)
    assert 0 < child.spec.limits.timeout <= 60_000


async def test_a_run_has_ten_children_at_most() -> None:
    here = world(*[delegate(f"brief {n}", f"c{n}", wait=False) for n in range(12)])
    await here.post("hello")
    await driven(here)
    assert [child.k for child in await of(here, ChildStarted)] == list(range(1, 11))
    refused = [returned for returned in await of(here, ToolReturned) if returned.status == "error"]
    assert [returned.call_id for returned in refused] == ["c10", "c11"]
    assert all("10 sub-agents at most" in returned.error for returned in refused)


async def test_sub_agents_end_three_levels_down() -> None:
    here = world(delegate("hello", "x"))
    await here.post("hello")
    for depth in range(4):
        await driven(here, "s1" + depth * "--1-1", work=depth + 1)
    deepest = "s1--1-1--1-1--1-1"
    assert not await of(here, ChildStarted, deepest)
    (returned,) = await of(here, ToolReturned, deepest)
    assert returned.status == "error" and "3 levels down" in returned.error
    (end,) = await of(here, RunEnded, deepest)
    assert end.status == "completed"


async def test_s38_a_child_that_never_fits_its_schema_fails_after_three_tries_and_its_parent_is_told() -> None:
    here = world(delegate("a", "x", schema={"type": "object", "required": ["n"]}))
    await here.post("hello")
    await driven(here)
    await driven(here, "s1--1-1", work=2)
    assert {bool(reply.misfit) for reply in await of(here, ModelReplied, "s1--1-1")} == {True}
    assert len(here.models.requests) == 1 + 3
    (child,) = await of(here, RunEnded, "s1--1-1")
    assert (child.status, child.error.code) == ("failed", "child_failed")
    await driven(here, work=3)
    (returned,) = await of(here, ToolReturned)
    assert (returned.status, returned.error) == ("error", "child_failed: 3 answers did not fit the schema")
    (end,) = await of(here, RunEnded)
    assert end.status == "completed"


async def test_what_a_child_does_goes_back_to_who_asked_for_the_run_that_delegated() -> None:
    here = world(delegate("a", "x"))
    posted = (await here.post("hello")).recorded
    assert posted
    await driven(here)
    await driven(here, "s1--1-1", work=2)
    opening, *rest = await here.events("s1--1-1")
    assert (opening.cause, opening.correlation, opening.actor) == (posted.event.id, "root-1", "agent:default")
    assert {event.correlation for event in rest if event.type != "run.reported"} == {"root-1"}
    assert opening.traceparent == posted.event.traceparent


@pytest.mark.parametrize(("agent", "model"), [(None, "said-for-this-turn"), ("other", "its-own")])
async def test_one_like_its_parent_has_the_model_that_was_said_for_the_turn(agent: str | None, model: str) -> None:
    here = world(delegate("a", "x", **({"agent": agent} if agent else {})))
    beside(here, Agent(name="other", model="its-own"))
    await here.post("hello", spec=msgspec.structs.replace(here.spec, model="said-for-this-turn"))
    await driven(here)
    (child,) = await of(here, ChildStarted)
    assert child.spec.model == model
