"""Sub-agents on real processes: two API processes, a runner of people's agents and one of their helpers, a projector.

Whoever is killed, frozen or deleted meanwhile: a run that has delegated ends, each child has one end, and that is told
once.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tests.support.asking import Speaker, events, insist, opened, outcome, say, types
from tests.support.deployment import Deployment, plan
from tests.support.follower import following
from tests.support.nats import run_alone
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.server import NatsServer
from turnstream.ids import SessionKey
from turnstream.wire.work import Work

pytestmark = pytest.mark.system

PRESETS = ("strict", "memory", "thread", "workspace")
presets = pytest.mark.parametrize("preset", PRESETS)
OVER = ("completed", "failed", "cancelled", "timed_out")
AGENTS = {
    "helper": 'model = "demo"\nqueue = "helpers"\ncontrol = {ask_user = true, delegate = true}\n',
    "careless": 'model = "demo"\nqueue = "helpers"\npolicy = {recovery = "fail"}\n',
}


@pytest.fixture(scope="module")
def household_standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("household")
    (folder / "agents").mkdir()
    for name, text in AGENTS.items():
        (folder / "agents" / f"{name}.toml").write_text(text)
    server = NatsServer(folder / "nats")
    run_alone(server.start())
    names = ("api-1", "api-2", "runner-people", "runner-helpers", "projector-1")
    queues = {"runner-people": {"TURNSTREAM_QUEUES": "default"}, "runner-helpers": {"TURNSTREAM_QUEUES": "helpers"}}
    made = plan(folder, server, *names, environments=queues, agents_dir=folder / "agents")
    yield made
    made.clean_up()


@pytest.fixture
async def household(household_standing: Deployment) -> AsyncIterator[Deployment]:
    async with household_standing.entered():
        yield household_standing


def delegate(brief: str, **options: Any) -> str:
    """A part of a prompt: another agent does this."""
    return f"[delegate {brief} {json.dumps(options)}]" if options else f"[delegate {brief}]"


async def begin(household: Deployment, session: str, prompt: str, preset: str = "strict", **policy: Any) -> str:
    """The run of a session's first message."""
    await opened(household.apis[0], session, policy={"preset": preset, **policy})
    return (await say(household.apis[1], session, prompt))["run"]


async def of(speaker: Speaker, session: str, kind: str) -> list[dict[str, Any]]:
    return [event["data"] for event in await events(speaker, session) if event["type"] == kind]


async def until(speaker: Speaker, session: str, kind: str, count: int = 1) -> list[dict[str, Any]]:
    """The first facts of this kind, once there are so many."""

    async def there() -> list[dict[str, Any]]:
        answer = await speaker.ask("get_session", session=session)
        found = await of(speaker, session, kind) if answer.status == 200 else []
        return found if len(found) >= count else []

    return await eventually(there, 60, what=f"{count} {kind} in {session}")


async def status(speaker: Speaker, run: str) -> str:
    return (await speaker.ask("wait_run", run=run, timeout=0)).body.get("status", "")


async def reaches(speaker: Speaker, run: str, *wanted: str) -> str:
    async def there() -> str:
        found = await status(speaker, run)
        return found if found in wanted else ""

    return await eventually(there, 60, what=f"{run} is {' or '.join(wanted)}")


async def tree(speaker: Speaker, root: str) -> dict[str, dict[str, Any]]:
    """Everything that was delegated below a run, by id."""
    answer = await speaker.ask("list_runs", root=root, limit=200)
    assert answer.status == 200, answer
    return {run["id"]: run for run in answer.body["items"]}


async def told_once(speaker: Speaker, session: str, count: int) -> list[dict[str, Any]]:
    """How the children of a session ended: each once, as soon as all are told."""
    ends = await until(speaker, session, "child.ended", count)
    assert sorted((end["run"], end["k"]) for end in ends) == sorted({(end["run"], end["k"]) for end in ends})
    assert len(ends) == count
    return ends


