"""Identifiers: what they look like, how they print and parse, how one is derived from another.

Nothing here reads a clock or makes up randomness: `uuid7` is given both, everything else is derived.
"""

import hashlib
import re
import uuid
from functools import lru_cache

import msgspec

NAME = re.compile(r"[a-z0-9-]{1,32}")
"""An account, an agent or a queue."""
VERSION = re.compile(r"[A-Za-z0-9_-]{1,32}")
"""A version of an agent."""
TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""A session or message id that a client gives."""
SESSION_MAX = 128
"""Longest session id: a child's is derived from its parent's and is longer than what a client may give."""
DEFAULT_AGENT = "default"
"""Who answers where neither the message nor the session names an agent."""
CHILD = "--"
"""Separates a child session's id from its parent's; no client opens an id that holds it."""

_NAMESPACE = uuid.UUID("6f0f5a52-0d3e-5a7b-9c55-7475726e7374").bytes
_CHILD_RUN = re.compile(r"(.+?)--([1-9][0-9]{0,14})-[1-9][0-9]{0,14}(?:--[0-9-]+)?")
_SESSION = re.compile(r"[A-Za-z0-9_-]{1,128}")
_RUN = re.compile(r"([A-Za-z0-9_-]{1,128})\.([1-9][0-9]{0,14})")
_AGENT = re.compile(rf"({NAME.pattern})(?:@({VERSION.pattern}))?")
_REQUEST = re.compile(r"(.+)\.q([1-9][0-9]{0,14})")


class SessionKey(msgspec.Struct, frozen=True, order=True):
    """Names one session of one account; prints as `<account>/<session>`."""

    account: str
    session: str

    def __str__(self) -> str:
        return f"{self.account}/{self.session}"

    def run(self, n: int) -> str:
        return run_id(self.session, n)

    def child(self, n: int, k: int) -> "SessionKey":
        """The session of the `k`th child of run `n`: a repeat of what opens it cannot open a second."""
        return SessionKey(self.account, child_id(self.session, n, k))


def child_id(session: str, n: int, k: int) -> str:
    """The session of the `k`th child of run `n`."""
    return f"{session}{CHILD}{n}-{k}"


def run_id(session: str, n: int) -> str:
    """`<session>.<n>`: a run can be located without an index."""
    return f"{session}.{n}"


def root_of(session: str) -> str | None:
    """The run at the top of the tree that a child's session belongs to, by its id; None of one that is no child's."""
    match = _CHILD_RUN.fullmatch(session)
    return run_id(match[1], int(match[2])) if match else None


def parse_run_id(text: str) -> tuple[str, int] | None:
    """The session and number of a run id, or None if it is not one."""
    match = _RUN.fullmatch(text)
    return (match[1], int(match[2])) if match else None


def parse_request_id(text: str) -> tuple[str, int, int] | None:
    """The session, the run's number and its own in that run, of a request id (`<run>.q<k>`), or None if it is none."""
    match = _REQUEST.fullmatch(text)
    run = parse_run_id(match[1]) if match else None
    return (*run, int(match[2])) if match and run else None


def agent_id(name: str, version: str) -> str:
    """`<name>@<version>`: this very version of an agent; its name alone is the one that is current."""
    return f"{name}@{version}"


@lru_cache(maxsize=4096)
def parse_agent(text: str) -> tuple[str, str | None] | None:
    """Name and version of an agent, no version where none is said; None if it names none."""
    match = _AGENT.fullmatch(text)
    return (match[1], match[2]) if match else None


def is_name(text: str) -> bool:
    return NAME.fullmatch(text) is not None


def is_version(text: str) -> bool:
    return VERSION.fullmatch(text) is not None


def is_token(text: str) -> bool:
    return TOKEN.fullmatch(text) is not None


def is_session(text: str) -> bool:
    """Whether a session of this id can exist (a client may open only those without `--`)."""
    return _SESSION.fullmatch(text) is not None


def may_open(text: str) -> bool:
    """Whether a client may open a session of this id."""
    return is_token(text) and CHILD not in text


@lru_cache(maxsize=4096)
def derive(*parts: str | int) -> str:
    """A UUIDv5 (RFC 9562) that belongs to its parts: the same parts always give the same id."""
    name = "\x1f".join([str(part) for part in parts])
    # By hand, for `uuid.uuid5` takes nearly twice as long and a turn derives a dozen.
    value = bytearray(hashlib.sha1(_NAMESPACE + name.encode(), usedforsecurity=False).digest()[:16])
    value[6] = value[6] & 0x0F | 0x50
    value[8] = value[8] & 0x3F | 0x80
    text = value.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def digest(data: bytes) -> str:
    """128 bits of SHA-256 in hex: enough to tell one body or key from another."""
    return hashlib.sha256(data).hexdigest()[:32]


def uuid7(millis: int, random: bytes) -> str:
    """A UUIDv7 (RFC 9562) of this time in milliseconds and 10 random bytes."""
    value = (millis & (1 << 48) - 1) << 80 | int.from_bytes(random[:10], "big")
    value = value & ~(0xF << 76) | 7 << 76
    value = value & ~(0x3 << 62) | 2 << 62
    return str(uuid.UUID(int=value))
