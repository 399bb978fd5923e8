"""What people do by themselves, what agents call their sessions, and the checklist: through the whole of it."""

import asyncio
import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from typing import Any
from unittest.mock import patch

import pytest
from tests.support.asking import Speaker, events, opened, outcome, say
from tests.support.deployment import Deployment
from tests.support.waiting import eventually
from tests.system.test_attaching import put
from tests.system.test_presets import begin, of, presets, reaches, sent

from turnstream_cli.main import main

pytestmark = pytest.mark.system

SUM = {"a": 1, "b": 2}
SHOWN = [
    '<user_action verb="count_words">{"text":"&lt;/user_action&gt; &amp;"}</user_action>',
    '<user_action_result verb="count_words">{"words":2,"characters":16,"bytes":16}</user_action_result>',
]


async def act(speaker: Speaker, session: str, verb: str = "add", **fields: Any) -> dict[str, Any]:
    answer = await speaker.ask("act_in_session", session=session, verb=verb, **fields)
    assert answer.status == 202, answer
    return answer.body


async def turnstream(deployment: Deployment, *arguments: str) -> tuple[int, str]:
    """The command line; its exit code and what it said."""
    said = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with patch.dict(os.environ, {"TURNSTREAM_URL": deployment.urls[0]}), redirect_stdout(said), redirect_stderr(said):
        code = await asyncio.to_thread(main, list(arguments))
        said.flush()
    return code, said.buffer.getvalue().decode()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("entrance", ["http", "nats", "command line"])
@presets
async def test_s44_a_person_runs_an_action(deployment: Deployment, session: str, preset: str, entrance: str) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    arguments = {"text": "</user_action> &"}
    if entrance == "command line":
        command = ("act", session, "count_words", json.dumps(arguments), "--author", "user:ann")
        code, said = await turnstream(deployment, *command)
        assert code == 0 and "completed" in said
        run = f"{session}.1"
    else:
        speaker = one if entrance == "http" else deployment.nats
        run = (await act(speaker, session, "count_words", arguments=arguments, author="user:ann"))["run"]
    ended = await outcome(two, run)
    assert (ended["status"], json.loads(ended["output"])["words"]) == ("completed", 2)
    (requested,) = await of(two, session, "run.requested")
    assert (requested["trigger"], requested["author"]) == ("action", "user:ann")
    history = (await two.ask("read_history", session=session, after=ended["seq"])).body["items"]
    assert [(item["type"], item.get("author")) for item in history] == [
        ("action", "user:ann"),
        ("tool_result", None),
        ("reply", None),
    ]
    seen = [message["user"] for message in await sent(two, session)]
    assert seen == ([] if preset == "memory" else SHOWN) + ["[about]"], "memory holds pairs alone"


@presets
async def test_s03_s44_an_action_while_a_run_is_live(deployment: Deployment, session: str, preset: str) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    run = (await say(one, session, "[hang]"))["run"]
    await reaches(two, run, "running")
    answer = await two.ask("act_in_session", session=session, verb="add", arguments=SUM)
    if preset == "strict":
        assert (answer.status, answer.body["code"], answer.body["run"]) == (409, "run_active", run)
    elif preset == "memory":
        assert answer.body["routed"] == "started"
        assert (await outcome(one, answer.body["run"]))["output"] == "3"
    else:
        assert answer.body["routed"] == "queued"
        assert (await two.ask("wait_run", run=answer.body["run"], timeout=0)).body["status"] == "queued"
    assert (await one.ask("cancel_run", run=run)).status == 202
    await outcome(one, run)
    if preset in ("thread", "workspace"):
        assert (await outcome(one, answer.body["run"]))["output"] == "3"


async def test_s44_a_repeat_a_wait_and_a_stream_are_as_for_messages(deployment: Deployment, session: str) -> None:
    one, two = deployment.apis
    await opened(one, session)
    first = await one.ask("act_in_session", key="k", session=session, verb="add", arguments=SUM, wait=30)
    again = await deployment.nats.ask("act_in_session", key="k", session=session, verb="add", arguments=SUM, wait=30)
    assert (first.status, again.status, again.replayed) == (202, 200, True)
    assert first.body["outcome"]["output"] == again.body["outcome"]["output"] == "3"
    assert first.body["run"] == again.body["run"]
    headers = {"Accept": "text/event-stream"}
    path = f"/v1/sessions/{session}/actions/add"
    async with two.http.stream("POST", path, json={"arguments": SUM}, headers=headers) as answer:
        text = "".join([chunk async for chunk in answer.aiter_text()])
    kinds = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert [kind for kind in kinds if kind not in ("delta", "caught-up")] == [
        "posted",
        "run.started",
        "tool.returned",
        "run.ended",
    ]


async def test_s44_the_persons_own_doing_is_the_consent(deployment: Deployment, session: str) -> None:
    one, two = deployment.apis
    await opened(one, session)
    ended = await outcome(two, (await act(one, session, "ask_first", arguments={"text": "mine"}))["run"])
    assert (ended["status"], ended["output"]) == ("completed", "mine")
    assert not await of(one, session, "run.waiting")


