"""Which nodes of a graph may begin, and what comes next in a run of one: the rules, one by one."""

from typing import Any

import msgspec
import pytest
from tests.core.scenario import (
    AGENTS,
    Given,
    answered,
    ask,
    came_out,
    cancel_requested,
    child,
    ended,
    given,
    opened,
    post,
    posted,
    record,
    rejected,
    resumed,
    started,
    waiting,
)

from turnstream.session.events import (
    Fact,
    ModelReplied,
    NodeFinished,
    NodeStarted,
    PolicyData,
    Spec,
    ToolCall,
    ToolReturned,
    ToolStarted,
)
from turnstream.session.graph import Edge, Graph, Node
from turnstream.session.plan import CallModel, CallTool, End, Park, Return, RunNode, Settle


def spec(**fields: Any) -> Spec:
    return msgspec.structs.replace(AGENTS["default"], graph=True, **fields)


def graph(*edges: str, **kinds: Any) -> Graph:
    """Nodes by name, each a kind or a `Node`; edges as `source.port -> target.into`."""
    nodes = tuple([kind if isinstance(kind, Node) else Node(id=name, kind=kind) for name, kind in kinds.items()])
    return Graph(nodes, tuple([_edge(text) for text in edges]))


def _edge(text: str) -> Edge:
    source, target = [part.strip().partition(".") for part in text.split("->")]
    return Edge(source[0], source[2] or "out", target[0], target[2] or "in")  # type: ignore[arg-type]


LINE = graph("q -> draft", "draft -> done", q="input", draft="llm", done="output")
BEGUN = (opened(), posted("m1", 1, by=spec()), started(1, 1, "m1"))


def finished(path: str, port: str = "out", *, attempt: int = 1, **fields: Any) -> NodeFinished:
    return NodeFinished(run=1, attempt=attempt, node=path.rpartition(".")[2], path=path, port=port, **fields)


def begun(path: str, *, attempt: int = 1, items: int = 0, call: str = "", asks: Any = None) -> NodeStarted:
    asked = ToolCall(id=path, name=call, arguments="{}", asks=asks) if call else None
    node = path.rpartition(".")[2]
    return NodeStarted(run=1, attempt=attempt, node=node, path=path, call=asked, items=items)


def said(path: str, step: int, *calls: str, attempt: int = 1, **fields: Any) -> ModelReplied:
    asked = tuple(ToolCall(id=call, name="look", arguments="{}") for call in calls)
    node = path.rpartition(".")[2]
    return ModelReplied(run=1, attempt=attempt, step=step, node=node, path=path, tool_calls=asked, **fields)


def returned(call: str, path: str, *, attempt: int = 1) -> ToolReturned:
    return ToolReturned(run=1, attempt=attempt, call_id=call, node=path, path=path, status="ok")


def tool_began(call: str, path: str, *, attempt: int = 1) -> ToolStarted:
    return ToolStarted(run=1, attempt=attempt, call_id=call, node=path, path=path)


def at(graph: Graph, *facts: Fact, begins: tuple[Fact, ...] = BEGUN) -> Given:
    return given(*begins, *facts).through(graph)


def next_of(graph: Graph, *facts: Fact) -> list[str]:
    """What is planned, as words: `speak draft 1`, `begin look`, `decide q`, `tool look`, `end`."""
    return [_word(effect) for effect in at(graph, *facts).planned()]


def _word(effect: object) -> str:
    match effect:
        case CallModel():
            return f"speak {effect.path} {effect.step}"
        case RunNode():
            return effect.key.split(":", 1)[1].rpartition(":")[0]
        case CallTool():
            return f"tool {effect.call.path}"
        case Settle():
            return f"settle {effect.call.path}"
        case Return():
            return f"return {effect.call.path}"
        case Park():
            return f"ask {' '.join(call.path for call in effect.calls)}"
        case End(status="completed"):
            return f"end {effect.output}".strip()
        case End():
            return f"{effect.error.code}: {effect.error.message}" if effect.error else effect.status
        case _:
            return type(effect).__name__


def test_a_line_is_gone_through_node_by_node() -> None:
    assert next_of(LINE) == ["q:decide"]
    assert next_of(LINE, finished("q")) == ["speak draft 1"]
    assert next_of(LINE, finished("q"), finished("draft")) == ["done:decide"]
    assert next_of(LINE, finished("q"), finished("draft"), finished("done")) == ["end done"]


