"""Sessions and runs: opened, changed, listed, looked at, cancelled; and reads that show what was just written."""

import asyncio
from typing import Any

import httpx
import pytest
from tests.support.api import Running


async def get(api: Running, path: str, **params: Any) -> dict[str, Any]:
    answer = await api.http.get(path, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


# --- opening and changing -----------------------------------------------------------------------------------------


async def test_opening_a_session_again_changes_only_what_is_given(viewed: Running) -> None:
    first = await viewed.post("/v1/sessions", {"id": "s1", "title": "one", "metadata": {"a": 1}})
    assert first.status_code == 201 and first.json()["created"]
    again = await viewed.post("/v1/sessions", {"id": "s1"})
    assert again.status_code == 200 and again.json() == {"session": "s1", "created": False, "seq": first.json()["seq"]}
    changed = await viewed.post("/v1/sessions", {"id": "s1", "metadata": {"b": 2}})
    assert changed.status_code == 200 and changed.json()["seq"] > first.json()["seq"]
    session = await get(viewed, "/v1/sessions/s1", after=changed.json()["seq"])
    assert (session["title"], session["metadata"], session["status"]) == ("one", {"b": 2}, "idle")


async def test_an_id_is_made_where_none_is_given(api: Running) -> None:
    one, two = await api.post("/v1/sessions"), await api.post("/v1/sessions")
    assert one.status_code == two.status_code == 201 and one.json()["session"] != two.json()["session"]
    kept = [(await api.post("/v1/sessions", {"title": "x"}, Idempotency_Key="k")).json() for _ in range(3)]
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize("given", ["a--b", "with space", "", "x" * 65, "é", "a.b"])
async def test_an_id_must_be_one(api: Running, given: str) -> None:
    answer = await api.post("/v1/sessions", {"id": given})
    assert answer.status_code == 422 and answer.json()["field"] == "id"


async def test_a_title_given_by_a_patch_is_a_persons(viewed: Running) -> None:
    await viewed.open("s1", title="the program's")
    answer = await viewed.http.patch("/v1/sessions/s1", json={"title": "mine", "policy": {"on_busy": "queue"}})
    session = await get(viewed, "/v1/sessions/s1", after=answer.json()["seq"])
    assert (session["title"], session["title_source"]) == ("mine", "user")
    assert session["policy"] == {"on_busy": "queue"}
    unchanged = await viewed.http.patch("/v1/sessions/s1", json={})
    assert unchanged.status_code == 200 and unchanged.json() == answer.json()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"title": "  "}, "title"),
        ({"title": "x" * 65}, "title"),
        ({"title": "a\0b"}, "title"),
        ({"agent": "Not A Name"}, "agent"),
        ({"metadata": []}, "metadata"),
        ({"policy": {"on_busy": "never"}}, "policy.on_busy"),
        ({"policy": {"nonsense": 1}}, "policy.nonsense"),
        ({"policy": {"on_busy": 7}}, "policy.on_busy"),
        ({"policy": {"on_busy": []}}, "policy.on_busy"),
        ({"mood": "good"}, "mood"),
    ],
)
async def test_a_change_that_does_not_fit_is_named(api: Running, body: dict[str, Any], field: str) -> None:
    await api.open("s1")
    answer = await api.http.patch("/v1/sessions/s1", json=body)
    assert answer.status_code == 422 and answer.json()["field"] == field, answer.text


# --- reads --------------------------------------------------------------------------------------------------------


async def test_a_reader_sees_its_own_write(viewed: Running) -> None:
    await viewed.open("s1")
    for n in range(10):
        run = await viewed.turn("s1", f"message {n}")
        (last,) = (await get(viewed, "/v1/sessions/s1/events", types="run.ended", after=0))["events"][-1:]
        found = await get(viewed, f"/v1/runs/{run}", after=last["seq"])
        assert found["status"] == "completed" and found["output"] == "done"
        listed = await get(viewed, "/v1/runs", session="s1", after=last["seq"])
        assert [item["id"] for item in listed["items"]] == [f"s1.{k}" for k in range(n + 1, 0, -1)]


async def test_an_existing_session_or_run_is_never_404_because_the_views_are_behind(viewed: Running) -> None:
    for n in range(10):
        posted = (await viewed.post("/v1/runs", {"input": "x"})).json()
        answers = await asyncio.gather(
            viewed.http.get(f"/v1/runs/{posted['run']}"),
            viewed.http.get(f"/v1/runs/{posted['run']}/steps"),
            viewed.http.get(f"/v1/sessions/{posted['session']}"),
            viewed.http.get(f"/v1/sessions/{posted['session']}/history"),
        )
        assert [answer.status_code for answer in answers] == [200] * 4, n
        assert answers[3].json()["items"][0]["content"] == [{"text": "x"}]


