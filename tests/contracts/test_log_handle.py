"""`Sessions`: what it asks the log for, what it believes, and what it keeps."""

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import count

import msgspec
import pytest
from tests.contracts.events import assert_whole, fill, new_key, read
from tests.core.scenario import QUEUE, cancel, delete, open_session, post, title, update, with_origin
from tests.support.nats import connect
from tests.support.waiting import eventually

from turnstream.broker.connection import Broker
from turnstream.ids import SessionKey, derive
from turnstream.log.base import PAGE, Unavailable
from turnstream.log.handle import ATTEMPTS, Sessions
from turnstream.log.jetstream import JetStreamLog
from turnstream.log.known import Known
from turnstream.log.memory import MemoryLog
from turnstream.session.decision import Decision
from turnstream.session.errors import Rejected
from turnstream.session.events import Opens, Recorded
from turnstream.session.fold import fold
from turnstream.session.state import Deleted, Session

KEY = SessionKey("default", "s1")
OTHER = SessionKey("default", "s2")
OPENS = Opens()


class Watched(MemoryLog):
    """A log in memory that tells what it was asked, and whose replica may lag."""

    def __init__(self) -> None:
        ticks = count(1_790_000_000_000)
        super().__init__(lambda: next(ticks))
        self.asked: list[str] = []
        self.shown_up_to = 1_000_000
        self.gate = asyncio.Event()
        self.gate.set()
        self.in_flight = self.most_in_flight = 0

    async def append(self, key: SessionKey, decision: Decision, expected: int) -> int:
        self.asked.append(f"append {expected}")
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
            return await super().append(key, decision, expected)
        finally:
            self.in_flight -= 1

    async def read(
        self, key: SessionKey, after: int = 0, *, at_least: int = 0, page: int = PAGE
    ) -> AsyncIterator[list[Recorded]]:
        self.asked.append(f"read {after}")
        shown = max(self.shown_up_to, at_least)
        async for some in super().read(key, after, at_least=at_least, page=page):
            if some := [recorded for recorded in some if recorded.seq <= shown]:
                yield some

    async def last(self, key: SessionKey) -> int:
        self.asked.append("last")
        return await super().last(key)

    def take_asked(self) -> list[str]:
        asked, self.asked = self.asked, []
        return asked

    def lose(self, key: SessionKey, after: int) -> None:
        """As a power loss may: the newest events are gone."""
        self._events[key] = [recorded for recorded in self._events[key] if recorded.seq <= after]
        self._seqs = {name: seq for name, seq in self._seqs.items() if name[0] != key or seq <= after}


@pytest.fixture
def log() -> Watched:
    return Watched()


def sessions_of(log: MemoryLog, *, on_conflict: Callable[[], None] | None = None, **keeps: int) -> Sessions:
    return Sessions(log, now=lambda: 1_790_000_000_000, known=Known(**keeps), on_conflict=on_conflict)


async def test_a_command_is_stored_and_folded(log: Watched) -> None:
    sessions = sessions_of(log)
    handled = await sessions.handle(KEY, post("m1", opens=OPENS))
    assert handled.recorded is not None
    assert handled.session.seq == handled.recorded.seq == await log.last(KEY)
    assert handled.session.last_run == 1
    (stored,) = await read(log, KEY)
    assert stored.event == handled.recorded.event
    assert handled.recorded.size == stored.size


async def test_a_session_that_is_cached_is_written_to_without_reading(log: Watched) -> None:
    sessions = sessions_of(log)
    await sessions.handle(KEY, post("m1", opens=OPENS, policy=QUEUE))
    assert log.take_asked() == ["read 0", "append 0"]
    await sessions.handle(KEY, post("m2", policy=QUEUE))
    assert log.take_asked() == ["append 1"]


async def test_a_fresh_session_is_written_to_without_reading(log: Watched) -> None:
    sessions = sessions_of(log)
    await sessions.handle(KEY, post("m1", opens=OPENS), fresh=True)
    assert log.take_asked() == ["append 0"]


