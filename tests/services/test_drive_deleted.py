"""A drive of a session that is deleted: it stops whatever it was at, removes what is left and says so, once."""

import asyncio
from typing import Any

import pytest
from tests.support.driving import Latch, World, asks_once
from tests.support.waiting import eventually

from turnstream.agents import tool
from turnstream.log.handle import Handled
from turnstream.session.commands import DeleteSession
from turnstream.session.events import NAMES, DeleteMode, ToolCall
from turnstream_runner.drive import Outcome


async def delete(world: World, mode: DeleteMode = "erase") -> Handled:
    return await world.do(DeleteSession(origin=world.origin(), specs={}, mode=mode, active="cancel"))


async def left(world: World) -> list[str]:
    events = [recorded async for page in world.log.read(world.key()) for recorded in page]
    return [NAMES[type(recorded.event.data)] for recorded in events]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mode", ["detach", "erase"])
async def test_what_is_left_is_removed_once(mode: DeleteMode) -> None:
    world = World()
    await world.post()
    deleted = await delete(world, mode)
    assert await world.drive(work=7).outcome() is Outcome.DONE
    assert world.eraser.erased == [(world.key(), 7)]
    assert await left(world) == ["session.erased"]
    session = await world.sessions.load(world.key())
    assert session.deleted and session.deleted.erased
    assert (session.deleted.events, session.deleted.mode) == (2, mode)
    assert deleted.session.deleted and session.deleted.at == deleted.session.deleted.at
    assert await world.drive(work=8).outcome() is Outcome.DONE
    assert world.eraser.begun == 1


async def test_a_run_is_given_up_for_it_by_the_drive_that_carries_it_out() -> None:
    latch = Latch()
    world = World(latch)
    await world.post()
    running = world.drive(work=1)
    await latch.reached.wait()
    await delete(world)
    assert await running.outcome() is Outcome.DONE
    assert world.models.closed == 1
    assert await left(world) == ["session.erased"]


async def test_a_drive_that_dies_leaves_it_to_the_next() -> None:
    world = World()
    await world.post()
    await delete(world)
    world.eraser.held = asyncio.Event()
    dying = world.drive(work=1)
    await eventually(lambda: world.eraser.begun == 1)
    await dying.die()
    assert await left(world) == ["message.posted", "session.deleted"]
    world.eraser.held.set()
    assert await world.drive(work=2).outcome() is Outcome.DONE
    assert await left(world) == ["session.erased"]


async def test_two_drives_at_once_do_no_harm() -> None:
    world = World()
    await world.post()
    await delete(world)
    world.eraser.held = asyncio.Event()
    drives = [world.drive(work=n) for n in (1, 2)]
    await eventually(lambda: world.eraser.begun == 2)
    world.eraser.held.set()
    assert [await drive.outcome() for drive in drives] == [Outcome.DONE] * 2
    assert await left(world) == ["session.erased"]


async def test_where_many_are_being_removed_it_comes_again_in_a_moment() -> None:
    world = World()
    await world.post()
    await delete(world)
    world.eraser.full = True
    assert await world.drive().outcome() is Outcome.BUSY
    assert world.eraser.begun == 0
    world.eraser.full = False
    assert await world.drive(work=2).outcome() is Outcome.DONE
    assert await left(world) == ["session.erased"]


async def test_it_is_given_back_at_shutdown() -> None:
    world = World()
    await world.post()
    await delete(world)
    world.eraser.held = asyncio.Event()
    running = world.drive()
    await eventually(lambda: world.eraser.begun == 1)
    running.drive.drain()
    running.drive.end_grace()
    assert await running.outcome() is Outcome.HANDED_BACK
    assert await left(world) == ["message.posted", "session.deleted"]


async def test_the_runners_of_another_queue_leave_it_alone() -> None:
    world = World()
    await world.post()
    await delete(world)
    assert await world.drive(queue="gpu").outcome() is Outcome.DONE
    assert world.eraser.begun == 0


async def test_a_result_that_came_too_late_leaves_nothing_in_the_object_store() -> None:
    """It is put before the event that names it, and that is refused."""
    reached, go_on = asyncio.Event(), asyncio.Event()

    @tool(idempotent=True)
    async def long_text() -> str:
        """A text."""
        reached.set()
        await go_on.wait()
        return "x" * 50_000

    world = World(asks_once(ToolCall(id="c1", name="long_text", arguments="{}")), tools=[long_text], event_max=4096)
    put: Any = world.blobs.put

    async def put_and_delete(*given: Any) -> Any:
        blob = await put(*given)
        await delete(world)
        return blob

    world.blobs.put = put_and_delete  # type: ignore[method-assign]
    await world.post()
    running = world.drive()
    await reached.wait()
    go_on.set()
    assert await running.outcome() is Outcome.DONE
    assert world.blobs.there == {}
    assert await left(world) == ["session.erased"]
