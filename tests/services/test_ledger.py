"""What a drive reads of its session: what is new, and of an old one what it needs."""

import pytest
from tests.contracts.events import fill
from tests.support.driving import World
from tests.support.snapshots import Store

from turnstream.log.base import LogError
from turnstream.log.handle import Sessions
from turnstream.log.known import Known
from turnstream.log.snapshots import Snapshotter
from turnstream.session.events import MessagePosted, Wake
from turnstream.session.fold import fold
from turnstream.session.state import Session
from turnstream_runner.drive import Outcome
from turnstream_runner.ledger import Ledger

OLD = 1000


class Old:
    """A session of a thousand events, with a snapshot ten events before its end, and a run that is asked for now."""

    def __init__(self) -> None:
        self.world = World()
        self.store = Store()
        self.log = self.world.log
        self.key = self.world.key()

    async def begin(self) -> int:
        """The sequence of the message that asks for the run."""
        await fill(self.log, self.key, OLD)
        self.store.take(self.key, self.log._events[self.key][: OLD - 10])
        seq = (await self.world.post()).session.seq
        self.log.shown.clear()
        return seq

    def ledger(self) -> Ledger:
        """Of a process that knows nothing."""
        sessions = Sessions(
            self.log,
            now=self.world.now,
            known=Known(keep_bytes=1 << 20),
            snapshots=Snapshotter(self.log, self.store),
        )
        return Ledger(sessions, self.key, actor="runner:r1", now=self.world.now, stir=lambda: None)

    def shown(self) -> set[int]:
        shown = set(self.log.shown)
        self.log.shown.clear()
        return shown


@pytest.fixture
async def old() -> Old:
    return Old()


async def test_an_old_session_is_opened_at_its_snapshot(old: Old) -> None:
    posted = await old.begin()
    ledger = old.ledger()
    await ledger.open(Wake(work=1, cause=posted, delivery=1))
    assert ledger.session == fold(Session(key=old.key), old.log._events[old.key])
    run = ledger.session.run(1)
    assert run is not None
    assert (await ledger.request(run)).data == (await ledger.at(posted)).event.data
    assert min(old.shown()) == OLD - 10, "the event that the snapshot is of"


async def test_an_event_that_is_not_at_hand_is_read_alone(old: Old) -> None:
    posted = await old.begin()
    ledger = old.ledger()
    await ledger.open(Wake(work=1, cause=posted, delivery=1))
    old.shown()
    assert isinstance((await ledger.at(7)).event.data, MessagePosted)
    assert old.shown() == {7}
    ledger.forget_events()
    run = ledger.session.run(1)
    assert run is not None
    await ledger.request(run)
    await ledger.request(run)
    assert old.log.shown == [posted]
    with pytest.raises(LogError, match="event 5000 is not there"):
        await ledger.at(5000)


async def test_events_are_read_from_where_they_are_needed(old: Old) -> None:
    posted = await old.begin()
    ledger = old.ledger()
    await ledger.open(Wake(work=1, cause=posted, delivery=1))
    old.shown()
    for since in (posted, OLD, OLD - 9):
        assert [recorded.seq for recorded in await ledger.events(since)] == [*range(since, posted + 1)]
        assert (await ledger.at(since)).seq == since
    assert not old.shown(), "they were at hand"
    assert [recorded.seq for recorded in await ledger.events(OLD - 50)] == [*range(OLD - 50, posted + 1)]
    assert min(old.shown()) == OLD - 50
    assert len(await ledger.events(OLD - 20)) == 22
    assert not old.shown(), "they are at hand from now on"
    assert [recorded.seq for recorded in await ledger.events()] == [*range(1, posted + 1)]
    assert [recorded.seq for recorded in await ledger.first(5)] == [1, 2, 3, 4, 5]


async def test_the_first_events_are_read_without_the_rest(old: Old) -> None:
    posted = await old.begin()
    ledger = old.ledger()
    await ledger.open(Wake(work=1, cause=posted, delivery=1))
    old.shown()
    assert [recorded.seq for recorded in await ledger.first(5)] == [1, 2, 3, 4, 5]
    assert old.shown() == {1, 2, 3, 4, 5}


async def test_the_next_turn_in_the_same_process_reads_nothing_again(old: Old) -> None:
    """What is kept of an old session is its end."""
    posted = await old.begin()
    ledger = old.ledger()
    await ledger.open(Wake(work=1, cause=posted, delivery=1))
    await ledger.events(OLD - 50)
    old.shown()
    again = Ledger(ledger._sessions, old.key, actor="runner:r1", now=old.world.now, stir=lambda: None)
    await again.open(Wake(work=1, cause=posted, delivery=2))
    assert len(await again.events(OLD - 50)) == 52
    assert not old.shown()


async def test_a_turn_of_an_old_session_reads_what_its_model_is_shown() -> None:
    world, store = World(), Store()
    for _ in range(150):
        await world.post("x" * 200)
        await world.drive().outcome()
    log = world.log
    world.models.takes = 600
    store.take(world.key(), log._events[world.key()][:-10])
    posted = (await world.post("and now?")).session.seq
    log.shown.clear()
    running = world.drive(cause=posted, snapshots=store)
    assert await running.outcome() is Outcome.DONE
    request = world.models.requests[-1]
    assert 1 < len(request.messages) < 20 and request.messages[-1].text == "and now?"
    assert len(set(log.shown)) < 50 < min(log.shown)
    world.models.takes = 128_000
    await world.post("and with everything?")
    assert await world.drive(cause=posted, snapshots=store).outcome() is Outcome.DONE
    assert len(world.models.requests[-1].messages) == 2 * 152 - 1