async def test_a_session_that_was_wrongly_called_fresh_is_read(log: Watched) -> None:
    await sessions_of(log).handle(KEY, post("m1", opens=OPENS))
    sessions = sessions_of(log)
    with pytest.raises(Rejected) as refusal:
        await sessions.handle(KEY, post("m2", opens=OPENS), fresh=True)
    assert refusal.value.code == "run_active"


async def test_a_session_that_has_moved_is_read_and_decided_again(log: Watched) -> None:
    conflicts: list[int] = []
    ours = sessions_of(log, on_conflict=lambda: conflicts.append(1))
    await ours.handle(KEY, post("m1", opens=OPENS, policy=QUEUE))
    await sessions_of(log).handle(KEY, post("m2", policy=QUEUE))
    log.take_asked()
    handled = await ours.handle(KEY, post("m3", policy=QUEUE))
    assert log.take_asked() == ["append 1", "read 1", "append 2"]
    assert handled.session.last_run == 3
    assert conflicts == [1]
    assert_whole(await read(log, KEY))


async def test_a_refusal_is_only_believed_on_the_newest_fold(log: Watched) -> None:
    ours, theirs = sessions_of(log), sessions_of(log)
    await ours.handle(KEY, post("m1", opens=OPENS))
    with pytest.raises(Rejected):
        await ours.handle(KEY, post("m2"))
    await theirs.handle(KEY, cancel(1))
    assert (await ours.handle(KEY, post("m2"))).session.last_run == 2


async def test_a_refusal_on_the_newest_fold_costs_one_round(log: Watched) -> None:
    sessions = sessions_of(log)
    await sessions.handle(KEY, post("m1", opens=OPENS))
    log.take_asked()
    with pytest.raises(Rejected):
        await sessions.handle(KEY, post("m2"))
    assert log.take_asked() == ["last", "read 1"]


async def test_a_replica_that_lags_causes_no_refusal(log: Watched) -> None:
    """The run has ended, its client has seen that, and the replica that answers reads does not know it yet."""
    await sessions_of(log).handle(KEY, post("m1", opens=OPENS))
    await sessions_of(log).handle(KEY, cancel(1))
    log.shown_up_to = 1
    handled = await sessions_of(log).handle(KEY, post("m2"))
    assert handled.session.last_run == 2


async def test_a_replica_that_lags_hides_no_session(log: Watched) -> None:
    await sessions_of(log).handle(KEY, post("m1", opens=OPENS))
    log.shown_up_to = 0
    await sessions_of(log).handle(KEY, cancel(1))
    assert len(await read(log, KEY, at_least=2)) == 2


async def test_nothing_to_do_is_only_believed_on_the_newest_fold(log: Watched) -> None:
    ours = sessions_of(log)
    await ours.handle(KEY, post("m1", opens=OPENS))
    await ours.handle(KEY, cancel(1))
    assert (await ours.handle(KEY, cancel(1))).recorded is None
    assert len(await read(log, KEY)) == 2


async def test_s06_a_repeat_has_one_effect_wherever_it_is_sent(log: Watched) -> None:
    command = with_origin(post("m1", opens=OPENS), idempotency_key="k", body_digest="b")
    repeats = [msgspec.structs.replace(command) for _ in range(6)]
    processes = [sessions_of(log) for _ in repeats]
    pairs = zip(processes, repeats, strict=True)
    answers = await asyncio.gather(*(each.handle(KEY, command) for each, command in pairs))
    assert len(await read(log, KEY)) == 1
    assert {handled.session.last_run for handled in answers} == {1}


