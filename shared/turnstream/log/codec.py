"""Bytes to event and back: a CloudEvents 1.0 JSON record, one a message.

Not here: which subject a record goes to and what guards it (`jetstream.py`), what an event means
(`turnstream.session`).

For whoever edits this: a field of an event is only ever added, with a default, and a default never changes (defaults
are not written). A bigger change is an upcaster: a function on the raw record, looked up by the type that was stored.
Every version ever written stays in `tests/golden/`.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial, reduce
from typing import cast

import msgspec

from turnstream import subjects
from turnstream.broker.clock import format_time, parse_time
from turnstream.ids import SessionKey
from turnstream.log.base import Unreadable
from turnstream.session.decision import Decision
from turnstream.session.events import NAMES, TYPES, Copied, Data, Event, Fact, Recorded, Unknown

SPECVERSION = "1.0"

Upcaster = Callable[[dict[str, object]], dict[str, object]]
"""From a record as an earlier release wrote it to one that this release reads; it may change `type` and `data`."""
UPCASTERS: Mapping[str, Upcaster] = {}
"""By stored `type`. None yet: every change so far was a field added with a default."""


class _Record(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """The attributes of a record. Each type's own struct adds `data` and is told by its tag, `type`."""

    specversion: str
    id: str
    source: str
    time: str
    actor: str
    cause: str | None = None
    correlation: str | None = None
    idempotencykey: str | None = None
    bodydigest: str | None = None
    traceparent: str | None = None
    copyof: str | None = None
    """Of an event that was copied: the session of its original, and behind a slash its sequence there."""
    copytime: str | None = None
    """When its original was stored."""


class _FactRecord(_Record, kw_only=True):
    data: Fact


class _OtherRecord(_Record, kw_only=True):
    """A record of a type that this release does not know; what we always write may be missing."""

    type: str
    actor: str = ""
    time: str = ""
    data: msgspec.Raw = msgspec.Raw(b"null")


def _record_of(name: str, kind: type[Data]) -> type[_FactRecord]:
    struct = msgspec.defstruct(
        f"{kind.__name__}Record", [("data", kind)], bases=(_Record,), tag=name, tag_field="type", kw_only=True
    )
    return cast("type[_FactRecord]", struct)


def _either(one: type[_FactRecord], other: type[_FactRecord]) -> type[_FactRecord]:
    """The tagged union that msgspec decodes in one pass."""
    return cast("type[_FactRecord]", one | other)


_RECORDS = {kind: _record_of(name, kind) for kind, name in NAMES.items()}
_ANY_RECORD = reduce(_either, _RECORDS.values())
_encoder = msgspec.json.Encoder()
_facts = msgspec.json.Decoder(_ANY_RECORD)
_others = msgspec.json.Decoder(_OtherRecord)
_objects = msgspec.json.Decoder(dict[str, object])


def encode(event: Event) -> bytes:
    """Raises `TypeError` for an event of a type that this release does not know: it writes none but a copy."""
    key, copied = event.key, event.copied
    make, data = _form(event)
    return _encoder.encode(
        make(
            specversion=SPECVERSION,
            id=event.id,
            source=f"/{key.account}/sessions/{key.session}",
            time=format_time(event.time),
            actor=event.actor,
            cause=event.cause,
            correlation=event.correlation,
            idempotencykey=event.idempotency_key,
            bodydigest=event.body_digest,
            traceparent=event.traceparent,
            copyof=f"{copied.session}/{copied.seq}" if copied else None,
            copytime=format_time(copied.time) if copied else None,
            data=data,
        )
    )


def _form(event: Event) -> tuple[Callable[..., _Record], object]:
    """What makes the record, and the data as it takes them."""
    data = event.data
    if not isinstance(data, Unknown):
        return _RECORDS[type(data)], data
    if event.copied is None:
        raise TypeError(f"{data.type}: not a type that this release writes")
    return partial(_OtherRecord, type=data.type), data.raw


