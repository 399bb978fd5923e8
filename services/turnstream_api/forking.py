"""Forking a session: a new one that begins with what another one has up to an event."""

import asyncio
import contextlib
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from turnstream import ids
from turnstream.ids import SessionKey
from turnstream.log.feed import Feed
from turnstream.session.commands import ForkSession as ForkCommand
from turnstream.session.commands import Origin
from turnstream.session.decision import no_session
from turnstream.session.errors import Rejected
from turnstream.session.events import ForkedFrom, Recorded, SessionDeleted, SessionErased, SessionForked
from turnstream.session.forking import not_whole
from turnstream.session.routing import check_title
from turnstream.session.state import Session
from turnstream_api import checks, policies
from turnstream_api.api import Answer, Api, Caller
from turnstream_api.checks import ExpectedSeq, Metadata, Seq, SessionId, TitleText
from turnstream_api.errors import Problem
from turnstream_api.operation import Request
from turnstream_api.paging import read_after
from turnstream_api.policies import Policy

WAIT: Final = 2.0
"""Seconds that a caller waits who says nothing."""


class ForkSession(Request, frozen=True, kw_only=True):
    """`at`: the fork has what the session has up to this sequence; absent: everything up to now. Without `id` the fork
    gets one from us. `title`, `metadata` and `policy` are the fork's own; absent: as they are at that place. `wait`:
    seconds until it is whole, else 202. `expected_seq` is the last sequence of the session that is forked."""

    session: str
    at: Seq | None = None
    id: SessionId | None = None
    title: TitleText | None = None
    metadata: Metadata | None = None
    policy: Policy | None = None
    wait: Annotated[float, Meta(ge=0, le=checks.WAIT_MAX, description="Seconds to wait until it is whole.")] = WAIT
    expected_seq: ExpectedSeq | None = None


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a session: `seq` is its sequence."""

    session: str
    seq: int


class Forked(msgspec.Struct, frozen=True, kw_only=True, rename={"source": "from"}):
    """`session` is the fork, `from` the last event that it takes over. While it is not `whole`, nothing may be asked of
    it (409 `session_copying`); the event `session.forked` says that it is. `seq`: its last event."""

    session: str
    seq: int
    source: Place
    whole: bool


async def fork_session(api: Api, caller: Caller, request: ForkSession) -> Answer:
    """Opens a session that takes over what this one has up to an event; what goes on there does not go on in it."""
    source = checks.session_key(caller, request.session)
    if request.id is not None and not ids.may_open(request.id):
        raise Problem("invalid", "id: `--` is kept for the ids of child sessions", field="id")
    key = SessionKey(caller.account, request.id or api.session_id(caller, f"fork_session {source.session}"))
    body = msgspec.structs.replace(request, wait=0.0, expected_seq=None)
    origin = api.origin(caller, "fork_session", body, expected_seq=request.expected_seq, key_of_body=request.id)
    fresh = request.id is None and caller.idempotency_key is None
    fork = None if fresh else await _repeated(api, key, origin)
    replayed = fork is not None
    if fork is None:
        command = await _command(api, request, source, origin)
        try:
            handled = await api.sessions.handle(key, command, fresh=fresh)
        except Rejected as refusal:
            if refusal.code != "key_reused" or caller.idempotency_key is not None:
                raise
            raise Rejected("already_exists", f"a session {key.session} is there already", field="id") from None
        fork, replayed = handled.session, handled.recorded is None
    fork = await _whole(api, fork, request.wait)
    assert fork.forked_from is not None
    whole = fork.copying is None
    answer = Forked(
        session=key.session,
        seq=fork.seq,
        source=Place(session=fork.forked_from.session, seq=fork.forked_from.through),
        whole=whole,
    )
    return Answer(body=answer, status=(200 if replayed else 201) if whole else 202, seq=fork.seq, replayed=replayed)


async def _repeated(api: Api, key: SessionKey, origin: Origin) -> Session | None:
    """The fork, if an equal request has made it: then it does not matter what has become of the other session."""
    session = await api.sessions.load(key)
    receipt = session.receipt(origin.idempotency_key)
    same = receipt is not None and receipt.body_digest == origin.body_digest
    return session if same and session.exists else None


async def _command(api: Api, request: ForkSession, source: SessionKey, origin: Origin) -> ForkCommand:
    session = await api.sessions.load(source, await api.log.last(source))
    if not session.exists:
        raise no_session(session)
    if session.copying:
        raise not_whole(session)
    if origin.expected_seq not in (None, session.seq):
        message = f"the session's last sequence is {session.seq}, not {origin.expected_seq}"
        raise Rejected("session_moved", message, seq=session.seq)
    given: dict[Literal["title", "metadata", "policy"], object] = {
        "title": request.title,
        "metadata": request.metadata,
        "policy": request.policy,
    }
    forked_from = ForkedFrom(
        session=source.session,
        through=await _through(api, session, request.at),
        queue=session.last_queue,
        given=tuple([name for name, value in given.items() if value is not None]),
    )
    opens = checks.opens(
        agent=None,
        title=checks.title(request.title, "client"),
        metadata=checks.metadata(api, request.metadata),
        policy=policies.given(request.policy),
    )
    spec = await api.spec(session.key.account, session.agent_name)
    check_title(opens.title, policies.in_force(api.settings, spec, opens.policy if request.policy else session.policy))
    # The caller's guard is of the other session; the fork's own is that nothing is there.
    return ForkCommand(origin=msgspec.structs.replace(origin, expected_seq=None), opens=opens, forked_from=forked_from)


async def _through(api: Api, session: Session, at: int | None) -> int:
    """The sequence of the last event up to `at`. Raises `Problem`."""
    if at is None or at == session.seq:
        return session.seq
    name, last = session.key.session, session.seq
    if at > last:
        raise Problem("invalid", f"at: the last event of session {name} is {last}, not {at}", field="at", seq=last)
    async for page in read_after(api.log, session.key, at, at_least=last, page=1):
        following = page[0]
        if isinstance(following.event.data, SessionDeleted | SessionErased):
            raise checks.no_session(name)
        if not following.previous:
            first = following.seq
            raise Problem("invalid", f"at: the first event of session {name} is {first}", field="at", seq=first)
        return following.previous
    raise checks.no_session(name)


async def _whole(api: Api, fork: Session, timeout: float) -> Session:
    """The fork once it is whole, `timeout` seconds from now at the latest. Raises `Rejected` where it never will be."""
    if fork.copying and timeout > 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout), Feed(api.log, fork.key, after=fork.seq) as feed:
                async for item in feed:
                    if isinstance(item, Recorded) and _settles(item):
                        break
        fork = await api.sessions.load(fork.key)
    if not fork.exists:
        raise no_session(fork)
    return fork


def _settles(recorded: Recorded) -> bool:
    data = recorded.event.data
    return isinstance(data, SessionDeleted | SessionErased) or (
        isinstance(data, SessionForked) and recorded.event.copied is None
    )