@presets
async def test_s34_two_children_one_fails_and_the_parent_resumes_once_with_both(
    household: Deployment, session: str, preset: str
) -> None:
    one, two = household.apis
    asks = delegate("[ask Ready?][then][say all well]")
    run = await begin(household, session, asks + delegate("[fail]", agent="helper"), preset)
    await reaches(two, run, "waiting")
    await reaches(two, f"{session}--1-1.1", "waiting")
    assert (await one.ask("answer_run", run=f"{session}--1-1.1", answer="yes")).status == 202
    ended = await outcome(two, run)
    assert ended["status"] == "completed"
    assert "delegate returned all well" in ended["output"] and "child_failed: model_error" in ended["output"]
    starts = await of(one, session, "run.started")
    assert [start.get("trigger", "message") for start in starts] == ["message", "answers"], "it resumed once"
    assert len(await of(one, session, "run.waiting")) == 1
    told = await told_once(one, session, 2)
    assert {end["status"] for end in told} == {"completed", "failed"}
    shown = (await two.ask("get_run", run=run, after=ended["seq"])).body
    below = await tree(one, run)
    assert {name: (child["agent"], child["status"], child["parent"]) for name, child in below.items()} == {
        f"{session}--1-1.1": ("default", "completed", run),
        f"{session}--1-2.1": ("helper", "failed", run),
    }
    used = [child["usage"].get("input_tokens", 0) for child in below.values()]
    assert shown["usage"]["input_tokens"] > sum(used) > 0, "what the children have used is included"
    assert (shown["children"], shown["open_children"]) == (2, [])
    steps = (await one.ask("read_steps", run=run)).body["items"]
    children = {step["child_run"]: step for step in steps if step["kind"] == "child"}
    assert {name: step["status"] for name, step in children.items()} == {
        name: child["status"] for name, child in below.items()
    }
    for name, step in children.items():
        assert step["began_at"] <= below[name]["requested_at"] <= below[name]["ended_at"] <= step["ended_at"]
        assert step["call_id"] == below[name]["call_id"]


@presets
async def test_s35_a_message_to_a_parked_parent(household: Deployment, session: str, preset: str) -> None:
    one, two = household.apis
    run = await begin(household, session, delegate("[ask Go on?]") + "[then][say resumed]", preset)
    child = f"{session}--1-1"
    await reaches(one, f"{child}.1", "waiting")
    await reaches(one, run, "waiting")
    shown = await eventually(lambda: waits_for(two, run), 60)
    assert shown == [f"{child}.1"]
    asked = (await one.ask("list_requests", session=session)).body["items"]
    assert asked == [], "that it waits for a child is nobody's to answer"
    assert (await one.ask("get_session", session=session)).body["status"] == "idle"
    answer = await two.ask("post_message", session=session, content="echo meanwhile", message_id="m2")
    if preset == "strict":
        assert (answer.status, answer.body["code"], answer.body["run"]) == (409, "run_active", run)
    else:
        assert (answer.status, answer.body["routed"]) == (202, "started")
        assert (await outcome(one, answer.body["run"]))["output"] == "meanwhile"
        assert await status(one, run) == "waiting"
    assert (await two.ask("answer_run", run=f"{child}.1", answer="yes")).status == 202
    assert (await outcome(two, run))["output"] == "resumed"
    starts = await of(one, session, "run.started")
    names = [name for start in starts for name in start.get("message_ids", [])]
    assert len(names) == len(set(names)) == (1 if preset == "strict" else 2)
    assert [start["run"] for start in starts] == ([1, 1] if preset == "strict" else [1, 2, 1])
    await told_once(one, session, 1)


async def waits_for(speaker: Speaker, run: str) -> list[str]:
    shown = (await speaker.ask("get_run", run=run)).body
    return shown["open_children"] if shown.get("status") == "waiting" else []


@pytest.mark.parametrize("how", ["cancel_run", "stop_session"])
async def test_s36_a_cancel_ends_the_whole_tree(household: Deployment, session: str, how: str) -> None:
    one, two = household.apis
    deep = delegate(delegate("[hang]"), agent="helper")
    run = await begin(household, session, deep + delegate("[hang]"))
    below = [f"{session}--1-1.1", f"{session}--1-1--1-1.1", f"{session}--1-2.1"]
    for name, wanted in zip((run, *below), ("waiting", "waiting", "running", "running"), strict=True):
        await reaches(one, name, wanted)
    if how == "cancel_run":
        assert (await two.ask("cancel_run", run=run)).body["state"] == "cancelled"
    else:
        assert (await two.ask("stop_session", session=session)).body["stopped"] == [run]
    assert await reaches(one, run, *OVER) == "cancelled"
    for name in below:
        assert await reaches(one, name, *OVER) == "cancelled"
        assert len(await of(one, name.rpartition(".")[0], "run.ended")) == 1
    await told_once(one, session, 2)
    await told_once(one, f"{session}--1-1", 1)
    assert all(end["late"] for end in await of(one, session, "child.ended"))


