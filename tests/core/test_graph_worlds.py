"""Random graphs, carried out by a runner that only pretends: whatever order its results come in, and wherever it
crashes, the same nodes finish by the same ports, each once, and the run ends alike.

What a node, a model, a tool, a person or a child comes to depends on its path and on a seed, and on nothing else. The
pretended runner performs what `plan` says and nothing more; each log is read by the auditor.
"""

import random
from collections.abc import Iterator
from typing import Any

import msgspec
from hypothesis import given as with_any
from hypothesis import settings
from hypothesis import strategies as st
from tests.core.auditor import Auditor
from tests.core.scenario import (
    AGENTS,
    RUNNER,
    WAKE,
    answer,
    approve,
    came_out,
    drive,
    ended,
    given,
    opened,
    post,
    record,
    record_as,
    start,
    started,
    tell,
)

from turnstream.ids import digest
from turnstream.session.commands import Command, RunFact
from turnstream.session.decide import decide
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    Ask,
    ChildStarted,
    Limits,
    ModelReplied,
    NodeFinished,
    NodeStarted,
    PolicyData,
    Recorded,
    RunEnded,
    RunStarted,
    RunWaiting,
    Spec,
    ToolCall,
    ToolReturned,
    ToolStarted,
    Usage,
)
from turnstream.session.fold import evolve
from turnstream.session.graph import ERR, Edge, Graph, Kind, Node, Walk
from turnstream.session.paths import is_within, name_of
from turnstream.session.plan import (
    BetweenEffect,
    CallModel,
    CallTool,
    Drive,
    Effect,
    End,
    Park,
    Return,
    RunNode,
    Settle,
    Start,
    StartChild,
    plan,
)
from turnstream.session.state import Call, Run, Session, request_id

AMPLE = Limits(
    max_steps=10_000, max_model_calls=10_000, max_tool_calls=10_000, max_same_calls=10_000, max_same_denials=10_000
)
SPEC: Spec = msgspec.structs.replace(
    AGENTS["default"], graph=True, limits=AMPLE, policy=PolicyData(titles="none", recovery="resume")
)
PORTS: dict[Kind, tuple[str, ...]] = {
    "router": ("x", "y", "default"),
    "guardrail": ("allow", "block"),
    "llm": ("out", "out", "out", ERR),
    "tool": ("out", "out", "out", ERR),
    "mcp": ("out", "out", "out", ERR),
    "agent": ("out", "out", "out", ERR),
}
"""By which a node can be left, where it is not `out` alone, as often as it is."""
KINDS: tuple[Kind, ...] = (
    "llm", "llm", "tool", "mcp", "router", "guardrail", "human", "agent", "map", "loop",
)  # fmt: skip
FACTS_MAX = 70
"""Of a story: each is told again once for every fact."""


# -- graphs -----------------------------------------------------------------------------------------------------------

ITERATIONS = 2
"""That a loop goes through at most."""


