"""What a write answers whose caller wants to see what comes of its run: at once, after a wait, or as a stream."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from turnstream.ids import SessionKey
from turnstream.log.base import LogError
from turnstream.session.commands import CancelRun
from turnstream.session.errors import Rejected
from turnstream.session.events import RunStatus
from turnstream.session.state import Session
from turnstream.telemetry import get_logger
from turnstream_api.api import Answer, Api, Caller, Stream
from turnstream_api.frames import Filter, control
from turnstream_api.standing import OpenRequest, Outcome, standing_of

log = get_logger()

TRIES: Final = 30
PAUSE: Final = 1.0
"""How often, and after how many seconds, the log is told again of a client that is gone, where it does not answer."""


class Watched(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`seq`: the event that was stored. `status`, `outcome` and `requests` are there if `wait` asked for them: how the
    run stands, how it ended if it has, what it waits for if it does."""

    session: str
    seq: int
    run: str | None = None
    status: RunStatus | None = None
    outcome: Outcome | None = None
    requests: tuple[OpenRequest, ...] = ()


async def watched(
    api: Api,
    caller: Caller,
    session: Session,
    n: int,
    answer: Watched,
    *,
    wait: float,
    replayed: bool,
    attached: bool = False,
) -> Answer | Stream:
    """The answer of a write about run `n` (0: about none). `session` is as after the write, if it is no replay.
    `attached`: the caller is the one that the run is for, so that its going away may end it."""
    key = session.key
    if caller.streams:
        first = control("posted", answer)
        on_gone = None
        run = session.run(n)
        if attached and not replayed and run and run.policy.on_disconnect == "fail":
            on_gone = _cancel(api, caller, key, n)
        return Stream(key=key, after=answer.seq, filter=Filter(run=n), first=first, over=not n, on_gone=on_gone)
    if n and wait:
        if replayed:
            session = await api.sessions.load(key, answer.seq)
        stands = await standing_of(api, session, n, wait, after=answer.seq)
        answer = msgspec.structs.replace(answer, status=stands.status, outcome=stands.outcome, requests=stands.requests)
    return Answer(body=answer, status=200 if replayed else 202, seq=answer.seq, replayed=replayed)


def _cancel(api: Api, caller: Caller, key: SessionKey, n: int) -> Callable[[], Awaitable[None]]:
    """Tells the session that the client for whom the run is has gone away."""
    by = msgspec.structs.replace(caller, idempotency_key=None, expected_seq=None)

    async def cancel() -> None:
        command = CancelRun(origin=api.origin(by, "cancel_run", by), run=n, disconnected=True)
        for _ in range(TRIES):
            try:
                await api.sessions.handle(key, command)
            except Rejected:  # the session is not there any more
                return
            except LogError as error:
                log.warning("a run goes on whose client is gone", account=key.account, run=key.run(n), error=error)
                await asyncio.sleep(PAUSE)
            else:
                return

    return cancel
