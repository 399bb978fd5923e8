"""Attachments through every entrance: what is put, named, stored with a message, and given back; to whom it belongs."""

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from tests.services.test_api_nats import ask
from tests.services.test_inbox import publish, refused, said
from tests.support.api import Running, api_settings
from tests.support.waiting import eventually

from turnstream.session.attachments import MANY
from turnstream.wire.attachments import Attachments
from turnstream.wire.blobs import Blobs
from turnstream_api.checks import CONTEXT_MAX
from turnstream_api.errors import Problem
from turnstream_api.http import Uploads

HELLO = hashlib.sha256(b"hello").hexdigest()


async def put(
    api: Running, data: bytes = b"hello", name: str = "notes.txt", media_type: str = "text/plain", session: str = "s1"
) -> httpx.Response:
    headers = {"content-type": media_type} if media_type else {}
    path = f"/v1/sessions/{session}/attachments/{quote(name, safe='')}"
    return await api.http.put(path, content=data, headers=headers)


async def get(api: Running, name: str = "notes.txt", session: str = "s1", **query: str) -> httpx.Response:
    return await api.http.get(f"/v1/sessions/{session}/attachments/{quote(name, safe='')}", params=query)


async def post(api: Running, *names: Any, content: str = "look", **fields: Any) -> httpx.Response:
    return await api.post("/v1/sessions/s1/messages", {"content": content, "attachments": list(names), **fields})


async def messages(api: Running) -> list[dict[str, Any]]:
    answer = await api.http.get("/v1/sessions/s1/events?types=message.posted&limit=200")
    return [event["data"] for event in answer.json()["events"]]


async def expire(api: Running) -> None:
    """As if everything had been there for long."""
    await Attachments(api.broker, Blobs(api.broker)).expire(api.broker.clock.now() + 60_000)


# -- putting and getting ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"\x00\xff\r\n", b"x" * 300_000])
async def test_what_is_put_is_given_back_byte_for_byte(api: Running, data: bytes) -> None:
    await api.open("s1")
    answer = await put(api, data, media_type="image/png")
    expected = {"name": "notes.txt", "media_type": "image/png", "size": len(data)}
    assert answer.status_code == 201 and answer.json() == expected | {"sha256": hashlib.sha256(data).hexdigest()}
    again = await put(api, data, media_type="image/png")
    assert again.status_code == 200 and again.json() == answer.json()
    got = await get(api)
    assert got.status_code == 200 and got.content == data and got.headers["content-type"] == "image/png"
    head = await api.http.head("/v1/sessions/s1/attachments/notes.txt")
    assert head.status_code == 200 and head.content == b"" and head.headers["content-length"] == str(len(data))


async def test_no_browser_shows_it_as_a_page_of_ours(api: Running) -> None:
    await api.open("s1")
    await put(api, b"<script>alert(1)</script>", "x.html", "text/html")
    headers = (await get(api, "x.html")).headers
    assert headers["content-type"] == "text/html"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-disposition"] == "attachment; filename*=UTF-8''x.html"
    assert headers["content-security-policy"].startswith("sandbox")
    assert headers["x-request-id"]


@pytest.mark.parametrize(
    "name", ["Übersicht (2) 🌍.txt", "日本語", "a b%2Fc", 'quote".txt', "semi;colon", "%2e%2e", "..."]
)
async def test_a_name_is_whatever_people_call_their_files(api: Running, name: str) -> None:
    await api.open("s1")
    assert (await put(api, name=name)).json()["name"] == name
    got = await get(api, name)
    assert got.content == b"hello"
    assert got.headers["content-disposition"] == f"attachment; filename*=UTF-8''{quote(name, safe='')}"
    assert (await post(api, name)).status_code == 202
    assert (await messages(api))[0]["attachments"][0]["name"] == name


async def test_a_name_has_one_spelling(api: Running) -> None:
    await api.open("s1")
    assert (await put(api, name="u\u0308ber.txt")).json()["name"] == "über.txt"
    assert (await put(api, name="über.txt")).status_code == 200
    assert (await get(api, "u\u0308ber.txt")).status_code == 200
    assert (await post(api, "u\u0308ber.txt")).status_code == 202


