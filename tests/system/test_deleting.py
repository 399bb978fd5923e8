"""Deleting with real processes: whatever a session is at, whoever dies meanwhile, it is gone, and so are its words."""

import asyncio
import base64
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.support.asking import Speaker, events, opened, outcome, put, say
from tests.support.deployment import Deployment, Service, plan
from tests.support.follower import following
from tests.support.nats import free_ports, run_alone
from tests.support.waiting import eventually
from tests.system.test_cli import Home, home

from turnstream import subjects
from turnstream.broker.server import NatsServer
from turnstream.ids import SessionKey
from turnstream.log.snapshots import EVERY
from turnstream.session.events import Blob
from turnstream.views.database import Database
from turnstream.wire.blobs import Blobs
from turnstream_api.operations import OPERATIONS
from turnstream_projector.rebuild import rebuild

pytestmark = pytest.mark.system
__all__ = ["home"]

HANG = "[hang]"
QUESTION = '[tool conversation_ask_user {"question":"which one?"}]'
PRESETS = {"strict": ("erase", "reject"), **dict.fromkeys(("memory", "thread", "workspace"), ("detach", "cancel"))}
"""What each preset deletes by, and what it does about runs that have not ended."""


@pytest.fixture(params=["http", "nats"])
def speaker(request: pytest.FixtureRequest, deployment: Deployment) -> Speaker:
    return deployment.apis[0] if request.param == "http" else deployment.nats


async def delete(speaker: Speaker, session: str, **fields: Any) -> int:
    return (await speaker.ask("delete_session", session=session, **fields)).status


async def status(speaker: Speaker, operation: str, **fields: Any) -> int:
    return (await speaker.ask(operation, **fields)).status


async def erased(speaker: Speaker, session: str) -> dict[str, Any]:
    """The receipt, once everything is removed."""

    async def there() -> dict[str, Any] | None:
        answer = await speaker.ask("read_receipt", session=session)
        return answer.body if answer.status == 200 and answer.body["erased_at"] else None

    return await eventually(there, 60, what=f"the erasure of {session}")


async def assert_not_there(speaker: Speaker, session: str) -> None:
    """A deleted session is 404 for every operation that names a session."""
    fields: dict[str, dict[str, Any]] = {
        "post_message": {"content": "late"},
        "update_session": {"title": "late"},
        "withdraw_message": {"message": "m1"},
        "act_in_session": {"verb": "add"},
        "put_attachment": {"name": "late.txt", "content": "bGF0ZQ=="},
        "get_attachment": {"name": "late.txt"},
    }
    for operation in OPERATIONS:
        if "{session}" in operation.path and operation.name not in ("delete_session", "read_receipt"):
            more = fields.get(operation.name, {})
            assert await status(speaker, operation.name, session=session, **more) == 404, operation.name
    assert await status(speaker, "open_session", id=session) == 404
    assert await status(speaker, "start_run", session=session, input="late") == 404


async def run_status(speaker: Speaker, run: str) -> str:
    answer = await speaker.ask("get_run", run=run)
    return answer.body["status"] if answer.status == 200 else ""


async def until(speaker: Speaker, run: str, wanted: str) -> None:
    async def so() -> bool:
        return await run_status(speaker, run) == wanted

    await eventually(so, 60, what=f"{run} to be {wanted}")


