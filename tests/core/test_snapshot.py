"""A folded session as bytes: what comes back, what is not believed, what the version is made of."""

import random
import uuid
from typing import Literal

import msgspec
import pytest
from tests.core.scenario import KEY
from tests.core.test_state import conversation
from tests.support.logs import wander

from turnstream.ids import SessionKey
from turnstream.session import snapshot
from turnstream.session.events import Event, MessagePosted, Recorded
from turnstream.session.fold import fold
from turnstream.session.state import Session


def taken(log: list[Recorded]) -> tuple[Session, bytes]:
    """The session of these events, and its snapshot."""
    session = fold(Session(key=KEY), log)
    return session, snapshot.encode(session, log[-1])


LOG = list(conversation(300))
SESSION, BYTES = taken(LOG)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_a_session_is_comes_back_as_it_was(seed: int) -> None:
    log = wander(random.Random(seed), 300, sessions=2)
    for key, session in log.sessions.items():
        events = [recorded for recorded in log.events if recorded.event.key == key]
        found = snapshot.decode(snapshot.encode(session, events[-1]), key)
        assert found is not None
        assert found.session == session
        assert found.is_of(events[-1])


def busy(events: int) -> list[Recorded]:
    """A session among many others, each of whose messages has an idempotency key and an id that a program made up."""
    rng = random.Random(7)
    log: list[Recorded] = []
    seq = 1_000_000
    for recorded in conversation(events):
        event, previous, seq = recorded.event, seq, seq + rng.randrange(1, 400)
        if isinstance(data := event.data, MessagePosted):
            key, body = rng.randbytes(16).hex(), rng.randbytes(16).hex()
            data = msgspec.structs.replace(data, message_id=str(uuid.UUID(bytes=rng.randbytes(16))))
            event = msgspec.structs.replace(event, data=data, idempotency_key=key, body_digest=body)
        else:
            event = msgspec.structs.replace(event, idempotency_key=None, body_digest=None)
        size = rng.randrange(300, 5000)
        log.append(msgspec.structs.replace(recorded, seq=seq, previous=previous if log else 0, size=size, event=event))
    return log


def test_a_snapshot_of_a_session_of_50_000_events_is_small() -> None:
    session, data = taken(busy(50_000))
    found = snapshot.decode(data, KEY)
    assert found is not None and found.session == session and len(session.turns) == 16_666
    assert 200_000 < len(data) < 300_000, "half of what a snapshot may have"


def test_a_snapshot_is_of_one_event() -> None:
    found = snapshot.decode(BYTES, KEY)
    assert found is not None
    last = LOG[-1]
    assert found.is_of(last)
    for other in (
        LOG[-2],
        msgspec.structs.replace(last, seq=last.seq + 1),
        msgspec.structs.replace(last, previous=last.previous - 1),
        msgspec.structs.replace(last, time=last.time + 1),
        msgspec.structs.replace(last, event=renamed(last.event)),
    ):
        assert not found.is_of(other)


def renamed(event: Event) -> Event:
    return msgspec.structs.replace(event, id=f"{event.id}-another")


def test_a_snapshot_of_another_session_is_none() -> None:
    assert snapshot.decode(BYTES, SessionKey(KEY.account, f"{KEY.session}x")) is None


def test_a_snapshot_of_another_version_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "FOLD_VERSION", "another")
    assert snapshot.decode(BYTES, KEY) is None
    assert snapshot.decode(taken(LOG)[1], KEY) is not None


def test_bytes_that_are_damaged_are_no_snapshot() -> None:
    rng = random.Random(1)
    for place in [*range(40), *[rng.randrange(len(BYTES)) for _ in range(300)]]:
        damaged = bytearray(BYTES)
        damaged[place] ^= 1 << rng.randrange(8)
        assert snapshot.decode(bytes(damaged), KEY) is None, place
    for size in (0, 1, 20, len(BYTES) // 2, len(BYTES) - 1):
        assert snapshot.decode(BYTES[:size], KEY) is None
    for other in (b"hello", b"{}", b"\x93\xa0\x00\xc4\x00", BYTES + b"\x00"):
        assert snapshot.decode(other, KEY) is None


def test_the_version_is_of_everything_that_a_state_consists_of() -> None:
    """A field more, another type, another name, another default of any part: another version."""

    class Part(msgspec.Struct):
        how: Literal["a", "b"] = "a"

    class State(msgspec.Struct):
        parts: tuple[Part, ...] = ()

    def version(part: type) -> str:
        return snapshot.version_of(1, msgspec.defstruct("State", [("parts", tuple[part, ...], ())]))

    def part(*fields: tuple[str, object, object]) -> type:
        return msgspec.defstruct("Part", list(fields))

    known = snapshot.version_of(1, State)
    assert version(part(("how", Literal["b", "a"], "a"))) == known
    others = [
        part(("how", Literal["a", "b"], "b")),
        part(("how", Literal["a", "b", "c"], "a")),
        part(("how", str, "a")),
        part(("who", Literal["a", "b"], "a")),
        part(("how", Literal["a", "b"], "a"), ("more", int, 0)),
    ]
    assert len({known, *map(version, others)}) == len(others) + 1


def test_the_version_can_be_raised_by_hand() -> None:
    assert snapshot.version_of(snapshot.MEANING, Session) == snapshot.FOLD_VERSION
    assert snapshot.version_of(snapshot.MEANING + 1, Session) != snapshot.FOLD_VERSION
