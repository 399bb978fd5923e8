"""What a session is, as its events tell it; how they do is in `fold.py`.

The folded state holds ids, numbers and digests, so it stays small however long a session grows; of content, only what
an open question takes as an answer (its schema, its choices). It is
immutable: whoever holds one holds what the log said at `seq`. It is not a read model (those are in `turnstream.views`)
and decides nothing (`decide.py`).

For whoever edits this: the table of edges below is the only place that says which status follows which; the diagram in
the README is checked against it.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from turnstream.ids import DEFAULT_AGENT, SessionKey, digest
from turnstream.session.events import (
    Ask,
    Asks,
    DeleteMode,
    ForkedFrom,
    Limits,
    OnExpiry,
    Parent,
    PolicyData,
    Requested,
    Routed,
    RunStatus,
    Spec,
    TitleSource,
    ToolCall,
    Trigger,
    Usage,
    Wake,
    Window,
)
from turnstream.session.paths import around
from turnstream.session.policy import Policy, resolve
from turnstream.session.recent import Recent
from turnstream.session.turns import Turn, Turns

BRACKETS = 200
"""So many in a call's arguments, and they are read; each may be a level."""
REMEMBERED = 1000
"""How many idempotency keys, and how many message ids, a session remembers at least. The key that opened it is
remembered for ever."""
WITHDRAWN = -1
"""In place of the run of a message that was withdrawn."""

EDGES: dict[RunStatus | None, dict[str, frozenset[RunStatus]]] = {
    None: {
        "message.posted": frozenset({"queued"}),
        "run.requested": frozenset({"queued"}),
        "run.ended": frozenset({"queued"}),
    },
    "queued": {
        "run.started": frozenset({"running"}),
        "message.withdrawn": frozenset({"cancelled"}),
        "run.ended": frozenset({"failed", "cancelled", "timed_out"}),
        "session.deleted": frozenset({"cancelled"}),
    },
    "running": {
        "run.started": frozenset({"running"}),
        "run.released": frozenset({"queued"}),
        "run.waiting": frozenset({"waiting"}),
        "run.ended": frozenset({"completed", "failed", "cancelled", "timed_out"}),
        "session.deleted": frozenset({"cancelled"}),
    },
    "waiting": {
        "request.answered": frozenset({"waiting", "queued"}),
        "request.expired": frozenset({"waiting", "queued"}),
        "message.posted": frozenset({"waiting", "queued"}),
        "child.ended": frozenset({"waiting", "queued"}),
        "run.ended": frozenset({"failed", "cancelled", "timed_out"}),
        "session.deleted": frozenset({"cancelled"}),
    },
    "completed": {},
    "failed": {},
    "cancelled": {},
    "timed_out": {},
}
"""status -> event -> what it may become. A status without edges is terminal. `run.ended` of another run leaves
messages over: they are the next run."""
TERMINAL = frozenset(
    event for edges in EDGES.values() for event, statuses in edges.items() if any(not EDGES[to] for to in statuses)
)
"""Events that end the run that they are about."""


def has_edge(status: RunStatus, event: str, to: RunStatus) -> bool:
    return to in EDGES[status].get(event, frozenset())


class Call(msgspec.Struct, frozen=True):
    """A tool call that has no result yet. `started` is the attempt that began it (only of tools that are not
    idempotent), else 0. `digest` is of its name and arguments. `asks`: what has to be there first; `closed` how that
    came out, by the event `closed_seq`; `request` is the number of the request, asked by the event `asked_seq`, both 0
    before it is asked; `child` the number of the child, 0 before there is one; `wait` whether the call returns only
    when the child has ended."""

    id: str
    name: str
    digest: str
    started: int = 0
    asks: Asks | None = None
    request: int = 0
    closed: "Closing | None" = None
    closed_seq: int = 0
    asked_seq: int = 0
    child: int = 0
    wait: bool = True
    seq: int = 0
    """Of the event that asks for it."""
    path: str = ""
    """Of the node of a graph that it belongs to."""

    @property
    def is_node(self) -> bool:
        """Whether the node itself is this call: what it comes to is the node's end."""
        return self.id == self.path != ""

    @property
    def may_begin(self) -> bool:
        """Whether the tool may be called: nobody is asked first, or has agreed."""
        return self.asks is None or self.closed == "approved"


