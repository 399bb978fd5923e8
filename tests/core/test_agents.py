"""What an agent is: read from files and modules, every fault named, content-addressed."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from pydantic import BaseModel, Field, ValidationError

from turnstream.agents import Agent, AgentsError, Control, Limits, Params, ToolContext, load, lookup, tool
from turnstream.agents.definition import define
from turnstream.agents.tool import RESERVED
from turnstream.session.events import ASK_USER, DELEGATE, UPDATE_PLAN, Spec
from turnstream.session.events import Limits as SessionLimits
from turnstream.settings import ModelSettings

WHOLE = """
description = "Answers customers."
model = "priced"
instructions = "Be brief."
tools = ["add", "sleep"]
queue = "slow"
approval_timeout = 3600
durable = true

[approval]
add = "always"

[control]
ask_user = true

[policy]
on_busy = "queue"

[params]
temperature = 0
max_tokens = 500
stop = ["END"]
reasoning_effort = "low"

[limits]
max_steps = 5
max_model_calls = 6
max_tool_calls = 0
max_tokens = 10_000
timeout = 1.5
max_cost = 0.25
max_same_calls = 3
max_same_denials = 2
"""
PRICES = {"priced": ModelSettings(provider="demo", input_price=1.0, output_price=2.0)}
"""What a limited cost needs."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def write(folder: Path, **files: str | dict[str, Any]) -> None:
    for name, content in files.items():
        kind, text = (".toml", content) if isinstance(content, str) else (".json", json.dumps(content))
        (folder / f"{name}{kind}").write_text(text)


def faults(**sources: Any) -> list[str]:
    with pytest.raises(AgentsError) as caught:
        load(**sources)
    assert str(caught.value).splitlines() == [str(fault) for fault in caught.value.faults]
    return [str(fault) for fault in caught.value.faults]


def module(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, source: str) -> str:
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_toml_file_and_a_json_file_say_the_same(folder: Path) -> None:
    write(folder, support=WHOLE)
    agent = load(folder=folder, models=PRICES).get("support")
    assert agent == Agent(
        name="support",
        description="Answers customers.",
        model="priced",
        instructions="Be brief.",
        tools=("add", "sleep"),
        queue="slow",
        control=Control(ask_user=True),
        approval={"add": "always"},
        approval_timeout=3600.0,
        policy={"on_busy": "queue"},
        durable=True,
        params=Params(temperature=0.0, max_tokens=500, stop=["END"], reasoning_effort="low"),
        limits=Limits(
            max_steps=5,
            max_model_calls=6,
            max_tool_calls=0,
            max_tokens=10_000,
            timeout=1.5,
            max_cost=0.25,
            max_same_calls=3,
            max_same_denials=2,
        ),
    )
    write(folder, other=agent.model_dump(mode="json") | {"name": "other"})
    same = load(folder=folder, models=PRICES).get("other")
    assert same is not None
    assert same.model_copy(update={"name": "support"}) == agent


def test_a_run_pins_what_the_definition_says(folder: Path) -> None:
    write(folder, support=WHOLE)
    agent = load(folder=folder, models=PRICES).get("support")
    assert agent is not None
    pinned = agent.pinned()
    spec = msgspec.convert(pinned, Spec)
    assert spec == Spec(
        agent="support",
        version=agent.digest[:12],
        digest=agent.digest,
        model="priced",
        queue="slow",
        limits=SessionLimits(
            max_steps=5,
            max_model_calls=6,
            max_tool_calls=0,
            max_tokens=10_000,
            timeout=1500,
            max_cost=250_000,
            max_same_calls=3,
            max_same_denials=2,
        ),
        durable=True,
    )
    # Every field of a spec is said, and none that it does not have; the policy is resolved where runs are asked for,
    # the tools are narrowed where something is delegated.
    assert pinned.keys() == set(Spec.__struct_fields__) - {"policy", "tools"}
    assert msgspec.to_builtins(pinned["limits"]).keys() == set(SessionLimits.__struct_fields__)


def test_the_limits_of_an_agent_are_those_of_a_run_unless_it_says_otherwise() -> None:
    assert msgspec.convert(Agent(name="a", model="demo").pinned(), Spec).limits == SessionLimits()


