"""The sweep wakes what everybody has forgotten, and leaves alone what somebody will take."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.support.logs import Log, child_call, publish
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.server import NatsServer
from turnstream.session.commands import CancelRun, ExpireRequest
from turnstream.session.events import DeleteMode
from turnstream.views.database import Database
from turnstream.wire.work import Work
from turnstream_projector.project import Projector
from turnstream_projector.sweep import Sweep

OLD = 60_000
"""Milliseconds: older than what the sweep lets be."""


class Place:
    """A broker with a log, its views, and a sweep whose clock the test sets."""

    def __init__(self, broker: Broker, database: Database) -> None:
        self.broker = broker
        self.database = database
        self.work = Work(broker)
        self.log = Log()
        self.stored = 0
        self.sweep = Sweep(database, self.work, broker.clock, every=0.05, after=30)

    async def show(self) -> None:
        """Stores what is new in the log, and waits until the views show it."""
        await publish(self.broker, self.log.entries[self.stored :])
        self.stored = len(self.log.entries)
        assert await self.database.wait_for(self.log.seq, 30)

    def later(self, monkeypatch: pytest.MonkeyPatch, millis: int) -> None:
        now = self.broker.clock.now() + millis
        monkeypatch.setattr(self.broker.clock, "now", lambda: now)

    async def waiting(self) -> list[str]:
        """Subjects of every wake-up in WORK, oldest first."""
        info = await self.broker.api("STREAM.INFO.WORK", {"subjects_filter": "ts.work.>"})
        found: dict[str, int] = info["state"].get("subjects") or {}  # pyright: ignore
        return [subject for subject, count in sorted(found.items()) for _ in range(count)]


@pytest.fixture
async def place(broker: Broker, database: Database) -> AsyncIterator[Place]:
    task = asyncio.create_task(Projector(broker, database).run())
    yield Place(broker, database)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_s56_a_queued_run_that_nobody_was_woken_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.log.say("s1", "first")
    place.log.say("s1", "behind it")
    place.log.say("s2", "elsewhere", agent="painter")
    await place.show()
    assert await place.sweep.once() == 0  # they may still be on their way
    place.later(monkeypatch, OLD)
    assert await place.sweep.once() == 2
    one, two = subjects.work("default", place.log.key("s1")), subjects.work("gpu", place.log.key("s2"))
    assert await place.waiting() == [one, two]
    assert await place.sweep.once() == 0  # nothing twice
    message = await place.broker.api("STREAM.MSG.GET.WORK", {"last_by_subj": one})
    assert "message" in message
    assert (await place.work.waiting("default", place.log.key("s1"))) == 1


async def test_s56_work_wiped_under_a_running_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    key = place.log.key("s1")
    place.log.say("s1", "hello")
    place.log.say("s1", "next")
    await place.work.wake("default", key, 1)
    place.log.start("s1", 1, work=1)
    await place.show()
    place.later(monkeypatch, OLD)
    assert await place.sweep.once() == 0  # its wake-up is held by its runner
    await place.broker.api("STREAM.PURGE.WORK")
    assert await place.sweep.once() == 1
    assert await place.waiting() == [subjects.work("default", key)]
    assert await place.sweep.once() == 0


async def test_s56_a_wake_up_of_a_work_stream_that_was_made_anew_is_not_the_runs_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = place.log.key("s1")
    await place.work.wake("default", place.log.key("other"), 1)
    place.log.say("s1", "hello")
    place.log.start("s1", 1, work=1)  # sequence 1 is another session's wake-up
    await place.show()
    place.later(monkeypatch, OLD)
    assert await place.sweep.once() == 1
    assert subjects.work("default", key) in await place.waiting()


async def test_s56_a_deadline_whose_timer_was_lost(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    key = place.log.key("s1")
    place.log.say("s1", "hello")
    await place.work.wake("default", key, 1)
    place.log.start("s1", 1, work=1)
    await place.show()
    place.later(monkeypatch, 600_000 + OLD)
    assert await place.sweep.once() == 1
    assert len(await place.waiting()) == 2
    assert await place.sweep.once() == 0


async def test_what_has_ended_is_let_be(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.log.turn("s1")
    place.log.say("s2", "hello")
    place.log.do("s2", CancelRun(origin=place.log.origin(), run=1))
    await place.show()
    place.later(monkeypatch, 3_600_000)
    assert await place.sweep.once() == 0


async def test_many_forgotten_runs_are_taken_page_by_page(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnstream_projector.sweep.PAGE", 7)
    for n in range(40):
        place.log.time += n % 3
        place.log.say(f"s{n}", "hello")
    await place.show()
    place.later(monkeypatch, OLD)
    assert await place.sweep.once() == 40
    assert len(set(await place.waiting())) == 40


async def test_it_goes_on_when_the_broker_or_the_database_does_not_answer(
    place: Place, own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.log.say("s1", "hello")
    await place.show()
    place.later(monkeypatch, OLD)
    own_nats.kill()
    task = asyncio.create_task(place.sweep.run())
    await own_nats.start()

    async def woken() -> bool:
        return await place.waiting() == [subjects.work("default", place.log.key("s1"))]

    await eventually(woken, 30, what="the run woken")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# --- what waits -----------------------------------------------------------------------------------------------------


async def test_a_run_that_waits_for_a_person_is_let_be(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.log.open("s1", policy={"on_message": {"question": "queue"}})
    place.log.waits("s1", "question")
    place.log.say("s1", "behind it")
    await place.show()
    place.later(monkeypatch, 90 * 86_400_000)
    assert await place.sweep.once() == 0


async def test_s56_an_expiry_whose_timer_was_lost(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    key = place.log.key("s1")
    place.log.waits("s1", "question", "approval", expires_in=3_600_000)
    await place.show()
    place.later(monkeypatch, 3_600_000 - OLD)
    assert await place.sweep.once() == 0
    place.later(monkeypatch, 2 * OLD)
    assert await place.sweep.once() == 1
    assert await place.waiting() == [subjects.work("default", key)]
    assert await place.sweep.once() == 0  # somebody will come


async def test_s56_a_deadline_that_goes_on_while_a_run_waits(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.log.open("s1", policy={"clock": "wall"})
    place.log.waits("s1", "question")
    place.log.waits("s2", "question")  # its clock stands
    await place.show()
    place.later(monkeypatch, 600_000 + OLD)
    assert await place.sweep.once() == 1
    assert await place.waiting() == [subjects.work("default", place.log.key("s1"))]


async def test_s56_a_run_that_is_to_end_while_something_is_open(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.log.waits("s1", "question", "approval", expires_in=1000)
    place.log.time += 2000
    place.log.do("s1", ExpireRequest(origin=place.log.origin(), run=1, request=1, now=place.log.time))
    await place.show()
    place.later(monkeypatch, OLD)
    assert await place.sweep.once() == 1


async def test_s56_a_run_that_was_answered_and_nobody_woken(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.log.waits("s1", "question")
    place.log.answer("s1", 1, 1, "blue")
    await place.show()
    place.later(monkeypatch, OLD)
    assert await place.sweep.once() == 1


async def test_s56_runs_side_by_side_and_what_is_left_over(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    log = place.log
    log.say("s1", "one", agent="painter")
    log.say("s1", "two", busy="parallel")
    log.start("s1", 1)
    log.say("s1", "behind both")
    await place.show()
    await place.work.wake("gpu", log.key("s1"), 1)
    place.later(monkeypatch, OLD)
    assert await place.sweep.once() == 1
    assert await place.waiting() == [subjects.work(queue, log.key("s1")) for queue in ("default", "gpu")]


# --- what is copied -------------------------------------------------------------------------------------------------


async def test_s56_a_fork_that_nobody_makes_whole(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.log.say("s1", "hello")
    place.log.start("s1", 1, work=1)
    place.log.say("s1", "next")
    place.log.fork("f1", "s1")
    place.log.copy("f1", 2)
    await place.work.wake("default", place.log.key("s1"), 1)
    await place.show()
    assert await place.sweep.once() == 0
    place.later(monkeypatch, OLD)
    assert await place.sweep.once() == 1, "for the fork, and not for the run that it tells of"
    assert subjects.work("default", place.log.key("f1")) in await place.waiting()
    assert await place.sweep.once() == 0
    place.log.copy("f1")
    await place.show()
    await place.broker.api("STREAM.PURGE.WORK", {"filter": subjects.work("default", place.log.key("f1"))})
    assert await place.sweep.once() == 0


# --- what is deleted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["detach", "erase"])
async def test_s56_a_deletion_that_nobody_finishes(
    place: Place, monkeypatch: pytest.MonkeyPatch, mode: DeleteMode
) -> None:
    place.log.say("s1", "hello", agent="painter")
    place.log.delete("s1", mode)
    await place.show()
    assert await place.sweep.once() == 0
    place.later(monkeypatch, OLD)
    assert await place.sweep.once() == 1
    assert await place.waiting() == [subjects.work("gpu", place.log.key("s1"))]
    assert await place.sweep.once() == 0
    place.log.erase("s1")
    await place.show()
    await place.broker.api("STREAM.PURGE.WORK")
    assert await place.sweep.once() == 0


async def test_s56_a_child_whose_end_was_not_told(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.log.delegates("s1", True)
    place.log.start("s1--1-1", 1)
    place.log.end("s1--1-1", 1)
    await place.show()
    assert await place.sweep.once() == 0  # it may be about to
    place.later(monkeypatch, OLD)
    assert await place.sweep.once() == 1
    assert await place.waiting() == [subjects.work("default", place.log.key("s1--1-1"))]
    assert await place.sweep.once() == 0
    place.log.tell("s1--1-1")
    await place.show()
    await place.broker.api("STREAM.PURGE.WORK")
    assert await place.sweep.once() == 1
    assert await place.waiting() == [subjects.work("default", place.log.key("s1"))], "the parent can go on"


@pytest.mark.parametrize("deleted", [False, True])
async def test_s56_children_that_are_to_be_ended(place: Place, monkeypatch: pytest.MonkeyPatch, deleted: bool) -> None:
    place.log.say("s1", "hello")
    place.log.start("s1", 1)
    place.log.reply("s1", 1, child_call("d1"))
    place.log.intend("s1", 1, "d1")  # its session is not there, so nobody but this one can be woken for it
    place.log.do("s1", CancelRun(origin=place.log.origin(), run=1))
    place.log.end("s1", 1, status="cancelled")
    if deleted:
        place.log.delete("s1", "detach")
    await place.show()
    place.later(monkeypatch, OLD)
    assert await place.sweep.once() == 1
    assert await place.waiting() == [subjects.work("default", place.log.key("s1"))]
    assert await place.sweep.once() == 0


async def test_a_run_that_waits_for_its_children_is_let_be(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.log.delegates("s1", True)
    place.log.start("s1--1-1", 1)
    await place.work.wake("default", place.log.key("s1--1-1"), 1)
    await place.show()
    place.later(monkeypatch, OLD)
    woken = await place.sweep.once()
    assert await place.waiting() == [subjects.work("default", place.log.key("s1--1-1"))] * (1 + woken)
