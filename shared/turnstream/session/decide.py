"""`decide(command, session) -> Decision | None`: the only place that says what may be stored.

None means that the session says so already: a repeat of a command with its idempotency key, a cancel of a run that has
ended, the withdrawal of a withdrawn message, a start that this drive has made. A refusal is `Rejected`. Nothing
here reads a clock, waits or makes up an id. Where a message goes is in `routing.py`.

Order of the checks: a deleted session is not there, but for what deletes it; a repeat is recognised; then
the session must exist, and be whole if it is a fork; then the caller's `expected_seq`; then the rules of the command.
"""

from itertools import takewhile
from typing import assert_never

import msgspec

from turnstream import schemas
from turnstream.ids import agent_id
from turnstream.session import answers, forking, routing
from turnstream.session.commands import (
    Act,
    AnswerRequest,
    CancelRun,
    CloseFork,
    Command,
    CompactHistory,
    CopyEvent,
    DeleteSession,
    EndChild,
    EraseSession,
    ExpireRequest,
    ForkSession,
    OpenSession,
    PostMessage,
    RecordFact,
    ReportRun,
    RetrySession,
    StartRun,
    TakeOver,
    TitleSession,
    UpdateSession,
    WithdrawMessage,
)
from turnstream.session.decision import (
    DISCONNECTED,
    Decision,
    after,
    deadline,
    dues_parked,
    ending,
    event_of,
    expiry,
    live,
    no_edge,
    no_session,
    settles,
    wakes,
)
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    NO_POLICY,
    UPDATE_PLAN,
    ChildStarted,
    Due,
    Error,
    Fact,
    HistoryCompacted,
    MessageWithdrawn,
    ModelReplied,
    NodeFinished,
    NodeStarted,
    PlanChanged,
    RequestAnswered,
    RequestExpired,
    RunCancelRequested,
    RunEnded,
    RunReleased,
    RunReported,
    RunRequested,
    RunStarted,
    RunSteered,
    RunWaiting,
    SessionDeleted,
    SessionErased,
    SessionOpened,
    SessionUpdated,
    Title,
    TitleSource,
    ToolReturned,
    ToolStarted,
    ToolStatus,
)
from turnstream.session.graph import ERR
from turnstream.session.limits import spent
from turnstream.session.policy import merged, resolve
from turnstream.session.state import (
    REMEMBERED,
    WITHDRAWN,
    Call,
    Deleted,
    Run,
    Session,
    clock_stands,
    has_edge,
    request_id,
    said,
)

MAX_RECOVERIES = 3
"""Consecutive recoveries of a run without a new fact, before it fails with `max_attempts_exceeded`."""
MAX_CHILDREN = 10
"""Children of one run."""
SUMMARY_MAX = 32 * 1024
"""Bytes of UTF-8 of what stands for the turns that it sums up."""
TITLE_RANK: dict[TitleSource, int] = {"derived": 0, "client": 1, "agent": 2, "user": 3}


def decide(command: Command, session: Session) -> Decision | None:
    """Raises `Rejected`; see the module."""
    if session.deleted:
        return _of_deleted(command, session)
    origin = command.origin
    if receipt := session.receipt(origin.idempotency_key):
        if receipt.body_digest != origin.body_digest:
            raise Rejected("key_reused", "this idempotency key was used with another body", seq=receipt.seq)
        return None
    opening = isinstance(command, OpenSession | ForkSession) or (
        isinstance(command, PostMessage) and command.opens is not None
    )
    if not session.exists and not opening:
        raise no_session(session)
    if session.copying and not isinstance(command, ForkSession | CopyEvent | CloseFork | DeleteSession):
        raise forking.not_whole(session)
    if origin.expected_seq is not None and origin.expected_seq != session.seq:
        raise Rejected(
            "session_moved",
            f"the session's last sequence is {session.seq}, not {origin.expected_seq}",
            seq=session.seq,
        )
    match command:
        case OpenSession():
            return _open(command, session)
        case ForkSession():
            return forking.fork(command, session)
        case CopyEvent():
            return forking.copy(command, session)
        case CloseFork():
            return forking.close(command, session)
        case UpdateSession():
            return _update(command, session)
        case DeleteSession():
            return _delete(command, session)
        case EraseSession():
            raise Rejected("invalid_transition", f"session {session.key.session} is not deleted")
        case TitleSession():
            return _title(command, session)
        case CompactHistory():
            return _compact(command, session)
        case PostMessage():
            return routing.post(command, session)
        case Act():
            return routing.act(command, session)
        case WithdrawMessage():
            return _withdraw(command, session)
        case RetrySession():
            return _retry(command, session)
        case CancelRun():
            return _cancel(command, session)
        case AnswerRequest():
            return _answer(command, session)
        case ExpireRequest():
            return _expire(command, session)
        case EndChild():
            return _end_child(command, session)
        case ReportRun():
            return _report(command, session)
        case StartRun():
            return _start(command, session)
        case RecordFact():
            return _record(command, session)
        case _:
            assert_never(command)


