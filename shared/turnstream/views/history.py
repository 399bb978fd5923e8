"""The transcript of a session, for people: what was said, what was answered, what tools gave back, what was asked, and
what people did by themselves.

One item an event at most, numbered by the event's sequence. Of an item only that changes which is found out later:
which run has taken a message, what was said to a request. What was withdrawn, or belongs to a run that was cancelled
before it started, is taken out again. This is not what the model sees: that is built from the log
(`turnstream.session.history`), without reasoning and errors.

How to read it: a message's turn is `run`; where that has not taken it yet, `taken` is false. A call of a reply has its
result in a `tool_result`, or waits for a request of a `requests` item that is open, or is named by `unfinished` of the
reply that ended the run, or is being carried out. Of a graph, what its nodes come to is there too, where a model, a
tool, a person or another agent had a part in it: each in a `node` item, behind the replies and results of its steps."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec
from sqlalchemy import Table, select

from turnstream.ids import SessionKey, run_id
from turnstream.session.events import (
    Attachment,
    Blob,
    EndStatus,
    Error,
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    NodeFinished,
    Part,
    Recorded,
    Routed,
    RunEnded,
    RunRequested,
    RunStarted,
    RunSteered,
    RunWaiting,
    ToolCall,
    ToolReturned,
    ToolStatus,
    Usage,
)
from turnstream.session.state import Run
from turnstream.views import requests
from turnstream.views.database import Database, Reader
from turnstream.views.requests import RequestView
from turnstream.views.rows import PAGE, Values, documents, page_size
from turnstream.views.run_row import OpenCall, Row


class _Item(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """`time` is the broker's, in milliseconds."""

    seq: int
    time: int


class Message(_Item, frozen=True, kw_only=True, tag="message", gc=False):
    """Something said, and whose turn it is in: `run` takes it, or has taken it if `taken`; without a run nobody does.
    `routed` is how it came there: one that steered a run too late is queued for the next."""

    message_id: str
    author: str
    kind: str = "message"
    content: tuple[Part, ...]
    attachments: tuple[Attachment, ...] = ()
    routed: Routed = "none"
    run: str | None = None
    taken: bool = False


class Unfinished(msgspec.Struct, frozen=True, kw_only=True):
    """A call that has no result and gets none."""

    call_id: str
    name: str
    status: ToolStatus = "interrupted"


class Reply(_Item, frozen=True, kw_only=True, tag="reply", gc=False):
    """What the agent said in one step; its reasoning apart. The last reply of a run carries the run's end in `status`,
    and the calls that ended with it as interrupted in `unfinished`. `retry_of`: the turn that this one tries again."""

    run: str
    attempt: int
    step: int | None = None
    path: str = ""
    """Of the node of a graph whose model said it."""
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    blob: Blob | None = None
    model: str = ""
    usage: Usage = Usage()
    status: EndStatus | None = None
    error: Error | None = None
    reason: str = ""
    note: str = ""
    unfinished: tuple[Unfinished, ...] = ()
    retry_of: str | None = None


class Action(_Item, frozen=True, kw_only=True, tag="action", gc=False):
    """A tool that a person called by himself. Its result is the `tool_result` of this call; the reply that ends the run
    says nothing more."""

    run: str
    author: str
    call_id: str
    name: str
    arguments: str = ""


class ToolResult(_Item, frozen=True, kw_only=True, tag="tool_result", gc=False):
    """The result of the call `call_id` of the reply before it, or of the action."""

    run: str
    call_id: str
    name: str
    status: ToolStatus
    output: str = ""
    error: str = ""
    blob: Blob | None = None
    duration: int = 0
    path: str = ""
    """Of the node of a graph whose model called it."""


class NodeEnd(_Item, frozen=True, kw_only=True, tag="node", gc=False):
    """What a node of a graph has come to, and by which port: what its model said last, or what came of the one call
    that it is (`name`, `arguments`). `json`: `output` is a JSON value. By the port `err` it gives `error`."""

    run: str
    attempt: int
    node: str
    path: str
    port: str
    name: str = ""
    arguments: str = ""
    output: str = ""
    json: bool = False
    error: str = ""
    note: str = ""
    reasoning: str = ""
    blob: Blob | None = None
    model: str = ""
    usage: Usage = Usage()
    duration: int = 0


