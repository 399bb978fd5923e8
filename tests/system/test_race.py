"""Everything at once, at random: clients say, steer, answer, cancel, stop and try again in sessions of every preset,
while processes are killed, frozen and thawed, and the broker with them.

Afterwards the books are made up: what was acknowledged is in the log, once, at the sequence that was said; what was
refused is not; every run has ended, once; whoever followed holds the log; log and views are whole.

`SOAK=<seconds>` runs it for as long as it is told.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from tests.support.asking import Answer, OverNats, Speaker, events, insist, opened
from tests.support.deployment import Deployment, Service
from tests.support.follower import Follower, following
from tests.support.waiting import eventually

from turnstream.broker.errors import BrokerFault

pytestmark = pytest.mark.system

PROMPTS = (
    "echo {}",
    "[wait 50ms][say {}]",
    "[slow 6 30ms]",
    '[tool add {{"a":{},"b":2}}][then][say added]',
    '[tool errand {{"seconds":0.2}}][tool add {{"a":1,"b":2}}][then][slow 3 20ms]',
    "[think Hm.][fail]",
    "[drop]",
    '[tool conversation_ask_user {{"question":"{}?"}}][then][say thanks]',
    '[tool conversation_ask_user {{"question":"{}?","expires_in":0.5,"on_expiry":"null"}}][then][say never mind]',
    '[tool ask_first {{"text":"{}"}}][tool errand {{}}][then][say so be it]',
)
PRESETS = ("workspace", "thread", "memory", "strict", "workspace")
BUSY = ("run_active", "run_waiting", "request_expired")
CLOSED = (*BUSY, "already_answered", "request_closed", "not_waiting")
OVER = ("completed", "failed", "cancelled", "timed_out")


class Book:
    """What clients were told, by session."""

    def __init__(self) -> None:
        self.taken: dict[tuple[str, str], int] = {}
        """Sequence of each message that was acknowledged."""
        self.refused: set[tuple[str, str]] = set()
        self.runs: list[str] = []
        self.withdrawn: set[tuple[str, str]] = set()
        self.answered: dict[str, int] = {}
        """Sequence of the answer to each request."""
        self.retried: list[str] = []
        self.sent: list[tuple[str, str]] = []
        """Into the inbox: session and text."""


class Client:
    """Says, answers, cancels, withdraws, stops, tries again and reads whatever comes to its mind."""

    def __init__(self, number: int, speakers: Sequence[Speaker], sessions: Sequence[str], book: Book) -> None:
        self.number = number
        self.rng = random.Random(number)
        self.speakers = speakers
        self.sessions = sessions
        self.book = book
        self._count = itertools.count(1)

    async def run(self, deployment: Deployment, over: asyncio.Event) -> None:
        while not over.is_set():
            session = self.rng.choice(self.sessions)
            dice = self.rng.random()
            if dice < 0.5:
                await self.post(session)
            elif dice < 0.6 and self.book.runs:
                await self.cancel(self.rng.choice(self.book.runs))
            elif dice < 0.75:
                await self.answer(session)
            elif dice < 0.83:
                await self.publish(deployment, session)
            elif dice < 0.88:
                await self.withdraw(session)
            elif dice < 0.9:
                await self.stop(session)
            elif dice < 0.93:
                await self.retry(session)
            else:
                await self.read(session)

    async def ask(self, operation: str, **fields: Any) -> Answer:
        return await insist(self.rng.sample(self.speakers, len(self.speakers)), operation, **fields)

    def name(self) -> str:
        return f"c{self.number}-{next(self._count)}"

    async def post(self, session: str) -> None:
        name = self.name()
        text = self.rng.choice(PROMPTS).format(next(self._count))
        fields: dict[str, Any] = {"session": session, "content": text, "message_id": name}
        if self.rng.random() < 0.4:
            fields["on_busy"] = self.rng.choice(("queue", "queue", "reject", "steer", "interrupt", "parallel"))
        lost: list[str] = []
        answer = await self.ask("post_message", lost=lost, **fields)
        if answer.status == 409:
            assert answer.body["code"] in BUSY, answer
            if not lost:  # else what was asked before may come to something yet
                self.book.refused.add((session, name))
        else:
            assert answer.status in (200, 202), answer
            self.book.taken[session, name] = answer.body["seq"]
            self.book.runs.append(answer.body["run"])

    async def publish(self, deployment: Deployment, session: str) -> None:
        assert deployment.broker
        text = f"echo letter {self.name()}"
        with contextlib.suppress(BrokerFault):  # nobody knows then whether it is there
            await deployment.broker.request(f"ts.inbox.default.{session}", text.encode(), timeout=30)
            self.book.sent.append((session, text))

    async def cancel(self, run: str) -> None:
        answer = await self.ask("cancel_run", run=run)
        assert answer.status in (200, 202), answer

    async def answer(self, session: str) -> None:
        for request in (await self.ask("list_requests", session=session)).body["items"]:
            said: dict[str, Any] = {"answer": f"answer of {self.number}"}
            if request["kind"] == "approval":
                said = {"approved": self.rng.random() < 0.7}
            answer = await self.ask("answer_request", key=self.name(), request=request["id"], **said)
            if answer.status == 409:
                assert answer.body["code"] in CLOSED, answer
            else:
                assert answer.status in (200, 202), answer
                self.book.answered[request["id"]] = answer.body["seq"]

    async def withdraw(self, session: str) -> None:
        queue = (await self.ask("read_queue", session=session)).body["items"]
        if queue:
            name = self.rng.choice(queue)["message"]
            answer = await self.ask("withdraw_message", key=self.name(), session=session, message=name)
            assert answer.status == 200 or answer.body["code"] == "not_queued", answer
            if answer.status == 200:
                self.book.withdrawn.add((session, name))

    async def stop(self, session: str) -> None:
        assert (await self.ask("stop_session", session=session)).status == 200

    async def retry(self, session: str) -> None:
        answer = await self.ask("retry_session", key=self.name(), session=session)
        if answer.status == 409:
            assert answer.body["code"] in ("run_active", "nothing_to_retry"), answer
        else:
            assert answer.status in (200, 202), answer
            self.book.retried.append(answer.body["run"])

    async def read(self, session: str) -> None:
        assert (await self.ask("get_session", session=session)).status == 200
        page = (await self.ask("read_events", session=session, limit=20)).body["events"]
        assert page[0]["type"] == "session.opened"


class Chaos:
    """One process after the other, always the one that has been left alone longest, is killed with -9, told to stop, or
    frozen for a while, longer than its lease or shorter; now and then the broker is killed. One API process is left."""

    def __init__(self, deployment: Deployment, rng: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self._deployment = deployment
        self._rng = rng
        self._line = rng.sample(list(deployment.services.values()), len(deployment.services))
        self._busy: dict[str, asyncio.Task[None]] = {}

    async def run(self, over: asyncio.Event) -> None:
        server = self._deployment.server
        assert server
        while not over.is_set():
            await asyncio.sleep(0.1 + self._rng.random() * 0.4)
            if self._rng.random() < 0.05:
                server.kill()
                await server.start()
                self.done["broker"] += 1
            elif victim := self._victim():
                self._line.remove(victim)
                self._line.append(victim)
                self._busy[victim.name] = asyncio.create_task(self._strike(victim))
        await asyncio.gather(*self._busy.values())

    def _victim(self) -> Service | None:
        busy = {name for name, task in self._busy.items() if not task.done()}
        no_api = any(self._deployment[name].command == "api" for name in busy)
        able = (one for one in self._line if one.name not in busy and not (no_api and one.command == "api"))
        return next(able, None)

    async def _strike(self, victim: Service) -> None:
        how = self._rng.choices(("kill", "stop", "freeze"), (5, 2, 3))[0]
        self.done[f"{how} {victim.command}"] += 1
        match how:
            case "kill":
                victim.kill()
            case "stop":
                victim.process.terminate()
            case _:
                victim.process.freeze()
                await asyncio.sleep(0.2 + self._rng.random() * 3)
                victim.process.thaw()
                return
        await victim.process.ended(60)
        await victim.restart()


SOAK = float(os.environ.get("SOAK", 0))
LENGTHS = [SOAK] if SOAK else [8.0, pytest.param(60.0, marks=pytest.mark.slow)]


@pytest.mark.parametrize("seconds", LENGTHS)
async def test_s51_a20_a21_a23_whatever_happens_at_once_the_books_agree(
    deployment: Deployment, session: str, seconds: float
) -> None:
    """Short: sixteen clients on eight sessions; long: sixty-four on twenty."""
    long = seconds > 30
    sessions = [f"{session}-{n}" for n in range(20 if long else 8)]
    book = Book()
    over = asyncio.Event()
    assert deployment.broker
    speakers: list[Speaker] = [*deployment.apis, OverNats(deployment.broker, timeout=5)]
    for n, name in enumerate(sessions):
        await opened(deployment.nats, name, policy={"preset": PRESETS[n % len(PRESETS)]})
    clients = [Client(n, speakers, sessions, book) for n in range(64 if long else 16)]
    async with AsyncExitStack() as stack:
        followers = [
            await stack.enter_async_context(following(name, *deployment.urls, deltas=n % 2 == 0))
            for n, name in enumerate(sessions)
        ]
        acting = [asyncio.create_task(client.run(deployment, over)) for client in clients]
        chaos = Chaos(deployment, random.Random(int(seconds)))
        striking = asyncio.create_task(chaos.run(over))
        await asyncio.wait((*acting, striking), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        over.set()
        await asyncio.gather(*acting)
        await striking
        assert chaos.done.total() >= seconds // 2, chaos.done
        for follower in followers:
            await made_up(deployment, book, follower)
    assert len(book.taken) > 5 * min(seconds, 60) and book.sent and (book.answered or not long)
    await lists_agree(deployment, sessions)
    await deployment.check()


def minted(event: dict[str, Any]) -> int:
    """The run that an event asks for, 0 for none."""
    data = event["data"]
    match event["type"]:
        case "message.posted":
            return (data.get("starts") or data.get("queued") or {"run": 0})["run"]
        case "run.requested":
            return data["run"]
        case "run.ended":
            return (data.get("leftover") or {"run": 0})["run"]
        case _:
            return 0


def ends(event: dict[str, Any]) -> int:
    """The run that an event ends, 0 for none."""
    return event["data"].get("run", 0) if event["type"] in ("run.ended", "message.withdrawn") else 0


def closes(event: dict[str, Any]) -> list[str]:
    """The requests that an event answers: a message may say the same as somebody who is asked."""
    data = event["data"]
    if event["type"] == "message.posted":
        return [answer["request"] for answer in data.get("answers", {}).get("requests", ())]
    return [data["request"]] if event["type"] == "request.answered" else []


async def made_up(deployment: Deployment, book: Book, follower: Follower) -> None:
    """One session's books, once everything in it has ended; what still waits for a person is answered."""
    one, two = deployment.apis
    session = follower.session
    stored: list[dict[str, Any]] = []

    async def all_ended() -> bool:
        for request in (await one.ask("list_requests", session=session)).body["items"]:
            said = {"answer": "at last"} if request["kind"] == "question" else {"approved": False}
            await two.ask("answer_request", request=request["id"], **said)
        stored[:] = await events(one, session)
        runs = sorted(filter(None, map(minted, stored)))
        return runs == sorted(filter(None, map(ends, stored))) and await letters_are_in(
            deployment, book, session, stored
        )

    await eventually(all_ended, 180, every=0.3, what=f"the end of every run of {session}")
    posted = {event["data"]["message_id"]: event for event in stored if event["type"] == "message.posted"}
    for (name, message), seq in book.taken.items():
        if name == session:
            assert posted[message]["seq"] == seq
    assert not [message for name, message in book.refused if name == session and message in posted]
    assert len(posted) == sum(event["type"] == "message.posted" for event in stored), "none twice"
    runs = sorted(filter(None, map(minted, stored)))
    assert runs == list(range(1, len(runs) + 1)), "one end for each run, and none without"
    withdrawn = {event["data"]["message_id"] for event in stored if event["type"] == "message.withdrawn"}
    assert withdrawn >= {message for name, message in book.withdrawn if name == session}
    answers = {request: event["seq"] for event in stored for request in closes(event)}
    mine = {request: seq for request, seq in book.answered.items() if request.startswith(f"{session}.")}
    assert mine.items() <= answers.items()
    taken = Counter(
        name
        for event in stored
        if event["type"] in ("run.started", "run.steered") and event["data"].get("trigger") != "retry"
        for name in event["data"].get("message_ids", ())
    )
    assert set(taken.values()) <= {1}, "a message is taken once"
    await follower.until_seq(stored[-1]["seq"])
    assert follower.records == stored
    assert await events(two, session) == stored