def _of_deleted(command: Command, session: Session) -> Decision | None:
    """Of a deleted session: what is left of it is erased once, and to delete one again that is to be erased, or the
    repeat of the very command that deleted it, changes nothing. For everything else it is not there."""
    deleted = session.deleted
    assert deleted is not None
    match command:
        case EraseSession() if not deleted.erased:
            data = SessionErased(
                mode=deleted.mode,
                by=deleted.by,
                events_removed=command.events_removed,
                last_run=session.last_run,
                deleted_at=deleted.at,
            )
            key, body = deleted.key or (None, None)
            event = msgspec.structs.replace(event_of(command, session, data), idempotency_key=key, body_digest=body)
            return Decision(event)
        case EraseSession():
            return None
        case DeleteSession() if deleted.mode == "erase" or _is_repeat(command, deleted):
            return None
        case _:
            raise no_session(session)


def _is_repeat(command: Command, deleted: Deleted) -> bool:
    return deleted.key is not None and deleted.key == (command.origin.idempotency_key, command.origin.body_digest)


def _open(command: OpenSession, session: Session) -> Decision | None:
    opens = command.opens
    agent = opens.agent or session.agent_name
    spec = command.specs.get(agent)
    own = session.policy if session.exists and "policy" not in command.given else opens.policy
    if not session.exists or "title" in command.given:
        routing.check_title(opens.title, resolve(spec.policy if spec else NO_POLICY, own))
    if not session.exists:
        opened = SessionOpened(
            agent=opens.agent,
            title=opens.title,
            metadata=opens.metadata,
            policy=opens.policy,
            one_shot=opens.one_shot,
            parent=opens.parent,
        )
        return Decision(event_of(command, session, opened))
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
    return Decision(event_of(command, session, data))


def _title(command: TitleSession, session: Session) -> Decision | None:
    """What was found loses against a title that a person has given meanwhile. It is asked for once."""
    if TITLE_RANK[session.title_source] >= TITLE_RANK["agent"] or session.untitled:
        return None
    title = Title(text=command.text, source="agent") if command.text else None
    data = SessionUpdated(title=title, untitled=title is None, usage=command.usage)
    return Decision(event_of(command, session, data))


def _compact(command: CompactHistory, session: Session) -> Decision:
    """Whatever is not over yet stays as it is."""
    through = command.through
    before = session.compacted.through if session.compacted else 0
    if through <= before:
        raise Rejected("invalid", f"through: everything up to {before} is summed up already", field="through")
    if all(turn.end != through for turn in takewhile(lambda turn: turn.end >= through, session.borders())):
        message = f"through: at {through} no turn ends, or another one, or one that has not ended, began before it"
        raise Rejected("invalid", message, field="through")
    if len(command.summary.encode()) > SUMMARY_MAX:
        raise Rejected("invalid", f"summary: more than {SUMMARY_MAX} bytes", field="summary")
    data = HistoryCompacted(
        through=through,
        summary=command.summary,
        fault=command.fault,
        usage=command.usage,
        model=command.model,
    )
    return Decision(event_of(command, session, data))


def _end_child(command: EndChild, session: Session) -> Decision | None:
    ended = command.ended
    if session.child(ended.run, ended.k) is None:
        return None
    run = session.run(ended.run)
    call = run.call_of(ended.k) if run else None
    event = event_of(command, session, msgspec.structs.replace(ended, late=call is None or not call.wait))
    return Decision(event, wakes(session, after(session, event)))


