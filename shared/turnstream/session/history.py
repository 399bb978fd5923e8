"""From events to what the model sees. One builder: `build(events, run)` is a pure function of the events.

A turn's messages stand where the run that took them started, whatever came between; each tool result stands directly
behind the reply that asked for it. What nobody took, was withdrawn, or was cancelled before it started is not there.
Reasoning and errors never appear. A turn that failed or was cancelled keeps what was said and done.
"""

from collections.abc import Iterable

import msgspec

from turnstream.session.events import (
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
        self.replies: list[ModelReplied] = []
        self.results: dict[str, ToolReturned] = {}
        self.end: RunEnded | None = None


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
                turns[replied.run].replies.append(replied)
            case ToolReturned() as returned if returned.run in turns:
                turns[returned.run].results.setdefault(returned.call_id, returned)
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
    for reply in turn.replies:
        yield AssistantMessage(reply.content, reply.tool_calls)
        for call in reply.tool_calls:
            if call.id in turn.results:
                yield _result(call, turn.results[call.id])
    if turn.end and turn.end.content:
        yield AssistantMessage(turn.end.content)


def _result(call: ToolCall, returned: ToolReturned) -> ToolMessage:
    text = returned.output if returned.status == "ok" else f"{returned.status}: {returned.error}"
    if returned.blob:
        text += f"\n[cut: the whole result has {returned.blob.size} bytes]"
    return ToolMessage(call.id, call.name, cut(text, RESULT_MAX), returned.status != "ok")


def cut(text: str, limit: int) -> str:
    """At most `limit` bytes of UTF-8, cut between characters, with a notice of what is missing."""
    data = text.encode()
    if len(data) <= limit:
        return text
    head = data[:limit].decode(errors="ignore")
    return f"{head}\n[cut: {len(data) - len(head.encode())} of {len(data)} bytes left out]"
