"""Events for tests of the log, which does not care what they say; and a writer that goes on until it is stored."""

from collections.abc import Sequence
from itertools import count

from turnstream.ids import SessionKey, derive
from turnstream.log.base import Conflict, Log, Unavailable
from turnstream.session.decision import Decision
from turnstream.session.events import (
    DeleteMode,
    Due,
    Event,
    Fact,
    MessagePosted,
    Part,
    Recorded,
    SessionDeleted,
    SessionErased,
    SessionUpdated,
    Title,
)

_sessions = count(1)


def new_key(account: str) -> SessionKey:
    return SessionKey(account, f"s{next(_sessions)}")


def decision(key: SessionKey, name: object, text: str = "", *, dues: tuple[Due, ...] = ()) -> Decision:
    """A notice; `name` makes its id."""
    data = MessagePosted(message_id=str(name), author="user:ann", kind="notice", content=(Part(text=text or "hello"),))
    return Decision(event(key, name, data), wakes=("default",), dues=dues)


def titled(key: SessionKey, name: object) -> Decision:
    return Decision(event(key, name, SessionUpdated(title=Title(text=str(name), source="user"))))


def deleted(key: SessionKey, mode: DeleteMode = "erase", events: int = 0) -> Decision:
    return Decision(event(key, f"deleted {events}", SessionDeleted(mode=mode, by="user:ann", events=events)))


def erased(key: SessionKey, mode: DeleteMode = "erase", removed: int = 0) -> Decision:
    data = SessionErased(mode=mode, by="user:ann", events_removed=removed, last_run=0, deleted_at=1)
    return Decision(event(key, "erased", data))


def event(key: SessionKey, name: object, data: Fact) -> Event:
    return Event(id=event_id(key, name), key=key, data=data, actor="user:ann", time=1_790_000_000_000)


def event_id(key: SessionKey, name: object) -> str:
    return derive(str(key), name)


async def fill(log: Log, key: SessionKey, events: int, expected: int = 0, *, text: str = "") -> list[int]:
    """Appends so many events one after the other; their sequences."""
    seqs: list[int] = []
    for number in range(events):
        expected = await log.append(key, decision(key, f"{expected}-{number}", text), expected)
        seqs.append(expected)
    return seqs


async def read(log: Log, key: SessionKey, after: int = 0, *, at_least: int = 0) -> list[Recorded]:
    return [recorded async for page in log.read(key, after, at_least=at_least) for recorded in page]


async def write(log: Log, key: SessionKey, name: object, expected: int = 0) -> int:
    """Stores the event whoever else writes, and however the broker fails meanwhile."""
    while True:
        try:
            return await log.append(key, decision(key, name), expected)
        except Conflict:
            expected = (await _tail(log, key, expected)) or expected
        except Unavailable:
            continue


async def _tail(log: Log, key: SessionKey, after: int) -> int:
    try:
        tail = await read(log, key, after)
    except Unavailable:
        return after
    return tail[-1].seq if tail else after


def assert_whole(events: Sequence[Recorded]) -> None:
    """Every event follows the one before it, and none is there twice."""
    assert [recorded.previous for recorded in events] == [0, *(recorded.seq for recorded in events)][: len(events)]
    assert len({recorded.event.id for recorded in events}) == len(events)
