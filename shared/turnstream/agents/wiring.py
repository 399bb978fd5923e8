"""Whether the edges of a graph fit its nodes: what can be said of a graph from the outlines of its nodes alone."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from turnstream.agents.edges import Edge
from turnstream.agents.outline import Outline
from turnstream.agents.terms import Place

Faults = Iterator[tuple[Place, str]]
Edges = Mapping[int, Edge]
"""By the place in which they are written; what could not be read is not among them."""


def faults_of(nodes: Mapping[str, Outline], edges: Edges, whole: bool) -> Faults:
    """`whole`: every edge could be read."""
    yield from _inputs(nodes)
    yield from _ids(nodes)
    for i, edge in edges.items():
        for message in _ends(nodes, edge):
            yield ("edges", i), message
    yield from _entrances(edges)
    for cycle in _cycles(nodes, edges):
        yield ("edges",), f"a cycle: {' -> '.join(cycle)}"
    if whole:
        yield from _unreached(nodes, edges)


def _inputs(nodes: Mapping[str, Outline]) -> Faults:
    first, *more = [name for name, node in nodes.items() if node.kind == "input"] or [""]
    if not first and all(node.kind for node in nodes.values()):
        yield ("nodes",), "no input node; exactly one is needed"
    for name in more:
        yield ("nodes", name), f"a second input node; {first!r} is one already"


def _ids(nodes: Mapping[str, Outline]) -> Faults:
    """Ids that are there twice: in this graph and inside one of its nodes, or inside two of them."""
    owner = {name: name for name in nodes}
    for name, node in nodes.items():
        for inner in node.inner:
            if (other := owner.setdefault(inner, name)) != name:
                where = f"inside {other!r}" if other != inner else "in the graph around it"
                yield ("nodes", name), f"the id {inner!r} inside it is there twice: there is one {where}"


def _ends(nodes: Mapping[str, Outline], edge: Edge) -> Iterator[str]:
    source, target = nodes.get(edge.source), nodes.get(edge.target)
    if source is None:
        yield f"no node {edge.source!r} in this graph"
    elif source.kind == "output":
        yield f"{edge.source!r} is an output node: nothing leads out of it"
    elif source.ports is not None and edge.port not in source.ports:
        yield f"{edge.source!r} has no port {edge.port!r}; it has {', '.join(source.ports)}"
    if target is None:
        if edge.target != edge.source:
            yield f"no node {edge.target!r} in this graph"
    elif target.kind == "input":
        yield f"{edge.target!r} is an input node: nothing leads into it"


def _entrances(edges: Edges) -> Faults:
    into: dict[str, dict[int, Edge]] = defaultdict(dict)
    for i, edge in edges.items():
        into[edge.target][i] = edge
    for target, found in into.items():
        first = next(iter(found.values()))
        seen: set[Edge] = set()
        for i, edge in found.items():
            if edge in seen:
                yield ("edges", i), f"`{edge}` is there twice"
            elif edge.into != first.into:
                yield ("edges", i), f"{target!r} is entered through {first.into!r} already; a node uses one in-port"
            elif edge.into == "in" and edge is not first:
                yield ("edges", i), f"a second edge into {target!r}, which takes one; more are for `any` or `all`"
            seen.add(edge)


def _cycles(nodes: Mapping[str, Outline], edges: Edges) -> Iterator[list[str]]:
    """One after the other: each is broken up once it is found."""
    before: dict[str, dict[str, None]] = {name: {} for name in nodes}
    for edge in edges.values():
        if edge.source in nodes and edge.target in nodes:
            before[edge.target][edge.source] = None
    while True:
        try:
            TopologicalSorter(before).prepare()
        except CycleError as error:
            cycle: list[str] = error.args[1]
            yield cycle
            for node in cycle:
                for source in cycle:
                    before[node].pop(source, None)
        else:
            return


def _unreached(nodes: Mapping[str, Outline], edges: Edges) -> Faults:
    """Nodes that nothing leads to from an input. What a node that is not there would lead to counts as reached."""
    inputs = [name for name, node in nodes.items() if node.kind in ("input", "")]
    if not inputs:
        return
    after: dict[str, list[str]] = defaultdict(list)
    for edge in edges.values():
        after[edge.source].append(edge.target)
    reached: set[str] = set()
    ahead = [*inputs, *(source for source in after if source not in nodes)]
    while ahead:
        name = ahead.pop()
        if name not in reached:
            reached.add(name)
            ahead += after[name]
    for name in nodes:
        if name not in reached:
            yield ("nodes", name), "unreachable: no edge leads to it from the input node"
