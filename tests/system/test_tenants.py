"""Two tenants on a broker as it is deployed, permissions and all: each has everything of its own, and nothing of the
other's comes to it, by whatever way it asks."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats.errors import NoRespondersError
from tests.support.asking import OverHttp, opened, outcome, put, say
from tests.support.deployment import Deployment, plan
from tests.support.follower import Follower, following
from tests.support.production import SECRETS, Production, Program
from tests.support.waiting import eventually

from turnstream_api.keys import add_key
from turnstream_api.operations import OPERATIONS

pytestmark = pytest.mark.system

SESSION, SECRET = "hush-hush", "psst"
ATTACHED = {"post_message": {"attachments": [f"{SECRET}.txt"]}}
"""One tenant's session, and what is said in it."""


@pytest.fixture
async def secured(production: Production, tmp_path: Path) -> AsyncIterator[Deployment]:
    (tmp_path / "services").mkdir()
    deployment = plan(
        tmp_path / "services",
        production.url,
        *("api-1", "runner-1", "projector-1"),
        user="turnstream",
        password=SECRETS["TURNSTREAM_NATS_PASSWORD"],
    )
    try:
        async with deployment.entered():
            yield deployment
    finally:
        deployment.clean_up()


async def tenant(deployment: Deployment, account: str) -> OverHttp:
    """Its way in over HTTP, once its key is known."""
    assert deployment.broker
    secret, _ = await add_key(deployment.broker, account)
    speaker = OverHttp(deployment.urls[0], secret=secret)

    async def known() -> bool:
        return (await speaker.ask("list_runs")).status == 200

    await eventually(known, 30, what=f"the key of {account} being known")
    return speaker


async def ask(program: Program, account: str, operation: str, **fields: Any) -> Any:
    answer = await program.nc.request(f"ts.api.{account}.{operation}", json.dumps(fields).encode(), timeout=30)
    return json.loads(answer.data)


async def test_a60_tenants_have_nothing_of_each_other(secured: Deployment) -> None:
    owner, rival = await tenant(secured, "default"), await tenant(secured, "rival")
    mine, theirs = Program(), Program()
    await mine.connect(secured.url, "default")
    await theirs.connect(secured.url, "rival")
    await mine.listen("ts.feed.default.*")
    await mine.listen("ts.delta.default.*.*")
    for subject in ("ts.feed.rival.*", "ts.delta.rival.*.*", "_INBOX.>"):
        await theirs.listen(subject)
    try:
        # The owner's conversation: over HTTP, over NATS, through the inbox.
        await opened(owner, SESSION, title=SECRET, policy={"on_busy": "queue"})
        await put(owner, SESSION, f"{SECRET}.txt", SECRET.encode())
        async with following(SESSION, secured.urls[0], headers=owner.headers) as follower:
            await say(owner, SESSION, "[slow 5 20ms]", attachments=[f"{SECRET}.txt"])
            await mine.nc.request("ts.inbox.default.hush-hush", b"echo psst, from a program", timeout=10)
            await ask(mine, "default", "post_message", session=SESSION, content="echo psst over NATS")
            for n in (1, 2, 3):
                assert (await outcome(owner, f"{SESSION}.{n}"))["status"] == "completed"
            await follower.until("run.ended", count=3)
            assert (await ask(mine, "default", "wait_run", run=f"{SESSION}.2"))["outcome"]["status"] == "completed"
            await eventually(lambda: len(of_feed(mine)) == len(follower.events), what="the broker's feed")
            assert of_feed(mine) == follower.ids
            assert any(message.subject.startswith("ts.delta.default.") for message in mine.heard)
            await nothing_over_http(secured, rival)
            await nothing_over_nats(theirs)
            await own_session_of_that_name(secured, rival, theirs, follower)
        assert not [message for message in theirs.heard if SECRET.encode() in message.data]
        assert not mine.refused
    finally:
        for each in (mine, theirs):
            await each.nc.close()
        for each in (owner, rival):
            await each.close()
    await secured.check()


def of_feed(program: Program) -> list[int]:
    heard = [message for message in program.heard if message.subject.startswith("ts.feed.")]
    return [int((message.headers or {})["Nats-Sequence"]) for message in heard]


