"""Whether what the texts of a graph say of other nodes, `nodes.<id>`, can be there when they are carried out: the node
comes before, in the same graph or in one around it.
"""

from collections import defaultdict
from collections.abc import Iterator

from turnstream.agents import expressions, templates
from turnstream.agents.graph import Graph
from turnstream.agents.nodes import (
    AgentNode,
    GuardrailNode,
    HumanNode,
    LlmNode,
    LoopNode,
    MapNode,
    McpNode,
    Node,
    RouterNode,
    ToolNode,
)
from turnstream.agents.terms import Place
from turnstream.agents.texts import strings_of


def faults_of(graph: Graph, around: frozenset[str] = frozenset()) -> Iterator[tuple[Place, str]]:
    """`around`: the nodes that come before this graph, in those it lies in."""
    for name, node in graph.nodes.items():
        before = around | _before(graph, name)
        for place, named in _named(node):
            for other in sorted(named - before):
                what = f"does not come before {name!r}" if other in graph.nodes else "is no node that comes before it"
                yield ("nodes", name, *place), f"`nodes.{other}`: {other!r} {what}"
        if isinstance(node, MapNode | LoopNode):
            for place, message in faults_of(node.graph, before):
                yield ("nodes", name, "graph", *place), message


def _before(graph: Graph, name: str) -> frozenset[str]:
    sources: dict[str, list[str]] = defaultdict(list)
    for edge in graph.wires:
        sources[edge.target].append(edge.source)
    before: set[str] = set()
    ahead = list(sources[name])
    while ahead:
        other = ahead.pop()
        if other not in before:
            before.add(other)
            ahead += sources[other]
    return frozenset(before)


def _named(node: Node) -> Iterator[tuple[Place, frozenset[str]]]:
    match node:
        case LlmNode() | AgentNode() | HumanNode():
            yield ("prompt",), templates.parse(node.prompt).nodes
        case ToolNode() | McpNode():
            for place, text in strings_of(node.arguments):
                yield ("arguments", *place), templates.parse(text).nodes
        case RouterNode():
            for i, rule in enumerate(node.rules):
                yield ("rules", i, "when"), expressions.parse(rule.when).nodes
        case GuardrailNode():
            if node.rule is not None:
                yield ("rule",), expressions.parse(node.rule).nodes
            if node.check is not None:
                yield ("check",), templates.parse(node.check).nodes
        case MapNode(over=str(over)):
            yield ("over",), expressions.parse(over).nodes
        case LoopNode():
            yield ("until",), expressions.parse(node.until).nodes
        case _:
            pass
