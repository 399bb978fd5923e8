"""Runs whose agent has MCP servers, on a real broker and with real servers."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from tests.support.driving import asks_once, call
from tests.support.servers import Notes, Web, broken, is_there, process
from tests.support.stage import Actor, Stage
from tests.support.waiting import eventually

from turnstream.agents import Agent, Agents, tool
from turnstream.agents.mcp import McpServer
from turnstream.roster import Roster
from turnstream.session.commands import Act, CancelRun
from turnstream.session.events import RunEnded, Spec, ToolCall, ToolReturned, ToolStarted
from turnstream.settings import Settings
from turnstream.specs import specs_of, tools_of
from turnstream_runner.mcp import offer
from turnstream_runner.mcp import servers as connections
from turnstream_runner.mcp.servers import Place, Servers, place
from turnstream_runner.models.port import Item, ModelRequest, Reply
from turnstream_runner.roles import Roles
from turnstream_runner.tools.registry import Tools


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server begins as late as a busy machine has it."""
    monkeypatch.setattr(offer, "WAIT", 60.0)


@tool(idempotent=True)
def look() -> str:
    "Looks."
    return "seen"


def down(**said: Any) -> McpServer:
    return McpServer(url="http://127.0.0.1:9/mcp", **said)


def at(server: McpServer) -> Place:
    return place("acme", "default", "srv", server)


def offered(request: ModelRequest) -> list[str]:
    return [spec.name for spec in request.tools]


async def returned(stage: Stage) -> ToolReturned:
    await stage.end()
    return (await stage.found(ToolReturned))[-1]


# --- what is offered and called ---------------------------------------------------------------------------------------


async def test_tools_of_a_server_are_offered_beside_others_and_called(stage: Stage, servers: Servers) -> None:
    server = process(tools=["add", "odd.name-" + ODD])
    script = asks_once(call("srv__add", '{"a": 1, "b": 2}'))
    actor = await stage.actor(script, tools=[look], servers=servers, mcp={"srv": server})
    await stage.say()
    assert (await returned(stage)).output == "3"
    (first, second) = actor.models.requests
    assert first.tools == second.tools
    look_spec, add, odd = first.tools
    assert (look_spec.name, add.name, add.description) == ("look", "srv__add", "The sum of two numbers.")
    assert add.schema["properties"]["a"]["type"] == "integer"
    assert odd.name.startswith("srv__odd_name-with") and len(odd.name) == 64


ODD = "with-a-very-long-tail-that-no-provider-would-take-as-it-is-for-it-has-too-many"


async def test_arguments_that_do_not_fit_are_not_sent(stage: Stage, servers: Servers, notes: Notes) -> None:
    await stage.actor(asks_once(call("srv__add", '{"a": "x"}')), servers=servers, mcp={"srv": process()})
    await stage.say()
    result = await returned(stage)
    assert result.status == "error"
    assert result.error.startswith("the arguments do not fit: ")
    assert "a: it is not of type" in result.error and '"b" is a required property' in result.error
    assert not any(line.startswith("add") for line in notes.lines)


async def test_an_error_of_the_tool_is_an_error_that_the_model_sees(stage: Stage, servers: Servers) -> None:
    await stage.actor(asks_once(call("srv__leak")), servers=servers, mcp={"srv": process()})
    await stage.say()
    result = await returned(stage)
    assert (result.status, result.output) == ("error", "")
    assert "cannot log in with ***" in result.error


async def test_a_large_result_goes_to_the_object_store(stage: Stage, servers: Servers) -> None:
    asked = call("srv__large", '{"size": 2000000}')
    await stage.actor(asks_once(asked), servers=servers, mcp={"srv": process()})
    await stage.say()
    result = await returned(stage)
    assert result.blob and result.blob.size == 2_000_000
    assert 0 < len(result.output) < 40_000


@pytest.mark.parametrize("idempotent", [True, False])
async def test_what_may_not_be_repeated_is_stored_before_it_is_begun(
    stage: Stage, servers: Servers, idempotent: bool
) -> None:
    server = process(idempotent=["add"] if idempotent else [])
    await stage.actor(asks_once(call("srv__add", '{"a": 1, "b": 2}')), servers=servers, mcp={"srv": server})
    await stage.say()
    await stage.end()
    assert bool(await stage.found(ToolStarted)) is not idempotent


# --- servers that are not there ---------------------------------------------------------------------------------------


async def test_a_server_that_is_down_is_not_offered_and_the_model_is_told(stage: Stage, servers: Servers) -> None:
    script = asks_once(call("gone__add", "{}"))
    agent = {"instructions": "be kind", "mcp": {"gone": down(), "srv": process(tools=["add"])}}
    actor = await stage.actor(script, servers=servers, **agent)
    await stage.say()
    result = await returned(stage)
    assert (await stage.end()).status == "completed"
    assert result.status == "error"
    assert result.error.startswith("the tools of MCP server gone cannot be had now: ConnectError")
    request = actor.models.requests[0]
    assert offered(request) == ["srv__add"]
    assert request.instructions.startswith("be kind\n\nSome of your tools cannot be reached")
    assert "gone__…" in request.instructions and "srv__" not in request.instructions
    assert not await stage.found(ToolStarted)