class Requests(_Item, frozen=True, kw_only=True, tag="requests", gc=False):
    """What a run asked before it went on, and what was said to that until now."""

    run: str
    requests: tuple[RequestView, ...]


class Asked(_Item, frozen=True, kw_only=True, tag="asked", gc=False):
    """`Requests` as it is stored: the numbers of the requests, which the view of requests has."""

    n: int
    requests: tuple[int, ...]


Item = Message | Reply | Action | ToolResult | NodeEnd | Requests
Stored = Message | Reply | Action | ToolResult | NodeEnd | Asked


class HistoryPage(msgspec.Struct, frozen=True):
    """Oldest first. `next` is the sequence to go on after; `position` is the sequence that the page reflects."""

    items: tuple[Item, ...]
    next: int | None
    position: int


# --- what is stored -----------------------------------------------------------------------------------------------


def posted(recorded: Recorded, data: MessagePosted) -> Message:
    """The item of a message."""
    return Message(
        seq=recorded.seq,
        time=recorded.time,
        message_id=data.message_id,
        author=data.author,
        kind=data.kind,
        content=data.content,
        attachments=data.attachments,
        routed=data.routed,
        run=run_id(recorded.event.key.session, data.run) if data.run else None,
    )


def acted(recorded: Recorded, data: RunRequested, action: ToolCall, author: str) -> Action:
    """The item of an action."""
    return Action(
        seq=recorded.seq,
        time=recorded.time,
        run=run_id(recorded.event.key.session, data.run),
        author=author,
        call_id=action.id,
        name=action.name,
        arguments=action.arguments,
    )


def fold(recorded: Recorded, row: Row, run: Run | None) -> Stored | None:
    """The item of a fact that has changed a run, if it has one: `row` is the run before it, `run` how it stands now."""
    data = recorded.event.data
    session = recorded.event.key.session
    seq, time = recorded.seq, recorded.time
    match data:
        case RunEnded() if run is None:
            cancelled_unstarted = data.status == "cancelled" and not row.attempt
            return None if cancelled_unstarted else _end(recorded, data, row)
        case ModelReplied():
            return Reply(
                seq=seq,
                time=time,
                run=run_id(session, data.run),
                attempt=data.attempt,
                step=data.step,
                path=data.path,
                content=data.content,
                reasoning=data.reasoning,
                tool_calls=data.tool_calls,
                blob=data.blob,
                model=data.model,
                usage=data.usage,
            )
        case ToolReturned() if call := row.find(data.call_id):
            return ToolResult(
                seq=seq,
                time=time,
                run=run_id(session, data.run),
                call_id=data.call_id,
                name=call.name,
                status=data.status,
                output=data.output,
                error=data.error,
                blob=data.blob,
                duration=data.duration,
                path=call.path,
            )
        case NodeFinished():
            return _finished(recorded, data, row.find(data.path))
        case RunWaiting() if run is not None and run.for_people:
            return Asked(seq=seq, time=time, n=run.n, requests=tuple([request.k for request in run.for_people]))
        case _:
            return None


def _finished(recorded: Recorded, data: NodeFinished, call: OpenCall | None) -> NodeEnd | None:
    """`call`: the one that the node is. What only leads from one node to another is no item."""
    if not (call or data.model or data.error):
        return None
    return NodeEnd(
        seq=recorded.seq,
        time=recorded.time,
        run=run_id(recorded.event.key.session, data.run),
        attempt=data.attempt,
        node=data.node,
        path=data.path,
        port=data.port,
        name=call.name if call else "",
        arguments=call.arguments if call else "",
        output=data.output,
        json=data.json,
        error=data.error,
        note=data.note,
        reasoning=data.reasoning,
        blob=data.blob,
        model=data.model,
        usage=data.usage,
        duration=data.duration,
    )


