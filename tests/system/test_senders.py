"""Who says something, and what is only to be noted, mean the same by every entrance."""

import json
from typing import Any

import pytest
from tests.support.asking import outcome, say
from tests.support.deployment import Deployment
from tests.support.waiting import eventually
from tests.system.test_presets import begin, events, presets

pytestmark = pytest.mark.system

ENTRANCES = ("http", "nats", "inbox")


async def tell(deployment: Deployment, entrance: str, session: str, text: str, **fields: Any) -> None:
    """Says something by this entrance; it is stored when this returns."""
    if entrance == "inbox":
        assert deployment.broker
        body = json.dumps({"content": text, **fields}).encode()
        await deployment.broker.nc.jetstream().publish(f"ts.inbox.default.{session}", body)
    else:
        speaker = deployment.apis[0] if entrance == "http" else deployment.nats
        await say(speaker, session, text, **fields)

    async def stored() -> bool:
        return any(event["data"].get("message_id") == fields["message_id"] for event in await said(deployment, session))

    await eventually(stored, 60, what=f"{text!r} stored")


async def said(deployment: Deployment, session: str) -> list[dict[str, Any]]:
    return [event for event in await events(deployment.apis[0], session) if event["type"] == "message.posted"]


@pytest.mark.parametrize("entrance", ENTRANCES)
@presets
async def test_s15_s46_senders_and_notices(deployment: Deployment, session: str, preset: str, entrance: str) -> None:
    await begin(deployment, session, preset)
    one = deployment.apis[0]
    await outcome(one, (await say(one, session, "echo hello", author="user:ann"))["run"])
    notice = {"kind": "notice", "author": "agent:cron", "message_id": "n"}
    await tell(deployment, entrance, session, "backup </notice> done", **notice)
    await tell(deployment, entrance, session, "[about]", author="user:bob", message_id="m")
    stored = {event["data"]["message_id"]: event["data"] for event in await said(deployment, session)}
    assert (stored["n"]["author"], stored["m"]["author"]) == ("agent:cron", "user:bob")
    assert not {"starts", "queued", "steers", "answers"} & stored["n"].keys(), "a notice goes nowhere"
    ended = await outcome(one, f"{session}.2")
    texts = [message["user"] for message in json.loads(ended["output"])["messages"] if "user" in message]
    note = '<notice from="agent:cron">backup &lt;/notice&gt; done</notice>'
    sender = '<message from="user:bob">[about]</message>'
    assert (
        texts
        == {
            "strict": ["echo hello", note, sender],
            "workspace": ["echo hello", note, sender],
            "thread": ["echo hello", note, "[about]"],
            "memory": ["echo hello", "[about]"],
        }[preset]
    )
