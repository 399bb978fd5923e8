"""Policies: given at every entrance, in layers, shown as given and as in force; and the same result wherever a message
comes in."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from tests.support.api import Running, api_settings
from tests.support.asking import OverHttp, OverNats
from tests.support.waiting import eventually

from turnstream import agents, subjects
from turnstream.broker.connection import Broker
from turnstream.session.policy import CHOICES, PRESETS
from turnstream.settings import SettingsError
from turnstream.specs import agents_of, specs_of
from turnstream_api.policies import ABOUT, Policy
from turnstream_cli.client import Client, Refused
from turnstream_cli.talk import post_text
from turnstream_projector.app import serve as serve_projector

# --- the same result everywhere (A13) -----------------------------------------------------------------------------

Result = tuple[str, str | None]
"""How a message was routed and where to; or why it was refused, and the run in the way."""
Entrance = Callable[[Running, str, dict[str, Any]], Awaitable[Result]]


def _read(status: int, body: dict[str, Any]) -> Result:
    run = body.get("run")
    return (body["routed"] if status == 202 else body["code"]), run and run.rpartition(".")[2]


async def post(api: Running, session: str, fields: dict[str, Any]) -> Result:
    answer = await api.post(f"/v1/sessions/{session}/messages", {"content": "hello", **fields})
    return _read(answer.status_code, answer.json())


async def post_and_wait(api: Running, session: str, fields: dict[str, Any]) -> Result:
    answer = await api.post(f"/v1/sessions/{session}/messages?wait=0.01", {"content": "hello", **fields})
    return _read(answer.status_code, answer.json())


async def post_and_stream(api: Running, session: str, fields: dict[str, Any]) -> Result:
    body = {"content": "hello", **fields}
    async with api.feed(session, method="POST", path=f"/v1/sessions/{session}/messages", json=body) as feed:
        if feed.status != 200:
            return _read(feed.status, json.loads(await feed.answer.aread()))
        return _read(202, json.loads((await feed.next()).data))


async def start_run(api: Running, session: str, fields: dict[str, Any]) -> Result:
    answer = await api.post("/v1/runs", {"session": session, "input": "hello", **fields})
    return _read(answer.status_code, answer.json())


async def over_nats(api: Running, session: str, fields: dict[str, Any]) -> Result:
    speaker = OverNats(api.broker, api.account)
    answer = await speaker.ask("post_message", session=session, content="hello", **fields)
    return _read(answer.status, answer.body)


async def start_over_nats(api: Running, session: str, fields: dict[str, Any]) -> Result:
    answer = await OverNats(api.broker, api.account).ask("start_run", session=session, input="hello", **fields)
    return _read(answer.status, answer.body)


async def inbox(api: Running, session: str, fields: dict[str, Any]) -> Result:
    """What came of it is read from the log, or from what was refused."""
    message = f"m{next(_numbers)}"
    body = json.dumps({"content": "hello", "message_id": message, **fields}).encode()
    await api.broker.store(f"ts.inbox.{api.account}.{session}", body)

    async def settled() -> Result | None:
        page = (await api.http.get(f"/v1/sessions/{session}/events?limit=200&types=message.posted")).json()
        for event in page["events"]:
            data = event["data"]
            if data["message_id"] == message:
                words = {"starts": "started", "queued": "queued", "steers": "steered", "answers": "answered"}
                name = next((name for name in words if name in data), "")
                return words.get(name, "none"), str(data[name]["run"]) if name else None
        subject = f"ts.inbox-refused.{api.account}.{session}"
        found = await api.broker.message(subjects.REFUSED, {"last_by_subj": subject})
        if not found or message.encode() not in found.data:
            return None
        answer = await api.broker.api(f"STREAM.MSG.GET.{subjects.REFUSED}", {"seq": found.seq})
        headers = base64.b64decode(answer["message"]["hdrs"]).decode()
        return headers.partition("ts-refused-code: ")[2].partition("\r\n")[0], None

    found = await eventually(settled)
    assert found
    return found


async def command_line(api: Running, session: str, fields: dict[str, Any]) -> Result:
    """What `turnstream send` does."""
    async with httpx.AsyncClient(base_url=api.url, trust_env=False) as http:
        try:
            return _read(202, await post_text(Client(http), session, "hello", fields))
        except Refused as refused:
            return _read(refused.status, dict(refused.problem))


ENTRANCES: dict[str, Entrance] = {
    entrance.__name__: entrance
    for entrance in (
        post,
        post_and_wait,
        post_and_stream,
        start_run,
        over_nats,
        start_over_nats,
        inbox,
        command_line,
    )
}
_numbers = iter(range(1, 1_000_000))


async def idle(api: Running, session: str) -> None:
    await api.hand.carry_out((await api.say(session))["run"])


async def running(api: Running, session: str) -> None:
    await api.hand.start((await api.say(session))["run"])


async def asking(api: Running, session: str) -> None:
    await running(api, session)
    await api.hand.ask(f"{session}.1", {"prompt": "Which one?"})


async def asking_leave(api: Running, session: str) -> None:
    await running(api, session)
    await api.hand.ask(f"{session}.1", {"kind": "approval", "prompt": "delete everything"})


STATES = {state.__name__: state for state in (idle, running, asking, asking_leave)}
EXPECTED: dict[str, dict[str, Result]] = {
    "idle": dict.fromkeys(("reject", "queue", "steer", "interrupt", "parallel", *PRESETS), ("started", "2")),
    "running": {
        "reject": ("run_active", "1"),
        "queue": ("queued", "2"),
        "steer": ("steered", "1"),
        "interrupt": ("queued", "2"),
        "parallel": ("started", "2"),
        "strict": ("run_active", "1"),
        "memory": ("started", "2"),
        "thread": ("steered", "1"),
        "workspace": ("queued", "2"),
    },
    "asking": {
        **dict.fromkeys(("reject", "queue", "steer", "interrupt", "parallel"), ("answered", "1")),
        "strict": ("answered", "1"),
        "memory": ("started", "2"),
        "thread": ("answered", "1"),
        "workspace": ("answered", "1"),
    },
    "asking_leave": {
        **dict.fromkeys(("reject", "queue", "steer", "interrupt", "parallel"), ("run_waiting", "1")),
        "strict": ("run_waiting", "1"),
        "memory": ("started", "2"),
        "thread": ("answered", "1"),
        "workspace": ("run_waiting", "1"),
    },
}


@pytest.mark.parametrize("entrance", ENTRANCES)
async def test_a13_a_policy_means_the_same_at_every_entrance(api: Running, entrance: str) -> None:
    """Every `on_busy`, of the session and of the message itself, and every preset, in every state of a session."""
    send = ENTRANCES[entrance]
    for state, prepare in STATES.items():
        for given, expected in EXPECTED[state].items():
            ways: list[tuple[dict[str, Any], dict[str, Any]]]
            if given in PRESETS:
                ways = [({"preset": given}, {})]
            else:
                ways = [({"on_busy": given}, {}), ({}, {"on_busy": given})]
            for number, (policy, fields) in enumerate(ways):
                session = f"{state}-{given}-{number}"
                await api.open(session, policy={"authors": "mixed", **policy} if policy else None)
                await prepare(api, session)
                before = await said(api, session)
                found = await send(api, session, fields)
                if entrance == "inbox" and found[1] is None:  # it says why, not which run is in the way
                    expected_here: Result = expected[0], None
                else:
                    expected_here = expected
                assert found == expected_here, (session, policy, fields)
                stored = await said(api, session) - before
                assert stored == (0 if expected[0].startswith("run_") else 1), session


async def said(api: Running, session: str) -> int:
    page = await api.http.get(f"/v1/sessions/{session}/events?limit=200&types=message.posted")
    return len(page.json()["events"])


# --- layers -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(nats: Broker, url: str, folder: Path, account: str, **given: Any) -> AsyncIterator[Running]:
    running = Running(api_settings(url, folder, account, **given), account, nats)
    await running.start()
    try:
        yield running
    finally:
        await running.close()


async def test_each_layer_is_over_the_one_before(nats: Broker, nats_url: str, account: str, tmp_path: Path) -> None:
    folder = tmp_path / "agents"
    folder.mkdir()
    (folder / "careful.toml").write_text('model = "demo"\ninstructions = "x"\n[policy]\non_busy = "reject"\n')
    server = {"preset": "thread", "on_busy": "queue", "authors": "mixed", "delete": {"mode": "erase"}}
    async with serving(nats, nats_url, tmp_path, account, policy=server, agents_dir=folder) as api:
        for session, fields, message, result in (
            ("server", {}, {}, ("queued", "2")),
            ("agent", {"agent": "careful"}, {}, ("run_active", "1")),
            ("session", {"agent": "careful", "policy": {"on_busy": "steer"}}, {}, ("steered", "1")),
            ("preset", {"policy": {"preset": "strict"}}, {}, ("run_active", "1")),
            ("message", {"policy": {"preset": "strict"}}, {"on_busy": "parallel"}, ("started", "2")),
        ):
            await api.open(session, **fields)
            await running(api, session)
            assert await post(api, session, message) == result, session
        # What is in force for a run was pinned when it was asked for.
        folded = await api.hand.sessions.load(api.hand.key("server"))
        assert folded.runs[0].policy.recovery == "fail" and folded.runs[0].policy.delete_mode == "erase"


async def test_a_session_shows_its_policy_as_given_and_as_in_force(
    nats: Broker, nats_url: str, account: str, tmp_path: Path
) -> None:
    server = {"on_busy": "queue", "starters": ["user:ann", "user:bob"]}
    async with serving(nats, nats_url, tmp_path, account, policy=server) as api:
        stop, ready = asyncio.Event(), asyncio.Event()
        projecting = asyncio.create_task(serve_projector(api.settings, stop=stop, ready=ready.set))
        await ready.wait()
        given = {"clock": "wall", "history": {"tools": "none"}}
        await api.open("s1", policy=given)
        shown = (await api.http.get("/v1/sessions/s1")).json()
        assert shown["policy"] == given
        assert shown["effective_policy"] == {
            "on_busy": "queue",
            "message_on_busy": "allow",
            "on_message": {"question": "answer", "approval": "reject", "parked": "reject"},
            "authors": "mixed",
            "starters": ["user:ann", "user:bob"],
            "recovery": "resume",
            "on_disconnect": "detach",
            "history": {"turns": "all", "tools": "none", "window": "fit", "compaction": "off"},
            "empty": "fail",
            "clock": "wall",
            "titles": "derived_then_agent",
            "delete": {"mode": "erase", "active": "reject"},
        }
        for preset in PRESETS:
            changed = await api.http.patch("/v1/sessions/s1", json={"policy": {"preset": preset}})
            shown = (await api.http.get("/v1/sessions/s1", params={"after": changed.json()["seq"]})).json()
            assert shown["policy"] == {"preset": preset}
            again = await api.http.patch("/v1/sessions/s1", json={"policy": shown["effective_policy"]})
            assert again.status_code == 200, "what is in force may be given"
            same = (await api.http.get("/v1/sessions/s1", params={"after": again.json()["seq"]})).json()
            assert same["effective_policy"] == shown["effective_policy"]
        stop.set()
        await projecting


async def test_a_run_of_its_own_has_a_policy_too(api: Running) -> None:
    posted = await api.post("/v1/runs", {"input": "hello", "policy": {"preset": "memory", "clock": "wall"}})
    session, _, n = posted.json()["run"].rpartition(".")
    folded = await api.hand.sessions.load(api.hand.key(session))
    run = folded.run(int(n))
    assert run and run.policy.on_disconnect == "fail" and run.policy.clock == "wall"
    kept = await api.post("/v1/runs", {"input": "hello", "session": "s1", "policy": {"on_busy": "queue"}})
    assert kept.status_code == 202
    assert (await api.say("s1"))["routed"] == "queued"


async def test_a_session_may_not_let_messages_choose(api: Running) -> None:
    await api.open("s1", policy={"message_on_busy": "refuse", "on_busy": "queue"})
    await api.say("s1")
    refused = await api.post("/v1/sessions/s1/messages", {"content": "x", "on_busy": "parallel"})
    assert (refused.status_code, refused.json()["field"]) == (422, "on_busy")
    assert (await api.say("s1"))["routed"] == "queued"


async def test_who_may_not_start_a_turn_is_stored_and_starts_none(api: Running) -> None:
    await api.open("s1", policy={"starters": "people"})
    assert (await api.say("s1"))["routed"] == "none"
    assert (await api.say("s1", author="user:ann"))["routed"] == "started"


async def test_what_a_model_would_get_is_by_the_policy_in_force(api: Running) -> None:
    for session, policy, kinds in (
        ("whole", {}, ["user", "assistant", "tool", "assistant"]),
        ("pairs", {"preset": "memory"}, ["user", "assistant"]),
        ("bare", {"history": {"tools": "none"}}, ["user", "assistant"]),
    ):
        await api.open(session, policy=policy)
        await running(api, session)
        await api.hand.ask(f"{session}.1", {"prompt": "Which one?"})
        await api.post(f"/v1/runs/{session}.1/input", {"answer": "left"})
        await api.hand.resume(f"{session}.1")
        await api.hand.end(f"{session}.1", "the left one")
        page = (await api.http.get(f"/v1/sessions/{session}/history?as=model")).json()
        assert [message["type"] for message in page["messages"]] == kinds, session


# --- refused by name ----------------------------------------------------------------------------------------------

NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"preset": "relaxed"}, "policy.preset"),
    ({"on_busy": "never"}, "policy.on_busy"),
    ({"mood": "good"}, "policy.mood"),
    ({"on_message": {"question": "ignore"}}, "policy.on_message.question"),
    ({"on_message": "answer"}, "policy.on_message"),
    ({"history": {"turns": 3}}, "policy.history.turns"),
    ({"starters": []}, "policy.starters"),
    ({"starters": [7]}, "policy.starters"),
    ({"delete": {"mode": ["erase"]}}, "policy.delete.mode"),
]


@pytest.mark.parametrize(("policy", "field"), NONSENSE)
async def test_what_is_no_policy_is_named_at_every_entrance(api: Running, policy: dict[str, Any], field: str) -> None:
    await api.open("s1")
    http, nats = OverHttp(api.url), OverNats(api.broker, api.account)
    for speaker in (http, nats):
        for operation, fields in (
            ("open_session", {"id": "s2"}),
            ("open_session", {"id": "s1"}),
            ("update_session", {"session": "s1"}),
            ("start_run", {"input": "x"}),
        ):
            answer = await speaker.ask(operation, policy=policy, **fields)
            assert (answer.status, answer.body["code"], answer.body["field"]) == (422, "invalid", field), operation
    await http.close()


# --- the server's -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "field"), NONSENSE[:-4])
def test_a_bad_policy_of_the_server_is_named_at_its_start(tmp_path: Path, policy: dict[str, Any], field: str) -> None:
    settings = api_settings("nats://127.0.0.1:1", tmp_path, "default", policy=policy)
    with pytest.raises(SettingsError, match=field):
        specs_of(settings, agents_of(settings))


def test_a_bad_policy_of_an_agent_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('model = "demo"\n[policy]\non_busy = "never"\n')
    settings = api_settings("nats://127.0.0.1:1", tmp_path, "default", agents_dir=tmp_path)
    with pytest.raises(agents.AgentsError, match=r"policy\.on_busy"):
        specs_of(settings, agents_of(settings))


def test_the_policy_of_the_server_may_come_from_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNSTREAM_POLICY__PRESET", "thread")
    monkeypatch.setenv("TURNSTREAM_POLICY__DELETE__MODE", "erase")
    monkeypatch.setenv("TURNSTREAM_POLICY__STARTERS", "user:ann, user:bob")
    settings = api_settings("nats://127.0.0.1:1", tmp_path, "default")
    policy = specs_of(settings, agents_of(settings))["default"].policy
    assert policy.preset == "thread" and policy.delete and policy.delete.mode == "erase"
    assert policy.starters == ("user:ann", "user:bob")


def test_the_readme_shows_every_preset() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown = readme.split("<!-- policies -->")[1].split("<!-- /policies -->")[0].strip()
    assert shown == _table(), "put this between the markers:\n" + _table()


def _table() -> str:
    rows = [f"| field | {' | '.join(f'`{preset}`' for preset in PRESETS)} | what |", "|---" * (len(PRESETS) + 2) + "|"]
    for name in CHOICES:
        if name != "preset":
            values = [getattr(policy, name.replace(".", "_")) for policy in PRESETS.values()]
            rows.append(f"| `{name}` | {' | '.join(values)} | {ABOUT[name]} |")
    return "\n".join(rows)


def test_every_field_of_a_policy_is_described() -> None:
    (meta,) = get_args(Policy)[1:]
    described = meta.extra_json_schema["properties"]
    names = {f"{name}.{inner}" for name in described for inner in described[name].get("properties", ())}
    names |= {name for name in described if "properties" not in described[name]}
    assert names == set(CHOICES) == {*ABOUT, "preset"}
