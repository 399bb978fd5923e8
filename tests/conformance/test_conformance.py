"""The cases beside this file, run against this core. Their format is in README.md; it knows nothing of this core."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import yaml

from turnstream.ids import SessionKey
from turnstream.session import commands
from turnstream.session.commands import Command, Origin
from turnstream.session.decide import decide
from turnstream.session.errors import Code, Rejected
from turnstream.session.events import (
    NO_POLICY,
    TYPES,
    ChildEnded,
    Copied,
    Event,
    Fact,
    ForkedFrom,
    Opens,
    Part,
    PolicyData,
    Recorded,
    RunStarted,
    SessionUpdated,
    Spec,
    Title,
    ToolCall,
    Unknown,
)
from turnstream.session.fold import fold
from turnstream.session.history import build
from turnstream.session.messages import AssistantMessage, Message, ToolMessage, UserMessage
from turnstream.session.policy import CHOICES, parse_policy, resolve
from turnstream.session.state import Session

FOLDER = Path(__file__).parent
DOCUMENTS = (
    "0-run-turn-session",
    "1-runs-and-sessions",
    "2-run-started-names-its-messages",
    "3-session-is-not-a-run",
)
KEY = SessionKey("default", "s1")
ANN, RUNNER = "user:ann", "runner:one"
BY_RUNNERS = {
    "copy_event",
    "close_fork",
    "start_run",
    "record",
    "expire_request",
    "title_session",
    "end_child",
    "report_run",
    "compact_history",
}
"""The commands that a runner gives."""
EMPTY = {"policy", "metadata", "usage", "step_usage"}
"""Objects that say nothing if they have no fields."""
SEES = {"given", "seen_by", "sees"}
DECIDES = {"given", "when"}
OUTCOMES = {"then", "refused", "nothing"}


def load(document: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{document}.yaml").read_text(encoding="utf-8"))


FILES = {document: load(document) for document in DOCUMENTS}
CASES: list[tuple[str, dict[str, Any]]] = [(name, case) for name, file in FILES.items() for case in file["cases"]]


# -- what is given ----------------------------------------------------------------------------------------------------


def policy_of(given: Mapping[str, Any]) -> PolicyData:
    return parse_policy(given)


def as_json(data: Fact) -> Any:
    """As it is stored, without what is at its default; nothing that is empty says anything, but where a session is
    updated."""
    stored = msgspec.json.decode(msgspec.json.encode(data))
    return without_empty(stored, {"usage"} if isinstance(data, SessionUpdated) else EMPTY)


def without_empty(data: dict[str, Any], names: set[str]) -> dict[str, Any]:
    inner = {name: without_empty(value, names) if name == "opens" else value for name, value in data.items()}
    return {name: value for name, value in inner.items() if name not in names or value}


def fact_of(given: Mapping[str, Any]) -> Fact:
    """The fact of an event as a case gives it. What this core would not store like that is a mistake of the case."""
    kind = TYPES[given["type"]]
    fact = msgspec.convert(given["data"], kind)
    assert as_json(fact) == given["data"], "a field that is unknown, or at its default"
    return fact


def history_of(case: Mapping[str, Any]) -> list[Recorded]:
    events: list[Recorded] = []
    at = 0
    for seq, given in enumerate(case["given"], 1):
        assert set(given) <= {"type", "data", "at", "id", "key", "body", "copy"}
        at = given.get("at", at + 1)
        event = Event(
            id=given.get("id", f"event {seq}"),
            key=KEY,
            data=fact_of(given),
            actor=RUNNER if given["type"].startswith(("run.", "tool.", "model.", "child.")) else ANN,
            time=at * 1000,
            idempotency_key=given.get("key"),
            body_digest=given.get("body"),
            copied=Copied(given["copy"]["session"], given["copy"]["seq"], at * 1000) if "copy" in given else None,
        )
        events.append(Recorded(seq=seq, previous=seq - 1, time=at * 1000, size=100, event=event))
    return events


# -- what is asked ----------------------------------------------------------------------------------------------------


def command_of(case: Mapping[str, Any], file: Mapping[str, Any], specs: Mapping[str, Spec], last: int) -> Command:
    ((name, fields),) = case["when"].items()
    fields = dict(fields or {})
    if name == "act":
        fields["tools"] = file.get("tools", {})
    at = fields.pop("at", last + 1)
    origin = Origin(
        id=fields.pop("id", "command"),
        actor=fields.pop("actor", RUNNER if name in BY_RUNNERS else ANN),
        time=round(at * 1000),
        idempotency_key=fields.pop("key", None),
        body_digest=fields.pop("body", None),
        expected_seq=fields.pop("expected_seq", None),
    )
    return COMMANDS[name](origin, fields, specs)


def opens_of(given: Mapping[str, Any]) -> Opens:
    policy = policy_of(given.get("policy", {}))
    return msgspec.structs.replace(msgspec.convert({**given, "policy": {}}, Opens), policy=policy)


def open_session(origin: Origin, fields: dict[str, Any], specs: Mapping[str, Spec]) -> Command:
    return commands.OpenSession(origin=origin, opens=opens_of(fields), given=frozenset(fields))


def fork_session(origin: Origin, fields: dict[str, Any], specs: Mapping[str, Spec]) -> Command:
    of = {name: fields.pop(name) for name in ("session", "through", "queue") if name in fields}
    forked_from = ForkedFrom(**of, given=tuple(fields))  # pyright: ignore[reportArgumentType]
    return commands.ForkSession(origin=origin, opens=opens_of(fields), forked_from=forked_from)


def copy_event(origin: Origin, fields: dict[str, Any], specs: Mapping[str, Spec]) -> Command:
    copied = Copied(fields.pop("session"), fields.pop("seq"), origin.time)
    return commands.CopyEvent(origin=origin, copied=copied, behind=fields.pop("behind"), data=fact_of(fields))


def update_session(origin: Origin, fields: dict[str, Any], specs: Mapping[str, Spec]) -> Command:
    given = dict(fields)
    if "policy" in given:
        given["policy"] = policy_of(given["policy"])
    if "title" in given:
        given["title"] = msgspec.convert(given["title"], Title)
    return commands.UpdateSession(origin=origin, **given)


def post_message(origin: Origin, fields: dict[str, Any], specs: Mapping[str, Spec]) -> Command:
    given = {"author": origin.actor, **fields}
    given["content"] = (Part(text=given.pop("text", "hello")),)
    on_busy = given.pop("on_busy", None)
    if "opens" in given:
        given["opens"] = opens_of(given["opens"])
    policy = policy_of({"on_busy": on_busy}) if on_busy else NO_POLICY
    return commands.PostMessage(origin=origin, specs=specs, policy=policy, **given)


def start_run(origin: Origin, fields: dict[str, Any], specs: Mapping[str, Spec]) -> Command:
    gone = frozenset(fields.pop("gone", ()))
    return commands.StartRun(origin=origin, started=msgspec.convert(fields, RunStarted), gone=gone)


def record(origin: Origin, fields: dict[str, Any], specs: Mapping[str, Spec]) -> Command:
    by = msgspec.convert(fields.pop("takes_over", None), commands.TakeOver | None)
    return commands.RecordFact(origin=origin, fact=fact_of(fields), takes_over=by)  # pyright: ignore[reportArgumentType]


def act(origin: Origin, fields: dict[str, Any], specs: Mapping[str, Spec]) -> Command:
    action = msgspec.convert(fields.pop("action"), ToolCall)
    return commands.Act(origin=origin, action=action, specs=specs, **{"author": origin.actor, **fields})


def end_child(origin: Origin, fields: dict[str, Any], specs: Mapping[str, Spec]) -> Command:
    return commands.EndChild(origin=origin, ended=msgspec.convert(fields, ChildEnded))


def expire_request(origin: Origin, fields: dict[str, Any], specs: Mapping[str, Spec]) -> Command:
    return commands.ExpireRequest(origin=origin, now=origin.time, **fields)


def with_specs(kind: Any) -> Any:
    return lambda origin, fields, specs: kind(origin=origin, specs=specs, **fields)


def plain(kind: Any) -> Any:
    return lambda origin, fields, specs: kind(origin=origin, **fields)


COMMANDS: dict[str, Any] = {
    "open_session": open_session,
    "fork_session": fork_session,
    "copy_event": copy_event,
    "close_fork": plain(commands.CloseFork),
    "update_session": update_session,
    "delete_session": with_specs(commands.DeleteSession),
    "erase_session": plain(commands.EraseSession),
    "post_message": post_message,
    "withdraw_message": plain(commands.WithdrawMessage),
    "retry_session": with_specs(commands.RetrySession),
    "act": act,
    "title_session": plain(commands.TitleSession),
    "compact_history": plain(commands.CompactHistory),
    "end_child": end_child,
    "report_run": plain(commands.ReportRun),
    "cancel_run": plain(commands.CancelRun),
    "answer_request": plain(commands.AnswerRequest),
    "expire_request": expire_request,
    "start_run": start_run,
    "record": record,
}


# -- what comes of it -------------------------------------------------------------------------------------------------


def outcome_of(case: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """What this core answers, in the words of a case."""
    events = history_of(case)
    specs = {name: msgspec.convert(spec, Spec) for name, spec in file["agents"].items()}
    last = events[-1].time // 1000 if events else 0
    try:
        decision = decide(command_of(case, file, specs, last), fold(Session(key=KEY), events))
    except Rejected as refusal:
        return {"refused": {"code": refusal.code, **refusal.details}}
    if decision is None:
        return {"nothing": True}
    data = decision.event.data
    assert not isinstance(data, Unknown)
    return {"then": {"type": decision.event.type, "data": as_json(data)}}


def agrees(found: Any, wanted: Any, name: str = "") -> bool:
    """Whether data are those that a case wants: all of them, but of a `spec` only what the case gives."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        more = set(found) - set(wanted) if name != "spec" else set()
        return not more and all(key in found and agrees(found[key], value, key) for key, value in wanted.items())
    return found == wanted and type(found) is type(wanted)


