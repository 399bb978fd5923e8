"""What the API pins for runs: each agent's definition, with the policy that the server and the agent say."""

import json
from pathlib import Path
from typing import Any

import pytest

from turnstream.agents import AgentsError
from turnstream.session.policy import resolve
from turnstream.settings import Settings
from turnstream.specs import agents_of, specs_of


def folder(tmp_path: Path, **agents: dict[str, Any]) -> Path:
    for name, policy in agents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"model": "demo", "policy": policy}))
    return tmp_path


def test_an_agent_says_more_than_the_server_and_only_of_itself(tmp_path: Path) -> None:
    where = folder(tmp_path, quick={"on_busy": "steer"}, other={})
    settings = Settings(agents_dir=where, policy={"preset": "workspace", "clock": "wall"})
    specs = specs_of(settings, agents_of(settings))
    quick, other = resolve(specs["quick"].policy), resolve(specs["other"].policy)
    assert (quick.on_busy, quick.clock, quick.empty) == ("steer", "wall", "note")
    assert (other.on_busy, other.clock, other.empty) == ("queue", "wall", "note")


def test_a_policy_that_does_not_do_names_agent_and_field_and_all_are_named_at_once(tmp_path: Path) -> None:
    where = folder(
        tmp_path,
        a={"on_busy": "never"},
        b={"history": {"window": "wide"}},
        c={"preset": "strict", "mood": "good"},
        d={"on_message": "answer"},
        e={"on_busy": "queue"},
    )
    settings = Settings(agents_dir=where)
    with pytest.raises(AgentsError) as caught:
        specs_of(settings, agents_of(settings))
    assert [str(fault) for fault in caught.value.faults] == [
        "agent a: policy.on_busy: must be one of reject, queue, steer, interrupt, parallel",
        "agent b: policy.history.window: must be one of fit, all",
        "agent c: policy.mood: no such policy field",
        "agent d: policy.on_message: must be an object",
    ]


@pytest.mark.parametrize(("recovery", "durable", "refused"), [
    ("resume", False, False), ("durable", False, True), ("durable", True, False), ("fail", False, True),
])  # fmt: skip
def test_who_asks_a_person_outlives_the_runner(tmp_path: Path, recovery: str, durable: bool, refused: bool) -> None:
    inside = {"nodes": {"i": {"type": "input"}, "ask": {"type": "human", "prompt": "?"}}, "edges": ["i -> ask"]}
    graph = {"nodes": {"start": {"type": "input"}, "m": {"type": "map", "graph": inside}}, "edges": ["start -> m"]}
    (tmp_path / "a.json").write_text(json.dumps({"graph": graph, "durable": durable}))
    settings = Settings(agents_dir=tmp_path, policy={"recovery": recovery})
    if not refused:
        assert specs_of(settings, agents_of(settings))["a"].durable is durable
        return
    with pytest.raises(AgentsError) as caught:
        specs_of(settings, agents_of(settings))
    what = f"asks a person: under `recovery = {recovery}` the agent has to be `durable`"
    assert [str(fault) for fault in caught.value.faults] == [f"agent a: graph.nodes.m.graph.nodes.ask: {what}"]
