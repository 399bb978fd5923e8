"""The demo, as a stranger without a terminal runs it: it keeps every promise, says how to do the same, and exits 0."""

import os
import re
import socket
from pathlib import Path

import pytest
from tests.support.processes import Spawn

from turnstream_cli.place import read_addresses

pytestmark = pytest.mark.system


async def test_the_demo_keeps_every_promise(spawn: Spawn, tmp_path: Path) -> None:
    # The embedded default, whatever the environment says.
    elsewhere = {"nats_url": "nats://127.0.0.1:9", "database_url": "postgresql://127.0.0.1:9/none", "lease": 60}
    elsewhere |= {"agents_dir": tmp_path / "none", "modules": "not_there"}
    (tmp_path / "turnstream.toml").write_text('[policy]\nstarters = ["user:nobody"]\n')
    demo = spawn("demo", policy__preset="memory", policy__on_busy="reject", **elsewhere)
    assert await demo.ended(timeout=120) == 0, demo.log

    assert "✗" not in demo.log
    assert demo.log.count("✓") == 20
    for shown in (
        "nats pub ts.inbox.default.tour-",
        "curl http://127.0.0.1:",
        "kill -9 ",
        "turnstream runs cancel tour-",
        "turnstream answer tour-",
    ):
        assert shown in demo.log
    (data,) = [line.split(maxsplit=1)[1] for line in demo.log.splitlines() if line.startswith("  data ")]
    assert not os.path.exists(data)  # noqa: ASYNC240


async def test_a_port_that_the_demo_is_told_is_taken_or_refused(spawn: Spawn) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        by_option = spawn("demo", "--port", str(port))
        by_variable = spawn("demo", "--port", "0", nats_port=port)
        assert (await by_option.ended(timeout=30), await by_variable.ended(timeout=30)) == (2, 2)
    assert f"port {port} on 127.0.0.1, for the demo, is in use; choose another with --port" in by_option.log
    assert "choose another with --nats-port" in by_variable.log


async def test_a_demo_that_stays_says_what_its_commands_need(spawn: Spawn, tmp_path: Path) -> None:
    demo = spawn("demo", "--stay", "--port", "0", "--nats-port", "0")
    line = await demo.until_logged("export ", timeout=120)
    found = dict(re.findall(r"(TURNSTREAM_\w+)=(\S*)", line))
    given = {name.removeprefix("TURNSTREAM_").lower(): value for name, value in found.items()}
    (session,) = set(re.findall(r"tour-\w+", demo.log))
    example = ("send", "graph", "count how many words", "--agent", "triage")
    for command in (("fsck",), ("runs", "cancel", f"{session}.3"), example):
        done = spawn(*command, **given)
        assert await done.ended(timeout=30) == 0, done.log
    await spawn("runner", **given).until_logged("ready", timeout=30)
    assert await demo.stop() == 0


@pytest.mark.slow
async def test_a_demo_that_is_stopped_leaves_nothing_behind(spawn: Spawn, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    demo = spawn("demo", "--data-dir", str(folder))
    killed = (await demo.until_logged("$ kill -9", timeout=60)).rpartition(" ")[2]
    assert await demo.stop() == 130
    assert "the demo was interrupted" in demo.log
    assert read_addresses(folder) is None
    with pytest.raises(ProcessLookupError):
        os.kill(int(killed), 0)
