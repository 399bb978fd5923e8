"""What the views keep of a session, and how events change it.

Its runs are not folded here: which there are and how they stand is said by the session as `turnstream.session` folds
it, so that both can never differ.

`status`: `busy` while a run is queued or running, or it is a fork that is not whole, else `waiting` while a question or
an approval is open, else `error` if the run that ended last failed, else `idle`; so one whose run waits for its
children alone is not busy.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from turnstream.ids import SessionKey
from turnstream.session.events import (
    NO_POLICY,
    DeleteMode,
    ForkedFrom,
    MessagePosted,
    OnMessageData,
    Opens,
    Parent,
    PlanChanged,
    PlanItem,
    PolicyData,
    Recorded,
    RunStatus,
    SessionDeleted,
    SessionOpened,
    SessionUpdated,
    Spec,
    Starts,
    TitleSource,
)
from turnstream.session.policy import resolve
from turnstream.session.recent import Recent
from turnstream.session.state import Child, Copying, Deleted, Ended, Run, Session

Status = Literal["busy", "waiting", "error", "idle"]
TITLE = 64
"""Characters of a derived title."""


class Live(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run that has not ended, as far as the session has to know it. `in_line`: it waits until those before it have
    ended. `to_end`: nothing but its end may follow. `requests`: numbers of those that a person can answer.
    `interrupts`: the run that it came to interrupt, 0 for none. `parked`: it waits for its children alone, or goes on
    with what they have come to. `passes`: it has not begun, and may go before others that wait like that."""

    n: int
    status: RunStatus
    attempt: int
    in_line: bool
    to_end: bool
    message_ids: tuple[str, ...]
    steering: tuple[str, ...]
    requests: tuple[int, ...]
    interrupts: int = 0
    parked: bool = False
    passes: bool = False