class Shapes:
    """Draws valid graphs: reachable, without a cycle, names used once, one edge into an `in`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._names = 0

    def graph(self, depth: int = 3) -> Graph:
        rng = self._rng
        nodes = [Node(id=self._name("q"), kind="input")]
        edges: list[Edge] = []
        for _ in range(rng.randint(*((2, 6) if depth == 3 else (1, 3)))):
            kind = rng.choice(KINDS if depth > 1 else KINDS[:-2])
            self._add(nodes, edges, self._node(kind, depth))
        for _ in range(rng.choice((0, 1, 1, 1, 1, 2)) if depth == 3 else 1):
            self._add(nodes, edges, Node(id=self._name("o"), kind="output"))
        return Graph(tuple(nodes), tuple(edges))

    def _name(self, letter: str) -> str:
        self._names += 1
        return f"{letter}{self._names}"

    def _node(self, kind: Kind, depth: int) -> Node:
        rng = self._rng
        inner = self.graph(depth - 1) if kind in ("map", "loop") else None
        return Node(
            id=self._name(kind[0]),
            kind=kind,
            graph=inner,
            asks_model=kind == "guardrail" and rng.random() < 0.5,
            collect=kind == "map" and rng.random() < 0.5,
        )

    def _add(self, nodes: list[Node], edges: list[Edge], node: Node) -> None:
        rng = self._rng
        sources = [one for one in nodes if one.kind != "output"]
        taken = rng.sample(sources, min(len(sources), rng.choice((1, 1, 2, 3))))
        into: Any = "in" if len(taken) == 1 else rng.choice(("any", "all"))
        edges += [Edge(source.id, rng.choice(PORTS.get(source.kind, ("out",))), node.id, into) for source in taken]
        nodes.append(node)


# -- a runner that pretends -------------------------------------------------------------------------------------------


class Fate:
    """What things come to, by their path."""

    def __init__(self, seed: int, graph: Graph) -> None:
        self._seed = seed
        self.graph = graph

    def number(self, of: str, below: int) -> int:
        return int(digest(f"{self._seed} {of}".encode())[:8], 16) % below

    def is_idempotent(self, call: str) -> bool:
        return self.number(f"{call} idempotent", 2) == 0

    def port(self, node: Node, path: str) -> str:
        ports = PORTS.get(node.kind, ("out",))
        doubtful = node.kind in ("tool", "mcp") and not self.is_idempotent(path)
        # A call that is cut off is in doubt and fails: what could be cut off fails always.
        return ERR if doubtful else ports[self.number(f"{path} port", len(ports))]

    def fact(self, session: Session, effect: Effect) -> RunFact:
        """What comes of what is planned."""
        run = session.run(1)
        assert run
        match effect:
            case CallModel():
                return self._says(run, effect)
            case RunNode():
                return self._runs(session, run, effect)
            case CallTool(call=call) if not call.started and not self.is_idempotent(call.id):
                return ToolStarted(run=1, attempt=run.attempt, call_id=call.id, **_place(call.path))
            case CallTool(call=call):
                return self._comes_back(run, call, "ok" if self.number(f"{call.id} comes to", 3) else "error")
            case Settle(call=call):
                return self._comes_back(run, call, "uncertain")
            case Return(call=call):
                return self._comes_back(run, call, "denied" if call.asks == "approval" else "ok")
            case StartChild(call=call, k=k):
                name = session.key.child(1, k).session
                place = _place(call.path)
                attempt = run.attempt
                return ChildStarted(
                    run=1, attempt=attempt, call_id=call.id, k=k, child_session=name, spec=AGENTS["poet"], **place
                )
            case Park(calls=calls, first=first):
                asks = [
                    Ask(
                        request=request_id(session, 1, k),
                        kind=call.asks or "question",
                        call_id=call.id,
                        prompt="?",
                        **_place(call.path),
                    )
                    for k, call in enumerate(calls, first)
                ]
                return RunWaiting(run=1, attempt=run.attempt, requests=tuple(asks))
            case End():
                return ended(1, effect.status, run.attempt, error=effect.error, content=effect.output or "")
            case _:
                raise AssertionError(f"nobody has planned for {effect}")

    def _says(self, run: Run, effect: CallModel) -> ModelReplied | NodeFinished:
        """So many rounds of calls, then the last word."""
        path, step = effect.path, effect.step
        usage = Usage(output_tokens=1)
        if step > self.number(f"{path} rounds", 3):
            port = self.port(self.graph.node(path), path)
            return NodeFinished(run=1, attempt=run.attempt, port=port, model="demo", usage=usage, **_place(path))
        calls = [
            ToolCall(id=f"{path}/{step}/{k}", name="look", arguments="{}", asks=self._asks(f"{path}/{step}/{k}"))
            for k in range(self.number(f"{path} calls {step}", 3))
        ]
        misfit = "" if calls else "it does not fit"
        return ModelReplied(
            run=1,
            attempt=run.attempt,
            step=step,
            tool_calls=tuple(calls),
            misfit=misfit,
            usage=usage,
            **_place(path),
        )

    def _asks(self, call: str) -> Any:
        return (None, None, None, None, "question", "approval", "child")[self.number(f"{call} asks", 7)]

    def _runs(self, session: Session, run: Run, effect: RunNode) -> NodeStarted | NodeFinished:
        path, node, visit = effect.path, self.graph.node(effect.path), effect.visit
        finished = NodeFinished(run=1, attempt=run.attempt, port=self.port(node, path), **_place(path))
        if node.graph is None and node.kind not in ("tool", "mcp", "human", "agent"):
            return finished
        begun = NodeStarted(run=1, attempt=run.attempt, **_place(path))
        if node.graph is None:
            if self.number(f"{path} cannot begin", 8) == 0:
                return msgspec.structs.replace(finished, port=ERR, error="what it asks for makes no sense")
            asks = {"human": "question", "agent": "child"}.get(node.kind) or self._asks(path)
            asks = None if asks in ("question", "child") and node.kind in ("tool", "mcp") else asks
            call = ToolCall(id=path, name=node.kind, arguments="{}", asks=asks)  # type: ignore[arg-type]
            return msgspec.structs.replace(begun, call=call)
        if not visit.begun:
            return msgspec.structs.replace(begun, items=1 if node.kind == "loop" else self.number(path, 4))
        ways = Walk(self.graph, {one.path: one for one in run.visits}, path[: -len(node.id)]).inside(node)
        if not node.collect and any(any(way.failed()) for way in ways):
            return msgspec.structs.replace(finished, port=ERR, error="an element has failed")
        assert all(way.is_over for way in ways)
        if node.kind == "loop" and visit.items <= self.number(path, ITERATIONS):
            return msgspec.structs.replace(begun, items=visit.items + 1)
        return finished

    def _comes_back(self, run: Run, call: Call, status: Any) -> ToolReturned | NodeFinished:
        if not call.is_node:
            return ToolReturned(run=1, attempt=run.attempt, call_id=call.id, status=status, **_place(call.path))
        port = ERR if status in ("uncertain", "denied") else self.port(self.graph.node(call.path), call.path)
        return NodeFinished(run=1, attempt=run.attempt, port=port, **_place(call.path))

    def agrees(self, call: str) -> bool:
        return self.number(f"{call} agreed", 2) == 0


def _place(path: str) -> dict[str, str]:
    return {"node": name_of(path), "path": path}


class Story:
    """One run of a graph, fact by fact. `rng` says whose result comes next."""

    def __init__(self, fate: Fate, rng: random.Random) -> None:
        self.fate = fate
        self._rng = rng
        self.session = given(opened()).session
        self.log: list[Recorded] = []
        self.sessions: list[Session] = []
        """The session before each fact of the log, from the first start on."""
        self._drive: Drive = drive()
        self.session = given().session
        self._do(post("m1", specs={"default": SPEC}, opens=opened()))
        self._do(start(started(1, 1, "m1")))

    def crashed_at(self, place: int, rng: random.Random) -> "Story":
        """The same up to its fact of this number, and another runner from there on."""
        other = Story(self.fate, rng)
        other.log, other.session = self.log[:place], self.sessions[place]
        other.sessions = self.sessions[:place]
        run = other.session.run(1)
        if run and run.status == "running":
            other._take_over(run)
        return other

    def _take_over(self, run: Run) -> None:
        wake = msgspec.structs.replace(WAKE, delivery=run.attempt + 1)
        self._drive = drive(wake)
        self._do(start(started(1, run.attempt + 1, wake=wake)))

    def _do(self, command: Command) -> None:
        decision = decide(command, self.session)
        assert decision, f"{command} is planned, and nothing comes of it"
        recorded = record_as(self.session, decision.event)
        self.log.append(recorded)
        self.sessions.append(self.session)
        self.session = evolve(self.session, recorded)

    def go_on(self) -> bool:
        """One more fact; False: the run is over, and so are its children."""
        run, rng = self.session.run(1), self._rng
        born = [child for child in self.session.children if child.cancel or rng.random() < 0.3]
        effects = [
            one
            for one in plan(self.session, 0, msgspec.structs.replace(self._drive, graph=self.fate.graph))
            if not isinstance(one, BetweenEffect)
        ]
        if run and run.status == "waiting" and self.session.children:
            born = list(self.session.children)
        if born and (rng.random() < 0.5 or not effects):
            child = rng.choice(born)
            self._do(tell(came_out(child.k, child.call_id, status="cancelled" if child.cancel else "completed")))
        elif effects:
            self._perform(rng.choice(effects))
        elif run is None:
            return False
        else:
            self._answer(run)
        return True

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Start):
            by = self.session.run(1)
            assert by
            fact = RunStarted(
                run=1,
                attempt=effect.attempt,
                runner=RUNNER,
                wake=WAKE,
                trigger=effect.trigger,
                message_ids=effect.message_ids,
            )
            self._do(start(fact))
            self._drive = drive()
            return
        self._do(record(self.fate.fact(self.session, effect)))

    def _answer(self, run: Run) -> None:
        assert run.for_people, "nothing is planned, and nobody is asked"
        request = self._rng.choice(run.for_people)
        if request.kind == "approval":
            self._do(approve(1, self.fate.agrees(request.call_id), k=request.k))
        else:
            self._do(answer(1, "yes", k=request.k))

    def to_the_end(self) -> "Story":
        for _ in range(20 * FACTS_MAX):
            if not self.go_on():
                self._audit()
                return self
        raise AssertionError("it goes on for ever")

    def _audit(self) -> None:
        auditor = Auditor()
        for recorded in self.log:
            auditor.read(recorded)

    def _check_ways(self, settled: dict[str, str]) -> None:
        """Told from the edges alone: who finished was reached, and whom a finished node leads to has finished."""
        for path, port in settled.items():
            graph, outer, name = self.fate.graph.holding(path), path[: -len(name_of(path))], name_of(path)
            ways = [settled.get(outer + edge.source) == edge.port for edge in graph.edges_to(name)]
            assert any(ways) or graph.node(name).kind == "input", f"nothing has reached {path}"
            for edge in graph.edges:
                if (edge.source, edge.port) == (name, port):
                    assert outer + edge.target in settled, f"{path} leads on to {edge.target}"

    @property
    def facts(self) -> Iterator[object]:
        return (recorded.event.data for recorded in self.log)

    @property
    def outcome(self) -> tuple[object, ...]:
        """How the run ended, and the nodes that had finished, by which port. Of a map that is over for one of its
        elements has failed, how far the others came is chance, and so it is of a run that is over for two outputs."""
        (end,) = [fact for fact in self.facts if isinstance(fact, RunEnded)]
        finished = {fact.path: fact.port for fact in self.facts if isinstance(fact, NodeFinished)}
        if end.error:
            return end.status, end.error.code
        failed = [path for path, port in finished.items() if port == ERR and self.fate.graph.node(path).graph]
        settled = {
            path: port
            for path, port in finished.items()
            if not any(path != map_ and is_within(path, map_) for map_ in failed)
        }
        self._check_ways(settled)
        return end.status, end.content, settled


@st.composite
def _fates(draw: st.DrawFn) -> Fate:
    seed = draw(st.integers(0, 2**32))
    return Fate(seed, Shapes(random.Random(seed)).graph())


CHANCES = st.integers(0, 2**32)


@settings(max_examples=60)
@with_any(_fates(), CHANCES, CHANCES)
def test_whatever_order_results_come_in_the_same_nodes_finish_by_the_same_ports(
    fate: Fate, one: int, other: int
) -> None:
    story = Story(fate, random.Random(one)).to_the_end()
    assert Story(fate, random.Random(other)).to_the_end().outcome == story.outcome


@settings(max_examples=25)
@with_any(_fates(), CHANCES)
def test_wherever_it_crashes_the_same_nodes_finish_by_the_same_ports(fate: Fate, chance: int) -> None:
    rng = random.Random(chance)
    story = Story(fate, rng).to_the_end()
    places = range(2, len(story.log))
    for place in places if len(places) <= FACTS_MAX else sorted(rng.sample(places, FACTS_MAX)):
        again = story.crashed_at(place, random.Random(chance + place)).to_the_end()
        assert again.outcome == story.outcome, f"crashed before fact {place}"


@settings(max_examples=40)
@with_any(_fates(), CHANCES)
def test_a_fact_that_is_not_planned_is_refused(fate: Fate, chance: int) -> None:
    rng = random.Random(chance)
    story = Story(fate, rng).to_the_end()
    for session in rng.sample(story.sessions[2:], min(len(story.sessions) - 2, 20)):
        for fact in _wrong(session):
            try:
                decision = decide(record(fact), session)
            except Rejected:
                continue
            raise AssertionError(f"{decision} is stored, and should not be")


def _wrong(session: Session) -> Iterator[RunFact]:
    """Facts that no runner may report of the run as it stands."""
    run = session.run(1)
    if run is None:
        return
    attempt = run.attempt
    for visit in run.visits:
        at: dict[str, Any] = {"run": 1, "attempt": attempt, **_place(visit.path)}
        call = ToolCall(id=visit.path, name="add", arguments="{}")
        new = (ToolCall(id="new", name="add", arguments="{}"),)
        if visit.begun:
            yield NodeStarted(**at, call=call)
            yield NodeStarted(**at, items=visit.items)
        if visit.port:
            yield NodeFinished(**at)
            yield ModelReplied(**at, step=visit.steps + 1, tool_calls=new)
            yield NodeStarted(**at, call=call)
            yield NodeFinished(run=1, attempt=attempt, **_place(f"{visit.path}[0].x"))
        else:
            yield ModelReplied(**at, step=visit.steps, tool_calls=new)
            yield ModelReplied(**at, step=visit.steps + 1)
            yield NodeFinished(**{**at, "attempt": attempt - 1})
            yield NodeFinished(run=1, attempt=attempt, **_place(f"{visit.path}[{visit.items}].x"))
        if run.calls_at(visit.path):
            yield ModelReplied(**at, step=visit.steps + 1, tool_calls=new)
        if any(not one.is_node for one in run.calls_at(visit.path)):
            yield NodeFinished(**at)
    for call in run.open_calls:
        at = {"run": 1, "attempt": attempt, "call_id": call.id, **_place(call.path)}
        if call.started or not call.may_begin:
            yield ToolStarted(**at)
        if call.is_node:
            yield ToolReturned(**at, status="ok")
        if call.asks and not call.closed:
            yield ToolReturned(**at, status="ok")
    if run.open_calls:
        yield ended(1, "completed", attempt)
    yield ToolReturned(run=1, attempt=attempt, call_id="nobody's", status="ok")
    if run.status == "waiting":
        yield NodeFinished(run=1, attempt=attempt, **_place("q1"))
