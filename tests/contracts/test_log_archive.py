"""The record of a run that outlives its session: what it holds, and that it folds to the same run."""

import msgspec
import pytest
from tests.core.scenario import KEY
from tests.support.logs import Log

from turnstream.log import archive
from turnstream.log.base import Unreadable
from turnstream.session.commands import CancelRun, DeleteSession, RecordFact, UpdateSession
from turnstream.session.events import (
    NAMES,
    Answered,
    Answers,
    Ask,
    Blob,
    Error,
    Leftover,
    MessagePosted,
    ModelReplied,
    Part,
    Recorded,
    RequestAnswered,
    RunEnded,
    RunWaiting,
    SessionDeleted,
    Title,
    ToolCall,
    ToolReturned,
)

WORD = "marzipan"
"""What is said wherever something can be said."""
LIMIT = 1 << 20


def spoken() -> Log:
    """A session in which everything was said: a turn with a tool, one that asked, one that was cut off, one that waits,
    one that was left over."""
    log = Log(account=KEY.account)
    log.open(KEY.session, title={"text": WORD, "source": "user"}, metadata={"k": WORD})
    log.turn(KEY.session, WORD, "first answer")
    log.say(KEY.session, WORD, attached=WORD, context=WORD)
    log.start(KEY.session, 2)
    call = ToolCall(id="c1", name="add", arguments=f'{{"a":"{WORD}"}}')
    reply = ModelReplied(run=2, attempt=1, step=1, content=WORD, reasoning=WORD, tool_calls=(call,), model="demo")
    blob = Blob(name=f"{KEY}/2.1.1", size=9, sha256="00")
    returned = ToolReturned(run=2, attempt=1, call_id="c1", status="error", output=WORD, error=WORD, blob=blob)
    for fact in (reply, returned):
        log.do(KEY.session, RecordFact(origin=log.origin("runner:one"), fact=fact))
    log.do(KEY.session, UpdateSession(origin=log.origin(), title=Title(text=WORD, source="user")))
    kept = Blob(name=f"{KEY}/2.1.2", size=9, sha256="00")
    log.end(KEY.session, 2, "second answer", reasoning="because", blob=kept)
    ask = Ask(
        request=f"{KEY.session}.3.q1",
        kind="question",
        call_id="c2",
        prompt=WORD,
        schema={"const": WORD},
        choices=(WORD,),
        default=WORD,
        digest="d",
    )
    log.say(KEY.session, WORD)
    log.start(KEY.session, 3)
    log.put(KEY.session, RunWaiting(run=3, attempt=1, requests=(ask,)))
    log.put(KEY.session, RequestAnswered(run=3, request=ask.request, answer=WORD, reason=WORD, by="user:ann"))
    answers = Answers(run=3, requests=(Answered(request=ask.request, answer=WORD),))
    log.put(
        KEY.session,
        MessagePosted(message_id="a1", author="user:ann", content=(Part(text=WORD),), answers=answers),
    )
    spec = log.sessions[KEY].runs[0].spec
    leftover = Leftover(run=4, spec=spec, message_ids=("x",))
    error = Error(code="model_error", message=WORD)
    log.put(KEY.session, RunEnded(run=3, attempt=1, status="failed", content=WORD, error=error, leftover=leftover))
    return log


def delete(log: Log) -> None:
    log.do(KEY.session, DeleteSession(origin=log.origin(), specs={}, mode="detach", active="cancel"))


def types(events: "list[Recorded] | tuple[Recorded, ...]") -> list[str]:
    return [NAMES[type(one.event.data)] for one in events]  # pyright: ignore[reportArgumentType]


def test_a_record_holds_the_runs_own_events_as_they_were_numbered() -> None:
    log = spoken()
    delete(log)
    runs = archive.split(log.events)
    assert sorted(runs) == [1, 2, 3, 4]
    assert types([*runs[1]]) == ["message.posted", "run.started", "run.ended"]
    assert types([*runs[2]]) == ["message.posted", "run.started", "model.replied", "tool.returned", "run.ended"]
    assert types([*runs[4]]) == ["run.ended", "session.deleted"]
    for n, events in runs.items():
        run, again = archive.decode(archive.encode(KEY, n, events, LIMIT), 1)
        assert run == n
        known = {one.seq: one for one in log.events}
        assert [(one.seq, one.previous, one.time) for one in again] == [
            (one.seq, known[one.seq].previous, known[one.seq].time) for one in events
        ]
        assert [one.event for one in again] == [one.event for one in events]
        assert {one.event.key for one in again} == {KEY}


def test_a_record_says_nothing_that_was_said_but_the_end_of_its_own_run() -> None:
    log = spoken()
    delete(log)
    runs = archive.split(log.events)
    for n in (1, 2, 4):
        assert WORD not in archive.encode(KEY, n, runs[n], LIMIT).decode()
    *before, end = runs[3]
    assert WORD not in archive.encode(KEY, 3, before, LIMIT).decode()
    assert isinstance(end.event.data, RunEnded) and end.event.data.content == WORD
    ended = runs[2][-1].event.data
    assert isinstance(ended, RunEnded)
    assert (ended.content, ended.reasoning) == ("second answer", "because")


def test_a_record_refers_only_to_the_blob_of_the_answer() -> None:
    runs = archive.split(spoken().events)
    assert archive.blobs(runs[2]) == {f"{KEY}/2.1.2"}
    assert archive.blobs(runs[1]) == set()


def test_what_could_check_a_guess_is_not_kept() -> None:
    log = spoken()
    marked = [
        msgspec.structs.replace(
            one, event=msgspec.structs.replace(one.event, idempotency_key="k" * 32, body_digest="b" * 32)
        )
        for one in log.events
    ]
    for n, events in archive.split(marked).items():
        record = archive.encode(KEY, n, events, LIMIT)
        assert b"kkkk" not in record and b"bbbb" not in record


def test_a_run_that_a_deletion_ends_ends_by_it() -> None:
    log = Log(account=KEY.account)
    log.say(KEY.session, "one")
    log.start(KEY.session, 1)
    log.say(KEY.session, "two")
    log.do(KEY.session, CancelRun(origin=log.origin(), run=2))
    log.say(KEY.session, "three")
    delete(log)
    runs = archive.split(log.events)
    assert isinstance(runs[1][-1].event.data, SessionDeleted) and isinstance(runs[3][-1].event.data, SessionDeleted)
    assert types([*runs[2]]) == ["message.posted", "run.ended"]


def test_a_record_that_is_too_large_keeps_how_the_run_began_and_ended() -> None:
    log = spoken()
    delete(log)
    record = archive.encode(KEY, 2, archive.split(log.events)[2], 100)
    assert types(archive.decode(record, 1)[1]) == ["message.posted", "run.started", "run.ended"]
    record = archive.encode(KEY, 4, archive.split(log.events)[4], 100)
    assert types(archive.decode(record, 1)[1]) == ["run.ended", "session.deleted"]


def test_what_is_no_record_is_unreadable() -> None:
    for payload in (b"", b"{}", b'{"type":"run.ended"}'):
        with pytest.raises(Unreadable) as error:
            archive.decode(payload, 7)
        assert error.value.seq == 7
