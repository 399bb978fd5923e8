"""What the views show of runs that wait, and of messages that answer, steer, come too late or are tried again."""

import pytest
from tests.support.logs import BEGIN, SPECS, Log
from tests.support.views import Views

from turnstream.session.commands import (
    CancelRun,
    ExpireRequest,
    RetrySession,
    UpdateSession,
    WithdrawMessage,
)
from turnstream.session.events import (
    Error,
    PolicyData,
    RunSteered,
    ToolCall,
    ToolReturned,
    Usage,
)
from turnstream.session.policy import parse_policy
from turnstream.views import history, live_runs, requests, runs, sessions, steps
from turnstream.views.database import Database
from turnstream.views.sessions import InvalidCursor

STEERING: dict[str, object] = {"preset": "thread"}


async def status_of(db: Database, log: Log, name: str) -> str:
    found, _ = await sessions.get(db, log.key(name))
    assert found
    return found.status


async def run_of(db: Database, run: str) -> runs.RunView:
    found, _ = await runs.get(db, "default", run)
    assert found
    return found


async def request_of(db: Database, request: str) -> requests.RequestView:
    found, _ = await requests.get(db, "default", request)
    assert found
    return found


async def messages(db: Database, log: Log, name: str) -> dict[str, tuple[str | None, str, bool]]:
    """Of each message in the transcript: its run, how it came there, whether it is taken."""
    page = await history.page(db, log.key(name))
    items = [item for item in page.items if isinstance(item, history.Message)]
    return {item.message_id: (item.run, item.routed, item.taken) for item in items}


async def waterfall(db: Database, run: str) -> list[tuple[str, str, str]]:
    found = await steps.list_for(db, "default", run)
    assert found
    return [(step.kind, step.name, step.status) for step in found.items]


def failed(log: Log, name: str, n: int) -> None:
    log.end(name, n, "", status="failed", error=Error(code="model_error", message="503"))


# --- sessions and runs ----------------------------------------------------------------------------------------------


async def test_a_session_waits_while_nothing_is_open_but_a_request(database: Database) -> None:
    log, views = Log(), Views(database)
    log.waits("s1", "question", "approval")
    await views.show(log.entries)
    shown, _ = await sessions.get(database, log.key("s1"))
    assert shown and (shown.status, shown.active_run, shown.queued) == ("waiting", "s1.1", 0)
    assert shown.open_requests == ("s1.1.q1", "s1.1.q2")
    page = await sessions.list_page(database, "default", status="waiting")
    assert [item.id for item in page.items] == ["s1"]
    log.do("s1", UpdateSession(origin=log.origin(), policy=parse_policy({"on_message": {"approval": "parallel"}})))
    log.say("s1", "beside it")
    await views.show(log.entries)
    assert await status_of(database, log, "s1") == "busy"
    log.start("s1", 2)
    failed(log, "s1", 2)
    await views.show(log.entries)
    assert await status_of(database, log, "s1") == "waiting"  # rather than error
    log.answer("s1", 1, 1, "blue")
    await views.show(log.entries)
    assert await status_of(database, log, "s1") == "waiting"
    log.answer("s1", 1, 2, approved=False)
    await views.show(log.entries)
    shown, _ = await sessions.get(database, log.key("s1"))
    assert shown and (shown.status, shown.open_requests, shown.active_run) == ("busy", (), "s1.1")
    log.start("s1", 1)
    failed(log, "s1", 1)
    await views.show(log.entries)
    assert await status_of(database, log, "s1") == "error"


async def test_a_title_is_derived_where_the_first_runs_policy_says_so(database: Database) -> None:
    log, views = Log(), Views(database)
    for name, policy in (("derived", {"titles": "derived"}), ("preset", {"preset": "workspace"}), ("none", {})):
        log.open(name, policy=policy)
        log.say(name, "What is this?")
    for preset in ("memory", "thread"):
        log.open(preset, policy={"preset": preset})
        log.say(preset, "What is this?")
        log.do(preset, UpdateSession(origin=log.origin(), policy=parse_policy({"titles": "derived"})))
        log.say(preset, "And this?", busy="parallel")
    log.open("people", policy={"starters": "people"})
    log.say("people", "an agent says", author="agent:x")
    log.say("people", "a person says")
    await views.show(log.entries)
    page = await sessions.list_page(database, "default")
    assert {item.id: item.title for item in page.items} == {
        "derived": "What is this?",
        "preset": "What is this?",
        "none": "What is this?",
        "memory": "",
        "thread": "",
        "people": "a person says",
    }
    assert {item.policy for item in page.items if item.id == "derived"} == {PolicyData(titles="derived")}


