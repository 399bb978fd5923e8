"""The waterfall of a run: its model calls and tools, with begin, end, usage.

A row is written when a step is over and never changes. What is going on now is not stored here: it is read from the
run's row, which knows the open tool calls and when the model could begin."""

from functools import lru_cache
from typing import Literal

import msgspec
from sqlalchemy import Table, select

from turnstream.ids import SessionKey, parse_run_id
from turnstream.session.events import EndStatus, ModelReplied, Recorded, RunEnded, ToolReturned, ToolStatus, Usage
from turnstream.session.state import has_edge
from turnstream.views import runs
from turnstream.views.database import Database, Reader
from turnstream.views.rows import Values, documents

StepStatus = Literal["running"] | ToolStatus | EndStatus


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A model call or a tool. Times are milliseconds since the epoch, by the broker's clock: `ended_at` is when its
    event was stored, `began_at` that less the duration that the runner measured. `seq` 0: it is going on."""

    seq: int = 0
    kind: Literal["model", "tool"]
    attempt: int
    step: int
    name: str
    """Of the model, or of the tool."""
    status: StepStatus
    began_at: int
    ended_at: int | None = None
    call_id: str | None = None
    arguments: str = ""
    """Of a tool: JSON, as the model wrote it."""
    finish: str = ""
    usage: Usage | None = None
    error: str = ""


class Steps(msgspec.Struct, frozen=True):
    """`position` is the sequence that the steps reflect."""

    items: tuple[Step, ...]
    position: int


def fold(recorded: Recorded, run: runs.Row) -> Step | None:
    """The step that this fact of a run ends, if any. `run` is the row of the run before the event."""
    if not run.live:
        return None
    data = recorded.event.data
    now = recorded.time
    match data:
        case ModelReplied() if run.attempt == data.attempt:
            return Step(
                seq=recorded.seq,
                kind="model",
                attempt=data.attempt,
                step=data.step,
                name=data.model or run.model or run.spec.model,
                status="ok",
                began_at=max(run.changed_at, now - data.duration) if data.duration else run.changed_at,
                ended_at=now,
                finish=data.finish,
                usage=data.usage,
            )
        case RunEnded() if has_edge(run.status, "run.ended", data.status) and _called_model(data):
            return Step(
                seq=recorded.seq,
                kind="model",
                attempt=data.attempt,
                step=run.steps + 1,
                name=data.model or run.model or run.spec.model,
                status="ok" if data.status == "completed" else data.status,
                began_at=max(run.changed_at, now - data.duration) if data.duration else run.changed_at,
                ended_at=now,
                finish=data.finish,
                usage=data.step_usage,
                error=data.error.message if data.error else "",
            )
        case ToolReturned() if run.attempt == data.attempt and (call := run.find(data.call_id)):
            began = call.started_at or call.asked_at
            return Step(
                seq=recorded.seq,
                kind="tool",
                attempt=data.attempt,
                step=run.steps,
                name=call.name,
                status=data.status,
                began_at=max(began, now - data.duration) if data.duration else began,
                ended_at=now,
                call_id=data.call_id,
                arguments=call.arguments,
                error=data.error,
            )
        case _:
            return None


def _called_model(data: RunEnded) -> bool:
    """Whether a model call ended with the run: a run may also end between two calls, or before the first."""
    failed = data.error is not None and data.error.code in ("model_error", "empty_reply", "context_overflow")
    return data.status == "completed" or bool(data.duration or data.content or data.reasoning) or failed


@lru_cache(maxsize=16)
def table(generation: int) -> Table:
    return documents(f"steps_{generation}")


_encoder = msgspec.json.Encoder()
_steps = msgspec.json.Decoder(Step)


def values(key: str, step: Step) -> Values:
    return (key, step.seq, _encoder.encode(step).decode())


async def list_for(db: Database, account: str, run: str) -> Steps | None:
    """Every step of the run, oldest first, what is going on now last; None if the views do not have the run. Raises
    `ViewsError`."""
    parsed = parse_run_id(run)
    if parsed is None:
        return None
    key = runs.key_of(SessionKey(account, parsed[0]), parsed[1])

    async def work(reader: Reader) -> Steps | None:
        known, steps = runs.table(reader.generation), table(reader.generation)
        found = await reader.rows(select(known.c.body).where(known.c.key == key))
        if not found:
            return None
        over = await reader.rows(select(steps.c.body).where(steps.c.key == key).order_by(steps.c.seq))
        row = runs.parse(found[0].body)
        return Steps((*(_steps.decode(step.body) for step in over), *_going_on(row)), reader.position)

    return await db.read(work)


def _going_on(run: runs.Row) -> tuple[Step, ...]:
    if run.status != "running":
        return ()
    if run.open_calls:
        return tuple(
            Step(
                kind="tool",
                attempt=run.attempt,
                step=run.steps,
                name=call.name,
                status="running",
                began_at=call.started_at or call.asked_at,
                call_id=call.id,
                arguments=call.arguments,
            )
            for call in run.open_calls
        )
    model = run.model or run.spec.model
    began = run.changed_at
    return (Step(kind="model", attempt=run.attempt, step=run.steps + 1, name=model, status="running", began_at=began),)