# --- S29: an idle session -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
async def test_s29_an_idle_session_is_deleted_by_its_policy(speaker: Speaker, session: str, preset: str) -> None:
    mode, _ = PRESETS[preset]
    await opened(speaker, session, policy={"preset": preset, "titles": "derived"})
    run = (await say(speaker, session, "echo what came of it", wait=30))["run"]
    removed = len(await events(speaker, session)) + 1
    assert await delete(speaker, session) == 204
    await assert_not_there(speaker, session)
    receipt = await erased(speaker, session)
    assert (receipt["mode"], receipt["events_removed"]) == (mode, removed)
    assert receipt["deleted_at"] <= receipt["erased_at"]
    await assert_not_there(speaker, session)
    assert await delete(speaker, session) == (204 if mode == "erase" else 404)

    async def settled() -> bool:
        answer = await speaker.ask("get_run", run=run)
        if mode == "erase":
            return answer.status == 404
        return answer.status == 200 and answer.body["session"] is None

    await eventually(settled, what="the views to follow")
    if mode == "detach":
        found = (await speaker.ask("get_run", run=run)).body
        assert (found["id"], found["status"], found["output"]) == (run, "completed", "what came of it")
        assert run in [one["id"] for one in (await speaker.ask("list_runs", limit=200)).body["items"]]
        waited = await speaker.ask("wait_run", run=run, timeout=0)
        assert (waited.status, waited.body["status"]) == (200, "completed")
        assert waited.body["outcome"]["output"] == "what came of it"
    else:
        assert await status(speaker, "wait_run", run=run, timeout=0) == 404
    assert await status(speaker, "cancel_run", run=run) == 404
    sessions = (await speaker.ask("list_sessions", limit=200)).body["items"]
    assert session not in [one["id"] for one in sessions]
    runs = (await speaker.ask("list_runs", session=session)).body["items"]
    assert runs == []


async def test_s29_the_request_has_the_last_word(speaker: Speaker, session: str) -> None:
    await opened(speaker, session, policy={"preset": "workspace"})
    assert await delete(speaker, session, mode="erase", wait=30) == 204
    assert (await speaker.ask("read_receipt", session=session)).body["events_removed"] == 2
    assert await delete(speaker, session) == 204


async def test_s29_a_repeat_of_the_request_is_answered_as_it_was(deployment: Deployment, session: str) -> None:
    one, two = deployment.apis
    await opened(one, session)
    for speaker in (one, two, deployment.nats):
        answer = await speaker.ask("delete_session", key="k1", session=session, mode="detach")
        assert answer.status == 204
    assert await delete(two, session, mode="detach") == 404


async def test_what_is_not_there_cannot_be_deleted(speaker: Speaker, session: str) -> None:
    assert await delete(speaker, session) == 404
    assert await status(speaker, "read_receipt", session=session) == 404
    await opened(speaker, session)
    assert await status(speaker, "read_receipt", session=session) == 404
    answer = await speaker.ask("delete_session", session=session, mode="half")
    assert (answer.status, answer.body["field"]) == (422, "mode")
    answer = await speaker.ask("delete_session", session=session, expected_seq=1)
    assert (answer.status, answer.body["code"]) == (412, "session_moved")
    assert await status(speaker, "get_session", session=session) == 200


# --- S30, A43: whatever it is at ----------------------------------------------------------------------------------


async def queued(speaker: Speaker, session: str) -> list[str]:
    first = await running(speaker, session)
    return [*first, (await say(speaker, session, "next", on_busy="queue"))["run"]]


async def running(speaker: Speaker, session: str) -> list[str]:
    run = (await say(speaker, session, HANG))["run"]
    await until(speaker, run, "running")
    return [run]


async def waiting(speaker: Speaker, session: str) -> list[str]:
    run = (await say(speaker, session, QUESTION))["run"]
    await until(speaker, run, "waiting")
    return [run]


async def cancelling(speaker: Speaker, session: str) -> list[str]:
    """A tool that is not done by being told."""
    run = (await say(speaker, session, '[tool sleep {"seconds": 30}]'))["run"]
    await until(speaker, run, "running")
    assert await status(speaker, "cancel_run", run=run) in (200, 202)
    return [run]


STATES: dict[str, Callable[[Speaker, str], Any]] = {
    "queued": queued,
    "running": running,
    "waiting": waiting,
    "cancelling": cancelling,
}


