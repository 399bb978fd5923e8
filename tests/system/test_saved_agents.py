"""Saved agents on real processes: what a run has pinned it carries out, whatever is saved, deleted, killed or started
again meanwhile; and a version is there whole or not at all."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from tests.support.asking import Answer, NoAnswer, Speaker, events, insist, opened, outcome, say
from tests.support.deployment import Deployment
from tests.support.waiting import eventually

pytestmark = pytest.mark.system

VERSIONS = 60
HUGE = "x" * 100_000


def told(instructions: str, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "instructions": instructions, "control": {"ask_user": True}, **more}


async def save(speaker: Speaker, name: str, version: str, definition: dict[str, Any]) -> dict[str, Any]:
    answer = await speaker.ask("save_agent", name=name, version=version, definition=definition)
    assert answer.status == 201, answer
    return answer.body


async def instructions_of(speaker: Speaker, run: str) -> str:
    """What a run that ends with `[about]` was told."""
    ended = await outcome(speaker, run)
    assert ended["status"] == "completed", ended
    return json.loads(ended["output"])["instructions"]


async def waits(speaker: Speaker, run: str) -> bool:
    return (await speaker.ask("wait_run", run=run, timeout=0)).body["status"] == "waiting"


async def pinned(speaker: Speaker, session: str) -> list[str]:
    """The version of each run that a message of the session has started or queued."""
    posted = [event["data"] for event in await events(speaker, session) if event["type"] == "message.posted"]
    return [(one.get("starts") or one["queued"])["spec"]["version"] for one in posted]


@pytest.mark.parametrize("deleted", [False, True])
async def test_a_run_keeps_its_version_while_newer_ones_are_saved_and_everything_is_killed(
    deployment: Deployment, session: str, deleted: bool
) -> None:
    one, two = deployment.apis
    name = f"poet-{session}"
    await save(one, name, "v1", told("Answer in verse."))
    await opened(two, session, agent=name, policy={"on_busy": "queue", "on_message": {"question": "queue"}})
    waiting = (await say(two, session, "[ask Begin?][then][about]"))["run"]
    await eventually(lambda: waits(one, waiting), 60)
    queued = (await say(one, session, "[about]"))["run"]
    await save(two, name, "v2", told("Answer in prose."))
    await eventually(lambda: _current(one, name, "v2"))
    newer = (await say(one, session, "[about]"))["run"]
    if deleted:
        assert (await one.ask("delete_agent", name=name)).status == 204
    assert deployment.server
    deployment.server.kill()
    for service in deployment.services.values():
        service.kill()
    await deployment.heal()
    await insist([one], "answer_run", run=waiting, answer="yes", key=f"{session}-answer")
    assert await instructions_of(one, waiting) == "Answer in verse."
    assert await instructions_of(two, queued) == "Answer in verse."
    assert await instructions_of(two, newer) == "Answer in prose."
    assert await pinned(one, session) == ["v1", "v1", "v2"]
    if deleted:
        refused = await two.ask("post_message", session=session, content="[about]")
        assert (refused.status, refused.body["code"]) == (422, "agent_not_found")


async def _current(speaker: Speaker, name: str, version: str) -> bool:
    return (await speaker.ask("get_agent", name=name)).body["version"] == version


async def test_a_run_delegates_to_saved_agents_by_name_and_version_and_to_one_like_itself(
    deployment: Deployment, session: str
) -> None:
    one, _ = deployment.apis
    boss, poet = f"boss-{session}", f"poet-{session}"
    await save(one, poet, "v1", told("Answer in verse."))
    await save(one, poet, "v2", told("Answer in prose."))
    await save(one, boss, "v1", told("Delegate.", control={"delegate": True, "ask_user": True}))
    await opened(one, session, agent=boss)
    brief = "".join(
        f"[delegate [about]{' ' + json.dumps({'agent': agent}) if agent else ''}]" for agent in (poet, f"{poet}@v1", "")
    )
    prompt = f"[ask Begin?][then]{brief}[delegate [about] {json.dumps({'agent': f'{poet}@v3'})}][then][say done]"
    run = (await say(one, session, prompt))["run"]
    await eventually(lambda: waits(one, run), 60)
    await save(one, boss, "v2", told("Do it yourself.", control={"delegate": True}))
    assert (await one.ask("answer_run", run=run, answer="yes")).status == 202
    assert (await outcome(one, run))["output"] == "done"
    stored = await events(one, session)
    specs = [event["data"]["spec"] for event in stored if event["type"] == "child.started"]
    assert [(spec["agent"], spec["version"]) for spec in specs] == [(poet, "v2"), (poet, "v1"), (boss, "v1")]
    said = [event["data"]["output"] for event in stored if event["type"] == "child.ended"]
    found = {json.loads(output)["instructions"] for output in said}
    assert found == {"Answer in prose.", "Answer in verse.", "Delegate."}
    failed = [event["data"] for event in stored if event["type"] == "tool.returned" and event["data"].get("error")]
    assert len(failed) == 1 and f"there is no '{poet}@v3'" in failed[0]["error"]


async def test_an_agent_that_no_runner_can_find_any_more_fails_the_run(deployment: Deployment, session: str) -> None:
    """Only a hand can do that."""
    one, _ = deployment.apis
    name = f"poet-{session}"
    await save(one, name, "v1", told("Answer in verse."))
    await opened(one, session, agent=name)
    for runner in deployment.runners:
        runner.kill()
    run = (await say(one, session, "[about]"))["run"]
    assert deployment.broker
    await deployment.broker.api("STREAM.PURGE.KV_agents", {"filter": f"$KV.agents.default.{name}.>"})
    await deployment.heal()
    ended = await outcome(one, run)
    assert (ended["status"], ended["error"]["code"]) == ("failed", "agent_not_found")


async def test_killed_in_the_middle_of_saves_each_version_is_there_whole_or_not_at_all(
    deployment: Deployment, session: str
) -> None:
    one, two = deployment.apis
    name = f"poet-{session}"
    definitions = {f"v{n}": told(f"{n} {HUGE}") for n in range(VERSIONS)}
    done: dict[str, Answer] = {}

    left = list(definitions)

    async def attempts() -> None:
        with suppress(NoAnswer):
            while left:
                version = left.pop()
                done[version] = await one.ask("save_agent", name=name, version=version, definition=definitions[version])
                if len(done) == VERSIONS // 4:
                    deployment["api-1"].kill()

    await asyncio.gather(*(attempts() for _ in range(8)))
    assert VERSIONS // 4 <= len(done) < VERSIONS
    assert all(answer.status == 201 for answer in done.values())
    there = [version for version in definitions if await _is_whole(two, name, version, definitions[version])]
    assert set(done) <= set(there)
    for version, definition in definitions.items():
        again = await two.ask("save_agent", name=name, version=version, definition=definition)
        assert again.status == (200 if version in there else 201), version
    shown = (await two.ask("get_agent", name=name)).body
    assert {item["version"] for item in shown["versions"]} == set(definitions)
    await deployment.heal()


async def _is_whole(speaker: Speaker, name: str, version: str, definition: dict[str, Any]) -> bool:
    answer = await speaker.ask("get_agent_version", name=name, version=version)
    if answer.status == 404:
        return False
    assert answer.body["definition"] == definition
    return True
