"""The waterfall of a run: its model calls, tools, waits for people and sub-agents, with begin, end, usage; of a graph,
its nodes too, each beside what was done for it.

A row is written when a step is over and never changes. What is going on now is not stored here: it is read from the
run's row, which knows the open tool calls, the open requests and when the model could begin, and from its session's,
which knows the sub-agents that have not ended: those may be at work when the run has ended."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Literal

import msgspec
from sqlalchemy import BigInteger, Column, Integer, MetaData, Table, Text, select

from turnstream.ids import SessionKey, parse_run_id, run_id
from turnstream.session.events import (
    ChildEnded,
    EndStatus,
    ModelReplied,
    NodeFinished,
    Recorded,
    RunEnded,
    ToolReturned,
    ToolStatus,
    Usage,
)
from turnstream.session.graph import ERR
from turnstream.session.paths import is_within, name_of
from turnstream.session.state import Run
from turnstream.views import requests, run_row, runs, session_row, sessions
from turnstream.views.database import Database, Reader
from turnstream.views.rows import Values, text

StepStatus = (
    Literal["running", "waiting", "answered", "approved", "denied", "expired", "interrupted"] | ToolStatus | EndStatus
)


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A model call, a tool, a wait for a person's word, a sub-agent from the intent to its end, or a node of a graph
    from its first call to its end. Times are milliseconds since the epoch, by the broker's clock: `ended_at` is when
    its event was stored, `began_at` that less the duration that the runner measured. `seq` 0: it is going on."""

    seq: int = 0
    kind: Literal["model", "tool", "wait", "child", "node"]
    attempt: int
    step: int
    """The model call that it is, or belongs to, counted in the run, or in the node; of a node, how many it took."""
    name: str
    """Of the model, the tool, the sub-agent's agent, or the node; of a wait the kind of its request."""
    node: str = ""
    path: str = ""
    """Of the node that it is, or was done for: `draft`, or `each[3].draft` in the graph of another one."""
    port: str = ""
    """By which a node has finished."""
    status: StepStatus
    began_at: int
    ended_at: int | None = None
    call_id: str | None = None
    request: str | None = None
    child_session: str | None = None
    child_run: str | None = None
    by: str | None = None
    """Who ended a wait."""
    arguments: str = ""
    """Of a tool: JSON, as it was written."""
    note: str = ""
    """What became of a node beside its end."""
    finish: str = ""
    usage: Usage | None = None
    """Of a model call, or a sub-agent; nothing is counted twice."""
    error: str = ""


class Steps(msgspec.Struct, frozen=True):
    """`position` is the sequence that the steps reflect."""

    items: tuple[Step, ...]
    position: int


def fold(recorded: Recorded, row: run_row.Row, run: Run | None) -> list[Step]:
    """The steps but waits that a fact of a run ends: `row` is the run before it, `run` how it stands now."""
    data = recorded.event.data
    match data:
        case ModelReplied():
            return [_model(recorded, data, row, data.step, data.usage, "ok")]
        case NodeFinished():
            return _of_node(recorded, data, row)
        case RunEnded() if run is None:
            steps = [_tool(recorded, row, call, "interrupted") for call in row.open_calls if _is_done(row, call)]
            if _called_model(row, data):
                status = "ok" if data.status == "completed" else data.status
                steps.append(_model(recorded, data, row, row.steps + 1, data.step_usage, status))
            return [*steps, *_interrupted(recorded, row, row.begun)]
        case ToolReturned() if call := row.find(data.call_id):
            return [_tool(recorded, row, call, data.status, data.duration, data.error)]
        case _:
            return []


def _of_node(recorded: Recorded, data: NodeFinished, row: run_row.Row) -> list[Step]:
    """The node itself, the call of a model or a tool that ended it, and what it leaves behind in the graph inside of
    it."""
    status, now = ("error" if data.port == ERR else "ok"), recorded.time
    steps: list[Step] = []
    for call in row.calls_within(data.path):
        if _is_done(row, call):
            own = call.path == data.path
            how, took, error = (status, data.duration, data.error) if own else ("interrupted", 0, "")
            steps.append(_tool(recorded, row, call, how, took, error))
    took = row.steps_of(data.path) + bool(data.model)
    if data.model:
        steps.append(_model(recorded, data, row, took, data.usage, status))
    left = [path for path in row.begun if path != data.path and is_within(path, data.path)]
    steps += _interrupted(recorded, row, left)
    began = row.begun.get(data.path)
    node = Step(
        seq=recorded.seq,
        kind="node",
        attempt=data.attempt,
        step=took,
        name=data.node,
        node=data.node,
        path=data.path,
        port=data.port,
        status=status,
        began_at=row.since(now, data.duration) if began is None else began,
        ended_at=now,
        error=data.error,
        note=data.note,
    )
    return [*steps, node]


