"""The feed over server-sent events: every event once, in order, from any sequence, at any time, for any number of
listeners; and what happens to those who are too slow."""

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.api import Feed, Running, api_settings
from tests.support.nats import connect
from tests.support.waiting import eventually

from turnstream.broker.connection import Broker
from turnstream.broker.server import NatsServer
from turnstream.session.events import ModelReplied, ToolCall, ToolReturned, ToolStarted
from turnstream.telemetry import metrics
from turnstream.wire.live import Live


async def stored(api: Running, session: str, after: int = 0) -> list[dict[str, Any]]:
    """What the log holds, page by page."""
    found: list[dict[str, Any]] = []
    while True:
        page = (await api.http.get(f"/v1/sessions/{session}/events", params={"after": after, "limit": 200})).json()
        found += page["events"]
        after = page["seq"]
        if not page["more"]:
            return found


async def sequences(api: Running, session: str, after: int = 0) -> list[int]:
    return [event["seq"] for event in await stored(api, session, after)]


async def until(feed: Feed, seq: int) -> None:
    """Reads on to this event."""
    while seq not in feed.ids:
        await feed.next()


async def test_the_feed_replays_marks_the_end_and_goes_on(api: Running) -> None:
    """Also A78: what is replayed ends with a mark."""
    await api.open("s1")
    run = await api.turn("s1")
    async with api.feed("s1") as feed:
        assert feed.answer.headers["content-type"] == "text/event-stream"
        assert feed.answer.headers["cache-control"] == "no-cache, no-transform"
        marked = await feed.until("caught-up")
        assert feed.ids == await sequences(api, "s1")
        assert json.loads(marked.data) == {"seq": feed.ids[-1]} and marked.id is None
        assert [frame.event for frame in feed.seen[:-1]] == [
            "session.opened",
            "message.posted",
            "run.started",
            "run.ended",
        ]
        assert json.loads(feed.seen[3].data)["data"]["content"] == "done" and run == "s1.1"
        await api.say("s1", "next")
        live = await feed.next()
        assert live.event == "message.posted" and int(live.id or 0) > feed.ids[-2]


async def test_a01_ids_are_unique_and_rising_whatever_comes_at_once(api: Running) -> None:
    await api.open("s1")
    async with api.feed("s1") as feed:
        await feed.until("caught-up")
        made = await api.hand.notices("s1", 500)
        await until(feed, made[-1])
    assert feed.ids[-500:] == made and feed.ids == sorted(set(feed.ids))
    cut = random.Random(1).choice(made)
    async with api.feed("s1", after=cut) as feed:
        await feed.until("caught-up")
    assert feed.ids == [seq for seq in made if seq > cut]


async def test_a02_readers_who_come_while_events_flow_miss_none_and_see_none_twice(api: Running) -> None:
    await api.open("s1")
    writing = asyncio.create_task(api.hand.notices("s1", 600))
    rng = random.Random(2)

    async def read() -> list[int]:
        await asyncio.sleep(rng.random() * 0.4)  # they come whenever they come
        async with api.feed("s1") as feed:
            made = await asyncio.shield(writing)
            await until(feed, made[-1])
            return feed.ids

    seen = await asyncio.gather(*(read() for _ in range(50)))
    everything = await sequences(api, "s1")
    assert len(everything) == 601 and all(ids == everything for ids in seen)


async def test_a04_rejoining_a_finished_run_gives_what_is_missing_and_says_that_it_is_all(api: Running) -> None:
    await api.open("s1")
    await api.turn("s1")
    everything = await sequences(api, "s1")
    await api.stop()
    await api.start()
    for after, missing in ((everything[-1], []), (everything[1], everything[2:]), (0, everything), (-1, everything)):
        async with asyncio.timeout(1), api.feed("s1", after=after) as feed:
            await feed.until("caught-up")
            assert feed.ids == missing


async def test_a_session_that_is_deleted_ends_whatever_is_about_it(api: Running) -> None:
    """The feed and the stream of a run."""
    await api.open("s1")
    body = {"content": "hello"}
    async with (
        api.feed("s1") as feed,
        api.feed("s1", method="POST", path="/v1/sessions/s1/messages", json=body) as stream,
    ):
        await feed.until("caught-up")
        await stream.until("caught-up")
        await api.hand.start("s1.1")
        await api.hand.delete("s1")
        assert [frame.event for frame in await stream.rest()] == ["run.started", "session.deleted"]
        *_, deleted, bye = await feed.rest()
        assert (deleted.event, bye.event) == ("session.deleted", "bye")
        assert json.loads(bye.data) == {"seq": int(deleted.id or 0), "reason": "deleted"}
    for path in ("/v1/sessions/s1/events", "/v1/runs/s1.1/wait"):
        assert (await api.http.get(path)).status_code == 404


