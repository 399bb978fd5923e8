"""Posting messages: what is stored, what is refused, and that a repeat has one effect."""

import asyncio
import json
from typing import Any

import pytest
from tests.support.api import Running


async def events(api: Running, session: str) -> list[dict[str, Any]]:
    return (await api.http.get(f"/v1/sessions/{session}/events?limit=200")).json()["events"]


async def test_a_message_starts_a_run(api: Running) -> None:
    await api.open("s1")
    answer = await api.post("/v1/sessions/s1/messages", {"content": "hello"})
    posted = answer.json()
    assert answer.status_code == 202
    assert posted["run"] == "s1.1" and posted["routed"] == "started" and posted["session"] == "s1"
    assert answer.headers["etag"] == f'"{posted["seq"]}"'
    assert answer.headers["x-request-id"]
    opened, said = await events(api, "s1")
    assert (opened["type"], said["type"]) == ("session.opened", "message.posted")
    assert said["seq"] == posted["seq"] and said["data"]["message_id"] == posted["message"]
    assert said["actor"] == said["data"]["author"] == "client:http"


async def test_s03_a_second_message_is_refused_while_a_run_is_live(api: Running) -> None:
    await api.open("s1")
    await api.say("s1")
    before = await events(api, "s1")
    answer = await api.post("/v1/sessions/s1/messages", {"content": "again"})
    problem = answer.json()
    assert answer.status_code == 409 and problem["code"] == "run_active" and problem["run"] == "s1.1"
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-should-retry"] == "false"
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert await events(api, "s1") == before


async def test_a_session_may_queue(api: Running) -> None:
    await api.open("s1", policy={"on_busy": "queue"})
    first = await api.say("s1", "one")
    second = await api.say("s1", "two")
    third = await api.say("s1", "three", author="user:ann")
    assert [first["routed"], second["routed"], third["routed"]] == ["started", "queued", "queued"]
    queue = (await api.http.get("/v1/sessions/s1/queue")).json()
    assert [(item["position"], item["run"], item["content"][0]["text"]) for item in queue["items"]] == [
        (1, "s1.1", "one"),
        (2, "s1.2", "two"),
        (3, "s1.3", "three"),
    ]
    await api.hand.start("s1.1")
    queue = (await api.http.get("/v1/sessions/s1/queue")).json()
    assert queue["active"] == "s1.1" and [item["run"] for item in queue["items"]] == ["s1.2", "s1.3"]
    assert queue["items"][1]["author"] == "user:ann"


async def test_a_queued_message_can_be_withdrawn_until_a_run_takes_it(api: Running) -> None:
    await api.open("s1", policy={"on_busy": "queue"})
    first, second = await api.say("s1", "one"), await api.say("s1", "two")
    await api.hand.start("s1.1")
    answer = await api.http.delete(f"/v1/sessions/s1/messages/{second['message']}")
    assert answer.status_code == 200 and answer.json()["seq"] > second["seq"]
    taken = await api.http.delete(f"/v1/sessions/s1/messages/{first['message']}")
    assert taken.status_code == 409 and taken.json()["code"] == "not_queued" and taken.json()["run"] == "s1.1"
    gone = await api.http.delete("/v1/sessions/s1/messages/nobody")
    assert gone.status_code == 404


async def test_a_notice_starts_nothing(api: Running) -> None:
    await api.open("s1")
    posted = await api.say("s1", "by the way", kind="notice")
    assert posted["routed"] == "none" and "run" not in posted
    assert (await api.say("s1", "now"))["routed"] == "started"


@pytest.mark.parametrize("operation", ["message", "run"])
async def test_s06_the_same_key_twice_at_once_is_one_run(api: Running, operation: str) -> None:
    await api.open("s1")
    path, body = {
        "message": ("/v1/sessions/s1/messages", {"content": "hello"}),
        "run": ("/v1/runs", {"input": "hello"}),
    }[operation]
    one, two = await asyncio.gather(
        api.post(path, body, Idempotency_Key="k1"), api.post(path, body, Idempotency_Key="k1")
    )
    assert one.json() == two.json()
    assert sorted((one.status_code, two.status_code)) == [200, 202]
    (again,) = [answer for answer in (one, two) if answer.status_code == 200]
    assert again.headers["idempotency-replayed"] == "true"
    later = await api.post(path, body, Idempotency_Key="k1")
    assert later.status_code == 200 and later.json() == one.json()
    assert [event["type"] for event in await events(api, one.json()["session"])].count("message.posted") == 1