async def test_a_run_that_waits_and_goes_on(database: Database) -> None:
    log, views = Log(), Views(database)
    log.time += 100
    log.waits("s1", "question", expires_in=5000)
    await views.show(log.entries)
    run = await run_of(database, "s1.1")
    assert (run.status, run.open_requests, run.deadline, run.trigger) == ("waiting", 1, None, "message")
    assert run.starts[-1].ended_at == log.time  # no runner has it
    assert [due.due for due in await live_runs.due_before(database, log.time + 5001, limit=5)] == [log.time + 5000]
    assert await live_runs.due_before(database, log.time + 5000, limit=5) == []
    assert await live_runs.live_before(database, log.time + 10_000, limit=5) == []
    live = await live_runs.count_live(database, "default")
    assert (live.queued, live.running, live.waiting) == (0, 0, 1)
    log.time += 1000
    log.say("s1", "blue", message="a1")
    log.start("s1", 1)
    await views.show(log.entries)
    run = await run_of(database, "s1.1")
    assert (run.status, run.open_requests, run.attempts) == ("running", 0, 2)
    assert run.message_ids == (log.events[0].event.data.message_id, "a1")  # pyright: ignore
    assert run.starts[-1].trigger == "reply" and run.deadline
    assert await live_runs.due_before(database, log.time + 10_000_000, limit=5) == []


async def test_calls_that_end_with_their_run_are_shown_as_interrupted(database: Database) -> None:
    log, views = Log(), Views(database)
    log.waits("s1", "question", "approval")
    log.time += 50
    log.do("s1", CancelRun(origin=log.origin(), run=1, reason="enough"))
    await views.show(log.entries)
    run = await run_of(database, "s1.1")
    assert (run.status, run.reason, run.unfinished, run.open_requests) == ("cancelled", "enough", ("c1", "c2"), 0)
    page = await history.page(database, log.key("s1"))
    said, reply, asked, end = page.items
    assert isinstance(said, history.Message) and isinstance(reply, history.Reply)
    assert isinstance(asked, history.Requests) and isinstance(end, history.Reply)
    assert [request.state for request in asked.requests] == ["closed", "closed"]
    assert [(call.call_id, call.name, call.status) for call in end.unfinished] == [
        ("c1", "conversation_ask_user", "interrupted"),
        ("c2", "remove", "interrupted"),
    ]
    found = await steps.list_for(database, "default", "s1.1")
    assert found
    assert [(step.kind, step.call_id, step.status, step.ended_at) for step in found.items[1:]] == [
        ("wait", "c1", "interrupted", log.time),
        ("wait", "c2", "interrupted", log.time),
        ("tool", "c1", "interrupted", log.time),
        ("tool", "c2", "interrupted", log.time),
    ]


# --- requests -------------------------------------------------------------------------------------------------------


async def test_a_request_as_its_events_made_it(database: Database) -> None:
    log, views = Log(), Views(database)
    log.time += 5
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    log.waits("s1", "question", schema=schema, expires_in=7000, on_expiry="null", prompt="Wie viele? ☃ \0")
    log.waits("s2", "approval", choices=())
    await views.show(log.entries)
    question, approval = await request_of(database, "s1.1.q1"), await request_of(database, "s2.1.q1")
    assert (question.run, question.session, question.kind, question.state) == ("s1.1", "s1", "question", "open")
    assert (question.prompt, question.schema, question.choices) == ("Wie viele? ☃ \0", schema, ())
    assert (question.asked_at, question.expires_at, question.on_expiry) == (BEGIN + 5, BEGIN + 7005, "null")
    assert (question.tool, question.call_id, question.digest) == ("conversation_ask_user", "c1", "")
    assert (approval.tool, approval.digest, approval.expires_at) == ("remove", "d1", None)
    assert (approval.closed_at, approval.by, approval.answer, approval.reason) == (None, None, None, "")
    log.time += 1000
    log.answer("s1", 1, 1, {"n": 7})
    log.answer("s2", 1, 1, approved=False, reason="not today")
    await views.show(log.entries)
    question, approval = await request_of(database, "s1.1.q1"), await request_of(database, "s2.1.q1")
    assert (question.state, question.answer, question.by, question.closed_at) == (
        "answered",
        {"n": 7},
        "user:bob",
        BEGIN + 1005,
    )
    assert (approval.state, approval.reason, approval.by) == ("denied", "not today", "user:bob")
    assert question.seq == log.seq - 1
    for other in ("s1.1.q2", "s1.1", "s9.1.q1", "nonsense", "s1.1.q1\0"):
        assert (await requests.get(database, "default", other))[0] is None
    assert (await requests.get(database, "other", "s1.1.q1"))[0] is None


