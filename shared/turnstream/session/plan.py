"""`plan(session, now, drive) -> tuple[Effect, ...]`: everything that the session, as folded, needs done by this drive.

Pure, like `decide`. The runner performs what is planned and not yet in flight, reports each result as a command and
plans again; it is done when nothing is planned. A crash changes nothing: the next drive folds the log, plans, and gets
the same effects with the same keys. A key is also the effect's idempotency key towards the outside.
"""

from itertools import takewhile
from typing import Final

import msgspec

from turnstream.ids import derive
from turnstream.session.commands import TakeOver
from turnstream.session.decide import MAX_RECOVERIES, may_take_over
from turnstream.session.decision import DISCONNECTED
from turnstream.session.events import DeleteMode, EndStatus, Error, ForkedFrom, Parent, Spec, Trigger, Wake
from turnstream.session.graph import Graph
from turnstream.session.limits import spent
from turnstream.session.nodes import Over, Step, next_steps
from turnstream.session.policy import resolve
from turnstream.session.state import Call, Child, Run, Session, Visit

STAYS: Final = 1 / 4
"""Of what is not summed up yet, by bytes, so much at least is never: the newest turns stay as they were said."""


class Drive(msgspec.Struct, frozen=True, kw_only=True):
    """One runner's work on one wake-up. `nonce` tells this drive's starts from any other's; `gone` holds the wake-ups
    that it looked for in `WORK` and did not find; `graph` is that of the run which it has started."""

    runner: str
    nonce: str
    queue: str
    wake: Wake
    gone: frozenset[int] = frozenset()
    graph: Graph | None = None

    def start_id(self, session: Session, run: int, attempt: int) -> str:
        """Id of the `run.started` by which this drive starts this attempt."""
        return derive(session.key.account, session.key.run(run), attempt, self.nonce)

    def owns(self, session: Session, run: Run) -> bool:
        return run.status == "running" and run.start_id == self.start_id(session, run.n, run.attempt)

    def taking(self, session: Session, run: Run) -> TakeOver | None:
        """By what it may take this run from its runner; None of one that nobody else carries out."""
        return None if run.status != "running" or self.owns(session, run) else TakeOver(self.wake, self.gone)


