"""A person calls a tool, through the API: what is refused, where it goes, what its answer says. No runner is here."""

import json
from typing import Any

import pytest
from tests.support.api import Running

ADD = "/v1/sessions/s1/actions/add"
SUM = {"arguments": {"a": 1, "b": 2}}


async def requested(api: Running) -> list[dict[str, Any]]:
    events = (await api.http.get("/v1/sessions/s1/events")).json()["events"]
    return [event for event in events if event["type"] == "run.requested"]


async def test_s44_an_action_is_a_run_recorded_as_the_persons(api: Running) -> None:
    await api.open("s1")
    answer = await api.post(ADD, {**SUM, "author": "user:ann"}, Idempotency_Key="once")
    body = answer.json()
    assert (answer.status_code, body["run"], body["verb"], body["routed"]) == (202, "s1.1", "add", "started")
    (event,) = await requested(api)
    assert (event["seq"], event["actor"], event["data"]["author"]) == (body["seq"], "client:http", "user:ann")
    assert (event["data"]["trigger"], event["data"]["action"]["name"]) == ("action", "add")
    assert json.loads(event["data"]["action"]["arguments"]) == {"a": 1, "b": 2}
    again = await api.post(ADD, {**SUM, "author": "user:ann"}, Idempotency_Key="once")
    assert (again.status_code, again.json(), again.headers["idempotency-replayed"]) == (200, body, "true")
    other = await api.post(ADD, {"arguments": {"a": 1, "b": 3}}, Idempotency_Key="once")
    assert (other.status_code, other.json()["code"]) == (409, "key_reused")


@pytest.mark.parametrize(
    ("verb", "body", "status", "code", "field"),
    [
        ("fly", {}, 404, "not_found", "verb"),
        ("conversation_ask_user", {"arguments": {"question": "Who?"}}, 404, "not_found", "verb"),
        ("add", {}, 422, "invalid", "arguments.a"),
        ("add", {"arguments": {"a": 1, "b": "two"}}, 422, "invalid", "arguments.b"),
        ("add", {"arguments": {"a": 1, "b": 2, "c": 3}}, 422, "invalid", "arguments"),
        ("add", {"arguments": [1, 2]}, 422, "invalid", "arguments"),
        ("add", {"arguments": {"a": {"x": "y" * 70_000}}}, 413, "too_large", "arguments"),
        ("add", {**SUM, "mood": "good"}, 422, "invalid", "mood"),
        ("add", {**SUM, "author": "ann"}, 422, "invalid", "author"),
    ],
)
async def test_what_does_not_fit_is_refused_by_name(
    api: Running, verb: str, body: dict[str, Any], status: int, code: str, field: str
) -> None:
    await api.open("s1")
    answer = await api.post(f"/v1/sessions/s1/actions/{verb}", body)
    problem = answer.json()
    assert (answer.status_code, problem["code"], problem["field"]) == (status, code, field), problem
    if field == "verb":
        assert verb in problem["detail"] and "count_words" in problem["detail"]
    assert not await requested(api)


async def test_an_action_is_refused_while_a_run_is_live_or_waits_for_its_turn(api: Running) -> None:
    await api.open("s1")
    await api.say("s1")
    refused = await api.post(ADD, SUM)
    assert (refused.status_code, refused.json()["code"], refused.json()["run"]) == (409, "run_active", "s1.1")
    await api.http.patch("/v1/sessions/s1", json={"policy": {"on_busy": "queue"}})
    waits = (await api.post(ADD, {**SUM, "author": "user:ann"})).json()
    assert (waits["run"], waits["routed"]) == ("s1.2", "queued")
    queue = (await api.http.get("/v1/sessions/s1/queue")).json()["items"]
    assert [(item["run"], item["waits"], item["verb"], item["message"], item["author"]) for item in queue] == [
        ("s1.1", "queued", None, queue[0]["message"], "client:http"),
        ("s1.2", "action", "add", None, "user:ann"),
    ]
    assert (await api.post("/v1/runs/s1.2/cancel")).json()["state"] == "cancelled"


async def test_there_is_no_action_in_a_session_that_is_not_there_or_has_moved(api: Running) -> None:
    assert (await api.post(ADD, SUM)).status_code == 404
    await api.open("s1")
    moved = await api.post(ADD, {**SUM, "expected_seq": 1})
    assert (moved.status_code, moved.json()["code"]) == (412, "session_moved")
    assert (await api.http.delete("/v1/sessions/s1")).status_code == 204
    assert (await api.post(ADD, SUM)).status_code == 404


async def test_a_person_may_be_the_only_one_who_may(api: Running) -> None:
    await api.open("s1", policy={"starters": "people"})
    refused = await api.post(ADD, SUM)
    assert (refused.status_code, refused.json()["field"]) == (422, "author")
    assert (await api.post(ADD, {**SUM, "author": "user:ann"})).status_code == 202
