"""Sub-agents in the views: whose child a session and a run is, what a run waits for, when each child was at work."""

import pytest
from tests.support.logs import BEGIN, Log, child_call
from tests.support.views import Views, fresh, rows_in_force

from turnstream.session.commands import CancelRun, UpdateSession
from turnstream.session.events import Error, PlanChanged, PlanItem, ToolCall, ToolReturned, Usage
from turnstream.views import history, live_runs, requests, runs, sessions, steps
from turnstream.views.database import Database
from turnstream.views.sessions import ParentView


async def run_of(db: Database, name: str) -> runs.RunView:
    found, _ = await runs.get(db, "default", name)
    assert found
    return found


async def session_of(db: Database, log: Log, name: str) -> sessions.SessionView:
    found, _ = await sessions.get(db, log.key(name))
    assert found
    return found


async def children_of(db: Database, run: str) -> list[steps.Step]:
    found = await steps.list_for(db, "default", run)
    assert found
    return [step for step in found.items if step.kind == "child"]


async def test_a_child_is_found_by_its_call_before_it_has_done_anything(database: Database) -> None:
    log = Log()
    log.delegates("s1", True, True)
    await Views(database).show(log.entries)
    page = await runs.list_page(database, "default", parent="s1.1")
    assert [(run.id, run.parent, run.call_id, run.root, run.status) for run in page.items] == [
        ("s1--1-2.1", "s1.1", "d2", "s1.1", "queued"),
        ("s1--1-1.1", "s1.1", "d1", "s1.1", "queued"),
    ]
    child = await session_of(database, log, "s1--1-1")
    assert child.parent == ParentView(session="s1", run="s1.1", call_id="d1")
    top = await run_of(database, "s1.1")
    assert (top.parent, top.call_id, top.root, top.children) == (None, None, None, 2)


async def test_a_run_that_is_parked_says_what_it_waits_for_and_asks_nobody(database: Database) -> None:
    log = Log()
    log.delegates("s1", True, False, True)
    await Views(database).show(log.entries)
    run = await run_of(database, "s1.1")
    assert (run.status, run.open_requests) == ("waiting", 0)
    assert run.open_children == ("s1--1-1.1", "s1--1-3.1"), "nobody waits for the second"
    assert (await requests.list_page(database, "default", state=None)).items == ()
    said = (await history.page(database, log.key("s1"), 0, 50)).items
    assert not [item for item in said if isinstance(item, history.Requests)]
    session = await session_of(database, log, "s1")
    assert (session.status, session.open_requests, session.active_run) == ("idle", (), "s1.1")


async def test_beside_a_question_only_that_is_asked_of_people(database: Database) -> None:
    log = Log()
    log.say("s1", "hello")
    log.start("s1", 1)
    log.reply("s1", 1, child_call("d1"), ToolCall(id="q1", name="ask", arguments="{}", asks="question"))
    log.delegate("s1", 1, "d1")
    log.ask("s1", 1)
    views = Views(database)
    await views.show(log.entries)
    (asked,) = (await requests.list_page(database, "default")).items
    assert (asked.call_id, asked.kind, asked.id) == ("q1", "question", "s1.1.q2")
    run = await run_of(database, "s1.1")
    assert (run.open_requests, run.open_children) == (1, ("s1--1-1.1",))
    assert (await session_of(database, log, "s1")).status == "waiting"
    log.answer("s1", 1, 2, "blue")
    await views.show(log.entries)
    assert (await session_of(database, log, "s1")).status == "idle"
    found = await steps.list_for(database, "default", "s1.1")
    assert found and [(step.kind, step.status) for step in found.items if step.kind in ("wait", "child")] == [
        ("wait", "answered"),
        ("child", "running"),
    ]


@pytest.mark.parametrize(("parked", "wanting"), [("interleave", [2]), ("queue", [])])
async def test_s56_what_may_start_while_children_are_at_work_is_known_whatever_else_comes(
    database: Database, parked: str, wanting: list[int]
) -> None:
    log = Log()
    log.open("s1", policy={"on_message": {"parked": parked}})
    log.delegates("s1", True, True)
    log.say("s1", "meanwhile")
    for child in (None, "s1--1-1", "s1--1-2"):  # each time by a projector that has only the rows
        if child:
            log.tell(child)
        await Views(database).show(log.entries)
        later = await live_runs.live_before(database, log.time + 1, limit=10)
        wants = [run.row.n for run in later if run.key.session == "s1" and run.wants_runner]
        assert wants == ([1] if child == "s1--1-2" else wanting), child