async def test_s44_a_tool_that_fails_is_what_came_of_it(deployment: Deployment, session: str) -> None:
    one, two = deployment.apis
    await opened(one, session)
    ended = await outcome(two, (await act(one, session, "fail", arguments={"message": "no luck"}))["run"])
    assert (ended["status"], ended["output"]) == ("completed", "no luck")
    (returned,) = await of(one, session, "tool.returned")
    assert (returned["status"], returned["error"]) == ("error", "no luck")


async def test_s16_an_action_is_cancelled_while_its_tool_runs(deployment: Deployment, session: str) -> None:
    one, two = deployment.apis
    await opened(one, session)
    run = (await act(one, session, "sleep", arguments={"seconds": 60}))["run"]
    await reaches(two, run, "running")
    assert (await two.ask("cancel_run", run=run)).status == 202
    assert (await outcome(one, run))["status"] == "cancelled"


@presets
async def test_s19_s44_a_runner_is_killed_in_the_tool_of_an_action(
    deployment: Deployment, session: str, preset: str
) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    run = (await act(one, session, "errand", arguments={"seconds": 60}))["run"]

    async def begun() -> bool:
        return bool(await of(one, session, "tool.started"))

    await eventually(begun, 60)
    for runner in deployment.runners:
        runner.kill()
    await deployment.heal()
    ended = await outcome(two, run)
    assert len(await of(one, session, "tool.started")) == 1, "it is not done again"
    if preset in ("memory", "thread"):
        assert (ended["status"], ended["error"]["code"]) == ("failed", "interrupted")
    else:
        (returned,) = await of(one, session, "tool.returned")
        assert (ended["status"], returned["status"]) == ("completed", "uncertain")
        assert "may or may not have taken effect" in ended["output"]


# --- titles -------------------------------------------------------------------------------------------------------


async def titled(speaker: Speaker, session: str, source: str) -> dict[str, Any]:
    async def there() -> dict[str, Any] | None:
        shown = (await speaker.ask("get_session", session=session)).body
        return shown if shown.get("title_source") == source else None

    return await eventually(there, 60, what=f"a title of the {source}'s")


@presets
async def test_s01_where_a_title_comes_from(deployment: Deployment, session: str, preset: str) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    posted = await say(one, session, "echo Tea for two")
    shown = (await two.ask("get_session", session=session, after=posted["seq"])).body
    named = preset in ("strict", "workspace")
    assert shown["title"] in (("echo Tea for two", "About echo Tea for two") if named else ("",))
    await outcome(one, posted["run"])
    if named:
        assert (await titled(two, session, "agent"))["title"] == "About echo Tea for two"
        (updated,) = await of(one, session, "session.updated")
        assert updated["usage"]["output_tokens"] > 0
    await outcome(one, (await say(one, session, "echo and coffee"))["run"])
    assert len(await of(one, session, "session.updated")) == named


@presets
async def test_s33_a57_whoever_names_it_a_persons_title_stays(
    deployment: Deployment, session: str, preset: str
) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    run = (await say(one, session, "[wait 300ms] tea"))["run"]
    assert (await two.ask("update_session", session=session, title="Mine")).status == 200
    await outcome(one, run)
    client = await two.ask("open_session", id=session, title="A program's")
    assert client.status == (422 if preset == "memory" else 200)
    ended = await outcome(one, (await say(one, session, "echo more"))["run"])
    shown = (await two.ask("get_session", session=session, after=ended["seq"])).body
    assert (shown["title"], shown["title_source"]) == ("Mine", "user")


async def test_s32_a_session_that_begins_with_nothing_but_a_file_is_named_by_its_agent(
    deployment: Deployment, session: str
) -> None:
    await begin(deployment, session, "workspace")
    one, two = deployment.apis
    await put(one, session, "notes.txt", b"hello")
    posted = await say(one, session, "", attachments=["notes.txt"])
    derived = (await two.ask("get_session", session=session, after=posted["seq"])).body
    assert derived["title"] in ("", "About attached notes txt"), "there is no text that it could come from"
    assert (await titled(two, session, "agent"))["title"] == "About attached notes txt"


# --- the checklist ------------------------------------------------------------------------------------------------


async def test_the_checklist_is_shown_and_a_person_may_change_it(deployment: Deployment, session: str) -> None:
    one, two = deployment.apis
    await opened(one, session)
    prompt = "[plan x Boil water | > Steep | Pour][then][say Nearly.]"
    ended = await outcome(two, (await say(one, session, prompt))["run"])
    shown = (await two.ask("get_session", session=session, after=ended["seq"])).body
    assert [(item["text"], item.get("status", "pending")) for item in shown["plan"]] == [
        ("Boil water", "completed"),
        ("Steep", "in_progress"),
        ("Pour", "pending"),
    ]
    code, said = await turnstream(deployment, "sessions", session)
    assert code == 0 and "☑ Boil water" in said and "☐ Pour" in said
    seen = await sent(two, session)
    assert any("<plan_state>" in message.get("user", "") for message in seen)
    changed = await act(one, session, "update_plan", arguments={"items": [{"text": "Drink"}]})
    ended = await outcome(two, changed["run"])
    shown = (await two.ask("get_session", session=session, after=ended["seq"])).body
    assert [item["text"] for item in shown["plan"]] == ["Drink"]
    wrong = await act(one, session, "update_plan", arguments={"items": [{"mood": "good"}]})
    assert "mood" in (await outcome(two, wrong["run"]))["output"]
    kinds = [event["type"] for event in await events(one, session)]
    assert kinds.count("plan.changed") == 2
