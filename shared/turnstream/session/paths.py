"""Paths of nodes: `draft`, and in the graph of another node, of its element or iteration 3, `each[3].draft`."""

import re
from typing import Final

_INSIDE: Final = re.compile(r"\[([0-9]+)\]\.")


def name_of(path: str) -> str:
    """The node's own name."""
    return path.rpartition(".")[2]


def outer_of(path: str) -> str:
    """What stands before the names of all nodes of the same graph: `each[3].`, or nothing."""
    return path[: len(path) - len(name_of(path))]


def place(path: str) -> dict[str, str]:
    """How an event says where it belongs."""
    return {"node": name_of(path), "path": path}


def is_within(path: str, node: str) -> bool:
    """Whether this is the path of the node, or of one in the graph inside of it."""
    return path == node or path.startswith(f"{node}[")


def around(path: str) -> dict[str, int]:
    """The nodes in whose graphs the node at this path is, the outermost first, and of each the element, or the
    iteration: of `each[3].again[0].draft`, `each` 3 and `each[3].again` 0."""
    return {path[: inside.start()]: int(inside[1]) for inside in _INSIDE.finditer(path)}
