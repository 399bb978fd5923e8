"""What a model sees of a session of 10,000 events, from the stored bytes on, over decoding these bytes alone.

Half of the turns call a tool. Everything is shown (`window = all`), or what fits into 100,000 tokens; of that, beside,
what a runner has to read.
"""

import gc
import time
from collections.abc import Callable, Sequence

import msgspec
from tests.bench.bench_log import new_key, turn
from tests.bench.figures import Figure, median

from turnstream.ids import SessionKey, derive
from turnstream.log import codec
from turnstream.session import history, window
from turnstream.session.decision import Decision
from turnstream.session.events import ModelReplied, Recorded, RunEnded, ToolCall, ToolReturned, Usage
from turnstream.session.fold import fold
from turnstream.session.policy import STRICT, Policy
from turnstream.session.state import Session
from turnstream.session.window import Budget

EVENTS = 10_000
ROUNDS = 9


async def history_build() -> dict[str, Figure]:
    stored = _stored(new_key())
    events = _decoded(stored)
    session = fold(Session(key=events[0].event.key), events)
    budget = Budget("demo", 100_000)
    fit, whole = STRICT, msgspec.structs.replace(STRICT, history_window="all")
    assert len(_built(session, events, whole, budget)) > len(_built(session, events, fit, budget)) > 100
    decoding: list[float] = []
    building: dict[Policy, list[float]] = {fit: [], whole: []}
    for _ in range(ROUNDS):
        decoding.append(_timed(lambda: _decoded(stored)))
        for policy, taken in building.items():
            taken.append(_timed(lambda policy=policy: _built(session, _decoded(stored), policy, budget)))
    base, slowest = median(decoding), max(median(taken) for taken in building.values())
    details: dict[str, float | str] = {
        "decoding_ms": base * 1000,
        "all_ms": median(building[whole]) * 1000,
        "fit_ms": median(building[fit]) * 1000,
        "events_read_for_the_next_turn": _read_next(session, events, budget),
    }
    return {"history_build": Figure(value=slowest / base, bound=3.0, kind="at_most", details=details)}


def _stored(key: SessionKey) -> list[bytes]:
    """As many events, each as the log has it."""
    stored: list[bytes] = []
    n = 0
    while len(stored) < EVENTS:
        n += 1
        posted, started, ended = turn(key, n)
        facts = [posted, started, *(_called(key, n, posted) if n % 2 else ()), ended]
        stored += [codec.encode(decision.event) for decision in facts]
    return stored[:EVENTS]


def _called(key: SessionKey, n: int, like: Decision) -> list[Decision]:
    call = ToolCall(id=f"c{n}", name="look", arguments='{"at": "there"}')
    replied = ModelReplied(run=n, attempt=1, step=1, tool_calls=(call,), usage=Usage(input_tokens=5))
    returned = ToolReturned(run=n, attempt=1, call_id=call.id, status="ok", output="z" * 400)
    return [
        Decision(msgspec.structs.replace(like.event, id=derive(str(key), n, codec.NAMES[type(data)]), data=data))
        for data in (replied, returned)
    ]


def _decoded(stored: Sequence[bytes]) -> list[Recorded]:
    return [codec.decode(data, seq=n, previous=n - 1, time=n) for n, data in enumerate(stored, 1)]


def _built(session: Session, events: Sequence[Recorded], policy: Policy, budget: Budget) -> Sequence[object]:
    return history.build(session, events, None, policy, budget).messages


def _read_next(session: Session, events: Sequence[Recorded], budget: Budget) -> int:
    """How many events a runner reads for the turn behind one whose window began anew."""
    view = history.build(session, events, None, STRICT, budget)
    last = next(event for event in reversed(events) if isinstance(event.event.data, RunEnded))
    data = msgspec.structs.replace(last.event.data, window=view.window)  # type: ignore[type-var]
    again = [
        msgspec.structs.replace(one, event=msgspec.structs.replace(one.event, data=data)) if one is last else one
        for one in events
    ]
    session = fold(Session(key=session.key), again)
    since = window.needs(session, None, STRICT, budget).since
    return sum(event.seq >= since for event in again)


def _timed(work: Callable[[], object]) -> float:
    gc.collect()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
