"""The demo model: does what its prompt asks, so that every feature can be seen without a key. Deterministic: no clock,
no randomness, no memory but the messages it is sent. Instant unless asked to be slow.

Plain text is answered with what was heard and what was said before. `echo <text>` is answered with exactly that text.
Anything else is asked for in brackets:

    [say <text>]             answers exactly this
    [think <text>]           reasons first, on the reasoning channel
    [tool add {"a":1,"b":2}] asks for a tool; several in one step are asked for at once
    [then]                   the next step begins: what follows is done when the tools of this step have returned
    [loop add {"a":1,"b":2}] asks for the tool in every step, until the run is at its limits
    [ask Which colour?]      asks a person, and waits; with choices, a schema, a time to answer in and what is then:
                             [ask Which colour? {"choices":["red","blue"],"expires_in":60,"default":"red"}],
                             {"schema":{"type":"integer"}}, {"expires_in":60,"on_expiry":"null"} or "fail"
    [delegate echo hi]       has another agent do this, and waits for what it comes to; several in one step work side by
                             side; its words may hold directives of their own, which are the other agent's:
                             [delegate [slow 20 50ms]], [delegate [tool add {"a":1,"b":2}]]; with an agent, without
                             waiting, with a time, with a schema that its answer has to fit:
                             [delegate [hang] {"timeout":2}], [delegate echo later {"wait":false}],
                             [delegate [say {"n":1}] {"agent":"default","schema":{"type":"object"}}]
    [tool ask_first {}]      asks for a tool that a person has to approve; so is ask_errand, which is not repeated
    [plan x Boil water | > Steep | Pour]
                             keeps a checklist: `x` is before what is done, `>` before what is under way
    [slow 50ms]              streams its answer word by word, one every 50 ms
    [slow 20 50ms]           the same with an answer of 20 words
    [wait 2s]                is silent that long before its first token
    [hang]                   never answers; [hang late]: stops in the middle of its answer
    [fail]                   the provider refuses the call; [fail 503]: it is not there, on every try;
                             [fail 503 2]: on the first two tries; [fail 429 1 2s]: once, and asks to wait 2 s
    [drop]                   the stream breaks in the middle, once; [drop 2], [drop always]
    [empty]                  an empty reply
    [cut 5]                  the answer stops at the token limit, after 5 words; [think …] [cut 0]: before any
    [size 1MB]               an answer of that size, up to 8MB
    [unicode]                an answer of characters that are often mishandled
    [opaque]                 gives its provider's token with this reply, and fails if a later call of the run brings
                             another one back
    [attachments]            what is attached, to all messages: names, types, sizes, and what it was shown of each
    [read notes.txt]         the text of an attachment
    [about]                  what the model was sent, as JSON
    [help]                   this

Everything up to `[then]` is one model call, also what is said beside a tool call. After tools have returned, and
nothing else is asked for, the answer says what they returned, and what a person answered. What a person does himself
(`turnstream act hello add '{"a":1,"b":2}'`) asks no model; [about] shows how later turns see it, and the checklist.
Asked for a title, it says what the session is about. Tokens are a quarter of the bytes, rounded up.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterable, Sequence
from operator import attrgetter

from turnstream.ids import digest
from turnstream.session import attachments
from turnstream.session.events import ASK_USER, ToolCall, Usage
from turnstream.session.messages import AssistantMessage, Message, ToolMessage, UserMessage
from turnstream_runner.models.port import (
    SUMMARISING,
    TITLING,
    Finish,
    Item,
    ModelError,
    ModelRequest,
    ReasoningDelta,
    Reply,
    TextDelta,
)
from turnstream_runner.models.script import Step, parse

NAME = "demo"
ECHO = "echo "
CHUNK = 32 * 1024
"""Characters of a delta where nobody asked for words."""
UNICODE = (
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 | combining e\u0301 ñ | right to left שלום مرحبا | astral 𝒳 𐍈 | "
    "line ends \u2028 \u2029 \x85 \x0b \x0c \x1c \r\n | zero width \u200b\u200d\ufeff | quotes \"'`\\ </script> &amp;"
)

_TEXT = attrgetter("text")
_WORD = re.compile(r"\s*\S+\s*?|\s+\Z")
_RETRYABLE = frozenset({408, 409, 429})


class _Turn:
    """The last message, its replies so far, and what came before."""

    def __init__(self, messages: Sequence[Message]) -> None:
        last = next((i for i in reversed(range(len(messages))) if _is_prompt(messages, i)), -1)
        prompt = messages[last] if last >= 0 else None
        self.prompt = prompt.text if isinstance(prompt, UserMessage) else ""
        self.attachments = [one.name for one in prompt.attachments] if isinstance(prompt, UserMessage) else []
        self.earlier = [message.text for message in messages[: max(last, 0)] if isinstance(message, UserMessage)]
        self.replies = sum(isinstance(message, AssistantMessage) for message in messages[last + 1 :])
        self.results = [message for message in messages[last + 1 :] if isinstance(message, ToolMessage)]

    def step(self) -> Step:
        if self.prompt.startswith(ECHO):
            return Step(say=self.prompt.removeprefix(ECHO))
        steps = parse(self.prompt)
        looping = next((step for step in steps if step.loop), None)
        return steps[self.replies] if self.replies < len(steps) else looping or Step()


def _is_prompt(messages: Sequence[Message], i: int) -> bool:
    """What came with an answer, and says nothing itself, is none."""
    message = messages[i]
    if not isinstance(message, UserMessage):
        return False
    return bool(message.text) or i == 0 or not isinstance(messages[i - 1], ToolMessage)


class DemoModel:
    """A model of the port in `port.py`; the language is in this module's docstring."""

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Item, None]:
        if request.instructions == TITLING:
            yield Reply(text=_title(request), usage=Usage(input_tokens=1, output_tokens=1), model=NAME)
            return
        if request.instructions == SUMMARISING:
            text = _summary(request)
            yield Reply(text=text, usage=_usage(request, text, "", ()), model=NAME)
            return
        _check_messages(request.messages)
        turn = _Turn(request.messages)
        step = turn.step()
        if step.wait:
            await asyncio.sleep(step.wait)
        if step.hang:
            await asyncio.get_running_loop().create_future()
        if step.failure and request.tries < step.failure.tries:
            status, after = step.failure.status, step.failure.retry_after
            retryable = status >= 500 or status in _RETRYABLE
            raise ModelError(f"the demo provider answered {status}", retryable=retryable, retry_after=after)
        async for delta in _paced(step.think, step.pace):
            yield ReasoningDelta(delta)
        _check_tokens(request)
        text, finish = _answer(request, turn, step)
        breaks = request.tries < step.drop
        if breaks or step.stall:
            for delta in _half(text):
                yield TextDelta(delta)
            if step.stall:
                await asyncio.get_running_loop().create_future()
            raise ModelError("the demo provider's stream broke", retryable=True)
        async for delta in _paced(text, step.pace):
            yield TextDelta(delta)
        calls = _calls(turn, step)
        yield Reply(
            text=text,
            reasoning=step.think,
            tool_calls=calls,
            usage=_usage(request, text, step.think, calls),
            finish="tool_calls" if calls else finish,
            model=NAME,
            opaque=_token(*_place(request)) if step.opaque else b"",
        )