def _report(command: ReportRun, session: Session) -> Decision | None:
    if not session.unreported:
        return None
    return Decision(event_of(command, session, RunReported(run=command.run, told=command.told)))


def _delete(command: DeleteSession, session: Session) -> Decision:
    spec = command.specs.get(session.agent_name)
    policy = resolve(spec.policy if spec else NO_POLICY, session.policy)
    goes_on = session.runs and not session.copying
    if goes_on and (command.active or policy.delete_active) == "reject":
        run = session.key.run((session.holder or session.runs[0]).n)
        raise Rejected("run_active", f"run {run} is not ended, and the session is not deleted meanwhile", run=run)
    data = SessionDeleted(
        mode=command.mode or policy.delete_mode,
        by=command.origin.actor,
        queue=session.last_queue,
        last_run=session.last_run,
        events=session.events + 1,
    )
    settled = tuple(name for run in session.runs for name in settles(run)) if goes_on else ()
    return Decision(event_of(command, session, data), wakes=(session.last_queue,), settled=settled)


def _withdraw(command: WithdrawMessage, session: Session) -> Decision | None:
    name = command.message_id
    waits = session.waits_with(name)  # a message that a run left over is with the run that takes it now
    n = waits.n if waits else session.messages.get(name)
    if n is None:
        raise Rejected("not_found", f"no message {name}, or none of the latest {REMEMBERED}")
    if n == WITHDRAWN:
        return None
    run = waits or session.run(n)
    if run is not None and name in run.steering:
        return Decision(event_of(command, session, MessageWithdrawn(message_id=name, by=command.origin.actor)))
    if n == 0 or run is None or name not in run.untaken:
        state = "waits for no turn" if n == 0 else f"is not queued: run {session.key.run(n)} has taken or settled it"
        raise Rejected("not_queued", f"message {name} {state}", **({"run": session.key.run(n)} if n else {}))
    if run.message_ids != (name,) or run.steering:  # the run is there for other messages too
        return Decision(event_of(command, session, MessageWithdrawn(message_id=name, by=command.origin.actor)))
    event = event_of(command, session, MessageWithdrawn(message_id=name, by=command.origin.actor, run=run.n))
    return Decision(event, wakes(session, after(session, event)))


def _retry(command: RetrySession, session: Session) -> Decision:
    if front := session.front:
        run = session.key.run(front.n)
        raise Rejected("run_active", f"run {run} is not ended", run=run)
    last = session.last_ended
    failed = last is not None and last.status in ("failed", "timed_out") and last.message_ids
    if last is None or not failed or any(run.n > last.run for run in session.runs):
        raise Rejected("nothing_to_retry", "the latest run did not fail")
    name = last.spec.agent
    if session.agent_name == agent_id(name, last.spec.version):  # the session wants no other version
        name = session.agent_name
    known = command.specs.get(name)
    if known is None:
        raise Rejected("agent_not_found", f"no agent {name}", field="agent")
    # The same definition keeps what was said for that turn, its model too; another one is what the agent is now.
    spec = last.spec if known.digest == last.spec.digest else known
    spec = msgspec.structs.replace(spec, policy=merged(known.policy, session.policy))
    routing.waits_for_parked(session, resolve(spec.policy))
    data = RunRequested(run=session.last_run + 1, spec=spec, message_ids=last.message_ids, retry_of=last.run)
    event = event_of(command, session, data)
    return Decision(event, wakes(session, after(session, event)))


def _cancel(command: CancelRun, session: Session) -> Decision | None:
    if not 0 < command.run <= session.last_run:
        raise Rejected("not_found", f"no run {session.key.run(command.run)}")
    run = session.run(command.run)
    if run is None or run.cancel:
        return None
    if command.disconnected and (run.policy.on_disconnect == "detach" or run.status == "waiting"):
        return None  # a run that waits streams nothing: it waits for whoever comes back
    if run.status == "running":
        data = RunCancelRequested(
            run=run.n,
            by=command.origin.actor,
            reason=command.reason,
            error="client_disconnected" if command.disconnected else None,
        )
        return Decision(event_of(command, session, data), wakes=(run.spec.queue,))
    status = "failed" if command.disconnected else "cancelled"
    ended = ending(
        session,
        run,
        RunEnded(
            run=run.n,
            attempt=run.attempt,
            status=status,
            reason=command.reason,
            error=DISCONNECTED if command.disconnected else None,
            model=run.spec.model if run.taken else "",
        ),
    )
    event = event_of(command, session, ended)
    return Decision(event, wakes(session, after(session, event)), settled=settles(run))


