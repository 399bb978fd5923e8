"""Makes streams, consumers and buckets as `turnstream.subjects` declares them.

Idempotent, and safe when several services start at once: what is missing is made, a setting that differs is changed, a
setting that nobody declares is kept as it is. What the server will not change is an `Incompatible`: it names each
setting, what it is and what it must be.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import cast

from turnstream.broker.connection import Broker
from turnstream.broker.errors import (
    BrokerError,
    BrokerFault,
    BrokerTimeout,
    Difference,
    IncompatibleConsumer,
    IncompatibleStream,
)
from turnstream.subjects import BLOBS, KEYS, STREAMS, Consumer, Stream
from turnstream.telemetry import get_logger

STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
_STREAM_EXISTS = 10058
_CONSUMER_EXISTS = 10148
_NO_PEERS = 10005
"""A cluster that does not know enough servers (yet)."""
_RETRY = 0.25
_LOOK = 2.0
"""Seconds to wait for what is there: a leader that is gone does not answer, the next one does."""

Config = dict[str, object]

log = get_logger()


async def declare(
    broker: Broker,
    *,
    replicas: int,
    streams: Iterable[Stream] = STREAMS,
    consumers: Iterable[Consumer] = (),
    keys: Iterable[str] = (KEYS,),
    objects: Iterable[str] = (BLOBS,),
    patience: float = 60.0,
) -> None:
    """Makes them all, `replicas` copies of each; `keys` are KV buckets, `objects` object stores.

    `patience`: seconds to wait for a cluster that has no leader or not enough servers yet. Raises `IncompatibleStream`,
    `IncompatibleConsumer`, `BrokerError`, `BrokerTimeout`.
    """
    deadline = asyncio.get_running_loop().time() + patience
    configs = [stream_config(stream, replicas) for stream in streams]
    configs += [_keys_config(bucket, replicas) for bucket in keys]
    configs += [_objects_config(bucket, replicas) for bucket in objects]
    for config in configs:
        broker.declared[str(config["name"])] = config
        await _patiently(deadline, partial(_ensure_stream, broker, config))
    for consumer in consumers:
        await _patiently(deadline, partial(ensure_consumer, broker, consumer))


async def ensure_stream(broker: Broker, name: str) -> None:
    """Makes a stream again that this connection declared and that somebody deleted; else does nothing."""
    if name in broker.declared and await _find(broker, f"STREAM.INFO.{name}") is None:
        log.error("a stream was deleted and is made again, empty", stream=name)
        await _ensure_stream(broker, broker.declared[name])


async def ensure_consumer(broker: Broker, consumer: Consumer) -> None:
    """Makes the consumer, or changes it into what is declared. It has as many replicas as its stream.

    Its stream is made again as `ensure_stream` does. Raises `IncompatibleConsumer`, `BrokerError`, `BrokerTimeout`.
    """
    wanted = consumer_config(consumer)
    path = f"{consumer.stream}.{consumer.name}"
    found = await _find(broker, f"CONSUMER.INFO.{path}")
    if found is None:
        await ensure_stream(broker, consumer.stream)
        found = await _make(broker, f"CONSUMER.CREATE.{path}", _consumer_body(consumer.stream, wanted, "create"))
    if found is None:
        found = await _find(broker, f"CONSUMER.INFO.{path}") or {}
    if differences := _differences(found, wanted):
        try:
            await broker.api(f"CONSUMER.CREATE.{path}", _consumer_body(consumer.stream, found | wanted, "update"))
        except BrokerError as error:
            if _is_passing(error):
                raise
            raise IncompatibleConsumer(path, differences, error) from error
        log.info("changed consumer", consumer=path, changes=[str(difference) for difference in differences])


def stream_config(stream: Stream, replicas: int) -> Config:
    """The stream as JetStream's API wants it."""
    source, target = stream.republish or ("", "")
    return {
        "name": stream.name,
        "subjects": list(stream.subjects),
        "retention": stream.retention,
        "storage": stream.storage,
        "max_age": _nanos(stream.max_age),
        "max_bytes": stream.max_bytes,
        "max_msgs_per_subject": stream.max_msgs_per_subject,
        "discard": stream.discard,
        "duplicate_window": _nanos(stream.duplicate_window),
        "no_ack": stream.no_ack,
        "allow_direct": stream.allow_direct,
        # A stream with schedules has rollups, whatever it asks for.
        "allow_rollup_hdrs": stream.allow_rollup_hdrs or stream.allow_msg_schedules,
        "allow_msg_ttl": stream.allow_msg_ttl,
        "allow_msg_schedules": stream.allow_msg_schedules,
        "num_replicas": replicas,
        "republish": {"src": source, "dest": target} if stream.republish else None,
    }


