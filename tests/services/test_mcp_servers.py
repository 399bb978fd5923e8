"""Connections to real servers: processes that the runner starts, and one at an address."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop
from structlog.testing import capture_logs
from tests.support.servers import SECRET, Notes, Web, broken, is_there, process
from tests.support.waiting import eventually

from turnstream.agents.mcp import McpServer
from turnstream_runner.mcp.failures import Ended, Failed, Refused
from turnstream_runner.mcp.servers import Place, Servers, place

WAIT = 30.0


def at(server: McpServer, name: str = "srv", account: str = "acme") -> Place:
    return place(account, "default", name, server)


async def names(servers: Servers, where: Place) -> list[str]:
    return [tool.name for tool in await servers.tools(where, wait=WAIT)]


async def failure(asked: Awaitable[object]) -> Failed:
    with pytest.raises(Failed) as caught:
        await asked
    return caught.value


# --- what is called ---------------------------------------------------------------------------------------------------


async def called(servers: Servers, where: Place, tool: str, arguments: dict[str, Any]) -> str:
    return (await servers.call(where, tool, arguments)).text


async def test_a_process_is_started_listed_called_and_ended(servers: Servers, notes: Notes) -> None:
    where = at(process())
    assert {"add", "split", "slow"} <= set(await names(servers, where))
    assert await called(servers, where, "add", {"a": 1, "b": 2}) == "3"
    assert json.loads(await called(servers, where, "split", {"text": "one two"})) == {
        "words": ["one", "two"],
        "size": 7,
    }
    (pid,) = notes.pids
    assert is_there(pid)
    await servers.close()
    assert not is_there(pid)


@pytest.mark.parametrize("options", [("stream",), ("stateless", "json")])
async def test_a_server_at_an_address_is_asked_with_its_headers(
    servers: Servers, web: Web, options: tuple[str, ...]
) -> None:
    await web.start(*options)
    where = at(web.server())
    assert "add" in await names(servers, where)
    assert await called(servers, where, "add", {"a": 1, "b": 2}) == "3"
    assert len(await called(servers, where, "large", {"size": 2_000_000})) == 2_000_000
    assert "8388608 bytes" in str(await failure(servers.call(where, "large", {"size": 9_000_000})))
    assert await called(servers, where, "add", {"a": 2, "b": 2}) == "4"


async def test_what_is_larger_than_may_be_ends_the_process_that_says_it(servers: Servers, notes: Notes) -> None:
    where = at(process())
    assert len(await called(servers, where, "large", {"size": 2_000_000})) == 2_000_000
    assert "more than 8388608 bytes" in str(await failure(servers.call(where, "large", {"size": 9_000_000})))
    assert await called(servers, where, "add", {"a": 2, "b": 2}) == "4"
    assert len(notes.pids) == 2


async def test_a_process_has_of_the_environment_what_its_definition_says(servers: Servers) -> None:
    has = json.loads(await called(servers, at(process()), "environment", {}))
    assert {"PATH", "NOTES", "SECRET"} <= set(has)
    assert "KEY" not in has


async def test_a_server_of_an_earlier_protocol_is_spoken_to_as_it_wants(servers: Servers) -> None:
    where = at(broken("old"))
    assert await names(servers, where) == ["add"]
    assert json.loads(await called(servers, where, "add", {"a": 1})) == {"a": 1}


async def test_a_session_that_a_server_has_forgotten_is_begun_anew_and_the_call_made(
    servers: Servers, notes: Notes, web: Web
) -> None:
    """As earlier protocols have it."""
    await web.start(program="mcp_broken.py")
    where = at(web.server())
    for n in range(3):
        assert json.loads((await servers.call(where, "add", {"n": n})).text) == {"n": n}
    assert json.loads((await servers.call(where, "add", {"forget": True})).text) == {"forget": True}
    assert json.loads((await servers.call(where, "add", {"n": 3})).text) == {"n": 3}
    assert [notes.count(line) for line in ("session 1", "session 2", "session 3")] == [1, 1, 0]


# --- what is kept secret ----------------------------------------------------------------------------------------------


async def test_no_secret_comes_out_of_results_errors_and_the_log(servers: Servers) -> None:
    where = at(process())
    with capture_logs() as entries:
        assert await called(servers, where, "tell", {}) == "the secret is ***"
        error = await failure(servers.call(where, "leak", {}))
        await called(servers, where, "complain", {"lines": 500})
        await servers.close()
    assert isinstance(error, Refused)
    assert "cannot log in with ***, api_key=***" in str(error)
    assert not any(SECRET in str(entry) for entry in entries)
    said = [entry for entry in entries if "complaint" in str(entry.get("text"))]
    assert 0 < len(said) <= 60


async def test_a_wrong_key_is_an_error_that_does_not_show_it(
    web: Web, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await web.start()
    servers = Servers(environment | {"KEY": "wrong-secret-key"})
    assert str(await failure(servers.tools(at(web.server()), wait=WAIT))) == "it answers 401 Unauthorized"
    await servers.close()


async def test_a_variable_that_is_not_there_is_named(servers: Servers) -> None:
    server = McpServer(command=["true"], env={"TOKEN": "${NO_SUCH_THING}"})
    error = await failure(servers.tools(at(server), wait=WAIT))
    assert str(error) == "the runner's environment does not have NO_SUCH_THING"


# --- servers that are not well ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("deaf", "it did not answer within 2 s"),
        ("rubbish", "it did not answer within 2 s"),
        ("listless", "it did not answer within 2 s"),
        ("endless", "it said more than 8388608 bytes at once"),
        ("ended", "it ended with status 7"),
    ],
)
async def test_a_server_that_does_not_begin_is_given_up(impatient: Servers, notes: Notes, kind: str, said: str) -> None:
    where = at(broken(kind, timeout=2))
    assert str(await failure(impatient.tools(where, wait=WAIT))) == said
    (pid,) = notes.pids
    await eventually(lambda: not is_there(pid), what="the process is gone")


async def test_what_cannot_be_started_or_reached_is_said(servers: Servers, tmp_path: Any) -> None:
    async def said(server: McpServer) -> str:
        return str(await failure(servers.tools(at(server), wait=WAIT)))

    assert "no command 'no-such-program'" in await said(McpServer(command=["no-such-program"]))
    assert "127" in await said(McpServer(command=["/no/such/program"]))
    assert "No such file" in await said(McpServer(command=["true"], cwd="/no/such/folder"))
    assert "ConnectError" in await said(McpServer(url="http://127.0.0.1:9/mcp"))


async def test_a_runner_without_the_library_says_so(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "turnstream_runner.mcp.dialog", None)
    await servers.prepare()
    error = await failure(servers.tools(at(process()), wait=WAIT))
    assert str(error) == "this runner has no MCP library: `pip install turnstream[mcp]`"


async def test_a_server_that_cannot_be_reached_holds_nobody_up_again(impatient: Servers, notes: Notes) -> None:
    where = at(broken("deaf", timeout=2))
    await failure(impatient.tools(where, wait=WAIT))
    began = asyncio.get_running_loop().time()
    assert str(await failure(impatient.tools(where, wait=WAIT))) == "it did not answer within 2 s"
    assert asyncio.get_running_loop().time() - began < 0.1
    assert len(notes.pids) == 1


async def test_nobody_waits_longer_than_he_will(servers: Servers) -> None:
    began = asyncio.get_running_loop().time()
    await failure(servers.tools(at(broken("deaf")), wait=0.2))
    assert asyncio.get_running_loop().time() - began < 1


@pytest.mark.parametrize("kind", ["process", "web"])
async def test_a_server_that_dies_in_a_call_is_an_error_and_opened_again(
    servers: Servers, notes: Notes, web: Web, kind: str
) -> None:
    if kind == "web":
        await web.start()
    where = at(web.server() if kind == "web" else process())
    waiting = asyncio.create_task(called(servers, where, "slow", {"seconds": 60}))
    await notes.until("begun ")
    error = await failure(servers.call(where, "die", {}))
    assert isinstance(error, Ended) and not error.undone
    assert isinstance(await failure(waiting), Ended)
    if kind == "web":
        web.kill()
        await web.start()
    assert await called(servers, where, "add", {"a": 1, "b": 1}) == "2"


async def test_a_server_that_was_started_anew_is_called_as_if_nothing_were(servers: Servers, web: Web) -> None:
    await web.start()
    where = at(web.server())
    assert await called(servers, where, "add", {"a": 1, "b": 1}) == "2"
    web.kill()
    await web.start()
    assert await called(servers, where, "add", {"a": 1, "b": 2}) == "3"


async def test_a_process_that_died_while_nobody_looked_is_started_again(servers: Servers, notes: Notes) -> None:
    where = at(process())
    await servers.tools(where, wait=WAIT)
    os.kill(notes.pids[0], 9)
    await eventually(lambda: not servers._there, what="the runner has seen it")
    assert await called(servers, where, "add", {"a": 1, "b": 2}) == "3"
    assert len(notes.pids) == 2


# --- who shares a connection, and when it is closed -------------------------------------------------------------------


async def test_runs_of_an_agent_share_a_process_and_accounts_do_not(servers: Servers) -> None:
    server = process()
    mine, same, others = at(server), at(process()), at(server, account="else")
    pids = await asyncio.gather(*[called(servers, where, "pid", {}) for where in (mine, same, mine, others)])
    assert pids[0] == pids[1] == pids[2] != pids[3]


async def test_calls_of_one_connection_run_at_once(servers: Servers, notes: Notes) -> None:
    where = at(process())
    await servers.tools(where, wait=WAIT)
    calls = [asyncio.create_task(called(servers, where, "slow", {"seconds": 1, "name": str(n)})) for n in range(5)]
    for n in range(5):
        await notes.until(f"begun {n}")
    assert not any(line.startswith("done") for line in notes.lines)
    await asyncio.gather(*calls)


async def is_cancelled_at_the_server(servers: Servers, where: Place, notes: Notes) -> None:
    """A call, within a second."""
    call = asyncio.create_task(called(servers, where, "slow", {"seconds": 60}))
    await notes.until("begun ")
    began = time.monotonic()
    call.cancel()
    assert await notes.until("cancelled ") - began < 1.0


async def test_a_call_that_is_cancelled_is_cancelled_at_the_server(servers: Servers, notes: Notes) -> None:
    where = at(process())
    await is_cancelled_at_the_server(servers, where, notes)
    assert await called(servers, where, "add", {"a": 1, "b": 2}) == "3"


async def test_a_call_over_http_that_is_cancelled_is_cancelled_at_the_server(
    servers: Servers, notes: Notes, web: Web
) -> None:
    await web.start()
    where = at(web.server())
    await is_cancelled_at_the_server(servers, where, notes)
    assert await called(servers, where, "add", {"a": 1, "b": 2}) == "3"


async def test_what_is_not_used_is_closed_and_opened_again(environment: dict[str, str], notes: Notes) -> None:
    servers = Servers(environment, idle=0.2)
    where = at(process())
    await servers.tools(where, wait=WAIT)
    call = asyncio.create_task(called(servers, where, "slow", {"seconds": 1}))
    assert await call == "waited for 1 s"  # longer than the time that is allowed without use
    (pid,) = notes.pids
    await eventually(lambda: not is_there(pid), what="the process is closed")
    assert await called(servers, where, "add", {"a": 1, "b": 2}) == "3"
    await servers.close()
    assert not any(map(is_there, notes.pids))


async def test_there_are_so_many_processes_and_no_more(environment: dict[str, str], notes: Notes) -> None:
    servers = Servers(environment, processes=2)
    first, second, third = (at(process(), name) for name in ("a", "b", "c"))
    busy = asyncio.create_task(called(servers, first, "slow", {"seconds": 60}))
    await called(servers, second, "add", {"a": 1, "b": 2})
    await called(servers, third, "add", {"a": 1, "b": 2})  # in place of the second
    assert [is_there(pid) for pid in notes.pids].count(True) == 2
    also = asyncio.create_task(called(servers, third, "slow", {"seconds": 60, "name": "also"}))
    await notes.until("begun also")
    assert "as many MCP servers as it may" in str(await failure(servers.call(second, "add", {"a": 1, "b": 2})))
    for call in (busy, also):
        call.cancel()
    await servers.close()


async def test_nothing_that_a_server_started_outlives_it(servers: Servers) -> None:
    where = at(process())
    pids = json.loads(await called(servers, where, "breed", {}))
    assert is_there(pids["server"]) and is_there(pids["child"])
    await servers.close()
    await eventually(lambda: not is_there(pids["server"]) and not is_there(pids["child"]))


async def test_nothing_that_a_server_started_outlives_its_death(servers: Servers) -> None:
    where = at(process())
    pids = json.loads(await called(servers, where, "breed", {}))
    os.kill(pids["server"], 9)
    await eventually(lambda: not is_there(pids["child"]))


# --- tools that change ------------------------------------------------------------------------------------------------


async def test_a_server_that_says_that_it_has_other_tools_is_listed_anew(servers: Servers) -> None:
    where = at(process())
    assert "late" not in await names(servers, where)
    await called(servers, where, "change", {})
    fresh = {tool.name: tool for tool in await servers.tools(where, wait=WAIT, fresh=True)}
    assert "late" in fresh
    assert "sentence" in fresh["split"].schema["properties"]
    assert "late" in await names(servers, where)


async def test_descriptors_are_given_back(servers: Servers) -> None:
    where = at(process())
    await called(servers, where, "add", {"a": 1, "b": 2})
    count: Callable[[], int] = lambda: len(os.listdir("/proc/self/fd"))  # noqa: E731
    before = count()
    for _ in range(3):
        await failure(servers.call(where, "die", {}))
        await called(servers, where, "add", {"a": 1, "b": 2})
    await eventually(lambda: count() <= before, what="as many open files as before")


def test_the_same_holds_on_the_loop_that_runners_have(environment: dict[str, str], notes: Notes) -> None:
    async def scenario() -> None:
        servers = Servers(environment)
        assert str(await failure(servers.tools(at(broken("ended")), wait=WAIT))) == "it ended with status 7"
        assert "more than 8388608" in str(await failure(servers.tools(at(broken("endless")), wait=WAIT)))
        where = at(process())
        born = json.loads(await called(servers, where, "breed", {}))
        await is_cancelled_at_the_server(servers, where, notes)
        assert str(await failure(servers.call(where, "die", {}))) == "it ended with status 3"
        await eventually(lambda: not is_there(born["child"]))
        assert await called(servers, where, "add", {"a": 1, "b": 2}) == "3"
        born = json.loads(await called(servers, where, "breed", {}))
        await servers.close()
        await eventually(lambda: not is_there(born["server"]) and not is_there(born["child"]))

    uvloop.run(scenario())