async def test_s07_the_same_key_with_another_body_is_refused(api: Running) -> None:
    await api.open("s1")
    first = await api.post("/v1/sessions/s1/messages", {"content": "hello"}, Idempotency_Key="k1")
    other = await api.post("/v1/sessions/s1/messages", {"content": "goodbye"}, Idempotency_Key="k1")
    assert other.status_code == 409 and other.json()["code"] == "key_reused"
    assert other.json()["seq"] == first.json()["seq"]


async def test_a_key_is_known_before_anything_else_is_looked_at(api: Running) -> None:
    """A repeat is a repeat although the session has moved on and is busy."""
    await api.open("s1")
    body = {"content": "hello", "expected_seq": (await api.http.get("/v1/sessions/s1/queue")).json()["seq"]}
    first = await api.post("/v1/sessions/s1/messages", body, Idempotency_Key="k1")
    again = await api.post("/v1/sessions/s1/messages?wait=0.01", body, Idempotency_Key="k1")
    assert (first.status_code, again.status_code) == (202, 200)
    assert again.json() == {**first.json(), "status": "queued"}


async def test_a_message_id_is_a_key(api: Running) -> None:
    await api.open("s1")
    first = await api.say("s1", message_id="m-1")
    again = await api.post("/v1/sessions/s1/messages", {"content": "hello", "message_id": "m-1"})
    assert first["message"] == "m-1" and again.status_code == 200 and again.json() == first
    other = await api.post("/v1/sessions/s1/messages", {"content": "bye", "message_id": "m-1"})
    assert other.status_code == 409 and other.json()["code"] == "key_reused"


async def test_keys_of_different_operations_do_not_meet(api: Running) -> None:
    opened = await api.post("/v1/sessions", {"id": "s1"}, Idempotency_Key="k1")
    posted = await api.post("/v1/sessions/s1/messages", {"content": "hello"}, Idempotency_Key="k1")
    assert (opened.status_code, posted.status_code) == (201, 202)


async def test_s55_a_write_that_expects_another_sequence_stores_nothing(api: Running) -> None:
    await api.open("s1")
    seq = (await api.http.get("/v1/sessions/s1/queue")).json()["seq"]
    for given in ({"expected_seq": seq - 1}, {}):
        headers = {} if given else {"If_Match": f'"{seq + 7}"'}
        answer = await api.post("/v1/sessions/s1/messages", {"content": "hello", **given}, **headers)
        assert answer.status_code == 412 and answer.json()["code"] == "session_moved"
        assert answer.json()["seq"] == seq
    assert len(await events(api, "s1")) == 1
    taken = await api.post("/v1/sessions/s1/messages", {"content": "hello"}, If_Match=f'"{seq}"')
    assert taken.status_code == 202


async def test_waiting_for_the_end(api: Running) -> None:
    await api.open("s1")
    asked = asyncio.create_task(api.post("/v1/sessions/s1/messages?wait=20", {"content": "hello"}))
    while not (queue := (await api.http.get("/v1/sessions/s1/queue")).json())["items"]:
        pass
    await api.hand.carry_out(queue["items"][0]["run"], "well, hello")
    outcome = (await asked).json()["outcome"]
    assert outcome["status"] == "completed" and outcome["output"] == "well, hello"


async def test_waiting_in_vain_answers_without_an_outcome(api: Running) -> None:
    await api.open("s1")
    answer = await api.post("/v1/sessions/s1/messages?wait=0.05", {"content": "hello"})
    assert answer.status_code == 202 and "outcome" not in answer.json()


async def test_a_queued_run_that_is_withdrawn_ends_the_wait(api: Running) -> None:
    await api.open("s1", policy={"on_busy": "queue"})
    await api.say("s1", "one")
    body = {"content": "two", "message_id": "m2"}
    asked = asyncio.create_task(api.post("/v1/sessions/s1/messages?wait=20", body))
    while (await api.http.delete("/v1/sessions/s1/messages/m2")).status_code != 200:
        pass
    assert (await asked).json()["outcome"]["status"] == "cancelled"


