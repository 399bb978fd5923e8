"""What a session is after an event: `evolve(session, recorded)`; after many: `fold`.

Pure, and total: whatever a log holds can be folded. An event that fits no edge of the table in `state.py` is ignored
when read (the first end wins); it is `decide` that refuses to write one.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import assert_never

import msgspec

from turnstream.session.events import (
    NO_POLICY,
    ChildEnded,
    ChildStarted,
    HistoryCompacted,
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    NodeFinished,
    NodeStarted,
    Opens,
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
    ToolCall,
    ToolReturned,
    ToolStarted,
    Unknown,
    Usage,
    Window,
)
from turnstream.session.paths import is_within
from turnstream.session.state import (
    WITHDRAWN,
    Call,
    Child,
    Closed,
    Closing,
    Compacted,
    Copying,
    Deleted,
    Ended,
    Prompt,
    Receipt,
    Request,
    Run,
    Session,
    Visit,
    call_digest,
    clock_stands,
    has_edge,
    request_id,
    said,
)
from turnstream.session.turns import Turn

PROMPTS = 4
"""Of how many models the newest call is remembered."""
CROWDED = 3 / 4
"""Of its budget, and a prompt with its answer leaves too little room for the next turn."""


def fold(session: Session, events: Iterable[Recorded]) -> Session:
    for recorded in events:
        session = evolve(session, recorded)
    return session


def evolve(session: Session, recorded: Recorded) -> Session:
    """The session after this event. Events come in the order of their sequence; none is left out."""
    event = recorded.event
    data = event.data
    if session.deleted and not isinstance(data, SessionErased):
        return msgspec.structs.replace(session, seq=recorded.seq)
    if event.idempotency_key is not None:
        session = _remember(session, recorded, event.idempotency_key)
    session = msgspec.structs.replace(
        session, seq=recorded.seq, events=session.events + 1, opened_at=session.opened_at or recorded.time
    )
    if event.copied and session.copying:
        copying = Copying(event.copied.seq, session.copying.events + 1)
        session = msgspec.structs.replace(session, copying=copying)
    match data:
        case SessionOpened():
            session = _opened(session, data)
            if data.forked_from is None or event.copied:  # what another session is of is not what this one is of
                return session
            return msgspec.structs.replace(session, forked_from=data.forked_from, copying=Copying())
        case SessionForked():
            return session if event.copied else _whole(session)
        case SessionUpdated():
            return _said_of(
                session,
                title_source=data.title.source if data.title else session.title_source,
                agent=data.agent if data.agent is not None else session.agent,
                policy=data.policy if data.policy is not None else session.policy,
                untitled=session.untitled or data.untitled,
            )
        case SessionDeleted():
            return _deleted(session, recorded, data)
        case SessionErased():
            deleted = Deleted(
                recorded.seq,
                data.deleted_at,
                data.mode,
                data.by,
                data.events_removed,
                erased=True,
                key=_key_of(recorded),
            )
            return Session(key=session.key, seq=recorded.seq, last_run=data.last_run, deleted=deleted)
        case MessagePosted():
            return _posted(session, recorded, data)
        case MessageWithdrawn():
            return _withdrawn(session, recorded, data)
        case RunRequested():
            return _run_requested(session, recorded, data)
        case RunStarted():
            return _started(session, recorded, data)
        case RunReleased():
            return _released(session, recorded, data)
        case RunSteered():
            return _steered(session, recorded, data)
        case RunWaiting():
            return _waiting(session, recorded, data)
        case RequestAnswered():
            how = "answered" if data.approved is None else "approved" if data.approved else "denied"
            return _close(session, recorded, data.run, {data.request: (how, said(data.answer, data.approved))})
        case RequestExpired():
            return _close(session, recorded, data.run, {data.request: ("expired", "")})
        case ModelReplied():
            return _replied(session, recorded, data)
        case ToolStarted():
            return _tool_started(session, recorded, data)
        case ToolReturned():
            return _tool_returned(session, recorded, data)
        case ChildStarted():
            return _child_started(session, recorded, data)
        case ChildEnded():
            return _child_ended(session, recorded, data)
        case RunReported():
            return msgspec.structs.replace(session, unreported=False)
        case PlanChanged():
            run = _at(session, data.run, data.attempt)
            session = _with(session, run, recorded) if run else session
            return msgspec.structs.replace(session, plan_seq=recorded.seq, plan_run=data.run)
        case NodeStarted():
            return _node_started(session, recorded, data)
        case NodeFinished():
            return _node_finished(session, recorded, data)
        case HistoryCompacted():
            compacted = Compacted(recorded.seq, data.through) if data.summary else session.compacted
            return msgspec.structs.replace(session, compacted=compacted, crowded=0)
        case RunCancelRequested():
            run = session.run(data.run)
            if run is None:
                return session
            session = _with(session, run, recorded, cancel=True, disconnected=bool(data.error))
            return _cancel_children(session, run.n)
        case RunEnded():
            run = session.run(data.run)
            ends = run is not None and has_edge(run.status, "run.ended", data.status)
            return _run_ended(session, run, recorded, data) if run and ends else session
        case Unknown():
            return session
        case _:
            assert_never(data)


def _opened(session: Session, opens: Opens) -> Session:
    return _said_of(
        session,
        agent=opens.agent,
        title_source=opens.title.source if opens.title else "derived",
        policy=opens.policy,
        one_shot=opens.one_shot,
        parent=opens.parent,
    )


def _said_of(session: Session, **changes: object) -> Session:
    """What is copied does not change what a fork was given."""
    given = session.forked_from.given if session.forked_from and session.copying else ()
    if "title" in given:
        del changes["title_source"]
    if "policy" in given:
        del changes["policy"]
    return msgspec.structs.replace(session, **changes)


def _whole(session: Session) -> Session:
    """Nothing is copied any more. Sub-agents of what was copied are not the fork's."""
    return msgspec.structs.replace(session, copying=None, children=(), delegated=())


