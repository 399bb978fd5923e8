"""A drive of a fork: it copies what the other session has, ends what was live there, and says that it is whole."""

import asyncio
from typing import Any

import msgspec
import pytest
from tests.support.driving import Running, World, asks_once

from turnstream.agents import Agent, Control, tool
from turnstream.ids import derive
from turnstream.session.commands import CompactHistory, DeleteSession, ForkSession
from turnstream.session.events import (
    DELEGATE,
    Copied,
    ForkedFrom,
    HistoryCompacted,
    Opens,
    Recorded,
    SessionForked,
    ToolCall,
    ToolReturned,
)
from turnstream.session.history import build
from turnstream.session.state import Session
from turnstream_runner.drive import Outcome

ASKS = asks_once(ToolCall(id="c1", name="conversation_ask_user", arguments='{"question":"Which?"}'))


@tool(idempotent=True)
def long_text() -> str:
    """A text that no event has room for."""
    return "x" * 50_000


async def fork(
    world: World, source: str = "s1", session: str = "f1", *, through: int = 0, queue: str = "default"
) -> None:
    through = through or await world.log.last(world.key(source))
    forked_from = ForkedFrom(session=source, through=through, queue=queue)
    await world.do(ForkSession(origin=world.origin(), opens=Opens(), forked_from=forked_from), session)


async def read(world: World, session: str) -> list[Recorded]:
    return [recorded async for page in world.log.read(world.key(session)) for recorded in page]


async def loaded(world: World, session: str = "f1") -> Session:
    return await world.sessions.load(world.key(session))


async def talked(world: World, turns: int = 2) -> None:
    """A session with some turns, of which the last has not begun."""
    for _ in range(turns):
        await world.post()
        await world.drive().outcome()
    await world.post()


def is_copied(copy: Recorded, original: Recorded) -> bool:
    """Whether it says the same, at the same time, in a session without requests and blobs."""
    same = msgspec.structs.replace(
        original.event,
        id=derive(str(copy.event.key), "copy of", original.event.id),
        key=copy.event.key,
        idempotency_key=None,
        body_digest=None,
        copied=Copied("s1", original.seq, original.time),
    )
    return copy.event == same and copy.time == original.time


async def check_whole(world: World) -> None:
    """The fork has what `s1` has, in its order, each event once, and nothing goes on in it."""
    source, copies = await read(world, "s1"), (await read(world, "f1"))[1:]
    assert len(copies) == len(source) + 2
    assert all(is_copied(copy, original) for copy, original in zip(copies, source, strict=False))
    end, last = [recorded.event.data for recorded in copies[-2:]]
    assert (end.status, end.reason, end.run) == ("cancelled", "forked", 3)  # type: ignore[union-attr]
    assert last == SessionForked(events=len(source))
    session = await loaded(world)
    assert session.copying is None
    assert session.runs == ()


async def test_a62_a_fork_has_every_event_of_the_other_up_to_its_own_and_goes_on_by_itself() -> None:
    world = World()
    await talked(world)
    await fork(world)
    await world.post("and more", on_busy="queue")  # is not of the fork
    source = (await read(world, "s1"))[:-1]
    assert await world.drive("f1").outcome() is Outcome.DONE
    copies = (await read(world, "f1"))[1:]
    assert all(is_copied(copy, original) for copy, original in zip(copies, source, strict=False))
    assert build(await loaded(world), copies) == build(await loaded(world, "s1"), source)
    await world.post("another way", "f1")
    assert await world.drive("f1").outcome() is Outcome.DONE
    assert world.models.requests[-1].messages[-1].text == "another way"
    assert world.models.requests[-1].messages[0].text == "hello"
    assert len(await read(world, "s1")) == len(source) + 1, "nothing of it comes back"


class Fatal:
    """Appends of a log, the `at`th of which its drive does not survive: before it is stored, or after."""

    def __init__(self, world: World, at: int, *, stored: bool) -> None:
        self.reached = asyncio.Event()
        self.count = 0
        self._append: Any = world.log.append
        self._world = world
        self._at = at
        self._stored = stored
        world.log.append = self  # type: ignore[method-assign,assignment]

    async def __call__(self, *given: Any) -> int:
        self.count += 1
        fatal = self.count == self._at
        seq: int | None = None
        if not fatal or self._stored:
            seq = await self._append(*given)
        if fatal:
            self.reached.set()
            await asyncio.Event().wait()
        assert seq is not None
        return seq

    async def strike(self, running: Running) -> None:
        await asyncio.wait((asyncio.ensure_future(self.reached.wait()), running.task), return_when="FIRST_COMPLETED")
        await running.die()
        self._world.log.append = self._append  # type: ignore[method-assign]


@pytest.mark.parametrize("stored", [False, True], ids=["before", "after"])
async def test_a62_killed_at_any_append_it_is_made_whole_by_the_next(stored: bool) -> None:
    points = 0
    for at in range(1, 100):
        world = World()
        await talked(world)
        await fork(world)
        fatal = Fatal(world, at, stored=stored)
        await fatal.strike(world.drive("f1", work=1))
        assert await world.drive("f1", work=2).outcome() is Outcome.DONE
        await check_whole(world)
        if not fatal.reached.is_set():
            break
        points = at
    assert points == len(await read(world, "s1")) + 2, "every event, the end of the run, the word that it is whole"