def test_a_digest_is_of_the_content() -> None:
    def digest(**fields: Any) -> str:
        return define("x", {"name": "a", "model": "demo", **fields}).digest

    plain = digest()
    assert plain == digest(instructions="", limits={"max_steps": 32}, queue="default", params={}), "said or default"
    others = [
        digest(name="b"),
        digest(model="openai:x"),
        digest(instructions="x"),
        digest(description="x"),
        digest(tools=["add"]),
        digest(tools=["sleep", "add"]),
        digest(tools=["add", "sleep"]),
        digest(limits={"timeout": 1}),
        digest(params={"seed": 1}),
        digest(queue="slow"),
        digest(control={"ask_user": True}),
        digest(tools=["add"], approval={"add": "never"}),
        digest(approval_timeout=1),
        digest(policy={"on_busy": "queue"}),
        digest(durable=True),
        digest(limits={"max_same_denials": 4}),
        digest(output={"type": "object"}),
        digest(mcp={"time": {"command": ["time-server"]}}),
        digest(graph={"nodes": {"a": {"type": "input"}}}),
    ]
    assert len({plain, *others}) == len(others) + 1
    assert plain == "307ada35f71d01c1e6371f032d3cd0f1", "a release must not change what agents are pinned by"


def test_a_run_finds_only_the_definition_that_it_pinned(folder: Path) -> None:
    write(folder, support='model = "demo"')
    agents = load(folder=folder)
    agent = agents.get("support")
    assert agent is not None
    assert agents.get("support", agent.digest) is agent
    assert agents.get("support", "0" * 32) is None
    assert agents.get("nobody") is None


def test_every_fault_is_named_at_once_with_its_path(folder: Path) -> None:
    write(
        folder,
        bad={
            "name": "No Name",
            "temprature": 1,
            "params": {"temperature": 9, "top_k": 1},
            "limits": {"max_steps": 0, "max_tool_calls": "3", "timeout": -1, "max_cost": 0, "fuel": 2},
            "tools": ["add", "not a name", 3],
            "mcp": {"no server": {}},
            "output": {"type": 3},
            "control": {"ask_user": 1, "delegate": 1, "fly": True},
            "approval": {"add": "sometimes"},
            "approval_timeout": 0,
            "policy": "strict",
            "durable": "yes",
        },
        broken="model = ",
        empty="",
    )
    (folder / "list.json").write_text("[]")
    (folder / "bytes.toml").write_bytes(b"\xff\xfe")
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "notes.txt").write_text("not a definition")
    (folder / ".hidden.toml").write_text("not a definition")
    found = faults(folder=folder)
    assert [fault.partition(": ")[0] for fault in found] == sorted(fault.partition(": ")[0] for fault in found)
    text = "\n".join(found)
    for path in (
        "bad.json: control.ask_user: ",
        "bad.json: control.delegate: ",
        "bad.json: control.fly: unknown field",
        "bad.json: approval.add: ",
        "bad.json: approval_timeout: ",
        "bad.json: policy: ",
        "bad.json: durable: ",
        "bad.json: mcp.no server: string should match",
        "bad.json: mcp.no server: either `url` or `command`",
        "bad.json: output: is no schema",
        "bad.json: limits.max_cost: ",
        "bad.json: name: ",
        "bad.json: model: field required",
        "bad.json: temprature: unknown field",
        "bad.json: params.temperature: ",
        "bad.json: params.top_k: unknown field",
        "bad.json: limits.max_steps: ",
        "bad.json: limits.max_tool_calls: ",
        "bad.json: limits.timeout: ",
        "bad.json: limits.fuel: unknown field",
        "bad.json: tools.1: ",
        "bad.json: tools.2: ",
        "broken.toml: cannot be read: ",
        "bytes.toml: cannot be read: ",
        "deep.json: cannot be read: ",
        "empty.toml: model: field required",
        "list.json: is not an object",
    ):
        assert text.count(path) == 1, path
    assert len(found) == 27


def test_what_json_does_not_have_is_a_fault_where_it_is_read(folder: Path) -> None:
    write(folder, a='model = "demo"\npolicy = {on_busy = 2026-12-01}')
    half = {"model": "demo", "instructions": "\ud83d", "params": {"stop": ["\ude00"]}, "policy": {"\ud83d": 1}}
    (folder / "b.json").write_text(json.dumps(half))
    no_text = "input should be a valid string, unable to parse raw data as a unicode string"
    assert faults(folder=folder) == [
        "a.toml: policy.on_busy: a date is nothing that JSON has",
        f"b.json: instructions: {no_text}",
        f"b.json: params.stop.0: {no_text}",
        r"b.json: policy: '\ud83d' is no key of an object: it has characters that no text has",
    ]


@pytest.mark.parametrize("timeout", ["inf", "nan", "0", "1e300", "true", '"5"'])
def test_a_timeout_is_a_time(folder: Path, timeout: str) -> None:
    write(folder, a=f'model = "demo"\nlimits = {{timeout = {timeout}}}')
    [fault] = faults(folder=folder)
    assert fault.startswith("a.toml: limits.timeout: ")


