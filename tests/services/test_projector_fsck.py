"""fsck finds nothing in what was stored by the rules, and every fault that is planted, by its name and place."""

import asyncio
import random

import msgspec
import pytest
from sqlalchemy import delete, insert, update
from tests.support.logs import SPECS, Log, child_call, publish, wander

from turnstream import subjects
from turnstream.broker.answers import EXPECTED
from turnstream.broker.connection import Broker
from turnstream.log import codec
from turnstream.log.handle import Sessions
from turnstream.log.jetstream import JetStreamLog
from turnstream.session.commands import CancelRun, DeleteSession
from turnstream.session.events import (
    NO_POLICY,
    Answered,
    Answers,
    Ask,
    ChildEnded,
    ChildStarted,
    Copied,
    Event,
    Fact,
    HistoryCompacted,
    Leftover,
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    NodeFinished,
    NodeStarted,
    OnMessageData,
    Opens,
    Parent,
    Part,
    PlanChanged,
    PolicyData,
    Queued,
    RequestAnswered,
    RequestExpired,
    RunEnded,
    RunReleased,
    RunReported,
    RunRequested,
    RunStarted,
    RunSteered,
    RunWaiting,
    SessionDeleted,
    SessionErased,
    SessionForked,
    SessionOpened,
    SessionUpdated,
    Starts,
    Steers,
    ToolCall,
    ToolReturned,
    Wake,
)
from turnstream.views import generations, history, runs, sessions, steps
from turnstream.views.batch import Archived
from turnstream.views.database import Database
from turnstream_projector.findings import Finding, Findings
from turnstream_projector.fsck import Report, fsck
from turnstream_projector.rebuild import Progress, rebuild
from turnstream_projector.rules import Checker

WAKE = Wake(work=1, cause=1, delivery=1)
STARTED = RunStarted(run=1, attempt=1, runner="r", wake=WAKE)
CALL = ToolCall(id="c1", name="add", arguments="{}")


def said(run: int, *, queued: bool = False, policy: PolicyData = NO_POLICY) -> MessagePosted:
    spec = msgspec.structs.replace(SPECS["default"], policy=policy)
    return MessagePosted(
        message_id=f"m{run}",
        author="user:ann",
        content=(Part(text="hello"),),
        starts=None if queued else Starts(run=run, spec=spec),
        queued=Queued(run=run, spec=spec) if queued else None,
    )


def heard(message: str, **routing: object) -> MessagePosted:
    content = (Part(text="hello"),)
    return MessagePosted(message_id=message, author="user:ann", content=content, **routing)  # pyright: ignore


def found(*facts: Fact) -> list[tuple[str, str, int | None]]:
    """What is found in the log of one session with these facts, however they came there."""
    log = Log()
    for fact in facts:
        log.put("s1", fact)
    return checked(log)


def checked(log: Log) -> list[tuple[str, str, int | None]]:
    findings = Findings()
    checker = Checker(findings)
    for recorded in log.events:
        checker.check(recorded)
    checker.finish()
    return [(finding.kind, finding.where, finding.seq) for finding in findings.all]


def reply(step: int = 1, *calls: ToolCall) -> ModelReplied:
    return ModelReplied(run=1, attempt=1, step=step, tool_calls=calls)


def ended(status: str = "completed", attempt: int = 1, run: int = 1, **fields: object) -> RunEnded:
    return RunEnded(run=run, attempt=attempt, status=status, **fields)  # pyright: ignore


def left(run: int, *messages: str) -> Leftover:
    return Leftover(run=run, spec=SPECS["default"], message_ids=messages)


def waiting(request: str, call: str, kind: str = "question") -> RunWaiting:
    ask = Ask(request=f"s1.1.{request}", kind=kind, call_id=call, prompt="?")  # pyright: ignore
    return RunWaiting(run=1, attempt=1, requests=(ask,))


def child(k: int = 1, attempt: int = 1, **fields: object) -> ChildStarted:
    given = {"call_id": "c1", "child_session": f"s1--1-{k}", "spec": SPECS["default"], **fields}
    return ChildStarted(run=1, attempt=attempt, k=k, **given)  # pyright: ignore


def came_out(k: int) -> ChildEnded:
    return ChildEnded(run=1, call_id=f"d{k}", k=k, status="completed")


def finished(path: str, attempt: int = 1) -> NodeFinished:
    return NodeFinished(run=1, attempt=attempt, node=path, path=path)


