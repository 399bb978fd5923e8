"""Events as they were stored: every version ever written loads, and what is written today is written the same tomorrow.

`events/<type>[.<variant>].json` holds stored bytes. A file is never changed; a change of an event adds one.
`defaults.json` holds the default of every field: defaults are not stored, so one that changed would change what is
stored already.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from turnstream.ids import SessionKey
from turnstream.log import codec
from turnstream.log.base import Unreadable
from turnstream.session.events import (
    TYPES,
    Answered,
    Answers,
    Ask,
    Attachment,
    Blob,
    ChildEnded,
    ChildStarted,
    Copied,
    DeleteData,
    Error,
    Event,
    Fact,
    ForkedFrom,
    HistoryCompacted,
    HistoryData,
    Leftover,
    Limits,
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    NodeFinished,
    NodeStarted,
    OnMessageData,
    Opens,
    Parent,
    Part,
    PlanChanged,
    PlanItem,
    PolicyData,
    Queued,
    Recorded,
    RequestAnswered,
    RequestExpired,
    RunCancelRequested,
    RunEnded,
    RunReleased,
    RunReported,
    RunRequested,
    RunStarted,
    RunSteered,
    RunWaiting,
    SessionDeleted,
    SessionErased,
    SessionForked,
    SessionOpened,
    SessionUpdated,
    Spec,
    Starts,
    Steers,
    Title,
    ToolCall,
    ToolReturned,
    ToolStarted,
    Unknown,
    Usage,
    Wake,
    Window,
)
from turnstream.session.fold import fold
from turnstream.session.state import Session

FOLDER = Path(__file__).parent
KEY = SessionKey("acme", "s1")
SPEC = Spec(
    agent="poet",
    version="7",
    digest="0f" * 16,
    model="demo",
    queue="gpu",
    limits=Limits(max_steps=3, max_model_calls=4, max_tool_calls=5, max_tokens=1000, timeout=60_000),
)
OPENS = Opens(
    agent="poet",
    title=Title(text="Über uns", source="client"),
    metadata={"ticket": 7, "tags": ["a", None]},
    policy=PolicyData(on_busy="queue"),
    one_shot=True,
)
BLOB = Blob(name="r1-c1", size=700_000, sha256="ab" * 32)
POLICY = PolicyData(
    preset="thread",
    on_busy="interrupt",
    message_on_busy="refuse",
    on_message=OnMessageData(question="queue", approval="decline", parked="interleave"),
    authors="mixed",
    starters=("user:ann", "client:k1"),
    recovery="durable",
    on_disconnect="fail",
    history=HistoryData(turns="completed", tools="none", window="all", compaction="off"),
    empty="note",
    clock="wall",
    titles="client",
    delete=DeleteData(mode="detach", active="cancel"),
)
WIDER = msgspec.structs.replace(
    SPEC,
    limits=Limits(max_cost=250_000, max_same_calls=2, max_same_denials=1),
    policy=POLICY,
    durable=True,
)
NARROWED = msgspec.structs.replace(SPEC, tools=("search",))
PARENT = Parent(session="s0", run=3, call_id="c1", k=2, schema={"type": "object", "required": ["n"]})
USAGE = Usage(input_tokens=10, output_tokens=20, reasoning_tokens=5, cached_tokens=2)

FACTS: dict[str, Fact] = {
    "session.opened": SessionOpened(
        agent=OPENS.agent, title=OPENS.title, metadata=OPENS.metadata, policy=OPENS.policy, one_shot=True
    ),
    "session.opened.bare": SessionOpened(),
    "session.opened.forked": SessionOpened(
        title=Title(text="Another way", source="client"),
        forked_from=ForkedFrom(session="s0", through=17, queue="gpu", given=("title", "metadata")),
    ),
    "session.forked": SessionForked(events=9),
    "session.opened.child": SessionOpened(agent="poet", parent=PARENT),
    "session.updated": SessionUpdated(
        title=Title(text="A poem", source="user"),
        agent="painter",
        metadata={},
        policy=PolicyData(on_busy="reject"),
    ),
    "session.updated.untitled": SessionUpdated(untitled=True),
    "session.updated.agent": SessionUpdated(
        title=Title(text="Tea for two", source="agent"), usage=Usage(input_tokens=70, output_tokens=4)
    ),
    "message.posted": MessagePosted(
        message_id="m1",
        author="user:ann",
        content=(Part(text="Grüße, 🌍\n"), Part(text="zwei")),
        opens=OPENS,
        starts=Starts(run=1, spec=SPEC),
    ),
    "message.posted.attachments": MessagePosted(
        message_id="m9",
        author="user:ann",
        content=(Part(text=""),),
        attachments=(
            Attachment(
                name="Übersicht 🌍.csv",
                media_type="text/csv; charset=utf-8",
                size=81_920,
                sha256="cd" * 32,
                blob="acme/s1/attachments/0f0f",
            ),
            Attachment(name="none", media_type="text/plain", size=0, sha256="e3" * 32, blob="acme/s1/attachments/1e1e"),
        ),
        context="page 3 of </window_context>",
        queued=Queued(run=2, spec=SPEC),
    ),
    "message.posted.queued": MessagePosted(
        message_id="m2", author="user:ann", content=(Part(text="and then?"),), queued=Queued(run=2, spec=SPEC)
    ),
    "message.posted.policy": MessagePosted(
        message_id="m1",
        author="user:ann",
        content=(Part(text="hello"),),
        opens=Opens(policy=POLICY),
        starts=Starts(run=1, spec=WIDER),
    ),
    "message.posted.interrupts": MessagePosted(
        message_id="m4", author="user:bob", content=(Part(text="stop!"),), queued=Queued(run=3, spec=SPEC, interrupts=1)
    ),
    "message.posted.steers": MessagePosted(
        message_id="m5", author="user:ann", content=(Part(text="in French"),), steers=Steers(run=1)
    ),
    "message.posted.answers": MessagePosted(
        message_id="m6",
        author="user:ann",
        content=(Part(text="42"),),
        answers=Answers(
            run=1, requests=(Answered(request="s1.1.q1", answer={"n": [42, None]}), Answered(request="s1.1.q2"))
        ),
    ),
    "message.posted.declines": MessagePosted(
        message_id="m7",
        author="user:ann",
        content=(Part(text="leave that"),),
        answers=Answers(run=1, requests=(Answered(request="s1.1.q3", declined=True),)),
    ),
    "message.posted.notice": MessagePosted(
        message_id="m3", author="program:cron", kind="notice", content=(Part(text="backup done"),)
    ),
    "message.posted.context": MessagePosted(
        message_id="m8",
        author="user:ann",
        content=(Part(text="what is this?"),),
        context="the window shows <b>a wall</b>",
        starts=Starts(run=1, spec=SPEC),
    ),
    "message.posted.brief": MessagePosted(
        message_id="brief",
        author="agent:boss",
        content=(Part(text="Write a poem."),),
        opens=Opens(agent="poet", parent=Parent(session="s0", run=3, call_id="c1", k=1)),
        starts=Starts(run=1, spec=NARROWED),
    ),
    "message.withdrawn": MessageWithdrawn(message_id="m2", by="user:ann", run=2),
    "run.started": RunStarted(
        run=1,
        attempt=2,
        runner="runner:one",
        wake=Wake(work=11, cause=3, delivery=2),
        trigger="recovery",
        message_ids=("m1",),
        model="demo",
    ),
    "run.started.answers": RunStarted(
        run=1,
        attempt=2,
        runner="runner:two",
        wake=Wake(work=12, cause=9, delivery=1),
        trigger="answers",
        message_ids=("m5", "m8"),
        model="demo",
    ),
    "run.started.action": RunStarted(
        run=5, attempt=1, runner="runner:one", wake=Wake(work=13, cause=21, delivery=1), trigger="action", model="demo"
    ),
    "run.requested": RunRequested(run=4, spec=SPEC, message_ids=("m1", "m5"), retry_of=3),
    "run.requested.action": RunRequested(
        run=5, spec=SPEC, trigger="action", action=ToolCall(id="c1", name="weather", arguments='{"city": "Köln"}')
    ),
    "run.requested.action.queued": RunRequested(
        run=6,
        spec=SPEC,
        trigger="action",
        action=ToolCall(id="action", name="add", arguments='{"a":1}'),
        author="user:ann",
        queued=True,
    ),
    "run.released": RunReleased(run=1, attempt=1),
    "run.steered": RunSteered(run=1, attempt=1, message_ids=("m5", "m8")),
    "run.waiting": RunWaiting(
        run=1,
        attempt=1,
        requests=(
            Ask(
                request="s1.1.q1",
                kind="question",
                call_id="c1",
                prompt="Welche Farbe?",
                schema={"type": "string", "maxLength": 5},
                choices=("rot", "blau"),
                expires_in=3_600_000,
                on_expiry="default",
                default="rot",
            ),
            Ask(
                request="s1.1.q2",
                kind="approval",
                call_id="c2",
                prompt="Delete the file?",
                digest="ef" * 16,
                on_expiry="null",
            ),
            Ask(request="s1.1.q3", kind="question", call_id="c3", prompt="Why?"),
        ),
    ),
    "run.waiting.children": RunWaiting(
        run=1,
        attempt=1,
        requests=(Ask(request="s1.1.q1", kind="child", call_id="c1", prompt="s1--1-1"),),
    ),
    "request.answered": RequestAnswered(run=1, request="s1.1.q1", answer="blau", by="user:ann"),
    "request.answered.approval": RequestAnswered(
        run=1, request="s1.1.q2", approved=False, reason="it is the last copy", by="user:bob"
    ),
    "request.expired": RequestExpired(run=1, request="s1.1.q3"),
    "model.replied": ModelReplied(
        run=1,
        attempt=1,
        step=1,
        content="Let me see.",
        reasoning="The user asks for the weather.",
        tool_calls=(ToolCall(id="c1", name="weather", arguments='{"city": "Köln"}'),),
        usage=USAGE,
        finish="tool_calls",
        model="demo-1",
        duration=1200,
    ),
    "model.replied.asks": ModelReplied(
        run=1,
        attempt=2,
        step=2,
        content="A long thought",
        tool_calls=(
            ToolCall(id="c1", name="conversation_ask_user", arguments='{"question":"Which?"}', asks="question"),
            ToolCall(id="c2", name="remove", arguments="{}", asks="approval"),
        ),
        usage=Usage(input_tokens=1, cost=1_500),
        blob=BLOB,
    ),
    "model.replied.delegates": ModelReplied(
        run=1,
        attempt=1,
        step=1,
        tool_calls=(ToolCall(id="c1", name="delegate", arguments='{"brief":"Write a poem."}', asks="child"),),
    ),
    "model.replied.misfit": ModelReplied(
        run=1, attempt=1, step=2, content="forty-two", misfit='"forty-two" is not of type "object"'
    ),
    "tool.started": ToolStarted(run=1, attempt=1, call_id="c1"),
    "tool.returned": ToolReturned(
        run=1, attempt=1, call_id="c1", status="ok", output='{"temperature": 7}', blob=BLOB, duration=300
    ),
    "tool.returned.error": ToolReturned(run=1, attempt=1, call_id="c2", status="error", error="no such city"),
    "tool.returned.denied": ToolReturned(run=1, attempt=2, call_id="c2", status="denied", error="it is the last copy"),
    "child.started": ChildStarted(
        run=1, attempt=1, call_id="c1", k=1, child_session="s1--1-1", brief="cd" * 16, spec=NARROWED
    ),
    "child.started.detached": ChildStarted(
        run=1,
        attempt=2,
        call_id="c2",
        k=2,
        child_session="s1--1-2",
        wait=False,
        spec=msgspec.structs.replace(SPEC, tools=()),
    ),
    "child.ended": ChildEnded(
        run=1, call_id="c1", k=1, status="completed", output="Grüße aus Köln", blob=BLOB, usage=USAGE
    ),
    "child.ended.late": ChildEnded(
        run=1,
        call_id="c2",
        k=2,
        status="failed",
        error=Error(code="child_failed", message="3 answers did not fit the schema"),
        late=True,
    ),
    "run.reported": RunReported(run=1),
    "run.reported.nobody": RunReported(run=1, told=False),
    "history.compacted": HistoryCompacted(
        through=90,
        summary="Ann wants the weather of Köln; it is 7 °C.",
        usage=Usage(input_tokens=900, output_tokens=20),
        model="demo-1",
    ),
    "history.compacted.none": HistoryCompacted(through=90, fault="the provider answered 503"),
    "model.replied.window": ModelReplied(
        run=1,
        attempt=1,
        step=2,
        tool_calls=(ToolCall(id="c1", name="weather", arguments="{}"),),
        usage=Usage(input_tokens=700),
        window=Window(since=90, inner=110, tokens=812, fixed=60, budget=1500),
    ),
    "run.ended.window": RunEnded(
        run=1, attempt=1, status="completed", content="Seven.", window=Window(tokens=812, budget=1500)
    ),
    "plan.changed": PlanChanged(
        items=(
            PlanItem(id="1", text="Wände streichen", status="completed"),
            PlanItem(id="b", text="dann die Decke", status="in_progress"),
            PlanItem(id="3", text="lüften"),
        ),
        run=1,
        attempt=1,
        call_id="c3",
    ),
    "plan.changed.empty": PlanChanged(items=(), run=2, attempt=1, call_id="c1"),
    "plan.changed.node": PlanChanged(items=(), run=2, attempt=1, call_id="c1", node="draft", path="each[3].draft"),
    "node.started": NodeStarted(
        run=1,
        attempt=2,
        node="look",
        path="look",
        call=ToolCall(id="look", name="add", arguments='{"a":1}', asks="approval"),
    ),
    "node.started.items": NodeStarted(run=1, attempt=2, node="each", path="again[2].each", items=3),
    "node.finished": NodeFinished(
        run=1,
        attempt=2,
        node="draft",
        path="each[3].draft",
        output='{"mood":"blue"}',
        json=True,
        blob=Blob(name="default/s1/1.2.each.3.draft", size=600_000, sha256="ab" * 32),
        note="the loop ended at its last iteration",
        reasoning="because",
        usage=Usage(input_tokens=3, output_tokens=4),
        finish="stop",
        model="demo",
        duration=12,
    ),
    "node.finished.err": NodeFinished(run=1, attempt=2, node="look", path="look", port="err", error="no"),
    "model.replied.node": ModelReplied(
        run=1, attempt=2, step=1, node="draft", path="each[3].draft", content="[]", misfit="not an object"
    ),
    "tool.started.node": ToolStarted(run=1, attempt=2, call_id="look", node="look", path="look"),
    "tool.returned.node": ToolReturned(
        run=1, attempt=2, call_id="c1", node="draft", path="draft", status="ok", output="3"
    ),
    "child.started.node": ChildStarted(
        run=1, attempt=2, call_id="poet", k=1, child_session="s1--1-1", spec=SPEC, node="poet", path="poet"
    ),
    "run.waiting.node": RunWaiting(
        run=1,
        attempt=2,
        requests=(Ask(request="s1.1.q1", kind="question", call_id="sure", prompt="?", node="sure", path="sure"),),
    ),
    "message.posted.graph": MessagePosted(
        message_id="m9",
        author="user:ann",
        content=(Part(text="hello"),),
        starts=Starts(run=2, spec=msgspec.structs.replace(SPEC, graph=True, output={"type": "object"})),
    ),
    "run.cancel_requested.disconnected": RunCancelRequested(run=1, by="system", error="client_disconnected"),
    "run.cancel_requested": RunCancelRequested(run=1, by="user:ann", reason="changed my mind"),
    "run.ended": RunEnded(
        run=1,
        attempt=1,
        status="completed",
        content="Seven degrees.",
        reasoning="Easy.",
        blob=BLOB,
        note="cut",
        finish="stop",
        usage=USAGE,
        step_usage=Usage(input_tokens=5),
        model="demo-1",
        duration=800,
    ),
    "run.ended.failed": RunEnded(
        run=1,
        attempt=3,
        status="failed",
        error=Error(code="model_error", message="503", retryable=True),
        reason="the provider is down",
    ),
    "run.ended.leftover": RunEnded(
        run=1,
        attempt=3,
        status="timed_out",
        error=Error(code="deadline_exceeded", message="the run took longer than 60 s"),
        usage=Usage(output_tokens=7, cost=9),
        unfinished=("c1", "c2"),
        leftover=Leftover(run=2, spec=SPEC, message_ids=("m5", "m8")),
    ),
    "session.deleted": SessionDeleted(mode="detach", by="user:ann"),
    "session.deleted.queue": SessionDeleted(mode="erase", by="user:ann", queue="gpu", last_run=4),
    "session.deleted.counted": SessionDeleted(mode="detach", by="user:ann", last_run=4, events=17),
    "session.erased": SessionErased(
        mode="erase", by="user:ann", events_removed=17, last_run=4, deleted_at=1_790_000_000_000
    ),
}
"""What today's release writes, by the name of its file."""