async def test_requests_close_by_whatever_closes_them(database: Database) -> None:
    log, views = Log(), Views(database)
    log.open("approved", policy=STEERING)
    log.waits("approved", "approval")
    log.waits("answered", "question")
    log.open("declined", policy=STEERING)
    log.waits("declined", "approval", "question")
    log.waits("expired", "question", expires_in=1000, on_expiry="null")
    log.waits("ended", "question")
    log.waits("deleted", "question")
    log.time += 2000
    log.answer("approved", 1, 1, approved=True)
    log.say("answered", "a message", author="user:zoe")
    log.say("declined", "leave that")
    log.do("expired", ExpireRequest(origin=log.origin(), run=1, request=1, now=log.time))
    log.do("ended", CancelRun(origin=log.origin(), run=1))
    log.delete("deleted", "detach")
    await views.show(log.entries)
    found = await requests.list_page(database, "default", state=None)
    assert {item.id: (item.state, item.answer, item.reason, item.by) for item in found.items} == {
        "approved.1.q1": ("approved", None, "", "user:bob"),
        "answered.1.q1": ("answered", "a message", "", "user:zoe"),
        "declined.1.q1": ("denied", None, "leave that", "user:ann"),
        "declined.1.q2": ("open", None, "", None),
        "expired.1.q1": ("expired", None, "", None),
        "ended.1.q1": ("closed", None, "", None),
    }
    assert [item.id for item in (await requests.list_page(database, "default")).items] == ["declined.1.q2"]


async def test_requests_are_listed_newest_first(database: Database) -> None:
    log, views = Log(), Views(database)
    for n in range(5):
        log.time += 1000
        log.waits(f"s{n}", "question", "approval")
    log.answer("s3", 1, 1, "blue")
    log.account = "other"
    log.waits("s0", "question")
    log.account = "default"
    await views.show(log.entries)
    everything = [f"s{n}.1.q{k}" for n in (4, 3, 2, 1, 0) for k in (2, 1)]
    for limit in (1, 2, 3, 200):
        found: list[str] = []
        cursor: str | None = None
        while True:
            page = await requests.list_page(database, "default", state=None, limit=limit, cursor=cursor)
            found += [item.id for item in page.items]
            cursor = page.next
            if cursor is None:
                break
            if limit == 3:
                log.time += 1
                log.waits(f"later{log.seq}", "question")  # newer ones do not disturb
                await views.show(log.entries)
        assert found == [*everything] or (limit == 200 and found[-10:] == everything)

    async def ids(**filters: object) -> list[str]:
        return [item.id for item in (await requests.list_page(database, "default", **filters)).items]  # pyright: ignore

    assert await ids(session="s3") == ["s3.1.q2"]
    assert await ids(session="s3", state="answered") == ["s3.1.q1"]
    assert await ids(run="s4.1", kind="approval") == ["s4.1.q2"]
    assert await ids(run="s4.2") == await ids(run="s4") == await ids(session="s\0") == []
    assert await ids(state="expired") == []
    for cursor in ("x", "1", "1.", ".1", "1.2.3", "-1.1", "é.1", "9" * 19 + ".1"):
        with pytest.raises(InvalidCursor):
            await requests.list_page(database, "default", cursor=cursor)


# --- the transcript -------------------------------------------------------------------------------------------------


