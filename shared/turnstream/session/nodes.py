"""What comes next in a run of a graph: `next_steps(run, graph)`. The interpreter: pure, so nothing is ever run again by
going through it, and a node that has finished least of all.

Of each node that may begin, or goes on, one step at a time. What its open calls need is not said here but in `plan.py`,
as for the calls of any run.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from turnstream.session.events import Error
from turnstream.session.graph import CALLS, Graph, Node, Walk
from turnstream.session.state import Run, Visit


class Step(msgspec.Struct, frozen=True):
    """`speak`: the model of the node at `path` is called. `begin`: the node begins that is a call, or is gone through.
    `decide`: it is found out what the node gives, or how it goes on, of what has reached it, or of what the graph
    inside of it has come to. `visit` is what has become of it."""

    how: Literal["speak", "begin", "decide"]
    path: str
    visit: Visit


class Over(msgspec.Struct, frozen=True):
    """Nothing goes on any more: the run has come to its end, or to `error`. `output` is the path of the output node
    that was reached, empty where none was."""

    output: str = ""
    error: Error | None = None


def next_steps(run: Run, graph: Graph) -> tuple[Step, ...] | Over:
    """Without any step and not over, the run waits for what its open calls come to."""
    whole = Walk(graph, {visit.path: visit for visit in run.visits})
    ways = tuple(_ways(whole))
    for way in ways:
        if len(way.outputs) > 1:
            names = " and ".join([way.path(node) for node in way.outputs])
            error = Error(code="multiple_outputs", message=f"output nodes {names} were reached, and only one may be")
            return Over(error=error)
    steps = tuple([step for way in ways for node in way.graph.nodes if (step := _step(run, way, node))])
    if steps or not whole.is_over:
        return steps
    return Over(output="".join([whole.path(node) for node in whole.outputs]))


def _ways(walk: Walk) -> Iterator[Walk]:
    """The graph, and those that are gone through inside of its nodes."""
    yield walk
    for node in walk.graph.nodes:
        if node.graph and walk.state(node) == "begun" and not _is_through(walk, node):
            for way in walk.inside(node):
                yield from _ways(way)


def _is_through(walk: Walk, node: Node) -> bool:
    """Whether everything inside of a map or a loop is over, or it is for something in it has failed."""
    inside = walk.inside(node)
    return all(way.is_over for way in inside) or (not node.collect and any(any(way.failed()) for way in inside))


def _step(run: Run, walk: Walk, node: Node) -> Step | None:
    path, visit = walk.path(node), walk.visit(node)
    match walk.state(node):
        case "ready" if node.speaks:
            return Step("speak", path, visit)
        case "ready":
            return Step("begin" if node.kind in CALLS or node.graph else "decide", path, visit)
        case "begun" if node.speaks:
            return None if run.calls_at(path) else Step("speak", path, visit)
        case "begun" if node.graph:
            return Step("decide", path, visit) if _is_through(walk, node) else None
        case _:
            return None
