"""How much of a session a model is shown: never half of anything, always the newest, and the same beginning each time
until there is no room."""

from collections.abc import Iterable, Iterator

import msgspec
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st
from tests.core.scenario import (
    KEY,
    ended,
    event_of,
    notice,
    posted,
    queued,
    record_as,
    replied,
    requested,
    returned,
    spec,
    started,
)
from tests.core.test_history import ASKING, conversations, log, whole

from turnstream.session import history, tokens, window
from turnstream.session.events import (
    Fact,
    MessagePosted,
    ModelReplied,
    Part,
    PlanChanged,
    PlanItem,
    Recorded,
    RunEnded,
    RunStarted,
    Usage,
)
from turnstream.session.fold import evolve, fold
from turnstream.session.history import View
from turnstream.session.messages import AssistantMessage, Message, ToolMessage, UserMessage
from turnstream.session.policy import PRESETS, STRICT, Policy
from turnstream.session.state import Session
from turnstream.session.window import BYTES, Budget

MODEL = "demo"


def read_only_what_is_needed(
    session: Session, events: Iterable[Recorded], run: int | None, policy: Policy, budget: Budget
) -> list[Recorded]:
    wanted = window.needs(session, session.run(run) if run is not None else None, policy, budget)
    return [one for one in events if one.seq >= wanted.since or one.seq in wanted.beside]


class Talk:
    """A session as a runner carries it out: what each model call was shown is stored with what came of it."""

    def __init__(self, budget: int, *, fixed: int = 0, policy: Policy = STRICT, share: float | None = None) -> None:
        self.budget = Budget(MODEL, budget, fixed)
        self.policy = policy
        self.share = share
        """What the provider counts of what we estimate; None: it counts nothing."""
        self.session = Session(key=KEY)
        self.events: list[Recorded] = []
        self.views: list[View] = []
        self.read: list[int] = []
        """How many events were read for each call."""

    def say(self, *facts: Fact) -> None:
        for fact in facts:
            event = event_of(fact, len(self.events))
            recorded = record_as(self.session, event, size=len(msgspec.json.encode(event.data)))
            self.events.append(recorded)
            self.session = evolve(self.session, recorded)

    def ask(self, run: int) -> View:
        """What the model is shown now, read as a runner reads it and by whoever reads everything."""
        policy, budget = self.policy, self.budget
        events = read_only_what_is_needed(self.session, self.events, run, policy, budget)
        view = history.build(self.session, events, run, policy, budget)
        assert view == history.build(self.session, self.events, run, policy, budget)
        assert whole(list(view.messages))
        self.views.append(view)
        self.read.append(len(events))
        return view

    def turn(self, n: int, text: str = "hello", answer: str = "hi", *results: str) -> View:
        """A turn that has a tool called once for each of the results; the view is that of its first call."""
        self.say(posted(f"m{n}", n, text), started(n, 1, f"m{n}"))
        first = view = self.ask(n)
        for step, result in enumerate(results, 1):
            self.say(self.counted(replied(n, step, f"c{n}-{step}"), view), returned(n, f"c{n}-{step}", output=result))
            view = self.ask(n)
        self.say(self.counted(ended(n, content=answer), view))
        return first

    def counted(self, fact: Fact, view: View) -> Fact:
        used = Usage(input_tokens=round(view.window.tokens * (self.share or 0)))
        if isinstance(fact, RunEnded):
            return msgspec.structs.replace(fact, window=view.window, step_usage=used)
        return msgspec.structs.replace(fact, window=view.window, usage=used)

    @property
    def cuts(self) -> int:
        """How often a prompt did not begin with all of the one before it."""
        pairs = zip(self.views, self.views[1:], strict=False)
        return sum(later.messages[: len(before.messages)] != before.messages for before, later in pairs)


def texts(view: View) -> list[str]:
    return [message.text for message in view.messages]


# -- what is left out -------------------------------------------------------------------------------------------------


