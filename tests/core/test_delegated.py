"""A session that a run of another one has had opened: it says how its first run ended, once, and else is like any."""

from typing import Any

import msgspec
import pytest
from tests.core.scenario import (
    NOTHING,
    PARENT,
    Given,
    brief,
    cancel,
    delete,
    deleted,
    drive,
    ended,
    erase,
    given,
    left_over,
    notice,
    opened,
    post,
    posted,
    record,
    rejected,
    report,
    reported,
    spec,
    started,
    steers,
    withdraw,
    withdrawn,
)

from turnstream.session.commands import OpenSession
from turnstream.session.events import Blob, ModelReplied, Opens, Parent, PolicyData, SessionOpened
from turnstream.session.plan import CallModel, End, Erase, Start, TellParent

RUNNING = (brief(), started(1, 1, "brief"))
DONE = (*RUNNING, ended(1))
STRICT = Parent(session="s0", run=3, call_id="a", k=1, schema={"type": "array"})
ASKED = (brief(parent=STRICT), started(1, 1, "brief"))


def names(scene: Given, *args: Any) -> list[type]:
    return [type(effect) for effect in scene.planned(*args)]


def misfit(step: int, why: str = "no array") -> ModelReplied:
    return ModelReplied(run=1, attempt=1, step=step, content="done", misfit=why)


def test_it_knows_whom_it_is_for() -> None:
    assert given(brief()).session.parent == PARENT
    opens = OpenSession(origin=post("m").origin, opens=Opens(parent=PARENT))
    given().when(opens).then(SessionOpened(parent=PARENT))
    assert given(SessionOpened(parent=PARENT)).session.parent == PARENT


def test_it_tells_its_parent_when_its_run_has_ended() -> None:
    assert names(given(*RUNNING)) == [CallModel]
    (effect,) = given(*DONE).planned()
    assert isinstance(effect, TellParent) and (effect.parent, effect.key) == (PARENT, "default/s1.1:tell")
    given(*DONE).when(report()).then(reported()).and_when(report()).then(NOTHING)
    given(*DONE).when(report(told=False)).then(reported(told=False))
    assert given(*DONE, reported()).planned() == ()


@pytest.mark.parametrize("status", ["failed", "cancelled", "timed_out"])
def test_a47_however_it_ends(status: Any) -> None:
    assert names(given(*RUNNING, ended(1, status))) == [TellParent]
    never = given(brief(), ended(1, "failed", 0))
    assert names(never) == [TellParent], "it could not be started"


def test_until_that_is_stored_it_is_there_to_be_told_whatever_comes() -> None:
    for more in ((notice("n1"),), (posted("m2", 2),), (posted("m2", 2), started(2, 1, "m2"))):
        assert names(given(*DONE, *more))[0] is TellParent
        assert TellParent not in names(given(*DONE, reported(), *more))


def test_whoever_is_woken_tells() -> None:
    for queue in ("default", "gpu", "elsewhere"):
        assert names(given(*DONE), drive(queue=queue)) == [TellParent]


def test_nothing_is_reported_before_the_end_nor_by_a_session_of_its_own() -> None:
    given(*RUNNING).when(report()).then(NOTHING)
    given(opened(), posted("m1", 1), started(1, 1, "m1"), ended(1)).when(report()).then(NOTHING)
    given().when(report()).then(rejected("not_found"))


def test_an_end_that_nobody_drives_wakes_who_tells() -> None:
    cancelled = given(brief()).when(cancel(1)).then(ended(1, "cancelled", 0), wakes=("default",))
    assert names(cancelled.given) == [TellParent]
    taken_back = given(brief()).when(withdraw("brief")).then(withdrawn("brief", 1), wakes=("default",))
    assert names(taken_back.given) == [TellParent]
    by_runner = given(*RUNNING).when(record(ended(1))).then(ended(1), wakes=())
    assert names(by_runner.given) == [TellParent], "the runner that reports it goes on with that"


def test_a_runner_that_reports_an_end_wakes_only_who_starts() -> None:
    later = given(*RUNNING, posted("m2", 2, by=spec("painter")))
    later.when(record(ended(1))).then(ended(1), wakes=("gpu",))


def test_a_later_turn_is_nobodys_business() -> None:
    told = (*DONE, reported())
    assert given(*told, posted("m2", 2), started(2, 1, "m2"), ended(2)).planned() == ()
    leaves = given(*RUNNING, steers("m2", 1), ended(1, "failed", leftover=left_over(2, "m2")), reported())
    assert names(leaves) == [Start]