def test_independent_branches_run_at_once_and_meet_when_both_have_come() -> None:
    shape = graph("q -> a", "q -> b", "a -> c.all", "b -> c.all", q="input", a="llm", b="llm", c="llm")
    assert next_of(shape, finished("q")) == ["speak a 1", "speak b 1"]
    assert next_of(shape, finished("q"), finished("a")) == ["speak b 1"]
    assert next_of(shape, finished("q"), finished("b"), finished("a")) == ["speak c 1"]


def test_what_was_not_chosen_is_dead_and_so_is_what_only_it_leads_to() -> None:
    shape = graph(
        "q -> r", "r.x -> a", "r.default -> b", "a -> c", "c -> done.any", "b -> done.any",
        q="input", r="router", a="llm", b="llm", c="llm", done="output",
    )  # fmt: skip
    assert next_of(shape, finished("q")) == ["r:decide"]
    assert next_of(shape, finished("q"), finished("r", "x")) == ["speak a 1"]
    assert next_of(shape, finished("q"), finished("r", "default")) == ["speak b 1"]
    assert next_of(shape, finished("q"), finished("r", "default"), finished("b")) == ["done:decide"]


def test_a_failure_goes_by_its_own_port() -> None:
    shape = graph("q -> a", "a -> b", "a.err -> c", q="input", a="llm", b="output", c="output")
    assert next_of(shape, finished("q"), finished("a", "err", error="no")) == ["c:decide"]


def test_where_nothing_takes_note_of_a_failure_the_run_ends_without_output() -> None:
    facts = (finished("q"), finished("draft", "err", error="no"))
    assert next_of(LINE, *facts) == ["end"]


def test_two_outputs_that_are_reached_fail_the_run_by_their_names() -> None:
    shape = graph("q -> a", "q -> x", "a -> y", q="input", a="llm", x="output", y="output")
    assert next_of(shape, finished("q")) == ["speak a 1", "x:decide"]
    one = (finished("q"), finished("x"), finished("a"))
    assert next_of(shape, *one) == ["multiple_outputs: output nodes x and y were reached, and only one may be"]


def test_a_node_that_is_a_call_begins_is_called_and_finishes_with_it() -> None:
    shape = graph("q -> look", "look -> done", q="input", look="tool", done="output")
    facts: tuple[Fact, ...] = (finished("q"),)
    assert next_of(shape, *facts) == ["look:begin"]
    facts = (*facts, begun("look", call="add"))
    assert next_of(shape, *facts) == ["tool look"]
    facts = (*facts, tool_began("look", "look"))
    assert next_of(shape, *facts) == ["tool look"]
    assert next_of(shape, *facts, finished("look")) == ["done:decide"]


def test_a_call_that_was_cut_off_by_a_crash_is_settled_as_uncertain() -> None:
    shape = graph("q -> look", q="input", look="tool")
    facts = (finished("q"), begun("look", call="add"), tool_began("look", "look"), started(1, 2))
    assert next_of(shape, *facts) == ["settle look"]
    doubtful = at(shape, *facts)
    doubtful.when(record(finished("look", attempt=2))).then(rejected("invalid_transition"))
    failed = finished("look", "err", attempt=2, error="in doubt")
    doubtful.when(record(failed)).then(failed)


def test_tools_that_a_node_s_model_asks_for_come_back_to_it_alone() -> None:
    shape = graph("q -> a", "q -> b", q="input", a="llm", b="llm")
    facts: tuple[Fact, ...] = (finished("q"), said("a", 1, "a1", "a2"))
    assert next_of(shape, *facts) == ["tool a", "tool a", "speak b 1"]
    facts = (*facts, returned("a1", "a"))
    assert next_of(shape, *facts) == ["tool a", "speak b 1"]
    facts = (*facts, said("b", 1, "b1"), returned("a2", "a"))
    assert next_of(shape, *facts) == ["tool b", "speak a 2"]
    at(shape, *facts).when(record(said("a", 3, "a3"))).then(rejected("invalid_transition"))
    at(shape, *facts).when(record(said("a", 2, "b1"))).then(rejected("invalid"))
    at(shape, *facts).when(record(finished("b"))).then(rejected("invalid_transition"))
    at(shape, *facts).when(record(finished("a"))).then(finished("a"))


