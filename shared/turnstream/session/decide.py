"""`decide(command, session) -> Decision | None`: the only place that says what may be stored.

None means that the session says so already: a repeat of a command with its idempotency key, a cancel of a run that has
ended, a start that this drive has made. A refusal is `Rejected`. Nothing here reads a clock, waits or makes up an id.

Order of the checks: a repeat is recognised first; then the session must exist; then the caller's `expected_seq`; then
the rules of the command.
"""

from typing import assert_never

import msgspec

from turnstream.session.commands import (
    CancelRun,
    Command,
    OpenSession,
    PostMessage,
    RecordFact,
    StartRun,
    UpdateSession,
    WithdrawMessage,
)
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    Due,
    Event,
    Fact,
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    RunCancelRequested,
    RunEnded,
    RunReleased,
    RunStarted,
    SessionOpened,
    SessionUpdated,
    Spec,
    Starts,
    TitleSource,
    ToolReturned,
    ToolStarted,
)
from turnstream.session.policy import Policy
from turnstream.session.state import Run, Session, has_edge

MAX_RECOVERIES = 3
"""Consecutive recoveries of a run without a new fact, before it fails with `max_attempts_exceeded`."""
TITLE_RANK: dict[TitleSource, int] = {"derived": 0, "client": 1, "agent": 2, "user": 3}


class Decision(msgspec.Struct, frozen=True):
    """What to store, and what it asks of others: queues to wake, and what falls due when."""

    event: Event
    wakes: tuple[str, ...] = ()
    dues: tuple[Due, ...] = ()
    settled: tuple[str, ...] = ()
    """What earlier events said falls due, and no longer does."""


def decide(command: Command, session: Session) -> Decision | None:
    """Raises `Rejected`; see the module."""
    origin = command.origin
    if receipt := session.receipt(origin.idempotency_key):
        if receipt.body_digest != origin.body_digest:
            raise Rejected("key_reused", "this idempotency key was used with another body", seq=receipt.seq)
        return None
    opening = isinstance(command, OpenSession) or (isinstance(command, PostMessage) and command.opens is not None)
    if not session.exists and not opening:
        raise Rejected("not_found", f"no session {session.key.session}")
    if origin.expected_seq is not None and origin.expected_seq != session.seq:
        raise Rejected(
            "session_moved",
            f"the session's last sequence is {session.seq}, not {origin.expected_seq}",
            seq=session.seq,
        )
    match command:
        case OpenSession():
            return _open(command, session)
        case UpdateSession():
            return _update(command, session)
        case PostMessage():
            return _post(command, session)
        case WithdrawMessage():
            return _withdraw(command, session)
        case CancelRun():
            return _cancel(command, session)
        case StartRun():
            return _start(command, session)
        case RecordFact():
            return _record(command, session)
        case _:
            assert_never(command)


def _event(command: Command, session: Session, data: Fact) -> Event:
    origin = command.origin
    return Event(
        id=origin.id,
        key=session.key,
        data=data,
        actor=origin.actor,
        time=origin.time,
        cause=origin.cause,
        correlation=origin.correlation,
        idempotency_key=origin.idempotency_key,
        body_digest=origin.body_digest,
        traceparent=origin.traceparent,
    )


def _open(command: OpenSession, session: Session) -> Decision | None:
    opens = command.opens
    if not session.exists:
        opened = SessionOpened(
            agent=opens.agent,
            title=opens.title,
            metadata=opens.metadata,
            policy=opens.policy,
            one_shot=opens.one_shot,
        )
        return Decision(_event(command, session, opened))
    if not command.given:
        return None
    update = UpdateSession(
        origin=command.origin,
        title=opens.title if "title" in command.given else None,
        agent=opens.agent if "agent" in command.given else None,
        metadata=opens.metadata if "metadata" in command.given else None,
        policy=opens.policy if "policy" in command.given else None,
    )
    return _update(update, session)


def _update(command: UpdateSession, session: Session) -> Decision | None:
    title = command.title
    if title and TITLE_RANK[title.source] < TITLE_RANK[session.title_source]:
        title = None
    data = SessionUpdated(title=title, agent=command.agent, metadata=command.metadata, policy=command.policy)
    if data == SessionUpdated():
        return None
    return Decision(_event(command, session, data))


