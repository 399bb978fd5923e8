"""Stopping a session, trying a turn again, and what waits in the queue until a run takes it."""

import asyncio
import json
from typing import Any

import pytest
from tests.support.api import Running

from turnstream import ids
from turnstream.session.events import Error

FAILED: dict[str, Any] = {"status": "failed", "error": Error(code="model_error", message="no")}


async def events(api: Running, kind: str, session: str = "s1", *, raw: bool = False) -> list[dict[str, Any]]:
    page = (await api.http.get(f"/v1/sessions/{session}/events", params={"types": kind, "limit": 200})).json()
    return [event if raw else event["data"] for event in page["events"]]


async def queue(api: Running, session: str = "s1") -> list[dict[str, Any]]:
    return (await api.http.get(f"/v1/sessions/{session}/queue")).json()["items"]


async def live(api: Running, session: str = "s1") -> dict[str, str]:
    folded = await api.hand.sessions.load(api.hand.key(session))
    return {f"{session}.{run.n}": "cancelling" if run.cancel else run.status for run in folded.runs}


# --- stopping -----------------------------------------------------------------------------------------------------


async def test_a_stop_ends_all_that_is_live_from_behind(api: Running) -> None:
    await api.open("s1", policy={"on_busy": "queue"})
    for text in ("one", "two", "three"):
        await api.say("s1", text)
    await api.hand.start("s1.1")
    await api.say("s1", "also this", on_busy="steer")
    stopped = await api.post("/v1/sessions/s1/stop", {"reason": "enough"})
    assert stopped.status_code == 200 and stopped.json()["stopped"] == ["s1.3", "s1.2", "s1.1"]
    assert stopped.headers["etag"] == f'"{stopped.json()["seq"]}"'
    assert await live(api) == {"s1.1": "cancelling"} and await queue(api) == []
    assert [end["run"] for end in await events(api, "run.ended")] == [3, 2]
    assert [one["run"] for one in await events(api, "run.cancel_requested")] == [1]
    await api.hand.end("s1.1", status="cancelled")
    assert await live(api) == {}, "what steered the run is left over for no other"
    again = await api.post("/v1/sessions/s1/stop")
    assert again.status_code == 200 and again.json()["stopped"] == []
    assert (await api.say("s1", "and on"))["routed"] == "started"


async def test_a_stop_of_a_run_that_waits_closes_its_requests(api: Running) -> None:
    await api.open("s1")
    await api.hand.start((await api.say("s1"))["run"])
    await api.hand.ask("s1.1", {"prompt": "Which one?"})
    assert (await api.post("/v1/sessions/s1/stop")).json()["stopped"] == ["s1.1"]
    assert await live(api) == {}
    late = await api.post("/v1/runs/s1.1/input", {"answer": "x"})
    assert late.json()["code"] == "request_closed"


async def test_a_stop_with_a_key_is_about_what_was_there(api: Running) -> None:
    await api.open("s1", policy={"on_busy": "queue"})
    for text in ("one", "two"):
        await api.say("s1", text)
    await api.hand.start("s1.1")
    first = await api.post("/v1/sessions/s1/stop", Idempotency_Key="k1")
    await api.hand.end("s1.1", status="cancelled")
    await api.say("s1", "three")
    again = await api.post("/v1/sessions/s1/stop", Idempotency_Key="k1")
    assert again.status_code == 200 and again.headers["idempotency-replayed"] == "true"
    assert again.json()["stopped"] == first.json()["stopped"] == ["s1.2", "s1.1"]
    assert await live(api) == {"s1.3": "queued"}, "what was said since is not touched"
    other = await api.post("/v1/sessions/s1/stop", {"reason": "other"}, Idempotency_Key="k1")
    assert other.status_code == 409 and other.json()["code"] == "key_reused"