def _title(request: ModelRequest) -> str:
    """The first words of what was said first."""
    said = next((message.text for message in request.messages if isinstance(message, UserMessage)), "")
    words = re.findall(r"[^\W_]+", said.partition("\n")[0].removeprefix("user: "))
    return "About " + " ".join(words[:5]) if words else ""


def _summary(request: ModelRequest) -> str:
    """How much there was, and how it began."""
    paragraphs = request.messages[0].text.split("\n\n")
    return f"{len(paragraphs)} things were said and done. It began with: {_short(paragraphs[0])}"


def _place(request: ModelRequest) -> tuple[str, int]:
    """Run and step of a call."""
    run, _, step = request.idempotency_key.rpartition(":")
    return run, int(step) if step.isdecimal() else 0


def _token(run: str, step: int) -> bytes:
    """What the model gives with the reply of a step: it is of no other one."""
    return f"{step} {digest(run.encode())}".encode()


def _check_messages(messages: Sequence[Message]) -> None:
    """Raises `ModelError` for what providers refuse: a call without its result, a result without its call, an empty
    message."""
    waiting: list[str] = []
    for message in messages:
        if isinstance(message, ToolMessage):
            if message.call_id not in waiting:
                raise ModelError(f"the demo provider was sent a result of {message.call_id[:64]!r}, which has no call")
            waiting.remove(message.call_id)
            continue
        if waiting:
            raise ModelError(f"the demo provider was sent no result of {waiting[0][:64]!r}")
        if isinstance(message, AssistantMessage):
            if message.tool_calls:
                waiting = [call.id for call in message.tool_calls]
        elif not message.text.strip() and not message.attachments:
            raise ModelError("the demo provider was sent an empty message")
    if waiting:
        raise ModelError(f"the demo provider was sent no result of {waiting[0][:64]!r}")


def _check_tokens(request: ModelRequest) -> None:
    """Raises `ModelError` for a token that this run's replies did not come with, in their order."""
    run, step = _place(request)
    mine = [_token(run, before) for before in range(1, step)]
    for token in filter(None, request.opaque):
        if token not in mine:
            raise ModelError(f"the demo provider was sent the token {token[:64]!r}, which it gave with another reply")
        del mine[: mine.index(token) + 1]


def _missing(request: ModelRequest, turn: _Turn) -> list[str]:
    """The steps since the last message whose reply came with a token that is not there now."""
    tokens = request.opaque[len(request.opaque) - turn.replies :]
    pairs = zip(parse(turn.prompt), tokens, strict=False)
    return [str(number) for number, (step, token) in enumerate(pairs, 1) if step.opaque and not token]


