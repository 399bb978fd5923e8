"""The graph of an agent: nodes by their ids, and edges from a node's port to a node. Data: the core walks it (from its
`topology`), the runner carries its nodes out.

A graph is refused as a whole: with every fault in it, each with the place it is at.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Final, cast

from pydantic import AfterValidator, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from turnstream.agents import edges as written
from turnstream.agents.edges import Edge
from turnstream.agents.nodes import PORT, AgentNode, GuardrailNode, LlmNode, LoopNode, MapNode, Node, ToolNode
from turnstream.agents.outline import edges_of, is_deeper, is_graph, outlines_of
from turnstream.agents.terms import Definition, Fixed, Place, fault, lines_of, refusal
from turnstream.agents.wiring import faults_of

DEPTH_MAX: Final = 4
"""Graphs inside graphs, the outermost counted."""
NODES_MAX: Final = 200
"""Nodes of a graph, those of the graphs inside it counted."""
_ID: Final = re.compile(PORT)


def _id(name: str) -> str:
    if not _ID.fullmatch(name):
        raise fault("no id of a node: that is a small letter, and up to 31 small letters, digits or `_` after it")
    return name


def _edge(text: str) -> str:
    """As it is written everywhere: what need not be said is not."""
    try:
        return str(written.parse(text))
    except ValueError as error:
        raise fault(str(error)) from None


class Graph(Definition):
    """`edges` are texts, `source[.port] -> target[.in-port]`; `wires` is what they say. Whether they fit the nodes is
    asked where a graph is put to use: `WholeGraph`."""

    nodes: Mapping[Annotated[str, AfterValidator(_id)], Node]
    edges: Annotated[Sequence[Annotated[str, AfterValidator(_edge)]], Fixed] = ()

    @cached_property
    def wires(self) -> tuple[Edge, ...]:
        return tuple(written.parse(edge) for edge in self.edges)

    def walk(self) -> Iterator[tuple[Place, Node]]:
        """Every node with its place in this graph, those of the graphs inside it too."""
        for name, node in self.nodes.items():
            place = ("nodes", name)
            yield place, node
            if isinstance(node, MapNode | LoopNode):
                for inner, one in node.graph.walk():
                    yield (*place, "graph", *inner), one

    def tools(self) -> Iterator[tuple[Place, str]]:
        """The registered tools that its nodes name, each with the place where."""
        for place, node in self.walk():
            match node:
                case ToolNode():
                    yield (*place, "tool"), node.tool
                case LlmNode(tools=tools) if tools:
                    yield from (((*place, "tools", i), tool) for i, tool in enumerate(tools))
                case _:
                    pass

    def agents(self) -> Iterator[tuple[Place, str]]:
        """The agents that its nodes name, `name` or `name@version`, each with the place where."""
        return (((*place, "agent"), node.agent) for place, node in self.walk() if isinstance(node, AgentNode))

    def topology(self) -> dict[str, object]:
        """What the core walks: `msgspec.convert` makes a `turnstream.session.graph.Graph` of it."""
        return {
            "nodes": [_corner(name, node) for name, node in self.nodes.items()],
            "edges": [
                {"source": edge.source, "port": edge.port, "target": edge.target, "into": edge.into}
                for edge in self.wires
            ],
        }


def _corner(name: str, node: Node) -> dict[str, object]:
    corner: dict[str, object] = {"id": name, "kind": node.type}
    match node:
        case GuardrailNode():
            corner["asks_model"] = node.check is not None
        case MapNode():
            corner |= {"graph": node.graph.topology(), "collect": node.on_error == "collect"}
        case LoopNode():
            corner |= {"graph": node.graph.topology()}
        case _:
            pass
    return corner


def _wrong(graph: object) -> Iterator[tuple[Place, str]]:
    """What is wrong between nodes and edges, whether or not each is right in itself."""
    outlines, edges = outlines_of(graph), edges_of(graph)
    wires: dict[int, Edge] = {}
    for i, edge in enumerate(edges):
        try:
            wires[i] = written.parse(edge if isinstance(edge, str) else "")
        except ValueError:
            pass  # that it is none is said where it is read
    yield from faults_of(outlines, wires, whole=len(wires) == len(edges))
    if (count := sum(1 + len(node.inner) for node in outlines.values())) > NODES_MAX:
        yield ("nodes",), f"{count} nodes, more than {NODES_MAX}"


def _whole(data: object, handler: ValidatorFunctionWrapHandler) -> Graph:
    if is_deeper(data, DEPTH_MAX):
        raise fault(f"graphs inside graphs, more than {DEPTH_MAX} deep")
    try:
        graph, lines = cast(Graph, handler(data)), []
    except ValidationError as error:
        graph, lines = None, lines_of(error)
    found = list(_wrong(data)) if is_graph(data) else []
    if graph is None or found:
        raise refusal(found, lines)
    return graph


WholeGraph = Annotated[Graph, WrapValidator(_whole)]

MapNode.model_rebuild()
LoopNode.model_rebuild()
Graph.model_rebuild()
