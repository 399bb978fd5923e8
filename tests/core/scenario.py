"""given(facts).when(command).then(fact | rejected(code) | NOTHING): the sentences that tell the rules of a session.

`given` folds facts as a log would hold them, whether or not `decide` would have let them in. The words below make facts
and commands of one session with the runs 1, 2, 3 …; sequence numbers skip, as they do in a stream that is shared.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from turnstream.ids import SessionKey, derive
from turnstream.session.commands import (
    Act,
    AnswerRequest,
    CancelRun,
    Command,
    DeleteSession,
    EndChild,
    EraseSession,
    ExpireRequest,
    OpenSession,
    Origin,
    PostMessage,
    RecordFact,
    ReportRun,
    RetrySession,
    RunFact,
    StartRun,
    TakeOver,
    TitleSession,
    UpdateSession,
    WithdrawMessage,
)
from turnstream.session.decide import decide
from turnstream.session.decision import Decision
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    NO_POLICY,
    UPDATE_PLAN,
    Answered,
    Answers,
    Ask,
    Attachment,
    ChildEnded,
    ChildStarted,
    Error,
    Event,
    Fact,
    Leftover,
    Limits,
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    OnMessageData,
    Opens,
    Parent,
    Part,
    PlanChanged,
    PlanItem,
    PolicyData,
    Queued,
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
    SessionOpened,
    SessionUpdated,
    Spec,
    Starts,
    Steers,
    Title,
    ToolCall,
    ToolReturned,
    ToolStarted,
    Unknown,
    Usage,
    Wake,
)
from turnstream.session.fold import evolve
from turnstream.session.graph import Graph
from turnstream.session.plan import Drive, Effect, plan
from turnstream.session.state import Session

KEY = SessionKey("default", "s1")
SKIP = 10
"""Sequence numbers and milliseconds between two events of the session."""
ANN = "user:ann"
RUNNER = "runner:one"
WAKE = Wake(work=7, cause=20, delivery=1)
AGENTS = {
    name: Spec(agent=name, version="v1", digest="d1", model="demo", queue=queue)
    for name, queue in (("default", "default"), ("poet", "default"), ("painter", "gpu"))
}
QUEUE = PolicyData(on_busy="queue")
REJECT = PolicyData(on_busy="reject")
INTERLEAVE = PolicyData(on_message=OnMessageData(parked="interleave"))
PARENT = Parent(session="s0", run=3, call_id="a", k=1)
ADD = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'
TOOLS = {"default": {"add": ADD, "update_plan": ""}, "poet": {"rhyme": ""}}
"""Those that a person may call."""
CALL = ToolCall(id="action", name="add", arguments='{"a":1}')
NOTHING = None
"""What `decide` answers where the session says so already."""


# -- facts ------------------------------------------------------------------------------------------------------------


def spec(agent: str = "default", policy: PolicyData = NO_POLICY, durable: bool = False, **limits: Any) -> Spec:
    return msgspec.structs.replace(AGENTS[agent], policy=policy, durable=durable, limits=Limits(**limits))


def said(text: str) -> tuple[Part, ...]:
    return (Part(text=text),)


def opened(**fields: Any) -> SessionOpened:
    return SessionOpened(**fields)


def posted(
    message: str, run: int, text: str = "hello", *, by: Spec | None = None, author: str = ANN, **fields: Any
) -> MessagePosted:
    starts = Starts(run=run, spec=by or spec())
    return MessagePosted(message_id=message, author=author, content=said(text), starts=starts, **fields)


def attached(name: str = "notes.txt", **fields: Any) -> Attachment:
    given = {"media_type": "text/plain", "size": 5, "sha256": "ab" * 32, "blob": f"default/s1/attachments/{name}"}
    return Attachment(name=name, **given | fields)


def queued(
    message: str, run: int, text: str = "hello", *, by: Spec | None = None, author: str = ANN, interrupts: int = 0
) -> MessagePosted:
    waits = Queued(run=run, spec=by or spec(), interrupts=interrupts)
    return MessagePosted(message_id=message, author=author, content=said(text), queued=waits)


def steers(message: str, run: int, text: str = "hello", *, author: str = ANN) -> MessagePosted:
    return MessagePosted(message_id=message, author=author, content=said(text), steers=Steers(run=run))


def answers(message: str, run: int, text: str = "hello", *, author: str = ANN, **said_to: Any) -> MessagePosted:
    """A message that answers requests: `q1="blue"`, or declines them: `q1=None`."""
    requests = tuple(
        Answered(request=f"s1.{run}.{name}", answer=answer, declined=answer is None) for name, answer in said_to.items()
    )
    return MessagePosted(
        message_id=message, author=author, content=said(text), answers=Answers(run=run, requests=requests)
    )


def passed_over(message: str, text: str = "hello", *, author: str = ANN) -> MessagePosted:
    """A message of an author who may not start a turn."""
    return MessagePosted(message_id=message, author=author, content=said(text))


def notice(message: str, text: str = "by the way", *, author: str = ANN) -> MessagePosted:
    return MessagePosted(message_id=message, author=author, kind="notice", content=said(text))


def withdrawn(message: str, run: int = 0) -> MessageWithdrawn:
    return MessageWithdrawn(message_id=message, by=ANN, run=run)


def started(run: int, attempt: int = 1, *messages: str, wake: Wake = WAKE, runner: str = RUNNER) -> RunStarted:
    """A first start names its messages, a later one none."""
    trigger = "message" if attempt == 1 else "recovery"
    return RunStarted(run=run, attempt=attempt, runner=runner, wake=wake, trigger=trigger, message_ids=messages)


def handover(run: int, attempt: int, wake: Wake = WAKE) -> RunStarted:
    return RunStarted(run=run, attempt=attempt, runner=RUNNER, wake=wake, trigger="handover")


def resumed(run: int, attempt: int, *messages: str, by: Any = "answers", wake: Wake = WAKE) -> RunStarted:
    """A start of a run whose requests are closed."""
    return RunStarted(run=run, attempt=attempt, runner=RUNNER, wake=wake, trigger=by, message_ids=messages)


def requested(run: int, *messages: str, retry_of: int, by: Spec | None = None) -> RunRequested:
    return RunRequested(run=run, spec=by or spec(), message_ids=messages, retry_of=retry_of)


def acted(run: int, *, policy: PolicyData = NO_POLICY, waits: bool = False, author: str = ANN) -> RunRequested:
    """A person calls a tool."""
    return RunRequested(run=run, spec=spec(policy=policy), trigger="action", action=CALL, author=author, queued=waits)


def began(run: int, attempt: int = 1) -> RunStarted:
    """A start of an action."""
    trigger = "action" if attempt == 1 else "recovery"
    return RunStarted(run=run, attempt=attempt, runner=RUNNER, wake=WAKE, trigger=trigger)


def released(run: int, attempt: int = 1) -> RunReleased:
    return RunReleased(run=run, attempt=attempt)


def replied(run: int, step: int, *calls: str, attempt: int = 1, text: str = "", tokens: int = 0) -> ModelReplied:
    asked = tuple(ToolCall(id=call, name="look", arguments="{}") for call in calls)
    usage = Usage(output_tokens=tokens)
    return ModelReplied(run=run, attempt=attempt, step=step, content=text, tool_calls=asked, usage=usage)


def asks(run: int, step: int, attempt: int = 1, text: str = "", **calls: Any) -> ModelReplied:
    """A reply whose calls ask: `a="question"`, `b="approval"`, or not: `c=None`."""
    asked = tuple(ToolCall(id=call, name="look", arguments="{}", asks=kind) for call, kind in calls.items())
    return ModelReplied(run=run, attempt=attempt, step=step, content=text, tool_calls=asked)


def ask(call: str, k: int = 1, *, run: int = 1, kind: Any = "question", **fields: Any) -> Ask:
    return Ask(request=f"s1.{run}.q{k}", kind=kind, call_id=call, prompt="well?", **fields)


def waiting(run: int, *requests: Ask, attempt: int = 1) -> RunWaiting:
    return RunWaiting(run=run, attempt=attempt, requests=requests)


def answered(run: int, k: int = 1, answer: object = None, **fields: Any) -> RequestAnswered:
    return RequestAnswered(run=run, request=f"s1.{run}.q{k}", answer=answer, **{"by": ANN, **fields})


def expired(run: int, k: int = 1) -> RequestExpired:
    return RequestExpired(run=run, request=f"s1.{run}.q{k}")


def steered(run: int, *messages: str, attempt: int = 1) -> RunSteered:
    return RunSteered(run=run, attempt=attempt, message_ids=messages)


def tool_started(run: int, call: str, attempt: int = 1) -> ToolStarted:
    return ToolStarted(run=run, attempt=attempt, call_id=call)


def returned(run: int, call: str, attempt: int = 1, status: Any = "ok", **fields: Any) -> ToolReturned:
    return ToolReturned(run=run, attempt=attempt, call_id=call, status=status, **fields)


def child(k: int, call: str, run: int = 1, *, wait: bool = True, attempt: int = 1, by: str = "poet") -> ChildStarted:
    name = f"s1--{run}-{k}"
    return ChildStarted(run=run, attempt=attempt, call_id=call, k=k, child_session=name, wait=wait, spec=AGENTS[by])


def came_out(k: int, call: str, run: int = 1, status: Any = "completed", **fields: Any) -> ChildEnded:
    return ChildEnded(run=run, call_id=call, k=k, status=status, **fields)


def brief(*, by: Spec | None = None, parent: Parent = PARENT, **opens: Any) -> MessagePosted:
    """What opens the session of a child."""
    return posted("brief", 1, author="agent:boss", by=by, opens=Opens(parent=parent, **opens))


def reported(told: bool = True) -> RunReported:
    return RunReported(run=1, told=told)


def noted(run: int, call: str, *texts: str, attempt: int = 1) -> PlanChanged:
    """The checklist is these items."""
    items = tuple(PlanItem(id=str(n), text=text) for n, text in enumerate(texts, 1))
    return PlanChanged(run=run, attempt=attempt, call_id=call, items=items)


def keeps(run: int, step: int, call: str, attempt: int = 1) -> ModelReplied:
    """A reply that changes the checklist."""
    calls = (ToolCall(id=call, name=UPDATE_PLAN, arguments="{}"),)
    return ModelReplied(run=run, attempt=attempt, step=step, tool_calls=calls)


def titled(text: str | None, source: Any = "agent") -> SessionUpdated:
    """None: there is no title."""
    return SessionUpdated(title=title(text, source)) if text else SessionUpdated(untitled=True)


def cancel_requested(run: int, by: str = ANN) -> RunCancelRequested:
    return RunCancelRequested(run=run, by=by)


def ended(run: int, status: Any = "completed", attempt: int = 1, **fields: Any) -> RunEnded:
    return RunEnded(run=run, attempt=attempt, status=status, **fields)


def left_over(run: int, *messages: str, by: Spec | None = None) -> Leftover:
    return Leftover(run=run, spec=by or spec(), message_ids=messages)


def deleted(mode: Any = "erase") -> SessionDeleted:
    return SessionDeleted(mode=mode, by=ANN)


def erased(mode: Any = "erase", *, removed: int, last_run: int, at: int) -> SessionErased:
    return SessionErased(mode=mode, by=ANN, events_removed=removed, last_run=last_run, deleted_at=at)


def failure(code: Any, message: str = "") -> Error:
    return Error(code=code, message=message)


# -- commands ---------------------------------------------------------------------------------------------------------


def origin(name: str, **fields: Any) -> Origin:
    return Origin(**{"id": derive(name), "actor": ANN, "time": 0, **fields})


def open_session(*, given: Iterable[str] = (), **opens: Any) -> OpenSession:
    return OpenSession(origin=origin("open"), opens=Opens(**opens), given=frozenset(given))


def update(**fields: Any) -> UpdateSession:
    return UpdateSession(origin=origin("update"), **fields)


def title(text: str, source: Any) -> Title:
    return Title(text=text, source=source)


def post(message: str, text: str = "hello", **fields: Any) -> PostMessage:
    words = {"origin": origin(f"post {message}"), "author": ANN, "content": said(text), "specs": AGENTS, **fields}
    return PostMessage(message_id=message, **words)


def withdraw(message: str) -> WithdrawMessage:
    return WithdrawMessage(origin=origin(f"withdraw {message}"), message_id=message)


def cancel(run: int, reason: str = "", *, disconnected: bool = False) -> CancelRun:
    return CancelRun(origin=origin(f"cancel {run}"), run=run, reason=reason, disconnected=disconnected)


def answer(run: int, answer: object = None, *, k: int | None = None, at: int = 0, **fields: Any) -> AnswerRequest:
    """Answers the request `k` of the run, or the only one, at the time `at`."""
    name = f"answer {run} {k} {answer} {fields}"
    return AnswerRequest(origin=origin(name, time=at), run=run, request=k, answer=answer, **fields)


def approve(run: int, approved: bool = True, **fields: Any) -> AnswerRequest:
    return answer(run, approved=approved, **fields)


def expire(run: int, k: int = 1, *, now: int) -> ExpireRequest:
    return ExpireRequest(origin=origin(f"expire {run} {k}"), run=run, request=k, now=now)


def retry() -> RetrySession:
    return RetrySession(origin=origin("retry"), specs=AGENTS)


def act(name: str = "add", arguments: str = '{"a":1}', *, author: str = ANN, what: str = "act") -> Act:
    action = ToolCall(id="action", name=name, arguments=arguments)
    return Act(origin=origin(what), action=action, author=author, specs=AGENTS, tools=TOOLS)


def tell(ended: ChildEnded) -> EndChild:
    return EndChild(origin=origin(f"tell {ended.run} {ended.k}", actor=RUNNER), ended=ended)


def report(told: bool = True) -> ReportRun:
    return ReportRun(origin=origin("report", actor=RUNNER), run=1, told=told)


def entitle(text: str | None) -> TitleSession:
    return TitleSession(origin=origin("entitle", actor=RUNNER), text=text)


def delete(**fields: Any) -> DeleteSession:
    return DeleteSession(**{"origin": origin("delete"), "specs": AGENTS, **fields})


def erase(removed: int = 0) -> EraseSession:
    return EraseSession(origin=origin("erase"), events_removed=removed)


def start(fact: RunStarted, *, gone: Iterable[int] = (), nonce: str = "n") -> StartRun:
    name = f"start {fact.run} {fact.attempt} {nonce}"
    return StartRun(origin=origin(name, actor=fact.runner), started=fact, gone=frozenset(gone))


def record(fact: RunFact, *, taking: Wake | None = None, gone: Iterable[int] = ()) -> RecordFact:
    """`taking`: the wake-up of a drive that has not started the attempt."""
    by = TakeOver(taking, frozenset(gone)) if taking else None
    return RecordFact(origin=origin(f"fact {fact}", actor=RUNNER), fact=fact, takes_over=by)


def with_origin(command: Any, **fields: Any) -> Any:
    """The command with another id, key, body or expected sequence."""
    return msgspec.structs.replace(command, origin=msgspec.structs.replace(command.origin, **fields))


# -- sentences --------------------------------------------------------------------------------------------------------


def record_as(session: Session, event: Event, size: int = 100) -> Recorded:
    """The event as the log would hold it behind what the session has."""
    seq = session.seq + SKIP
    return Recorded(seq=seq, previous=session.seq, time=seq, size=size, event=event)


def event_of(fact: Fact | Unknown, n: int, **fields: Any) -> Event:
    """An event that holds this fact; a start's id is the one that the command `start` would give it."""
    name = f"start {fact.run} {fact.attempt} n" if isinstance(fact, RunStarted) else f"event {n}"
    return Event(**{"id": derive(name), "key": KEY, "data": fact, "actor": ANN, "time": 0, **fields})


