"""Logs for tests: whatever `decide` lets in, in any order, of any number of sessions; or anything at all."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
from tests.support.waiting import eventually

from turnstream import subjects
from turnstream.broker.answers import EXPECTED
from turnstream.broker.connection import Broker
from turnstream.ids import SessionKey, derive
from turnstream.log import archive, codec
from turnstream.session.commands import (
    Act,
    AnswerRequest,
    CancelRun,
    CloseFork,
    Command,
    DeleteSession,
    EndChild,
    EraseSession,
    ExpireRequest,
    ForkSession,
    OpenSession,
    Origin,
    PostMessage,
    RecordFact,
    ReportRun,
    RetrySession,
    RunFact,
    StartRun,
    UpdateSession,
    WithdrawMessage,
)
from turnstream.session.decide import decide
from turnstream.session.errors import Rejected
from turnstream.session.events import (
    ASK_USER,
    DELEGATE,
    Ask,
    Attachment,
    ChildEnded,
    ChildStarted,
    DeleteMode,
    EndStatus,
    Error,
    Event,
    Fact,
    ForkedFrom,
    ModelReplied,
    NodeFinished,
    NodeStarted,
    Opens,
    Parent,
    Part,
    PolicyData,
    Recorded,
    RunEnded,
    RunReleased,
    RunStarted,
    RunSteered,
    RunWaiting,
    SessionErased,
    Spec,
    Title,
    ToolCall,
    ToolReturned,
    ToolStarted,
    Unknown,
    Usage,
    Wake,
)
from turnstream.session.fold import evolve
from turnstream.session.forking import Places, copy_of
from turnstream.session.paths import name_of, place
from turnstream.session.policy import parse_policy
from turnstream.session.state import Run, Session, request_id
from turnstream.subjects import MESSAGE_ID, TYPE
from turnstream.views.batch import Archived
from turnstream_projector.reading import extent

SPECS = {
    name: Spec(agent=name, version="v1", digest="d1", model="demo", queue=queue)
    for name, queue in (("default", "default"), ("painter", "gpu"))
}
SPECS["flow"] = Spec(agent="flow", version="v1", digest="d1", model="", graph=True)
Entry = Recorded | Archived
BEGIN = 1_700_000_000_000


class Log:
    """A log in a list. `entries` are as a reader of the stream gets them: events, and records of runs."""

    def __init__(self, *, account: str = "default", time: int = BEGIN) -> None:
        self.account = account
        self.time = time
        self.seq = 0
        self.entries: list[Entry] = []
        self.sessions: dict[SessionKey, Session] = {}

    @property
    def events(self) -> list[Recorded]:
        return [entry for entry in self.entries if isinstance(entry, Recorded)]

    def key(self, session: str) -> SessionKey:
        return SessionKey(self.account, session)

    def origin(self, actor: str = "user:ann") -> Origin:
        return Origin(id=derive("test", self.account, len(self.entries), self.seq), actor=actor, time=self.time)

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
        self.entries.append(recorded)
        return recorded

    # --- what happens in most sessions ----------------------------------------------------------------------------

    def open(self, session: str, **opens: object) -> Recorded | None:
        return self.do(session, OpenSession(origin=self.origin(), opens=msgspec.convert(opens, Opens)))

    def say(
        self,
        session: str,
        text: str,
        *,
        message: str = "",
        agent: str | None = None,
        busy: str = "queue",
        author: str = "user:ann",
        attached: str = "",
        context: str = "",
    ) -> str:
        """A message; the run that was asked for last. `attached`: the name of something that came with it."""
        policy = msgspec.convert({"on_busy": busy}, PolicyData)
        name = message or f"m{self.seq + 1}"
        command = PostMessage(
            origin=self.origin(author),
            message_id=name,
            author=author,
            content=(Part(text=text),),
            attachments=(attachment(attached),) if attached else (),
            context=context,
            specs=SPECS,
            agent=agent,
            policy=policy,
            opens=Opens(),
        )
        self.do(session, command)
        return self.key(session).run(self.sessions[self.key(session)].last_run)

    def notice(self, session: str, text: str) -> None:
        """Something said that starts nothing."""
        command = PostMessage(
            origin=self.origin("agent:x"),
            message_id=f"n{self.seq + 1}",
            author="agent:x",
            kind="notice",
            content=(Part(text=text),),
            specs=SPECS,
            opens=Opens(),
        )
        self.do(session, command)

    def act(self, session: str, *, author: str = "user:ann", arguments: str = '{"a":1}') -> int:
        """A person calls a tool: the number of the run."""
        call = ToolCall(id="action", name="add", arguments=arguments)
        command = Act(
            origin=self.origin("client:k1"), action=call, author=author, specs=SPECS, tools={"default": {"add": ""}}
        )
        self.do(session, command)
        return self.sessions[self.key(session)].last_run

    def start(self, session: str, n: int, *, work: int = 0) -> None:
        run = self._run(session, n)
        trigger, message_ids = run.next_start()
        started = RunStarted(
            run=n,
            attempt=run.attempt + 1,
            runner="runner:one",
            wake=Wake(work=work or self.seq, cause=run.requested_seq, delivery=1),
            trigger=trigger,
            message_ids=message_ids,
            model="demo",
        )
        gone = frozenset({run.wake.work}) if run.wake else frozenset[int]()
        self.do(session, StartRun(origin=self.origin("runner:one"), started=started, gone=gone))

    def end(self, session: str, n: int, content: str = "done", **fields: object) -> None:
        run = self._run(session, n)
        ended = {"status": "completed", "content": content, "duration": 12, "step_usage": Usage(output_tokens=3)}
        fact = RunEnded(**{"run": n, "attempt": run.attempt, **ended, **fields})  # pyright: ignore
        self.do(session, RecordFact(origin=self.origin("runner:one"), fact=fact))

    def report(self, session: str, fact: RunFact) -> None:
        """What a runner reports of a run."""
        self.do(session, RecordFact(origin=self.origin("runner:one"), fact=fact))

    def reply(self, session: str, n: int, *calls: ToolCall, **fields: object) -> None:
        """A step that asks for these calls."""
        run = self._run(session, n)
        said = {"content": "let me see", "usage": Usage(input_tokens=10, output_tokens=2), "duration": 30}
        path = str(fields.get("path", ""))
        number = (run.visit(path).steps if path else run.steps) + 1
        step = {"run": n, "attempt": run.attempt, "step": number, "tool_calls": calls, "node": name_of(path)}
        self.report(session, ModelReplied(**{**step, **said, **fields}))  # pyright: ignore

    def begin(self, session: str, n: int, path: str, call: ToolCall | None = None, items: int = 0) -> None:
        """A node of a graph begins; the id of its call is its path."""
        call = msgspec.structs.replace(call, id=path) if call else None
        attempt, node = self._run(session, n).attempt, name_of(path)
        self.report(session, NodeStarted(run=n, attempt=attempt, node=node, path=path, call=call, items=items))

    def give(self, session: str, n: int, call_id: str, output: str = "42", **fields: object) -> None:
        """What came of a call."""
        run = self._run(session, n)
        call = run.call(call_id)
        path = call.path if call else ""
        where = {"run": n, "attempt": run.attempt, "call_id": call_id, **place(path)}
        self.report(session, ToolReturned(**{**where, "status": "ok", "output": output, **fields}))  # pyright: ignore

    def finish(self, session: str, n: int, path: str, port: str = "out", **fields: object) -> None:
        """The end of a node of a graph."""
        where = {"run": n, "attempt": self._run(session, n).attempt, **place(path)}
        self.report(session, NodeFinished(**{**where, "port": port, **fields}))  # pyright: ignore

    def ask(self, session: str, n: int, **fields: object) -> None:
        """Asks for everything that the run's open calls need, and waits."""
        run = self._run(session, n)
        requests = [
            Ask(
                **{
                    "request": request_id(self.sessions[self.key(session)], n, run.asked + number),
                    "kind": call.asks,
                    "call_id": call.id,
                    **place(call.path),
                    "prompt": f"May I, {call.id}?",
                    "digest": "d1" if call.asks == "approval" else "",
                    **fields,
                }  # pyright: ignore
            )
            for number, call in enumerate([call for call in run.open_calls if call.asks and not call.request], 1)
        ]
        self.report(session, RunWaiting(run=n, attempt=run.attempt, requests=tuple(requests)))

    def waits(self, session: str, *kinds: str, **fields: object) -> int:
        """A turn that waits for these: the number of its run."""
        self.say(session, "hello")
        n = self.sessions[self.key(session)].last_run
        self.start(session, n)
        calls = tuple(
            ToolCall(id=f"c{k}", name=ASK_USER if kind == "question" else "remove", arguments="{}", asks=kind)  # pyright: ignore
            for k, kind in enumerate(kinds, 1)
        )
        self.reply(session, n, *calls)
        self.ask(session, n, **fields)
        return n

    # --- what one session delegates to another ------------------------------------------------------------------------

    def delegates(self, session: str, *waits: bool) -> int:
        """A turn that delegates: the number of its run."""
        self.say(session, "hello")
        n = self.sessions[self.key(session)].last_run
        self.hand_on(session, n, *waits)
        return n

    def hand_on(self, session: str, n: int, *waits: bool) -> None:
        """The run starts, delegates once for each of `waits`, and parks on those that it waits for."""
        self.start(session, n)
        self.reply(session, n, *[child_call(f"d{k}") for k in range(1, len(waits) + 1)])
        for k, wait in enumerate(waits, 1):
            self.delegate(session, n, f"d{k}", wait=wait)
        for call in [call for call in self._run(session, n).open_calls if not call.wait]:
            fact = ToolReturned(run=n, attempt=self._run(session, n).attempt, call_id=call.id, status="ok", output="{}")
            self.report(session, fact)
        if any(waits):
            self.ask(session, n)

    def delegate(self, session: str, n: int, call_id: str, *, wait: bool = True) -> None:
        """The intent, and the child's session."""
        self.intend(session, n, call_id, wait=wait)
        self.open_child(session, n, self._run(session, n).children)

    def intend(self, session: str, n: int, call_id: str, *, wait: bool = True) -> None:
        run = self._run(session, n)
        k = run.children + 1
        name = self.key(session).child(n, k).session
        call = run.call(call_id)
        fact = ChildStarted(
            run=n,
            attempt=run.attempt,
            call_id=call_id,
            node=name_of(call.path) if call else "",
            path=call.path if call else "",
            k=k,
            child_session=name,
            wait=wait,
            spec=SPECS["default"],
        )
        self.report(session, fact)

    def open_child(self, session: str, n: int, k: int) -> None:
        child = self.sessions[self.key(session)].child(n, k)
        assert child
        command = PostMessage(
            origin=self.origin("agent:default"),
            message_id="brief",
            author="agent:default",
            content=(Part(text="do it"),),
            specs=SPECS,
            opens=Opens(parent=Parent(session=session, run=n, call_id=child.call_id, k=k)),
        )
        self.do(child.session, command)

    def tell(self, child: str, status: EndStatus = "completed", **fields: object) -> None:
        """What came of run 1 of a child that has ended is told, and that it was."""
        parent = self.sessions[self.key(child)].parent
        assert parent
        usage = Usage(output_tokens=3)
        said = {"run": parent.run, "call_id": parent.call_id, "k": parent.k, "status": status, "usage": usage}
        ended = ChildEnded(**{**said, **fields})  # pyright: ignore
        told = True
        try:
            self.do(parent.session, EndChild(origin=self.origin("runner:one"), ended=ended))
        except Rejected:
            told = False
        if self.sessions[self.key(child)].exists:
            self.do(child, ReportRun(origin=self.origin("runner:one"), run=1, told=told))

    # --- forks --------------------------------------------------------------------------------------------------------

    def fork(self, session: str, source: str, *, at: int | None = None, **opens: object) -> None:
        """Opens a fork of everything in `source` up to the sequence `at`."""
        of = self.sessions[self.key(source)]
        through = max(entry.seq for entry in self._events_of(source) if at is None or entry.seq <= at)
        given: Any = tuple(opens)
        forked_from = ForkedFrom(session=source, through=through, queue=of.last_queue, given=given)
        self.do(
            session, ForkSession(origin=self.origin(), opens=msgspec.convert(opens, Opens), forked_from=forked_from)
        )

    def copy(self, session: str, count: int | None = None) -> None:
        """Copies the next events, `count` or all; then what is live ends, and the fork is whole."""
        key = self.key(session)
        fork = self.sessions[key]
        assert fork.forked_from
        assert fork.copying
        source, through, done = fork.forked_from.session, fork.forked_from.through, fork.copying.seq
        missing = [recorded for recorded in self._events_of(source) if done < recorded.seq <= through]
        places = Places()
        for copy in self._events_of(session):
            if copy.event.copied:
                places.add(copy.event.copied.seq, copy.seq)
        for recorded in missing[:count]:
            if copy := self.do(session, copy_of(recorded, self.key(source), key, places)):
                places.add(recorded.seq, copy.seq)
        while (fork := self.sessions[key]).copying and len(missing[:count]) == len(missing):
            self.do(session, CloseFork(origin=self.origin("runner:one"), run=fork.runs[0].n if fork.runs else 0))

    def _events_of(self, session: str) -> list[Recorded]:
        return [recorded for recorded in self.events if recorded.event.key == self.key(session)]

    # --- answers, ends ------------------------------------------------------------------------------------------------

    def answer(self, session: str, n: int, k: int | None = None, answer: object = None, **fields: object) -> None:
        command = AnswerRequest(origin=self.origin("user:bob"), run=n, request=k, answer=answer, **fields)  # pyright: ignore
        self.do(session, command)

    def delete(self, session: str, mode: DeleteMode = "erase") -> None:
        self.do(session, DeleteSession(origin=self.origin(), specs=SPECS, mode=mode, active="cancel"))

    def erase(self, session: str, *, archives: bool = True) -> None:
        """Ends a deletion as a runner does: keeps what is kept of each run, removes what there was, and says so."""
        key = self.key(session)
        deleted = self.sessions[key].deleted
        assert deleted
        events = [entry for entry in self.entries if isinstance(entry, Recorded) and entry.event.key == key]
        if deleted.mode == "detach" and archives:
            for n, own in archive.split(events).items():
                self.seq += 1
                run, kept = archive.decode(archive.encode(key, n, own, 1 << 20), self.seq)
                self.entries.append(Archived(seq=self.seq, key=key, run=run, events=kept))
        self.do(session, EraseSession(origin=self.origin("runner:one"), events_removed=len(events)))

    @property
    def left(self) -> list[Entry]:
        """The log as it is once everything was removed that deletions remove."""
        begins = {}
        for entry in self.entries:
            if isinstance(entry, Recorded) and isinstance(entry.event.data, SessionErased):
                begins[entry.event.key] = entry.seq
        return [
            entry
            for entry in self.entries
            if isinstance(entry, Archived) or entry.seq >= begins.get(entry.event.key, 0)
        ]

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