def test_a_node_finishes_once() -> None:
    over = at(LINE, finished("q"), finished("draft"))
    over.when(record(finished("draft"))).then(rejected("invalid_transition"))
    over.when(record(said("draft", 1, "x"))).then(rejected("invalid_transition"))
    over.when(record(begun("draft", call="add"))).then(rejected("invalid_transition"))
    over.when(record(finished("done", attempt=2))).then(rejected("fenced"))


def test_a_person_is_asked_when_nothing_else_is_left_to_do() -> None:
    shape = graph("q -> h", "q -> a", q="input", h="human", a="llm")
    facts: tuple[Fact, ...] = (finished("q"), begun("h", call="conversation_ask_user", asks="question"))
    assert next_of(shape, *facts) == ["speak a 1"]
    facts = (*facts, finished("a"))
    assert next_of(shape, *facts) == ["ask h"]
    facts = (*facts, waiting(1, ask("h")), answered(1, answer="yes"), resumed(1, 2))
    assert next_of(shape, *facts) == ["return h"]
    yes = finished("h", attempt=2, output="yes")
    at(shape, *facts).when(record(yes)).then(yes)
    assert next_of(shape, *facts, yes) == ["end"]


def test_a_sub_agent_is_a_node_too() -> None:
    shape = graph("q -> h", q="input", h="agent")
    facts: tuple[Fact, ...] = (finished("q"), begun("h", call="delegate", asks="child"))
    assert next_of(shape, *facts) == ["StartChild"]
    facts = (*facts, msgspec.structs.replace(child(1, "h"), node="h", path="h"))
    assert next_of(shape, *facts) == ["ask h"]
    facts = (*facts, waiting(1, ask("h", kind="child")), came_out(1, "h"), resumed(1, 2))
    assert next_of(shape, *facts) == ["return h"]


EACH = Node(id="each", kind="map", graph=graph("e -> a", "a -> o", e="input", a="llm", o="output"))
MAP = graph("q -> each", "each -> done", q="input", each=EACH, done="output")


def test_a_map_goes_through_its_graph_once_for_each_element() -> None:
    facts: tuple[Fact, ...] = (finished("q"),)
    assert next_of(MAP, *facts) == ["each:begin"]
    facts = (*facts, begun("each", items=2))
    assert next_of(MAP, *facts) == ["each[0].e:decide", "each[1].e:decide"]
    facts = (*facts, finished("each[1].e"), finished("each[0].e"), finished("each[1].a"))
    assert next_of(MAP, *facts) == ["speak each[0].a 1", "each[1].o:decide"]
    facts = (*facts, finished("each[1].o"), finished("each[0].a"), finished("each[0].o"))
    assert next_of(MAP, *facts) == ["each:decide"]
    assert next_of(MAP, *facts, finished("each")) == ["done:decide"]


def test_a_map_over_nothing_is_over() -> None:
    assert next_of(MAP, finished("q"), begun("each")) == ["each:decide"]


def test_a_map_is_over_as_soon_as_an_element_fails_unless_it_collects() -> None:
    facts = (finished("q"), begun("each", items=2), finished("each[0].e"), finished("each[1].e"))
    facts = (*facts, finished("each[0].a", "err", error="no"))
    assert next_of(MAP, *facts) == ["each:decide"]
    collects = msgspec.structs.replace(EACH, collect=True)
    patient = graph("q -> each", "each -> done", q="input", each=collects, done="output")
    assert next_of(patient, *facts) == ["speak each[1].a 1"]


def test_what_a_map_leaves_behind_ends_with_it() -> None:
    facts = (finished("q"), begun("each", items=2), finished("each[0].e"), finished("each[1].e"))
    facts = (*facts, said("each[1].a", 1, "x"), finished("each", "err", error="no"))
    session = at(MAP, *facts).session
    run = session.run(1)
    assert run is not None and run.open_calls == ()
    assert next_of(MAP, *facts) == ["end"]


