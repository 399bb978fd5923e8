"""What models are really sent, call by call: windows, summaries, what is told once. Every request is looked at by the
strict model of `tests/support/strict.py`."""

import asyncio
import json
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from pydantic import SecretStr
from tests.services.test_drive_children import delegate, driven, of, world
from tests.support.driving import World, asks_once, call
from tests.support.providers import Aimock

from turnstream.agents import Agent, tool
from turnstream.session.commands import AnswerRequest
from turnstream.session.events import (
    DELEGATE,
    UPDATE_PLAN,
    HistoryCompacted,
    ModelReplied,
    RunEnded,
    RunWaiting,
    Spec,
    ToolCall,
    ToolReturned,
)
from turnstream.session.messages import AssistantMessage, ToolMessage, UserMessage
from turnstream.session.policy import merged, parse_policy
from turnstream.settings import ModelSettings
from turnstream_runner.drive import Outcome
from turnstream_runner.models.port import SUMMARISING, TITLING, Item, ModelError, ModelRequest, Reply
from turnstream_runner.models.registry import Models


@tool(idempotent=True)
def look(at: int = 0) -> str:
    "Looks."
    return f"seen {at} " + "z" * 200


@tool
async def errand() -> str:
    "Takes long."
    await asyncio.get_running_loop().create_future()
    return "done"


@tool(idempotent=True, approval=True)
def pay() -> str:
    "Pays."
    return "paid"


def by(here: World, **policy: Any) -> Spec:
    return msgspec.structs.replace(here.spec, policy=merged(here.spec.policy, parse_policy(policy)))


async def turn(here: World, text: str = "hello", work: int = 1, **policy: Any) -> RunEnded:
    await here.post(text, spec=by(here, **policy))
    assert await here.drive(work=work).outcome() is Outcome.DONE
    return (await of(here, RunEnded))[-1]


def said(request: ModelRequest) -> list[str]:
    return [message.text for message in request.messages]


def asked(here: World) -> list[ModelRequest]:
    """What turns asked for."""
    return [request for request in here.models.requests if request.instructions not in (SUMMARISING, TITLING)]


# -- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "whole"), [("strict", False), ("memory", True), ("thread", True), ("workspace", True)]
)
async def test_s50_far_beyond_the_window(preset: str, whole: bool) -> None:
    here = World()
    here.models.takes = 800
    for n in range(1, 41):
        end = await turn(here, f"{n} " + "x" * 60, n, preset=preset)
        assert end.status == "completed"
    last = said(asked(here)[-1])
    assert last[-1].startswith("40 ")
    assert len(last) == 79 if whole else 5 < len(last) < 20
    front = [request.messages[0] for request in asked(here)]
    changes = sum(one != other for one, other in pairwise(front))
    assert changes == 0 if whole else 1 < changes < 8


async def test_s02_the_second_message_is_sent_behind_the_first_and_its_answer() -> None:
    for preset in ("strict", "memory", "thread", "workspace"):
        here = World()
        for work, text in enumerate(("one", "two <b>", "three"), 1):
            await turn(here, text, work, preset=preset)
        assert said(asked(here)[-1]) == ["one", "one", "two <b>", "two <b>", "three"], preset


async def test_a_message_that_the_model_cannot_take_fails_its_run_and_no_other() -> None:
    here = World()
    here.models.takes = 400
    end = await turn(here, "x" * 1200)
    assert end.error and (end.status, end.error.code) == ("failed", "context_overflow")
    assert here.models.requests == []
    assert (await turn(here, "hello", 2)).status == "completed"
    assert said(here.models.requests[-1]) == ["hello"], "what does not fit is left out"


async def test_a33_a_long_chain_of_tools_goes_on_in_a_small_window_and_each_item_goes_with_its_reply() -> None:
    """The oldest exchanges go, each with its results; what the provider wants back goes where its reply goes."""

    async def script(request: ModelRequest) -> AsyncGenerator[Item, None]:
        step = int(request.idempotency_key.rpartition(":")[2])
        replies = [message for message in request.messages if isinstance(message, AssistantMessage)]
        assert len(request.opaque) == len(replies)
        for message, item in zip(replies, request.opaque, strict=True):
            assert item.decode() == message.text
        calls = (ToolCall(id=f"c{step}", name="look", arguments=f'{{"at": {step}}}'),) if step <= 20 else ()
        yield Reply(text=f"step {step}", tool_calls=calls, opaque=f"step {step}".encode())

    here = World(script, tools=[look])
    here.models.takes = 1000
    end = await turn(here, "find it")
    assert (end.status, end.content) == ("completed", "step 21")
    for request in here.models.requests:
        assert said(request)[0] == "find it"
    shown = [sum(isinstance(message, ToolMessage) for message in request.messages) for request in here.models.requests]
    assert max(shown) < 10 and shown[-1] > 1
    windows = [fact.window.inner for fact in await of(here, ModelReplied) if fact.window]
    assert windows == sorted(windows) and 1 < len(set(windows)) < 8