async def test_an_append_whose_answer_is_lost_is_stored_once() -> None:
    world = World()
    await talked(world)
    await fork(world)
    world.log.lose_answers = 3
    assert await world.drive("f1").outcome() is Outcome.DONE
    await check_whole(world)


async def test_two_who_copy_at_once_copy_each_event_once() -> None:
    world = World()
    await talked(world, 6)
    await fork(world)
    drives = [world.drive("f1", work=n) for n in (1, 2, 3)]
    assert [await drive.outcome() for drive in drives] == [Outcome.DONE] * 3
    source, copies = await read(world, "s1"), (await read(world, "f1"))[1:]
    assert [copy.event.copied and copy.event.copied.seq for copy in copies[:-2]] == [one.seq for one in source]
    assert (await loaded(world)).copying is None


async def test_the_runners_of_another_queue_leave_it_alone() -> None:
    world = World()
    await talked(world)
    await fork(world, queue="gpu")
    assert await world.drive("f1").outcome() is Outcome.DONE
    assert len(await read(world, "f1")) == 1
    assert await world.drive("f1", queue="gpu").outcome() is Outcome.DONE
    await check_whole(world)


async def test_a_run_that_waits_is_closed_with_what_it_asks() -> None:
    asker = Agent(name="default", model="scripted", control=Control(ask_user=True))
    world = World(ASKS, agent=asker)
    await world.post()
    await world.drive().outcome()
    await fork(world)
    assert await world.drive("f1").outcome() is Outcome.DONE
    session = await loaded(world)
    assert session.runs == ()
    closed = session.closed.get("f1.1.q1")
    assert closed and closed.how == "ended"
    source = await loaded(world, "s1")
    assert [run.status for run in source.runs] == ["waiting"], "there it goes on"


async def test_a_fork_of_a_run_that_has_delegated_leaves_its_sub_agents_alone() -> None:
    order = ToolCall(id="d1", name=DELEGATE, arguments='{"brief": "help"}')
    world = World(asks_once(order), agent=Agent(name="default", model="scripted", control=Control(delegate=True)))
    await world.post()
    await world.drive().outcome()
    child = await read(world, "s1--1-1")
    await fork(world)
    assert await world.drive("f1").outcome() is Outcome.DONE
    assert await world.drive("f1", work=2).outcome() is Outcome.DONE
    assert await read(world, "s1--1-1") == child, "nobody calls it off"
    assert not await world.log.last(world.key("f1--1-1")), "and there is no other"
    await world.do(DeleteSession(origin=world.origin(), specs={}, mode="erase", active="cancel"), "f1")
    assert await world.drive("f1", work=3).outcome() is Outcome.DONE
    assert await read(world, "s1--1-1") == child, "nor does it go with the fork"
    assert [run.status for run in (await loaded(world, "s1")).runs] == ["waiting"]


async def test_what_is_summed_up_is_so_in_the_fork_whoever_copies_it() -> None:
    world = World()
    await talked(world)
    end = next(recorded.seq for recorded in await read(world, "s1") if recorded.event.type == "run.ended")
    await world.do(CompactHistory(origin=world.origin(), through=end, summary="They greeted."))
    before = len(await read(world, "s1"))
    for at in (1, before - 1, before):  # it is copied by whom began, by whom has copied all but it, and by another
        here = World(shares=world)
        await fork(here, session=f"f{at}x")
        fatal = Fatal(here, at, stored=True)
        await fatal.strike(here.drive(f"f{at}x", work=1))
        assert await here.drive(f"f{at}x", work=2).outcome() is Outcome.DONE
        copies = await read(here, f"f{at}x")
        (there,) = [copy.seq for copy in copies if copy.event.copied and copy.event.copied.seq == end]
        (summary,) = [copy.event.data for copy in copies if isinstance(copy.event.data, HistoryCompacted)]
        assert summary.through == there


async def test_what_lies_in_the_object_store_is_the_fork_s_own() -> None:
    world = World(asks_once(ToolCall(id="c1", name="long_text", arguments="{}")), tools=[long_text], event_max=4096)
    await world.post()
    await world.drive().outcome()
    await fork(world)
    assert await world.drive("f1").outcome() is Outcome.DONE
    (returned,) = [fact for fact in await world.facts("f1") if isinstance(fact, ToolReturned)]
    assert returned.blob
    assert returned.blob.name.startswith("acme/f1/")
    assert world.blobs.there[returned.blob.name] == b"x" * 50_000


async def test_what_the_other_has_lost_is_lost_to_the_fork_too() -> None:
    world = World(asks_once(ToolCall(id="c1", name="long_text", arguments="{}")), tools=[long_text], event_max=4096)
    await world.post()
    await world.drive().outcome()
    world.blobs.there.clear()
    await fork(world)
    assert await world.drive("f1").outcome() is Outcome.DONE
    assert (await loaded(world)).copying is None
    assert world.blobs.there == {}


