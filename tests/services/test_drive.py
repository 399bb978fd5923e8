"""The drive on a log in memory: what it stores, in which order, and what becomes of its wake-up."""

import asyncio
import random

import msgspec
import pytest
from tests.support.driving import (
    TRACEPARENT,
    CountingLog,
    Latch,
    World,
    asks_once,
    call,
    echo,
    fails,
    says,
)

from turnstream.agents import Agent, Control, ToolContext, tool
from turnstream.ids import SessionKey
from turnstream.log.base import PAGE, BrokenChain, Unavailable
from turnstream.log.handle import Sessions
from turnstream.log.known import Known
from turnstream.session.commands import DeleteSession
from turnstream.session.decision import Decision
from turnstream.session.events import (
    Error,
    ModelReplied,
    Recorded,
    RunEnded,
    RunStarted,
    ToolCall,
    ToolReturned,
    ToolStarted,
    Usage,
)
from turnstream.session.messages import AssistantMessage, ToolMessage, UserMessage
from turnstream.telemetry import metrics
from turnstream_runner.drive import Outcome
from turnstream_runner.models.port import ReasoningDelta, Reply, Reset, TextDelta

TURN = ["message.posted", "run.started", "run.ended"]


async def ended(world: World, session: str = "s1") -> RunEnded:
    """The last terminal event; fails if a run has two."""
    ends = [fact for fact in await world.facts(session) if isinstance(fact, RunEnded)]
    assert len({end.run for end in ends}) == len(ends), ends
    return ends[-1]


# --- a turn -------------------------------------------------------------------------------------------------------


async def test_an_instant_turn_is_three_events_one_read_and_two_appends() -> None:
    world = World()
    await world.post("hello")
    world.log.appends = world.log.reads = 0
    assert await world.drive().outcome() is Outcome.DONE
    assert (world.log.reads, world.log.appends) == (1, 2)
    assert await world.types() == TURN
    _, started, end = await world.facts()
    assert isinstance(started, RunStarted)
    assert (started.attempt, started.trigger, started.message_ids, started.wake.work) == (1, "message", ("m1",), 1)
    assert isinstance(end, RunEnded)
    assert end.window and (end.window.since, end.window.tokens) == (0, 21)
    assert msgspec.structs.replace(end, duration=0, window=None) == RunEnded(
        run=1, attempt=1, status="completed", content="hello", finish="stop", model="scripted"
    )


async def test_facts_name_whoever_requested_the_run() -> None:
    world = World(asks_once(call("look")), tools=[tool(idempotent=True)(look)])
    await world.post()
    await world.drive().outcome()
    posted, *facts = await world.events()
    for event in facts:
        assert (event.cause, event.correlation, event.traceparent) == (posted.id, "root-1", TRACEPARENT)
        assert event.actor.startswith("runner:")
    assert len({event.id for event in facts}) == len(facts)


def look() -> str:
    "Looks."
    return "seen"


async def test_the_model_is_sent_what_was_said_before() -> None:
    world = World()
    for text in ("one", "two"):
        await world.post(text)
        await world.drive().outcome()
    request = world.models.requests[-1]
    assert request.messages == (UserMessage("one"), AssistantMessage("one"), UserMessage("two"))
    assert (request.instructions, request.idempotency_key) == ("be kind", "acme/s1.2:1")


async def test_a_warm_runner_reads_only_the_tail_for_the_next_turn() -> None:
    world = World()
    await world.post("one")
    first = world.drive()
    await first.outcome()
    await world.post("two")
    world.log.reads = 0
    assert await world.drive(work=2).outcome() is Outcome.DONE
    assert world.log.reads == 1


@pytest.fixture
def known() -> Known:
    return Known(keep_bytes=1 << 20)


async def test_what_the_process_knows_already_is_not_read(known: Known) -> None:
    world = World()
    world.sessions = Sessions(world.log, now=world.now, known=known)
    cause = (await world.post("hello")).session.seq
    world.log.reads = 0
    assert await world.drive(cause=cause, known=known).outcome() is Outcome.DONE
    assert (world.log.reads, await world.types()) == (0, TURN)


async def test_what_became_of_a_redelivered_wake_up_is_read(known: Known) -> None:
    world = World()
    world.sessions = Sessions(world.log, now=world.now, known=known)
    cause = (await world.post("hello")).session.seq
    assert await World(shares=world).drive(cause=cause).outcome() is Outcome.DONE
    world.log.reads = 0
    assert await world.drive(cause=cause, delivery=2, known=known).outcome() is Outcome.DONE
    assert (world.log.reads, await world.types()) == (1, TURN)


