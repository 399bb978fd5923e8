"""Graphs as they are written: which are refused, every fault with its path, and what the core gets to walk."""

from itertools import pairwise
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
    nodes: dict[str, Any] = {
        "one": {"type": "llm", "params": {"seed": 1}},
        "two": {"type": "llm", "model": "openai:gpt-5"},
        "three": {"type": "guardrail", "check": "ok?", "model": "openai:gpt-5"},
        "four": {"type": "guardrail", "rule": "true"},
    }
    edges = ("i -> one", "one -> two", "two -> three", "three.allow -> four", "four.allow -> o")
    found = agent(line(*edges, **nodes), model="anthropic:x", params={"stop": ["."]})
    assert [str(fault) for fault in check("a", found, (), {}, ())] == [
        "a: graph.nodes.one.params: Anthropic's Messages API has no seed, through which model 'anthropic:x' is asked",
        "a: graph.nodes.two.params: OpenAI's Responses API has no stop, through which model 'openai:gpt-5' is asked",
        "a: graph.nodes.three.params: OpenAI's Responses API has no stop, through which model 'openai:gpt-5' is asked",
    ]


def test_ports_are_those_that_a_type_has() -> None:
    for kind, ports in {
        "input": "out",
        "llm": "out, err",
        "tool": "out, err",
        "mcp": "out, err",
        "router": "yes, default",
        "guardrail": "allow, block",
        "human": "out",
        "agent": "out, err",
        "map": "out",
        "loop": "out",
    }.items():
        graph = line("i -> x", "x.zzz -> o", x=PLAIN[kind]) if kind != "input" else line("i.zzz -> o")
        name = "i" if kind == "input" else "x"
        edge = 0 if kind == "input" else 1
        found = faults(graph, mcp={"time": {"command": ["time"]}})
        assert found == [f"graph.edges.{edge}: {name!r} has no port 'zzz'; it has {ports}"]


def inside(start: str, end: str, **node: Any) -> dict[str, Any]:
    """A graph from `start` to `end`, with one node between them if it is said."""
    through = [start, *node, end]
    return {
        "nodes": {start: {"type": "input"}, end: {"type": "output"}, **node},
        "edges": [f"{a} -> {b}" for a, b in pairwise(through)],
    }


PLAIN: dict[str, dict[str, Any]] = {
    "input": {"type": "input"},
    "llm": {"type": "llm"},
    "tool": {"type": "tool", "tool": "add"},
    "mcp": {"type": "mcp", "server": "time", "tool": "now"},
    "router": {"type": "router", "rules": [{"port": "yes", "when": "true"}]},
    "guardrail": {"type": "guardrail", "rule": "true"},
    "human": {"type": "human", "prompt": "?"},
    "agent": {"type": "agent", "agent": "default"},
    "map": {"type": "map", "graph": inside("mi", "mo")},
    "loop": {"type": "loop", "until": "true", "max_iterations": 2, "graph": inside("li", "lo")},
    "output": {"type": "output"},
}