async def test_the_traceparent_goes_into_the_event(api: Running) -> None:
    await api.open("s1")
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await api.post("/v1/sessions/s1/messages", {"content": "hello"}, traceparent=parent)
    _, said = await events(api, "s1")
    assert said["traceparent"].split("-")[1] == "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "content"),
        ({"content": " \n\t"}, "content"),
        ({"content": []}, "content"),
        ({"content": ""}, "content"),
        ({"content": 5}, "content"),
        ({"content": [{"type": "image", "text": "x"}]}, "content[0].type"),
        ({"content": [{"text": "x", "role": "assistant"}]}, "content[0].role"),
        ({"content": "x", "role": "assistant"}, "role"),
        ({"content": "x", "messages": [{"role": "tool"}]}, "messages"),
        ({"content": "x", "history": [{"role": "assistant", "content": "I agreed"}]}, "history"),
        ({"content": [{"type": "tool_result", "text": "x"}]}, "content[0].type"),
        ({"content": "x", "starts": {"run": 1}}, "starts"),
        ({"content": "x", "answers": {"run": 1, "requests": []}}, "answers"),
        ({"content": "x", "author": "runner:r1"}, "author"),
        ({"content": "x", "session": "other"}, "session"),
        ({"content": "x", "on_busy": "whatever"}, "on_busy"),
        ({"content": "x", "message_id": "no spaces"}, "message_id"),
        ({"content": "x", "author": "system"}, "author"),
        ({"content": "x", "kind": "shout"}, "kind"),
        ({"content": "x", "model": "gpt-nonsense"}, "model"),
        ({"content": "x", "wait": 5}, "wait"),
        ({"content": "x", "expected_seq": -1}, "expected_seq"),
        ({"content": "x", "expected_seq": "1"}, "expected_seq"),
    ],
)
async def test_a66_what_does_not_fit_is_named(api: Running, body: dict[str, Any], field: str) -> None:
    """Roles and a history of the client's own among it."""
    await api.open("s1")
    answer = await api.post("/v1/sessions/s1/messages", body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["code"] == "invalid" and answer.json()["field"] == field
    assert len(await events(api, "s1")) == 1


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/runs", {"input": "x", "limits": {}}, "limits"),
    ],
)
async def test_what_comes_later_is_refused_by_name(api: Running, path: str, body: dict[str, Any], field: str) -> None:
    await api.open("s1")
    answer = await api.post(path, body)
    assert answer.status_code == 422 and answer.json()["code"] == "not_available"
    assert answer.json()["field"] == field


async def test_an_unknown_agent_is_refused(api: Running) -> None:
    await api.open("s1")
    answer = await api.post("/v1/sessions/s1/messages", {"content": "x", "agent": "nobody"})
    assert answer.status_code == 422 and answer.json()["code"] == "agent_not_found"


async def test_an_unknown_session_is_404_for_all_but_its_openers(api: Running) -> None:
    for method, path in (
        ("POST", "/v1/sessions/none/messages"),
        ("GET", "/v1/sessions/none/events"),
        ("GET", "/v1/sessions/none/queue"),
        ("GET", "/v1/sessions/none/history?as=model"),
        ("PATCH", "/v1/sessions/none"),
        ("DELETE", "/v1/sessions/none/messages/m"),
        ("GET", "/v1/runs/none.1/wait"),
        ("POST", "/v1/runs/none.1/cancel"),
        ("GET", "/v1/sessions/no%20id/events"),
        ("GET", "/v1/runs/nonsense/wait"),
    ):
        body = {"content": "x"} if path.endswith("messages") else {"title": "x"} if method == "PATCH" else None
        answer = await api.http.request(method, path, json=body)
        assert answer.status_code == 404 and answer.json()["code"] == "not_found", (method, path, answer.text)
    started = await api.post("/v1/runs", {"input": "x", "session": "none"})
    assert started.status_code == 202 and started.json()["run"] == "none.1"


