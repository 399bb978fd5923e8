"""Forks: a session that begins with what another one has up to an event, as events of its own.

A log is only ever added to, so what it has up to an event never changes, whoever writes to it meanwhile. The fork's
first event says what it is of; then follow the other's events, each as it is there but for what names the session
(`copy_of`); then the runs that had not ended by then are ended, and one event says that the fork is whole. What was
going on in the other session stays that one's affair: its sub-agents are not called off, nobody is told, nothing falls
due, and no idempotency key of it is known here.

Pure. Which events there are, and where what is too large for one lies, is the runner's affair.
"""

from bisect import bisect_left

import msgspec

from turnstream.ids import SessionKey, derive, parse_request_id
from turnstream.session.commands import CloseFork, CopyEvent, ForkSession, Origin
from turnstream.session.decision import DISCONNECTED, Decision, ending, event_of
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    Blob,
    ChildEnded,
    Copied,
    Fact,
    HistoryCompacted,
    MessagePosted,
    ModelReplied,
    Recorded,
    RequestAnswered,
    RequestExpired,
    RunEnded,
    RunWaiting,
    SessionDeleted,
    SessionErased,
    SessionForked,
    SessionOpened,
    ToolReturned,
    Unknown,
    Window,
)
from turnstream.session.state import Session

REASON = "forked"
"""Why a run is cancelled that had not ended where its session was forked."""


def not_whole(session: Session) -> Rejected:
    """Of a fork that is not whole."""
    forked_from, copying = session.forked_from, session.copying
    assert forked_from is not None
    assert copying is not None
    of = f"session {session.key.session} is a fork of {forked_from.session} that is not whole"
    return Rejected("session_copying", f"{of}: {copying.events} events are copied; ask again in a moment")


def fork(command: ForkSession, session: Session) -> Decision:
    if session.exists:
        raise Rejected("already_exists", f"a session {session.key.session} is there already", field="id")
    opens = command.opens
    opened = SessionOpened(
        title=opens.title, metadata=opens.metadata, policy=opens.policy, forked_from=command.forked_from
    )
    return Decision(event_of(command, session, opened), wakes=(command.forked_from.queue,))


def copy(command: CopyEvent, session: Session) -> Decision | None:
    """Each event once, in the order in which they are there."""
    copied, forked_from = session.copying, session.forked_from
    if copied is None or forked_from is None or command.copied.seq <= copied.seq:
        return None
    seq, of = command.copied.seq, command.copied.session
    if command.behind != copied.seq or seq > forked_from.through or of != forked_from.session:
        wanted = f"what follows {copied.seq} in {forked_from.session}, up to {forked_from.through}"
        raise Rejected("invalid", f"event {seq} of {of} is not {wanted}", field="copied")
    if isinstance(command.data, SessionDeleted | SessionErased):
        raise Rejected("invalid", "a deletion is not copied", field="data")
    event = msgspec.structs.replace(event_of(command, session, command.data), copied=command.copied)
    return Decision(event)


def close(command: CloseFork, session: Session) -> Decision | None:
    copied, forked_from = session.copying, session.forked_from
    if copied is None or forked_from is None:
        return None
    if copied.seq != forked_from.through:
        raise not_whole(session)
    if command.run:
        run = session.run(command.run)
        if run is None:
            return None
        model = run.spec.model if run.taken else ""
        ended = RunEnded(run=run.n, attempt=run.attempt, status="cancelled", reason=REASON, model=model)
        if run.disconnected:  # it was about to end like this
            ended = msgspec.structs.replace(ended, status="failed", error=DISCONNECTED)
        return Decision(event_of(command, session, ending(session, run, ended)))
    if session.runs:
        raise not_whole(session)
    # Whoever looks after the session from here on may be another than who copied it.
    wakes = () if session.last_queue == forked_from.queue else (session.last_queue,)
    return Decision(event_of(command, session, SessionForked(events=copied.events)), wakes=wakes)


