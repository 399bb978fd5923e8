"""What the runner removes of a deleted session, on a real broker: everything, in an order that survives any crash."""

import asyncio

import msgspec
import pytest
from tests.contracts.events import read
from tests.contracts.test_log_archive import LIMIT, WORD, delete, spoken
from tests.core.scenario import KEY
from tests.support.logs import publish
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.server import NatsServer
from turnstream.ids import SessionKey
from turnstream.log import archive
from turnstream.log.base import LogError
from turnstream.log.handle import Sessions
from turnstream.log.jetstream import JetStreamLog
from turnstream.session.commands import DeleteSession
from turnstream.session.events import DeleteMode
from turnstream.session.state import Session
from turnstream.wire.attachments import Attachments
from turnstream.wire.blobs import Blobs
from turnstream.wire.checkpoints import Checkpoints
from turnstream.wire.live import Live
from turnstream.wire.snapshots import Snapshots
from turnstream.wire.timers import Timers
from turnstream.wire.work import Work
from turnstream_runner.erase import Eraser
from turnstream_runner.few import AT_ONCE, HELD

OTHER = msgspec.structs.replace(KEY, session=f"{KEY.session}x")
"""A session whose name begins like the other's."""


async def deleted(broker: Broker, mode: DeleteMode) -> Session:
    """A session in which everything was said, stored and deleted."""
    story = spoken()
    if mode == "detach":
        delete(story)
    else:
        story.do(KEY.session, DeleteSession(origin=story.origin(), specs={}, mode=mode, active="cancel"))
    await publish(broker, story.events)
    return await Sessions(JetStreamLog(broker), now=broker.clock.now).load(KEY, story.seq)


async def things_beside(broker: Broker) -> tuple[int, dict[str, int]]:
    """All that a session can have beside its log, of two sessions. A wake-up, and how much there is by stream."""
    for key in (KEY, OTHER):
        blobs = Blobs(broker)
        for name in ("2.1.1", "2.1.2"):
            await blobs.put(key, name, WORD.encode() * 20_000)
        await Checkpoints(broker).put(key, 3, "event", WORD.encode())
        await Snapshots(broker).put(key, WORD.encode(), 0)
        await Attachments(broker, blobs).put(key, WORD, "text/plain", WORD.encode())
        await Live(broker).speak(key, 3, 1).mark(1, "reset", WORD)
        await Timers(broker).put(key, seq=1, at_ms=broker.clock.now() + 3_600_000, queue="default", what="deadline-3")
        await broker.store(subjects.inbox(key), WORD.encode())
        await broker.store(subjects.refused(key.account, key.session), WORD.encode())
        for queue in ("default", "gpu"):
            await Work(broker).wake(queue, key, 1)
    mine = await Work(broker).waiting("gpu", KEY)
    await Work(broker).wake("default", KEY, 2)
    assert mine
    return mine, await amounts(broker)


async def amounts(broker: Broker) -> dict[str, int]:
    names = ("WORK", "INBOX", "REFUSED", "DELTAS", "KV_checkpoints", "KV_snapshots", "KV_attachments", "OBJ_blobs")
    await broker.nc.flush()
    return {name: (await broker.stream(name)).state.messages for name in names}


@pytest.mark.parametrize("mode", ["detach", "erase"])
async def test_everything_goes_but_what_is_kept(broker: Broker, mode: DeleteMode) -> None:
    session = await deleted(broker, mode)
    mine, before = await things_beside(broker)
    theirs = await Blobs(broker).put(OTHER, "2.1.1", WORD.encode() * 20_000)
    log = JetStreamLog(broker)
    await Eraser(broker, log).erase(session, mine)
    (only,) = await read(log, KEY)
    assert session.deleted and only.seq == session.deleted.seq
    kept = {n: archive.decode(record, 1)[1] async for n, record in log.archives(KEY)}
    assert sorted(kept) == ([1, 2, 3, 4] if mode == "detach" else [])
    after = await amounts(broker)
    attached = 2
    one_blob = (before["OBJ_blobs"] - 2 * attached) // 4
    assert {name: before[name] - after[name] for name in before} == {
        "WORK": 2,  # the timer, and the wake-up that is older than this one
        "INBOX": 1,
        "REFUSED": 1,
        "DELTAS": 1,
        "KV_checkpoints": 1,
        "KV_snapshots": 0,  # in its place there is the mark that keeps out late ones
        "KV_attachments": 1,
        "OBJ_blobs": attached + one_blob * (1 if mode == "detach" else 2),  # the answer's is kept
    }
    assert await Work(broker).exists(mine, KEY)
    await Eraser(broker, log).erase(session, mine)
    assert await amounts(broker) == after, "a second time changes nothing"
    assert await Blobs(broker).get(theirs) == WORD.encode() * 20_000
    assert [(await Snapshots(broker).get(one) or (WORD.encode(), 0))[0] for one in (KEY, OTHER)] == [b"", WORD.encode()]


