"""What the views keep of a run, and how events change it.

How a run stands is not folded here: it is said by the run as `turnstream.session` folds it, which the row holds as long
as the run has not ended (`folded`). What is added is what people want to see and the core does not keep: who started
it when, what it called with which arguments, why it ended. The row of a run that has ended never changes again, but for
a session that is deleted.
"""

from typing import assert_never

import msgspec

from turnstream.session.events import (
    ChildEnded,
    ChildStarted,
    Error,
    Fact,
    HistoryCompacted,
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    NodeFinished,
    NodeStarted,
    Parent,
    PlanChanged,
    Recorded,
    RequestAnswered,
    Requested,
    RequestExpired,
    RunCancelRequested,
    RunEnded,
    RunReleased,
    RunReported,
    RunRequested,
    RunStarted,
    RunStatus,
    RunSteered,
    RunWaiting,
    SessionDeleted,
    SessionErased,
    SessionForked,
    SessionOpened,
    SessionUpdated,
    Spec,
    ToolReturned,
    ToolStarted,
    Trigger,
    Unknown,
    Usage,
    Wake,
)
from turnstream.session.paths import is_within
from turnstream.session.state import Run, Session

BY_DELETION = "session_deleted"
"""Why a run is cancelled that ends with its session."""
BY_WITHDRAWAL = "message withdrawn"
"""Why a run is cancelled that ends with its message."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One start of the run by a runner. `ended_at` is when it was known to be over: the next start, a release, the
    wait for an answer, the end."""

    attempt: int
    runner: str
    trigger: Trigger
    started_at: int
    ended_at: int | None = None


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    by: str
    reason: str
    at: int


class OpenCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tool call that has no result yet. `since`: when it could begin; `started_at` 0: not stored."""

    id: str
    name: str
    arguments: str
    since: int
    started_at: int = 0
    path: str = ""
    """Of the node that it belongs to."""


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What the fold keeps of a run."""

    n: int
    spec: Spec
    message_ids: tuple[str, ...]
    """Those that it has taken; before it starts, those that it will."""
    requested_seq: int
    requested_at: int
    seq: int
    changed_at: int
    """Time of the run's last event."""
    trigger: Requested = "message"
    retry_of: int = 0
    copied_from: str = ""
    """The session in which it went as it is told here; empty: in this one."""
    parent: Parent | None = None
    """The call that it was delegated by."""
    status: RunStatus = "queued"
    model: str = ""
    attempt: int = 0
    starts: tuple[Attempt, ...] = ()
    started_at: int | None = None
    ended_at: int | None = None
    deadline: int | None = None
    live_since: int | None = None
    """When it came to stand as it stands; None once it has ended."""
    steps: int = 0
    tool_calls: int = 0
    children: int = 0
    """How many sub-agents it has had."""
    open_calls: tuple[OpenCall, ...] = ()
    begun: dict[str, int] = {}
    """The nodes of its graph that have begun and not finished, by path, and when they began. Of those that have
    finished nothing is kept here, nor in `folded`: a graph may go through thousands."""
    unfinished: tuple[str, ...] = ()
    usage: Usage = Usage()
    cancel: CancelRequest | None = None
    reason: str = ""
    error: Error | None = None
    note: str = ""
    leftover: int = 0
    """The run that takes what reached this one too late."""
    said: dict[str, int] = {}
    """The sequences of the messages that were routed to it."""
    folded: Run | None = None

    @property
    def live(self) -> bool:
        return self.live_since is not None

    @property
    def wake(self) -> Wake | None:
        return self.folded.wake if self.folded else None

    @property
    def due(self) -> int | None:
        """When there is something to do for a run that waits: at its deadline, at the end of a request's time, now."""
        if self.folded is None or self.status != "waiting":
            return None
        if self.folded.is_to_end:
            return self.changed_at
        times = [request.expires_at for request in self.folded.requests if request.expires_at is not None]
        return min([*times, *([self.deadline] if self.deadline is not None else [])], default=None)

    def find(self, call_id: str) -> OpenCall | None:
        return next((call for call in self.open_calls if call.id == call_id), None)

    def calls_within(self, node: str) -> list[OpenCall]:
        """The open calls of the node at this path, and of those in the graph inside of it."""
        return [call for call in self.open_calls if is_within(call.path, node)]

    def steps_of(self, path: str) -> int:
        """How many replies of a model it has had: the run, or its node at this path."""
        return self.folded.visit(path).steps if path and self.folded else self.steps

    def since(self, now: int, duration: int) -> int:
        """When something began that took so long until now, in milliseconds, in the attempt that goes on."""
        return max(now - duration, self.starts[-1].started_at if self.starts else now)


def about(data: Fact | Unknown) -> tuple[int | str, ...]:
    """The runs that a fact may change, by number, or by the id of a message that is theirs."""
    match data:
        case MessageWithdrawn():
            return (data.message_id,)
        case MessagePosted():
            routed = data.steers or data.answers
            interrupts = data.queued.interrupts if data.queued else 0
            return (routed.run,) if routed else (interrupts,) if interrupts else ()
        case RunRequested():
            return ()
        case _:
            run = getattr(data, "run", None)
            return (run,) if isinstance(run, int) else ()


