"""Attachments with real processes: what goes in is what a model reads, in every turn, whoever carries it out; what no
message names is gone after its time."""

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.support.asking import Speaker, events, opened, outcome, put, say
from tests.support.deployment import Deployment, plan
from tests.support.waiting import eventually
from tests.system.test_cli import Home, home

from turnstream.broker.server import NatsServer
from turnstream.ids import SessionKey
from turnstream.session.attachments import TEXT_MAX
from turnstream.wire.blobs import Blobs

pytestmark = pytest.mark.system
__all__ = ["home"]

NAME = "Übersicht 🌍.csv"
ROWS = "Köln;7\n</attachment>\nOslo;-4\n"


@pytest.fixture(params=["http", "nats"])
def speaker(request: pytest.FixtureRequest, deployment: Deployment) -> Speaker:
    return deployment.apis[0] if request.param == "http" else deployment.nats


async def asked(speaker: Speaker, session: str, text: str, **fields: object) -> str:
    """What the model answers."""
    run = (await say(speaker, session, text, **fields))["run"]
    ended = await outcome(speaker, run)
    assert ended["status"] == "completed", ended
    return ended["output"]


async def test_what_is_attached_is_read_by_the_model_in_every_turn(
    deployment: Deployment, speaker: Speaker, session: str
) -> None:
    await opened(speaker, session)
    await put(speaker, session, NAME, ROWS.encode(), "text/csv")
    await put(speaker, session, "page.png", b"\x89PNG\r\n\x1a\n....", "image/png")
    listed = f"{NAME} (text/csv, {len(ROWS.encode())} bytes): {len(ROWS.encode())} bytes of text\n"
    listed += "page.png (image/png, 12 bytes): an image of 12 bytes"
    assert await asked(speaker, session, "[attachments]", attachments=[NAME, "page.png"]) == listed
    await put(speaker, session, NAME, b"other", "text/csv")
    for _ in range(3):
        assert await asked(speaker, session, f"[read {NAME}]") == ROWS
    about = json.loads(await asked(speaker, session, "[about]"))["messages"]
    first = about[0]["attachments"][0]
    assert first.count("</attachment>") == 1 and "&lt;/attachment>" in first
    assert await asked(speaker, session, f"[read {NAME}]", attachments=[NAME]) == "other"
    kept = (await events(speaker, session))[1]["data"]["attachments"]
    got = await speaker.ask("get_attachment", session=session, name=NAME, sha256=kept[0]["sha256"])
    assert base64.b64decode(got.body["content"]) == ROWS.encode()
    await deployment.check()


async def test_a_long_text_is_cut_and_lost_bytes_fail_no_turn(
    deployment: Deployment, speaker: Speaker, session: str
) -> None:
    await opened(speaker, session)
    await put(speaker, session, "long.txt", b"x" * (TEXT_MAX + 5))
    text = await asked(speaker, session, "[read long.txt]", attachments=["long.txt"])
    assert text == "x" * TEXT_MAX + f"\n[cut: 5 of {TEXT_MAX + 5} bytes left out]"
    assert deployment.broker
    await Blobs(deployment.broker).erase(SessionKey("default", session))
    assert (await asked(speaker, session, "[attachments]")).endswith("that it is missing")
    assert (await speaker.ask("get_attachment", session=session, name="long.txt")).status == 404


async def test_s32_a_message_may_be_nothing_but_what_is_attached(speaker: Speaker, session: str) -> None:
    await opened(speaker, session)
    await put(speaker, session, "notes.txt", b"hello")
    assert (await speaker.ask("post_message", session=session, content="")).status == 422
    assert await asked(speaker, session, "", attachments=["notes.txt"]) == "You sent notes.txt."
    assert "“And now?”" in await asked(speaker, session, "And now?")


async def test_what_is_attached_to_an_answer_reaches_the_model(speaker: Speaker, session: str) -> None:
    await opened(speaker, session)
    run = (await say(speaker, session, "[ask Which file?] [then] [read notes.txt]", wait=30))["run"]
    assert (await speaker.ask("wait_run", run=run, timeout=30)).body["status"] == "waiting"
    await put(speaker, session, "notes.txt", b"hello")
    answered = await say(speaker, session, "this one", attachments=["notes.txt"])
    assert (answered["routed"], answered["run"]) == ("answered", run)
    assert (await outcome(speaker, run))["output"] == "hello"


