"""The record of a run that outlives its session: the run's own events, without what was said.

When a session is deleted with `detach`, each of its runs is kept as one message beside the log, on a subject of its
own (`subjects.archive`). What it holds are the events that concern the run, each with its sequence and the broker's
time, in the form in which every event is stored: so the views fold it as they fold the log, it loads for as long as
events do, and views made from zero show the same as those that saw the session live.

Kept is how it went: who was asked when, attempts, steps, tools by name, usage, and the end with everything that it says
(the answer, its reasoning, the error), and the call that delegated it. Gone is what was said before and who said it:
messages, titles, what the model wrote on the way, arguments and results of tools, questions and answers, and the
digests of requests, by which a guess could be checked.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from turnstream.broker.clock import format_time
from turnstream.ids import SessionKey, derive
from turnstream.log import codec
from turnstream.log.base import Unreadable
from turnstream.session.events import (
    Answered,
    Blob,
    ChildEnded,
    ChildStarted,
    Fact,
    HistoryCompacted,
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    Opens,
    PlanChanged,
    Recorded,
    RequestAnswered,
    RunEnded,
    RunReported,
    RunRequested,
    RunStarted,
    RunWaiting,
    SessionDeleted,
    SessionErased,
    SessionForked,
    SessionOpened,
    SessionUpdated,
    ToolReturned,
    Unknown,
)

TYPE: Final = "run.archived"
"""The record's type."""
HEAD_MAX: Final = 1024
"""Bytes that its headers take at most."""


class _Kept(msgspec.Struct, frozen=True):
    seq: int
    previous: int
    storedat: int
    """Broker time in milliseconds."""
    record: msgspec.Raw


class _Data(msgspec.Struct, frozen=True):
    run: int
    events: tuple[_Kept, ...]


class _Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=TYPE):
    """A CloudEvents 1.0 record, as every message of the stream."""

    specversion: str = codec.SPECVERSION
    id: str
    source: str
    time: str
    data: _Data


_encode = msgspec.json.Encoder().encode
_records = msgspec.json.Decoder(_Record)


def split(events: Iterable[Recorded]) -> Mapping[int, Sequence[Recorded]]:
    """The events of each run of a whole session, oldest first, without what was said."""
    runs: defaultdict[int, list[Recorded]] = defaultdict(list)
    routed: dict[str, int] = {}
    live: set[int] = set()
    for recorded in events:
        data = recorded.event.data
        for n in _concerned(data, routed, live):
            runs[n].append(_without_words(recorded, n))
    return runs


def encode(key: SessionKey, run: int, events: Sequence[Recorded], limit: int) -> bytes:
    """The record of a run as bytes. One of more than `limit` keeps only how the run began and ended."""
    record = _encode(_record(key, run, events))
    if len(record) > limit:
        ends = [one for one in events if _begins_or_ends(one.event.data)]
        record = _encode(_record(key, run, ends))
    return record


def decode(payload: bytes, seq: int) -> tuple[int, tuple[Recorded, ...]]:
    """The run of the record at this sequence, and its events. Raises `Unreadable`."""
    try:
        data = _records.decode(payload).data
    except msgspec.MsgspecError as error:
        raise Unreadable(seq, str(error)) from error
    return data.run, tuple(
        [
            codec.decode(bytes(kept.record), seq=kept.seq, previous=kept.previous, time=kept.storedat)
            for kept in data.events
        ]
    )


def blobs(events: Iterable[Recorded]) -> set[str]:
    """The names of the blobs that a run's record refers to."""
    found: set[str] = set()
    for recorded in events:
        blob: Blob | None = getattr(recorded.event.data, "blob", None)
        if blob is not None:
            found.add(blob.name)
    return found


def _begins_or_ends(data: Fact | Unknown) -> bool:
    """Of a run; what steered and answered it meanwhile is neither."""
    match data:
        case MessagePosted():
            return data.routing is not None
        case RunRequested() | RunStarted() | RunEnded() | MessageWithdrawn() | SessionDeleted():
            return True
        case _:
            return False


