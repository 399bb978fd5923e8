"""Saved versions of agents on a real server: each is stored once, the one stored last is current, and what is deleted
stays for those who have pinned it."""

import asyncio

import msgspec
import pytest
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.errors import BrokerFault
from turnstream.broker.server import NatsServer
from turnstream.roster import Names
from turnstream.wire.agents import STREAM, Deleted, Pin, Saved, SavedAgents, VersionConflict

DELETED = Deleted(deleted_at=7, by="user:ann")


@pytest.fixture
def shelf(broker: Broker) -> SavedAgents:
    return SavedAgents(broker)


def saved(digest: str, **more: object) -> Saved:
    definition: dict[str, object] = {"model": "demo", "instructions": digest, **more}
    return Saved(definition=definition, digest=digest, saved_at=1, by="client:test")


async def put(shelf: SavedAgents, version: str, digest: str, name: str = "poet", account: str = "acme") -> int:
    return (await shelf.put(account, name, version, saved(digest)))[0].seq


async def current(shelf: SavedAgents, name: str = "poet", account: str = "acme") -> str | None:
    found = await shelf.current(account, name)
    return found and found.version


async def test_what_was_stored_is_read_as_it_was(shelf: SavedAgents) -> None:
    pins = {"ask": Pin(agent="other", version="v9", digest="d9")}
    whole = msgspec.structs.replace(saved("d1", params={"temperature": 0}), pins=pins)
    stored, is_new = await shelf.put("acme", "poet", "v1", whole)
    assert is_new
    assert await shelf.get("acme", "poet", "v1") == stored
    assert (stored.account, stored.name, stored.version, stored.saved) == ("acme", "poet", "v1", whole)
    assert stored.size == len(msgspec.json.encode(whole))
    assert await shelf.get("acme", "poet", "v2") is None
    assert await shelf.get("acme", "clerk", "v1") is None


async def test_the_one_stored_last_is_current_whatever_it_is_called(shelf: SavedAgents, own_nats: NatsServer) -> None:
    assert await current(shelf) is None
    await put(shelf, "z", "d1")
    await put(shelf, "a", "d2")
    assert await current(shelf) == "a"
    await put(shelf, "m", "d3")
    await put(shelf, "x", "d4", name="poets")  # no other agent's, and no other account's, comes between
    await put(shelf, "y", "d5", account="acm")
    assert await current(shelf) == "m"
    await put(shelf, "z", "d1")  # it is there
    assert await current(shelf) == "m"
    assert [found.version for found in await shelf.versions("acme", "poet")] == ["z", "a", "m"]
    own_nats.kill()
    await own_nats.start()
    assert await current(shelf) == "m"


async def test_a_version_never_says_anything_else(shelf: SavedAgents) -> None:
    first, _ = await shelf.put("acme", "poet", "v1", saved("d1"))
    again, is_new = await shelf.put("acme", "poet", "v1", saved("d1"))
    assert (again, is_new) == (first, False)
    with pytest.raises(VersionConflict, match="version v1 of agent poet is there already") as conflict:
        await shelf.put("acme", "poet", "v1", saved("d2"))
    assert conflict.value.found == first
    assert await shelf.get("acme", "poet", "v1") == first


async def test_of_twenty_who_save_something_else_at_once_one_wins(shelf: SavedAgents, broker: Broker) -> None:
    results = await asyncio.gather(
        *(shelf.put("acme", "poet", "v1", saved(f"d{n}")) for n in range(20)), return_exceptions=True
    )
    won = [result for result in results if not isinstance(result, BaseException)]
    assert len(won) == 1 and won[0][1]
    assert sum(isinstance(result, VersionConflict) for result in results) == 19
    assert await shelf.get("acme", "poet", "v1") == won[0][0]
    assert (await broker.stream(STREAM)).state.messages == 1


async def test_of_twenty_who_save_the_same_at_once_one_has_stored_it(shelf: SavedAgents) -> None:
    results = await asyncio.gather(*(shelf.put("acme", "poet", "v1", saved("d1")) for _ in range(20)))
    assert [is_new for _, is_new in results].count(True) == 1
    assert len({found.seq for found, _ in results}) == 1


async def test_what_is_deleted_is_not_current_and_can_still_be_had(shelf: SavedAgents) -> None:
    assert not await shelf.delete("acme", "poet", DELETED)
    await put(shelf, "v1", "d1")
    await put(shelf, "v2", "d2")
    await put(shelf, "v1", "d3", name="clerk")
    assert await shelf.mark("acme", "poet") == 0
    assert await shelf.delete("acme", "poet", DELETED)
    assert await current(shelf) is None
    assert await shelf.versions("acme", "poet") == []
    assert await shelf.mark("acme", "poet") == 4
    kept = await shelf.get("acme", "poet", "v1")
    assert kept and kept.saved.digest == "d1"
    assert not await shelf.delete("acme", "poet", DELETED)
    assert await current(shelf, name="clerk") == "v1"


