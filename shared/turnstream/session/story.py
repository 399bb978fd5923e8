"""What the events of a session tell, turn by turn: who said what to a turn, what it replied and did, how it came out.

A turn's messages stand where the run that took them started or was steered, whatever came between; each tool result
with the reply that asked for it. What nobody took, was withdrawn, or was cancelled before it started is not there; a
message that answered a request is there as the result of the call that asked. A turn that was tried again goes on in
the later one. How much of it a model sees is not said here (`history.py`).
"""

from collections.abc import Iterable

from turnstream.ids import SessionKey
from turnstream.session.events import (
    ChildEnded,
    ChildStarted,
    MessagePosted,
    ModelReplied,
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
from turnstream.session.messages import UserMessage, cut, text_of
from turnstream.session.policy import Policy

RESULT_MAX = 8 * 1024
"""Bytes of UTF-8 of a tool result that the model sees where they are bounded; the rest is cut with a notice."""


class Reply:
    """A reply with the results of its calls, by id: two replies may use the same id. `over`: no result comes any
    more. `children`: the sessions of the sub-agents that its calls are for."""

    __slots__ = ("begun", "children", "over", "replied", "results", "seq")

    def __init__(self, seq: int, replied: ModelReplied) -> None:
        self.seq = seq
        self.replied = replied
        self.results: dict[str, ToolReturned] = {}
        self.begun: set[str] = set()
        self.children: dict[str, str] = {}
        self.over = False

    def misses(self, call_id: str) -> bool:
        return call_id not in self.results and any(call.id == call_id for call in self.replied.tool_calls)


class Turn:
    """`began` is the sequence of its first start. `action`: what a person did, if that is all that it is. `window`:
    what the authors of its messages had before them, which is shown while it is under way, and never again. `nodes`:
    what the models of the nodes of its graph have replied, by path; that is for the node itself and nobody else."""

    __slots__ = ("action", "began", "end", "ended", "items", "n", "nodes", "shown", "window")

    def __init__(self, n: int, began: int, action: ToolCall | None = None) -> None:
        self.n = n
        self.began = began
        self.items: list[UserMessage | Reply] = []
        self.nodes: dict[str, list[Reply]] = {}
        self.window: list[UserMessage] = []
        self.end: RunEnded | None = None
        self.ended = 0
        self.action = action
        self.shown: tuple[object, object] | None = None
        """What a turn that has ended shows, and how: it stays so."""

    @property
    def replies(self) -> list[Reply]:
        return [item for item in self.items if isinstance(item, Reply)]

    def reply_of(self, call_id: str, path: str) -> Reply | None:
        """The newest reply that asked for this call and has no result of it."""
        replies = self.nodes.get(path, []) if path else self.replies
        return next((reply for reply in reversed(replies) if reply.misses(call_id) and not reply.over), None)

    def close(self, seq: int, ended: RunEnded) -> None:
        """The first end counts."""
        if self.end is None:
            self.end, self.ended = ended, seq
        for reply in self.replies:
            reply.over = True


class Story:
    """The turns in the order of their starts. `several_since`: the first message of a second author; from there on each
    says whose it is."""

    def __init__(self, policy: Policy, several_since: int = 0) -> None:
        self.turns: dict[int, Turn] = {}
        self._pairs = policy.history_turns == "completed"
        self._mixed = policy.authors == "mixed"
        self._several_since = several_since
        self._said: dict[str, tuple[int, MessagePosted]] = {}
        self._shown: set[str] = set()
        self._notices: list[UserMessage] = []
        self._windows: list[UserMessage] = []
        """Of the notices."""
        self._retries: dict[int, int] = {}
        self._actions: dict[int, ToolCall] = {}
        self._children: dict[tuple[int, int], str] = {}
        """Their sessions, by run and number."""

    def hear(self, recorded: Recorded) -> None:
        data = recorded.event.data
        match data:
            case MessagePosted():
                self._said[data.message_id] = recorded.seq, data
                if data.kind == "notice" and not self._pairs:
                    text = frame("notice", text_of(data), from_=data.author)
                    self._notices.append(UserMessage(text, data.attachments))
                    self._windows += _window(data)
            case RunRequested():
                self._retries[data.run] = data.retry_of
                if data.action:
                    self._actions[data.run] = data.action
            case RunStarted():
                self._start(recorded.seq, data)
            case RunSteered() if turn := self.turns.get(data.run):
                self._show(turn, data.message_ids)
            case ModelReplied() if turn := self.turns.get(data.run):
                replies = turn.nodes.setdefault(data.path, []) if data.path else turn.items
                replies.append(Reply(recorded.seq, data))
            case ToolStarted() if turn := self.turns.get(data.run):
                if reply := turn.reply_of(data.call_id, data.path):
                    reply.begun.add(data.call_id)
            case ChildStarted():
                self._children[data.run, data.k] = data.child_session
                turn = self.turns.get(data.run)
                if turn and (reply := turn.reply_of(data.call_id, data.path)):
                    reply.children[data.call_id] = data.child_session
            case ChildEnded() if data.late and not self._pairs:
                self._notices.append(_child_result(recorded, data, self._children.get((data.run, data.k))))
            case ToolReturned() if turn := self.turns.get(data.run):
                if turn.action:
                    turn.items.append(_acted(turn.action, data))
                elif reply := turn.reply_of(data.call_id, data.path):  # a second result is not heard
                    reply.results[data.call_id] = data
            case RunEnded() if turn := self.turns.get(data.run):
                turn.close(recorded.seq, data)
            case _:
                pass

    def _start(self, seq: int, started: RunStarted) -> None:
        turn = self.turns.get(started.run)
        if turn is None:
            turn = self.turns[started.run] = Turn(started.run, seq, self._actions.get(started.run))
            if retried := self.turns.pop(self._tried(started.run), None):
                # How it ended does not matter any more. What was done for it does, if that is remembered at all.
                turn.items += [item for item in retried.items if not self._pairs or isinstance(item, UserMessage)]
                turn.window += retried.window
            turn.items += self._notices
            turn.window += self._windows
            self._notices, self._windows = [], []
            if turn.action:
                turn.items.append(_act(turn.action))
        self._show(turn, started.message_ids)

    def _tried(self, n: int) -> int:
        """The turn that run `n` tries again, 0 for none: the latest that was started."""
        while n := self._retries.get(n, 0):
            if n in self.turns:
                return n
        return 0

    def _show(self, turn: Turn, names: Iterable[str]) -> None:
        for name in names:
            seq, posted = self._said.get(name, (0, None))
            if posted is None or name in self._shown:
                continue
            self._shown.add(name)
            turn.window += _window(posted)
            if posted.answers is None:
                turn.items.append(UserMessage(self._text(seq, posted), posted.attachments))
            elif posted.attachments:  # the result of the call that asked holds the text alone
                turn.items.append(UserMessage("", posted.attachments))

    def _text(self, seq: int, posted: MessagePosted) -> str:
        """What looks as if it said whose it is, or as if it were anything else that only we say, does not."""
        text = text_of(posted)
        if self._pairs:
            return text
        several = self._mixed and 0 < self._several_since <= seq
        return frame("message", text, from_=posted.author) if several or looks_framed(text) else text


def _window(posted: MessagePosted) -> list[UserMessage]:
    """What its author had before him."""
    return [UserMessage(frame("window_context", posted.context))] if posted.context else []


def _act(action: ToolCall) -> UserMessage:
    """What a person did, as text: it is no call of the model's."""
    return UserMessage(frame("user_action", action.arguments, verb=action.name))


def _acted(action: ToolCall, returned: ToolReturned) -> UserMessage:
    text = returned.output if returned.status == "ok" else f"{returned.status}: {returned.error}"
    return UserMessage(frame("user_action_result", cut(text, RESULT_MAX), verb=action.name))


def _child_result(recorded: Recorded, ended: ChildEnded, session: str | None) -> UserMessage:
    """`session` is the child's, where its beginning was told; of what was copied it is that of the original."""
    text = ended.output
    if ended.status != "completed":
        text = f"{ended.error.code}: {ended.error.message}" if ended.error else "it was cancelled"
    if session is None:
        key, copied = recorded.event.key, recorded.event.copied
        parent = SessionKey(key.account, copied.session) if copied else key
        session = parent.child(ended.run, ended.k).session
    return UserMessage(frame("child_result", cut(text, RESULT_MAX), session=session, status=ended.status))
