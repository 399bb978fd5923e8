"""The NATS entrance: the same operations, the same answers and refusals, and a truthful account of itself."""

import asyncio
import json
from typing import Any

from nats.aio.msg import Msg
from tests.support.api import Running
from tests.support.waiting import eventually

from turnstream.broker.connection import Broker
from turnstream_api.operations import OPERATIONS


async def ask(api: Running, operation: str, body: Any = None, **headers: str) -> tuple[dict[str, Any], dict[str, str]]:
    return _read(await _ask(api, operation, body, **headers))


async def _ask(api: Running, operation: str, body: Any = None, **headers: str) -> Msg:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await api.broker.request(f"ts.api.{api.account}.{operation}", data, named, timeout=10)


def _read(message: Msg) -> tuple[dict[str, Any], dict[str, str]]:
    return json.loads(message.data), message.headers or {}


async def test_a_conversation_over_nats_alone(api: Running) -> None:
    opened, headers = await ask(api, "open_session", {"id": "s1", "title": "over NATS"})
    assert opened["session"] == "s1" and headers["Status-Code"] == "201" and headers["X-Request-Id"]
    posted, _ = await ask(api, "post_message", {"session": "s1", "content": "hello"})
    assert posted["run"] == "s1.1"
    waiting = asyncio.create_task(ask(api, "wait_run", {"run": "s1.1", "timeout": 20}))
    await api.hand.carry_out("s1.1", "hello over there")
    waited, _ = await waiting
    assert waited["outcome"]["output"] == "hello over there"
    page, _ = await ask(api, "read_events", {"session": "s1"})
    assert [event["type"] for event in page["events"]][-1] == "run.ended"
    assert page == (await api.http.get("/v1/sessions/s1/events")).json()
    history, _ = await ask(api, "read_history", {"session": "s1", "as": "model"})
    assert [message["type"] for message in history["messages"]] == ["user", "assistant"]


async def test_one_that_waits_holds_up_no_other(api: Running) -> None:
    await api.open("s1")
    await api.say("s1")
    waiting = [asyncio.create_task(ask(api, "wait_run", {"run": "s1.1", "timeout": 30})) for _ in range(20)]
    answer, _ = await ask(api, "wait_run", {"run": "s1.1", "timeout": 0})
    assert answer["status"] == "queued"
    await api.hand.carry_out("s1.1")
    assert {answer["status"] for answer, _ in await asyncio.gather(*waiting)} == {"completed"}


async def test_refusals_are_the_same_problems(api: Running) -> None:
    await api.open("s1")
    await api.say("s1")
    cases: list[tuple[str, Any, str, str]] = [
        ("post_message", {"session": "s1", "content": "again"}, "409", "run_active"),
        ("post_message", {"session": "none", "content": "x"}, "404", "not_found"),
        ("post_message", {"session": "s1"}, "422", "invalid"),
        ("post_message", {"session": "s1", "content": "x", "role": "tool"}, "422", "invalid"),
        ("post_message", {"session": "s1", "content": "x", "attachments": ["a"]}, "422", "invalid"),
        ("start_run", {"input": "x", "limits": {}}, "422", "not_available"),
        ("answer_run", {"run": "s1.1", "answer": "x"}, "409", "not_waiting"),
        ("answer_run", {"run": "s1.1"}, "422", "invalid"),
        ("post_message", {"session": "s1", "content": "x", "expected_seq": 1}, "412", "session_moved"),
        ("post_message", b"{", "400", "invalid_json"),
        ("post_message", b'{"session":"s1","content":"\\ud800"}', "422", "invalid"),
        ("post_message", {"session": "s1", "content": "x" * 70_000}, "413", "too_large"),
        ("read_events", {"session": "s1", "after": "abc"}, "400", "invalid_cursor"),
        ("wait_run", {"run": "s1.7"}, "404", "not_found"),
    ]
    for operation, body, status, code in cases:
        problem, headers = await ask(api, operation, body)
        assert (headers["Nats-Service-Error-Code"], problem["code"]) == (status, code), problem
        assert problem["status"] == int(status) and headers["Nats-Service-Error"] and headers["X-Request-Id"]
    unnamed, _ = await ask(api, "post_message", {"session": "s1", "content": "x"}, ts_actor="system")
    assert unnamed["field"] == "ts-actor"