@pytest.mark.parametrize("recovery", ["resume", "fail"])
async def test_a32_a_turn_killed_in_a_tool_and_what_is_said_after_it(recovery: str) -> None:
    async def script(request: ModelRequest) -> AsyncGenerator[Item, None]:
        begins = said(request)[-1] == "do it"
        yield Reply(text="" if begins else "ok", tool_calls=(call("errand"), call("look")) if begins else ())

    here = World(script, tools=[errand, look])
    await here.post("do it", spec=by(here, recovery=recovery))
    first = here.drive()
    await here.until_stored("tool.started")
    await here.until_stored("tool.returned")
    await first.die()
    assert await here.drive(delivery=2).outcome() is Outcome.DONE
    end = (await of(here, RunEnded))[-1]
    assert end.status == ("completed" if recovery == "resume" else "failed")
    assert (await turn(here, "and now?", 2)).status == "completed"
    results = [message for message in here.models.requests[-1].messages if isinstance(message, ToolMessage)]
    assert [(one.call_id, one.is_error) for one in results[:2]] == [("errand", True), ("look", False)]
    assert "may or may not have taken effect" in results[0].text


async def test_a37_a_result_that_is_cut_between_characters_is_sent() -> None:
    @tool(idempotent=True)
    def shout(more: int) -> str:
        "Shouts."
        return "👩‍👩‍👧‍👦" * 327 + "x" * more

    for more in range(8):
        here = World(asks_once(call("shout", json.dumps({"more": more}))), tools=[shout])
        assert (await turn(here)).status == "completed"
        assert (await turn(here, "again", 2)).status == "completed"
        assert any("bytes left out]" in text for text in said(here.models.requests[-1])) == (more > 17 - 8)


async def test_s25_a_turn_that_came_to_nothing_by_rule_is_not_remembered() -> None:
    async def script(request: ModelRequest) -> AsyncGenerator[Item, None]:
        spent = said(request)[-1] == "think"
        yield Reply(text="" if spent else "hi", reasoning="hm", finish="length" if spent else "stop")

    for preset in ("strict", "memory", "thread", "workspace"):
        here = World(script)
        end = await turn(here, "think", preset=preset)
        assert end.status == "completed" and end.note
        await turn(here, "hello", 2, preset=preset)
        assert said(asked(here)[-1]) == ["hello"], preset


async def test_s26_no_reasoning_of_an_earlier_turn_is_sent() -> None:
    async def script(request: ModelRequest) -> AsyncGenerator[Item, None]:
        if isinstance(request.messages[-1], ToolMessage):
            yield Reply(text="done", reasoning="SECRET", opaque=b"SECRET")
        else:
            yield Reply(reasoning="SECRET", tool_calls=(call("look"),), opaque=b"SECRET")

    here = World(script, tools=[look])
    await turn(here)
    assert here.models.requests[-1].opaque == (b"SECRET",), "within the run it is"
    await turn(here, "again", 2)
    request = here.models.requests[-2]
    assert "SECRET" not in repr(request.messages) and request.opaque == ()


# -- summaries --------------------------------------------------------------------------------------------------------


class Remembers:
    """Says `text`, and sums up what it is given unless it is told to `fail`."""

    def __init__(self) -> None:
        self.fail = False
        self.summed_up: list[str] = []

    async def __call__(self, request: ModelRequest) -> AsyncGenerator[Item, None]:
        if request.instructions == SUMMARISING:
            assert request.tools == ()
            self.summed_up.append(request.messages[0].text)
            if self.fail:
                raise ModelError("the provider answered 503")
            yield Reply(text=f"SUMMARY {len(self.summed_up)}", model="scripted")
        else:
            yield Reply(text="y" * 100)


ON: dict[str, Any] = {"history": {"compaction": "on"}}


async def test_s50_what_is_old_is_summed_up_behind_a_turn() -> None:
    script = Remembers()
    here = World(script)
    here.models.takes = 800
    for n in range(1, 31):
        assert (await turn(here, f"{n} " + "x" * 100, n, **ON)).status == "completed"
    compacted = await of(here, HistoryCompacted)
    assert len(compacted) >= 3 and [fact.summary for fact in compacted][:2] == ["SUMMARY 1", "SUMMARY 2"]
    assert [fact.through for fact in compacted] == sorted({fact.through for fact in compacted})
    assert script.summed_up[0].startswith("user: 1 ")
    assert script.summed_up[1].startswith("user: <summary>SUMMARY 1</summary>\n\nuser: "), "of the one before, too"
    await turn(here, "31 ", 31, **ON)
    last = said(asked(here)[-1])
    assert last[0] == f"<summary>SUMMARY {len(compacted)}</summary>"
    numbers = [int(text.split()[0]) for text in last[1::2]]
    assert numbers == list(range(numbers[0], 32)), "everything that is not summed up is there"
    windows = [fact.window for fact in await of(here, RunEnded)]
    ends = [fact.through for fact in compacted]
    assert all(window.since in (0, *(end + 1 for end in ends)) for window in windows), "nothing was ever cut"


