"""The facts of a session. One event is one message on the session's subject.

Data only: how an event folds is in `state.py`, what may be stored is in `decide.py`, how it is written as bytes is in
`turnstream.log.codec`. Fields are only ever added, with a default, so that an event stored by any earlier release
loads. Times are milliseconds since the epoch by the broker's clock; durations are milliseconds.
"""

from typing import Literal

import msgspec

from turnstream.ids import SessionKey

Routed = Literal["started", "queued", "none"]
TitleSource = Literal["user", "agent", "client", "derived"]
RunStatus = Literal["queued", "running", "completed", "failed", "cancelled", "timed_out"]
EndStatus = Literal["completed", "failed", "cancelled", "timed_out"]
Trigger = Literal["message", "recovery", "handover"]
ToolStatus = Literal["ok", "error", "uncertain", "interrupted"]
Failure = Literal[
    "interrupted",
    "max_attempts_exceeded",
    "deadline_exceeded",
    "budget_exceeded",
    "max_steps_exceeded",
    "context_overflow",
    "model_error",
    "empty_reply",
    "agent_not_found",
    "internal_error",
]


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
    """Tokens, as the provider counts them."""

    input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
        )


class Limits(Data, frozen=True, kw_only=True):
    """What one run may use. `timeout` is in milliseconds, from its first start."""

    max_steps: int = 32
    max_model_calls: int = 32
    max_tool_calls: int = 64
    max_tokens: int | None = None
    timeout: int = 600_000


class Spec(Data, frozen=True, kw_only=True):
    """What a run carries out, pinned when it is requested. `digest` is the content hash of the agent's definition."""

    agent: str
    version: str
    digest: str
    model: str
    queue: str = "default"
    limits: Limits = Limits()


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


class Wake(Data, frozen=True, kw_only=True):
    """The wake-up that a start came by: its sequence in `WORK`, the log sequence that caused it, its delivery count."""

    work: int
    cause: int
    delivery: int


class ToolCall(Data, frozen=True, kw_only=True):
    """A tool that the model asks for. `arguments` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


class PolicyData(Data, frozen=True, kw_only=True):
    """The fields of a session's policy that were given; what is absent takes its default."""

    on_busy: Literal["reject", "queue"] | None = None


class Starts(Data, frozen=True, kw_only=True):
    run: int
    spec: Spec


class Opens(Data, frozen=True, kw_only=True):
    """What opening a session says. `title` derived from the first message is folded, never stored."""

    agent: str | None = None
    title: Title | None = None
    metadata: dict[str, object] = {}
    policy: PolicyData = PolicyData()
    one_shot: bool = False


class SessionOpened(Opens, frozen=True, kw_only=True):
    pass


class SessionUpdated(Data, frozen=True, kw_only=True):
    """Whole values, never merged; None is "as before"."""

    title: Title | None = None
    agent: str | None = None
    metadata: dict[str, object] | None = None
    policy: PolicyData | None = None


class MessagePosted(Data, frozen=True, kw_only=True):
    """Something said, and where it was routed: `starts` or `queued` (never both; neither: it starts nothing)."""

    message_id: str
    author: str
    kind: Literal["message", "notice"] = "message"
    content: tuple[Part, ...]
    opens: Opens | None = None
    starts: Starts | None = None
    queued: Starts | None = None

    @property
    def routing(self) -> Starts | None:
        """The run that it starts or waits for."""
        return self.starts or self.queued

    @property
    def routed(self) -> Routed:
        return "started" if self.starts else "queued" if self.queued else "none"


class MessageWithdrawn(Data, frozen=True, kw_only=True):
    """A queued message is taken back. The run that it was queued for, `run`, ends with it: this is its terminal event,
    as `cancelled`."""

    message_id: str
    by: str
    run: int = 0


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


class ModelReplied(Data, frozen=True, kw_only=True):
    """A step that is not the last: it asks for tools. `reasoning` is portable text, for people."""

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


class ToolStarted(Data, frozen=True, kw_only=True):
    """Stored before a tool that is not idempotent is called."""

    run: int
    attempt: int
    call_id: str


class ToolReturned(Data, frozen=True, kw_only=True):
    """Every call ends in exactly one of these. An output too large for an event is in `blob`; `output` holds its
    head."""

    run: int
    attempt: int
    call_id: str
    status: ToolStatus
    output: str = ""
    error: str = ""
    blob: Blob | None = None
    duration: int = 0


class RunCancelRequested(Data, frozen=True, kw_only=True):
    run: int
    by: str
    reason: str = ""


class RunEnded(Data, frozen=True, kw_only=True):
    """The run's one terminal event. `completed` carries the final answer in `content`."""

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


class Unknown(Data, frozen=True, kw_only=True):
    """An event of a type that this release does not know: kept, folded as nothing, shown as it is."""

    type: str
    raw: msgspec.Raw


Fact = (
    SessionOpened
    | SessionUpdated
    | MessagePosted
    | MessageWithdrawn
    | RunStarted
    | RunReleased
    | ModelReplied
    | ToolStarted
    | ToolReturned
    | RunCancelRequested
    | RunEnded
)

TYPES: dict[str, type[Fact]] = {
    "session.opened": SessionOpened,
    "session.updated": SessionUpdated,
    "message.posted": MessagePosted,
    "message.withdrawn": MessageWithdrawn,
    "run.started": RunStarted,
    "run.released": RunReleased,
    "model.replied": ModelReplied,
    "tool.started": ToolStarted,
    "tool.returned": ToolReturned,
    "run.cancel_requested": RunCancelRequested,
    "run.ended": RunEnded,
}
NAMES: dict[type[Data], str] = {kind: name for name, kind in TYPES.items()}


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

    @property
    def type(self) -> str:
        return self.data.type if isinstance(self.data, Unknown) else NAMES[type(self.data)]


class Recorded(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An event as the log has it: numbered by the stream's sequence, dated by the broker."""

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