@pytest.mark.parametrize(
    ("kind", "fields", "found"),
    [
        ("input", {"prompt": "x"}, "x.prompt: unknown field"),
        ("llm", {"prompt": "{{ nope }}"}, "x.prompt: is no template: line 1: unknown name 'nope'"),
        ("llm", {"prompt": ""}, "x.prompt: string should have at least 1 character"),
        ("llm", {"tools": ["add", "add"]}, "x.tools: named twice: add"),
        ("llm", {"tools": ["a b"]}, "x.tools.0: string should match"),
        ("llm", {"mcp": ["time", "space"]}, "x.mcp.1: unknown server 'space'; the agent has time"),
        ("llm", {"params": {"temperature": 9}}, "x.params.temperature: input should be less"),
        ("llm", {"control": {"fly": True}}, "x.control.fly: unknown field"),
        ("llm", {"output": {"type": 3}}, "x.output: is no schema that can be used: "),
        ("llm", {"output": {"$ref": "#"}}, "x.output: is no schema that can be used: $ref cannot be used"),
        ("llm", {"output": []}, "x.output: is not an object"),
        ("tool", {"arguments": {"a": [{"b": "{{"}], "c": "{% if %}"}}, "x.arguments.a.0.b: is no template"),
        ("tool", {"arguments": {"a": [{"b": "{{"}], "c": "{% if %}"}}, "x.arguments.c: is no template"),
        ("tool", {"arguments": {"a": float("inf")}}, "x.arguments.a: inf is no number that JSON has"),
        ("tool", {"arguments": {"\ud800": 1}}, "x.arguments: '\\ud800' is no key of an object"),
        ("tool", {"arguments": "{{ input }}"}, "x.arguments: is not an object"),
        ("tool", {"tool": None}, "x.tool: input should be a valid string"),
        ("mcp", {"server": "space"}, "x.server: unknown server 'space'; the agent has time"),
        ("mcp", {"tool": "then"}, "x.tool: 'then' is not among the tools of 'time' that may be used"),
        ("router", {"rules": []}, "x.rules: a router has rules"),
        ("router", {"rules": [{"port": "a", "when": "true"}] * 2}, "x.rules.1.port: 'a' is the port of another rule"),
        (
            "router",
            {"rules": [{"port": "default", "when": "true"}]},
            "x.rules.0.port: `default` is where",
        ),
        ("router", {"rules": [{"port": "A", "when": "true"}]}, "x.rules.0.port: string should match"),
        (
            "router",
            {"rules": [{"port": "a", "when": "input =="}]},
            "x.rules.0.when: is no expression: ",
        ),
        ("router", {"rules": [{"port": "a", "when": "y"}]}, "x.rules.0.when: unknown name 'y'"),
        ("guardrail", {"rule": None}, "x: either `rule` or `check`, and not both"),
        ("guardrail", {"check": "ok?"}, "x: either `rule` or `check`, and not both"),
        ("guardrail", {"model": "demo"}, "x.model: goes with `check`"),
        ("guardrail", {"rule": "1 +"}, "x.rule: is no expression"),
        ("human", {"choices": []}, "x.choices: value should have at least 1 item"),
        ("human", {"choices": ["a", "a"]}, "x.choices: named twice: a"),
        ("human", {"choices": ["a", "b "]}, "x.choices.1: begins or ends with a blank"),
        ("human", {"choices": [" "]}, "x.choices.0: begins or ends with a blank"),
        ("human", {"schema": {"type": "thing"}}, "x.schema: is no schema that can be used"),
        ("human", {"timeout": 0}, "x.timeout: input should be greater than 0"),
        ("human", {"on_timeout": "default", "timeout": 5}, "x.default: is missing"),
        ("human", {"on_timeout": "default", "default": "a"}, "x.timeout: is missing"),
        ("human", {"default": "a"}, "x.default: goes with `on_timeout"),
        (
            "human",
            {"choices": ["b"], "timeout": 1, "on_timeout": "default", "default": "a"},
            "x.default: is not an answer",
        ),
        ("human", {"schema": {"type": "integer"}, "choices": ["1"]}, "x.choices.0: is not an answer: "),
        ("agent", {"agent": "A"}, "x.agent: string should match"),
        ("agent", {"agent": "a@"}, "x.agent: string should match"),
        ("map", {"over": "input."}, "x.over: is no expression"),
        ("map", {"on_error": "skip"}, "x.on_error: input should be 'fail_fast' or 'collect'"),
        ("map", {"graph": {"nodes": {}}}, "x.graph.nodes: no input node; exactly one is needed"),
        ("map", {"graph": {}}, "x.graph.nodes: field required"),
        (
            "map",
            {"graph": inside("mi", "mo", mx={"type": "llm", "prompt": "{{"})},
            "x.graph.nodes.mx.prompt: is no template",
        ),
        (
            "map",
            {"graph": inside("mi", "mo", mx={"type": "lm"})},
            "x.graph.nodes.mx.type: unknown type of node; known: ",
        ),
        (
            "map",
            {"graph": inside("mi", "i")},
            "x: the id 'i' inside it is there twice: there is one in the graph around it",
        ),
        ("loop", {"max_iterations": None}, "x.max_iterations: input should be a valid integer"),
        ("loop", {"max_iterations": 0}, "x.max_iterations: input should be greater"),
        ("loop", {"until": "x"}, "x.until: unknown name 'x'"),
        ("output", {"prompt": "x"}, "x.prompt: unknown field"),
        ("llm", {"prompt": "{{ nodes.o }}"}, "x.prompt: `nodes.o`: 'o' does not come before 'x'"),
        ("llm", {"prompt": "{{ nodes.x }}"}, "x.prompt: `nodes.x`: 'x' does not come before 'x'"),
        (
            "tool",
            {"arguments": {"a": ["{{ nodes.no }}"]}},
            "x.arguments.a.0: `nodes.no`: 'no' is no node that comes before",
        ),
        ("router", {"rules": [{"port": "yes", "when": "nodes.no == 1"}]}, "x.rules.0.when: `nodes.no`"),
        ("map", {"over": "nodes.mi"}, "x.over: `nodes.mi`"),
    ],
)
def test_every_fault_of_a_node_has_its_path(kind: str, fields: dict[str, Any], found: str) -> None:
    node = {**PLAIN[kind], **fields}
    port = {"router": "x.yes", "guardrail": "x.allow"}.get(kind, "x")
    edges = ["i -> o"] if kind in ("input", "output") else ["i -> x", f"{port} -> o"]
    everything = faults(line(*edges, x=node), mcp={"time": {"command": ["time"], "tools": ["now"]}})
    assert any(one.startswith(f"graph.nodes.{found}") for one in everything), everything


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("tool", "tool"),
        ("mcp", "server"),
        ("mcp", "tool"),
        ("router", "rules"),
        ("human", "prompt"),
        ("agent", "agent"),
        ("map", "graph"),
        ("loop", "graph"),
        ("loop", "until"),
        ("loop", "max_iterations"),
    ],
)
def test_what_a_node_cannot_do_without_has_to_be_said(kind: str, field: str) -> None:
    node = {name: value for name, value in PLAIN[kind].items() if name != field}
    port = "x.yes" if kind == "router" else "x"
    found = faults(line("i -> x", f"{port} -> o", x=node), mcp={"time": {"command": ["time"]}})
    assert f"graph.nodes.x.{field}: field required" in found


