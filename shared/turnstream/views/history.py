"""The transcript of a session, for people: what was said, what was answered, what tools gave back.

One item an event at most, numbered by the event's sequence; an item never changes. What was withdrawn, or belongs to a
run that was cancelled before it started, is taken out again. This is not what the model sees: that is built from the
log (`turnstream.session.history`), without reasoning and errors."""

from functools import lru_cache

import msgspec
from sqlalchemy import Table, select

from turnstream.ids import SessionKey, run_id
from turnstream.session.events import (
    Blob,
    EndStatus,
    Error,
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    Part,
    Recorded,
    RunEnded,
    ToolCall,
    ToolReturned,
    ToolStatus,
    Usage,
)
from turnstream.session.state import has_edge
from turnstream.views import runs
from turnstream.views.database import Database, Reader
from turnstream.views.rows import PAGE, Values, documents, page_size


class _Item(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """`time` is the broker's, in milliseconds."""

    seq: int
    time: int


class Message(_Item, frozen=True, kw_only=True, tag="message", gc=False):
    """Something said. `run` is the run that it starts, if any."""

    message_id: str
    author: str
    kind: str = "message"
    content: tuple[Part, ...]
    run: str | None = None


class Reply(_Item, frozen=True, kw_only=True, tag="reply", gc=False):
    """What the agent said in one step; its reasoning apart. The last reply of a run carries the run's end in
    `status`."""

    run: str
    attempt: int
    step: int | None = None
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


class ToolResult(_Item, frozen=True, kw_only=True, tag="tool_result", gc=False):
    """The result of the call `call_id` of the reply before it."""

    run: str
    call_id: str
    name: str
    status: ToolStatus
    output: str = ""
    error: str = ""
    blob: Blob | None = None
    duration: int = 0


Item = Message | Reply | ToolResult


class HistoryPage(msgspec.Struct, frozen=True):
    """Oldest first. `next` is the sequence to go on after; `position` is the sequence that the page reflects."""

    items: tuple[Item, ...]
    next: int | None
    position: int


def posted(recorded: Recorded, data: MessagePosted) -> Message:
    """The item of a message."""
    routing = data.routing
    return Message(
        seq=recorded.seq,
        time=recorded.time,
        message_id=data.message_id,
        author=data.author,
        kind=data.kind,
        content=data.content,
        run=run_id(recorded.event.key.session, routing.run) if routing else None,
    )


def fold(recorded: Recorded, run: runs.Row) -> tuple[int, Item | None] | None:
    """What a fact of a run does to the transcript: the item of this sequence is put, or (None) taken out. `run` is the
    row of the run before the event."""
    if not run.live:
        return None
    data = recorded.event.data
    session = recorded.event.key.session
    seq, time = recorded.seq, recorded.time
    match data:
        case RunEnded() if has_edge(run.status, "run.ended", data.status):
            if data.status == "cancelled" and not run.attempt:
                return run.requested_seq, None
            return seq, _end(recorded, data, session)
        case ModelReplied() if run.attempt == data.attempt:
            return seq, Reply(
                seq=seq,
                time=time,
                run=run_id(session, data.run),
                attempt=data.attempt,
                step=data.step,
                content=data.content,
                reasoning=data.reasoning,
                tool_calls=data.tool_calls,
                model=data.model,
                usage=data.usage,
            )
        case ToolReturned() if run.attempt == data.attempt and (call := run.find(data.call_id)):
            return seq, ToolResult(
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
            )
        case MessageWithdrawn():
            return run.requested_seq, None
        case _:
            return None


def _end(recorded: Recorded, data: RunEnded, session: str) -> Reply:
    return Reply(
        seq=recorded.seq,
        time=recorded.time,
        run=run_id(session, data.run),
        attempt=data.attempt,
        content=data.content,
        reasoning=data.reasoning,
        blob=data.blob,
        model=data.model,
        usage=data.step_usage,
        status=data.status,
        error=data.error,
        reason=data.reason,
        note=data.note,
    )


@lru_cache(maxsize=16)
def table(generation: int) -> Table:
    return documents(f"history_{generation}")


_encoder = msgspec.json.Encoder()
_items = msgspec.json.Decoder(Item)


def values(key: str, item: Item) -> Values:
    return (key, item.seq, _encoder.encode(item).decode())


async def page(db: Database, key: SessionKey, after: int = 0, limit: int = PAGE) -> HistoryPage:
    """At most `limit` items behind the sequence `after`. Raises `ViewsError`."""
    limit = page_size(limit)

    async def work(reader: Reader) -> HistoryPage:
        items = table(reader.generation)
        statement = select(items.c.seq, items.c.body).where(items.c.key == str(key), items.c.seq > after)
        found = await reader.rows(statement.order_by(items.c.seq).limit(limit + 1))
        more = found[limit - 1].seq if len(found) > limit else None
        return HistoryPage(tuple(_items.decode(row.body) for row in found[:limit]), more, reader.position)

    return await db.read(work)