class Places:
    """Where in a fork the events are that were copied into it. To be told of each, in their order."""

    def __init__(self) -> None:
        self._there: list[int] = []
        self._here: list[int] = []

    @property
    def last(self) -> int:
        """The sequence in the fork of the last one, 0 for none."""
        return self._here[-1] if self._here else 0

    def add(self, there: int, here: int) -> None:
        self._there.append(there)
        self._here.append(here)

    def of(self, seq: int) -> int:
        """The sequence in the fork of the event that has this one in its source, else of the first behind it; 0, which
        is none, stays 0."""
        place = bisect_left(self._there, seq)
        if not seq or not self._here:
            return 0
        return self._here[place] if place < len(self._here) else self.last + 1


def copy_of(recorded: Recorded, source: SessionKey, key: SessionKey, places: Places) -> CopyEvent:
    """The event of `source` as one of its fork `key`, which has all the events before it at these places. Its blobs are
    the fork's own (`place_of`)."""
    event = recorded.event
    origin = Origin(
        id=derive(str(key), "copy of", event.id),
        actor=event.actor,
        time=event.time,
        cause=event.cause,
        correlation=event.correlation,
        traceparent=event.traceparent,
    )
    copied = Copied(source.session, recorded.seq, recorded.time)
    return CopyEvent(origin=origin, data=_of(event.data, source, key, places), copied=copied, behind=recorded.previous)


def blobs_of(data: Fact | Unknown) -> tuple[Blob, ...]:
    """What an event leaves in the object store."""
    match data:
        case ModelReplied() | ToolReturned() | ChildEnded() | RunEnded():
            return (data.blob,) if data.blob else ()
        case MessagePosted():
            return tuple([Blob(name=one.blob, size=one.size, sha256=one.sha256) for one in data.attachments])
        case _:
            return ()


def place_of(sha256: str) -> str:
    """The name, within a fork, of what is copied for it: what has the same bytes lies there once."""
    return f"forked/{sha256}"


def _of(data: Fact | Unknown, source: SessionKey, key: SessionKey, places: Places) -> Fact | Unknown:
    """The data with what names the session. Sessions of sub-agents keep their names: they are the other's, and it is
    there that they did what is told here."""
    replace = msgspec.structs.replace
    match data:
        case SessionOpened():  # a session of its own, whatever the other one was opened for
            return replace(data, parent=None, one_shot=False)
        case MessagePosted(answers=answers, opens=opens):
            if answers:
                requests = tuple([replace(one, request=_name(one.request, source, key)) for one in answers.requests])
                answers = replace(answers, requests=requests)
            opens = opens and replace(opens, parent=None, one_shot=False)
            attachments = tuple([replace(one, blob=f"{key}/{place_of(one.sha256)}") for one in data.attachments])
            return replace(data, answers=answers, opens=opens, attachments=attachments)
        case RunWaiting():
            return replace(
                data, requests=tuple([replace(ask, request=_name(ask.request, source, key)) for ask in data.requests])
            )
        case RequestAnswered() | RequestExpired():
            return replace(data, request=_name(data.request, source, key))
        case HistoryCompacted():
            return replace(data, through=places.of(data.through))
        case ModelReplied() | RunEnded():
            return replace(data, blob=_placed(data.blob, key), window=_shown(data.window, places))
        case ToolReturned() | ChildEnded():
            return replace(data, blob=_placed(data.blob, key))
        case _:
            return data


def _shown(window: Window | None, places: Places) -> Window | None:
    """What a model call was shown, by sequences of the fork."""
    if window is None:
        return None
    return msgspec.structs.replace(window, since=places.of(window.since), inner=places.of(window.inner))


def _placed(blob: Blob | None, key: SessionKey) -> Blob | None:
    return blob and msgspec.structs.replace(blob, name=f"{key}/{place_of(blob.sha256)}")


def _name(request: str, source: SessionKey, key: SessionKey) -> str:
    """The id of the same request of the same run here."""
    parsed = parse_request_id(request)
    if parsed is None or parsed[0] != source.session:
        return request
    _, n, k = parsed
    return f"{key.run(n)}.q{k}"
