"""From events to what the model sees. One builder: `build(events, run, policy)` is a pure function of both.

A turn's messages stand where the run that took them started or was steered, whatever came between; each tool result
stands directly behind the reply that asked for it, and a call that has none yet shows a placeholder that is never
stored. What nobody took, was withdrawn, or was cancelled before it started is not there; a message that answered a
request is there as the result of the call that asked. A turn that was tried again goes on in the later one. Reasoning
and errors never appear. A turn that failed or was cancelled keeps what was said and done, unless the policy remembers
only completed ones: then these are there as they were said, message and answer, and nothing else is.

What came with a message is there as references; what its author had before him only in the turn that takes it.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from turnstream.session.events import (
    Attachment,
    Blob,
    MessagePosted,
    ModelReplied,
    PlanChanged,
    Recorded,
    RunEnded,
    RunRequested,
    RunStarted,
    RunSteered,
    ToolCall,
    ToolReturned,
    ToolStarted,
)
from turnstream.session.frames import frame, looks_framed
from turnstream.session.policy import STRICT, Policy

RESULT_MAX = 8 * 1024
"""Bytes of UTF-8 of a tool result that the model sees where they are bounded; the rest is cut with a notice."""
RUNNING = '{"status":"running"}'
"""What a call shows that has no result yet."""
INTERRUPTED = "interrupted: there is no result"
"""What a call shows whose turn ended without its result."""
IN_DOUBT = "interrupted: there is no result, and the tool may or may not have taken effect"
"""The same where the tool had begun."""


class UserMessage(msgspec.Struct, frozen=True, tag="user", omit_defaults=True):
    text: str
    attachments: tuple[Attachment, ...] = ()


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


class _Reply:
    """A reply with the results of its calls, by id: two replies may use the same id. `over`: no result comes any
    more."""

    def __init__(self, replied: ModelReplied) -> None:
        self.replied = replied
        self.results: dict[str, ToolReturned] = {}
        self.begun: set[str] = set()
        self.over = False

    def misses(self, call_id: str) -> bool:
        return call_id not in self.results and any(call.id == call_id for call in self.replied.tool_calls)


class _Turn:
    def __init__(self, action: ToolCall | None = None) -> None:
        self.items: list[UserMessage | _Reply] = []
        self.end: RunEnded | None = None
        self.action = action
        """What a person did, if that is all that it is."""
        self.plan: list[UserMessage] = []
        self.window: list[UserMessage] = []

    @property
    def context(self) -> Iterable[UserMessage]:
        """What is shown with its messages while it is under way."""
        return (*self.plan, *self.window)

    @property
    def replies(self) -> list[_Reply]:
        return [item for item in self.items if isinstance(item, _Reply)]

    @property
    def answer(self) -> str:
        return _whole(self.end.content, self.end.blob) if self.end and not self.action else ""

    def reply_of(self, call_id: str) -> _Reply | None:
        """The newest reply that asked for this call and has no result of it."""
        return next((reply for reply in reversed(self.replies) if reply.misses(call_id) and not reply.over), None)

    def close(self, ended: RunEnded) -> None:
        """The first end counts."""
        self.end = self.end or ended
        for reply in self.replies:
            reply.over = True


class _Story:
    """What the events tell, turn by turn in the order of their starts."""

    def __init__(self, policy: Policy) -> None:
        self.turns: dict[int, _Turn] = {}
        self._pairs = policy.history_turns == "completed"
        self._mixed = policy.authors == "mixed"
        self._said: dict[str, MessagePosted] = {}
        self._shown: set[str] = set()
        self._notices: list[UserMessage] = []
        self._windows: list[UserMessage] = []
        """What the authors of the notices had before them."""
        self._first_author: str | None = None
        self._several = False
        self._retries: dict[int, int] = {}
        self._actions: dict[int, ToolCall] = {}
        self._plan: PlanChanged | None = None

    def hear(self, recorded: Recorded) -> None:
        data = recorded.event.data
        match data:
            case MessagePosted():
                self._said[data.message_id] = data
                if data.kind == "notice" and not self._pairs:
                    text = frame("notice", text_of(data), from_=data.author)
                    self._notices.append(UserMessage(text, data.attachments))
                    self._windows += _window(data)
            case RunRequested():
                self._retries[data.run] = data.retry_of
                if data.action:
                    self._actions[data.run] = data.action
            case RunStarted():
                self._start(data)
            case RunSteered() if turn := self.turns.get(data.run):
                self._show(turn, data.message_ids)
            case ModelReplied() if turn := self.turns.get(data.run):
                turn.items.append(_Reply(data))
            case ToolStarted() if turn := self.turns.get(data.run):
                if reply := turn.reply_of(data.call_id):
                    reply.begun.add(data.call_id)
            case ToolReturned() if turn := self.turns.get(data.run):
                if turn.action:
                    turn.items.append(_acted(turn.action, data))
                elif reply := turn.reply_of(data.call_id):  # a second result is not heard
                    reply.results[data.call_id] = data
            case PlanChanged():
                self._plan = data
            case RunEnded() if turn := self.turns.get(data.run):
                turn.close(data)
            case _:
                pass

    def _start(self, started: RunStarted) -> None:
        turn = self.turns.get(started.run)
        if turn is None:
            turn = self.turns[started.run] = _Turn(self._actions.get(started.run))
            if retried := self.turns.pop(self._tried(started.run), None):
                # How it ended does not matter any more. What was done for it does, if that is remembered at all.
                turn.items += [item for item in retried.items if not self._pairs or isinstance(item, UserMessage)]
                turn.window += retried.window
            turn.items += self._notices
            turn.window += self._windows
            self._notices, self._windows = [], []
            if self._plan and self._plan.items:
                turn.plan.append(_plan_state(self._plan))
            if turn.action:
                turn.items.append(_act(turn.action))
        self._show(turn, started.message_ids)

    def _tried(self, n: int) -> int:
        """The turn that run `n` tries again, 0 for none: the latest that was started."""
        while n := self._retries.get(n, 0):
            if n in self.turns:
                return n
        return 0

    def _show(self, turn: _Turn, names: Iterable[str]) -> None:
        for name in names:
            posted = self._said.get(name)
            if posted is None or name in self._shown:
                continue
            self._shown.add(name)
            if not posted.answers:
                turn.items.append(UserMessage(self._text(posted), posted.attachments))
            elif posted.attachments:  # the result of the call that asked holds the text alone
                turn.items.append(UserMessage("", posted.attachments))
            turn.window += _window(posted)

    def _text(self, posted: MessagePosted) -> str:
        """From the first message of a second author on, each says whose it is; and so does any that looks as if it
        did."""
        self._first_author = self._first_author or posted.author
        self._several = self._several or posted.author != self._first_author
        text = text_of(posted)
        frames = (self._mixed and self._several) or looks_framed(text)
        return frame("message", text, from_=posted.author) if frames and not self._pairs else text


def build(events: Iterable[Recorded], run: int | None = None, policy: Policy = STRICT) -> tuple[Message, ...]:
    """What the model sees of these events, oldest first. With `run`, that run's turn is last: its prompt and its steps
    so far, whatever other runs have started since."""
    story = _Story(policy)
    ended: list[int] = []
    for recorded in events:
        story.hear(recorded)
        if isinstance(recorded.event.data, RunEnded):
            ended.append(recorded.event.data.run)
    turns = story.turns
    own = turns.pop(run, None) if run is not None else None
    if policy.history_turns == "completed":
        before = [message for n in dict.fromkeys(ended) if n in turns for message in _pair(turns[n])]
    else:
        before = [message for turn in turns.values() for message in _messages(turn, policy.history_tools)]
    if own is None:
        return tuple(before)
    # What is shown for this turn alone comes behind everything that stays, so that the front is the same each time.
    now = _messages(own, "full" if policy.history_tools == "full" else "bounded")
    return (*before, *own.context, *now)


def text_of(posted: MessagePosted) -> str:
    return "\n".join(part.text for part in posted.content)


def _window(posted: MessagePosted) -> list[UserMessage]:
    """What its author had before him."""
    return [UserMessage(frame("window_context", posted.context))] if posted.context else []


def _act(action: ToolCall) -> UserMessage:
    """What a person did, as text: it is no call of the model's."""
    return UserMessage(frame("user_action", action.arguments, verb=action.name))