def begun(path: str, items: int = 0) -> NodeStarted:
    return NodeStarted(run=1, attempt=1, node=path, path=path, items=items)


def spoke(path: str, *calls: ToolCall) -> ModelReplied:
    return ModelReplied(run=1, attempt=1, step=1, node=path, path=path, tool_calls=calls)


def opens_child(session: str = "s1", *, k: int) -> Opens:
    return Opens(parent=Parent(session=session, run=1, call_id="c1", k=k))


DELEGATED = child_call("c1")
ASKING = ToolCall(id="c1", name="ask", arguments="{}", asks="question")
CALL2 = ToolCall(id="c2", name="add", arguments="{}")
WAITING = (said(1), STARTED, reply(1, ASKING), waiting("q1", "c1"))
STEERED = (said(1), STARTED, heard("m2", steers=Steers(run=1)))
DELETED = SessionDeleted(mode="erase", by="x", last_run=1)
ERASED = SessionErased(mode="erase", by="x", events_removed=2, last_run=1, deleted_at=1)
ALONE = PolicyData(message_on_busy="refuse")
SIDE_BY_SIDE = PolicyData(on_busy="parallel")


def test_a_log_that_decide_has_written_has_no_findings() -> None:
    log = Log()
    for n in range(3):
        log.turn(f"s{n}")
        log.say(f"s{n}", "more")
        log.say(f"s{n}", "and more")
        log.start(f"s{n}", 2)
        log.start(f"s{n}", 2)
        log.put(f"s{n}", RunReleased(run=2, attempt=2))
        log.put(f"s{n}", MessageWithdrawn(message_id=f"m{log.seq - 3}", by="user:ann"))
    assert checked(log) == []