@pytest.mark.parametrize("state", STATES)
async def test_s30_a43_a_session_is_deleted_whatever_its_runs_are_at(
    speaker: Speaker, session: str, state: str
) -> None:
    await opened(speaker, session)
    runs = await STATES[state](speaker, session)
    answer = await speaker.ask("delete_session", session=session, mode="detach")
    if state != "cancelling":  # which may have ended by now
        assert (answer.status, answer.body["code"], answer.body["run"]) == (409, "run_active", runs[0])
        assert await status(speaker, "get_session", session=session) == 200
    async with asyncio.timeout(5):
        assert await delete(speaker, session, active="cancel", mode="detach") in (204, 404)
    await erased(speaker, session)
    for run in runs:
        await until(speaker, run, "cancelled")
    await assert_not_there(speaker, session)


async def test_s30_who_waits_for_a_run_is_told(deployment: Deployment, session: str) -> None:
    one, two = deployment.apis
    await opened(one, session)
    (run,) = await running(one, session)
    waits = asyncio.create_task(two.ask("wait_run", run=run, timeout=60))
    async with following(session, two.url) as follower:
        assert await delete(one, session, active="cancel") == 204
        answer = await waits
        assert (answer.status, answer.body["status"]) == (200, "cancelled")
        await follower.until("session.deleted")
    assert await status(two, "read_events", session=session) == 404


async def test_s30_no_runner_is_waited_for(deployment: Deployment, session: str) -> None:
    """Neither to delete, nor for the session not to be there; what it leaves is removed when there is one."""
    speaker = deployment.apis[0]
    await opened(speaker, session)
    await running(speaker, session)
    for runner in deployment.runners:
        runner.kill()
    async with asyncio.timeout(5):
        assert await delete(speaker, session, active="cancel", mode="erase") == 204
    await assert_not_there(speaker, session)
    assert await delete(speaker, session, wait=0.5) == 202, "nobody is there to remove it"
    assert (await speaker.ask("read_receipt", session=session)).body["erased_at"] is None
    await deployment.heal()
    assert (await erased(speaker, session))["events_removed"] == 4


async def test_a44_deleted_sessions_leave_no_work_behind(deployment: Deployment, session: str) -> None:
    """Fifty sessions with queued runs are deleted; a new run begins within a second, also after a restart."""
    speaker = deployment.apis[0]
    names = [f"{session}-{n}" for n in range(50)]

    async def one(name: str) -> None:
        await opened(speaker, name)
        for _ in range(3):
            await say(speaker, name, HANG, on_busy="queue")
        assert await delete(speaker, name, active="cancel", mode="erase") == 204

    await asyncio.gather(*(one(name) for name in names))

    async def starts_at_once(name: str) -> None:
        await opened(speaker, name)
        began = time.monotonic()
        run = (await say(speaker, name, "echo hello"))["run"]
        assert (await outcome(speaker, run))["output"] == "hello"
        assert time.monotonic() - began < 1

    await starts_at_once(f"{session}-new")
    await asyncio.gather(*(erased(speaker, name) for name in names))
    for runner in deployment.runners:
        runner.kill()
    await deployment.heal()
    await starts_at_once(f"{session}-newer")

    async def nothing_left() -> bool:
        assert deployment.broker
        info: Any = await deployment.broker.api("STREAM.INFO.WORK", {"subjects_filter": f"ts.*.*.default.{session}-*"})
        live = (await speaker.ask("list_runs", limit=200)).body["items"]
        return not info["state"].get("subjects") and not any(
            run["id"].startswith(f"{session}-") and run["status"] in ("queued", "running") for run in live
        )

    await eventually(nothing_left, 30, what="no orphans")
    await deployment.check()


# --- S31: late writers --------------------------------------------------------------------------------------------


