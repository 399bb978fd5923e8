"""The runner service in this process on a real server: slots, leases, what is put off, its pages, its end."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from tests.support.client import Client
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.server import NatsServer
from turnstream.ids import SessionKey
from turnstream.settings import Settings
from turnstream.telemetry import metrics
from turnstream.wire.work import Work
from turnstream_runner.app import serve


class Service:
    """The runner service under way."""

    def __init__(self, settings: Settings) -> None:
        self._stop = asyncio.Event()
        self.ready = asyncio.Event()
        self.task = asyncio.create_task(serve(settings, stop=self._stop, ready=self.ready.set))

    async def stop(self, timeout: float = 10.0) -> None:
        self._stop.set()
        await asyncio.wait_for(self.task, timeout)


@pytest.fixture
async def start(own_nats: NatsServer) -> AsyncIterator[Callable[..., Service]]:
    services: list[Service] = []

    def begin(**settings: Any) -> Service:
        services.append(Service(Settings(nats_url=own_nats.url, **({"lease": 1.0, "drain_grace": 0.5} | settings))))
        return services[-1]

    yield begin
    for service in services:
        await service.stop()


async def work(client: Client) -> dict[str, Any]:
    answer: Any = await client.broker.api(f"CONSUMER.INFO.{subjects.WORK}.runner-default")
    return answer


async def test_a_conversation_and_its_wake_ups_are_gone_afterwards(
    client: Client, start: Callable[..., Service]
) -> None:
    start()
    for n, text in enumerate(("echo one", "[think hm][say two]", '[tool add {"a": 1, "b": 2}][then][say three]'), 1):
        await client.post(text)
        assert (await client.end(run=n)).status == "completed"

    async def idle() -> bool:
        info = await work(client)
        return info["num_pending"] == 0 and info["num_ack_pending"] == 0

    await eventually(idle)


async def test_no_more_runs_at_once_than_slots_and_the_rest_stays_with_the_broker(
    client: Client, start: Callable[..., Service]
) -> None:
    await start(runner_slots=2).ready.wait()
    sessions = [f"s{n}" for n in range(5)]
    for session in sessions:
        await client.post("[hang]", session)

    async def running() -> list[str]:
        return [session for session in sessions if await client.starts(session) and not await client.ends(session)]

    async def rest() -> bool:
        return (await work(client))["num_pending"] == 3

    await eventually(rest)
    for _ in range(4):
        two = await eventually(lambda: _all(running, 2))
        await client.cancel(1, two[0])
        assert (await client.end(two[0])).status == "cancelled"
    await client.cancel(1, (await running())[0])
    await client.all_ended(sessions)


async def _all(found: Callable[[], Awaitable[list[str]]], count: int) -> list[str]:
    """What is found once there are so many; never more."""
    items = await found()
    assert len(items) <= count
    return items if len(items) == count else []


async def test_s49_a_run_keeps_its_lease_and_is_not_delivered_again(
    client: Client, start: Callable[..., Service]
) -> None:
    for service in (start(), start()):
        await service.ready.wait()
    await client.post("[wait 2.5s]")
    assert (await client.end()).attempt == 1
    assert (await work(client))["num_redelivered"] == 0


async def test_a_session_that_cannot_be_driven_is_put_off_longer_each_time_and_shows_up(
    client: Client, start: Callable[..., Service]
) -> None:
    """Somebody wrote nonsense to a session's subject. The others go on; once it is mended, so does this one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    service = start(health_port=port)
    await service.ready.wait()
    odd = SessionKey("acme", "odd")
    await client.broker.request(subjects.session(odd), b"not an event")
    await Work(client.broker).wake("default", odd, 1)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:

        async def stuck() -> Any:
            return (await http.get("/stuck")).json()["items"]

        [first] = await eventually(stuck)
        assert (first["account"], first["session"], first["deliveries"]) == ("acme", "odd", 1)
        assert "Unreadable" in first["error"]
        await client.post("echo fine")
        assert (await client.end()).status == "completed"

        async def again() -> Any:
            items = await stuck()
            return items if items and items[0]["deliveries"] > first["deliveries"] else None

        [second] = await eventually(again)
        now = client.broker.clock.now()
        assert second["again_at"] - now > first["again_at"] - now
        assert b"turnstream_sessions_stuck 1.0" in (await http.get("/metrics")).content
        assert (await http.get("/healthz")).status_code == 204
        await client.broker.api(f"STREAM.PURGE.{subjects.SESSIONS}", {"filter": subjects.session(odd)})
        await Work(client.broker).wake("default", odd, 0)
        await eventually(lambda: _none(stuck))


async def _none(found: Callable[[], Any]) -> bool:
    return not await found()


async def test_wake_ups_of_nonsense_hold_up_nobody(client: Client, start: Callable[..., Service]) -> None:
    for headers in (None, {subjects.CAUSE: "soon"}, {subjects.CAUSE: "-1"}):
        await client.broker.request(subjects.work("default", SessionKey("acme", "none")), b"?", headers)
    start()
    await client.post("echo fine")
    assert (await client.end()).content == "fine"


async def test_a59_a_runner_ends_at_once_though_the_server_is_gone(
    own_nats: NatsServer, client: Client, start: Callable[..., Service]
) -> None:
    service = start()
    await client.post("[hang]")
    await client.until("run.started")
    own_nats.kill()
    loop = asyncio.get_running_loop()
    began = loop.time()
    await service.stop()
    assert loop.time() - began < 8
    await own_nats.start()


async def test_a_runner_that_finds_no_server_ends_when_it_is_told_to(own_nats: NatsServer) -> None:
    own_nats.kill()
    service = Service(Settings(nats_url=own_nats.url))
    await asyncio.sleep(0)
    await service.stop(3)
    assert not service.ready.is_set()
    await own_nats.start()


async def test_a_port_that_is_taken_is_an_error_of_the_service(own_nats: NatsServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        service = Service(Settings(nats_url=own_nats.url, health_port=taken.getsockname()[1]))
        with pytest.raises(OSError, match="in use"):
            await asyncio.wait_for(service.task, 10)


async def test_several_queues_have_slots_of_their_own(client: Client, start: Callable[..., Service]) -> None:
    start(queues=("default", "gpu"), runner_slots=1)
    await client.post("[hang]", "blocker")
    await client.until("run.started", "blocker")
    spec = client.specs["default"]
    client.specs["default"] = type(spec)(
        agent=spec.agent, version=spec.version, digest=spec.digest, model=spec.model, queue="gpu"
    )
    await client.post("echo painted", "s2")
    assert (await client.end("s2")).content == "painted"
    await client.cancel(1, "blocker")
    assert (await client.end("blocker")).status == "cancelled"


async def test_turns_are_counted_by_how_they_end(client: Client, start: Callable[..., Service]) -> None:
    def count(outcome: str) -> float:
        return metrics.turns.labels(outcome=outcome)._value.get()

    before = {outcome: count(outcome) for outcome in ("completed", "failed")}
    start()
    await client.post("echo fine")
    await client.post("[fail]", "s2")
    await client.end()
    await client.end("s2")
    await eventually(lambda: count("completed") == before["completed"] + 1)
    await eventually(lambda: count("failed") == before["failed"] + 1)