async def test_a_session_that_is_deleted_ends_the_wait_for_its_run(api: Running) -> None:
    await api.open("s1")
    asked = asyncio.create_task(api.post("/v1/sessions/s1/messages?wait=20", {"content": "hello"}))
    while not (await api.http.get("/v1/sessions/s1/queue")).json()["items"]:
        pass
    await api.hand.delete("s1")
    outcome = (await asked).json()["outcome"]
    assert (outcome["status"], outcome["reason"]) == ("cancelled", "session_deleted")


async def test_a05_readers_do_not_share_and_do_not_harm_each_other(api: Running) -> None:
    await api.open("s1")
    async with api.feed("s1") as one:
        async with api.feed("s1") as two:
            await one.until("caught-up")
            await two.until("caught-up")
            first = await api.hand.notices("s1", 20)
            await until(two, first[10])
        second = await api.hand.notices("s1", 20)
        await until(one, second[-1])
    assert one.ids == await sequences(api, "s1")
    assert two.ids == one.ids[: len(two.ids)]


async def test_a06_s40_a_reader_comes_back_after_a_restart_and_misses_nothing(api: Running) -> None:
    await api.open("s1")
    seen: list[int] = []
    async with api.feed("s1") as feed:
        made = await api.hand.notices("s1", 10)
        await until(feed, made[4])
        seen += feed.ids
        assert seen[-1] >= made[4]
        await api.stop()
    seen = [seq for seq in seen if seq <= made[4]]  # a reader that lost what came last
    await api.hand.notices("s1", 10)
    await api.start()
    header = {"Last-Event-ID": str(seen[-1])}
    for how in ({"after": seen[-1]}, {"headers": header}, {"after": 0, "headers": header}):
        async with api.feed("s1", **how) as feed:
            await feed.until("caught-up")
        assert seen + feed.ids == await sequences(api, "s1")


async def test_a10_a_cursor_is_a_sequence_and_may_be_any_number(api: Running) -> None:
    """Sequences skip, for other sessions share the stream: "after N" never waits for N + 1."""
    await api.open("s1")
    await api.open("s2")
    for _ in range(3):
        await api.hand.notices("s1", 1)
        await api.hand.notices("s2", 2)
    everything = await sequences(api, "s1")
    assert everything[-1] - everything[0] > len(everything)
    for after in range(everything[0] - 1, everything[-1] + 1):
        rest = [seq for seq in everything if seq > after]
        assert await sequences(api, "s1", after) == rest
        async with api.feed("s1", after=after) as feed:
            await feed.until("caught-up")
            assert feed.ids == rest


async def test_s41_a_cursor_ahead_of_the_log_is_reset(api: Running) -> None:
    await api.open("s1")
    (last,) = await sequences(api, "s1")
    async with api.feed("s1", after=last + 1_000_000) as feed:
        frame = await feed.next()
        assert frame.event == "reset" and json.loads(frame.data) == {"seq": last} and frame.id is None
        await feed.until("caught-up")
        (made,) = await api.hand.notices("s1", 1)
        await until(feed, made)
    page = (await api.http.get(f"/v1/sessions/s1/events?after={made + 1000}")).json()
    assert page == {"events": [], "seq": made, "more": False}


@pytest.mark.parametrize("cursor", ["abc", "1.5", "", "99999999999999999999", "٣"])
async def test_s41_a_cursor_that_is_no_number_is_refused(api: Running, cursor: str) -> None:
    await api.open("s1")
    async with api.feed("s1", after=cursor) as feed:
        assert feed.status == 400
    answer = await api.http.get("/v1/sessions/s1/events", params={"after": cursor})
    assert answer.status_code == 400 and answer.json()["code"] == "invalid_cursor"
    if cursor.isascii() and cursor:
        async with api.feed("s1", headers={"Last-Event-ID": cursor}) as feed:
            assert feed.status == 400


async def test_a49_what_cannot_be_followed_is_said_at_once(api: Running) -> None:
    async with asyncio.timeout(1), api.feed("nobody") as feed:
        assert feed.status == 404
        problem = json.loads(await feed.answer.aread())
    assert problem["code"] == "not_found"