async def letters_are_in(deployment: Deployment, book: Book, session: str, stored: list[dict[str, Any]]) -> bool:
    """Each letter is a message, once, or was refused."""
    said = Counter(text_of(event) for event in stored if event["type"] == "message.posted")
    letters = [text for name, text in book.sent if name == session]
    assert all(said[text] <= 1 for text in letters)
    missing = {text for text in letters if not said[text]}
    return not missing or missing <= await refused(deployment, session)


async def refused(deployment: Deployment, session: str) -> set[str]:
    """The letters of a session that the inbox did not take."""
    assert deployment.broker
    found: set[str] = set()
    js = deployment.broker.nc.jetstream()
    subscription = await js.pull_subscribe(f"ts.inbox-refused.default.{session}", stream="REFUSED")
    with contextlib.suppress(TimeoutError):
        while messages := await subscription.fetch(100, timeout=0.5):
            found |= {message.data.decode() for message in messages}
    await subscription.unsubscribe()
    return found


def text_of(posted: dict[str, Any]) -> str:
    return "".join(part["text"] for part in posted["data"]["content"])


async def lists_agree(deployment: Deployment, sessions: Sequence[str]) -> None:
    """List, detail and log say the same, and nothing is under way."""
    one, two = deployment.apis
    for name in sessions:
        last = (await events(one, name))[-1]["seq"]
        shown = (await two.ask("get_session", session=name, after=last)).body
        assert (shown["status"] in ("idle", "error")) and shown["seq"] == last, shown
        runs = (await one.ask("list_runs", session=name, limit=200)).body["items"]
        assert {run["status"] for run in runs} <= set(OVER)
        for run in runs[:3]:
            waited = (await two.ask("wait_run", run=run["id"], timeout=0)).body
            assert json.dumps(waited["outcome"]["status"]) == json.dumps(run["status"])