async def test_a_server_that_hangs_does_not_hold_up_the_run(
    stage: Stage, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offer, "WAIT", 1.0)
    actor = await stage.actor(servers=servers, mcp={"srv": broken("deaf")})
    await stage.say()
    await eventually(lambda: bool(actor.models.requests), 10.0, what="the model is asked after some seconds")
    assert offered(actor.models.requests[0]) == []
    assert (await stage.end()).content == "hello"


async def test_a_server_that_is_there_later_is_offered_from_then_on(
    stage: Stage, servers: Servers, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "AGAIN", 0.2)
    await web.start()
    web.kill()
    server = web.server(tools=["add"])

    def has_news() -> bool:
        """The runner has found the server, or may look for it again."""
        _, connection = servers._there.get(at(server).key, (None, None))
        trouble = servers._trouble.get(at(server).key)
        return connection.is_open if connection else not trouble or trouble.until < asyncio.get_running_loop().time()

    async def looks_until_it_is_there(request: ModelRequest) -> AsyncGenerator[Item, None]:
        if offered(request) != ["look"]:
            yield Reply(text=f"has {len(offered(request))}")
            return
        if not web.running:
            await web.start()
        await eventually(has_news, 30)
        yield Reply(tool_calls=(ToolCall(id="", name="look", arguments="{}"),), finish="tool_calls")

    actor = await stage.actor(looks_until_it_is_there, servers=servers, tools=[look], mcp={"srv": server})
    await stage.say()
    assert (await stage.end(timeout=60)).content == "has 2"
    assert "cannot be reached" in actor.models.requests[0].instructions
    assert "cannot be reached" not in actor.models.requests[-1].instructions


async def test_what_was_offered_in_a_run_stays_though_the_server_has_other_tools(
    stage: Stage, servers: Servers
) -> None:
    server = process(tools=["change", "split", "late"])
    actor = await stage.actor(asks_once(call("srv__change")), servers=servers, mcp={"srv": server})
    await stage.say()
    await stage.end()
    first, second = actor.models.requests
    assert offered(first) == ["srv__split", "srv__change"]
    assert first.tools == second.tools
    await servers.tools(at(server), wait=1.0, fresh=True)
    await stage.say(session="s2")
    await stage.end("s2")
    assert offered(actor.models.requests[-1]) == ["srv__change", "srv__split", "srv__late"]


# --- approvals --------------------------------------------------------------------------------------------------------


async def asks_approval(stage: Stage, servers: Servers, server: McpServer) -> Actor:
    asked = call("srv__split", '{"text": "a b"}')
    actor = await stage.actor(asks_once(asked), servers=servers, mcp={"srv": server}, approval={"srv__split": "always"})
    await stage.say()
    ask = (await stage.waiting()).requests[0]
    assert (ask.kind, ask.prompt) == ("approval", 'srv__split {"text": "a b"}')
    return actor


async def test_an_approved_call_runs(stage: Stage, servers: Servers) -> None:
    await asks_approval(stage, servers, process())
    await stage.approve()
    assert json.loads((await returned(stage)).output)["words"] == ["a", "b"]


async def test_a_call_whose_schema_has_changed_since_it_was_approved_is_denied(stage: Stage, servers: Servers) -> None:
    server = process()
    await asks_approval(stage, servers, server)
    await servers.call(at(server), "change", {})
    await stage.approve()
    result = await returned(stage)
    assert result.status == "denied"
    assert "the tool has changed" in result.error


async def test_a_call_whose_server_is_gone_when_it_is_approved_is_an_error(
    stage: Stage, servers: Servers, web: Web
) -> None:
    await web.start()
    await asks_approval(stage, servers, web.server())
    web.kill()
    await stage.approve()
    result = await returned(stage)
    assert result.status == "error"
    assert "ConnectError" in result.error


# --- what is cut off --------------------------------------------------------------------------------------------------


SLOW = '{"seconds": 60, "name": "x"}'


async def test_a_cancelled_run_cancels_its_call_within_a_second(stage: Stage, servers: Servers, notes: Notes) -> None:
    await stage.actor(asks_once(call("srv__slow", SLOW)), servers=servers, mcp={"srv": process()})
    await stage.say()
    await notes.until("begun x")
    await stage.do(CancelRun(origin=stage.origin(), run=1))
    stored = time.monotonic()
    assert await notes.until("cancelled x") - stored < 1.0
    assert (await stage.end()).status == "cancelled"


