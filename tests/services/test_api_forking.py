"""Forking a session: what is asked, what is answered, and what may be asked of a fork that is not whole."""

import asyncio
from typing import Any

import httpx
import pytest
from tests.support.api import Running
from tests.support.waiting import eventually

from turnstream.session.events import ForkedFrom


async def fork(api: Running, source: str = "s1", *, wait: float = 0, key: str = "", **fields: Any) -> httpx.Response:
    headers = {"Idempotency_Key": key} if key else {}
    return await api.post(f"/v1/sessions/{source}/fork?wait={wait}", fields, **headers)


async def whole(api: Running, session: str) -> dict[str, Any]:
    """Makes it whole, as a runner would, and looks at it."""
    await api.hand.copy(session)
    answer = await api.http.get(f"/v1/sessions/{session}/events", params={"types": "session.forked", "limit": 200})
    assert len(answer.json()["events"]) == 1
    return answer.json()["events"][0]


async def events(api: Running, session: str) -> list[dict[str, Any]]:
    return (await api.http.get(f"/v1/sessions/{session}/events", params={"limit": 200})).json()["events"]


async def test_a_fork_is_answered_for_once_it_is_whole(api: Running) -> None:
    await api.open("s1")
    await api.turn("s1")
    asking = asyncio.create_task(fork(api, id="f1", wait=20))

    async def opened() -> bool:
        return (await api.hand.sessions.load(api.hand.key("f1"))).exists

    await eventually(opened)
    await api.hand.copy("f1")
    answer = await asking
    source = await events(api, "s1")
    copies = await events(api, "f1")
    assert answer.status_code == 201, answer.text
    assert answer.json() == {
        "session": "f1",
        "seq": copies[-1]["seq"],
        "from": {"session": "s1", "seq": source[-1]["seq"]},
        "whole": True,
    }
    assert answer.headers["etag"] == f'"{copies[-1]["seq"]}"'
    assert [one["type"] for one in copies] == ["session.opened", *(one["type"] for one in source), "session.forked"]
    told = [(one["storedat"], one["time"], one["actor"], one["data"]) for one in source]
    assert [(one["storedat"], one["time"], one["actor"], one["data"]) for one in copies[1:-1]] == told
    assert [one["copyof"] for one in copies[1:-1]] == [f"s1/{one['seq']}" for one in source]
    assert (await api.say("f1", "and on"))["run"] == "f1.2"


async def test_one_that_is_not_whole_in_time_is_202(api: Running) -> None:
    await api.open("s1")
    answer = await fork(api, wait=0.05)
    assert answer.status_code == 202 and not answer.json()["whole"]
    session = answer.json()["session"]
    refused = await api.post(f"/v1/sessions/{session}/messages", {"content": "hello"})
    assert refused.status_code == 409 and refused.headers["retry-after"] == "1"
    assert (refused.json()["code"], refused.json()["retry_after"]) == ("session_copying", 1)
    assert (await fork(api, session)).json()["code"] == "session_copying", "nor is it forked meanwhile"
    assert (await api.http.get(f"/v1/sessions/{session}/queue")).json()["items"] == []
    await whole(api, session)
    assert (await api.say(session))["routed"] == "started"


async def test_at_is_a_place_between_events_or_at_one(api: Running) -> None:
    await api.open("s1")
    first = (await events(api, "s1"))[0]["seq"]
    await api.open("s2")  # sequences of others lie between
    await api.turn("s1")
    last = (await events(api, "s1"))[-1]["seq"]
    for n, (at, seq) in enumerate([(first, first), (first + 1, first), (last, last), (None, last)]):
        answer = await fork(api, id=f"f{n}", **({"at": at} if at else {}))
        assert answer.status_code == 202 and answer.json()["from"] == {"session": "s1", "seq": seq}
        await whole(api, f"f{n}")
        assert len(await events(api, f"f{n}")) == len([one for one in await events(api, "s1") if one["seq"] <= seq]) + 2
    beyond = await fork(api, at=last + 1)
    assert (beyond.status_code, beyond.json()["code"], beyond.json()["field"]) == (422, "invalid", "at")
    assert beyond.json()["seq"] == last
    before = await fork(api, at=first - 1)
    assert (before.status_code, before.json()["field"], before.json()["seq"]) == (422, "at", first)


