"""Tools whose effects can be counted: each call leaves a line in the file that `EFFECTS` names."""

import os
from pathlib import Path

from turnstream.agents import ToolContext, tool


def _leave(name: str, context: ToolContext) -> str:
    with Path(os.environ["EFFECTS"]).open("a") as file:
        file.write(f"{context.session} {name} {context.idempotency_key}\n")
        file.flush()
        os.fsync(file.fileno())
    return name


@tool(idempotent=True)
def again(context: ToolContext) -> str:
    """May be called twice."""
    return _leave("again", context)


@tool
def once(context: ToolContext) -> str:
    """Must not be called twice."""
    return _leave("once", context)


@tool(approval=True)
def approved(context: ToolContext) -> str:
    """Must not be called twice, and only if a person says so."""
    return _leave("approved", context)
