"""The tools that are always there, so that every feature of tools can be seen at once. Pure and harmless: they change
nothing, reach nothing, and none of them takes long unless asked to.
"""

import asyncio
from typing import Annotated, Final

from pydantic import Field

from turnstream.agents.tool import Tool, ToolContext, ToolError, tool

REPEAT_MAX: Final = 8 << 20
"""Bytes of what `repeat` returns: a prompt must not be able to use up the memory of a runner."""

Seconds = Annotated[float, Field(ge=0, le=60)]


@tool(idempotent=True)
def add(a: int | float, b: int | float) -> int | float:
    """The sum of two numbers."""
    return a + b


@tool(idempotent=True)
def count_words(text: str) -> dict[str, int]:
    """How many words, characters and bytes a text has."""
    return {"words": len(text.split()), "characters": len(text), "bytes": len(text.encode())}


@tool(idempotent=True)
async def sleep(seconds: Seconds) -> str:
    """Waits. It may be repeated: after a crash it simply runs again."""
    await asyncio.sleep(seconds)
    return f"slept for {seconds:g} s"


@tool
async def errand(seconds: Seconds = 0) -> str:
    """Waits like `sleep`, but as something that must not be done twice: if it is cut off by a crash, nobody knows
    whether it was done, and it is not repeated."""
    await asyncio.sleep(seconds)
    return "done"


@tool(exclusive=True, idempotent=True)
async def alone(seconds: Seconds = 0) -> str:
    """Waits like `sleep`, while no other tool of the same run is running."""
    await asyncio.sleep(seconds)
    return "was alone"


@tool(idempotent=True, approval=True)
def ask_first(text: str = "done") -> str:
    """Returns the text, once a person has approved the call."""
    return text


@tool(approval=True)
async def ask_errand(seconds: Seconds = 0) -> str:
    """Waits like `errand`, once a person has approved the call: something that must be done neither unasked nor twice.
    To see what becomes of an approval when a runner dies."""
    await asyncio.sleep(seconds)
    return "done, as approved"


@tool(idempotent=True)
def receipt(context: ToolContext) -> dict[str, str]:
    """What a tool is told about the call it serves: the key by which a repeat can be recognised."""
    return {"run": context.run, "call": context.call_id, "idempotency_key": context.idempotency_key}


@tool(idempotent=True)
def fail(message: str = "this tool always fails") -> str:
    """Fails with this message."""
    raise ToolError(message)


@tool(idempotent=True)
def repeat(text: Annotated[str, Field(max_length=4096)], times: Annotated[int, Field(ge=0)]) -> str:
    """The text, so many times over: a result of any size up to 8 MB."""
    if len(text.encode()) * times > REPEAT_MAX:
        raise ToolError(f"that would be more than {REPEAT_MAX} bytes")
    return text * times


TOOLS: Final[tuple[Tool[..., object], ...]] = (
    add,
    alone,
    ask_errand,
    ask_first,
    count_words,
    errand,
    fail,
    receipt,
    repeat,
    sleep,
)