async def test_a_cancel_of_a_child_alone_unblocks_its_parent(household: Deployment, session: str) -> None:
    one, two = household.apis
    run = await begin(household, session, delegate("[hang]") + delegate("echo fine"))
    await reaches(one, f"{session}--1-1.1", "running")
    await reaches(one, run, "waiting")
    await two.ask("cancel_run", run=f"{session}--1-1.1")
    output = (await outcome(two, run))["output"]
    assert "child_cancelled" in output and "delegate returned fine" in output


async def test_s37_everything_is_killed_while_children_run(household: Deployment, session: str) -> None:
    one, two = household.apis
    prompt = delegate("[wait 3s][say one]") + delegate("[wait 3s][say two]", agent="helper")
    run = await begin(household, session, prompt)
    children = [f"{session}--1-1", f"{session}--1-2"]
    for child in children:
        await reaches(one, f"{child}.1", "running")
    await reaches(one, run, "waiting")
    for service in household.services.values():
        service.kill()
    assert household.server
    household.server.kill()
    await household.heal()
    body = (await insist((one, two), "wait_run", run=run, timeout=60)).body
    assert body["outcome"]["output"] == "delegate returned one; delegate returned two"
    starts = await of(one, session, "run.started")
    assert [start.get("trigger", "message") for start in starts] == ["message", "answers"]
    for child in children:
        assert len(await of(one, child, "run.ended")) == 1
        assert [start["attempt"] for start in await of(one, child, "run.started")] == [1, 2]
    await told_once(one, session, 2)


async def test_s38_a_child_that_never_fits_its_schema(household: Deployment, session: str) -> None:
    one, two = household.apis
    schema = {"type": "object", "required": ["n"]}
    run = await begin(
        household,
        session,
        delegate("[say no JSON at all]", schema=schema) + delegate('[say {"n": 7}]', schema=schema),
    )
    output = (await outcome(two, run))["output"]
    assert "child_failed" in output and 'delegate returned {"n": 7}' in output
    bad, good = f"{session}--1-1", f"{session}--1-2"
    assert len(await of(one, bad, "model.replied")) == 3
    (end,) = await of(one, bad, "run.ended")
    assert (end["status"], end["error"]["code"]) == ("failed", "child_failed")
    assert await of(one, good, "model.replied") == []


async def test_s39_however_often_everybody_is_woken_there_is_one_child_and_one_run(
    household: Deployment, session: str
) -> None:
    one, two = household.apis
    assert household.broker
    work = Work(household.broker)
    key = SessionKey("default", session)
    run = await begin(household, session, delegate("[wait 500ms][say one]") + delegate("echo two", agent="helper"))
    names = [(key, "default"), (key.child(1, 1), "default"), (key.child(1, 2), "helpers")]
    over = asyncio.create_task(outcome(two, run))
    while not over.done():
        await asyncio.gather(*(work.wake(queue, name, 1) for name, queue in names for _ in range(20)))
    assert (await over)["output"] == "delegate returned one; delegate returned two"
    assert len(await of(one, session, "child.started")) == 2
    for child in (f"{session}--1-1", f"{session}--1-2"):
        assert await types(one, child) == ["message.posted", "run.started", "run.ended", "run.reported"]
    await told_once(one, session, 2)


async def test_a03_a_feed_with_a_filter_shows_the_children_whenever_it_is_joined(
    household: Deployment, session: str
) -> None:
    one, two = household.apis
    await opened(one, session)
    wanted = "child.started,child.ended,run.ended"
    async with following(session, two.url, types=wanted) as early:
        run = (await say(one, session, delegate("echo a") + delegate("echo b", agent="helper")))["run"]
        await outcome(one, run)
        await early.until("run.ended")
        async with following(session, one.url, types=wanted) as late:
            await late.until("run.ended")
            assert early.records == late.records
        kinds = [record["type"] for record in early.records]
    assert kinds == ["child.started", "child.started", "child.ended", "child.ended", "run.ended"]
    page = (await one.ask("read_events", session=session, types=wanted)).body["events"]
    assert page == early.records