async def test_knowing_less_than_the_log_does_no_harm(known: Known) -> None:
    world = World()
    world.sessions = Sessions(world.log, now=world.now, known=known)
    cause = (await world.post("hello")).session.seq
    assert await World(shares=world).drive(cause=cause).outcome() is Outcome.DONE
    calls = len(world.models.requests)
    assert await world.drive(work=2, cause=cause, known=known).outcome() is Outcome.DONE
    assert (await world.types(), len(world.models.requests)) == (TURN, calls)


async def test_queued_runs_are_carried_out_one_after_the_other_by_the_same_drive() -> None:
    world = World()
    for text in ("one", "two", "three"):
        await world.post(text, on_busy="queue")
    assert await world.drive().outcome() is Outcome.DONE
    types = await world.types()
    assert types == ["message.posted"] * 3 + ["run.started", "run.ended"] * 3
    assert [r.messages[-1] for r in world.models.requests] == [UserMessage(t) for t in ("one", "two", "three")]


async def test_a_run_of_another_queue_is_left_alone() -> None:
    world = World()
    await world.post(spec=msgspec.structs.replace(world.spec, queue="gpu"))
    assert await world.drive().outcome() is Outcome.DONE
    assert await world.types() == ["message.posted"]
    assert await world.drive(queue="gpu").outcome() is Outcome.DONE
    assert await world.types() == TURN


async def test_a_wake_up_for_nothing_stores_nothing() -> None:
    world = World()
    assert await world.drive(cause=0).outcome() is Outcome.DONE
    assert await world.types() == []


async def test_what_the_model_says_is_heard_while_it_says_it() -> None:
    script = says(
        ReasoningDelta("hm"),
        TextDelta("no"),
        Reset("dropped"),
        TextDelta("yes"),
        Reply(text="yes", reasoning="hm", usage=Usage(input_tokens=5, output_tokens=2), model="m-1"),
    )
    world = World(script)
    await world.post()
    await world.drive().outcome()
    assert world.live.said == [
        (1, 1, "reasoning", "hm"),
        (1, 1, "text", "no"),
        (1, 1, "reset", "dropped"),
        (1, 1, "text", "yes"),
    ]
    end = await ended(world)
    assert (end.content, end.reasoning, end.model) == ("yes", "hm", "m-1")
    assert end.usage == end.step_usage == Usage(input_tokens=5, output_tokens=2)


# --- how a model fails --------------------------------------------------------------------------------------------


async def test_s22_a_model_that_fails_for_good_fails_the_run_and_the_session_goes_on() -> None:
    world = World(fails("503 after 4 tries", retryable=True))
    await world.post("one")
    await world.drive().outcome()
    end = await ended(world)
    assert (end.status, end.error) == (
        "failed",
        Error(code="model_error", message="503 after 4 tries", retryable=True),
    )
    world.models.script = echo
    await world.post("two")
    await world.drive(work=2).outcome()
    assert (await ended(world)).content == "two"
    assert world.models.requests[-1].messages == (UserMessage("one"), UserMessage("two")), "no error is shown"


async def test_a_model_that_breaks_fails_the_run_and_says_no_secret() -> None:
    async def script(request: object):  # type: ignore[no-untyped-def]
        raise KeyError("sk-secret")
        yield

    world = World(script)
    await world.post()
    assert await world.drive().outcome() is Outcome.DONE
    end = await ended(world)
    assert end.error == Error(code="internal_error", message="KeyError in the call of model scripted")


async def test_an_unknown_model_fails_the_run() -> None:
    world = World()
    await world.post(spec=msgspec.structs.replace(world.spec, model="unknown"))
    await world.drive().outcome()
    end = await ended(world)
    assert end.error == Error(code="model_error", message="unknown model 'unknown'")


@pytest.mark.parametrize(
    ("reply", "status", "note"),
    [
        (Reply(), "failed", ""),
        (Reply(finish="length"), "completed", "no answer: the model hit the token limit; raise max_tokens"),
        (Reply(finish="content_filter"), "completed", "no answer: the provider's content filter withheld it"),
    ],
)
async def test_an_empty_reply(reply: Reply, status: str, note: str) -> None:
    world = World(says(reply))
    await world.post()
    await world.drive().outcome()
    end = await ended(world)
    assert (end.status, end.note) == (status, note)
    assert (end.error.code if end.error else "") == ("empty_reply" if status == "failed" else "")


@pytest.mark.parametrize("missing", ["gone", "changed"])
async def test_s45_an_agent_that_is_gone_fails_each_run_once_before_it_starts(missing: str) -> None:
    world = World()
    replace = {"agent": "nobody"} if missing == "gone" else {"digest": "another"}
    spec = msgspec.structs.replace(world.spec, **replace)
    for n in (1, 2, 3):
        await world.post("lost", spec=spec)
        assert await world.drive(work=n).outcome() is Outcome.DONE
        end = await ended(world)
        assert (end.run, end.attempt, end.status) == (n, 0, "failed")
        assert end.error and end.error.code == "agent_not_found"
    assert await world.types() == ["message.posted", "run.ended"] * 3
    await world.post("found")
    await world.drive(work=4).outcome()
    assert world.models.requests[-1].messages == (UserMessage("found"),), "nothing was consumed"