# --- slow readers -------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def deaf(api: Running, session: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A listener that reads nothing, not even into its kernel's larger buffers."""
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    peer.setblocking(False)
    await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", api.settings.http_port))
    reader, writer = await asyncio.open_connection(sock=peer, limit=4096)
    path = f"/v1/sessions/{session}/events"
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n".encode())
    await writer.drain()
    try:
        yield reader, writer
    finally:
        writer.close()


async def test_s42_a51_a_slow_reader_is_told_and_closed_and_others_are_unharmed(api: Running) -> None:
    await api.open("s1")
    before = metrics.overflows._value.get()
    async with api.feed("s1") as good, deaf(api, "s1") as (reader, _):
        await good.until("caught-up")
        await eventually(lambda: metrics.listeners._value.get() >= 2)
        body = "x" * 60_000
        made: list[int] = []
        while metrics.overflows._value.get() == before:
            made += await api.hand.notices("s1", 5, body)
            await until(good, made[-1])
            assert len(made) * len(body) < 40 * api.settings.listener_buffer
        assert good.ids[-len(made) :] == made
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += await asyncio.wait_for(reader.read(1 << 20), 20)
    assert metrics.overflows._value.get() == before + 1
    assert len(data) < 5 * api.settings.listener_buffer
    frame = data[data.rindex(b"event: overflow") :]
    last = json.loads(frame.partition(b"data: ")[2].partition(b"\n")[0])["seq"]
    assert b"id: %d\n" % last in data and made[0] <= last < made[-1]
    async with api.feed("s1", after=last) as feed:
        await feed.until("caught-up")
        assert feed.ids == [seq for seq in made if seq > last]


# --- deltas -------------------------------------------------------------------------------------------------------


async def test_deltas_come_live_and_a_late_joiner_gets_those_so_far(api: Running, nats: Broker) -> None:
    await api.open("s1")
    run = (await api.say("s1"))["run"]
    await api.hand.start(run)
    speech = Live(nats).speak(api.hand.key("s1"), 1, 1)
    async with api.feed("s1") as early:
        await early.until("caught-up")
        await speech.say(1, "reasoning", "hm")
        await speech.say(1, "text", "Hel")
        await speech.flush()
        first = [json.loads((await early.until("delta")).data) for _ in range(2)]
        assert first == [
            {"run": "s1.1", "attempt": 1, "step": 1, "index": 1, "kind": "reasoning", "text": "hm"},
            {"run": "s1.1", "attempt": 1, "step": 1, "index": 2, "kind": "text", "text": "Hel"},
        ]
        async with api.feed("s1") as late, api.feed("s1", deltas="false") as quiet:
            await late.until("caught-up")
            assert [json.loads((await late.next()).data) for _ in range(2)] == first
            await speech.say(1, "text", "lo")
            await speech.flush()
            assert json.loads((await late.until("delta")).data)["index"] == 3
            assert json.loads((await early.until("delta")).data)["index"] == 3
            await api.hand.end(run, "Hello")
            await quiet.until("run.ended")
            assert "delta" not in [frame.event for frame in quiet.seen]
    async with api.feed("s1") as after:
        await after.until("caught-up")
        await api.hand.notices("s1", 1)
        assert (await after.next()).event == "message.posted"  # what was said is in the event, not said again


async def test_a_first_listener_gets_what_was_said_before_anybody_listened(api: Running, nats: Broker) -> None:
    await api.open("s1")
    run = (await api.say("s1"))["run"]
    await api.hand.start(run)
    live = Live(nats)
    speech = live.speak(api.hand.key("s1"), 1, 1)
    for n in range(20):
        await speech.say(1, "text", f"{n} ")
        await speech.flush()
    await eventually(lambda: _kept(live, api, 20))
    async with api.feed("s1") as feed:
        await feed.until("caught-up")
        said = [json.loads((await feed.next()).data) for _ in range(20)]
    assert [delta["index"] for delta in said] == list(range(1, 21))
    assert "".join(delta["text"] for delta in said) == "".join(f"{n} " for n in range(20))


async def _kept(live: Live, api: Running, count: int) -> bool:
    return len(await live.read(api.hand.key("s1"), 1)) == count


# --- filters, one run ---------------------------------------------------------------------------------------------


