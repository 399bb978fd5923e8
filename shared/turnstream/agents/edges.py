"""The edges of a graph, as they are written: `source[.port] -> target[.in-port]`.

A port that is not said is `out`, an in-port `in`. The in-port says what the target gets: `in` the one value that comes,
`any` the first that came, in the order written, `all` an object of those that came, by their sources.
"""

import re
from typing import Final, Literal

import msgspec

from turnstream.agents.nodes import OUT, PORT

In = Literal["in", "any", "all"]
INS: Final[tuple[In, ...]] = ("in", "any", "all")
_EDGE: Final = re.compile(rf"\s*({PORT})(?:\.({PORT}))?\s*->\s*({PORT})(?:\.({PORT}))?\s*")
_EXAMPLE: Final = "`source -> target`, `source.port -> target.any`"


class Edge(msgspec.Struct, frozen=True, order=True):
    source: str
    port: str
    target: str
    into: In

    def __str__(self) -> str:
        port = "" if self.port == OUT else f".{self.port}"
        into = "" if self.into == "in" else f".{self.into}"
        return f"{self.source}{port} -> {self.target}{into}"


def parse(text: str) -> Edge:
    """Raises `ValueError` with a message for people."""
    found = _EDGE.fullmatch(text)
    if not found:
        raise ValueError(f"{text[:100]!r} is no edge; one is written {_EXAMPLE}")
    source, port, target, into = found.groups(default="")
    into = into or "in"
    if into not in INS:
        raise ValueError(f"{target}.{into}: a node is entered through `in`, `any` or `all`")
    return Edge(source, port or OUT, target, into)
