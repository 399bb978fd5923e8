"""What can be read of a graph that may be wrong: as it was written, or as the models that were made of it.

So that every fault of a definition is named at once, what is between the nodes is looked at even where a node is wrong
in itself. Nothing here refuses anything.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import msgspec

from turnstream.agents.nodes import DEFAULT, TYPES


class Outline(msgspec.Struct, frozen=True):
    """A node from outside. `kind` is empty and `ports` None where they could not be read; `inner`: the ids of the nodes
    in the graph inside it, all the way down."""

    kind: str
    ports: Sequence[str] | None
    inner: Sequence[str] = ()


def outlines_of(graph: object) -> dict[str, Outline]:
    return {name: _outline(node) for name, node in _nodes(graph)}


def edges_of(graph: object) -> Sequence[object]:
    return _sequence(_field(graph, "edges"))


def is_graph(graph: object) -> bool:
    return isinstance(_field(graph, "nodes"), Mapping)


def is_deeper(graph: object, levels: int) -> bool:
    """Whether graphs lie in graphs, more than so many, the outermost counted."""
    inside = [_field(node, "graph") for _, node in _nodes(graph)]
    return levels == 0 or any(is_deeper(one, levels - 1) for one in inside if one is not None)


def _outline(node: object) -> Outline:
    kind = _field(node, "type")
    if not isinstance(kind, str) or kind not in TYPES:
        return Outline("", None)
    if kind != "router":
        return Outline(kind, TYPES[kind].PORTS, tuple(_inner(_field(node, "graph"))))
    ports = [_field(rule, "port") for rule in _sequence(_field(node, "rules"))]
    named = [port for port in ports if isinstance(port, str)]
    return Outline(kind, (*named, DEFAULT) if len(named) == len(ports) else None)


def _inner(graph: object) -> Iterator[str]:
    for name, node in _nodes(graph):
        yield name
        yield from _inner(_field(node, "graph"))


def _nodes(graph: object) -> Iterator[tuple[str, object]]:
    nodes = _field(graph, "nodes")
    if isinstance(nodes, Mapping):
        for name, node in cast("Mapping[object, object]", nodes).items():
            if isinstance(name, str):
                yield name, node


def _field(said: object, name: str) -> object:
    if isinstance(said, Mapping):
        return cast("Mapping[str, object]", said).get(name)
    return getattr(said, name, None)


def _sequence(said: object) -> Sequence[object]:
    return cast("Sequence[object]", said) if isinstance(said, (list, tuple)) else ()