async def test_what_is_asked_and_said_stands_in_the_transcript(database: Database) -> None:
    log, views = Log(), Views(database)
    log.waits("s1", "question", "approval")
    await views.show(log.entries)
    page = await history.page(database, log.key("s1"))
    *_, asked = page.items
    assert isinstance(asked, history.Requests)
    assert asked.run == "s1.1"
    assert [(request.call_id, request.state) for request in asked.requests] == [("c1", "open"), ("c2", "open")]
    log.answer("s1", 1, 2, approved=True)
    await views.show(log.entries)
    page = await history.page(database, log.key("s1"))
    asked = page.items[-1]
    assert isinstance(asked, history.Requests)
    assert [request.state for request in asked.requests] == ["open", "approved"]
    log.say("s1", "the left one", message="a1")
    log.start("s1", 1)
    log.report("s1", ToolReturned(run=1, attempt=2, call_id="c1", status="ok", output="the left one"))
    await views.show(log.entries)
    page = await history.page(database, log.key("s1"))
    *_, asked, answer, result = page.items
    assert isinstance(asked, history.Requests) and [one.state for one in asked.requests] == ["answered", "approved"]
    assert isinstance(answer, history.Message) and (answer.routed, answer.run, answer.taken) == (
        "answered",
        "s1.1",
        True,
    )
    assert isinstance(result, history.ToolResult) and result.output == "the left one"


async def test_a_reader_of_the_transcript_finds_the_turn_of_every_message(database: Database) -> None:
    log, views = Log(), Views(database)
    log.open("s1", policy=STEERING)
    log.say("s1", "one", message="m1")
    log.say("s1", "before it starts", message="m2", busy="steer")
    log.say("s1", "from another", message="m3", busy="steer", author="user:bob")
    await views.show(log.entries)
    assert await messages(database, log, "s1") == {
        "m1": ("s1.1", "started", False),
        "m2": ("s1.1", "steered", False),
        "m3": ("s1.2", "queued", False),
    }
    log.start("s1", 1)
    log.report("s1", RunSteered(run=1, attempt=1, message_ids=("m2",)))
    log.say("s1", "too late", message="m4", busy="steer")
    log.say("s1", "taken back", message="m5", busy="steer")
    log.say("s1", "this too", message="m6", busy="steer")
    await views.show(log.entries)
    assert (await messages(database, log, "s1"))["m2"] == ("s1.1", "steered", True)
    assert (await run_of(database, "s1.1")).message_ids == ("m1", "m2")
    log.do("s1", WithdrawMessage(origin=log.origin(), message_id="m5"))
    failed(log, "s1", 1)
    await views.show(log.entries)
    shown = {
        "m1": ("s1.1", "started", True),
        "m2": ("s1.1", "steered", True),
        "m3": ("s1.2", "queued", False),
        "m4": ("s1.3", "queued", False),
        "m6": ("s1.3", "queued", False),
    }
    assert await messages(database, log, "s1") == shown
    left = await run_of(database, "s1.3")
    assert (left.trigger, left.status, left.message_ids) == ("leftover", "queued", ("m4", "m6"))
    assert (await run_of(database, "s1.1")).leftover == "s1.3"
    session, _ = await sessions.get(database, log.key("s1"))
    assert session and (session.active_run, session.queued) == ("s1.3", 1)  # before what came after it
    log.start("s1", 3)
    log.end("s1", 3)
    log.do("s1", CancelRun(origin=log.origin(), run=2))
    await views.show(log.entries)
    shown |= {"m4": ("s1.3", "queued", True), "m6": ("s1.3", "queued", True)}
    shown.pop("m3")  # settled with its run
    assert await messages(database, log, "s1") == shown


async def test_what_nobody_may_start_is_nobodys_turn(database: Database) -> None:
    log, views = Log(), Views(database)
    log.open("s1", policy={"starters": "people"})
    log.say("s1", "hello", message="m1", author="agent:x")
    await views.show(log.entries)
    assert await messages(database, log, "s1") == {"m1": (None, "none", False)}
    assert await status_of(database, log, "s1") == "idle"


async def test_a_leftover_turn_that_is_cancelled_before_it_starts_takes_its_messages_along(database: Database) -> None:
    log, views = Log(), Views(database)
    log.say("s1", "one", message="m1")
    log.start("s1", 1)
    log.say("s1", "two", message="m2", busy="steer")
    failed(log, "s1", 1)
    await views.show(log.entries)
    log.do("s1", CancelRun(origin=log.origin(), run=2))
    await views.show(log.entries)
    assert list(await messages(database, log, "s1")) == ["m1"]