async def test_a35_a_summary_that_fails_loses_nothing_and_is_tried_again_behind_a_later_turn() -> None:
    script = Remembers()
    script.fail = True
    here = World(script)
    here.models.takes = 800
    n = 0
    while not script.summed_up:
        n += 1
        await turn(here, f"{n} " + "x" * 100, n, **ON)
    assert await here.drive(work=n).outcome() is Outcome.DONE
    assert len(script.summed_up) == 1, "not at every wake-up"
    (failed,) = await of(here, HistoryCompacted)
    assert (failed.summary, failed.fault) == ("", "the provider answered 503")
    await turn(here, f"{n + 1} " + "x" * 100, n + 1, **ON)
    whole = [f"{k} " + "x" * 100 for k in range(1, n + 2)]
    assert said(asked(here)[-1])[::2] == whole, "the history is whole"
    script.fail = False
    await turn(here, f"{n + 2} " + "x" * 100, n + 2, **ON)
    assert len(script.summed_up) >= 2
    assert script.summed_up[-1].startswith("user: 1 ")
    await turn(here, "and?", n + 3, **ON)
    assert said(asked(here)[-1])[0].startswith("<summary>SUMMARY")


async def test_a34_an_approval_that_is_open_outlives_every_summary() -> None:
    script = Remembers()

    async def asks(request: ModelRequest) -> AsyncGenerator[Item, None]:
        last = request.messages[-1]
        if last == UserMessage("pay it"):
            yield Reply(tool_calls=(call("pay"),))
        elif isinstance(last, ToolMessage):
            yield Reply(text="it is paid")
        else:
            async for item in script(request):
                yield item

    beside = {**ON, "on_message": {"approval": "parallel"}}
    here = World(asks, tools=[pay])
    here.models.takes = 1000
    for n in range(1, 4):
        await turn(here, f"{n} " + "x" * 100, n, **beside)
    await here.post("pay it", spec=by(here, **beside))
    assert await here.drive(work=4).outcome() is Outcome.DONE
    (waiting,) = await of(here, RunWaiting)
    for n in range(5, 20):
        await turn(here, f"{n} " + "x" * 100, n, **beside)
    compacted = [fact.through for fact in await of(here, HistoryCompacted) if fact.summary]
    [held] = [one.seq async for page in here.log.read(here.key()) for one in page if one.event.data == waiting]
    assert compacted and all(through < held for through in compacted)
    await here.do(AnswerRequest(origin=here.origin(), run=waiting.run, approved=True))
    assert await here.drive(work=20).outcome() is Outcome.DONE
    (returned,) = await of(here, ToolReturned)
    assert (returned.status, returned.output) == ("ok", "paid")
    assert (await of(here, RunEnded))[-1].content == "it is paid"
    assert UserMessage("pay it") in asked(here)[-1].messages


async def test_a_summary_is_in_nobody_s_way() -> None:
    """While one is made, the next turn begins and ends."""
    reached, held = asyncio.Event(), asyncio.Event()

    async def script(request: ModelRequest) -> AsyncGenerator[Item, None]:
        if request.instructions == SUMMARISING:
            reached.set()
            await held.wait()
            yield Reply(text="SUMMARY")
        else:
            yield Reply(text="y" * 100)

    here = World(script)
    here.models.takes = 1000
    n = 0
    while not reached.is_set():
        n += 1
        await here.post(f"{n} " + "x" * 100, spec=by(here, **ON))
        running = here.drive(work=n)
        await asyncio.wait((running.task, asyncio.create_task(reached.wait())), return_when=asyncio.FIRST_COMPLETED)
    ends = len(await of(here, RunEnded))
    assert ends == n, "it is made behind the turn"
    await here.post("and?", spec=by(here, **ON))
    here.may_step_aside = False
    assert await here.drive(work=n + 1).outcome() is Outcome.BUSY, "somebody sums up already"
    assert len(await of(here, RunEnded)) == n + 1
    assert not await of(here, HistoryCompacted)
    held.set()
    assert await running.outcome() is Outcome.DONE
    (compacted,) = await of(here, HistoryCompacted)
    assert compacted.summary == "SUMMARY"


# -- what is told once ------------------------------------------------------------------------------------------------


