import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop
from faststream import FastStream
from nats.aio.msg import Msg
from tests.support.nats import connect, freeze, thaw
from tests.support.waiting import eventually

from turnstream.broker.connection import Broker
from turnstream.broker.errors import BrokerClosed, BrokerDenied, BrokerError, BrokerFault, BrokerTimeout, NoResponders
from turnstream.broker.server import NatsServer
from turnstream.broker.shell import TenaciousClient

Factory = Callable[[], asyncio.AbstractEventLoop]

ACCOUNTS = """
authorization {
  users: [
    { user: "all", password: "secret" }
    { user: "some", password: "secret", permissions: {
        publish: ["Allowed.*", "$SYS.REQ.USER.INFO"], subscribe: ["_INBOX.>", "Allowed.*"] } }
  ]
}
"""


@pytest.fixture
async def broker(own_nats: NatsServer) -> AsyncIterator[Broker]:
    broker = await connect(own_nats.url)
    yield broker
    await broker.close()


async def echo(broker: Broker, subject: str) -> None:
    async def answer(message: Msg) -> None:
        await message.respond(message.data)

    await broker.subscribe(subject, answer)


async def test_a_thousand_requests_at_once_get_their_own_answers(nats: Broker, account: str):
    await echo(nats, f"echo.{account}")
    answers = await asyncio.gather(*(nats.request(f"echo.{account}", b"%d" % n) for n in range(1000)))
    assert [int(answer.data) for answer in answers] == list(range(1000))


async def test_headers_travel_with_a_request(nats: Broker, account: str):
    await echo(nats, f"echo.{account}")
    answer = await nats.request(f"echo.{account}", headers={"ts-actor": "user:ada"})
    assert answer.headers == {"ts-actor": "user:ada"}


async def test_nobody_there_is_told_at_once(nats: Broker, account: str):
    with pytest.raises(NoResponders):
        await nats.request(f"nobody.{account}", timeout=30)


async def test_silence_ends_in_a_timeout_and_a_late_answer_harms_nobody(nats: Broker, account: str):
    asked: list[Msg] = []

    async def keep(message: Msg) -> None:
        asked.append(message)

    await nats.subscribe(f"late.{account}", keep)
    with pytest.raises(BrokerTimeout, match=r"late.* 0\.05 s"):
        await nats.request(f"late.{account}", timeout=0.05)
    await echo(nats, f"echo.{account}")
    pending = asyncio.ensure_future(nats.request(f"echo.{account}", b"mine"))
    await asked[0].respond(b"late")
    assert (await pending).data == b"mine"


async def test_a_refusal_of_the_api_carries_its_codes(nats: Broker):
    with pytest.raises(BrokerError, match="stream not found") as caught:
        await nats.api("STREAM.INFO.NOWHERE")
    assert (caught.value.code, caught.value.err_code) == (404, 10059)


async def test_closing_fails_whoever_waits(broker: Broker, own_nats: NatsServer):
    async def nothing(message: Msg) -> None: ...

    await broker.subscribe("quiet", nothing)
    pending = asyncio.ensure_future(broker.request("quiet", timeout=30))
    await asyncio.sleep(0)
    await broker.close()
    with pytest.raises(BrokerClosed):
        await pending
    with pytest.raises(BrokerClosed):
        await broker.request("quiet")
    with pytest.raises(BrokerClosed):
        await broker.publish("quiet")


async def test_who_listens_hears_each_message_in_order_until_the_end(broker: Broker):
    heard: list[bytes] = []
    listening = await broker.listen("topic.*", lambda message: heard.append(message.data))
    for n in range(1000):
        await broker.publish(f"topic.{n % 3}", b"%d" % n, headers={"n": str(n)} if n % 2 else None)
    await broker.nc.flush()
    assert heard == [b"%d" % n for n in range(1000)]
    await listening.unsubscribe()
    await broker.publish("topic.x")
    await broker.nc.flush()
    assert len(heard) == 1000


async def test_a_listener_that_fails_hears_the_next_message(broker: Broker, own_nats: NatsServer):
    heard: list[bytes] = []

    def hear(message: Msg) -> None:
        if message.data == b"bad":
            raise ValueError("a fault in a listener")
        heard.append(message.data)

    await broker.listen("topic", hear)
    for data in (b"bad", b"good"):
        await broker.publish("topic", data)
    await eventually(lambda: heard == [b"good"])
    own_nats.kill()
    await own_nats.start()
    await eventually(lambda: broker.nc.stats["reconnects"])
    await broker.publish("topic", b"after")
    await eventually(lambda: heard == [b"good", b"after"])


