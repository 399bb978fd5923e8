"""A graph with everything in it, whose runner is killed (-9) before and after all it does; one that waits for a person
over a restart of everything; one whose agent is saved anew meanwhile.
"""

import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tests.support.asking import Speaker, events, insist
from tests.support.doomed import Ground, Told, in_turn, laid_out
from tests.support.nats import run_alone
from tests.support.servers import Web
from tests.support.waiting import eventually

pytestmark = pytest.mark.system

LINES = 130
"""More runs than there are points: each has a queue of its own."""
ELEMENT = {
    "nodes": {
        "element": {"type": "input"},
        "shout": {"type": "llm", "prompt": "echo {{ input | upper }}"},
        "shouted": {"type": "output"},
    },
    "edges": ["element -> shout", "shout -> shouted"],
}
DOTTED = {
    "nodes": {
        "before": {"type": "input"},
        "dot": {"type": "llm", "prompt": "echo {{ input }}."},
        "after": {"type": "output"},
    },
    "edges": ["before -> dot", "dot -> after"],
}
GRAPH: dict[str, Any] = {
    "nodes": {
        "question": {"type": "input"},
        "sort": {"type": "router", "rules": [{"port": "words", "when": 'input.contains(" ")'}]},
        "guard": {"type": "guardrail", "rule": "size(input) < 100"},
        "think": {"type": "llm", "prompt": "[tool again {}]"},
        "count": {"type": "tool", "tool": "once"},
        "sum": {"type": "mcp", "server": "sums", "tool": "add", "arguments": {"a": 20, "b": 22}},
        "sure": {"type": "human", "prompt": "Go on with {{ input }}?", "choices": ["yes", "no"]},
        "other": {"type": "agent", "agent": "helper", "prompt": "echo {{ input }} by another"},
        "each": {"type": "map", "graph": ELEMENT, "over": '[input, "bc"]'},
        "dots": {"type": "loop", "graph": DOTTED, "until": "size(input) > 4", "max_iterations": 5},
        "all": {
            "type": "llm",
            "prompt": "echo {{ input.think }} / {{ nodes.sum }} / {{ input.sure }} / {{ input.other }} /"
            " {{ input.each | join('-') }} / {{ input.dots }}",
        },
        "refused": {"type": "output"},
        "answer": {"type": "output"},
    },
    "edges": [
        "question -> sort",
        "sort.words -> guard",
        "sort.default -> refused.any",
        "guard.block -> refused.any",
        "guard.allow -> think",
        "guard.allow -> count",
        "guard.allow -> sum",
        "guard.allow -> sure",
        "guard.allow -> other",
        "guard.allow -> each",
        "guard.allow -> dots",
        "think -> all.all",
        "count -> all.all",
        "count.err -> all.all",
        "sum -> all.all",
        "sure -> all.all",
        "other -> all.all",
        "each -> all.all",
        "dots -> all.all",
        "all -> answer",
    ],
}
SAID = "a bc"
ANSWERS = {"question": {"answer": "yes"}}
OUTPUT = "again returned again / 42 / yes / a bc by another / A BC-BC / a bc."


