"""Text from outside, made fit to be stored: valid UTF-8 without NUL (which PostgreSQL cannot hold). Nothing else is
changed: control characters, odd line ends and unpaired marks stay as they are.
"""

import re

REPLACEMENT = "\ufffd"

_UNFIT = re.compile("[\0\ud800-\udfff]")
_HIGH = re.compile("[\ud800-\udbff]\\Z")


def fit(text: str) -> str:
    """Surrogates that make a pair become their character; what is alone, and NUL, becomes U+FFFD."""
    if not _UNFIT.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\0", REPLACEMENT)


class Joined:
    """The same for a text that comes in pieces: a pair that is cut in two by a piece's end is still a pair."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        text = self._held + piece
        self._held = text[-1] if _HIGH.search(text) else ""
        return fit(text[:-1] if self._held else text)

    def end(self) -> str:
        held, self._held = self._held, ""
        return fit(held)
