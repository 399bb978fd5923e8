"""The title that an agent gives its session: beside the turns, once, and never over a person's."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from tests.core.scenario import event_of, posted, record_as, said, started
from tests.support.driving import World
from tests.support.stage import Stage
from tests.support.waiting import eventually

from turnstream.session.commands import Act, PostMessage, UpdateSession
from turnstream.session.events import (
    NO_POLICY,
    Attachment,
    MessageWithdrawn,
    Opens,
    Parent,
    Part,
    PolicyData,
    RunEnded,
    RunStarted,
    SessionUpdated,
    Title,
    ToolCall,
    Usage,
)
from turnstream.session.state import Session
from turnstream_runner import titles
from turnstream_runner.drive import Outcome
from turnstream_runner.models.port import TITLING, Item, ModelError, ModelRequest, Reply

USED = Usage(input_tokens=7, output_tokens=2)


class Titler:
    """Answers turns at once; a title when it is let go. `asked`: what it was told of the session, each time."""

    def __init__(self, title: str = "Tea for two", *, held: bool = False, error: str = "") -> None:
        self.asked: list[str] = []
        self.reached = asyncio.Event()
        self.held = asyncio.Event()
        if not held:
            self.held.set()
        self._title = title
        self._error = error

    async def __call__(self, request: ModelRequest) -> AsyncGenerator[Item, None]:
        if request.instructions != TITLING:
            yield Reply(text="an answer")
            return
        assert not request.tools
        self.asked.append(request.messages[0].text)
        self.reached.set()
        await self.held.wait()
        if self._error:
            raise ModelError(self._error)
        yield Reply(text=self._title, usage=USED)


def world(titler: Any, **policy: Any) -> World:
    here = World(titler)
    here.spec = msgspec.structs.replace(here.spec, policy=PolicyData(**policy) if policy else NO_POLICY)
    return here


async def updates(here: World, session: str = "s1") -> list[SessionUpdated]:
    return [fact for fact in await here.facts(session) if isinstance(fact, SessionUpdated)]


async def driven(here: World, work: int, session: str = "s1") -> None:
    assert await here.drive(session, work=work).outcome() is Outcome.DONE


async def test_the_agent_names_its_session_and_what_that_used_is_recorded() -> None:
    here = world(titler := Titler())
    await here.post("How do I make tea?")
    await driven(here, 1)
    assert await updates(here) == [SessionUpdated(title=Title(text="Tea for two", source="agent"), usage=USED)]
    assert titler.asked == ["user: How do I make tea?\nassistant: an answer"]
    reads = here.log.reads
    await here.post("And coffee?")
    await driven(here, 2)
    assert len(titler.asked) == 1, "once"
    assert here.log.reads - reads <= 2


async def test_s33_a57_what_a_person_says_meanwhile_stays() -> None:
    here = world(titler := Titler(held=True))
    await here.post()
    running = here.drive()
    await titler.reached.wait()
    await here.do(UpdateSession(origin=here.origin(), title=Title(text="Mine", source="user")))
    titler.held.set()
    assert await running.outcome() is Outcome.DONE
    assert [update.title for update in await updates(here)] == [Title(text="Mine", source="user")]
    await here.post()
    await driven(here, 2)
    assert len(titler.asked) == 1


async def test_a_message_that_comes_while_a_title_is_being_found_starts_at_once() -> None:
    here = world(titler := Titler(held=True))
    await here.post()
    first = here.drive(work=1)
    await titler.reached.wait()
    await here.post("and this?")
    here.may_step_aside = False
    assert await here.drive(work=2).outcome() is Outcome.BUSY, "the turn is done, and the title is left to the other"
    starts = [fact for fact in await here.facts() if isinstance(fact, RunStarted)]
    assert [(start.run, start.wake.work) for start in starts] == [(1, 1), (2, 2)]
    assert not first.task.done()
    titler.held.set()
    assert await first.outcome() is Outcome.DONE
    assert [update.title for update in await updates(here)] == [Title(text="Tea for two", source="agent")]
    assert len(titler.asked) == 1


async def test_a_title_that_cannot_be_had_is_a_fact_and_does_not_come_back() -> None:
    here = world(titler := Titler(error="503"))
    await here.post()
    await driven(here, 1)
    assert await updates(here) == [SessionUpdated(untitled=True)]
    await here.post()
    await driven(here, 2)
    assert len(titler.asked) == 1


async def test_a_call_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(titles, "PATIENCE", 0.01)
    here = world(Titler(held=True))
    await here.post()
    await driven(here, 1)
    assert await updates(here) == [SessionUpdated(untitled=True)]


async def test_a_runner_that_dies_over_it_leaves_it_to_the_next() -> None:
    here = world(titler := Titler(held=True))
    await here.post()
    running = here.drive()
    await titler.reached.wait()
    await running.die()
    assert not await updates(here)
    titler.held.set()
    assert await here.drive(delivery=2).outcome() is Outcome.DONE
    assert len(await updates(here)) == 1


async def test_a_runner_that_shuts_down_gives_it_back() -> None:
    here = world(titler := Titler(held=True))
    await here.post()
    running = here.drive()
    await titler.reached.wait()
    running.drive.drain()
    assert await running.outcome() is Outcome.HANDED_BACK
    assert not await updates(here)


@pytest.mark.parametrize("source", ["derived", "client", "none"])
async def test_no_title_is_looked_for_where_the_policy_says_else(source: Any) -> None:
    here = world(titler := Titler(), titles=source)
    await here.post()
    await driven(here, 1)
    assert not titler.asked


@pytest.mark.parametrize(
    "opens",
    [
        Opens(one_shot=True),
        Opens(title=Title(text="A ticket", source="client")),
        Opens(parent=Parent(session="p", run=1, call_id="c", k=1)),
    ],
)
async def test_no_title_is_looked_for_where_none_is_wanted(opens: Opens) -> None:
    here = world(titler := Titler())
    command = PostMessage(
        origin=here.origin(),
        message_id="m",
        author="user:ann",
        content=(Part(text="hello"),),
        specs={"default": here.spec},
        opens=opens,
    )
    await here.do(command)
    await driven(here, 1)
    assert not titler.asked


async def test_a_turn_that_fails_and_an_action_give_no_title_but_the_next_turn_does() -> None:
    titler = Titler()

    async def script(request: ModelRequest) -> AsyncGenerator[Item, None]:
        if request.messages[-1].text == "hopeless":
            raise ModelError("no")
        async for item in titler(request):
            yield item

    here = world(script)
    await here.post("hopeless")
    await driven(here, 1)
    specs, tools = {"default": here.spec}, {"default": {"fly": ""}}
    action = ToolCall(id="action", name="fly", arguments="{}")
    await here.do(Act(origin=here.origin(), action=action, author="user:ann", specs=specs, tools=tools))
    await driven(here, 2)
    assert [fact.status for fact in await here.facts() if isinstance(fact, RunEnded)] == ["failed", "completed"]
    assert not titler.asked
    await here.post("hopeful")
    await driven(here, 3)
    (told,) = titler.asked
    assert told.startswith("user: hopeless\n") and "user: hopeful" in told


async def test_only_what_turns_took_is_told_and_attachments_by_name() -> None:
    photo = Attachment(name="tea.png", media_type="image/png", size=3, sha256="00", blob="b")
    session, recorded = Session(key=event_of(posted("m1", 1), 0).key), []
    facts = (
        posted("m0", 1, "taken back"),
        MessageWithdrawn(message_id="m0", by="user:ann", run=1),
        msgspec.structs.replace(posted("m1", 2), content=said(""), attachments=(photo,)),
        started(2, 1, "m1"),
        RunEnded(run=2, attempt=1, status="completed", content="x" * 600),
    )
    for n, fact in enumerate(facts):
        recorded.append(record_as(session, event_of(fact, n)))
    assert titles.digest_of(recorded) == f"user: [attached: tea.png]\nassistant: {'x' * 500}"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Tea", "Tea"),
        ('  "Tea for two"\nbecause', "Tea for two"),
        ("one two three four five six seven eight nine", "one two three four five six seven eight"),
        (" ".join(["twelveletters"] * 8), " ".join(["twelveletters"] * 4)),
        ("x" * 100, "x" * 64),
        ("a\x00b\u202ec\ud800", "a\ufffdb c\ufffd"),
        ("\n\n", None),
        ("***", None),
    ],
)
def test_a_title_is_one_line_of_at_most_eight_words(text: str, title: str | None) -> None:
    assert titles.title_of(text) == title


async def test_titles_take_no_runs_slot_and_as_many_as_may_be_are_looked_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slot: turns of the session and of others go on while titles are being found."""
    monkeypatch.setattr("turnstream_runner.runner.ASIDE_MAX", 2)
    monkeypatch.setattr("turnstream_runner.runner.MOMENT", 0.1)
    titler = Titler(held=True)
    await stage.actor(titler, slots=1)
    names = ("s1", "s2", "s3")
    for session in names:
        await stage.say("hello", session, titles="derived_then_agent", on_busy="queue")
        await stage.until("run.ended", session)
    await eventually(lambda: len(titler.asked) == 2)
    await stage.say("more", "s1", on_busy="queue")
    await stage.until("run.ended", "s1", count=2)
    assert len(titler.asked) == 2
    titler.held.set()
    for session in names:
        await stage.until("session.updated", session)
    await stage.idle()
    assert len(titler.asked) == 3
