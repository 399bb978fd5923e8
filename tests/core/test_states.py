"""The table of edges, what is stored and what is folded agree: each edge can be taken, nothing else changes a status.

"Status" here is a run's: None before it is there, and what its last event made of it after it has ended.
"""

from collections.abc import Iterator
from typing import get_args

import msgspec
import pytest
from tests.core.scenario import (
    WAKE,
    Given,
    act,
    answer,
    answered,
    answers,
    approve,
    ask,
    asks,
    came_out,
    cancel,
    cancel_requested,
    child,
    delete,
    deleted,
    ended,
    entitle,
    erase,
    erased,
    event_of,
    expire,
    expired,
    given,
    handover,
    keeps,
    left_over,
    noted,
    notice,
    opened,
    post,
    posted,
    queued,
    record,
    record_as,
    released,
    replied,
    report,
    reported,
    requested,
    resumed,
    retry,
    returned,
    start,
    started,
    steered,
    steers,
    tell,
    tool_started,
    waiting,
    withdraw,
    withdrawn,
)

from turnstream.session.commands import Command
from turnstream.session.decision import Decision
from turnstream.session.events import (
    ChildStarted,
    DeleteData,
    EndStatus,
    Fact,
    ModelReplied,
    OnMessageData,
    PlanChanged,
    PolicyData,
    RunEnded,
    RunReleased,
    RunStarted,
    RunStatus,
    RunSteered,
    RunWaiting,
    ToolReturned,
    ToolStarted,
    Unknown,
    Wake,
)
from turnstream.session.fold import evolve
from turnstream.session.state import EDGES, Session

Edge = tuple[RunStatus | None, str, RunStatus]

ENDS: tuple[EndStatus, ...] = get_args(EndStatus)
DECLINE = PolicyData(
    on_busy="queue",
    on_message=OnMessageData(question="answer", approval="decline"),
    delete=DeleteData(active="cancel"),
)
BEGIN = (opened(policy=DECLINE),)
QUEUED = (*BEGIN, posted("m1", 1))
RUNNING = (*QUEUED, started(1, 1, "m1"))
CALLING = (*RUNNING, replied(1, 1, "a"))
ASKING = (*RUNNING, asks(1, 1, a="question", b="approval"))
WAITING = (*ASKING, waiting(1, ask("a", 1, expires_in=5), ask("b", 2, kind="approval", expires_in=5)))

DELEGATING = (*RUNNING, asks(1, 1, a="child", b="approval"), child(1, "a"))
PARKED = (*RUNNING, asks(1, 1, a="child"), child(1, "a"), waiting(1, ask("a", kind="child")))

BEFORE: dict[str, tuple[Fact, ...]] = {
    "no session": (),
    "no run": BEGIN,
    "queued": QUEUED,
    "queued behind a run": (*BEGIN, posted("m0", 1), started(1, 1, "m0"), queued("m1", 2)),
    "running": RUNNING,
    "running, cancel requested": (*RUNNING, cancel_requested(1)),
    "running, taken over": (*RUNNING, started(1, 2, wake=Wake(work=7, cause=20, delivery=2))),
    "running, with a call": CALLING,
    "running, with a call begun": (*CALLING, tool_started(1, "a")),
    "running, with a result": (*CALLING, returned(1, "a")),
    "given back": (*RUNNING, released(1)),
    "given back with a call": (*CALLING, released(1)),
    "given back, cancel requested": (*CALLING, released(1), cancel_requested(1)),
    "running, steered": (*RUNNING, steers("m2", 1)),
    "running, asking": ASKING,
    "running, asking a question": (*RUNNING, asks(1, 1, a="question")),
    "waiting": WAITING,
    "waiting for an answer": (*WAITING, answered(1, 2, approved=True)),
    "waiting for an approval": (*WAITING, answered(1, 1, "blue")),
    "to be resumed": (*WAITING, answered(1, 1, "blue"), answered(1, 2, approved=True)),
    "to be resumed by a reply": (*WAITING, answered(1, 2, approved=True), answers("m2", 1, q1="blue")),
    "running, delegating": (*RUNNING, asks(1, 1, a="child")),
    "running, with a child": DELEGATING,
    "running, keeping a checklist": (*RUNNING, keeps(1, 1, "a")),
    "waiting for its child": PARKED,
    "waiting for its child and a person": (
        *DELEGATING,
        waiting(1, ask("a", 1, kind="child"), ask("b", 2, kind="approval", expires_in=5)),
    ),
    "to be resumed by its child": (*PARKED, came_out(1, "a")),
    "never requested, the turn before failed": (*RUNNING, ended(1, "failed")),
    "never requested, the turn before is steered": (*RUNNING, steers("m2", 1)),
    "withdrawn": (*QUEUED, withdrawn("m1", 1)),
    **{f"never started, {status}": (*QUEUED, ended(1, status, 0)) for status in ENDS if status != "completed"},
    **{status: (*RUNNING, ended(1, status)) for status in ENDS},
}