def _acted(action: ToolCall, returned: ToolReturned) -> UserMessage:
    text = returned.output if returned.status == "ok" else f"{returned.status}: {returned.error}"
    return UserMessage(frame("user_action_result", cut(text, RESULT_MAX), verb=action.name))


def _plan_state(plan: PlanChanged) -> UserMessage:
    lines = [f"- [{item.status}] {item.id}: {item.text}" for item in plan.items]
    return UserMessage(frame("plan_state", "\n".join(["", *lines, ""])))


def _pair(turn: _Turn) -> Iterable[Message]:
    """What was said to a turn and what it answered, verbatim, if it came to an answer."""
    if turn.end and turn.end.status == "completed" and turn.answer:
        yield from (item for item in turn.items if isinstance(item, UserMessage))
        yield AssistantMessage(turn.answer)


def _messages(turn: _Turn, tools: Literal["bounded", "full", "none"]) -> Iterable[Message]:
    items = turn.items
    if items and turn.answer and isinstance(items[-1], _Reply) and not items[-1].replied.tool_calls:
        items = items[:-1]  # the reply that turned out to be the answer
    for item in items:
        if isinstance(item, UserMessage):
            yield item
            continue
        replied = item.replied
        text = _whole(replied.content, replied.blob)
        if tools == "none" or not replied.tool_calls:
            if text:
                yield AssistantMessage(text)
            continue
        yield AssistantMessage(text, replied.tool_calls)
        for call in replied.tool_calls:
            yield _result(call, item, bounded=tools == "bounded")
    if turn.answer:
        yield AssistantMessage(turn.answer)


def _result(call: ToolCall, reply: _Reply, *, bounded: bool) -> ToolMessage:
    returned = reply.results.get(call.id)
    if returned is None:
        missing = IN_DOUBT if call.id in reply.begun else INTERRUPTED
        return ToolMessage(call.id, call.name, missing if reply.over else RUNNING, reply.over)
    text = returned.output if returned.status == "ok" else f"{returned.status}: {returned.error}"
    text = cut(text, RESULT_MAX) if bounded else text
    return ToolMessage(call.id, call.name, _whole(text, returned.blob), returned.status != "ok")


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