def agent(queue: str, server: str) -> dict[str, Any]:
    return {
        "model": "demo",
        "tools": ["again", "once"],
        "mcp": {"sums": {"url": server, "idempotent": ["add"], "headers": {"Authorization": "Bearer ${KEY}"}}},
        "queue": queue,
        "graph": GRAPH,
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder, key = tmp_path_factory.mktemp("graphs"), {"KEY": "open-sesame"}
    sums = Web(folder, {**os.environ, **key})
    run_alone(sums.start("stateless"))
    url = f"http://127.0.0.1:{sums.port}/mcp"
    agents = {f"line-{n}.json": json.dumps(agent(f"line-{n}", url)) for n in range(LINES)}
    agents["helper.toml"] = 'model = "demo"\n'
    with laid_out(folder, agents, "api-1", "projector-1", "runner-1", environment=key) as ground:
        yield ground
    sums.kill()


@pytest.fixture
async def ground(made: Ground) -> AsyncIterator[Ground]:
    async with made.entered():
        yield made


def ports(told: Told) -> dict[str, str]:
    """The port by which each node has finished, by its path: each has once."""
    ends = Counter(finished["path"] for finished in told.of("node.finished"))
    assert set(ends.values()) == {1}, f"finished more than once: {ends.most_common(3)}"
    return {finished["path"]: finished.get("port", "out") for finished in told.of("node.finished")}


async def killed(ground: Ground, every: int) -> None:
    """After every so many-th thing that a runner does."""

    async def at_point(at: int) -> Told:
        return await ground.carried_out(f"line-{at}", f"graph-{every}-{at}", at, SAID, ANSWERS)

    whole = await at_point(0)
    points = whole.first.points
    (ended,) = whole.of("run.ended")
    assert (ended["status"], ended.get("content"), ended.get("note")) == ("completed", OUTPUT, None)
    appended = ("node.started", "node.finished", "model.replied", "tool.returned", "child.started", "run.waiting")
    assert {f"{when} {kind}" for when in ("before", "after") for kind in appended} <= set(points)
    assert 60 <= len(points) < LINES, points
    some = range(1, len(points) + 1, every)
    runs = await in_turn(at_point, some)
    done = ground.effects
    for at, told in zip(some, runs, strict=True):
        where = f"killed at point {at}, {(told.first.points or ['none'])[-1]}"
        assert told.first.dead, where
        (ended,) = told.of("run.ended")
        assert (ended["status"], ended.get("content")) == ("completed", OUTPUT), where
        nodes = ports(told)
        assert nodes.pop("count") in ("out", "err"), where
        assert {path: port for path, port in ports(whole).items() if path != "count"} == nodes, where
        assert done[f"graph-{every}-{at}", "once"] <= 1, f"{where}: what must not be done twice was"
        asked = [ask for waits in told.of("run.waiting") for ask in waits["requests"] if ask.get("node") == "sure"]
        assert len(asked) == 1, where
        assert len(told.of("child.started")) == len(told.of("child.ended")) == 1, where
    await ground.deployment.check()


async def test_killed_now_and_then_a_graph_ends_the_same_way_and_no_finished_node_runs_again(
    ground: Ground,
) -> None:
    await killed(ground, 7)


@pytest.mark.slow
async def test_killed_at_any_point_a_graph_ends_the_same_way_and_no_finished_node_runs_again(
    ground: Ground,
) -> None:
    await killed(ground, 1)


ASKS = {
    "nodes": {
        "question": {"type": "input"},
        "sure": {"type": "human", "prompt": "Ship {{ input }}?", "schema": {"type": "boolean"}},
        "ship": {"type": "llm", "prompt": "echo {{ nodes.question }}: {{ input }}"},
        "shipped": {"type": "output"},
    },
    "edges": ["question -> sure", "sure -> ship", "ship -> shipped"],
}


async def save(api: Speaker, name: str, version: str, **fields: Any) -> None:
    told = await api.ask("save_agent", name=name, version=version, definition=fields)
    assert told.status in (200, 201), told


async def started(api: Speaker, session: str, **fields: Any) -> str:
    return (await insist([api], "start_run", session=session, **fields)).body["run"]


async def reaches(api: Speaker, run: str, *wanted: str) -> dict[str, Any]:
    async def there() -> dict[str, Any] | None:
        found = (await api.ask("wait_run", run=run, timeout=1)).body
        return found if found.get("status") in wanted else None

    return await eventually(there, 60, what=f"{run} is {' or '.join(wanted)}")


@pytest.mark.parametrize("durable", [True, False])
async def test_a_person_is_waited_for_over_a_restart_of_everything(ground: Ground, durable: bool) -> None:
    """Of a durable agent where no other one goes on, and of an ordinary one where all do: the same comes of it."""
    deployment, api, name = ground.deployment, ground.api, f"asks-{durable}".lower()
    policy = {"recovery": "durable"} if durable else {}
    await save(api, name, "v1", model="demo", graph=ASKS, durable=durable, policy=policy)
    run = await started(api, name, agent=name, input="it", policy={"titles": "client"})
    await reaches(api, run, "waiting")
    for service in deployment.services.values():
        service.kill()
    assert deployment.server
    deployment.server.kill()
    await deployment.heal()
    told = await insist([api], "answer_run", run=run, answer=True)
    assert told.status in (200, 202), told
    ended = await reaches(api, run, "completed")
    assert ended["outcome"]["output"] == "it: true"
    assert [event["type"] for event in await events(api, name)] == [
        *("message.posted", "run.started", "node.finished", "node.started", "run.waiting"),
        *("request.answered", "run.started", *["node.finished"] * 3, "run.ended"),
    ]


async def test_a_durable_run_and_an_ordinary_one_give_the_same_output_and_the_same_rows(
    ground: Ground,
) -> None:
    api = ground.api
    shown: list[Any] = []
    for durable in (True, False):
        name = f"rows-{durable}".lower()
        await save(api, name, "v1", model="demo", graph=_answers_with("here"), durable=durable)
        run = await started(api, name, agent=name, input="hi", policy={"titles": "client"})
        ended = await reaches(api, run, "completed")
        steps = (await insist([api], "read_steps", run=run, after=ended["seq"])).body["items"]
        lasting = ("kind", "node", "path", "name", "status", "attempt", "step", "usage", "port", "error")
        shown.append([{field: step.get(field) for field in lasting} for step in steps])
        assert ended["outcome"]["output"] == "here"
    assert shown[0] == shown[1] and {step["node"] for step in shown[0]} == {"q", "a", "o"}


async def test_a_run_goes_on_with_the_version_it_began_with_and_so_does_what_its_graph_names(
    ground: Ground,
) -> None:
    api = ground.api
    await save(api, "echoes", "v1", model="demo", graph=_answers_with("old"))
    graph: dict[str, Any] = {
        "nodes": {**ASKS["nodes"], "ship": {"type": "agent", "agent": "echoes", "prompt": "hi"}},
        "edges": ASKS["edges"],
    }
    await save(api, "pinned", "v1", model="demo", graph=graph)
    run = await started(api, "pinned", agent="pinned", input="it")
    await reaches(api, run, "waiting")
    await save(api, "echoes", "v2", model="demo", graph=_answers_with("new"))
    await save(api, "pinned", "v2", model="demo", graph=_answers_with("another"))
    assert (await api.ask("delete_agent", name="echoes")).status == 204
    await insist([api], "answer_run", run=run, answer=True)
    ended = await reaches(api, run, "completed")
    assert ended["outcome"]["output"] == "old"
    other = await started(api, "pinned-later", agent="pinned", input="it")
    assert (await reaches(api, other, "completed"))["outcome"]["output"] == "another"


def _answers_with(text: str) -> dict[str, Any]:
    nodes = {"q": {"type": "input"}, "a": {"type": "llm", "prompt": f"echo {text}"}, "o": {"type": "output"}}
    return {"nodes": nodes, "edges": ["q -> a", "a -> o"]}