def test_only_calls_of_its_own_tools_are_an_agent_s_to_have_approved(folder: Path) -> None:
    write(folder, a='model = "demo"\ntools = ["add"]\napproval = {add = "always", sleep = "never", nope = "always"}')
    assert faults(folder=folder) == ["a.toml: approval: no tool of this agent: nope, sleep"]


@pytest.mark.parametrize("model", ["demo", "openai:gpt-5", "cheap", "nope"])
def test_a_cost_is_limited_only_where_there_are_prices(folder: Path, model: str) -> None:
    write(folder, a={"model": model, "limits": {"max_cost": 1.5}}, b={"model": "priced", "limits": {"max_cost": 1.5}})
    found = faults(folder=folder, models={**PRICES, "cheap": ModelSettings(provider="demo")})
    assert found[-1] == (
        f"a.json: limits.max_cost: model {model!r} has no prices: they are settings of a logical model"
    )
    assert len(found) == 1 + (model == "nope")


@pytest.mark.parametrize("prices", [{"input_price": 1}, {"output_price": 1}, {"cached_price": 1}, {"caching_price": 1}])
def test_a_model_has_all_its_prices_or_none(prices: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="both `input_price` and `output_price`, or no price at all"):
        ModelSettings(provider="demo", **prices)


@pytest.mark.parametrize("price", [-1, float("inf"), float("nan")])
def test_a_price_is_an_amount(price: float) -> None:
    with pytest.raises(ValidationError, match="input_price"):
        ModelSettings(provider="demo", input_price=price, output_price=1)


def test_an_agent_is_defined_once(folder: Path, tmp_path: Path) -> None:
    write(folder, a='name = "same"\nmodel = "demo"', b='name = "same"\nmodel = "demo"')
    assert faults(folder=folder) == ["b.toml: name: agent 'same' is defined in a.toml already"]


def test_tools_and_models_have_to_be_there(folder: Path) -> None:
    write(folder, a='model = "gpt-5"\ntools = ["nope"]', b='model = "anthropic:"')
    found = faults(folder=folder, models={"local": ModelSettings(provider="demo")})
    assert found[0] == "a.toml: model: unknown model 'gpt-5'; known: demo, openai:<id>, anthropic:<id>, local"
    assert found[1].startswith("a.toml: tools.0: unknown tool 'nope'; known: add, ")
    assert found[2].startswith("b.toml: model: unknown model 'anthropic:'; known: demo, ")


@pytest.mark.parametrize(
    ("model", "params", "fault"),
    [
        ("openai:gpt-5", "{seed = 1, stop = ['.'], top_p = 0.5}", "OpenAI's Responses API has no seed, stop"),
        ("anthropic:claude-opus-5", "{seed = 1}", "Anthropic's Messages API has no seed"),
        ("chat", "{reasoning_summary = true}", "the chat completions API has no reasoning_summary"),
        ("chat", "{seed = 1, stop = ['.'], presence_penalty = 1}", None),
        ("anthropic:claude-opus-5", "{stop = ['.'], reasoning_summary = true}", None),
    ],
)
def test_a_model_is_told_only_what_its_api_has(folder: Path, model: str, params: str, fault: str | None) -> None:
    models = {"chat": ModelSettings(provider="openai", model="gpt-4.1", api="chat")}
    write(folder, a=f'model = "{model}"\nparams = {params}')
    if fault:
        told = f"a.toml: params: {fault}, through which model {model!r} is asked"
        assert faults(folder=folder, models=models) == [told]
    else:
        assert load(folder=folder, models=models).get("a")


def test_what_is_said_elsewhere_or_otherwise_is_a_fault_that_says_how(folder: Path) -> None:
    write(
        folder,
        a='model = "demo"\ntools = ["add", "conversation_ask_user"]',
        b='model = "demo"\ntools = ["add"]\napproval = ["add"]',
        c='model = "demo"\ntools = ["add"]\napproval = {add = true}',
        d='model = "demo"\ntools = ["add"]\napproval = true',
    )
    right = 'say it of each tool: `approval = {add = "always"}`, or "never"'
    assert faults(folder=folder) == [
        f"b.toml: approval: {right}",
        f"c.toml: approval.add: {right}",
        f"d.toml: approval: {right}",
        "a.toml: tools.1: 'conversation_ask_user' is not named here; say `control = {ask_user = true}`",
    ]