async def test_views_that_stay_behind_are_said(api: Running) -> None:
    """No projector: nothing that the log has is called missing."""
    api.settings.__dict__["after_timeout"] = 0.1
    await api.open("s1")
    run = (await api.say("s1"))["run"]
    for path in ("/v1/sessions/s1", f"/v1/runs/{run}", f"/v1/runs/{run}/steps", "/v1/sessions/s1/history"):
        answer = await api.http.get(path)
        assert answer.status_code == 503 and answer.json()["code"] in ("projection_behind", "unavailable")
        assert answer.headers["retry-after"] == "1"
    for path in ("/v1/sessions/nobody/queue", "/v1/runs/s1.2/wait"):
        assert (await api.http.get(path)).status_code == 404
    assert (await api.http.get(f"/v1/runs/{run}/wait?timeout=0")).json()["status"] == "queued"


async def test_a_sequence_that_is_not_there_yet_is_refused(viewed: Running) -> None:
    answer = await viewed.http.get("/v1/sessions", params={"after": 2**52})
    assert answer.status_code == 422 and answer.json()["field"] == "after"


async def test_a40_a41_a42_lists_are_ordered_and_complete(viewed: Running) -> None:
    for n in range(23):
        await viewed.open(f"s{n}")
    (last,) = (await get(viewed, "/v1/sessions/s22/events"))["events"]
    seen: list[str] = []
    page = await get(viewed, "/v1/sessions", limit=2, after=last["seq"])
    touched = False
    while True:
        seen += [item["id"] for item in page["items"]]
        if page["next"] is None:
            break
        if not touched:
            touched = True
            changed = await viewed.http.patch("/v1/sessions/s3", json={"title": "touched"})
            await get(viewed, "/v1/sessions/s3", after=changed.json()["seq"])
        page = await get(viewed, "/v1/sessions", limit=2, cursor=page["next"])
    assert set(seen) >= {f"s{n}" for n in range(23)} - {"s3"}
    assert len(seen) == len(set(seen))
    assert (await get(viewed, "/v1/sessions"))["items"][0]["id"] == "s3"
    assert [item["id"] for item in (await get(viewed, "/v1/sessions", q="TOUCH"))["items"]] == ["s3"]


async def test_list_filters(viewed: Running) -> None:
    await viewed.open("s1")
    await viewed.open("s2")
    run = (await viewed.say("s2"))["run"]
    posted = await viewed.hand.start(run)
    after = posted.session.seq
    assert [item["id"] for item in (await get(viewed, "/v1/sessions", status="busy", after=after))["items"]] == ["s2"]
    assert [item["id"] for item in (await get(viewed, "/v1/sessions", status="idle"))["items"]] == ["s1"]
    assert [item["id"] for item in (await get(viewed, "/v1/runs", status="running"))["items"]] == ["s2.1"]
    assert (await get(viewed, "/v1/runs", status="failed"))["items"] == []
    assert (await get(viewed, "/v1/runs", agent="nobody"))["items"] == []


@pytest.mark.parametrize(
    ("path", "status", "code", "field"),
    [
        ("/v1/sessions?limit=0", 422, "invalid", "limit"),
        ("/v1/sessions?limit=201", 422, "invalid", "limit"),
        ("/v1/sessions?limit=ten", 422, "invalid", "limit"),
        ("/v1/sessions?status=happy", 422, "invalid", "status"),
        ("/v1/sessions?cursor=nonsense", 400, "invalid_cursor", "cursor"),
        ("/v1/runs?cursor=-1", 400, "invalid_cursor", "cursor"),
        ("/v1/sessions?colour=red", 422, "invalid", "colour"),
        ("/v1/sessions?limit=1&limit=2", 422, "invalid", "limit"),
        ("/v1/sessions?q=%00", 422, "invalid", "q"),
        ("/v1/sessions?q=%ff", 422, "invalid", "query"),
        (f"/v1/sessions?parent={'x' * 129}", 422, "invalid", "parent"),
        (f"/v1/runs?root={'x' * 161}", 422, "invalid", "root"),
        ("/v1/runs?since=-1", 422, "invalid", "since"),
        ("/v1/runs/s1.1/wait?timeout=nan", 422, "invalid", "timeout"),
        ("/v1/runs/s1.1/wait?timeout=inf", 422, "invalid", "timeout"),
        ("/v1/sessions/s1/history?as=poem", 422, "invalid", "as"),
        ("/v1/sessions/s1/history?cursor=x", 400, "invalid_cursor", "cursor"),
    ],
)
async def test_queries_that_do_not_fit_are_named(
    viewed: Running, path: str, status: int, code: str, field: str
) -> None:
    await viewed.open("s1")
    answer = await viewed.http.get(path)
    problem = answer.json()
    assert (answer.status_code, problem["code"], problem["field"]) == (status, code, field), problem