def stored(name: str) -> bytes:
    return (FOLDER / "events" / f"{name}.json").read_bytes().removesuffix(b"\n")


def load(name: str, seq: int = 20, previous: int = 10, **options: Any) -> Recorded:
    return codec.decode(stored(name), seq=seq, previous=previous, time=1_790_000_000_000 + seq, **options)


def event(data: Fact) -> Event:
    return Event(
        id="6f0f5a52-0d3e-5a7b-9c55-7475726e7374",
        key=KEY,
        data=data,
        actor="user:ann",
        time=1_790_000_000_123,
        cause="a" * 32,
        correlation="b" * 32,
        idempotency_key="c" * 32,
        body_digest="d" * 32,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )


@pytest.mark.parametrize("name", FACTS)
def test_s54_an_event_is_read_and_written_as_ever(name: str) -> None:
    assert load(name).event == event(FACTS[name])
    assert codec.encode(event(FACTS[name])) == stored(name)


def test_s54_every_type_has_a_golden_file() -> None:
    assert {type(fact) for fact in FACTS.values()} == set(TYPES.values())
    assert {load(name).event.type for name in FACTS} == set(TYPES)


def test_s54_no_default_has_changed() -> None:
    known = json.loads((FOLDER / "defaults.json").read_bytes())
    assert {name: value for name, value in defaults().items() if name in known} == known