def child_call(call_id: str) -> ToolCall:
    return ToolCall(id=call_id, name=DELEGATE, arguments='{"brief":"do it"}', asks="child")


def attachment(name: str) -> Attachment:
    blob = f"default/s1/attachments/{name}"
    return Attachment(name=name, media_type="text/plain", size=5, sha256="ab" * 32, blob=blob)


def _encode(event: Event) -> bytes:
    """The stored record; this release does not write types that it does not know, so that one is written by hand."""
    if not isinstance(event.data, Unknown) or event.copied:
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


def wander(rng: random.Random, steps: int, *, sessions: int = 6, faults: bool = True) -> Log:
    """A log of at least `steps` entries over a few sessions: commands that `decide` lets in and, with `faults`, now and
    then something it would not."""
    log = Log()
    names = [f"s{n}" for n in range(sessions)]
    while len(log.entries) < steps:
        log.time += rng.choice((0, 0, 1, 40, 5000))
        if all((session := log.sessions.get(log.key(name))) and session.deleted for name in names):
            names.append(f"s{len(names)}")
        others = [key.session for key, session in log.sessions.items() if session.parent or session.forked_from]
        name = rng.choice(others if others and rng.random() < 0.3 else names)
        try:
            _step(log, rng, name, log.sessions.get(log.key(name), Session(key=log.key(name))), faults)
        except Rejected:
            continue
    return log