async def test_the_actor_the_key_and_the_trace_come_in_headers(api: Running) -> None:
    await api.open("s1")
    body = {"session": "s1", "content": "hello"}
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    given = {"ts_actor": "user:ann", "Idempotency_Key": "k1", "traceparent": parent}
    first, _ = await ask(api, "post_message", body, **given)
    again, headers = await ask(api, "post_message", body, **given)
    assert again == first and headers["Idempotency-Replayed"] == "true" and headers["Status-Code"] == "200"
    over_http = await api.post("/v1/sessions/s1/messages", {"content": "hello"}, Idempotency_Key="k1")
    assert over_http.status_code == 200 and over_http.json() == first
    said = (await api.http.get("/v1/sessions/s1/events")).json()["events"][-1]
    assert said["actor"] == said["data"]["author"] == "user:ann" and parent[3:35] in said["traceparent"]


async def test_an_answer_that_no_message_can_hold_is_said(api: Running) -> None:
    await api.open("s1", policy={"on_busy": "queue", "history": {"window": "all"}})
    for _ in range(20):
        run = (await api.say("s1", "x" * 60_000))["run"]
        await api.hand.carry_out(run)
    problem, _ = await ask(api, "read_history", {"session": "s1", "as": "model"})
    assert problem["code"] == "too_large" and problem["limit"] == api.broker.nc.max_payload
    page, _ = await ask(api, "read_events", {"session": "s1", "limit": 200})
    found = page["events"]
    while page["more"]:
        page, _ = await ask(api, "read_events", {"session": "s1", "limit": 200, "after": page["seq"]})
        found += page["events"]
    assert len(found) == 61


async def discovered(nats: Broker, subject: str, service: str) -> dict[str, Any]:
    return json.loads((await nats.request(f"$SRV.{subject}.turnstream-api.{service}")).data)


async def service_ids(nats: Broker, account: str) -> list[str]:
    """Whoever answers a ping."""
    found: list[str] = []
    inbox = nats.nc.new_inbox()
    subscription = await nats.nc.subscribe(inbox)
    await nats.nc.publish("$SRV.PING.turnstream-api", b"", reply=inbox)
    try:
        while True:
            found.append(json.loads((await subscription.next_msg(timeout=0.3)).data)["id"])
    except TimeoutError:
        return found
    finally:
        await subscription.unsubscribe()


async def test_discovery_tells_the_truth(api: Running, nats: Broker) -> None:
    (service,) = await service_ids(nats, api.account)
    info = await discovered(nats, "INFO", service)
    assert info["type"] == "io.nats.micro.v1.info_response"
    assert {(endpoint["name"], endpoint["subject"]) for endpoint in info["endpoints"]} == {
        (operation.name, f"ts.api.*.{operation.name}") for operation in OPERATIONS
    }
    await api.open("s1")
    for _ in range(3):
        await ask(api, "read_queue", {"session": "s1"})
    await ask(api, "read_queue", {"session": "none"})

    async def counted() -> bool:
        stats = await discovered(nats, "STATS", service)
        (one,) = [endpoint for endpoint in stats["endpoints"] if endpoint["name"] == "read_queue"]
        return (
            (one["num_requests"], one["num_errors"]) == (4, 1)
            and one["processing_time"] > 0
            and "none" in one["last_error"]
        )

    await eventually(counted)
    # One subscription an endpoint: each request is answered once.
    inbox = nats.nc.new_inbox()
    answers = await nats.nc.subscribe(inbox)
    await nats.nc.publish(f"ts.api.{api.account}.read_queue", b'{"session":"s1"}', reply=inbox)
    await answers.next_msg(timeout=5)
    await nats.nc.flush()
    assert answers.pending_msgs == 0
