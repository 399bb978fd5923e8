"""One-shot runs are deleted a time after the last that happened in them, and nothing else is."""

import pytest
from tests.services.test_projector_sweep import OLD, Place, place

from turnstream.ids import SessionKey
from turnstream.log.handle import Sessions
from turnstream.log.jetstream import JetStreamLog
from turnstream.views import sessions
from turnstream_projector.passing import Passing

__all__ = ["place"]


async def test_a_one_shot_run_is_erased_when_it_is_old(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Sessions(JetStreamLog(place.broker), now=place.broker.clock.now)
    passing = Passing(place.database, journal, place.broker.clock, every=0.05, after=30)
    for name, one_shot in (("once", True), ("kept", False), ("live", True)):
        place.log.open(name, one_shot=one_shot)
        place.log.say(name, "hello")
        place.log.start(name, 1)
        if name != "live":
            place.log.end(name, 1)
    await place.show()
    assert await passing.once() == 0, "none is old"
    place.later(monkeypatch, OLD)
    assert await passing.once() == 1

    async def is_there(name: str) -> bool:
        return (await journal.load(SessionKey("default", name))).exists

    assert [await is_there(name) for name in ("once", "kept", "live")] == [False, True, True]
    deleted = (await journal.load(SessionKey("default", "once"))).deleted
    assert deleted and (deleted.mode, deleted.by) == ("erase", "system")
    assert await place.database.wait_for((await journal.load(SessionKey("default", "once"))).seq, 30)
    assert (await sessions.get(place.database, SessionKey("default", "once")))[0] is None
    assert await passing.once() == 0
