"""Whose title a session has, and when its agent is asked for one."""

from typing import Any

import msgspec
import pytest
from tests.core.scenario import (
    DRIVE,
    KEY,
    NOTHING,
    Given,
    act,
    acted,
    began,
    brief,
    deleted,
    drive,
    ended,
    entitle,
    given,
    opened,
    post,
    posted,
    rejected,
    reported,
    returned,
    spec,
    started,
    title,
    titled,
    update,
    with_origin,
)

from turnstream.session.events import Fact, PolicyData, SessionUpdated, Usage
from turnstream.session.plan import Entitle, Start, titling

DONE = (opened(), posted("m1", 1), started(1, 1, "m1"), ended(1))


def is_wanted(*facts: Fact, queue: str = "default") -> bool:
    planned = given(*facts).planned(drive(queue=queue))
    return [type(effect) for effect in planned] == [Entitle]


def test_it_is_looked_for_once_behind_the_first_turn() -> None:
    assert given(*DONE).planned() == (Entitle(key="default/s1:title", run=1, spec=spec()),)
    assert not is_wanted(*DONE[:2]) and not is_wanted(*DONE[:3])
    assert not is_wanted(*DONE, titled("Walls"))
    assert not is_wanted(*DONE, titled(None))
    assert is_wanted(*DONE, posted("m2", 2), started(2, 1, "m2"), ended(2))
    assert not is_wanted(*DONE, titled(None), posted("m2", 2), started(2, 1, "m2"), ended(2))


@pytest.mark.parametrize("status", ["failed", "cancelled", "timed_out"])
def test_a_turn_that_comes_to_nothing_has_none(status: Any) -> None:
    assert not is_wanted(*DONE[:3], ended(1, status))


def test_what_a_person_does_by_himself_has_none() -> None:
    assert not is_wanted(opened(), acted(1), began(1), returned(1, "action"), ended(1))


@pytest.mark.parametrize("titles", ["derived", "client", "none"])
def test_it_is_looked_for_where_the_policy_says_so(titles: Any) -> None:
    policy = PolicyData(titles=titles)
    assert not is_wanted(opened(), posted("m1", 1, by=spec(policy=policy)), started(1, 1, "m1"), ended(1))


def test_it_is_looked_for_in_sessions_that_people_look_at() -> None:
    assert not is_wanted(brief(), started(1, 1, "brief"), ended(1), reported())
    assert not is_wanted(opened(one_shot=True), *DONE[1:])
    assert titling(given(*DONE, deleted()).session, DRIVE) == ()


def test_it_stands_back_behind_what_waits_for_its_turn() -> None:
    scene = given(*DONE, posted("m2", 2))
    assert [type(effect) for effect in scene.planned()] == [Start]
    assert titling(scene.session, DRIVE) != (), "and goes on beside it"


def test_it_is_the_affair_of_who_looks_after_the_session() -> None:
    assert not is_wanted(*DONE, queue="gpu")
    gpu = (opened(), posted("m1", 1, by=spec("painter")), started(1, 1, "m1"), ended(1))
    assert is_wanted(*gpu, queue="gpu") and not is_wanted(*gpu)


@pytest.mark.parametrize("source", ["user", "agent", "client"])
def test_a_title_that_is_there_is_left_alone(source: Any) -> None:
    assert not is_wanted(*DONE, titled("Mine", source))


def test_s33_what_was_found_never_replaces_a_persons() -> None:
    given(*DONE).when(entitle("Walls")).then(titled("Walls"), wakes=())
    given(*DONE, titled("Mine", "user")).when(entitle("Walls")).then(NOTHING)
    given(*DONE, titled("Chat 7", "client")).when(entitle("Walls")).then(titled("Walls"))
    given(*DONE, titled("Ceilings")).when(entitle("Walls")).then(NOTHING)


def test_a57_a_persons_replaces_what_was_found() -> None:
    mine = update(title=title("Mine", "user"))
    outcome = given(*DONE, titled("Walls")).when(mine).then(titled("Mine", "user"))
    outcome.and_when(entitle("Walls")).then(NOTHING)
    given(*DONE, titled("Walls")).when(update(title=title("Chat 7", "client"))).then(NOTHING)


def test_that_there_is_none_is_a_fact_and_kept() -> None:
    for text in (None, ""):
        given(*DONE).when(entitle(text)).then(titled(None))
    given(*DONE, titled(None)).when(entitle("Walls")).then(NOTHING)
    given(*DONE, titled(None)).when(update(title=title("Mine", "user"))).then(titled("Mine", "user"))
    renamed = given(*DONE, titled(None), SessionUpdated(agent="poet")).session
    assert renamed.untitled and renamed.agent == "poet"


def test_what_the_search_used_is_told() -> None:
    usage = Usage(input_tokens=9, output_tokens=3)
    found = msgspec.structs.replace(entitle("Walls"), usage=usage)
    given(*DONE).when(found).then(SessionUpdated(title=title("Walls", "agent"), usage=usage))


def test_a_session_that_is_not_there_has_none() -> None:
    Given(given().session).when(entitle("Walls")).then(rejected("not_found"))
    given(*DONE, deleted()).when(entitle("Walls")).then(rejected("not_found"))
    given(*DONE).when(with_origin(entitle("Walls"), expected_seq=1)).then(rejected("session_moved"))


def test_it_is_no_turn() -> None:
    """A message does not wait for it, nor does an action, and nothing of it is remembered but whose it is."""
    assert given(*DONE).when(post("m2")).session.startable != ()
    assert given(*DONE).when(act()).session.startable != ()
    session = given(*DONE, titled("Walls")).session
    assert (session.key, session.title_source) == (KEY, "agent")
    assert "Walls" not in repr(session)