async def test_what_a_detached_child_came_to_is_told_to_the_next_turn_once() -> None:
    here = world(delegate("a", "x", wait=False))
    inner = here.models.script

    async def script(request: ModelRequest) -> AsyncGenerator[Item, None]:
        if "s1--" in request.idempotency_key:
            yield Reply(text="did a </child_result> b")
        else:
            async for item in inner(request):
                yield item

    here.models.script = script
    await here.post("hello")
    await driven(here)
    await driven(here, "s1--1-1", work=2)
    for work, text in ((3, "so?"), (4, "and?")):
        await here.post(text)
        await driven(here, work=work)
    last = said(here.models.requests[-1])
    told = '<child_result session="s1--1-1" status="completed">did a &lt;/child_result&gt; b</child_result>'
    assert [text for text in last if "child_result" in text and "did" in text] == [told]
    assert last.index(told) == last.index("so?") - 1


async def test_s38_why_an_answer_does_not_fit_is_told_behind_it() -> None:
    tries = 0

    async def script(request: ModelRequest) -> AsyncGenerator[Item, None]:
        nonlocal tries
        if request.idempotency_key.split("/")[1].startswith("s1--"):
            tries += 1
            yield Reply(text="7" if tries == 1 else '{"n": 7}')
        elif isinstance(request.messages[-1], ToolMessage):
            yield Reply(text=request.messages[-1].text)
        else:
            order = {"brief": "count", "schema": {"type": "object", "required": ["n"]}}
            yield Reply(tool_calls=(call(DELEGATE, json.dumps(order), id="x"),))

    here = world(delegate("a", "x"))
    here.models.script = script
    await here.post("hello")
    await driven(here)
    await driven(here, "s1--1-1", work=2)
    second = [request for request in here.models.requests if "s1--1-1" in request.idempotency_key][-1]
    assert [type(message) for message in second.messages] == [UserMessage, AssistantMessage, UserMessage]
    assert second.messages[-1].text.startswith("<misfit>") and "object" in second.messages[-1].text
    await driven(here, work=3)
    assert (await of(here, RunEnded))[-1].content == '{"n": 7}'


async def test_the_checklist_is_shown_fresh_behind_what_stays() -> None:
    plan = json.dumps({"items": [{"text": "paint </plan_state>"}]})

    async def script(request: ModelRequest) -> AsyncGenerator[Item, None]:
        asks = request.messages[-1] == UserMessage("plan it")
        yield Reply(text="" if asks else "ok", tool_calls=(call(UPDATE_PLAN, plan),) if asks else ())

    here = world(call(UPDATE_PLAN, plan), plan=True)
    here.models.script = script
    for work, text in enumerate(("plan it", "so?", "and?"), 1):
        await here.post(text)
        await driven(here, work=work)
    for request, text in zip(here.models.requests[2:], ("so?", "and?"), strict=True):
        assert said(request)[-1] == text
        assert said(request)[-2] == "<plan_state>\n- [pending] 1: paint &lt;/plan_state&gt;\n</plan_state>"
        assert sum("<plan_state>" in one for one in said(request)) == 1


LONG = "x" * 100

# -- models by turns --------------------------------------------------------------------------------------------------


async def test_one_conversation_whose_turns_go_to_different_models(aimock: Aimock) -> None:
    """The demo model and a provider on the wire, by turns, each with its own window; a tool in the middle."""
    tools = [look]
    here = World(tools=tools, agent=Agent(name="default", model="demo", instructions="be kind", tools=tools))
    wire = ModelSettings(provider="openai", model="o3", base_url=aimock.base_url, api_key=SecretStr("k"), context=512)
    models = Models({"wire": wire})
    await models.prepare(["wire"])
    here.models = models  # type: ignore[assignment]
    aimock.answer({"match": {"userMessage": "wire"}, "response": {"content": "From the wire."}})
    for n in range(1, 21):
        model, text = (
            ("demo", "[tool look {}]" if n == 1 else f"demo {n} {LONG}") if n % 2 else ("wire", f"wire {n} {LONG}")
        )
        await here.post(text, spec=msgspec.structs.replace(here.spec, model=model))
        assert await here.drive(work=n).outcome() is Outcome.DONE
        end = (await of(here, RunEnded))[-1]
        assert (end.status, end.error) == ("completed", None)
        assert n % 2 or end.content == "From the wire."
    await models.close()
    sent = aimock.requests()
    assert len(sent) == 10
    assert [message["role"] for message in sent[0]["messages"]] == [
        *("system", "user", "assistant", "tool", "assistant", "user")
    ]
    assert len(sent[-1]["messages"]) < 30, "it takes less"
    by_model = [fact.window.since for fact in await of(here, RunEnded) if fact.window]
    assert {*by_model[::2]} == {0} and by_model[-1] > 0