def _answer(command: AnswerRequest, session: Session) -> Decision | None:
    """The first answer wins. The same again changes nothing; another is refused."""
    key, n = session.key, command.run
    if not 0 < n <= session.last_run:
        raise Rejected("not_found", f"no run {key.run(n)}")
    run = session.run(n)
    request = None
    if command.request is not None:
        name = request_id(session, n, command.request)
        if closed := session.closed.get(name):
            return _answered_before(command, name, closed.how, closed.said)
        request = run.request(command.request) if run else None
        if request is None:
            raise Rejected("not_found", f"no request {name}")
    elif run is not None and len(run.for_people) > 1:
        names = ", ".join(request_id(session, n, one.k) for one in run.for_people)
        raise Rejected("invalid", f"request: several are open: {names}", field="request")
    elif run is not None and run.for_people:
        request = run.for_people[0]
    if run is None or request is None:
        if (closed := _only_closed(session, n)) is not None:
            name, how, what = closed
            return _answered_before(command, name, how, what)
        raise Rejected("not_waiting", f"run {key.run(n)} waits for no answer", run=key.run(n))
    name = request_id(session, n, request.k)
    if request.kind == "child":
        raise _not_for_people(name)
    if run.is_to_end:
        raise Rejected("request_closed", f"run {key.run(n)} is about to end", run=key.run(n))
    if request.expires_at is not None and command.origin.time >= request.expires_at:
        raise Rejected("request_expired", f"the time of request {name} is over", request=name)
    if request.kind == "question":
        if command.approved is not None:
            raise Rejected("invalid", f"approved: request {name} is a question, it takes an answer", field="approved")
        answers.check(command.answer, request.schema, request.choices)
    elif command.approved is None:
        raise Rejected("invalid", f"approved: request {name} is an approval, it takes true or false", field="approved")
    elif command.answer is not None:
        raise Rejected("invalid", f"answer: request {name} is an approval, it takes no answer", field="answer")
    data = RequestAnswered(
        run=n,
        request=name,
        answer=command.answer,
        approved=command.approved,
        reason=command.reason,
        by=command.origin.actor,
    )
    settled = () if request.expires_at is None else (expiry(n, request.k),)
    event = event_of(command, session, data)
    then = after(session, event)
    return Decision(event, wakes(session, then), dues_parked(run, then), settled)


def _only_closed(session: Session, n: int) -> tuple[str, str, str] | None:
    """The one request that a run has made of people, if it is closed."""
    run, found, k = session.run(n), list[tuple[str, str, str]](), 1
    while (closed := session.closed.get(request_id(session, n, k))) or (run and k <= run.asked):
        if closed and closed.how != "returned":
            found.append((request_id(session, n, k), closed.how, closed.said))
        k += 1
    return found[0] if len(found) == 1 else None


def _not_for_people(name: str) -> Rejected:
    return Rejected("invalid", f"request: {name} is for a sub-agent, nobody else answers it", field="request")


def _answered_before(command: AnswerRequest, name: str, how: str, what: str) -> None:
    if how == "returned":
        raise _not_for_people(name)
    if how == "expired":
        raise Rejected("request_expired", f"the time of request {name} is over", request=name)
    if how == "ended":
        raise Rejected("request_closed", f"the run ended before request {name} was answered", request=name)
    if what != said(command.answer, command.approved):
        raise Rejected("already_answered", f"request {name} has another answer", request=name)


def _expire(command: ExpireRequest, session: Session) -> Decision | None:
    run = session.run(command.run)
    request = run.request(command.request) if run else None
    if run is None or request is None:
        return None
    if request.expires_at is None or command.now < request.expires_at:
        raise no_edge(session, run, "request.expired")
    event = event_of(command, session, RequestExpired(run=run.n, request=request_id(session, run.n, request.k)))
    then = after(session, event)
    # The drive that reports this plans again, and carries the run on or ends it.
    others = _others(run, wakes(session, then))
    return Decision(event, others, dues_parked(run, then), settled=(expiry(run.n, request.k),))