async def test_s31_who_writes_late_is_refused(house: "House", session: str) -> None:
    """A frozen runner, a client with its key, a program that only publishes: none of them brings it back."""
    speaker, deployment = house.speaker, house.deployment
    await opened(speaker, session, policy={"preset": "workspace"})
    await say(speaker, session, "[wait 3s] [size 40KB] too late", key="k1")
    await until(speaker, f"{session}.1", "running")
    pid = await _driven_by(speaker, session)
    runner = next(one for one in deployment.runners if one.pid == pid)
    runner.process.freeze()
    assert await delete(speaker, session, mode="erase", active="cancel", wait=60) == 204
    await assert_not_there(speaker, session)
    runner.process.thaw()
    await eventually(lambda: house.is_idle(runner), 60, what="the thawed runner to be done with it")
    assert await status(speaker, "post_message", key="k1", session=session, content="late") == 404
    assert deployment.broker
    await deployment.broker.store(f"ts.inbox.default.{session}", b"late by the inbox")

    async def taken() -> bool:
        assert deployment.broker
        info: Any = await deployment.broker.api("STREAM.INFO.INBOX")
        return info["state"]["messages"] == 0

    await eventually(taken)
    await assert_not_there(speaker, session)
    assert await delete(speaker, session) == 204
    assert (await erased(speaker, session))["mode"] == "erase"
    await house.until_nowhere("too late")
    await deployment.check()


async def _driven_by(speaker: Speaker, session: str) -> int:
    """The process that has started the session's last attempt: its id is in the runner's name."""
    started = [event for event in await events(speaker, session) if event["type"] == "run.started"]
    return int(started[-1]["data"]["runner"].rsplit("-", 2)[1])


# --- S59, A45: what was said is nowhere ---------------------------------------------------------------------------

READS = [
    operation for operation in OPERATIONS if operation.method == "GET" and not operation.path.startswith("/v1/ops")
]


def files_with(folder: Path, word: str) -> dict[str, int]:
    """The files below this folder that hold the word, in any of the forms in which it may lie there, and how often."""
    forms = {word.encode(), base64.b64encode(word.encode()).rstrip(b"=")[:-1], word.encode("utf-16-le")}
    found: dict[str, int] = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            data = file.read_bytes()
            if count := sum(data.count(form) for form in forms):
                found[str(file.relative_to(folder))] = count
    return found


class House:
    """A whole Turnstream in a folder of its own, with all that its processes say of themselves."""

    def __init__(self, folder: Path, deployment: Deployment) -> None:
        self.folder = folder
        self.deployment = deployment

    @property
    def speaker(self) -> Speaker:
        return self.deployment.apis[0]

    async def is_idle(self, runner: Service) -> bool:
        """Whether it drives no session."""
        async with httpx.AsyncClient(trust_env=False) as http:
            page = await http.get(f"http://127.0.0.1:{runner.settings['health_port']}/metrics")
        return "turnstream_runs_active 0.0" in page.text

    async def until_nowhere(self, word: str, *, but: Sequence[str] = (), rest: int = 0) -> None:
        """`but`: runs that may say it; then the files that hold runs may, too. `rest`: how often a broker that was
        killed may have left it in the log's files."""

        async def nowhere() -> bool:
            found = files_with(self.folder, word)
            if but:
                found = {name: count for name, count in found.items() if not _holds_runs(name)}
            if rest and sum(found.values()) <= rest:
                found = {name: count for name, count in found.items() if "/SESSIONS/msgs/" not in name}
            assert found == {}
            return True

        await eventually(nowhere, 30, what=f"{word} to be nowhere")
        for speaker in (self.speaker, self.deployment.nats):
            await self._assert_unread(speaker, word, but)
        async with httpx.AsyncClient(trust_env=False) as http:
            for service in self.deployment.services.values():
                port = service.settings["http_port" if service.command == "api" else "health_port"]
                page = await http.get(f"http://127.0.0.1:{port}/metrics")
                assert page.status_code == 200 and word not in page.text, service.name

    async def _assert_unread(self, speaker: Speaker, word: str, but: Sequence[str]) -> None:
        sessions = [one["id"] for one in (await speaker.ask("list_sessions", limit=200)).body["items"]]
        runs = [one["id"] for one in (await speaker.ask("list_runs", limit=200)).body["items"]]
        for operation in READS:
            asked: list[dict[str, Any]] = [{}]
            if "{session}" in operation.path:
                names = {*sessions, *(run.rpartition(".")[0] for run in but)}
                asked = [{"session": name, "name": f"{word}.txt"} for name in names]
            elif "{run}" in operation.path:
                asked = [{"run": name} for name in runs]
            elif "{name}" in operation.path:
                asked = [{"name": "default", "version": "v1"}]
            for given in asked:
                fields = {name: value for name, value in given.items() if name in operation.fields}
                answer = await speaker.ask(operation.name, **fields)
                assert answer.status < 500, (operation.name, fields, answer)
                if word in json.dumps(answer.body, ensure_ascii=False):
                    assert fields.get("run") in but and operation.name in ("get_run", "wait_run"), (
                        operation.name,
                        fields,
                    )