def _post(command: PostMessage, session: Session) -> Decision:
    if not any(part.text.strip() for part in command.content):
        raise Rejected("invalid", "a message has something to say: its text is empty", field="content")
    if session.messages.get(command.message_id) is not None:
        raise Rejected("already_exists", f"a message {command.message_id} is there already", field="message_id")
    posted = MessagePosted(
        message_id=command.message_id,
        author=command.author,
        kind=command.kind,
        content=command.content,
        opens=None if session.exists else command.opens,
    )
    if command.kind == "notice":
        return Decision(_event(command, session, posted))
    starts = Starts(run=session.last_run + 1, spec=_spec(command, session))
    busy = session.runs[0] if session.runs else None
    if busy is None:
        data = msgspec.structs.replace(posted, starts=starts)
        return Decision(_event(command, session, data), wakes=(starts.spec.queue,))
    policy = Policy().override(session.policy).override(command.policy)
    match policy.on_busy:
        case "reject":
            run = session.key.run((session.holder or busy).n)
            raise Rejected("run_active", f"run {run} is not ended, and the session refuses a second message", run=run)
        case "queue":
            return Decision(_event(command, session, msgspec.structs.replace(posted, queued=starts)))
        case _:
            assert_never(policy.on_busy)


def _spec(command: PostMessage, session: Session) -> Spec:
    opened = None if session.exists or command.opens is None else command.opens.agent
    name = command.agent or opened or session.agent_name
    spec = command.specs.get(name)
    if spec is None:
        raise Rejected("agent_not_found", f"no agent {name}", field="agent")
    return msgspec.structs.replace(spec, model=command.model) if command.model else spec


def _withdraw(command: WithdrawMessage, session: Session) -> Decision:
    n = session.messages.get(command.message_id)
    if n is None:
        raise Rejected("not_found", f"no queued message {command.message_id}")
    if n == 0:
        raise Rejected("not_queued", f"message {command.message_id} waits for no turn")
    run = session.run(n)
    if run is None or run.taken or not has_edge(run.status, "message.withdrawn", "cancelled"):
        name = session.key.run(n)
        state = "has ended" if run is None else f"is {run.status}"
        raise Rejected("not_queued", f"message {command.message_id} is not queued: its run {name} {state}", run=name)
    data = MessageWithdrawn(message_id=command.message_id, by=command.origin.actor, run=n)
    return Decision(_event(command, session, data), wakes=_next_wakes(session, without=run))


def _cancel(command: CancelRun, session: Session) -> Decision | None:
    if not 0 < command.run <= session.last_run:
        raise Rejected("not_found", f"no run {session.key.run(command.run)}")
    run = session.run(command.run)
    if run is None or run.cancel:
        return None
    if run.status == "queued" and not run.open_calls:
        ended = RunEnded(run=run.n, attempt=run.attempt, status="cancelled", reason=command.reason, usage=run.usage)
        return Decision(_event(command, session, ended), wakes=_next_wakes(session, without=run), settled=_settles(run))
    data = RunCancelRequested(run=run.n, by=command.origin.actor, reason=command.reason)
    return Decision(_event(command, session, data), wakes=(run.spec.queue,))


def _next_wakes(session: Session, without: Run) -> tuple[str, ...]:
    """Whom to wake once this run is out of the way: the queue of a run that its going makes startable."""
    rest = msgspec.structs.replace(session, runs=tuple([run for run in session.runs if run is not without]))
    following = rest.next_run
    return (following.spec.queue,) if following and following is not session.next_run else ()


def may_take_over(run: Run, started: RunStarted, gone: frozenset[int]) -> bool:
    """Whether this start may take a running run from its runner: it came by the same wake-up, delivered again, or the
    wake-up that the run was started by is no longer in `WORK` (its runner is gone).

    Two wake-ups of one sequence and different causes: `WORK` was made anew, and the older one went with it."""
    held, wake = run.wake, started.wake
    if held is None:
        return False
    if wake.work == held.work:
        return wake.delivery > held.delivery or wake.cause != held.cause
    return held.work in gone