@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ((SessionOpened(), SessionOpened()), ("opened_twice", "default/s1", 2)),
        ((said(1), STARTED, said(2, policy=ALONE)), ("two_holders", "s1.2", 3)),
        ((*WAITING, said(2, policy=SIDE_BY_SIDE)), ("two_holders", "s1.2", 5)),
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
        ((said(1), STARTED, RunRequested(run=2, spec=SPECS["default"], retry_of=1)), ("transition", "s1.2", 3)),
        # calls: each has a result, or ends with its run
        ((said(1), STARTED, reply(1, CALL), ended()), ("call_open", "s1.1", 4)),
        ((said(1), STARTED, reply(1, CALL), ended("failed")), ("call_open", "s1.1", 4)),
        ((said(1), STARTED, reply(1, CALL), reply(2)), ("call_open", "s1.1", 4)),
        (
            (said(1), STARTED, ToolReturned(run=1, attempt=1, call_id="c9", status="ok")),
            ("no_such_call", "s1.1", 3),
        ),
        ((said(1), STARTED, ended("failed", unfinished=("c9",))), ("no_such_call", "s1.1", 3)),
        # requests: each is open, closed once, or ends with its run
        ((*WAITING, RequestAnswered(run=1, request="s1.1.q2", by="x")), ("no_such_request", "s1.1", 5)),
        ((*WAITING, RequestExpired(run=1, request="s1.2.q1")), ("no_such_request", "s1.1", 5)),
        ((*WAITING, *[RequestAnswered(run=1, request="s1.1.q1", by="x")] * 2), ("no_such_request", "s1.1", 6)),
        (
            (*WAITING, heard("m2", answers=Answers(run=1, requests=(Answered(request="s1.1.q7"),)))),
            ("no_such_request", "s1.1", 5),
        ),
        ((said(1), STARTED, reply(1, CALL), waiting("q1", "c1")), ("no_such_request", "s1.1", 4)),
        ((said(1), STARTED, reply(1, ASKING), waiting("q2", "c1")), ("no_such_request", "s1.1", 4)),
        ((said(1), STARTED, reply(1, ASKING, CALL2), waiting("q1", "c1")), ("call_open", "s1.1", 4)),
        ((*WAITING, msgspec.structs.replace(STARTED, attempt=2)), ("transition", "s1.1", 5)),
        # what steers a run is taken, withdrawn or left over, once
        ((*STEERED, RunSteered(run=1, attempt=1, message_ids=("m3",))), ("no_such_message", "s1.1", 4)),
        ((*STEERED, *[RunSteered(run=1, attempt=1, message_ids=("m2",))] * 2), ("no_such_message", "s1.1", 5)),
        ((*STEERED, ended("failed")), ("message_lost", "s1.1", 4)),
        ((*STEERED, ended("failed", leftover=left(2, "m2", "m9"))), ("no_such_message", "s1.1", 4)),
        ((*STEERED, ended("failed", leftover=left(5, "m2"))), ("run_number", "s1.5", 4)),
        (
            (
                *STEERED,
                ended("failed", leftover=left(2, "m2")),
                RunStarted(run=2, attempt=1, runner="r", wake=WAKE, trigger="leftover", message_ids=("m2",)),
                ended("failed", run=2, leftover=left(3, "m2")),
            ),
            ("no_such_message", "s1.2", 6),
        ),
        ((said(1), msgspec.structs.replace(STARTED, message_ids=("m1", "m2"))), ("no_such_message", "s1.1", 2)),
        ((said(1), STARTED, ended(), heard("m2", steers=Steers(run=1))), ("transition", "s1.1", 4)),
        # children: each is intended, and ends once
        ((said(1), STARTED, reply(1, CALL), child()), ("no_such_call", "s1.1", 4)),
        ((said(1), STARTED, reply(1, DELEGATED), child(k=2)), ("no_such_child", "s1.1", 4)),
        ((said(1), STARTED, reply(1, DELEGATED), child(child_session="s2")), ("no_such_child", "s1.1", 4)),
        ((said(1), STARTED, reply(1, DELEGATED), child(attempt=2)), ("fenced", "s1.1", 4)),
        ((said(1), STARTED, reply(1, DELEGATED), came_out(1)), ("no_such_child", "s1.1", 4)),
        ((said(1), STARTED, reply(1, DELEGATED), child(), came_out(1), came_out(1)), ("second_end", "s1.1", 6)),
        ((said(1), STARTED, ended(), RunReported(run=1)), ("transition", "s1.1", 4)),
        ((said(1), STARTED, PlanChanged(items=(), run=1, attempt=1, call_id="c9")), ("no_such_call", "s1.1", 3)),
        # nodes of a graph: each begins, says something, finishes once, and nothing comes behind that
        ((said(1), STARTED, finished("a"), finished("a")), ("node_over", "s1.1", 4)),
        ((said(1), STARTED, finished("a"), begun("a")), ("node_over", "s1.1", 4)),
        ((said(1), STARTED, finished("a"), spoke("a")), ("node_over", "s1.1", 4)),
        ((said(1), STARTED, begun("m", 2), finished("m"), finished("m[1].a")), ("node_over", "s1.1", 5)),
        ((said(1), STARTED, begun("m", 2), finished("m[2].a")), ("no_such_node", "s1.1", 4)),
        ((said(1), STARTED, spoke("m[0].a")), ("no_such_node", "s1.1", 3)),
        ((said(1), STARTED, begun("m", 2), begun("m", 2), finished("m")), ("transition", "s1.1", 4)),
        ((said(1), STARTED, spoke("a", CALL), finished("a"), finished("b")), ("call_open", "s1.1", 4)),
        ((said(1), STARTED, spoke("a", CALL), spoke("a", CALL2)), ("call_open", "s1.1", 4)),
        ((said(1), STARTED, begun("m", 1), ended()), ("node_open", "s1.1", 4)),
        ((said(1), STARTED, finished("a", attempt=2)), ("fenced", "s1.1", 3)),
        ((said(1), STARTED, ended(), finished("a")), ("transition", "s1.1", 4)),
        ((*WAITING, finished("a")), ("transition", "s1.1", 5)),
        # a session that is deleted
        ((said(1), DELETED, STARTED), ("deleted", "default/s1", 3)),
        ((said(1), DELETED, DELETED), ("deleted", "default/s1", 3)),
        ((said(1), DELETED, ERASED, said(2)), ("deleted", "default/s1", 4)),
        ((said(1), DELETED, ERASED, ERASED), ("deleted", "default/s1", 4)),
        ((said(1), ERASED), ("deleted", "default/s1", 2)),
    ],
)
def test_a_fact_that_no_rule_allows_is_found(facts: tuple[Fact, ...], fault: tuple[str, str, int]) -> None:
    assert found(*facts) == [fault]


def test_what_a_graph_leaves_behind_is_no_finding() -> None:
    facts = (said(1), STARTED, begun("m", 2), spoke("m[0].a", CALL), begun("m[1].m", 3), finished("m[1].m[2].a"))
    assert found(*facts, finished("m"), ended()) == []
    assert found(*facts, ended("failed", unfinished=("c1",))) == []