def _holds_runs(name: str) -> bool:
    return "/SESSIONS/msgs/" in name or "/OBJ_blobs/msgs/" in name or name.startswith("views.db")


@pytest.fixture(scope="module")
def standing_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    server = NatsServer(folder / "nats")
    run_alone(server.start())
    names = ("api-1", "runner-1", "runner-2", "projector-1")
    made = plan(folder, server, *names, event_max=16_384, log_level="debug")
    for service, port in zip(made.services.values(), free_ports(len(names)), strict=True):
        service.settings["health_port"] = port
    yield House(folder, made)
    made.clean_up()


@pytest.fixture
async def house(standing_house: House) -> AsyncIterator[House]:
    async with standing_house.deployment.entered():
        yield standing_house


def words_of(session: str) -> tuple[str, str]:
    """What is said in this session wherever something can be said, and what its runs answer."""
    name = session.replace("-", "")
    return f"marzipan{name}", f"nougat{name}"


async def speak(house: House, session: str) -> list[str]:
    """Says the session's words; its runs."""
    speaker, broker, (word, answer) = house.speaker, house.deployment.broker, words_of(session)
    assert broker
    policy = {"preset": "workspace"}
    await opened(speaker, session, title=f"about {word}", metadata={"topic": word, word: 1}, policy=policy)
    await put(speaker, session, f"{word} that nobody names", f"{word} ".encode() * 30_000)
    await put(speaker, session, f"{word}.txt", f"{word} ".encode() * 30_000, f"text/plain; about={word}")
    more = {"attachments": [f"{word}.txt"], "context": word, "author": f"user:{word}"}
    await say(speaker, session, f"[say {answer}] {word}", wait=30, **more)
    tools = f'[tool count_words {{"text":"{word}"}}] [tool repeat {{"text":"{word} ","times":4000}}]'
    tools += f' [think {word}] [tool fail {{"message":"{word}"}}]'
    await say(speaker, session, f"{tools} {word} [then] [think {answer}] [say {answer}]", wait=30)
    await say(speaker, session, f"[say {f'{answer} ' * 2000}] {word}", wait=30)
    await broker.store(f"ts.inbox.default.{session}", f"[say {answer}] {word} by the inbox".encode())
    await broker.store(f"ts.inbox.default.{session}", json.dumps({"content": word, "nothing": word}).encode())
    await until(speaker, f"{session}.4", "completed")
    question = f'[tool conversation_ask_user {{"question":"{word}?","choices":["{word}","other"]}}]'
    approval = f'[tool ask_first {{"text":"{word}"}}]'
    for asks, answers in ((question, {"answer": word}), (approval, {"approved": False, "reason": word})):
        run = (await say(speaker, session, f"{asks} [then] [say {answer}]"))["run"]
        await until(speaker, run, "waiting")
        assert await status(speaker, "answer_run", run=run, **answers) in (200, 202)
        assert (await outcome(speaker, run))["output"] == answer
    assert await status(speaker, "update_session", session=session, title=f"{word} again") == 200
    await say(speaker, session, f"[slow 20ms] {f'{word} ' * 500}", author=f"user:{word}")
    await until(speaker, f"{session}.7", "running")
    await say(speaker, session, word, on_busy="queue")
    await say(speaker, session, word, on_busy="steer")
    return [f"{session}.{n}" for n in range(1, 9)]