def consumer_config(consumer: Consumer) -> Config:
    """The consumer as JetStream's API wants it."""
    return {
        "durable_name": consumer.name,
        "name": consumer.name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": _nanos(consumer.ack_wait),
        "max_ack_pending": consumer.max_ack_pending,
        "max_deliver": consumer.max_deliver,
        "headers_only": consumer.headers_only,
        "filter_subjects": list(consumer.filters) or None,
    }


def _keys_config(bucket: str, replicas: int) -> Config:
    """A KV bucket as clients expect it (ADR-8)."""
    history: Config = {"max_msgs_per_subject": 1, "deny_delete": True}
    return _bucket_config(f"KV_{bucket}", [f"$KV.{bucket}.>"], replicas) | history


def _objects_config(bucket: str, replicas: int) -> Config:
    """An object store as clients expect it (ADR-20)."""
    return _bucket_config(f"OBJ_{bucket}", [f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"], replicas)


def _bucket_config(name: str, subjects: list[str], replicas: int) -> Config:
    return {
        "name": name,
        "subjects": subjects,
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "num_replicas": replicas,
    }


async def _ensure_stream(broker: Broker, wanted: Config) -> None:
    name = wanted["name"]
    found = await _find(broker, f"STREAM.INFO.{name}")
    if found is None:
        found = await _make(broker, f"STREAM.CREATE.{name}", wanted)
    if found is None:
        found = await _find(broker, f"STREAM.INFO.{name}") or {}
    if differences := _differences(found, wanted):
        try:
            await broker.api(f"STREAM.UPDATE.{name}", found | wanted)
        except BrokerError as error:
            if _is_passing(error):
                raise
            raise IncompatibleStream(str(name), differences, error) from error
        log.info("changed stream", stream=name, changes=[str(difference) for difference in differences])


async def _find(broker: Broker, operation: str) -> Config | None:
    """The configuration of what is there, or None."""
    try:
        return _config(await broker.api(operation, timeout=_LOOK))
    except BrokerError as error:
        if error.err_code in (STREAM_NOT_FOUND, CONSUMER_NOT_FOUND):
            return None
        raise


async def _make(broker: Broker, operation: str, body: Config) -> Config | None:
    """Makes it; its configuration. None: another one with this name has come in between."""
    try:
        answer = await broker.api(operation, body)
    except BrokerError as error:
        if error.err_code in (_STREAM_EXISTS, _CONSUMER_EXISTS):
            return None
        raise
    log.info("made what is declared", operation=operation)
    return _config(answer)


async def _patiently(deadline: float, work: Callable[[], Awaitable[None]]) -> None:
    """Does it again while a cluster has no leader, until `deadline` (loop time)."""
    told = False
    while True:
        try:
            return await work()
        except BrokerFault as error:
            if not _is_passing(error) or asyncio.get_running_loop().time() > deadline:
                raise
            if not told:
                log.warning("the broker is not ready, waiting for it", error=error)
                told = True
        await asyncio.sleep(_RETRY)


def _is_passing(error: BrokerFault) -> bool:
    """Whether the same request may succeed a moment later."""
    if isinstance(error, BrokerError):
        return error.code == 503 or error.err_code == _NO_PEERS
    return isinstance(error, BrokerTimeout)


def _config(answer: Config) -> Config:
    return cast("Config", answer["config"])


def _consumer_body(stream: str, config: Config, action: str) -> Config:
    return {"stream_name": stream, "config": config, "action": action}


def _differences(found: Mapping[str, object], wanted: Mapping[str, object]) -> tuple[Difference, ...]:
    """What is declared and not so. The server leaves out what has its zero value."""
    return tuple(
        Difference(field, found.get(field), value)
        for field, value in wanted.items()
        if not _same(found.get(field), value)
    )


def _same(found: object, wanted: object) -> bool:
    if isinstance(found, dict) and isinstance(wanted, dict):
        there, must = cast("Config", found), cast("Config", wanted)
        return all(_same(there.get(key), value) for key, value in must.items())
    return found == wanted or (not found and not wanted)


def _nanos(seconds: float) -> int:
    return round(seconds * 1e9)
