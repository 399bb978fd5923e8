"""A folded session as bytes, so that the events it was made of need not be read again.

A snapshot is never the record. It is believed only where its bytes are whole, where this release folds as the one did
that made it, and where the log has the very event that it ends with (`is_of`): one of another life of the log, or of a
log that has lost its end, is none. Otherwise it is as if there were none, which costs time and nothing else.

For whoever edits this: `FOLD_VERSION` is of what the state consists of, and is another as soon as a field of it is.
`MEANING` is raised by hand where the same events fold into something else though the fields are the same;
`tests/golden/test_fold.py` notices.
"""

import zlib
from typing import Final

import msgspec
from msgspec import inspect

from turnstream.ids import SessionKey, digest
from turnstream.session.events import Recorded
from turnstream.session.state import Session

MEANING: Final = 3


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """A session, and what tells its last event from any other one: its id, its broker time, the event before it."""

    session: Session
    id: str
    time: int
    previous: int

    @property
    def seq(self) -> int:
        return self.session.seq

    def is_of(self, recorded: Recorded) -> bool:
        """Whether this is the event that it ends with."""
        own = (self.seq, self.id, self.time, self.previous)
        return own == (recorded.seq, recorded.event.id, recorded.time, recorded.previous)


class _Stored(msgspec.Struct, array_like=True):
    """What is written: a snapshot's bytes are looked at only if version and checksum are right."""

    version: str
    checksum: int
    snapshot: bytes


def encode(session: Session, last: Recorded) -> bytes:
    """`last` is the session's last event, as it was read from the log."""
    body = _encoder.encode(Snapshot(session, last.event.id, last.time, last.previous))
    return _encoder.encode(_Stored(FOLD_VERSION, zlib.crc32(body), body))


def decode(data: bytes, key: SessionKey) -> Snapshot | None:
    """None: these bytes are no snapshot of this session that this release can use."""
    try:
        stored = _stored.decode(data)
        if stored.version != FOLD_VERSION or stored.checksum != zlib.crc32(stored.snapshot):
            return None
        snapshot = _snapshots.decode(stored.snapshot)
    except msgspec.MsgspecError:
        return None
    return snapshot if snapshot.session.key == key else None


def shape(kind: inspect.Type) -> str:
    """What values of this type consist of: every field of every struct in them, with its type and default."""
    match kind:
        case inspect.StructType():
            fields = [f"{field.name}:{shape(field.type)}={field.default!r}" for field in kind.fields]
            return f"{'array' if kind.array_like else 'map'}({','.join(fields)})"
        case inspect.UnionType():
            return "|".join(sorted([shape(one) for one in kind.types]))
        case inspect.LiteralType():
            return f"literal({','.join(sorted(map(repr, kind.values)))})"
        case inspect.VarTupleType():
            return f"many({shape(kind.item_type)})"
        case inspect.TupleType():
            return f"these({','.join([shape(one) for one in kind.item_types])})"
        case inspect.DictType():
            return f"map({shape(kind.key_type)}:{shape(kind.value_type)})"
        case inspect.NoneType() | inspect.BoolType() | inspect.IntType() | inspect.StrType() | inspect.BytesType():
            return type(kind).__name__
        case inspect.CustomType(cls=any_) if any_ is object:
            return "any"
        case _:
            raise TypeError(f"{kind}: the state of a session holds nothing like it")


def version_of(meaning: int, kind: object) -> str:
    return digest(f"{meaning} {shape(inspect.type_info(kind))}".encode())[:16]


FOLD_VERSION: Final = version_of(MEANING, Session)
"""Of the folds that this release makes and reads."""

_encoder = msgspec.msgpack.Encoder()
_stored = msgspec.msgpack.Decoder(_Stored)
_snapshots = msgspec.msgpack.Decoder(Snapshot)