class rejected:
    """A refusal with this code and at least these details."""

    def __init__(self, code: str, **details: str | int) -> None:
        self.code = code
        self.details = details

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rejected) and other.code == self.code and self.details.items() <= other.details.items()

    def __repr__(self) -> str:
        return f"rejected({self.code!r}, {self.details})"


class Outcome:
    """What `decide` answered, and the session after it."""

    def __init__(self, before: Session, answer: Decision | Rejected | None) -> None:
        self.answer = answer
        self.session = evolve(before, record_as(before, answer.event)) if isinstance(answer, Decision) else before

    def then(self, expected: Fact | rejected | None, *, wakes: tuple[str, ...] | None = None) -> "Outcome":
        answer = self.answer
        if isinstance(expected, rejected):
            assert expected == answer, f"{answer!r} is not {expected!r}"
        else:
            if isinstance(answer, Rejected):
                raise AssertionError(f"expected {expected}") from answer
            assert (answer.event.data if answer else None) == expected
        if wakes is not None:
            assert isinstance(answer, Decision)
            assert answer.wakes == wakes
        return self

    def and_when(self, command: Command) -> "Outcome":
        return Given(self.session).when(command)

    @property
    def given(self) -> "Given":
        return Given(self.session)

    @property
    def decision(self) -> Decision:
        assert isinstance(self.answer, Decision)
        return self.answer


