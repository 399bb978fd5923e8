"""One conversation through several processes: two API processes, two runners, a projector, over HTTP and over NATS.

Whatever two clients do at once, the log decides, and everybody gets the same answer wherever he asks.
"""

import asyncio
import json
import random
import time
from collections.abc import Awaitable
from statistics import median

import pytest
from tests.support.asking import Answer, Speaker, events, opened, outcome, say, types
from tests.support.deployment import Deployment
from tests.support.follower import following
from tests.support.waiting import eventually

pytestmark = pytest.mark.system

HANG = "[hang]"
"""A model that is blocked until its run is cancelled."""
DERIVED = {"titles": "derived"}
"""Nothing comes behind a turn."""


@pytest.fixture(params=["http", "nats"])
def speakers(request: pytest.FixtureRequest, deployment: Deployment) -> list[Speaker]:
    """Two ways in: each API process over HTTP, or twice whichever the broker chooses."""
    return list(deployment.apis) if request.param == "http" else [deployment.nats, deployment.nats]


async def at_once(asking: list[Awaitable[Answer]]) -> list[Answer]:
    return list(await asyncio.gather(*asking))


async def blocked(speaker: Speaker, session: str) -> str:
    """A run whose model is blocked."""
    run = (await say(speaker, session, HANG))["run"]
    await begun(speaker, run)
    return run


async def begun(speaker: Speaker, run: str) -> None:
    async def running() -> bool:
        return (await speaker.ask("wait_run", run=run, timeout=0)).body["status"] == "running"

    await eventually(running, 60, what=f"the start of {run}")


async def free(speakers: list[Speaker], run: str) -> None:
    """Ends a run that hangs."""
    assert (await speakers[0].ask("cancel_run", run=run)).status == 202
    assert (await outcome(speakers[1], run))["status"] == "cancelled"


async def test_s01_one_message_one_reply(deployment: Deployment, speakers: list[Speaker], session: str) -> None:
    one, two = speakers
    await opened(one, session, policy=DERIVED)
    posted = await say(two, session, "echo Hello, world!")
    assert (posted["session"], posted["run"], posted["routed"]) == (session, f"{session}.1", "started")
    ended = await outcome(one, posted["run"])
    assert (ended["status"], ended["output"]) == ("completed", "Hello, world!")
    everything = await events(two, session)
    assert [event["type"] for event in everything] == ["session.opened", "message.posted", "run.started", "run.ended"]
    assert everything[-1]["seq"] == ended["seq"]
    shown = (await one.ask("get_session", session=session, after=ended["seq"])).body
    assert (shown["title"], shown["status"]) == ("echo Hello, world!", "idle")
    run = (await two.ask("get_run", run=posted["run"], after=ended["seq"])).body
    assert (run["status"], run["output"]) == ("completed", "Hello, world!")
    history = (await one.ask("read_history", session=session, after=ended["seq"])).body
    said, replied = history["items"]
    assert (said["content"][0]["text"], replied["content"]) == ("echo Hello, world!", "Hello, world!")


async def test_s02_the_second_message_is_sent_with_the_first_and_its_reply(
    deployment: Deployment, session: str
) -> None:
    """Whichever runner takes it."""
    one, two = deployment.apis
    await opened(one, session)
    await outcome(two, (await say(one, session, "echo first"))["run"])
    ended = await outcome(one, (await say(two, session, "[about]"))["run"])
    sent = json.loads(ended["output"])["messages"]
    assert sent == [{"user": "echo first"}, {"assistant": "first"}, {"user": "[about]"}]


async def test_s50_what_a_model_would_get_is_what_it_gets(speakers: list[Speaker], session: str) -> None:
    one, two = speakers
    await opened(one, session)
    await outcome(two, (await say(one, session, '[tool add {"a": 1, "b": 2}] [then] [say Three.]'))["run"])
    posted = await say(two, session, "[wait 2s] [about]")
    await begun(one, posted["run"])
    shown = (await two.ask("read_history", **{"session": session, "as": "model"})).body
    sent = json.loads((await outcome(one, posted["run"]))["output"])["messages"]
    assert [message["type"] for message in shown["messages"]] == ["user", "assistant", "tool", "assistant", "user"]
    texts = [message.get("user") or message.get("result") or message.get("assistant") or "" for message in sent]
    assert [message["text"] for message in shown["messages"]] == texts
    first = (await events(one, session))[0]["seq"]
    assert (shown["from_seq"], shown["fits"]) == (first, True)
    assert 0 < shown["tokens"] < shown["budget"]


