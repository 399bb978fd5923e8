"""Logs for tests: whatever `decide` lets in, in any order, of any number of sessions; or anything at all."""

import random
from collections.abc import Sequence

import msgspec
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.ids import SessionKey, derive
from turnstream.log import codec
from turnstream.log.messages import EXPECTED
from turnstream.session.commands import (
    CancelRun,
    Command,
    OpenSession,
    Origin,
    PostMessage,
    RecordFact,
    StartRun,
    UpdateSession,
    WithdrawMessage,
)
from turnstream.session.decide import decide
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    Error,
    Event,
    Fact,
    ModelReplied,
    Opens,
    Part,
    PolicyData,
    Recorded,
    RunEnded,
    RunReleased,
    RunStarted,
    Spec,
    Title,
    ToolCall,
    ToolReturned,
    ToolStarted,
    Unknown,
    Usage,
    Wake,
)
from turnstream.session.state import Run, Session, evolve
from turnstream.subjects import MESSAGE_ID, TYPE
from turnstream_projector.reading import extent

SPECS = {
    name: Spec(agent=name, version="v1", digest="d1", model="demo", queue=queue)
    for name, queue in (("default", "default"), ("painter", "gpu"))
}
BEGIN = 1_700_000_000_000


class Log:
    """A log in a list. `events` are as a reader of the stream gets them."""

    def __init__(self, *, account: str = "default", time: int = BEGIN) -> None:
        self.account = account
        self.time = time
        self.seq = 0
        self.events: list[Recorded] = []
        self.sessions: dict[SessionKey, Session] = {}

    def key(self, session: str) -> SessionKey:
        return SessionKey(self.account, session)

    def origin(self, actor: str = "user:ann") -> Origin:
        return Origin(id=derive("test", self.account, len(self.events), self.seq), actor=actor, time=self.time)

    def do(self, session: str, command: Command) -> Recorded | None:
        """What `decide` says of the command, stored. Raises `Rejected`."""
        key = self.key(session)
        decision = decide(command, self.sessions.get(key, Session(key=key)))
        return self.store(decision.event) if decision else None

    def put(self, session: str, fact: Fact | Unknown, actor: str = "runner:one") -> Recorded:
        """A fact, whether or not it may be stored."""
        origin = self.origin(actor)
        return self.store(Event(id=origin.id, key=self.key(session), data=fact, actor=actor, time=self.time))

    def store(self, event: Event) -> Recorded:
        before = self.sessions.get(event.key, Session(key=event.key))
        self.seq += 1
        payload = _encode(event)
        recorded = codec.decode(payload, seq=self.seq, previous=before.seq, time=self.time)
        self.sessions[event.key] = evolve(before, recorded)
        self.events.append(recorded)
        return recorded

    # --- what happens in most sessions ----------------------------------------------------------------------------

    def open(self, session: str, **opens: object) -> Recorded | None:
        return self.do(session, OpenSession(origin=self.origin(), opens=msgspec.convert(opens, Opens)))

    def say(self, session: str, text: str, *, message: str = "", agent: str | None = None, busy: str = "queue") -> str:
        """A message; the run it starts or waits for."""
        policy = msgspec.convert({"on_busy": busy}, PolicyData)
        name = message or f"m{self.seq + 1}"
        command = PostMessage(
            origin=self.origin(),
            message_id=name,
            author="user:ann",
            content=(Part(text=text),),
            specs=SPECS,
            agent=agent,
            policy=policy,
            opens=Opens(),
        )
        self.do(session, command)
        return self.key(session).run(self.sessions[self.key(session)].last_run)

    def start(self, session: str, n: int, *, trigger: str = "message", work: int = 0) -> None:
        run = self._run(session, n)
        started = RunStarted(
            run=n,
            attempt=run.attempt + 1,
            runner="runner:one",
            wake=Wake(work=work or self.seq, cause=run.requested_seq, delivery=1),
            trigger=msgspec.convert(trigger, type=RunStarted.__annotations__["trigger"]),
            message_ids=run.message_ids if run.attempt == 0 else (),
            model="demo",
        )
        gone = frozenset({run.wake.work}) if run.wake else frozenset[int]()
        self.do(session, StartRun(origin=self.origin("runner:one"), started=started, gone=gone))

    def end(self, session: str, n: int, content: str = "done", **fields: object) -> None:
        run = self._run(session, n)
        ended = {"status": "completed", "content": content, "duration": 12, "step_usage": Usage(output_tokens=3)}
        fact = RunEnded(**{"run": n, "attempt": run.attempt, **ended, **fields})  # pyright: ignore
        self.do(session, RecordFact(origin=self.origin("runner:one"), fact=fact))

    def turn(self, session: str, text: str = "hello", answer: str = "hi") -> int:
        """A whole turn: three events. The number of its run."""
        self.say(session, text)
        n = self.sessions[self.key(session)].last_run
        self.start(session, n)
        self.end(session, n, answer)
        return n

    def _run(self, session: str, n: int) -> Run:
        run = self.sessions[self.key(session)].run(n)
        assert run, f"run {n} of {session} has ended"
        return run


