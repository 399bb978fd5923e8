"""MCP servers of real runners: through the whole house, and when a runner is killed (-9) or told to stop."""

import json
import re
import shlex
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.client import Client
from tests.support.processes import Process, Spawn
from tests.support.servers import SECRET, Notes, Web, broken, is_there, process
from tests.support.waiting import eventually

from turnstream import agents
from turnstream.agents.mcp import McpServer
from turnstream.broker.server import NatsServer
from turnstream.session.events import ToolReturned
from turnstream_cli.place import read_addresses

pytestmark = pytest.mark.system

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "agents"
    found.mkdir()
    return found


def write(folder: Path, name: str, **servers: McpServer) -> None:
    said = {name: server.model_dump(mode="json", exclude_defaults=True) for name, server in servers.items()}
    (folder / f"{name}.json").write_text(json.dumps({"model": "demo", "mcp": said}))


@pytest.fixture(autouse=True)
def shown(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the runners have in their environment."""
    for name, value in {"NOTES": str(notes.path), "SECRET": SECRET, "KEY": "open-sesame"}.items():
        monkeypatch.setenv(name, value)


# --- through the whole house ------------------------------------------------------------------------------------------


async def test_a_message_over_http_is_answered_with_what_servers_say(
    spawn: Spawn, tmp_path: Path, folder: Path, web: Web, notes: Notes
) -> None:
    await web.start()
    write(folder, "helper", srv=process(), web=web.server(tools=["add"]), gone=broken("ended"))
    data = tmp_path / "data"
    dev = spawn("dev", "--port", "0", "--nats-port", "0", data_dir=data, agents_dir=folder)
    await dev.until_logged("Turnstream is up", timeout=60)
    addresses = await eventually(lambda: read_addresses(data))
    assert addresses

    async with httpx.AsyncClient(base_url=addresses.http, timeout=60, trust_env=False) as http:

        async def say(session: str, text: str) -> dict[str, Any]:
            body: dict[str, Any] = {"id": session, "agent": "helper"}
            assert (await http.post("/v1/sessions", json=body)).status_code == 201
            body = {"content": text}
            return (await http.post(f"/v1/sessions/{session}/messages?wait=30", json=body)).json()

        ended = await say("s1", '[tool srv__add {"a":1,"b":2}][tool web__add {"a":3,"b":4}][tool gone__x {}]')
        assert ended["status"] == "completed", json.dumps(ended)
        outputs = [item async for item in results(http, "s1")]
        assert sorted(item["output"] for item in outputs if item["status"] == "ok") == ["3", "7"]
        (failed,) = [item["error"] for item in outputs if item["status"] == "error"]
        assert failed == "the tools of MCP server gone cannot be had now: it ended with status 7"
        ended = await say("s2", '[tool srv__leak {}][tool srv__tell {}][tool srv__complain {"lines": 3}]')
        assert "***" in json.dumps([item async for item in results(http, "s2")])
        everything = (await http.get("/v1/sessions/s2/events")).text
        assert "srv__leak" in everything and SECRET not in everything
        acted = await http.post("/v1/sessions/s1/actions/web__add?wait=30", json={"arguments": {"a": 5, "b": 5}})
        assert acted.json()["outcome"]["output"] == "10", acted.text
    assert await dev.stop() == 0
    assert SECRET not in dev.log
    assert not any(map(is_there, notes.pids[1:])), "all that the runner started have ended with it"


async def test_the_readmes_server_is_one(spawn: Spawn, tmp_path: Path, folder: Path) -> None:
    section = README.read_text().partition("## MCP servers")[2].partition("## Policies")[0]
    for kind, path in (("python", tmp_path / "clock.py"), ("toml", folder / "timekeeper.toml")):
        (text,) = re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)
        path.write_text(text)
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    data = tmp_path / "data"
    dev = spawn("dev", "--port", "0", "--nats-port", "0", data_dir=data, agents_dir=folder)
    await dev.until_logged("Turnstream is up", timeout=60)
    (command,) = re.findall(r"^turnstream (.*)$", section, re.MULTILINE)
    sent = spawn(*shlex.split(command), data_dir=data)
    assert await sent.ended(timeout=60) == 0, sent.log
    assert re.search(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", sent.log), sent.log


async def results(http: httpx.AsyncClient, session: str) -> AsyncIterator[dict[str, Any]]:
    answer = await http.get(f"/v1/sessions/{session}/events")
    for event in answer.json()["events"]:
        if event["type"] == "tool.returned":
            yield {"output": "", "error": "", **event["data"]}


# --- runners that end -------------------------------------------------------------------------------------------------


@pytest.fixture
def start(own_nats: NatsServer, spawn: Spawn, folder: Path, client: Client) -> Callable[..., Process]:
    """Starts a runner whose agents are those of the folder."""

    def begin(**said: object) -> Process:
        client.know(agents.load(folder=folder))
        return spawn("runner", nats_url=own_nats.url, lease=1.0, agents_dir=folder, **said)

    return begin


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_runner_killed_in_a_call_leaves_no_process_and_the_call_is_repeated_only_if_it_may_be(
    client: Client, start: Callable[..., Process], folder: Path, notes: Notes, idempotent: bool
) -> None:
    write(folder, "helper", srv=process(idempotent=["slow"] if idempotent else []))
    first = start()
    await first.until_logged("ready")
    await client.post('[tool srv__breed {}][then][tool srv__slow {"seconds": 2, "name": "x"}]', agent="helper")
    await notes.until("begun x", timeout=40)
    (returned,) = await found(client)
    started = json.loads(returned.output)
    assert is_there(started["server"]) and is_there(started["child"])
    first.kill()
    await eventually(lambda: not is_there(started["server"]) and not is_there(started["child"]), 10)
    await start().until_logged("ready")
    assert (await client.end(timeout=60)).status == "completed"
    last = (await found(client))[-1]
    assert last.status == ("ok" if idempotent else "uncertain")
    assert notes.count("begun x") == 1 + idempotent


async def test_a_server_that_hears_nothing_does_not_outlive_its_runner(
    client: Client, start: Callable[..., Process], folder: Path, notes: Notes
) -> None:
    """It ignores that its input ends and that it is told to go."""
    write(folder, "helper", srv=broken("deaf"))
    for ends in ("kill", "stop"):
        runner = start(drain_grace=0.5)
        await runner.until_logged("ready")
        await client.post("echo hi", ends, agent="helper")
        pids = await eventually(lambda: [pid for pid in notes.pids if is_there(pid)], 30)
        if ends == "kill":
            runner.kill()
        else:
            assert await runner.stop() == 0
        await eventually(lambda pids=pids: not any(map(is_there, pids)), 10, what="the server is gone")


async def test_a_runner_that_is_told_to_stop_lets_a_call_end(
    client: Client, start: Callable[..., Process], folder: Path, notes: Notes
) -> None:
    write(folder, "helper", srv=process())
    runner = start(drain_grace=10)
    await runner.until_logged("ready")
    await client.post('[tool srv__slow {"seconds": 2, "name": "x"}]', agent="helper")
    await notes.until("begun x", timeout=40)
    assert await runner.stop() == 0
    (returned,) = await found(client)
    assert (returned.status, returned.output) == ("ok", "waited for 2 s")
    assert not any(map(is_there, notes.pids))


async def found(client: Client) -> list[ToolReturned]:
    return [fact for fact in await client.facts() if isinstance(fact, ToolReturned)]
