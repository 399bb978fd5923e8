"""Graphs as they are written: which are refused, every fault with its path, and what the core gets to walk."""

from typing import Any

import pytest

from turnstream.agents import AgentsError, check
from turnstream.agents.definition import Agent, define

SORTING = {
    "edges": [
        "question->sort",
        "sort.bug -> look",
        " sort.default  ->  answer.in ",
        "look -> report.any",
        "look.err -> report.any",
        "answer.out -> report.any",
    ],
    "nodes": {
        "question": {"type": "input", "description": "What somebody asks."},
        "sort": {"type": "router", "rules": [{"port": "bug", "when": 'input.contains("crash")'}]},
        "look": {"type": "tool", "tool": "count_words", "arguments": {"text": "{{ input }}"}},
        "answer": {"type": "llm"},
        "report": {"type": "output"},
    },
}


def agent(graph: object, **fields: Any) -> Agent:
    return define("x", {"name": "a", "model": "demo", "graph": graph, **fields})


def faults(graph: object, **fields: Any) -> list[str]:
    with pytest.raises(AgentsError) as caught:
        agent(graph, **fields)
    return [f"{fault.path}: {fault.message}" for fault in caught.value.faults]


def line(*edges: str, **nodes: Any) -> dict[str, Any]:
    """A graph with an input node `i` and an output node `o` besides."""
    return {"edges": list(edges), "nodes": {"i": {"type": "input"}, "o": {"type": "output"}, **nodes}}


def test_an_edge_is_kept_as_it_is_written_everywhere() -> None:
    graph = agent(SORTING).graph
    assert graph is not None
    assert graph.edges == (
        "question -> sort",
        "sort.bug -> look",
        "sort.default -> answer",
        "look -> report.any",
        "look.err -> report.any",
        "answer -> report.any",
    )
    assert agent(agent(SORTING).model_dump(mode="json")["graph"]) == agent(SORTING)
    tidy = {**SORTING, "edges": list(graph.edges)}
    assert agent(tidy).digest == agent(SORTING).digest


def test_the_core_gets_nodes_and_edges_as_it_calls_them() -> None:
    inner = line("i2 -> g", "g.allow -> o2", g={"type": "guardrail", "check": "{{ input }}"})
    inner["nodes"]["i2"], inner["nodes"]["o2"] = inner["nodes"].pop("i"), inner["nodes"].pop("o")
    again = line("i3 -> o3")
    again["nodes"] = {"i3": {"type": "input"}, "o3": {"type": "output"}}
    whole = line(
        "i -> m",
        "m -> l",
        "l -> o.any",
        m={"type": "map", "graph": inner, "on_error": "collect"},
        l={"type": "loop", "graph": again, "until": "true", "max_iterations": 3},
    )
    assert agent(whole).topology() == {
        "nodes": [
            {"id": "i", "kind": "input"},
            {"id": "o", "kind": "output"},
            {
                "id": "m",
                "kind": "map",
                "collect": True,
                "graph": {
                    "nodes": [
                        {"id": "g", "kind": "guardrail", "asks_model": True},
                        {"id": "i2", "kind": "input"},
                        {"id": "o2", "kind": "output"},
                    ],
                    "edges": [
                        {"source": "i2", "port": "out", "target": "g", "into": "in"},
                        {"source": "g", "port": "allow", "target": "o2", "into": "in"},
                    ],
                },
            },
            {
                "id": "l",
                "kind": "loop",
                "max_iterations": 3,
                "graph": {
                    "nodes": [{"id": "i3", "kind": "input"}, {"id": "o3", "kind": "output"}],
                    "edges": [{"source": "i3", "port": "out", "target": "o3", "into": "in"}],
                },
            },
        ],
        "edges": [
            {"source": "i", "port": "out", "target": "m", "into": "in"},
            {"source": "m", "port": "out", "target": "l", "into": "in"},
            {"source": "l", "port": "out", "target": "o", "into": "any"},
        ],
    }
    assert agent(SORTING).topology() != agent(whole).topology()
    assert define("x", {"name": "a", "model": "demo"}).topology() is None


@pytest.mark.parametrize(
    ("edges", "fault"),
    [
        (["i -> x", "x -> o", "x -> o"], "graph.edges.2: `x -> o` is there twice"),
        (["i -> x", "x -> o", "i -> o"], "graph.edges.2: a second edge into 'o', which takes one"),
        (["i -> x", "x -> o.any", "i -> o.all"], "graph.edges.2: 'o' is entered through 'any' already"),
        (["i -> x", "x -> o", "nobody -> o.any"], "graph.edges.2: no node 'nobody' in this graph"),
        (["i -> x", "x -> nobody", "x -> o"], "graph.edges.1: no node 'nobody' in this graph"),
        (["i -> x", "x.bug -> o"], "graph.edges.1: 'x' has no port 'bug'; it has out, err"),
        (["i.err -> x", "x -> o"], "graph.edges.0: 'i' has no port 'err'; it has out"),
        (["i -> x", "x -> o", "o -> x.any"], "graph.edges.2: 'o' is an output node: nothing leads out of it"),
        (["i -> x", "x -> o", "x -> i"], "graph.edges.2: 'i' is an input node: nothing leads into it"),
        (["i -> x.any", "x -> o", "x -> x.any"], "graph.edges: a cycle: x -> x"),
        (["i -> x", "x -> y", "y -> x.any", "x -> o"], "graph.edges: a cycle: "),
        (["i -> x"], "graph.nodes.o: unreachable"),
        (["i -> o"], "graph.nodes.x: unreachable"),
        (["i -> x", "x -> o.all.any"], "graph.edges.1: 'x -> o.all.any' is no edge; one is written `source -> "),
        (["i -> x", "x -> o.none"], "graph.edges.1: o.none: a node is entered through `in`, `any` or `all`"),
        (["i -> x", "x => o"], "graph.edges.1: 'x => o' is no edge"),
        (["i -> x", ""], "graph.edges.1: '' is no edge"),
        (["i -> x", 3], "graph.edges.1: input should be a valid string"),
        ("i -> x", "graph.edges: "),
    ],
)
def test_edges_fit_the_nodes(edges: object, fault: str) -> None:
    nodes = {"i": {"type": "input"}, "o": {"type": "output"}, "x": {"type": "llm"}}
    if "y" in str(edges):
        nodes["y"] = {"type": "llm"}
    assert any(one.startswith(fault) for one in faults({"nodes": nodes, "edges": edges})), faults(
        {"nodes": nodes, "edges": edges}
    )


def test_a_node_tells_a_model_only_what_its_api_has() -> None:
    nodes = {"one": {"type": "llm", "params": {"seed": 1}}, "two": {"type": "llm", "model": "openai:gpt-5"}}
    found = agent(line("i -> one", "one -> two", "two -> o", **nodes), model="anthropic:x", params={"stop": ["."]})
    assert [str(fault) for fault in check("a", found, (), {}, ())] == [
        "a: graph.nodes.one.params: Anthropic's Messages API has no seed, through which model 'anthropic:x' is asked",
        "a: graph.nodes.two.params: OpenAI's Responses API has no stop, through which model 'openai:gpt-5' is asked",
    ]