async def say(broker: Broker, count: int) -> list[bool]:
    """Publishes so often in one turn of the loop; after each whether it is with the socket. Then the turn ends."""
    written: list[bool] = []
    for _ in range(count):
        await broker.publish("void")
        written.append(broker.nc.pending_data_size == 0)
    await asyncio.sleep(0)
    assert broker.nc.pending_data_size == 0
    return written


async def test_what_is_published_is_written_at_once_unless_there_is_much_of_it(broker: Broker):
    await asyncio.sleep(0)
    assert await say(broker, 1) == [True]
    assert await say(broker, 2) == [True, False]
    assert await say(broker, 3) == [True, False, False]
    assert await say(broker, 3) == [False, False, False], "together, at the end of the turn"
    assert await say(broker, 1) == [False]
    assert await say(broker, 1) == [True]


async def test_what_the_socket_does_not_take_waits_and_arrives_in_order(broker: Broker, own_nats: NatsServer):
    heard: list[int] = []
    await broker.listen("topic", lambda message: heard.append(int(message.data[:8])))
    await broker.nc.flush()
    count = 0
    freeze(own_nats)
    while broker.nc.pending_data_size < 100_000:
        await broker.publish("topic", b"%08d" % count + b"x" * 10_000)
        count += 1
        await asyncio.sleep(0)
    thaw(own_nats)
    await eventually(lambda: len(heard) == count)
    assert heard == list(range(count))


async def test_a_killed_server_fails_requests_at_once_and_is_found_again(broker: Broker, own_nats: NatsServer):
    heard: list[bytes] = []
    reconnects: list[int] = []

    async def hear(message: Msg) -> None:
        heard.append(message.data)

    await broker.subscribe("topic", hear)
    broker.on_reconnect(lambda: reconnects.append(1))
    remove = broker.on_reconnect(lambda: reconnects.append(1000))
    remove()
    pending = asyncio.ensure_future(broker.request("topic", timeout=300))
    await eventually(lambda: heard)
    own_nats.kill()
    with pytest.raises(BrokerTimeout, match="connection was lost"):
        await asyncio.wait_for(pending, 10)
    await own_nats.start()
    await eventually(lambda: reconnects == [1])
    await broker.publish("topic", b"after")
    await eventually(lambda: b"after" in heard)


async def test_what_was_asked_while_the_server_was_away_is_answered(broker: Broker, own_nats: NatsServer):
    own_nats.kill()
    await eventually(lambda: not broker.nc.is_connected)
    pending = asyncio.ensure_future(broker.api("INFO", timeout=20))
    await own_nats.start()
    assert (await pending)["streams"] == 0


async def test_a_full_send_buffer_is_an_error_not_a_hang(broker: Broker, own_nats: NatsServer):
    own_nats.kill()
    await eventually(lambda: not broker.nc.is_connected)
    with pytest.raises(BrokerTimeout, match="outbound buffer"):
        await _flood(broker)


@pytest.mark.parametrize("poison", [b"PUB void 999999999\r\n", b"THIS IS NO PROTOCOL\r\n"])
async def test_an_error_of_the_server_does_not_close_the_connection_for_good(broker: Broker, poison: bytes):
    reconnects: list[int] = []
    broker.on_reconnect(lambda: reconnects.append(1))
    broker.nc._transport.write(poison)  # the server answers -ERR and hangs up
    await eventually(lambda: reconnects)
    assert await broker.api("INFO")


async def test_a_fault_in_the_reader_does_not_leave_the_connection_deaf(broker: Broker, monkeypatch):
    reconnects: list[int] = []
    broker.on_reconnect(lambda: reconnects.append(1))

    async def fail(data: bytes) -> None:
        monkeypatch.undo()
        raise RuntimeError("a fault in the parser")

    monkeypatch.setattr(broker.nc._ps, "parse", fail)
    await broker.publish("void")
    await broker.nc._send_ping()
    await eventually(lambda: reconnects)
    assert await broker.api("INFO")