Closing = Literal["answered", "approved", "denied", "expired", "returned"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a run waits for: the `k`th request of the run. `schema` is JSON text, `expires_at` broker time in
    milliseconds; of both, and of `choices`, only an open request is so well known."""

    k: int
    kind: Asks
    call_id: str
    asked_seq: int
    schema: str = ""
    choices: tuple[str, ...] = ()
    expires_at: int | None = None
    on_expiry: OnExpiry = "fail"


class Closed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that is not open any more, since event `seq`: how, and what was said (a digest)."""

    seq: int
    how: Closing | Literal["ended"]
    said: str = ""


class Child(msgspec.Struct, frozen=True, kw_only=True):
    """The `k`th child of run `run`, which has not ended. `cancel`: it is to end, for nobody waits for it any more."""

    run: int
    k: int
    call_id: str
    session: str
    spec: Spec
    cancel: bool = False


class Visit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What has become of a node of a graph, by its path. `begun`: the sequence of its `node.started`, 0 before there is
    one; `items`: how often the graph inside of it is gone through by now; `steps`: how many replies its model has
    given that were not the last, `misfits` how many of these were none; `port`: by which it has finished, empty before;
    `seq`: the sequence of its `node.finished`."""

    path: str
    begun: int = 0
    items: int = 0
    steps: int = 0
    misfits: int = 0
    port: str = ""
    seq: int = 0


class Run(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run that has not ended."""

    n: int
    spec: Spec
    message_ids: tuple[str, ...]
    """The messages that it has taken, and those that its first start takes."""
    author: str
    """Whose message asked for it."""
    requested_seq: int
    requested_at: int
    since: int = 0
    """Nothing that belongs to it is older than the event of this sequence; its messages may be older than the run."""
    steered_since: int = 0
    """The same of the messages of `steering`."""
    plan_seq: int = 0
    """Sequence of the event that held the checklist when it began, 0 for none."""
    trigger: Requested = "message"
    in_line: bool = True
    """Whether it waits until the runs before it have ended."""
    interrupts: int = 0
    """The run that it came to interrupt, 0 for none: it is the next behind that one."""
    status: RunStatus = "queued"
    attempt: int = 0
    start_id: str = ""
    """Id of the current attempt's `run.started`: the fence."""
    runner: str = ""
    wake: Wake | None = None
    deadline: int | None = None
    """Broker time in milliseconds; None while the clock stands."""
    left: int | None = None
    """Milliseconds until the deadline when the clock goes on; None before the first start."""
    cancel: bool = False
    disconnected: bool = False
    """The cancel is for a client that went away, and a failure."""
    recoveries: int = 0
    """Recoveries since the last new fact."""
    steps: int = 0
    tool_calls: int = 0
    reply_seq: int = 0
    """Sequence of the event that gave the answer of `answered`."""
    answered: bool = False
    """The newest reply asks for no tools: without a message to carry on with, it is the answer."""
    open_calls: tuple[Call, ...] = ()
    asked: int = 0
    """How many requests it has made."""
    requests: tuple[Request, ...] = ()
    """Those that are open."""
    children: int = 0
    """How many it has made."""
    parked: bool = False
    """It waits for its children alone, or goes on with what they have come to: it does not hold the turn."""
    misfits: int = 0
    """How many of its answers were none, for they did not fit."""
    refused_by_expiry: bool = False
    """A request expired that ends the run by it."""
    resume: Literal["reply", "answers"] | None = None
    """Its requests are closed: why it starts again."""
    replies: tuple[str, ...] = ()
    """The messages that closed requests since it waits."""
    steering: tuple[str, ...] = ()
    """Messages that have reached it and that it has not taken."""
    same_calls: tuple[tuple[str, int], ...] = ()
    """How often it has asked for each call, by digest."""
    same_denials: tuple[tuple[str, int], ...] = ()
    visits: tuple[Visit, ...] = ()
    """The nodes of its graph that have begun, or finished."""
    usage: Usage = Usage()
    size: int = 0

    @property
    def limits(self) -> Limits:
        return self.spec.limits

    @property
    def policy(self) -> Policy:
        return resolve(self.spec.policy)

    @property
    def taken(self) -> bool:
        """Whether its message was taken: it has been started."""
        return self.attempt > 0

    @property
    def untaken(self) -> tuple[str, ...]:
        """The messages that its first start takes. Those of a turn that is tried again were taken before."""
        return () if self.taken or self.trigger == "retry" else self.message_ids

    @property
    def recovers(self) -> bool:
        """Whether it goes on after its runner stopped."""
        recovery = self.policy.recovery
        return recovery == "resume" or (recovery == "durable" and self.spec.durable)

    @property
    def is_to_end(self) -> bool:
        """Whether nothing but its end may follow."""
        return self.cancel or self.refused_by_expiry

    def next_start(self) -> tuple[Trigger, tuple[str, ...]]:
        """Why the next attempt starts, and the messages that its start names: each message is taken once."""
        if self.status == "running":
            return "recovery", ()
        if self.resume == "reply":
            return "reply", self.replies
        if self.resume == "answers":
            return "answers", (*self.replies, *self.steering)
        return ("handover", ()) if self.taken else (self.trigger, self.message_ids)

    def call(self, call_id: str) -> Call | None:
        """The open call of this id."""
        return next((call for call in self.open_calls if call.id == call_id), None)

    def visit(self, path: str) -> Visit:
        """What has become of the node at this path. Those that began last are asked for most."""
        for visit in reversed(self.visits):
            if visit.path == path:
                return visit
        return Visit(path)

    def reaches(self, path: str) -> bool:
        """Whether the graph that the node at this path is in is being gone through: that of the run always is, that of
        an element, or of an iteration, once it has begun, and until the node around it has finished."""
        wanted = around(path)
        inside = [visit for visit in self.visits if visit.path in wanted] if wanted else []
        return len(inside) == len(wanted) and all(
            not visit.port and visit.items > wanted[visit.path] for visit in inside
        )

    def calls_at(self, path: str) -> tuple[Call, ...]:
        """The open calls of this node; of none, where there is no graph."""
        return tuple([call for call in self.open_calls if call.path == path])

    def call_of(self, child: int) -> Call | None:
        """The open call that this child is for."""
        return next((call for call in self.open_calls if call.child == child), None)

    @property
    def for_people(self) -> tuple[Request, ...]:
        """The open requests that a person can answer."""
        return tuple([request for request in self.requests if request.kind != "child"])

    def request(self, k: int) -> Request | None:
        """The open request of this number."""
        return next((request for request in self.requests if request.k == k), None)


class Prompt(msgspec.Struct, frozen=True):
    """The newest call of a model: what it was shown, and how many tokens its provider counted, 0 if it did not."""

    model: str
    window: Window
    counted: int = 0


class Compacted(msgspec.Struct, frozen=True):
    """The event `seq` holds a summary of everything up to the sequence `through`."""

    seq: int
    through: int


class Ended(msgspec.Struct, frozen=True):
    """The run that ended last: what trying it again needs."""

    run: int
    status: RunStatus
    spec: Spec
    message_ids: tuple[str, ...]
    author: str
    since: int = 0


class Deleted(msgspec.Struct, frozen=True):
    """Since event `seq`, at broker time `at` in milliseconds. `events` is how many there were, this one included.
    `erased`: nothing is left but the tombstone. `key`: idempotency key and body digest of the command that did it, by
    which its repeat is recognised."""

    seq: int
    at: int
    mode: DeleteMode
    by: str
    events: int = 0
    erased: bool = False
    key: tuple[str, str | None] | None = None


class Copying(msgspec.Struct, frozen=True, gc=False):
    """How far a fork is: the sequence, in the session that it is of, of the last event that was copied, and how many
    were."""

    seq: int = 0
    events: int = 0


class Receipt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The first answer to a command with an idempotency key."""

    seq: int
    body_digest: str | None
    message_id: str = ""
    run: int = 0
    routed: Routed | None = None


class Session(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A session as of `seq`, the sequence of its last event; `seq` 0 is one that does not exist."""

    key: SessionKey
    seq: int = 0
    events: int = 0
    """How many there are up to `seq`."""
    opened_at: int = 0
    agent: str | None = None
    title_source: TitleSource = "derived"
    spoken: bool = False
    """A turn that took messages has completed: there is something to find a title for."""
    untitled: bool = False
    """A title was asked for, and there is none."""
    policy: PolicyData = PolicyData()
    one_shot: bool = False
    parent: Parent | None = None
    forked_from: ForkedFrom | None = None
    copying: Copying | None = None
    """It is a fork that is not whole yet: nothing in it goes on, and nobody may ask anything of it but to delete it."""
    unreported: bool = False
    """The run that the session was made for has ended, and whoever delegated it has not been told."""
    children: tuple[Child, ...] = ()
    """Those of all its runs that have not ended."""
    delegated: tuple[tuple[int, int], ...] = ()
    """The runs that have had children, and how many: their sessions go with this one."""
    plan_seq: int = 0
    """Sequence of the event that holds the checklist, 0 for none."""
    plan_run: int = 0
    """The run that wrote it."""
    first_author: str = ""
    """Who said the first message."""
    several_since: int = 0
    """Sequence of the first message of a second author, 0 while there is none."""
    unshown_since: int = 0
    """Sequence of the first notice, or late word of a sub-agent, that the next turn is to show; 0 for none."""
    prompts: tuple[Prompt, ...] = ()
    """The newest call of each of the models that were called last."""
    crowded: int = 0
    """Sequence of the end of the turn that left too little room for the next one, 0 since that was seen to."""
    compacted: Compacted | None = None
    runs: tuple[Run, ...] = ()
    """The runs that have not ended, in the order of their turns: by number, but that one that interrupts another comes
    right behind that, and what a run leaves over is first, or right behind what interrupted it."""
    last_run: int = 0
    last_queue: str = "default"
    """The queue of the run that was requested last: its runners look after the session."""
    last_ended: Ended | None = None
    deleted: Deleted | None = None
    turn_blocks: Turns = Turns()
    """So that history can start reading where it needs to."""
    receipts: Recent[Receipt] = Recent(REMEMBERED)
    messages: Recent[int] = Recent(REMEMBERED)
    """The run that each message was routed to, 0 for none; `WITHDRAWN` of one that was withdrawn."""
    closed: Recent[Closed] = Recent(REMEMBERED)
    """The requests that are not open any more, by id."""
    opening: tuple[str, Receipt] | None = None

    @property
    def exists(self) -> bool:
        """Whether there is one, for whoever asks: a deleted one is not there."""
        return self.seq > 0 and self.deleted is None

    @property
    def agent_name(self) -> str:
        return self.agent or DEFAULT_AGENT

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The runs that were started and have ended, in the order of their ends."""
        return tuple(self.turn_blocks)

    def before_end(self, n: int) -> int:
        """The sequence of an event before the one that ended run `n`, 0 if none is known: the run's first, or that of
        one that was requested before it."""
        nearest = 0
        for turn in reversed(self.turn_blocks):
            if turn.run == n:
                return turn.seq
            if turn.run < n:
                nearest = max(nearest, turn.seq)
        return nearest

    def prompt(self, model: str) -> Prompt | None:
        """The newest call of this model, if it is one of those that were called last."""
        return next((prompt for prompt in self.prompts if prompt.model == model), None)

    def borders(self) -> Iterator[Turn]:
        """The turns, the newest first, that are over for good at their end: no turn that ended later, or has not ended,
        and nothing that waits to be shown, is older."""
        first = min([*(run.since for run in self.runs), self.unshown_since or self.seq + 1])
        for turn in reversed(self.turn_blocks):
            if turn.end < first:
                yield turn
            first = min(first, turn.seq)

    def run(self, n: int) -> Run | None:
        """The run of this number if it has not ended."""
        for run in self.runs:
            if run.n == n:
                return run
        return None

    def child(self, run: int, k: int) -> Child | None:
        """The `k`th child of this run, if it has not ended."""
        return next((child for child in self.children if (child.run, child.k) == (run, k)), None)

    def receipt(self, key: str | None) -> Receipt | None:
        if key is None:
            return None
        if self.opening and self.opening[0] == key:
            return self.opening[1]
        return self.receipts.get(key)

    @property
    def holder(self) -> Run | None:
        """The run that holds the turn: it has begun, has not ended, and is not parked. The first, where several may."""
        return next((run for run in self.runs if run.taken and not run.parked), None)

    @property
    def live(self) -> tuple[Run, ...]:
        """The runs that keep the session busy: all that have not ended but those that wait for their children alone."""
        return tuple([run for run in self.runs if not (run.parked and run.status == "waiting")])

    @property
    def front(self) -> Run | None:
        """The run that holds the turn; where none does, the live one that is about to take it."""
        live = self.live
        return self.holder or next((run for run in live if run.parked), live[0] if live else None)

    def place_of_leftover(self, n: int) -> int:
        """Where in `runs` belongs what run `n` leaves over: the newest word counts first."""
        return max([place for place, run in enumerate(self.runs, 1) if run.interrupts == n], default=0)

    def waits_with(self, message_id: str) -> Run | None:
        """The run for which this message waits, if no run has taken it."""
        for run in self.runs:
            if message_id in run.steering or message_id in run.untaken:
                return run
        return None

    @property
    def waiting(self) -> int:
        """How many messages no run has taken, and how many actions have not begun."""
        acts = sum([run.trigger == "action" and not run.taken for run in self.runs])
        return acts + sum([len(run.steering) + len(run.untaken) for run in self.runs])

    @property
    def last_end(self) -> RunStatus | None:
        """Status of the run that ended last."""
        return self.last_ended.status if self.last_ended else None

    @property
    def startable(self) -> tuple[Run, ...]:
        """The runs that may start now: those that go on, those that wait for nobody, and the first in line once nobody
        holds the turn."""
        held = any(run.taken and run.in_line and not run.parked for run in self.runs)
        return tuple(
            [
                run
                for place, run in enumerate(self.runs)
                if run.status == "queued"
                and not run.cancel
                and (not run.in_line or (run.taken and not run.parked) or not (held or self._is_behind(place)))
            ]
        )

    def _is_behind(self, place: int) -> bool:
        """Whether another run comes before the one at this place. What was parked goes before everything in line that
        has not begun; one that still waits for its children is passed by what may start beside it."""
        run, before = self.runs[place], self.runs[:place]
        if run.parked:
            return False
        parked = all(other.parked and other.status == "waiting" for other in before)
        if before and not (parked and run.policy.on_message_parked == "interleave"):
            return True
        return any(other.parked and other.in_line and other.status == "queued" for other in self.runs)


def clock_stands(run: Run, asked: Iterable[Request | Ask]) -> bool:
    """Whether the run's time stands while it waits for this: a person is asked, and the policy says so."""
    return (
        run.policy.clock == "running" and run.deadline is not None and any(request.kind != "child" for request in asked)
    )


def said(answer: object, approved: bool | None) -> str:
    """What tells one answer from another."""
    return digest(msgspec.json.encode([answer, approved], order="sorted"))


def request_id(session: Session, run: int, k: int) -> str:
    return f"{session.key.run(run)}.q{k}"


def call_digest(call: ToolCall) -> str:
    """What tells one call from another: its tool, and its arguments whatever their order and spacing. What has very
    many levels, or may have, is taken as it was written: how deep a reader comes is not the same everywhere."""
    text = call.arguments or "{}"
    arguments = text.encode(errors="replace")
    if text.count("{") + text.count("[") <= BRACKETS:
        try:
            arguments = msgspec.json.encode(msgspec.json.decode(text), order="sorted")
        except msgspec.MsgspecError:
            pass  # no JSON: as it is
    return digest(call.name.encode(errors="replace") + b"\x00" + arguments)[:16]
