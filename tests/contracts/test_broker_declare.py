import asyncio
from typing import Any

import msgspec
import pytest
from tests.support.nats import connect

from turnstream.broker.connection import Broker
from turnstream.broker.declare import declare, ensure_consumer, ensure_stream
from turnstream.broker.errors import BrokerError, IncompatibleConsumer, IncompatibleStream
from turnstream.broker.pull import Pull
from turnstream.broker.server import NatsServer
from turnstream.subjects import DISPATCH, INBOX_CONSUMER, STREAMS, Consumer, Stream, runner_consumer

SERVICES = (DISPATCH, INBOX_CONSUMER, runner_consumer("default", 15))


@pytest.fixture
async def broker(own_nats: NatsServer):
    broker = await connect(own_nats.url)
    yield broker
    await broker.close()


async def config_of(broker: Broker, operation: str) -> dict[str, Any]:
    config = (await broker.api(operation))["config"]
    assert isinstance(config, dict)
    return config


async def spy(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The API operations from now on."""
    operations: list[str] = []
    real = broker.api

    async def api(operation: str, body: Any = None, timeout: float = 5) -> dict[str, object]:
        operations.append(operation)
        return await real(operation, body, timeout)

    monkeypatch.setattr(broker, "api", api)
    return operations


async def test_everything_is_there_as_declared(broker: Broker):
    await declare(broker, replicas=1, consumers=SERVICES)
    for stream in STREAMS:
        config = await config_of(broker, f"STREAM.INFO.{stream.name}")
        assert tuple(config["subjects"]) == stream.subjects
        assert config["storage"] == stream.storage
        assert config["retention"] == stream.retention
        assert config["max_age"] == stream.max_age * 1e9
        assert config["duplicate_window"] == stream.duplicate_window * 1e9
    sessions = await config_of(broker, "STREAM.INFO.SESSIONS")
    assert sessions["republish"]["dest"] == "ts.feed.{{wildcard(2)}}.{{wildcard(3)}}"
    assert sessions["allow_direct"]
    assert sessions["allow_rollup_hdrs"]
    assert sessions["allow_msg_ttl"]
    assert (await config_of(broker, "STREAM.INFO.WORK"))["allow_msg_schedules"]
    runner = await config_of(broker, "CONSUMER.INFO.WORK.runner-default")
    assert (runner["ack_policy"], runner["ack_wait"], runner["max_ack_pending"]) == ("explicit", 15e9, -1)
    assert (await config_of(broker, "CONSUMER.INFO.SESSIONS.dispatch"))["headers_only"] is True


async def test_declaring_again_changes_nothing(broker: Broker, monkeypatch: pytest.MonkeyPatch):
    await declare(broker, replicas=1, consumers=SERVICES)
    operations = await spy(broker, monkeypatch)
    await declare(broker, replicas=1, consumers=SERVICES)
    assert operations
    assert all(operation.split(".")[1] == "INFO" for operation in operations)


async def test_many_services_may_start_at_once(own_nats: NatsServer):
    brokers = [await connect(own_nats.url, f"service-{n}") for n in range(6)]
    await asyncio.gather(*(declare(broker, replicas=1, consumers=SERVICES) for broker in brokers))
    names = (await brokers[0].api("STREAM.NAMES"))["streams"]
    buckets = ["KV_agents", "KV_attachments", "KV_checkpoints", "KV_keys", "KV_snapshots", "OBJ_blobs"]
    assert names == ["DELTAS", "INBOX", *buckets, "REFUSED", "SESSIONS", "WORK"]
    for broker in brokers:
        await broker.close()


async def test_a_changed_setting_is_applied_and_nothing_is_lost(broker: Broker):
    old = Stream(name="S", subjects=("s.>",), max_age=60, duplicate_window=10)
    await declare(broker, replicas=1, streams=[old], keys=(), objects=())
    await broker.request("s.1", b"kept")
    new = Stream(
        name="S", subjects=("s.>", "more.>"), max_age=90, duplicate_window=20, max_bytes=10**6, allow_rollup_hdrs=True
    )
    await declare(broker, replicas=1, streams=[new], keys=(), objects=())
    config = await config_of(broker, "STREAM.INFO.S")
    assert (config["subjects"], config["max_age"], config["max_bytes"]) == (["s.>", "more.>"], 90e9, 10**6)
    assert (await broker.api("STREAM.INFO.S"))["state"]["messages"] == 1  # type: ignore[index]
    await declare(broker, replicas=1, streams=[old], keys=(), objects=())
    config = await config_of(broker, "STREAM.INFO.S")
    assert (config["subjects"], config["max_age"], config["max_bytes"]) == (["s.>"], 60e9, -1)


async def test_a_republish_is_added_and_taken_away(broker: Broker):
    plain = Stream(name="S", subjects=("s.>",))
    feeding = msgspec.structs.replace(plain, republish=("s.>", "feed.>"))
    for stream in (plain, feeding, plain):
        await declare(broker, replicas=1, streams=[stream], keys=(), objects=())
        config = await config_of(broker, "STREAM.INFO.S")
        assert bool(config.get("republish")) == bool(stream.republish)


async def test_what_nobody_declares_is_kept(broker: Broker):
    by_hand = {"max_msg_size": 4242, "description": "by hand", "metadata": {"owner": "ops"}}
    await broker.api("STREAM.CREATE.S", {"name": "S", "subjects": ["s.>"]} | by_hand)
    await declare(broker, replicas=1, streams=[Stream(name="S", subjects=("s.>",), max_age=777)], keys=(), objects=())
    config = await config_of(broker, "STREAM.INFO.S")
    assert (config["max_age"], config["max_msg_size"], config["description"]) == (777e9, 4242, "by hand")
    assert config["metadata"]["owner"] == "ops"


@pytest.mark.parametrize(
    ("change", "field", "found", "wanted"),
    [
        ({"storage": "memory"}, "storage", "'file'", "'memory'"),
        ({"retention": "workqueue"}, "retention", "'limits'", "'workqueue'"),
    ],
)
async def test_what_cannot_be_changed_is_a_clear_error(broker: Broker, change, field, found, wanted):
    stream = Stream(name="S", subjects=("s.>",))
    await declare(broker, replicas=1, streams=[stream], keys=(), objects=())
    with pytest.raises(IncompatibleStream) as caught:
        await declare(broker, replicas=1, streams=[msgspec.structs.replace(stream, **change)], keys=(), objects=())
    assert f"stream S cannot be made as declared: {field} is {found}, must be {wanted}" in str(caught.value)
    assert caught.value.name == "S"
    assert [difference.field for difference in caught.value.differences] == [field]
    assert (await config_of(broker, "STREAM.INFO.S"))[field] == found.strip("'")


async def test_subjects_of_another_stream_are_a_clear_error(broker: Broker):
    await broker.api("STREAM.CREATE.OTHER", {"name": "OTHER", "subjects": ["ts.work.>"]})
    with pytest.raises(BrokerError, match=r"STREAM\.CREATE\.WORK: subjects overlap"):
        await declare(broker, replicas=1)


async def test_more_replicas_than_servers_are_a_clear_error(broker: Broker):
    with pytest.raises(BrokerError, match="replicas > 1 not supported in non-clustered mode"):
        await declare(broker, replicas=3)


async def test_buckets_are_what_other_clients_expect(broker: Broker):
    await declare(broker, replicas=1)
    js = broker.nc.jetstream()
    keys = await js.key_value("keys")
    await keys.create("acc.k1", b"one")
    assert (await keys.get("acc.k1")).value == b"one"
    await keys.delete("acc.k1")
    blobs = await js.object_store("blobs")
    await blobs.put("acc/s1/big", bytes(300_000))
    assert (await blobs.get("acc/s1/big")).data == bytes(300_000)
    await blobs.delete("acc/s1/big")


async def test_a_bucket_that_a_client_made_is_taken_over(broker: Broker):
    js = broker.nc.jetstream()
    keys = await js.create_key_value(bucket="keys")
    await keys.put("acc.k1", b"one")
    await (await js.create_object_store("blobs")).put("acc/s1/x", b"two")
    await declare(broker, replicas=1)
    assert (await keys.get("acc.k1")).value == b"one"
    assert (await (await js.object_store("blobs")).get("acc/s1/x")).data == b"two"


async def test_a_consumers_changed_setting_is_applied_and_its_place_is_kept(broker: Broker):
    await declare(broker, replicas=1, streams=[Stream(name="S", subjects=("s.>",))], keys=(), objects=())
    consumer = Consumer(stream="S", name="c", ack_wait=5)
    await ensure_consumer(broker, consumer)
    for n in range(3):
        await broker.request("s.1", b"%d" % n)
    pull = Pull(broker, consumer, slots=1)
    (first,) = await anext(pull)
    first.ack()
    await pull.close()
    changed = Consumer(stream="S", name="c", ack_wait=9, max_ack_pending=-1, filters=("s.1",), headers_only=True)
    await ensure_consumer(broker, changed)
    config = await config_of(broker, "CONSUMER.INFO.S.c")
    assert (config["ack_wait"], config["max_ack_pending"], config["filter_subjects"]) == (9e9, -1, ["s.1"])
    assert (await broker.api("CONSUMER.INFO.S.c"))["num_pending"] == 2


async def test_a_consumer_that_cannot_be_changed_is_a_clear_error(broker: Broker):
    await declare(broker, replicas=1, streams=[Stream(name="S", subjects=("s.>",))], keys=(), objects=())
    body = {"durable_name": "c", "name": "c", "ack_policy": "none", "deliver_policy": "new"}
    await broker.api("CONSUMER.CREATE.S.c", {"stream_name": "S", "config": body, "action": "create"})
    with pytest.raises(IncompatibleConsumer, match=r"consumer S\.c .* ack_policy is 'none', must be 'explicit'"):
        await ensure_consumer(broker, Consumer(stream="S", name="c"))


async def test_a_deleted_stream_is_made_again_only_if_it_was_declared_here(broker: Broker, own_nats: NatsServer):
    stream = Stream(name="S", subjects=("s.>",), max_age=333)
    await declare(broker, replicas=1, streams=[stream], keys=(), objects=())
    await broker.api("STREAM.DELETE.S")
    stranger = await connect(own_nats.url)
    await ensure_stream(stranger, "S")
    with pytest.raises(BrokerError, match="stream not found"):
        await ensure_consumer(stranger, Consumer(stream="S", name="c"))
    await ensure_consumer(broker, Consumer(stream="S", name="c"))
    assert (await config_of(broker, "STREAM.INFO.S"))["max_age"] == 333e9
    await stranger.close()