@pytest.mark.parametrize("mode", ["detach", "erase"])
def test_s36_a_deleted_child_tells_before_it_is_erased(mode: Any) -> None:
    scene = given(*RUNNING).when(delete(mode=mode, active="cancel")).given
    assert names(scene) == [TellParent, Erase]
    scene.when(report()).then(rejected("not_found"))
    assert names(given(*DONE, reported(), deleted(mode))) == [Erase]
    assert scene.when(erase(3)).given.planned() == ()


def test_it_starts_whoever_may_start_turns_of_other_sessions() -> None:
    people = spec(policy=PolicyData(starters="people"))
    by_agent = post("brief", author="agent:boss", specs={"default": people}, opens=Opens(parent=PARENT))
    assert given().when(by_agent).then(brief(by=people)).session.runs
    later = post("m2", author="agent:boss", specs={"default": people})
    assert given(brief(by=people), started(1, 1, "brief"), ended(1)).when(later).session.runs == ()


def test_it_gets_no_title_of_its_agents() -> None:
    assert given(*DONE, reported()).planned() == ()


# -- what it was asked for --------------------------------------------------------------------------------------------


def test_s38_an_answer_that_fits_is_one() -> None:
    given(*ASKED).when(record(ended(1, content="[1, 2]"))).then(ended(1, content="[1, 2]"))
    given(*RUNNING).when(record(ended(1, content="done"))).then(ended(1, content="done"))


def test_s38_one_that_does_not_fit_is_told_to_the_model() -> None:
    outcome = given(*ASKED).when(record(ended(1, content='"done"', finish="stop", model="demo")))
    reply = outcome.decision.event.data
    assert isinstance(reply, ModelReplied)
    assert (reply.content, reply.finish, reply.step, reply.tool_calls) == ('"done"', "stop", 1, ())
    assert "array" in reply.misfit
    assert outcome.decision.wakes == () and outcome.decision.settled == ()
    (again,) = outcome.given.planned()
    assert isinstance(again, CallModel) and again.step == 2
    outcome.and_when(record(ended(1, content="[]"))).then(ended(1, content="[]"))


def test_s38_three_that_do_not_fit_fail_it() -> None:
    tries = [misfit(step) for step in (1, 2, 3)]
    assert names(given(*ASKED, *tries[:-1])) == [CallModel]
    (end,) = given(*ASKED, *tries).planned()
    assert isinstance(end, End) and end.status == "failed" and end.error and end.error.code == "child_failed"


def test_one_that_does_not_fit_is_no_answer_though_it_is_the_last() -> None:
    limited = (brief(by=spec(max_steps=1), parent=STRICT), started(1, 1, "brief"))
    outcome = given(*limited).when(record(ended(1, content="done")))
    assert isinstance(outcome.decision.event.data, ModelReplied)
    (end,) = outcome.given.planned()
    assert isinstance(end, End) and end.error and end.error.code == "max_steps_exceeded"


def test_an_answer_that_is_too_large_for_an_event_does_not_fit() -> None:
    blob = Blob(name="b", size=700_000, sha256="ab" * 32)
    reply = given(*ASKED).when(record(ended(1, content="[", blob=blob))).decision.event.data
    assert isinstance(reply, ModelReplied) and "700000 bytes" in reply.misfit


def test_a_message_that_steers_it_comes_before_the_judgement_and_after() -> None:
    steered = given(*ASKED, steers("m2", 1))
    reply = steered.when(record(ended(1, content="[]"))).decision.event.data
    assert isinstance(reply, ModelReplied) and not reply.misfit
    worse = steered.when(record(ended(1, content="done"))).decision.event.data
    assert isinstance(worse, ModelReplied) and worse.misfit


def test_only_the_run_that_was_delegated_is_judged() -> None:
    later = given(*ASKED, ended(1, content="[]"), reported(), posted("m2", 2), started(2, 1, "m2"))
    later.when(record(ended(2, content="done"))).then(ended(2, content="done"))
    for status in ("failed", "timed_out"):
        given(*ASKED).when(record(ended(1, status, content="half"))).then(ended(1, status, content="half"))


def test_usage_of_tries_that_did_not_fit_counts() -> None:
    usage = msgspec.structs.replace(misfit(1).usage, output_tokens=5)
    tried = given(*ASKED, msgspec.structs.replace(misfit(1), usage=usage))
    assert tried.session.runs[0].usage == usage
