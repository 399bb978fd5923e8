"""Snapshots as the log sees them: which one is believed, when one is written, and that none is ever needed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from tests.contracts.events import decision, deleted, erased, fill, read
from tests.contracts.test_log_handle import KEY, OPENS, Watched
from tests.core.scenario import QUEUE, post
from tests.support.snapshots import Store
from tests.support.waiting import eventually

from turnstream.ids import SessionKey
from turnstream.log import snapshots
from turnstream.log.handle import Sessions
from turnstream.log.known import Known
from turnstream.log.snapshots import EVERY, Snapshotter
from turnstream.session import snapshot
from turnstream.session.fold import fold
from turnstream.session.state import Session


@pytest.fixture
def log() -> Watched:
    return Watched()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
async def processes(log: Watched, store: Store) -> AsyncIterator[Callable[[], Sessions]]:
    made: list[Sessions] = []

    def process() -> Sessions:
        made.append(Sessions(log, now=lambda: 7, known=Known(keep_bytes=1 << 24), snapshots=Snapshotter(log, store)))
        return made[-1]

    yield process
    for sessions in made:
        await sessions.close()


Processes = Callable[[], Sessions]


def truth(log: Watched, key: SessionKey = KEY) -> Session:
    return fold(Session(key=key), log._events[key])


def take(log: Watched, store: Store, events: int, key: SessionKey = KEY) -> Session:
    """What the session was after so many events, and a snapshot of that."""
    return store.take(key, log._events[key][:events])


async def until_written(store: Store, seq: int) -> None:
    def there() -> bool:
        found = store.found(KEY)
        return found is not None and found.seq == seq

    await eventually(there, what=f"a snapshot at {seq}")


async def is_idle(sessions: Sessions) -> None:
    """Whatever was begun in the background is done."""
    assert sessions._snapshots
    await eventually(lambda: not sessions._snapshots._due)


# --- which one is believed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("events", [1, 200, 299, 300])
async def test_a_session_that_is_not_known_goes_on_from_its_snapshot(
    log: Watched, store: Store, processes: Processes, events: int
) -> None:
    await fill(log, KEY, 300)
    known = take(log, store, events)
    log.take_asked()
    assert await processes().load(KEY) == truth(log)
    assert log.take_asked()[0] == f"read {known.seq - 1}", "the event that it is of, and those behind it"


async def of_another_session(log: Watched, store: Store) -> bytes:
    other = SessionKey(KEY.account, f"{KEY.session}-other")
    await fill(log, other, 200)
    take(log, store, 200, other)
    return store.held[other][0]


async def of_another_release(log: Watched, store: Store) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "FOLD_VERSION", "0123456789abcdef")
        take(log, store, 200)
    return store.held[KEY][0]


async def damaged(log: Watched, store: Store) -> bytes:
    take(log, store, 200)
    data = bytearray(store.held[KEY][0])
    data[len(data) // 2] ^= 1
    return bytes(data)


async def of_more_than_there_is(log: Watched, store: Store) -> bytes:
    """The log has lost its end."""
    take(log, store, 300)
    log.lose(KEY, after=(await read(log, KEY))[249].seq)
    return store.held[KEY][0]


async def of_another_life(log: Watched, store: Store) -> bytes:
    """Its end was lost, and the same sequences were issued again, for other events."""
    take(log, store, 300)
    kept = (await read(log, KEY))[249].seq
    log.lose(KEY, after=kept)
    log._last = kept
    await fill(log, KEY, 60, kept, text="another life")
    return store.held[KEY][0]


async def with_the_same_ids(log: Watched, store: Store) -> bytes:
    """As before, and the events have the ids that the lost ones had: ids are derived. Their times differ."""
    take(log, store, 300)
    before = await read(log, KEY)
    log.lose(KEY, after=before[249].seq)
    log._last = before[249].seq
    for lost in before[250:]:
        other = msgspec.structs.replace(lost.event, data=decision(KEY, "x", "another life").event.data)
        await log.append(KEY, msgspec.structs.replace(decision(KEY, "x"), event=other), lost.previous)
    assert [one.event.id for one in await read(log, KEY)] == [one.event.id for one in before]
    return store.held[KEY][0]


@pytest.mark.parametrize(
    "made",
    [
        of_another_session,
        of_another_release,
        damaged,
        of_more_than_there_is,
        of_another_life,
        with_the_same_ids,
    ],
)
async def test_any_other_snapshot_is_as_none(
    log: Watched, store: Store, processes: Processes, made: Callable[[Watched, Store], Awaitable[bytes]]
) -> None:
    await fill(log, KEY, 300)
    store.held[KEY] = await made(log, store), 5
    log.take_asked()
    sessions = processes()
    session = await sessions.load(KEY)
    assert session == truth(log)
    assert "read 0" in log.take_asked()
    await until_written(store, session.seq)
    assert await processes().load(KEY) == truth(log)


async def test_a_snapshot_of_an_erased_session_is_none(log: Watched, store: Store, processes: Processes) -> None:
    """Its id was free again, and is another session's by now."""
    seqs = await fill(log, KEY, 200)
    take(log, store, 200)
    last = await log.append(KEY, deleted(KEY, events=201), seqs[-1])
    await log.overwrite(KEY)
    await log.append(KEY, erased(KEY), last)
    assert (await processes().load(KEY)).deleted
    log._remove(KEY, 1)
    await fill(log, KEY, 150)
    session = await processes().load(KEY)
    assert session == truth(log) and session.events == 150


