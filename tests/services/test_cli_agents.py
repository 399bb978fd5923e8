"""`turnstream agents`: what it prints and how it ends."""

import asyncio
import io
import json
import os
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from tests.support.api import Running

from turnstream_cli.main import main

POET = 'model = "demo"\ninstructions = "Answer in verse."\ntools = ["add"]\n'
BAD = 'model = "nope"\nmood = "good"\ntools = ["bad"]\n[limits]\nmax_steps = 0\n[policy]\non_busy = "never"\n'
TEAM = {
    "graph": {
        "edges": ["question -> ask", "ask -> last"],
        "nodes": {
            "question": {"type": "input"},
            "ask": {"type": "agent", "agent": "poet"},
            "last": {"type": "output"},
        },
    }
}
FAULTS = {
    "limits.max_steps": "input should be greater than 0",
    "model": "unknown model 'nope'",
    "mood": "unknown field",
    "policy.on_busy": "must be one of reject",
    "tools.0": "unknown tool 'bad'",
}


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def environment(tmp_path: Path) -> Iterator[None]:
    """No settings but those of the test."""
    with patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("TURNSTREAM_")]:
            del os.environ[name]
        os.environ["TURNSTREAM_DATA_DIR"] = str(tmp_path / "data")
        yield


async def run(*arguments: str | Path) -> Answer:
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    with redirect_stdout(out), redirect_stderr(err):
        code = await asyncio.to_thread(main, ["agents", *map(str, arguments)])
    return Answer(code, *(stream.buffer.getvalue().decode() for stream in (out, err) if not stream.flush()))  # pyright: ignore


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)


# -- without a server -------------------------------------------------------------------------------------------------


async def test_check_says_every_fault_with_file_and_path(tmp_path: Path) -> None:
    write(tmp_path, poet_toml=POET, bad_toml=BAD, torn_json="{", list_json="[]", notes_txt="no agent")
    found = await run("check", tmp_path)
    assert found.code == 1
    assert found.lines[0] == "4 definitions, 7 faults"
    bad = [line.removeprefix(f"{tmp_path}/bad.toml: ") for line in found.lines if "bad.toml" in line]
    assert [line.partition(": ")[0] for line in bad] == list(FAULTS)
    assert all(FAULTS[path] in line for path, line in zip(FAULTS, bad, strict=True))
    assert any(line.startswith(f"{tmp_path}/torn.json: cannot be read") for line in found.lines)
    assert f"{tmp_path}/list.json: is not an object" in found.lines
    rows = [json.loads(line) for line in (await run("check", tmp_path / "bad.toml", "--json")).lines]
    assert [(row["where"], row["path"]) for row in rows] == [(f"{tmp_path}/bad.toml", path) for path in FAULTS]


@pytest.mark.parametrize(
    "rest",
    ['tools = ["add", "no name"]\napproval = {add = "always"}', 'mcp = {time = {}}\napproval = {time__now = "never"}'],
)
async def test_what_goes_with_a_field_that_is_wrong_hides_no_other_fault(tmp_path: Path, rest: str) -> None:
    write(tmp_path, bad_toml=f'model = "nope"\n{rest}')
    found = await run("check", tmp_path)
    assert found.lines[0] == "1 definition, 2 faults"
    assert any("bad.toml: model: unknown model 'nope'" in line for line in found.lines)


async def test_check_of_what_is_right_says_so(tmp_path: Path) -> None:
    write(tmp_path, poet_toml=POET)
    assert await run("check", tmp_path / "poet.toml") == (0, "1 definition, 0 faults\n", "")
    assert await run("check", tmp_path, "--json") == (0, "", "")