def test_a_folder_that_is_not_there_is_a_fault(folder: Path) -> None:
    assert faults(folder=folder / "nope") == [f"{folder / 'nope'}: no such folder"]


# --- the default ------------------------------------------------------------------------------------------------------


def test_the_default_agent_is_always_there_with_the_built_in_tools() -> None:
    agents = load()
    assert [agent.name for agent in agents] == ["default"]
    default = agents.get("default")
    assert default is not None
    assert default.model == "demo"
    assert (
        set(default.tool_names)
        == set(agents.tools)
        == {
            "add",
            "alone",
            "ask_errand",
            "ask_first",
            "count_words",
            "errand",
            "fail",
            "receipt",
            "repeat",
            "sleep",
        }
    )


def test_the_settings_name_the_model_of_the_default_agent() -> None:
    models = {"local": ModelSettings(provider="openai", model="qwen3", base_url="http://127.0.0.1:1/v1")}
    default = load(models=models, default_model="local").get("default")
    assert default is not None
    assert default.model == "local"
    assert faults(default_model="nope") == [
        "settings: model: unknown model 'nope'; known: demo, openai:<id>, anthropic:<id>"
    ]


def test_the_default_agent_gives_way_to_a_defined_one(folder: Path) -> None:
    write(folder, default='model = "demo"\ninstructions = "Mine."')
    default = load(folder=folder, default_model="nope").get("default")
    assert default is not None
    assert default.instructions == "Mine."
    assert default.tool_names == ()


# --- modules ----------------------------------------------------------------------------------------------------------


def test_a_module_gives_agents_and_tools(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    name = module(
        monkeypatch,
        folder,
        "my_agents",
        """
from __future__ import annotations
from turnstream.agents import Agent, tool

@tool(idempotent=True, timeout=5)
def weather(city: str) -> str:
    "Today's weather in a city."
    return city

def make():
    @tool
    def add(x: int) -> int:
        "Mine."
        return x
    return add

support = Agent(name="support", model="demo", tools=[weather, make(), "sleep"])
also = support
""",
    )
    agents = load(modules=[name])
    support = agents.get("support")
    assert support is not None
    assert support.tool_names == ("weather", "add", "sleep")
    assert agents.tools["weather"].description == "Today's weather in a city."
    assert agents.tools["add"].description == "Mine.", "a tool of the user's goes before a built-in one"
    assert len(agents) == 2


def test_a_module_that_cannot_be_used_says_why(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    bad = module(monkeypatch, folder, "bad_agent", "from turnstream.agents import Agent\nAgent(name='a', mode='x')")
    ends = module(monkeypatch, folder, "ends", "raise SystemExit(1)")
    odd = module(monkeypatch, folder, "odd", "from turnstream.agents import tool\n@tool\ndef f(x): ...")
    assert faults(modules=[bad, ends, odd, "no_such_module"]) == [
        "module bad_agent: Agent: model: field required",
        "module bad_agent: Agent: mode: unknown field",
        "module ends: cannot be imported: SystemExit: 1",
        "module odd: cannot be imported: TypeError: tool f: parameter x: has no type hint",
        "module no_such_module: cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
    ]


def test_two_different_tools_of_one_name_are_a_fault(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    source = "from turnstream.agents import tool\n@tool\ndef same(x: int) -> int: ..."
    one, two = module(monkeypatch, folder, "one", source), module(monkeypatch, folder, "two", source)
    again = module(monkeypatch, folder, "again", "from one import same")
    assert faults(modules=[one, two, again]) == ["module two: tool 'same' is defined in module one already"]


# --- tools ------------------------------------------------------------------------------------------------------------


class Point(BaseModel):
    x: int


def test_a_tools_schema_comes_from_its_type_hints() -> None:
    @tool
    def search(
        query: Annotated[str, Field(description="What to look for.")],
        near: Point | None = None,
        mode: Literal["fast", "deep"] = "fast",
        *,
        context: ToolContext,
        copy: list[int] = [],  # noqa: B006
    ) -> str:
        """Looks things up.

        In every book.
        """
        return f"{query} {near} {mode} {context} {copy}"

    assert search.name == "search"
    assert search.description == "Looks things up.\n\nIn every book."
    assert search.context == "context"
    assert search.schema == {
        "type": "object",
        "additionalProperties": False,
        "required": ["query"],
        "properties": {
            "query": {"type": "string", "description": "What to look for."},
            "near": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}], "default": None},
            "mode": {"enum": ["fast", "deep"], "type": "string", "default": "fast"},
            "copy": {"type": "array", "items": {"type": "integer"}, "default": []},
        },
        "$defs": {
            "Point": {"title": "Point", "type": "object", "required": ["x"], "properties": {"x": {"type": "integer"}}}
        },
    }