async def test_s03_a_second_message_while_the_model_is_blocked_is_refused(
    speakers: list[Speaker], session: str
) -> None:
    one, two = speakers
    await opened(one, session)
    run = await blocked(one, session)
    answer = await two.ask("post_message", session=session, content="me too")
    assert (answer.status, answer.body["code"], answer.body["run"]) == (409, "run_active", run)
    await free(speakers, run)
    assert await types(two, session) == [
        "session.opened",
        *("message.posted", "run.started", "run.cancel_requested", "run.ended"),
    ]
    assert (await outcome(one, (await say(two, session, "echo now"))["run"]))["output"] == "now"


async def test_s03_a_second_message_that_may_wait_runs_next(speakers: list[Speaker], session: str) -> None:
    one, two = speakers
    await opened(one, session)
    run = await blocked(one, session)
    queued = await say(two, session, "echo next", on_busy="queue")
    assert (queued["routed"], queued["run"]) == ("queued", f"{session}.2")
    queue = (await one.ask("read_queue", session=session)).body
    assert (queue["active"], [item["run"] for item in queue["items"]]) == (run, [queued["run"]])
    await free(speakers, run)
    assert (await outcome(one, queued["run"]))["output"] == "next"
    assert (await two.ask("read_queue", session=session)).body["items"] == []


async def test_s04_of_twelve_messages_at_once_one_is_taken(speakers: list[Speaker], session: str) -> None:
    await opened(speakers[0], session)
    answers = await at_once([speakers[n % 2].ask("post_message", session=session, content=HANG) for n in range(12)])
    assert sorted(answer.status for answer in answers) == [202] + [409] * 11
    run = f"{session}.1"
    await begun(speakers[0], run)
    for answer in answers:
        assert answer.body["run"] == run
        assert answer.status == 202 or answer.body["code"] == "run_active"
    await free(speakers, run)
    assert (await types(speakers[1], session)).count("message.posted") == 1


async def test_s04_twelve_messages_at_once_that_may_wait_run_in_order(speakers: list[Speaker], session: str) -> None:
    await opened(speakers[0], session, policy={"on_busy": "queue"})
    answers = await at_once(
        [speakers[n % 2].ask("post_message", session=session, content=f"echo {n}") for n in range(12)]
    )
    assert {answer.status for answer in answers} == {202}
    taken = {answer.body["run"]: n for n, answer in enumerate(answers)}
    assert set(taken) == {f"{session}.{n}" for n in range(1, 13)}
    for run, n in taken.items():
        assert (await outcome(speakers[0], run))["output"] == str(n)
    everything = await events(speakers[1], session)
    started = [event["data"]["run"] for event in everything if event["type"] == "run.started"]
    ended = [event["data"]["run"] for event in everything if event["type"] == "run.ended"]
    assert started == ended == list(range(1, 13))
    turns = [event["type"] for event in everything if event["type"].startswith("run.")]
    assert turns == ["run.started", "run.ended"] * 12, "no two at once"
    sent = json.loads((await outcome(speakers[0], (await say(speakers[1], session, "[about]"))["run"]))["output"])
    assert [next(iter(message)) for message in sent["messages"]] == ["user", "assistant"] * 12 + ["user"]
    assert [message["user"] for message in sent["messages"][0:24:2]] == [
        f"echo {taken[f'{session}.{n}']}" for n in range(1, 13)
    ]


