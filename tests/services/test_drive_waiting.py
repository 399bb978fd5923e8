"""Runs that wait for a person, on a real server: what is asked, what is held meanwhile, and how they go on."""

import asyncio
import json
from typing import Any

import pytest
from tests.support.driving import Latch, asks_once, call, echo
from tests.support.stage import Stage
from tests.support.waiting import eventually

from turnstream.agents import ToolContext, tool
from turnstream.agents.builtin import TOOLS
from turnstream.session.commands import AnswerRequest
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    ASK_USER,
    Error,
    ModelReplied,
    RequestExpired,
    RunEnded,
    RunStarted,
    RunWaiting,
    ToolCall,
    ToolReturned,
    ToolStarted,
)
from turnstream.session.messages import ToolMessage
from turnstream_runner.models.port import ModelRequest, Reply
from turnstream_runner.models.registry import Models

ASKS = {"control": {"ask_user": True}}


@tool(idempotent=True)
def look() -> str:
    "Looks."
    return "seen"


@tool(approval=True)
def pay(amount: int, context: ToolContext) -> str:
    "Pays."
    return f"paid {amount} by {context.idempotency_key}"


def ask(question: str = "well?", id: str = "ask", **fields: Any) -> ToolCall:
    return call(ASK_USER, json.dumps({"question": question, **fields}), id=id)


def results(request: ModelRequest) -> dict[str, str]:
    """What the model sees of its calls."""
    return {message.call_id: message.text for message in request.messages if isinstance(message, ToolMessage)}


# --- what is asked ----------------------------------------------------------------------------------------------------


async def test_s10_free_calls_run_first_then_everything_is_asked_at_once_and_nothing_is_held(stage: Stage) -> None:
    calls = (call("look"), ask(choices=["red", "blue"]), call("pay", '{"amount": 3}', id="pay"))
    actor = await stage.actor(asks_once(*calls), tools=[look, pay], **ASKS)
    await stage.say()
    waiting = await stage.waiting()
    assert await stage.types() == ["message.posted", "run.started", "model.replied", "tool.returned", "run.waiting"]
    question, approval = waiting.requests
    assert (question.request, question.kind, question.call_id) == ("s1.1.q1", "question", "ask")
    assert (question.prompt, question.choices, question.on_expiry) == ("well?", ("red", "blue"), "fail")
    assert (approval.request, approval.kind, approval.call_id) == ("s1.1.q2", "approval", "pay")
    assert approval.prompt == 'pay {"amount": 3}'
    assert approval.digest
    await stage.idle()
    await eventually(lambda: not actor.runner.active)
    assert (len(actor.runner.leases), len(actor.models.requests)) == (0, 1)

    await stage.answer("red", k=1)
    await stage.idle()
    assert len(await stage.found(RunStarted)) == 1, "one is open still"
    await stage.approve(k=2)
    assert (await stage.end()).content == "done"
    started = (await stage.found(RunStarted))[-1]
    assert (started.attempt, started.trigger, started.message_ids) == (2, "answers", ())
    assert results(actor.models.requests[-1]) == {
        "look": "seen",
        "ask": "red",
        "pay": "paid 3 by acme/s1.1:1:pay",
    }


async def test_s09_the_answer_is_the_result_of_the_call_and_anything_but_a_text_is_json(stage: Stage) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    actor = await stage.actor(asks_once(ask(schema=schema)), **ASKS)
    await stage.say()
    assert (await stage.waiting()).requests[0].schema == schema
    with pytest.raises(Rejected, match=r"answer\.n"):
        await stage.answer({"m": 1})
    await stage.answer({"n": 1})
    await stage.end()
    assert results(actor.models.requests[-1]) == {"ask": '{"n":1}'}
    [returned] = await stage.found(ToolReturned)
    assert (returned.status, returned.output, returned.attempt) == ("ok", '{"n":1}', 2)


