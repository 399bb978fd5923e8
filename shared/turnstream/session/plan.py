"""`plan(session, now, drive) -> tuple[Effect, ...]`: everything that the session, as folded, needs done by this drive.

Pure, like `decide`. The runner performs what is planned and not yet in flight, reports each result as a command and
plans again; it is done when nothing is planned. A crash changes nothing: the next drive folds the log, plans, and gets
the same effects with the same keys. A key is also the effect's idempotency key towards the outside.
"""

import msgspec

from turnstream.ids import derive
from turnstream.session.decide import MAX_RECOVERIES, may_take_over
from turnstream.session.events import EndStatus, Error, RunStarted, ToolStatus, Trigger, Wake
from turnstream.session.state import Call, Run, Session


class Drive(msgspec.Struct, frozen=True, kw_only=True):
    """One runner's work on one wake-up. `nonce` tells this drive's starts from any other's; `gone` holds the wake-ups
    that it looked for in `WORK` and did not find."""

    runner: str
    nonce: str
    queue: str
    wake: Wake
    gone: frozenset[int] = frozenset()

    def start_id(self, session: Session, run: int, attempt: int) -> str:
        """Id of the `run.started` by which this drive starts this attempt."""
        return derive(session.key.account, session.key.run(run), attempt, self.nonce)

    def owns(self, session: Session, run: Run) -> bool:
        return run.status == "running" and run.start_id == self.start_id(session, run.n, run.attempt)


class _Effect(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    run: int


class Start(_Effect, frozen=True, kw_only=True):
    """Start this attempt. The agent is resolved first; one that is not there ends the run as `agent_not_found`."""

    attempt: int
    trigger: Trigger
    message_ids: tuple[str, ...]


class CallModel(_Effect, frozen=True, kw_only=True):
    attempt: int
    step: int


class CallTool(_Effect, frozen=True, kw_only=True):
    """Call the tool; `reply_seq` is the sequence of the reply that holds the arguments."""

    attempt: int
    step: int
    call: Call
    reply_seq: int


class Settle(_Effect, frozen=True, kw_only=True):
    """Store a result for a call that will not be carried out, so that every call has one."""

    attempt: int
    call: Call
    status: ToolStatus
    why: str


class End(_Effect, frozen=True, kw_only=True):
    attempt: int
    status: EndStatus
    error: Error | None = None


Effect = Start | CallModel | CallTool | Settle | End


def plan(session: Session, now: int, drive: Drive) -> tuple[Effect, ...]:
    """`now` is broker time in milliseconds. Effects of one run only, of the drive's own queue; run effects only for
    attempts of this drive, except what ends a run that it may take over."""
    for run in session.runs:
        if run.spec.queue == drive.queue and (effects := _of_run(session, run, now, drive)):
            return effects
    return ()


def next_due(session: Session) -> int | None:
    """Broker time in milliseconds of the earliest thing that falls due by itself."""
    return min((run.deadline for run in session.runs if run.deadline is not None), default=None)


def blocked_by(session: Session, drive: Drive) -> Wake | None:
    """The wake-up whose runner holds the turn, if that is another drive of this queue: whether it is still in `WORK`
    decides whether this drive may take the run over. A run of another queue blocks nobody: its end wakes who waits."""
    holder = session.holder
    if holder is None or holder.spec.queue != drive.queue or drive.owns(session, holder):
        return None
    return holder.wake


def _of_run(session: Session, run: Run, now: int, drive: Drive) -> tuple[Effect, ...]:
    if run.status == "queued":
        return _of_queued(session, run, now, drive)
    mine = drive.owns(session, run)
    if not mine and not may_take_over(run, _start_data(run, drive), drive.gone):
        return ()
    if closing := _closing(run, now, taken_over=not mine):
        return close(session, run, *closing)
    if not mine:
        return (_start(session, run),)
    if run.open_calls:
        return tuple(_of_call(session, run, call) for call in run.open_calls)
    step = run.steps + 1
    return (CallModel(key=_key(session, run, step), run=run.n, attempt=run.attempt, step=step),)


def _of_queued(session: Session, run: Run, now: int, drive: Drive) -> tuple[Effect, ...]:
    if run.taken and (closing := _closing(run, now, taken_over=False)):
        return close(session, run, *closing)
    return (_start(session, run),) if session.next_run is run else ()


def _closing(run: Run, now: int, *, taken_over: bool) -> tuple[EndStatus, Error | None] | None:
    """How the run has to end now, if it has to."""
    limits = run.limits
    if run.cancel:
        return "cancelled", None
    if run.deadline is not None and now >= run.deadline:
        seconds = limits.timeout / 1000
        return "timed_out", Error(code="deadline_exceeded", message=f"the run took longer than {seconds:g} s")
    if taken_over and run.recoveries >= MAX_RECOVERIES:
        message = f"the runner stopped {MAX_RECOVERIES + 1} times without a new fact"
        return "failed", Error(code="max_attempts_exceeded", message=message)
    if run.tool_calls > limits.max_tool_calls:
        return "failed", Error(code="budget_exceeded", message=f"more than {limits.max_tool_calls} tool calls")
    if limits.max_tokens is not None and run.usage.total > limits.max_tokens:
        return "failed", Error(code="budget_exceeded", message=f"more than {limits.max_tokens} tokens")
    if run.steps == 0:
        return None
    if run.steps >= limits.max_steps:
        return "failed", Error(code="max_steps_exceeded", message=f"no answer after {limits.max_steps} steps")
    if run.steps >= limits.max_model_calls:
        return "failed", Error(code="budget_exceeded", message=f"no answer after {limits.max_model_calls} model calls")
    return None


def close(session: Session, run: Run, status: EndStatus, error: Error | None) -> tuple[Settle, ...] | tuple[End]:
    """What ends the run like this: every open call gets its result first, then comes the end."""
    if run.open_calls:
        return tuple(_settle(session, run, call, "interrupted", _why(call, status)) for call in run.open_calls)
    key = f"{_key(session, run, 0)}:end:{status}"
    return (End(key=key, run=run.n, attempt=run.attempt, status=status, error=error),)


def _why(call: Call, status: EndStatus) -> str:
    ended = f"the run ended ({status}) before the tool returned"
    return f"{ended}; it may or may not have taken effect" if call.started else ended


def _of_call(session: Session, run: Run, call: Call) -> Effect:
    if 0 < call.started < run.attempt:
        why = "the runner stopped while this tool was running; it may or may not have taken effect"
        return _settle(session, run, call, "uncertain", why)
    key = f"{_key(session, run, run.steps)}:{call.id}"
    return CallTool(key=key, run=run.n, attempt=run.attempt, step=run.steps, call=call, reply_seq=run.reply_seq)


def _settle(session: Session, run: Run, call: Call, status: ToolStatus, why: str) -> Settle:
    key = f"{_key(session, run, run.steps)}:{call.id}:{status}"
    return Settle(key=key, run=run.n, attempt=run.attempt, call=call, status=status, why=why)


def _start(session: Session, run: Run) -> Start:
    trigger, message_ids = run.next_start()
    attempt = run.attempt + 1
    key = f"{session.key.account}/{session.key.run(run.n)}:start:{attempt}"
    return Start(key=key, run=run.n, attempt=attempt, trigger=trigger, message_ids=message_ids)


def _start_data(run: Run, drive: Drive) -> RunStarted:
    return RunStarted(run=run.n, attempt=run.attempt + 1, runner=drive.runner, wake=drive.wake)


def _key(session: Session, run: Run, step: int) -> str:
    return f"{session.key.account}/{session.key.run(run.n)}:{step}"