class OpenChild(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The `k`th child of run `run`, which has not ended: what its step will tell. `since`: when it was intended."""

    run: int
    k: int
    call_id: str
    session: str
    agent: str
    attempt: int
    step: int
    since: int
    path: str = ""
    """Of the node that delegates."""


class Gone(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Since `at`, in milliseconds. `queue`: whose runners remove what is left."""

    at: int
    mode: DeleteMode
    queue: str
    last_run: int


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What the fold keeps of a session. `seq` 0: not folded yet."""

    seq: int = 0
    created_at: int = 0
    updated_at: int = 0
    title: str = ""
    title_source: TitleSource = "derived"
    agent: str | None = None
    metadata: dict[str, object] = {}
    policy: PolicyData = NO_POLICY
    one_shot: bool = False
    parent: Parent | None = None
    forked_from: ForkedFrom | None = None
    copying: Copying | None = None
    """How far it is, if it is a fork that is not whole."""
    children: tuple[Child, ...] = ()
    """Those that have not ended."""
    open_children: tuple[OpenChild, ...] = ()
    """The same, as their steps tell of them."""
    unreported: bool = False
    """Whoever delegated it has not been told how it came out."""
    queue: str = "default"
    """Whose runners look after it."""
    plan: tuple[PlanItem, ...] = ()
    plan_seq: int = 0
    """The event that holds it."""
    unshown_since: int = 0
    """The first notice that no turn has shown, 0 for none: what begins next reaches back to it."""
    live: tuple[Live, ...] = ()
    startable: tuple[int, ...] = ()
    """Those of them that may start now, and are not to end instead."""
    last_run: int = 0
    last_end: RunStatus | None = None
    last_author: str = ""
    """Whose message the run was for that ended last: who tries it again takes its place."""
    last_since: int = 0
    """Sequence from which on what that run was for was said."""
    deleted: Gone | None = None

    @property
    def listed(self) -> bool:
        return not self.one_shot and self.deleted is None

    @property
    def status(self) -> Status:
        if self.copying or any(run.status != "waiting" for run in self.live):
            return "busy"
        if any(run.requests for run in self.live):
            return "waiting"
        return "error" if self.last_end == "failed" else "idle"

    @property
    def unsettled(self) -> bool:
        """Whether something is left to do between it and others: it tells whoever delegated it, or ends children, or
        copies what it is a fork of."""
        return self.copying is not None or self.unreported or any(child.cancel for child in self.children)

    @property
    def keeper(self) -> str:
        """The queue whose runners do that."""
        return self.forked_from.queue if self.copying and self.forked_from else self.queue

    @property
    def going_on(self) -> tuple[Live, ...]:
        """The runs that have not ended; in a fork that is not whole they do not go on."""
        return () if self.copying else self.live

    def active(self) -> Live | None:
        first = self.going_on[0] if self.going_on else None
        begun = next((run for run in self.going_on if run.attempt), first)
        return next((run for run in self.going_on if run.status == "running"), begun)

    def wants_runner(self, n: int) -> bool:
        """Whether a runner has something to do for this run: it is being carried out, may start, or is to end."""
        run = next((run for run in self.going_on if run.n == n), None)
        if run is None:
            return False
        return run.status == "running" or n in self.startable or (run.status == "queued" and run.to_end)


NEW = Row()


def fold(row: Row, recorded: Recorded, before: Session) -> Row:
    """The session's row after this event, but for its runs: those are said by `with_runs`. `before`: the session as it
    was."""
    data = recorded.event.data
    if isinstance(data, SessionDeleted):
        gone = Gone(at=recorded.time, mode=data.mode, queue=data.queue, last_run=data.last_run)
        return Row(seq=recorded.seq, created_at=recorded.time, updated_at=recorded.time, deleted=gone)
    changes: dict[str, object] = {}
    match data:
        case MessagePosted():
            changes = _posted(row, data)
        case SessionOpened():
            changes = _opened(data)
        case SessionUpdated():
            changes = _updated(data)
        case PlanChanged():
            changes = {"plan": data.items}
        case _:
            pass
    if before.copying and before.forked_from:  # what is copied does not change what it was given
        for name in before.forked_from.given:
            changes.pop(name, None)
        if "title" in before.forked_from.given:
            changes.pop("title_source", None)
    changes["seq"] = recorded.seq
    # A new leader's clock may be behind the old one's: a session never moves backwards for that.
    if recorded.time > row.updated_at:
        changes["updated_at"] = recorded.time
    if not row.created_at:
        changes["created_at"] = recorded.time
    return msgspec.structs.replace(row, **changes)


def with_children(row: Row, before: Session, after: Session, recorded: Recorded) -> Row:
    """The row after an event that has changed which children have not ended."""
    there = {(child.run, child.k) for child in after.children}
    kept = [child for child in row.open_children if (child.run, child.k) in there]
    known = {(child.run, child.k) for child in before.children}
    for child in after.children:
        run = after.run(child.run)
        if run and (child.run, child.k) not in known:
            call = run.call(child.call_id)
            path = call.path if call else ""
            step = run.visit(path).steps if path else run.steps
            name, agent = child.session, child.spec.agent
            kept.append(OpenChild(run.n, child.k, child.call_id, name, agent, run.attempt, step, recorded.time, path))
    return msgspec.structs.replace(row, open_children=tuple(kept))


def with_runs(row: Row, session: Session, known: Mapping[int, tuple[Run, Live]]) -> Row:
    """The row with the runs of the folded session. `known`: runs as they were, for those that have not changed."""
    live: list[Live] = []
    for run in session.runs:
        before, as_before = known.get(run.n, (None, None))
        live.append(as_before if as_before and before is run else _live(run))
    last = session.last_ended
    return msgspec.structs.replace(
        row,
        live=tuple(live),
        forked_from=session.forked_from,
        copying=session.copying,
        startable=tuple([run.n for run in session.startable if not run.is_to_end]),
        plan_seq=session.plan_seq,
        unshown_since=session.unshown_since,
        children=session.children,
        unreported=session.unreported,
        queue=session.last_queue,
        last_run=session.last_run,
        last_end=last.status if last else None,
        last_author=last.author if last else "",
        last_since=last.since if last else 0,
    )


def _live(run: Run) -> Live:
    requests = tuple([request.k for request in run.for_people])
    return Live(
        run.n,
        run.status,
        run.attempt,
        run.in_line,
        run.is_to_end,
        run.message_ids,
        run.steering,
        requests,
        run.interrupts,
        run.parked,
        not run.taken and run.policy.on_message_parked == "interleave",
    )


def _posted(row: Row, data: MessagePosted) -> dict[str, object]:
    changes = _opened(data.opens) if data.opens else {}
    source = changes.get("title_source", row.title_source)
    if source == "derived" and (routing := data.routing) and routing.run == 1 and _derives(routing):
        changes["title"] = _derived(data)
    return changes


def _derives(routing: Starts) -> bool:
    """Whether a run's policy says that the session's title comes from what is said first."""
    return resolve(routing.spec.policy).titles in ("derived", "derived_then_agent")


def _opened(opens: Opens) -> dict[str, object]:
    changes: dict[str, object] = {
        "agent": opens.agent,
        "metadata": opens.metadata,
        "policy": opens.policy,
        "one_shot": opens.one_shot,
        "parent": opens.parent,
    }
    if opens.title:
        changes |= {"title": opens.title.text, "title_source": opens.title.source}
    return changes


def _updated(data: SessionUpdated) -> dict[str, object]:
    changes: dict[str, object] = {}
    if data.title:
        changes |= {"title": data.title.text, "title_source": data.title.source}
    if data.agent is not None:
        changes["agent"] = data.agent
    if data.metadata is not None:
        changes["metadata"] = data.metadata
    if data.policy is not None:
        changes["policy"] = data.policy
    return changes


def _derived(data: MessagePosted) -> str:
    """The first text, its white space made single blanks, cut between characters."""
    for part in data.content:
        if words := part.text[: 16 * TITLE].split():
            return " ".join(words)[:TITLE].rstrip()
    return ""


_UNREAD = Spec(agent="", version="", digest="", model="")
_PASSES = msgspec.structs.replace(_UNREAD, policy=PolicyData(on_message=OnMessageData(parked="interleave")))


def session_of(key: SessionKey, row: Row, live: tuple[Run, ...]) -> Session:
    """The session as its rows keep it: all of it that an event can show in them. `live`: the runs of the row."""
    gone, end = row.deleted, row.last_end
    return Session(
        key=key,
        seq=row.seq,
        opened_at=row.created_at,
        parent=row.parent,
        forked_from=row.forked_from,
        copying=row.copying,
        children=row.children,
        unreported=row.unreported,
        last_queue=row.queue,
        plan_seq=row.plan_seq,
        unshown_since=row.unshown_since,
        runs=live,
        last_run=row.last_run,
        last_ended=Ended(row.last_run, end, _UNREAD, (), row.last_author, row.last_since) if end else None,
        deleted=Deleted(row.seq, gone.at, gone.mode, "") if gone else None,
        receipts=Recent(0),
        messages=Recent(0),
        closed=Recent(0),
    )


def unread(live: Live) -> Run:
    """A run as far as the row of its session knows it: enough for events that are about other runs."""
    return Run(
        n=live.n,
        spec=_PASSES if live.passes else _UNREAD,
        message_ids=live.message_ids,
        author="",
        requested_seq=0,
        requested_at=0,
        interrupts=live.interrupts,
        in_line=live.in_line,
        status=live.status,
        attempt=live.attempt,
        cancel=live.to_end,
        parked=live.parked,
        steering=live.steering,
    )


def about_to_end(n: int, attempt: int) -> Row:
    """A session of which nothing is known but that this run is being carried out."""
    return Row(seq=1, live=(Live(n, "running", attempt, True, False, (), (), ()),), last_run=n)
