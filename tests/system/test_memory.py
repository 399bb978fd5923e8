"""Runs and sessions as conversation memory (the preset `memory`), sentence by sentence: over HTTP and over NATS, by
`start_run` and by `post_message`. Two agents: `default`, and `poet`, who has instructions of its own."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tests.support.asking import Speaker, opened, outcome, say
from tests.support.deployment import Deployment, plan
from tests.support.nats import run_alone
from tests.support.waiting import eventually

from turnstream.broker.server import NatsServer

pytestmark = pytest.mark.system

VERBATIM = "Grüße, 🌍!\n\n  two  spaces,\ttab, [brackets], <tags/> &amp; " + "and so on " * 3000
"""Longer than what tools may return, and nothing that survives being tidied up."""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Every session is `memory`, for the server says so."""
    folder = tmp_path_factory.mktemp("memory")
    (folder / "agents").mkdir()
    (folder / "agents" / "poet.toml").write_text('model = "demo"\ninstructions = "Answer in verse."\n')
    server = NatsServer(folder / "nats")
    run_alone(server.start())
    names = ("api-1", "runner-1", "runner-2", "projector-1")
    made = plan(folder, server, *names, agents_dir=folder / "agents", policy__preset="memory")
    yield made
    made.clean_up()


@pytest.fixture
async def deployment(house: Deployment) -> AsyncIterator[Deployment]:
    async with house.entered():
        yield house


@pytest.fixture(params=["http", "nats"])
def speaker(request: pytest.FixtureRequest, deployment: Deployment) -> Speaker:
    return deployment.apis[0] if request.param == "http" else deployment.nats


async def start(speaker: Speaker, text: str, session: str | None = None, **fields: Any) -> dict[str, Any]:
    """Starts a run, with or without a session."""
    given = {"session": session} if session else {}
    answer = await speaker.ask("start_run", input=text, **given, **fields)
    assert answer.status == 202, answer
    return answer.body


async def ran(speaker: Speaker, text: str, session: str | None = None, **fields: Any) -> dict[str, Any]:
    return await outcome(speaker, (await start(speaker, text, session, **fields))["run"])


async def sent(speaker: Speaker, session: str | None = None, **fields: Any) -> list[dict[str, str]]:
    """What the model is sent, the prompt that asks for it left out."""
    *before, prompt = json.loads((await ran(speaker, "[about]", session, **fields))["output"])["messages"]
    assert prompt == {"user": "[about]"}
    return before