class Given:
    """`graph`: what the run of the drive goes through."""

    def __init__(self, session: Session, graph: Graph | None = None) -> None:
        self.session = session
        self.graph = graph

    def through(self, graph: Graph) -> "Given":
        return Given(self.session, graph)

    def when(self, command: Command) -> Outcome:
        try:
            return Outcome(self.session, decide(command, self.session))
        except Rejected as refusal:
            return Outcome(self.session, refusal)

    def planned(self, drive: Drive | None = None, now: int = 0) -> tuple[Effect, ...]:
        return plan(self.session, now, msgspec.structs.replace(drive or DRIVE, graph=self.graph))


class _Drive(Drive, frozen=True, kw_only=True):
    """A drive whose starts have the ids that `started` facts have in `given`."""

    def start_id(self, session: Session, run: int, attempt: int) -> str:
        return derive(f"start {run} {attempt} {self.nonce}")


def drive(wake: Wake = WAKE, *, nonce: str = "n", queue: str = "default", gone: Iterable[int] = ()) -> Drive:
    """The drive that made the starts in `given` is the one with the nonce `n`."""
    return _Drive(runner=RUNNER, nonce=nonce, queue=queue, wake=wake, gone=frozenset(gone))


DRIVE = drive()


def given(*facts: Fact | Unknown) -> Given:
    session = Session(key=KEY)
    for n, fact in enumerate(facts):
        session = evolve(session, record_as(session, event_of(fact, n)))
    return Given(session)