@pytest.mark.parametrize(
    "fact",
    [
        finished("each[1].a"),
        finished("each[1].a", "err", error="late"),
        said("each[1].a", 1, "x"),
        begun("each[1].t", call="add"),
        begun("each[1].more", items=1),
        finished("each[1].more[0].a"),
    ],
    ids=lambda fact: f"{type(fact).__name__} {fact.path}",
)
def test_nothing_more_is_heard_from_inside_of_a_node_that_has_finished(fact: Any) -> None:
    facts = (finished("q"), begun("each", items=2), begun("each[1].more", items=1))
    other = begun("each[1].more", items=2) if fact.path == "each[1].more" else fact
    at(MAP, *facts).when(record(other)).then(other)
    at(MAP, *facts, finished("each", "err", error="no")).when(record(other)).then(rejected("invalid_transition"))


@pytest.mark.parametrize("path", ["each[2].e", "again[0].e", "each[1].more[0].e", "e[0].e"])
def test_there_is_no_element_but_those_that_a_node_goes_through(path: str) -> None:
    facts = (finished("q"), begun("each", items=2))
    at(MAP, *facts).when(record(finished("each[1].e"))).then(finished("each[1].e"))
    for fact in (finished(path), said(path, 1, "x"), begun(path, call="add")):
        at(MAP, *facts).when(record(fact)).then(rejected("invalid_transition"))


def test_a_loop_goes_on_iteration_by_iteration() -> None:
    inner = graph("i -> a", "a -> o", i="input", a="llm", o="output")
    again = Node(id="again", kind="loop", graph=inner)
    shape = graph("q -> again", "again -> done", q="input", again=again, done="output")
    facts: tuple[Fact, ...] = (finished("q"), begun("again", items=1))
    assert next_of(shape, *facts) == ["again[0].i:decide"]
    facts = (*facts, finished("again[0].i"), finished("again[0].a"), finished("again[0].o"))
    assert next_of(shape, *facts) == ["again:decide"]
    at(shape, *facts).when(record(begun("again", items=3))).then(rejected("invalid_transition"))
    facts = (*facts, begun("again", items=2))
    assert next_of(shape, *facts) == ["again[1].i:decide"]


def test_a_guardrail_that_asks_a_model_speaks() -> None:
    guard = Node(id="g", kind="guardrail", asks_model=True)
    shape = graph("q -> g", "g.allow -> a", "g.block -> b", q="input", g=guard, a="output", b="output")
    assert next_of(shape, finished("q")) == ["speak g 1"]
    assert next_of(shape, finished("q"), finished("g", "block")) == ["b:decide"]


def test_limits_hold_in_a_graph_before_the_next_call_of_a_model() -> None:
    by = msgspec.structs.replace(spec(), limits=msgspec.structs.replace(spec().limits, max_model_calls=1))
    begins = (opened(), posted("m1", 1, by=by), started(1, 1, "m1"))
    shape = graph("q -> a", "a -> b", "b -> done", q="input", a="llm", b="llm", done="output")
    facts = (finished("q"), finished("a", model="demo"))
    (effect,) = at(shape, *facts, begins=begins).planned()
    assert isinstance(effect, End) and effect.error and effect.error.code == "budget_exceeded"
    (effect,) = at(LINE, finished("q"), finished("draft", model="demo"), begins=begins).planned()
    assert isinstance(effect, RunNode), "what needs no model goes on"


def test_what_would_steer_a_run_of_a_graph_waits_for_its_turn() -> None:
    steer = PolicyData(on_busy="steer")
    by = {"default": spec(policy=steer)}
    run = given(opened(), posted("m1", 1, by=by["default"]), started(1, 1, "m1"))
    decision = run.when(post("m2", specs=by)).decision
    assert decision.event.data.routed == "queued"


@pytest.mark.parametrize("port", ["out", "err"])
def test_a_run_that_is_to_end_takes_no_more_of_its_nodes(port: str) -> None:
    over = at(LINE, finished("q"), cancel_requested(1))
    over.when(record(finished("draft", port))).then(rejected("invalid_transition"))
    assert next_of(LINE, finished("q"), cancel_requested(1)) == ["cancelled"]


def test_the_run_ends_with_what_the_output_node_gave() -> None:
    over = at(LINE, finished("q"), finished("draft"), finished("done"))
    whole = ended(1, content="hello")
    assert over.when(record(whole)).decision.event.data.content == "hello"