async def test_what_cannot_be_forked_is_refused(api: Running) -> None:
    assert (await fork(api)).status_code == 404
    await api.open("s1")
    await api.open("s2")
    taken = await fork(api, id="s2")
    assert (taken.status_code, taken.json()["code"], taken.json()["field"]) == (409, "already_exists", "id")
    assert (await fork(api, id="a--b")).json()["field"] == "id"
    assert (await fork(api, id="f1", title="\0")).json()["field"] == "title"
    assert (await fork(api, id="f1", agent="poet")).json()["field"] == "agent"
    seq = (await events(api, "s1"))[-1]["seq"]
    assert (await fork(api, id="f1", expected_seq=seq + 9)).json()["code"] == "session_moved"
    assert not (await api.hand.sessions.load(api.hand.key("f1"))).seq, "nothing is stored by a refusal"
    assert (await fork(api, id="f1", expected_seq=seq)).status_code == 202
    await api.open("s3", policy={"titles": "none"})
    assert (await fork(api, "s3", id="f3", title="T")).json()["field"] == "title"
    assert (await fork(api, "s3", id="f3", title="T", policy={"titles": "client"})).status_code == 202
    await api.hand.delete("s1")
    assert (await fork(api)).status_code == 404


async def test_the_same_fork_again_is_the_same(api: Running) -> None:
    await api.open("s1")
    first = await fork(api, id="f1")
    await whole(api, "f1")
    await api.turn("s1")
    again = await fork(api, id="f1")
    assert (again.status_code, again.json()["from"]) == (200, first.json()["from"]), "up to where it was then"
    assert (await fork(api, id="f1", at=first.json()["from"]["seq"], title="T")).json()["code"] == "already_exists"
    keyed = await fork(api, key="k1")
    assert (await fork(api, key="k1")).json()["session"] == keyed.json()["session"]
    assert (await fork(api, key="k1", title="T")).json()["code"] == "key_reused"
    await api.open("s2")
    other = await fork(api, "s2", key="k1")
    assert other.json()["session"] != keyed.json()["session"], "a key is one of the session that is forked"
    await whole(api, keyed.json()["session"])
    await api.hand.delete("s1")
    replayed = await fork(api, key="k1")
    assert (replayed.status_code, replayed.json()["whole"]) == (200, True), "whatever became of the other one"


async def test_many_equal_forks_at_once_are_one(api: Running) -> None:
    await api.open("s1")
    await api.turn("s1")

    async def talking() -> None:
        for _ in range(5):
            await api.turn("s1")

    answers, _ = await asyncio.gather(asyncio.gather(*(fork(api, key="k1") for _ in range(20))), talking())
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["session"] for answer in answers}) == 1
    assert len({answer.json()["from"]["seq"] for answer in answers}) == 1


async def test_a_key_of_the_source_is_free_in_the_fork(api: Running) -> None:
    await api.open("s1")
    await api.post("/v1/sessions/s1/messages", {"content": "hello"}, Idempotency_Key="k")
    await fork(api, id="f1")
    await whole(api, "f1")
    anew = await api.post("/v1/sessions/f1/messages", {"content": "something else"}, Idempotency_Key="k")
    assert anew.status_code == 202 and anew.json()["run"] == "f1.2"


async def test_a_fork_whose_source_is_deleted_is_deleted_before_its_caller(api: Running) -> None:
    await api.open("s1")
    asking = asyncio.create_task(fork(api, id="f1", wait=20))

    async def opened() -> bool:
        return (await api.hand.sessions.load(api.hand.key("f1"))).exists

    await eventually(opened)
    await api.hand.delete("f1")  # as the runner does that finds the other one gone
    answer = await asking
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


