"""The README speaks of what is there."""

import re
import tomllib
from pathlib import Path

from turnstream.agents import PARAMS, Params, load
from turnstream.agents.definition import Agent, Limits, define
from turnstream.agents.examples import EXAMPLES
from turnstream.agents.nodes import TYPES
from turnstream.session.policy import parse_policy
from turnstream.settings import ModelSettings
from turnstream_cli.main import build

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SUBS = ("agents", "runs", "keys")
"""Commands that have others below them."""


def test_every_test_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", README))
    defined = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert named
    assert not named - defined


def test_every_command_and_target_that_the_readme_names_exists() -> None:
    commands = set(re.findall(r"\bturnstream ([a-z]+)", README))
    assert {"send", "dev", "fsck"} <= commands
    app = build()
    assert not {command for command in commands if command not in app}
    targets = set(re.findall(r"\bmake ([a-z-]+)", README)) - {"help"}
    makefile = (ROOT / "Makefile").read_text()
    assert not {target for target in targets if f"\n{target}:" not in makefile}


def test_the_readme_names_every_command() -> None:
    (table,) = re.findall(r"\| to \| commands \|\n((?:\|.*\n)+)", README)
    named = set(re.findall(r"`([a-z ]+)`", table))
    app = build()
    everything: set[str] = set()
    for name in app.resolved_commands():
        below = (
            {sub for sub in app[name].resolved_commands() if not sub.startswith("-")} - {"list"} if name in SUBS else ()
        )
        everything |= {f"{name} {sub}" for sub in below} | ({name} if name != "keys" else {"keys list"})
    assert named == {name for name in everything if not name.startswith("-")}


def test_the_whole_agent_of_the_readme_is_one_and_leaves_nothing_out() -> None:
    (text,) = re.findall(r"```toml\n(# agents/clerk\.toml\n.*?)```", README, re.DOTALL)
    said = tomllib.loads(text.replace("# max_cost", "max_cost"))
    assert said.keys() == Agent.model_fields.keys() - {"graph"}, "which has a part of its own"
    assert said["limits"].keys() == Limits.model_fields.keys()
    agent = define("README.md", said)
    assert agent.control.ask_user and agent.approval == {"add": "always"}
    assert parse_policy(dict(agent.policy)).preset == "thread"


def test_the_models_of_the_readme_are_some() -> None:
    (text,) = re.findall(r"```toml\n(# turnstream\.toml\n.*?)```", README, re.DOTALL)
    models = {name: ModelSettings(**said) for name, said in tomllib.loads(text)["models"].items()}
    assert {name: model.wire for name, model in models.items()} == {
        "local": "chat",
        "careful": "chat",
        "clever": "anthropic",
    }


def test_the_readme_says_what_a_model_can_be_told_through_which_api() -> None:
    (table,) = re.findall(r"<!-- params -->\n\|.*\n\|.*\n((?:\|.*\n)+)", README)
    rows = [line.split("|") for line in table.splitlines()]
    said = {row[1].strip("` "): [cell.strip() for cell in row[2:-1]] for row in rows}
    wires = ("responses", "chat", "anthropic", "demo")
    assert said == {name: ["yes" if name in PARAMS[wire] else "–" for wire in wires] for name in Params.model_fields}


def test_every_path_that_the_readme_names_exists() -> None:
    for path in re.findall(r"`((?:deploy|shared|services|tests)/[\w/.-]*)`", README):
        assert (ROOT / path).exists(), path


def test_the_graph_of_the_readme_is_one_and_every_node_is_told_of() -> None:
    (text,) = re.findall(r"```toml\n(# agents/triage\.toml\n.*?)```", README, re.DOTALL)
    agent = define("README.md", {"name": "triage", **tomllib.loads(text)})
    assert agent.graph is not None
    (table,) = re.findall(r"\| node \| does \| may be left by \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", README)
    assert {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])} == TYPES.keys()


def test_the_examples_are_agents() -> None:
    assert {agent.name for agent in load(folder=EXAMPLES)} == {"default", "chorus", "release", "triage"}