async def test_s08_a_message_answers_and_the_same_run_goes_on(stage: Stage) -> None:
    actor = await stage.actor(asks_once(ask(), ask("and?", id="more")), **ASKS)
    await stage.say()
    await stage.waiting()
    await stage.say("blue", name="reply")
    assert (await stage.end()).content == "done"
    started = (await stage.found(RunStarted))[-1]
    assert (started.run, started.trigger, started.message_ids) == (1, "reply", ("reply",))
    assert results(actor.models.requests[-1]) == {"ask": "blue", "more": "blue"}
    assert [message.text for message in actor.models.requests[-1].messages].count("blue") == 2, "it is no prompt"


async def test_s11_a_message_declines_with_its_text_as_the_reason_and_the_run_goes_on(stage: Stage) -> None:
    actor = await stage.actor(asks_once(call("pay", '{"amount": 3}', id="pay"), ask()), tools=[pay], **ASKS)
    await stage.say(preset="thread")
    await stage.waiting()
    await stage.say("too expensive")
    await stage.idle()
    assert "run.ended" not in await stage.types(), "the question is open still"
    await stage.answer("fine", k=2)
    assert (await stage.end()).content == "done"
    assert results(actor.models.requests[-1]) == {"pay": "denied: too expensive", "ask": "fine"}
    assert not await stage.found(ToolStarted)


@pytest.mark.parametrize(("reason", "shown"), [("not today", "denied: not today"), ("", "denied: denied by user:ann")])
async def test_s12_a_denied_call_does_not_run_and_the_model_sees_why(stage: Stage, reason: str, shown: str) -> None:
    actor = await stage.actor(asks_once(call("pay", '{"amount": 3}', id="pay")), tools=[pay])
    await stage.say()
    await stage.waiting()
    await stage.approve(False, reason=reason)
    assert (await stage.end()).content == "done"
    assert results(actor.models.requests[-1]) == {"pay": shown}


async def test_s12_what_is_approved_runs_once_however_many_approve(stage: Stage) -> None:
    paid: list[str] = []

    @tool(name="pay", approval=True)
    def count(context: ToolContext) -> str:
        paid.append(context.idempotency_key)
        return "paid"

    await stage.actor(asks_once(call("pay")), tools=[count])
    await stage.actor(asks_once(call("pay")), tools=[count])
    await stage.say()
    await stage.waiting()
    said = await asyncio.gather(*(stage.approve(n % 2 == 0) for n in range(20)), return_exceptions=True)
    refusals = {error.code for error in said if isinstance(error, Rejected)}
    assert refusals == {"already_answered"}
    assert (await stage.end()).content == "done"
    assert paid == ["acme/s1.1:1:pay"]


async def test_what_was_approved_is_not_carried_out_by_a_runner_where_it_is_something_else(stage: Stage) -> None:
    first = await stage.actor(asks_once(call("pay", '{"amount": 3}', id="pay")), tools=[pay])
    await stage.say()
    await stage.waiting()
    await first.leave()
    ran: list[int] = []

    @tool(name="pay", approval=True)
    def changed(amount: int, twice: bool = True) -> str:
        ran.append(amount)
        return "paid twice"

    second = await stage.actor(asks_once(), tools=[changed])
    await stage.approve()
    assert (await stage.end()).content == "done"
    assert results(second.models.requests[-1])["pay"].startswith("denied: what was approved is not what would run now")
    assert not ran
    assert not await stage.found(ToolStarted)


async def test_what_needs_approval_by_now_does_not_run_because_it_did_not_before(stage: Stage) -> None:
    begun = asyncio.Event()
    ran: list[str] = []

    @tool(name="pay", idempotent=True)
    async def free() -> str:
        begun.set()
        await asyncio.Event().wait()
        return "never"

    @tool(name="pay", idempotent=True, approval=True)
    def guarded() -> str:
        ran.append("paid")
        return "paid"

    first = await stage.actor(asks_once(call("pay")), tools=[free])
    await stage.say()
    await begun.wait()
    await first.die()
    second = await stage.actor(asks_once(), tools=[guarded])
    assert (await stage.end()).content == "done"
    assert results(second.models.requests[-1])["pay"].startswith("error: a person has to be asked first, and was not")
    assert not ran