async def test_a23_list_detail_and_log_agree_though_everything_is_restarted_during_a_fan_out(
    household: Deployment, session: str
) -> None:
    one, two = household.apis
    run = await begin(household, session, delegate("[hang]") * 3 + delegate("echo done", agent="helper"))
    await told_once(one, session, 1)
    for service in household.services.values():
        service.kill()
    await household.heal()

    async def agree() -> dict[str, str]:
        listed = (await insist((two,), "list_runs", root=run)).body["items"]
        listed += (await insist((two,), "list_runs", session=session)).body["items"]
        found: dict[str, str] = {}
        for name, shown in {item["id"]: item["status"] for item in listed}.items():
            detail = (await insist((one,), "get_run", run=name)).body["status"]
            assert detail == shown == await status(two, name)
            found[name] = shown
        return found

    async def settled() -> dict[str, str]:
        found = await agree()
        return found if list(found.values()).count("running") == 3 else {}

    before = await eventually(settled, 60)
    assert before[run] == "waiting" and before[f"{session}--1-4.1"] == "completed"
    assert (await one.ask("cancel_run", run=run)).body["state"] == "cancelled"

    async def over() -> bool:
        return not {"queued", "running", "waiting"} & set((await agree()).values())

    await eventually(over, 60)
    last = await types(one, session)
    again = await two.ask("cancel_run", run=run)
    assert (again.status, again.body["state"]) == (200, "ended")
    await told_once(one, session, 4)
    assert len(await types(one, session)) == len(last) or last.count("child.ended") < 4


async def test_a46_a_child_that_hangs_past_its_time_is_no_longer_waited_for(
    household: Deployment, session: str
) -> None:
    one, two = household.apis
    run = await begin(household, session, delegate("[hang]", timeout=2))
    ended = await outcome(two, run)
    assert ended["status"] == "completed" and "child_timed_out: deadline_exceeded" in ended["output"]
    (child,) = await of(one, f"{session}--1-1", "run.ended")
    assert child["status"] == "timed_out"


@pytest.mark.parametrize("agent", ["helper", "careless"])
async def test_a47_the_runner_of_a_child_is_killed(household: Deployment, session: str, agent: str) -> None:
    one, two = household.apis
    run = await begin(household, session, delegate("[wait 3s][say here]", agent=agent))
    child = f"{session}--1-1"
    await reaches(one, f"{child}.1", "running")
    await reaches(one, run, "waiting")
    household["runner-helpers"].kill()
    assert await status(one, run) == "waiting"
    await household["runner-helpers"].restart()
    output = (await outcome(two, run))["output"]
    told = {"helper": "delegate returned here", "careless": "child_failed: interrupted"}
    assert told[agent] in output
    (end,) = await of(one, child, "run.ended")
    assert end["attempt"] == (2 if agent == "helper" else 1)
    await told_once(one, session, 1)


async def test_a_child_of_another_queue_waits_for_its_own_runner(household: Deployment, session: str) -> None:
    one, two = household.apis
    assert await household["runner-helpers"].stop() == 0
    run = await begin(household, session, delegate("echo helped", agent="helper"))
    await reaches(one, run, "waiting")
    assert await status(one, f"{session}--1-1.1") == "queued"
    await household["runner-helpers"].restart()
    assert (await outcome(two, run))["output"] == "delegate returned helped"
    (started,) = await of(one, f"{session}--1-1", "run.started")
    assert f"-{household['runner-helpers'].pid}-" in started["runner"]


async def test_a_detached_child_goes_on_behind_its_parents_end_and_is_told_of_late(
    household: Deployment, session: str
) -> None:
    one, two = household.apis
    run = await begin(household, session, delegate("[ask Still there?]", wait=False), "workspace")
    child = f"{session}--1-1"
    ended = await outcome(two, run)
    assert json.loads(ended["output"].removeprefix("delegate returned ")) == {"status": "running", "session": child}
    await reaches(one, f"{child}.1", "waiting")
    steps = (await one.ask("read_steps", run=run, after=ended["seq"])).body["items"]
    (step,) = [step for step in steps if step["kind"] == "child"]
    assert step["status"] == "running"
    assert (await outcome(one, (await say(two, session, "echo next"))["run"]))["output"] == "next"
    assert (await two.ask("answer_run", run=f"{child}.1", answer="yes")).status == 202
    assert (await outcome(two, f"{child}.1"))["status"] == "completed"
    (told,) = await told_once(one, session, 1)
    assert told["late"] and told["status"] == "completed"
    seq = (await events(one, session))[-1]["seq"]
    steps = (await two.ask("read_steps", run=run, after=seq)).body["items"]
    assert [step["status"] for step in steps if step["kind"] == "child"] == ["completed"]


