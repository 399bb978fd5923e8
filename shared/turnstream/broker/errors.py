"""How the broker fails.

BrokerFault
 ├─ BrokerTimeout       no answer in time; whether the request was carried out is not known
 │   └─ NoResponders    nobody listens there (503): it was not carried out
 ├─ BrokerDenied        the server's permissions do not allow it; it was not carried out
 ├─ BrokerClosed        this connection has been closed
 ├─ BrokerError         JetStream's API refused, with its codes
 │   └─ Incompatible    what exists is not what is declared, and cannot be changed into it
 │       ├─ IncompatibleStream
 │       └─ IncompatibleConsumer
 └─ StreamBehind        the stream ends before the sequence that a reader has already seen
"""

import msgspec


class BrokerFault(Exception):
    """The broker could not do what was asked."""


class BrokerTimeout(BrokerFault):
    """No answer to `subject` in time. Whether it was carried out is not known."""

    def __init__(self, subject: str, reason: str) -> None:
        super().__init__(f"{subject}: {reason}")
        self.subject = subject


class NoResponders(BrokerTimeout):
    """Nobody listens on `subject`: a stream or consumer that is not there, or has no leader now."""

    def __init__(self, subject: str) -> None:
        super().__init__(subject, "nobody answers there")


class BrokerDenied(BrokerFault):
    """The permissions of this connection's user do not allow `subject`."""

    def __init__(self, subject: str, reason: str) -> None:
        super().__init__(f"{subject}: {reason}")
        self.subject = subject


class BrokerClosed(BrokerFault):
    """This connection has been closed."""


class BrokerError(BrokerFault):
    """JetStream's API refused: `code` is HTTP-like, `err_code` is JetStream's own."""

    def __init__(self, code: int, err_code: int, description: str, *, operation: str = "") -> None:
        super().__init__(f"{operation}: {description} (code {code}, err_code {err_code})")
        self.code = code
        self.err_code = err_code
        self.description = description
        self.operation = operation


class Difference(msgspec.Struct, frozen=True):
    """One setting: what it is, and what it must be."""

    field: str
    found: object
    wanted: object

    def __str__(self) -> str:
        return f"{self.field} is {self.found!r}, must be {self.wanted!r}"


class Incompatible(BrokerError):
    """What exists differs from what is declared, and the server does not let it be changed."""

    what = "object"

    def __init__(self, name: str, differences: tuple[Difference, ...], refusal: BrokerError) -> None:
        super().__init__(refusal.code, refusal.err_code, refusal.description, operation=refusal.operation)
        self.name = name
        self.differences = differences

    def __str__(self) -> str:
        found = "; ".join(map(str, self.differences))
        return f"{self.what} {self.name} cannot be made as declared: {found} ({self.description})"


class IncompatibleStream(Incompatible):
    """A stream that cannot be changed into what is declared."""

    what = "stream"


class IncompatibleConsumer(Incompatible):
    """A consumer that cannot be changed into what is declared."""

    what = "consumer"


class StreamBehind(BrokerFault):
    """The stream ends at `last`, before `after`: sequences that were seen are gone and will be issued again."""

    def __init__(self, stream: str, after: int, last: int) -> None:
        super().__init__(
            f"stream {stream} ends at {last}, but {after} has been read: it is another or a damaged stream"
        )
        self.stream = stream
        self.after = after
        self.last = last
