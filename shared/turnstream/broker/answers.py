"""What JetStream answers, as far as anybody here looks at it."""

from typing import Final

import msgspec

from turnstream.broker.errors import BrokerError

NO_MESSAGE = 10037
"""Error code: a message that is not there (any more)."""
EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"
"""Header of a guarded write: the sequence of the subject's last message, 0 for none."""
WRONG_LAST: Final = 10071
"""Error code: another message is last; names its sequence."""
WRONG_LAST_RACE: Final = 10164
"""The same, found while a replicated write was under way; names none."""


class Refusal(msgspec.Struct):
    code: int = 500
    err_code: int = 0
    description: str = ""


class Stored(msgspec.Struct):
    """A message as its stream holds it. `hdrs` is the header block as it was sent; `time` is RFC 3339."""

    subject: str
    seq: int
    time: str
    data: bytes = b""
    hdrs: bytes = b""


class StreamState(msgspec.Struct):
    messages: int
    bytes: int
    first_seq: int
    last_seq: int
    consumer_count: int = 0
    num_subjects: int = 0


class StreamConfig(msgspec.Struct):
    num_replicas: int = 1


class Cluster(msgspec.Struct):
    leader: str | None = None


class StreamInfo(msgspec.Struct):
    """`created` tells a stream from another one that bears its name."""

    created: str
    config: StreamConfig
    state: StreamState
    cluster: Cluster | None = None


class _Ack(msgspec.Struct):
    error: Refusal | None = None


_acks = msgspec.json.Decoder(_Ack)


def check_stored(subject: str, answer: bytes) -> None:
    """Raises `BrokerError` if the answer to a publish says that the message was not stored."""
    if b'"error"' in answer and (error := _acks.decode(answer).error):
        raise refused(error, subject)


def refused(refusal: Refusal, operation: str) -> BrokerError:
    return BrokerError(refusal.code, refusal.err_code, refusal.description, operation=operation)
