"""What a person does to the turns of a session: stop everything that is live, try again what failed."""

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from turnstream.session.commands import CancelRun, Origin, WithdrawMessage
from turnstream.session.commands import RetrySession as RetryCommand
from turnstream.session.decision import no_session
from turnstream.session.errors import Rejected
from turnstream.session.events import RunCancelRequested, RunEnded, RunRequested
from turnstream.session.state import Receipt, Run, Session
from turnstream_api import checks
from turnstream_api.api import Answer, Api, Caller, Stream
from turnstream_api.checks import ExpectedSeq, Wait
from turnstream_api.errors import Problem
from turnstream_api.operation import Request
from turnstream_api.paging import read_after
from turnstream_api.watched import Watched, watched

SCAN: Final = 5000
"""Events among which a repeat looks for what its stop did."""


class StopSession(Request, frozen=True, kw_only=True):
    session: str
    reason: Annotated[str, Meta(max_length=1024)] = ""
    expected_seq: ExpectedSeq | None = None


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """`stopped`: the runs that this cancels, the latest first; those that were running go on until their runner sees
    it."""

    session: str
    stopped: tuple[str, ...]
    seq: int


async def stop_session(api: Api, caller: Caller, request: StopSession) -> Answer:
    """Cancels every run of the session that has not ended, and takes back the messages that steer them. What is said
    from now on is not touched; where nothing is live nothing happens."""
    key = checks.session_key(caller, request.session)
    body = msgspec.structs.replace(request, expected_seq=None)
    origin = api.origin(caller, "stop_session", body, expected_seq=request.expected_seq)
    session = await api.sessions.load(key)
    if not session.exists:
        raise no_session(session)
    stop = _Stop(api, session, origin, request.reason)
    receipt = session.receipt(origin.idempotency_key)
    if receipt is None:
        await stop.everything()
        if not stop.stored:  # an equal request may have been first
            receipt = stop.session.receipt(origin.idempotency_key)
    if receipt:
        await stop.again(receipt)
    session = stop.session
    stopped = Stopped(session=key.session, stopped=tuple(stop.stopped), seq=session.seq)
    return Answer(body=stopped, seq=session.seq, replayed=receipt is not None)


class _Stop:
    """Each run is cancelled by a command of its own. The first event of a stop has its idempotency key, all of them
    have one correlation: so a repeat finds what was stopped, and finishes what was begun."""

    def __init__(self, api: Api, session: Session, origin: Origin, reason: str) -> None:
        self._api = api
        self._origin = origin
        self._reason = reason
        self.session = session
        self.stored = False
        self.stopped: list[str] = []

    async def everything(self) -> None:
        seq, expected = self.session.seq, self._origin.expected_seq
        if expected is not None and expected != seq:
            raise Rejected("session_moved", f"the session's last sequence is {seq}, not {expected}", seq=seq)
        await self._stop(self.session.runs)

    async def again(self, receipt: Receipt) -> None:
        """What a stop with this key did, and what it left to do."""
        if receipt.body_digest != self._origin.body_digest:
            raise Rejected("key_reused", "this idempotency key was used with another body", seq=receipt.seq)
        first = await self._api.log.at(self.session.key, receipt.seq)
        correlation = first.event.correlation if first else None
        self._origin = self._next(correlation)
        looked = 0
        async for page in read_after(self._api.log, self.session.key, receipt.seq - 1):
            for recorded in page:
                data = recorded.event.data
                if isinstance(data, RunCancelRequested | RunEnded) and recorded.event.correlation == correlation:
                    self.stopped.append(self.session.key.run(data.run))
            looked += len(page)
            if looked >= SCAN:
                break
        await self._stop([run for run in self.session.runs if run.requested_seq < receipt.seq])

    async def _stop(self, runs: Sequence[Run]) -> None:
        """What has not begun goes first and backwards, so that nothing starts in between; a message that steers a run
        goes before it, so that it is not left over for the next one."""
        for run in sorted(runs, key=lambda run: (run.taken, -run.n)):
            for message in run.steering:
                try:
                    await self._do(WithdrawMessage(origin=self._origin, message_id=message))
                except Rejected as error:
                    if error.code != "not_queued":  # taken by now
                        raise
            if await self._do(CancelRun(origin=self._origin, run=run.n, reason=self._reason)):
                self.stopped.append(self.session.key.run(run.n))

    async def _do(self, command: WithdrawMessage | CancelRun) -> bool:
        key = self.session.key
        if isinstance(command, CancelRun):
            handled = await self._api.cancel(key, command)
        else:
            handled = await self._api.sessions.handle(key, command)
        self.session = handled.session
        if handled.recorded:
            self.stored = True
            self._origin = self._next(self._origin.correlation)
        return handled.recorded is not None

    def _next(self, correlation: str | None) -> Origin:
        """Of the stop's next event."""
        return msgspec.structs.replace(
            self._origin,
            id=self._api.new_id(),
            correlation=correlation,
            idempotency_key=None,
            body_digest=None,
            expected_seq=None,
        )


class RetrySession(Request, frozen=True, kw_only=True):
    session: str
    expected_seq: ExpectedSeq | None = None
    wait: Wait = 0.0


class Retried(Watched, frozen=True, kw_only=True, omit_defaults=True):
    """`run` tries again what `retry_of` was for. `seq`: the event that asks for it. `status`, `outcome` and `requests`
    are there if `wait` asked for them."""

    retry_of: str


async def retry_session(api: Api, caller: Caller, request: RetrySession) -> Answer | Stream:
    """Tries the latest turn again, if it failed: a new run for the same messages."""
    key = checks.session_key(caller, request.session)
    body = msgspec.structs.replace(request, wait=0.0, expected_seq=None)
    origin = api.origin(caller, "retry_session", body, expected_seq=request.expected_seq)
    handled = await api.handle(key, RetryCommand(origin=origin, specs=api.agents(caller.account)))
    recorded = handled.recorded
    replayed = recorded is None
    receipt = handled.session.receipt(origin.idempotency_key) if replayed else None
    if receipt:
        recorded = await api.log.at(key, receipt.seq)
    data = recorded.event.data if recorded else None
    if recorded is None or not isinstance(data, RunRequested):  # only a repeat is answered without an event
        raise Problem("internal_error", f"the retry in session {key.session} was not stored")
    retried = Retried(session=key.session, seq=recorded.seq, run=key.run(data.run), retry_of=key.run(data.retry_of))
    return await watched(
        api, caller, handled.session, data.run, retried, wait=request.wait, replayed=replayed, attached=True
    )