def _step(log: Log, rng: random.Random, name: str, session: Session, faults: bool) -> None:
    run = rng.choice(session.runs) if session.runs else None
    if session.copying and rng.random() < 0.9:
        _copy(log, rng, name, session)
        return
    match rng.randrange(26):
        case 0:
            log.do(name, OpenSession(origin=log.origin(), opens=Opens(one_shot=rng.random() < 0.3)))
        case 1:
            title = Title(text=rng.choice(("Plan", "Ünïcode ☃ \0")), source="user") if rng.random() < 0.5 else None
            policy = parse_policy(rng.choice(POLICIES)) if rng.random() < 0.5 else None
            metadata: dict[str, object] = {"k": rng.randrange(3)}
            log.do(name, UpdateSession(origin=log.origin(), title=title, metadata=metadata, policy=policy))
        case 2 | 3 | 4 | 5 | 6:
            text, agent = (
                rng.choice(("hello", "  two\nlines \0", "🙂" * 80, "")),
                rng.choice((None, None, "painter", "flow")),
            )
            busy = rng.choice(("queue", "steer", "steer", "interrupt", "parallel"))
            author = rng.choice(("user:ann", "user:bob", "agent:x"))
            log.say(name, text, agent=agent, busy=busy, author=author, attached="" if text else "Ünïcode ☃")
        case 7 if run:
            log.do(name, CancelRun(origin=log.origin(), run=run.n, reason="enough", disconnected=rng.random() < 0.2))
        case 8 if run and (run.message_ids or run.steering):
            message = rng.choice((*run.message_ids, *run.steering))
            log.do(name, WithdrawMessage(origin=log.origin(), message_id=message))
        case 9 if rng.random() < 0.2 and (faults or session.exists):
            log.put(name, Unknown(type="session.starred", raw=msgspec.Raw(b'{"stars":5}')))
        case 10 if faults and run and rng.random() < 0.3:  # what a stale writer would store if nothing stopped it
            log.put(name, RunEnded(run=run.n, attempt=run.attempt, status=rng.choice(("completed", "failed"))))
        case 11 if faults and rng.random() < 0.2 and session.last_run:
            log.put(name, RunEnded(run=rng.randint(1, session.last_run), attempt=1, status="failed"))
        case 12 if rng.random() < 0.5:
            log.do(name, RetrySession(origin=log.origin(), specs=SPECS))
        case 12:
            log.act(name, author=rng.choice(("user:ann", "client:k1")))
        case 13 if rng.random() < 0.15:
            if not session.deleted:
                log.delete(name, rng.choice(("detach", "erase")))
            elif not session.deleted.erased:
                log.erase(name)
        case 14 | 15 if session.unreported and session.last_ended:
            log.tell(name, session.last_ended.status)  # pyright: ignore
        case 24 if session.exists and not session.copying and rng.random() < 0.3:
            at = rng.choice(log.events).seq if rng.random() < 0.5 else None
            begun = min([recorded.seq for recorded in log.events if recorded.event.key == log.key(name)])
            given: dict[str, object] = {"title": {"text": "Fork", "source": "client"}} if rng.random() < 0.3 else {}
            log.fork(f"f{len(log.entries)}", name, at=max(at, begun) if at else None, **given)
        case 25 if rng.random() < 0.5:
            log.notice(name, "by the way")
        case _ if run:
            _drive(log, rng, name, run)
        case _:
            pass