def test_what_is_still_to_be_done_between_sessions_is_no_finding() -> None:
    log = Log()
    log.say("s1", "hello")
    log.start("s1", 1)
    log.reply("s1", 1, child_call("d1"), child_call("d2"))
    log.intend("s1", 1, "d1")
    assert checked(log) == [], "its session is about to be opened"
    log.do("s1", CancelRun(origin=log.origin(), run=1))
    log.end("s1", 1, status="cancelled")
    assert checked(log) == [], "it is to be opened, and ended"
    log.open_child("s1", 1, 1)
    log.do("s1--1-1", CancelRun(origin=log.origin(), run=1))
    assert checked(log) == [], "that it has ended is to be told"
    log.tell("s1--1-1", "cancelled")
    assert checked(log) == []


def test_a_child_whose_parent_is_deleted_needs_none() -> None:
    log = Log()
    log.delegates("s1", True)
    log.delete("s1", "detach")
    assert checked(log) == []
    log.erase("s1")
    log.entries = log.left
    assert checked(log) == []


def test_a_child_that_nobody_has_delegated_to_is_found() -> None:
    log = Log()
    log.turn("s1")
    log.put("s1--1-1", msgspec.structs.replace(said(1), opens=opens_child(k=1)))
    assert checked(log) == [("no_such_child", "default/s1--1-1", None)]
    log.put("s7--1-1", msgspec.structs.replace(said(1), opens=opens_child("s7", k=1)))
    assert checked(log)[1:] == [("no_such_child", "default/s7--1-1", None)]


@pytest.mark.parametrize("ends", [False, True])
def test_an_intent_that_came_to_nothing_is_found(ends: bool) -> None:
    facts = (said(1), STARTED, reply(1, DELEGATED), child(wait=not ends))
    done = (ToolReturned(run=1, attempt=1, call_id="c1", status="ok"), ended())
    followed = done if ends else (waiting("q1", "c1", "child"),)
    assert found(*facts) == []
    assert found(*facts, *followed) == [("child_missing", "s1--1-1", None)]


def test_an_end_of_which_the_two_logs_do_not_agree_is_found() -> None:
    log = Log()
    log.delegates("s1", True, True)
    log.put("s1", came_out(1))
    assert checked(log) == [("child_untold", "default/s1--1-1", None)], "it has not ended"
    log.start("s1--1-1", 1)
    log.end("s1--1-1", 1)
    assert checked(log) == []
    log.start("s1--1-2", 1)
    log.end("s1--1-2", 1)
    log.put("s1--1-2", RunReported(run=1))
    assert checked(log) == [("child_untold", "default/s1--1-2", None)]
    log.put("s1", came_out(2))
    assert checked(log) == []


def test_beside_a_parked_run_a_message_may_start_one_where_the_policy_says_so() -> None:
    parked = (STARTED, reply(1, DELEGATED), child(), waiting("q1", "c1", "child"))
    opened = msgspec.structs.replace(said(1), opens=opens_child(k=1))
    for wanted, kinds in (("interleave", []), ("reject", ["two_holders"])):
        policy = PolicyData(on_message=OnMessageData(parked=wanted))  # pyright: ignore
        log = Log()
        log.put("s1", said(1, policy=policy))
        for fact in parked:
            log.put("s1", fact)
        log.put("s1--1-1", opened)
        log.put("s1", said(2, policy=policy))
        assert [kind for kind, _, _ in checked(log)] == kinds


def test_an_end_other_than_cancelled_behind_a_cancel_is_found() -> None:
    log = Log()
    log.say("s1", "hello")
    log.start("s1", 1)
    log.do("s1", CancelRun(origin=log.origin(), run=1))
    log.put("s1", ended())
    assert checked(log) == [("transition", "s1.1", 4)]


def test_runs_may_go_side_by_side_where_that_can_have_been_said() -> None:
    assert found(said(1), STARTED, said(2)) == []
    alone = PolicyData(on_busy="parallel", message_on_busy="refuse")
    assert found(said(1), STARTED, said(2, policy=alone)) == []
    for kind in ("question", "approval"):
        parallel = PolicyData(on_message=OnMessageData(**{kind: "parallel"}))
        asks = msgspec.structs.replace(ASKING, asks=kind)
        facts = (said(1), STARTED, reply(1, asks), waiting("q1", "c1", kind), said(2, policy=parallel))
        assert found(*facts) == []


