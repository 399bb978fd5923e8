"""From events to what the model sees. One builder: `build(events, run)` is a pure function of the events.

A turn's messages stand where the run that took them started, whatever came between; each tool result stands directly
behind the reply that asked for it, and a call that has none yet shows a placeholder that is never stored. What nobody
took, was withdrawn, or was cancelled before it started is not there. Reasoning and errors never appear. A turn that
failed or was cancelled keeps what was said and done.
"""

from collections.abc import Iterable

import msgspec

from turnstream.session.events import (
    Blob,
    MessagePosted,
    ModelReplied,
    Recorded,
    RunEnded,
    RunStarted,
    ToolCall,
    ToolReturned,
)

RESULT_MAX = 8 * 1024
"""Bytes of UTF-8 of a tool result that the model sees; the rest is cut with a notice."""
RUNNING = '{"status":"running"}'
"""What a call shows that has no result yet."""
INTERRUPTED = "interrupted: there is no result"
"""What a call shows whose turn ended without its result."""


class UserMessage(msgspec.Struct, frozen=True, tag="user"):
    text: str


class AssistantMessage(msgspec.Struct, frozen=True, tag="assistant"):
    text: str
    tool_calls: tuple[ToolCall, ...] = ()


class ToolMessage(msgspec.Struct, frozen=True, tag="tool"):
    """The result of the call `call_id` of the assistant message before it."""

    call_id: str
    name: str
    text: str
    is_error: bool = False


Message = UserMessage | AssistantMessage | ToolMessage


class _Turn:
    def __init__(self) -> None:
        self.prompt: list[UserMessage] = []
        self.replies: list[tuple[ModelReplied, dict[str, ToolReturned]]] = []
        """Each reply with the results of its calls, by id: two replies may use the same id."""
        self.end: RunEnded | None = None

    def take(self, returned: ToolReturned) -> None:
        """Gives the result to the newest reply that asked for it and has none; a second result is not heard."""
        for reply, results in reversed(self.replies):
            if returned.call_id not in results and any(call.id == returned.call_id for call in reply.tool_calls):
                results[returned.call_id] = returned
                return


def build(events: Iterable[Recorded], run: int | None = None) -> tuple[Message, ...]:
    """What the model sees of these events, oldest first. With `run`, that run's turn is last: its prompt and its steps
    so far, whatever other runs have started since."""
    said: dict[str, MessagePosted] = {}
    turns: dict[int, _Turn] = {}
    for recorded in events:
        match recorded.event.data:
            case MessagePosted() as posted:
                said[posted.message_id] = posted
            case RunStarted() as started:
                turn = turns.setdefault(started.run, _Turn())
                turn.prompt += [UserMessage(text_of(said[name])) for name in started.message_ids if name in said]
            case ModelReplied() as replied if replied.run in turns:
                turns[replied.run].replies.append((replied, {}))
            case ToolReturned() as returned if returned.run in turns:
                turns[returned.run].take(returned)
            case RunEnded() as ended if ended.run in turns and turns[ended.run].end is None:
                turns[ended.run].end = ended
            case _:
                pass
    if run is not None and run in turns:
        turns[run] = turns.pop(run)
    return tuple(message for turn in turns.values() for message in _messages(turn))


def text_of(posted: MessagePosted) -> str:
    return "\n".join(part.text for part in posted.content)


def _messages(turn: _Turn) -> Iterable[Message]:
    yield from turn.prompt
    for reply, results in turn.replies:
        yield AssistantMessage(reply.content, reply.tool_calls)
        for call in reply.tool_calls:
            yield _result(call, results.get(call.id), ended=turn.end is not None)
    if turn.end and turn.end.content:
        yield AssistantMessage(_whole(turn.end.content, turn.end.blob))


def _result(call: ToolCall, returned: ToolReturned | None, *, ended: bool) -> ToolMessage:
    if returned is None:
        return ToolMessage(call.id, call.name, INTERRUPTED if ended else RUNNING, ended)
    text = returned.output if returned.status == "ok" else f"{returned.status}: {returned.error}"
    return ToolMessage(call.id, call.name, _whole(cut(text, RESULT_MAX), returned.blob), returned.status != "ok")


def _whole(head: str, blob: Blob | None) -> str:
    return f"{head}\n[cut: the whole has {blob.size} bytes]" if blob else head


def cut(text: str, limit: int) -> str:
    """The first `limit` bytes of UTF-8 at most, cut between characters, and behind them a notice of what is missing."""
    if len(text) * 4 <= limit:
        return text
    data = text.encode()
    if len(data) <= limit:
        return text
    head = data[:limit].decode(errors="ignore")
    return f"{head}\n[cut: {len(data) - len(head.encode())} of {len(data)} bytes left out]"