def test_what_comes_before_can_be_named_also_from_inside() -> None:
    inner = inside("mi", "mo", mx={"type": "llm", "prompt": "{{ nodes.i }} {{ nodes.a }} {{ nodes.mi }}"})
    graph = line("i -> a", "a -> m", "m -> o", a={"type": "llm"}, m={"type": "map", "graph": inner, "over": "nodes.a"})
    assert agent(graph).graph
    graph["edges"] = ["i -> a", "i -> m", "m -> o", "a -> b", "m -> b.any"]
    graph["nodes"] |= {"b": {"type": "output"}}
    graph["edges"] = ["i -> a", "i -> m", "m -> o.all", "a -> o.all"]
    del graph["nodes"]["b"]
    assert faults(graph) == [
        "graph.nodes.m.over: `nodes.a`: 'a' does not come before 'm'",
        "graph.nodes.m.graph.nodes.mx.prompt: `nodes.a`: 'a' is no node that comes before it",
    ]


@pytest.mark.parametrize("kind", ["llm", "guardrail"])
def test_who_asks_a_model_has_one(kind: str) -> None:
    node = {"type": "llm"} if kind == "llm" else {"type": "guardrail", "check": "ok?"}
    port = "x" if kind == "llm" else "x.allow"
    graph = line("i -> x", f"{port} -> o", x=node)
    assert faults(graph, model="") == ["graph.nodes.x.model: no model: neither the node nor the agent names one"]
    assert agent(graph, model="demo").graph
    assert agent(line("i -> x", f"{port} -> o", x={**node, "model": "demo"}), model="").graph
    assert (
        agent(line("i -> x", "x.allow -> o", x={"type": "guardrail", "rule": "true"}), model="").pinned()["model"] == ""
    )


def test_graphs_lie_in_graphs_but_not_for_ever() -> None:
    def nested(levels: int) -> dict[str, Any]:
        graph = inside(f"i{levels}", f"o{levels}")
        if levels > 1:
            graph["nodes"][f"m{levels}"] = {"type": "map", "graph": nested(levels - 1)}
            graph["edges"] = [f"i{levels} -> m{levels}", f"m{levels} -> o{levels}"]
        return graph

    assert agent(nested(4)).graph
    assert faults(nested(5)) == ["graph: graphs inside graphs, more than 4 deep"]
    assert faults(nested(300)) == ["graph: graphs inside graphs, more than 4 deep"]
    many = {f"n{i}": {"type": "llm"} for i in range(199)}
    assert faults(line(*(f"i -> {name}" for name in many), "i -> o", **many)) == [
        "graph.nodes: 201 nodes, more than 200"
    ]


def test_calls_of_the_tools_of_a_graph_are_an_agent_s_to_have_approved() -> None:
    graph = line("i -> x", "x -> o", x={"type": "llm", "tools": ["sleep"]})
    servers = {"time": {"command": ["time"], "tools": ["now"]}}
    approval = {"sleep": "always", "time__now": "never", "time__then": "always", "add": "always"}
    assert faults(graph, mcp=servers, approval=approval) == ["approval: no tool of this agent: add, time__then"]
    assert agent(graph, mcp={"time": {"command": ["time"]}}, approval={"time__any": "always"}).approval