async def test_a_stop_that_was_cut_short_is_finished_by_its_repeat(api: Running) -> None:
    """Its process died after the first of its events."""
    await api.open("s1", policy={"on_busy": "queue"})
    for text in ("one", "two", "three"):
        await api.say("s1", text)
    await api.hand.start("s1.1")
    key = ids.digest(b"stop_session\x1fkey\x1fk1")
    await api.hand.cancel("s1.3", idempotency_key=key, body_digest=ids.digest(b'{"session":"s1"}'), correlation="c1")
    await api.say("s1", "four")
    again = await api.post("/v1/sessions/s1/stop", Idempotency_Key="k1")
    assert again.json()["stopped"] == ["s1.3", "s1.2", "s1.1"]
    assert await live(api) == {"s1.1": "cancelling", "s1.4": "queued"}
    correlations = {event["correlation"] for event in await events(api, "run.ended,run.cancel_requested", raw=True)}
    assert correlations == {"c1"}


async def test_two_stops_with_one_key_at_once_are_one(api: Running) -> None:
    for n in range(10):
        await api.open(f"s{n}", policy={"on_busy": "queue"})
        for text in ("one", "two"):
            await api.say(f"s{n}", text)
        path = f"/v1/sessions/s{n}/stop"
        answers = await asyncio.gather(*(api.post(path, Idempotency_Key="k1") for _ in range(3)))
        named = sorted({run for answer in answers for run in answer.json()["stopped"]})
        assert named == [f"s{n}.1", f"s{n}.2"] and await live(api, f"s{n}") == {}
        assert len(await events(api, "run.ended", f"s{n}")) == 2
        assert (await api.post(path, Idempotency_Key="k1")).json()["stopped"] == [f"s{n}.2", f"s{n}.1"]


async def test_a_stop_may_expect_a_sequence(api: Running) -> None:
    await api.open("s1")
    seq = (await api.say("s1"))["seq"]
    moved = await api.post("/v1/sessions/s1/stop", {"expected_seq": seq - 1})
    assert (moved.status_code, moved.json()["seq"]) == (412, seq) and await live(api) == {"s1.1": "queued"}
    assert (await api.post("/v1/sessions/s1/stop", {"expected_seq": seq})).json()["stopped"] == ["s1.1"]
    assert (await api.post("/v1/sessions/none/stop")).status_code == 404


async def test_a17_a_stop_right_behind_a_message_ends_its_run(api: Running) -> None:
    await api.open("s1")
    for _ in range(20):
        posted, stopped = await asyncio.gather(api.say("s1"), api.post("/v1/sessions/s1/stop"))
        named = stopped.json()["stopped"]
        assert named in ([], [posted["run"]])
        if not named:  # it came before the message
            assert (await api.post("/v1/sessions/s1/stop")).json()["stopped"] == [posted["run"]]
        assert await live(api) == {}


# --- trying again -------------------------------------------------------------------------------------------------


async def test_s27_a_retry_is_a_run_without_a_message(api: Running) -> None:
    await api.open("s1")
    posted = await api.say("s1", "hello")
    await api.hand.carry_out("s1.1", "", **FAILED)
    asked = asyncio.create_task(api.post("/v1/sessions/s1/retry?wait=20", Idempotency_Key="k1"))
    while not await live(api):
        pass
    (waiting,) = await queue(api)
    assert (waiting["message"], waiting["run"], waiting["waits"]) == (posted["message"], "s1.2", "retry")
    await api.hand.carry_out("s1.2", "well")
    retried = await asked
    assert retried.status_code == 202
    body = retried.json()
    assert (body["run"], body["retry_of"], body["status"], body["outcome"]["output"]) == (
        "s1.2",
        "s1.1",
        "completed",
        "well",
    )
    again = await api.post("/v1/sessions/s1/retry", Idempotency_Key="k1")
    assert again.status_code == 200 and again.json()["run"] == "s1.2"
    assert len(await events(api, "message.posted")) == 1
    (requested,) = await events(api, "run.requested")
    assert requested["message_ids"] == [posted["message"]] and requested["retry_of"] == 1


async def test_s28_nothing_to_retry(api: Running) -> None:
    await api.open("s1")
    nothing = await api.post("/v1/sessions/s1/retry")
    assert (nothing.status_code, nothing.json()["code"]) == (409, "nothing_to_retry")
    await api.say("s1")
    busy = await api.post("/v1/sessions/s1/retry")
    assert (busy.status_code, busy.json()["code"], busy.json()["run"]) == (409, "run_active", "s1.1")
    await api.hand.carry_out("s1.1")
    assert (await api.post("/v1/sessions/s1/retry")).json()["code"] == "nothing_to_retry"
    assert (await api.post("/v1/sessions/none/retry")).status_code == 404