async def test_a_call_that_takes_longer_than_its_server_may_is_cancelled(
    stage: Stage, servers: Servers, notes: Notes
) -> None:
    server = process(timeout=2)
    await stage.actor(asks_once(call("srv__slow", SLOW)), servers=servers, mcp={"srv": server})
    await stage.say()
    result = await returned(stage)
    assert (result.status, result.error) == ("error", "the tool took longer than 2 s and was given up")
    await notes.until("cancelled x")


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_call_that_a_dead_runner_leaves_is_repeated_only_if_that_was_said(
    stage: Stage, environment: dict[str, str], notes: Notes, idempotent: bool
) -> None:
    server = process(idempotent=["slow"] if idempotent else [])
    asked = asks_once(call("srv__slow", '{"seconds": 3, "name": "x"}'))
    before, after = Servers(environment), Servers(environment)
    first = await stage.actor(asked, servers=before, mcp={"srv": server})
    await stage.say()
    await notes.until("begun x")
    await first.die()
    await before.close()
    await stage.actor(asked, servers=after, mcp={"srv": server})
    result = await returned(stage)
    if idempotent:
        assert (result.status, result.output) == ("ok", "waited for 3 s")
    else:
        assert result.status == "uncertain"
    assert notes.count("begun x") == 1 + idempotent
    await after.close()
    assert not any(map(is_there, notes.pids))


async def test_a_server_that_dies_in_a_call_leaves_its_run_alive(stage: Stage, servers: Servers) -> None:
    await stage.actor(asks_once(call("srv__die")), servers=servers, mcp={"srv": process()})
    await stage.say()
    result = await returned(stage)
    assert result.status == "error"
    assert result.error == "MCP server srv: it ended with status 3; whether it was done is not known"
    ended: RunEnded = await stage.end()
    assert ended.status == "completed"


# --- who may use a server ---------------------------------------------------------------------------------------------


async def test_a_child_has_the_servers_that_its_parent_has_too() -> None:
    files, search = down(), down(tools=["find"])
    mine = Agent(name="mine", model="demo", mcp={"files": files, "search": search})
    its = Agent(name="its", model="demo", mcp={"files": down(), "search": down(), "own": files})
    known = Agents({"mine": mine, "its": its}, {})
    roles = Roles(Roster(known, specs_of(Settings(), known), Settings()), Tools({}))
    parent = msgspec.convert(mine.pinned(), Spec)
    child = msgspec.convert(its.pinned(), Spec)
    has = await roles.tools_of("acme", parent)
    left = tuple([name for name in await roles.tools_of("acme", child) if name in has])
    role = await roles.get("acme", msgspec.structs.replace(child, tools=left))
    assert role
    assert set(role.servers) == {"files"}, "`search` may use more, and `own` is none of the parent's"


async def test_a_person_calls_a_tool_that_the_agent_names(stage: Stage, servers: Servers) -> None:
    server = process(tools=["add"])
    await stage.actor(servers=servers, mcp={"srv": server}, approval={"srv__add": "always"})
    await stage.say()
    await stage.end()
    action = ToolCall(id="action", name="srv__add", arguments='{"a": 1, "b": 2}')
    agent = Agent(name="default", model="demo", mcp={"srv": server})
    may = {"default": tools_of(agent, {})}
    await stage.do(Act(origin=stage.origin(), action=action, author="user:ann", specs=stage.specs, tools=may))
    assert (await stage.end(run=2)).content == "3"


# --- nodes of a graph -------------------------------------------------------------------------------------------------


async def test_a_node_calls_a_server_s_tool_once_a_person_has_approved_it(stage: Stage, servers: Servers) -> None:
    sums = {"type": "mcp", "server": "srv", "tool": "add", "arguments": {"a": 1, "b": "{{ input | int }}"}}
    graph = {
        "nodes": {"q": {"type": "input"}, "sums": sums, "o": {"type": "output"}},
        "edges": ["q -> sums", "sums -> o"],
    }
    said = {"mcp": {"srv": process().model_dump()}, "approval": {"srv__add": "always"}, "graph": graph, "limits": {}}
    await stage.actor(servers=servers, **said)
    await stage.say("41")
    assert [(ask.kind, ask.path) for ask in (await stage.waiting()).requests] == [("approval", "sums")]
    await stage.approve()
    assert (await stage.end()).content == "42"


@pytest.mark.parametrize("said", ["", "one", "one two"])
async def test_a_map_goes_through_the_list_that_a_server_gives(stage: Stage, servers: Servers, said: str) -> None:
    each = {"nodes": {"e": {"type": "input"}, "x": {"type": "output"}}, "edges": ["e -> x"]}
    nodes = {
        "q": {"type": "input"},
        "split": {"type": "mcp", "server": "srv", "tool": "words", "arguments": {"text": "{{ input[1:] }}"}},
        "each": {"type": "map", "graph": each},
        "o": {"type": "output"},
    }
    graph = {"nodes": nodes, "edges": ["q -> split", "split -> each", "each -> o"]}
    await stage.actor(servers=servers, mcp={"srv": process().model_dump()}, graph=graph, limits={})
    await stage.say(f"!{said}")
    assert json.loads((await stage.end()).content) == said.split()
