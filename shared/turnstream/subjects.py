"""Every subject, stream, consumer and bucket, declared once, as plain data.

Nobody else writes a subject down. `turnstream.broker` makes what is declared here. Durations are seconds. Public
subjects (`ts.feed`, `ts.delta`, `ts.inbox`, `ts.api`) do not show the partition.
"""

from typing import Literal

import msgspec

from turnstream.ids import SessionKey

PARTITIONS = 64

SESSIONS = "SESSIONS"
WORK = "WORK"
INBOX = "INBOX"
REFUSED = "REFUSED"
DELTAS = "DELTAS"
KEYS = "keys"
BLOBS = "blobs"
CHUNKS = f"$O.{BLOBS}.C."
CHECKPOINTS = "KV_checkpoints"
"""The stream of the KV bucket `checkpoints`."""
SNAPSHOTS = "KV_snapshots"
"""The stream of the KV bucket `snapshots`."""
ATTACHMENTS = "KV_attachments"
"""The stream of the KV bucket `attachments`."""
AGENTS = "KV_agents"
"""The stream of the KV bucket `agents`."""
DELETED = "="
"""In the place of a version, for it can be none: the mark that an agent was deleted."""

EVENTS = "ts.session.>"
"""Filter: the events of every session."""
ARCHIVES = "ts.archive.>"
"""Filter: the records of runs that outlive their sessions."""
RECORD = "ts.>"
"""Filter: everything that `SESSIONS` holds. One filter: of several the server looks each message up in turn, which is
six times slower (2026-11-30, tests/bench/bench_views.py)."""

MESSAGE_ID = "Nats-Msg-Id"
"""Header: an event's id, or what makes a repeat of another message recognisable."""
WAKE = "ts-wake"
"""Header: queues to wake, separated by blanks."""
DUE = "ts-due"
"""Header: `<milliseconds after the event's broker time> <queue> <what>`, the earliest first, separated by `;`.
`<what>` names it within its session."""
SETTLED = "ts-settled"
"""Header: what an earlier event said falls due and no longer does, separated by blanks."""
TYPE = "ts-type"
"""Header: the event's type."""
CAUSE = "ts-cause"
"""Header of a wake-up: the log sequence that caused it."""
IDEMPOTENCY_KEY = "Idempotency-Key"
"""Header of a request or a message: what makes a repeat recognisable."""
ACTOR = "ts-actor"
"""Header of a request: who asks."""


def partition(account: str, session: str) -> int:
    """FNV-1a, 32 bits, of `<account>.<session>`, mod 64."""
    value = 0x811C9DC5
    for byte in f"{account}.{session}".encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value % PARTITIONS


def session(key: SessionKey) -> str:
    """The one subject that the session is."""
    return f"ts.session.{partition(key.account, key.session)}.{key.account}.{key.session}"


def parse_session(subject: str) -> SessionKey:
    """The session of a subject of `SESSIONS`."""
    _, _, _, account, name = subject.split(".", 4)
    return SessionKey(account, name)


def archive(key: SessionKey, run: int | Literal["*"]) -> str:
    """The record of a run that outlives its session."""
    return f"ts.archive.{partition(key.account, key.session)}.{key.account}.{key.session}.{run}"


def is_archive(subject: str) -> bool:
    """Whether a subject of `SESSIONS` holds the record of a run; else it is a session."""
    return subject.startswith("ts.archive.")


def parse_archive(subject: str) -> tuple[SessionKey, int]:
    """Session and number of the run."""
    _, _, _, account, name, run = subject.split(".", 5)
    return SessionKey(account, name), int(run)


def feed(key: SessionKey) -> str:
    return f"ts.feed.{key.account}.{key.session}"


def delta(key: SessionKey, run: int | Literal["*"]) -> str:
    return f"ts.delta.{key.account}.{key.session}.{run}"


def work(queue: str, key: SessionKey) -> str:
    """The wake-ups of a session; `*`: those of all queues."""
    return f"ts.work.{queue}.{key.account}.{key.session}"


def work_of(queue: str) -> str:
    """Every wake-up of a queue."""
    return f"ts.work.{queue}.>"


def is_work(subject: str) -> bool:
    """Whether a subject of `WORK` is a wake-up; else it is a timer."""
    return subject.startswith("ts.work.")


def parse_work(subject: str) -> tuple[str, SessionKey]:
    """Queue and session of a wake-up."""
    _, _, queue, account, name = subject.split(".", 4)
    return queue, SessionKey(account, name)


def timer(key: SessionKey, what: str) -> str:
    """A timer of a session; `*`: all of them."""
    return f"ts.timer.{key.account}.{key.session}.{what}"


def inbox(key: SessionKey) -> str:
    return f"ts.inbox.{key.account}.{key.session}"


def parse_inbox(subject: str) -> tuple[str, str]:
    """Account and session of an inbox subject, as written: neither is checked."""
    _, _, account, name = subject.split(".", 3)
    return account, name