async def test_s05_a_message_exactly_while_a_run_ends_is_taken_or_refused(deployment: Deployment, session: str) -> None:
    """The second message is sent over and over until it is taken: the last refusal and the first acceptance lie on
    either side of the end of the first run."""
    trials = 30
    refusals = 0

    async def trial(n: int) -> None:
        nonlocal refusals
        one, two = deployment.apis if n % 2 else reversed(deployment.apis)
        mine = f"{session}-{n}"
        await opened(one, mine, policy=DERIVED)
        await say(one, mine, f"[wait {500 + 3 * n}ms][say first]")
        while (answer := await two.ask("post_message", session=mine, content="echo second")).status == 409:
            assert answer.body["code"] == "run_active" and answer.body["run"] == f"{mine}.1"
            refusals += 1
        assert answer.status == 202 and answer.body["run"] == f"{mine}.2", answer
        assert (await outcome(one, f"{mine}.2"))["output"] == "second"
        assert await types(two, mine) == [
            "session.opened",
            *("message.posted", "run.started", "run.ended"),
            *("message.posted", "run.started", "run.ended"),
        ]

    for first in range(0, trials, 6):
        await asyncio.gather(*(trial(n) for n in range(first, first + 6)))
    assert refusals >= trials


async def test_s05_a_message_that_may_wait_is_never_in_limbo_however_runs_end(
    deployment: Deployment, session: str
) -> None:
    """One hundred messages, each sent at the very moment the one before has ended."""
    one, two = deployment.apis
    await opened(one, session, policy={"on_busy": "queue"})
    async with following(session, two.url, deltas=False) as follower:
        for n in range(1, 51):
            posted = [await say(api, session, f"echo {n}") for api in (one, two)]
            assert [answer["run"] for answer in posted] == [f"{session}.{2 * n - 1}", f"{session}.{2 * n}"]
            await follower.until("run.ended", count=2 * n - 1)
        await follower.until("run.ended", count=100)
        ends = [record["data"] for record in follower.records if record["type"] == "run.ended"]
    assert [(end["run"], end["status"]) for end in ends] == [(n, "completed") for n in range(1, 101)]


async def test_s06_a56_the_same_key_at_once_is_one_run(speakers: list[Speaker], session: str) -> None:
    await opened(speakers[0], session, policy=DERIVED)
    key, body = f"key of {session}", {"session": session, "content": "echo once"}
    answers = await at_once([speakers[n % 2].ask("post_message", key=key, **body) for n in range(50)])
    assert {answer.status for answer in answers} == {200, 202}
    assert 1 <= sum(answer.status == 202 for answer in answers) <= 2, (
        "each process may have stored it, as far as it knows"
    )
    assert all(answer.replayed == (answer.status == 200) for answer in answers)
    assert len({json.dumps(answer.body, sort_keys=True) for answer in answers}) == 1
    assert (await outcome(speakers[1], f"{session}.1"))["output"] == "once"
    again = await speakers[1].ask("post_message", key=key, **body)
    assert again.replayed and again.body == answers[0].body
    assert await types(speakers[0], session) == ["session.opened", "message.posted", "run.started", "run.ended"]


async def test_s06_the_same_key_at_once_opens_one_session_where_the_id_is_made_here(
    speakers: list[Speaker], session: str
) -> None:
    key = f"key of {session}"
    opening = await at_once([speakers[n % 2].ask("open_session", key=key, title="one") for n in range(20)])
    assert {answer.status for answer in opening} == {200, 201}
    assert len({answer.body["session"] for answer in opening}) == 1
    starting = await at_once([speakers[n % 2].ask("start_run", key=key, input="echo x") for n in range(20)])
    assert {answer.status for answer in starting} == {200, 202}
    (run,) = {answer.body["run"] for answer in starting}
    assert (await outcome(speakers[0], run))["output"] == "x"


async def test_s07_the_same_key_with_another_body_is_refused(speakers: list[Speaker], session: str) -> None:
    one, two = speakers
    await opened(one, session)
    key = f"key of {session}"
    await outcome(one, (await say(one, session, "echo once", key=key))["run"])
    answer = await two.ask("post_message", key=key, session=session, content="echo twice")
    assert (answer.status, answer.body["code"]) == (409, "key_reused")
    both = await at_once(
        [speakers[n % 2].ask("post_message", key=f"{key} 2", session=session, content=f"echo {n}") for n in range(8)]
    )
    assert sorted(answer.status for answer in both) == [202] + [409] * 7
    assert {answer.body["code"] for answer in both if answer.status == 409} <= {"key_reused", "run_active"}
    assert (await types(two, session)).count("message.posted") == 2


