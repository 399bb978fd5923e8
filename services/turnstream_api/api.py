"""What the operations work with, and who asks. Not how a request comes in (`http.py`, `nats.py`)."""

import itertools
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from random import Random

import msgspec

from turnstream import ids, subjects
from turnstream.broker.connection import Broker
from turnstream.ids import SessionKey
from turnstream.log.handle import Handled, Sessions
from turnstream.roster import Offered, Roster, Unread
from turnstream.session.commands import CancelRun, Command, Origin
from turnstream.session.events import Attachment, RunEnded, Spec
from turnstream.settings import Settings
from turnstream.views.database import Database
from turnstream.wire.attachments import Attachments
from turnstream.wire.blobs import Blobs
from turnstream.wire.checkpoints import Checkpoints
from turnstream_api.errors import Problem
from turnstream_api.frames import Filter
from turnstream_api.hub import Hub

KEY_MAX = 255
"""Characters of an idempotency key."""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, and what the request says about itself beside its content."""

    account: str
    actor: str
    key_id: str = ""
    """Of the API key; empty where there is none."""
    idempotency_key: str | None = None
    expected_seq: int | None = None
    """From `If-Match`."""
    traceparent: str | None = None
    streams: bool = False
    """The caller wants server-sent events."""
    last_event_id: int | None = None


class File(msgspec.Struct, frozen=True):
    """An attachment with its bytes: the first piece, and those behind it."""

    about: Attachment
    first: bytes
    rest: AsyncGenerator[bytes, None]

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Raises `BrokerFault`."""
        yield self.first
        async with aclosing(self.rest):
            async for piece in self.rest:
                yield piece


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What an operation answers: its body as a struct, as JSON or as a file, or none, its status, and the sequence it
    reflects or made."""

    body: msgspec.Struct | msgspec.Raw | File | None
    status: int = 200
    seq: int | None = None
    replayed: bool = False


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that goes on: the session's feed behind a sequence. `first` is sent before everything else."""

    key: SessionKey
    after: int
    filter: Filter
    first: bytes = b""
    over: bool = False
    """Nothing can follow `first`."""
    on_gone: Callable[[], Awaitable[None]] | None = None
    """What is to be done if the peer goes away before the stream has ended."""


def written(handled: Handled, origin: Origin) -> tuple[int, bool]:
    """The sequence that a write answers with: of the event that it stored, else (True) of the one that an equal request
    stored before, else the session's last."""
    if handled.recorded:
        return handled.recorded.seq, False
    receipt = handled.session.receipt(origin.idempotency_key)
    return (receipt.seq, True) if receipt else (handled.session.seq, False)


class Api:
    """One process's hands. `roster`: every agent that there is; `now`: the broker's time in milliseconds."""

    def __init__(
        self,
        *,
        settings: Settings,
        sessions: Sessions,
        hub: Hub,
        views: Database,
        roster: Roster,
        now: Callable[[], int],
        broker: Broker,
    ) -> None:
        self.settings = settings
        self.log = sessions.log
        self.sessions = sessions
        self.hub = hub
        self.views = views
        self.roster = roster
        self.now = now
        self.broker = broker
        self.checkpoints = Checkpoints(broker)
        self.blobs = Blobs(broker)
        self.attachments = Attachments(broker, self.blobs)
        # Ids must be unique, not secret: no system call for each.
        self._random = Random(os.urandom(32)).randbytes
        self._requests = itertools.count(1)
        self._process = os.urandom(6).hex()

    def agents(self, account: str) -> Offered:
        """The agents of an account, for one request."""
        return self.roster.of(account)

    async def spec(self, account: str, agent: str) -> Spec | None:
        """What a run of this agent would carry out now. Raises `BrokerFault`."""
        edition = await self.roster.find(account, agent)
        return edition.spec if edition else None

    async def handle(self, key: SessionKey, command: Command, *, fresh: bool = False) -> Handled:
        """Decides and stores, as `Sessions.handle` does; what a saved agent says is read as soon as that turns out to
        be needed. Raises `BrokerFault` too."""
        while True:
            try:
                return await self.sessions.handle(key, command, fresh=fresh)
            except Unread as unread:
                await unread.read()

    async def cancel(self, key: SessionKey, command: CancelRun) -> Handled:
        """Where that ends a run which had begun, what only the run needed goes with it: no runner comes by."""
        handled = await self.sessions.handle(key, command)
        ended = handled.recorded.event.data if handled.recorded else None
        if isinstance(ended, RunEnded) and ended.attempt:
            await self.checkpoints.drop(key, ended.run)
        return handled

    def new_id(self) -> str:
        return ids.uuid7(self.now(), self._random(10))

    def request_id(self) -> str:
        return f"{self._process}-{next(self._requests):x}"

    async def last_seq(self) -> int:
        """Sequence of the newest event of all sessions. Raises `BrokerFault`."""
        return (await self.broker.stream(subjects.SESSIONS)).state.last_seq

    def origin(
        self,
        caller: Caller,
        operation: str,
        body: msgspec.Struct,
        *,
        expected_seq: int | None = None,
        key_of_body: str | None = None,
    ) -> Origin:
        """Who asks for a write, and how a repeat is recognised: by the request's idempotency key, else by what the body
        itself names (`key_of_body`, a message id). A repeat is a command of its own, with its own id: which of two
        equal requests was first is what the log says."""
        if caller.expected_seq is not None and expected_seq not in (None, caller.expected_seq):
            raise Problem("invalid", "If-Match and expected_seq name different sequences", field="expected_seq")
        name = f"key\x1f{caller.idempotency_key}" if caller.idempotency_key is not None else None
        if name is None and key_of_body is not None:
            name = f"id\x1f{key_of_body}"
        command = self.new_id()
        return Origin(
            id=command,
            actor=caller.actor,
            time=self.now(),
            idempotency_key=None if name is None else ids.digest(f"{operation}\x1f{name}".encode()),
            body_digest=None if name is None else ids.digest(_canonical.encode(body)),
            expected_seq=caller.expected_seq if expected_seq is None else expected_seq,
            correlation=command,
            traceparent=caller.traceparent,
        )

    def session_id(self, caller: Caller, operation: str) -> str:
        """The id of a session that we name: derived from the idempotency key, so that a repeat is about the same."""
        if caller.idempotency_key is None:
            return self.new_id()
        return ids.derive(caller.account, operation, caller.idempotency_key)


_canonical = msgspec.json.Encoder(order="sorted")