def _deleted(session: Session, recorded: Recorded, data: SessionDeleted) -> Session:
    session = _whole(session) if session.copying else session
    for run in session.runs:
        session = _ended(session, run, recorded, "cancelled")
    session = _cancel_children(session)
    deleted = Deleted(recorded.seq, recorded.time, data.mode, data.by, data.events, key=_key_of(recorded))
    return msgspec.structs.replace(
        session,
        deleted=deleted,
        policy=NO_POLICY,
        last_run=max(session.last_run, data.last_run),
        last_queue=data.queue,
    )


def _key_of(recorded: Recorded) -> tuple[str, str | None] | None:
    event = recorded.event
    return None if event.idempotency_key is None else (event.idempotency_key, event.body_digest)


def _posted(session: Session, recorded: Recorded, data: MessagePosted) -> Session:
    if data.opens:
        session = _opened(session, data.opens)
    session = msgspec.structs.replace(session, messages=session.messages.add(data.message_id, data.run))
    if data.kind == "notice":
        return _unshown(session, recorded)
    if not session.several_since and data.author != session.first_author:
        if session.first_author:
            session = msgspec.structs.replace(session, several_since=recorded.seq)
        else:
            session = msgspec.structs.replace(session, first_author=data.author)
    if routing := data.routing:
        # What starts beside a live run waits for nobody, and takes nobody's turn.
        ids, in_line = (data.message_id,), data.starts is None or not session.live
        run = _requested(recorded, routing.run, routing.spec, ids, data.author, recorded.seq, in_line=in_line)
        if data.queued and (interrupted := session.run(data.queued.interrupts)):
            place = session.runs.index(interrupted) + 1
            session = _cancel_children(_with(session, interrupted, None, cancel=True), interrupted.n)
            return _with_run(session, msgspec.structs.replace(run, interrupts=interrupted.n), place)
        return _with_run(session, run)
    if data.steers:
        run = session.run(data.steers.run)
        if run is None:
            return session
        since = run.steered_since if run.steering else recorded.seq
        return _with(session, run, recorded, steering=(*run.steering, data.message_id), steered_since=since)
    if data.answers:
        closing: dict[str, tuple[Closing, str]] = {
            one.request: ("denied", said(None, False)) if one.declined else ("answered", said(one.answer, None))
            for one in data.answers.requests
        }
        return _close(session, recorded, data.answers.run, closing, data.message_id)
    return session


def _requested(
    recorded: Recorded,
    n: int,
    spec: Spec,
    message_ids: tuple[str, ...],
    author: str,
    since: int,
    *,
    trigger: Requested = "message",
    in_line: bool = True,
) -> Run:
    return Run(
        n=n,
        spec=spec,
        message_ids=message_ids,
        author=author,
        trigger=trigger,
        in_line=in_line,
        requested_seq=recorded.seq,
        requested_at=recorded.time,
        since=since,
        size=recorded.size,
    )