def test_of_a_deleted_session_of_which_a_part_is_gone_nothing_is_asked() -> None:
    log = Log()
    log.turn("s1")
    log.delete("s1")
    findings = Findings()
    checker = Checker(findings)
    for recorded in log.events[2:3]:  # its beginning is overwritten, and its deletion not read yet
        checker.check(recorded)
    assert {finding.kind for finding in findings.all} == {"broken_chain", "no_such_run"}
    checker.check(log.events[-1])
    assert findings.all == ()


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
        Finding("row_differs", "steps default/s4.1 12 0", 12, "not what the log gives: body"),
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


def test_a_fork_has_what_it_is_of_and_nothing_else_before_it_is_whole() -> None:
    log = Log()
    log.turn("s1")
    log.waits("s1", "question")
    log.fork("f1", "s1")
    log.copy("f1", 4)
    assert checked(log) == [], "it is no fault that it is not whole"
    log.copy("f1")
    log.turn("f1")
    log.delegates("s2", True)
    log.fork("f2", "s2")
    log.copy("f2")
    assert checked(log) == []
    for n, fault in enumerate((SessionUpdated(untitled=True), SessionForked(events=2), ended(run=1)), 1):
        broken = Log()
        broken.turn("s1")
        broken.fork(f"f{n}", "s1")
        broken.copy(f"f{n}", 2)
        at = broken.put(f"f{n}", fault).seq
        assert ("fork", f"default/f{n}", at) in checked(broken)
    assert found(SessionOpened(), SessionForked(events=1)) == [("fork", "default/s1", 2)]
    for copied in (Copied("s1", 1, 0), Copied("s1", 99, 0), Copied("s9", 3, 0)):
        stray = Log()
        stray.turn("s1")
        stray.fork("f1", "s1")
        stray.copy("f1", 2)
        event = Event(id="x", key=stray.key("f1"), data=SessionUpdated(), actor="a", time=0, copied=copied)
        assert ("fork", "default/f1", stray.store(event).seq) in checked(stray)


async def test_nothing_that_decide_lets_in_is_found(broker: Broker, database: Database) -> None:
    stories = (wander(random.Random(seed), 400, sessions=20, faults=False) for seed in range(50))
    log = next(log for log in stories if any(isinstance(entry, Archived) for entry in log.entries))
    await publish(broker, log.entries)
    await rebuild(broker, database)
    assert await fsck(broker, database) == Report((), log.seq, log.seq)


async def test_a_session_that_is_deleted_while_fsck_reads_is_no_finding(broker: Broker, database: Database) -> None:
    log = Log()
    log.waits("s1", "question")
    await shown(broker, database, log)
    sessions = Sessions(JetStreamLog(broker), now=broker.clock.now)
    key, origin = log.key("s1"), log.origin()
    command = DeleteSession(origin=origin, specs=SPECS, mode="erase", active="cancel")

    async def delete() -> None:
        await sessions.handle(key, command)
        await sessions.log.overwrite(key)

    done: list[asyncio.Task[None]] = []
    pages = generations.prepare

    async def late(*arguments: object) -> object:  # what the views reflect is known, and nothing of the log is read
        done.append(asyncio.create_task(delete()))
        await done[0]
        return await pages(*arguments)  # pyright: ignore

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generations, "prepare", late)
        report = await fsck(broker, database)
    assert done and report.findings == ()


def test_a_summary_stands_for_what_is_over_and_was_not_summed_up_before() -> None:
    log = Log()
    log.turn("s1")
    first = log.events[-1].seq
    log.turn("s1")
    second = log.events[-1].seq
    log.put("s1", HistoryCompacted(through=first, summary="hello"))
    log.put("s1", HistoryCompacted(through=second, fault="the model did not answer"))
    log.put("s1", HistoryCompacted(through=second, summary="hello, twice"))
    assert checked(log) == []
    again = log.put("s1", HistoryCompacted(through=first, summary="hello")).seq
    log.say("s1", "and")
    log.start("s1", 3)
    within = log.put("s1", HistoryCompacted(through=log.events[-1].seq, summary="and")).seq
    assert checked(log) == [("compaction", "default/s1", again), ("compaction", "default/s1", within)]
