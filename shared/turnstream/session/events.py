"""The facts of a session. One event is one message on the session's subject.

Data only: how an event folds is in `fold.py`, what may be stored is in `decide.py`, how it is written as bytes is in
`turnstream.log.codec`. Fields are only ever added, with a default, so that an event stored by any earlier release
loads. Times are milliseconds since the epoch by the broker's clock; durations are milliseconds.
"""

from typing import Literal

import msgspec

from turnstream.ids import SessionKey

Routed = Literal["started", "queued", "steered", "answered", "none"]
TitleSource = Literal["user", "agent", "client", "derived"]
RunStatus = Literal["queued", "running", "waiting", "completed", "failed", "cancelled", "timed_out"]
EndStatus = Literal["completed", "failed", "cancelled", "timed_out"]
Requested = Literal["message", "retry", "leftover", "child", "action"]
"""Why a run is there: a message asked for it, a turn is tried again, it takes what an earlier run left over, another
session's run delegated it, or a person does something by himself."""
Trigger = Literal["message", "retry", "leftover", "child", "action", "reply", "answers", "recovery", "handover"]
"""Why an attempt starts: why the run is there, or that its requests are closed (`reply`: by a message; `answers`), or
that its runner stopped (`recovery`) or gave it back (`handover`)."""
ToolStatus = Literal["ok", "error", "denied", "uncertain", "interrupted"]
Asks = Literal["question", "approval", "child"]
"""What a call waits for before it can return: a person's answer, a person's consent, or a sub-agent."""
PlanStatus = Literal["pending", "in_progress", "completed"]
OnExpiry = Literal["fail", "default", "null"]
DeleteMode = Literal["detach", "erase"]
Failure = Literal[
    "interrupted",
    "max_attempts_exceeded",
    "deadline_exceeded",
    "budget_exceeded",
    "max_steps_exceeded",
    "tool_loop_detected",
    "repeated_denial",
    "request_expired",
    "context_overflow",
    "model_error",
    "empty_reply",
    "multiple_outputs",
    "no_route",
    "child_failed",
    "agent_not_found",
    "client_disconnected",
    "internal_error",
]

ASK_USER = "conversation_ask_user"
"""The control tool by which a model asks a person."""
DELEGATE = "delegate"
"""The control tool by which a model has another agent do something, in a session of its own."""
UPDATE_PLAN = "update_plan"
"""The control tool by which a model keeps the checklist of the session."""


