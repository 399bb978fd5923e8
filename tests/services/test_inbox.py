"""The inbox: what a program only publishes is taken once, in order, and nothing is lost, refused or not."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from nats.aio.msg import Msg
from tests.support.api import Running
from tests.support.nats import connect
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.declare import declare
from turnstream.broker.server import NatsServer
from turnstream.ids import SessionKey
from turnstream.log.handle import Sessions
from turnstream.log.jetstream import JetStreamLog
from turnstream.session.commands import DeleteSession, Origin
from turnstream.wire import inbox
from turnstream.wire.inbox import Inbox, Letter, Refused, TryAgain


async def publish(broker: Broker, account: str, session: str, body: Any, **headers: str) -> int:
    """Its sequence in the inbox."""
    data = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    while True:
        stored = json.loads((await broker.request(f"ts.inbox.{account}.{session}", data, named)).data)
        if not stored.get("duplicate"):  # the broker's own window, a tenth of a second: we, not it, tell a repeat
            return stored["seq"]


async def said(api: Running, session: str, count: int) -> list[dict[str, Any]]:
    """The messages of the session, once there are so many."""

    async def look() -> list[dict[str, Any]] | None:
        answer = await api.http.get(f"/v1/sessions/{session}/events?types=message.posted&limit=200")
        if answer.status_code != 200:
            return None
        found = answer.json()["events"]
        return found if len(found) >= count else None

    return await eventually(look, what=f"{count} messages in {session}")


async def refused(nats: Broker, account: str) -> list[Msg]:
    """What lies in REFUSED of this account."""
    info = await nats.api("STREAM.INFO.REFUSED", {"subjects_filter": f"ts.inbox-refused.{account}.>"})
    js = nats.nc.jetstream()
    names = info["state"].get("subjects") or {}  # type: ignore[attr-defined]
    return [await js.get_msg("REFUSED", subject=name, direct=True) for name in names]


async def unfinished(nats: Broker) -> int:
    return (await nats.api("STREAM.INFO.INBOX"))["state"]["messages"]  # type: ignore[index]


async def test_plain_text_opens_a_session_and_starts_a_run(api: Running) -> None:
    await publish(api.broker, api.account, "s1", "hello from a script")
    (event,) = await said(api, "s1", 1)
    data = event["data"]
    assert data["content"][0]["text"] == "hello from a script"
    assert data["starts"]["run"] == 1 and data["opens"]["policy"] == {"on_busy": "queue"}
    assert event["actor"] == "client:inbox"
    await publish(api.broker, api.account, "s1", {"content": "and again", "author": "user:ann"}, ts_actor="user:bo")
    _, second = await said(api, "s1", 2)
    assert second["data"]["queued"]["run"] == 2 and second["data"]["author"] == "user:ann"
    assert second["actor"] == "user:bo"
    await eventually(lambda: _done(api.broker))


async def _done(broker: Broker) -> bool:
    return await unfinished(broker) == 0


@pytest.mark.parametrize("text", ["{not json", "[1, 2]", '"quoted"', "17", " leading", "a\u2028b", "{}x"])
async def test_what_is_no_json_object_is_text(api: Running, text: str) -> None:
    await publish(api.broker, api.account, "s1", text)
    (event,) = await said(api, "s1", 1)
    assert event["data"]["content"][0]["text"] == text


async def test_messages_of_a_session_keep_their_order(api: Running) -> None:
    await asyncio.gather(
        *(publish(api.broker, api.account, f"s{session}", f"{session}:{n}") for n in range(40) for session in range(5))
    )
    for session in range(5):
        events = await said(api, f"s{session}", 40)
        assert [event["data"]["content"][0]["text"] for event in events] == [f"{session}:{n}" for n in range(40)]


async def test_a_repeat_with_its_id_has_one_effect_and_without_one_it_is_another(api: Running) -> None:
    for _ in range(3):
        await publish(api.broker, api.account, "s1", "with an id", Nats_Msg_Id="m1")
    for _ in range(2):
        await publish(api.broker, api.account, "s1", {"content": "with its own", "message_id": "own-1"})
        await publish(api.broker, api.account, "s1", "without")
    await eventually(lambda: _done(api.broker))
    texts = [event["data"]["content"][0]["text"] for event in await said(api, "s1", 4)]
    assert texts == ["with an id", "with its own", "without", "without"]
    over_http = await api.post("/v1/sessions/s1/messages", {"content": "with an id"}, Idempotency_Key="m1")
    assert over_http.status_code == 200 and over_http.headers["idempotency-replayed"] == "true"


async def test_a_key_of_one_session_is_no_key_of_another(api: Running) -> None:
    """Unlike a `Nats-Msg-Id`, of which the broker drops the second whatever its subject."""
    for session in ("s1", "s2", "s1"):
        await publish(api.broker, api.account, session, f"to {session}", Idempotency_Key="k1")
    await eventually(lambda: _done(api.broker))
    for session in ("s1", "s2"):
        (event,) = await said(api, session, 1)
        assert event["data"]["content"][0]["text"] == f"to {session}"


async def test_what_cannot_be_taken_goes_to_refused_with_the_reason(api: Running) -> None:
    await api.open("busy", policy={"on_busy": "reject"})
    await api.say("busy")
    cases: dict[str, tuple[Any, dict[str, str], str, str]] = {
        "busy": ("again", {}, "run_active", "busy.1"),
        "empty": ("", {}, "invalid", "empty"),
        "blank": ("  \n", {}, "invalid", "empty"),
        "bytes": (b"\xff\xfe", {}, "invalid", "UTF-8"),
        "surrogate": (b'{"content":"\\ud800"}', {}, "invalid", "surrogate"),
        "role": ({"content": "x", "role": "tool"}, {}, "invalid", "role"),
        "nothing": ({"text": "x"}, {}, "invalid", "text"),
        "busy-word": ({"content": "x", "on_busy": "wait"}, {}, "invalid", "on_busy"),
        "agent": ({"content": "x", "agent": "nobody"}, {}, "agent_not_found", "nobody"),
        "large": ("x" * 70_000, {}, "too_large", "65536"),
        "actor": ("x", {"ts_actor": "system"}, "invalid", "ts-actor"),
        "a--b": ("x", {}, "not_found", "a--b"),
        "longkey": ("x", {"Nats_Msg_Id": "k" * 256}, "invalid", "255"),
    }
    places = {}
    for session, (body, headers, _, _) in cases.items():
        places[session] = await publish(api.broker, api.account, session, body, **headers)

    async def all_there() -> list[Msg] | None:
        found = await refused(api.broker, api.account)
        return found if len(found) == len(cases) else None

    found = {subjects.parse_inbox(message.subject)[1]: message for message in await eventually(all_there)}
    for session, (body, _, code, word) in cases.items():
        headers = found[session].headers or {}
        assert headers[inbox.CODE] == code, session
        assert word in headers[inbox.DETAIL], (session, headers)
        assert headers[inbox.ORIGIN] == str(places[session])
        if isinstance(body, str):
            assert (found[session].data or b"") == body.encode()
    await eventually(lambda: _done(api.broker))
    for session in set(cases) - {"busy"}:
        assert (await api.http.get(f"/v1/sessions/{session}/queue")).status_code == 404


async def test_an_account_that_can_be_none_is_refused(api: Running) -> None:
    other = api.account.upper()
    await publish(api.broker, other, "s1", "hello")
    (message,) = await eventually(lambda: refused(api.broker, other))
    assert (message.headers or {})[inbox.CODE] == "not_found"


async def test_s56_a_deleted_consumer_is_made_again(api: Running) -> None:
    await publish(api.broker, api.account, "s1", "before")
    await said(api, "s1", 1)
    await api.broker.api("CONSUMER.DELETE.INBOX.inbox")
    await publish(api.broker, api.account, "s1", "after")
    async with asyncio.timeout(10):
        await said(api, "s1", 2)


# --- the mechanism, without the API -------------------------------------------------------------------------------


class Desk:
    """Takes letters as a test says."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.taken: list[str] = []
        self.tries = 0
        self.broken = False
        self.refuse = ""
        self.hold: asyncio.Event | None = None
        self.inbox = Inbox(broker, self.take)
        self.running = asyncio.create_task(self.inbox.run())

    async def take(self, letter: Letter) -> None:
        self.tries += 1
        if self.hold:
            await self.hold.wait()
        if self.broken:
            raise TryAgain("not now")
        text = letter.data.decode()
        if text == self.refuse:
            raise Refused("invalid", "not this one")
        if text == "surprise":
            raise ZeroDivisionError
        self.taken.append(text)

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


