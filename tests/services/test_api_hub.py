"""The hub alone, on a log in memory: how channels are shared, filled, bounded and given up."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.contracts.events import deleted, erased, event
from tests.support.waiting import eventually

from turnstream.ids import SessionKey
from turnstream.log.base import Unreadable
from turnstream.log.feed import Feed
from turnstream.log.handle import Sessions
from turnstream.log.memory import MemoryLog
from turnstream.session.commands import OpenSession, Origin, PostMessage
from turnstream.session.decision import Decision
from turnstream.session.events import ModelReplied, NodeFinished, Opens, Part, Recorded
from turnstream.session.state import Session
from turnstream.telemetry import Metrics
from turnstream.wire.live import Delta
from turnstream_api import channel as channels
from turnstream_api import hub as hubs
from turnstream_api.channel import Channel
from turnstream_api.frames import Filter, event_frame
from turnstream_api.hub import Hub
from turnstream_api.listener import Listener

KEY = SessionKey("acme", "s1")


class House:
    """A hub on a log in memory, with deltas that a test says."""

    def __init__(self) -> None:
        self.ticks = 0
        self.log = MemoryLog(self._now)
        self.sessions = Sessions(self.log, now=self._now)
        self.feeds: list[Feed] = []
        self.kept: list[Delta] = []
        self.hear: Any = None
        self.hub = Hub(
            self.sessions,
            follow=self._follow,
            live=self,  # type: ignore[arg-type]
            heartbeat=60,
            budget=64 * 1024,
            metrics=Metrics(),
        )

    def _now(self) -> int:
        self.ticks += 1
        return self.ticks

    def _follow(self, key: SessionKey, after: int) -> Feed:
        self.feeds.append(Feed(self.log, key, after=after))
        return self.feeds[-1]

    async def listen(self, key: SessionKey, on_delta: Any) -> "House":
        self.hear = on_delta
        return self

    async def read(self, key: SessionKey, run: int) -> list[Delta]:
        return self.kept

    async def unsubscribe(self) -> None:
        self.hear = None

    async def open(self) -> Session:
        origin = Origin(id="open", actor="client:test", time=0)
        return (await self.sessions.handle(KEY, OpenSession(origin=origin, opens=Opens()))).session

    async def post(self, text: str = "x") -> Recorded:
        name = f"m{self._now()}"
        command = PostMessage(
            origin=Origin(id=name, actor="client:test", time=0),
            message_id=name,
            author="client:test",
            kind="notice",
            content=(Part(text=text),),
            specs={},
        )
        recorded = (await self.sessions.handle(KEY, command)).recorded
        assert recorded is not None
        return recorded

    def listener(self, **given: Any) -> Listener:
        return self.hub.enter(Filter(**given), account="acme", owner="")


@pytest.fixture
async def house() -> AsyncIterator[House]:
    made = House()
    yield made
    await made.hub.close()


def ids(data: bytes | None) -> list[int]:
    lines = (data or b"").split(b"\n")
    return [int(line[4:]) for line in lines if line.startswith(b"id: ")]


async def test_all_listeners_of_a_session_share_one_feed_and_the_same_bytes(house: House) -> None:
    session = await house.open()
    many = [house.listener() for _ in range(50)]
    for listener in many:
        assert house.hub.channel(session).join(listener, session.seq)
    recorded = await house.post()
    pieces = [await listener.take() for listener in many]
    assert len(house.feeds) == 1 and len({id(piece) for piece in pieces}) == 1
    assert ids(pieces[0]) == [recorded.seq]


async def test_frames_that_come_fast_are_handed_on_in_one_piece(house: House) -> None:
    session = await house.open()
    listener = house.listener()
    assert house.hub.channel(session).join(listener, session.seq)
    made = [(await house.post()).seq for _ in range(20)]
    got: list[int] = []
    pieces = 0
    while len(got) < 20:
        got += ids(await listener.take())
        pieces += 1
    assert got == made and pieces < 20


async def test_one_who_joins_late_gets_what_the_channel_still_holds(house: House) -> None:
    session = await house.open()
    channel = house.hub.channel(session)
    made = [(await house.post()).seq for _ in range(10)]
    await eventually(lambda: channel.seq == made[-1])
    listener = house.listener()
    assert channel.join(listener, made[3])
    assert ids(await listener.take()) == made[4:]


async def test_one_who_is_too_far_behind_has_to_read_first(house: House) -> None:
    session = await house.open()
    channel = house.hub.channel(session)
    made = [(await house.post()).seq for _ in range(channels.RECENT + 10)]
    await eventually(lambda: channel.seq == made[-1])
    assert not channel.join(house.listener(), session.seq)
    assert not channel.join(house.listener(), made[8])
    assert channel.join(house.listener(), made[-10])


async def test_one_who_has_read_further_than_the_channel_sees_nothing_twice(house: House) -> None:
    session = await house.open()
    channel = house.hub.channel(session)
    made = [(await house.post()).seq for _ in range(5)]
    assert channel.seq == session.seq  # it had no time to follow yet
    ahead, behind = house.listener(), house.listener()
    assert channel.join(ahead, made[2]) and channel.join(behind, session.seq)
    await eventually(lambda: channel.seq == made[-1])
    got: dict[Listener, list[int]] = {ahead: [], behind: []}
    for listener, count in ((ahead, 2), (behind, 5)):
        while len(got[listener]) < count:
            got[listener] += ids(await listener.take())
    assert got[ahead] == made[3:] and got[behind] == made


async def test_a_listener_holds_no_more_than_its_budget(house: House) -> None:
    session = await house.open()
    slow, quick = house.listener(), house.listener()
    channel = house.hub.channel(session)
    assert channel.join(slow, session.seq) and channel.join(quick, session.seq)
    made: list[int] = []
    got: list[int] = []
    while slow.ending is None:
        made.append((await house.post("x" * 9000)).seq)
        assert len(made) < 20
        while len(got) < len(made):
            got += ids(await quick.take())
    assert slow.ending == "overflow" and await slow.take() is None
    assert len(made) == 8 and got == made and quick.ending is None


async def test_a_channel_that_nobody_watches_is_given_up(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "LINGER", 0.01)
    session = await house.open()
    channel = house.hub.channel(session)
    listener = house.listener()
    assert channel.join(listener, session.seq)
    channel.leave(listener)
    await eventually(lambda: channel.closed)
    again = house.hub.channel(session)
    assert again is not channel and len(house.feeds) == 2


async def test_a_channel_that_is_watched_stays(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "LINGER", 0.01)
    session = await house.open()
    channel = house.hub.channel(session)
    stays, leaves = house.listener(), house.listener()
    assert channel.join(stays, session.seq) and channel.join(leaves, session.seq)
    channel.leave(leaves)
    for _ in range(3):
        recorded = await house.post()
        assert ids(await stays.take()) == [recorded.seq]
        await asyncio.sleep(0.02)  # longer than a channel lingers
    assert house.hub.channel(session) is channel and not channel.closed


async def test_a_log_that_cannot_be_followed_ends_its_streams_and_only_those(house: House) -> None:
    session = await house.open()

    class Broken(Feed):
        async def __anext__(self) -> Any:
            raise Unreadable(5, "damaged")

    follow, house.hub._follow = house.hub._follow, lambda key, after: Broken(house.log, key, after=after)
    channel = house.hub.channel(session)
    listener = house.listener()
    assert channel.join(listener, session.seq)
    waiting = channel.wait(Filter(run=1))
    assert await listener.take() is None and listener.ending == "bye"
    assert await waiting is None
    house.hub._follow = follow
    better = house.hub.channel(session)
    assert better is not channel
    assert better.join(other := house.listener(), session.seq)
    recorded = await house.post()
    assert ids(await other.take()) == [recorded.seq]


async def test_deltas_of_an_older_attempt_and_repeated_ones_are_not_shown(house: House) -> None:
    session = await house.open()
    channel: Channel = house.hub.channel(session)
    listener = house.listener()
    assert channel.join(listener, session.seq)
    await house.hub.hear(channel)
    for attempt, index in ((1, 1), (1, 2), (1, 2), (2, 1), (1, 3), (2, 2)):
        house.hear(Delta(1, attempt, 1, index, "text", f"{attempt}.{index}"))
    said = b""
    while said.count(b"event: delta") < 4:
        said += await listener.take() or b""
    shown = [line.partition(b'"text":"')[2][:3] for line in said.split(b"\n") if line.startswith(b"data: ")]
    assert shown == [b"1.1", b"1.2", b"2.1", b"2.2"]
    late = house.listener()
    assert channel.join(late, session.seq)
    channel.catch_up(late)
    assert (await late.take() or b"").count(b"event: delta") == 2


async def test_who_joins_late_gets_what_each_node_is_saying_that_has_not_finished(house: House) -> None:
    session = await house.open()
    channel = house.hub.channel(session)
    await house.hub.hear(channel)
    said = [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("b", 2), ("m[0].y", 1)]
    for index, (path, step) in enumerate(said, 1):
        house.hear(Delta(1, 1, step, index, "text", f"{path}{step}", path))
    facts = (
        ModelReplied(run=1, attempt=1, step=1, node="a", path="a"),
        NodeFinished(run=1, attempt=1, node="b", path="b"),
        NodeFinished(run=1, attempt=1, node="m", path="m"),
        NodeFinished(run=1, attempt=1, node="x", path="x"),
    )
    seq = session.seq
    for fact in facts:
        seq = await house.log.append(KEY, Decision(event(KEY, seq, fact)), seq)
    await eventually(lambda: channel.seq == seq)
    late = house.listener()
    assert channel.join(late, seq)
    channel.catch_up(late)
    lines = (await late.take() or b"").split(b"\n")
    heard = [msgspec.json.decode(line[6:]) for line in lines if line.startswith(b"data: ")]
    assert [(delta["path"], delta["step"], delta["index"]) for delta in heard] == [("c", 1, 3), ("a", 2, 4)]


async def test_what_a_run_says_is_kept_within_bounds(house: House) -> None:
    session = await house.open()
    channel = house.hub.channel(session)
    await house.hub.hear(channel)
    for index in range(1, 101):
        house.hear(Delta(1, 1, 1, index, "text", "x" * 1000))
    late = house.listener()
    assert channel.join(late, session.seq)
    channel.catch_up(late)
    said = await late.take() or b""
    assert len(said) <= 16 * 1024 and b'"index":100,' in said and b'"index":1,' not in said


async def test_nothing_is_left_when_the_hub_is_closed(house: House) -> None:
    session = await house.open()
    channel = house.hub.channel(session)
    listener, waiting = house.listener(), channel.wait(Filter(run=1))
    assert channel.join(listener, session.seq)
    await house.hub.close()
    assert await listener.take() is None and listener.ending == "bye" and await waiting is None
    assert house.listener().ending == "bye"
    assert await house.hub.wait(session, Filter(run=1), 10) is None
    assert [task.get_name() for task in asyncio.all_tasks() if "acme/s1" in task.get_name()] == []


async def test_what_is_left_of_an_erased_session_ends_whatever_missed_its_deletion() -> None:
    log = MemoryLog(lambda: 1)
    end = await log.append(KEY, deleted(KEY), 0)
    await log.append(KEY, erased(KEY), end)
    ((recorded,),) = [page async for page in log.read(KEY)]
    frame = event_frame(recorded)
    for wish in (Filter(), Filter(run=1)):
        assert wish.wants(frame) and wish.ends(frame)