# --- what waits ---------------------------------------------------------------------------------------------------


async def test_the_queue_shows_everything_that_no_run_has_taken(api: Running) -> None:
    await api.open("s1", policy={"on_busy": "queue"})
    await api.say("s1", "one")
    await api.say("s1", "two", author="user:ann")
    await api.hand.start("s1.1")
    steering = [(await api.say("s1", text, on_busy="steer")) for text in ("left", "right")]
    assert [(one["routed"], one["run"]) for one in steering] == [("steered", "s1.1")] * 2
    found = await queue(api)
    assert [(one["position"], one["content"][0]["text"], one["run"], one["waits"]) for one in found] == [
        (1, "left", "s1.1", "steering"),
        (2, "right", "s1.1", "steering"),
        (3, "two", "s1.2", "queued"),
    ]
    assert found[0]["seq"] == steering[0]["seq"] and found[2]["author"] == "user:ann"
    await api.hand.end("s1.1", "", **FAILED)
    left = [(one["content"][0]["text"], one["run"], one["waits"]) for one in await queue(api)]
    assert sorted(left) == [("left", "s1.3", "leftover"), ("right", "s1.3", "leftover"), ("two", "s1.2", "queued")]


async def test_the_queue_shows_a_message_that_interrupts_before_what_it_overtakes(api: Running) -> None:
    await api.open("s1", policy={"on_busy": "queue"})
    await api.say("s1", "one")
    await api.say("s1", "two")
    await api.hand.start("s1.1")
    await api.say("s1", "left", on_busy="steer")
    for text in ("stop", "stop now"):
        await api.say("s1", text, on_busy="interrupt")
    shown = [one["content"][0]["text"] for one in await queue(api)]
    assert shown == ["stop now", "stop", "left", "two"]
    await api.hand.end("s1.1", "", status="cancelled")
    assert [one["content"][0]["text"] for one in await queue(api)] == shown


@pytest.mark.parametrize("waits", ["queued", "steering", "leftover"])
async def test_whatever_waits_can_be_withdrawn_and_posted_again(api: Running, waits: str) -> None:
    await api.open("s1", policy={"on_busy": "queue" if waits == "queued" else "steer"})
    await api.say("s1", "one")
    await api.hand.start("s1.1")
    for text in ("left", "right"):
        await api.say("s1", text, message_id=text)
    if waits == "leftover":
        await api.hand.end("s1.1", "", **FAILED)
    assert [(one["message"], one["waits"]) for one in await queue(api)] == [("left", waits), ("right", waits)]
    for text in ("left", "right"):
        withdrawn = await api.http.delete(f"/v1/sessions/s1/messages/{text}")
        assert withdrawn.status_code == 200, withdrawn.text
        again = await api.http.delete(f"/v1/sessions/s1/messages/{text}")
        assert again.json() == withdrawn.json(), "it was withdrawn already"
    assert await queue(api) == []
    assert await live(api) == ({} if waits == "leftover" else {"s1.1": "running"})
    changed = await api.say("s1", "up", message_id="up")
    assert changed["routed"] == {"queued": "queued", "steering": "steered", "leftover": "started"}[waits]


async def test_a_message_that_steers_is_waited_for_with_its_run(api: Running) -> None:
    await api.open("s1", policy={"on_busy": "steer"})
    await api.say("s1", "one")
    await api.hand.start("s1.1")
    asked = asyncio.create_task(api.post("/v1/sessions/s1/messages?wait=20", {"content": "two", "message_id": "m2"}))
    while not await queue(api):
        pass
    path = "/v1/sessions/s1/messages"
    async with api.feed("s1", method="POST", path=path, json={"content": "three"}) as feed:
        assert json.loads((await feed.next()).data)["routed"] == "steered"
        await api.hand.end("s1.1", "", **FAILED)
        assert [frame.event for frame in await feed.rest() if frame.id] == ["run.ended"]
    posted = (await asked).json()
    assert (posted["routed"], posted["run"], posted["outcome"]["status"]) == ("steered", "s1.1", "failed")
    assert [(one["message"], one["run"]) for one in await queue(api)][:1] == [("m2", "s1.2")], "it is left over"