async def test_a_turn_that_is_tried_again(database: Database) -> None:
    log, views = Log(), Views(database)
    log.say("s1", "one", message="m1")
    log.start("s1", 1)
    failed(log, "s1", 1)
    await views.show(log.entries)
    log.do("s1", RetrySession(origin=log.origin(), specs=SPECS))
    await views.show(log.entries)
    again = await run_of(database, "s1.2")
    assert (again.trigger, again.retry_of, again.message_ids, again.status) == ("retry", "s1.1", ("m1",), "queued")
    log.do("s1", CancelRun(origin=log.origin(), run=2))
    await views.show(log.entries)
    assert await messages(database, log, "s1") == {"m1": ("s1.1", "started", True)}  # taken once is taken
    log.say("s1", "two", message="m2")
    log.start("s1", 3)
    failed(log, "s1", 3)
    log.do("s1", RetrySession(origin=log.origin(), specs=SPECS))
    log.start("s1", 4)
    log.end("s1", 4, "at last")
    await views.show(log.entries)
    page = await history.page(database, log.key("s1"))
    ends = [(item.run, item.status, item.retry_of) for item in page.items if isinstance(item, history.Reply)]
    assert ends == [("s1.1", "failed", None), ("s1.3", "failed", None), ("s1.4", "completed", "s1.3")]
    assert (await messages(database, log, "s1"))["m2"] == ("s1.4", "started", True)


async def test_an_interrupted_run_says_what_interrupted_it(database: Database) -> None:
    log, views = Log(), Views(database)
    log.say("s1", "one", message="m1")
    log.start("s1", 1)
    log.say("s1", "stop!", message="m2", busy="interrupt", author="user:bob")
    await views.show(log.entries)
    run = await run_of(database, "s1.1")
    assert run.cancel_requested
    assert (run.cancel_requested.by, run.cancel_requested.reason) == ("user:bob", "interrupted by message m2")


async def test_an_answer_that_turned_out_to_be_the_last_is_shown_once(database: Database) -> None:
    log, views = Log(), Views(database)
    log.say("s1", "one", message="m1")
    log.start("s1", 1)
    log.say("s1", "in French", message="m2", busy="steer")
    log.end("s1", 1, "hello")  # stored as a reply: somebody has said more
    await views.show(log.entries)
    assert await waterfall(database, "s1.1") == [("model", "demo", "ok"), ("model", "demo", "running")]
    log.do("s1", WithdrawMessage(origin=log.origin(), message_id="m2"))
    log.end("s1", 1, "hello", step_usage=Usage(), duration=0)
    await views.show(log.entries)
    page = await history.page(database, log.key("s1"))
    replies = [item for item in page.items if isinstance(item, history.Reply)]
    assert [(reply.content, reply.status) for reply in replies] == [("hello", "completed")]
    assert await waterfall(database, "s1.1") == [("model", "demo", "ok")]


# --- the waterfall --------------------------------------------------------------------------------------------------


async def test_waits_stand_in_the_waterfall(database: Database) -> None:
    log, views = Log(), Views(database)
    log.say("s1", "hello")
    log.start("s1", 1)
    calls = (
        ToolCall(id="c1", name="add", arguments="{}"),
        ToolCall(id="c2", name="remove", arguments="{}", asks="approval"),
    )
    log.reply("s1", 1, *calls)
    await views.show(log.entries)
    assert (await waterfall(database, "s1.1"))[1:] == [("tool", "add", "running"), ("tool", "remove", "waiting")]
    log.report("s1", ToolReturned(run=1, attempt=1, call_id="c1", status="ok"))
    log.time += 10
    asked = log.time
    log.ask("s1", 1)
    await views.show(log.entries)
    assert (await waterfall(database, "s1.1"))[1:] == [("tool", "add", "ok"), ("wait", "approval", "waiting")]
    log.time += 9000
    log.answer("s1", 1, 1, approved=True)
    answered = log.time
    await views.show(log.entries)
    assert (await waterfall(database, "s1.1"))[1:] == [("tool", "add", "ok"), ("wait", "approval", "approved")]
    log.time += 100
    log.start("s1", 1)
    began = log.time
    log.time += 20
    await views.show(log.entries)
    log.report("s1", ToolReturned(run=1, attempt=2, call_id="c2", status="ok"))
    await views.show(log.entries)
    found = await steps.list_for(database, "default", "s1.1")
    assert found
    *_, wait, tool, model = found.items
    assert (wait.began_at, wait.ended_at, wait.by, wait.request) == (asked, answered, "user:bob", "s1.1.q1")
    assert (tool.name, tool.status, tool.began_at, tool.ended_at) == ("remove", "ok", began, log.time)
    assert (model.kind, model.status) == ("model", "running")