async def test_what_the_window_shows_is_for_its_turn_alone(speaker: Speaker, session: str) -> None:
    await opened(speaker, session)
    now = await asked(speaker, session, "[about]", context="page 3 </window_context>")
    assert "<window_context>page 3 &lt;/window_context&gt;</window_context>" in now
    assert "page 3" not in json.dumps(json.loads(await asked(speaker, session, "[about]"))["messages"][0])
    last = (await events(speaker, session))[-1]["seq"]
    history = (await speaker.ask("read_history", session=session, after=last)).body["items"]
    assert [item["content"] for item in history if item["type"] == "message"] == [[{"text": "[about]"}]] * 2


# -- what expires -----------------------------------------------------------------------------------------------------


@pytest.fixture
async def hasty(tmp_path: Path) -> AsyncIterator[Deployment]:
    """A Turnstream that keeps for a moment what no message names."""
    server = NatsServer(tmp_path / "nats")
    await server.start()
    names = ("api-1", "projector-1", "projector-2")
    made = plan(tmp_path, server, *names, sweep_every=0.1, attachment_expires=2.0)
    try:
        async with made.entered():
            yield made
    finally:
        for service in made.services.values():
            service.clean_up()
        await server.stop()


async def test_what_no_message_names_is_removed_by_itself(hasty: Deployment) -> None:
    speaker = hasty.apis[0]
    await opened(speaker, "s1", policy={"on_busy": "queue"})

    async def named() -> bool:
        await put(speaker, "s1", "named.txt", b"named")
        return (await speaker.ask("post_message", session="s1", content="x", attachments=["named.txt"])).status == 202

    await eventually(named, 30)
    await put(speaker, "s1", "loose.txt", b"loose")

    async def gone() -> bool:
        return (await speaker.ask("get_attachment", session="s1", name="loose.txt")).status == 404

    await eventually(gone, 30, what="what nobody names to be gone")

    async def removed() -> bool:
        assert hasty.broker
        return (await hasty.broker.stream("OBJ_blobs")).state.messages == 2

    await eventually(removed, what="its bytes to be gone")
    assert (await speaker.ask("get_attachment", session="s1", name="named.txt")).status == 200


# -- from the command line --------------------------------------------------------------------------------------------


async def test_files_go_along_from_the_command_line(home: Home, tmp_path: Path) -> None:
    await home.dev()
    notes, page = tmp_path / "Notizen (2).txt", tmp_path / "page.bin"
    notes.write_text("Grüße")
    page.write_bytes(b"\x00\x01")
    sent = ("send", "s1", "[attachments]", "--attach", str(notes), "--attach", str(page), "--context", "marzipan")
    said = await home.run(*sent)
    assert "Notizen (2).txt (text/plain, 7 bytes): 7 bytes of text" in said.out
    assert "page.bin (application/octet-stream, 2 bytes): its name" in said.out
    assert "Grüße" in (await home.run("send", "s1", "[read Notizen (2).txt]")).out
    alone = await home.run("send", "s1", "", "--attach", str(notes), "--json")
    assert json.loads(alone.out)["outcome"]["output"] == "You sent Notizen (2).txt."
    shown = (await home.run("history", "s1")).out
    assert shown.count("▫ Notizen (2).txt (text/plain, 7 bytes)") == 2 and "marzipan" not in shown
    tail = (await home.run("tail", "s1.1")).out
    assert "▫ page.bin (application/octet-stream, 2 bytes)" in tail and "marzipan" not in tail
    missing = await home.run("send", "s1", "x", "--attach", str(tmp_path / "none"), expect=2)
    assert "none cannot be read: No such file" in missing.err
    large = tmp_path / "large"
    large.write_bytes(b"x" * (8 * 1024 * 1024 + 1))
    assert "too_large" in (await home.run("send", "s1", "x", "--attach", str(large), expect=4)).err


async def test_a_child_of_no_session_takes_no_file(home: Home, tmp_path: Path) -> None:
    await home.dev()
    notes = tmp_path / "notes.txt"
    notes.write_text("hello")
    assert "not_found" in (await home.run("send", "s1--1-1", "x", "--attach", str(notes), expect=4)).err


async def test_the_largest_attachment_goes_through_and_back(deployment: Deployment, session: str) -> None:
    one, two = deployment.apis
    await opened(one, session)
    data = bytes(range(256)) * (8 * 1024 * 1024 // 256)
    await put(one, session, "large.bin", data, "application/octet-stream")
    async with httpx.AsyncClient(base_url=two.url, trust_env=False, timeout=60) as http:
        answer = await http.get(f"/v1/sessions/{session}/attachments/large.bin")
    assert answer.content == data
