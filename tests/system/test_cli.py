"""The command line against a running `turnstream dev`: what a person does, and what may go wrong.

Services are processes of their own; client commands run in a thread of the test, for a process costs a second.
"""

import asyncio
import io
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import nats
import pytest
import structlog
from nats.aio.msg import Msg
from tests.support.processes import Process, Spawn
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.ids import SessionKey
from turnstream_cli.main import main
from turnstream_cli.place import Addresses, read_addresses

pytestmark = pytest.mark.system


PORT = ("--port", "0")


class Answer(NamedTuple):
    code: int
    out: str
    err: str


class Home:
    """A data directory, the `dev` on it, and commands that find it there."""

    def __init__(self, folder: Path, spawn: Spawn) -> None:
        self.folder = folder
        self.spawn = spawn

    async def dev(self, *arguments: str) -> Process:
        process = self.spawn("dev", "--nats-port", "0", *(arguments or PORT), data_dir=self.folder)
        await process.until_logged("Turnstream is up", timeout=60)
        await eventually(lambda: read_addresses(self.folder))
        return process

    @property
    def addresses(self) -> Addresses:
        addresses = read_addresses(self.folder)
        assert addresses
        return addresses

    async def run(self, *arguments: str, expect: int = 0, **variables: str) -> Answer:
        """Runs one command to its end, as `turnstream` would, and checks its exit code."""
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
        environment = {"TURNSTREAM_DATA_DIR": str(self.folder), "TURNSTREAM_LOG_LEVEL": "error"} | variables
        with patch.dict(os.environ, environment), redirect_stdout(out), redirect_stderr(err):
            code = await asyncio.to_thread(main, list(arguments))
        answer = Answer(code, *(stream.buffer.getvalue().decode() for stream in (out, err) if not stream.flush()))
        assert answer.code == expect, answer
        return answer


@pytest.fixture
def home(tmp_path: Path, spawn: Spawn) -> Iterator[Home]:
    with patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("TURNSTREAM_")]:
            del os.environ[name]
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        yield Home(tmp_path / "data", spawn)
        root.handlers, root.level = handlers, level
        structlog.reset_defaults()


async def test_in_one_process_a_turn_reads_nothing_of_what_another_part_has_stored(home: Home) -> None:
    await home.dev()
    broker = await nats.connect(home.addresses.nats)
    asked: list[str] = []
    ended = asyncio.Queue[str]()

    async def hear(message: Msg) -> None:
        if message.headers and message.headers.get("ts-type") == "run.ended":
            ended.put_nowait(message.headers["Nats-Sequence"])

    async def ask(message: Msg) -> None:
        asked.append(message.subject)

    await broker.subscribe("ts.feed.default.s1", cb=hear)
    await broker.subscribe("$JS.API.DIRECT.GET.SESSIONS", cb=ask)
    await broker.subscribe("$JS.API.STREAM.MSG.GET.SESSIONS", cb=ask)
    await home.run("send", "s1", "one", "--no-wait")
    await asyncio.wait_for(ended.get(), 30)
    await broker.flush()
    assert asked, "whether the session is there"
    for n in range(20):  # a turn that takes longer than a moment, on a busy machine, is followed by its runner
        asked.clear()
        await home.run("send", "s1", f"and {n}", "--no-wait")
        await asyncio.wait_for(ended.get(), 30)
        await broker.flush()
        if not asked:
            break
    assert asked == [], "in every turn"
    await broker.close()