async def test_the_views_show_what_it_is_of_and_how_far_it_is(viewed: Running) -> None:
    api = viewed
    await api.open("s1", title="The first", metadata={"a": 1}, policy={"on_busy": "queue"})
    await api.turn("s1")
    await api.hand.start((await api.say("s1", "two"))["run"])
    await api.say("s1", "three")
    source = await events(api, "s1")
    await fork(api, id="f1", metadata={"b": 2})
    await api.hand.copy("f1", 5)
    seq = (await events(api, "f1"))[-1]["seq"]

    async def look(path: str, **params: Any) -> Any:
        return (await api.http.get(path, params={"after": seq, **params})).json()

    found = await look("/v1/sessions/f1")
    assert found["forked_from"] == {"session": "s1", "seq": source[-1]["seq"]}
    assert found["copying"] == {"seq": source[4]["seq"], "events": 5}
    assert (found["status"], found["active_run"], found["queued"]) == ("busy", None, 0)
    assert (found["title"], found["metadata"]) == ("The first", {"b": 2})
    overview = (await api.http.get("/v1/ops/overview")).json()
    assert overview["runs"] == {"queued": 1, "running": 1, "waiting": 0} | {
        "oldest_queued_at": overview["runs"]["oldest_queued_at"]
    }, "what is copied is not carried out"
    await api.hand.copy("f1")
    seq = (await events(api, "f1"))[-1]["seq"]
    found = await look("/v1/sessions/f1")
    assert (found["status"], found["copying"], found["last_run"]) == ("idle", None, 3)
    assert (await look("/v1/sessions/s1"))["forked_from"] is None
    runs = {run["id"]: run for run in (await look("/v1/runs", session="f1"))["items"]}
    assert {name: run["status"] for name, run in runs.items()} == {
        "f1.1": "completed",
        "f1.2": "cancelled",
        "f1.3": "cancelled",
    }
    assert [runs[f"f1.{n}"]["copied_from"] for n in (1, 2, 3)] == ["s1.1", "s1.2", "s1.3"]
    original = (await api.http.get("/v1/runs/s1.1")).json()
    times = ("requested_at", "started_at", "ended_at", "usage", "message_ids")
    assert [runs["f1.1"][name] for name in times] == [original[name] for name in times]
    assert (await api.http.get("/v1/runs/s1.2")).json()["status"] == "running"
    assert (await api.say("f1", "and on"))["run"] == "f1.4"
    await api.hand.carry_out("f1.4")
    later = (await api.http.get("/v1/runs/f1.4", params={"after": (await events(api, "f1"))[-1]["seq"]})).json()
    assert later["copied_from"] is None


async def test_the_history_of_a_fork_is_that_of_its_source(viewed: Running) -> None:
    api = viewed
    await api.open("s1")
    await api.turn("s1", "one", "first")
    await api.turn("s1", "two", "second")
    at = (await events(api, "s1"))[-1]["seq"]
    await api.turn("s1", "three", "third")
    await fork(api, id="f1", at=at)
    await whole(api, "f1")
    seq = (await events(api, "f1"))[-1]["seq"]

    async def told(session: str) -> list[dict[str, Any]]:
        page = (await api.http.get(f"/v1/sessions/{session}/history", params={"after": seq})).json()
        return [
            {name: value for name, value in item.items() if name != "seq"} | {"run": item["run"].rpartition(".")[2]}
            for item in page["items"]
        ]

    assert await told("f1") == (await told("s1"))[:4]
    model = (await api.http.get("/v1/sessions/f1/history", params={"as": "model"})).json()["messages"]
    assert [one["text"] for one in model] == ["one", "first", "two", "second"]


async def test_open_requests_are_not_the_fork_s(viewed: Running) -> None:
    api = viewed
    await api.open("s1")
    await api.hand.start((await api.say("s1"))["run"])
    (request,) = await api.hand.ask("s1.1", {"prompt": "Which one?"})
    await fork(api, id="f1")
    for count in (4, 5):  # as it is asked, and with all that is copied
        await api.hand.copy("f1", count)
        seq = (await events(api, "f1"))[-1]["seq"]
        items = (await api.http.get("/v1/requests", params={"after": seq})).json()["items"]
        assert [one["id"] for one in items] == [request]
    await whole(api, "f1")
    seq = (await events(api, "f1"))[-1]["seq"]
    items = (await api.http.get("/v1/requests", params={"after": seq})).json()["items"]
    assert [one["id"] for one in items] == [request]
    late = await api.post("/v1/runs/f1.1/input", {"answer": "x"})
    assert (late.status_code, late.json()["code"]) == (409, "request_closed")
    assert (await api.post("/v1/runs/s1.1/input", {"answer": "x"})).status_code == 202


@pytest.mark.parametrize("command", ["stop", "retry"])
async def test_other_operations_are_refused_until_it_is_whole(api: Running, command: str) -> None:
    await api.open("s1", policy={"on_busy": "queue"})
    await api.say("s1")
    await fork(api, id="f1")
    await api.hand.copy("f1", 2)
    assert (await api.post(f"/v1/sessions/f1/{command}")).json()["code"] == "session_copying"
    patched = await api.http.patch("/v1/sessions/f1", json={"title": "T"})
    assert patched.json()["code"] == "session_copying"
    assert (await api.post("/v1/runs/f1.1/cancel")).json()["code"] == "session_copying"
    deleted = await api.http.delete("/v1/sessions/f1")
    assert deleted.status_code == 204


async def test_the_fork_says_in_its_log_what_it_is_of(api: Running) -> None:
    await api.open("s1")
    await fork(api, id="f1", title="Another")
    session = await api.hand.sessions.load(api.hand.key("f1"))
    seq = (await events(api, "s1"))[-1]["seq"]
    assert session.forked_from == ForkedFrom(session="s1", through=seq, given=("title",))
