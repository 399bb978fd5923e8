"""What is wrong with the definitions of agents and tools: every fault with its path, all at once."""

from collections.abc import Iterable

import msgspec


class Fault(msgspec.Struct, frozen=True, order=True):
    """`where` is a file, module or agent; `path` leads to the field in it, `limits.max_steps`, or is empty."""

    where: str
    path: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.path, self.message) if part)


class AgentsError(ValueError):
    """Definitions that cannot be used. `faults` holds all that is wrong with them."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))