async def test_a_conversation_from_the_command_line(home: Home) -> None:
    dev = await home.dev(*PORT, "--sync-interval", "always")
    assert "sync_interval: always" in dev.log

    said = await home.run("send", "s1", '[tool add {"a":1,"b":2}] [then] [say It is three.]')
    assert "◆ It is three." in said.out
    failed = json.loads((await home.run("send", "s1", "[fail]", "--json", expect=1)).out)
    assert (failed["run"], failed["outcome"]["status"], failed["outcome"]["error"]["code"]) == (
        "s1.2",
        "failed",
        "model_error",
    )
    tail = [json.loads(line) for line in (await home.run("tail", "s1.1", "--json")).out.splitlines()]
    assert [event["type"] for event in tail] == [
        "message.posted",
        "run.started",
        "model.replied",
        "tool.returned",
        "run.ended",
    ]

    await home.run("send", "s1", "[hang]", "--no-wait")
    refused = await home.run("send", "s1", "again", expect=4)
    assert "run_active, run: s1.3" in refused.err and "`on_busy` (queue, steer" in refused.err
    await home.run("runs", "cancel", "s1.3", "--reason", "enough")
    await home.run("tail", "s1.3", expect=1)
    assert "had ended before" in (await home.run("runs", "cancel", "s1.3")).out

    runs = [json.loads(line) for line in (await home.run("runs", "--session", "s1", "--json")).out.splitlines()]
    assert [(run["id"], run["status"]) for run in runs] == [
        ("s1.3", "cancelled"),
        ("s1.2", "failed"),
        ("s1.1", "completed"),
    ]
    assert "add" in (await home.run("steps", "s1.1")).out
    assert json.loads((await home.run("sessions", "s1", "--json")).out)["status"] == "idle"
    assert json.loads((await home.run("ops", "--json")).out)["views"]["behind"] == 0
    assert "generation 2" in (await home.run("rebuild")).out
    assert "s1.1" in (await home.run("runs")).out
    assert "0 faults" in (await home.run("fsck")).out
    await _plant(home, "s9")
    finding = json.loads((await home.run("fsck", "--json", expect=1)).out)
    assert finding["kind"] == "unreadable"
    for unknown in (("tail", "nope"), ("tail", "s1.9"), ("runs", "show", "s1.9"), ("sessions", "nope")):
        missing = await home.run(*unknown, expect=4)
        assert missing.err.count("\n") == 1
        assert "not_found" in missing.err


async def test_a_person_answers_from_the_command_line(home: Home) -> None:
    await home.dev()
    question = '{"question": "How many?", "schema": {"type": "integer"}}'
    asked = await home.run(
        "send", "s1", f'[tool conversation_ask_user {question}] [tool ask_first {{"text":"x"}}]', expect=5
    )
    assert "? s1.1.q1 How many?" in asked.out and "turnstream answer s1.1.q1" in asked.out
    assert "turnstream approve s1.1.q2" in asked.out
    listed = [json.loads(line) for line in (await home.run("requests", "--json")).out.splitlines()]
    assert {(one["id"], one["kind"]) for one in listed} == {("s1.1.q1", "question"), ("s1.1.q2", "approval")}
    assert json.loads((await home.run("sessions", "s1", "--json")).out)["status"] == "waiting"
    for arguments, complaint in (
        (("answer", "s1.1", "7"), "request: several are open"),
        (("answer", "s1.1.q1", "many"), "field: answer"),
        (("approve", "s1.1.q1"), "use `turnstream answer s1.1.q1 …`"),
        (("answer", "s1.1.q2", "yes"), "use `turnstream approve s1.1.q2` or `turnstream deny s1.1.q2`"),
        (("answer", "s1.1.q3", "7"), "not_found"),
    ):
        refused = await home.run(*arguments, expect=4)
        assert complaint in refused.err and refused.err.count("\n") == 1
    assert "no request's id" in (await home.run("answer", "s1", "7", expect=2)).err
    still = json.loads((await home.run("answer", "s1.1.q1", "7", "--json", expect=5)).out)
    assert [one["request"] for one in still["requests"]] == ["s1.1.q2"] and still["status"] == "waiting"
    done = await home.run("deny", "s1.1.q2", "--reason", "rather not")
    assert "rather not" in done.out and "run 1 completed" in done.out
    again = await home.run("answer", "s1.1.q1", "7", "--no-wait")
    assert "is answered" in again.out
    other = await home.run("answer", "s1.1.q1", "8", expect=4)
    assert "already_answered" in other.err
    assert "nothing waits" in (await home.run("requests")).out
    assert "answered" in (await home.run("requests", "--state", "any", "--session", "s1")).out
    assert "? question" in (await home.run("steps", "s1.1")).out


async def test_stopping_and_trying_again_from_the_command_line(home: Home) -> None:
    await home.dev()
    await home.run("send", "s1", "[hang]", "--no-wait")
    steers = await home.run("send", "s1", "and this", "--on-busy", "steer", "--no-wait")
    assert steers.out.startswith("steers s1.1 (#")
    queued = await home.run("send", "s1", "echo then", "--on-busy", "queue", "--no-wait")
    assert queued.out.startswith("queued as s1.2, behind s1.1 (#")
    assert (await home.run("stop", "s1", "--reason", "enough")).out == "stopped: s1.2, s1.1\n"
    assert (await home.run("stop", "s1")).out == "stopped: nothing was live\n"
    await home.run("tail", "s1.1", expect=1)
    refused = await home.run("retry", "s1", expect=4)
    assert "nothing_to_retry" in refused.err
    await home.run("send", "s1", "[fail]", expect=1)
    again = json.loads((await home.run("retry", "s1", "--json", expect=1)).out)
    assert (again["retry_of"], again["run"], again["outcome"]["error"]["code"]) == ("s1.3", "s1.4", "model_error")


