"""Saved agents over HTTP and NATS: saved once and for good, refused with everything that is wrong, named as `name` and
as `name@version` wherever an agent is named, and pinned in what was asked for before."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg
from tests.support.api import Running, api_settings
from tests.support.asking import Answer, OverHttp, OverNats, Speaker
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.session.events import Spec
from turnstream.wire.agents import STREAM
from turnstream_api import agents

POET: dict[str, Any] = {"model": "demo", "instructions": "Answer in verse.", "tools": ["add"]}
PROSE: dict[str, Any] = {"model": "demo", "instructions": "Answer in prose."}
GRAPH = {
    "edges": ["question -> ask", "ask -> all.in", "all -> last"],
    "nodes": {
        "question": {"type": "input"},
        "ask": {"type": "agent", "agent": "poet"},
        "all": {
            "type": "map",
            "over": "[input]",
            "graph": {
                "edges": ["each -> again", "again -> done"],
                "nodes": {
                    "each": {"type": "input"},
                    "again": {"type": "agent", "agent": "poet@v1"},
                    "done": {"type": "output"},
                },
            },
        },
        "last": {"type": "output"},
    },
}


def _naming(agent: str) -> dict[str, Any]:
    """The same of another agent."""
    return json.loads(json.dumps(GRAPH).replace('"poet', f'"{agent}'))


@pytest.fixture(params=["http", "nats"])
async def speaker(api: Running, request: pytest.FixtureRequest) -> AsyncIterator[Speaker]:
    if request.param == "nats":
        yield OverNats(api.broker, api.account)
        return
    speaking = OverHttp(api.url)
    yield speaking
    await speaking.close()


async def save(api: Running, name: str, version: str, definition: dict[str, Any] = POET) -> dict[str, Any]:
    answer = await api.http.put(f"/v1/agents/{name}/versions/{version}", json={"definition": definition})
    assert answer.status_code == 201, answer.text
    return answer.json()


async def stored(api: Running) -> dict[str, int]:
    """What the account has in the bucket and in its sessions: messages by subject."""
    found: dict[str, int] = {}
    for stream, subject in ((STREAM, f"$KV.agents.{api.account}.>"), ("SESSIONS", f"ts.session.*.{api.account}.>")):
        state: Any = (await api.broker.api(f"STREAM.INFO.{stream}", {"subjects_filter": subject}))["state"]
        found |= state.get("subjects") or {}
    return found


async def spec(api: Running, run: str) -> Spec:
    """What a run that has not ended carries out."""
    session, _, n = run.rpartition(".")
    live = (await api.hand.sessions.load(api.hand.key(session))).run(int(n))
    assert live
    return live.spec


async def pinned(api: Running, run: str) -> tuple[str, str, str]:
    found = await spec(api, run)
    return found.agent, found.version, found.digest


# -- saving -----------------------------------------------------------------------------------------------------------


async def test_a_version_is_saved_once_and_never_changes(api: Running, speaker: Speaker) -> None:
    first = await speaker.ask("save_agent", name="poet", version="v1", definition=POET)
    assert first.status == 201 and first.body["created"]
    assert first.body["saved_at"] > 1_700_000_000_000 and first.body["by"].startswith("client:")
    again = await speaker.ask("save_agent", name="poet", version="v1", definition=dict(reversed(POET.items())))
    assert again == Answer(200, first.body | {"created": False}, False)
    other = await speaker.ask("save_agent", name="poet", version="v1", definition=PROSE)
    assert (other.status, other.body["code"], other.body["field"]) == (409, "version_conflict", "version")
    assert first.body["digest"] in other.body["detail"]
    got = await speaker.ask("get_agent_version", name="poet", version="v1")
    assert got.body["definition"] == POET and got.body["digest"] == first.body["digest"]


REFUSED: list[tuple[str, str, Any, str, str]] = [
    ("Poet", "v1", POET, "invalid", "name"),
    ("p" * 33, "v1", POET, "invalid", "name"),
    ("poet", "v.1", POET, "invalid", "version"),
    ("poet", "=", POET, "invalid", "version"),
    ("poet", "v" * 33, POET, "invalid", "version"),
    ("poet", "v1", [POET], "invalid", "definition"),
    ("poet", "v1", None, "invalid", "definition"),
    ("poet", "v1", POET | {"instructions": "x" * 262_144}, "too_large", "definition"),
]


async def test_what_cannot_be_saved_is_refused_and_stores_nothing(api: Running, speaker: Speaker) -> None:
    for name, version, definition, code, field in REFUSED:
        given = {} if definition is None else {"definition": definition}
        answer = await speaker.ask("save_agent", name=name, version=version, **given)
        assert (answer.body["code"], answer.body["field"]) == (code, field), (name, version, answer)
    too_large = await speaker.ask("save_agent", name="poet", version="v1", definition={"instructions": "x" * 262_144})
    assert (too_large.status, too_large.body["limit"]) == (413, 262_144)
    unknown = await speaker.ask("save_agent", name="poet", version="v1", definition=POET, wait=1)
    assert (unknown.status, unknown.body["field"]) == (422, "wait")
    assert await stored(api) == {}


FAULTY: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {"model": "field required"}),
    ({"model": "nope"}, {"model": "unknown model 'nope'"}),
    ({"model": 3, "mood": "good"}, {"model": "valid string", "mood": "unknown field"}),
    (POET | {"name": "clerk"}, {"name": "says 'clerk', and is to be saved as 'poet'"}),
    (POET | {"tools": ["add", "bad"]}, {"tools.1": "unknown tool 'bad'"}),
    (POET | {"tools": ["delegate"]}, {"tools.0": "say `control = {delegate = true}`"}),
    (POET | {"limits": {"max_steps": 0, "max_cost": 1}}, {"limits.max_steps": "greater than 0"}),
    (POET | {"limits": {"max_cost": 1}}, {"limits.max_cost": "no prices"}),
    (POET | {"policy": {"on_busy": "never"}}, {"policy.on_busy": "must be one of reject"}),
    (
        {"model": "nope", "tools": ["bad"], "durable": "yes", "policy": {"mood": 1}},
        {
            "durable": "boolean",
            "model": "unknown model",
            "tools.0": "unknown tool",
            "policy.mood": "no such policy field",
        },
    ),
    (
        {"graph": _naming("nobody")},
        {"graph.nodes.ask.agent": "unknown", "graph.nodes.all.graph.nodes.again.agent": "unknown"},
    ),
]


async def test_everything_that_is_wrong_with_a_definition_is_said_with_its_path(api: Running, speaker: Speaker) -> None:
    for definition, expected in FAULTY:
        answer = await speaker.ask("save_agent", name="poet", version="v1", definition=definition)
        assert (answer.status, answer.body["code"], answer.body["field"]) == (422, "invalid", "definition"), answer
        found = {fault["path"]: fault["message"] for fault in answer.body["faults"]}
        assert found.keys() == expected.keys(), answer
        assert all(expected[path] in message for path, message in found.items()), answer
        assert answer.body["detail"].endswith(f", and {len(expected) - 1} more") is (len(expected) > 1)
    assert await stored(api) == {}


async def test_a_saved_agent_starts_nothing_on_the_runner_and_has_none_of_its_keys(
    api: Running, nats: Broker, nats_url: str, account: str, tmp_path: Path
) -> None:
    server = {"url": "https://example.org/mcp", "headers": {"Authorization": "Bearer ${OPENAI_API_KEY}"}}
    mcp = {"web": server, "own": {"command": ["sh"], "env": {"TOKEN": "${FILES_TOKEN}"}}}
    said = {"definition": {"model": "demo", "mcp": mcp}}
    answer = await api.http.put("/v1/agents/sly/versions/v1", json=said)
    assert answer.status_code == 422
    assert {fault["path"]: fault["message"].split(" (")[0] for fault in answer.json()["faults"]} == {
        "mcp.web.headers.Authorization": "saved agents may not refer to OPENAI_API_KEY",
        "mcp.own.command": "only agents in files and modules have servers that the runner starts",
        "mcp.own.env.TOKEN": "saved agents may not refer to FILES_TOKEN",
    }
    assert (await api.http.put("/v1/agents/sly/versions/v1", json={"definition": {"model": "demo"}})).status_code == 201

    may = {"mcp_commands": True, "mcp_variables": ("OPENAI_API_KEY", "FILES_TOKEN")}
    trusting = Running(api_settings(nats_url, tmp_path, account, **may), account, nats)
    await trusting.start()
    assert (await trusting.http.put("/v1/agents/sly/versions/v2", json=said)).status_code == 201
    await trusting.close()


async def test_an_account_saves_no_more_agents_than_it_may(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "SAVED_MAX", 2)
    for name in ("one", "two"):
        await save(api, name, "v1")
    put = {"url": "/v1/agents/three/versions/v1", "json": {"definition": POET}}
    assert len((await api.http.get("/v1/agents")).json()["items"]) == 3  # with `default`; it knows of them now
    refused = await api.http.put(**put)
    assert (refused.status_code, refused.json()["code"], refused.json()["limit"]) == (413, "too_large", 2)
    await save(api, "two", "v2", PROSE)
    assert (await api.http.delete("/v1/agents/one")).status_code == 204
    assert len((await api.http.get("/v1/agents")).json()["items"]) == 2
    assert (await api.http.put(**put)).status_code == 201


async def test_of_twenty_who_save_other_content_at_once_exactly_one_wins(api: Running) -> None:
    answers = await asyncio.gather(
        *(
            api.http.put("/v1/agents/poet/versions/v1", json={"definition": POET | {"description": str(n)}})
            for n in range(20)
        )
    )
    statuses = [answer.status_code for answer in answers]
    assert (statuses.count(201), statuses.count(409)) == (1, 19)
    won = next(n for n, status in enumerate(statuses) if status == 201)
    got = (await api.http.get("/v1/agents/poet")).json()
    assert got["definition"]["description"] == str(won) and len(got["versions"]) == 1


# -- looking ----------------------------------------------------------------------------------------------------------


async def test_an_agent_is_shown_in_its_current_version_with_all_of_them(api: Running, speaker: Speaker) -> None:
    first, second = await save(api, "poet", "v1"), await save(api, "poet", "v2", PROSE)
    assert (await speaker.ask("save_agent", name="poet", version="v1", definition=POET)).status == 200
    got = (await speaker.ask("get_agent", name="poet")).body
    assert (got["source"], got["version"], got["definition"]) == ("saved", "v2", PROSE)
    assert [(one["version"], one["digest"]) for one in got["versions"]] == [
        ("v2", second["digest"]),
        ("v1", first["digest"]),
    ]
    assert (await speaker.ask("get_agent_version", name="poet", version="v1")).body["definition"] == POET
    for operation, fields in (
        ("get_agent", {"name": "none"}),
        ("get_agent", {"name": "No"}),
        ("get_agent", {"name": "poet@v1"}),
        ("get_agent_version", {"name": "poet", "version": "v3"}),
        ("get_agent_version", {"name": "poet", "version": "v 3"}),
        ("get_agent_version", {"name": "Poet", "version": "v1"}),
    ):
        assert (await speaker.ask(operation, **fields)).body["code"] == "not_found", fields


async def test_the_list_has_every_agent_once_in_pages(api: Running, speaker: Speaker) -> None:
    for n in range(5):
        await save(api, f"poet-{n}", "v1", POET | {"description": f"number {n}"})
    await save(api, "poet-3", "v2", PROSE)
    names: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = (await speaker.ask("list_agents", limit=2, **cursor)).body
        names += [item["name"] for item in page["items"]]
        assert len(page["items"]) <= 2
        if page["next"] is None:
            break
        cursor = {"cursor": page["next"]}
    assert names == ["default", *(f"poet-{n}" for n in range(5))]
    items = {item["name"]: item for item in (await speaker.ask("list_agents")).body["items"]}
    assert (items["default"]["source"], items["default"]["saved_at"]) == ("built-in", None)
    assert (items["poet-3"]["version"], items["poet-2"]["description"]) == ("v2", "number 2")
    assert (await speaker.ask("list_agents", cursor="No!")).body["code"] == "invalid_cursor"


async def test_the_overview_names_saved_agents_too(viewed: Running) -> None:
    await save(viewed, "poet", "v1")
    assert (await viewed.http.get("/v1/ops/overview")).json()["agents"] == ["default", "poet"]


# -- whose a name is --------------------------------------------------------------------------------------------------


@pytest.fixture
async def furnished(nats: Broker, nats_url: str, account: str, tmp_path: Path) -> AsyncIterator[Running]:
    """An API whose deployment defines the agent `clerk` in a file."""
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "clerk.toml").write_text('model = "demo"\ndescription = "Of a file."\n')
    running = Running(api_settings(nats_url, tmp_path, account, agents_dir=tmp_path / "agents"), account, nats)
    await running.start()
    yield running
    await running.close()


async def test_what_the_deployment_defines_is_neither_saved_nor_deleted(furnished: Running) -> None:
    api = furnished
    put = await api.http.put("/v1/agents/clerk/versions/v1", json={"definition": POET})
    assert (put.status_code, put.json()["code"]) == (409, "agent_defined")
    assert "clerk.toml" in put.json()["detail"]
    gone = await api.http.delete("/v1/agents/clerk")
    assert (gone.status_code, gone.json()["code"]) == (409, "agent_defined")
    assert await stored(api) == {}
    got = (await api.http.get("/v1/agents/clerk")).json()
    assert (got["source"], got["where"], got["description"]) == ("file", "clerk.toml", "Of a file.")
    assert got["definition"] == {"name": "clerk", "model": "demo", "description": "Of a file.", "tools": []}
    assert [one["version"] for one in got["versions"]] == [got["version"]] == [got["digest"][:12]]
    run = (await api.say("s0", agent=f"clerk@{got['version']}"))["run"] if await _opened(api, "s0") else ""
    assert await pinned(api, run) == ("clerk", got["version"], got["digest"])
    unknown = await api.post("/v1/runs", {"input": "hi", "agent": "clerk@v1"})
    assert unknown.json()["code"] == "agent_not_found"


async def _opened(api: Running, session: str, **fields: Any) -> bool:
    await api.open(session, **fields)
    return True


async def test_a_file_that_takes_a_saved_name_is_what_the_name_means(
    api: Running, nats: Broker, nats_url: str, account: str, tmp_path: Path
) -> None:
    """And runs that have pinned what was saved are still to be had."""
    await save(api, "clerk", "v1")
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "clerk.toml").write_text('model = "demo"\n')
    other = Running(api_settings(nats_url, tmp_path, account, agents_dir=tmp_path / "agents"), account, nats)
    await other.start()
    try:
        items = (await other.http.get("/v1/agents")).json()["items"]
        assert [(item["name"], item["source"]) for item in items] == [("clerk", "file"), ("default", "built-in")]
        refused = await other.post("/v1/runs", {"input": "hi", "agent": "clerk@v1"})
        assert refused.json()["code"] == "agent_not_found"
    finally:
        await other.close()


async def test_a_saved_default_takes_the_place_of_the_built_in_one_until_it_is_deleted(api: Running) -> None:
    built_in = (await api.http.get("/v1/agents/default")).json()
    nothing = await api.http.delete("/v1/agents/default")
    assert (nothing.status_code, nothing.json()["code"]) == (409, "agent_defined")
    mine = await save(api, "default", "v1")
    await api.open("s1")
    run = (await api.say("s1"))["run"]
    assert await pinned(api, run) == ("default", "v1", mine["digest"])
    await api.hand.carry_out(run)
    run = (await api.say("s1", agent=f"default@{built_in['version']}"))["run"]
    assert await pinned(api, run) == ("default", built_in["version"], built_in["digest"])
    await api.hand.carry_out(run)
    assert (await api.http.delete("/v1/agents/default")).status_code == 204
    run = (await api.say("s1"))["run"]
    assert await pinned(api, run) == ("default", built_in["version"], built_in["digest"])


async def test_another_accounts_agent_does_not_exist(api: Running) -> None:
    await save(api, "poet", "v1")
    other = OverNats(api.broker, f"{api.account}x")
    assert (await other.ask("get_agent", name="poet")).status == 404
    assert (await other.ask("get_agent_version", name="poet", version="v1")).status == 404
    assert [item["name"] for item in (await other.ask("list_agents")).body["items"]] == ["default"]
    for agent in ("poet", "poet@v1"):
        assert (await other.ask("start_run", input="hi", agent=agent)).body["code"] == "agent_not_found"
    assert (await other.ask("delete_agent", name="poet")).status == 404
    saved = await other.ask("save_agent", name="poet", version="v1", definition=PROSE)
    assert saved.status == 201
    assert (await api.http.get("/v1/agents/poet")).json()["definition"] == POET


# -- naming one -------------------------------------------------------------------------------------------------------

NAMING: list[tuple[str, dict[str, Any]]] = [
    ("open_session", {"id": "fresh"}),
    ("update_session", {"session": "s1"}),
    ("post_message", {"session": "s1", "content": "hi"}),
    ("start_run", {"input": "hi"}),
    ("start_run", {"input": "hi", "session": "fresh"}),
]


async def test_whoever_is_not_there_is_refused_at_every_entrance_and_nothing_is_stored(
    api: Running, speaker: Speaker
) -> None:
    await save(api, "poet", "v1")
    await save(api, "gone", "v1")
    assert (await api.http.delete("/v1/agents/gone")).status_code == 204
    await api.open("s1")
    before = await stored(api)
    for agent in ("none", "none@v1", "poet@v2", "gone", "gone@v1", "default@v1"):
        for operation, fields in NAMING:
            answer = await speaker.ask(operation, agent=agent, **fields)
            assert (answer.status, answer.body["code"], answer.body["field"]) == (422, "agent_not_found", "agent"), (
                agent,
                operation,
                answer,
            )
    for agent in ("poet@", "@v1", "Poet", "poet@v.1", "poet@v1@v1", "poet@" + "v" * 33):
        for operation, fields in NAMING:
            answer = await speaker.ask(operation, agent=agent, **fields)
            assert (answer.body["code"], answer.body["field"]) == ("invalid", "agent"), (agent, operation)
    assert await stored(api) == before


async def test_an_agent_is_named_alone_or_with_a_version_at_every_entrance(api: Running, speaker: Speaker) -> None:
    first, second = await save(api, "poet", "v1"), await save(api, "poet", "v2", PROSE)
    wanted = {"poet": ("poet", "v2", second["digest"]), "poet@v1": ("poet", "v1", first["digest"])}
    for n, (agent, expected) in enumerate(wanted.items()):
        await speaker.ask("open_session", id=f"a{n}", agent=agent)
        run = (await speaker.ask("post_message", session=f"a{n}", content="hi")).body["run"]
        assert await pinned(api, run) == expected
        await api.open(f"b{n}")
        run = (await speaker.ask("post_message", session=f"b{n}", content="hi", agent=agent)).body["run"]
        assert await pinned(api, run) == expected
        await api.open(f"c{n}")
        assert (await speaker.ask("update_session", session=f"c{n}", agent=agent)).status == 200
        run = (await speaker.ask("post_message", session=f"c{n}", content="hi")).body["run"]
        assert await pinned(api, run) == expected
        run = (await speaker.ask("start_run", input="hi", agent=agent)).body["run"]
        assert await pinned(api, run) == expected
        run = (await speaker.ask("start_run", input="hi", agent=agent, session=f"d{n}")).body["run"]
        assert await pinned(api, run) == expected
        acted = await speaker.ask("act_in_session", session=f"e{n}", verb="add", arguments={"a": 1, "b": 2})
        assert acted.status == 404  # there is no such session
        await speaker.ask("open_session", id=f"e{n}", agent=agent)
        acted = await speaker.ask("act_in_session", session=f"e{n}", verb="add", arguments={"a": 1, "b": 2})
        assert acted.status == (202 if "add" in [POET, PROSE][1 - n].get("tools", ()) else 404), acted
        letter = json.dumps({"content": "hi", "agent": agent}).encode()
        await api.broker.store(f"ts.inbox.{api.account}.f{n}", letter)
        assert await eventually(lambda n=n: _has(api, f"f{n}")) == expected


async def _has(api: Running, session: str) -> tuple[str, str, str] | None:
    folded = await api.hand.sessions.load(api.hand.key(session))
    return await pinned(api, f"{session}.1") if folded.last_run else None


async def test_what_was_asked_for_keeps_its_version_whatever_is_saved_after_it(api: Running) -> None:
    first = await save(api, "poet", "v1")
    await api.open("s1", agent="poet", policy={"preset": "workspace"})
    running, queued = (await api.say("s1"))["run"], (await api.say("s1"))["run"]
    second = await save(api, "poet", "v2", PROSE)
    latest = (await api.say("s1"))["run"]
    for run, expected in ((running, first), (queued, first), (latest, second)):
        assert await pinned(api, run) == ("poet", expected["version"], expected["digest"])


async def test_a_repeat_is_answered_as_before_whatever_has_become_of_the_agent(api: Running) -> None:
    await save(api, "poet", "v1")
    await api.open("s1", agent="poet")
    body = {"content": "hello"}
    first = await api.post("/v1/sessions/s1/messages", body, Idempotency_Key="k1")
    assert (await api.http.delete("/v1/agents/poet")).status_code == 204
    again = await api.post("/v1/sessions/s1/messages", body, Idempotency_Key="k1")
    assert (again.status_code, again.json()) == (200, first.json())


async def test_an_agent_that_is_deleted_cannot_be_named_and_its_runs_stay(api: Running, speaker: Speaker) -> None:
    mine = await save(api, "poet", "v1")
    await api.open("s1", agent="poet", policy={"preset": "workspace"})
    running, queued = (await api.say("s1"))["run"], (await api.say("s1"))["run"]
    assert (await speaker.ask("delete_agent", name="poet")).status == 204
    assert (await speaker.ask("delete_agent", name="poet")).status == 204  # it is
    assert (await speaker.ask("delete_agent", name="none")).status == 404
    assert (await speaker.ask("get_agent", name="poet")).status == 404
    assert (await speaker.ask("get_agent_version", name="poet", version="v1")).status == 404
    assert [item["name"] for item in (await speaker.ask("list_agents")).body["items"]] == ["default"]
    refused = await speaker.ask("post_message", session="s1", content="hi")
    assert (refused.status, refused.body["code"]) == (422, "agent_not_found")
    for run in (running, queued):
        assert await pinned(api, run) == ("poet", "v1", mine["digest"])
        await api.hand.carry_out(run)
    other = await speaker.ask("save_agent", name="poet", version="v1", definition=PROSE)
    assert other.body["code"] == "version_conflict"
    back = await speaker.ask("save_agent", name="poet", version="v1", definition=POET)
    assert (back.status, back.body["digest"]) == (201, mine["digest"])
    assert (await speaker.ask("post_message", session="s1", content="hi")).status == 202


async def test_a_retry_is_of_the_version_that_the_session_names_else_of_the_current_one(api: Running) -> None:
    first = await save(api, "poet", "v1")
    for session, agent in (("s1", "poet@v1"), ("s2", "poet")):
        await api.open(session, agent=agent)
        await api.hand.carry_out((await api.say(session))["run"], "", status="failed")
    second = await save(api, "poet", "v2", PROSE)
    for session, expected in (("s1", first), ("s2", second)):
        answer = await api.post(f"/v1/sessions/{session}/retry")
        assert answer.status_code == 202, answer.text
        assert await pinned(api, answer.json()["run"]) == ("poet", expected["version"], expected["digest"])


async def test_a_message_for_the_version_that_is_running_steers_it_and_one_for_another_waits(api: Running) -> None:
    await save(api, "poet", "v1")
    await save(api, "poet", "v2", PROSE)
    await api.open("s1", agent="poet@v1", policy={"preset": "thread"})
    await api.hand.start((await api.say("s1"))["run"])
    assert (await api.say("s1", agent="poet@v1"))["routed"] == "steered"
    assert (await api.say("s1", agent="poet"))["routed"] == "steered"
    assert (await api.say("s1", agent="poet@v2"))["routed"] == "queued"


# -- the agents that a graph names ------------------------------------------------------------------------------------


async def test_a_graph_pins_the_agents_that_it_names_when_it_is_saved(api: Running) -> None:
    poet = await save(api, "poet", "v1")
    later = await save(api, "poet", "v2", PROSE)
    team = await save(api, "team", "v1", {"graph": GRAPH})
    pins = {
        "ask": {"agent": "poet", "version": "v2", "digest": later["digest"]},
        "again": {"agent": "poet", "version": "v1", "digest": poet["digest"]},
    }
    assert team["pins"] == pins
    await save(api, "poet", "v3", PROSE | {"description": "newer"})
    again = await api.http.put("/v1/agents/team/versions/v1", json={"definition": {"graph": GRAPH}})
    assert (again.status_code, again.json()["pins"]) == (200, pins)
    assert (await api.http.get("/v1/agents/team")).json()["pins"] == pins
    echo = await save(api, "echo", "v1", {"graph": _naming("echo")})
    mine = {"agent": "echo", "version": "v1", "digest": echo["digest"]}
    assert echo["pins"] == {"ask": mine, "again": mine}


async def test_the_same_again_changes_nothing_whatever_has_become_of_the_agents_that_it_names(api: Running) -> None:
    await save(api, "poet", "v1")
    team = await save(api, "team", "v1", {"graph": GRAPH})
    assert (await api.http.delete("/v1/agents/poet")).status_code == 204
    again = await api.http.put("/v1/agents/team/versions/v1", json={"definition": {"graph": GRAPH}})
    assert (again.status_code, again.json()) == (200, team | {"created": False})
    other = await api.http.put("/v1/agents/team/versions/v2", json={"definition": {"graph": GRAPH}})
    assert other.status_code == 422, "it is a version of its own"
    assert (await api.http.delete("/v1/agents/team")).status_code == 204
    back = await api.http.put("/v1/agents/team/versions/v1", json={"definition": {"graph": GRAPH}})
    assert back.status_code == 422, "what is deleted is judged anew"


# -- what it costs ----------------------------------------------------------------------------------------------------


async def test_a_turn_costs_no_look_at_the_bucket_and_a_version_costs_one(api: Running) -> None:
    asked: list[bytes] = []

    async def hear(message: Msg) -> None:
        asked.append(message.data)

    async def turns(agent: str, count: int = 3) -> int:
        """How many messages of the bucket so many turns ask for."""
        asked.clear()
        for _ in range(count):
            run = (await api.post("/v1/runs", {"input": "hi", "agent": agent})).json()["run"]
            session = run.rpartition(".")[0]
            await api.hand.carry_out(run)
            run = (await api.say(session))["run"]
            await api.hand.carry_out(run)
        await api.broker.store(f"ts.inbox-refused.{api.account}.x")  # behind whatever was asked
        return len(asked)

    listening = await api.broker.subscribe(f"$JS.API.STREAM.MSG.GET.{STREAM}", hear)
    try:
        assert await turns("default") == 0
        await save(api, "poet", "v1")
        assert await turns("poet") == 1
        assert await turns("poet") == 0
        assert await turns("poet@v1") == 0
        await save(api, "poet", "v2", PROSE)
        assert await turns("poet") == 1
        assert await turns("poet@v1") == 0
        assert await turns("default") == 0
        assert {json.loads(data)["last_by_subj"] for data in asked} == set()
    finally:
        await listening.unsubscribe()
    assert subjects.agent(api.account, "poet", "v2") in await stored(api)