def requested(recorded: Recorded, run: Run, said: dict[str, int], parent: Parent | None) -> Row:
    """The row of a run that is new. `said`: where the messages were stored that it may take; `parent`: the call that
    its session was made for."""
    data = recorded.event.data
    action = data.action if isinstance(data, RunRequested) else None
    return Row(
        n=run.n,
        spec=run.spec,
        message_ids=run.message_ids,
        requested_seq=recorded.seq,
        requested_at=recorded.time,
        seq=recorded.seq,
        changed_at=recorded.time,
        trigger=run.trigger,
        retry_of=data.retry_of if isinstance(data, RunRequested) else 0,
        copied_from=recorded.event.copied.session if recorded.event.copied else "",
        parent=msgspec.structs.replace(parent, schema=None) if parent and run.n == 1 else None,
        live_since=recorded.time,
        tool_calls=run.tool_calls,
        open_calls=(OpenCall(action.id, action.name, action.arguments, recorded.time),) if action else (),
        said={name: said[name] for name in run.message_ids if name in said},
        folded=run,
    )


def fold(row: Row, run: Run | None, recorded: Recorded) -> Row:
    """The row after an event that has changed the run: `run` is how it stands now, None if it has ended."""
    now = recorded.time
    changes = _changes(row, run, recorded)
    if run is None:
        changes |= {
            "live_since": None,
            "ended_at": now,
            "folded": None,
            "open_calls": (),
            "begun": {},
            "starts": _over(row, now),
        }
    else:
        moved = run.status != row.status or run.attempt != row.attempt
        changes |= {
            "message_ids": run.message_ids,
            "status": run.status,
            "attempt": run.attempt,
            "deadline": run.deadline,
            "live_since": now if moved else row.live_since,
            "steps": run.steps,
            "tool_calls": run.tool_calls,
            "children": run.children,
            "usage": run.usage,
            "folded": run,
        }
    return msgspec.structs.replace(row, seq=recorded.seq, changed_at=now, **changes)


def _changes(row: Row, run: Run | None, recorded: Recorded) -> dict[str, object]:
    """What the event says beyond what the core keeps."""
    data, now = recorded.event.data, recorded.time
    match data:
        case RunStarted():
            attempt = Attempt(attempt=data.attempt, runner=data.runner, trigger=data.trigger, started_at=now)
            return {
                "starts": (*_over(row, now), attempt),
                "model": data.model or row.model,
                "started_at": row.started_at if row.started_at is not None else now,
                "open_calls": tuple([msgspec.structs.replace(call, since=now) for call in row.open_calls]),
            }
        case RunEnded():
            return {
                "status": data.status,
                "model": data.model or row.model,
                "usage": data.usage,
                "reason": data.reason,
                "error": data.error,
                "note": data.note,
                "unfinished": data.unfinished,
                "leftover": data.leftover.run if data.leftover else 0,
            }
        case ModelReplied():
            calls = [OpenCall(call.id, call.name, call.arguments, now, path=data.path) for call in data.tool_calls]
            begun = _begins(row, data.path, row.since(now, data.duration)) if data.path else row.begun
            return {"open_calls": (*row.open_calls, *calls), "model": data.model or row.model, "begun": begun}
        case NodeStarted():
            call = data.call
            calls = [OpenCall(call.id, call.name, call.arguments, now, path=data.path)] if call else []
            return {"open_calls": (*row.open_calls, *calls), "begun": _begins(row, data.path, now)}
        case NodeFinished():
            return {
                "open_calls": tuple([call for call in row.open_calls if not is_within(call.path, data.path)]),
                "model": data.model or row.model,
                "begun": {path: since for path, since in row.begun.items() if not is_within(path, data.path)},
            }
        case ToolReturned():
            return {"open_calls": tuple([call for call in row.open_calls if call.id != data.call_id])}
        case ToolStarted():
            return {"open_calls": tuple([_begun(call, data.call_id, now) for call in row.open_calls])}
        case RunReleased() | RunWaiting():
            return {"starts": _over(row, now)}
        case RunCancelRequested():
            return {"cancel": CancelRequest(by=data.by, reason=data.reason, at=now)}
        case MessagePosted() if data.queued:
            reason = f"interrupted by message {data.message_id}"
            return {"cancel": CancelRequest(by=data.author, reason=reason, at=now)}
        case MessagePosted():
            return {"said": {**row.said, data.message_id: recorded.seq}}
        case MessageWithdrawn():
            return {"status": "cancelled", "reason": BY_WITHDRAWAL} if run is None else {}
        case SessionDeleted():
            return {"status": "cancelled", "reason": BY_DELETION}
        case RunSteered() | RequestAnswered() | RequestExpired() | ChildStarted() | ChildEnded() | PlanChanged():
            return {}
        case SessionOpened() | SessionForked() | SessionUpdated() | SessionErased() | HistoryCompacted() | Unknown():
            return {}  # about no run
        case RunRequested() | RunReported():
            return {}  # about no run that is there
        case _:
            assert_never(data)


def _begins(row: Row, path: str, now: int) -> dict[str, int]:
    return row.begun if path in row.begun else {**row.begun, path: now}


def without_finished(session: Session, finished: NodeFinished) -> Session:
    """The session after a node has finished, without that node, and without those inside of it: nothing asks for them
    any more."""
    run = session.run(finished.run)
    if run is None:
        return session
    visits = tuple([visit for visit in run.visits if not is_within(visit.path, finished.path)])
    lean = msgspec.structs.replace(run, visits=visits)
    return msgspec.structs.replace(session, runs=tuple([lean if other is run else other for other in session.runs]))


def _begun(call: OpenCall, call_id: str, now: int) -> OpenCall:
    return msgspec.structs.replace(call, started_at=now) if call.id == call_id else call


def _over(row: Row, now: int) -> tuple[Attempt, ...]:
    """The last attempt is over now, if it was not before."""
    starts = row.starts
    if not starts or starts[-1].ended_at is not None:
        return starts
    return (*starts[:-1], msgspec.structs.replace(starts[-1], ended_at=now))