def test_s50_what_fits_is_shown_whole() -> None:
    talk = Talk(1000)
    for n in range(1, 11):
        talk.turn(n)
    assert len(talk.views[-1].messages) == 19
    assert (talk.cuts, talk.views[-1].window.since, talk.views[-1].since) == (0, 0, 0)


@pytest.mark.parametrize("share", [None, 0.7, 1.0, 1.4])
def test_s50_over_fifty_turns_a_prompt_begins_as_the_one_before_but_for_a_few(share: float | None) -> None:
    """Each turn is a tenth of the budget; half of it is free after a window has begun anew."""
    talk = Talk(2000, fixed=100, share=share)
    for n in range(1, 51):
        talk.turn(n, f"question {n} " + "x" * 280, f"answer {n} " + "y" * 280)
    size = (share or 1) * 206
    assert talk.cuts <= 50 * size / 1000 * 1.3
    assert talk.cuts >= 3
    for view in talk.views:
        assert view.tokens <= 2000
    since = [view.window.since for view in talk.views]
    assert since == sorted(since), "a window never goes back"
    last = texts(talk.views[-1])
    assert last[-1].startswith("question 50")
    assert [text.split()[1] for text in last[-3::-2]] == [str(n) for n in range(49, 49 - len(last) // 2, -1)]


def test_s50_a_window_that_begins_anew_leaves_half_of_the_budget_free() -> None:
    talk = Talk(2000)
    for n in range(1, 60):
        before = talk.views[-1].window.since if talk.views else 0
        view = talk.turn(n, "x" * 290, "y" * 290)
        if view.window.since != before:
            assert view.tokens <= 1000
            return
    raise AssertionError("it never did")


def test_s50_memory_and_thread_show_everything_however_much_it_is() -> None:
    for name, preset in PRESETS.items():
        talk = Talk(300, policy=preset)
        for n in range(1, 31):
            talk.turn(n, "x" * 60, "y" * 60)
        shown = len(talk.views[-1].messages)
        assert shown == 59 if preset.history_window == "all" else shown < 20, name
        assert talk.views[-1].fits


def test_a33_within_a_turn_whole_exchanges_go_and_what_was_said_to_it_stays() -> None:
    talk = Talk(1500)
    talk.turn(1, "before", "it")
    talk.turn(2, "find it", "found", *(f"result {n} " + "z" * 500 for n in range(1, 21)))
    for view in talk.views[1:]:
        assert UserMessage("find it") in view.messages
        assert view.fits and view.tokens <= 1500
    last = talk.views[-1]
    results = [message for message in last.messages if isinstance(message, ToolMessage)]
    assert 0 < len(results) < 20
    assert results[-1].text.startswith("result 20")
    assert len(last.replies) == len(results)
    assert talk.cuts <= 10, "more than one exchange goes at once"
    after = talk.turn(3, "and then?", "nothing")
    assert after.messages[-1] == UserMessage("and then?")
    assert AssistantMessage("found") in after.messages
    assert UserMessage("find it") in after.messages


@pytest.mark.parametrize("size", [299, 300, 301, 302])
def test_a_message_that_does_not_fit_by_itself_is_too_much(size: int) -> None:
    talk = Talk(100 + tokens.MESSAGE)
    talk.turn(1)
    talk.turn(2)
    view = talk.turn(3, "x" * size)
    assert view.fits == (size <= 300)
    assert view.messages[-1] == UserMessage("x" * size)
    if view.fits:
        assert view.messages == (UserMessage("x" * size),)


def test_the_checklist_goes_before_the_message_does() -> None:
    talk = Talk(120)
    plan = PlanChanged(run=1, items=(PlanItem(id="1", text="p" * 200),))
    talk.say(posted("m1", 1), started(1, 1, "m1"), plan, ended(1))
    talk.say(posted("m2", 2, "x" * 120), started(2, 1, "m2"))
    assert talk.ask(2).messages == (UserMessage("x" * 120),)


# -- what is known ----------------------------------------------------------------------------------------------------


def test_what_the_provider_has_counted_counts() -> None:
    """A window lasts so much longer as tokens are fewer than estimated, and so much less as they are more."""
    lasts: list[int] = []
    for share in (0.5, 1.0, 1.5):
        talk = Talk(2000, share=share)
        for n in range(1, 100):
            if talk.turn(n, "x" * 300, "y" * 300).window.since:
                lasts.append(n)
                break
    assert lasts[0] > 1.7 * lasts[1] and lasts[2] < lasts[1], lasts


def test_a_count_that_cannot_be_is_not_believed() -> None:
    talk = Talk(2000, share=0.001)
    for n in range(1, 101):
        view = talk.turn(n, "x" * 300, "y" * 300)
    assert view.window.since, "it counts a quarter at least"


def test_each_model_has_its_own_window() -> None:
    small, large = Budget("small", 400), Budget("large", 4000)
    talk = Talk(0)
    for n in range(1, 41):
        talk.budget = small if n % 2 else large
        by = msgspec.structs.replace(spec(), model=talk.budget.model)
        talk.say(posted(f"m{n}", n, "x" * 100, by=by), started(n, 1, f"m{n}"))
        view = talk.ask(n)
        talk.say(talk.counted(ended(n, content="y" * 100), view))
        assert view.tokens <= talk.budget.tokens
    assert [len(view.messages) for view in talk.views[-2:]] == [pytest.approx(7, abs=6), 79]
    for views in (talk.views[::2], talk.views[1::2]):
        since = [view.window.since for view in views]
        assert since == sorted(since)


def test_a_model_that_takes_more_now_is_shown_more() -> None:
    talk = Talk(400)
    for n in range(1, 21):
        talk.turn(n, "x" * 100, "y" * 100)
    assert talk.views[-1].window.since
    talk.budget = Budget(MODEL, 10_000)
    assert len(talk.turn(21).messages) == 41


def test_of_a_long_session_only_so_much_is_read() -> None:
    """Its turns have few tokens and many bytes: reasoning, which nobody is shown."""
    budget = 2000
    talk = Talk(budget)
    for n in range(1, 101):
        talk.say(posted(f"m{n}", n), started(n, 1, f"m{n}"), ended(n, content="hi", reasoning="r" * 5000))
    talk.say(posted("m101", 101), started(101, 1, "m101"))
    view = talk.ask(101)
    size = sum(recorded.size for recorded in talk.events[-talk.read[-1] :])
    assert budget * BYTES / 3 < size <= budget * BYTES / 2
    assert len(view.messages) > 10


def test_a_window_is_read_from_where_it_begins() -> None:
    talk = Talk(2000)
    for n in range(1, 201):
        talk.turn(n, "x" * 100, "y" * 100)
    assert max(talk.read) < 120, "of 600 events"


# -- what is outside of it --------------------------------------------------------------------------------------------


def items(text: str) -> tuple[PlanItem, ...]:
    return (PlanItem(id="1", text=text),)


def test_the_checklist_is_there_however_old_it_is() -> None:
    talk = Talk(400)
    talk.say(posted("m1", 1), started(1, 1, "m1"), PlanChanged(run=1, items=items("paint")), ended(1))
    for n in range(2, 41):
        talk.turn(n, "x" * 100, "y" * 100)
    assert talk.read[-1] < 60
    plans = [[text for text in texts(view) if text.startswith("<plan_state>")] for view in talk.views]
    assert all(plan == ["<plan_state>\n- [pending] 1: paint\n</plan_state>"] for plan in plans)
    for view in talk.views:
        assert view.messages[-2].text.startswith("<plan_state>"), "behind everything that stays"


def test_a_run_that_changes_the_checklist_begins_its_prompts_as_before() -> None:
    talk = Talk(2000)
    talk.say(posted("m1", 1), started(1, 1, "m1"), PlanChanged(run=1, items=items("one")), ended(1))
    talk.say(posted("m2", 2), started(2, 1, "m2"))
    view = talk.ask(2)
    talk.say(talk.counted(replied(2, 1, "p"), view), PlanChanged(run=2, call_id="p", items=items("two")))
    talk.say(returned(2, "p", output="noted"))
    assert talk.ask(2).messages[: len(view.messages)] == view.messages
    talk.say(ended(2), posted("m3", 3), started(3, 1, "m3"))
    assert "1: two" in talk.ask(3).messages[-2].text


def test_who_spoke_first_is_known_when_it_is_not_shown_any_more() -> None:
    talk = Talk(400)
    talk.turn(1)
    talk.say(posted("m2", 2, author="user:bob"), started(2, 1, "m2"))
    talk.say(talk.counted(ended(2), talk.ask(2)))
    for n in range(3, 30):
        talk.turn(n, "x" * 100, "y" * 100)
    asked = [message for message in talk.views[-1].messages if isinstance(message, UserMessage)]
    assert all(message.text.startswith('<message from="user:ann">') for message in asked)


def test_a_turn_tried_again_is_read_from_its_message_on() -> None:
    talk = Talk(300)
    for n in range(1, 20):
        talk.turn(n, "x" * 100, "y" * 100)
    talk.say(posted("m20", 20, "find it"), started(20, 1, "m20"))
    talk.say(talk.counted(replied(20, 1, "a"), talk.ask(20)), returned(20, "a", output="A"), ended(20, "failed"))
    talk.say(requested(21, "m20", retry_of=20))
    talk.say(RunStarted(run=21, attempt=1, runner="r", wake=started(1).wake, trigger="retry", message_ids=("m20",)))
    view = talk.ask(21)
    assert [message.text for message in view.messages[-3:]] == ["find it", "", "A"]


def test_a_notice_that_waited_is_shown_by_a_turn_that_begins_its_window() -> None:
    talk = Talk(60)
    talk.turn(1, "x" * 60, "y" * 60)
    talk.say(notice("n1", "disk full"), queued("m2", 2, "so?"), started(2, 1, "m2"))
    assert texts(talk.ask(2)) == ['<notice from="user:ann">disk full</notice>', "so?"]


def test_a_run_that_waited_long_is_shown_when_it_has_ended() -> None:
    talk = Talk(300)
    talk.say(*ASKING[:1], started(1, 1, "m1"), *ASKING[2:3], *(fact for fact in ASKING[3:]))
    for n in range(2, 40):
        talk.turn(n, "x" * 100, "y" * 100)
    assert "hi" not in texts(talk.views[-1]), "it is old"
    talk.say(ended(1, "cancelled", content="never mind"))
    view = talk.turn(40, "and?", "well")
    assert {"hi", "never mind"} <= {*texts(view)}


# -- any log ----------------------------------------------------------------------------------------------------------


def calls_of(facts: tuple[Fact, ...], talk: Talk) -> Iterator[tuple[int, View]]:
    """Stores the facts one by one; what a model has said is stored with what it was shown."""
    for fact in facts:
        if isinstance(fact, ModelReplied | RunEnded) and talk.session.run(fact.run):
            view = talk.ask(fact.run)
            yield fact.run, view
            fact = talk.counted(fact, view)
        talk.say(fact)


SIZES = st.sampled_from([0, 30, 60, 90, 150, 300, 1000, 100_000])


@for_all(conversations(), SIZES, st.sampled_from(sorted(PRESETS)), st.sampled_from([None, 0.5, 1.5]))
def test_a33_whatever_the_budget_no_pair_is_parted_and_the_newest_message_is_there(
    facts: tuple[Fact, ...], size: int, preset: str, share: float | None
) -> None:
    talk = Talk(size, policy=PRESETS[preset], share=share)  # type: ignore[index]
    for run, view in calls_of(facts, talk):
        assert view.tokens <= size or not view.fits or talk.policy.history_window == "all"
        taken = {name for one in talk.events for name in named(one, run)}
        said = [one.event.data for one in talk.events if isinstance(one.event.data, MessagePosted)]
        for message in said:
            if message.message_id in taken and message.answers is None:
                assert any(message.content[0].text in unframed(shown) for shown in view.messages)
        assert {*view.replies} <= {one.seq for one in talk.events if isinstance(one.event.data, ModelReplied)}


def named(recorded: Recorded, run: int) -> tuple[str, ...]:
    data = recorded.event.data
    return getattr(data, "message_ids", ()) if getattr(data, "run", 0) == run else ()


def unframed(message: Message) -> str:
    return message.text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


@for_all(conversations(), SIZES, st.sampled_from(sorted(PRESETS)))
def test_a_window_is_a_function_of_the_session_and_its_events(facts: tuple[Fact, ...], size: int, preset: str) -> None:
    """What a runner reads is enough, and reading more changes nothing (`Talk.ask`); nor does asking again."""
    policy, budget = PRESETS[preset], Budget(MODEL, size)  # type: ignore[index]
    events = log(*facts)
    session = fold(Session(key=KEY), events)
    first = history.build(session, events, None, policy, budget)
    assert history.build(session, events, None, policy, budget) == first
    needed = read_only_what_is_needed(session, events, None, policy, budget)
    assert history.build(session, needed, None, policy, budget) == first


@for_all(conversations(), SIZES)
def test_a_prompt_begins_with_the_one_before_unless_its_window_begins_anew(facts: tuple[Fact, ...], size: int) -> None:
    talk = Talk(size)
    before: View | None = None
    for _, view in calls_of(facts, talk):
        if before and before.fits and same_window(before, view):
            assert view.messages[: len(before.messages)] == before.messages
        before = view


def same_window(one: View, other: View) -> bool:
    return (one.window.since, one.window.inner) == (other.window.since, other.window.inner)


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("The quick brown fox jumps over the lazy dog.", 10),
        ("敏捷的棕色狐狸跳过了懒狗", 12),
        ("Быстрая коричневая лиса прыгает через ленивую собаку", 7 * 3),
        ("👍🏽👩‍👩‍👧‍👦", 2 * 9),
    ],
)
def test_an_estimate_is_rather_too_much_and_not_far_too_much(text: str, least: int) -> None:
    """A token for each word and mark of English, each character of Chinese, three for a word of Russian, two for each
    code point of an emoji."""
    assert least <= tokens.of_text(text) <= 3 * least


