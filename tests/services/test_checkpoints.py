"""What only one run needs, beside the log: kept for its own later steps, seen by no other run, and never missed."""

import asyncio
from typing import Any

import pytest
from tests.support.driving import FakeCheckpoints, Jealous, World, call
from tests.support.stage import Actor, Stage
from tests.support.waiting import eventually

from turnstream.agents import tool
from turnstream.broker.connection import Broker
from turnstream.broker.server import NatsServer
from turnstream.ids import SessionKey
from turnstream.session.commands import AnswerRequest, RecordFact
from turnstream.session.events import Event, ModelReplied, Recorded, RunEnded, Spec
from turnstream.session.state import Run
from turnstream.subjects import CHECKPOINTS
from turnstream.wire.checkpoints import Checkpoints
from turnstream_runner.models.port import ModelRequest, Reply
from turnstream_runner.opaque import Opaque

KEY = SessionKey("acme", "s1")


@tool(idempotent=True)
def look(at: str = "") -> str:
    "Looks."
    return f"seen {at}"


@tool(name="look", idempotent=True, approval=True)
def look_if_told(at: str = "") -> str:
    "Looks, if a person says so."
    return f"seen {at}"


async def count(stage: Stage) -> int:
    """How many items there are, of whichever run."""
    return (await stage.broker.stream(CHECKPOINTS)).state.messages


# --- the bucket -------------------------------------------------------------------------------------------------------


async def test_items_of_a_run_are_found_in_order_until_they_are_dropped(nats: Broker, account: str) -> None:
    checkpoints = Checkpoints(nats)
    key, other = SessionKey(account, "s1"), SessionKey(account, "s1-1")
    first = await checkpoints.put(key, 1, "e1", b"one")
    second = await checkpoints.put(key, 1, "e2", b"\n\0\xff")
    for where, run in ((key, 2), (key, 11), (other, 1)):
        await checkpoints.put(where, run, "x", b"other")
    assert await checkpoints.get(key, 1) == [first, second]
    assert (second.name, second.item) == ("e2", b"\n\0\xff")
    await checkpoints.drop(key, 1, before=second.seq)
    assert await checkpoints.get(key, 1) == [second]
    await checkpoints.drop(key, 1)
    assert await checkpoints.get(key, 1) == []
    assert len(await checkpoints.get(key, 2)) == len(await checkpoints.get(key, 11)) == 1
    await checkpoints.erase(key)
    assert await checkpoints.get(key, 2) == await checkpoints.get(key, 11) == []
    assert len(await checkpoints.get(other, 1)) == 1


async def test_a_bucket_that_was_deleted_is_empty_and_there_again(stage: Stage) -> None:
    await stage.checkpoints.put(KEY, 1, "e1", b"one")
    await stage.broker.api(f"STREAM.DELETE.{CHECKPOINTS}")
    assert (await stage.checkpoints.put(KEY, 1, "e2", b"two")).seq == 0
    assert (await stage.checkpoints.put(KEY, 1, "e3", b"three")).seq == 1
    assert [entry.name for entry in await stage.checkpoints.get(KEY, 1)] == ["e3"]


# --- within a run -----------------------------------------------------------------------------------------------------


async def test_every_step_of_a_run_is_sent_what_the_steps_before_it_came_with(stage: Stage) -> None:
    model = Jealous(steps=3)
    await stage.actor(model, tools=[look])
    await stage.say("one")
    await stage.say("two", on_busy="queue")
    await stage.end(run=2)
    assert not model.faults
    for run in (1, 2):
        assert [model.sent_back[f"acme/s1.{run}:{step}"] for step in (1, 2, 3, 4)] == [
            [],
            [True],
            [True] * 2,
            [True] * 3,
        ]
    await eventually(lambda: _none(stage))


async def _none(stage: Stage) -> bool:
    return await count(stage) == 0


async def test_a_run_that_waits_and_goes_on_elsewhere_has_them_still(stage: Stage) -> None:
    model = Jealous(steps=3)
    actor = await stage.actor(model, tools=[look_if_told])
    await stage.say()
    for n in (1, 2, 3):
        await stage.waiting(count=n)
        assert await count(stage) == n
        await actor.leave()
        actor = await stage.actor(model, tools=[look_if_told])
        await stage.approve(k=n)
    assert (await stage.end()).content == "done"
    assert not model.faults
    assert model.sent_back["acme/s1.1:4"] == [True] * 3
    await eventually(lambda: _none(stage))


