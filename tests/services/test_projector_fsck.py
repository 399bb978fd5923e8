"""fsck finds nothing in what was stored by the rules, and every fault that is planted, by its name and place."""

import random
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import delete, insert, update
from tests.support.logs import SPECS, Log, publish, wander
from tests.support.nats import connect

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.declare import declare
from turnstream.broker.server import NatsServer
from turnstream.log import codec
from turnstream.log.messages import EXPECTED
from turnstream.session.commands import CancelRun
from turnstream.session.events import (
    Event,
    Fact,
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    Part,
    RunEnded,
    RunReleased,
    RunStarted,
    SessionOpened,
    Starts,
    ToolCall,
    ToolReturned,
    Wake,
)
from turnstream.views import generations, history, runs, sessions, steps
from turnstream.views.database import Database
from turnstream_projector.findings import Checker, Finding
from turnstream_projector.fsck import Report, fsck
from turnstream_projector.rebuild import Progress, rebuild

WAKE = Wake(work=1, cause=1, delivery=1)
STARTED = RunStarted(run=1, attempt=1, runner="r", wake=WAKE)
CALL = ToolCall(id="c1", name="add", arguments="{}")


@pytest.fixture
async def broker(own_nats: NatsServer) -> AsyncIterator[Broker]:
    broker = await connect(own_nats.url)
    await declare(broker, replicas=1)
    yield broker
    await broker.close()


def said(run: int, *, queued: bool = False) -> MessagePosted:
    routing = Starts(run=run, spec=SPECS["default"])
    return MessagePosted(
        message_id=f"m{run}",
        author="user:ann",
        content=(Part(text="hello"),),
        starts=None if queued else routing,
        queued=routing if queued else None,
    )


def found(*facts: Fact) -> list[tuple[str, str, int | None]]:
    """What is found in the log of one session with these facts, however they came there."""
    log, checker = Log(), Checker()
    for fact in facts:
        checker.check(log.put("s1", fact))
    return [(finding.kind, finding.where, finding.seq) for finding in checker.findings]


def reply(step: int = 1, *calls: ToolCall) -> ModelReplied:
    return ModelReplied(run=1, attempt=1, step=step, tool_calls=calls)


def ended(status: str = "completed", attempt: int = 1, run: int = 1) -> RunEnded:
    return RunEnded(run=run, attempt=attempt, status=status)  # pyright: ignore


def test_a_log_that_decide_has_written_has_no_findings() -> None:
    log, checker = Log(), Checker()
    for n in range(3):
        log.turn(f"s{n}")
        log.say(f"s{n}", "more")
        log.say(f"s{n}", "and more")
        log.start(f"s{n}", 2)
        log.start(f"s{n}", 2, trigger="recovery")
        log.put(f"s{n}", RunReleased(run=2, attempt=2))
        log.put(f"s{n}", MessageWithdrawn(message_id=f"m{log.seq - 3}", by="user:ann"))
    for recorded in log.events:
        checker.check(recorded)
    assert checker.findings == []


@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ((SessionOpened(), SessionOpened()), ("opened_twice", "default/s1", 2)),
        ((said(1), STARTED, said(2)), ("two_holders", "s1.2", 3)),
        (
            (said(1), STARTED, said(2, queued=True), RunStarted(run=2, attempt=1, runner="r", wake=WAKE)),
            ("two_holders", "s1.2", 4),
        ),
        ((said(2),), ("run_number", "s1.2", 1)),
        ((said(1), STARTED, ended(run=7)), ("no_such_run", "s1.7", 3)),
        ((said(1), STARTED, ended(attempt=2)), ("fenced", "s1.1", 3)),
        ((said(1), STARTED, STARTED), ("fenced", "s1.1", 3)),
        ((said(1), STARTED, ended(), ended()), ("second_end", "s1.1", 4)),
        ((said(1), STARTED, ended(), reply()), ("transition", "s1.1", 4)),
        ((said(1), ended(attempt=0)), ("transition", "s1.1", 2)),
        ((said(1), ModelReplied(run=1, attempt=0, step=1)), ("transition", "s1.1", 2)),
        ((said(1), STARTED, MessageWithdrawn(message_id="m1", by="x")), ("transition", "default/s1", 3)),
        ((said(1), STARTED, reply(1, CALL), ended()), ("call_open", "s1.1", 4)),
        ((said(1), STARTED, reply(1, CALL), reply(2)), ("call_open", "s1.1", 4)),
        (
            (said(1), STARTED, ToolReturned(run=1, attempt=1, call_id="c9", status="ok")),
            ("no_such_call", "s1.1", 3),
        ),
    ],
)
def test_a_fact_that_no_rule_allows_is_found(facts: tuple[Fact, ...], fault: tuple[str, str, int]) -> None:
    assert found(*facts) == [fault]


def test_an_end_other_than_cancelled_behind_a_cancel_is_found() -> None:
    log, checker = Log(), Checker()
    log.say("s1", "hello")
    log.start("s1", 1)
    log.do("s1", CancelRun(origin=log.origin(), run=1))
    log.put("s1", ended())
    for recorded in log.events:
        checker.check(recorded)
    assert [(finding.kind, finding.seq) for finding in checker.findings] == [("transition", 4)]