@pytest.fixture
async def desk(own_nats: NatsServer) -> AsyncIterator[Desk]:
    broker = await connect(own_nats.url)
    await declare(broker, replicas=1, consumers=(subjects.INBOX_CONSUMER,))
    made = Desk(broker)
    yield made
    await made.close()
    await broker.close()


async def test_what_fails_for_another_reason_is_tried_again_in_its_place(desk: Desk) -> None:
    broker = desk.broker
    desk.broken = True
    for n in range(3):
        await publish(broker, "acme", "s1", str(n))
    await eventually(lambda: desk.tries >= 3)
    assert desk.taken == []
    desk.broken = False
    await eventually(lambda: desk.taken == ["0", "1", "2"])
    await eventually(lambda: _done(broker))


async def test_one_session_that_waits_holds_up_no_other(desk: Desk) -> None:
    broker = desk.broker
    desk.refuse = "never"
    desk.hold = asyncio.Event()
    await publish(broker, "acme", "s1", "held")
    await eventually(lambda: desk.tries == 1)
    desk.hold, held = None, desk.hold
    await publish(broker, "acme", "s2", "free")
    await eventually(lambda: desk.taken == ["free"])
    assert await unfinished(broker) >= 1
    held.set()
    await eventually(lambda: desk.taken == ["free", "held"])