async def test_a_command_of_the_same_id_is_stored_once(log: Watched) -> None:
    """Without an idempotency key: the event's id alone tells that it is there."""
    await sessions_of(log).handle(KEY, post("m1", opens=OPENS))
    command = update(title=title("A", "user"))
    stale = sessions_of(log)
    await stale.load(KEY)
    first = await sessions_of(log).handle(KEY, command)
    again = await stale.handle(KEY, command)
    assert again.session.seq == first.session.seq
    third = await stale.handle(KEY, command)
    assert third.recorded is None
    assert len(await read(log, KEY)) == 2


async def test_one_append_is_in_flight_a_session(log: Watched) -> None:
    sessions = sessions_of(log)
    await sessions.handle(KEY, post("m0", opens=OPENS, policy=QUEUE))
    log.take_asked()
    await asyncio.gather(*(sessions.handle(KEY, post(f"m{n}", policy=QUEUE)) for n in range(1, 30)))
    assert log.most_in_flight == 1
    assert log.take_asked() == [f"append {n}" for n in range(1, 30)]
    assert not sessions._known._writers


async def test_sessions_do_not_wait_for_each_other(log: Watched) -> None:
    sessions = sessions_of(log)
    keys = [SessionKey("default", f"s{n}") for n in range(5)]
    await asyncio.gather(*(sessions.handle(key, post("m", opens=OPENS)) for key in keys))
    assert log.most_in_flight == 5


async def test_a_command_that_is_given_up_leaves_the_session_usable(log: Watched) -> None:
    sessions = sessions_of(log)
    await sessions.handle(KEY, post("m1", opens=OPENS, policy=QUEUE))
    log.gate.clear()
    giving_up = asyncio.create_task(sessions.handle(KEY, post("m2", policy=QUEUE)))
    await eventually(lambda: log.in_flight)
    giving_up.cancel()
    await asyncio.wait({giving_up})
    log.gate.set()
    assert (await sessions.handle(KEY, post("m3", policy=QUEUE))).recorded is not None
    assert not sessions._known._writers


async def test_a_writer_that_always_loses_gives_up(log: Watched) -> None:
    sessions = sessions_of(log)
    await sessions.handle(KEY, post("m1", opens=OPENS, policy=QUEUE))
    losing = log.append

    async def append(key: SessionKey, decision: Decision, expected: int) -> int:
        await fill(MemoryLogView(log), key, 1, expected)
        return await losing(key, decision, expected)

    log.append = append  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match=f"{ATTEMPTS} times"):
        await sessions.handle(KEY, post("m2", policy=QUEUE))