def _copy(log: Log, rng: random.Random, name: str, session: Session) -> None:
    """The next events of a fork; its end, if what it is of is gone."""
    assert session.forked_from
    if log.sessions[log.key(session.forked_from.session)].deleted:
        log.delete(name)
    else:
        log.copy(name, rng.choice((1, 3, 10, None)))


POLICIES: tuple[dict[str, object], ...] = (
    {"preset": "memory"},
    {"preset": "thread", "clock": "wall"},
    {"preset": "workspace", "starters": "people"},
    {"on_message": {"question": "queue", "approval": "decline"}, "recovery": "fail", "titles": "none"},
)


def _drive(log: Log, rng: random.Random, name: str, run: Run) -> None:
    """The next thing that a runner, or whoever is asked, may say."""
    asking = [call for call in run.open_calls if call.asks and not call.request and not call.closed]
    intended = [call for call in run.open_calls if call.asks == "child" and not call.child]
    if run.status == "queued" or rng.random() < 0.1:
        log.start(name, run.n)
    elif run.status == "waiting":
        _close(log, rng, name, run)
    elif run.spec.graph and run.trigger != "action" and rng.random() < 0.7:
        _go_through(log, rng, name, run)
    elif intended and rng.random() < 0.8:
        log.delegate(name, run.n, intended[0].id, wait=rng.random() < 0.8)
    elif run.open_calls and len(asking) == len(run.open_calls):
        expires = rng.choice((None, None, 1000))
        log.ask(name, run.n, expires_in=expires, on_expiry=rng.choice(("fail", "null")))
    elif run.open_calls:
        _carry_out(log, rng, name, run)
    elif run.steering and rng.random() < 0.7:
        log.report(name, RunSteered(run=run.n, attempt=run.attempt, message_ids=run.steering))
    elif rng.random() < 0.4:
        calls = [
            child_call(f"c{run.steps}-{k}")
            if rng.random() < 0.2
            else ToolCall(
                id=f"c{k}", name="add", arguments='{"a":1}', asks=rng.choice((None, None, "question", "approval"))
            )
            for k in range(rng.randrange(1, 4))
        ]
        log.reply(name, run.n, *calls, reasoning="hm", duration=rng.choice((0, 30)))
    elif rng.random() < 0.2:
        log.report(name, RunReleased(run=run.n, attempt=run.attempt))
    else:
        error = Error(code="model_error", message="503")
        failed = {"status": "failed", "error": error, "content": ""} if rng.random() < 0.3 else {}
        cancelled = {"status": "cancelled", "content": "par"} if run.cancel else {}
        log.end(name, run.n, **(cancelled or failed))