async def test_an_answer_that_turns_out_not_to_be_the_last_word_keeps_its_item(stage: Stage) -> None:
    asked = asyncio.Event()
    go_on = asyncio.Event()
    model = Jealous(steps=1)

    async def script(request: ModelRequest):  # type: ignore[no-untyped-def]
        if request.idempotency_key.endswith(":2"):
            asked.set()
            await go_on.wait()
        async for item in model(request):
            yield item

    await stage.actor(script, tools=[look])
    await stage.say(preset="thread")
    await asked.wait()
    await stage.say("and?")
    go_on.set()
    await stage.end()
    assert not model.faults
    assert model.sent_back["acme/s1.1:3"] == [True, True]


async def test_what_is_kept_is_bounded_and_the_oldest_goes(stage: Stage) -> None:
    model = Jealous(steps=4, size=200 * 1024)
    await stage.actor(model, tools=[look])
    await stage.say()
    await stage.end()
    assert not model.faults
    assert model.sent_back["acme/s1.1:4"] == [False, True, True]
    assert model.sent_back["acme/s1.1:5"] == [False, False, True, True]
    await eventually(lambda: _none(stage))


async def test_an_item_that_is_too_large_is_not_kept(stage: Stage) -> None:
    model = Jealous(steps=2, size=512 * 1024 + 1)
    await stage.actor(model, tools=[look])
    await stage.say()
    assert (await stage.end()).content == "done"
    assert model.sent_back["acme/s1.1:3"] == [False, False]
    assert await count(stage) == 0


# --- never another run's ----------------------------------------------------------------------------------------------


async def test_s26_no_run_is_ever_sent_what_another_one_came_with(stage: Stage) -> None:
    """Runs that end, fail, are tried again, go beside each other, and whose numbers are alike."""
    model = Jealous(steps=2)
    actor = await stage.actor(model, tools=[look])
    await stage.say("one", on_busy="parallel")
    await stage.say("two", on_busy="parallel")
    await stage.say("other", "s1-1")
    await stage.until("run.ended", count=2)
    await stage.end("s1-1")

    async def breaks(request: ModelRequest):  # type: ignore[no-untyped-def]
        if request.idempotency_key.endswith(":3"):
            raise ValueError
        async for item in model(request):
            yield item

    actor.models.script = breaks
    await stage.say("fails")
    assert (await stage.end(run=3)).status == "failed"
    actor.models.script = model
    await stage.retry()
    assert (await stage.end(run=4)).content == "done"
    assert model.sent_back["acme/s1.4:1"] == []
    assert not model.faults
    await eventually(lambda: _none(stage))


async def test_an_item_that_nobody_dropped_is_of_its_own_run_only(stage: Stage) -> None:
    model = Jealous(steps=2)
    await stage.actor(model, tools=[look])
    for run in (2, 11):
        await stage.checkpoints.put(KEY, run, "left-by-somebody", b"foreign")
    for n in (1, 2):
        await stage.say()
        await stage.end(run=n)
    assert not model.faults


async def test_an_item_of_an_erased_session_is_none_of_the_one_that_has_its_id_now() -> None:
    """Its runs and events have the same ids again: a runner that was frozen put an item there meanwhile."""

    def run(requested_seq: int) -> Run:
        spec = Spec(agent="default", version="v1", digest="d1", model="demo")
        return Run(n=1, spec=spec, message_ids=(), author="", requested_seq=requested_seq, requested_at=0)

    there: Any = FakeCheckpoints()
    await Opaque(there, KEY, run(7), is_new=True).keep("event-1", b"of the erased session")
    replied = ModelReplied(run=1, attempt=1, step=1, content="hm")
    event = Event(id="event-1", key=KEY, data=replied, actor="", time=0)
    reply = Recorded(seq=9, previous=8, time=0, size=1, event=event)
    assert await Opaque(there, KEY, run(7), is_new=False).of([reply]) == (b"of the erased session",)
    assert await Opaque(there, KEY, run(8), is_new=False).of([reply]) == (b"",)


# --- never missed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["purged", "deleted"])
@pytest.mark.parametrize("at", range(1, 5))
async def test_a_run_whose_checkpoints_are_lost_at_any_point_ends_the_same_way(stage: Stage, at: int, how: str) -> None:
    """Before its `at`th model call. It waits for a person once, so that they are read again."""
    model = Jealous(steps=3)

    async def script(request: ModelRequest):  # type: ignore[no-untyped-def]
        if request.idempotency_key == f"acme/s2.1:{at}":
            await stage.broker.api(f"STREAM.{'PURGE' if how == 'purged' else 'DELETE'}.{CHECKPOINTS}")
        async for item in model(request):
            yield item

    await stage.actor(script, tools=[look_if_told])
    for session in ("s1", "s2"):
        await stage.say("go", session, name="m1")
        for n in (1, 2, 3):
            await stage.waiting(session, count=n)
            await stage.do(AnswerRequest(origin=stage.origin(), run=1, request=n, approved=True), session)
        await stage.end(session)
    assert not model.faults
    assert await told(stage, "s1") == await told(stage, "s2")