def _end(recorded: Recorded, data: RunEnded, row: Row) -> Reply:
    session = recorded.event.key.session
    shown = row.trigger == "action"  # as the tool's result
    return Reply(
        seq=recorded.seq,
        time=recorded.time,
        run=run_id(session, data.run),
        attempt=data.attempt,
        content="" if shown else data.content,
        reasoning=data.reasoning,
        blob=None if shown else data.blob,
        model=data.model,
        usage=data.step_usage,
        status=data.status,
        error=data.error,
        reason=data.reason,
        note=data.note,
        unfinished=tuple([Unfinished(call_id=call.id, name=call.name) for call in row.open_calls]),
        retry_of=run_id(session, row.retry_of) if row.retry_of else None,
    )


def gone(recorded: Recorded, row: Row, run: Run | None) -> Iterator[int]:
    """The items that a fact takes out again: `row` is the run before it, `run` how it stands now."""
    data = recorded.event.data
    took_none = not row.attempt and row.trigger != "retry"  # a turn that is tried again had taken them before
    match data:
        case MessageWithdrawn() if data.message_id in row.said and row.trigger != "retry":
            yield row.said[data.message_id]
        case RunEnded(status="cancelled") if run is None and took_none:
            yield from (row.said[name] for name in row.message_ids if name in row.said)
            if row.trigger == "action":
                yield row.requested_seq
        case RunEnded(status="completed") if row.folded and row.folded.answered and row.trigger != "action":
            yield row.folded.reply_seq  # it turned out to be the answer, which the end shows
        case _:
            pass


def told(recorded: Recorded) -> tuple[str, ...]:
    """The messages of which this event says whose they are."""
    data = recorded.event.data
    match data:
        case RunStarted() | RunSteered():
            return data.message_ids
        case RunEnded(leftover=leftover) if leftover:
            return leftover.message_ids
        case _:
            return ()


def moved(message: Message, recorded: Recorded) -> Message:
    """A message that an event told of."""
    data, session = recorded.event.data, recorded.event.key.session
    match data:
        case RunStarted() | RunSteered():
            return msgspec.structs.replace(message, run=run_id(session, data.run), taken=True)
        case RunEnded(leftover=leftover) if leftover:
            return msgspec.structs.replace(message, run=run_id(session, leftover.run), routed="queued")
        case _:
            return message


# --- the table ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def table(generation: int) -> Table:
    return documents(f"history_{generation}")


_encoder = msgspec.json.Encoder()
_items = msgspec.json.Decoder(Stored)


def values(key: str, item: Stored) -> Values:
    return (key, item.seq, _encoder.encode(item).decode())


def parse(body: str) -> Stored:
    return _items.decode(body)


# --- how it is asked ----------------------------------------------------------------------------------------------


async def page(db: Database, key: SessionKey, after: int = 0, limit: int = PAGE) -> HistoryPage:
    """At most `limit` items behind the sequence `after`. Raises `ViewsError`."""
    limit = page_size(limit)

    async def work(reader: Reader) -> HistoryPage:
        items = table(reader.generation)
        statement = select(items.c.seq, items.c.body).where(items.c.key == str(key), items.c.seq > after)
        found = await reader.rows(statement.order_by(items.c.seq).limit(limit + 1))
        more = found[limit - 1].seq if len(found) > limit else None
        stored = [parse(row.body) for row in found[:limit]]
        return HistoryPage(await _shown(reader, key, stored), more, reader.position)

    return await db.read(work)


async def _shown(reader: Reader, key: SessionKey, stored: Sequence[Stored]) -> tuple[Item, ...]:
    """The items with the requests as they are now."""
    wanted = [requests.key_of(key, item.n, k) for item in stored if isinstance(item, Asked) for k in item.requests]
    bodies = await reader.bodies(requests.table(reader.generation), wanted)
    return tuple([_requests(key, item, bodies) if isinstance(item, Asked) else item for item in stored])


def _requests(key: SessionKey, item: Asked, bodies: dict[str, str]) -> Requests:
    found = [bodies.get(requests.key_of(key, item.n, k)) for k in item.requests]
    return Requests(
        seq=item.seq,
        time=item.time,
        run=key.run(item.n),
        requests=tuple([requests.view(key.session, requests.parse(body)) for body in found if body]),
    )
