"""Questions and approvals through the API: waiting is shown, answers are taken once, whatever does not fit is named."""

import asyncio
import json
from typing import Any

import pytest
from tests.support.api import Running
from tests.support.asking import Answer, OverHttp, OverNats, Speaker
from tests.support.waiting import eventually

QUESTION: dict[str, Any] = {"kind": "question", "prompt": "Which one?"}
APPROVAL: dict[str, Any] = {"kind": "approval", "prompt": "delete everything"}


async def asks(api: Running, *asks: dict[str, Any], session: str = "s1", **policy: Any) -> list[str]:
    """A session whose first run has asked this; the requests' ids."""
    await api.open(session, policy=policy or None)
    run = (await api.say(session, "hello"))["run"]
    await api.hand.start(run)
    return await api.hand.ask(run, *asks)


async def answer(api: Running, run: str, body: dict[str, Any], **headers: str) -> Answer:
    given = await api.post(f"/v1/runs/{run}/input", body, **headers)
    return Answer(given.status_code, given.json(), "idempotency-replayed" in given.headers)


async def kinds(api: Running, session: str = "s1") -> list[str]:
    page = (await api.http.get(f"/v1/sessions/{session}/events?limit=200")).json()
    return [event["type"] for event in page["events"]]


# --- waiting is shown ---------------------------------------------------------------------------------------------


async def test_a71_who_waits_for_the_run_is_told_that_it_waits_for_a_person(api: Running) -> None:
    await api.open("s1")
    asked = asyncio.create_task(api.post("/v1/sessions/s1/messages?wait=20", {"content": "hello"}))
    while not (queue := (await api.http.get("/v1/sessions/s1/queue")).json())["items"]:
        pass
    run = queue["items"][0]["run"]
    waiting = asyncio.create_task(api.http.get(f"/v1/runs/{run}/wait?timeout=20"))
    await api.hand.start(run)
    schema = {"type": "object", "required": ["side"]}
    fields = {"schema": schema, "expires_in": 60_000, "on_expiry": "default", "default": {"side": "left"}}
    (request,) = await api.hand.ask(run, QUESTION | fields)
    for body in ((await asked).json(), (await waiting).json()):
        assert body["status"] == "waiting" and "outcome" not in body
        (shown,) = body["requests"]
        assert shown.pop("expires_at") > 0
        assert shown == {
            "request": request,
            "kind": "question",
            "prompt": "Which one?",
            "call_id": "c1-0",
            "schema": schema,
            "on_expiry": "default",
            "default": {"side": "left"},
        }
    later = (await api.http.get(f"/v1/runs/{run}/wait?timeout=0")).json()
    assert later["status"] == "waiting" and later["requests"][0]["request"] == request


async def test_a71_a_wait_that_was_answered_meanwhile_goes_on(api: Running) -> None:
    """The question is answered by somebody else as soon as it is there: the wait ends with whatever comes first."""
    (request,) = await asks(api, QUESTION)
    assert (await answer(api, "s1.1", {"answer": "left"})).status == 202
    waiting = asyncio.create_task(api.http.get("/v1/runs/s1.1/wait?timeout=20"))
    await api.hand.resume("s1.1")
    await api.hand.end("s1.1", "it was the left one")
    assert (await waiting).json()["outcome"]["output"] == "it was the left one"
    assert request == "s1.1.q1"


async def test_waiting_is_no_end_of_the_runs_stream(api: Running) -> None:
    await api.open("s1")
    body = {"content": "hello"}
    async with api.feed("s1", method="POST", path="/v1/sessions/s1/messages", json=body) as feed:
        posted = json.loads((await feed.next()).data)
        await feed.until("caught-up")
        await api.hand.start(posted["run"])
        await api.hand.ask(posted["run"], QUESTION)
        asked = json.loads((await feed.until("run.waiting")).data)
        assert asked["data"]["requests"][0]["prompt"] == "Which one?"
        assert (await answer(api, posted["run"], {"answer": "left"})).status == 202
        await feed.until("request.answered")
        await api.hand.resume(posted["run"])
        await api.hand.end(posted["run"])
        assert [frame.event for frame in await feed.rest()] == ["run.started", "tool.returned", "run.ended"]