async def test_a_session_is_played_with_from_the_command_line(home: Home) -> None:
    await home.dev()
    opened = await home.run("open", "s1", "--preset", "thread", "--title", "Tea")
    assert opened.out.startswith("session s1 is opened (#")
    assert "there already" in (await home.run("open", "s1")).out
    shown = json.loads((await home.run("sessions", "s1", "--json")).out)
    assert (shown["title"], shown["policy"]) == ("Tea", {"preset": "thread"})
    await home.run("send", "s1", "[hang]", "--author", "user:ann", "--no-wait")
    await home.run("send", "s1", "more of this", "--author", "user:ann", "--no-wait")
    other = await home.run("send", "s1", "of another", "--author", "user:bob", "--no-wait")
    assert other.out.startswith("queued as s1.2, behind s1.1 (#")
    queue = (await home.run("queue", "s1")).out
    assert "in front: s1.1" in queue and "steering for s1.1  user:ann: more of this" in queue
    waiting = json.loads((await home.run("queue", "s1", "--json")).out)["items"]
    assert [one["author"] for one in waiting] == ["user:ann", "user:bob"]
    for one in waiting:
        assert "is withdrawn" in (await home.run("withdraw", "s1", one["message"])).out
    first = json.loads((await home.run("history", "s1", "--json")).out.splitlines()[0])
    assert "not_queued" in (await home.run("withdraw", "s1", first["message_id"], expect=4)).err
    assert (await home.run("queue", "s1")).out == "in front: s1.1\nnothing waits\n"
    await home.run("stop", "s1")
    assert "run_active" not in (await home.run("send", "s1", '[tool add {"a":1,"b":2}] [then] [say Three.]')).out
    said = (await home.run("history", "s1")).out
    for line in ("▸ user:ann: [hang]  s1.1 #", "■ cancelled  s1.1 #", "⚙ → ok: 3  s1.3 #", "◆ Three.  s1.3 #"):
        assert line in said
    assert "more of this" not in said
    items = [json.loads(line)["type"] for line in (await home.run("history", "s1", "--json")).out.splitlines()]
    assert items[-4:] == ["message", "reply", "tool_result", "reply"]


async def test_what_is_said_may_begin_with_a_hyphen_or_come_from_standard_input(home: Home) -> None:
    await home.dev()
    assert "“-5 degrees”" in (await home.run("send", "s1", "-5 degrees")).out
    with patch("sys.stdin", io.StringIO("from a pipe")):
        assert "“from a pipe”" in (await home.run("send", "s1", "-")).out
    await home.run("send", "s1", '[ask How cold? {"schema": {"type": "integer"}}]', expect=5)
    assert "s1.3.q1 answered: -5" in (await home.run("answer", "s1.3.q1", "-5")).out


async def test_ops_fits_a_terminal(home: Home) -> None:
    await home.dev()
    await home.run("send", "s1", "[hang]", "--no-wait")
    await eventually(lambda: _says(home, "1 running", "ops"), what="the run being shown")
    assert all(len(line) <= 80 for line in (await home.run("ops")).out.splitlines())


async def _says(home: Home, what: str, *arguments: str) -> bool:
    return what in (await home.run(*arguments)).out


async def _plant(home: Home, session: str) -> None:
    """Puts something onto the session's subject that is no event."""
    nc = await nats.connect(home.addresses.nats)
    await nc.request(subjects.session(SessionKey("default", session)), b"rubbish")
    await nc.close()


async def test_keys_shut_the_door_and_open_it(home: Home) -> None:
    await home.dev()
    await home.run("send", "s1", "echo hi")
    secret = (await home.run("keys", "add", "default", "--label", "mine")).out.strip()
    await eventually(lambda: _refused(home), what="asking without a key being refused")
    assert "s1" in (await home.run("sessions", "--key", secret)).out
    other = (await home.run("keys", "add", "other")).out.strip()
    assert "no sessions" in (await home.run("sessions", TURNSTREAM_API_KEY=other)).out
    (mine,) = [
        key
        for key in map(json.loads, (await home.run("keys", "list", "--json")).out.splitlines())
        if key["label"] == "mine"
    ]
    assert secret not in json.dumps(mine)
    assert "there is no key nope" in (await home.run("keys", "revoke", "nope", expect=4)).err
    assert (await home.run("keys", "revoke", mine["id"])).out == f"revoked {mine['id']} of default\n"
    await eventually(lambda: _refused(home, "--key", secret), what="a revoked key being refused")
    await home.run("keys", "revoke", "default", mine["id"])  # is revoked, and stays so
    assert "no key" in (await home.run("keys", "revoke", "other", mine["id"], expect=4)).err