async def test_a_surprise_is_refused_and_does_not_block_the_session(desk: Desk) -> None:
    broker = desk.broker
    await publish(broker, "acme", "s1", "surprise")
    await publish(broker, "acme", "s1", "next")
    await eventually(lambda: desk.taken == ["next"])
    (message,) = await refused(broker, "acme")
    assert (message.headers or {})[inbox.CODE] == "internal_error" and message.data == b"surprise"


@pytest.mark.parametrize(
    ("body", "headers", "session"),
    [
        (b"x" * 1024 * 1024, {}, "s1"),
        (b"x", {"Nats-Msg-Id": "k" * 60_000}, "s1"),
        (b"x" * 1_000_000, {"Nats-Msg-Id": "k" * 48_000}, "s1"),
        (b"x", {}, "s" * 4000),
    ],
    ids=["body", "header", "both", "subject"],
)
async def test_a39_what_leaves_no_room_for_the_reason_is_cut(
    desk: Desk, body: bytes, headers: dict[str, str], session: str
) -> None:
    desk.refuse = body.decode()
    await desk.broker.publish(f"ts.inbox.acme.{session}", body, headers=headers or None)
    (message,) = await eventually(lambda: refused(desk.broker, "acme"))
    kept = message.data or b""
    assert body.startswith(kept) and len(kept) >= min(len(body), 900_000)
    assert (message.headers or {}).get(inbox.SIZE) == (str(len(body)) if kept != body else None)
    await eventually(lambda: _done(desk.broker))
    assert desk.broker.nc.stats["reconnects"] == 0


async def test_what_a_process_held_at_its_end_is_given_to_another_at_once(desk: Desk) -> None:
    broker = desk.broker
    desk.hold = asyncio.Event()
    for n in range(5):
        await publish(broker, "acme", "s1", str(n))
    await eventually(lambda: sum(map(len, desk.inbox._lines.values())) == 5)
    await desk.close()
    other = Desk(broker)
    try:
        async with asyncio.timeout(10):
            await eventually(lambda: sorted(other.taken) == ["0", "1", "2", "3", "4"])
    finally:
        await other.close()


# --- what is left of a message ------------------------------------------------------------------------------------


def left_of(server: NatsServer, word: bytes) -> set[str]:
    """The files of the broker that hold this word."""
    return {file.name for file in server.store.rglob("*.blk") if word in file.read_bytes()}