def test_a_tool_is_still_the_function_that_it_was_made_of() -> None:
    @tool(name="plus", description="Adds.", idempotent=True, timeout=2, exclusive=True)
    def add(a: int, b: int = 1) -> int:
        return a + b

    assert add(1) == add(1, b=1) == 2
    assert (add.name, add.description, add.idempotent, add.timeout, add.exclusive) == ("plus", "Adds.", True, 2, True)


class Opaque:
    """Nothing that JSON could hold."""


def star(*words: str) -> None: ...


def named(**words: str) -> None: ...


def positional(word: str, /) -> None: ...


def unhinted(word) -> None: ...


def unknown(word: "Nowhere") -> None: ...  # noqa: F821


def opaque(word: Opaque) -> None: ...


def twice(a: ToolContext, b: ToolContext) -> None: ...


def defaulted(word: str = Field("x")) -> None: ...


@pytest.mark.parametrize("function", [star, named, positional, unhinted, unknown, opaque, twice, defaulted, lambda: 1])
def test_a_function_that_does_not_do_is_refused_where_it_is_defined(function: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"tool \w+: .+|is no name for a tool") as caught:
        tool(function)
    assert "\n" not in str(caught.value)


def test_options_that_do_not_do_are_refused() -> None:
    for approval in ("always", "never", None, 1):
        with pytest.raises(TypeError, match="approval must be true or false"):
            tool(approval=approval)
    for timeout in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="timeout must be more than 0"):
            tool(timeout=timeout)
    with pytest.raises(ValueError, match="is no name for a tool"):
        tool(name="not a name")(positional)
    with pytest.raises(ValueError, match="it is how a model asks a person"):
        tool(name=ASK_USER)(positional)
    assert {ASK_USER, DELEGATE, UPDATE_PLAN} == RESERVED.keys()


def test_a_logical_name_goes_before_all_others() -> None:
    mine = ModelSettings(provider="openai", model="x", base_url="http://127.0.0.1:1/v1")
    assert lookup("demo", {"demo": mine}) is mine
    assert lookup("openai:gpt-5", {}).model == "gpt-5"
    assert lookup("demo", {}).provider == "demo"


# --- what graphs name -------------------------------------------------------------------------------------------------


def test_what_the_nodes_of_a_graph_name_has_to_be_there(folder: Path) -> None:
    other = {"model": "demo"}
    nodes: dict[str, Any] = {
        "start": {"type": "input"},
        "think": {"type": "llm", "model": "nope", "tools": ["add", "nope", "delegate"]},
        "check": {"type": "guardrail", "check": "ok?", "model": "priced"},
        "call": {"type": "tool", "tool": "nowhere"},
        "ask": {"type": "agent", "agent": "other"},
        "old": {"type": "agent", "agent": "other@0123"},
        "self": {"type": "agent", "agent": "a"},
        "gone": {"type": "agent", "agent": "gone"},
    }
    graph = {"nodes": nodes, "edges": [f"start -> {name}" for name in list(nodes)[1:]]}
    write(folder, other=other, a={"graph": graph})
    known = ", ".join(sorted(load().tools))
    assert faults(folder=folder, models=PRICES) == [
        "a.json: graph.nodes.think.model: unknown model 'nope'; known: demo, openai:<id>, anthropic:<id>, priced",
        f"a.json: graph.nodes.think.tools.1: unknown tool 'nope'; known: {known}",
        "a.json: graph.nodes.think.tools.2: 'delegate' is not named here; say `control = {delegate = true}`",
        f"a.json: graph.nodes.call.tool: unknown tool 'nowhere'; known: {known}",
        "a.json: graph.nodes.old.agent: unknown agent 'other@0123'",
        "a.json: graph.nodes.gone.agent: unknown agent 'gone'",
    ]
    version = define("x", {"name": "other", **other}).version
    nodes["old"]["agent"] = f"other@{version}"
    nodes["gone"]["agent"] = "default"
    nodes["call"]["tool"] = "add"
    nodes["think"] = {"type": "llm", "model": "demo"}
    write(folder, a={"graph": graph, "limits": {"max_cost": 1}})
    assert faults(folder=folder, models=PRICES) == [
        "a.json: limits.max_cost: model 'demo' has no prices: they are settings of a logical model"
    ]
    nodes["think"]["model"] = "priced"
    write(folder, a={"graph": graph, "limits": {"max_cost": 1}})
    agents = load(folder=folder, models=PRICES)
    assert "a" in agents and f"other@{version}" in agents