async def test_everything_that_waits_for_a_person_is_listed(viewed: Running) -> None:
    await asks(viewed, QUESTION | {"choices": ("left", "right")}, APPROVAL)
    await asks(viewed, QUESTION, session="s2")
    last = (await viewed.post("/v1/requests/s1.1.q1/answer", {"answer": "left"})).json()["seq"]

    async def ids(**given: Any) -> list[str]:
        page = await viewed.http.get("/v1/requests", params={"after": last, **given})
        assert page.status_code == 200, page.text
        return [item["id"] for item in page.json()["items"]]

    assert await ids() == ["s2.1.q1", "s1.1.q2"]
    assert await ids(state="any") == ["s2.1.q1", "s1.1.q2", "s1.1.q1"]
    assert await ids(state="answered") == ["s1.1.q1"]
    assert await ids(session="s1") == ["s1.1.q2"] and await ids(run="s2.1") == ["s2.1.q1"]
    assert await ids(kind="approval") == ["s1.1.q2"]
    page = (await viewed.http.get("/v1/requests?limit=1")).json()
    rest = (await viewed.http.get("/v1/requests", params={"limit": 1, "cursor": page["next"]})).json()
    assert [item["id"] for item in (*page["items"], *rest["items"])] == ["s2.1.q1", "s1.1.q2"]
    assert (await viewed.http.get("/v1/requests?cursor=x")).json()["code"] == "invalid_cursor"
    shown = (await viewed.http.get("/v1/requests?state=answered")).json()["items"][0]
    assert (shown["answer"], shown["by"], shown["choices"]) == ("left", "client:http", ["left", "right"])


async def test_a71_a_run_that_waits_is_waiting_wherever_one_looks(viewed: Running) -> None:
    await asks(viewed, QUESTION)
    last = (await viewed.http.get("/v1/runs/s1.1/wait?timeout=0")).json()["seq"]
    for path in ("/v1/runs/s1.1", "/v1/sessions/s1"):
        assert (await viewed.http.get(path, params={"after": last})).json()["status"] == "waiting"
    for path in ("/v1/runs", "/v1/sessions"):
        listed = (await viewed.http.get(path, params={"status": "waiting"})).json()["items"]
        assert [item["status"] for item in listed] == ["waiting"]


# --- answering ----------------------------------------------------------------------------------------------------


async def test_s09_the_first_answer_counts(api: Running) -> None:
    (request,) = await asks(api, QUESTION)
    first = await answer(api, "s1.1", {"answer": {"side": "left", "n": 1}})
    assert first.status == 202 and not first.replayed
    assert first.body == {"session": "s1", "run": "s1.1", "request": request, "seq": first.body["seq"]}
    before = await kinds(api)
    for body in ({"answer": {"n": 1, "side": "left"}}, {"answer": {"side": "left", "n": 1}, "request": request}):
        again = await answer(api, "s1.1", body)
        assert again.status == 200 and again.replayed and again.body == first.body
    by_request = await api.post(f"/v1/requests/{request}/answer", {"answer": {"side": "left", "n": 1}})
    assert by_request.status_code == 200 and by_request.json() == first.body
    other = await answer(api, "s1.1", {"answer": {"side": "right"}})
    assert other.status == 409 and other.body["code"] == "already_answered" and other.body["request"] == request
    assert await kinds(api) == before and before.count("request.answered") == 1


async def test_an_answer_of_null_is_one_and_no_answer_is_none(api: Running) -> None:
    await asks(api, QUESTION)
    for body, field in (
        ({}, "answer"),
        ({"reason": "x"}, "answer"),
        ({"answer": "x", "approved": True}, "approved"),
        ({"answer": "x", "reason": "because"}, "reason"),
        ({"approved": "yes"}, "approved"),
        ({"answers": "x"}, "answers"),
    ):
        refused = await answer(api, "s1.1", body)
        assert (refused.status, refused.body["code"], refused.body["field"]) == (422, "invalid", field)
    assert (await answer(api, "s1.1", {"answer": None})).status == 202
    assert (await answer(api, "s1.1", {"answer": None})).status == 200
    page = (await api.http.get("/v1/sessions/s1/events?types=request.answered")).json()
    assert page["events"][0]["data"]["by"] == "client:http"


