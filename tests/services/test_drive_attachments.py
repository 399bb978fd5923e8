"""What a run's model is shown of attachments: read once, the same in every turn, and never a reason to fail."""

import asyncio
import base64
from collections.abc import AsyncGenerator

from tests.support.driving import FakeBlobs, World, asks_once, call
from tests.support.providers import peer, strict
from tests.support.stage import Stage
from tests.support.waiting import eventually

from turnstream.agents import tool
from turnstream.broker.errors import BrokerTimeout
from turnstream.session.attachments import SHOWN_MAX, TEXT_MAX
from turnstream.session.commands import PostMessage
from turnstream.session.events import Attachment, Blob, Opens, Part, RunEnded
from turnstream.settings import ModelSettings
from turnstream.wire.attachments import Attachments
from turnstream.wire.blobs import Blobs
from turnstream_runner.drive import Outcome
from turnstream_runner.models.port import Image, Item, ModelRequest, Reply, Shown
from turnstream_runner.models.registry import Models

PNG = b"\x89PNG\r\n\x1a\n rest"


def attach(world: World, name: str, data: bytes, media_type: str = "text/plain") -> Attachment:
    blob = f"{world.key()}/attachments/{name}"
    world.blobs.there[blob] = data
    return Attachment(name=name, media_type=media_type, size=len(data), sha256="", blob=blob)


async def turn(world: World, *attachments: Attachment, text: str = "look", context: str = "") -> ModelRequest:
    """A whole turn; the last request to its model."""
    handled = await world.post(text, attachments=attachments, context=context)
    assert handled.recorded
    run = world.drive(work=handled.recorded.seq, cause=handled.recorded.seq)
    assert await run.outcome() is Outcome.DONE
    return world.models.requests[-1]


async def answer(request: ModelRequest) -> AsyncGenerator[Item, None]:
    yield Reply(text="seen")


async def test_texts_and_images_are_shown_and_everything_else_is_named() -> None:
    world = World(answer)
    request = await turn(
        world,
        attach(world, "a.txt", "Grüße".encode()),
        attach(world, "a.png", PNG, "image/png"),
        attach(world, "a.pdf", b"%PDF", "application/pdf"),
        attach(world, "b.txt", b"\xff\xfe\x00", "text/plain"),
        attach(world, "b.png", b"no image", "image/png"),
    )
    shown = (Shown(text="Grüße"), Shown(image=Image("image/png", PNG)), Shown(), Shown(), Shown())
    assert request.shown == shown
    assert world.blobs.there.keys() - set(world.blobs.gets) == {f"{world.key()}/attachments/a.pdf"}


async def test_a_later_turn_shows_the_same() -> None:
    world = World(answer)
    attached = (attach(world, "long.txt", b"x" * (TEXT_MAX + 9)), attach(world, "a.png", PNG, "image/png"))
    first = await turn(world, *attached)
    later = await turn(world, text="and now?")
    assert later.shown == first.shown and later.messages[: len(first.messages)] == first.messages
    text = first.shown[0].text
    assert text and text.endswith(f"[cut: 9 of {TEXT_MAX + 9} bytes left out]")


async def test_each_is_read_once_a_run() -> None:
    @tool(idempotent=True)
    def look() -> str:
        "Looks."
        return "seen"

    world = World(asks_once(call("look")), tools=[look])
    one = attach(world, "a.txt", b"hello")
    request = await turn(world, one)
    assert len(world.models.requests) == 2 and request.shown == (Shown(text="hello"),)
    assert world.blobs.gets == [one.blob]
    await turn(world, one)
    assert world.blobs.gets == [one.blob] * 2
    assert world.models.requests[-1].shown == (Shown(text="hello"),) * 2


async def test_bytes_that_are_lost_fail_no_turn() -> None:
    world = World(answer)
    one = attach(world, "a.txt", b"hello")
    world.blobs.there.clear()
    request = await turn(world, one)
    assert request.shown == (Shown(missing=True),)
    end = (await world.facts())[-1]
    assert isinstance(end, RunEnded) and end.status == "completed"


async def test_a_model_that_takes_no_images_is_told_their_names() -> None:
    world = World(answer)
    world.models.images = False
    request = await turn(world, attach(world, "a.png", PNG, "image/png"), attach(world, "a.txt", b"hello"))
    assert request.shown == (Shown(), Shown(text="hello"))
    assert world.blobs.gets == [f"{world.key()}/attachments/a.txt"]


async def test_a_prompt_holds_no_more_than_its_bound() -> None:
    world = World(answer)
    size = SHOWN_MAX // 4
    images = [attach(world, f"{n}.png", PNG.ljust(size, b"x"), "image/png") for n in range(6)]
    request = await turn(world, *images)
    assert [bool(shown.image) for shown in request.shown] == [False, False, True, True, True, True]
    assert len(world.blobs.gets) == 4


async def test_what_the_window_shows_is_there_in_its_turn_only() -> None:
    world = World(answer)
    first = await turn(world, context="page </window_context> 1")
    assert first.messages[0].text == "<window_context>page &lt;/window_context&gt; 1</window_context>"
    later = await turn(world, text="and now?")
    assert "page" not in str(later.messages)


async def test_a_provider_gets_what_was_put_the_same_in_every_turn(stage: Stage) -> None:
    """From the object store to the wire."""
    blobs = Blobs(stage.broker)
    attachments = Attachments(stage.broker, blobs)
    key = stage.key("s1")
    png, _ = await attachments.put(key, "Übersicht 🌍.png", "image/png", PNG)
    notes, _ = await attachments.put(key, "notes.txt", "text/plain", b"x" * 300_000)
    lost, _ = await attachments.put(key, "lost.txt", "text/plain", b"lost")
    await blobs.erase(key, frozenset({png.blob, notes.blob}))
    async with peer(strict) as provider:
        local = ModelSettings(provider="openai", model="m", base_url=provider.base_url, context=200_000)
        models = Models({"local": local})
        await stage.actor(models=models, model="local")
        for text, attached in (("look", (png, notes, lost)), ("and now?", ())):
            message = PostMessage(
                origin=stage.origin(),
                message_id=text[:3],
                author="user:ann",
                content=(Part(text=text),),
                attachments=attached,
                specs=stage.specs,
                opens=Opens(),
            )
            handled = await stage.do(message)
            await stage.until("run.ended", count=handled.session.last_run)
        await models.close()
        first, second = [exchange.body["messages"] for exchange in provider.seen][:2]
    assert [end.status for end in await stage.found(RunEnded)] == ["completed", "completed"]
    named, image, texts = first[0]["content"]
    assert named["text"].endswith('name="Übersicht 🌍.png" type="image/png" size="13"/>')
    assert image["image_url"]["url"] == f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert "x" * TEXT_MAX + "\n[cut: " in texts["text"]
    assert texts["text"].endswith('<attachment name="lost.txt" type="text/plain" size="4" missing="true"/>')
    assert second[: len(first)] == first and second[-1]["content"] == "and now?"


class Away(FakeBlobs):
    """A store that is away for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.tries = 0
        self.back = asyncio.Event()

    async def get(self, blob: Blob) -> bytes:
        self.tries += 1
        if not self.back.is_set():
            raise BrokerTimeout(blob.name, "away")
        return await super().get(blob)


async def test_a_store_that_is_away_is_waited_for() -> None:
    world = World(answer)
    world.blobs = store = Away()
    one = attach(world, "a.txt", b"hello")
    asking = asyncio.create_task(turn(world, one))
    await eventually(lambda: store.tries > 1)
    store.back.set()
    assert (await asking).shown == (Shown(text="hello"),)