class Data(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What every kind of event data has in common. Nothing in it points back: the garbage collector need not look."""


class Title(Data, frozen=True, kw_only=True):
    text: str
    source: TitleSource


class Part(Data, frozen=True, kw_only=True):
    """One part of a message's content. `text` is what was said."""

    type: Literal["text"] = "text"
    text: str


class Usage(Data, frozen=True, kw_only=True):
    """Tokens, as the provider counts them. `cost` is in millionths of the currency that the model's prices are in, 0
    where it has none."""

    input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    cost: int = 0

    @property
    def total(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            cost=self.cost + other.cost,
        )


class Limits(Data, frozen=True, kw_only=True):
    """What one run may use. `timeout` is in milliseconds, from its first start. `max_cost` is in the unit of
    `Usage.cost`. `max_same_calls` and `max_same_denials`: so many calls of one tool with the same arguments, or denials
    of them, are a loop."""

    max_steps: int = 32
    max_model_calls: int = 32
    max_tool_calls: int = 64
    max_tokens: int | None = None
    timeout: int = 600_000
    max_cost: int | None = None
    max_same_calls: int = 5
    max_same_denials: int = 3


class OnMessageData(Data, frozen=True, kw_only=True):
    """What a message does that comes while a run waits."""

    question: Literal["answer", "reject", "queue", "parallel"] | None = None
    approval: Literal["reject", "decline", "parallel"] | None = None
    parked: Literal["interleave", "queue", "reject"] | None = None


class HistoryData(Data, frozen=True, kw_only=True):
    turns: Literal["all", "completed"] | None = None
    tools: Literal["bounded", "full", "none"] | None = None
    window: Literal["fit", "all"] | None = None
    compaction: Literal["off", "on"] | None = None


class DeleteData(Data, frozen=True, kw_only=True):
    mode: DeleteMode | None = None
    active: Literal["cancel", "reject"] | None = None


class PolicyData(Data, frozen=True, kw_only=True):
    """The fields of a policy that were given; what is absent is as it is where nothing is said. `preset` names a whole
    policy, which the other fields change. What each field means is in `policy.py`."""

    preset: Literal["strict", "memory", "thread", "workspace"] | None = None
    on_busy: Literal["reject", "queue", "steer", "interrupt", "parallel"] | None = None
    message_on_busy: Literal["allow", "refuse"] | None = None
    on_message: OnMessageData | None = None
    authors: Literal["mixed", "single"] | None = None
    starters: Literal["any", "people"] | tuple[str, ...] | None = None
    recovery: Literal["resume", "fail", "durable"] | None = None
    on_disconnect: Literal["detach", "fail"] | None = None
    history: HistoryData | None = None
    empty: Literal["fail", "note"] | None = None
    clock: Literal["running", "wall"] | None = None
    titles: Literal["derived_then_agent", "derived", "client", "none"] | None = None
    delete: DeleteData | None = None


NO_POLICY = PolicyData()


class Spec(Data, frozen=True, kw_only=True):
    """What a run carries out, pinned when it is requested. `digest` is the content hash of the agent's definition.
    `policy` is everything that was given for the run, by whomever; an agent's own before that. `durable`: what the
    agent says of itself. `tools`: the only ones of the agent's that it may use; None: all. `graph`: it is carried out
    node by node. `output`: a JSON Schema that its answer has to fit."""

    agent: str
    version: str
    digest: str
    model: str
    queue: str = "default"
    limits: Limits = Limits()
    policy: PolicyData = NO_POLICY
    durable: bool = False
    tools: tuple[str, ...] | None = None
    graph: bool = False
    output: dict[str, object] | None = None


class Error(Data, frozen=True, kw_only=True):
    code: Failure
    message: str
    retryable: bool = False


class Blob(Data, frozen=True, kw_only=True):
    """Where something too large for an event lies: its name in the object store, its size in bytes, its SHA-256 in
    hex."""

    name: str
    size: int
    sha256: str


class Attachment(Data, frozen=True, kw_only=True):
    """A reference to bytes that came with a message: never the bytes. `sha256` is of them, in hex; `blob` is their name
    in the object store. They never change under it."""

    name: str
    media_type: str
    size: int
    sha256: str
    blob: str


class Window(Data, frozen=True, kw_only=True):
    """What a model call was shown of the session. `since`: turns that had ended before this sequence were left out (0:
    none was). `inner`: so were replies before that one, with their results, of the turns that were shown. `tokens` is
    our estimate of the prompt, `fixed` the part of it that is instructions and tools, `budget` what it may have had."""

    since: int = 0
    inner: int = 0
    tokens: int = 0
    fixed: int = 0
    budget: int = 0


class Wake(Data, frozen=True, kw_only=True):
    """The wake-up that a start came by: its sequence in `WORK`, the log sequence that caused it, its delivery count."""

    work: int
    cause: int
    delivery: int


class ToolCall(Data, frozen=True, kw_only=True):
    """A tool that the model asks for, or a person calls. `arguments` is JSON text as it was written. `asks`: what has
    to be there before the call can return."""

    id: str
    name: str
    arguments: str
    asks: Asks | None = None


class Placed(Data, frozen=True, kw_only=True):
    """Something that belongs to a node of a graph, if it does. `path` leads to the node: `draft`, or `each[3].draft`
    where it is in the graph of another one; `node` is its end."""

    node: str = ""
    path: str = ""


class Starts(Data, frozen=True, kw_only=True):
    run: int
    spec: Spec


class Queued(Starts, frozen=True, kw_only=True):
    """`interrupts`: the run that is to be cancelled for it, 0 for none."""

    interrupts: int = 0


class Steers(Data, frozen=True, kw_only=True):
    run: int


class Answered(Data, frozen=True, kw_only=True):
    """What a message says to one request: an answer, or that it is declined."""

    request: str
    answer: object = None
    declined: bool = False


class Answers(Data, frozen=True, kw_only=True):
    run: int
    requests: tuple[Answered, ...]


class Leftover(Data, frozen=True, kw_only=True):
    """The run that takes the messages which reached another too late."""

    run: int
    spec: Spec
    message_ids: tuple[str, ...]


class Parent(Data, frozen=True, kw_only=True):
    """The call that a session was made for: `call_id` of run `run` of `session`, its `k`th child. With `schema`, a JSON
    Schema, what it answers has to fit."""

    session: str
    run: int
    call_id: str
    k: int
    schema: dict[str, object] | None = None


class Opens(Data, frozen=True, kw_only=True):
    """What opening a session says. `title` derived from the first message is folded, never stored."""

    agent: str | None = None
    title: Title | None = None
    metadata: dict[str, object] = {}
    policy: PolicyData = PolicyData()
    one_shot: bool = False
    parent: Parent | None = None


class ForkedFrom(Data, frozen=True, kw_only=True):
    """What a fork is of: the events of `session` up to its event `through`, which are copied behind this one. `queue`
    is whose runners copy them. `given`: what this event says of the fork and stands, whatever is copied."""

    session: str
    through: int
    queue: str = "default"
    given: tuple[Literal["title", "metadata", "policy"], ...] = ()


class SessionOpened(Opens, frozen=True, kw_only=True):
    forked_from: ForkedFrom | None = None


class SessionForked(Data, frozen=True, kw_only=True):
    """A fork is whole: so many `events` of the other session are here, and what was going on in them has ended."""

    events: int


class SessionUpdated(Data, frozen=True, kw_only=True):
    """Whole values, never merged; None is "as before". `untitled`: a title was asked for, and there is none. `usage`:
    of the model call that was to find it."""

    title: Title | None = None
    agent: str | None = None
    metadata: dict[str, object] | None = None
    policy: PolicyData | None = None
    untitled: bool = False
    usage: Usage = Usage()


class SessionDeleted(Data, frozen=True, kw_only=True):
    """The session is gone for everybody. This is the terminal event of every run that has not ended, as `cancelled`.
    `queue` is whose runners remove what is left, `last_run` the run that was requested last, `events` how many events
    there are with this one: what was stored before may be gone by the time that somebody needs to know."""

    mode: DeleteMode
    by: str
    queue: str = "default"
    last_run: int = 0
    events: int = 0


class SessionErased(Data, frozen=True, kw_only=True):
    """What is left of a deleted session: no content, and what stands in the way of whoever writes late."""

    mode: DeleteMode
    by: str
    events_removed: int
    last_run: int
    deleted_at: int
    """Broker time in milliseconds."""


class MessagePosted(Data, frozen=True, kw_only=True):
    """Something said, and where it was routed: exactly one of `starts`, `queued`, `steers`, `answers`, or nowhere."""

    message_id: str
    author: str
    kind: Literal["message", "notice"] = "message"
    content: tuple[Part, ...]
    attachments: tuple[Attachment, ...] = ()
    context: str = ""
    """What the author has before him; for the turn that takes the message, and no other."""
    opens: Opens | None = None
    starts: Starts | None = None
    queued: Queued | None = None
    steers: Steers | None = None
    answers: Answers | None = None

    @property
    def routing(self) -> Starts | None:
        """The run that it asks for."""
        return self.starts or self.queued

    @property
    def run(self) -> int:
        """The run that it was routed to, 0 for none."""
        to = self.starts or self.queued or self.steers or self.answers
        return to.run if to else 0

    @property
    def routed(self) -> Routed:
        if self.starts:
            return "started"
        if self.queued:
            return "queued"
        if self.steers:
            return "steered"
        return "answered" if self.answers else "none"


class MessageWithdrawn(Data, frozen=True, kw_only=True):
    """A message that no run has taken is taken back. A run that it leaves without any message, `run`, ends with it:
    this is its terminal event, as `cancelled`."""

    message_id: str
    by: str
    run: int = 0


class RunRequested(Data, frozen=True, kw_only=True):
    """A run that no new message asks for: a turn that failed is tried again, or (`action`) a person calls a tool.
    `author`: who that is. `queued`: it waits for its turn; else it starts, beside whatever is live."""

    run: int
    spec: Spec
    trigger: Literal["retry", "action"] = "retry"
    message_ids: tuple[str, ...] = ()
    retry_of: int = 0
    action: ToolCall | None = None
    author: str = ""
    queued: bool = False


class RunStarted(Data, frozen=True, kw_only=True):
    run: int
    attempt: int
    runner: str
    wake: Wake
    trigger: Trigger = "message"
    message_ids: tuple[str, ...] = ()
    model: str = ""


class RunReleased(Data, frozen=True, kw_only=True):
    run: int
    attempt: int
    reason: Literal["drain"] = "drain"


class RunSteered(Data, frozen=True, kw_only=True):
    """The next model call carries these messages."""

    run: int
    attempt: int
    message_ids: tuple[str, ...]


class Ask(Placed, frozen=True, kw_only=True):
    """What a run waits for. `request` is its id. `schema` is a JSON Schema (draft 2020-12) of the answer, `choices` are
    the only ones that do. `digest` is of the tool, its schema and the arguments that an approval is for. `expires_in`
    is in milliseconds from the event's broker time."""

    request: str
    kind: Asks
    call_id: str
    prompt: str
    schema: dict[str, object] | None = None
    choices: tuple[str, ...] = ()
    digest: str = ""
    expires_in: int | None = None
    on_expiry: OnExpiry = "fail"
    default: object = None


class RunWaiting(Data, frozen=True, kw_only=True):
    run: int
    attempt: int
    requests: tuple[Ask, ...]


class RequestAnswered(Data, frozen=True, kw_only=True):
    """The answer to a question, or the decision on an approval. `by` is who said so."""

    run: int
    request: str
    answer: object = None
    approved: bool | None = None
    reason: str = ""
    by: str


class RequestExpired(Data, frozen=True, kw_only=True):
    run: int
    request: str


class ModelReplied(Placed, frozen=True, kw_only=True):
    """A step that is not the last: it asks for tools, or messages have come that the next one carries. `reasoning` is
    portable text, for people. Steps are counted in the run, or in the node."""

    run: int
    attempt: int
    step: int
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()
    finish: str = ""
    model: str = ""
    duration: int = 0
    blob: Blob | None = None
    """Where the whole of `content` lies, if that is only its head."""
    misfit: str = ""
    """Why this would-be answer is none: it does not fit what was asked for."""
    window: Window | None = None


class ToolStarted(Placed, frozen=True, kw_only=True):
    """Stored before a tool that is not idempotent is called."""

    run: int
    attempt: int
    call_id: str


class ToolReturned(Placed, frozen=True, kw_only=True):
    """Every call ends in exactly one of these, with its run (`run.ended.unfinished`), or, the one call that a node
    itself is, with its node. An output too large for an event is in `blob`; `output` holds its head."""

    run: int
    attempt: int
    call_id: str
    status: ToolStatus
    output: str = ""
    error: str = ""
    blob: Blob | None = None
    duration: int = 0


class ChildStarted(Placed, frozen=True, kw_only=True):
    """A run has another agent do something: what it intends, before the child's session is there. `wait`: the call
    returns when the child has ended. `brief` is a digest of what the child is told."""

    run: int
    attempt: int
    call_id: str
    k: int
    child_session: str
    child_run: int = 1
    wait: bool = True
    brief: str = ""
    spec: Spec


class ChildEnded(Data, frozen=True, kw_only=True):
    """How a child came out. `late`: the run has gone on without it."""

    run: int
    call_id: str
    k: int
    status: EndStatus
    output: str = ""
    blob: Blob | None = None
    error: Error | None = None
    usage: Usage = Usage()
    late: bool = False


class RunReported(Data, frozen=True, kw_only=True):
    """In a child's log: how its run ended has been told to whom it was done for, or there is nobody any more."""

    run: int
    told: bool = True


class PlanItem(Data, frozen=True, kw_only=True):
    id: str
    text: str
    status: PlanStatus = "pending"


class PlanChanged(Placed, frozen=True, kw_only=True):
    """The session's checklist, whole."""

    items: tuple[PlanItem, ...]
    run: int = 0
    attempt: int = 0
    call_id: str = ""


class NodeStarted(Data, frozen=True, kw_only=True):
    """A node begins that is a call: of a tool, of a person, of another agent. `call` is what it asks for, its arguments
    made of what has reached the node. Or the graph inside of a node is gone through for so many `items`: the elements
    of a map, the iterations of a loop by now."""

    run: int
    attempt: int
    node: str
    path: str
    call: ToolCall | None = None
    items: int = 0


class NodeFinished(Data, frozen=True, kw_only=True):
    """A node's one end: what it gives, and by which port. `json`: `output` is a JSON value; else it is that text. By
    `err` it gives `error`. `usage`, `finish`, `model`, `duration` and `reasoning` are of the model call that ended
    it. `note` says what became of it beside that."""

    run: int
    attempt: int
    node: str
    path: str
    port: str = "out"
    output: str = ""
    json: bool = False
    blob: Blob | None = None
    error: str = ""
    note: str = ""
    reasoning: str = ""
    usage: Usage = Usage()
    finish: str = ""
    model: str = ""
    duration: int = 0


class RunCancelRequested(Data, frozen=True, kw_only=True):
    """The run is to end: as `cancelled`, or, where `error` says why, as failed for that."""

    run: int
    by: str
    reason: str = ""
    error: Literal["client_disconnected"] | None = None


class RunEnded(Data, frozen=True, kw_only=True):
    """The run's one terminal event. `completed` carries the final answer in `content`; another status what the model
    had said by then. `unfinished`: calls without a result, which end with the run as `interrupted`."""

    run: int
    attempt: int
    status: EndStatus
    content: str = ""
    reasoning: str = ""
    blob: Blob | None = None
    note: str = ""
    error: Error | None = None
    reason: str = ""
    finish: str = ""
    usage: Usage = Usage()
    """Of the whole run."""
    step_usage: Usage = Usage()
    """Of the model call that ended it."""
    model: str = ""
    duration: int = 0
    """Of the model call that ended it."""
    window: Window | None = None
    """Of the model call that ended it."""
    unfinished: tuple[str, ...] = ()
    leftover: Leftover | None = None


class HistoryCompacted(Data, frozen=True, kw_only=True):
    """What the model sees in place of everything up to the sequence `through`, which is the end of a turn. Without a
    `summary` none could be had, for the reason in `fault`: everything stays as it was."""

    through: int
    summary: str = ""
    fault: str = ""
    usage: Usage = Usage()
    model: str = ""


class Unknown(Data, frozen=True, kw_only=True):
    """An event of a type that this release does not know: kept, folded as nothing, shown as it is."""

    type: str
    raw: msgspec.Raw


Fact = (
    SessionOpened
    | SessionForked
    | SessionUpdated
    | SessionDeleted
    | SessionErased
    | MessagePosted
    | MessageWithdrawn
    | RunRequested
    | RunStarted
    | RunReleased
    | RunSteered
    | RunWaiting
    | RequestAnswered
    | RequestExpired
    | ModelReplied
    | ToolStarted
    | ToolReturned
    | ChildStarted
    | ChildEnded
    | RunReported
    | PlanChanged
    | NodeStarted
    | NodeFinished
    | HistoryCompacted
    | RunCancelRequested
    | RunEnded
)

TYPES: dict[str, type[Fact]] = {
    "session.opened": SessionOpened,
    "session.forked": SessionForked,
    "session.updated": SessionUpdated,
    "session.deleted": SessionDeleted,
    "session.erased": SessionErased,
    "message.posted": MessagePosted,
    "message.withdrawn": MessageWithdrawn,
    "run.requested": RunRequested,
    "run.started": RunStarted,
    "run.released": RunReleased,
    "run.steered": RunSteered,
    "run.waiting": RunWaiting,
    "request.answered": RequestAnswered,
    "request.expired": RequestExpired,
    "model.replied": ModelReplied,
    "tool.started": ToolStarted,
    "tool.returned": ToolReturned,
    "child.started": ChildStarted,
    "child.ended": ChildEnded,
    "run.reported": RunReported,
    "plan.changed": PlanChanged,
    "node.started": NodeStarted,
    "node.finished": NodeFinished,
    "history.compacted": HistoryCompacted,
    "run.cancel_requested": RunCancelRequested,
    "run.ended": RunEnded,
}
NAMES: dict[type[Data], str] = {kind: name for name, kind in TYPES.items()}


class Copied(msgspec.Struct, frozen=True, gc=False):
    """Of an event of a fork that was copied: the session that it comes from, its sequence there, and the broker time,
    in milliseconds, at which it was first stored."""

    session: str
    seq: int
    time: int


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A fact and its circumstances. `time` is the writer's estimate of the broker's clock: shown, never decided on."""

    id: str
    key: SessionKey
    data: Fact | Unknown
    actor: str
    time: int
    cause: str | None = None
    correlation: str | None = None
    idempotency_key: str | None = None
    """Digest of the operation and the client's key."""
    body_digest: str | None = None
    traceparent: str | None = None
    copied: Copied | None = None

    def stored_at(self, time: int) -> int:
        """The broker time, in milliseconds, that its record has if it is stored at this one: what was copied was there
        before."""
        return self.copied.time if self.copied else time

    @property
    def type(self) -> str:
        return self.data.type if isinstance(self.data, Unknown) else NAMES[type(self.data)]


class Recorded(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An event as the log has it: numbered by the stream's sequence, dated by the broker; one that was copied, as its
    original was."""

    seq: int
    previous: int
    """Sequence of the session's event before, 0 for the first: the link of the chain."""
    time: int
    size: int
    """Bytes of the stored payload."""
    event: Event
    payload: bytes = b""
    """The stored bytes, where they were read; empty where the writer folds what it has just appended."""


class Due(msgspec.Struct, frozen=True):
    """Something falls due `after` milliseconds after its event's broker time; `queue` is woken then."""

    after: int
    queue: str
    what: str