def may_take_over(run: Run, by: TakeOver) -> bool:
    """Whether a drive may take a running run from its runner: it came by the same wake-up, delivered again, or the
    wake-up that the run was started by is no longer in `WORK` (its runner is gone).

    Two wake-ups of one sequence and different causes: `WORK` was made anew, and the older one went with it."""
    held, wake = run.wake, by.wake
    if held is None:
        return False
    if wake.work == held.work:
        return wake.delivery > held.delivery or wake.cause != held.cause
    return held.work in by.gone


def _start(command: StartRun, session: Session) -> Decision | None:
    started = command.started
    run = live(session, started.run)
    if run.start_id == command.origin.id:
        return None
    if started.attempt != run.attempt + 1:
        raise Rejected("fenced", f"attempt {run.attempt} of run {session.key.run(run.n)} is there already")
    if run.status == "running":
        if not may_take_over(run, TakeOver(started.wake, command.gone)):
            raise Rejected("fenced", f"run {session.key.run(run.n)} is carried out by {run.runner}")
        if run.cancel or not run.recovers or run.recoveries >= MAX_RECOVERIES:
            raise no_edge(session, run, "run.started")
    elif run not in session.startable or run.is_to_end:
        raise no_edge(session, run, "run.started")
    _takes_what_is_there(session, run, started)
    if run.deadline is not None:
        return Decision(event_of(command, session, started))
    due = Due(run.left if run.left is not None else run.limits.timeout, run.spec.queue, deadline(run))
    return Decision(event_of(command, session, started), dues=(due,))


def _takes_what_is_there(session: Session, run: Run, started: RunStarted) -> None:
    trigger, names = run.next_start()
    fits = started.message_ids == names
    if trigger == "answers":  # what has come meanwhile steers it
        fits = names[: len(started.message_ids)] == started.message_ids
        fits = fits and len(started.message_ids) >= len(run.replies)
    if started.trigger != trigger or not fits:
        message = f"this start of run {session.key.run(run.n)} is a {trigger} and takes {', '.join(names) or 'nothing'}"
        raise Rejected("invalid", message, field="message_ids" if started.trigger == trigger else "trigger")


def _record(command: RecordFact, session: Session) -> Decision:
    fact: Fact = command.fact
    run = live(session, fact.run)
    if fact.attempt != run.attempt:
        raise Rejected("fenced", f"run {session.key.run(run.n)} is at attempt {run.attempt}, not {fact.attempt}")
    dues: tuple[Due, ...] = ()
    settled: tuple[str, ...] = ()
    match fact:
        case ModelReplied():
            _reply(session, run, fact)
        case ToolStarted():
            call = run.call(fact.call_id)
            if call is None or call.started or not call.may_begin or run.status != "running" or run.cancel:
                raise no_edge(session, run, "tool.started")
        case ToolReturned():
            call = run.call(fact.call_id)
            if call is None or call.is_node or run.status != "running" or not _may_return(run, call, fact.status):
                raise no_edge(session, run, f"tool.returned ({fact.status})")
        case NodeStarted():
            _begin_node(session, run, fact)
        case NodeFinished():
            _finish_node(session, run, fact)
        case RunSteered():
            takes = fact.message_ids and fact.message_ids == run.steering[: len(fact.message_ids)]
            if not takes or run.status != "running" or run.cancel or run.open_calls:
                raise no_edge(session, run, "run.steered")
        case RunWaiting():
            _wait(session, run, fact)
            dues = tuple(
                Due(ask.expires_in, run.spec.queue, expiry(run.n, run.asked + number))
                for number, ask in enumerate(fact.requests, 1)
                if ask.expires_in is not None
            )
            settled = (deadline(run),) if clock_stands(run, fact.requests) else ()
        case ChildStarted():
            call = run.call(fact.call_id)
            may_start = call is not None and call.asks == "child" and not call.child and run.status == "running"
            if not may_start or run.cancel or fact.k != run.children + 1 or fact.k > MAX_CHILDREN:
                raise no_edge(session, run, "child.started")
        case PlanChanged():
            call = run.call(fact.call_id)
            keeps = call is not None and call.name == UPDATE_PLAN and call.may_begin
            if not keeps or run.status != "running" or run.cancel:
                raise no_edge(session, run, "plan.changed")
        case RunReleased():
            if not has_edge(run.status, "run.released", "queued"):
                raise no_edge(session, run, "run.released")
        case RunEnded():
            _may_end(session, run, fact, command.takes_over)
            fact = _end(session, run, fact)
            settled = settles(run) if isinstance(fact, RunEnded) else ()
        case _:
            assert_never(fact)
    event = event_of(command, session, fact)
    woken: tuple[str, ...] = ()
    match fact:
        case RunReleased():
            woken = (run.spec.queue,)
        case RunWaiting() | RunEnded():
            # The drive that reports this plans again and starts what waits for its own queue: others are woken.
            woken = _others(run, wakes(session, after(session, event)))
        case _:
            pass
    return Decision(event, woken, dues, settled)


