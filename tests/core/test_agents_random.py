"""Graphs at random: a valid one stays what it is, and damage is always named with its place."""

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given as for_all
from hypothesis import strategies as st

from turnstream.agents import Agent, AgentsError, Fault
from turnstream.agents.definition import define
from turnstream.agents.edges import parse
from turnstream.agents.nodes import TYPES

FIELDS: dict[str, dict[str, Any]] = {
    "llm": {"prompt": "{{ input }}", "output": {"type": "object"}, "tools": ["add"]},
    "tool": {"tool": "add", "arguments": {"a": ["{{ input }}", 1, None]}},
    "mcp": {"server": "time", "tool": "now"},
    "router": {"rules": [{"port": "yes", "when": "input == 1"}]},
    "guardrail": {"rule": "true"},
    "human": {"prompt": "?", "schema": {"type": "string"}, "choices": ["a", "b"]},
    "agent": {"agent": "default"},
    "map": {"over": "input", "on_error": "collect"},
    "loop": {"until": "true", "max_iterations": 3},
    "output": {},
}


@st.composite
def graphs(draw: st.DrawFn, depth: int = 3, prefix: str = "n") -> dict[str, Any]:
    """An input, then nodes each of which is entered from some of those before it."""
    nodes: dict[str, Any] = {f"{prefix}_start": {"type": "input"}}
    edges: list[str] = []
    leavable = [f"{prefix}_start"]
    for i in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(sorted(FIELDS if depth else FIELDS.keys() - {"map", "loop"})))
        name = f"{prefix}{i}"
        node = {"type": kind, **FIELDS[kind]}
        if kind in ("map", "loop"):
            node["graph"] = draw(graphs(depth=depth - 1 if depth < 3 else 2, prefix=f"{name}_"))
        sources = draw(st.lists(st.sampled_from(leavable), min_size=1, max_size=3, unique=True))
        into = (
            draw(st.sampled_from(["any", "all"])) if len(sources) > 1 else draw(st.sampled_from(["in", "any", "all"]))
        )
        for source in sources:
            ports = ("yes", "default") if nodes[source]["type"] == "router" else TYPES[nodes[source]["type"]].PORTS
            edges.append(f"{source}.{draw(st.sampled_from(ports))} -> {name}.{into}")
        nodes[name] = node
        if kind != "output":
            leavable.append(name)
    return {"nodes": nodes, "edges": edges}


def agent(graph: object) -> Agent:
    servers = {"time": {"url": "https://time.example/mcp"}}
    return define("x", {"name": "a", "model": "demo", "mcp": servers, "graph": graph})


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of everything in a value."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from leaves(inner, (*path, i))


def wires(topology: Any) -> Iterator[tuple[str, str, str, str]]:
    for edge in topology["edges"]:
        yield edge["source"], edge["port"], edge["target"], edge["into"]
    for node in topology["nodes"]:
        if node.get("graph"):
            yield from wires(node["graph"])


def texts(graph: Any) -> Iterator[str]:
    yield from graph["edges"]
    for node in graph["nodes"].values():
        if "graph" in node:
            yield from texts(node["graph"])


@for_all(graphs())
def test_a_valid_graph_stays_what_it_is(graph: dict[str, Any]) -> None:
    defined = agent(graph)
    again = define("x", json.loads(json.dumps(defined.model_dump(mode="json"))))
    short = define("x", json.loads(json.dumps(defined.model_dump(mode="json", exclude_defaults=True))))
    assert again == short == defined
    assert again.digest == short.digest == defined.digest
    assert again.topology() == defined.topology()
    said = sorted((edge.source, edge.port, edge.target, edge.into) for edge in map(parse, texts(graph)))
    assert sorted(wires(defined.topology())) == said


JUNK = st.sampled_from([None, True, 0, -1, 1.5, "", "x", "{{", "input", "a -> b", [], [1], {}, {"type": "llm"}, "n0"])


@for_all(graphs(), st.data())
def test_damage_is_named_or_does_no_harm(graph: dict[str, Any], data: st.DataObject) -> None:
    broken: Any = copy.deepcopy(graph)
    for _ in range(data.draw(st.integers(1, 4))):
        *path, last = data.draw(st.sampled_from([place for place in leaves(broken) if place] or [("nodes",)]))
        inside = broken
        for part in path:
            inside = inside[part]
        if data.draw(st.booleans()):
            inside[last] = data.draw(JUNK)
        elif isinstance(inside, dict):
            inside[f"{last}x"] = inside.pop(last)
        else:
            inside.append(inside.pop(last))
            inside.append(data.draw(JUNK))
    for fault in faults(broken):
        assert fault.path == "graph" or fault.path.startswith(("graph.nodes", "graph.edges")), fault
        assert fault.message


def faults(graph: object) -> tuple[Fault, ...]:
    """Of what is harmless after all: that it is still the same once it is written and read."""
    try:
        whole = agent(graph)
    except AgentsError as error:
        return error.faults
    assert whole == agent(json.loads(json.dumps(whole.model_dump(mode="json")))["graph"])
    return ()
