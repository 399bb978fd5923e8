"""What may be asked of a session. Time, ids and randomness are inside the command: the core makes nothing up.

`decide(command, session)` answers each with the event to store, None (the session says so already) or `Rejected`.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from turnstream.session.events import (
    NO_POLICY,
    Attachment,
    ChildEnded,
    ChildStarted,
    Copied,
    DeleteMode,
    Fact,
    ForkedFrom,
    ModelReplied,
    NodeFinished,
    NodeStarted,
    Opens,
    Part,
    PlanChanged,
    PolicyData,
    RunEnded,
    RunReleased,
    RunStarted,
    RunSteered,
    RunWaiting,
    Spec,
    Title,
    ToolCall,
    ToolReturned,
    ToolStarted,
    Unknown,
    Usage,
    Wake,
)

RunFact = (
    ModelReplied
    | ToolStarted
    | ToolReturned
    | ChildStarted
    | PlanChanged
    | NodeStarted
    | NodeFinished
    | RunSteered
    | RunWaiting
    | RunReleased
    | RunEnded
)


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, and what makes a repeat recognisable.

    `id` is the event's id: it belongs to the command, not to the try. `time` is the writer's estimate of the broker's
    clock, in milliseconds. `expected_seq` is the caller's guard: the command is refused if the session's last sequence
    is another.
    """

    id: str
    actor: str
    time: int
    idempotency_key: str | None = None
    body_digest: str | None = None
    expected_seq: int | None = None
    cause: str | None = None
    correlation: str | None = None
    traceparent: str | None = None


class _Command(msgspec.Struct, frozen=True, kw_only=True):
    origin: Origin


class OpenSession(_Command, frozen=True, kw_only=True):
    """Opens a session. One that is there stays as it is, but for the fields named in `given`. `specs` are as for a
    message."""

    opens: Opens
    given: frozenset[str] = frozenset()
    specs: Mapping[str, Spec] = {}


class ForkSession(_Command, frozen=True, kw_only=True):
    """Opens a session that takes over what another one has up to an event. `opens` says what is given of it."""

    opens: Opens
    forked_from: ForkedFrom


class CopyEvent(_Command, frozen=True, kw_only=True):
    """The next event of a fork, as it is there. `behind`: the sequence of the one before it in the session that it
    comes from, 0 for none. The origin is the original's."""

    data: Fact | Unknown
    copied: Copied
    behind: int


class CloseFork(_Command, frozen=True, kw_only=True):
    """Everything is copied: run `run` does not go on here; 0: none is left, and the fork is whole."""

    run: int


class UpdateSession(_Command, frozen=True, kw_only=True):
    """Changes whole values; None is "as before"."""

    title: Title | None = None
    agent: str | None = None
    metadata: dict[str, object] | None = None
    policy: PolicyData | None = None


class PostMessage(_Command, frozen=True, kw_only=True):
    """Says something. `specs` are the runs that the known agents would carry out, by agent name; `agent` and `model`
    override the session's for this turn; `policy` overrides the session's for this message. `opens` says how an unknown
    session is opened; without it an unknown session is an error."""

    message_id: str
    author: str
    kind: Literal["message", "notice"] = "message"
    content: tuple[Part, ...]
    attachments: tuple[Attachment, ...] = ()
    context: str = ""
    specs: Mapping[str, Spec]
    agent: str | None = None
    model: str | None = None
    policy: PolicyData = NO_POLICY
    opens: Opens | None = None


class WithdrawMessage(_Command, frozen=True, kw_only=True):
    message_id: str


class CancelRun(_Command, frozen=True, kw_only=True):
    """`disconnected`: the client that streamed the run went away; whether the run ends by that is its policy's word."""

    run: int
    reason: str = ""
    disconnected: bool = False


class AnswerRequest(_Command, frozen=True, kw_only=True):
    """Answers a question with `answer`, or decides on an approval with `approved`. `request` is the number of the
    request in its run; None is the only one that is open."""

    run: int
    request: int | None = None
    answer: object = None
    approved: bool | None = None
    reason: str = ""


class RetrySession(_Command, frozen=True, kw_only=True):
    """Tries the latest turn again, which failed. `specs` are as for a message."""

    specs: Mapping[str, Spec]


class Act(_Command, frozen=True, kw_only=True):
    """A person calls a tool in the session. `specs` are as for a message; `tools` are those that a person may call, by
    agent, each with the JSON Schema of its arguments as text, empty where it is not known."""

    action: ToolCall
    author: str
    specs: Mapping[str, Spec]
    tools: Mapping[str, Mapping[str, str]]


class EndChild(_Command, frozen=True, kw_only=True):
    """A child has ended: told to whoever delegated to it. `ended.late` is found out here."""

    ended: ChildEnded


class ReportRun(_Command, frozen=True, kw_only=True):
    """Whoever delegated to this session has been told, or is not there any more."""

    run: int
    told: bool


class TitleSession(_Command, frozen=True, kw_only=True):
    """The title that was found for the session, None: none was; and what the search has used."""

    text: str | None
    usage: Usage = Usage()


class CompactHistory(_Command, frozen=True, kw_only=True):
    """The summary of everything up to the end of a turn, `through`; an empty one: none could be had, says `fault`."""

    through: int
    summary: str = ""
    fault: str = ""
    usage: Usage = Usage()
    model: str = ""


class DeleteSession(_Command, frozen=True, kw_only=True):
    """None is the policy's word, of which `specs` are a part."""

    specs: Mapping[str, Spec]
    mode: DeleteMode | None = None
    active: Literal["cancel", "reject"] | None = None


class EraseSession(_Command, frozen=True, kw_only=True):
    """Everything that was to be removed of a deleted session is removed: only the tombstone is left."""

    events_removed: int


class ExpireRequest(_Command, frozen=True, kw_only=True):
    """A drive finds that the time of a request is over. `now` is broker time in milliseconds."""

    run: int
    request: int
    now: int


class StartRun(_Command, frozen=True, kw_only=True):
    """A drive starts an attempt. `gone` holds wake-ups that the drive looked for in `WORK` and did not find any
    more."""

    started: RunStarted
    gone: frozenset[int] = frozenset()


class TakeOver(msgspec.Struct, frozen=True):
    """By what a drive may take a running run from its runner: its own wake-up, and those that it looked for in `WORK`
    and did not find any more."""

    wake: Wake
    gone: frozenset[int] = frozenset()


class RecordFact(_Command, frozen=True, kw_only=True):
    """A drive reports what an attempt of its run did. A fact of an attempt that is not the current one is refused.
    `takes_over`: the drive has not started the running attempt that it ends, and does so in its runner's place."""

    fact: RunFact
    takes_over: TakeOver | None = None


Command = (
    OpenSession
    | ForkSession
    | CopyEvent
    | CloseFork
    | UpdateSession
    | DeleteSession
    | EraseSession
    | TitleSession
    | CompactHistory
    | PostMessage
    | Act
    | WithdrawMessage
    | RetrySession
    | CancelRun
    | AnswerRequest
    | ExpireRequest
    | EndChild
    | ReportRun
    | StartRun
    | RecordFact
)