def stores(house: House, word: str) -> set[str]:
    """The streams and other files that hold it."""
    return {
        match[1] if (match := re.search(r"/streams/(\w+)/", name)) else name for name in files_with(house.folder, word)
    }


async def test_s59_a45_nothing_that_was_said_is_left(house: House, session: str) -> None:
    await speak(house, session)
    word, answer = words_of(session)
    for _ in range(EVERY):
        await say(house.speaker, session, word, kind="notice")
    before = {"SESSIONS", "OBJ_blobs", "KV_attachments", "REFUSED", "KV_snapshots"}
    await eventually(lambda: stores(house, word) >= before, what="whatever there is to hold it")
    assert any("views.db" in name for name in stores(house, answer))
    assert await delete(house.speaker, session, mode="erase", active="cancel", wait=60) == 204
    await house.until_nowhere(word)
    await house.until_nowhere(answer)
    assert house.deployment.server
    house.deployment.server.kill()
    await house.deployment.heal()
    await house.until_nowhere(word)
    await house.until_nowhere(answer)


async def test_s59_the_runs_that_are_kept_say_their_answers_and_nothing_else(house: House, session: str) -> None:
    runs = await speak(house, session)
    word, answer = words_of(session)
    assert await delete(house.speaker, session, mode="detach", active="cancel", wait=60) == 204
    await house.until_nowhere(word)
    await house.until_nowhere(answer, but=runs)
    for run in runs[:6]:
        found = (await house.speaker.ask("get_run", run=run)).body
        assert (found["session"], found["status"]) == (None, "completed")
        assert answer in found["output"]
    large = (await house.speaker.ask("get_run", run=runs[2])).body
    assert large["blob"]["size"] > 16_384, "an answer too large for an event is kept too"
    assert house.deployment.broker
    blob = msgspec.convert(large["blob"], Blob)
    assert answer.encode() in await Blobs(house.deployment.broker).get(blob)
    for run in runs[6:]:
        assert await run_status(house.speaker, run) == "cancelled"


# --- what dies meanwhile ------------------------------------------------------------------------------------------

EVENTS = 150
"""Enough that their removal takes a while: each of them is a write of its own."""
MOMENTS = {"detach": (0.05, 0.4), "erase": (0.0, 0.15)}
"""Seconds after a deletion."""


async def long_session(house: House, session: str) -> int:
    """A session of many events that say its words; how many there will be once it is deleted."""
    word, answer = words_of(session)
    await opened(house.speaker, session, title=word)
    for n in range(2):
        assert (await say(house.speaker, session, f"[say {answer}] {word} {n}", wait=30))["run"]
    for n in range(EVENTS):
        assert await status(house.speaker, "update_session", session=session, title=f"{word} {n}") == 200
    return len(await events(house.speaker, session)) + 1


async def assert_erased(house: House, session: str, mode: str, removed: int, *, rest: int = 0) -> None:
    word, answer = words_of(session)
    receipt = await erased(house.speaker, session)
    assert (receipt["mode"], receipt["events_removed"]) == (mode, removed)
    await assert_not_there(house.speaker, session)
    await house.until_nowhere(word, rest=rest)
    runs = [f"{session}.1", f"{session}.2"] if mode == "detach" else []
    await house.until_nowhere(answer, but=runs, rest=rest)
    for run in runs:
        assert (await house.speaker.ask("get_run", run=run)).body["output"] == answer


