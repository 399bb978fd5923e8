"""Messages that reach a run that is under way, and runs beside each other, on a real server."""

import asyncio
import random

import pytest
from tests.support.driving import Latch, asks_once, call, echo
from tests.support.stage import Stage
from tests.support.waiting import eventually

from turnstream.agents import tool
from turnstream.session.events import ModelReplied, RunEnded, RunStarted, RunSteered
from turnstream.session.messages import AssistantMessage, UserMessage
from turnstream_runner.models.port import ModelRequest, Reply


class Gate:
    """A tool `wait` that a test holds in its hand."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.over = asyncio.Event()

        @tool(idempotent=True)
        async def wait() -> str:
            self.begun.set()
            await self.over.wait()
            return "waited"

        self.tool = wait


def prompts(request: ModelRequest) -> list[str]:
    return [message.text for message in request.messages if isinstance(message, UserMessage)]


# --- steering ---------------------------------------------------------------------------------------------------------


async def test_s53_messages_that_come_during_a_tool_are_in_the_next_model_call_all_at_once(stage: Stage) -> None:
    gate = Gate()
    actor = await stage.actor(asks_once(call("wait")), tools=[gate.tool])
    await stage.say("start", on_busy="steer")
    await gate.begun.wait()
    for name in ("one", "two", "three"):
        assert (await stage.say(name, name=name, on_busy="steer")).recorded

    async def script(request: ModelRequest):  # type: ignore[no-untyped-def]
        yield Reply(text=" ".join(prompts(request)))

    actor.models.script = script
    gate.over.set()
    assert (await stage.end()).content == "start one two three"
    [steered] = await stage.found(RunSteered)
    assert steered.message_ids == ("one", "two", "three")
    assert (await stage.types())[-3:] == ["tool.returned", "run.steered", "run.ended"]


async def test_s03_a_message_does_not_call_the_model_off_and_is_seen_once(stage: Stage) -> None:
    latch = Latch("I am ", answer="I am done")
    actor = await stage.actor(latch)
    await stage.say("start", preset="thread")
    await latch.reached.wait()
    await stage.say("but wait", name="steer")
    await stage.heard(actor)
    assert actor.models.closed == 0, "the call goes on"
    actor.models.script = echo
    latch.let_go()
    end = await stage.end()
    assert end.content == "but wait"
    assert await stage.types() == [
        "message.posted",
        "run.started",
        "message.posted",
        "model.replied",
        "run.steered",
        "run.ended",
    ]
    first, second = actor.models.requests
    assert prompts(first) == ["start"]
    assert second.messages == (UserMessage("start"), AssistantMessage("I am done"), UserMessage("but wait"))


async def test_s05_a_message_in_the_moment_of_the_answer_is_taken_by_this_run_or_starts_the_next(stage: Stage) -> None:
    async def script(request: ModelRequest):  # type: ignore[no-untyped-def]
        yield Reply(text=prompts(request)[-1])

    await stage.actor(script)
    rng = random.Random(5)

    async def trial(session: str) -> None:
        await stage.say("first", session, preset="thread")
        await asyncio.sleep(rng.random() * 0.03)
        await stage.say("second", session)

        async def all_ended() -> bool:
            facts = await stage.facts(session)
            ends = [fact for fact in facts if isinstance(fact, RunEnded)]
            return bool(ends) and ends[-1].content == "second"

        await eventually(all_ended, what=f"the second message's answer in {session}")
        facts = await stage.facts(session)
        taken = [name for fact in facts if isinstance(fact, RunStarted | RunSteered) for name in fact.message_ids]
        assert len(taken) == len(set(taken)) == 2, "each is taken once"
        answers = [fact.content for fact in facts if isinstance(fact, RunEnded | ModelReplied)]
        assert answers in (["first", "second"], ["second"])

    await asyncio.gather(*(trial(f"s{n}") for n in range(60)))


@pytest.mark.parametrize("size", [10, 400_000])
async def test_an_answer_whose_steering_is_taken_back_in_time_is_the_answer_once(stage: Stage, size: int) -> None:
    """The message comes with the answer and is withdrawn before it is taken: by a runner that was away meanwhile."""
    answer = "a" * size
    latch = Latch(answer=answer)
    first = await stage.actor(latch)
    await stage.say("start", preset="thread", recovery="resume")
    await latch.reached.wait()
    await stage.say("but wait", name="steer")
    replied = asyncio.Event()
    handle = first.runner._equipment.sessions.handle

    async def die_behind_the_reply(*args, **options):  # type: ignore[no-untyped-def]
        handled = await handle(*args, **options)
        if handled.recorded and isinstance(handled.recorded.event.data, ModelReplied):
            replied.set()
            await asyncio.Event().wait()
        return handled

    first.runner._equipment.sessions.handle = die_behind_the_reply
    latch.let_go()
    await replied.wait()
    await first.die()
    await stage.withdraw("steer")
    second = await stage.actor(echo)
    end = await stage.end()
    assert (end.status, end.attempt) == ("completed", 2)
    assert answer.startswith(end.content)
    assert (end.blob.size if end.blob else size) == size
    assert not second.models.requests, "the answer was there already"
    await stage.say("and now?", preset="thread")
    await stage.end(run=2)
    shown = [message for message in second.models.requests[-1].messages if isinstance(message, AssistantMessage)]
    assert len(shown) == 1
    assert shown[0].text.startswith(end.content)


async def test_messages_that_a_failed_run_leaves_over_are_the_next_turn_together(stage: Stage) -> None:
    gate = Gate()
    actor = await stage.actor(asks_once(call("wait")), tools=[gate.tool])
    await stage.say("start", preset="thread")
    await gate.begun.wait()
    await stage.say("one", name="one")
    await stage.say("two", name="two")
    actor.models.script = echo
    await stage.cancel(1)
    end = await stage.end(run=2)
    assert (await stage.ends())[1].leftover
    started = (await stage.starts())[-1]
    assert (started.trigger, started.message_ids) == ("leftover", ("one", "two"))
    assert end.status == "completed"


async def test_another_author_s_message_waits_for_its_turn(stage: Stage) -> None:
    latch = Latch(answer="one")
    await stage.actor(latch)
    await stage.say("mine", preset="thread")
    await latch.reached.wait()
    await stage.say("yours", author="user:bob", name="bob")
    latch.let_go()
    await stage.end(run=2)
    assert [start.message_ids for start in await stage.starts()][-1] == ("bob",)
    assert not await stage.found(RunSteered)


# --- interrupt --------------------------------------------------------------------------------------------------------


async def test_a_message_that_interrupts_ends_the_run_and_is_the_next(stage: Stage) -> None:
    latch = Latch("half")
    actor = await stage.actor(latch)
    await stage.say("start", on_busy="queue")
    await latch.reached.wait()
    await stage.say("queued", on_busy="queue")
    actor.models.script = echo
    await stage.say("stop", on_busy="interrupt")
    assert (await stage.end(run=3)).content == "stop"
    ends = await stage.ends()
    assert (ends[1].status, ends[1].content) == ("cancelled", "half")
    assert (await stage.end(run=2)).content == "queued", "what was in line before stays there"
    assert [start.run for start in await stage.starts()] == [1, 3, 2]


# --- beside each other ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runners", [1, 2])
async def test_s03_parallel_runs_of_one_session_are_driven_at_once(stage: Stage, runners: int) -> None:
    together = asyncio.Barrier(8)

    async def script(request: ModelRequest):  # type: ignore[no-untyped-def]
        text = request.messages[-1].text
        await together.wait()
        yield Reply(text=text)

    for _ in range(runners):
        await stage.actor(script)
    for n in range(8):
        await stage.say(f"m{n}", preset="memory")
    await stage.until("run.ended", count=8)
    ends = await stage.ends()
    assert {run: end.content for run, end in ends.items()} == {n + 1: f"m{n}" for n in range(8)}
    assert {end.attempt for end in ends.values()} == {1}


async def test_a_crash_of_one_of_two_runners_leaves_the_other_s_parallel_runs_alone(stage: Stage) -> None:
    latches = [Latch(answer="one"), Latch(answer="two")]
    actors = [await stage.actor(latches[0])]
    await stage.say("one", preset="workspace", on_busy="parallel")
    await latches[0].reached.wait()
    actors.append(await stage.actor(latches[1]))
    actors[0].runner.stop_taking()
    await stage.say("two", on_busy="parallel")
    await latches[1].reached.wait()
    actors[1].models.script = echo
    await actors[0].die()
    assert (await stage.end(run=1)).content == "one"
    latches[1].let_go()
    assert (await stage.end(run=2)).content == "two"
    ends = await stage.ends()
    assert (ends[1].attempt, ends[2].attempt) == (2, 1)