async def test_whoever_approves_is_told_that_the_arguments_are_longer(stage: Stage) -> None:
    @tool(approval=True)
    def write(text: str) -> str:
        return f"{len(text)} written"

    arguments = json.dumps({"text": "x" * 50_000})
    actor = await stage.actor(asks_once(call("write", arguments, id="write")), tools=[write])
    await stage.say()
    [asked] = (await stage.waiting()).requests
    assert asked.prompt.endswith(f"\n[cut: {len(arguments) + 6} characters in all]")
    assert 16_000 < len(asked.prompt) < 17_000
    await stage.approve()
    await stage.end()
    assert results(actor.models.requests[-1]) == {"write": "50000 written"}


async def test_what_an_agent_says_of_approval_goes_before_what_the_tool_says(stage: Stage) -> None:
    calls = asks_once(call("look"), call("pay", '{"amount": 3}', id="pay"))
    actor = await stage.actor(
        calls, tools=[look, pay], approval={"look": "always", "pay": "never"}, approval_timeout=60.0
    )
    await stage.say()
    [asked] = (await stage.waiting()).requests
    assert (asked.call_id, asked.expires_in) == ("look", 60_000)
    assert [fact.call_id for fact in await stage.found(ToolReturned)] == ["pay"]
    await stage.approve()
    await stage.end()
    assert results(actor.models.requests[-1])["look"] == "seen"


async def test_nobody_is_asked_to_approve_what_cannot_run(stage: Stage) -> None:
    actor = await stage.actor(asks_once(call("pay", '{"amount": "much"}', id="pay")), tools=[pay])
    await stage.say()
    assert (await stage.end()).content == "done"
    assert results(actor.models.requests[-1])["pay"].startswith("error: the arguments do not fit: amount: ")
    assert not await stage.found(RunWaiting)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ("{}", "missing required field `question`"),
        ('{"question": "  "}', "the question is empty"),
        ('{"question": 3}', "Expected `str`"),
        ('{"question": "?", "urgent": true}', "unknown field `urgent`"),
        ('{"question": "?", "choices": [""]}', "choices: "),
        ('{"question": "?", "choices": "red"}', "Expected `array`"),
        ('{"question": "?", "schema": {"type": "colour"}}', "schema: "),
        ('{"question": "?", "schema": {"$ref": "http://127.0.0.1/"}}', "schema: $ref"),
        ('{"question": "?", "expires_in": 0}', "expires_in: "),
        ('{"question": "?", "expires_in": 1e12}', "expires_in: "),
        ('{"question": "?", "on_expiry": "default"}', "default: is missing"),
        ('{"question": "?", "on_expiry": "retry"}', "Invalid enum value 'retry'"),
        ('{"question": "?", "choices": ["a"], "default": "b"}', "default: it does not do as an answer"),
        ('{"question": "?", "schema": {"type": "integer"}, "default": "b"}', "default: it does not do as an answer"),
    ],
)
async def test_a_question_that_cannot_be_asked_is_an_error_that_the_model_sees(
    stage: Stage, arguments: str, why: str
) -> None:
    actor = await stage.actor(asks_once(call(ASK_USER, arguments, id="ask")), **ASKS)
    await stage.say()
    assert (await stage.end()).content == "done"
    shown = results(actor.models.requests[-1])["ask"]
    assert shown.startswith("error: ")
    assert why in shown
    assert not await stage.found(RunWaiting)


async def test_beside_a_question_that_cannot_be_asked_the_others_are(stage: Stage) -> None:
    actor = await stage.actor(asks_once(ask("", id="bad"), ask(id="good"), ask(" ", id="worse")), **ASKS)
    await stage.say()
    [asked] = (await stage.waiting()).requests
    assert (asked.request, asked.call_id) == ("s1.1.q1", "good")
    await stage.answer("yes")
    await stage.end()
    assert results(actor.models.requests[-1]) == {
        "bad": "error: the question is empty",
        "good": "yes",
        "worse": "error: the question is empty",
    }


