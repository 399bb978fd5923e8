"""The four presets, each through the whole of it: two API processes, two runners, a projector.

What is asked is the same each time; what differs is what the preset says. A table's row that a preset does not name is
the same for all of them.
"""

import asyncio
import json
from typing import Any

import pytest
from tests.support.asking import Answer, Speaker, events, insist, opened, outcome, say, types
from tests.support.deployment import Deployment
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.ids import SessionKey

pytestmark = pytest.mark.system

PRESETS = ("strict", "memory", "thread", "workspace")
HANG = "[hang]"

presets = pytest.mark.parametrize("preset", PRESETS)


def ask(**fields: Any) -> str:
    """A prompt that makes the model ask, and say what it was told."""
    return f"[tool conversation_ask_user {json.dumps({'question': 'Which one?', **fields})}]"


APPROVAL = '[tool ask_first {"text":"it is done"}]'


async def begin(deployment: Deployment, session: str, preset: str, **policy: Any) -> None:
    await opened(deployment.apis[0], session, policy={"preset": preset, **policy})


async def state(speaker: Speaker, run: str) -> dict[str, Any]:
    return (await speaker.ask("wait_run", run=run, timeout=0)).body


async def reaches(speaker: Speaker, run: str, status: str) -> dict[str, Any]:
    async def there() -> dict[str, Any] | None:
        found = await state(speaker, run)
        return found if found.get("status") == status else None

    return await eventually(there, 60, what=f"{run} is {status}")


async def end_of(speaker: Speaker, run: str) -> dict[str, Any]:
    """How a run ended that may wait meanwhile."""

    async def over() -> bool:
        return (await state(speaker, run))["status"] not in ("queued", "running", "waiting")

    await eventually(over, 60, what=f"the end of {run}")
    return await outcome(speaker, run)


async def sent(speaker: Speaker, session: str, **fields: Any) -> list[dict[str, str]]:
    """What the model is sent with a message that asks for just that."""
    ended = await outcome(speaker, (await say(speaker, session, "[about]", **fields))["run"])
    return json.loads(ended["output"])["messages"]


async def of(speaker: Speaker, session: str, kind: str) -> list[dict[str, Any]]:
    return [event["data"] for event in await events(speaker, session) if event["type"] == kind]


@presets
async def test_s01_one_message_one_reply(deployment: Deployment, session: str, preset: str) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    ended = await outcome(two, (await say(one, session, "echo Hello, world!"))["run"])
    assert (ended["status"], ended["output"]) == ("completed", "Hello, world!")
    turn = ["session.opened", "message.posted", "run.started", "run.ended"]
    shown = (await one.ask("get_session", session=session, after=ended["seq"])).body
    if preset not in ("strict", "workspace"):
        assert await types(two, session) == turn
        assert not shown["title"]
        return
    assert shown["title"] in ("echo Hello, world!", "About echo Hello world"), (
        "from the message, until there is another"
    )

    async def titled() -> bool:
        return await types(two, session) == [*turn, "session.updated"]

    await eventually(titled, 60, what="its agent finds a title")
    seq = (await events(two, session))[-1]["seq"]
    shown = (await one.ask("get_session", session=session, after=seq)).body
    assert shown["title"] == "About echo Hello world"


@presets
async def test_s02_the_second_message_is_sent_with_the_first_and_its_reply(
    deployment: Deployment, session: str, preset: str
) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    await outcome(two, (await say(one, session, '[tool add {"a":1,"b":2}][then][say three]'))["run"])
    first, *between, answer, second = await sent(two, session)
    assert (first["user"], answer["assistant"], second["user"]) == (
        '[tool add {"a":1,"b":2}][then][say three]',
        "three",
        "[about]",
    )
    assert bool(between) == (preset != "memory"), "memory holds the pair alone"


