"""The rules of a log: each session's events held against what may be stored.

A log that only `decide` has written has no findings; what is looked for is what somebody else wrote, or damage. The
rules are checked against the folded session before each event. A run that has not ended is no finding. Of a session
that is deleted nothing is asked but that nothing came after: what was there before is being removed."""

from collections.abc import Iterable
from typing import assert_never

import msgspec

from turnstream.ids import SessionKey
from turnstream.log.messages import UNGUARDED
from turnstream.session.events import (
    ChildEnded,
    ChildStarted,
    HistoryCompacted,
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    NodeFinished,
    NodeStarted,
    PlanChanged,
    Recorded,
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
    SessionForked,
    SessionOpened,
    SessionUpdated,
    ToolReturned,
    ToolStarted,
    Unknown,
)
from turnstream.session.fold import evolve
from turnstream.session.paths import around
from turnstream.session.policy import resolve
from turnstream.session.recent import Recent
from turnstream.session.state import Call, Run, Session, has_edge, request_id
from turnstream_projector import kinship
from turnstream_projector.findings import Findings, Kind


class Checker:
    """Folds a whole log, session by session, and finds what does not fit."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._sessions: dict[SessionKey, Session] = {}
        self._broken: set[SessionKey] = set()
        self._told: set[SessionKey] = set()

    def finish(self) -> None:
        """The whole log was read: sessions are held against each other."""
        whole = {key: session for key, session in self._sessions.items() if key not in self._broken}
        if len(whole) == len(self._sessions):  # else nobody can say what is missing
            kinship.check(whole, self._told, self._findings)

    def check(self, recorded: Recorded) -> None:
        key = recorded.event.key
        session = self._sessions.get(key) or Session(key=key)
        data = recorded.event.data
        if isinstance(data, SessionErased):
            self._check_erased(session, recorded)
        elif session.deleted:
            self._add("deleted", session, key, recorded, f"{recorded.event.type} behind the session's deletion")
        else:
            self._check_chain(session, recorded)
            self._check_copied(session, recorded)
            self._check_fact(session, recorded)
        if isinstance(data, SessionDeleted | SessionErased) and key in self._broken:
            self._findings.forget(key)  # a log of which a part is gone says nothing of the rest
        after = evolve(session, recorded)
        nothing = Recent(0)
        self._sessions[key] = msgspec.structs.replace(
            after, receipts=nothing, messages=nothing, closed=nothing, opening=None
        )

    def _check_chain(self, session: Session, recorded: Recorded) -> None:
        key, previous = session.key, recorded.previous
        if previous == UNGUARDED:
            self._add("unguarded", session, key, recorded, f"stored without a guard, behind event {session.seq}")
        elif previous != session.seq:
            self._broken.add(key)
            message = f"follows event {previous}, but the event before it is {session.seq}"
            self._add("broken_chain", session, key, recorded, message)

    def _check_copied(self, session: Session, recorded: Recorded) -> None:
        """A fork has nothing but copies, in their order, until it has them all; then what they leave open is ended."""
        data, copied, copying = recorded.event.data, recorded.event.copied, session.copying
        name, of = recorded.event.type, session.forked_from
        if copying is None or of is None:
            if copied or isinstance(data, SessionForked):
                self._add("fork", session, session.key, recorded, f"{name} is of a fork, but this is none, or is whole")
            return
        if copied:
            if copied.session != of.session or not copying.seq < copied.seq <= of.through:
                message = f"a copy of event {copied.seq} of {copied.session}, behind that of {copying.seq}"
                self._add("fork", session, session.key, recorded, message)
        elif isinstance(data, SessionForked | RunEnded):
            if copying.seq != of.through or (isinstance(data, SessionForked) and session.runs):
                self._add("fork", session, session.key, recorded, f"{name} of a fork that is not whole")
        elif not isinstance(data, SessionDeleted):
            self._add("fork", session, session.key, recorded, f"{name} in a fork that is not whole")

    def _check_erased(self, session: Session, recorded: Recorded) -> None:
        """It stands alone, but while the deletion before it is being removed."""
        key = session.key
        if session.deleted and session.deleted.erased:
            self._add("deleted", session, key, recorded, "the session is erased already")
        elif session.seq and not session.deleted and key not in self._broken:
            self._add("deleted", session, key, recorded, "the session is erased, but nothing has deleted it")

    def _check_fact(self, session: Session, recorded: Recorded) -> None:
        data = recorded.event.data
        match data:
            case SessionOpened():
                if session.exists and not recorded.event.copied:
                    self._add("opened_twice", session, session.key, recorded, "the session is open already")
            case MessagePosted():
                self._check_posted(session, recorded, data)
            case MessageWithdrawn():
                self._check_withdrawn(session, recorded, data)
            case RunRequested():
                self._check_requested(session, recorded, data)
            case HistoryCompacted():
                self._check_compacted(session, recorded, data)
            case (
                RunStarted()
                | RunReleased()
                | RunSteered()
                | RunWaiting()
                | RequestAnswered()
                | RequestExpired()
                | ModelReplied()
                | ToolStarted()
                | ToolReturned()
                | ChildStarted()
                | PlanChanged()
                | NodeStarted()
                | NodeFinished()
                | RunCancelRequested()
                | RunEnded()
            ):
                run = session.run(data.run)
                if run is None:
                    self._check_gone(session, recorded, data.run)
                else:
                    self._check_run(session, run, recorded)
            case ChildEnded():
                self._check_child_ended(session, recorded, data)
            case RunReported():
                if not recorded.event.copied:  # a fork was delegated by nobody
                    self._check_reported(session, recorded, data)
            case SessionForked() | SessionUpdated() | SessionDeleted() | SessionErased() | Unknown():
                pass
            case _:
                assert_never(data)

    def _add(self, kind: Kind, session: Session, where: object, recorded: Recorded, message: str) -> None:
        self._findings.add(kind, where, recorded.seq, message, session.key)

    def _check_number(self, session: Session, recorded: Recorded, n: int) -> None:
        if n != session.last_run + 1:
            message = f"the next run is {session.last_run + 1}"
            self._add("run_number", session, session.key.run(n), recorded, message)

    def _check_requested(self, session: Session, recorded: Recorded, data: RunRequested) -> None:
        self._check_number(session, recorded, data.run)
        where = session.key.run(data.run)
        last = session.last_ended
        if data.trigger == "retry" and (session.live or last is None or last.run != data.retry_of):
            message = f"run {data.retry_of} is tried again, but it is not what ended last"
            self._add("transition", session, where, recorded, message)
        beside = resolve(data.spec.policy).on_busy == "parallel"
        if data.trigger == "action" and session.live and not data.queued and not beside:
            other = session.key.run((session.holder or session.live[0]).n)
            self._add("two_holders", session, where, recorded, f"it starts, but run {other} has not ended")

    def _check_compacted(self, session: Session, recorded: Recorded, data: HistoryCompacted) -> None:
        before = session.compacted.through if session.compacted else 0
        if data.through <= before or all(turn.end != data.through for turn in session.borders()):
            message = f"everything up to {data.through} is summed up: no turn ends there, or it was summed up before"
            self._add("compaction", session, session.key, recorded, message)

    # --- messages ---------------------------------------------------------------------------------------------------

    def _check_posted(self, session: Session, recorded: Recorded, data: MessagePosted) -> None:
        if data.opens and session.exists and not recorded.event.copied:
            self._add("opened_twice", session, session.key, recorded, "the session is open already")
        if routing := data.routing:
            self._check_number(session, recorded, routing.run)
        if data.starts and session.runs and not _side_by_side(session, data):
            other = session.key.run((session.holder or session.runs[0]).n)
            message = f"it starts, but run {other} has not ended"
            self._add("two_holders", session, session.key.run(data.run), recorded, message)
        if to := data.steers or data.answers:
            run = session.run(to.run)
            if run is None:
                self._check_gone(session, recorded, to.run)
            elif data.answers:
                for said in data.answers.requests:
                    self._check_request(session, run, recorded, said.request)

    def _check_withdrawn(self, session: Session, recorded: Recorded, data: MessageWithdrawn) -> None:
        name = data.message_id
        if session.waits_with(name) is None:
            message = f"message {name} is withdrawn, but no run waits with it"
            self._add("transition", session, session.key, recorded, message)

    # --- runs -------------------------------------------------------------------------------------------------------

    def _check_gone(self, session: Session, recorded: Recorded, n: int) -> None:
        where, name = session.key.run(n), recorded.event.type
        if not 0 < n <= session.last_run:
            self._add("no_such_run", session, where, recorded, f"{name} of a run that nothing has asked for")
        elif isinstance(recorded.event.data, RunEnded):
            self._add("second_end", session, where, recorded, "the run has ended before")
        else:
            self._add("transition", session, where, recorded, f"{name} behind the run's end")

    def _check_run(self, session: Session, run: Run, recorded: Recorded) -> None:
        data, where = recorded.event.data, session.key.run(run.n)
        match data:
            case RunStarted():
                self._check_start(session, run, recorded, data)
            case RequestAnswered() | RequestExpired():
                self._check_request(session, run, recorded, data.request)
            case (
                RunReleased()
                | RunSteered()
                | RunWaiting()
                | ModelReplied()
                | ToolStarted()
                | ToolReturned()
                | ChildStarted()
                | PlanChanged()
                | NodeStarted()
                | NodeFinished()
                | RunEnded()
            ):
                if data.attempt == run.attempt:
                    self._check_of_attempt(session, run, recorded)
                    return
                message = f"{recorded.event.type} of attempt {data.attempt}, but attempt {run.attempt} is current"
                self._add("fenced", session, where, recorded, message)
            case _:
                pass

    def _check_start(self, session: Session, run: Run, recorded: Recorded, data: RunStarted) -> None:
        where = session.key.run(run.n)
        if data.attempt != run.attempt + 1:
            message = f"attempt {data.attempt} starts behind attempt {run.attempt}"
            self._add("fenced", session, where, recorded, message)
            return
        if not has_edge(run.status, "run.started", "running"):
            self._add("transition", session, where, recorded, f"a run that is {run.status} starts")
        elif run.status == "queued" and run not in session.startable:
            other = session.key.run((session.holder or session.runs[0]).n)
            self._add("two_holders", session, where, recorded, f"it starts, but run {other} holds the turn")
        own = {*run.message_ids, *run.steering, *run.replies}
        self._check_messages(session, where, recorded, [name for name in data.message_ids if name not in own])

    def _check_messages(self, session: Session, where: str, recorded: Recorded, strange: list[str]) -> None:
        if strange:
            message = f"{recorded.event.type} names {', '.join(strange)}, which does not wait for this run"
            self._add("no_such_message", session, where, recorded, message)

    def _check_of_attempt(self, session: Session, run: Run, recorded: Recorded) -> None:
        """A fact of the run's current attempt."""
        data, where, name = recorded.event.data, session.key.run(run.n), recorded.event.type
        if isinstance(data, RunEnded):
            self._check_end(session, run, recorded, data)
        elif isinstance(data, ToolStarted | ToolReturned | PlanChanged) and run.call(data.call_id) is None:
            message = f"{name} of call {data.call_id}, which is not open"
            self._add("no_such_call", session, where, recorded, message)
        elif run.status != "running":
            self._add("transition", session, where, recorded, f"{name} of a run that is {run.status}")
        elif isinstance(data, NodeStarted | NodeFinished) or (isinstance(data, ModelReplied) and data.path):
            self._check_node(session, run, recorded, data)
        elif isinstance(data, ModelReplied) and run.open_calls:
            self._add_open(session, run, recorded, run.open_calls)
        elif isinstance(data, ChildStarted):
            self._check_intent(session, run, recorded, data)
        elif isinstance(data, RunSteered):
            strange = [message for message in data.message_ids if message not in run.steering]
            self._check_messages(session, where, recorded, strange)
        elif isinstance(data, RunWaiting):
            self._check_waiting(session, run, recorded, data)

    def _check_waiting(self, session: Session, run: Run, recorded: Recorded, data: RunWaiting) -> None:
        asking = {call.id for call in run.open_calls if call.asks and not call.request}
        for number, ask in enumerate(data.requests, 1):
            if ask.request != request_id(session, run.n, run.asked + number) or ask.call_id not in asking:
                message = f"request {ask.request} of call {ask.call_id}, which has none to make"
                self._add("no_such_request", session, session.key.run(run.n), recorded, message)
        asked = {ask.call_id for ask in data.requests}
        if any(call.id not in asked for call in run.open_calls):
            self._add_open(session, run, recorded, run.open_calls)

    def _check_node(
        self, session: Session, run: Run, recorded: Recorded, data: ModelReplied | NodeStarted | NodeFinished
    ) -> None:
        """A node begins once, but for one that goes on to its next iteration; it finishes once, and nothing comes
        behind that, also from inside of it. What its model has asked for comes back to it first."""
        where, name, visit = session.key.run(run.n), recorded.event.type, run.visit(data.path)
        over = [node for node in (*around(data.path), data.path) if run.visit(node).port]
        if over:
            self._add("node_over", session, where, recorded, f"{name} of {data.path}, but {over[0]} has finished")
        elif not run.reaches(data.path):
            self._add("no_such_node", session, where, recorded, f"{name} of {data.path}, which no node goes through")
        elif isinstance(data, NodeStarted):
            first = not visit.begun and not visit.steps
            if not first and (data.call or data.items != visit.items + 1):
                self._add("transition", session, where, recorded, f"{data.path} has begun before")
        elif open_calls := [call for call in run.calls_at(data.path) if not call.is_node]:
            self._add_open(session, run, recorded, open_calls)

    def _check_intent(self, session: Session, run: Run, recorded: Recorded, data: ChildStarted) -> None:
        where, call = session.key.run(run.n), run.call(data.call_id)
        if call is None or call.asks != "child" or call.child:
            message = f"a child for call {data.call_id}, which does not ask for one"
            self._add("no_such_call", session, where, recorded, message)
        own = session.key.child(run.n, run.children + 1).session
        expected = data.child_session if recorded.event.copied else own  # a copy tells of another's child
        if (data.k, data.child_session) != (run.children + 1, expected):
            message = f"child {data.k} in {data.child_session}, but the next one is in {expected}"
            self._add("no_such_child", session, where, recorded, message)

    def _check_child_ended(self, session: Session, recorded: Recorded, data: ChildEnded) -> None:
        where = session.key.run(data.run)
        if session.child(data.run, data.k):
            return
        if dict(session.delegated).get(data.run, 0) < data.k:
            self._add("no_such_child", session, where, recorded, f"an end of child {data.k}, which was never intended")
        else:
            self._add("second_end", session, where, recorded, f"child {data.k} has ended before")

    def _check_reported(self, session: Session, recorded: Recorded, data: RunReported) -> None:
        if data.told:
            self._told.add(session.key)
        if not session.unreported:
            message = "an end is told that nobody waits for, or that is told already"
            self._add("transition", session, session.key.run(data.run), recorded, message)

    def _check_request(self, session: Session, run: Run, recorded: Recorded, request: str) -> None:
        if not any(request == request_id(session, run.n, one.k) for one in run.requests):
            message = f"{recorded.event.type} closes request {request}, which is not open"
            self._add("no_such_request", session, session.key.run(run.n), recorded, message)

    def _check_end(self, session: Session, run: Run, recorded: Recorded, data: RunEnded) -> None:
        where = session.key.run(run.n)
        if not has_edge(run.status, "run.ended", data.status):
            message = f"a run that is {run.status} ends as {data.status}"
            self._add("transition", session, where, recorded, message)
        if run.cancel and data.status != ("failed" if run.disconnected else "cancelled"):
            message = f"its cancel was requested, and it ends as {data.status}"
            self._add("transition", session, where, recorded, message)
        calls = {call.id for call in run.open_calls}
        if data.status == "completed" or not calls <= set(data.unfinished):
            self._add_open(session, run, recorded, run.open_calls)
        if data.status == "completed":
            self._check_nodes_are_over(session, run, recorded)
        if strange := sorted(set(data.unfinished) - calls):
            message = f"the end says that {', '.join(strange)} had no result, which is not open"
            self._add("no_such_call", session, where, recorded, message)
        self._check_leftover(session, run, recorded, data)

    def _check_nodes_are_over(self, session: Session, run: Run, recorded: Recorded) -> None:
        """Of what a map or a loop leaves behind nothing more comes."""
        over = {visit.path for visit in run.visits if visit.port}
        left = [visit.path for visit in run.visits if over.isdisjoint((visit.path, *around(visit.path)))]
        if left:
            message = f"it is completed, and {', '.join(left)} has begun and not finished"
            self._add("node_open", session, session.key.run(run.n), recorded, message)

    def _check_leftover(self, session: Session, run: Run, recorded: Recorded, data: RunEnded) -> None:
        """What steered a run and was not taken is the next run, once."""
        where = session.key.run(run.n)
        left = data.leftover.message_ids if data.leftover else ()
        if data.leftover:
            self._check_number(session, recorded, data.leftover.run)
        self._check_messages(session, where, recorded, [name for name in left if name not in run.steering])
        if lost := [name for name in run.steering if name not in left]:
            message = f"it ends, and nobody takes {', '.join(lost)}"
            self._add("message_lost", session, where, recorded, message)

    def _add_open(self, session: Session, run: Run, recorded: Recorded, open_calls: Iterable[Call]) -> None:
        if calls := ", ".join(call.id for call in open_calls):
            self._add("call_open", session, session.key.run(run.n), recorded, f"no result yet of {calls}")


def _side_by_side(session: Session, data: MessagePosted) -> bool:
    """Whether a message may start a run beside those that are there. What a message itself said of that is not
    stored, so where it may say so, it may have."""
    assert data.starts
    policy = resolve(data.starts.spec.policy)
    if not session.live:
        return policy.on_message_parked == "interleave"
    waiting = next((run for run in session.runs if run.for_people and not run.is_to_end), None)
    if waiting is None:
        return policy.on_busy == "parallel" or policy.message_on_busy == "allow"
    if any(request.kind == "approval" for request in waiting.requests):
        return policy.on_message_approval == "parallel"
    return policy.on_message_question == "parallel"