def _interrupted(recorded: Recorded, row: run_row.Row, paths: Iterable[str]) -> list[Step]:
    """Nodes that had begun, and never finish."""
    ended = {"seq": recorded.seq, "ended_at": recorded.time}
    return [msgspec.structs.replace(node, **ended) for node in _nodes(row, paths, {}, "interrupted")]


def _nodes(
    row: run_row.Row, paths: Iterable[str], stand: Mapping[str, StepStatus], otherwise: StepStatus
) -> list[Step]:
    """Nodes that have begun. `stand`: how they do, those that do not as `otherwise` says."""
    steps = {visit.path: visit.steps for visit in row.folded.visits} if row.folded else {}
    return [
        Step(
            kind="node",
            attempt=row.attempt,
            step=steps.get(path, 0),
            name=name_of(path),
            node=name_of(path),
            path=path,
            status=stand.get(path, otherwise),
            began_at=row.begun[path],
        )
        for path in paths
    ]


def _is_done(row: run_row.Row, call: run_row.OpenCall) -> bool:
    """Whether the call is told of as a tool's: what a node itself asks of a person, or of another agent, is told of as
    that alone."""
    known = row.folded.call(call.id) if row.folded else None
    return known is None or not known.is_node or known.asks not in ("question", "child")


def wait(recorded: Recorded, row: run_row.Row, closed: requests.Row) -> Step:
    """The wait that ended when this request was closed."""
    status = "interrupted" if closed.state in ("closed", "open") else closed.state
    return Step(
        seq=recorded.seq,
        kind="wait",
        attempt=row.attempt,
        step=row.steps_of(closed.path),
        name=closed.kind,
        node=name_of(closed.path),
        path=closed.path,
        status=status,
        began_at=closed.asked_at,
        ended_at=recorded.time,
        call_id=closed.call_id,
        request=requests.id_of(recorded.event.key.session, closed),
        by=closed.by,
    )


def child(recorded: Recorded, data: ChildEnded, child: session_row.OpenChild) -> Step:
    """What a sub-agent did, which has ended by this."""
    return msgspec.structs.replace(
        _delegated(child),
        seq=recorded.seq,
        status=data.status,
        ended_at=recorded.time,
        usage=data.usage,
        error=data.error.message if data.error else "",
    )


def _delegated(child: session_row.OpenChild) -> Step:
    return Step(
        kind="child",
        attempt=child.attempt,
        step=child.step,
        name=child.agent,
        node=name_of(child.path),
        path=child.path,
        status="running",
        began_at=child.since,
        call_id=child.call_id,
        child_session=child.session,
        child_run=run_id(child.session, 1),
    )


def _model(
    recorded: Recorded,
    data: ModelReplied | NodeFinished | RunEnded,
    row: run_row.Row,
    step: int,
    usage: Usage,
    status: StepStatus,
) -> Step:
    now = recorded.time
    node, path, error = "", "", ""
    match data:
        case RunEnded():
            error = data.error.message if data.error else ""
        case NodeFinished():
            node, path, error = data.node, data.path, data.error
        case ModelReplied():
            node, path = data.node, data.path
    # Beside a node others go on: what came last says nothing of when its model was called.
    began = row.since(now, data.duration) if path else row.changed_at
    return Step(
        seq=recorded.seq,
        kind="model",
        attempt=data.attempt,
        step=step,
        name=data.model or row.model or row.spec.model,
        node=node,
        path=path,
        status=status,
        began_at=max(began, now - data.duration) if data.duration else began,
        ended_at=now,
        finish=data.finish,
        usage=usage,
        error=error,
    )


def _tool(
    recorded: Recorded,
    row: run_row.Row,
    call: run_row.OpenCall,
    status: ToolStatus,
    duration: int = 0,
    error: str = "",
) -> Step:
    began = call.started_at or call.since
    return Step(
        seq=recorded.seq,
        kind="tool",
        attempt=row.attempt,
        step=row.steps_of(call.path),
        name=call.name,
        node=name_of(call.path),
        path=call.path,
        status=status,
        began_at=max(began, recorded.time - duration) if duration else began,
        ended_at=recorded.time,
        call_id=call.id,
        arguments=call.arguments,
        error=error,
    )


