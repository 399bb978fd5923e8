"""What of an error may be shown to models and people: its kind and first line, short, without credentials.

An exception's text is written by others. What looks like a key, a password or the user part of an address is struck
out; that is a net, not a promise, so nothing here is a reason to put a secret into an exception.
"""

import re

from turnstream_runner.unicode import fit

MAX = 500
"""Characters of one message."""
STRUCK = "***"

_SECRET = re.compile(
    r"""(?P<keep>://)[^/\s@]+(?=@)"""
    r"""|(?P<name>(?i:api[_-]?key|access[_-]?key|token|secret|passw(?:or)?d|authorization)["']?\s*[=:]\s*["']?)"""
    r"""(?!Bearer\b|Basic\b)[^\s"',;&]+"""
    r"""|(?P<scheme>(?i:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{6,}"""
    r"""|\b(?:sk|pk|rk|ghp|gho|ghs|xoxb|xoxp)[-_][A-Za-z0-9_*-]{6,}"""
)


def shown(error: BaseException) -> str:
    """`ValueError: what happened`, or only the kind where there is no text."""
    kind = type(error).__name__
    text = line(str(error))
    return f"{kind}: {text}" if text else kind


def line(text: str) -> str:
    """The first line of a text, short, without credentials."""
    first = next((part.strip() for part in fit(text).splitlines() if part.strip()), "")
    without = struck(first[: 4 * MAX])
    return without if len(without) <= MAX else f"{without[:MAX]}…"


def struck(text: str) -> str:
    """The text without credentials."""
    return _SECRET.sub(lambda found: (found["keep"] or found["name"] or found["scheme"] or "") + STRUCK, text)