def _encode(event: Event) -> bytes:
    """The stored record; this release does not write types that it does not know, so that one is written by hand."""
    if not isinstance(event.data, Unknown):
        return codec.encode(event)
    record = {
        "specversion": "1.0",
        "id": event.id,
        "type": event.data.type,
        "source": f"/{event.key.account}/sessions/{event.key.session}",
        "time": codec.format_time(event.time),
        "actor": event.actor,
        "data": event.data.raw,
    }
    return msgspec.json.encode(record)


def wander(rng: random.Random, steps: int, *, sessions: int = 4, faults: bool = True) -> list[Recorded]:
    """A log of `steps` events over a few sessions: commands that `decide` lets in and, with `faults`, now and then
    something it would not."""
    log = Log()
    names = [f"s{n}" for n in range(sessions)]
    while len(log.events) < steps:
        log.time += rng.choice((0, 0, 1, 40, 5000))
        name = rng.choice(names)
        try:
            _step(log, rng, name, log.sessions.get(log.key(name), Session(key=log.key(name))), faults)
        except Rejected:
            continue
    return log.events


def _step(log: Log, rng: random.Random, name: str, session: Session, faults: bool) -> None:
    run = rng.choice(session.runs) if session.runs else None
    match rng.randrange(14):
        case 0:
            log.do(name, OpenSession(origin=log.origin(), opens=Opens(one_shot=rng.random() < 0.3)))
        case 1:
            title = Title(text=rng.choice(("Plan", "Ünïcode ☃ \0")), source="user") if rng.random() < 0.5 else None
            log.do(name, UpdateSession(origin=log.origin(), title=title, metadata={"k": rng.randrange(3)}))
        case 2 | 3 | 4 | 5:
            log.say(name, rng.choice(("hello", "  two\nlines \0", "🙂" * 80)), agent=rng.choice((None, "painter")))
        case 6 if run:
            log.do(name, CancelRun(origin=log.origin(), run=run.n, reason="enough"))
        case 7 if run:
            log.do(name, WithdrawMessage(origin=log.origin(), message_id=run.message_ids[0]))
        case 8 if rng.random() < 0.2:
            log.put(name, Unknown(type="plan.changed", raw=msgspec.Raw(b'{"items":[]}')))
        case 9 if faults and run and rng.random() < 0.3:  # what a stale writer would store if nothing stopped it
            log.put(name, RunEnded(run=run.n, attempt=run.attempt, status=rng.choice(("completed", "failed"))))
        case 10 if faults and rng.random() < 0.2 and session.last_run:
            log.put(name, RunEnded(run=rng.randint(1, session.last_run), attempt=1, status="failed"))
        case _ if run:
            _drive(log, rng, name, run)
        case _:
            pass


def _drive(log: Log, rng: random.Random, name: str, run: Run) -> None:
    """The next thing that a runner may report."""
    if run.status == "queued" or rng.random() < 0.1:
        log.start(name, run.n, trigger="recovery" if run.status == "running" else "message")
    elif run.open_calls:
        call = rng.choice(run.open_calls)
        facts: Sequence[ToolStarted | ToolReturned] = (
            ToolStarted(run=run.n, attempt=run.attempt, call_id=call.id),
            ToolReturned(run=run.n, attempt=run.attempt, call_id=call.id, status="ok", output="42", duration=7),
            ToolReturned(run=run.n, attempt=run.attempt, call_id=call.id, status="error", error="no"),
        )
        log.do(name, RecordFact(origin=log.origin("runner:one"), fact=rng.choice(facts)))
    elif rng.random() < 0.4:
        calls = tuple(ToolCall(id=f"c{k}", name="add", arguments='{"a":1}') for k in range(rng.randrange(1, 3)))
        reply = ModelReplied(
            run=run.n,
            attempt=run.attempt,
            step=run.steps + 1,
            content="let me see",
            reasoning="hm",
            tool_calls=calls,
            usage=Usage(input_tokens=10, output_tokens=2),
            duration=rng.choice((0, 30)),
        )
        log.do(name, RecordFact(origin=log.origin("runner:one"), fact=reply))
    elif rng.random() < 0.2:
        log.do(name, RecordFact(origin=log.origin("runner:one"), fact=RunReleased(run=run.n, attempt=run.attempt)))
    else:
        error = Error(code="model_error", message="503")
        failed = {"status": "failed", "error": error, "content": ""} if rng.random() < 0.3 else {}
        cancelled = {"status": "cancelled", "content": "par"} if run.cancel else {}
        log.end(name, run.n, **(cancelled or failed))


async def publish(broker: Broker, events: Sequence[Recorded]) -> None:
    """Stores these events in a stream that holds exactly what came before them, so that they keep their sequences."""
    for recorded in events:
        headers = {EXPECTED: str(recorded.previous), MESSAGE_ID: recorded.event.id, TYPE: recorded.event.type}
        await broker.nc.publish(subjects.session(recorded.event.key), recorded.payload, headers=headers)
    await broker.nc.flush()

    async def stored() -> bool:
        return (await extent(broker)).last == events[-1].seq

    await eventually(stored, what="every event stored")