async def _refused(home: Home, *more: str) -> bool:
    try:
        await home.run("sessions", *more, expect=4)
    except AssertionError:
        return False
    return True


async def test_dev_is_alone_on_its_data_comes_back_after_kill_9_and_stops_in_order(home: Home) -> None:
    dev = await home.dev()
    http = home.addresses.http
    second = home.spawn("dev", "--port", "0", "--nats-port", "0", data_dir=home.folder)
    assert await second.ended() == 2
    assert second.log == (
        f"turnstream: the data directory {home.folder} is in use by process {dev.pid} at {http}; "
        "stop it, or choose another with TURNSTREAM_DATA_DIR\n"
    )
    await home.run("send", "s1", "echo before")
    tail = home.spawn("tail", "s1", url=http)
    await tail.until_logged("before")

    dev.kill()
    nobody = {"TURNSTREAM_HTTP_PORT": "1"}  # where no other Turnstream of this machine listens
    away = await home.run("sessions", expect=3, **nobody)
    assert f"(process {dev.pid} at {http}) has ended without stopping" in away.err
    assert tail.running

    again = await home.dev("--port", http.rpartition(":")[2])
    await home.run("send", "s1", "echo after")
    await tail.until_logged("after")
    assert tail.log.count("echo before") == 1
    runs = (await home.run("runs", "--json")).out.splitlines()
    assert [json.loads(run)["status"] for run in runs] == ["completed", "completed"]
    assert await again.stop() == 0
    assert read_addresses(home.folder) is None
    assert tail.running


async def test_a_port_in_use_is_refused_by_name(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        http = home.spawn("dev", "--port", port, "--nats-port", "0", data_dir=home.folder / "1")
        nats = home.spawn("dev", "--port", "0", "--nats-port", port, data_dir=home.folder / "2")
        assert (await http.ended(), await nats.ended()) == (2, 2)
    assert http.log == f"turnstream: port {port} on 127.0.0.1, for the API, is in use; choose another with --port\n"
    assert f"port {port} on 127.0.0.1, for the embedded NATS server, is in use" in nats.log


async def test_wrong_use_is_one_clear_line(home: Home) -> None:
    for arguments, code, complaint in (
        (("api",), 2, "TURNSTREAM_NATS_URL"),
        (("sessions", "--url", "localhost:8080"), 2, "must start with http"),
        (("runs", "show", "s1"), 2, "no run's id"),
        (("tail", "a/../b"), 2, "no session's id"),
        (("fsck",), 2, "no Turnstream's data in"),
        (("keys", "add", "default"), 2, "no Turnstream's data in"),
    ):
        answer = await home.run(*arguments, expect=code)
        assert complaint in answer.err
        assert answer.err.count("\n") == 1
    setting = await home.run("config", expect=2, TURNSTREAM_HTTP_PORT="many")
    assert setting.err.startswith("turnstream: http_port: ")
    rows = [json.loads(line) for line in (await home.run("config", "--json", TURNSTREAM_LEASE="7")).out.splitlines()]
    assert [row["origin"] for row in rows if row["name"] == "lease"] == ["$TURNSTREAM_LEASE"]
    away = await home.run("sessions", expect=3, TURNSTREAM_HTTP_PORT="1")
    assert "no Turnstream answers at http://127.0.0.1:1: " in away.err
    assert not home.folder.exists()


async def test_the_reader_of_the_output_may_leave(home: Home) -> None:
    command = f"set -o pipefail; {sys.executable} -m turnstream_cli.main config --json | head -1"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert (process.returncode, json.loads(out)["name"], err) == (0, "data_dir", b"")


async def test_a_signal_ends_a_tail(home: Home) -> None:
    await home.dev()
    await home.run("send", "s1", "echo hi")
    tail = home.spawn("tail", "s1", url=home.addresses.http)
    await tail.until_logged("completed")
    os.kill(tail.pid, signal.SIGINT)
    assert await tail.ended() == 130
    assert "Traceback" not in tail.log