def _run_requested(session: Session, recorded: Recorded, data: RunRequested) -> Session:
    """A turn that is tried again goes on for the author whose it was; an action is the person's who does it."""
    author, since = data.author or recorded.event.actor, recorded.seq
    if data.trigger == "retry" and session.last_ended:
        author, since = session.last_ended.author, session.last_ended.since
    in_line = data.queued or not session.live
    run = _requested(
        recorded, data.run, data.spec, data.message_ids, author, since, trigger=data.trigger, in_line=in_line
    )
    if call := data.action:
        run = msgspec.structs.replace(run, open_calls=(_call(call, recorded),), tool_calls=1)
    return _with_run(session, run)


def _child_started(session: Session, recorded: Recorded, data: ChildStarted) -> Session:
    run = _at(session, data.run, data.attempt)
    if run is None or data.k <= run.children:
        return session
    calls = tuple(
        [
            msgspec.structs.replace(call, child=data.k, wait=data.wait) if call.id == data.call_id else call
            for call in run.open_calls
        ]
    )
    child = Child(run=run.n, k=data.k, call_id=data.call_id, session=data.child_session, spec=data.spec)
    delegated = {**dict(session.delegated), run.n: data.k}
    session = _with(session, run, recorded, open_calls=calls, children=data.k, recoveries=0)
    return msgspec.structs.replace(session, children=(*session.children, child), delegated=tuple(delegated.items()))


def _child_ended(session: Session, recorded: Recorded, data: ChildEnded) -> Session:
    """What the child used is the run's; its call can return, if the run still has it."""
    child = session.child(data.run, data.k)
    if child is None:
        return session
    session = msgspec.structs.replace(
        session, children=tuple([other for other in session.children if other is not child])
    )
    if data.late:
        session = _unshown(session, recorded)
    run = session.run(data.run)
    if run is None:
        return session
    calls = tuple(
        [
            msgspec.structs.replace(call, closed="returned", closed_seq=recorded.seq) if call.child == data.k else call
            for call in run.open_calls
        ]
    )
    call = run.call_of(data.k)
    request = run.request(call.request) if call else None
    # An event that closes a request is taken account of there.
    session = _with(session, run, None if request else recorded, open_calls=calls, usage=run.usage + data.usage)
    if request is None:
        return session
    return _close(session, recorded, data.run, {request_id(session, data.run, request.k): ("returned", "")})


def _cancel_children(session: Session, n: int | None = None, only: Collection[int] | None = None) -> Session:
    """Nobody waits any more for what the children come to: of run `n`, `only` these of it, or of all."""

    def is_over(child: Child) -> bool:
        return n in (None, child.run) and (only is None or child.k in only)

    if not any(map(is_over, session.children)):
        return session
    children = [msgspec.structs.replace(child, cancel=True) if is_over(child) else child for child in session.children]
    return msgspec.structs.replace(session, children=tuple(children))


def _with_run(session: Session, run: Run, place: int | None = None) -> Session:
    """The session with one more run: the last one, or at this place."""
    runs = session.runs
    place = len(runs) if place is None else place
    runs = (*runs[:place], run, *runs[place:])
    return msgspec.structs.replace(session, runs=runs, last_run=run.n, last_queue=run.spec.queue)


def _withdrawn(session: Session, recorded: Recorded, data: MessageWithdrawn) -> Session:
    after = _without(session, recorded, data.message_id)
    if after is session:
        return session
    return msgspec.structs.replace(after, messages=after.messages.put(data.message_id, WITHDRAWN))


def _without(session: Session, recorded: Recorded, name: str) -> Session:
    for run in session.runs:
        if name in run.steering:
            return _with(session, run, recorded, steering=tuple([one for one in run.steering if one != name]))
        if name in run.message_ids and not run.taken and has_edge(run.status, "message.withdrawn", "cancelled"):
            rest = tuple([one for one in run.message_ids if one != name])
            if rest:
                return _with(session, run, recorded, message_ids=rest)
            if run.steering:  # what steers it is what it is for now
                return _with(session, run, recorded, message_ids=run.steering, steering=())
            return _ended(session, run, recorded, "cancelled")
    return session