async def test_check_knows_the_agents_that_are_checked_together_and_those_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    write(tmp_path / "one", team_json=json.dumps(TEAM))
    write(tmp_path / "two", poet_toml=POET)
    alone = await run("check", tmp_path / "one")
    assert alone.code == 1 and "graph.nodes.ask.agent: unknown agent 'poet'" in alone.out
    assert (await run("check", tmp_path / "one", tmp_path / "two" / "poet.toml")).code == 0
    os.environ["TURNSTREAM_AGENTS_DIR"] = str(tmp_path / "two")
    assert (await run("check", tmp_path / "one")).code == 0
    write(tmp_path / "one", poet_toml=POET + 'description = "Another one."\n')
    twice = await run("check", tmp_path / "one", tmp_path / "two")
    assert f"{tmp_path}/two/poet.toml: name: agent 'poet' is defined in {tmp_path}/one/poet.toml already" in twice.out


async def test_what_is_not_there_is_a_wrong_argument(tmp_path: Path) -> None:
    for arguments in (("check", tmp_path / "none"), ("check",), ("show", "No"), ("delete", "poet@v1")):
        assert (await run(*arguments)).code == 2, arguments
    write(tmp_path, poet_toml=POET)
    assert (await run("save", tmp_path / "poet.toml", "--version", "v.1")).code == 2
    assert (await run("save", tmp_path / "none.toml")).code == 1
    assert (await run("list", "--url", "http://127.0.0.1:9")).code == 3


# -- with one ---------------------------------------------------------------------------------------------------------


async def test_an_agent_is_saved_once_shown_listed_and_deleted(api: Running, tmp_path: Path) -> None:
    write(tmp_path, poet_toml=POET)
    url = ("--url", api.url)
    first = await run("save", tmp_path / "poet.toml", *url)
    version = (await run("show", "poet", "--json", *url)).json["version"]
    assert first == (0, f"poet@{version} is saved\n", "") and len(version) == 12
    again = await run("save", tmp_path / "poet.toml", *url)
    assert again == (0, f"poet@{version} was there already, and says the same\n", "")
    write(tmp_path, poet_toml=POET + 'description = "Rhymes."\n')
    saved = (await run("save", tmp_path / "poet.toml", "--version", "v2", "--json", *url)).json
    assert (saved["name"], saved["version"], saved["created"]) == ("poet", "v2", True)

    listed = await run(*url)
    assert [line.split()[:3] for line in listed.lines[1:]] == [
        ["default", listed.lines[1].split()[1], "built-in"],
        ["poet", "v2", "saved"],
    ]
    rows = [json.loads(line) for line in (await run("list", "--json", "--limit", "1", *url)).lines]
    assert [row["name"] for row in rows] == ["default"]
    shown = await run("show", "poet", *url)
    assert "Answer in verse." in shown.out and "Rhymes." in shown.out and version in shown.out
    older = await run("show", f"poet@{version}", *url)
    assert "Answer in verse." in older.out and "Rhymes." not in older.out

    write(tmp_path, poet_toml=POET)
    conflict = await run("save", tmp_path / "poet.toml", "--version", "v2", *url)
    assert conflict.code == 4 and "version_conflict" in conflict.err
    assert await run("delete", "poet", *url) == (0, "deleted poet\n", "")
    assert (await run("show", "poet", *url)).code == 4
    assert (await run("delete", "nobody", *url)).code == 4


async def test_faults_are_told_whoever_finds_them(api: Running, tmp_path: Path) -> None:
    """The command finds what is wrong in a file itself, the server what it does not know."""
    write(tmp_path, bad_toml=BAD, team_json=json.dumps(TEAM))
    itself = await run("save", tmp_path / "bad.toml", "--url", api.url)
    assert itself.code == 1 and f"{tmp_path}/bad.toml: limits.max_steps: input should be greater than 0" in itself.lines
    served = await run("save", tmp_path / "team.json", "--url", api.url)
    assert served == (1, f"{tmp_path}/team.json: graph.nodes.ask.agent: unknown agent 'poet'\n", "")
    rows = (await run("save", tmp_path / "team.json", "--json", "--url", api.url)).json
    assert rows["path"] == "graph.nodes.ask.agent"