def _record(key: SessionKey, run: int, events: Sequence[Recorded]) -> _Record:
    kept = tuple([_Kept(one.seq, one.previous, one.time, msgspec.Raw(codec.encode(one.event))) for one in events])
    return _Record(
        id=derive(str(key), run, TYPE, events[-1].seq),
        source=f"/{key.account}/sessions/{key.session}",
        time=format_time(events[-1].time),
        data=_Data(run, kept),
    )


def _concerned(data: Fact | Unknown, routed: dict[str, int], live: set[int]) -> Sequence[int]:
    """The runs that a fact is about. `routed` learns which message belongs to which run, `live` which have not
    ended."""
    match data:
        case SessionOpened() | SessionForked() | SessionUpdated() | SessionErased():
            return ()
        case PlanChanged() | RunReported() | Unknown():
            return ()
        case SessionDeleted():
            return sorted(live)
        case MessagePosted():
            if data.run:
                routed[data.message_id] = data.run
            if data.routing:
                live.add(data.run)
            interrupts = data.queued.interrupts if data.queued else 0
            return [n for n in (data.run, interrupts) if n]
        case MessageWithdrawn():
            live.discard(data.run)
            n = data.run or routed.get(data.message_id, 0)
            return (n,) if n else ()
        case RunEnded():
            live.discard(data.run)
            if left := data.leftover:
                routed.update(dict.fromkeys(left.message_ids, left.run))
                live.add(left.run)
                return (data.run, left.run)
            return (data.run,)
        case RunRequested():
            live.add(data.run)
            return (data.run,)
        case HistoryCompacted():
            return ()
        case _:
            return (data.run,)


def _without_words(recorded: Recorded, run: int) -> Recorded:
    data = _silent(recorded.event.data, run)
    says = isinstance(data, MessagePosted | RequestAnswered | MessageWithdrawn)
    says = says or (isinstance(data, RunRequested) and data.action is not None)
    event = msgspec.structs.replace(
        recorded.event,
        data=data,
        actor="" if says else recorded.event.actor,
        idempotency_key=None,
        body_digest=None,
    )
    return msgspec.structs.replace(recorded, event=event, payload=b"")


def _silent(data: Fact | Unknown, run: int) -> Fact | Unknown:
    replace = msgspec.structs.replace
    match data:
        case MessagePosted():
            answers = data.answers and replace(
                data.answers,
                requests=tuple([Answered(request=one.request, declined=one.declined) for one in data.answers.requests]),
            )
            author = data.author if data.queued and data.queued.interrupts == run else ""  # who cancels it
            parent = data.opens.parent if data.opens else None
            opens = Opens(parent=replace(parent, schema=None)) if parent else None
            return replace(data, author=author, content=(), attachments=(), context="", opens=opens, answers=answers)
        case RunWaiting():
            asks = tuple(
                [replace(ask, prompt="", schema=None, choices=(), digest="", default=None) for ask in data.requests]
            )
            return replace(data, requests=asks)
        case RequestAnswered():
            return replace(data, answer=None, reason="", by="")
        case ModelReplied():
            calls = tuple([replace(call, arguments="") for call in data.tool_calls])
            return replace(data, content="", reasoning="", tool_calls=calls, blob=None)
        case ToolReturned():
            return replace(data, output="", error="", blob=None)
        case ChildEnded():
            return replace(data, output="", blob=None, error=None)
        case ChildStarted():
            return replace(data, brief="")
        case RunRequested() if data.action:
            return replace(data, author="", action=replace(data.action, arguments=""))
        case PlanChanged():
            return replace(data, items=())
        case RunEnded() if data.run != run:
            return replace(data, content="", reasoning="", blob=None, note="", error=None, reason="")
        case _:
            return data
