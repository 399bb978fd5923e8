"""What a session does where designs differ. Every field is observable; a value that is not offered is refused, by name.

A policy is resolved once, when a message is routed: what the message says, else what the session says, else the default
of the field. A server with other defaults writes them into the sessions that it opens.
"""

from typing import Literal

import msgspec

from turnstream.session.errors import Rejected
from turnstream.session.events import PolicyData

OnBusy = Literal["reject", "queue"]

AVAILABLE: dict[str, tuple[str, ...]] = {"on_busy": ("reject", "queue")}
"""Every field that may be given, and its values."""
PLANNED: dict[str, tuple[str, ...]] = {"on_busy": ("steer", "interrupt", "parallel")}
"""Values that are known and that this release does not offer: refused as `not_available`."""
PLANNED_FIELDS = frozenset(
    {
        "preset",
        "on_message",
        "authors",
        "starters",
        "recovery",
        "on_disconnect",
        "history",
        "empty",
        "clock",
        "titles",
        "delete",
    }
)
"""Fields that are known and that this release does not offer: refused as `not_available`."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """`on_busy`: what a message does that comes while a run is live."""

    on_busy: OnBusy = "reject"

    def override(self, data: PolicyData) -> "Policy":
        return Policy(on_busy=data.on_busy or self.on_busy)


def parse_policy(given: dict[str, object], where: str = "policy") -> PolicyData:
    """The policy fields of a request. Raises `Rejected` naming the field that is unknown or not available."""
    for name, value in given.items():
        field = f"{where}.{name}" if where else name
        if name in PLANNED_FIELDS:
            raise Rejected("not_available", f"{field} is not available in this release", field=field)
        if name not in AVAILABLE:
            raise Rejected("invalid", f"{field}: no such policy field", field=field)
        if value in PLANNED[name]:
            raise Rejected("not_available", f"{field}: {value!r} is not available in this release", field=field)
        if value is not None and value not in AVAILABLE[name]:
            values = ", ".join(AVAILABLE[name])
            raise Rejected("invalid", f"{field}: must be one of {values}", field=field)
    return msgspec.convert(given, PolicyData)