async def test_s13_what_does_not_fit_is_named_and_stores_nothing(api: Running) -> None:
    schema = {"type": "object", "required": ["side"], "properties": {"side": {"enum": ["left", "right"]}}}
    first, second = await asks(api, QUESTION | {"schema": schema}, QUESTION | {"choices": ("left", "right")})
    before = await kinds(api)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"answer": {"sid": "left"}, "request": first}, "answer.side"),
        ({"answer": {"side": "up"}, "request": first}, "answer.side"),
        ({"answer": "up", "request": second}, "answer"),
        ({"approved": True, "request": first}, "approved"),
        ({"answer": "left"}, "request"),
    ]
    for body, field in cases:
        refused = await answer(api, "s1.1", body)
        assert (refused.status, refused.body["field"]) == (422, field), refused
    for content, status, code in (
        (b"{", 400, "invalid_json"),
        (b"", 422, "invalid"),
        (b'{"answer": "' + b"x" * 70_000 + b'"}', 413, "too_large"),
        (b'{"answer": ' + b"[" * 40 + b"]" * 40 + b"}", 422, "invalid"),
        (b'{"answer": "\\ud800"}', 422, "invalid"),
    ):
        headers = {"content-type": "application/json"}
        refused = await api.http.post("/v1/runs/s1.1/input", content=content, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (status, code)
    assert await kinds(api) == before


async def test_what_is_not_there_cannot_be_answered(api: Running) -> None:
    await asks(api, QUESTION)
    for path, body, status, code in (
        ("/v1/runs/s1.1/input", {"answer": "x", "request": "s1.1.q2"}, 404, "not_found"),
        ("/v1/runs/s1.1/input", {"answer": "x", "request": "s1.2.q1"}, 404, "not_found"),
        ("/v1/runs/s1.1/input", {"answer": "x", "request": "q1"}, 404, "not_found"),
        ("/v1/runs/s1.2/input", {"answer": "x"}, 404, "not_found"),
        ("/v1/runs/none.1/input", {"answer": "x"}, 404, "not_found"),
        ("/v1/requests/s1.1.q2/answer", {"answer": "x"}, 404, "not_found"),
        ("/v1/requests/none.1.q1/answer", {"answer": "x"}, 404, "not_found"),
        ("/v1/requests/nonsense/answer", {"answer": "x"}, 404, "not_found"),
    ):
        refused = await api.post(path, body)
        assert (refused.status_code, refused.json()["code"]) == (status, code), (path, refused.text)
    await api.open("s2")
    run = (await api.say("s2"))["run"]
    early = await answer(api, run, {"answer": "x"})
    assert (early.status, early.body["code"], early.body["run"]) == (409, "not_waiting", run)


async def test_too_late_is_said(api: Running) -> None:
    await asks(api, QUESTION)
    await api.post("/v1/runs/s1.1/cancel")
    closed = await answer(api, "s1.1", {"answer": "x"})
    assert (closed.status, closed.body["code"]) == (409, "request_closed")
    await asks(api, QUESTION | {"expires_in": 1}, session="s2")
    waiting = (await api.http.get("/v1/runs/s2.1/wait?timeout=0")).json()
    over = waiting["requests"][0]["expires_at"] + 200  # whoever estimates the broker's time
    await eventually(lambda: api.broker.clock.now() > over)
    late = await answer(api, "s2.1", {"answer": "too late"})
    assert (late.status, late.body["code"], late.body["request"]) == (409, "request_expired", "s2.1.q1")


@pytest.mark.parametrize("approved", [True, False])
async def test_s12_twenty_decisions_at_once_are_one(api: Running, approved: bool) -> None:
    (request,) = await asks(api, APPROVAL)
    speakers: list[Speaker] = [OverHttp(api.url), OverNats(api.broker, api.account)]
    fields: dict[str, Any] = {"approved": approved} if approved else {"approved": False, "reason": "rather not"}
    answers = await asyncio.gather(
        *(speakers[n % 2].ask("answer_request", request=request, **fields) for n in range(20))
    )
    assert sorted(one.status for one in answers) == [200] * 19 + [202]
    assert all(one.body == answers[0].body for one in answers)
    contrary = await speakers[0].ask("answer_request", request=request, approved=not approved)
    assert (contrary.status, contrary.body["code"]) == (409, "already_answered")
    assert (await kinds(api)).count("request.answered") == 1
    assert isinstance(speakers[0], OverHttp)
    await speakers[0].close()


async def test_an_answer_has_a_key_a_wait_and_a_stream(api: Running) -> None:
    first, second = await asks(api, QUESTION, QUESTION)
    one = await answer(api, "s1.1", {"answer": "a", "request": first}, Idempotency_Key="k1")
    again = await answer(api, "s1.1", {"answer": "a", "request": first}, Idempotency_Key="k1")
    reused = await answer(api, "s1.1", {"answer": "b", "request": second}, Idempotency_Key="k1")
    assert (one.status, again.status, again.body) == (202, 200, one.body)
    assert (reused.status, reused.body["code"]) == (409, "key_reused")
    moved = await answer(api, "s1.1", {"answer": "b", "request": second, "expected_seq": 1})
    assert moved.status == 412
    still = await api.post(f"/v1/requests/{first}/answer?wait=20", {"answer": "a"})
    assert still.json()["status"] == "waiting" and [one["request"] for one in still.json()["requests"]] == [second]
    path = f"/v1/requests/{second}/answer"
    async with api.feed("s1", method="POST", path=path, json={"answer": "b"}) as feed:
        posted = json.loads((await feed.next()).data)
        assert posted["request"] == second and posted["run"] == "s1.1"
        await api.hand.resume("s1.1")
        await api.hand.end("s1.1")
        assert [frame.event for frame in await feed.rest() if frame.id] == [
            "run.started",
            "tool.returned",
            "tool.returned",
            "run.ended",
        ]


async def test_s08_a_message_that_answers_is_waited_for_with_its_run(api: Running) -> None:
    await asks(api, QUESTION)
    asked = asyncio.create_task(api.post("/v1/sessions/s1/messages?wait=20", {"content": "the left one"}))
    while "message.posted" not in (await kinds(api))[-1:]:
        pass
    await api.hand.resume("s1.1")
    await api.hand.end("s1.1", "left it is")
    posted = (await asked).json()
    assert (posted["routed"], posted["run"], posted["outcome"]["output"]) == ("answered", "s1.1", "left it is")