def refused(account: str, name: str) -> str:
    return f"ts.inbox-refused.{account}.{name}"


def chunks(key: SessionKey, blob: str) -> str:
    """The bytes of a blob of a session, in pieces; `>`: of all of them."""
    return f"{CHUNKS}{key.account}.{key.session}.{blob}"


def checkpoint(key: SessionKey, run: int | Literal["*"]) -> str:
    """What only one run needs, `*`: any run of the session."""
    return f"$KV.checkpoints.{key.account}.{key.session}.{run}"


def snapshot(key: SessionKey) -> str:
    """What a session's events up to some point fold into."""
    return f"$KV.snapshots.{key.account}.{key.session}"


def attachment(key: SessionKey, name: str) -> str:
    """What a name of an attachment means in a session, the name as one token; `*`: every name."""
    return f"$KV.attachments.{key.account}.{key.session}.{name}"


def parse_attachment(subject: str) -> tuple[SessionKey, str]:
    """Session and name of a record, the name as one token."""
    _, _, account, session, name = subject.split(".", 4)
    return SessionKey(account, session), name


def agent(account: str, name: str, version: str) -> str:
    """A saved version of an agent, or the mark that it was deleted; `*`: all of them."""
    return f"$KV.agents.{account}.{name}.{version}"


def parse_agent(subject: str) -> tuple[str, str, str]:
    """Account, name and version."""
    _, _, account, name, version = subject.split(".", 4)
    return account, name, version


def api(account: str, operation: str) -> str:
    return f"ts.api.{account}.{operation}"


def parse_api(subject: str) -> tuple[str, str]:
    """Account and operation of a request."""
    _, _, account, operation = subject.split(".", 3)
    return account, operation


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """A stream as it has to be. `max_age` and `duplicate_window` are seconds."""

    name: str
    subjects: tuple[str, ...]
    retention: Literal["limits", "workqueue"] = "limits"
    storage: Literal["file", "memory"] = "file"
    max_age: float = 0
    max_bytes: int = -1
    max_msgs_per_subject: int = -1
    discard: Literal["old", "new"] = "old"
    duplicate_window: float = 120
    no_ack: bool = False
    allow_direct: bool = True
    allow_rollup_hdrs: bool = False
    allow_msg_ttl: bool = False
    allow_msg_schedules: bool = False
    republish: tuple[str, str] | None = None
    """Source and destination."""


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """A durable pull consumer with explicit acks, as it has to be. `ack_wait` is seconds."""

    stream: str
    name: str
    filters: tuple[str, ...] = ()
    ack_wait: float = 30
    max_ack_pending: int = 1000
    max_deliver: int = -1
    headers_only: bool = False


STREAMS = (
    Stream(
        name=SESSIONS,
        subjects=("ts.session.*.*.*", "ts.archive.*.*.*.*"),
        allow_rollup_hdrs=True,
        allow_msg_ttl=True,
        republish=("ts.session.*.*.*", "ts.feed.{{wildcard(2)}}.{{wildcard(3)}}"),
    ),
    Stream(
        name=WORK,
        subjects=("ts.work.*.*.*", "ts.timer.*.*.*"),
        retention="workqueue",
        allow_msg_schedules=True,
    ),
    # Broker-side dedupe is stream-wide, so one tenant's ids would swallow another's: as short as the server allows.
    Stream(name=INBOX, subjects=("ts.inbox.*.*",), retention="workqueue", duplicate_window=0.1),
    Stream(name=REFUSED, subjects=("ts.inbox-refused.*.*",), max_age=7 * 86400, duplicate_window=0.1),
    Stream(
        name=DELTAS,
        subjects=("ts.delta.*.*.*",),
        storage="memory",
        max_age=600,
        max_bytes=256 * 1024 * 1024,
        max_msgs_per_subject=5000,
        no_ack=True,
    ),
    Stream(name=CHECKPOINTS, subjects=("$KV.checkpoints.>",), max_age=7 * 86400, allow_rollup_hdrs=True),
    Stream(name=SNAPSHOTS, subjects=("$KV.snapshots.>",), allow_rollup_hdrs=True, allow_msg_ttl=True),
    Stream(name=ATTACHMENTS, subjects=("$KV.attachments.>",), max_msgs_per_subject=64),
    Stream(name=AGENTS, subjects=("$KV.agents.>",), max_msgs_per_subject=1, allow_rollup_hdrs=True),
)

# An event that was lost on the way to a dispatcher comes again soon, but not while its timer is only held back.
DISPATCH = Consumer(
    stream=SESSIONS, name="dispatch", filters=(EVENTS,), ack_wait=10, headers_only=True, max_ack_pending=-1
)
INBOX_CONSUMER = Consumer(stream=INBOX, name="inbox")


def runner_consumer(queue: str, ack_wait: float) -> Consumer:
    return Consumer(
        stream=WORK, name=f"runner-{queue}", filters=(work_of(queue),), ack_wait=ack_wait, max_ack_pending=-1
    )