async def test_an_agent_that_is_gone_when_its_run_is_taken_over_leaves_no_call_without_a_result() -> None:
    begun = asyncio.Event()

    @tool
    async def pay() -> str:
        begun.set()
        await asyncio.Event().wait()
        return "never"

    world = World(asks_once(call("pay"), call("pay")), tools=[pay])
    await world.post()
    dead = world.drive(delivery=1)
    await begun.wait()
    await dead.die()
    elsewhere = World(agent=Agent(name="other", model="scripted"), shares=world)
    assert await elsewhere.drive(delivery=2).outcome() is Outcome.DONE
    assert not [fact for fact in await world.facts() if isinstance(fact, ToolReturned)]
    end = await ended(world)
    assert (end.status, end.attempt, len(end.unfinished)) == ("failed", 1, 2)
    assert end.error and end.error.code == "agent_not_found"


# --- tools --------------------------------------------------------------------------------------------------------


async def test_tools_of_a_step_run_at_once_and_their_results_go_to_the_model() -> None:
    together = asyncio.Barrier(2)

    @tool(idempotent=True)
    async def left() -> str:
        await together.wait()
        return "L"

    @tool(idempotent=True)
    async def right() -> str:
        await together.wait()
        return "R"

    world = World(asks_once(call("left"), call("right")), tools=[left, right])
    await world.post()
    assert await world.drive().outcome() is Outcome.DONE
    assert await world.types() == [
        "message.posted",
        "run.started",
        "model.replied",
        "tool.returned",
        "tool.returned",
        "run.ended",
    ]
    asked, *results = world.models.requests[-1].messages[1:]
    assert isinstance(asked, AssistantMessage)
    assert sorted(m.text for m in results if isinstance(m, ToolMessage)) == ["L", "R"]
    assert [said[3] for said in world.live.said if said[2] == "tool"] == [
        '{"call_id":"left","name":"left"}',
        '{"call_id":"right","name":"right"}',
    ]


async def test_a_tool_that_must_not_be_repeated_is_announced_in_the_log_first() -> None:
    world = World()
    seen: list[str] = []

    @tool
    async def pay(context: ToolContext) -> str:
        seen.extend(await world.types())
        return context.idempotency_key

    world = World(asks_once(call("pay", id="c1")), tools=[pay])
    await world.post()
    await world.drive().outcome()
    assert seen[-1] == "tool.started"
    facts = await world.facts()
    assert [type(fact) for fact in facts[3:5]] == [ToolStarted, ToolReturned]
    returned = facts[4]
    assert isinstance(returned, ToolReturned)
    assert returned.output == "acme/s1.1:1:c1"


async def test_a_tool_that_is_not_there_is_an_error_that_the_model_sees() -> None:
    world = World(asks_once(call("nothing")), tools=[tool(idempotent=True)(look)])
    await world.post()
    await world.drive().outcome()
    result = world.models.requests[-1].messages[-1]
    assert isinstance(result, ToolMessage)
    assert result.is_error
    assert (await ended(world)).content == "done"


async def test_every_call_of_a_run_has_an_id_of_its_own() -> None:
    steps = iter(
        [
            (call("look", id="same"), ToolCall(id="same", name="look", arguments="{}")),
            (call("look", id="same\ud800"), ToolCall(id="", name="look", arguments="{}")),
            (),
        ]
    )

    async def script(request: object):  # type: ignore[no-untyped-def]
        calls = next(steps)
        yield Reply(tool_calls=calls) if calls else Reply(text="done")

    world = World(script, tools=[tool(idempotent=True)(look)])
    await world.post()
    await world.drive().outcome()
    ids = [c.id for fact in await world.facts() if isinstance(fact, ModelReplied) for c in fact.tool_calls]
    assert len(set(ids)) == len(ids) == 4
    assert all(ids)
    assert (await ended(world)).content == "done"


async def test_a_run_that_never_ends_asking_fails_at_its_limit() -> None:
    async def script(request: object):  # type: ignore[no-untyped-def]
        yield Reply(tool_calls=(call("look"),))

    agent = Agent.model_validate(
        {"name": "default", "model": "scripted", "tools": ["look"], "limits": {"max_steps": 3}}
    )
    world = World(script, tools=[tool(idempotent=True)(look)], agent=agent)
    await world.post()
    await world.drive().outcome()
    end = await ended(world)
    assert end.error and end.error.code == "max_steps_exceeded"
    assert len(world.models.requests) == 3