def _others(run: Run, queues: tuple[str, ...]) -> tuple[str, ...]:
    return tuple([queue for queue in queues if queue != run.spec.queue])


def _reply(session: Session, run: Run, replied: ModelReplied) -> None:
    steps = run.visit(replied.path).steps if replied.path else run.steps
    over = _is_past(run, replied.path) if replied.path else run.answered
    goes_on = run.status == "running" and not run.cancel and not over
    if not goes_on or run.calls_at(replied.path) or replied.step != steps + 1:
        raise no_edge(session, run, f"model.replied (step {replied.step})")
    ids = {call.id for call in replied.tool_calls}
    fits = ids or (replied.path and replied.misfit)
    if not fits or len(ids) < len(replied.tool_calls) or any(map(run.call, ids)):
        message = "a reply that is not the last asks for tools, each call under an id of its own"
        raise Rejected("invalid", message, field="tool_calls")


def _begin_node(session: Session, run: Run, started: NodeStarted) -> None:
    visit = run.visit(started.path)
    first = not visit.begun and not visit.steps
    goes_on = visit.begun and started.call is None and started.items == visit.items + 1
    if run.status != "running" or run.cancel or _is_past(run, started.path) or not (first or goes_on):
        raise no_edge(session, run, f"node.started ({started.path})")
    if started.call and started.call.id != started.path:
        raise Rejected("invalid", "call: the call that a node is has its path as id", field="call")


def _finish_node(session: Session, run: Run, finished: NodeFinished) -> None:
    """A node that is a call finishes as the call returns; one whose model has asked for calls, once they have."""
    calls = run.calls_at(finished.path)
    statuses: tuple[ToolStatus, ...] = ("error", "denied", "uncertain") if finished.port == ERR else ("ok",)
    returns = all(call.is_node and any(_may_return(run, call, status) for status in statuses) for call in calls)
    if run.status != "running" or run.cancel or _is_past(run, finished.path) or not returns:
        raise no_edge(session, run, f"node.finished ({finished.path})")


def _is_past(run: Run, path: str) -> bool:
    """Whether nothing more becomes of this node: it has finished, or the one around it has, or has not come to it."""
    return bool(run.visit(path).port) or not run.reaches(path)


def _may_return(run: Run, call: Call, status: ToolStatus) -> bool:
    """A call that is in doubt is not known to have come out well; one that asks returns what was said to it."""
    doubtful = 0 < call.started < run.attempt and status in ("ok", "error")
    match call.asks:
        case None:
            return status != "denied" and not doubtful
        case "question":
            if not call.request:  # a question that cannot be asked
                return status == "error"
            return call.closed in ("answered", "expired") and status in ("ok", "error")
        case "child":
            if not call.child:  # a child that cannot be made
                return status == "error"
            return status in ("ok", "error") and (call.closed == "returned" or not call.wait)
        case "approval":
            if not call.request:
                return status == "error"
            if call.closed == "approved":
                return not doubtful
            return call.closed in ("denied", "expired") and status == "denied"