async def test_a39_what_is_too_large_is_refused_with_its_limit(api: Running) -> None:
    await api.open("s1")
    limit = api.settings.message_max
    assert (await api.say("s1", "x" * limit))["routed"] == "started"
    await api.hand.carry_out("s1.1")
    for text in ("x" * (limit + 1), "é" * (limit // 2 + 1), "x" * 1_000_000, "x" * 8_000_000):
        answer = await api.post("/v1/sessions/s1/messages", {"content": text})
        assert answer.status_code == 413 and answer.json()["code"] == "too_large"
        assert answer.json()["limit"] in (limit, 6 * (limit + api.settings.metadata_max + 16_384) + 65_536)
    escaped = b'{"content":"' + b"\\u0001" * (limit - 1) + b'x"}'
    answer = await api.http.post(
        "/v1/sessions/s1/messages", content=escaped, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 202, answer.text
    assert (await events(api, "s1"))[-1]["data"]["content"][0]["text"] == "\x01" * (limit - 1) + "x"
    metadata = await api.post("/v1/sessions", {"id": "s2", "metadata": {"x": "y" * 8192}})
    assert metadata.status_code == 413 and metadata.json()["field"] == "metadata"


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_json"),
        (b"hello", "application/json", 400, "invalid_json"),
        (b'{"content":"x"}trailing', "application/json", 400, "invalid_json"),
        (b'{"content":NaN}', "application/json", 400, "invalid_json"),
        (b'\xef\xbb\xbf{"content":"x"}', "application/json", 400, "invalid_json"),
        (b"[]", "application/json", 422, "invalid"),
        (b'"text"', "application/json", 422, "invalid"),
        (b'{"content":"\xff"}', "application/json", 422, "invalid"),
        (b'{"content":"\xed\xa0\x80"}', "application/json", 422, "invalid"),
        (b'{"content":"\\ud800"}', "application/json", 422, "invalid"),
        (b'{"content":"\\ud800 and much more text"}', "application/json", 422, "invalid"),
        (b'{"content":"\\udc00"}', "application/json", 422, "invalid"),
        (b'{"content":' + b"[" * 100_000, "application/json", 422, "invalid"),
        (b'{"content":1e999}', "application/json", 422, "invalid"),
        (b'{"content":"x"}', "text/plain", 415, "unsupported_media_type"),
        (b"content=x", "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
        (b'{"content":"x"}', "application/json; charset=utf-8", 202, None),
        (b'{"content":"x"}', "", 202, None),
    ],
)
async def test_bodies(api: Running, content: bytes, kind: str, status: int, code: str | None) -> None:
    await api.open("s1")
    headers = {"content-type": kind} if kind else {}
    answer = await api.http.post("/v1/sessions/s1/messages", content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.json().get("code") == code


async def test_metadata_that_no_reader_could_take_apart_is_refused(api: Running) -> None:
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"x": deep}
    answer = await api.post("/v1/sessions", {"id": "s1", "metadata": deep})
    assert answer.status_code == 422 and answer.json()["field"] == "metadata", answer.text


async def test_a_key_that_is_too_long_is_refused(api: Running) -> None:
    await api.open("s1")
    for key in ("", "k" * 256):
        answer = await api.post("/v1/sessions/s1/messages", {"content": "x"}, Idempotency_Key=key)
        assert answer.status_code == 422 and answer.json()["field"] == "Idempotency-Key"
    assert (await api.post("/v1/sessions/s1/messages", {"content": "x"}, Idempotency_Key="k" * 255)).status_code == 202


async def test_a38_text_is_kept_byte_for_byte(api: Running) -> None:
    text = "a\u2028b\u2029c\u0085d\ve\ff\x1cg\x1dh\x1ei\r\nj 😀"
    await api.open("s1")
    async with api.feed("s1") as feed:
        await api.say("s1", text)
        frame = await feed.until("message.posted")
    assert json.loads(frame.data)["data"]["content"][0]["text"] == text
    (_, said) = await events(api, "s1")
    assert said["data"]["content"][0]["text"] == text
    page = (await api.http.get("/v1/sessions/s1/events")).content
    assert frame.data in page