async def nothing_over_http(secured: Deployment, rival: OverHttp) -> None:
    """Whatever it asks, by every operation there is on sessions and runs; agents are in test_api_agents.py."""
    for operation in OPERATIONS:
        if operation.path.startswith("/v1/agents"):
            continue
        fields = {"session": SESSION, "run": f"{SESSION}.1", "message": "m1", "request": f"{SESSION}.1.q1"}
        path = operation.path.format_map(fields | {"name": f"{SECRET}.txt", "verb": "add", "version": "v1"})
        body = {"content": "x", "title": "x", "reason": "x", "answer": "x"}
        given = {name: body[name] for name in body if name in operation.in_body}
        if "answer" in given:
            del given["reason"]
        if operation.in_path:
            answer = await rival.http.request(operation.method, path, json=given if operation.has_body else None)
            assert answer.status_code == 404, (operation.name, answer.text)
        elif operation.method == "GET":
            answer = await rival.http.get(path)
            assert answer.status_code == 200 and SESSION not in answer.text and SECRET not in answer.text, (
                operation.name,
                answer.text,
            )
    stranger = OverHttp(secured.urls[0])
    for speaker, status in ((rival, 404), (stranger, 401)):
        for path in (f"/v1/sessions/{SESSION}/events", f"/v1/sessions/{SESSION}/events?after=999999"):
            answer = await speaker.http.get(path, headers={"Accept": "text/event-stream"})
            assert answer.status_code == status
    await stranger.close()
    for way in ({"session": SESSION}, {"agent": "default"}, {"status": "completed"}):
        assert (await rival.ask("list_runs", **way)).body["items"] == []
    assert (await rival.ask("list_sessions", q=SECRET)).body["items"] == []


async def nothing_over_nats(theirs: Program) -> None:
    """Neither by its own subjects nor by the owner's."""
    for operation in ("get_session", "read_events", "read_history", "read_queue"):
        assert (await ask(theirs, "rival", operation, session=SESSION))["code"] == "not_found"
    named = {"session": SESSION, "name": f"{SECRET}.txt"}
    assert (await ask(theirs, "rival", "get_attachment", **named))["code"] == "not_found"
    assert (await ask(theirs, "rival", "put_attachment", content="eA==", **named))["code"] == "not_found"
    assert (await ask(theirs, "rival", "cancel_run", run=f"{SESSION}.1"))["code"] == "not_found"
    assert (await ask(theirs, "rival", "list_sessions"))["items"] == []
    refusals = 0
    for subject in ("ts.api.default.get_session", "ts.inbox.default.hush-hush", "ts.feed.default.hush-hush"):
        with pytest.raises((NoRespondersError, TimeoutError)):
            await theirs.nc.request(subject, b'{"session":"hush-hush","content":"x"}', timeout=0.3)
        refusals += 1
        await eventually(lambda expected=refusals: len(theirs.refused) >= expected)
    for subject in ("ts.feed.default.*", "ts.feed.>", "ts.delta.default.*.*", "ts.>", ">"):
        await theirs.listen(subject)
        refusals += 1
        await eventually(lambda expected=refusals: len(theirs.refused) >= expected)


async def own_session_of_that_name(secured: Deployment, rival: OverHttp, theirs: Program, follower: Follower) -> None:
    """The same id is another session; neither hears of the other's."""
    before = list(follower.events)
    await opened(rival, SESSION, policy={"titles": "derived"})  # the answer is the last event
    async with following(SESSION, secured.urls[0], headers=rival.headers) as own:
        await say(rival, SESSION, "echo ours")
        await own.until("run.ended")
        assert [record["source"] for record in own.records] == [f"/rival/sessions/{SESSION}"] * 4
        await eventually(lambda: of_feed(theirs) == own.ids)
    assert (await outcome(rival, f"{SESSION}.1"))["output"] == "ours"
    for operation, given in (("get_attachment", {"name": f"{SECRET}.txt"}), ("post_message", {"content": "x"})):
        answer = await rival.ask(operation, session=SESSION, **given, **ATTACHED.get(operation, {}))
        assert answer.status in (404, 422), (operation, answer)
    assert (await rival.ask("get_run", run=f"{SESSION}.2")).status == 404
    assert follower.events == before