async def test_types_choose_the_same_live_and_replayed(api: Running) -> None:
    await api.open("s1")
    async with api.feed("s1", types="run.started,run.ended") as live:
        await live.until("caught-up")
        for _ in range(3):
            await api.turn("s1")
        while len(live.ids) < 6:
            await live.next()
    async with api.feed("s1", types="run.started,run.ended") as replayed:
        await replayed.until("caught-up")
    assert live.ids == replayed.ids
    page = (await api.http.get("/v1/sessions/s1/events?types=run.ended&limit=2")).json()
    assert [event["type"] for event in page["events"]] == ["run.ended", "run.ended"] and page["more"]


@pytest.mark.parametrize("types", ["run.endet", "run.ended,", "delta,nonsense"])
async def test_types_that_are_none_are_refused(api: Running, types: str) -> None:
    await api.open("s1")
    answer = await api.http.get("/v1/sessions/s1/events", params={"types": types})
    assert answer.status_code == 422 and answer.json()["field"] == "types"


async def test_a_post_can_stream_its_own_run(api: Running) -> None:
    await api.open("s1", policy={"on_busy": "queue"})
    await api.say("s1", "in front")
    path = "/v1/sessions/s1/messages"
    async with api.feed("s1", method="POST", path=path, json={"content": "mine"}) as feed:
        posted = json.loads((await feed.next()).data)
        assert posted["run"] == "s1.2" and feed.seen[0].event == "posted" and feed.seen[0].id is None
        await feed.until("caught-up")
        await api.hand.carry_out("s1.1")
        await api.hand.carry_out("s1.2", "yours")
        await api.hand.notices("s1", 1)
        rest = await feed.rest()
    assert [frame.event for frame in rest] == ["run.started", "run.ended"]
    assert json.loads(rest[-1].data)["data"]["content"] == "yours"


async def test_s24_a77_a_reader_who_goes_away_ends_nothing(api: Running) -> None:
    await api.open("s1")
    for _ in range(3):
        async with api.feed("s1", method="POST", path="/v1/sessions/s1/messages", json={"content": "x"}) as feed:
            run = json.loads((await feed.next()).data)["run"]
        assert (await api.http.get(f"/v1/runs/{run}/wait?timeout=0")).json()["status"] == "queued"
        await api.hand.carry_out(run)
        assert (await api.http.get(f"/v1/runs/{run}/wait")).json()["outcome"]["status"] == "completed"


async def test_a_repeated_post_streams_the_run_again_from_its_beginning(api: Running) -> None:
    await api.open("s1")
    for again in (False, True):
        body = {"content": "x", "message_id": "m1"}
        async with api.feed("s1", method="POST", path="/v1/sessions/s1/messages", json=body) as feed:
            await feed.next()
            if not again:
                await api.hand.carry_out("s1.1")
            rest = await feed.rest()
        assert [frame.event for frame in rest if frame.id] == ["run.started", "run.ended"]


async def test_a_notice_has_no_run_to_stream(api: Running) -> None:
    await api.open("s1")
    body = {"content": "x", "kind": "notice"}
    async with asyncio.timeout(1), api.feed("s1", method="POST", path="/v1/sessions/s1/messages", json=body) as feed:
        assert [frame.event for frame in await feed.rest()] == ["posted"]


# --- the same for all ---------------------------------------------------------------------------------------------


async def test_a74_what_comes_live_is_byte_for_byte_what_is_read_later(api: Running, nats: Broker) -> None:
    await api.open("s1", title="t", metadata={"a": [1, None, "é"]})
    async with api.feed("s1") as live:
        await live.until("caught-up")
        await api.http.patch("/v1/sessions/s1", json={"title": "other"})
        run = (await api.say("s1", "do it"))["run"]
        await api.hand.start(run)
        call = ToolCall(id="c1", name="echo", arguments='{"x": "\u2028"}')
        await api.hand.say(run, ModelReplied(run=1, attempt=1, step=1, content="let me", tool_calls=(call,)))
        await api.hand.say(run, ToolStarted(run=1, attempt=1, call_id="c1"))
        await api.hand.say(run, ToolReturned(run=1, attempt=1, call_id="c1", status="error", error="no"))
        await api.http.post(f"/v1/runs/{run}/cancel", json={"reason": "enough"})
        await api.hand.end(run, "partial", status="cancelled")
        await live.until("run.ended")
    async with api.feed("s1") as replayed:
        await replayed.until("caught-up")
    assert [frame for frame in live.seen if frame.id] == [frame for frame in replayed.seen if frame.id]
    page = (await api.http.get("/v1/sessions/s1/events?limit=200")).content
    assert b",".join(frame.data for frame in replayed.seen if frame.id) in page
    assert len({frame.event for frame in replayed.seen if frame.id}) == 9


