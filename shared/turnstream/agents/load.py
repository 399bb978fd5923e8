"""Where agents come from: a folder of TOML and JSON files, one agent a file, and Python modules.

A file that says no name is named by its file name. A module gives whatever agents and tools stand in it by a name. The
agent `default` is always there: with the model that the settings name and the built-in tools, unless somebody defines
another. Nothing is half loaded: every fault of every source is said at once.
"""

import importlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from turnstream.agents import builtin
from turnstream.agents.definition import Agent, AnyTool, Control, define, faults_of
from turnstream.agents.errors import AgentsError, Fault
from turnstream.agents.models import lookup
from turnstream.agents.tool import RESERVED, Tool
from turnstream.ids import DEFAULT_AGENT
from turnstream.settings import ModelSettings

FILE_MAX = 1 << 20
"""Bytes of one definition."""
FORMATS = (".toml", ".json")


class Agents:
    """Every agent and tool that one process knows. Iterates over the agents by name."""

    def __init__(self, agents: Mapping[str, Agent], tools: Mapping[str, AnyTool]) -> None:
        self._agents = dict(sorted(agents.items()))
        self.tools: Mapping[str, AnyTool] = dict(tools)

    def __iter__(self) -> Iterator[Agent]:
        return iter(self._agents.values())

    def __len__(self) -> int:
        return len(self._agents)

    def get(self, name: str, digest: str | None = None) -> Agent | None:
        """The agent of this name; with `digest`, only if it is the very one that a run has pinned."""
        agent = self._agents.get(name)
        return agent if agent is None or digest is None or agent.digest == digest else None


def load(
    *,
    folder: Path | None = None,
    modules: Sequence[str] = (),
    models: Mapping[str, ModelSettings] | None = None,
    default_model: str = "demo",
) -> Agents:
    """Everything that these sources define; `models` are the logical model names. Raises `AgentsError`."""
    found = _Found()
    for name in modules:
        found.take_module(name)
    if folder is not None:
        found.take_folder(folder)
    found.add_default(default_model)
    found.check(models or {})
    if found.faults:
        raise AgentsError(found.faults)
    return Agents(found.agents, found.tools)


class _Found:
    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.tools: dict[str, AnyTool] = {}
        self.faults: list[Fault] = []
        self._source: dict[str, str] = {}
        self._tool_source: dict[str, str] = {}

    def take_module(self, name: str) -> None:
        where = f"module {name}"
        try:
            module = importlib.import_module(name)
        except AgentsError as error:
            self.faults += error.faults
        except ValidationError as error:
            self.faults += faults_of(f"{where}: {error.title}", error)
        except (Exception, SystemExit) as error:
            self.faults.append(Fault(where, "", f"cannot be imported: {type(error).__name__}: {error}"))
        else:
            for value in cast(dict[str, object], vars(module)).values():
                if isinstance(value, Agent):
                    self._add_agent(where, value)
                elif isinstance(value, Tool):
                    self._add_tool(where, cast(AnyTool, value))

    def take_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            self.faults.append(Fault(str(folder), "", "no such folder"))
            return
        for file in sorted(folder.iterdir()):
            if file.suffix in FORMATS and file.is_file() and not file.name.startswith("."):
                self._take_file(file)

    def _take_file(self, file: Path) -> None:
        try:
            self._add_agent(file.name, define(file.name, {"name": file.stem, **_parse(file)}))
        except AgentsError as error:
            self.faults += error.faults

    def _add_agent(self, where: str, agent: Agent) -> None:
        for tool in agent.own_tools:
            self._add_tool(f"{where}: agent {agent.name}", tool)
        known = self.agents.setdefault(agent.name, agent)
        source = self._source.setdefault(agent.name, where)
        if known is not agent:
            self.faults.append(Fault(where, "name", f"agent {agent.name!r} is defined in {source} already"))

    def _add_tool(self, where: str, tool: AnyTool) -> None:
        known = self.tools.setdefault(tool.name, tool)
        source = self._tool_source.setdefault(tool.name, where)
        if known is not tool:
            self.faults.append(Fault(where, "", f"tool {tool.name!r} is defined in {source} already"))

    def add_default(self, model: str) -> None:
        """The built-in tools give way to tools of the same name, as the built-in agent gives way to another."""
        self.tools = {tool.name: tool for tool in builtin.TOOLS} | self.tools
        names = [tool.name for tool in builtin.TOOLS]
        default = Agent(
            name=DEFAULT_AGENT,
            description="Answers where no agent is named.",
            model=model,
            tools=names,
            control=Control(ask_user=True, delegate=True, plan=True),
        )
        self.agents.setdefault(DEFAULT_AGENT, default)
        self._source.setdefault(DEFAULT_AGENT, "settings")

    def check(self, models: Mapping[str, ModelSettings]) -> None:
        """What only holds between definitions: that each tool and model is there."""
        for name, agent in self.agents.items():
            where = self._source[name]
            try:
                lookup(agent.model, models)
            except LookupError as error:
                self.faults.append(Fault(where, "model", str(error)))
            model = models.get(agent.model)
            if agent.limits.max_cost is not None and not (model and model.has_prices):
                what = f"model {agent.model!r} has no prices: they are settings of a logical model"
                self.faults.append(Fault(where, "limits.max_cost", what))
            for i, tool in enumerate(agent.tool_names):
                if tool in RESERVED:
                    what = f"{tool!r} is not named here; say `control = {{{RESERVED[tool][0]} = true}}`"
                    self.faults.append(Fault(where, f"tools.{i}", what))
                elif tool not in self.tools:
                    known = ", ".join(sorted(self.tools))
                    self.faults.append(Fault(where, f"tools.{i}", f"unknown tool {tool!r}; known: {known}"))


def _parse(file: Path) -> Mapping[str, object]:
    try:
        with file.open("rb") as source:
            data = source.read(FILE_MAX + 1)
        if len(data) > FILE_MAX:
            raise ValueError(f"larger than {FILE_MAX} bytes")
        text = data.decode()
        parsed: object = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise AgentsError([Fault(file.name, "", f"cannot be read: {error}")]) from None
    if not isinstance(parsed, dict):
        raise AgentsError([Fault(file.name, "", "is not an object")])
    return cast(dict[str, object], parsed)