async def test_a_wrong_choice_is_told_the_right_ones(api: Running) -> None:
    answer = await api.http.get("/v1/sessions?status=happy")
    told = answer.json()["detail"].rpartition("it is one of ")[2]
    assert set(told.split(", ")) == {"idle", "busy", "waiting", "error"}


# --- runs ---------------------------------------------------------------------------------------------------------


async def test_a_one_shot_run_has_a_session_of_its_own_that_is_not_listed(viewed: Running) -> None:
    posted = (await viewed.post("/v1/runs", {"input": "hello", "title": "alone"})).json()
    await viewed.hand.carry_out(posted["run"], "hi")
    waited = await get(viewed, f"/v1/runs/{posted['run']}/wait")
    run = await get(viewed, f"/v1/runs/{posted['run']}", after=waited["seq"])
    assert run["output"] == "hi" and run["status"] == waited["status"] == "completed"
    assert (await get(viewed, "/v1/sessions"))["items"] == []
    assert (await get(viewed, f"/v1/sessions/{posted['session']}"))["one_shot"] is True


async def test_a_run_in_a_session_is_a_message_to_it(viewed: Running) -> None:
    first = await viewed.post("/v1/runs", {"input": "one", "session": "s1", "title": "made by a run"})
    assert first.status_code == 202 and first.json()["run"] == "s1.1"
    busy = await viewed.post("/v1/runs", {"input": "two", "session": "s1"})
    assert busy.status_code == 409 and busy.json()["run"] == "s1.1"
    session = await get(viewed, "/v1/sessions/s1", after=first.json()["seq"])
    assert session["title"] == "made by a run" and session["status"] == "busy" and not session["one_shot"]
    child = await viewed.post("/v1/runs", {"input": "x", "session": "s1--1-1"})
    assert child.status_code == 404


async def test_s16_cancelling(api: Running) -> None:
    await api.open("s1", policy={"on_busy": "queue"})
    await api.say("s1", "one")
    await api.say("s1", "two")
    await api.hand.start("s1.1")

    async def cancel(run: str) -> tuple[int, str]:
        answer = await api.post(f"/v1/runs/{run}/cancel", {"reason": "enough"})
        return answer.status_code, answer.json()["state"]

    assert await cancel("s1.2") == (200, "cancelled")
    assert await cancel("s1.1") == (202, "requested")
    assert await cancel("s1.1") == (202, "requested")
    await api.hand.end("s1.1", "partial", status="cancelled")
    assert await cancel("s1.1") == (200, "ended")
    assert await cancel("s1.2") == (200, "ended")
    assert (await api.post("/v1/runs/s1.3/cancel")).status_code == 404
    events = (await get(api, "/v1/sessions/s1/events"))["events"]
    ends = [event["data"]["run"] for event in events if event["type"] == "run.ended"]
    assert sorted(ends) == [1, 2]
    waited = await get(api, "/v1/runs/s1.1/wait")
    assert waited["status"] == "cancelled" and waited["outcome"]["output"] == "partial"


async def test_a_repeated_cancel_gets_the_first_answer(api: Running) -> None:
    await api.open("s1", policy={"on_busy": "queue"})
    await api.say("s1", "one")
    await api.say("s1", "two")
    await api.hand.start("s1.1")
    for run, state in (("s1.1", "requested"), ("s1.2", "cancelled")):
        first = await api.post(f"/v1/runs/{run}/cancel", Idempotency_Key=run)
        if run == "s1.1":
            await api.hand.end("s1.1", "", status="cancelled")
        again = await api.post(f"/v1/runs/{run}/cancel", Idempotency_Key=run)
        assert first.json()["state"] == state and again.json() == first.json()
        assert again.status_code == 200 and again.headers["idempotency-replayed"] == "true"
    other = await api.post("/v1/runs/s1.1/cancel", Idempotency_Key="s1.2")
    assert other.status_code == 409 and other.json()["code"] == "key_reused"