async def test_an_agent_that_may_not_ask_has_no_such_tool(stage: Stage) -> None:
    actor = await stage.actor(asks_once(ask()), tools=[look])
    await stage.say()
    await stage.end()
    assert [spec.name for spec in actor.models.requests[0].tools] == ["look"]
    assert results(actor.models.requests[-1])["ask"] == f"error: there is no tool {ASK_USER!r}; there are: look"


async def test_s57_a_run_asks_as_often_as_it_has_steps(stage: Stage) -> None:
    async def script(request: ModelRequest):  # type: ignore[no-untyped-def]
        n = len(results(request))
        yield Reply(text="done") if n == 10 else Reply(tool_calls=(ask(f"{n}?", id=f"ask-{n}"),))

    await stage.actor(script, **ASKS)
    await stage.actor(script, **ASKS)
    await stage.say()
    for n in range(1, 11):
        [asked] = (await stage.waiting(count=n)).requests
        assert asked.request == f"s1.1.q{n}"
        await stage.answer(f"answer {n}", k=n)
    assert (await stage.end()).attempt == 11


async def test_s53_a_run_that_goes_on_takes_what_has_come_since_it_was_answered(stage: Stage) -> None:
    first = await stage.actor(asks_once(ask()), **ASKS)
    await stage.say()
    await stage.waiting()
    await first.leave()
    await stage.answer("blue")
    await stage.say("and hurry", name="hurry", on_busy="steer")
    await stage.say("please", name="please", on_busy="steer")
    second = await stage.actor(echo, **ASKS)
    assert (await stage.end()).content == "please"
    started = (await stage.found(RunStarted))[-1]
    assert (started.trigger, started.message_ids) == ("answers", ("hurry", "please"))
    shown = [message.text for message in second.models.requests[-1].messages]
    assert shown == ["hello", "", "blue", "and hurry", "please"]


# --- expiry -----------------------------------------------------------------------------------------------------------


async def test_s14_a_question_that_nobody_answers_fails_the_run(stage: Stage) -> None:
    await stage.actor(asks_once(ask(expires_in=0.3), ask("and?", id="more")), **ASKS)
    await stage.say()
    end = await stage.end()
    assert (end.status, end.error) == ("failed", Error(code="request_expired", message="nobody answered in time"))
    assert end.unfinished == ("ask", "more")
    assert len(await stage.found(RequestExpired)) == 1
    with pytest.raises(Rejected) as late:
        await stage.answer("now", k=1)
    assert late.value.code == "request_expired"


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"default": "red"}, "red"),
        ({"on_expiry": "default", "default": {"n": 1}}, '{"n":1}'),
        ({"on_expiry": "default", "default": None}, "null"),
        ({"on_expiry": "null"}, "null"),
        ({"on_expiry": "null", "default": "red"}, "null"),
    ],
)
async def test_s14_a_question_that_nobody_answers_has_the_answer_that_it_said(
    stage: Stage, fields: dict[str, Any], shown: str
) -> None:
    actor = await stage.actor(asks_once(ask(expires_in=0.2, **fields)), **ASKS)
    await stage.say()
    assert (await stage.end()).content == "done"
    assert results(actor.models.requests[-1]) == {"ask": shown}
    assert (await stage.found(RunStarted))[-1].trigger == "answers"


async def test_s14_an_approval_that_nobody_gives_is_none(stage: Stage) -> None:
    actor = await stage.actor(
        asks_once(call("pay", '{"amount": 3}', id="pay")), tools=[pay], approval_timeout=0.2, limits={}
    )
    await stage.say()
    assert (await stage.end()).content == "done"
    assert results(actor.models.requests[-1]) == {"pay": "denied: nobody approved it in time"}
    assert not await stage.found(ToolStarted)


async def test_s14_an_expired_question_leaves_the_others_open(stage: Stage) -> None:
    actor = await stage.actor(asks_once(ask(expires_in=0.2, on_expiry="null"), ask(id="more")), **ASKS)
    await stage.say()
    await stage.until("request.expired")
    await stage.idle()
    assert len(await stage.found(RunStarted)) == 1
    await stage.answer("late but fine", k=2)
    await stage.end()
    assert results(actor.models.requests[-1]) == {"ask": "null", "more": "late but fine"}


