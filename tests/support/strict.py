"""What a provider refuses, and what no model may be sent: every request of every test is looked at.

A call without its result, a result without its call, an empty message, half a character, an opaque item of another run,
a frame that closes early; and a prompt of a run that does not begin with the one before it. What is found is kept, and
fails the test at its end (`no_model_is_sent_nonsense`): a run that fails for it may be what the test waits for.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import unescape
from typing import Any

import pytest
from tests.support import wire_rules

from turnstream.session.frames import TAGS
from turnstream.session.messages import AssistantMessage, Message, ToolMessage, UserMessage
from turnstream_runner.models.port import SUMMARISING, TITLING, ModelRequest, Reply

FAULTS: list[str] = []
"""Of the test that runs."""
_NAMES = "|".join(TAGS)
_LOOKS = re.compile(rf"<\s*/?\s*({_NAMES})\b", re.IGNORECASE)
_FRAME = re.compile(rf"<({_NAMES})((?: [a-z_]+=\"[^\"<>]*\")*)(?:/>|>(.*?)</\1>)\s*", re.DOTALL)


@pytest.fixture(autouse=True)
def no_model_is_sent_nonsense() -> Iterator[None]:
    FAULTS.clear()
    yield
    found = FAULTS.copy()
    FAULTS.clear()
    assert not found, "\n".join(found)


class Strict:
    """Looks at what one model is sent, and keeps what it gave."""

    def __init__(self) -> None:
        self._given: dict[bytes, set[str]] = {}
        self._last: dict[str, tuple[str, tuple[Message, ...]]] = {}
        """Of each session, the run that asked last and its messages; no run where several have asked by turns."""
        self._open: dict[str, int] = {}

    def begins(self, request: ModelRequest) -> None:
        run, session = _place(request)
        if request.instructions in (TITLING, SUMMARISING):
            found = [fault for message in request.messages for fault in _of_text("a digest", message.text)]
            if request.instructions == SUMMARISING and _LOOKS.search(_FRAME.sub("", request.messages[0].text)):
                found.append(f"what looks like a frame and is none: {request.messages[0].text}")
        else:
            found = [*faults(request.messages), *self._opaque(request, run), *self._beginning(request, run, session)]
        self._open[session] = self._open.get(session, 0) + 1
        FAULTS.extend(f"{request.idempotency_key}: {fault}" for fault in found)

    def gives(self, request: ModelRequest, reply: Reply) -> None:
        if reply.opaque:
            self._given.setdefault(reply.opaque, set()).add(_place(request)[0])

    def ends(self, request: ModelRequest) -> None:
        self._open[_place(request)[1]] -= 1

    def _opaque(self, request: ModelRequest, run: str) -> Iterator[str]:
        replies = sum(isinstance(message, AssistantMessage) for message in request.messages)
        if len(request.opaque) > replies:
            yield f"{len(request.opaque)} opaque items for {replies} replies"
        for item in filter(None, request.opaque):
            if run not in (given := self._given.get(item, {run})):
                yield f"an opaque item of {', '.join(given)}"

    def _beginning(self, request: ModelRequest, run: str, session: str) -> Iterator[str]:
        """Within a run that nothing goes on beside, a prompt goes on where the last one ended; where its window begins
        anew it has less of that, and nothing else."""
        before, messages = self._last.get(session, (run, ()))
        mixed = before == "" or self._open.get(session, 0) > 0 or _number(before) > _number(run)
        self._last[session] = ("" if mixed else run, request.messages)
        if before == run and not mixed and request.messages[: len(messages)] != messages:
            rest = iter(messages)
            kept = [message for message in request.messages if any(message == other for other in rest)]
            if not kept or len(kept) == len(messages) or request.messages[: len(kept)] != tuple(kept):
                yield f"the prompt begins otherwise than the one before: {request.messages} after {messages}"


def faults(messages: Sequence[Message]) -> Iterator[str]:
    """What is wrong with these messages."""
    waiting: list[str] = []
    for place, message in enumerate(messages):
        where = f"message {place}"
        yield from _of_text(where, message.text)
        match message:
            case ToolMessage():
                if message.call_id not in waiting:
                    yield f"{where}: a result of {message.call_id!r}, which nobody called"
                else:
                    waiting.remove(message.call_id)
                continue
            case UserMessage():
                if not message.text.strip() and not message.attachments:
                    yield f"{where}: says nothing"
                yield from _of_frames(where, message.text)
            case AssistantMessage():
                if not message.text and not message.tool_calls:
                    yield f"{where}: an empty reply"
        if waiting:
            yield f"{where}: before it, {', '.join(waiting)} has no result"
        waiting = [call.id for call in message.tool_calls] if isinstance(message, AssistantMessage) else []
        if len(set(waiting)) < len(waiting):
            yield f"{where}: two calls of one id"
    if waiting:
        yield f"at the end, {', '.join(waiting)} has no result"


def faults_on_the_wire(body: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The same of a request as a provider gets it, at this path of its."""
    if path.startswith("/v1/responses"):
        yield from wire_rules.responses(body)
    elif path.startswith("/v1/messages"):
        yield from wire_rules.messages(body)
    else:
        yield from _faults_of_chat(body)


def _faults_of_chat(body: Mapping[str, Any]) -> Iterator[str]:
    waiting: list[str] = []
    for place, message in enumerate(body.get("messages", ())):
        where = f"message {place}"
        yield from _of_text(where, json.dumps(message, ensure_ascii=False))
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                yield f"{where}: a result of {message['tool_call_id']!r}, which nobody called"
            else:
                waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            yield f"{where}: before it, {', '.join(waiting)} has no result"
        waiting = [call["id"] for call in message.get("tool_calls") or ()]
        if message["role"] == "user" and not message.get("content"):
            yield f"{where}: an empty message"
    if waiting:
        yield f"at the end, {', '.join(waiting)} has no result"


def _of_text(where: str, text: str) -> Iterator[str]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        yield f"{where}: {error}"


def _of_frames(where: str, text: str) -> Iterator[str]:
    if not _LOOKS.search(text):
        return
    at = 0
    while frame := _FRAME.match(text, at):
        at = frame.end()
        inside = frame[3] or ""
        if _LOOKS.search(inside) or _LOOKS.search(frame[2]):
            yield f"{where}: a frame that closes early: {text[:200]!r}"
        elif frame[1] != "attachment" and re.search("[<>]", inside):
            yield f"{where}: a frame whose text is not escaped: {unescape(inside)[:200]!r}"
    if at < len(text):
        yield f"{where}: what looks like a frame and is none: {text[:200]!r}"


def _place(request: ModelRequest) -> tuple[str, str]:
    """The run and the session of a call."""
    run = request.idempotency_key.rpartition(":")[0]
    return run, run.rpartition(".")[0]


def _number(run: str) -> int:
    n = run.rpartition(".")[2]
    return int(n) if n.isdecimal() else 0