def defaults() -> dict[str, Any]:
    """The default of every field of an event's data, as JSON."""
    said = (Title, Part, Opens, PolicyData, OnMessageData, HistoryData, DeleteData)
    routed = (Starts, Queued, Steers, Answered, Answers, Leftover, ForkedFrom)
    parts = (
        *said,
        *routed,
        Usage,
        Limits,
        Spec,
        Error,
        Blob,
        Attachment,
        Wake,
        ToolCall,
        Ask,
        Parent,
        PlanItem,
        Window,
    )
    found = {
        f"{struct.__name__}.{field.name}": None if field.required else default(field)
        for struct in (*TYPES.values(), *parts)
        for field in msgspec.structs.fields(struct)
    }
    return json.loads(msgspec.json.encode(found))


def default(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def test_s54_a_start_of_an_older_release_names_no_messages() -> None:
    posted = load("message.posted", seq=10, previous=0)
    started = load("run.started.first-release")
    assert started.event.data == RunStarted(
        run=1, attempt=1, runner="runner:one", wake=Wake(work=11, cause=10, delivery=1), message_ids=(), model=""
    )
    session = fold(Session(key=KEY), [posted, started])
    assert session.holder is not None
    assert session.holder.attempt == 1


def test_s54_an_event_of_an_unknown_type_is_kept_and_folds_as_nothing() -> None:
    posted = load("message.posted", seq=10, previous=0)
    unknown = load("unknown")
    assert unknown.event.type == "session.starred"
    assert unknown.event.data == Unknown(type="session.starred", raw=msgspec.Raw(b'{"by": "user:ann", "stars": 5}'))
    before, after = (fold(Session(key=KEY), events) for events in ([posted], [posted, unknown]))
    assert after == msgspec.structs.replace(before, seq=20, events=2)
    shown = json.loads(codec.public(unknown))
    assert shown == {"seq": 20, "storedat": "2026-09-21T14:13:20.020Z", **json.loads(stored("unknown"))}


COPIED = Copied("s0", 17, 1_780_000_000_456)


def test_s54_a_copy_says_what_it_is_of_and_is_dated_as_that_was() -> None:
    copy = msgspec.structs.replace(event(FACTS["run.ended"]), copied=COPIED)
    assert codec.encode(copy) == stored("run.ended.copied")
    recorded = load("run.ended.copied")
    assert recorded.event == copy
    assert (recorded.seq, recorded.time) == (20, 1_780_000_000_456)
    assert json.loads(codec.public(recorded))["storedat"] == "2026-05-28T20:26:40.456Z"


def test_s54_an_event_of_an_unknown_type_is_copied_with_all_its_data_and_written_by_nobody_else() -> None:
    unknown = load("unknown")
    copy = msgspec.structs.replace(unknown.event, copied=COPIED)
    again = codec.decode(codec.encode(copy), seq=30, previous=20, time=0)
    assert again.event == copy
    with pytest.raises(TypeError, match="not a type that this release writes"):
        codec.encode(unknown.event)


def test_s54_an_event_with_fields_of_a_newer_release_loads() -> None:
    assert load("run.released.newer").event.data == RunReleased(run=1, attempt=1)


def test_s54_an_older_shape_is_brought_up_to_date() -> None:
    """As if `run.started` had once been `run.begun`, and that once `turn.begun` with its run under another name."""

    def begun(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "type": "run.begun", "data": {"run": record["data"]["turn"], "runner": "runner:old"}}

    def started(record: dict[str, Any]) -> dict[str, Any]:
        data = {"attempt": 1, "wake": {"work": 0, "cause": 0, "delivery": 0}, **record["data"]}
        return {**record, "type": "run.started", "data": data}

    upcasters = {"turn.begun": begun, "run.begun": started}
    recorded = load("turn.begun", upcasters=upcasters)
    wake = Wake(work=0, cause=0, delivery=0)
    assert recorded.event.data == RunStarted(run=4, attempt=1, runner="runner:old", wake=wake)
    assert recorded.event.id == "0b0f5a52-0d3e-5a7b-9c55-7475726e7374"
    assert recorded.payload == stored("turn.begun")
    assert isinstance(load("turn.begun").event.data, Unknown)


def test_s54_a_changed_shape_of_a_known_type_is_brought_up_to_date() -> None:
    """A type that keeps its name: its upcaster is asked even where the old shape happens to fit the new one."""

    def in_milliseconds(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "data": {**record["data"], "duration": record["data"]["duration"] * 1000}}

    recorded = load("tool.returned", upcasters={"tool.returned": in_milliseconds})
    assert recorded.event.data == msgspec.structs.replace(FACTS["tool.returned"], duration=300_000)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"hello",
        b"[]",
        b"{}",
        b'{"type":"run.ended"}',
        stored("run.ended").replace(b'"completed"', b'"exploded"'),
        stored("run.ended").replace(b"/acme/sessions/s1", b"elsewhere"),
        stored("run.ended").replace(b"2026-", b"yesterday"),
        stored("run.ended").replace(b'"run":1', b'"run":"one"'),
        stored("message.posted").replace("Grüße".encode(), b"\xff"),
    ],
)
def test_bytes_that_are_no_event_are_refused_by_name(payload: bytes) -> None:
    with pytest.raises(Unreadable, match="event 7 cannot be read"):
        codec.decode(payload, seq=7, previous=0, time=0)


