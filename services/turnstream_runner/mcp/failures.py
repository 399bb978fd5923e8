"""How it goes wrong with a server. Every message is short and may be shown to a model.

Failed           nothing came of what was asked of a server
├── Refused      the server says that its tool failed
├── Ended        the server is gone
└── Unset        its definition refers to what the environment does not have
"""


class Failed(Exception):
    pass


class Refused(Failed):
    """The message is what the server says."""


class Ended(Failed):
    """`undone`: nothing of what was asked was done."""

    def __init__(self, message: str, *, undone: bool = False) -> None:
        super().__init__(message)
        self.undone = undone


class Unset(Failed):
    """The message names the variable."""