@pytest.mark.parametrize("mode", ["detach", "erase"])
async def test_a_deleted_parent_ends_its_children_and_leaves_or_takes_them(
    household: Deployment, session: str, mode: str
) -> None:
    one, two = household.apis
    nested = delegate(delegate("[hang]"), agent="helper")
    run = await begin(household, session, nested + delegate("echo done", wait=False) + delegate("[hang]"))
    children = [f"{session}--1-{k}" for k in (1, 2, 3)]
    await reaches(one, f"{children[0]}--1-1.1", "running")
    await reaches(one, f"{children[2]}.1", "running")
    await reaches(one, f"{children[1]}.1", "completed")
    await reaches(one, run, "waiting")
    before = (await one.ask("get_session", session=children[0])).body
    assert before["parent"]["run"] == run
    assert (await two.ask("delete_session", session=session, mode=mode, active="cancel", wait=30)).status == 204
    if mode == "detach":
        for child, wanted in zip(children, ("cancelled", "completed", "cancelled"), strict=True):
            assert await reaches(one, f"{child}.1", *OVER) == wanted
            assert (await one.ask("get_session", session=child)).body["parent"] is None, "promoted"
            (reported,) = await until(one, child, "run.reported")
            assert reported.get("told", True) == (wanted == "completed")
        assert await reaches(one, f"{children[0]}--1-1.1", *OVER) == "cancelled"
        assert (await one.ask("list_sessions", parent=session)).body["items"] == []
        kept = (await one.ask("get_run", run=run)).body
        assert (kept["session"], kept["status"]) == (None, "cancelled")
        return

    async def gone() -> bool:
        names = (*children, f"{children[0]}--1-1")
        answers = [await one.ask("read_receipt", session=name) for name in names]
        return all(answer.status == 200 and answer.body["erased_at"] for answer in answers)

    await eventually(gone, 60, what="the children are erased")
    for child in children:
        assert (await one.ask("get_session", session=child)).status == 404
    assert await tree(one, run) == {}


async def test_deleting_a_child_tells_its_parent(household: Deployment, session: str) -> None:
    one, two = household.apis
    run = await begin(household, session, delegate("[hang]", agent="helper"))
    child = f"{session}--1-1"
    await reaches(one, f"{child}.1", "running")
    await reaches(one, run, "waiting")
    assert (await two.ask("delete_session", session=child, mode="erase", active="cancel", wait=30)).status == 204
    assert "child_cancelled" in (await outcome(two, run))["output"]
    await told_once(one, session, 1)


async def test_s56_what_was_to_be_told_is_told_though_work_is_wiped(
    household: Deployment, session: str, tmp_path: Any
) -> None:
    """A sweep of the test's own, which does not wait for long."""
    from turnstream.views.database import Database
    from turnstream_projector.sweep import Sweep

    one, two = household.apis
    assert household.broker
    run = await begin(household, session, delegate("[ask Ready?]", agent="helper"))
    child = f"{session}--1-1"
    await reaches(one, f"{child}.1", "waiting")
    await reaches(one, run, "waiting")
    assert await household["runner-helpers"].stop() == 0
    assert (await two.ask("cancel_run", run=f"{child}.1")).body["state"] == "cancelled"
    seq = (await events(one, child))[-1]["seq"]
    queue = subjects.work("helpers", SessionKey("default", child))

    async def carried() -> bool:
        info: Any = await household.broker.api("STREAM.INFO.WORK", {"subjects_filter": queue})  # pyright: ignore
        return bool((info["state"].get("subjects") or {}).get(queue))

    await eventually(carried, 60, what="the wake-up of the child")
    await household.broker.api("STREAM.PURGE.WORK")
    await household["runner-helpers"].restart()
    database = Database(household.database)
    try:
        assert await database.wait_for(seq, 30)
        sweep = Sweep(database, Work(household.broker), household.broker.clock, every=1.0, after=0.0)

        async def swept() -> bool:
            await sweep.once()
            return await status(one, run) in OVER

        await eventually(swept, 60, every=0.2, what="the end of the parent")
    finally:
        await database.close()
    assert "child_cancelled" in (await outcome(two, run))["output"]
    await told_once(one, session, 1)


async def test_at_the_end_log_and_views_hold_together(household: Deployment) -> None:
    await household.check()