def facts(run: int) -> Iterator[Fact]:
    """Every kind of fact that could be told of a run, of its current attempt and of others."""
    yield from (posted("m1", run), queued("m1", run), notice("m1"), withdrawn("m1", run), cancel_requested(run))
    for attempt in (0, 1, 2, 3):
        for delivery in (1, 2, 3):
            wake = Wake(work=WAKE.work, cause=WAKE.cause, delivery=delivery)
            yield started(run, attempt, "m1", wake=wake)
            yield started(run, attempt, wake=wake)
            yield handover(run, attempt, wake)
        yield from (
            released(run, attempt),
            replied(run, 1, "a", attempt=attempt),
            replied(run, 2, "a", attempt=attempt),
        )
        yield from (tool_started(run, "a", attempt), returned(run, "a", attempt))
        yield from (ended(run, status, attempt) for status in ENDS)
        yield from (ended(run, status, attempt, leftover=left_over(run + 1, "m2")) for status in ENDS)
        yield from (steered(run, "m2", attempt=attempt), asks(run, 1, attempt, a="question", b="approval"))
        yield from (resumed(run, attempt), resumed(run, attempt, "m2"), resumed(run, attempt, "m2", by="reply"))
        yield waiting(run, ask("a", 1, run=run), attempt=attempt)
        yield waiting(run, ask("a", 1, run=run, kind="child"), attempt=attempt)
        yield from (child(k, "a", run, attempt=attempt) for k in (1, 2))
        yield noted(run, "a", "look around", attempt=attempt)
        yield waiting(run, ask("a", 1, run=run), ask("b", 2, run=run, kind="approval"), attempt=attempt)
    yield from (steers("m1", run), answers("m1", run, q1="blue"), answers("m1", run, q1="blue", q2=None))
    yield from (answered(run, 1, "blue"), answered(run, 2, approved=True), answered(run, 2, approved=False))
    yield from (expired(run, 1), expired(run, 2), requested(run, "m1", retry_of=run))
    yield from (came_out(1, "a", run), came_out(2, "a", run), reported())
    yield from (deleted(), erased(removed=1, last_run=run, at=1))


def commands(run: int) -> Iterator[Command]:
    """Every kind of command that could be given to a run."""
    yield from (post("m1"), post("m1", kind="notice"), withdraw("m1"), cancel(run), cancel(run, disconnected=True))
    for on_busy in ("reject", "queue", "steer", "interrupt", "parallel"):
        yield post("m3", policy=PolicyData(on_busy=on_busy))
    yield from (answer(run, "blue", k=1), answer(run, "red", k=1), approve(run, k=2), approve(run, False, k=2))
    yield from (expire(run, 1, now=10**9), expire(run, 2, now=10**9), expire(run, 1, now=0))
    yield from (retry(), delete(), erase(5), act(), report(), entitle("Walls"), entitle(None))
    yield from (tell(came_out(1, "a", run)), tell(came_out(2, "a", run)))
    for fact in facts(run):
        match fact:
            case RunStarted():
                yield from (start(fact), start(fact, gone=[WAKE.work]))
            case (
                RunReleased()
                | ModelReplied()
                | ToolStarted()
                | ToolReturned()
                | ChildStarted()
                | PlanChanged()
                | RunSteered()
                | RunWaiting()
                | RunEnded()
            ):
                yield record(fact)
            case _:
                pass


def status_of(session: Session, run: int) -> RunStatus | None:
    live = session.run(run)
    if live:
        return live.status
    return session.last_end if run <= session.last_run else None


def taken(before: Given, after: Session, event: str, run: int) -> Edge | None:
    """The edge between two states, if there is one: a status that changed, a start that began another attempt, or a
    request that was closed while others are open."""
    old, new = before.session.run(run), after.run(run)
    here, there = status_of(before.session, run), status_of(after, run)
    started_again = old and new and old.attempt != new.attempt
    closed = old and new and here == "waiting" and old.requests != new.requests
    return (here, event, there) if there and (here != there or started_again or closed) else None


def run_in(name: str) -> int:
    return 2 if name == "queued behind a run" or name.startswith("never requested") else 1


def table() -> set[Edge]:
    return {(here, event, there) for here, events in EDGES.items() for event, tos in events.items() for there in tos}


@pytest.fixture(params=BEFORE)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_what_is_stored_takes_an_edge_or_changes_no_status(name: str) -> None:
    before, run = given(*BEFORE[name]), run_in(name)
    for command in commands(run):
        outcome = before.when(command)
        if isinstance(outcome.answer, Decision):
            edge = taken(before, outcome.session, outcome.answer.event.type, run)
            assert edge is None or edge in table(), command


def test_what_is_folded_takes_an_edge_or_changes_no_status(name: str) -> None:
    """Of anything that a log might hold, also what `decide` would never have stored."""
    before, run = given(*BEFORE[name]), run_in(name)
    for fact in (*facts(run), Unknown(type="run.blessed", raw=msgspec.Raw(b"{}"))):
        event = event_of(fact, 99)
        edge = taken(before, evolve(before.session, record_as(before.session, event)), event.type, run)
        if edge and edge[0] in ENDS and edge[1] in ("message.posted", "run.requested", "run.ended"):
            continue  # a log that uses a number twice: no status follows an end, this is another run
        assert edge is None or edge in table(), fact


def test_every_edge_can_be_taken() -> None:
    seen: set[Edge] = set()
    for name, past in BEFORE.items():
        before, run = given(*past), run_in(name)
        for command in (*commands(run), *commands(1)):
            outcome = before.when(command)
            if isinstance(outcome.answer, Decision):
                edge = taken(before, outcome.session, outcome.answer.event.type, run)
                seen |= {edge} if edge else set()
    assert seen == table()


def test_terminal_is_final() -> None:
    assert {status for status, events in EDGES.items() if not events} == set(ENDS)
    assert {there for _, _, there in table()} | {None} == set(EDGES)
    for name in (*ENDS, "withdrawn", "never started, failed"):
        over = given(*BEFORE[name])
        for command in commands(1):
            outcome = over.when(command)
            assert outcome.session.run(1) is None, command


def test_a16_a_second_end_that_is_read_is_ignored() -> None:
    for first in ENDS:
        for second in ENDS:
            session = given(*RUNNING, ended(1, first), ended(1, second)).session
            assert session.last_end == first
            assert len(session.turns) == 1