# --- cancel and deadline ------------------------------------------------------------------------------------------


async def test_s16_cancelling_a_queued_run_ends_it_at_once_and_the_next_one_goes_on() -> None:
    latch = Latch("first ")
    world = World(latch)
    await world.post("one")
    await world.post("two")
    running = world.drive()
    await latch.reached.wait()
    await world.cancel(2)
    await world.post("three")
    latch.let_go()
    assert await running.outcome() is Outcome.DONE
    ends = {fact.run: fact.status for fact in await world.facts() if isinstance(fact, RunEnded)}
    assert ends == {1: "completed", 2: "cancelled", 3: "completed"}
    assert UserMessage("two") not in world.models.requests[-1].messages


async def test_s16_a_cancel_just_before_the_start_lets_the_same_drive_go_on_with_the_next_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    await world.post("first")
    append = world.log.append

    async def be_late(key: SessionKey, decision: Decision, expected: int) -> int:
        monkeypatch.undo()
        await world.post("second")
        await world.cancel(1)
        return await append(key, decision, expected)

    monkeypatch.setattr(world.log, "append", be_late)
    assert await world.drive().outcome() is Outcome.DONE
    ends = [fact for fact in await world.facts() if isinstance(fact, RunEnded)]
    assert [(end.run, end.status) for end in ends] == [(1, "cancelled"), (2, "completed")]


async def test_s16_cancelling_a_running_run_stops_the_model_and_keeps_what_it_said() -> None:
    latch = Latch("half ", "an answer")
    world = World(latch)
    await world.post()
    running = world.drive()
    await latch.reached.wait()
    await world.cancel()
    assert await running.outcome() is Outcome.DONE
    end = await ended(world)
    assert (end.status, end.content, end.attempt) == ("cancelled", "half an answer", 1)
    assert world.models.closed == 1


async def test_s16_cancelling_a_run_that_has_ended_changes_nothing() -> None:
    world = World()
    await world.post()
    await world.drive().outcome()
    handled = await world.cancel()
    assert handled.recorded is None
    assert await world.types() == TURN


async def test_a_cancel_between_the_last_word_and_the_end_wins_and_the_answer_is_kept() -> None:
    world = World()

    async def script(request: object):  # type: ignore[no-untyped-def]
        await world.cancel()
        yield Reply(text="whole answer")

    world.models.script = script
    await world.post()
    assert await world.drive().outcome() is Outcome.DONE
    end = await ended(world)
    assert (end.status, end.content) == ("cancelled", "whole answer")
    assert len(world.models.requests) == 1


async def test_a_cancel_interrupts_tools_and_every_call_has_a_result() -> None:
    begun = asyncio.Event()

    @tool
    async def errand() -> str:
        begun.set()
        await asyncio.Event().wait()
        return "never"

    world = World(asks_once(call("errand"), call("look")), tools=[errand, tool(idempotent=True)(look)])
    await world.post()
    running = world.drive()
    await begun.wait()
    await world.cancel()
    assert await running.outcome() is Outcome.DONE
    returned = {fact.call_id: fact.status for fact in await world.facts() if isinstance(fact, ToolReturned)}
    assert returned == {"look": "ok"}
    end = await ended(world)
    assert (end.status, end.unfinished) == ("cancelled", ("errand",))


