import asyncio
import contextvars
import dataclasses
import datetime
import json
import threading
import time
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from tests.support.waiting import eventually

from turnstream import agents
from turnstream.agents import Tool, ToolContext, ToolError, tool
from turnstream_runner.tools.output import printed
from turnstream_runner.tools.registry import ToolResult, Tools

CONTEXT = ToolContext(
    account="acme", session="s", run="s.1", attempt=1, call_id="call_1", idempotency_key="acme/s.1:1:call_1"
)


def tools(*some: Tool[..., Any]) -> Tools:
    return Tools({one.name: one for one in some})


async def call(one: Tool[..., Any], arguments: str = "{}") -> ToolResult:
    return await tools(one).call(one.name, arguments, CONTEXT)


def ok(output: str, *, json: bool = False) -> ToolResult:
    return ToolResult(status="ok", output=output, json=json)


def returning(value: object) -> Tool[..., Any]:
    def give() -> object:
        return value

    return tool(give)


class City(BaseModel):
    name: str
    size: Annotated[int, Field(ge=0)] = 0


@tool
def describe(city: City, style: Literal["long", "short"] = "short", *, json: bool = False) -> str:
    """A tool whose parameter names are those of pydantic's own."""
    return f"{city.name} {city.size} {style} {json}"


# --- arguments --------------------------------------------------------------------------------------------------------


async def test_arguments_are_validated_and_converted() -> None:
    assert await call(describe, '{"city": {"name": "Oslo", "size": "7"}}') == ok("Oslo 7 short False")
    assert await call(describe, '{"city": {"name": "Oslo"}, "style": "long", "json": true}') == ok("Oslo 0 long True")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("{}", ["city: ", "required"]),
        ('{"city": {"name": "x", "size": -1}}', ["city.size: "]),
        ('{"city": {"name": "x"}, "style": "odd", "more": 1}', ["style: ", "more: "]),
        ("[]", ["object"]),
        ("null", ["object"]),
        ('{"city": ', ["JSON"]),
        ('{"city": {"name": "\\ud800"}}', ["JSON"]),
        ("[" * 5000, ["JSON"]),
    ],
)
async def test_arguments_that_do_not_fit_are_a_result_that_says_which(arguments: str, names: list[str]) -> None:
    result = await call(describe, arguments)
    assert result.status == "error"
    assert result.error.startswith("the arguments do not fit: ")
    for name in names:
        assert name in result.error
    assert len(result.error) < 2000


async def test_what_was_in_the_arguments_is_not_said_again() -> None:
    result = await call(describe, json.dumps({"city": {"name": ["hunter2"], "size": "hunter2"}}))
    assert result.status == "error"
    assert "hunter2" not in result.error


async def test_no_arguments_at_all_are_none() -> None:
    assert await call(returning("x"), "") == ok("x")
    assert await call(returning("x"), "  ") == ok("x")


async def test_the_context_is_given_and_cannot_be_forged() -> None:
    @tool
    def key(context: ToolContext) -> str:
        return context.idempotency_key

    assert await call(key) == ok(CONTEXT.idempotency_key)
    assert (await call(key, '{"context": {"idempotency_key": "forged"}}')).status == "error"


async def test_a_tool_that_is_not_there_is_a_result() -> None:
    result = await tools(describe).call("delete_everything", "{}", CONTEXT)
    assert result.status == "error"
    assert "'delete_everything'" in result.error
    assert "describe" in result.error


async def test_a_run_has_no_tools_but_its_agents() -> None:
    everything = tools(describe, returning("secret"))
    mine = everything.only(["describe", "gone"])
    assert [spec.name for spec in mine.specs()] == ["describe"]
    assert (await mine.call("give", "{}", CONTEXT)).status == "error"
    assert await everything.call("give", "{}", CONTEXT) == ok("secret")


# --- outputs ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Point:
    x: int
    y: float


@pytest.mark.parametrize(
    ("value", "output"),
    [
        ("as it is", "as it is"),
        ("", ""),
        (None, "null"),
        (True, "true"),
        (3, "3"),
        ({"a": [1, None, "é"]}, '{"a":[1,null,"é"]}'),
        (float("nan"), '"NaN"'),
        (City(name="Oslo"), '{"name":"Oslo","size":0}'),
        (Point(1, 2.5), '{"x":1,"y":2.5}'),
        (datetime.date(2026, 1, 2), '"2026-01-02"'),
        (Decimal("1.10"), '"1.10"'),
        (b"bytes \xff", "bytes \ufffd"),
        ([b"\xff"], '["_w=="]'),
        ("\x00\x07\x1b[0m \u2028 \x85 👩‍👩‍👧", "\ufffd\x07\x1b[0m \u2028 \x85 👩‍👩‍👧"),
        ("a \ud83d\ude00 b \ud800 c", "a 😀 b \ufffd c"),
        ({"\ud800": ["\udc00", float("inf")]}, '{"\ufffd":["\ufffd","Infinity"]}'),
    ],
)
async def test_a37_any_output_is_text_that_can_be_stored(value: object, output: str) -> None:
    result = await call(returning(value))
    assert result == ok(output, json=not isinstance(value, str | bytes))
    result.output.encode()