def _wait(session: Session, run: Run, waiting: RunWaiting) -> None:
    if not has_edge(run.status, "run.waiting", "waiting") or run.cancel:
        raise no_edge(session, run, "run.waiting")
    asked = {call.id: call for call in run.open_calls if call.asks and not call.request and not call.closed}
    names = [request_id(session, run.n, run.asked + number) for number in range(1, len(waiting.requests) + 1)]
    if len(asked) != len(run.open_calls) or not asked:
        raise no_edge(session, run, "run.waiting")
    calls = sorted(ask.call_id for ask in waiting.requests)
    if [ask.request for ask in waiting.requests] != names or calls != sorted(asked):
        raise Rejected("invalid", "requests: one for each open call, numbered on", field="requests")
    if any(call.asks == "child" and not (call.child and call.wait) for call in asked.values()):
        raise no_edge(session, run, "run.waiting")
    if any(asked[ask.call_id].asks != ask.kind for ask in waiting.requests):
        raise Rejected("invalid", "requests: of the kind that the call asks for", field="requests")
    for ask in waiting.requests:
        if ask.schema is not None and (fault := schemas.fault_of(ask.schema)):
            raise Rejected("invalid", f"requests: {ask.request}: {fault}", field="requests")


def _may_end(session: Session, run: Run, ended: RunEnded, by: TakeOver | None) -> None:
    """That its runner stopped is said of a running run by whoever may take it over, and by nobody else."""
    name = session.key.run(run.n)
    if by is not None and run.status == "running" and not may_take_over(run, by):
        raise Rejected("fenced", f"run {name} is carried out by {run.runner}")
    code = ended.error.code if ended.error else None
    if code not in ("interrupted", "max_attempts_exceeded"):
        return
    if by is None or run.status != "running" or (code == "interrupted" and run.recovers):
        raise no_edge(session, run, f"run.ended ({code})")
    if code == "max_attempts_exceeded" and run.recoveries < MAX_RECOVERIES:
        raise Rejected("fenced", f"run {name} has gone on since")


def _end(session: Session, run: Run, ended: RunEnded) -> RunEnded | ModelReplied:
    """The end as it is stored. An answer is none while a message is there that the run can still take: then it is one
    more reply."""
    if not has_edge(run.status, "run.ended", ended.status):
        raise no_edge(session, run, f"run.ended ({ended.status})")
    code = ended.error.code if ended.error else None
    if run.cancel and (ended.status, code) != _only_end(run):
        raise no_edge(session, run, f"run.ended ({ended.status})")
    if ended.status == "completed" and run.open_calls:
        raise no_edge(session, run, "run.ended (completed)")
    misfit = _misfit(session, run, ended)
    if misfit and run.visits:  # a graph does not come to another answer
        error = Error(code="model_error" if run.spec.output else "child_failed", message=misfit)
        return ending(session, run, msgspec.structs.replace(ended, status="failed", error=error))
    if misfit or (ended.status == "completed" and run.steering):
        if run.answered:  # the answer is such a reply already
            raise no_edge(session, run, "run.ended (completed)")
        reply = ModelReplied(
            run=run.n,
            attempt=ended.attempt,
            step=run.steps + 1,
            content=ended.content,
            reasoning=ended.reasoning,
            blob=ended.blob,
            usage=ended.step_usage,
            finish=ended.finish,
            model=ended.model,
            duration=ended.duration,
            misfit=misfit,
            window=ended.window,
        )
        after = msgspec.structs.replace(run, steps=reply.step, usage=run.usage + reply.usage)
        if misfit or spent(after) is None:
            return reply
    return ending(session, run, ended)


def _misfit(session: Session, run: Run, ended: RunEnded) -> str:
    """Why the answer is none for the agent, or for whoever delegated the run, if so."""
    parent = session.parent
    ordered = parent.schema if parent and run.n == 1 else None
    schemas = [schema for schema in (run.spec.output, ordered) if schema is not None]
    if ended.status != "completed" or not schemas or run.trigger == "action":
        return ""
    if ended.blob:
        return f"it has {ended.blob.size} bytes, which is too much"
    try:
        for schema in schemas:
            answers.read_json(ended.content, msgspec.json.encode(schema).decode())
    except Rejected as refusal:
        return refusal.message
    return ""


def _only_end(run: Run) -> tuple[str, str | None]:
    return ("failed", "client_disconnected") if run.disconnected else ("cancelled", None)
