"""An old session: a process that does not know it reads little of it, whatever it is asked, and without its snapshot
says the same."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.api import Running, api_settings
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.erasing import erase
from turnstream.log.base import PAGE
from turnstream.log.jetstream import JetStreamLog
from turnstream.log.snapshots import EVERY
from turnstream.session import snapshot
from turnstream.session.events import Recorded
from turnstream.wire.snapshots import Snapshots

OLD = 6 * EVERY
"""Events. Nobody needs to read more of them than a page, and what has come since the snapshot."""


class Reads:
    """Counts the events that are read of any log in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        read = JetStreamLog.read

        async def counted(log: JetStreamLog, *args: Any, **given: Any) -> AsyncIterator[list[Recorded]]:
            async for page in read(log, *args, **given):
                self.count += len(page)
                yield page

        monkeypatch.setattr(JetStreamLog, "read", counted)


@pytest.fixture
async def old(api: Running) -> Running:
    """Run 1 has ended, run 2 waits for an answer, run 3 was cancelled before it began; much later comes run 4."""
    await api.open("s1", policy={"preset": "memory"})
    await api.turn("s1", answer="the first")
    await api.hand.start((await api.say("s1", "ask me"))["run"])
    await api.hand.ask("s1.2", {"prompt": "Which one?", "choices": ["left", "right"]})
    await api.hand.cancel((await api.say("s1", "rather not"))["run"])
    await api.hand.notices("s1", OLD)
    assert (await api.say("s1", "later"))["run"] == "s1.4"
    await until_taken(api, OLD)
    return api


async def until_taken(api: Running, events: int) -> None:
    """There is a snapshot of the session with so many events, or nearly so many."""
    key = api.hand.key("s1")

    async def taken() -> bool:
        await api.http.get("/v1/sessions/s1/queue")
        data, _ = await Snapshots(api.broker).get(key) or (b"", 0)
        found = snapshot.decode(data, key)
        return found is not None and found.session.events > events - EVERY

    await eventually(taken, what="a snapshot")


async def forget(api: Running) -> None:
    """The process dies, and another one begins."""
    await api.stop()
    await api.start()


QUESTIONS = ("/v1/sessions/s1/queue", *(f"/v1/runs/s1.{n}/wait?timeout=0" for n in (1, 2, 3, 4)))
CHANGES: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("POST", "/v1/sessions/s1/messages", {"content": "hello"}),
    ("POST", "/v1/sessions", {"id": "s1", "metadata": {"how": "old"}}),
    ("PATCH", "/v1/sessions/s1", {"title": "older"}),
    ("POST", "/v1/runs/s1.2/input", {"answer": "left"}),
    ("POST", "/v1/runs/s1.4/cancel", {}),
    ("POST", "/v1/sessions/s1/stop", {}),
    ("DELETE", "/v1/sessions/s1?mode=detach", {}),
)


async def test_little_of_an_old_session_is_read(old: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = []
    for path in QUESTIONS:
        await forget(old)
        with monkeypatch.context() as patch:
            reads = Reads(patch)
            answers.append((await old.http.get(path)).json())
            assert reads.count < EVERY + PAGE, path
    queue, first, second, third, fourth = answers
    assert [(one["run"], one["content"][0]["text"]) for one in queue["items"]] == [("s1.4", "later")]
    assert first["outcome"]["output"] == "the first"
    assert [request["choices"] for request in second["requests"]] == [["left", "right"]]
    assert (third["status"], fourth["status"]) == ("cancelled", "queued")
    for method, path, body in CHANGES:
        await forget(old)
        with monkeypatch.context() as patch:
            reads = Reads(patch)
            answer = await old.http.request(method, path, json=body)
            assert answer.status_code < 300, (path, answer.text)
            assert reads.count < EVERY + PAGE, path


async def test_without_its_snapshot_an_old_session_is_the_same(old: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    await forget(old)
    answers = [(await old.http.get(path)).json() for path in QUESTIONS]
    await erase(old.broker, subjects.SNAPSHOTS, subjects.snapshot(old.hand.key("s1")))
    await forget(old)
    reads = Reads(monkeypatch)
    assert [(await old.http.get(path)).json() for path in QUESTIONS] == answers
    assert reads.count > OLD, "it was read whole"
    await until_taken(old, OLD)


async def test_of_an_old_session_no_more_is_read_than_a_model_would_get(
    nats: Broker, nats_url: str, account: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"models": {"tiny": {"provider": "demo", "context": 1000}}, "default_model": "tiny"}
    api = Running(api_settings(nats_url, tmp_path, account, **given), account, nats)
    await api.start()
    try:
        await api.open("s1")
        for n in range(2 * EVERY):
            await api.turn("s1", f"question {n} {'x' * 500}", f"answer {n}")
        await until_taken(api, 6 * EVERY)
        await forget(api)
        reads = Reads(monkeypatch)
        shown = (await api.http.get("/v1/sessions/s1/history?as=model")).json()
        assert shown["messages"][-1]["text"] == f"answer {2 * EVERY - 1}" and 1 < len(shown["messages"]) < 20
        assert reads.count < 2 * EVERY
    finally:
        await api.close()