async def told(stage: Stage, session: str) -> list[Any]:
    """The facts, as far as they are the same in two sessions where the same is done."""
    names = ("content", "status", "output", "tool_calls", "trigger", "message_ids", "error")
    return [(type(fact), *(getattr(fact, name, None) for name in names)) for fact in await stage.facts(session)]


async def test_a_bucket_out_of_reach_is_no_run_s_trouble() -> None:
    model = Jealous(steps=2)
    world = World(model, tools=[look])
    world.checkpoints.away = True
    await world.post()
    await world.drive().outcome()
    assert [type(fact) for fact in await world.facts()][-1] is RunEnded
    assert model.sent_back["acme/s1.1:3"] == [True, True], "an attempt knows its own"
    assert not model.faults


async def die_before(actor: Actor, kind: type[Any]) -> asyncio.Event:
    """The runner stops for ever right before it stores a fact of this kind; the event is set then."""
    reached = asyncio.Event()
    handle = actor.runner._equipment.sessions.handle

    async def stop(key: SessionKey, command: Any, **options: Any) -> Any:
        if isinstance(command, RecordFact) and isinstance(command.fact, kind):
            reached.set()
            await asyncio.Event().wait()
        return await handle(key, command, **options)

    actor.runner._equipment.sessions.handle = stop  # type: ignore[method-assign]
    return reached


async def test_an_item_whose_reply_was_never_stored_is_never_sent(stage: Stage) -> None:
    """Killed between the checkpoint and the event: the next attempt's reply is another one, with an item of its own."""
    lost, model = Jealous(steps=2, size=100), Jealous(steps=2)
    first = await stage.actor(lost, tools=[look])
    reached = await die_before(first, ModelReplied)
    await stage.say()
    await reached.wait()
    assert await count(stage) == 1
    await first.die()
    await stage.actor(model, tools=[look])
    end = await stage.end()
    assert (end.content, end.attempt) == ("done", 2)
    assert not model.faults
    assert model.sent_back["acme/s1.1:3"] == [True, True]
    await eventually(lambda: _none(stage))


async def test_items_of_an_attempt_that_died_are_sent_with_the_replies_that_it_stored(stage: Stage) -> None:
    model = Jealous(steps=2)
    first = await stage.actor(model, tools=[look])
    reached = await die_before(first, RunEnded)
    await stage.say()
    await reached.wait()
    await first.die()
    await stage.actor(model, tools=[look])
    assert (await stage.end()).attempt == 2
    assert not model.faults
    assert model.sent_back["acme/s1.1:3"] == [True, True]
    await eventually(lambda: _none(stage))


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_whatever_ends_a_run_nothing_is_left_of_it_in_the_files_of_the_server(
    stage: Stage, own_nats: NatsServer
) -> None:
    """Cancelled while it waits for its model; timed out while it waits for a person, by a drive that never had it."""
    model = Jealous(steps=1)
    hangs = asyncio.Event()

    async def script(request: ModelRequest):  # type: ignore[no-untyped-def]
        if request.idempotency_key == "acme/s1.1:2":
            hangs.set()
            await asyncio.Event().wait()
        async for item in model(request):
            yield item

    actor = await stage.actor(script, tools=[look])
    await stage.say()
    await hangs.wait()
    assert b"secret" in _files(own_nats)
    await stage.cancel(1)
    assert (await stage.end()).status == "cancelled"
    await actor.leave()
    await stage.actor(model, tools=[look_if_told], limits={"timeout": 0.5})
    await stage.say(session="s2", clock="wall")
    await stage.waiting("s2")
    assert (await stage.end("s2")).status == "timed_out"
    await eventually(lambda: _none(stage))
    assert b"secret" not in _files(own_nats)


def _files(server: NatsServer) -> bytes:
    return b"".join(file.read_bytes() for file in server.store.rglob("*.blk"))


async def test_a_run_without_such_items_asks_nothing_of_the_bucket() -> None:
    world = World(tools=[look])
    await world.post()
    await world.drive().outcome()

    async def script(request: ModelRequest):  # type: ignore[no-untyped-def]
        step = request.idempotency_key.rpartition(":")[2]
        yield Reply(tool_calls=(call("look", id=f"c{step}"),)) if step == "1" else Reply(text="done")

    world.models.script = script
    await world.post()
    await world.drive(work=2).outcome()
    assert world.checkpoints.gets == 0
    assert not world.checkpoints.there
