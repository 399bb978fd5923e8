"""Runs of graphs in the views: nodes as steps, beside what was done for each; what is going on; the transcript."""

from collections.abc import Callable, Sequence

from tests.support.logs import BEGIN, Log, child_call
from tests.support.views import Views, fresh, rows_in_force

from turnstream.session.commands import CancelRun
from turnstream.session.events import ASK_USER, ToolCall, Usage
from turnstream.views import history, requests, runs, steps
from turnstream.views.database import Database

LOOK = ToolCall(id="look", name="add", arguments='{"a":1}')
ASK = ToolCall(id="", name=ASK_USER, arguments="{}", asks="question")


class Flow:
    """A run of a graph, its facts a hundred milliseconds apart."""

    def __init__(self) -> None:
        self.log = Log()
        self.log.say("s1", "hello", agent="flow")
        self.log.start("s1", 1)

    def do(self, what: Callable[..., object], *arguments: object, **fields: object) -> None:
        self.log.time += 100
        what("s1", 1, *arguments, **fields)

    def begin(self, path: str, call: ToolCall | None = None, items: int = 0) -> None:
        self.do(self.log.begin, path, call, items)

    def reply(self, path: str, *calls: ToolCall, duration: int = 50) -> None:
        self.do(self.log.reply, *calls, path=path, duration=duration)

    def finish(self, path: str, port: str = "out", **fields: object) -> None:
        self.do(self.log.finish, path, port, **fields)

    def say(self, path: str, text: str = "well", **fields: object) -> None:
        """The last word of a node's model."""
        said = {"output": text, "model": "demo", "usage": Usage(output_tokens=3), "duration": 80}
        self.finish(path, **{**said, **fields})  # pyright: ignore

    async def shown(self, db: Database) -> list[steps.Step]:
        """The steps, written event by event by one projector after the other; they are what one batch gives."""
        for end in range(1, len(self.log.entries) + 1):
            await Views(db).show(self.log.entries[:end])
        _, found = await rows_in_force(db)
        assert found == await fresh(self.log.entries)
        listed = await steps.list_for(db, "default", "s1.1")
        assert listed
        return list(listed.items)


def told(found: Sequence[steps.Step]) -> list[tuple[object, ...]]:
    """Kind, path, name, status, and the hundreds of milliseconds from its begin to its end."""

    def at(time: int | None) -> float | None:
        return None if time is None else (time - BEGIN) / 100

    return [(one.kind, one.path, one.name, one.status, at(one.began_at), at(one.ended_at)) for one in found]


async def test_a_node_is_a_step_beside_the_calls_that_were_made_for_it(database: Database) -> None:
    flow = Flow()
    flow.finish("q")
    flow.reply("draft", LOOK)
    flow.finish("route", "bug")
    flow.do(flow.log.give, "look")
    flow.say("draft", finish="stop", note="short")
    found = await flow.shown(database)
    assert told(found) == [
        ("node", "q", "q", "ok", 1, 1),
        ("model", "draft", "demo", "ok", 1.5, 2),
        ("node", "route", "route", "ok", 3, 3),
        ("tool", "draft", "add", "ok", 2, 4),
        ("model", "draft", "demo", "ok", 4.2, 5),
        ("node", "draft", "draft", "ok", 1.5, 5),
    ]
    assert [(step.port, step.step, step.usage, step.note) for step in found if step.path == "draft"] == [
        ("", 1, Usage(input_tokens=10, output_tokens=2), ""),
        ("", 1, None, ""),
        ("", 2, Usage(output_tokens=3), ""),
        ("out", 2, None, "short"),
    ]
    assert next(step.port for step in found if step.path == "route") == "bug"
    run, _ = await runs.get(database, "default", "s1.1")
    assert run and (run.usage, run.steps, run.model) == (Usage(input_tokens=10, output_tokens=5), 2, "demo")


async def test_a_node_that_is_a_call_is_told_of_as_both_and_keeps_what_it_asked_for(database: Database) -> None:
    flow = Flow()
    flow.begin("look", LOOK)
    flow.finish("look", "err", error="no such thing", duration=30)
    found = await flow.shown(database)
    assert told(found) == [("tool", "look", "add", "error", 1.7, 2), ("node", "look", "look", "error", 1, 2)]
    assert [(step.call_id, step.arguments, step.error, step.port) for step in found] == [
        ("look", '{"a":1}', "no such thing", ""),
        (None, "", "no such thing", "err"),
    ]


async def test_what_a_node_asks_of_a_person_is_a_wait_of_that_node(database: Database) -> None:
    flow = Flow()
    flow.begin("each", items=1)
    flow.begin("each[0].ok", ASK)
    flow.do(flow.log.ask)
    waiting = await flow.shown(database)
    assert told(waiting) == [
        ("wait", "each[0].ok", "question", "waiting", 3, None),
        ("node", "each", "each", "running", 1, None),
        ("node", "each[0].ok", "ok", "waiting", 2, None),
    ]
    (asked,) = (await requests.list_page(database, "default")).items
    assert (asked.id, asked.path, asked.tool) == ("s1.1.q1", "each[0].ok", ASK_USER)
    flow.log.answer("s1", 1, 1, "yes")
    flow.do(flow.log.start)
    flow.finish("each[0].ok", output="yes")
    assert told(await flow.shown(database)) == [
        ("wait", "each[0].ok", "question", "answered", 3, 3),
        ("node", "each[0].ok", "ok", "ok", 2, 5),
        ("node", "each", "each", "running", 1, None),
    ]