class MemoryLogView:
    """Appends past what a test has put in front of it."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    async def append(self, key: SessionKey, decision: Decision, expected: int) -> int:
        return await MemoryLog.append(self._log, key, decision, expected)


async def test_events_that_the_log_has_lost_are_forgotten(log: Watched) -> None:
    sessions = sessions_of(log, keep_bytes=1_000_000)
    await sessions.handle(KEY, post("m1", opens=OPENS))
    await sessions.handle(KEY, cancel(1))
    log.lose(KEY, after=1)
    handled = await sessions.handle(KEY, cancel(1, "again"))
    assert handled.session.seq == await log.last(KEY)
    session, events = await sessions.events(KEY)
    assert session == handled.session
    assert [recorded.seq for recorded in events] == [1, handled.session.seq]


async def test_a_second_load_reads_only_the_tail(log: Watched) -> None:
    (last,) = (await fill(log, KEY, 10))[-1:]
    sessions = sessions_of(log)
    session = await sessions.load(KEY)
    log.take_asked()
    assert await sessions.load(KEY) == session
    assert log.take_asked() == [f"read {last}"]


async def test_load_sees_what_is_known_to_be_stored(log: Watched) -> None:
    (last,) = (await fill(log, KEY, 3))[-1:]
    log.shown_up_to = 1
    sessions = sessions_of(log)
    assert (await sessions.load(KEY)).seq == 1
    assert (await sessions.load(KEY, last)).seq == last


async def test_a_session_that_does_not_exist_is_not_kept(log: Watched) -> None:
    sessions = sessions_of(log)
    assert not (await sessions.load(KEY)).exists
    assert (await sessions.events(KEY)) == (Session(key=KEY), [])
    assert not sessions._folds._sessions


async def test_events_are_all_events(log: Watched) -> None:
    for keep in (0, 1_000_000):
        key = SessionKey("default", f"keep{keep}")
        sessions = sessions_of(log, keep_bytes=keep)
        await sessions.handle(key, post("m1", opens=OPENS, policy=QUEUE))
        await sessions_of(log).handle(key, post("m2", policy=QUEUE))
        await sessions.handle(key, post("m3", policy=QUEUE))
        session, events = await sessions.events(key)
        stored = await read(log, key)
        assert [recorded.event for recorded in events] == [recorded.event for recorded in stored]
        assert [recorded.size for recorded in events] == [recorded.size for recorded in stored]
        assert_whole(events)
        assert session.seq == stored[-1].seq


async def test_events_that_are_kept_are_not_read_again(log: Watched) -> None:
    sessions = sessions_of(log, keep_bytes=1_000_000)
    await fill(log, KEY, 10)
    await sessions.events(KEY)
    log.take_asked()
    session, events = await sessions.events(KEY)
    assert (log.take_asked(), len(events), session.seq) == (["read 10"], 10, 10)
    await fill(log, KEY, 1, 10)
    session, events = await sessions.events(KEY)
    assert (log.take_asked()[1:], len(events), session.seq) == (["read 10"], 11, 11)


async def test_events_of_a_session_written_here_from_its_start_are_not_read(log: Watched) -> None:
    sessions = sessions_of(log, keep_bytes=1_000_000)
    await sessions.handle(KEY, post("m1", opens=OPENS, policy=QUEUE))
    await sessions.handle(KEY, post("m2", policy=QUEUE))
    log.take_asked()
    _, events = await sessions.events(KEY)
    assert (log.take_asked(), len(events)) == (["read 2"], 2)


async def test_what_a_caller_got_does_not_change(log: Watched) -> None:
    sessions = sessions_of(log, keep_bytes=1_000_000)
    await sessions.handle(KEY, post("m1", opens=OPENS, policy=QUEUE))
    _, events = await sessions.events(KEY)
    await sessions.handle(KEY, post("m2", policy=QUEUE))
    assert len(events) == 1


async def test_events_behind_a_lagging_replica_are_read_to_the_fold(log: Watched) -> None:
    sessions = sessions_of(log)
    await fill(log, KEY, 5)
    await sessions.load(KEY)
    log.shown_up_to = 3
    session, events = await sessions.events(KEY)
    assert (session.seq, len(events)) == (5, 5)


async def test_events_are_kept_within_the_budget(log: Watched) -> None:
    keys = [SessionKey("default", f"s{n}") for n in range(4)]
    for key in keys:
        await fill(log, key, 5, text="x" * 1000)
    size = sum(recorded.size for recorded in await read(log, keys[0]))
    sessions = sessions_of(log, keep_bytes=2 * size + 100)
    for key in keys:
        await sessions.events(key)
    assert list(sessions._kept._events) == keys[2:]
    await sessions.events(keys[2])
    await sessions.events(keys[0])
    assert list(sessions._kept._events) == [keys[2], keys[0]]
    assert sessions._kept._size <= 2 * size + 100
    await fill(log, keys[1], 50, 10, text="x" * 1000)
    _, events = await sessions.events(keys[1])
    assert len(events) == 55
    assert sessions._kept._size == sum(sessions._kept._sizes.values()) <= 2 * size + 100


async def test_folds_are_kept_up_to_the_capacity(log: Watched) -> None:
    sessions = sessions_of(log, capacity=2)
    keys = [SessionKey("default", f"s{n}") for n in range(3)]
    for key in keys:
        await sessions.handle(key, post("m", opens=OPENS))
    assert list(sessions._folds._sessions) == keys[1:]
    log.take_asked()
    await sessions.load(keys[0])
    assert log.take_asked() == ["read 0"]


async def test_events_that_outlive_their_fold_are_folded_again(log: Watched) -> None:
    sessions = sessions_of(log, capacity=1, keep_bytes=1_000_000)
    await sessions.handle(KEY, post("m1", opens=OPENS, policy=QUEUE))
    await sessions.handle(SessionKey("default", "another"), post("m1", opens=OPENS))
    assert KEY not in sessions._folds._sessions
    await sessions_of(log).handle(KEY, post("m2", policy=QUEUE))
    log.take_asked()
    session, events = await sessions.events(KEY)
    assert (len(events), log.take_asked()) == (2, ["read 1"])
    assert [run.n for run in session.runs] == [1, 2]
    assert session == await sessions.load(KEY)
    assert session.last_run == fold(Session(key=KEY), await read(log, KEY)).last_run


async def test_an_event_from_the_feed_is_folded_if_it_follows(log: Watched) -> None:
    sessions = sessions_of(log, keep_bytes=1_000_000)
    await sessions.handle(KEY, post("m1", opens=OPENS, policy=QUEUE))
    await sessions_of(log).handle(KEY, post("m2", policy=QUEUE))
    await sessions_of(log).handle(KEY, post("m3", policy=QUEUE))
    first, second, third = await read(log, KEY)
    sessions.fold(KEY, third)
    sessions.fold(KEY, second)
    sessions.fold(KEY, first)
    sessions.fold(KEY, second)
    log.take_asked()
    await sessions.load(KEY)
    assert log.take_asked() == ["read 2"]
    assert await sessions.load(KEY) == fold(Session(key=KEY), await timed_alike(sessions, await read(log, KEY)))


async def timed_alike(sessions: Sessions, events: list[Recorded]) -> list[Recorded]:
    """What this process appended itself is dated by it."""
    kept = (await sessions.events(KEY))[1]
    return [msgspec.structs.replace(recorded, time=own.time) for recorded, own in zip(events, kept, strict=True)]


async def test_what_one_part_of_a_process_stores_another_knows(log: Watched) -> None:
    known = Known(keep_bytes=1_000_000)
    one, other = (Sessions(log, now=lambda: 1_790_000_000_000, known=known) for _ in range(2))
    first = await one.handle(KEY, post("m1", opens=OPENS, policy=QUEUE))
    log.take_asked()
    second = await other.handle(KEY, post("m2", policy=QUEUE))
    assert (log.take_asked(), second.session.last_run) == (["append 1"], 2)
    assert one.recall(KEY, 2) == (second.session, [first.recorded, second.recorded])
    assert log.take_asked() == []


async def test_parts_of_a_process_write_to_a_session_one_after_the_other(log: Watched) -> None:
    known, conflicts = Known(), list[int]()
    parts = [
        Sessions(log, now=lambda: 1_790_000_000_000, known=known, on_conflict=lambda: conflicts.append(1))
        for _ in range(3)
    ]
    await parts[0].handle(KEY, post("m0", opens=OPENS, policy=QUEUE))
    commands = [part.handle(KEY, post(f"m{n}", policy=QUEUE)) for n, part in enumerate(parts * 3, 1)]
    await asyncio.gather(*commands)
    assert (conflicts, log.most_in_flight, len(await read(log, KEY))) == ([], 1, 10)


async def test_only_what_is_known_far_enough_is_recalled(log: Watched) -> None:
    sessions = sessions_of(log, keep_bytes=1_000_000)
    assert sessions.recall(KEY, 1) is None
    await sessions.handle(KEY, post("m1", opens=OPENS, policy=QUEUE))
    assert sessions.recall(KEY, 2) is None
    assert sessions.recall(KEY, 1)
    await sessions_of(log).handle(KEY, post("m2", policy=QUEUE))
    session = await sessions.load(KEY)
    assert session.seq == 2
    recalled = sessions.recall(KEY, 2)
    assert recalled and [recorded.seq for recorded in recalled[1]] == [1, 2], "what is read is kept with the rest"
    forgetful = sessions_of(log)
    await forgetful.load(KEY)
    assert forgetful.recall(KEY, 2) is None, "no events are kept"


async def test_a_deleted_session_is_not_recalled(log: Watched) -> None:
    sessions = sessions_of(log, keep_bytes=1_000_000)
    await sessions.handle(KEY, open_session())
    deleted = await sessions.handle(KEY, delete())
    assert sessions.recall(KEY, deleted.session.seq) is None


async def test_forgetting_costs_a_read(log: Watched) -> None:
    sessions = sessions_of(log, keep_bytes=1_000_000)
    await sessions.handle(KEY, post("m1", opens=OPENS))
    sessions.forget()
    log.take_asked()
    _, events = await sessions.events(KEY)
    assert (log.take_asked(), len(events)) == (["read 0"], 1)


async def test_a_long_fold_lets_others_run(log: Watched) -> None:
    await fill(log, KEY, 2000)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await sessions_of(log).load(KEY)
    task.cancel()
    assert turns > 20


async def test_s04_of_twelve_messages_through_two_processes_one_is_accepted(
    nats_url: str, nats: Broker, account: str
) -> None:
    key = new_key(account)
    brokers = [nats, await connect(nats_url)]
    processes = [Sessions(JetStreamLog(broker), now=broker.clock.now) for broker in brokers]
    await processes[0].handle(key, with_origin(open_session(), id=derive(str(key))))
    answers = await asyncio.gather(
        *(processes[n % 2].handle(key, with_origin(post(f"m{n}"), id=derive(str(key), n))) for n in range(12)),
        return_exceptions=True,
    )
    assert sum(isinstance(answer, Rejected) and answer.code == "run_active" for answer in answers) == 11
    events = await read(processes[0].log, key, at_least=await processes[0].log.last(key))
    assert [recorded.event.type for recorded in events] == ["session.opened", "message.posted"]
    await brokers[1].close()


async def test_many_writers_in_many_processes_store_everything_once(nats_url: str, nats: Broker, account: str) -> None:
    key = new_key(account)
    brokers = [nats, *[await connect(nats_url) for _ in range(2)]]
    processes = [Sessions(JetStreamLog(broker), now=broker.clock.now) for broker in brokers]
    commands = [with_origin(post(f"m{n}", opens=OPENS, policy=QUEUE), id=derive(str(key), n)) for n in range(60)]
    answers = await asyncio.gather(*(processes[n % 3].handle(key, command) for n, command in enumerate(commands)))
    events = await read(processes[0].log, key, at_least=max(answer.session.seq for answer in answers))
    assert_whole(events)
    assert {recorded.event.id for recorded in events} == {command.origin.id for command in commands}
    sessions = [await process.load(key) for process in processes]
    assert len({session.seq for session in sessions}) == 1
    assert all(session.last_run == 60 for session in sessions)
    for broker in brokers[1:]:
        await broker.close()


async def test_an_id_that_is_another_sessions_by_now_is_read_from_its_beginning(log: Watched) -> None:
    """It was erased, and what was folded then is still remembered."""
    ours = sessions_of(log, keep_bytes=1 << 20)
    for n in range(3):
        await ours.handle(SessionKey("default", f"other-{n}"), post("m1", opens=OPENS))
    gone = Session(key=KEY, seq=2, deleted=Deleted(seq=1, at=0, mode="erase", by="user:ann", erased=True))
    ours._folds.keep(gone)
    await sessions_of(log).handle(KEY, post("m1", opens=OPENS))
    session, events = await ours.events(KEY)
    assert session.exists and session.last_run == 1 and len(events) == 1
