"""The descriptions are true: whatever schemathesis makes up from `/openapi.json`, the real API answers as described."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import checks
from tests.support.api import Hand, api_settings
from tests.support.nats import connect

from turnstream.broker.server import NatsServer
from turnstream.session.events import TYPES
from turnstream_api.app import serve as serve_api
from turnstream_api.errors import CODES, STATUS
from turnstream_api.openapi import asyncapi, openapi
from turnstream_api.operations import OPERATIONS
from turnstream_projector.app import serve as serve_projector

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]
schema = schemathesis.openapi.from_dict(json.loads(openapi()))


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real API with a projector on a broker of their own, in a thread; a session `s1` with a run in it, and `s2` with
    one that waits for two answers."""
    folder = tmp_path_factory.mktemp("openapi")
    up = threading.Event()
    hold: dict[str, Any] = {}

    async def run() -> None:
        server = NatsServer(folder / "nats")
        await server.start()
        hold["stop"] = stop = asyncio.Event()
        hold["loop"] = asyncio.get_running_loop()
        chosen = api_settings(server.url, folder, "default", after_timeout=1.0)
        hold["url"] = f"http://127.0.0.1:{chosen.http_port}"
        ready = {name: asyncio.Event() for name in ("api", "projector")}
        serving = [
            asyncio.create_task(serve_api(chosen, stop=stop, ready=ready["api"].set)),
            asyncio.create_task(serve_projector(chosen, stop=stop, ready=ready["projector"].set)),
        ]
        for event in ready.values():
            waiting = asyncio.create_task(event.wait())
            done, _ = await asyncio.wait([waiting, *serving], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {waiting}:
                task.result()
        async with httpx.AsyncClient(base_url=hold["url"], trust_env=False) as http:
            body = {"input": "hello", "session": "s1", "message_id": "m1"}
            assert (await http.post("/v1/runs", json=body)).status_code == 202
            body = {"input": "hello", "session": "s2", "message_id": "m2"}
            assert (await http.post("/v1/runs", json=body)).status_code == 202
        broker = await connect(server.url)
        hand = Hand(broker, "default")
        await hand.start("s2.1")
        await hand.ask("s2.1", {"prompt": "Which one?"}, {"kind": "approval", "prompt": "really?"})
        await broker.close()
        up.set()
        await asyncio.gather(*serving)
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="api under test")
    thread.start()
    assert up.wait(20)
    yield hold["url"]
    hold["loop"].call_soon_threadsafe(hold["stop"].set)
    thread.join(20)
    assert not thread.is_alive()


@schema.parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_500_and_no_undocumented_answer(case: schemathesis.Case, base_url: str) -> None:
    _aim(case)
    answer = case.call(base_url=base_url)
    case.validate_response(answer, checks=CHECKS)
    assert answer.headers["x-request-id"]


def _aim(case: schemathesis.Case) -> None:
    """Every other case is about what exists; none waits."""
    if case.meta and case.meta.generation.mode.is_negative:
        return
    near = len(str(case.query)) % 2 == 0
    run = "s2.1" if case.path.endswith("/input") else "s1.1"
    for name, existing in (("session", "s1"), ("run", run), ("message", "m1"), ("request", "s2.1.q1")):
        if near and case.path_parameters and name in case.path_parameters:
            case.path_parameters[name] = existing
    for name, value in (("wait", 0.01), ("after", 1)):
        if case.query and name in case.query:
            case.query[name] = value
    if case.path.endswith("/wait"):
        case.query = {**(case.query or {}), "timeout": 0.01}
    if case.path.endswith("/fork"):
        case.query = {**(case.query or {}), "wait": 0.01}


# --- what can be told without asking ------------------------------------------------------------------------------


def test_every_operation_is_described_once() -> None:
    names = [operation.name for operation in OPERATIONS]
    assert len(set(names)) == len(names)
    assert len({(operation.method, operation.path) for operation in OPERATIONS}) == len(names)
    described = json.loads(openapi())["paths"]
    for operation in OPERATIONS:
        one = described[operation.path][operation.method.lower()]
        assert one["operationId"] == operation.name and one["description"] and one["summary"]
        assert set(operation.in_path) | operation.in_query | operation.in_body == set(operation.fields)


def test_a_page_of_events_is_one_of_events_as_they_are_stored() -> None:
    for described in (openapi(), asyncapi()):
        page = json.loads(described)["components"]["schemas"]["EventPage"]
        assert {"seq", "id", "type", "source", "data"} <= set(page["properties"]["events"]["items"]["required"])


def test_every_code_has_one_status() -> None:
    assert set(STATUS) == set(CODES) and len(CODES) == len(set(CODES))


def test_asyncapi_holds_together() -> None:
    document = json.loads(asyncapi())
    text = json.dumps(document)
    for channel in document["channels"].values():
        for message in channel["messages"].values():
            assert message["$ref"].rpartition("/")[2] in document["components"]["messages"]
    for name in document["components"]["schemas"]:
        assert f"schemas/{name}" in text
    assert {channel["address"] for channel in document["channels"].values()} >= {
        "ts.inbox.{account}.{session}",
        "ts.feed.{account}.{session}",
        "ts.api.{account}.post_message",
    }
    assert "run.ended" in text and set(TYPES) <= set(
        document["components"]["messages"]["Event"]["payload"]["properties"]["type"]["examples"]
    )
