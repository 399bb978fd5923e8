"""How a command ends. The codes are part of the interface: scripts rely on them."""

from enum import IntEnum


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    """What was asked for did not come out well: the run failed, `fsck` found a fault, the demo broke a promise."""
    USAGE = 2
    """A wrong argument or setting."""
    UNREACHABLE = 3
    """Turnstream, its broker or its database did not answer."""
    REFUSED = 4
    """Turnstream answered with a refusal."""
    WAITING = 5
    """The run waits for a person: it is not done."""
    INTERRUPTED = 130


class CommandError(Exception):
    """Ends the command with one line on standard error."""

    def __init__(self, message: str, code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.code = code
