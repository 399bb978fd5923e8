"""What a model orders of a sub-agent by the control tool `delegate`."""

from collections.abc import Mapping
from typing import Final

import msgspec

from turnstream import schemas
from turnstream.session.events import DELEGATE, Limits, ToolCall
from turnstream_runner.models.port import ToolSpec
from turnstream_runner.unicode import fit

TIMEOUT_MAX: Final = 366 * 86_400
"""Seconds."""

DELEGATION: Final = ToolSpec(
    DELEGATE,
    "Has another agent do something by itself, in a conversation of its own, and gives you what it comes to.",
    {
        "type": "object",
        "properties": {
            "brief": {"type": "string", "description": "What is to be done; the agent knows nothing else."},
            "agent": {"type": "string", "description": "Who does it; absent: one like you."},
            "schema": {"type": "object", "description": "A JSON Schema of the result."},
            "wait": {"type": "boolean", "description": "false: go on at once, without the result."},
            "timeout": {"type": "number", "description": "Seconds that it may take."},
        },
        "required": ["brief"],
        "additionalProperties": False,
    },
)


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    brief: str
    agent: str | None = None
    schema: dict[str, object] | None = None
    wait: bool = True
    timeout: float | None = None

    @property
    def said(self) -> str:
        """What the agent is told."""
        if self.schema is None:
            return self.brief
        return f"{self.brief}\n\n{fitting(self.schema)}"

    def within(self, limits: Limits) -> Limits:
        """These limits, and no more time than was said."""
        if self.timeout is None:
            return limits
        return msgspec.structs.replace(limits, timeout=min(limits.timeout, max(1, round(self.timeout * 1000))))


def fitting(schema: Mapping[str, object]) -> str:
    """What a model is told whose answer has to fit."""
    return f"Answer with nothing but JSON that fits this JSON Schema: {msgspec.json.encode(schema).decode()}"


def order_of(call: ToolCall) -> Order:
    """What a call delegates. Raises `ValueError` for what cannot be."""
    try:
        order = msgspec.json.decode(fit(call.arguments), type=Order)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    if not order.brief.strip():
        raise ValueError("brief: is empty")
    if order.timeout is not None and not 0 < order.timeout <= TIMEOUT_MAX:
        raise ValueError(f"timeout: more than 0 and at most {TIMEOUT_MAX} seconds")
    if order.schema is not None and (fault := schemas.fault_of(order.schema)):
        raise ValueError(f"schema: {fault}")
    return order