@for_all(st.text(), st.text())
def test_an_estimate_grows_with_what_is_said(one: str, more: str) -> None:
    assert tokens.of_text(one + more) >= tokens.of_text(one)
    assert tokens.of_text(one + more) <= tokens.of_text(one) + tokens.of_text(more) + 2


def test_whatever_is_sent_is_counted() -> None:
    call = replied(1, 1, "a").tool_calls[0]
    bare = tokens.of_message(AssistantMessage("hi"))
    assert tokens.of_message(AssistantMessage("hi", (call,))) > bare > tokens.of_text("hi")
    assert tokens.of_role("be kind", [("look", "Looks.", "{}")]) > tokens.of_role("be kind", ())
    assert tokens.of_role("", ()) == 0
    long = MessagePosted(message_id="m", author="a", content=(Part(text="x" * 300),))
    assert tokens.of_message(UserMessage(long.content[0].text)) == 100 + tokens.MESSAGE


def test_room_is_left_for_the_answer() -> None:
    assert window.budget_of("m", 100_000).tokens == 100_000 - window.RESERVE
    assert window.budget_of("m", 8_000).tokens == 6_000
    assert window.budget_of("m", 8_000, answer=7_000).tokens == 1_000
    assert window.budget_of("m", 8_000, answer=9_000).tokens == 0