class _Effect(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    run: int


class Start(_Effect, frozen=True, kw_only=True):
    """Start this attempt. The agent is resolved first; one that is not there ends the run as `agent_not_found`."""

    attempt: int
    trigger: Trigger
    message_ids: tuple[str, ...]


class CallModel(_Effect, frozen=True, kw_only=True):
    """`path`: of the node whose model it is, empty outside of a graph; steps are counted there."""

    attempt: int
    step: int
    path: str = ""


class RunNode(_Effect, frozen=True, kw_only=True):
    """Find out how the node at this path begins, what it gives, or how it goes on; `visit` is what has become of it.
    Nobody has to be waited for."""

    attempt: int
    path: str
    visit: Visit


class CallTool(_Effect, frozen=True, kw_only=True):
    """Call the tool; the event `call.seq` holds the arguments. One that needed an approval has it, if what was approved
    is still what would be done."""

    attempt: int
    step: int
    call: Call


class Settle(_Effect, frozen=True, kw_only=True):
    """Store that a call is uncertain: it was being carried out when its runner stopped, and is not done again."""

    attempt: int
    call: Call


class Return(_Effect, frozen=True, kw_only=True):
    """Store what came of a call's request, by the event `call.closed_seq`, as the call's result."""

    attempt: int
    call: Call


class Steer(_Effect, frozen=True, kw_only=True):
    """Take these messages into the next model call."""

    attempt: int
    message_ids: tuple[str, ...]


class Park(_Effect, frozen=True, kw_only=True):
    """Ask what these calls ask for, and wait. A call that cannot be asked for gets an error as its result instead."""

    attempt: int
    calls: tuple[Call, ...]
    first: int
    """Number of the first request."""


class StartChild(_Effect, frozen=True, kw_only=True):
    """Say what sub-agent this call is for: the intent. The child's session is opened after it. A call that asks for
    none that can be had gets an error as its result instead."""

    attempt: int
    call: Call
    k: int


class Detach(_Effect, frozen=True, kw_only=True):
    """Open the child's session and let the call return: nobody waits for what it comes to."""

    attempt: int
    call: Call


class CancelChild(_Effect, frozen=True, kw_only=True):
    """End a child that nobody waits for any more; one that was never opened is opened, and ended. What it comes to is
    told by the child, so a drive does this once."""

    child: Child


class DropChild(_Effect, frozen=True, kw_only=True):
    """Delete the session of a child for good, as this one is deleted."""

    session: str


class TellParent(_Effect, frozen=True, kw_only=True):
    """The run that this session was made for has ended: whoever delegated it is told. Of a deleted session that is no
    fact of its own: a drive does it once, before it erases."""

    parent: Parent


class Entitle(_Effect, frozen=True, kw_only=True):
    """Find a title for the session, beside its turns. `run` is the one whose agent is asked."""

    spec: Spec


class Compact(_Effect, frozen=True, kw_only=True):
    """Sum up what was said and done up to the end of a turn, `through`, beside the turns that go on. `run` is the one
    whose model is asked."""

    spec: Spec
    through: int


class Expire(_Effect, frozen=True, kw_only=True):
    request: int


class End(_Effect, frozen=True, kw_only=True):
    """`answer_seq`: the reply that turned out to be the last, 0 for none. `output`: the path of the output node that a
    graph has come to, empty for none; None outside of a graph."""

    attempt: int
    status: EndStatus
    error: Error | None = None
    answer_seq: int = 0
    output: str | None = None


class Copy(_Effect, frozen=True, kw_only=True):
    """Copy what is missing of the session that this one is a fork of. `run` is 0. Where that session is deleted
    meanwhile, this one is, too."""

    forked_from: ForkedFrom


class Close(_Effect, frozen=True, kw_only=True):
    """Everything is copied: end this run, which does not go on in the fork; `run` 0: none is left, say so."""


class Erase(_Effect, frozen=True, kw_only=True):
    """Remove everything that belongs to the deleted session, and leave the tombstone. `run` is 0."""

    mode: DeleteMode


RunEffect = Start | CallModel | RunNode | CallTool | Settle | Return | Steer | Park | StartChild | Detach | Expire | End
BetweenEffect = CancelChild | DropChild | TellParent
AsideEffect = Entitle | Compact
ForkEffect = Copy | Close
Effect = RunEffect | BetweenEffect | AsideEffect | ForkEffect | Erase


def plan(session: Session, now: int, drive: Drive) -> tuple[Effect, ...]:
    """`now` is broker time in milliseconds. Effects of one run only, of the drive's own queue: of the run that it
    carries out, else of one that nobody does, or that it may take over."""
    if session.copying:
        return _of_fork(session, drive)
    between = _between(session)
    if session.deleted:
        return (*between, *_of_deleted(session, drive))
    for run in session.runs:
        if drive.owns(session, run):
            return (*between, *_of_mine(session, run, now, drive.graph))
    for run in session.runs:
        if run.spec.queue == drive.queue and (effects := _of_other(session, run, now, drive)):
            return (*between, *effects)
    return (*between, *aside(session, drive))


def aside(session: Session, drive: Drive) -> tuple[AsideEffect, ...]:
    """What is nobody's turn and waits for none: it goes on whatever else there is to do by then."""
    return titling(session, drive) or summing_up(session, drive)


def next_due(session: Session, drive: Drive) -> int | None:
    """Broker time in milliseconds of the earliest thing that falls due by itself and is this drive's to do."""
    times: list[int] = []
    for run in _going_on(session):
        if run.spec.queue == drive.queue and (run.status != "running" or drive.owns(session, run)):
            times += [request.expires_at for request in run.requests if request.expires_at is not None]
            times += [run.deadline] if run.deadline is not None else []
    return min(times, default=None)


def blocked_by(session: Session, drive: Drive) -> tuple[Wake, ...]:
    """The wake-ups by which other drives of this queue carry runs out: whether they are still in `WORK` decides whether
    this drive may take the runs over. A run of another queue blocks nobody: its end wakes who waits."""
    return tuple(
        [
            run.wake
            for run in _going_on(session)
            if run.status == "running" and run.wake and run.spec.queue == drive.queue and not drive.owns(session, run)
        ]
    )


def _going_on(session: Session) -> tuple[Run, ...]:
    return () if session.copying else session.runs


def _of_fork(session: Session, drive: Drive) -> tuple[Effect, ...]:
    forked_from, copying = session.forked_from, session.copying
    if forked_from is None or copying is None or forked_from.queue != drive.queue:
        return ()
    if copying.seq != forked_from.through:
        return (Copy(key=f"{session.key}:copy", run=0, forked_from=forked_from),)
    run = session.runs[0].n if session.runs else 0
    return (Close(key=f"{session.key}:close:{run}", run=run),)


def _between(session: Session) -> tuple[BetweenEffect, ...]:
    """What goes on between this session and those that it was delegated by or has delegated to: any drive's to do, for
    it needs no agent."""
    found: list[BetweenEffect] = [
        CancelChild(key=f"{_at(session, child.run)}:cancel:{child.k}", run=child.run, child=child)
        for child in session.children
        if child.cancel
    ]
    if session.deleted and session.deleted.mode == "erase":
        for n, count in session.delegated:
            for k in range(1, count + 1):
                key = f"{_at(session, n)}:drop:{k}"
                found.append(DropChild(key=key, run=n, session=session.key.child(n, k).session))
    if session.parent and session.unreported:
        found.append(TellParent(key=f"{_at(session, 1)}:tell", run=1, parent=session.parent))
    return tuple(found)


def summing_up(session: Session, drive: Drive) -> tuple[Compact, ...]:
    """A turn has left little room for the next one: behind it the older ones are summed up."""
    last = session.last_ended
    if not session.crowded or last is None or session.last_queue != drive.queue:
        return ()
    if resolve(last.spec.policy).history_compaction == "off":
        return ()
    through = _through(session)
    key = f"{session.key}:compact:{session.crowded}"
    return (Compact(key=key, run=last.run, spec=last.spec, through=through),) if through else ()


def _through(session: Session) -> int:
    """The end of the newest turn behind which stays at least so much of what is there, 0 if there is none."""
    before = session.compacted.through if session.compacted else 0
    turns = list(takewhile(lambda turn: turn.end > before, reversed(session.turn_blocks)))
    ends = {turn.end for turn in takewhile(lambda turn: turn.end > before, session.borders())}
    whole, stays = sum(turn.size for turn in turns), 0
    for turn in turns:
        if turn.end in ends and stays >= whole * STAYS:
            return turn.end
        stays += turn.size
    return 0


def titling(session: Session, drive: Drive) -> tuple[Entitle, ...]:
    """The title, while it is to be found: once, behind the first turn that completes, whatever else there is to do."""
    last = session.last_ended
    if last is None or not session.spoken or session.last_queue != drive.queue:
        return ()
    over = session.title_source != "derived" or session.untitled or session.deleted
    if over or session.parent or session.one_shot or resolve(last.spec.policy).titles != "derived_then_agent":
        return ()
    return (Entitle(key=f"{session.key}:title", run=last.run, spec=last.spec),)


def _of_deleted(session: Session, drive: Drive) -> tuple[Effect, ...]:
    deleted = session.deleted
    if deleted is None or deleted.erased or session.last_queue != drive.queue:
        return ()
    return (Erase(key=f"{session.key}:erase", run=0, mode=deleted.mode),)


def _of_mine(session: Session, run: Run, now: int, graph: Graph | None) -> tuple[Effect, ...]:
    if closing := _closing(run, now, taken_over=False):
        return (end(session, run, *closing),)
    if graph and run.trigger != "action":
        return _of_graph(session, run, graph)
    if run.open_calls:
        return _of_calls(session, run, ())
    if run.steering:
        key = f"{_key(session, run, run.steps)}:steer:{run.steering[-1]}"
        return (Steer(key=key, run=run.n, attempt=run.attempt, message_ids=run.steering),)
    if run.answered:
        key = f"{_key(session, run, 0)}:end:answered:{run.reply_seq}"
        return (End(key=key, run=run.n, attempt=run.attempt, status="completed", answer_seq=run.reply_seq),)
    step = run.steps + 1
    return (CallModel(key=_key(session, run, step), run=run.n, attempt=run.attempt, step=step),)


def _of_other(session: Session, run: Run, now: int, drive: Drive) -> tuple[Effect, ...]:
    """Of a run that this drive does not carry out."""
    taken_over = run.status == "running"
    if taken_over and not may_take_over(run, TakeOver(drive.wake, drive.gone)):
        return ()
    if (run.taken or run.cancel) and (closing := _closing(run, now, taken_over=taken_over)):
        return (end(session, run, *closing),)
    if run.status == "waiting":
        return tuple(
            [
                Expire(key=f"{_key(session, run, 0)}:expire:{request.k}", run=run.n, request=request.k)
                for request in run.requests
                if request.expires_at is not None and now >= request.expires_at
            ]
        )
    return (_start(session, run),) if taken_over or run in session.startable else ()


def _closing(run: Run, now: int, *, taken_over: bool) -> tuple[EndStatus, Error | None] | None:
    """How the run has to end now, if it has to."""
    if run.disconnected:
        return "failed", DISCONNECTED
    if run.cancel:
        return "cancelled", None
    if run.deadline is not None and now >= run.deadline:
        seconds = run.limits.timeout / 1000
        return "timed_out", Error(code="deadline_exceeded", message=f"the run took longer than {seconds:g} s")
    if run.refused_by_expiry:
        return "failed", Error(code="request_expired", message="nobody answered in time")
    if taken_over and not run.recovers:
        message = "interrupted: the runner stopped while the run was in flight"
        return "failed", Error(code="interrupted", message=message, retryable=True)
    if taken_over and run.recoveries >= MAX_RECOVERIES:
        message = f"the runner stopped {MAX_RECOVERIES + 1} times without a new fact"
        return "failed", Error(code="max_attempts_exceeded", message=message)
    if run.status != "waiting" and not run.answered and not run.visits and (error := spent(run)):
        return "failed", error
    return None


def end(session: Session, run: Run, status: EndStatus, error: Error | None) -> End:
    """What ends the run like this. Its open calls end with it."""
    key = f"{_key(session, run, 0)}:end:{status}"
    return End(key=key, run=run.n, attempt=run.attempt, status=status, error=error)


def _of_graph(session: Session, run: Run, graph: Graph) -> tuple[Effect, ...]:
    """Everything that can be done for its nodes and their calls, side by side."""
    match next_steps(run, graph):
        case Over(error=Error() as error):
            return (end(session, run, "failed", error),)
        case Over(output=output):
            key = f"{_key(session, run, 0)}:end:graph"
            return (End(key=key, run=run.n, attempt=run.attempt, status="completed", output=output),)
        case steps:
            effects = tuple([_of_step(session, run, step) for step in steps])
    effects = _of_calls(session, run, effects) if run.open_calls else effects
    if (error := spent(run)) and any(isinstance(effect, CallModel | CallTool) for effect in effects):
        return (end(session, run, "failed", error),)
    return effects


def _of_step(session: Session, run: Run, step: Step) -> CallModel | RunNode:
    path, visit = step.path, step.visit
    if step.how == "speak":
        number = visit.steps + 1
        key = _key(session, run, number, path)
        return CallModel(key=key, run=run.n, attempt=run.attempt, step=number, path=path)
    key = f"{_at(session, run.n)}:{path}:{step.how}:{visit.items}"
    return RunNode(key=key, run=run.n, attempt=run.attempt, path=path, visit=visit)


def _of_calls(session: Session, run: Run, others: tuple[Effect, ...]) -> tuple[Effect, ...]:
    """Everything that can be done for the open calls, and whatever else; only when nothing is left but what a person
    has to say, that is asked, all at once."""
    found = [effect for call in run.open_calls if (effect := _of_call(session, run, call))]
    if found or others:
        return (*found, *others)
    key = f"{_key(session, run, run.steps)}:wait:{run.asked + 1}"
    return (Park(key=key, run=run.n, attempt=run.attempt, calls=run.open_calls, first=run.asked + 1),)


def _of_call(session: Session, run: Run, call: Call) -> Effect | None:
    """None: a person has to be asked first."""
    step = run.visit(call.path).steps if call.path else run.steps
    key = f"{_key(session, run, step, call.path)}:{call.id}"
    if 0 < call.started < run.attempt:
        return Settle(key=f"{key}:uncertain", run=run.n, attempt=run.attempt, call=call)
    if call.asks == "child" and not call.closed:
        return _of_child(run, call, key)
    if call.may_begin:
        return CallTool(key=key, run=run.n, attempt=run.attempt, step=step, call=call)
    return Return(key=key, run=run.n, attempt=run.attempt, call=call) if call.closed else None


def _of_child(run: Run, call: Call, key: str) -> Effect | None:
    if not call.child:
        return StartChild(key=f"{key}:child", run=run.n, attempt=run.attempt, call=call, k=run.children + 1)
    if not call.wait:
        return Detach(key=f"{key}:detach", run=run.n, attempt=run.attempt, call=call)
    return None


def _start(session: Session, run: Run) -> Start:
    trigger, message_ids = run.next_start()
    attempt = run.attempt + 1
    key = f"{session.key.account}/{session.key.run(run.n)}:start:{attempt}"
    return Start(key=key, run=run.n, attempt=attempt, trigger=trigger, message_ids=message_ids)


def _key(session: Session, run: Run, step: int, path: str = "") -> str:
    return f"{_at(session, run.n)}:{path}:{step}" if path else f"{_at(session, run.n)}:{step}"


def _at(session: Session, n: int) -> str:
    return f"{session.key.account}/{session.key.run(n)}"