async def test_a_session_that_is_deleted_since_is_deleted(log: Watched, store: Store, processes: Processes) -> None:
    seqs = await fill(log, KEY, 200)
    take(log, store, 150)
    await log.append(KEY, deleted(KEY, events=201), seqs[-1])
    assert await processes().load(KEY) == truth(log)


async def test_nobody_waits_for_a_snapshot_that_does_not_come(
    log: Watched, store: Store, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(log, KEY, 300)
    take(log, store, 200)
    store.away = True
    sessions = processes()
    assert await sessions.load(KEY) == truth(log)
    await is_idle(sessions)

    async def never(_: SessionKey) -> tuple[bytes, int]:
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(store, "get", never)
    monkeypatch.setattr(snapshots, "WAIT", 0.01)
    assert await processes().load(KEY) == truth(log)


async def test_who_has_slept_long_goes_on_from_a_snapshot(log: Watched, store: Store, processes: Processes) -> None:
    seqs = await fill(log, KEY, 50)
    sessions = processes()
    _, events = await sessions.events(KEY)
    seqs += await fill(log, KEY, 1000, seqs[-1])
    known = take(log, store, 1000)
    log.take_asked()
    assert await sessions.load(KEY) == truth(log)
    assert log.take_asked() == [f"read {seqs[49]}", f"read {known.seq - 1}"]
    assert len((await sessions.events(KEY))[1]) == 1050, "the events in between are read where they are needed"
    assert len(events) == 50


async def test_who_knows_more_than_the_snapshot_goes_on_from_there(
    log: Watched, store: Store, processes: Processes
) -> None:
    seqs = await fill(log, KEY, 400)
    sessions = processes()
    await sessions.load(KEY)
    await is_idle(sessions)
    take(log, store, 150)
    seqs += await fill(log, KEY, EVERY + 50, seqs[-1])
    log.take_asked()
    assert await sessions.load(KEY) == truth(log)
    assert log.take_asked() == [f"read {seqs[399]}", f"read {seqs[399 + EVERY]}"]


async def test_a_few_new_events_are_read_as_ever(log: Watched, store: Store, processes: Processes) -> None:
    seqs = await fill(log, KEY, 200)
    sessions = processes()
    await sessions.load(KEY)
    await fill(log, KEY, EVERY - 1, seqs[-1])
    log.take_asked()
    assert await sessions.load(KEY) == truth(log)
    assert log.take_asked() == [f"read {seqs[-1]}"]


# --- when one is written ---------------------------------------------------------------------------------------------


async def test_a_snapshot_is_written_once_the_session_has_gone_on(
    log: Watched, store: Store, processes: Processes
) -> None:
    seqs = await fill(log, KEY, EVERY - 1)
    sessions = processes()
    await sessions.load(KEY)
    await is_idle(sessions)
    assert not store.written, "too few events"
    seqs += await fill(log, KEY, 1, seqs[-1])
    await sessions.load(KEY)
    await until_written(store, seqs[-1])
    seqs += await fill(log, KEY, EVERY - 1, seqs[-1])
    await sessions.load(KEY)
    await is_idle(sessions)
    assert store.written == [0]
    await sessions.handle(KEY, post("late", policy=QUEUE, opens=OPENS))
    await until_written(store, await log.last(KEY))
    assert store.written == [0, 1]


async def test_a_process_that_begins_with_a_snapshot_knows_how_old_it_is(
    log: Watched, store: Store, processes: Processes
) -> None:
    seqs = await fill(log, KEY, 300)
    take(log, store, 250)
    sessions = processes()
    await sessions.load(KEY)
    await is_idle(sessions)
    await fill(log, KEY, 80, seqs[-1])
    await sessions.load(KEY)
    await until_written(store, await log.last(KEY))
    assert store.written == [1]


async def test_a_snapshot_says_what_the_log_says(log: Watched, store: Store, processes: Processes) -> None:
    """A process dates what it appends by its own idea of the broker's time; nobody else has to believe that."""
    sessions = processes()
    for n in range(EVERY):
        await sessions.handle(KEY, post(f"m{n}", policy=QUEUE, opens=OPENS))
    await until_written(store, await log.last(KEY))
    assert await sessions.load(KEY) != truth(log)
    found = store.found(KEY)
    assert found and found.session == truth(log)


async def test_one_of_several_processes_writes(log: Watched, store: Store, processes: Processes) -> None:
    await fill(log, KEY, 300)
    several = [processes() for _ in range(4)]
    await asyncio.gather(*(sessions.load(KEY) for sessions in several))
    for sessions in several:
        await is_idle(sessions)
    found = store.found(KEY)
    assert found and found.session == truth(log)
    assert store.held[KEY][1] == 1, "what others write meanwhile is left to them"
    late = processes()
    await late.load(KEY)
    await is_idle(late)
    assert len(store.written) <= 4


async def test_what_another_process_has_written_is_not_written_again(
    log: Watched, store: Store, processes: Processes
) -> None:
    seqs = await fill(log, KEY, EVERY)
    one, other = processes(), processes()
    await one.load(KEY)
    await until_written(store, seqs[-1])
    seqs += await fill(log, KEY, EVERY // 2, seqs[-1])
    await one.load(KEY)
    seqs += await fill(log, KEY, EVERY // 2, seqs[-1])
    await other.load(KEY)
    await until_written(store, seqs[-1])
    await fill(log, KEY, 1, seqs[-1])
    await one.load(KEY)
    await is_idle(one)
    assert store.written == [0, 1]


async def test_a_process_writes_one_snapshot_at_a_time(log: Watched, store: Store, processes: Processes) -> None:
    keys = [SessionKey("default", f"s{n}") for n in range(5)]
    for key in keys:
        await fill(log, key, 200)
    at_work = most = 0

    async def slowly() -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0)
        at_work -= 1

    store.before_put = slowly
    sessions = processes()
    await asyncio.gather(*(sessions.load(key) for key in [*keys, *keys]))
    await is_idle(sessions)
    assert (most, len(store.written)) == (1, 5)
    assert all(store.found(key) for key in keys)


async def test_few_sessions_wait_for_their_snapshot(
    log: Watched, store: Store, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "DUE_MAX", 2)
    keys = [SessionKey("default", f"s{n}") for n in range(5)]
    for key in keys:
        await fill(log, key, 200)
    sessions = processes()
    go_on = asyncio.Event()
    store.before_put = go_on.wait
    for key in keys:
        await sessions.load(key)
    go_on.set()
    await is_idle(sessions)
    assert len(store.written) == 2
    await fill(log, keys[4], 1, await log.last(keys[4]))
    await sessions.load(keys[4])
    await is_idle(sessions)
    assert store.found(keys[4]), "its turn comes when it goes on"


async def test_what_cannot_be_written_is_not_tried_at_every_event(
    log: Watched, store: Store, processes: Processes
) -> None:
    seqs = await fill(log, KEY, 300)

    async def refuse() -> None:
        raise RuntimeError("broken")

    store.before_put = refuse
    sessions = processes()
    await sessions.load(KEY)
    await is_idle(sessions)
    reads = len([asked for asked in log.take_asked() if asked == "read 0"])
    for _ in range(EVERY - 1):
        seqs += await fill(log, KEY, 1, seqs[-1])
        await sessions.load(KEY)
        await is_idle(sessions)
    assert reads == 2 and "read 0" not in log.take_asked()
    store.before_put = None
    await fill(log, KEY, 1, seqs[-1])
    await sessions.load(KEY)
    await until_written(store, await log.last(KEY))


async def test_a_snapshot_that_is_too_large_is_not_written(
    log: Watched, store: Store, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SIZE_MAX", 1000)
    seqs = await fill(log, KEY, 300)
    sessions = processes()
    await sessions.load(KEY)
    await is_idle(sessions)
    await fill(log, KEY, 2 * EVERY, seqs[-1])
    assert await sessions.load(KEY) == truth(log)
    await is_idle(sessions)
    assert not store.written


async def test_no_snapshot_is_written_of_a_session_that_is_deleted_meanwhile(
    log: Watched, store: Store, processes: Processes
) -> None:
    """The writer asks who orders the appends, so a replica that lags does not hide it."""
    seqs = await fill(log, KEY, 300)
    sessions = processes()
    asked = log.take_asked
    log.shown_up_to = seqs[-1]
    get = store.get

    async def get_and_delete(key: SessionKey) -> tuple[bytes, int] | None:
        held = await get(key)
        if asked().count("read 0"):  # the writer's turn
            await log.append(KEY, deleted(KEY, events=301), seqs[-1])
        return held

    store.get = get_and_delete  # type: ignore[method-assign]
    await sessions.load(KEY)
    await is_idle(sessions)
    assert await log.last(KEY) > seqs[-1]
    assert not store.written


async def test_what_is_forgotten_is_looked_for_again(log: Watched, store: Store, processes: Processes) -> None:
    seqs = await fill(log, KEY, 300)
    sessions = processes()
    await sessions.load(KEY)
    await until_written(store, seqs[-1])
    await is_idle(sessions)
    log.lose(KEY, after=seqs[200])
    sessions.forget()
    assert await sessions.load(KEY) == truth(log)
    await until_written(store, seqs[200])
    assert store.written == [0, 1]


async def test_a_writer_that_is_stopped_leaves_the_rest(log: Watched, store: Store, processes: Processes) -> None:
    await fill(log, KEY, 300)
    sessions = processes()
    store.before_put = asyncio.Event().wait
    await sessions.load(KEY)
    await eventually(lambda: sessions._snapshots and sessions._snapshots._due)
    await asyncio.wait_for(sessions.close(), 5)
    store.before_put = None
    assert not store.written
    other = processes()
    assert await other.load(KEY) == truth(log)
    await until_written(store, await log.last(KEY))