async def test_nothing_of_the_log_goes_before_every_run_is_kept(broker: Broker) -> None:
    """Whoever died in the middle is followed by one who finds some of the records, or a log without its beginning."""
    session = await deleted(broker, "detach")
    log = JetStreamLog(broker)
    events = await read(log, KEY)
    runs = archive.split(events)
    await log.archive(KEY, 2, archive.encode(KEY, 2, runs[2], LIMIT))
    await broker.api(f"STREAM.MSG.DELETE.{subjects.SESSIONS}", {"seq": events[0].seq})
    with pytest.raises(LogError, match="not every run is kept"):
        await Eraser(broker, log).erase(session, 1)
    for n in (1, 3, 4):
        await log.archive(KEY, n, archive.encode(KEY, n, runs[n], LIMIT))
    await Eraser(broker, log).erase(session, 1)
    assert [n async for n, _ in log.archives(KEY)] == [2, 1, 3, 4]
    assert len(await read(log, KEY)) == 1


async def test_several_at_once_come_to_the_same(broker: Broker) -> None:
    session = await deleted(broker, "detach")
    mine, _ = await things_beside(broker)
    logs = [JetStreamLog(broker) for _ in range(3)]
    await asyncio.gather(*(Eraser(broker, log).erase(session, mine) for log in logs))
    records = [entry async for entry in logs[0].archives(KEY)]
    assert sorted(n for n, _ in records) == [1, 2, 3, 4]
    assert len(await read(logs[0], KEY)) == 1


async def test_few_are_removed_at_once_and_few_wait_for_it(broker: Broker) -> None:
    session = await deleted(broker, "erase")
    log = Slow(broker)
    eraser = Eraser(broker, log)
    erasing = [asyncio.create_task(eraser.erase(session, 1)) for _ in range(HELD)]
    await eventually(lambda: log.at_work == AT_ONCE)
    assert eraser.full
    log.go_on.set()
    await asyncio.gather(*erasing)
    assert not eraser.full
    assert log.most == AT_ONCE


class Slow(JetStreamLog):
    """A log that takes its time to overwrite anything."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self.go_on = asyncio.Event()
        self.at_work = self.most = 0

    async def overwrite(self, key: SessionKey) -> None:
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        await self.go_on.wait()
        await super().overwrite(key)
        self.at_work -= 1


async def test_what_somebody_deleted_altogether_holds_nothing_up(broker: Broker) -> None:
    session = await deleted(broker, "erase")
    for stream in (
        "OBJ_blobs",
        "KV_checkpoints",
        "KV_snapshots",
        "KV_attachments",
        "DELTAS",
        "INBOX",
        "REFUSED",
        "WORK",
    ):
        await broker.api(f"STREAM.DELETE.{stream}")
    log = JetStreamLog(broker)
    await asyncio.wait_for(Eraser(broker, log).erase(session, 1), 10)
    assert len(await read(log, KEY)) == 1


async def test_a_broker_that_is_away_is_waited_for(broker: Broker, own_nats: NatsServer) -> None:
    session = await deleted(broker, "detach")
    log = JetStreamLog(broker)
    own_nats.kill()
    erasing = asyncio.create_task(Eraser(broker, log).erase(session, 1))
    await eventually(lambda: not broker.nc.is_connected)
    assert not erasing.done()
    await own_nats.start()
    await asyncio.wait_for(erasing, 20)
    assert len(await read(log, KEY)) == 1