@pytest.mark.parametrize(
    "headers", [b"garbage", b"NATS/1.0", b"\r\n\r\n", b"NATS/1.0 \xff\xfe\xff x\r\n\r\n", b"NATS/1.0\r\n\r\n"]
)
async def test_headers_that_are_none_do_not_cost_the_connection(broker: Broker, headers: bytes):
    heard: list[Msg] = []

    async def hear(message: Msg) -> None:
        heard.append(message)

    await broker.subscribe("void", hear)
    await broker.nc.flush()
    broker.nc._transport.write(b"HPUB void %d %d\r\n%sbody\r\n" % (len(headers), len(headers) + 4, headers))
    await broker.publish("void", b"the next")
    await eventually(lambda: len(heard) == 2)
    assert [message.data for message in heard] == [b"body", b"the next"]
    assert broker.nc.stats["reconnects"] == 0


@pytest.mark.parametrize("token", [b"a\x0bb", b"a\x0cb", b"\x0b", b"a\xffb", b"\xe2\x80\xa8", b"a" * 1500])
async def test_a_subject_of_any_bytes_does_not_cost_the_connection(broker: Broker, token: bytes):
    heard: list[Msg] = []

    async def hear(message: Msg) -> None:
        heard.append(message)

    await broker.subscribe("void.*", hear)
    await broker.nc.flush()
    broker.nc._transport.write(b"PUB void.%s %s 4\r\nbody\r\n" % (token, token))
    broker.nc._transport.write(b"HPUB void.%s 12 16\r\nNATS/1.0\r\n\r\nbody\r\n" % token)
    await broker.publish("void.x", b"the next")
    await eventually(lambda: len(heard) == 3)
    assert [message.data for message in heard] == [b"body", b"body", b"the next"]
    assert heard[0].subject == "void." + token.decode(errors="replace")
    assert heard[0].reply == token.decode(errors="replace")
    assert broker.nc.stats["reconnects"] == 0


async def test_a_fault_while_reconnecting_does_not_end_it(broker: Broker, own_nats: NatsServer, monkeypatch):
    reconnects: list[int] = []
    failed: list[int] = []
    broker.on_reconnect(lambda: reconnects.append(1))

    async def fail() -> None:
        failed.append(1)
        monkeypatch.undo()
        raise AssertionError("a fault in the client")

    monkeypatch.setattr(broker.nc, "_process_connect_init", fail)
    own_nats.kill()
    await own_nats.start()
    await eventually(lambda: reconnects)
    assert failed


async def test_a_frozen_server_is_noticed_and_closing_does_not_wait_for_it(own_nats: NatsServer):
    broker = await connect(own_nats.url, ping=0.2)
    freeze(own_nats)
    pending = asyncio.ensure_future(broker.api("INFO", timeout=300))
    with pytest.raises(BrokerTimeout, match="connection was lost"):
        await asyncio.wait_for(pending, 20)
    thaw(own_nats)
    assert await broker.api("INFO", timeout=20)
    freeze(own_nats)
    flood = asyncio.ensure_future(_flood(broker))
    await asyncio.sleep(0)
    started = time.monotonic()
    await broker.close()
    assert time.monotonic() - started < 6
    flood.cancel()
    await asyncio.gather(flood, return_exceptions=True)


async def _flood(broker: Broker) -> None:
    for _ in range(200):
        await broker.publish("void", bytes(100_000))


async def test_no_server_is_a_timeout_and_a_late_one_is_found(own_nats: NatsServer):
    await own_nats.stop()
    with pytest.raises(BrokerTimeout, match=r"127\.0\.0\.1.*no server answers"):
        await Broker.connect(own_nats.url, name="test", monotonic=time.monotonic, timeout=0.3)
    waiting = asyncio.ensure_future(connect(own_nats.url))
    await own_nats.start()
    await (await waiting).close()