async def test_s59_a_message_that_was_taken_leaves_nothing(desk: Desk, own_nats: NatsServer) -> None:
    """Also while another one waits, so that its place in the file is not given up."""
    broker = desk.broker
    await publish(broker, "acme", "s1", "marzipan")
    await eventually(lambda: desk.taken == ["marzipan"])
    desk.hold = asyncio.Event()
    await publish(broker, "acme", "s1", "nougat")
    await eventually(lambda: desk.tries == 2)
    await eventually(lambda: not left_of(own_nats, b"marzipan"), what="nothing left of it")
    assert left_of(own_nats, b"nougat")
    desk.hold.set()
    await eventually(lambda: not left_of(own_nats, b"nougat"), what="nothing left of it")
    assert await unfinished(broker) == 0


async def test_s59_many_messages_leave_nothing_once_they_are_all_taken(own_nats: NatsServer) -> None:
    """Most of them are acknowledged only."""
    broker = await connect(own_nats.url)
    await declare(broker, replicas=1, consumers=(subjects.INBOX_CONSUMER,))
    count = 5 * inbox.CALM
    for number in range(count):
        await broker.publish(f"ts.inbox.acme.s{number % 20}", b"marzipan")
    await eventually(lambda: _has(broker, count), what="all of them stored")
    assert left_of(own_nats, b"marzipan")
    desk = Desk(broker)
    await eventually(lambda: len(desk.taken) == count, what="all of them taken")
    await eventually(lambda: _done(broker))
    await eventually(lambda: not left_of(own_nats, b"marzipan"), what="nothing left of them")
    await desk.close()
    await broker.close()


async def _has(broker: Broker, count: int) -> bool:
    return await unfinished(broker) == count


async def test_s59_what_waits_and_what_was_refused_can_be_erased(desk: Desk, own_nats: NatsServer) -> None:
    broker, key = desk.broker, SessionKey("acme", "s1")
    desk.refuse = "marzipan"
    await publish(broker, "acme", "s1", "marzipan")
    await publish(broker, "acme", "s2", "marzipan")
    await eventually(lambda: desk.tries == 2)
    await eventually(lambda: _done(broker))
    desk.hold = asyncio.Event()
    await publish(broker, "acme", "s1", "nougat")
    await eventually(lambda: desk.tries == 3)
    await inbox.forget(broker, key)
    assert len(await refused(broker, "acme")) == 1, "that of the other session"
    assert left_of(own_nats, b"marzipan") and not left_of(own_nats, b"nougat")
    await inbox.forget(broker, SessionKey("acme", "s2"))
    assert not left_of(own_nats, b"marzipan")
    desk.hold.set()
    await eventually(lambda: desk.taken == ["nougat"], what="what is in hand to be dealt with all the same")


async def test_s31_what_comes_for_a_deleted_session_is_not_kept(api: Running) -> None:
    await api.open("gone")
    key = SessionKey(api.account, "gone")
    origin = Origin(id="delete", actor="user:ann", time=api.broker.clock.now())
    sessions = Sessions(JetStreamLog(api.broker), now=api.broker.clock.now)
    await sessions.handle(key, DeleteSession(origin=origin, specs={}, mode="erase"))
    for name, body in (("marzipan", "marzipan"), ("m2", {"content": "x", "on_busy": "marzipan"})):
        seq = await publish(api.broker, api.account, "gone", body, Nats_Msg_Id=name)

        async def answered(seq: int = seq) -> Msg | None:
            found = await refused(api.broker, api.account)
            return found[0] if found and (found[0].headers or {})[inbox.ORIGIN] == str(seq) else None

        message = await eventually(answered)
        assert (message.headers or {})[inbox.CODE] == "not_found"
        assert "marzipan" not in f"{message.headers} {message.data}"


async def test_what_is_worked_on_for_long_is_not_given_to_another(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker is told in time."""
    broker = desk.broker
    await desk.close()
    monkeypatch.setattr(inbox, "RENEW", 0.1)
    patient = Desk(broker)
    patient.hold = asyncio.Event()
    await publish(broker, "acme", "s1", "long")
    await eventually(lambda: patient.tries == 1)
    subscription = await broker.nc.subscribe("$JS.ACK.INBOX.inbox.>")
    assert (await subscription.next_msg(timeout=5)).data == b"+WPI"
    patient.hold.set()
    await eventually(lambda: patient.taken == ["long"])
    await patient.close()