_ANY = st.text('aé😀\0\ud83d\ude00\u2028"\\')


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.floats() | st.binary() | _ANY, lambda inner: st.lists(inner) | st.dictionaries(_ANY, inner)
    )
)
def test_any_output_is_valid(value: object) -> None:
    text = printed(value)
    text.encode()
    assert "\0" not in text
    if not isinstance(value, str | bytes):
        json.loads(text)


async def test_what_cannot_be_written_is_an_error() -> None:
    circle: list[object] = []
    circle.append(circle)
    assert (await call(returning(circle))).status == "error"


# --- failures ---------------------------------------------------------------------------------------------------------


def failing(error: BaseException, *, in_thread: bool) -> Tool[..., Any]:
    if in_thread:

        def fail() -> None:
            raise error

        return tool(fail)

    async def fail_async() -> None:
        raise error

    return tool(fail_async)


@pytest.mark.parametrize("in_thread", [True, False])
@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ToolError("there is no such city\ntry another"), "there is no such city\ntry another"),
        (ToolError("x" * 5000), "x" * 4096 + "…"),
        (ValueError("first line\nsecond line"), "ValueError: first line"),
        (RuntimeError(), "RuntimeError"),
        (SystemExit(3), "SystemExit: 3"),
        (StopIteration("x"), "RuntimeError: coroutine raised StopIteration"),
        (asyncio.CancelledError(), "CancelledError"),
        (BaseExceptionGroup("several", [SystemExit(1)]), "BaseExceptionGroup: several (1 sub-exception)"),
        (ValueError("\ud800 x" * 1000), "ValueError: " + "\ufffd x" * 166 + "\ufffd …"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
async def test_an_exception_is_a_short_result(error: BaseException, shown: str, in_thread: bool) -> None:
    result = await call(failing(error, in_thread=in_thread))
    assert result.status == "error"
    assert result.error == shown
    assert "Traceback" not in result.error


@pytest.mark.parametrize(
    "text",
    [
        "cannot connect to postgres://app:HUNTER2@db/x",
        "redis://:HUNTER2@cache:6379 is down",
        "401 for Authorization: Bearer HUNTER2HUNTER2",
        'bad config {"api_key": "HUNTER2"}',
        "login failed password=HUNTER2, user=x",
        "key sk-HUNTER2HUNTER2 is revoked",
        "GET https://x/?token=HUNTER2&a=1",
    ],
)
async def test_credentials_in_an_exception_are_struck_out(text: str) -> None:
    result = await call(failing(ConnectionError(text), in_thread=False))
    assert result.error.startswith("ConnectionError: ")
    assert "HUNTER2" not in result.error
    assert "***" in result.error


async def test_a_validator_that_breaks_is_a_result() -> None:
    class Odd(BaseModel):
        x: int

        def model_post_init(self, context: object) -> None:
            raise KeyError("broken validator")

    @tool
    def odd(value: Odd) -> str:
        return "never"

    assert (await call(odd, '{"value": {"x": 1}}')).error == "KeyError: 'broken validator'"


# --- time -------------------------------------------------------------------------------------------------------------


async def test_a_tool_that_takes_too_long_is_given_up_and_its_task_ended() -> None:
    cleaned = asyncio.Event()

    @tool(timeout=0.05)
    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    result = await call(endless)
    assert result.error == "the tool took longer than 0.05 s and was given up"
    assert cleaned.is_set()


async def test_a_tool_that_will_not_be_cancelled_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnstream_runner.tools.registry.GRACE", 0.05)
    release = asyncio.Event()

    @tool(timeout=0.05)
    async def stubborn() -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    some = tools(stubborn)
    assert (await some.call("stubborn", "{}", CONTEXT)).status == "error"
    assert len(some._leaving) == 1
    release.set()
    await eventually(lambda: not some._leaving)


async def test_a_function_that_blocks_holds_up_nobody() -> None:
    release = threading.Event()

    @tool(timeout=0.05)
    def blocking() -> None:
        release.wait(30)

    started = time.monotonic()
    results = await asyncio.gather(*(call(blocking) for _ in range(20)), call(returning("quick")))
    assert time.monotonic() - started < 5
    assert [result.status for result in results] == ["error"] * 20 + ["ok"]
    release.set()


async def test_cancelling_the_caller_cancels_the_tool() -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()

    @tool
    async def endless() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    calling = asyncio.create_task(call(endless))
    await began.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await asyncio.wait_for(cancelled.wait(), 5)


async def test_functions_run_in_threads_with_the_callers_context() -> None:
    who = contextvars.ContextVar("who", default="nobody")
    who.set("caller")

    @tool
    def where() -> list[object]:
        return [who.get(), threading.current_thread() is threading.main_thread()]

    assert await call(where) == ok('["caller",false]', json=True)


async def test_a_function_that_returns_a_coroutine_is_awaited() -> None:
    async def inner() -> dict[str, int]:
        return {"a": 1}

    def wrapped() -> Any:
        return inner()

    assert await call(tool(wrapped)) == ok('{"a":1}', json=True)


# --- several at once --------------------------------------------------------------------------------------------------


class Room:
    """Who is inside now, and the most that ever were."""

    def __init__(self) -> None:
        self.inside: set[str] = set()
        self.met: set[frozenset[str]] = set()

    async def visit(self, name: str) -> None:
        self.inside.add(name)
        for _ in range(5):
            self.met.add(frozenset(self.inside))
            await asyncio.sleep(0)
        self.inside.discard(name)


def visitors(room: Room) -> Tools:
    @tool
    async def shared(name: str) -> None:
        await room.visit(name)

    @tool(exclusive=True)
    async def single(name: str) -> None:
        await room.visit(name)

    return tools(shared, single)


async def visit(some: Tools, which: str, name: str, run: str = "s.1") -> None:
    async with some.turn(which, run):
        await some.call(which, json.dumps({"name": name}), CONTEXT)


async def test_calls_of_a_run_are_at_once_but_for_an_exclusive_one() -> None:
    room = Room()
    some = visitors(room)
    mine = some.only(["shared", "single"])
    await asyncio.gather(
        visit(mine, "shared", "a"), visit(mine, "single", "X"), visit(mine, "shared", "b"), visit(mine, "single", "Y")
    )
    assert frozenset("ab") in room.met
    assert all(len(group) == 1 for group in room.met if group & {"X", "Y"})
    assert not some._gates


async def test_an_exclusive_tool_of_one_run_does_not_hold_up_another() -> None:
    room = Room()
    some = visitors(room)
    await asyncio.gather(visit(some, "single", "X", "s.1"), visit(some, "single", "Y", "t.1"))
    assert frozenset("XY") in room.met


async def test_a_call_that_is_cancelled_while_it_waits_leaves_the_way_free() -> None:
    some = visitors(Room())
    async with some.turn("single", "s.1"):
        waiting = asyncio.create_task(visit(some, "shared", "a"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await asyncio.wait_for(visit(some, "single", "X"), 5)
    assert not some._gates


# --- the built-in ones ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("add", '{"a": 1, "b": 2}', ok("3", json=True)),
        ("add", '{"a": 0.5, "b": 2}', ok("2.5", json=True)),
        ("count_words", '{"text": "a bé"}', ok('{"words":2,"characters":4,"bytes":5}', json=True)),
        ("sleep", '{"seconds": 0}', ok("slept for 0 s")),
        ("errand", "{}", ok("done")),
        ("alone", "{}", ok("was alone")),
        ("repeat", '{"text": "ab", "times": 3}', ok("ababab")),
        ("fail", '{"message": "no"}', ToolResult(status="error", error="no")),
        ("receipt", "{}", ok('{"run":"s.1","call":"call_1","idempotency_key":"acme/s.1:1:call_1"}', json=True)),
    ],
)
async def test_the_built_in_tools(name: str, arguments: str, result: ToolResult) -> None:
    assert await Tools(agents.load().tools).call(name, arguments, CONTEXT) == result


async def test_no_prompt_can_use_up_the_memory() -> None:
    some = Tools(agents.load().tools)
    most = await some.call("repeat", '{"text": "é", "times": 4194304}', CONTEXT)
    assert (most.status, len(most.output)) == ("ok", 1 << 22)
    for times in (4_194_305, 10**30):
        more = await some.call("repeat", json.dumps({"text": "é", "times": times}), CONTEXT)
        assert more.error == "that would be more than 8388608 bytes"


@pytest.mark.parametrize("arguments", ['{"seconds": 61}', '{"seconds": -1}', '{"seconds": NaN}'])
async def test_the_built_in_tools_have_bounds(arguments: str) -> None:
    assert (await Tools(agents.load().tools).call("sleep", arguments, CONTEXT)).status == "error"


def test_which_calls_may_be_repeated() -> None:
    some = Tools(agents.load().tools)
    assert some.is_idempotent("add")
    assert not some.is_idempotent("errand")
    assert some.is_idempotent("no such tool")