@pytest.mark.parametrize("name", ["a\\b", "..\\..\\x", "a\nb", "a\0b", "a\u202eb", " a", "x" * 129, "\x85"])
async def test_what_is_no_name_is_refused(api: Running, name: str) -> None:
    await api.open("s1")
    answer = await put(api, name=name)
    assert answer.status_code == 422 and answer.json()["field"] == "name", answer.text
    assert (await get(api, name)).status_code == 404
    named = await post(api, name)
    assert named.status_code == 422 and named.json()["field"] == "attachments[0]"


@pytest.mark.parametrize("path", ["..%2F..%2Fetc%2Fpasswd", "a%2Fb", "", "%2E%2E%2F", "a/b"])
async def test_a_path_is_no_name(api: Running, path: str) -> None:
    await api.open("s1")
    answer = await api.http.put(f"/v1/sessions/s1/attachments/{path}", content=b"x")
    assert answer.status_code == 404, answer.text


async def test_a_name_that_is_not_utf8_is_refused(api: Running) -> None:
    await api.open("s1")
    answer = await api.http.put("/v1/sessions/s1/attachments/%ff%fe", content=b"x")
    assert answer.status_code == 422 and answer.json()["field"] == "name"


async def test_its_type_is_what_was_said_and_can_be_said(api: Running) -> None:
    await api.open("s1")
    for given, stored in (
        ("", "application/octet-stream"),
        ("Text/Plain; Charset=UTF-8", "text/plain; Charset=UTF-8"),
        ("application/vnd.api+json", "application/vnd.api+json"),
    ):
        assert (await put(api, name="x", media_type=given)).json()["media_type"] == stored
        assert (await get(api, "x")).headers["content-type"] == stored
    for given in ("nonsense", "text/", "/plain", "text/plain x", "a" * 300 + "/b", "text/pl\u00e4in"):
        answer = await api.http.put(
            "/v1/sessions/s1/attachments/x", content=b"x", headers={"content-type": given.encode("latin-1")}
        )
        assert answer.status_code == 422 and answer.json()["field"] == "media_type", given


@asynccontextmanager
async def another(api: Running, folder: Path, **settings: Any) -> AsyncIterator[Running]:
    """An API in its place, with other settings."""
    await api.stop()
    made = api_settings(api.settings.nats_url, folder, api.account, **settings)
    running = Running(made, api.account, api.broker)
    await running.start()
    yield running
    await running.close()


