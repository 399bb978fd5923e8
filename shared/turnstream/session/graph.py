"""A graph of nodes as far as is needed to say what comes next: nodes, edges, and how far a run of it has come.

Pure, like everything here, and without content: what a node is asked, calls or gives is in the agent's definition and
in the log. What is to be done for a node that may begin is said in `nodes.py`.

A node may begin when every edge to it has delivered or is dead, and one at least has delivered. An edge is dead when
its source will never give anything by its port: it has chosen another one, or nothing has reached it.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from turnstream.session.paths import name_of
from turnstream.session.state import Visit

Kind = Literal["input", "llm", "tool", "mcp", "router", "guardrail", "human", "agent", "map", "loop", "output"]
CALLS: frozenset[Kind] = frozenset({"tool", "mcp", "human", "agent"})
"""The nodes that are one call."""
ERR = "err"
"""The port by which a node fails."""
State = Literal["blocked", "dead", "ready", "begun", "finished"]


class Edge(msgspec.Struct, frozen=True):
    """From a node's port to another node. `into`: `in`, its only one; `any`: the value is that of the first of several
    that has delivered; `all`: the values of all of them."""

    source: str
    port: str
    target: str
    into: Literal["in", "any", "all"] = "in"


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """`asks_model`: of a guardrail. `graph` is what a map or a loop goes through; `collect`: a map goes on where an
    element fails."""

    id: str
    kind: Kind
    asks_model: bool = False
    graph: "Graph | None" = None
    collect: bool = False

    @property
    def speaks(self) -> bool:
        """Whether a model is called for it."""
        return self.kind == "llm" or self.asks_model


class Graph(msgspec.Struct, frozen=True):
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    def node(self, path: str) -> Node:
        """The node at this path. Raises `LookupError`."""
        graph: Graph | None = self
        for part in path.split(".")[:-1]:
            graph = _named(graph, part.partition("[")[0]).graph
        return _named(graph, name_of(path))

    def holding(self, path: str) -> "Graph":
        """The graph that the node at this path is one of. Raises `LookupError`."""
        outer = path.rpartition(".")[0]
        graph = self.node(outer.rpartition("[")[0]).graph if outer else self
        if graph is None:
            raise LookupError(path)
        return graph

    def edges_to(self, name: str) -> tuple[Edge, ...]:
        return tuple([edge for edge in self.edges if edge.target == name])

    def listens(self, name: str, port: str) -> bool:
        """Whether an edge leaves the node by this port."""
        return any(edge.source == name and edge.port == port for edge in self.edges)


def _named(graph: Graph | None, name: str) -> Node:
    for node in graph.nodes if graph else ():
        if node.id == name:
            return node
    raise LookupError(name)


class Walk:
    """One way through a graph: `outer` stands before the names of its nodes. `visits` are those of the run, by path.
    `other`: another way through the same graph."""

    def __init__(self, graph: Graph, visits: Mapping[str, Visit], outer: str = "", other: "Walk | None" = None) -> None:
        self.graph = graph
        self.outer = outer
        self._visits = visits
        self._states: dict[str, State] = {}
        self._inside: dict[str, tuple[Walk, ...]] = {}
        self._nodes = other._nodes if other else {node.id: node for node in graph.nodes}
        self._edges = other._edges if other else {node.id: graph.edges_to(node.id) for node in graph.nodes}

    def path(self, node: Node) -> str:
        return self.outer + node.id

    def visit(self, node: Node) -> Visit:
        path = self.path(node)
        return self._visits.get(path) or Visit(path)

    def inside(self, node: Node) -> "tuple[Walk, ...]":
        """The ways through the graph inside of a node that has begun: of a map all, of a loop the last one."""
        if node.graph is None:
            return ()
        if node.id not in self._inside:
            items = self.visit(node).items
            first = Walk(node.graph, self._visits)
            numbers = range(items) if node.kind == "map" else range(items - 1, items)
            self._inside[node.id] = tuple(
                [Walk(node.graph, self._visits, f"{self.path(node)}[{i}].", first) for i in numbers]
            )
        return self._inside[node.id]

    def state(self, node: Node) -> State:
        if node.id not in self._states:
            self._states[node.id] = self._state(node)
        return self._states[node.id]

    def _state(self, node: Node) -> State:
        visit = self.visit(node)
        if visit.port:
            return "finished"
        if visit.begun or visit.steps:
            return "begun"
        if node.kind == "input":
            return "ready"
        states = [self.delivers(edge) for edge in self._edges[node.id]]
        if None in states:
            return "blocked"
        return "ready" if any(states) else "dead"

    def delivers(self, edge: Edge) -> bool | None:
        """Whether the edge has delivered, or is dead (False); None: it may still do."""
        source = self._nodes[edge.source]
        match self.state(source):
            case "finished":
                return self.visit(source).port == edge.port
            case "dead":
                return False
            case "blocked" | "ready" | "begun":
                return None

    @property
    def is_over(self) -> bool:
        """Nothing in it goes on any more."""
        return all(self.state(node) in ("finished", "dead") for node in self.graph.nodes)

    @property
    def outputs(self) -> tuple[Node, ...]:
        """The output nodes that something has reached: one may be."""
        return tuple(
            [node for node in self.graph.nodes if node.kind == "output" and self.state(node) in ("finished", "ready")]
        )

    def failed(self) -> Iterator[Node]:
        """The nodes that have failed, and nothing takes note of it."""
        for node in self.graph.nodes:
            if self.visit(node).port == ERR and not self.graph.listens(node.id, ERR):
                yield node