async def test_s03_s04_memory_takes_messages_side_by_side_and_its_pairs_never_interleave(
    deployment: Deployment, session: str
) -> None:
    await begin(deployment, session, "memory")
    one, two = deployment.apis
    answers = await asyncio.gather(
        *((one, two)[n % 2].ask("post_message", session=session, content=f"[wait 50ms][say {n}]") for n in range(12))
    )
    assert {answer.body["routed"] for answer in answers} == {"started"}
    said = {answer.body["run"]: n for n, answer in enumerate(answers)}
    for run, n in said.items():
        assert (await outcome(two, run))["output"] == str(n)
    *pairs, last = await sent(one, session)
    assert last == {"user": "[about]"}
    ends = [data["run"] for data in await of(one, session, "run.ended")][:12]
    expected = [said[f"{session}.{n}"] for n in ends]
    shown = [
        (message.get("user"), following.get("assistant"))
        for message, following in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    assert shown == [(f"[wait 50ms][say {n}]", str(n)) for n in expected], "in the order of their ends"


async def test_s03_s53_thread_steers_and_the_model_sees_it_once(deployment: Deployment, session: str) -> None:
    await begin(deployment, session, "thread")
    one, two = deployment.apis
    run = (await say(one, session, '[tool sleep {"seconds":1}][then][say unsteered]'))["run"]
    await reaches(two, run, "running")
    steering = await say(two, session, "[about]", message_id="steer")
    assert (steering["routed"], steering["run"]) == ("steered", run)
    ended = await outcome(one, run)
    seen = json.loads(ended["output"])["messages"]
    assert [message["user"] for message in seen if "user" in message] == [
        '[tool sleep {"seconds":1}][then][say unsteered]',
        "[about]",
    ]
    (steered,) = await of(one, session, "run.steered")
    assert steered["message_ids"] == ["steer"]
    (started,) = await of(one, session, "run.started")
    assert len(started["message_ids"]) == 1
    again = await sent(one, session)
    assert [message["user"] for message in again if "user" in message].count("[about]") == 2, "and itself"


@presets
async def test_s04_twelve_messages_at_once(deployment: Deployment, session: str, preset: str) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    pause = "3s" if preset == "strict" else "100ms"  # there the first is to go on until the last has been refused
    answers: list[Answer] = await asyncio.gather(
        *(
            (one, two)[n % 2].ask(
                "post_message", session=session, content=f"[wait {pause}][say {n}]", message_id=f"m{n}"
            )
            for n in range(12)
        )
    )
    taken = [answer.body for answer in answers if answer.status == 202]
    if preset == "strict":
        assert sorted(answer.status for answer in answers) == [202, *[409] * 11]
    else:
        assert len(taken) == 12
    for body in taken:
        await outcome(two, body["run"])
    await eventually(lambda: is_idle(one, session), 60)
    named = [
        name
        for kind in ("run.started", "run.steered")
        for data in await of(one, session, kind)
        for name in data.get("message_ids", ())
    ]
    assert sorted(named) == sorted(body["message"] for body in taken), "each is taken once"
    if preset == "workspace":
        ends = [data["run"] for data in await of(one, session, "run.ended")]
        assert ends == list(range(1, 13)), "in order"


async def is_idle(speaker: Speaker, session: str) -> bool:
    runs = (await speaker.ask("list_runs", session=session, limit=200)).body["items"]
    return all(run["status"] not in ("queued", "running", "waiting") for run in runs)


@presets
async def test_s05_a_message_exactly_while_a_run_ends_is_never_in_limbo(
    deployment: Deployment, session: str, preset: str
) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    for n in range(15):
        first = (await say(one, session, f"echo {n}", message_id=f"a{n}"))["run"]
        while True:
            answer = await two.ask("post_message", session=session, content=f"echo then {n}", message_id=f"b{n}")
            if answer.status == 202:
                break
            assert (preset, answer.status, answer.body["code"]) == ("strict", 409, "run_active")
        await outcome(one, first)
        await outcome(one, answer.body["run"])

        async def named(n: int = n) -> bool:
            kinds = ("run.started", "run.steered")
            taken = [name for kind in kinds for data in await of(two, session, kind) for name in data["message_ids"]]
            return taken.count(f"b{n}") == 1 and await is_idle(two, session)

        await eventually(named, 60, what=f"b{n} is taken, once")


@presets
async def test_s08_a_message_while_a_question_is_open(deployment: Deployment, session: str, preset: str) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    run = (await say(one, session, ask()))["run"]
    waiting = await reaches(two, run, "waiting")
    assert [request["request"] for request in waiting["requests"]] == [f"{run}.q1"]
    said = await say(two, session, "echo the left one")
    if preset == "memory":
        assert (said["routed"], said["run"]) == ("started", f"{session}.2")
        assert (await outcome(one, said["run"]))["output"] == "the left one"
        assert (await state(one, run))["status"] == "waiting"
        assert (await one.ask("answer_run", run=run, answer="left")).status == 202
    else:
        assert (said["routed"], said["run"]) == ("answered", run)
    ended = await outcome(one, run)
    told = "left" if preset == "memory" else "echo the left one"
    assert ended["status"] == "completed" and told in ended["output"]
    starts = await of(one, session, "run.started")
    resumed = [start for start in starts if start["run"] == 1][1]
    assert resumed["trigger"] == ("answers" if preset == "memory" else "reply")
    assert resumed.get("message_ids", []) == ([] if preset == "memory" else [said["message"]])
    assert not any(m.get("user") == "echo the left one" for m in await sent(one, session)) or preset == "memory"


async def test_s09_the_first_answer_wins(deployment: Deployment, session: str) -> None:
    await begin(deployment, session, "strict")
    one, two = deployment.apis
    run = (await say(one, session, ask(schema={"type": "object", "required": ["side"]})))["run"]
    await reaches(one, run, "waiting")
    request = f"{run}.q1"
    missing = await two.ask("answer_request", request=request, answer={"sid": 1})
    assert (missing.status, missing.body["code"], missing.body["field"]) == (422, "invalid", "answer.side")
    first = await one.ask("answer_request", request=request, answer={"side": "left"})
    again = await two.ask("answer_request", request=request, answer={"side": "left"})
    other = await two.ask("answer_request", request=request, answer={"side": "right"})
    assert (first.status, again.status, other.status) == (202, 200, 409)
    assert again.body["seq"] == first.body["seq"] and other.body["code"] == "already_answered"
    assert '{"side":"left"}' in (await outcome(one, run))["output"]
    late = await one.ask("answer_run", run=run, request=request, answer={"side": "right"})
    assert (late.status, late.body["code"]) == (409, "already_answered")
    assert len(await of(two, session, "request.answered")) == 1


async def test_s10_a31_with_one_of_two_questions_answered_it_still_waits(deployment: Deployment, session: str) -> None:
    await begin(deployment, session, "strict")
    one, two = deployment.apis
    run = (await say(one, session, ask() + ask()))["run"]
    waiting = await reaches(one, run, "waiting")
    first, second = (request["request"] for request in waiting["requests"])
    assert first != second
    assert (await two.ask("answer_request", request=second, answer="two")).status == 202
    assert (await state(one, run))["status"] == "waiting"
    assert (await one.ask("answer_request", request=first, answer="one")).status == 202
    output = (await outcome(one, run))["output"]
    assert output.index("one") < output.index("two")
    assert len(await of(one, session, "run.started")) == 2, "it resumed once"


@presets
async def test_s11_a_message_while_an_approval_is_open(deployment: Deployment, session: str, preset: str) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    run = (await say(one, session, APPROVAL))["run"]
    await reaches(two, run, "waiting")
    answer = await two.ask("post_message", session=session, content="echo rather not")
    if preset in ("strict", "workspace"):
        assert (answer.status, answer.body["code"], answer.body["run"]) == (409, "run_waiting", run)
        assert len(await of(one, session, "message.posted")) == 1
        assert (await one.ask("answer_run", run=run, approved=True)).status == 202
        assert "it is done" in (await outcome(one, run))["output"]
    elif preset == "memory":
        assert answer.body["routed"] == "started"
        assert (await outcome(one, answer.body["run"]))["output"] == "rather not"
        assert (await state(one, run))["status"] == "waiting"
        assert (await one.ask("answer_run", run=run, approved=False, reason="no")).status == 202
        await outcome(one, run)
    else:
        assert (answer.body["routed"], answer.body["run"]) == ("answered", run)
        assert (await outcome(one, run))["status"] == "completed"
        (returned,) = await of(one, session, "tool.returned")
        assert (returned["status"], returned["error"]) == ("denied", "echo rather not")


async def test_s12_a26_a30_of_many_decisions_one_wins_and_the_tool_runs_once(
    deployment: Deployment, session: str
) -> None:
    await begin(deployment, session, "strict")
    one, two = deployment.apis
    run = (await say(one, session, APPROVAL * 3))["run"]
    waiting = await reaches(one, run, "waiting")
    requests = [request["request"] for request in waiting["requests"]]
    assert len(set(requests)) == 3
    answers = await asyncio.gather(
        *((one, two)[n % 2].ask("answer_request", request=requests[1], approved=True) for n in range(20)),
        *((one, two)[n % 2].ask("answer_request", request=requests[0], approved=bool(n % 2)) for n in range(20)),
    )
    assert sorted(answer.status for answer in answers[:20]) == [200] * 19 + [202]
    assert len({answer.body["seq"] for answer in answers[:20]}) == 1
    mixed = [answer.status for answer in answers[20:]]
    assert mixed.count(202) == 1 and mixed.count(200) == 9 and mixed.count(409) == 10
    assert (await state(one, run))["status"] == "waiting"
    assert (await one.ask("answer_request", request=requests[2], approved=False, reason="no")).status == 202
    await outcome(one, run)
    results = [returned["status"] for returned in await of(one, session, "tool.returned")]
    assert sorted(results) in (["denied", "denied", "ok"], ["denied", "ok", "ok"])


@pytest.mark.parametrize("on_expiry", ["fail", "default", "null"])
async def test_s14_a29_a_question_that_nobody_answers(deployment: Deployment, session: str, on_expiry: str) -> None:
    await begin(deployment, session, "strict")
    one, two = deployment.apis
    run = (await say(one, session, ask(expires_in=1, on_expiry=on_expiry, default="the default")))["run"]
    ended = await end_of(two, run)
    if on_expiry == "fail":
        assert (ended["status"], ended["error"]["code"]) == ("failed", "request_expired")
    else:
        assert ended["status"] == "completed"
        assert ("the default" if on_expiry == "default" else "null") in ended["output"]
    stored = await events(one, session)
    waited = next(event for event in stored if event["type"] == "run.waiting")
    expired = next(event for event in stored if event["type"] == "request.expired")
    assert expired["storedat"] > waited["storedat"]
    late = await one.ask("answer_request", request=f"{run}.q1", answer="late")
    assert (late.status, late.body["code"]) == (409, "request_expired")
    assert (await outcome(one, (await say(two, session, "echo on"))["run"]))["output"] == "on"


@presets
async def test_s15_a_notice_answers_nothing(deployment: Deployment, session: str, preset: str) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    run = (await say(one, session, ask()))["run"]
    await reaches(one, run, "waiting")
    assert (await say(two, session, "by the way", kind="notice"))["routed"] == "none"
    assert (await state(two, run))["status"] == "waiting"
    assert (await one.ask("answer_run", run=run, answer="left")).status == 202
    assert "left" in (await outcome(two, run))["output"]


@presets
async def test_s16_a19_a_waiting_run_that_is_cancelled_ends_at_once(
    deployment: Deployment, session: str, preset: str
) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    run = (await say(one, session, "[opaque]" + ask() + APPROVAL))["run"]
    waiting = await reaches(one, run, "waiting")
    assert await opaque_items(deployment, session) == 1
    cancelled = await two.ask("cancel_run", run=run)
    assert await opaque_items(deployment, session) == 0
    assert (cancelled.status, cancelled.body["state"]) == (200, "cancelled")
    ended = await outcome(one, run)
    assert ended["status"] == "cancelled"
    again = await one.ask("cancel_run", run=run)
    assert (again.status, again.body["state"]) == (200, "ended")
    for request in waiting["requests"]:
        answer = await two.ask("answer_request", request=request["request"], answer="x")
        assert (answer.status, answer.body["code"]) == (409, "request_closed")
    open_ones = (await one.ask("list_requests", session=session, after=ended["seq"])).body["items"]
    assert open_ones == []
    shown = (await two.ask("get_session", session=session, after=ended["seq"])).body
    assert shown["status"] == "idle"
    assert (await outcome(one, (await say(two, session, "echo on"))["run"]))["output"] == "on"


async def opaque_items(deployment: Deployment, session: str) -> int:
    """How many lie beside the log for the runs of a session."""
    assert deployment.broker
    subject = subjects.checkpoint(SessionKey("default", session), "*")
    state = (await deployment.broker.api("STREAM.INFO.KV_checkpoints", {"subjects_filter": subject}))["state"]
    return sum((state.get("subjects") or {}).values())


async def killed(deployment: Deployment, speaker: Speaker, session: str) -> None:
    """Kills the runner that carries out the session's newest attempt."""

    async def owner() -> str | None:
        starts = await of(speaker, session, "run.started")
        return starts[-1]["runner"] if starts else None

    name = await eventually(owner, 60)
    victim = next(runner for runner in deployment.runners if name.split("-")[-2] == str(runner.pid))
    victim.kill()


@presets
async def test_s18_a_runner_is_killed_in_a_model_call(deployment: Deployment, session: str, preset: str) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    run = (await say(one, session, "[wait 2s][say at last]", message_id="m1"))["run"]
    await reaches(one, run, "running")
    await killed(deployment, one, session)
    ended = await outcome(two, run)
    if preset in ("strict", "workspace"):
        assert (ended["status"], ended["output"]) == ("completed", "at last")
        assert [start["attempt"] for start in await of(one, session, "run.started")] == [1, 2]
    else:
        assert (ended["status"], ended["error"]["code"]) == ("failed", "interrupted")
        assert "the runner stopped while the run was in flight" in ended["error"]["message"]
        (started,) = await of(one, session, "run.started")
        assert started["message_ids"] == ["m1"]
        first = (await sent(two, session))[0]
        assert first["user"] == ("[about]" if preset == "memory" else "[wait 2s][say at last]")


@presets
async def test_s19_a32_a64_a_runner_is_killed_in_a_tool_that_must_not_be_repeated(
    deployment: Deployment, session: str, preset: str
) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    run = (await say(one, session, '[tool errand {"seconds":2}]'))["run"]
    await eventually(lambda: of(one, session, "tool.started"), 60)
    await killed(deployment, one, session)
    ended = await outcome(two, run)
    if preset in ("strict", "workspace"):
        (returned,) = await of(one, session, "tool.returned")
        assert returned["status"] == "uncertain"
        assert ended["status"] == "completed" and "uncertain" in ended["output"]
    else:
        assert (ended["status"], ended["error"]["code"]) == ("failed", "interrupted")
        (end,) = await of(one, session, "run.ended")
        (reply,) = await of(one, session, "model.replied")
        assert end["unfinished"] == [call["id"] for call in reply["tool_calls"]]
    assert len(await of(one, session, "tool.started")) == 1, "it is not repeated"
    seen = await sent(two, session)
    if preset == "memory":
        assert len(seen) == 1
    else:
        assert any("may or may not have taken effect" in json.dumps(message) for message in seen)


@presets
async def test_s22_s27_a_provider_that_is_not_there_and_the_turn_tried_again(
    deployment: Deployment, session: str, preset: str
) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    prompt = "[fail 400]"
    run = (await say(one, session, prompt))["run"]
    ended = await outcome(two, run)
    assert (ended["status"], ended["error"]["code"]) == ("failed", "model_error")
    shown = (await one.ask("get_session", session=session, after=ended["seq"])).body
    assert shown["status"] == "error"
    retried = await one.ask("retry_session", session=session)
    assert retried.status == 202 and retried.body["run"] == f"{session}.2"
    assert (await outcome(two, retried.body["run"]))["status"] == "failed"
    posted = await of(two, session, "message.posted")
    starts = await of(two, session, "run.started")
    assert len(posted) == 1 and [start["message_ids"] for start in starts] == [[posted[0]["message_id"]]] * 2
    assert starts[1]["trigger"] == "retry"
    seen = await sent(two, session)
    assert "model_error" not in json.dumps(seen)
    assert sum(message.get("user") == prompt for message in seen) == (preset != "memory"), "once, if at all"


@presets
async def test_s25_an_empty_reply(deployment: Deployment, session: str, preset: str) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    thought = await outcome(one, (await say(two, session, "[think all of it] [cut 0]"))["run"])
    assert thought["status"] == "completed" and "token limit" in thought["note"] and not thought.get("output")
    nothing = await outcome(one, (await say(two, session, "[empty]"))["run"])
    if preset == "strict":
        assert (nothing["status"], nothing["error"]["code"]) == ("failed", "empty_reply")
    else:
        assert nothing["status"] == "completed" and "nothing at all" in nothing["note"]
    if preset == "memory":
        assert await sent(two, session) == [{"user": "[about]"}], "it adds no turn"


@presets
async def test_s28_nothing_to_retry(deployment: Deployment, session: str, preset: str) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    answer = await one.ask("retry_session", session=session)
    assert (answer.status, answer.body["code"]) == (409, "nothing_to_retry")
    await outcome(two, (await say(one, session, "echo well"))["run"])
    answer = await two.ask("retry_session", session=session)
    assert (answer.status, answer.body["code"]) == (409, "nothing_to_retry")
    run = (await say(one, session, HANG))["run"]
    answer = await two.ask("retry_session", session=session)
    assert (answer.status, answer.body["code"], answer.body["run"]) == (409, "run_active", run)
    await one.ask("cancel_run", run=run)
    assert (await outcome(one, run))["status"] == "cancelled"


@presets
async def test_s33_a57_a_persons_title_stays(deployment: Deployment, session: str, preset: str) -> None:
    await begin(deployment, session, preset)
    one, two = deployment.apis
    await outcome(one, (await say(one, session, "echo one"))["run"])
    named = await two.ask("update_session", session=session, title="Mine")
    assert named.status == 200
    ended = await outcome(one, (await say(one, session, "echo two"))["run"])
    shown = (await two.ask("get_session", session=session, after=ended["seq"])).body
    assert shown["title"] == "Mine"


@presets
async def test_s45_a_turn_that_fails_before_it_starts_costs_one_try_a_message(
    deployment: Deployment, session: str, preset: str
) -> None:
    """A queued run that is cancelled before it starts takes nothing, and is not tried again."""
    await begin(deployment, session, preset, on_busy="queue")
    one, two = deployment.apis
    front = (await say(one, session, HANG))["run"]
    await reaches(one, front, "running")
    behind = (await say(two, session, "echo never", message_id="never"))["run"]
    assert (await one.ask("cancel_run", run=behind)).status == 200
    await one.ask("cancel_run", run=front)
    await outcome(two, front)
    starts = await of(two, session, "run.started")
    assert [start["run"] for start in starts] == [1]
    assert not any(message.get("user") == "echo never" for message in await sent(two, session))


async def test_s46_thread_takes_no_second_author_into_a_turn(deployment: Deployment, session: str) -> None:
    await begin(deployment, session, "thread")
    one, two = deployment.apis
    run = (await say(one, session, '[tool sleep {"seconds":1}][then][say done]', author="user:ann"))["run"]
    await reaches(two, run, "running")
    other = await say(two, session, "echo mine", author="user:bob")
    assert (other["routed"], other["run"]) == ("queued", f"{session}.2")
    same = await say(one, session, "go on", author="user:ann")
    assert (same["routed"], same["run"]) == ("steered", run)
    await outcome(one, run)
    assert (await outcome(one, other["run"]))["output"] == "mine"


async def test_s46_workspace_queues_both_and_shows_the_sender(deployment: Deployment, session: str) -> None:
    await begin(deployment, session, "workspace")
    one, two = deployment.apis
    await outcome(two, (await say(one, session, "echo hello", author="user:ann"))["run"])
    seen = await sent(two, session, author="user:bob")
    assert seen[0] == {"user": "echo hello"} and seen[-1] == {"user": '<message from="user:bob">[about]</message>'}


async def test_s47_a28_an_answer_outlives_everything_and_becomes_no_prompt(
    deployment: Deployment, session: str
) -> None:
    await begin(deployment, session, "strict")
    one, _ = deployment.apis
    run = (await say(one, session, ask()))["run"]
    await reaches(one, run, "waiting")
    for runner in deployment.runners:
        runner.kill()
    answer = await say(one, session, "the left one")
    assert answer["routed"] == "answered"
    assert deployment.server
    deployment.server.kill()
    for service in deployment.services.values():
        if service.running:
            service.kill()
    await deployment.heal()
    shown = await insist([one], "wait_run", run=run, timeout=60)
    assert shown.body["outcome"]["status"] == "completed" and "the left one" in shown.body["outcome"]["output"]
    seen = await sent(one, session)
    assert not any(message.get("user") == "the left one" for message in seen)
    assert any("the left one" in message.get("result", "") for message in seen)


async def test_s57_ten_questions_in_one_run(deployment: Deployment, session: str) -> None:
    await begin(deployment, session, "strict")
    one, two = deployment.apis
    run = (await say(one, session, "[then]".join([ask(choices=[str(n)]) for n in range(10)]) + "[then][say all]"))[
        "run"
    ]
    for n in range(10):

        async def asked(n: int = n) -> bool:
            found = await state(two, run)
            return found["status"] == "waiting" and found["requests"][0]["request"] == f"{run}.q{n + 1}"

        await eventually(asked, 60, what=f"question {n + 1}")
        assert (await one.ask("answer_run", run=run, answer=str(n))).status == 202
    assert (await outcome(one, run))["output"] == "all"
    starts = await of(one, session, "run.started")
    assert [start.get("trigger") for start in starts] == [None, *["answers"] * 10], "a message, unless it is said"


async def test_a71_a_waiting_run_is_waiting_wherever_one_looks(deployment: Deployment, session: str) -> None:
    await begin(deployment, session, "strict")
    one, two = deployment.apis
    posted = await one.ask("post_message", session=session, content=ask(), wait=30)
    run = posted.body["run"]
    assert "outcome" not in posted.body, "it is not done"
    seq = (await state(two, run))["seq"]
    assert (await two.ask("get_run", run=run, after=seq)).body["status"] == "waiting"
    assert (await two.ask("get_session", session=session, after=seq)).body["status"] == "waiting"
    listed = (await one.ask("list_runs", session=session, status="waiting", after=seq)).body["items"]
    assert [item["id"] for item in listed] == [run]
    requests = (await two.ask("list_requests", session=session, after=seq)).body["items"]
    assert [(request["id"], request["run"], request["kind"]) for request in requests] == [
        (f"{run}.q1", run, "question")
    ]
    assert (await one.ask("answer_request", request=f"{run}.q1", answer="x")).status == 202
    await outcome(two, run)


async def test_a58_an_answer_at_first_sight_is_never_lost(deployment: Deployment, session: str) -> None:
    await begin(deployment, session, "workspace")
    one, two = deployment.apis
    for n in range(20):
        run = (await say(one, session, ask()))["run"]
        while True:
            answer = await two.ask("answer_run", run=run, answer=f"answer {n}")
            if answer.status == 202:
                break
            assert (answer.status, answer.body["code"]) == (409, "not_waiting")
        assert f"answer {n}" in (await outcome(one, run))["output"]


async def test_a15_interrupt_ends_the_run_in_front_and_comes_next(deployment: Deployment, session: str) -> None:
    await begin(deployment, session, "workspace", on_busy="interrupt")
    one, two = deployment.apis
    front = (await say(one, session, HANG))["run"]
    await reaches(two, front, "running")
    said = await say(two, session, "echo me")
    assert said["routed"] == "queued"
    assert (await outcome(one, said["run"]))["output"] == "me"
    assert (await outcome(one, front))["status"] == "cancelled"


async def test_s16_stopping_a_session_ends_everything_in_it(deployment: Deployment, session: str) -> None:
    await begin(deployment, session, "workspace")
    one, two = deployment.apis
    runs = [(await say(one, session, HANG))["run"]]
    await reaches(two, runs[0], "running")
    runs += [(await say(two, session, f"echo {n}"))["run"] for n in range(4)]
    stopped = await two.ask("stop_session", session=session)
    assert stopped.status == 200 and sorted(stopped.body["stopped"]) == sorted(runs)
    for run in runs:
        assert (await outcome(one, run))["status"] == "cancelled"
    assert len(await of(one, session, "run.started")) == 1, "nothing started in between"
    assert (await two.ask("stop_session", session=session)).body["stopped"] == []