async def test_the_tree_of_a_run_page_by_page(database: Database) -> None:
    log = Log()
    log.delegates("s1", True, True)
    log.turn("s2")
    log.hand_on("s1--1-1", 1, True)
    log.say("s1--1-2", "a word of a person", busy="queue")
    await Views(database).show(log.entries)
    found: list[tuple[str, str | None]] = []
    cursor: str | None = ""
    while cursor is not None:
        page = await runs.list_page(database, "default", root="s1.1", limit=1, cursor=cursor or None)
        found += [(run.id, run.parent) for run in page.items]
        cursor = page.next
    assert found == [("s1--1-1--1-1.1", "s1--1-1.1"), ("s1--1-2.1", "s1.1"), ("s1--1-1.1", "s1.1")]
    own = await run_of(database, "s1--1-2.2")
    assert (own.parent, own.root) == (None, None), "a later turn of a child is nobody's but its own"


async def test_a_sub_agent_is_a_step_from_its_intent_to_its_end(database: Database) -> None:
    log = Log()
    log.say("s1", "hello")
    log.start("s1", 1)
    log.reply("s1", 1, child_call("d1"), child_call("d2"))
    log.time += 5
    log.intend("s1", 1, "d1")
    views = Views(database)
    await views.show(log.entries)
    (going_on,) = await children_of(database, "s1.1")
    assert (going_on.status, going_on.began_at, going_on.ended_at) == ("running", BEGIN + 5, None)
    assert (going_on.child_session, going_on.child_run) == ("s1--1-1", "s1--1-1.1"), "its session is not there yet"
    log.open_child("s1", 1, 1)
    log.delegate("s1", 1, "d2")
    log.ask("s1", 1)
    log.time += 10
    log.tell("s1--1-2", "failed", error=Error(code="model_error", message="503"))
    await views.show(log.entries)
    over, still = await children_of(database, "s1.1")
    assert (over.call_id, over.status, over.error, over.name) == ("d2", "failed", "503", "default")
    assert (over.began_at, over.ended_at, over.usage) == (BEGIN + 5, BEGIN + 15, Usage(output_tokens=3))
    assert (still.call_id, still.seq) == ("d1", 0)
    assert (await run_of(database, "s1.1")).usage.output_tokens == 2 + 3, "what a child has used is its parent's"


async def test_a_child_that_nobody_waited_for_may_end_long_after(database: Database) -> None:
    log = Log()
    log.delegates("s1", False)
    log.end("s1", 1, "told you")
    views = Views(database)
    await views.show(log.entries)
    before = await run_of(database, "s1.1")
    (going_on,) = await children_of(database, "s1.1")
    assert (before.status, going_on.status) == ("completed", "running")
    log.time += 1000
    log.start("s1--1-1", 1)
    log.end("s1--1-1", 1)
    log.tell("s1--1-1")
    await views.show(log.entries)
    (over,) = await children_of(database, "s1.1")
    assert (over.status, over.ended_at, over.step) == ("completed", BEGIN + 1000, 1)
    assert await run_of(database, "s1.1") == before, "how it ended stays as it was"
    assert (await rows_in_force(database))[1] == await fresh(log.entries)