async def test_a_sub_agent_is_told_of_as_its_node_s(database: Database) -> None:
    flow = Flow()
    flow.begin("ask", child_call("ask"))
    flow.do(flow.log.delegate, "ask")
    flow.do(flow.log.ask)
    assert told(await flow.shown(database)) == [
        ("node", "ask", "ask", "waiting", 1, None),
        ("child", "ask", "default", "running", 2, None),
    ]
    flow.log.tell("s1--1-1")
    flow.do(flow.log.start)
    flow.finish("ask", output="done")
    assert told(await flow.shown(database)) == [
        ("child", "ask", "default", "completed", 2, 3),
        ("node", "ask", "ask", "ok", 1, 5),
    ]


async def test_elements_side_by_side_and_what_is_going_on_in_them(database: Database) -> None:
    flow = Flow()
    flow.begin("each", items=2)
    flow.reply("each[0].a", LOOK)
    flow.begin("each[1].t", LOOK)
    assert told(await flow.shown(database)) == [
        ("model", "each[0].a", "demo", "ok", 1.5, 2),
        ("tool", "each[0].a", "add", "running", 2, None),
        ("tool", "each[1].t", "add", "running", 3, None),
        ("node", "each", "each", "running", 1, None),
        ("node", "each[0].a", "a", "running", 1.5, None),
        ("node", "each[1].t", "t", "running", 3, None),
    ]


async def test_what_a_failing_map_leaves_behind_is_interrupted_with_it(database: Database) -> None:
    flow = Flow()
    flow.begin("each", items=2)
    flow.reply("each[0].a", LOOK)
    flow.begin("each[1].t", LOOK)
    flow.finish("each[1].b", "err", error="no")
    flow.finish("each", "err", error="no")
    found = await flow.shown(database)
    assert told(found)[2:] == [
        ("tool", "each[0].a", "add", "interrupted", 2, 5),
        ("tool", "each[1].t", "add", "interrupted", 3, 5),
        ("node", "each[0].a", "a", "interrupted", 1.5, 5),
        ("node", "each[1].t", "t", "interrupted", 3, 5),
        ("node", "each", "each", "error", 1, 5),
    ]
    flow.do(flow.log.end, "", note="no output node was reached")
    assert len(await flow.shown(database)) == len(found), "a graph ends without a call of a model"


async def test_a_run_that_is_cut_off_interrupts_the_nodes_that_had_begun(database: Database) -> None:
    flow = Flow()
    flow.begin("look", LOOK)
    flow.log.do("s1", CancelRun(origin=flow.log.origin(), run=1))
    flow.do(flow.log.end, "", status="cancelled", duration=0)
    assert told(await flow.shown(database)) == [
        ("tool", "look", "add", "interrupted", 1, 2),
        ("node", "look", "look", "interrupted", 1, 2),
    ]


async def test_a_node_that_a_crash_interrupts_keeps_when_it_began(database: Database) -> None:
    flow = Flow()
    flow.begin("look", LOOK)
    flow.do(flow.log.start)
    flow.do(flow.log.start)
    flow.finish("look", output="42", duration=30)
    found = await flow.shown(database)
    assert told(found) == [("tool", "look", "add", "ok", 3.7, 4), ("node", "look", "look", "ok", 1, 4)]
    assert [step.attempt for step in found] == [3, 3]


async def test_the_transcript_tells_what_nodes_said_and_did_and_not_what_only_leads_on(database: Database) -> None:
    flow = Flow()
    flow.finish("q", output="hello")
    flow.reply("draft", LOOK)
    flow.do(flow.log.give, "look")
    flow.say("draft", "a draft")
    flow.begin("count", LOOK)
    flow.finish("count", output="7", json=True)
    flow.finish("done", output="7", json=True)
    flow.do(flow.log.end, "7")
    await flow.shown(database)
    items = (await history.page(database, flow.log.key("s1"))).items
    reply, result, draft, count, end = items[1:]
    assert isinstance(reply, history.Reply) and (reply.path, reply.step, reply.status) == ("draft", 1, None)
    assert isinstance(result, history.ToolResult) and (result.path, result.output) == ("draft", "42")
    assert isinstance(draft, history.NodeEnd) and (draft.path, draft.output, draft.model) == (
        "draft",
        "a draft",
        "demo",
    )
    assert isinstance(count, history.NodeEnd)
    assert (count.path, count.name, count.arguments, count.output, count.json) == ("count", "add", '{"a":1}', "7", True)
    assert isinstance(end, history.Reply) and (end.content, end.status) == ("7", "completed")


async def test_of_nodes_that_have_finished_nothing_is_carried_from_event_to_event(database: Database) -> None:
    flow = Flow()
    flow.begin("each", items=50)
    sizes: list[int] = []
    for n in range(50):
        flow.say(f"each[{n}].a")
        sizes.append(await _size_of_row(database, flow.log))
    assert max(sizes) - min(sizes) < 10
    assert len((await steps.list_for(database, "default", "s1.1") or steps.Steps((), 0)).items) == 101


async def _size_of_row(database: Database, log: Log) -> int:
    await Views(database).show(log.entries)
    _, found = await rows_in_force(database)
    (row,) = found["runs"]
    return max(len(cell) for cell in row if isinstance(cell, str))