async def test_s56_a_lost_timer_is_made_up_for_by_any_wake_up(stage: Stage) -> None:
    await stage.actor(asks_once(ask(expires_in=1.5, on_expiry="null")), **ASKS)
    handled = await stage.say()
    await stage.waiting()
    await stage.idle()
    await eventually(lambda: _timer(stage, "expiry-1-1"))
    await stage.timers.drop(stage.key("s1"), "expiry-1-1")
    await stage.until_time(stage.now + 1600)
    assert "request.expired" not in await stage.types()
    await stage.work.wake("default", stage.key("s1"), handled.session.seq)
    assert (await stage.end()).content == "done"


async def _timer(stage: Stage, what: str) -> bool:
    return await stage.broker.message("WORK", {"last_by_subj": f"ts.timer.acme.s1.{what}"}) is not None


@pytest.mark.parametrize("early", [0.4, 5.0])
async def test_a_timer_that_goes_off_early_expires_nothing_early(stage: Stage, early: float) -> None:
    """A moment early is waited for; much earlier is for nothing, and the real one comes."""
    actor = await stage.actor(asks_once(ask(expires_in=early + 0.2, on_expiry="null")), **ASKS)
    handled = await stage.say()
    await stage.waiting()
    await stage.idle()
    await stage.work.wake("default", stage.key("s1"), handled.session.seq)
    if early > 1:
        await stage.idle()
        await eventually(lambda: not actor.runner.active)
        assert "request.expired" not in await stage.types()
        await stage.answer("in time")
    assert (await stage.end()).content == "done"
    waited, *_ = [event for event in await stage.events() if event.type == "run.waiting"]
    expired = [event.time - waited.time for event in await stage.events() if event.type == "request.expired"]
    assert all(after >= (early + 0.2) * 1000 - 50 for after in expired)


# --- the clock --------------------------------------------------------------------------------------------------------


async def test_the_clock_stands_while_a_run_waits_and_goes_on_with_what_was_left(stage: Stage) -> None:
    actor = await stage.actor(asks_once(ask()), limits={"timeout": 1.0}, **ASKS)
    await stage.say()
    await stage.waiting()
    await stage.until_time(stage.now + 1500)
    actor.models.script = latch = Latch("so far")
    await stage.answer("late")
    await latch.reached.wait()
    end = await stage.end()
    assert (end.status, end.content) == ("timed_out", "so far")
    assert end.error == Error(code="deadline_exceeded", message="the run took longer than 1 s")


async def test_the_clock_of_a_wall_ends_a_run_that_waits(stage: Stage) -> None:
    await stage.actor(asks_once(ask()), limits={"timeout": 0.5}, **ASKS)
    await stage.say(clock="wall")
    await stage.waiting()
    end = await stage.end()
    assert (end.status, end.attempt, end.unfinished) == ("timed_out", 1, ("ask",))
    with pytest.raises(Rejected) as late:
        await stage.answer("now")
    assert late.value.code == "request_closed"


# --- cancel, drain, crash ---------------------------------------------------------------------------------------------


async def test_s16_cancelling_a_run_that_waits_ends_it_at_once(stage: Stage) -> None:
    actor = await stage.actor(asks_once(ask()), **ASKS)
    await stage.say()
    await stage.waiting()
    await stage.idle()
    handled = await stage.cancel(1)
    assert handled.recorded
    assert isinstance(handled.recorded.event.data, RunEnded)
    actor.models.script = echo
    await stage.say("next")
    await stage.end(run=2)
    assert {run: end.status for run, end in (await stage.ends()).items()} == {1: "cancelled", 2: "completed"}
    assert len(actor.models.requests) == 2