async def test_children_of_a_session_and_their_promotion(database: Database) -> None:
    log = Log()
    log.delegates("s1", True, True)
    log.open("s2")
    views = Views(database)
    await views.show(log.entries)
    listed = (await sessions.list_page(database, "default", parent="s1", limit=1)).items
    assert [session.id for session in listed] == ["s1--1-2"]
    assert {session.id: session.parent is not None for session in (await sessions.list_page(database, "default")).items}
    page = await sessions.list_page(database, "default", parent="s1", limit=1)
    log.time += 5
    log.do("s1--1-2", UpdateSession(origin=log.origin(), metadata={"k": 1}))
    await views.show(log.entries)
    rest = (await sessions.list_page(database, "default", parent="s1", limit=1, cursor=page.next)).items
    assert [session.id for session in rest] == ["s1--1-1"], "wherever the other has moved"
    assert (await sessions.list_page(database, "default", parent="s2")).items == ()
    log.delete("s1", "detach")
    await views.show(log.entries)
    assert (await session_of(database, log, "s1--1-1")).parent is None
    assert (await sessions.list_page(database, "default", parent="s1")).items == ()
    log.erase("s1")
    await views.show(log.entries)
    assert (await session_of(database, log, "s1--1-1")).parent is None
    kept = await run_of(database, "s1.1")
    assert (kept.session, kept.status) == (None, "cancelled")
    assert (await run_of(database, "s1--1-1.1")).parent == "s1.1", "its run is kept, and can be looked up"
    assert (await rows_in_force(database))[1] == await fresh(log.entries)


async def test_the_run_of_a_deleted_child_still_names_its_parent(database: Database) -> None:
    log = Log()
    log.delegates("s1", True)
    log.start("s1--1-1", 1)
    log.end("s1--1-1", 1, "done")
    log.tell("s1--1-1")
    log.delete("s1--1-1", "detach")
    log.erase("s1--1-1")
    await Views(database).show(log.left)
    run = await run_of(database, "s1--1-1.1")
    assert (run.session, run.output) == (None, "done")
    assert (run.parent, run.call_id, run.root) == ("s1.1", "d1", "s1.1")
    assert [item.id for item in (await runs.list_page(database, "default", root="s1.1")).items] == ["s1--1-1.1"]


async def test_what_is_left_to_do_between_sessions_is_found(database: Database) -> None:
    log = Log()
    log.delegates("s1", True)
    views = Views(database)

    async def unsettled() -> list[str]:
        await views.show(log.entries)
        return [found.key.session for found in await sessions.unsettled_before(database, log.time + 1, limit=10)]

    assert await unsettled() == []
    log.do("s1", CancelRun(origin=log.origin(), run=1))
    assert await unsettled() == ["s1"], "its child is to be ended"
    log.time += 1
    log.do("s1--1-1", CancelRun(origin=log.origin(), run=1))
    assert await unsettled() == ["s1", "s1--1-1"], "and that it has is to be told"
    assert await sessions.unsettled_before(database, log.time, limit=10) != []
    first = await sessions.unsettled_before(database, log.time + 1, limit=1)
    after = (first[0].row.updated_at, str(first[0].key))
    assert [found.key.session for found in await sessions.unsettled_before(database, log.time + 1, after, limit=1)] == [
        "s1--1-1"
    ]
    log.tell("s1--1-1", "cancelled")
    assert await unsettled() == []


async def test_a_record_of_a_run_keeps_when_its_children_were_at_work(database: Database) -> None:
    log = Log()
    log.delegates("s1", True)
    log.time += 7
    log.tell("s1--1-1", output="words", error=Error(code="model_error", message="words"))
    log.start("s1", 1)
    log.report("s1", ToolReturned(run=1, attempt=2, call_id="d1", status="ok", output="words"))
    log.end("s1", 1)
    log.delete("s1", "detach")
    log.erase("s1")
    await Views(database).show(log.left)
    (child,) = await children_of(database, "s1.1")
    assert (child.began_at, child.ended_at, child.child_run) == (BEGIN, BEGIN + 7, "s1--1-1.1")
    everything = str((await rows_in_force(database))[1])
    assert "words" not in everything


async def test_what_a_turn_takes_over_from_its_session_is_known_whatever_was_read_together(database: Database) -> None:
    """The end of a sub-agent that nobody waited for, and the checklist, are shown by the next turn that starts."""
    log = Log()
    log.delegates("s1", False)
    log.put("s1", PlanChanged(run=1, attempt=1, items=(PlanItem(id="1", text="look"),)))
    log.end("s1", 1, "told you")
    log.start("s1--1-1", 1)
    log.end("s1--1-1", 1)
    log.tell("s1--1-1")
    log.say("s1", "next")
    log.start("s1", 2)
    views = Views(database)
    for recorded in log.entries:  # each by itself
        await views.show([recorded])
    assert (await rows_in_force(database))[1] == await fresh(log.entries)
