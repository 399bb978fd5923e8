"""Snapshots with real processes: whoever is killed while they are written, and whatever becomes of them, nothing is
different."""

import pytest
from tests.contracts.events import read
from tests.support.deployment import Deployment
from tests.support.load import Load
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.erasing import erase
from turnstream.ids import SessionKey
from turnstream.log.jetstream import JetStreamLog
from turnstream.session import snapshot
from turnstream.session.fold import fold
from turnstream.session.state import Session
from turnstream.wire.snapshots import Snapshots

pytestmark = pytest.mark.system


async def taken(deployment: Deployment, key: SessionKey) -> snapshot.Snapshot | None:
    assert deployment.broker
    data, _ = await Snapshots(deployment.broker).get(key) or (b"", 0)
    return snapshot.decode(data, key) if data else None


async def newer(deployment: Deployment, key: SessionKey, seq: int) -> snapshot.Snapshot:
    """A snapshot behind this sequence."""

    async def there() -> snapshot.Snapshot | None:
        found = await taken(deployment, key)
        return found if found and found.seq > seq else None

    return await eventually(there, 120, what=f"a snapshot of {key} behind {seq}")


async def forge(deployment: Deployment, key: SessionKey, data: bytes) -> None:
    """Puts something else in the place of whatever is there."""
    assert deployment.broker
    snapshots = Snapshots(deployment.broker)
    _, revision = await snapshots.get(key) or (b"", 0)
    await snapshots.put(key, data, revision)


async def test_s18_whatever_becomes_of_snapshots_sessions_go_on(deployment: Deployment, session: str) -> None:
    """Two sessions of many turns through two APIs and two runners, which are killed as soon as there is a snapshot, so
    that who follows them begins with it; then with another session's, with a damaged one, with none."""
    assert deployment.broker
    load = Load(deployment, [f"{session}-{n}" for n in range(2)], '[tool add {{"a":1,"b":0}}][then][say {}]')
    one, other = (SessionKey("default", name) for name in load.sessions)
    async with load.going_on():
        first = await newer(deployment, one, 0)
        await kill_all(deployment)
        second = await newer(deployment, one, first.seq)
        await newer(deployment, other, 0)
        data, _ = await Snapshots(deployment.broker).get(other) or (b"", 0)
        await forge(deployment, one, data)
        await kill_all(deployment)
        third = await newer(deployment, one, second.seq)
        data, _ = await Snapshots(deployment.broker).get(one) or (b"", 0)
        await forge(deployment, one, data[:-1])
        await erase(deployment.broker, subjects.SNAPSHOTS, subjects.snapshot(other))
        await kill_all(deployment)
        last = await newer(deployment, one, third.seq)
        await load.made_up()
    log = JetStreamLog(deployment.broker)
    for key, found in ((one, last), (other, await newer(deployment, other, 0))):
        events = await read(log, key, at_least=found.seq)
        assert found.session == fold(Session(key=key), [event for event in events if event.seq <= found.seq])
    await deployment.check()


async def kill_all(deployment: Deployment) -> None:
    for service in deployment.services.values():
        if service.command != "projector":
            service.kill()
    await deployment.heal()
