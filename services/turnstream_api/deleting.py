"""Deleting a session, and what can be known of one that is deleted.

Deleted it is as soon as this answers, whoever is at work on it: the session is not there for anybody (404, also for who
would open it anew), its runs have ended. What it leaves behind is removed after that, by a runner.
"""

import asyncio
import contextlib
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from turnstream.ids import SessionKey
from turnstream.log.feed import Feed
from turnstream.session.commands import DeleteSession as DeleteCommand
from turnstream.session.events import DeleteMode, Recorded, SessionDeleted, SessionErased
from turnstream.session.state import Session
from turnstream.views.database import ViewsError
from turnstream_api import checks
from turnstream_api.api import Answer, Api, Caller
from turnstream_api.checks import ExpectedSeq
from turnstream_api.operation import Request

SHOWN: Final = 0.5
"""Seconds that the views have at most to show it before this answers: who deletes and then lists shall not find it."""


class DeleteSession(Request, frozen=True, kw_only=True):
    """`mode`: `detach` keeps the runs, with what came of them; `erase` keeps nothing. `active`: what becomes of runs
    that have not ended: `cancel`, or `reject`, which refuses to delete. Both are the session's policy where they are
    not given. `wait`: seconds until everything is removed, else 202."""

    session: str
    mode: DeleteMode | None = None
    active: Literal["cancel", "reject"] | None = None
    wait: Annotated[float, Meta(ge=0, le=checks.WAIT_MAX, description="Seconds to wait until it is erased.")] = 0.0
    expected_seq: ExpectedSeq | None = None


async def delete_session(api: Api, caller: Caller, request: DeleteSession) -> Answer:
    """Deletes a session. Again, of one deleted with `erase`, it changes nothing; of one deleted with `detach`, there is
    no such session."""
    key = checks.session_key(caller, request.session)
    body = msgspec.structs.replace(request, wait=0.0, expected_seq=None)
    origin = api.origin(caller, "delete_session", body, expected_seq=request.expected_seq)
    specs = api.agents(caller.account)
    command = DeleteCommand(origin=origin, specs=specs, mode=request.mode, active=request.active)
    session = (await api.handle(key, command)).session
    with contextlib.suppress(ViewsError):
        await api.views.wait_for(session.seq, SHOWN)
    finished = request.wait <= 0 or await _erased(api, session, request.wait)
    return Answer(body=None, status=204 if finished else 202, seq=session.seq)


class ReadReceipt(Request, frozen=True, kw_only=True):
    session: str


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a deleted session. Times are milliseconds since the epoch, by the broker's clock. `erased_at` and
    `events_removed` are null until everything is removed."""

    session: str
    mode: DeleteMode
    deleted_at: int
    erased_at: int | None
    events_removed: int | None


async def read_receipt(api: Api, caller: Caller, request: ReadReceipt) -> Answer:
    """The receipt of a deletion, for as long as the session's id is kept: of one deleted with `detach` for good."""
    key = checks.session_key(caller, request.session)
    receipt = await _receipt(api, key)
    if receipt is None:
        raise checks.no_receipt(key.session)
    return Answer(body=receipt)


async def _receipt(api: Api, key: SessionKey) -> Receipt | None:
    """What the last event of the session says, if that is of its deletion."""
    session = await api.sessions.load(key)
    last = await api.log.at(key, session.seq) if session.deleted else None
    match last.event.data if last else None:
        case SessionErased() as erased if last:
            return Receipt(
                session=key.session,
                mode=erased.mode,
                deleted_at=erased.deleted_at,
                erased_at=last.time,
                events_removed=erased.events_removed,
            )
        case SessionDeleted() as deleted if last:
            return Receipt(
                session=key.session, mode=deleted.mode, deleted_at=last.time, erased_at=None, events_removed=None
            )
        case _:
            return None


async def _erased(api: Api, session: Session, timeout: float) -> bool:
    """Whether everything is removed, `timeout` seconds from now at the latest."""
    if session.deleted is None or session.deleted.erased:
        return True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout), Feed(api.log, session.key, after=session.seq) as feed:
            async for item in feed:
                if isinstance(item, Recorded) and isinstance(item.event.data, SessionErased):
                    return True
    return False