async def test_a16_a_cancel_at_any_moment_of_a_tool_gives_one_end() -> None:
    @tool
    async def errand(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    rng = random.Random(16)
    world = World(asks_once(call("errand", '{"seconds":0.03}')), tools=[errand])

    async def trial(n: int) -> None:
        session = f"s{n}"
        posted = await world.post(session=session)
        running = world.drive(session, work=n, cause=posted.session.seq)
        await asyncio.sleep(rng.random() * 0.05)
        handled = await world.cancel(session=session)
        assert await running.outcome() is Outcome.DONE
        end = await ended(world, session)
        if handled.recorded:
            assert end.status == "cancelled"
        else:
            assert end.status == "completed"

    for start in range(1, 201, 50):
        await asyncio.gather(*(trial(n) for n in range(start, start + 50)))


async def test_a18_cancelling_one_run_leaves_nineteen_alone() -> None:
    latch = Latch("x")
    world = World(latch)
    sessions = [f"s{n}" for n in range(20)]
    drives = []
    for n, session in enumerate(sessions, 1):
        posted = await world.post(session=session)
        drives.append(world.drive(session, work=n, cause=posted.session.seq))
    while len(world.models.requests) < 20:
        await asyncio.sleep(0.001)
    await world.cancel(session="s7")
    assert await drives[7].outcome() is Outcome.DONE
    latch.let_go()
    await asyncio.gather(*(drive.outcome() for drive in drives))
    assert [session for session in sessions if (await ended(world, session)).status == "cancelled"] == ["s7"]
    assert all([(await ended(world, session)).status == "completed" for session in sessions if session != "s7"])


async def test_a_withdrawn_message_is_not_taken() -> None:
    latch = Latch()
    world = World(latch)
    await world.post("one")
    await world.post("two")
    running = world.drive()
    await latch.reached.wait()
    await world.withdraw("m2")
    latch.let_go()
    await running.outcome()
    assert [fact.run for fact in await world.facts() if isinstance(fact, RunStarted)] == [1]


async def test_the_deadline_ends_a_run_and_keeps_what_was_said() -> None:
    latch = Latch("so far")
    agent = Agent.model_validate({"name": "default", "model": "scripted", "limits": {"timeout": 0.15}})
    world = World(latch, agent=agent)
    await world.post()
    assert await world.drive().outcome() is Outcome.DONE
    end = await ended(world)
    assert (end.status, end.content) == ("timed_out", "so far")
    assert end.error == Error(code="deadline_exceeded", message="the run took longer than 0.15 s")


async def test_the_deadline_of_a_later_run_of_the_same_drive_is_minded_though_it_is_earlier() -> None:
    first, second = Latch(answer="one"), Latch("so far")
    world = World(first)
    await world.post("one")
    limits = msgspec.structs.replace(world.spec.limits, timeout=150)
    await world.post("two", spec=msgspec.structs.replace(world.spec, limits=limits))
    running = world.drive()
    await first.reached.wait()
    await world.cancel(2)  # it follows the feed by the time that it hears of this
    await world.post("three", spec=msgspec.structs.replace(world.spec, limits=limits))
    while running.drive._session.seq < (await world.sessions.load(world.key())).seq:
        await asyncio.sleep(0.001)
    world.models.script = second
    first.let_go()
    assert await running.outcome() is Outcome.DONE
    end = await ended(world)
    assert (end.run, end.status, end.content) == (3, "timed_out", "so far")


async def test_a_drive_whose_session_is_deleted_calls_its_model_off_and_erases() -> None:
    latch = Latch("half")
    world = World(latch)
    await world.post()
    running = world.drive()
    await latch.reached.wait()
    fenced = metrics.fenced._value.get()
    await world.do(DeleteSession(origin=world.origin(), specs={}, mode="erase", active="cancel"))
    assert await running.outcome() is Outcome.DONE
    assert (await world.types())[-1] == "session.erased"
    assert world.models.closed == 1
    assert metrics.fenced._value.get() == fenced, "nobody else has its run"


# --- crash, takeover, fence ---------------------------------------------------------------------------------------


async def test_s18_a_run_whose_runner_died_is_taken_over_by_the_same_wake_up() -> None:
    latch = Latch("lost words")
    world = World(latch)
    await world.post("hello")
    dead = world.drive(work=1, delivery=1)
    await latch.reached.wait()
    await dead.die()
    world.models.script = echo
    assert await world.drive(work=1, delivery=2).outcome() is Outcome.DONE
    starts = [fact for fact in await world.facts() if isinstance(fact, RunStarted)]
    assert [(s.attempt, s.trigger, s.message_ids) for s in starts] == [(1, "message", ("m1",)), (2, "recovery", ())]
    end = await ended(world)
    assert (end.attempt, end.content) == (2, "hello")
    assert world.models.requests[-1].messages == (UserMessage("hello"),), "the message is shown once"


@pytest.mark.parametrize("thawed_first", [True, False])
async def test_s20_a24_nothing_of_a_frozen_runner_is_stored(thawed_first: bool) -> None:
    frozen, finisher = Latch("stale", answer="stale answer"), Latch(answer="true answer")
    world = World(frozen)
    other = World(finisher, shares=world)
    await world.post()
    slow = world.drive(work=1, delivery=1)
    await frozen.reached.wait()
    winner = other.drive(work=1, delivery=2)
    await finisher.reached.wait()
    if thawed_first:
        frozen.let_go()
        assert await slow.outcome() is Outcome.FENCED
        finisher.let_go()
    else:
        finisher.let_go()
        assert await winner.outcome() is Outcome.DONE
        frozen.let_go()
        assert await slow.outcome() is Outcome.FENCED
    assert await winner.outcome() is Outcome.DONE
    assert await world.types() == ["message.posted", "run.started", "run.started", "run.ended"]
    assert (await ended(world)).content == "true answer"


async def test_a_fenced_drive_notices_by_the_feed_and_calls_its_model_off() -> None:
    frozen = Latch()
    world = World(frozen)
    await world.post()
    slow = world.drive(work=1, delivery=1)
    await frozen.reached.wait()
    assert await World(shares=world).drive(work=1, delivery=2).outcome() is Outcome.DONE
    assert await slow.outcome() is Outcome.FENCED
    assert world.models.closed == 1


async def test_s49_the_same_wake_up_delivered_twice_makes_one_attempt() -> None:
    world = World()
    await world.post()
    first, second = world.drive(work=1, delivery=1), World(shares=world).drive(work=1, delivery=1)
    outcomes = {await first.outcome(), await second.outcome()}
    assert Outcome.DONE in outcomes
    assert outcomes <= {Outcome.DONE, Outcome.HELD}
    assert await world.types() == TURN


@pytest.mark.parametrize("delivery", [1, 2])
async def test_s49_an_older_delivery_of_the_wake_up_leaves_the_run_alone(delivery: int) -> None:
    latch = Latch()
    world = World(latch)
    await world.post()
    running = world.drive(work=1, delivery=2)
    await latch.reached.wait()
    assert await World(shares=world).drive(work=1, delivery=delivery).outcome() is Outcome.HELD
    latch.let_go()
    assert await running.outcome() is Outcome.DONE
    assert await world.types() == TURN


async def test_s49_another_wake_up_leaves_a_live_run_alone() -> None:
    latch = Latch()
    world = World(latch)
    await world.post()
    running = world.drive(work=1)
    await latch.reached.wait()
    elsewhere = World(shares=world)
    assert await elsewhere.drive(work=2, delivery=7).outcome() is Outcome.DONE
    assert world.work.asked == [1]
    elsewhere.here = {1}
    assert await elsewhere.drive(work=3).outcome() is Outcome.DONE
    assert world.work.asked == [1], "a run of this very runner is known to be alive"
    latch.let_go()
    await running.outcome()
    assert await world.types() == TURN


async def test_a_run_whose_wake_up_is_gone_is_taken_over_by_another_one() -> None:
    latch = Latch()
    world = World(latch)
    await world.post()
    dead = world.drive(work=1)
    await latch.reached.wait()
    await dead.die()
    world.work.there.clear()
    world.models.script = echo
    assert await world.drive(work=2).outcome() is Outcome.DONE
    assert await world.types() == ["message.posted", "run.started", "run.started", "run.ended"]


async def test_a25_two_runners_over_a_hundred_orphans_make_one_new_attempt_each() -> None:
    latch = Latch()
    world = World(latch)
    sessions = [f"s{n}" for n in range(100)]
    for n, session in enumerate(sessions, 1):
        posted = await world.post(session=session)
        dead = world.drive(session, work=n, cause=posted.session.seq)
        await world.until_stored("run.started", session)
        await dead.die()
    world.work.there.clear()
    runners = [World(shares=world), World(shares=world)]
    drives = [
        runner.drive(session, work=1000 + 2 * n + r)
        for n, session in enumerate(sessions)
        for r, runner in enumerate(runners)
    ]
    random.Random(25).shuffle(drives)
    assert {await drive.outcome() for drive in drives} == {Outcome.DONE}
    for session in sessions:
        starts = [fact.attempt for fact in await world.facts(session) if isinstance(fact, RunStarted)]
        assert starts == [1, 2]
        assert (await ended(world, session)).status == "completed"


async def test_s21_a20_a_run_whose_every_attempt_dies_fails_and_frees_the_session() -> None:
    world = World(Latch())
    await world.post()
    for delivery in range(1, 5):
        world.models.script = latch = Latch()
        drive = world.drive(work=1, delivery=delivery)
        await latch.reached.wait()
        await drive.die()
    assert await world.drive(work=1, delivery=5).outcome() is Outcome.DONE
    end = await ended(world)
    assert (end.status, end.attempt) == ("failed", 4)
    assert end.error and end.error.code == "max_attempts_exceeded"
    world.models.script = echo
    await world.post("next")
    assert await world.drive(work=2).outcome() is Outcome.DONE
    assert (await ended(world)).content == "next"


async def test_a_tool_in_flight_at_the_crash_is_uncertain_or_called_again_with_the_same_key() -> None:
    keys: list[str] = []
    begun = asyncio.Event()

    @tool
    async def pay() -> str:
        begun.set()
        await asyncio.Event().wait()
        return "never"

    @tool(idempotent=True)
    async def fetch(context: ToolContext) -> str:
        keys.append(context.idempotency_key)
        if len(keys) == 1:
            await asyncio.Event().wait()
        return "fetched"

    world = World(asks_once(call("pay"), call("fetch")), tools=[pay, fetch])
    await world.post()
    dead = world.drive(delivery=1)
    await begun.wait()
    while not keys:
        await asyncio.sleep(0.001)
    await dead.die()
    assert await world.drive(delivery=2).outcome() is Outcome.DONE
    returned = {fact.call_id: fact.status for fact in await world.facts() if isinstance(fact, ToolReturned)}
    assert returned == {"pay": "uncertain", "fetch": "ok"}
    assert len(keys) == 2 and len(set(keys)) == 1
    shown = [message.text for message in world.models.requests[-1].messages if isinstance(message, ToolMessage)]
    assert shown[0].startswith("uncertain: ")


async def test_a72_a_runner_that_dies_just_after_a_tool_returned_is_followed_by_one_that_goes_on() -> None:
    asked_again = asyncio.Event()

    async def script(request):  # type: ignore[no-untyped-def]
        if isinstance(request.messages[-1], ToolMessage):
            asked_again.set()
            await asyncio.Event().wait()
        yield Reply(tool_calls=(call("look"),))

    world = World(script, tools=[tool(idempotent=True)(look)])
    await world.post("one")
    await world.post("two")
    await world.post("three")
    dead = world.drive(delivery=1)
    await asked_again.wait()
    await dead.die()
    world.models.script = asks_once(call("look"), then="done")
    assert await world.drive(delivery=2).outcome() is Outcome.DONE
    ends = [(fact.run, fact.status) for fact in await world.facts() if isinstance(fact, RunEnded)]
    assert ends == [(1, "completed"), (2, "completed"), (3, "completed")]


async def test_a_cancelled_run_of_a_dead_runner_is_ended_without_a_new_attempt() -> None:
    latch = Latch()
    world = World(latch)
    await world.post()
    dead = world.drive(delivery=1)
    await latch.reached.wait()
    await dead.die()
    await world.cancel()
    assert await world.drive(delivery=2).outcome() is Outcome.DONE
    assert await world.types() == ["message.posted", "run.started", "run.cancel_requested", "run.ended"]
    assert (await ended(world)).status == "cancelled"


async def test_doubt_makes_a_drive_look_and_go_on_if_the_run_is_still_its_own() -> None:
    latch = Latch()
    world = World(latch)
    await world.post()
    running = world.drive()
    await latch.reached.wait()
    running.drive.doubt()
    while not running.confirmed:
        await asyncio.sleep(0.001)
    latch.let_go()
    assert await running.outcome() is Outcome.DONE
    assert (await ended(world)).attempt == 1


# --- shutdown -----------------------------------------------------------------------------------------------------


async def test_a_runner_that_shuts_down_gives_a_model_call_to_the_next() -> None:
    latch = Latch("words")
    world = World(latch)
    await world.post("hello")
    running = world.drive(work=1)
    await latch.reached.wait()
    running.drive.drain()
    assert await running.outcome() is Outcome.DONE
    assert await world.types() == ["message.posted", "run.started", "run.released"]
    world.models.script = echo
    assert await world.drive(work=2).outcome() is Outcome.DONE
    starts = [(f.attempt, f.trigger) for f in await world.facts() if isinstance(f, RunStarted)]
    assert starts == [(1, "message"), (2, "handover")]
    assert (await ended(world)).content == "hello"


async def test_a_runner_that_shuts_down_waits_for_a_tool_and_stores_what_it_returned() -> None:
    begun, over = asyncio.Event(), asyncio.Event()

    @tool
    async def errand() -> str:
        begun.set()
        await over.wait()
        return "done"

    world = World(asks_once(call("errand")), tools=[errand])
    await world.post()
    running = world.drive()
    await begun.wait()
    running.drive.drain()
    over.set()
    assert await running.outcome() is Outcome.DONE
    assert (await world.types())[-2:] == ["tool.returned", "run.released"]
    assert len(world.models.requests) == 1, "nothing new is begun"


async def test_a_runner_that_shuts_down_waits_for_a_tool_no_longer_than_the_grace() -> None:
    begun = asyncio.Event()

    @tool
    async def errand() -> str:
        begun.set()
        await asyncio.Event().wait()
        return "never"

    world = World(asks_once(call("errand")), tools=[errand])
    await world.post()
    running = world.drive(work=1)
    await begun.wait()
    running.drive.drain()
    running.drive.end_grace()
    assert await running.outcome() is Outcome.DONE
    assert (await world.types())[-2:] == ["tool.started", "run.released"]
    assert await world.drive(work=2).outcome() is Outcome.DONE
    assert [f.status for f in await world.facts() if isinstance(f, ToolReturned)] == ["uncertain"]


async def test_a_runner_that_shuts_down_starts_nothing() -> None:
    world = World()
    await world.post()
    running = world.drive()
    running.drive.drain()
    assert await running.outcome() is Outcome.HANDED_BACK
    assert await world.types() == ["message.posted"]


# --- the log is away, or broken -----------------------------------------------------------------------------------


async def test_an_answer_that_was_lost_is_settled_and_nothing_is_stored_twice() -> None:
    world = World()
    await world.post()
    world.log.lose_answers = 2
    assert await world.drive().outcome() is Outcome.DONE
    assert await world.types() == TURN


async def test_a_run_waits_for_a_broker_that_is_away() -> None:
    latch = Latch(answer="at last")
    world = World(latch)
    await world.post()
    running = world.drive()
    await latch.reached.wait()
    world.log.away = True
    latch.let_go()
    appends = world.log.appends
    while world.log.appends < appends + 3:
        await asyncio.sleep(0.01)
    world.log.away = False
    assert await running.outcome() is Outcome.DONE
    assert (await ended(world)).content == "at last"


async def test_a_log_that_cannot_be_read_ends_the_drive() -> None:
    world = World()
    await world.post()
    world.log.away = True
    with pytest.raises(Unavailable):
        await world.drive().outcome()


class Broken(CountingLog):
    async def read(self, key: SessionKey, after: int = 0, *, at_least: int = 0, page: int = PAGE):  # type: ignore[no-untyped-def]
        events: list[Recorded] = [recorded async for some in super().read(key, after) for recorded in some]
        yield events[:1]
        raise BrokenChain(key, 3, 2, 1)


async def test_a_broken_chain_ends_the_drive() -> None:
    world = World()
    await world.post()
    broken = Broken(world.now)
    broken.__dict__.update(world.log.__dict__)
    world.log = broken
    with pytest.raises(BrokenChain):
        await world.drive().outcome()


# --- what is too large, or no text --------------------------------------------------------------------------------


async def test_an_answer_too_large_for_an_event_goes_to_the_object_store() -> None:
    answer = "ä\n" * 30_000
    world = World(says(Reply(text=answer)), event_max=8192)
    await world.post()
    await world.drive().outcome()
    end = await ended(world)
    assert end.blob
    assert end.blob.size == len(answer.encode())
    assert world.blobs.there[end.blob.name].decode() == answer
    assert answer.startswith(end.content)
    assert 1000 < len(end.content.encode()) < 4096


async def test_a_result_too_large_for_an_event_goes_to_the_object_store() -> None:
    @tool(idempotent=True)
    def dump() -> str:
        return "\x01" * 100_000

    world = World(asks_once(call("dump")), tools=[dump], event_max=8192)
    await world.post()
    await world.drive().outcome()
    [returned] = [fact for fact in await world.facts() if isinstance(fact, ToolReturned)]
    assert returned.blob and returned.blob.size == 100_000
    assert returned.output and set(returned.output) == {"\x01"}


async def test_no_event_is_larger_than_it_may_be() -> None:
    big = "\x02" * 50_000
    reply = Reply(text=big, reasoning=big, tool_calls=tuple(call("look", f"{n}{big}", id=f"c{n}") for n in range(5)))

    async def script(request):  # type: ignore[no-untyped-def]
        done = isinstance(request.messages[-1], ToolMessage)
        yield Reply(text=big, reasoning=big) if done else reply

    world = World(script, tools=[tool(idempotent=True)(look)], event_max=8192)
    await world.post()
    assert await world.drive().outcome() is Outcome.DONE
    sizes = [recorded.size async for page in world.log.read(world.key()) for recorded in page]
    assert max(sizes) <= 8192
    assert (await ended(world)).status == "completed"


async def test_what_is_no_text_is_stored_as_text() -> None:
    world = World(says(Reply(text="a\ud800b\0c", reasoning="\udfff")))
    await world.post()
    assert await world.drive().outcome() is Outcome.DONE
    end = await ended(world)
    assert (end.content, end.reasoning) == ("a\ufffdb\ufffdc", "\ufffd")


@pytest.mark.parametrize("levels", [100, 900, 1_000, 5_000, 100_000])
@pytest.mark.parametrize("name", ["take", "conversation_ask_user", "nothing"])
async def test_arguments_of_many_levels_harm_nobody(levels: int, name: str) -> None:
    """Whatever a provider sends: the call has an error as its result, and the session goes on."""

    @tool
    def take(given: list[object]) -> str:
        "Takes."
        return "taken"

    agent = Agent(name="default", model="scripted", tools=[take], control=Control(ask_user=True))
    deep = '{"given":' + "[" * levels + "]" * levels + "}"
    world = World(asks_once(call(name, deep, id="deep")), agent=agent, tools=[take])
    await world.post("hello")
    assert await world.drive().outcome() is Outcome.DONE
    (returned,) = [fact for fact in await world.facts() if isinstance(fact, ToolReturned)]
    assert returned.status == "error" or (name, levels) == ("take", 100)
    await world.post("and now?")
    assert await world.drive(work=2).outcome() is Outcome.DONE
    assert (await world.types())[-1] == "run.ended"