async def test_a62_where_the_other_is_deleted_meanwhile_the_fork_goes_too() -> None:
    world = World()
    await talked(world)
    await fork(world)
    await world.do(DeleteSession(origin=world.origin(), specs={}, mode="detach", active="cancel"))
    assert await world.drive().outcome() is Outcome.DONE  # it is removed
    assert await world.drive("f1").outcome() is Outcome.DONE
    assert await world.types("f1") == ["session.erased"]


async def test_a62_where_the_other_is_erased_in_the_middle_nothing_of_it_is_left() -> None:
    world = World(asks_once(ToolCall(id="c1", name="long_text", arguments="{}")), tools=[long_text], event_max=4096)
    await world.post()
    await world.drive().outcome()
    await fork(world)
    get: Any = world.blobs.get

    async def get_and_delete(*given: Any) -> bytes:
        data = await get(*given)
        await world.do(DeleteSession(origin=world.origin(), specs={}, mode="erase", active="cancel"))
        await world.drive(work=5).outcome()
        return data

    world.blobs.get = get_and_delete  # type: ignore[method-assign]
    page = world.log.read

    async def one_by_one(*given: Any, **named: Any) -> Any:
        async for events in page(*given, **named):
            for recorded in events:
                yield [recorded]

    world.log.read = one_by_one  # type: ignore[method-assign,assignment]
    assert await world.drive("f1", work=6).outcome() is Outcome.DONE
    assert [recorded.event.type for recorded in await read(world, "f1")] == ["session.erased"]
    assert [str(key) for key, _ in world.eraser.erased] == ["acme/s1", "acme/f1"]


async def test_another_session_that_has_the_id_by_now_is_not_copied() -> None:
    world = World()
    await talked(world)
    await fork(world)
    world.log._events.clear()  # the tombstone has expired, too
    world.log._seqs.clear()
    await world.post("not of it")
    events = await read(world, "s1")
    forked = World(shares=world)
    await forked.do(
        ForkSession(
            origin=forked.origin(),
            opens=Opens(),
            forked_from=ForkedFrom(session="s1", through=events[0].seq - 1),
        ),
        "f2",
    )
    assert await forked.drive("f2").outcome() is Outcome.DONE
    assert await forked.types("f2") == ["session.erased"]


async def test_a_fork_that_is_deleted_while_it_is_copied_leaves_nothing_in_the_object_store() -> None:
    world = World(asks_once(ToolCall(id="c1", name="long_text", arguments="{}")), tools=[long_text], event_max=4096)
    await world.post()
    await world.drive().outcome()
    await fork(world)
    put: Any = world.blobs.put

    async def put_and_delete(*given: Any) -> Any:
        blob = await put(*given)
        await world.do(DeleteSession(origin=world.origin(), specs={}, mode="erase", active="cancel"), "f1")
        return blob

    world.blobs.put = put_and_delete  # type: ignore[method-assign]
    assert await world.drive("f1").outcome() is Outcome.DONE
    assert await world.types("f1") == ["session.erased"]
    assert [name for name in world.blobs.there if "f1" in name] == []


class Held:
    """Keeps reads of a session from coming to an end."""

    def __init__(self, world: World, session: str) -> None:
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        last: Any = world.log.last

        async def held(key: Any) -> int:
            if key.session == session:
                self.reached.set()
                await self.go_on.wait()
            return await last(key)

        world.log.last = held  # type: ignore[method-assign]


async def test_it_is_given_back_at_shutdown() -> None:
    world = World()
    await talked(world)
    await fork(world)
    held = Held(world, "s1")
    running = world.drive("f1")
    await held.reached.wait()
    running.drive.drain()
    assert await running.outcome() is Outcome.HANDED_BACK
    held.go_on.set()
    assert await world.drive("f1", work=2).outcome() is Outcome.DONE
    await check_whole(world)


async def test_it_stops_at_once_where_the_fork_is_deleted() -> None:
    world = World()
    await talked(world)
    await fork(world)
    held = Held(world, "s1")
    running = world.drive("f1")
    await held.reached.wait()
    await world.do(DeleteSession(origin=world.origin(), specs={}, mode="erase", active="cancel"), "f1")
    assert await running.outcome() is Outcome.DONE
    assert await world.types("f1") == ["session.erased"]


async def test_where_many_are_being_copied_it_comes_again_in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    await talked(world)
    await fork(world)
    monkeypatch.setattr("turnstream_runner.copying.Copier.full", True)
    assert await world.drive("f1").outcome() is Outcome.BUSY
    assert len(await read(world, "f1")) == 1
    monkeypatch.undo()
    assert await world.drive("f1", work=2).outcome() is Outcome.DONE
    await check_whole(world)


async def test_a_fork_that_is_taken_to_its_end_asks_nothing_twice() -> None:
    """A page of events costs one question for the end of the other session and one read; each event one append."""
    world = World()
    await talked(world)
    await fork(world)
    appends, events = world.log.appends, len(await read(world, "s1"))
    await world.drive("f1").outcome()
    assert world.log.appends - appends == events + 2