def _started(session: Session, recorded: Recorded, data: RunStarted) -> Session:
    run = session.run(data.run)
    if run is None or data.attempt <= run.attempt or not has_edge(run.status, "run.started", "running"):
        return session
    left = run.left if run.left is not None else run.limits.timeout
    shows: dict[str, object] = {}
    if not run.taken:
        since = min(run.since, session.unshown_since or run.since)
        shows = {"since": since, "plan_seq": session.plan_seq}
        session = msgspec.structs.replace(session, unshown_since=0)
    return _with(
        session,
        run,
        recorded,
        status="running",
        attempt=data.attempt,
        start_id=recorded.event.id,
        runner=data.runner,
        wake=data.wake,
        deadline=run.deadline if run.deadline is not None else recorded.time + left,
        recoveries=run.recoveries + (run.status == "running"),
        resume=None,
        replies=(),
        parked=False,
        **shows,
        **_takes(run, data.message_ids),
    )


def _unshown(session: Session, recorded: Recorded) -> Session:
    """The session with something that the next turn to start shows."""
    return msgspec.structs.replace(session, unshown_since=session.unshown_since or recorded.seq)


def _takes(run: Run, names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The run's fields once it has taken these messages."""
    new = tuple([name for name in names if name not in run.message_ids])
    return {
        "message_ids": run.message_ids + new,
        "steering": tuple([name for name in run.steering if name not in names]),
    }


def _released(session: Session, recorded: Recorded, data: RunReleased) -> Session:
    run = _at(session, data.run, data.attempt)
    releases = run is not None and has_edge(run.status, "run.released", "queued")
    return _with(session, run, recorded, status="queued") if run and releases else session


def _steered(session: Session, recorded: Recorded, data: RunSteered) -> Session:
    run = _at(session, data.run, data.attempt)
    if run is None:
        return session
    return _with(session, run, recorded, answered=False, **_takes(run, data.message_ids))


def _waiting(session: Session, recorded: Recorded, data: RunWaiting) -> Session:
    run = _at(session, data.run, data.attempt)
    if run is None or not has_edge(run.status, "run.waiting", "waiting"):
        return session
    requests = tuple(
        [
            Request(
                k=run.asked + number,
                kind=ask.kind,
                call_id=ask.call_id,
                asked_seq=recorded.seq,
                schema="" if ask.schema is None else msgspec.json.encode(ask.schema).decode(),
                choices=ask.choices,
                expires_at=None if ask.expires_in is None else recorded.time + ask.expires_in,
                on_expiry=ask.on_expiry,
            )
            for number, ask in enumerate(data.requests, 1)
        ]
    )
    asked = {request.call_id: (request.k, request.asked_seq) for request in requests}
    calls: list[Call] = []
    for call in run.open_calls:
        number, seq = asked.get(call.id, (0, 0))
        calls.append(msgspec.structs.replace(call, request=number, asked_seq=seq))
    stands = clock_stands(run, requests)
    return _with(
        session,
        run,
        recorded,
        status="waiting",
        parked=all(request.kind == "child" for request in requests),
        asked=run.asked + len(requests),
        requests=requests,
        open_calls=tuple(calls),
        left=max(run.deadline - recorded.time, 0) if run.deadline is not None and stands else run.left,
        deadline=None if stands else run.deadline,
        recoveries=0,
    )


def _close(
    session: Session,
    recorded: Recorded,
    n: int,
    closing: Mapping[str, tuple[Closing, str]],
    message_id: str | None = None,
) -> Session:
    """Closes open requests of a run. With none left open, it is to go on: `message_id` is the message that did it."""
    run = session.run(n)
    if run is None or run.status != "waiting":
        return session
    still: list[Request] = []
    calls = {call.id: call for call in run.open_calls}
    closed = session.closed
    fails = run.refused_by_expiry
    for request in run.requests:
        name = request_id(session, n, request.k)
        if name not in closing:
            still.append(request)
            continue
        how, what = closing[name]
        closed = closed.add(name, Closed(recorded.seq, how, what))
        fails = fails or (how == "expired" and request.kind == "question" and request.on_expiry == "fail")
        if call := calls.get(request.call_id):
            calls[call.id] = msgspec.structs.replace(call, closed=how, closed_seq=recorded.seq)
    if len(still) == len(run.requests):
        return session
    replies = (*run.replies, message_id) if message_id else run.replies
    parks = bool(still) and all(request.kind == "child" for request in still)
    due = run.deadline
    if parks and due is None and run.left is not None:  # its time goes on: nobody is to say anything
        due = recorded.time + run.left
    session = _with(
        session,
        run,
        recorded,
        requests=tuple(still),
        open_calls=tuple(calls.values()),
        replies=replies,
        refused_by_expiry=fails,
        parked=parks if still else run.parked,
        deadline=due,
        status="waiting" if still else "queued",
        resume=None if still else "reply" if message_id else "answers",
    )
    return msgspec.structs.replace(session, closed=closed)


def _replied(session: Session, recorded: Recorded, data: ModelReplied) -> Session:
    run = _at(session, data.run, data.attempt)
    if run is None:
        return session
    calls = tuple([_call(call, recorded, data.path) for call in data.tool_calls])
    own: dict[str, object] = {}
    if data.path:
        visit = run.visit(data.path)
        changed = msgspec.structs.replace(visit, steps=data.step, misfits=visit.misfits + bool(data.misfit))
        own = {"steps": run.steps + 1, "visits": _visits(run, visit, changed)}
    else:
        session = _prompted(session, run, data.window, data.usage)
        own = {
            "steps": data.step,
            "reply_seq": recorded.seq,
            "answered": not calls and not data.misfit,
            "misfits": run.misfits + bool(data.misfit),
        }
    return _with(
        session,
        run,
        recorded,
        tool_calls=run.tool_calls + len(calls),
        open_calls=(*run.open_calls, *calls),
        same_calls=_counted(run.same_calls, [call.digest for call in calls]),
        usage=run.usage + data.usage,
        recoveries=0,
        **own,
    )


def _call(call: ToolCall, recorded: Recorded, path: str = "") -> Call:
    return Call(call.id, call.name, call_digest(call), asks=call.asks, seq=recorded.seq, path=path)


def _visits(run: Run, before: Visit, changed: Visit) -> tuple[Visit, ...]:
    """In the order in which the nodes began. There may be thousands: none but the last ones is looked at."""
    if before == Visit(before.path):  # it begins
        return (*run.visits, changed)
    place = len(run.visits) - 1
    while run.visits[place] is not before:
        place -= 1
    return (*run.visits[:place], changed, *run.visits[place + 1 :])


def _node_started(session: Session, recorded: Recorded, data: NodeStarted) -> Session:
    run = _at(session, data.run, data.attempt)
    if run is None:
        return session
    visit = run.visit(data.path)
    changed = msgspec.structs.replace(visit, begun=visit.begun or recorded.seq, items=data.items)
    calls = (_call(data.call, recorded, data.path),) if data.call else ()
    return _with(
        session,
        run,
        recorded,
        visits=_visits(run, visit, changed),
        tool_calls=run.tool_calls + len(calls),
        open_calls=(*run.open_calls, *calls),
        recoveries=0,
    )


def _node_finished(session: Session, recorded: Recorded, data: NodeFinished) -> Session:
    """The first end counts. What is open in it, or in the graph inside of it, ends with it."""
    run = _at(session, data.run, data.attempt)
    visit = run.visit(data.path) if run else None
    if run is None or visit is None or visit.port:
        return session
    changed = msgspec.structs.replace(visit, port=data.port, seq=recorded.seq)
    over = {call.child for call in run.open_calls if call.child and is_within(call.path, data.path)}
    session = _cancel_children(session, run.n, over)
    return _with(
        session,
        run,
        recorded,
        visits=_visits(run, visit, changed),
        steps=run.steps + bool(data.model),
        open_calls=tuple([call for call in run.open_calls if not is_within(call.path, data.path)]),
        usage=run.usage + data.usage,
        recoveries=0,
    )


def _prompted(session: Session, run: Run, window: Window | None, usage: Usage) -> Session:
    """The session after a model call of this run."""
    if window is None:
        return session
    prompt = Prompt(run.spec.model, window, usage.input_tokens)
    others = [other for other in session.prompts if other.model != prompt.model]
    return msgspec.structs.replace(session, prompts=(*others[1 - PROMPTS :], prompt))


def _is_crowded(session: Session, window: Window | None, usage: Usage) -> bool:
    """Whether a prompt with its answer is nearly too much, or was cut already."""
    if window is None or not window.budget:
        return False
    front = session.compacted.through + 1 if session.compacted else 0
    size = (usage.input_tokens or window.tokens) + usage.output_tokens
    return window.since > front or window.inner > 0 or size >= window.budget * CROWDED


def _counted(counts: tuple[tuple[str, int], ...], names: Iterable[str]) -> tuple[tuple[str, int], ...]:
    found = dict(counts)
    for name in names:
        found[name] = found.get(name, 0) + 1
    return tuple(found.items())


def _tool_started(session: Session, recorded: Recorded, data: ToolStarted) -> Session:
    run = _at(session, data.run, data.attempt)
    if run is None:
        return session
    calls = tuple(
        [
            msgspec.structs.replace(call, started=data.attempt) if call.id == data.call_id else call
            for call in run.open_calls
        ]
    )
    return _with(session, run, recorded, open_calls=calls, recoveries=0)


def _tool_returned(session: Session, recorded: Recorded, data: ToolReturned) -> Session:
    run = _at(session, data.run, data.attempt)
    if run is None:
        return session
    done = [call for call in run.open_calls if call.id == data.call_id]
    calls = tuple([call for call in run.open_calls if call.id != data.call_id])
    denials = run.same_denials
    if data.status == "denied":
        denials = _counted(denials, [call.digest for call in done])
    # A call that is only settled is no progress: else a run that kills its runners could not end for it.
    recoveries = 0 if data.status in ("ok", "error", "denied") else run.recoveries
    changes: dict[str, object] = {"open_calls": calls, "same_denials": denials, "recoveries": recoveries}
    if run.trigger == "action":  # what the tool gave is what it comes to
        changes |= {"answered": True, "reply_seq": recorded.seq}
    return _with(session, run, recorded, **changes)


def _at(session: Session, n: int, attempt: int) -> Run | None:
    """The run, if this attempt is its current one."""
    run = session.run(n)
    return run if run and run.attempt == attempt else None


def _with(session: Session, run: Run, recorded: Recorded | None, **changes: object) -> Session:
    """The session with this run changed by an event, of whose size it takes account if it is one of the run's own."""
    changed = msgspec.structs.replace(run, size=run.size + (recorded.size if recorded else 0), **changes)
    runs = tuple([changed if other is run else other for other in session.runs])
    return msgspec.structs.replace(session, runs=runs)


def _run_ended(session: Session, run: Run, recorded: Recorded, data: RunEnded) -> Session:
    session = _prompted(session, run, data.window, data.step_usage)
    if not session.crowded and _is_crowded(session, data.window, data.step_usage):
        session = msgspec.structs.replace(session, crowded=recorded.seq)
    session = _ended(session, run, recorded, data.status)
    if data.status != "completed":
        session = _cancel_children(session, run.n)
    if left := data.leftover:
        place = session.place_of_leftover(run.n)
        in_line = run.in_line or place > 0  # what waited for nobody leaves what waits for nobody
        takes = _requested(
            recorded,
            left.run,
            left.spec,
            left.message_ids,
            run.author,
            run.steered_since,
            trigger="leftover",
            in_line=in_line,
        )
        session = _with_run(session, takes, place)
    return session


def _ended(session: Session, run: Run, recorded: Recorded, status: RunStatus) -> Session:
    closed = session.closed
    for request in run.requests:
        how = "returned" if request.kind == "child" else "ended"
        closed = closed.add(request_id(session, run.n, request.k), Closed(recorded.seq, how))
    session = msgspec.structs.replace(
        session,
        runs=tuple([other for other in session.runs if other is not run]),
        closed=closed,
        last_ended=Ended(run.n, status, run.spec, run.message_ids, run.author, run.since),
        unreported=session.unreported or (session.parent is not None and run.n == 1),
        spoken=session.spoken or (status == "completed" and bool(run.message_ids)),
    )
    if not run.taken:
        return session
    turn = Turn(run.n, run.since, run.size + recorded.size, recorded.seq)
    return msgspec.structs.replace(session, turn_blocks=session.turn_blocks.add(turn))


def _remember(session: Session, recorded: Recorded, key: str) -> Session:
    data = recorded.event.data
    body = recorded.event.body_digest
    match data:
        case MessagePosted():
            receipt = Receipt(recorded.seq, body, data.message_id, data.run, data.routed)
        case RunCancelRequested() | RunEnded() | RunRequested() | RequestAnswered():
            receipt = Receipt(recorded.seq, body, run=data.run)
        case _:
            receipt = Receipt(recorded.seq, body)
    if recorded.previous == 0:
        return msgspec.structs.replace(session, opening=(key, receipt))
    return msgspec.structs.replace(session, receipts=session.receipts.add(key, receipt))