async def test_s16_cancelling_whatever_state_a_run_is_in(speakers: list[Speaker], session: str) -> None:
    one, two = speakers
    await opened(one, session, policy={"on_busy": "queue"})
    running = await blocked(one, session)
    waiting = (await say(two, session, "echo never"))["run"]
    done = await two.ask("cancel_run", run=waiting)
    assert (done.status, done.body["state"]) == (200, "cancelled")
    asked = await two.ask("cancel_run", run=running, reason="enough")
    assert (asked.status, asked.body["state"]) == (202, "requested")
    ended = await outcome(one, running)
    assert ended["status"] == "cancelled"
    shown = (await two.ask("get_run", run=running, after=ended["seq"])).body
    assert (shown["status"], shown["cancel_requested"]["reason"]) == ("cancelled", "enough")
    for run in (running, waiting):
        again = await one.ask("cancel_run", run=run)
        assert (again.status, again.body["state"]) == (200, "ended")
    everything = await events(two, session)
    assert sorted(event["data"]["run"] for event in everything if event["type"] == "run.ended") == [1, 2]


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param("[hang]", id="silent-model"),
        pytest.param("[slow 1000 20ms]", id="talking-model"),
        pytest.param('[tool sleep {"seconds":60}]', id="tool"),
        pytest.param("[fail 503 always 60s]", id="back-off"),
    ],
)
async def test_s17_a_cancel_through_another_process_takes_less_than_a_second(
    deployment: Deployment, session: str, prompt: str
) -> None:
    """The median of several, for a machine that runs tests has hiccups."""
    taking, cancelling = deployment.apis

    async def trial(mine: str) -> float:
        await opened(taking, mine)
        run = (await say(taking, mine, prompt))["run"]
        async with following(mine, taking.url) as follower:
            await follower.until("model.replied" if "tool" in prompt else "run.started")
            began = time.monotonic()
            answer = await cancelling.ask("cancel_run", run=run, reason="enough")
            assert (answer.status, answer.body["state"]) == (202, "requested")
            await follower.until("run.ended")
            took = time.monotonic() - began
            end = follower.records[-1]["data"]
        assert (end["status"], end["attempt"]) == ("cancelled", 1)
        shown = (await cancelling.ask("get_run", run=run, after=follower.cursor)).body
        assert (shown["status"], shown["cancel_requested"]["reason"]) == ("cancelled", "enough")
        return took

    times = [await trial(f"{session}-{n}") for n in range(3)]
    assert median(times) < 1, times


async def test_a17_a_cancel_right_behind_the_message_is_never_lost(deployment: Deployment, session: str) -> None:
    rng = random.Random(17)

    async def trial(n: int) -> None:
        one, two = deployment.apis if n % 2 else reversed(deployment.apis)
        mine = f"{session}-{n}"
        await opened(one, mine)
        run = (await say(one, mine, "[wait 20s][say success]"))["run"]
        await asyncio.sleep(rng.random() * 0.02)  # at any moment of its start
        assert (await two.ask("cancel_run", run=run)).status in (200, 202)
        assert (await outcome(one, run))["status"] == "cancelled"
        assert (await types(two, mine)).count("run.ended") == 1

    for first in range(0, 60, 10):
        await asyncio.gather(*(trial(n) for n in range(first, first + 10)))


async def test_a65_what_was_said_until_a_cancel_is_kept(deployment: Deployment, session: str) -> None:
    one, two = deployment.apis
    await opened(one, session)
    async with following(session, one.url) as follower:
        run = (await say(one, session, "[think Let me see.][slow 2000 10ms]"))["run"]
        await eventually(lambda: len(follower.text(run).split()) >= 50, 60, what="50 words")
        assert (await two.ask("cancel_run", run=run, reason="enough")).status == 202
        await follower.until("run.ended")
        end = follower.records[-1]["data"]
        assert end["status"] == "cancelled"
        assert end["reasoning"] == "Let me see."
        kept = end["content"]
        assert kept == follower.text(run), "what is kept is what was heard"
    assert 50 <= len(kept.split()) < 2000
    shown = (await two.ask("get_run", run=run, after=follower.cursor)).body
    assert (shown["status"], shown["output"]) == ("cancelled", kept)
    # The next turn knows what was said.
    sent = json.loads((await outcome(two, (await say(two, session, "[about]"))["run"]))["output"])["messages"]
    assert sent[1] == {"assistant": kept}