async def test_a_deleted_version_is_back_once_the_same_is_saved_again_and_means_nothing_else(
    shelf: SavedAgents,
) -> None:
    await put(shelf, "v1", "d1")
    await put(shelf, "v2", "d2")
    await shelf.delete("acme", "poet", DELETED)
    with pytest.raises(VersionConflict):
        await shelf.put("acme", "poet", "v1", saved("d3"))
    assert (await shelf.put("acme", "poet", "v1", saved("d1")))[1]
    assert await current(shelf) == "v1"
    assert [found.version for found in await shelf.versions("acme", "poet")] == ["v1"]
    await put(shelf, "v3", "d3")
    assert await current(shelf) == "v3"
    assert await shelf.delete("acme", "poet", DELETED)
    assert await current(shelf) is None


async def test_a_version_that_is_back_names_the_very_agents_that_it_named(shelf: SavedAgents) -> None:
    pins = {"ask": Pin(agent="other", version="v1", digest="d9")}
    newer = {"ask": Pin(agent="other", version="v2", digest="d8")}
    await shelf.put("acme", "poet", "v1", msgspec.structs.replace(saved("d1"), pins=pins))
    await shelf.delete("acme", "poet", DELETED)
    back, is_new = await shelf.put("acme", "poet", "v1", msgspec.structs.replace(saved("d1"), pins=newer))
    assert is_new and back.saved.pins == pins
    assert await shelf.get("acme", "poet", "v1") == back


@pytest.mark.parametrize("junk", [b"", b"no json", b'{"digest": 1}'])
async def test_what_a_hand_has_put_there_is_no_version(shelf: SavedAgents, broker: Broker, junk: bytes) -> None:
    await put(shelf, "v1", "d1")
    await broker.store(subjects.agent("acme", "poet", "v2"), junk)
    assert await shelf.get("acme", "poet", "v2") is None
    assert await current(shelf) == "v1"
    assert [found.version for found in await shelf.versions("acme", "poet")] == ["v1"]
    assert (await shelf.put("acme", "poet", "v2", saved("d2")))[1]
    assert await current(shelf) == "v2"


async def test_a_bucket_that_somebody_deleted_is_there_again_and_empty(shelf: SavedAgents, broker: Broker) -> None:
    await put(shelf, "v1", "d1")
    await broker.api(f"STREAM.DELETE.{STREAM}")
    with pytest.raises(BrokerFault):
        await put(shelf, "v1", "d1")
    assert await shelf.current("acme", "poet") is None
    await put(shelf, "v1", "d2")
    assert await current(shelf) == "v1"


async def test_a_reader_of_the_bucket_sees_versions_as_any_other_entry(shelf: SavedAgents, broker: Broker) -> None:
    await put(shelf, "v1", "d1")
    bucket = await broker.nc.jetstream().key_value("agents")
    entry = await bucket.get("acme.poet.v1")
    assert entry.value and msgspec.json.decode(entry.value)["definition"]["instructions"] == "d1"
    assert entry.revision == 1


# -- which is current, kept in memory ---------------------------------------------------------------------------------


async def test_names_are_followed(shelf: SavedAgents, broker: Broker, own_nats: NatsServer) -> None:
    await put(shelf, "v1", "d1")
    await put(shelf, "v1", "d2", name="clerk")
    await put(shelf, "v1", "d3", account="other")
    names = Names()
    following = asyncio.create_task(names.follow(broker))
    try:
        await asyncio.wait_for(names.wait_loaded(), 10)
        assert names.of("acme") == ["clerk", "poet"] and names.of("other") == ["poet"] and names.of("nobody") == []
        seq = await put(shelf, "v2", "d4")
        assert await names.reach(seq, 10)
        known = names.get("acme", "poet")
        assert known and (known.version, known.seq) == ("v2", seq)
        await shelf.delete("acme", "poet", DELETED)
        await eventually(lambda: names.of("acme") == ["clerk"], 10)
        own_nats.kill()
        await own_nats.start()
        await eventually(lambda: broker.nc.is_connected, 20)
        seq = await put(shelf, "v3", "d5")
        assert await names.reach(seq, 20)
        assert names.of("acme") == ["clerk", "poet"]
        assert not await names.reach(seq + 1, 0.01)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def test_names_are_the_same_in_whatever_order_one_hears_of_what_was_stored() -> None:
    stored = [("v1", 1), ("v2", 2), (subjects.DELETED, 3), ("v1", 4), ("v3", 5)]
    for order in (stored, stored[::-1], stored[2:] + stored[:2], stored + stored):
        names = Names()
        for version, seq in order:
            names.take("acme", "poet", version, seq)
        known = names.get("acme", "poet")
        assert known and (known.version, known.seq, known.deleted) == ("v3", 5, 3), order
    names.take("acme", "poet", subjects.DELETED, 6)
    names.take("acme", "poet", "v2", 2)
    assert names.of("acme") == []


async def test_names_of_a_bucket_that_is_lost_are_forgotten(shelf: SavedAgents, broker: Broker) -> None:
    await put(shelf, "v1", "d1")
    await put(shelf, "v2", "d2")
    names = Names()
    following = asyncio.create_task(names.follow(broker))
    try:
        await asyncio.wait_for(names.wait_loaded(), 10)
        await broker.api(f"STREAM.DELETE.{STREAM}")
        await eventually(lambda: names.of("acme") == [], 30)
        await eventually(lambda: _declared(broker), 30)
        await put(shelf, "v9", "d9")
        await eventually(lambda: (known := names.get("acme", "poet")) and known.version == "v9", 30)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _declared(broker: Broker) -> bool:
    try:
        await broker.stream(STREAM)
    except BrokerFault:
        return False
    return True