PATHS = ("q", "a", "b", "each", "each[0].a", "each[1].a", "each[1].again", "each[1].again[0].a", "each[1].again[1].b")


def _go_through(log: Log, rng: random.Random, name: str, run: Run) -> None:
    """A node begins, says something or finishes."""
    path = rng.choice(PATHS)
    match rng.randrange(4):
        case 0:
            asks = rng.choice((None, None, "question", "approval", "child"))
            call = child_call("") if asks == "child" else ToolCall(id="", name="add", arguments="{}", asks=asks)
            log.begin(name, run.n, path, call)
        case 1:
            log.begin(name, run.n, path, items=run.visit(path).items + 1)
        case 2:
            log.reply(name, run.n, ToolCall(id=f"c{log.seq}", name="add", arguments="{}"), path=path)
        case _:
            said = {"model": "demo", "duration": rng.choice((0, 30)), "usage": Usage(output_tokens=2)}
            failed = {"port": "err", "error": "no"} if rng.random() < 0.3 else {"output": "42"}
            log.finish(name, run.n, path, **failed, **(said if rng.random() < 0.5 else {}))


def _close(log: Log, rng: random.Random, name: str, run: Run) -> None:
    if not run.for_people:
        return
    request = rng.choice(run.for_people)
    if rng.random() < 0.3:
        log.do(name, ExpireRequest(origin=log.origin("runner:one"), run=run.n, request=request.k, now=log.time))
    elif request.kind == "approval":
        log.answer(name, run.n, request.k, approved=rng.random() < 0.5, reason=rng.choice(("", "why not")))
    else:
        log.answer(name, run.n, request.k, rng.choice(("blue", {"n": [1, None]})))