@pytest.mark.parametrize("mode", ["detach", "erase"])
async def test_s59_a_runner_that_is_killed_leaves_the_rest_to_the_next(house: House, session: str, mode: str) -> None:
    begun = 0
    for n, moment in enumerate(MOMENTS[mode]):
        name = f"{session}-{n}"
        removed = await long_session(house, name)
        assert await delete(house.speaker, name, mode=mode) == 204
        await asyncio.sleep(moment)
        for runner in house.deployment.runners:
            runner.kill()
        receipt = (await house.speaker.ask("read_receipt", session=name)).body
        if receipt["erased_at"] is None:
            begun += 0 < await left(house, name) < removed
            await assert_not_there(house.speaker, name)
        await house.deployment.heal()
        await assert_erased(house, name, mode, removed)
    assert begun, "at least one was killed in the middle"


async def left(house: House, session: str) -> int:
    """How many events of it there are still."""
    assert house.deployment.broker
    subject = subjects.session(SessionKey("default", session))
    info: Any = await house.deployment.broker.api("STREAM.INFO.SESSIONS", {"subjects_filter": subject})
    return (info["state"].get("subjects") or {}).get(subject, 0)


@pytest.mark.parametrize("mode", ["detach", "erase"])
async def test_s59_a_broker_that_is_killed_is_waited_for(house: House, session: str, mode: str) -> None:
    """It writes that an event is deleted before it overwrites it, so where it is killed between the two, that one event
    lies in its files until it writes them anew: nobody can name it any more."""
    server = house.deployment.server
    assert server
    for n, moment in enumerate(MOMENTS[mode]):
        name = f"{session}-{n}"
        removed = await long_session(house, name)
        assert await delete(house.speaker, name, mode=mode) == 204
        await asyncio.sleep(moment)
        server.kill()
        await server.start()
        await assert_erased(house, name, mode, removed, rest=2)


async def test_s59_views_made_anew_show_the_same(house: House, session: str) -> None:
    """The runs that were kept, from their records alone."""
    names = {mode: f"{session}-{mode}" for mode in ("detach", "erase")}
    for mode, name in names.items():
        runs = await speak(house, name)
        assert await delete(house.speaker, name, mode=mode, active="cancel", wait=60) == 204
        await house.until_nowhere(words_of(name)[0])
        shown = {run: (await house.speaker.ask("get_run", run=run)).body for run in runs}
        steps = {run: (await house.speaker.ask("read_steps", run=run)).body.get("items") for run in runs}
        database = Database(house.deployment.database)
        assert house.deployment.broker
        await rebuild(house.deployment.broker, database)
        await database.close()
        await house.until_nowhere(words_of(name)[0])
        for run in runs:
            now = (await house.speaker.ask("get_run", run=run)).body
            if mode == "erase":
                assert now["status"] == 404
            else:
                assert now == shown[run]
                assert (await house.speaker.ask("read_steps", run=run)).body["items"] == steps[run]
    await house.deployment.check()


# --- from the command line ----------------------------------------------------------------------------------------


async def test_a_session_is_deleted_from_the_command_line(home: Home) -> None:
    await home.dev()
    await home.run("open", "s1", "--preset", "thread")  # which has no title of its agent's
    await home.run("send", "s1", "echo hello")
    await home.run("send", "s2", "[hang]", "--no-wait")
    refused = await home.run("delete", "s2", expect=4)
    assert "run_active, run: s2.1" in refused.err
    done = await home.run("delete", "s2", "--active", "cancel", "--mode", "detach", "--wait", "30")
    assert re.search(r"session s2 is deleted \(detach\): [34] events removed", done.out)
    receipt = json.loads((await home.run("delete", "s1", "--mode", "erase", "--wait", "30", "--json")).out)
    assert (receipt["mode"], receipt["events_removed"]) == ("erase", 5)
    for session in ("s1", "s2"):
        assert "not_found" in (await home.run("sessions", session, expect=4)).err
    assert json.loads((await home.run("runs", "show", "s2.1", "--json")).out)["status"] == "cancelled"
    assert "not_found" in (await home.run("runs", "show", "s1.1", expect=4)).err
    assert "not_found" in (await home.run("delete", "s2", expect=4)).err
    assert "events removed" in (await home.run("delete", "s1")).out
    assert "0 faults" in (await home.run("fsck")).out
