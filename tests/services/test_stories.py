"""What the events of a session tell, told on from call to call: what a model is shown does not say that it was."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.scenario import KEY, opened, posted, started
from tests.core.test_history import conversations, log
from tests.core.test_window import MODEL, SIZES

from turnstream.ids import SessionKey
from turnstream.session import history, window
from turnstream.session.events import Fact, Recorded
from turnstream.session.fold import fold
from turnstream.session.policy import PRESETS, STRICT
from turnstream.session.state import Session
from turnstream.session.window import Budget
from turnstream_runner.stories import Stories


def shown(session: Session, events: list[Recorded], preset: str, size: int, stories: Stories | None) -> history.View:
    policy, budget = PRESETS[preset], Budget(MODEL, size)  # type: ignore[index]
    since = window.needs(session, None, policy, budget).since
    story = stories.tell(session, events, policy, since) if stories else None
    return history.build(session, events, None, policy, budget, story)


@settings(max_examples=150, deadline=None)
@given(conversations(), SIZES, st.sampled_from(sorted(PRESETS)), st.data())
def test_what_is_told_on_is_as_if_told_anew(
    facts: tuple[Fact, ...], size: int, preset: str, data: st.DataObject
) -> None:
    events = log(*facts)
    stories = Stories()
    upto = 0
    while upto < len(events):
        upto += data.draw(st.integers(1, 4))
        session = fold(Session(key=KEY), events[:upto])
        told = shown(session, events[:upto], preset, size, stories)
        assert told == shown(session, events[:upto], preset, size, None)


@settings(max_examples=50, deadline=None)
@given(conversations())
def test_another_log_of_the_same_session_is_told_anew(facts: tuple[Fact, ...]) -> None:
    """Its end was lost with a broker that does not sync, and it went on otherwise."""
    events = log(*facts)
    other = [
        msgspec.structs.replace(one, event=msgspec.structs.replace(one.event, id=f"other {one.seq}")) for one in events
    ]
    stories = Stories()
    session = fold(Session(key=KEY), events)
    before = stories.tell(session, events, STRICT, 0)
    assert stories.tell(session, other, STRICT, 0) is not before
    assert stories.tell(session, other, STRICT, 0) is stories.tell(session, other, STRICT, 0)


def test_what_was_told_longest_ago_is_told_anew() -> None:
    first = log_of()
    stories = Stories(budget=sum(recorded.size for recorded in first) * 2)
    told = {name: stories.tell(Session(key=SessionKey("default", name)), log_of(), STRICT, 0) for name in "abc"}
    assert stories.tell(Session(key=SessionKey("default", "c")), log_of(), STRICT, 0) is told["c"]
    assert stories.tell(Session(key=SessionKey("default", "a")), log_of(), STRICT, 0) is not told["a"]


def log_of() -> list[Recorded]:
    return log(opened(), posted("m1", 1), started(1, 1, "m1"))