async def test_s16_a_cancel_at_the_moment_of_the_resume_gives_one_end(stage: Stage) -> None:
    actor = await stage.actor(asks_once(ask()), **ASKS)

    async def trial(session: str, pause: float) -> None:
        await stage.say(session=session)
        await stage.waiting(session)
        await stage.do(AnswerRequest(origin=stage.origin(), run=1, answer="go"), session)
        await asyncio.sleep(pause)
        handled = await stage.cancel(1, session)
        end = await stage.end(session)
        assert end.status == ("cancelled" if handled.recorded else "completed")
        assert len([fact for fact in await stage.facts(session) if isinstance(fact, RunEnded)]) == 1

    await asyncio.gather(*(trial(f"s{n}", n * 0.0005) for n in range(40)))
    await stage.idle()
    assert not list(actor.runner.stuck)


async def test_a_runner_that_leaves_takes_no_run_with_it_that_waits(stage: Stage) -> None:
    first = await stage.actor(asks_once(ask()), **ASKS)
    for n in range(5):
        await stage.say(session=f"s{n}")
        await stage.waiting(f"s{n}")
    await first.leave()
    second = await stage.actor(asks_once(), **ASKS)
    for n in range(5):
        await stage.say("here", session=f"s{n}")
        assert (await stage.end(f"s{n}")).content == "done"
        starts = await stage.starts(f"s{n}")
        assert [start.trigger for start in starts] == ["message", "reply"]
        assert "run.released" not in await stage.types(f"s{n}")
    assert len(second.models.requests) == 5


async def test_s47_an_answer_whose_runner_dies_at_once_is_not_lost(stage: Stage) -> None:
    first = await stage.actor(asks_once(ask()), **ASKS)
    await stage.say()
    await stage.waiting()
    first.models.script = latch = Latch()
    await stage.say("blue", name="reply")
    await latch.reached.wait()
    await first.die()
    second = await stage.actor(asks_once(), **ASKS)
    assert (await stage.end()).content == "done"
    assert [start.trigger for start in await stage.starts()] == ["message", "reply", "recovery"]
    assert results(second.models.requests[-1]) == {"ask": "blue"}
    assert len(await stage.found(ToolReturned)) == 1


async def test_a_run_that_waits_lets_another_message_start_one_beside_it(stage: Stage) -> None:
    actor = await stage.actor(asks_once(ask()), **ASKS)
    await stage.say(preset="memory")
    await stage.waiting()
    actor.models.script = echo
    await stage.say("beside it")
    assert (await stage.end(run=2)).content == "beside it"
    assert 1 not in await stage.ends()
    actor.models.script = asks_once()
    await stage.answer("red")
    assert (await stage.end()).content == "done"


async def test_nothing_of_a_run_that_waits_is_forgotten_by_a_big_answer(stage: Stage) -> None:
    actor = await stage.actor(asks_once(ask()), **ASKS)
    await stage.say()
    await stage.waiting()
    await stage.answer("x" * 300_000)
    await stage.end()
    [returned] = await stage.found(ToolReturned)
    assert returned.blob
    assert returned.blob.size == 300_000
    assert results(actor.models.requests[-1])["ask"].startswith("x" * 1000)
    assert len(await stage.found(ModelReplied)) == 1


# --- without a key ----------------------------------------------------------------------------------------------------


async def test_the_demo_model_asks_takes_answers_and_has_its_tokens_back(stage: Stage) -> None:
    actor = await stage.actor(models=Models({}), model="demo", tools=TOOLS, **ASKS)
    prompt = """
        [opaque] [ask Which colour? {"choices": ["red", "blue"]}] [tool ask_first {"text": "it is done"}]
        [then] [opaque] [tool ask_errand {"seconds": 0}]"""
    await stage.say(prompt)
    question, approval = (await stage.waiting()).requests
    assert (question.prompt, question.choices) == ("Which colour?", ("red", "blue"))
    assert approval.prompt == 'ask_first {"text": "it is done"}'
    await stage.approve(k=2)
    await stage.answer("red", k=1)
    await stage.waiting(count=2)
    await actor.leave()
    await stage.actor(models=Models({}), model="demo", tools=TOOLS, **ASKS)
    await stage.approve(k=3)
    assert (await stage.end()).content == (
        "You answered: “red”; ask_first returned it is done; ask_errand returned done, as approved"
    )