def _start(command: StartRun, session: Session) -> Decision | None:
    started = command.started
    run = _live(session, started.run)
    if run.start_id == command.origin.id:
        return None
    if started.attempt != run.attempt + 1:
        raise Rejected("fenced", f"attempt {run.attempt} of run {session.key.run(run.n)} is there already")
    if run.cancel:
        raise _no_edge(session, run, "run.started")
    if run.status == "running":
        if not may_take_over(run, started, command.gone):
            raise Rejected("fenced", f"run {session.key.run(run.n)} is carried out by {run.runner}")
        if run.recoveries >= MAX_RECOVERIES:
            raise _no_edge(session, run, "run.started")
    elif session.next_run is None or session.next_run.n != run.n:
        raise _no_edge(session, run, "run.started")
    if (started.trigger, started.message_ids) != run.next_start():
        trigger, names = run.next_start()
        message = f"this start of run {session.key.run(run.n)} is a {trigger} and takes {', '.join(names) or 'nothing'}"
        raise Rejected("invalid", message, field="message_ids" if started.trigger == trigger else "trigger")
    due = (Due(run.limits.timeout, run.spec.queue, _deadline(run)),) if run.deadline is None else ()
    return Decision(_event(command, session, started), dues=due)


def _deadline(run: Run) -> str:
    return f"deadline-{run.n}"


def _settles(run: Run) -> tuple[str, ...]:
    """What no longer falls due once this run has ended."""
    return () if run.deadline is None else (_deadline(run),)


def _record(command: RecordFact, session: Session) -> Decision:
    fact = command.fact
    run = _live(session, fact.run)
    if fact.attempt != run.attempt:
        raise Rejected("fenced", f"run {session.key.run(run.n)} is at attempt {run.attempt}, not {fact.attempt}")
    wakes: tuple[str, ...] = ()
    settled: tuple[str, ...] = ()
    match fact:
        case ModelReplied():
            _reply(session, run, fact)
        case ToolStarted():
            call = run.call(fact.call_id)
            if call is None or call.started or run.status != "running" or run.cancel:
                raise _no_edge(session, run, "tool.started")
        case ToolReturned():
            call = run.call(fact.call_id)
            if call is None or (0 < call.started < run.attempt and fact.status in ("ok", "error")):
                raise _no_edge(session, run, f"tool.returned ({fact.status})")
        case RunReleased():
            if not has_edge(run.status, "run.released", "queued"):
                raise _no_edge(session, run, "run.released")
            wakes = (run.spec.queue,)
        case RunEnded():
            fact = _end(session, run, fact)
            # The drive that reports this plans again and starts what waits for its own queue: only others are woken.
            wakes = tuple(queue for queue in _next_wakes(session, without=run) if queue != run.spec.queue)
            settled = _settles(run)
        case _:
            assert_never(fact)
    return Decision(_event(command, session, fact), wakes, settled=settled)


def _reply(session: Session, run: Run, replied: ModelReplied) -> None:
    if run.status != "running" or run.cancel or run.open_calls or replied.step != run.steps + 1:
        raise _no_edge(session, run, f"model.replied (step {replied.step})")
    ids = {call.id for call in replied.tool_calls}
    if not ids or len(ids) < len(replied.tool_calls):
        message = "a reply that is not the last asks for tools, each call under an id of its own"
        raise Rejected("invalid", message, field="tool_calls")


def _end(session: Session, run: Run, ended: RunEnded) -> RunEnded:
    allowed = has_edge(run.status, "run.ended", ended.status) and not run.open_calls
    if not allowed or (run.cancel and ended.status != "cancelled"):
        raise _no_edge(session, run, f"run.ended ({ended.status})")
    if ended.error and ended.error.code == "max_attempts_exceeded" and run.recoveries < MAX_RECOVERIES:
        raise Rejected("fenced", f"run {session.key.run(run.n)} has gone on since")
    return msgspec.structs.replace(ended, usage=run.usage + ended.step_usage)


def _live(session: Session, n: int) -> Run:
    run = session.run(n)
    if run is not None:
        return run
    if 0 < n <= session.last_run:
        raise Rejected("invalid_transition", f"run {session.key.run(n)} has ended", run=session.key.run(n))
    raise Rejected("not_found", f"no run {session.key.run(n)}")


def _no_edge(session: Session, run: Run, event: str) -> Rejected:
    name = session.key.run(run.n)
    state = f"{run.status}, cancel requested" if run.cancel else run.status
    return Rejected("invalid_transition", f"run {name} is {state}: no {event} now", run=name)