async def shown(broker: Broker, database: Database, log: Log) -> None:
    await publish(broker, log.events)
    await rebuild(broker, database)


def kinds(report: Report) -> list[tuple[str, str]]:
    return [(finding.kind, finding.where) for finding in report.findings]


async def test_nothing_is_found_where_nothing_is_wrong(broker: Broker, database: Database) -> None:
    log = Log()
    for n in range(700):
        log.turn(f"s{n % 30}")
    await shown(broker, database, log)
    steps: list[Progress] = []
    report = await fsck(broker, database, on_progress=steps.append)
    assert report == Report((), 2100, 2100)
    assert steps[-1].position == 2100


async def test_an_empty_log_and_no_views(broker: Broker, database: Database) -> None:
    assert await fsck(broker, database) == Report((), 0, None)
    await rebuild(broker, database)
    assert await fsck(broker, database) == Report((), 0, 0)


async def test_views_that_are_behind_the_log_are_compared_as_far_as_they_go(broker: Broker, database: Database) -> None:
    log = Log()
    log.turn("s1")
    await shown(broker, database, log)
    log.turn("s1")
    await publish(broker, log.events[3:])
    assert await fsck(broker, database) == Report((), 6, 3)


async def raw(broker: Broker, event: Event, headers: dict[str, str], subject: str = "") -> None:
    """A message that somebody published who is none of us."""
    await broker.nc.publish(subject or subjects.session(event.key), codec.encode(event), headers=headers)
    await broker.nc.flush()


async def test_messages_that_somebody_else_published_are_found(broker: Broker, database: Database) -> None:
    log = Log()
    log.turn("s1")
    log.turn("s2")
    await publish(broker, log.events)
    event = Event(id="x", key=log.key("s1"), data=said(2), actor="evil", time=log.time)
    await raw(broker, event, {})  # 7: no guard
    await raw(broker, event, {EXPECTED: "7"}, subjects.session(log.key("s2")))  # refused by the server
    await raw(broker, event, {}, subjects.session(log.key("s2")))  # 8: of another session
    await broker.nc.publish(subjects.session(log.key("s3")), b"\xff not json")  # 9
    await broker.nc.flush()
    await rebuild(broker, database)
    report = await fsck(broker, database)
    assert [(finding.kind, finding.where, finding.seq) for finding in report.findings] == [
        ("unguarded", "default/s1", 7),
        ("unreadable", subjects.session(log.key("s2")), 8),
        ("unreadable", subjects.session(log.key("s3")), 9),
    ]
    assert report.position == 9


async def test_an_event_that_is_missing_breaks_the_chain(broker: Broker, database: Database) -> None:
    log = Log()
    log.turn("s1")
    await publish(broker, log.events)
    await broker.api("STREAM.MSG.DELETE.SESSIONS", {"seq": 2})
    report = await fsck(broker, database)
    assert ("broken_chain", "default/s1") in kinds(report)
    broken = next(finding for finding in report.findings if finding.kind == "broken_chain")
    assert broken.seq == 3 and "follows event 2, but the event before it is 1" in broken.message


async def test_rows_that_are_not_what_the_log_gives_are_found(broker: Broker, database: Database) -> None:
    log = Log()
    for n in range(1, 5):
        log.turn(f"s{n}")
    await shown(broker, database, log)
    generation = (await database.checkpoint()).generation
    table, ran, said_, did = (view.table(generation) for view in (sessions, runs, history, steps))
    async with database.transaction() as connection:
        await connection.execute(update(table).where(table.c.key == "default/s2").values(title="other"))
        await connection.execute(delete(ran).where(ran.c.key == "default/s1.1"))
        await connection.execute(insert(said_).values(key="default/s9", seq=77, body="{}"))
        await connection.execute(update(did).where(did.c.key == "default/s4.1").values(body="{}"))
    report = await fsck(broker, database)
    assert report.findings == (
        Finding("row_differs", "sessions default/s2", 6, "not what the log gives: title"),
        Finding("row_missing", "runs default/s1.1", 1, "the log gives this row, and the view does not have it"),
        Finding("row_extra", "history default/s9 77", 77, "no event of the log gives this row"),
        Finding("row_differs", "steps default/s4.1 12", 12, "not what the log gives: body"),
    )
    await rebuild(broker, database)
    assert (await fsck(broker, database)).findings == ()


async def test_views_of_another_log_or_ahead_of_it_are_found(broker: Broker, database: Database) -> None:
    log = Log()
    log.turn("s1")
    await shown(broker, database, log)
    async with database.transaction() as connection:
        await connection.execute(update(generations.CHECKPOINT).values(position=50))
    assert kinds(await fsck(broker, database)) == [("views_ahead", "views")]
    async with database.transaction() as connection:
        await connection.execute(update(generations.CHECKPOINT).values(position=3, log="another"))
    assert kinds(await fsck(broker, database)) == [("another_log", "views")]


async def test_nothing_that_decide_lets_in_is_found(broker: Broker, database: Database) -> None:
    events = wander(random.Random(3), 400, faults=False)
    await publish(broker, events)
    await rebuild(broker, database)
    assert await fsck(broker, database) == Report((), 400, 400)