def test_readers_get_the_stored_bytes_with_number_and_time_in_front() -> None:
    shown = codec.public(load("run.ended"))
    assert shown == b'{"seq":20,"storedat":"2026-09-21T14:13:20.020Z",' + stored("run.ended")[1:]
    appended = msgspec.structs.replace(load("run.ended"), payload=b"")
    with pytest.raises(ValueError, match="was not read"):
        codec.public(appended)


def test_an_event_of_an_unknown_type_is_never_written() -> None:
    with pytest.raises(TypeError, match=r"session\.starred"):
        codec.encode(load("unknown").event)


@pytest.mark.parametrize(
    ("text", "millis"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("2026-11-30T16:00:00.123456789Z", 1_796_054_400_123),
        ("2026-11-30T16:00:00.9Z", 1_796_054_400_900),
        ("2026-11-30T16:00:00.000999Z", 1_796_054_400_000),
        ("2026-11-30T18:00:00.5+02:00", 1_796_054_400_500),
    ],
)
def test_times_are_read_to_the_millisecond(text: str, millis: int) -> None:
    assert codec.parse_time(text) == millis


@pytest.mark.parametrize("text", ["", "Z", "yesterday", "2026-11-30T16:00:00", "2026-11-30T16:00:00.12x4Z"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        codec.parse_time(text)
