"""Every command of the README's "Use it" works as it is written there, in its order, and ends as its comment says."""

import asyncio
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
from tests.support.processes import Spawn
from tests.support.waiting import eventually

from turnstream_cli.main import main
from turnstream_cli.place import read_addresses

pytestmark = pytest.mark.system

README = Path(__file__).parents[2] / "README.md"
ENDLESS = "until Ctrl-C"
PROMISES = {"waits": 5, "fails": 1}
"""Exit codes by the first word of the comment behind a command."""


USE, SAVED = ("## Use it", "**Agents**"), ("**Saved agents.**", "## MCP servers")
GRAPHS = ("**Graphs.**", "**Models.**")
"""Parts of the README: where each begins, and where the next one does."""


def commands(part: tuple[str, str]) -> Iterator[tuple[str, int]]:
    """Commands of `turnstream` and `curl`, and the exit code that the comment behind them promises."""
    text = README.read_text().partition(part[0])[2].partition(part[1])[0]
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            written, _, comment = line.partition("  #")
            if ENDLESS in comment:
                continue
            promised = next((code for word, code in PROMISES.items() if comment.strip().startswith(word)), 0)
            lexer = shlex.shlex(written, posix=True, punctuation_chars=";")
            lexer.whitespace_split = True
            command: list[str] = []
            for word in (*lexer, ";"):
                if word != ";":
                    command.append(word)
                elif command:
                    if command[0] in ("turnstream", "curl"):
                        yield shlex.join(command), promised
                    command = []


async def test_the_readmes_commands_do_what_it_says(spawn: Spawn, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    dev = spawn("dev", "--port", "0", "--nats-port", "0", data_dir=folder)
    await dev.until_logged("Turnstream is up", timeout=60)
    addresses = await eventually(lambda: read_addresses(folder))
    assert addresses
    found = [*commands(USE), *commands(GRAPHS)]
    named = {shlex.split(command)[1] for command, _ in found if command.startswith("turnstream")}
    assert {"open", "send", "stop", "retry", "queue", "requests", "answer", "approve", "deny", "delete"} <= named
    assert len(found) > 30
    await _perform(found, folder, addresses.http)


async def test_the_readmes_commands_for_saved_agents_do_what_it_says(
    spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    dev = spawn("dev", "--port", "0", "--nats-port", "0", data_dir=folder)
    await dev.until_logged("Turnstream is up", timeout=60)
    addresses = await eventually(lambda: read_addresses(folder))
    assert addresses
    (poet,) = re.findall(r"```toml\n(# agents/poet\.toml\n.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "poet.toml").write_text(poet)
    monkeypatch.chdir(tmp_path)
    found = list(commands(SAVED))
    assert len([command for command, _ in found if command.startswith("turnstream agents save")]) == 2
    await _perform(found, folder, addresses.http)
    runs = [json.loads(line) for line in (await _perform([("turnstream runs --json", 0)], folder, addresses.http))]
    assert [run["version"] for run in runs] == ["v2", "v1", "v1"]


async def _perform(found: list[tuple[str, int]], folder: Path, http: str) -> list[str]:
    """The lines that the last of the commands has printed."""
    said = ""
    with patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("TURNSTREAM_")]:
            del os.environ[name]
        os.environ |= {"TURNSTREAM_DATA_DIR": str(folder), "TURNSTREAM_LOG_LEVEL": "error"}
        for command, promised in found:
            program, *arguments = shlex.split(command.replace("localhost:8080", http))
            code, said = await (_curl(arguments) if program == "curl" else _turnstream(arguments))
            assert code == promised, (command, code, said)
    return said.splitlines()


async def test_the_readmes_program_says_something_and_reads_what_became_of_it(spawn: Spawn, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    dev = spawn("dev", "--port", "0", "--nats-port", "0", data_dir=folder)
    await dev.until_logged("Turnstream is up", timeout=60)
    addresses = await eventually(lambda: read_addresses(folder))
    assert addresses
    (program,) = re.findall(r"```python\n(# say\.py.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "say.py").write_text(program.replace("nats://127.0.0.1:4222", addresses.nats))

    async def said() -> bool:
        process = await asyncio.create_subprocess_exec(
            sys.executable, tmp_path / "say.py", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        out, _ = await process.communicate()
        return "message.posted" in out.decode() and not process.returncode

    await eventually(said, timeout=30, what="the program reading what it said")


async def _turnstream(arguments: list[str]) -> tuple[int, str]:
    said = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with redirect_stdout(said), redirect_stderr(said):
        code = await asyncio.to_thread(main, arguments)
        said.flush()
    return code, said.buffer.getvalue().decode()  # pyright: ignore[reportAttributeAccessIssue]


async def _curl(arguments: list[str]) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        "curl", "--silent", "--fail-with-body", *arguments, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()
