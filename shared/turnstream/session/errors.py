"""The one refusal of the core.

    Rejected(code, message, **details)

`code` is from the closed list below; `details` is what a caller needs to go on (`run`, `field`, `seq`). How a code is
said over HTTP and NATS is one table in the API; the core knows of neither.
"""

from typing import Literal

Code = Literal[
    "not_found",  # no such session, run or message
    "already_exists",  # a message of this id is there already
    "run_active",  # the session is busy and its policy refuses what was asked
    "run_waiting",  # a run waits for an answer, and the policy refuses a message meanwhile
    "not_waiting",  # nothing of this run is open that could be answered
    "already_answered",  # the request has another answer
    "request_expired",  # the time for an answer is over
    "request_closed",  # the run ended before the request was answered
    "nothing_to_retry",  # the latest run did not fail
    "session_copying",  # a fork that is not whole yet
    "key_reused",  # the same idempotency key with another body
    "session_moved",  # expected_seq is not the last sequence
    "invalid",  # a value that does not fit; `field` names it
    "invalid_transition",  # the state table has no such edge
    "fenced",  # a fact of an attempt that is not the current one
    "not_queued",  # a message that can no longer be withdrawn
    "agent_not_found",
]


class Rejected(Exception):
    """A command was refused and nothing was stored."""

    def __init__(self, code: Code, message: str, **details: str | int) -> None:
        super().__init__(message)
        self.code: Code = code
        self.message = message
        self.details = details

    def __repr__(self) -> str:
        return f"Rejected({self.code!r}, {self.message!r}, {self.details!r})"