def _called_model(row: run_row.Row, data: RunEnded) -> bool:
    """Whether a model call ended with the run: a run may also end between two calls, or before the first. A graph calls
    models for its nodes alone."""
    if row.spec.graph and row.trigger != "action":
        return False
    if row.folded and (row.folded.answered or row.folded.status != "running"):
        return False
    failed = data.error is not None and data.error.code in ("model_error", "empty_reply", "context_overflow")
    return data.status == "completed" or bool(data.duration or data.content or data.reasoning) or failed


@lru_cache(maxsize=16)
def table(generation: int) -> Table:
    """An event may end several steps: `place` tells them apart."""
    return Table(
        f"steps_{generation}",
        MetaData(),
        Column("key", text(), primary_key=True),
        Column("seq", BigInteger, primary_key=True, autoincrement=False),
        Column("place", Integer, primary_key=True, autoincrement=False),
        Column("body", Text, nullable=False),
    )


_encoder = msgspec.json.Encoder()
_steps = msgspec.json.Decoder(Step)


def values(key: str, place: int, step: Step) -> Values:
    return (key, step.seq, place, _encoder.encode(step).decode())


async def list_for(db: Database, account: str, run: str) -> Steps | None:
    """Every step of the run, oldest first, what is going on now last; None if the views do not have the run. Raises
    `ViewsError`."""
    parsed = parse_run_id(run)
    if parsed is None:
        return None
    session = SessionKey(account, parsed[0])
    key = runs.key_of(session, parsed[1])

    async def work(reader: Reader) -> Steps | None:
        known, steps = runs.table(reader.generation), table(reader.generation)
        found = await reader.rows(select(known.c.body).where(known.c.key == key))
        if not found:
            return None
        over = await reader.rows(select(steps.c.body).where(steps.c.key == key).order_by(steps.c.seq, steps.c.place))
        row = runs.parse(found[0].body)
        going_on = [*await _going_on(reader, session, row), *await _children(reader, session, row)]
        return Steps((*(_steps.decode(step.body) for step in over), *going_on), reader.position)

    return await db.read(work)


async def _going_on(reader: Reader, key: SessionKey, row: run_row.Row) -> list[Step]:
    run = row.folded
    if run is None:
        return []
    unasked: dict[str, StepStatus] = {call.id: "waiting" for call in run.open_calls if call.asks and not call.closed}
    if row.status == "waiting":
        wanted = [requests.key_of(key, row.n, request.k) for request in run.requests]
        bodies = await reader.bodies(requests.table(reader.generation), wanted)
        asked = sorted([requests.parse(body) for body in bodies.values()], key=lambda request: request.k)
        return [*(_asked(key, row, request) for request in asked), *_nodes(row, row.begun, unasked, "running")]
    if row.status != "running":
        return []
    if row.open_calls or row.begun:
        return [*_carried_out(row, unasked), *_nodes(row, row.begun, unasked, "running")]
    if row.spec.graph and row.trigger != "action":  # which of its nodes is at work is not known here
        return []
    if run.answered and not run.steering:  # it is about to end
        return []
    return [
        Step(
            kind="model",
            attempt=row.attempt,
            step=row.steps + 1,
            name=row.model or row.spec.model,
            status="running",
            began_at=row.changed_at,
        )
    ]


async def _children(reader: Reader, key: SessionKey, row: run_row.Row) -> list[Step]:
    """The sub-agents of the run that have not ended."""
    if not row.children:
        return []
    bodies = await reader.bodies(sessions.table(reader.generation), [str(key)])
    return [
        _delegated(child)
        for body in bodies.values()
        for child in sessions.parse(body).open_children
        if child.run == row.n
    ]


def _asked(key: SessionKey, row: run_row.Row, request: requests.Row) -> Step:
    return Step(
        kind="wait",
        attempt=row.attempt,
        step=row.steps_of(request.path),
        name=request.kind,
        node=name_of(request.path),
        path=request.path,
        status="waiting",
        began_at=request.asked_at,
        call_id=request.call_id,
        request=requests.id_of(key.session, request),
    )


def _carried_out(row: run_row.Row, unasked: Mapping[str, StepStatus]) -> list[Step]:
    """The open calls; one that a person has to be asked for waits until nothing else is to be done."""
    return [
        Step(
            kind="tool",
            attempt=row.attempt,
            step=row.steps_of(call.path),
            name=call.name,
            node=name_of(call.path),
            path=call.path,
            status=unasked.get(call.id, "running"),
            began_at=call.started_at or call.since,
            call_id=call.id,
            arguments=call.arguments,
        )
        for call in row.open_calls
        if _is_done(row, call)
    ]