def decode(
    payload: bytes, *, seq: int, previous: int, time: int, upcasters: Mapping[str, Upcaster] = UPCASTERS
) -> Recorded:
    """The event of a stored record. A type that this release does not know is kept raw, as `Unknown`.

    `seq`, `previous` and `time` (milliseconds) are the broker's; what was copied is dated as its original was. Raises
    `Unreadable` if the bytes are no record, or if the data of a known type does not fit.
    """
    try:
        record = _facts.decode(payload)
        data: Fact | Unknown = record.data
        if upcasters and NAMES[type(data)] in upcasters:
            record = _upcast(payload, upcasters)
            data = record.data
    except msgspec.MsgspecError as error:
        record, data = _decode_other(payload, seq, upcasters, error)
    try:
        event = Event(
            id=record.id,
            key=_key_of(record.source),
            data=data,
            actor=record.actor,
            time=parse_time(record.time) if record.time else time,
            cause=record.cause,
            correlation=record.correlation,
            idempotency_key=record.idempotencykey,
            body_digest=record.bodydigest,
            traceparent=record.traceparent,
            copied=_copied(record),
        )
    except ValueError as error:
        raise Unreadable(seq, str(error)) from error
    return Recorded(
        seq=seq, previous=previous, time=event.stored_at(time), size=len(payload), event=event, payload=payload
    )


def _copied(record: _Record) -> Copied | None:
    """Raises `ValueError`."""
    if record.copyof is None or record.copytime is None:
        return None
    session, _, seq = record.copyof.rpartition("/")
    return Copied(session, int(seq), parse_time(record.copytime))


def _decode_other(
    payload: bytes, seq: int, upcasters: Mapping[str, Upcaster], error: msgspec.MsgspecError
) -> tuple[_Record, Fact | Unknown]:
    """A record that is not one of today's: of a type that was, or of one that is not known."""
    try:
        other = _others.decode(payload)
        if other.type in upcasters:
            record = _upcast(payload, upcasters)
            return record, record.data
    except msgspec.MsgspecError as reason:
        raise Unreadable(seq, str(reason)) from reason
    if other.type in TYPES:
        raise Unreadable(seq, f"{other.type}: {error}") from error
    return other, Unknown(type=other.type, raw=other.data)


def _upcast(payload: bytes, upcasters: Mapping[str, Upcaster]) -> _FactRecord:
    """Applies the stored type's upcaster, then that of the type it became, and so on."""
    record = _objects.decode(payload)
    done: set[object] = set()
    while (name := record.get("type")) not in done and isinstance(name, str) and name in upcasters:
        done.add(name)
        record = upcasters[name](record)
    return msgspec.convert(record, _ANY_RECORD)


def headers(decision: Decision) -> dict[str, str]:
    """What others need to know of the event without opening it: its id, its type, whom to wake, what falls due."""
    event = decision.event
    found = {subjects.MESSAGE_ID: event.id, subjects.TYPE: event.type}
    if decision.wakes:
        found[subjects.WAKE] = " ".join(decision.wakes)
    if decision.dues:
        dues = sorted(decision.dues, key=lambda due: due.after)
        found[subjects.DUE] = ";".join(f"{due.after} {due.queue} {due.what}" for due in dues)
    if decision.settled:
        found[subjects.SETTLED] = " ".join(decision.settled)
    return found


def public(recorded: Recorded) -> bytes:
    """The JSON that readers get, the same bytes in pages and in feeds: the stored record with its number and the
    broker's time in front (of a copy, that of its original). Only for an event that was read (one that this process has
    just appended has no `payload`)."""
    if not recorded.payload:
        raise ValueError(f"event {recorded.seq} was not read from the log")
    stored = format_time(recorded.time)
    return b'{"seq":%d,"storedat":"%b",%b' % (recorded.seq, stored.encode(), recorded.payload.lstrip()[1:])


@lru_cache(maxsize=4096)
def _key_of(source: str) -> SessionKey:
    empty, account, sessions, session = source.split("/")
    if empty or sessions != "sessions" or not account or not session:
        raise ValueError(f"{source!r} names no session")
    return SessionKey(account, session)