class TestPermissions:
    @pytest.fixture
    async def server(self, tmp_path: Path) -> AsyncIterator[NatsServer]:
        server = NatsServer(tmp_path / "secured", config=ACCOUNTS)
        await server.start()
        yield server
        await server.stop()

    async def test_a_wrong_password_is_refused_at_once_and_not_shown(self, server: NatsServer):
        with pytest.raises(BrokerDenied, match=r"(?i)authorization") as caught:
            await connect(server.url, user="all", password="wr0ng-one")
        assert "wr0ng-one" not in str(caught.value)

    async def test_a_refused_request_fails_at_once(self, server: NatsServer):
        broker = await connect(server.url, user="some", password="secret")
        started = time.monotonic()
        with pytest.raises(BrokerDenied, match="Forbidden"):
            await broker.request("Forbidden.Thing", timeout=30)
        assert time.monotonic() - started < 5
        assert broker.denied == 1
        with pytest.raises(NoResponders):
            await broker.request("Allowed.thing")
        await broker.close()

    async def test_a_refused_subscription_is_counted(self, server: NatsServer):
        broker = await connect(server.url, user="some", password="secret")

        async def nothing(message: Msg) -> None: ...

        await broker.subscribe("forbidden", nothing)
        await eventually(lambda: broker.denied == 1)
        await broker.close()

    async def test_reconnecting_goes_on_when_the_user_is_gone_for_a_while(self, server: NatsServer):
        broker = await connect(server.url, user="all", password="secret")
        reconnects: list[int] = []
        broker.on_reconnect(lambda: reconnects.append(1))
        server.kill()
        server._config = ACCOUNTS.replace('"all"', '"nobody"')
        await server.start()
        await eventually(lambda: "authorization" in broker.faststream.trouble.lower())
        server.kill()
        server._config = ACCOUNTS
        await server.start()
        await eventually(lambda: reconnects)
        await broker.close()


async def test_a_subscription_that_is_too_slow_says_so(broker: Broker):
    slow: list[str] = []
    gate = asyncio.Event()

    async def wait(message: Msg) -> None:
        await gate.wait()

    broker.on_slow(slow.append)
    subscription = await broker.subscribe("flood", wait)
    subscription._pending_bytes_limit = 1000
    for _ in range(5):
        await broker.publish("flood", bytes(400))
    await eventually(lambda: slow)
    assert set(slow) == {"flood"}
    assert broker.dropped == len(slow)
    gate.set()


async def test_a_faststream_application_shares_the_connection(broker: Broker, own_nats: NatsServer):
    app = FastStream(broker.faststream)
    heard: list[bytes] = []

    @broker.faststream.subscriber("jobs")
    async def handle(body: bytes) -> bytes:
        heard.append(body)
        return body.upper()

    await app.start()
    assert (await broker.request("jobs", b"one")).data == b"ONE"
    own_nats.kill()
    await own_nats.start()
    await eventually(lambda: broker.nc.is_connected)
    assert (await broker.request("jobs", b"two")).data == b"TWO"
    await app.stop()
    with pytest.raises(NoResponders):
        await broker.request("jobs", b"three")
    assert await broker.api("INFO"), "the application's end is not the connection's"
    await app.start()
    assert (await broker.request("jobs", b"four")).data == b"FOUR"
    await app.stop()
    assert heard == [b"one", b"two", b"four"]


async def test_a_handler_that_fails_is_logged(broker: Broker, caplog: pytest.LogCaptureFixture):
    @broker.faststream.subscriber("jobs")
    async def handle(body: bytes) -> None:
        raise ValueError("broken handler")

    await broker.faststream.start()
    await broker.publish("jobs", b"")
    await eventually(lambda: "broken handler" in caplog.text)
    await broker.faststream.stop()


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
class TestAtTheVeryMoment:
    """In which a connection is lost, after any number of turns of the loop; the two loops say it differently."""

    TURNS = range(16)

    async def losing(self, url: str, turns: int) -> Broker:
        broker = await connect(url)
        await broker.subscribe("any.>", _ignore)
        client = broker.nc
        assert isinstance(client, TenaciousClient)
        client.abort()
        for _ in range(turns):
            await asyncio.sleep(0)
        return broker

    def test_nothing_but_faults_of_the_broker_is_raised(self, nats_url: str, factory: Factory):
        async def run() -> None:
            for turns in self.TURNS:
                broker = await self.losing(nats_url, turns)
                subscription = await broker.subscribe("other.>", _ignore)
                for _ in range(8):
                    await broker.publish("any.thing")
                    await asyncio.sleep(0)
                with contextlib.suppress(BrokerFault):
                    await broker.request("$JS.API.INFO", timeout=0.001)
                await subscription.unsubscribe()
                await eventually(lambda broker=broker: broker.nc.is_connected)
                assert await broker.api("INFO")
                await broker.close()

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(run())

    def test_it_can_be_closed(self, nats_url: str, factory: Factory):
        async def run() -> None:
            for turns in self.TURNS:
                broker = await self.losing(nats_url, turns)
                await broker.publish("any.thing")
                await broker.close()
                assert broker.closed
                broker = await self.losing(nats_url, turns)
                await broker.close()
            await eventually(lambda: len(asyncio.all_tasks()) == 1, what="the end of every task")

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(run())


async def _ignore(message: Msg) -> None:
    """Whatever it is."""