async def test_a39_what_is_too_large_is_refused_with_its_limit(api: Running, tmp_path: Path) -> None:
    async def pieces(size: int) -> AsyncIterator[bytes]:
        for _ in range(size // 10_000):
            yield b"y" * 10_000

    async with another(api, tmp_path, attachment_max=100_000) as small:
        await small.open("s1")
        assert (await put(small, b"x" * 100_000)).status_code == 201
        for body in (b"x" * 100_001, pieces(500_000)):
            answer = await small.http.put("/v1/sessions/s1/attachments/large", content=body)
            assert answer.status_code == 413 and answer.json()["code"] == "too_large", answer.text
            assert answer.json()["limit"] == 100_000
        assert (await get(small, "large")).status_code == 404
        streamed = await small.http.put("/v1/sessions/s1/attachments/streamed", content=pieces(100_000))
        assert streamed.status_code == 201 and streamed.json()["size"] == 100_000
        content = base64.b64encode(b"x" * 100_001).decode()
        problem, headers = await ask(small, "put_attachment", {"session": "s1", "name": "n", "content": content})
        assert headers["Nats-Service-Error-Code"] == "413" and problem["limit"] == 100_000


async def test_an_upload_that_breaks_off_is_none(api: Running) -> None:
    """Not even an empty one."""
    await api.open("s1")
    host, port = api.url.removeprefix("http://").split(":")
    for sent in (b"", b"hel"):
        _, writer = await asyncio.open_connection(host, int(port))
        head = "PUT /v1/sessions/s1/attachments/broken HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n"
        writer.write(head.encode() + sent)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    await put(api, name="whole")
    assert (await get(api, "broken")).status_code == 404


async def test_a_session_that_is_not_there_takes_none(api: Running) -> None:
    assert (await put(api, session="none")).status_code == 404
    assert (await get(api, session="none")).status_code == 404
    await api.open("s1")
    await put(api)
    await api.hand.delete("s1")
    assert (await put(api)).status_code == 404
    assert (await get(api)).status_code == 404
    assert (await post(api, "notes.txt")).status_code == 404


async def test_an_upload_into_a_session_that_is_deleted_meanwhile_leaves_nothing(
    api: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.open("s1")
    whole = Blobs.put

    async def late(self: Blobs, key: Any, name: str, data: bytes) -> Any:
        await api.hand.delete("s1")
        return await whole(self, key, name, data)

    monkeypatch.setattr(Blobs, "put", late)
    assert (await put(api)).status_code == 404
    for stream, subject in (("KV_attachments", "$KV.attachments"), ("OBJ_blobs", "$O.blobs.C")):
        filter = {"subjects_filter": f"{subject}.{api.account}.s1.>"}
        info: Any = await api.broker.api(f"STREAM.INFO.{stream}", filter)
        assert not info["state"].get("subjects")


def test_what_is_taken_in_at_once_is_bounded() -> None:
    uploads = Uploads(10)
    with uploads.one() as first:
        first(6)
        with uploads.one() as second:
            second(4)
            for hold in (first, second):
                with pytest.raises(Problem, match="at this moment"):
                    hold(1)
        first(4)
    with uploads.one() as third:
        third(10)


async def test_what_is_too_much_at_once_is_put_off(
    api: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("turnstream_api.http.UPLOADS", 0)
    async with another(api, tmp_path) as full:
        await full.open("s1")
        answer = await put(full)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert (await put(full, b"")).status_code == 201


# -- over NATS --------------------------------------------------------------------------------------------------------


async def test_the_same_over_nats(api: Running) -> None:
    await api.open("s1")
    content = base64.b64encode(b"hello").decode()
    body = {"session": "s1", "name": "notes.txt", "content": content, "media_type": "text/plain"}
    answer, headers = await ask(api, "put_attachment", body)
    assert headers["Status-Code"] == "201" and answer == (await put(api)).json()
    assert (await ask(api, "put_attachment", body))[1]["Status-Code"] == "200"
    got, _ = await ask(api, "get_attachment", {"session": "s1", "name": "notes.txt"})
    assert got == answer | {"content": content}
    posted, _ = await ask(api, "post_message", {"session": "s1", "content": "", "attachments": ["notes.txt"]})
    assert posted["routed"] == "started"
    for bad in ({"content": "no base64!"}, {"content": 5}, {"name": "a/b"}, {"media_type": "x"}):
        problem, _ = await ask(api, "put_attachment", body | bad)
        assert problem["status"] == 422 and problem["field"] == next(iter(bad))
    assert (await ask(api, "put_attachment", body | {"session": "none"}))[0]["status"] == 404


async def test_what_no_nats_message_holds_is_asked_for_over_http(api: Running) -> None:
    await api.open("s1")
    await put(api, b"x" * 900_000)
    problem, headers = await ask(api, "get_attachment", {"session": "s1", "name": "notes.txt"})
    assert headers["Nats-Service-Error-Code"] == "413" and "ask over HTTP" in problem["detail"]
    assert len((await get(api)).content) == 900_000


# -- naming -----------------------------------------------------------------------------------------------------------


async def test_a_message_holds_a_reference_that_never_changes(api: Running) -> None:
    await api.open("s1", policy={"on_busy": "queue"})
    await put(api, b"hello")
    assert (await post(api, "notes.txt")).status_code == 202
    await put(api, b"other")
    await post(api, "notes.txt")
    await post(api, {"name": "notes.txt", "sha256": HELLO})
    first, second, third = [message["attachments"] for message in await messages(api)]
    assert set(first[0]) == {"name", "media_type", "size", "sha256", "blob"}
    assert (first[0]["sha256"], first[0]["size"], first[0]["media_type"]) == (HELLO, 5, "text/plain")
    assert third == first and second[0]["sha256"] != HELLO
    assert (await get(api)).content == b"other"
    assert (await get(api, sha256=HELLO)).content == b"hello"
    assert (await get(api, sha256="0" * 64)).status_code == 404


async def test_a_message_names_each_once(api: Running) -> None:
    await api.open("s1")
    await put(api, name="a")
    await put(api, b"b", name="b")
    await post(api, "b", "a", "b", {"name": "a", "sha256": HELLO})
    (message,) = await messages(api)
    assert [one["name"] for one in message["attachments"]] == ["b", "a"]


@pytest.mark.parametrize(
    ("names", "field"),
    [
        (["none"], "attachments[0]"),
        (["notes.txt", "none"], "attachments[1]"),
        ([{"name": "notes.txt", "sha256": "0" * 64}], "attachments[0]"),
        ([{"name": "notes.txt"}], "attachments[0].sha256"),
        ([{"name": "notes.txt", "sha256": "x"}], "attachments[0].sha256"),
        ([{"name": "notes.txt", "sha256": HELLO, "blob": "x"}], "attachments[0].blob"),
        ([5], "attachments[0]"),
        ("notes.txt", "attachments"),
        (["notes.txt"] * (MANY + 1), "attachments"),
    ],
)
async def test_what_cannot_be_named_is_refused_and_nothing_is_stored(api: Running, names: Any, field: str) -> None:
    await api.open("s1")
    await put(api)
    for path, body in (
        ("/v1/sessions/s1/messages", {"content": "look"}),
        ("/v1/runs", {"input": "look", "session": "s1"}),
    ):
        answer = await api.post(path, {**body, "attachments": names})
        assert answer.status_code == 422 and answer.json()["field"] == field, answer.text
    assert await messages(api) == []
    await expire(api)
    assert (await get(api)).status_code == 404, "what a refused message named expires"


async def test_s32_a_message_without_a_word_may_have_something_attached(viewed: Running) -> None:
    api = viewed
    await api.open("s1")
    empty = await post(api, content="")
    assert empty.status_code == 422 and empty.json()["field"] == "content"
    await put(api)
    posted = (await post(api, "notes.txt", content="")).json()
    assert posted["routed"] == "started"
    session = (await api.http.get(f"/v1/sessions/s1?after={posted['seq']}")).json()
    assert session["title"] == ""
    await api.hand.carry_out("s1.1")
    later = (await post(api, content="And now?")).json()
    session = (await api.http.get(f"/v1/sessions/s1?after={later['seq']}")).json()
    assert session["title"] == "", "it is the first message's"


async def test_a_run_that_opens_its_session_has_nothing_to_name(api: Running) -> None:
    for session in ({}, {"session": "s1"}):
        answer = await api.post("/v1/runs", {"input": "x", "attachments": ["a"], **session})
        assert answer.status_code == 422 and answer.json()["field"] == "attachments[0]"
    await api.open("s1")
    await put(api)
    answer = await api.post("/v1/runs", {"input": "", "attachments": ["notes.txt"], "session": "s1"})
    assert answer.status_code == 202, answer.text


async def test_the_inbox_takes_them_too(api: Running) -> None:
    await api.open("s1", policy={"on_busy": "queue"})
    await put(api)
    await publish(api.broker, api.account, "s1", {"content": "", "attachments": ["notes.txt"], "context": "page 1"})
    await publish(api.broker, api.account, "s1", {"content": "x", "attachments": ["none"]})
    (event,) = await said(api, "s1", 1)
    assert event["data"]["attachments"][0]["sha256"] == HELLO and event["data"]["context"] == "page 1"

    async def told() -> Any:
        return await refused(api.broker, api.account)

    (letter,) = await eventually(told)
    assert letter.headers["ts-refused-code"] == "invalid" and "none" in letter.headers["ts-refused-detail"]


# -- again ------------------------------------------------------------------------------------------------------------


async def test_s07_a_repeat_is_one_and_other_attachments_are_another_body(api: Running) -> None:
    await api.open("s1")
    await put(api)
    await put(api, b"b", "b")
    body = {"content": "look", "attachments": ["notes.txt"], "context": "page 1"}
    first = await api.post("/v1/sessions/s1/messages", body, Idempotency_Key="k1")
    again = await api.post("/v1/sessions/s1/messages", body, Idempotency_Key="k1")
    assert (first.status_code, again.status_code) == (202, 200) and again.json() == first.json()
    for other in ({"attachments": ["b"]}, {"attachments": []}, {"attachments": ["none"]}, {"context": "page 2"}):
        answer = await api.post("/v1/sessions/s1/messages", body | other, Idempotency_Key="k1")
        assert answer.status_code == 409 and answer.json()["code"] == "key_reused", other
    assert len(await messages(api)) == 1
    await expire(api)
    assert (await get(api)).status_code == 200
    assert (await get(api, "b")).status_code == 404


async def test_a_repeat_is_one_whatever_the_name_means_by_then(api: Running) -> None:
    await api.open("s1")
    await put(api)
    body = {"content": "look", "attachments": ["notes.txt"]}
    first = await api.post("/v1/sessions/s1/messages", body, Idempotency_Key="k1")
    await put(api, b"other")
    again = await api.post("/v1/sessions/s1/messages", body, Idempotency_Key="k1")
    assert again.status_code == 200 and again.json() == first.json()
    assert (await messages(api))[0]["attachments"][0]["sha256"] == HELLO


async def test_many_equal_requests_at_once_claim_once(api: Running) -> None:
    await api.open("s1")
    await put(api)
    body = {"content": "look", "attachments": ["notes.txt"]}
    answers = await asyncio.gather(
        *(api.post("/v1/sessions/s1/messages", body, Idempotency_Key="k1") for _ in range(20))
    )
    assert sorted(answer.status_code for answer in answers) == [200] * 19 + [202]
    await expire(api)
    assert (await get(api)).content == b"hello", "those who were late have not released it for the first"


# -- what expires -----------------------------------------------------------------------------------------------------


async def test_what_no_message_names_expires_and_what_one_names_never(api: Running) -> None:
    await api.open("s1")
    await put(api, name="named")
    await put(api, b"loose", "loose")
    await post(api, "named")
    await expire(api)
    assert (await get(api, "named")).content == b"hello"
    assert (await get(api, "loose")).status_code == 404
    answer = await post(api, "loose")
    assert answer.status_code == 422 and answer.json()["field"] == "attachments[0]"
    assert (await put(api, b"loose", "loose")).status_code == 201


async def test_what_a_refused_message_named_expires(api: Running) -> None:
    await api.open("s1")
    await api.say("s1")
    await put(api)
    assert (await post(api, "notes.txt")).json()["code"] == "run_active"
    moved = await post(api, "notes.txt", expected_seq=1, on_busy="queue")
    assert moved.status_code == 412
    assert (await get(api)).status_code == 200
    await expire(api)
    assert (await get(api)).status_code == 404


async def test_messages_and_expiry_at_once_leave_no_message_with_nothing(api: Running) -> None:
    await api.open("s1", policy={"on_busy": "queue"})
    taken = 0
    for n in range(20):
        await put(api, b"%d" % n, f"{n}")
        answer, _ = await asyncio.gather(post(api, f"{n}"), expire(api))
        assert answer.status_code in (202, 422)
        taken += answer.status_code == 202
        assert ((await get(api, f"{n}")).status_code == 200) == (answer.status_code == 202)
    assert taken == len(await messages(api)) > 0


# -- what the window shows --------------------------------------------------------------------------------------------


async def test_a_context_has_a_bound_in_bytes(api: Running) -> None:
    await api.open("s1")
    for text in ("x" * (CONTEXT_MAX + 1), "é" * (CONTEXT_MAX // 2 + 1)):
        answer = await post(api, context=text)
        assert answer.status_code == 413 and answer.json()["field"] == "context"
        assert answer.json()["limit"] == CONTEXT_MAX
    both = {"content": "\x01" * api.settings.message_max, "context": "\x01" * CONTEXT_MAX}
    answer = await api.post("/v1/sessions/s1/messages", both)
    assert answer.status_code == 202, answer.text
    assert (await messages(api))[0]["context"] == "\x01" * CONTEXT_MAX


async def test_transcript_and_queue_show_attachments_and_no_window(viewed: Running) -> None:
    api = viewed
    await api.open("s1", policy={"on_busy": "queue"})
    await put(api)
    posted = (await post(api, "notes.txt", context="marzipan")).json()
    queue = (await api.http.get("/v1/sessions/s1/queue")).json()
    page = (await api.http.get(f"/v1/sessions/s1/history?after={posted['seq']}")).json()
    for item in (queue["items"][0], page["items"][0]):
        (one,) = item["attachments"]
        assert (one["name"], one["size"], one["sha256"]) == ("notes.txt", 5, HELLO)
    assert "marzipan" not in json.dumps([queue, page])
    await api.hand.carry_out("s1.1")
    model = (await api.http.get("/v1/sessions/s1/history?as=model")).json()
    assert model["messages"][0]["attachments"][0]["name"] == "notes.txt"
    assert "marzipan" not in json.dumps(model)


async def test_s32_what_is_attached_may_be_all_that_there_is_to_say(api: Running) -> None:
    await api.open("s1")
    await put(api, b"words")
    answer = await api.post("/v1/sessions/s1/messages", {"attachments": ["notes.txt"]})
    assert answer.status_code == 202, answer.text
    nothing = await api.post("/v1/sessions/s1/messages", {})
    assert (nothing.status_code, nothing.json()["field"]) == (422, "content")
