"""API keys: who may ask, for which account; tenants see nothing of each other; a revoked key is shut out at once."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.api import Running, api_settings
from tests.support.nats import connect
from tests.support.waiting import eventually

from turnstream.broker.errors import BrokerError
from turnstream.broker.server import NatsServer
from turnstream.ids import SessionKey
from turnstream_api import keys


@pytest.fixture
async def alone(own_nats: NatsServer, tmp_path: Path) -> AsyncIterator[Running]:
    """An API on a broker of its own: where a key exists, it exists for everybody."""
    broker = await connect(own_nats.url)
    running = Running(api_settings(own_nats.url, tmp_path, "default"), "default", broker)
    await running.start()
    yield running
    await running.close()
    await broker.close()


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


async def status(running: Running, path: str, secret: str | None, method: str = "GET", **more: Any) -> int:
    headers = bearer(secret) if secret is not None else {}
    return (await running.http.request(method, path, headers=headers, **more)).status_code


async def test_without_keys_everybody_is_the_default_account(alone: Running) -> None:
    await alone.open("s1")
    assert alone.hand.key("s1").account == "default"
    assert (await alone.hand.sessions.load(alone.hand.key("s1"))).exists
    assert await status(alone, "/v1/sessions/s1/queue", "ts_default_0_nonsense") == 401


async def test_a_key_opens_its_account_and_shuts_out_everybody_else(alone: Running) -> None:
    await alone.open("s1")
    secret, key = await keys.add_key(alone.broker, "acme", label="ci")
    assert secret.startswith(f"ts_acme_{key.id}_") and secret not in str(await keys.list_keys(alone.broker))

    async def shut() -> bool:
        return await status(alone, "/v1/sessions/s1/queue", None) == 401

    await eventually(shut)
    answer = await alone.http.get("/v1/sessions/s1/queue")
    assert answer.json()["code"] == "unauthorized" and answer.headers["www-authenticate"] == "Bearer"
    assert await status(alone, "/v1/sessions", secret, "POST", json={"id": "s2"}) == 201
    assert (await alone.hand.sessions.load(SessionKey("acme", "s2"))).exists
    events = (await alone.http.get("/v1/sessions/s2/events", headers=bearer(secret))).json()["events"]
    assert events[0]["actor"] == f"client:{key.id}"
    for wrong in (secret[:-1], secret + "x", secret.replace("acme", "default"), "x", f"ts_acme_{key.id}_", "é"):
        headers = {"Authorization": f"Bearer {wrong}".encode()}
        assert (await alone.http.get("/v1/sessions/s2/queue", headers=headers)).status_code == 401
    basic = {"Authorization": f"Basic {secret}"}
    assert (await alone.http.get("/v1/sessions/s2/queue", headers=basic)).status_code == 401
    assert (await alone.http.get("/healthz")).status_code == 200


async def test_a60_a_tenant_sees_nothing_of_another(alone: Running) -> None:
    mine, _ = await keys.add_key(alone.broker, "mine")
    other, _ = await keys.add_key(alone.broker, "other")
    await eventually(lambda: _open(alone, mine))
    await eventually(lambda: _open(alone, other))
    assert await status(alone, "/v1/sessions", mine, "POST", json={"id": "secret"}) == 201
    assert await status(alone, "/v1/sessions/secret/messages", mine, "POST", json={"content": "psst"}) == 202
    for method, path, body in (
        ("GET", "/v1/sessions/secret/events", None),
        ("GET", "/v1/sessions/secret/queue", None),
        ("GET", "/v1/sessions/secret/history?as=model", None),
        ("POST", "/v1/sessions/secret/messages", {"content": "x"}),
        ("PATCH", "/v1/sessions/secret", {"title": "x"}),
        ("GET", "/v1/runs/secret.1/wait", None),
        ("POST", "/v1/runs/secret.1/cancel", {}),
    ):
        assert await status(alone, path, other, method, json=body) == 404, path
        assert await status(alone, path, None, method, json=body) == 401, path
    async with alone.feed("secret", headers=bearer(other)) as feed:
        assert feed.status == 404
    async with alone.feed("secret") as feed:
        assert feed.status == 401
    # The same id is another session for the other tenant.
    assert await status(alone, "/v1/sessions", other, "POST", json={"id": "secret"}) == 201
    async with alone.feed("secret", headers=bearer(other)) as feed:
        await feed.until("caught-up")
        assert [frame.event for frame in feed.seen if frame.id] == ["session.opened"]
        assert b"psst" not in b"".join(frame.data for frame in feed.seen)


async def _open(running: Running, secret: str) -> bool:
    return await status(running, "/v1/sessions/none/queue", secret) == 404


async def test_a_revoked_key_is_shut_out_within_moments_on_open_streams_too(alone: Running) -> None:
    kept, _ = await keys.add_key(alone.broker, "acme")
    secret, key = await keys.add_key(alone.broker, "acme")
    await eventually(lambda: _open(alone, secret))
    await eventually(lambda: _open(alone, kept))
    assert await status(alone, "/v1/sessions", kept, "POST", json={"id": "s1"}) == 201
    async with alone.feed("s1", headers=bearer(secret)) as shut, alone.feed("s1", headers=bearer(kept)) as stays:
        await shut.until("caught-up")
        await stays.until("caught-up")
        await keys.revoke_key(alone.broker, "acme", key.id)
        async with asyncio.timeout(5):
            (farewell,) = await shut.rest()
        assert farewell.event == "bye" and json.loads(farewell.data)["reason"] == "unauthorized"
        assert await status(alone, "/v1/sessions/s1/queue", secret) == 401
        assert await status(alone, "/v1/sessions/s1/messages", kept, "POST", json={"content": "x"}) == 202
        await stays.until("message.posted")
    listed = {one.id: one.revoked_at for one in await keys.list_keys(alone.broker)}
    assert listed[key.id] and len(listed) == 2


async def test_revoking_the_last_key_does_not_open_the_door_again(alone: Running) -> None:
    secret, key = await keys.add_key(alone.broker, "acme")
    await eventually(lambda: _open(alone, secret))
    first = await keys.revoke_key(alone.broker, "acme", key.id)
    assert await keys.revoke_key(alone.broker, "acme", key.id) == first

    async def shut() -> bool:
        return await status(alone, "/v1/sessions/none/queue", secret) == 401

    await eventually(shut)
    assert await status(alone, "/v1/sessions/none/queue", None) == 401
    await alone.stop()
    await alone.start()
    assert await status(alone, "/v1/sessions/none/queue", None) == 401


async def test_the_first_key_ends_streams_that_came_without_one(alone: Running) -> None:
    await alone.open("s1")
    async with alone.feed("s1") as feed:
        await feed.until("caught-up")
        await keys.add_key(alone.broker, "acme")
        async with asyncio.timeout(5):
            assert [frame.event for frame in await feed.rest()] == ["bye"]


async def test_keys_are_followed_through_a_restart_of_the_broker(alone: Running, own_nats: NatsServer) -> None:
    secret, key = await keys.add_key(alone.broker, "acme")
    await eventually(lambda: _open(alone, secret))
    own_nats.kill()
    await own_nats.start()
    await eventually(lambda: alone.broker.nc.is_connected)
    await keys.revoke_key(alone.broker, "acme", key.id)

    async def shut() -> bool:
        return await status(alone, "/v1/sessions/none/queue", secret) == 401

    await eventually(shut, timeout=10)


async def test_s56_where_the_keys_were_deleted_the_door_stays_shut_until_there_is_a_new_one(alone: Running) -> None:
    for _ in range(2):
        secret, _ = await keys.add_key(alone.broker, "acme")
    await eventually(lambda: _open(alone, secret))
    await alone.broker.api("STREAM.DELETE.KV_keys")

    async def shut() -> bool:
        return await status(alone, "/v1/sessions/none/queue", secret) == 401

    await eventually(shut, 20)
    assert await status(alone, "/v1/sessions/none/queue", None) == 401
    new, _ = await keys.add_key(alone.broker, "acme")
    await eventually(lambda: _open(alone, new))
    assert await shut()


async def test_what_is_no_key_is_said(alone: Running) -> None:
    with pytest.raises(ValueError, match="no account"):
        await keys.add_key(alone.broker, "Not An Account")
    for account, key_id in (("acme", "nobody"), ("*", "*"), ("acme", "a.b")):
        with pytest.raises(keys.UnknownKey):
            await keys.revoke_key(alone.broker, account, key_id)
    assert await keys.list_keys(alone.broker) == []


async def test_a_key_is_never_overwritten(alone: Running) -> None:
    _, key = await keys.add_key(alone.broker, "acme")
    with pytest.raises(BrokerError):
        await keys._put(alone.broker, key, 0)
