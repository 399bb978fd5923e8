"""The checklist that a model keeps of what it does, by the control tool `update_plan`: each call says all of it."""

from typing import Final

import msgspec

from turnstream.session.events import UPDATE_PLAN, PlanItem, PlanStatus
from turnstream_runner.models.port import ToolSpec
from turnstream_runner.unicode import fit

ITEMS_MAX: Final = 100
TEXT_MAX: Final = 500
"""Characters of one item."""
NOTED: Final = "noted"

CHECKLIST: Final = ToolSpec(
    UPDATE_PLAN,
    "Replaces the checklist of what you do, so that people see how far you are. Give all items each time.",
    {
        "type": "object",
        "properties": {
            "items": {
                "type": "array",
                "maxItems": ITEMS_MAX,
                "items": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "string"},
                        "text": {"type": "string", "maxLength": TEXT_MAX},
                        "status": {"enum": ["pending", "in_progress", "completed"]},
                    },
                    "required": ["text"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["items"],
        "additionalProperties": False,
    },
)


class _Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    id: str = ""
    status: PlanStatus = "pending"


class _Checklist(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    items: list[_Item]


def items_of(arguments: str) -> tuple[PlanItem, ...]:
    """The items that a call gives, each with an id. Raises `ValueError`."""
    try:
        items = msgspec.json.decode(fit(arguments), type=_Checklist).items
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    if len(items) > ITEMS_MAX or any(len(item.text) > TEXT_MAX or len(item.id) > 64 for item in items):
        raise ValueError(f"items: {ITEMS_MAX} at most, of {TEXT_MAX} characters each")
    return tuple(
        [PlanItem(id=item.id or str(n), text=item.text, status=item.status) for n, item in enumerate(items, 1)]
    )
