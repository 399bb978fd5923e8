"""A graph with everything in it, whose runner is killed (-9) before and after all it does; one that waits for a person
over a restart of everything; one whose agent is saved anew meanwhile.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.asking import NoAnswer, Speaker, events, insist, opened
from tests.support.deployment import Deployment, plan
from tests.support.doomed import Doomed, Runners
from tests.support.nats import run_alone
from tests.support.servers import Web
from tests.support.waiting import eventually

from turnstream.broker.server import NatsServer

pytestmark = pytest.mark.system

LINES = 130
"""More runs than there are points: each has a queue of its own."""
AT_ONCE = 8
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
ANSWER = "again returned again / 42 / yes / a bc by another / A BC-BC / a bc."


def agent(queue: str, server: str) -> dict[str, Any]:
    return {
        "model": "demo",
        "tools": ["again", "once"],
        "mcp": {"sums": {"url": server, "idempotent": ["add"], "headers": {"Authorization": "Bearer ${KEY}"}}},
        "queue": queue,
        "graph": GRAPH,
    }


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Runners]]:
    folder = tmp_path_factory.mktemp("graphs")
    agents = folder / "agents"
    agents.mkdir()
    sums = Web(folder, {**os.environ, "KEY": "open-sesame"})
    run_alone(sums.start("stateless"))
    url = f"http://127.0.0.1:{sums.port}/mcp"
    for n in range(LINES):
        (agents / f"line-{n}.json").write_text(json.dumps(agent(f"line-{n}", url)))
    (agents / "helper.toml").write_text('model = "demo"\n')
    shared: dict[str, object] = {"agents_dir": agents, "modules": "tests.support.effects", "lease": 1.0}
    server = NatsServer(folder / "nats")
    run_alone(server.start())
    effects = {"EFFECTS": str(folder / "effects"), "PYTHONPATH": str(Path(__file__).parents[2]), "KEY": "open-sesame"}
    names = ("api-1", "projector-1", "runner-1")
    made = plan(folder, server, *names, environments=dict.fromkeys(names, effects), **shared)
    settings = {f"TURNSTREAM_{name.upper()}": str(value) for name, value in made["api-1"].settings.items()}
    runners = Runners(folder, settings | effects)
    yield made, runners
    runners.clean_up()
    made.clean_up()
    sums.kill()


@pytest.fixture
async def beds(ground: tuple[Deployment, Runners]) -> AsyncIterator[tuple[Deployment, Runners]]:
    async with ground[0].entered():
        yield ground


class Told:
    """What the log tells of one run."""

    def __init__(self, stored: list[dict[str, Any]], first: Doomed) -> None:
        self.stored = stored
        self.first = first

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event["data"] for event in self.stored if event["type"] == kind]

    @property
    def nodes(self) -> dict[str, str]:
        """The port by which each node has finished, by its path: each has once."""
        ends = Counter(finished["path"] for finished in self.of("node.finished"))
        assert set(ends.values()) == {1}, f"finished more than once: {ends.most_common(3)}"
        return {finished["path"]: finished.get("port", "out") for finished in self.of("node.finished")}


async def carried_out(deployment: Deployment, runners: Runners, session: str, at: int) -> Told:
    """One run whose runner dies at this point, and is followed by one that lives."""
    api, queue = deployment.apis[0], f"line-{at}"
    first = runners.start(queue, at)
    await opened(api, session, agent=queue, policy={"titles": "client"})
    posted = await insist([api], "post_message", session=session, content=SAID, message_id="m1")
    run = posted.body["run"]
    second: Doomed | None = None
    answered = False

    async def over() -> bool:
        nonlocal second, answered
        if at and second is None and first.dead:
            second = runners.start(queue, 0)
        try:
            state = (await api.ask("wait_run", run=run, timeout=0)).body.get("status")
        except NoAnswer:
            return False
        if state == "waiting" and not answered:
            answered = await _answers(api, run)
        return state in ("completed", "failed", "cancelled", "timed_out")

    await eventually(over, 120, every=0.05, what=f"the end of {run}, whose runner dies at point {at}")
    told = Told(await events(api, session), first)
    (second or first).kill()
    return told


async def _answers(api: Speaker, run: str) -> bool:
    """Whether a person was asked: the run may wait for its sub-agent alone."""
    waits = [event["data"] for event in await events(api, run.split(".")[0]) if event["type"] == "run.waiting"]
    for ask in waits[-1]["requests"]:
        if ask["kind"] == "question":
            told = await insist([api], "answer_run", run=run, request=ask["request"], answer="yes")
            assert told.status in (200, 202), told
            return True
    return False


async def killed(beds: tuple[Deployment, Runners], every: int) -> None:
    """After every so many-th thing that a runner does."""
    deployment, runners = beds
    whole = await carried_out(deployment, runners, f"graph-{every}-0", 0)
    points = whole.first.points
    (ended,) = whole.of("run.ended")
    assert (ended["status"], ended.get("content"), ended.get("note")) == ("completed", ANSWER, None)
    appended = ("node.started", "node.finished", "model.replied", "tool.returned", "child.started", "run.waiting")
    assert {f"{when} {kind}" for when in ("before", "after") for kind in appended} <= set(points)
    assert 60 <= len(points) < LINES, points
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(at: int) -> tuple[int, Told]:
        async with slots:
            return at, await carried_out(deployment, runners, f"graph-{every}-{at}", at)

    runs = await asyncio.gather(*(one(at) for at in range(1, len(points) + 1, every)))
    done = Counter(
        tuple(line.split()[:2]) for line in (runners.folder / "effects").read_text().splitlines() if line.strip()
    )
    for at, told in runs:
        where = f"killed at point {at}, {(told.first.points or ['none'])[-1]}"
        assert told.first.dead, where
        (ended,) = told.of("run.ended")
        assert (ended["status"], ended.get("content")) == ("completed", ANSWER), where
        nodes = told.nodes
        assert nodes.pop("count") in ("out", "err"), where
        assert {path: port for path, port in whole.nodes.items() if path != "count"} == nodes, where
        assert done[f"graph-{every}-{at}", "once"] <= 1, f"{where}: what must not be done twice was"
        asked = [ask for waits in told.of("run.waiting") for ask in waits["requests"] if ask.get("node") == "sure"]
        assert len(asked) == 1, where
        assert len(told.of("child.started")) == len(told.of("child.ended")) == 1, where
    await deployment.check()


async def test_killed_now_and_then_a_graph_ends_the_same_way_and_no_finished_node_runs_again(
    beds: tuple[Deployment, Runners],
) -> None:
    await killed(beds, 7)


@pytest.mark.slow
async def test_killed_at_any_point_a_graph_ends_the_same_way_and_no_finished_node_runs_again(
    beds: tuple[Deployment, Runners],
) -> None:
    await killed(beds, 1)


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
async def test_a_person_is_waited_for_over_a_restart_of_everything(
    beds: tuple[Deployment, Runners], durable: bool
) -> None:
    """Of a durable agent where no other one goes on, and of an ordinary one where all do: the same comes of it."""
    deployment, _ = beds
    (api, *_), name = deployment.apis, f"asks-{durable}".lower()
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
    beds: tuple[Deployment, Runners],
) -> None:
    deployment, _ = beds
    api = deployment.apis[0]
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
    beds: tuple[Deployment, Runners],
) -> None:
    deployment, _ = beds
    api = deployment.apis[0]
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
