"""How much room an event has, and what is done with what does not fit.

A tool result or a final answer that is too large goes to the object store whole and leaves its head; whatever else is
too large (reasoning, the text beside tool calls, arguments, messages) is cut. Cuts fall between characters. What was
said is made fit to be stored on the way.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from turnstream.session.events import Blob, ModelReplied, NodeFinished, RunEnded
from turnstream_runner.results import Result
from turnstream_runner.unicode import fit

ENVELOPE: Final = 2048
"""Bytes of an event that its attributes and small fields may take."""
HEAD: Final = 32 * 1024
"""Bytes that stay in the event of what went to the object store, where there is so much room."""
MESSAGE: Final = 1024
"""Bytes of an error's message that are kept."""
_WIDEST: Final = 6
"""Bytes of JSON that one character takes at most."""

Put = Callable[[bytes], Awaitable[Blob]]
"""Stores the bytes whole."""


class Room:
    """`event_max`: bytes that an event's payload may have."""

    def __init__(self, event_max: int) -> None:
        self._bytes = max(event_max - ENVELOPE, 1024)
        self._head = min(self._bytes // 4, HEAD)

    async def for_result(self, fact: Result, put: Put) -> Result:
        """One that lies in the object store already stays there."""
        output, blob = (fact.output, fact.blob) if fact.blob else await self._whole(fact.output, put)
        fact = msgspec.structs.replace(fact, output=output, blob=blob, error=cut(fit(fact.error), self._head))
        if isinstance(fact, NodeFinished) and fact.reasoning:
            return msgspec.structs.replace(fact, reasoning=cut(fit(fact.reasoning), self._bytes // 4))
        return fact

    def takes(self, arguments: str) -> bool:
        """Whether an event has room for a node's own call. Cut, it would be another one."""
        return fits(arguments, self._bytes // 2)

    async def for_end(self, fact: RunEnded, put: Put) -> RunEnded:
        content, blob = await self._whole(fact.content, put)
        error = fact.error
        if error is not None:
            error = msgspec.structs.replace(error, message=cut(fit(error.message), min(self._head, MESSAGE)))
        reasoning = cut(fit(fact.reasoning), self._bytes // 4)
        return msgspec.structs.replace(fact, content=content, blob=blob, reasoning=reasoning, error=error)

    def for_reply(self, fact: ModelReplied) -> ModelReplied:
        each = self._bytes // 2 // max(len(fact.tool_calls), 1)
        calls = tuple(
            msgspec.structs.replace(
                call, name=cut(fit(call.name), each // 4), arguments=cut(fit(call.arguments), each // 2)
            )
            for call in fact.tool_calls
        )
        content, reasoning = (cut(fit(text), self._bytes // 4) for text in (fact.content, fact.reasoning))
        return msgspec.structs.replace(fact, content=content, reasoning=reasoning, tool_calls=calls)

    async def _whole(self, text: str, put: Put) -> tuple[str, Blob | None]:
        text = fit(text)
        if fits(text, self._bytes // 2):
            return text, None
        return cut(text, self._head), await put(text.encode())


def fits(text: str, limit: int) -> bool:
    """Whether the text takes no more than `limit` bytes as JSON, quotes included."""
    return len(text) * _WIDEST + 2 <= limit or len(msgspec.json.encode(text)) <= limit


def cut(text: str, limit: int) -> str:
    """The longest head of the text, nearly, that takes at most `limit` bytes as JSON."""
    while not fits(text, limit):
        data = text.encode()
        share = len(data) * limit // len(msgspec.json.encode(text))
        text = data[: min(share, len(data) - 1)].decode(errors="ignore")
    return text