async def test_the_history_as_the_model_would_get_it(api: Running) -> None:
    """Also S02: the second turn sees the first, verbatim."""
    await api.open("s1")
    await api.turn("s1", "one", "eins")
    await api.turn("s1", "two", "zwei")
    history = await get(api, "/v1/sessions/s1/history", **{"as": "model"})
    assert [(message["type"], message["text"]) for message in history["messages"]] == [
        ("user", "one"),
        ("assistant", "eins"),
        ("user", "two"),
        ("assistant", "zwei"),
    ]


async def test_a52_reads_are_not_held_up_by_a_run(viewed: Running) -> None:
    await viewed.open("s1")
    await viewed.hand.start((await viewed.say("s1"))["run"])
    waiting = asyncio.create_task(viewed.http.get("/v1/runs/s1.1/wait?timeout=20"))
    loop = asyncio.get_running_loop()
    times: list[float] = []
    for _ in range(50):
        for path in ("/v1/sessions", "/v1/sessions/s1/history", "/v1/sessions/s1/events", "/v1/runs/s1.1"):
            began = loop.time()
            await get(viewed, path)
            times.append(loop.time() - began)
    await viewed.hand.end("s1.1")
    await waiting
    assert sorted(times)[-3] < 0.2


# --- operations and pages -----------------------------------------------------------------------------------------


async def test_the_state_of_the_whole(viewed: Running) -> None:
    await viewed.open("s1")
    posted = await viewed.say("s1")
    await get(viewed, "/v1/sessions/s1", after=posted["seq"])
    overview = await get(viewed, "/v1/ops/overview")
    assert overview["account"] == viewed.account and overview["runs"]["queued"] == 1
    assert "default" in overview["agents"] and overview["views"]["position"] >= posted["seq"]
    assert overview["runners"] == [] and overview["old_runs"] == []
    started = await viewed.hand.start("s1.1")
    await get(viewed, "/v1/sessions/s1", after=started.session.seq)
    assert (await get(viewed, "/v1/ops/overview"))["runners"] == ["hand"]
    streams = {stream["name"]: stream for stream in (await get(viewed, "/v1/ops/streams"))["items"]}
    assert {"SESSIONS", "WORK", "INBOX", "REFUSED", "DELTAS"} <= set(streams)
    assert streams["SESSIONS"]["last_seq"] >= posted["seq"]
    consumers = {item["name"]: item for item in (await get(viewed, "/v1/ops/consumers"))["items"]}
    assert consumers["inbox"]["oldest_at"] is None and consumers["inbox"]["pending"] == 0
    views = await get(viewed, "/v1/ops/views")
    assert views["behind"] == views["last_seq"] - views["position"]


async def test_pages(viewed: Running) -> None:
    assert (await get(viewed, "/healthz")) == {"status": "ok", "detail": ""}
    assert (await get(viewed, "/readyz"))["status"] == "ready"
    assert "turnstream_appends_total" in (await viewed.http.get("/metrics")).text
    docs = await viewed.http.get("/docs")
    assert docs.headers["content-type"].startswith("text/html")
    assert "http://" not in docs.text and "https://" not in docs.text  # nothing is fetched from elsewhere
    assert (await viewed.http.get("/")).text == docs.text
    document = await get(viewed, "/openapi.json")
    assert document["openapi"] == "3.1.0" and "/v1/sessions/{session}/messages" in document["paths"]
    assert (await get(viewed, "/asyncapi.json"))["asyncapi"] == "3.0.0"


async def test_every_answer_carries_a_request_id(api: Running) -> None:
    answers: list[httpx.Response] = [
        await api.http.request(method, path, headers={"X-Request-Id": "mine-1"})
        for method, path in (
            ("GET", "/healthz"),
            ("GET", "/nowhere"),
            ("GET", "/v1/sessions/none/queue"),
            ("PUT", "/v1/sessions"),
            ("DELETE", "/docs"),
            ("POST", "/v1/sessions"),
        )
    ]
    assert [answer.status_code for answer in answers] == [200, 404, 404, 405, 405, 201]
    assert {answer.headers["x-request-id"] for answer in answers} == {"mine-1"}
    assert answers[3].headers["allow"] == "POST, GET, HEAD" and answers[3].json()["code"] == "method_not_allowed"
    made = {(await api.http.get("/healthz")).headers["x-request-id"] for _ in range(5)}
    assert len(made) == 5


async def test_head_is_answered_like_get_without_a_body(api: Running) -> None:
    await api.open("s1")
    answer = await api.http.head("/v1/sessions/s1/events", headers={"Accept": "text/event-stream"})
    assert answer.status_code == 200 and not answer.content and answer.headers["content-type"] == "application/json"