def message_of(message: Message) -> dict[str, Any]:
    match message:
        case UserMessage(text):
            return {"user": text}
        case AssistantMessage(text, calls):
            return {"assistant": text, **({"calls": [call.id for call in calls]} if calls else {})}
        case ToolMessage(call_id, _, text, is_error):
            return {"tool": text, "call": call_id, **({"error": True} if is_error else {})}


@pytest.mark.parametrize(("document", "case"), [pytest.param(*one, id=one[1]["name"]) for one in CASES])
def test_case(document: str, case: dict[str, Any]) -> None:
    if "sees" in case:
        by = case["seen_by"]
        events = history_of(case)
        session = fold(Session(key=KEY), events)
        found = build(session, events, by.get("run"), resolve(policy_of(by.get("policy", {})))).messages
        assert [message_of(message) for message in found] == case["sees"]
        return
    found = outcome_of(case, FILES[document])
    (outcome,) = OUTCOMES & set(case)
    assert set(found) == {outcome}, found
    if outcome == "then":
        assert found["then"]["type"] == case["then"]["type"]
        assert agrees(found["then"]["data"], case["then"]["data"]), found["then"]["data"]
    else:
        wanted = case[outcome]
        assert found[outcome] == wanted if outcome == "nothing" else wanted.items() <= found[outcome].items(), found


