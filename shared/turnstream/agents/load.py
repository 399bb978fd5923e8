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
from typing import Literal, cast

import msgspec
from pydantic import ValidationError

from turnstream.agents import builtin
from turnstream.agents.check import check
from turnstream.agents.definition import Agent, AnyTool, Control, define, faults_of
from turnstream.agents.errors import AgentsError, Fault
from turnstream.agents.tool import Tool
from turnstream.ids import DEFAULT_AGENT
from turnstream.settings import ModelSettings

FILE_MAX = 1 << 20
"""Bytes of one definition."""
FORMATS = (".toml", ".json")


class Source(msgspec.Struct, frozen=True):
    """Where an agent is defined: in a file of this name, in a module, or here (`built-in`)."""

    kind: Literal["file", "module", "built-in"]
    name: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "file":
                return self.name
            case "module":
                return f"module {self.name}"
            case "built-in":
                return "settings"


BUILT_IN = Source("built-in")


class Agents:
    """Every agent and tool that one process knows by itself. Iterates over the agents by name."""

    def __init__(
        self,
        agents: Mapping[str, Agent],
        tools: Mapping[str, AnyTool],
        sources: Mapping[str, Source] | None = None,
    ) -> None:
        self._agents = dict(sorted(agents.items()))
        self._sources = dict(sources or {})
        self.tools: Mapping[str, AnyTool] = dict(tools)

    def __iter__(self) -> Iterator[Agent]:
        return iter(self._agents.values())

    def __len__(self) -> int:
        return len(self._agents)

    def source(self, name: str) -> Source:
        """Where an agent of this name that is known is defined."""
        return self._sources.get(name, BUILT_IN)

    def get(self, name: str, digest: str | None = None) -> Agent | None:
        """The agent of this name; with `digest`, only if it is the very one that a run has pinned."""
        agent = self._agents.get(name)
        return agent if agent is None or digest is None or agent.digest == digest else None

    def __contains__(self, ref: object) -> bool:
        """Whether there is an agent as a graph names it, `name` or `name@version`."""
        name, _, version = str(ref).partition("@")
        agent = self._agents.get(name)
        return agent is not None and version in ("", agent.version)


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
    return Agents(found.agents, found.tools, found.sources)


class _Found:
    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.tools: dict[str, AnyTool] = {}
        self.faults: list[Fault] = []
        self.sources: dict[str, Source] = {}
        self._tool_source: dict[str, str] = {}

    def take_module(self, name: str) -> None:
        source = Source("module", name)
        where = str(source)
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
                    self._add_agent(source, value)
                elif isinstance(value, Tool):
                    self._add_tool(where, cast(AnyTool, value))

    def take_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            self.faults.append(Fault(str(folder), "", "no such folder"))
            return
        for file in files_in(folder):
            self._take_file(file)

    def _take_file(self, file: Path) -> None:
        try:
            self._add_agent(Source("file", file.name), define(file.name, read(file)))
        except AgentsError as error:
            self.faults += error.faults

    def _add_agent(self, source: Source, agent: Agent) -> None:
        where = str(source)
        for tool in agent.own_tools:
            self._add_tool(f"{where}: agent {agent.name}", tool)
        known = self.agents.setdefault(agent.name, agent)
        first = self.sources.setdefault(agent.name, source)
        if known is not agent:
            self.faults.append(Fault(where, "name", f"agent {agent.name!r} is defined in {first} already"))

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
        self.sources.setdefault(DEFAULT_AGENT, BUILT_IN)

    def check(self, models: Mapping[str, ModelSettings]) -> None:
        """What only holds between definitions."""
        agents = Agents(self.agents, self.tools)
        for name, agent in self.agents.items():
            self.faults += check(str(self.sources[name]), agent, self.tools, models, agents)


def files_in(folder: Path) -> list[Path]:
    """The files of a folder that define agents, by name."""
    return [
        file
        for file in sorted(folder.iterdir())
        if file.suffix in FORMATS and file.is_file() and not file.name.startswith(".")
    ]


def read(file: Path, where: str = "") -> dict[str, object]:
    """What a file says of an agent, who has the file's name if it says none. `where`: what faults call the file, if not
    by its name. Raises `AgentsError`."""
    where = where or file.name
    try:
        with file.open("rb") as source:
            data = source.read(FILE_MAX + 1)
        if len(data) > FILE_MAX:
            raise ValueError(f"larger than {FILE_MAX} bytes")
        text = data.decode()
        parsed: object = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise AgentsError([Fault(where, "", f"cannot be read: {error}")]) from None
    if not isinstance(parsed, dict):
        raise AgentsError([Fault(where, "", "is not an object")])
    return {"name": file.stem, **cast(dict[str, object], parsed)}