async def test_a55_order_is_the_logs_whatever_clocks_say(api: Running) -> None:
    await api.open("s1")
    true = api.hand._now
    for hours in (5, -5, 0):
        api.hand._now = lambda ahead=hours: true() + ahead * 3_600_000
        await api.hand.notices("s1", 2)
    found = await stored(api, "s1")
    assert [event["seq"] for event in found] == sorted(event["seq"] for event in found)
    dates = [event["storedat"] for event in found]
    assert dates == sorted(dates) and len({date[:13] for date in dates}) <= 2
    assert len({event["time"][:13] for event in found}) >= 3


async def test_a70_a_backlog_longer_than_any_page_comes_whole_then_live(api: Running) -> None:
    await api.open("s1")
    made = await api.hand.notices("s1", 2000)
    writing = asyncio.create_task(api.hand.notices("s1", 300))
    async with api.feed("s1") as feed:
        last = (await writing)[-1]
        await until(feed, last)
    assert feed.ids[1:2001] == made and feed.ids == await sequences(api, "s1")


@pytest.fixture
async def quick(nats: Broker, nats_url: str, account: str, tmp_path: Path) -> AsyncIterator[Running]:
    """With a heartbeat of a fifth of a second."""
    running = Running(api_settings(nats_url, tmp_path, account, heartbeat=0.2), account, nats)
    await running.start()
    yield running
    await running.close()


async def test_a53_an_idle_stream_is_kept_alive(quick: Running) -> None:
    await quick.open("s1")
    async with quick.http.stream("GET", "/v1/sessions/s1/events", headers={"Accept": "text/event-stream"}) as answer:
        chunks = answer.aiter_raw()
        text = b""
        while b"caught-up" not in text:
            text += await anext(chunks)
        loop = asyncio.get_running_loop()
        for _ in range(3):
            began = loop.time()
            assert await anext(chunks) == b": keep-alive\n\n"
            assert loop.time() - began < 1


async def test_a59_a_shutdown_says_good_bye_and_ends_within_seconds(api: Running) -> None:
    await api.open("s1")
    (last,) = await sequences(api, "s1")
    async with contextlib.AsyncExitStack() as stack:
        feeds = [await stack.enter_async_context(api.feed("s1")) for _ in range(100)]
        for feed in feeds:
            await feed.until("caught-up")
        waiting = asyncio.create_task(api.post("/v1/sessions/s1/messages?wait=60", {"content": "x"}))
        await eventually(lambda: _queued(api))
        loop = asyncio.get_running_loop()
        began = loop.time()
        await api.stop()
        assert loop.time() - began < 5
        for feed in feeds:
            farewell = (await feed.rest())[-1]
            assert farewell.event == "bye" and json.loads(farewell.data)["seq"] >= last
        answer = await waiting
        assert answer.status_code == 202 and answer.json()["status"] == "queued" and "outcome" not in answer.json()


async def _queued(api: Running) -> bool:
    return bool((await api.http.get("/v1/sessions/s1/queue")).json()["items"])


async def test_a68_a75_connections_that_are_cut_again_and_again_cost_nothing(api: Running) -> None:
    await api.open("s1")
    writing = asyncio.create_task(api.hand.notices("s1", 400))
    seen: list[int] = []
    cuts = 0
    while not writing.done() or not seen or seen[-1] < writing.result()[-1]:
        async with api.feed("s1", after=seen[-1] if seen else 0) as feed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    while len(feed.ids) < 40:
                        await feed.next()
        seen += feed.ids
        cuts += 1
    assert seen == await sequences(api, "s1") and cuts > 3


async def test_a61_the_feed_goes_on_when_the_broker_is_started_again(own_nats: NatsServer, tmp_path: Path) -> None:
    broker = await connect(own_nats.url)
    running = Running(api_settings(own_nats.url, tmp_path, "a61"), "a61", broker)
    await running.start()
    try:
        await running.open("s1")
        async with running.feed("s1") as feed:
            await feed.until("caught-up")
            made = await running.hand.notices("s1", 5)
            await until(feed, made[-1])
            own_nats.kill()
            await own_nats.start()
            made = await running.hand.notices("s1", 5)
            async with asyncio.timeout(20):
                await until(feed, made[-1])
        assert feed.ids == await sequences(running, "s1")
    finally:
        await running.close()
        await broker.close()