# -- whether they are enough ------------------------------------------------------------------------------------------


def test_a_case_is_written_as_the_format_says() -> None:
    for _, case in CASES:
        fields = set(case) - {"name", "says"}
        assert fields == SEES or (fields > DECIDES and len(fields) == 3 and fields - DECIDES <= OUTCOMES), case["name"]
        assert "refused" not in case or set(case["refused"]) & {"code"}, case["name"]
        assert case.get("nothing", True) is True


def test_there_are_enough_and_each_has_a_sentence_of_its_own() -> None:
    assert len(CASES) >= 150
    names = [case["name"] for _, case in CASES]
    assert len(set(names)) == len(names)
    assert [name for name in names if len(name.split()) < 4] == []


def words(value: Any) -> Iterator[tuple[str, Any]]:
    """Every field of a case, however deep, with its value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name, inner
            yield from words(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from words(inner)


def test_every_type_of_event_is_given_and_comes_about() -> None:
    given = {event["type"] for _, case in CASES for event in case["given"]}
    stored = {case["then"]["type"] for _, case in CASES if "then" in case}
    assert given == set(TYPES)
    assert stored == set(TYPES)


def test_every_refusal_occurs() -> None:
    assert {case["refused"]["code"] for _, case in CASES if "refused" in case} == set(get_args(Code))


def test_every_command_occurs_and_each_is_refused_and_obeyed() -> None:
    for name in COMMANDS:
        outcomes = {next(iter(OUTCOMES & set(case))) for _, case in CASES if name in case.get("when", {})}
        assert {"then", "refused"} <= outcomes, name


def test_every_policy_value_that_is_offered_occurs() -> None:
    found: set[tuple[str, Any]] = set()
    for _, case in CASES:
        for name, value in words(case):
            if name == "policy":
                found |= {*flat(value)}
            if name == "on_busy":
                found.add((name, value))
    wanted = {(name, value) for name, values in CHOICES.items() for value in values}
    assert wanted - found == set()
    assert any(name == "starters" and isinstance(value, tuple) for name, value in found)


def flat(policy: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in policy.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{field}", inner) for field, inner in value.items())
        else:
            yield name, tuple(value) if isinstance(value, list) else value


def test_every_status_and_trigger_occurs() -> None:
    """What the diagram in the README shows, and every way to start an attempt."""
    facts = [event for _, case in CASES for event in (*case["given"], *([case["then"]] if "then" in case else []))]
    ends = {fact["data"]["status"] for fact in facts if fact["type"] == "run.ended"}
    assert ends == {"completed", "failed", "cancelled", "timed_out"}
    triggers = {fact["data"].get("trigger", "message") for fact in facts if fact["type"] == "run.started"}
    assert triggers == {"message", "reply", "answers", "recovery", "handover", "leftover", "retry", "action"}


def test_the_format_names_every_command() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    table = text.split("| command | fields |", 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == set(COMMANDS)