def _answer(request: ModelRequest, turn: _Turn, step: Step) -> tuple[str, Finish]:
    if step.empty:
        return "", "stop"
    text = _text(request, turn, step)
    if step.cut is None:
        return text, "stop"
    return "".join(_words(text)[: step.cut]), "length"


def _text(request: ModelRequest, turn: _Turn, step: Step) -> str:
    if step.faults:
        return "I did not understand " + "; ".join(step.faults)
    if step.help:
        return __doc__ or ""
    if step.attachments:
        return _attachments(request) or "Nothing is attached."
    if step.read:
        return _read(request, step.read)
    if step.about:
        return _about(request)
    if step.unicode:
        return UNICODE
    if step.size is not None:
        return ("0123456789abcde\n" * (step.size // 16 + 1))[: step.size]
    if step.words is not None:
        return " ".join(f"word{n}" for n in range(1, step.words + 1))
    if step.say is not None:
        return step.say
    if step.tools:
        return ""
    if turn.results:
        said = [_returned(result) for result in turn.results]
        said += [f"the token of step {number} is missing" for number in _missing(request, turn)]
        return "; ".join(said)
    if not step.text and turn.attachments:
        return f"You sent {', '.join(turn.attachments)}."
    return _heard(step.text, turn.earlier)


def _attachments(request: ModelRequest) -> str:
    """One a line."""
    lines: list[str] = []
    for _, attached in request.attached():
        for one, shown in attached:
            what = "its name"
            if shown.missing:
                what = "that it is missing"
            elif shown.text is not None:
                what = f"{len(shown.text.encode())} bytes of text"
            elif shown.image:
                what = f"an image of {len(shown.image.data)} bytes"
            lines.append(f"{one.name} ({one.media_type}, {one.size} bytes): {what}")
    return "\n".join(lines)


def _read(request: ModelRequest, name: str) -> str:
    """The newest of this name."""
    texts = [shown.text for _, attached in request.attached() for one, shown in attached if one.name == name]
    return f"I was shown no text of “{name}”." if not texts or texts[-1] is None else texts[-1]


def _returned(result: ToolMessage) -> str:
    if result.name == ASK_USER and not result.is_error:
        return f"You answered: “{result.text}”"
    return f"{result.name} returned {result.text}"


def _heard(text: str, earlier: Sequence[str]) -> str:
    if not text:
        return "Done."
    if not earlier:
        return f"You said: “{text}” It is the first thing you say to me."
    count = "one thing" if len(earlier) == 1 else f"{len(earlier)} things"
    return f"You said: “{text}” Before that you said {count}, the last was: “{_short(earlier[-1])}”"


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def _about(request: ModelRequest) -> str:
    attached = iter(request.attached())

    def shown(message: Message) -> dict[str, object]:
        match message:
            case UserMessage(text=text):
                named = [attachments.named(one, what.text, missing=what.missing) for one, what in next(attached)[1]]
                return {"user": text, "attachments": named} if named else {"user": text}
            case AssistantMessage(text=text, tool_calls=calls):
                return {"assistant": text, "tools": [call.name for call in calls]} if calls else {"assistant": text}
            case ToolMessage(name=name, text=text):
                return {"tool": name, "result": text}

    said = {
        "model": request.model,
        "instructions": request.instructions,
        "params": request.params,
        "tools": [tool.name for tool in request.tools],
        "messages": [shown(message) for message in request.messages],
    }
    return json.dumps(said, ensure_ascii=False)


def _calls(turn: _Turn, step: Step) -> tuple[ToolCall, ...]:
    """Ids are unique in the session: they name turn, step and place."""
    at = f"{len(turn.earlier) + 1}_{turn.replies + 1}"
    return tuple(
        ToolCall(id=f"call_{at}_{i}", name=asked.name, arguments=asked.arguments)
        for i, asked in enumerate(step.tools, start=1)
    )


async def _paced(text: str, pace: float | None) -> AsyncGenerator[str, None]:
    if pace is None:
        for start in range(0, len(text), CHUNK):
            yield text[start : start + CHUNK]
            await asyncio.sleep(0)
        return
    for word in _words(text):
        await asyncio.sleep(pace)
        yield word


def _half(text: str) -> list[str]:
    words = _words(text)
    return words[: len(words) // 2]


def _words(text: str) -> list[str]:
    """The text in words, with the space around them: joined they are the text."""
    return _WORD.findall(text)


def _usage(request: ModelRequest, text: str, reasoning: str, calls: Iterable[ToolCall]) -> Usage:
    asked = sum(_tokens(call.name) + _tokens(call.arguments) for call in calls)
    thought = _tokens(reasoning)
    # A long session has many messages.
    sent = _tokens("".join([*map(_TEXT, request.messages), *[shown.text or "" for shown in request.shown]]))
    sent += _tokens(request.instructions)
    return Usage(input_tokens=sent, output_tokens=_tokens(text) + thought + asked, reasoning_tokens=thought)


def _tokens(text: str) -> int:
    size = len(text) if text.isascii() else len(text.encode(errors="replace"))
    return (size + 3) // 4