def pairs(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [said for user, assistant in turns for said in ({"user": user}, {"assistant": assistant})]


# --- what a run is, where its output comes from -------------------------------------------------------------------


async def test_a_plain_prompt_is_a_run_and_its_output_is_exactly_the_models_completion(speaker: Speaker) -> None:
    ended = await ran(speaker, "echo exactly  this\n", model="demo")
    assert (ended["status"], ended["output"], ended["model"]) == ("completed", "exactly  this\n", "demo")


async def test_a_run_is_there_from_the_moment_it_is_accepted_and_while_it_answers(speaker: Speaker) -> None:
    posted = await start(speaker, "[slow 40 50ms]")
    row = await speaker.ask("get_run", run=posted["run"], after=posted["seq"])
    assert row.status == 200 and row.body["status"] in ("queued", "running") and row.body["ended_at"] is None
    ended = await outcome(speaker, posted["run"])
    row = (await speaker.ask("get_run", run=posted["run"], after=ended["seq"])).body
    assert (row["status"], row["output"], row["model"]) == ("completed", ended["output"], "demo")
    assert row["ended_at"] >= row["started_at"] >= row["requested_at"] and row["version"]
    listed = (await speaker.ask("list_runs", after=ended["seq"])).body["items"]
    assert posted["run"] in [run["id"] for run in listed]


async def test_reasoning_is_never_folded_into_the_output(speaker: Speaker, session: str) -> None:
    ended = await ran(speaker, "[think hm, difficult][say easy]", session)
    assert (ended["output"], ended["reasoning"]) == ("easy", "hm, difficult")
    assert await sent(speaker, session) == pairs(("[think hm, difficult][say easy]", "easy"))


async def test_s25_empty_output_is_explained_and_adds_no_blank_reply(speaker: Speaker, session: str) -> None:
    cut = await ran(speaker, "[think a lot][cut 0]", session)
    assert cut["status"] == "completed" and "output" not in cut
    assert "hit the token limit" in cut["note"] and "raise max_tokens" in cut["note"]
    empty = await ran(speaker, "[empty]", session)
    assert empty["status"] == "completed" and "output" not in empty and empty["note"]
    assert await sent(speaker, session) == []


# --- sessions -----------------------------------------------------------------------------------------------------


async def test_by_default_a_run_is_one_shot_sees_its_prompt_alone_and_is_recorded(speaker: Speaker) -> None:
    first = await start(speaker, "echo My name is Ann.")
    await outcome(speaker, first["run"])
    assert await sent(speaker) == []
    own = await speaker.ask("get_session", session=first["session"])
    assert own.body["one_shot"] is True
    listed = (await speaker.ask("list_sessions", after=own.body["seq"], limit=200)).body["items"]
    assert first["session"] not in [item["id"] for item in listed]
    assert (await speaker.ask("get_run", run=first["run"])).body["output"] == "My name is Ann."


async def test_an_unknown_id_is_created_and_listed(speaker: Speaker, session: str) -> None:
    posted = await start(speaker, "echo hello", session)
    ended = await outcome(speaker, posted["run"])
    assert posted["session"] == session
    shown = (await speaker.ask("get_session", session=session, after=ended["seq"])).body
    assert (shown["one_shot"], shown["status"]) == (False, "idle")
    listed = (await speaker.ask("list_sessions", limit=200)).body["items"]
    assert session in [item["id"] for item in listed]
    unknown = await speaker.ask("post_message", session=f"{session}-no", content="hello")
    assert unknown.status == 404, "only a run attaches itself to what is not there"


async def test_every_earlier_turn_is_replayed_in_full_verbatim_and_in_order(speaker: Speaker, session: str) -> None:
    prompts = [f"echo {VERBATIM}", "[say second]", '[tool add {"a": 1, "b": 2}][then][say third]']
    await ran(speaker, prompts[0], session)
    await outcome(speaker, (await say(speaker, session, prompts[1]))["run"])
    await ran(speaker, prompts[2], session)
    expected = pairs(*zip(prompts, (VERBATIM, "second", "third"), strict=True))
    assert await sent(speaker, session) == expected
    shown = (await speaker.ask("read_history", session=session, **{"as": "model"})).body["messages"]
    assert [message["text"] for message in shown[: len(expected)]] == [
        one for turn in expected for one in turn.values()
    ]


async def test_only_real_exchanges_are_stored(speaker: Speaker, session: str) -> None:
    await ran(speaker, "echo kept", session)
    assert (await ran(speaker, "[fail]", session))["status"] == "failed"
    hanging = await start(speaker, "[slow 3 1ms][hang late]", session)
    await speaker.ask("cancel_run", run=hanging["run"])
    assert (await outcome(speaker, hanging["run"]))["status"] == "cancelled"
    await ran(speaker, "[empty]", session)
    noticed = await speaker.ask("post_message", session=session, content="by the way", kind="notice")
    assert noticed.body["routed"] == "none"
    acted = await speaker.ask("act_in_session", session=session, verb="add", arguments={"a": 1, "b": 2})
    assert (await outcome(speaker, acted.body["run"]))["output"] == "3"
    assert await sent(speaker, session) == pairs(("echo kept", "kept"))


async def test_s04_pairs_never_interleave_and_stand_in_the_order_of_completion(speaker: Speaker, session: str) -> None:
    texts = [f"[wait {(n * 7) % 12 * 40}ms][say {n}]" for n in range(12)]
    posted = await asyncio.gather(*(start(speaker, text, session) for text in texts))
    ends = await asyncio.gather(*(outcome(speaker, one["run"]) for one in posted))
    order = sorted(range(12), key=lambda n: ends[n]["seq"])
    seen = await sent(speaker, session)
    assert seen == pairs(*((texts[n], str(n)) for n in order))
    assert [next(iter(message)) for message in seen] == ["user", "assistant"] * 12, "roles strictly alternate"


async def test_memory_is_per_run_agents_share_a_session_and_one_holds_many(speaker: Speaker, session: str) -> None:
    other = f"{session}-other"
    await ran(speaker, "echo I am Ann.", session, agent="poet")
    await ran(speaker, "echo I am Bob.", other, agent="poet")
    await ran(speaker, "echo Nobody hears this.")
    about = json.loads((await ran(speaker, "[about]", session, agent="default"))["output"])
    assert about["instructions"] == ""
    assert about["messages"][:-1] == pairs(("echo I am Ann.", "I am Ann."))
    verse = json.loads((await ran(speaker, "[about]", other, agent="poet"))["output"])
    assert verse["instructions"] == "Answer in verse."
    assert verse["messages"][:-1] == pairs(("echo I am Bob.", "I am Bob."))


async def test_s29_deleting_a_session_detaches_its_runs(speaker: Speaker, session: str) -> None:
    run = (await start(speaker, "echo remember me", session))["run"]
    await outcome(speaker, run)
    assert (await speaker.ask("delete_session", session=session, wait=30)).status == 204
    assert (await speaker.ask("get_session", session=session)).status == 404
    assert (await speaker.ask("read_history", session=session)).status == 404

    async def detached() -> dict[str, Any] | None:
        row = (await speaker.ask("get_run", run=run)).body
        return row if row.get("session", "") is None else None

    row = await eventually(detached, 30, what="the run without its session")
    assert (row["status"], row["output"]) == ("completed", "remember me")
    assert (await speaker.ask("start_run", input="x", session=session)).status == 404, "and its id is not used again"


# --- titles, interruptions, waiting -------------------------------------------------------------------------------


async def test_a_session_has_no_title_but_a_persons(speaker: Speaker, session: str) -> None:
    refused = await speaker.ask("open_session", id=session, title="A program's")
    assert (refused.status, refused.body["field"]) == (422, "title")
    refused = await speaker.ask("start_run", input="hello", session=session, title="A program's")
    assert (refused.status, refused.body["field"]) == (422, "title")
    ended = await ran(speaker, "echo hello", session)
    assert (await speaker.ask("get_session", session=session, after=ended["seq"])).body["title"] == ""
    named = await speaker.ask("update_session", session=session, title="Mine")
    shown = (await speaker.ask("get_session", session=session, after=named.body["seq"])).body
    assert (shown["title"], shown["title_source"]) == ("Mine", "user")


async def test_s18_a_restart_interrupts_a_run_honestly(deployment: Deployment, session: str) -> None:
    speaker = deployment.apis[0]
    run = (await start(speaker, "[hang]", session))["run"]

    async def begun() -> bool:
        return (await speaker.ask("wait_run", run=run, timeout=0)).body["status"] == "running"

    await eventually(begun, 60)
    for runner in deployment.runners:
        runner.kill()
    await deployment.heal()
    ended = await outcome(speaker, run)
    assert (ended["status"], ended["error"]["code"]) == ("failed", "interrupted")
    assert ended["error"]["message"] == "interrupted: the runner stopped while the run was in flight"
    assert await sent(speaker, session) == []


async def test_s24_a_client_that_leaves_ends_its_run_as_failed(deployment: Deployment, session: str) -> None:
    api = deployment.apis[0]
    await opened(api, session)
    headers = {"Accept": "text/event-stream"}
    body = {"input": "[slow 500 20ms]", "session": session}
    async with api.http.stream("POST", "/v1/runs", json=body, headers=headers) as answer:
        async for chunk in answer.aiter_text():
            if "run.started" in chunk:
                break
    ended = await outcome(api, f"{session}.1")
    assert (ended["status"], ended["error"]["message"]) == ("failed", "client disconnected mid-stream")
    assert await sent(api, session) == []
