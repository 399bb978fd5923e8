"""What can be wrong with a log: each session's events held against the rules that they were stored by.

A log that only `decide` has written has no findings; what is looked for is what somebody else wrote, or damage. The
rules are checked against the folded session before each event. A run that has not ended is no finding."""

from typing import Literal, assert_never

import msgspec

from turnstream.ids import SessionKey
from turnstream.log.messages import UNGUARDED
from turnstream.session.events import (
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    Recorded,
    RunCancelRequested,
    RunEnded,
    RunReleased,
    RunStarted,
    SessionOpened,
    SessionUpdated,
    ToolReturned,
    ToolStarted,
    Unknown,
)
from turnstream.session.recent import Recent
from turnstream.session.state import Run, Session, evolve, has_edge

Kind = Literal[
    "unreadable",  # a message that is no event, or lies on another session's subject
    "unguarded",  # stored without naming the event before it
    "broken_chain",  # names another event than the one before it
    "opened_twice",
    "two_holders",  # a run takes the turn that another one holds
    "run_number",  # a new run that is not the next one
    "no_such_run",
    "fenced",  # a fact of an attempt that is not the current one
    "transition",  # an edge that the state table does not have
    "second_end",  # a run has more than one terminal event
    "call_open",  # a reply or an end while a tool call has no result
    "no_such_call",  # a tool fact without its call
    "another_log",  # the views were made of another log
    "views_ahead",  # the views show an event that the log does not have
    "row_missing",
    "row_extra",
    "row_differs",
]


class Finding(msgspec.Struct, frozen=True):
    """One fault: in which session, run or row, at which sequence of the log if it has one."""

    kind: Kind
    where: str
    seq: int | None
    message: str


class Checker:
    """Folds a whole log, session by session, and collects what does not fit."""

    def __init__(self) -> None:
        self._sessions: dict[SessionKey, Session] = {}
        self.findings: list[Finding] = []

    def check(self, recorded: Recorded) -> None:
        key = recorded.event.key
        session = self._sessions.get(key) or Session(key=key)
        self._check_chain(session, recorded)
        self._check_fact(session, recorded)
        after = evolve(session, recorded)
        self._sessions[key] = msgspec.structs.replace(after, receipts=Recent(0), turn_blocks=(), opening=None)

    def add(self, kind: Kind, where: object, seq: int | None, message: str) -> None:
        self.findings.append(Finding(kind, str(where), seq, message))

    def _check_chain(self, session: Session, recorded: Recorded) -> None:
        key, seq, previous = session.key, recorded.seq, recorded.previous
        if previous == UNGUARDED:
            self.add("unguarded", key, seq, f"stored without a guard, behind event {session.seq}")
        elif previous != session.seq:
            self.add("broken_chain", key, seq, f"follows event {previous}, but the event before it is {session.seq}")

    def _check_fact(self, session: Session, recorded: Recorded) -> None:
        data = recorded.event.data
        match data:
            case SessionOpened():
                if session.exists:
                    self.add("opened_twice", session.key, recorded.seq, "the session is open already")
            case MessagePosted():
                self._check_posted(session, recorded, data)
            case MessageWithdrawn():
                run = next((run for run in session.runs if data.message_id in run.message_ids), None)
                if run is None or not has_edge(run.status, "message.withdrawn", "cancelled"):
                    message = f"message {data.message_id} is withdrawn, but no queued run waits with it"
                    self.add("transition", session.key, recorded.seq, message)
            case (
                RunStarted()
                | RunReleased()
                | ModelReplied()
                | ToolStarted()
                | ToolReturned()
                | RunCancelRequested()
                | RunEnded()
            ):
                run = session.run(data.run)
                if run is None:
                    self._check_gone(session, recorded, data.run)
                else:
                    self._check_run(session, run, recorded)
            case SessionUpdated() | Unknown():
                pass
            case _:
                assert_never(data)

    def _check_posted(self, session: Session, recorded: Recorded, data: MessagePosted) -> None:
        routing = data.routing
        if data.opens and session.exists:
            self.add("opened_twice", session.key, recorded.seq, "the session is open already")
        if routing is None:
            return
        where = session.key.run(routing.run)
        if routing.run != session.last_run + 1:
            self.add("run_number", where, recorded.seq, f"the next run is {session.last_run + 1}")
        if data.starts and session.runs:
            other = session.key.run((session.holder or session.runs[0]).n)
            self.add("two_holders", where, recorded.seq, f"it starts, but run {other} has not ended")

    def _check_gone(self, session: Session, recorded: Recorded, n: int) -> None:
        where, name = session.key.run(n), recorded.event.type
        if not 0 < n <= session.last_run:
            self.add("no_such_run", where, recorded.seq, f"{name} of a run that nothing has asked for")
        elif isinstance(recorded.event.data, RunEnded):
            self.add("second_end", where, recorded.seq, "the run has ended before")
        else:
            self.add("transition", where, recorded.seq, f"{name} behind the run's end")

    def _check_run(self, session: Session, run: Run, recorded: Recorded) -> None:
        data, seq, where = recorded.event.data, recorded.seq, session.key.run(run.n)
        name = recorded.event.type
        match data:
            case RunStarted():
                if data.attempt != run.attempt + 1:
                    self.add("fenced", where, seq, f"attempt {data.attempt} starts behind attempt {run.attempt}")
                if session.holder and session.holder.n != run.n:
                    other = session.key.run(session.holder.n)
                    self.add("two_holders", where, seq, f"it starts, but run {other} holds the turn")
            case RunReleased() | ModelReplied() | ToolStarted() | ToolReturned() | RunEnded():
                if data.attempt != run.attempt:
                    message = f"{name} of attempt {data.attempt}, but attempt {run.attempt} is the current one"
                    self.add("fenced", where, seq, message)
                elif isinstance(data, RunEnded):
                    self._check_end(run, data, seq, where)
                elif isinstance(data, ToolStarted | ToolReturned):
                    if not any(call.id == data.call_id for call in run.open_calls):
                        self.add("no_such_call", where, seq, f"{name} of call {data.call_id}, which is not open")
                elif run.status != "running":
                    self.add("transition", where, seq, f"{name} of a run that is {run.status}")
                elif isinstance(data, ModelReplied) and run.open_calls:
                    self._add_open(run, seq, where)
            case _:
                pass

    def _check_end(self, run: Run, data: RunEnded, seq: int, where: str) -> None:
        if not has_edge(run.status, "run.ended", data.status):
            self.add("transition", where, seq, f"a run that is {run.status} ends as {data.status}")
        if run.cancel and data.status != "cancelled":
            self.add("transition", where, seq, f"its cancel was requested, and it ends as {data.status}")
        if run.open_calls:
            self._add_open(run, seq, where)

    def _add_open(self, run: Run, seq: int, where: str) -> None:
        calls = ", ".join(call.id for call in run.open_calls)
        self.add("call_open", where, seq, f"no result yet of {calls}")
