"""Makes streams, consumers and buckets as `turnstream.subjects` declares them.

Idempotent, and safe when several services start at once: what is missing is made, a setting that differs is changed, a
setting that nobody declares is kept as it is. What the server will not change is an `Incompatible`: it names each
setting, what it is and what it must be.
"""

from collections.abc import Iterable, Mapping
from typing import cast

from turnstream.broker.connection import Broker
from turnstream.broker.errors import BrokerError, Difference, IncompatibleConsumer, IncompatibleStream
from turnstream.subjects import BLOBS, KEYS, STREAMS, Consumer, Stream
from turnstream.telemetry import get_logger

STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
_STREAM_EXISTS = 10058
_CONSUMER_EXISTS = 10148

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
) -> None:
    """Makes them all, `replicas` copies of each; `keys` are KV buckets, `objects` object stores.

    Raises `IncompatibleStream`, `IncompatibleConsumer`, `BrokerError`, `BrokerTimeout`.
    """
    for stream in streams:
        await _ensure_stream(broker, stream.name, stream_config(stream, replicas))
        broker.declared[stream.name] = stream, replicas
    for bucket in keys:
        await _ensure_stream(
            broker,
            f"KV_{bucket}",
            _bucket_config(f"KV_{bucket}", (f"$KV.{bucket}.>",), replicas)
            | {"max_msgs_per_subject": 1, "deny_delete": True},
        )
    for bucket in objects:
        await _ensure_stream(
            broker, f"OBJ_{bucket}", _bucket_config(f"OBJ_{bucket}", (f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"), replicas)
        )
    for consumer in consumers:
        await ensure_consumer(broker, consumer)


async def ensure_consumer(broker: Broker, consumer: Consumer) -> None:
    """Makes the consumer, or changes it into what is declared. It has as many replicas as its stream.

    A stream that this connection declared and that is gone is made again.

    Raises `IncompatibleConsumer`, `IncompatibleStream`, `BrokerError`, `BrokerTimeout`.
    """
    wanted = consumer_config(consumer)
    path = f"{consumer.stream}.{consumer.name}"
    try:
        found = await _find(broker, f"CONSUMER.INFO.{path}", CONSUMER_NOT_FOUND)
        if found is None:
            try:
                await _put_consumer(broker, path, wanted, "create")
                log.info("made consumer", stream=consumer.stream, consumer=consumer.name)
                return
            except BrokerError as error:
                if error.err_code != _CONSUMER_EXISTS:
                    raise
            found = await _find(broker, f"CONSUMER.INFO.{path}", CONSUMER_NOT_FOUND) or {}
    except BrokerError as error:
        if error.err_code != STREAM_NOT_FOUND or consumer.stream not in broker.declared:
            raise
        stream, replicas = broker.declared[consumer.stream]
        log.error("stream is gone and is made again, empty", stream=stream.name)
        await _ensure_stream(broker, stream.name, stream_config(stream, replicas))
        await _put_consumer(broker, path, wanted, "create")
        return
    if not (differences := _differences(found, wanted)):
        return
    try:
        await _put_consumer(broker, path, found | wanted, "update")
    except BrokerError as error:
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


def _bucket_config(name: str, subjects: tuple[str, ...], replicas: int) -> Config:
    """What a KV bucket and an object store have in common (ADR-8, ADR-20)."""
    return {
        "name": name,
        "subjects": list(subjects),
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "num_replicas": replicas,
    }


async def _ensure_stream(broker: Broker, name: str, wanted: Config) -> None:
    found = await _find(broker, f"STREAM.INFO.{name}", STREAM_NOT_FOUND)
    if found is None:
        try:
            await broker.api(f"STREAM.CREATE.{name}", wanted)
            log.info("made stream", stream=name)
            return
        except BrokerError as error:
            if error.err_code != _STREAM_EXISTS:
                raise
        found = await _find(broker, f"STREAM.INFO.{name}", STREAM_NOT_FOUND) or {}
    if not (differences := _differences(found, wanted)):
        return
    try:
        await broker.api(f"STREAM.UPDATE.{name}", found | wanted)
    except BrokerError as error:
        raise IncompatibleStream(name, differences, error) from error
    log.info("changed stream", stream=name, changes=[str(difference) for difference in differences])


async def _find(broker: Broker, operation: str, not_found: int) -> Config | None:
    """The configuration of what is there, or None."""
    try:
        answer = await broker.api(operation)
    except BrokerError as error:
        if error.err_code == not_found:
            return None
        raise
    return cast("Config", answer["config"])


async def _put_consumer(broker: Broker, path: str, config: Config, action: str) -> None:
    body = {"stream_name": path.partition(".")[0], "config": config, "action": action}
    await broker.api(f"CONSUMER.CREATE.{path}", body)


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