def _carry_out(log: Log, rng: random.Random, name: str, run: Run) -> None:
    call = rng.choice(run.open_calls)
    facts: Sequence[ToolStarted | ToolReturned] = (
        ToolStarted(run=run.n, attempt=run.attempt, call_id=call.id),
        ToolReturned(run=run.n, attempt=run.attempt, call_id=call.id, status="ok", output="42", duration=7),
        ToolReturned(run=run.n, attempt=run.attempt, call_id=call.id, status="error", error="no"),
        ToolReturned(run=run.n, attempt=run.attempt, call_id=call.id, status="denied", error="no"),
        ToolReturned(run=run.n, attempt=run.attempt, call_id=call.id, status="uncertain"),
    )
    log.report(name, rng.choice(facts))


async def publish(broker: Broker, entries: Sequence[Entry]) -> None:
    """Stores these events and records in a stream that holds exactly what came before them, so that they keep their
    sequences. Nothing is removed from it."""
    for recorded in entries:
        if isinstance(recorded, Archived):
            payload = archive.encode(recorded.key, recorded.run, recorded.events, 1 << 20)
            await broker.nc.publish(subjects.archive(recorded.key, recorded.run), payload)
            continue
        headers = {EXPECTED: str(recorded.previous), MESSAGE_ID: recorded.event.id, TYPE: recorded.event.type}
        await broker.nc.publish(subjects.session(recorded.event.key), recorded.payload, headers=headers)
    await broker.nc.flush()

    async def stored() -> bool:
        return (await extent(broker)).last == entries[-1].seq

    await eventually(stored, what="every event stored")
