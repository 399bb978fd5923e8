"""What must be true of the log of any session: read event by event, as an outsider would who knows neither the fold nor
the table of edges."""

from collections.abc import Callable

from turnstream.session.commands import RunFact
from turnstream.session.events import (
    Answers,
    Ask,
    ChildEnded,
    ChildStarted,
    Leftover,
    MessagePosted,
    MessageWithdrawn,
    ModelReplied,
    NodeFinished,
    NodeStarted,
    Parent,
    PlanChanged,
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
    SessionOpened,
    SessionUpdated,
    Spec,
    ToolReturned,
    ToolStarted,
    Usage,
)
from turnstream.session.policy import resolve

RANKS = ["derived", "client", "agent", "user"]
"""Where a title comes from: a later one is never replaced by an earlier one."""


class Auditor:
    """Fails as soon as a log says what must not be."""

    def __init__(self) -> None:
        self.seq = 0
        self.deleted = False
        self.deletion: str | None = None
        """The key of the command that deleted it."""
        self.line: list[int] = []
        """The runs that have not ended, in the order of their turns."""
        self.free: set[int] = set()
        """Runs that wait for nobody."""
        self.specs: dict[int, Spec] = {}
        self.interrupting: dict[int, list[int]] = {}
        """The runs that came to interrupt each run."""
        self.running: set[int] = set()
        self.waiting: set[int] = set()
        """The runs that have open requests."""
        self.resumed: set[int] = set()
        """The runs that waited for their children alone, have nothing open any more, and have not gone on."""
        self.to_resume: set[int] = set()
        """The runs that have waited and not gone on since: each goes on once."""
        self.attempts: dict[int, int] = {}
        self.over: set[int] = set()
        self.cancelled: dict[int, str | None] = {}
        self.own: dict[int, list[str]] = {}
        """The messages that a run's first start takes."""
        self.retries: set[int] = set()
        self.actions: set[int] = set()
        self.waits: dict[str, int] = {}
        """The run that is to take each message."""
        self.fate: dict[str, str] = {}
        """What became of each message in the end."""
        self.replies: dict[int, list[str]] = {}
        """The messages that have answered, and that no start has named."""
        self.open: dict[int, set[str]] = {}
        """The calls that have no result."""
        self.begun: dict[tuple[int, str], int] = {}
        self.asking: dict[tuple[int, str], str] = {}
        """Of calls, by run and id, the path of the node that each is for."""
        self.items: dict[tuple[int, str], int] = {}
        """The nodes that have begun, by run and path: how often the graph inside of each is gone through."""
        self.finished: dict[tuple[int, str], str] = {}
        """The nodes that have finished, and by which port."""
        self.asked: dict[int, int] = {}
        self.requests: dict[str, tuple[int, Ask, int]] = {}
        """The open requests: their run, what they ask, and when."""
        self.children: dict[tuple[int, int], ChildStarted] = {}
        """Those that have not ended, by run and number."""
        self.doomed: set[tuple[int, int]] = set()
        """Those of them that nobody waits for any more."""
        self.born: dict[int, int] = {}
        """How many children each run has had."""
        self.usage: dict[int, Usage] = {}
        """What each run has used, its children included."""
        self.parent: Parent | None = None
        self.reported: bool | None = None
        """Whether the parent has been told how run 1 ended, or is gone; None: it has not ended."""
        self.title = "derived"
        self.untitled = False
        self.keys: set[str] = set()
        self.ids: set[str] = set()

    @property
    def live(self) -> set[int]:
        return set(self.line)

    def parks(self, run: int) -> bool:
        """Whether it waits for its children alone."""
        return run in self.waiting and all(ask.kind == "child" for _, ask in self._asked(run))

    @property
    def busy(self) -> list[int]:
        """The runs that keep the session busy."""
        return [run for run in self.line if not self.parks(run)]

    @property
    def holders(self) -> list[int]:
        """The runs that have begun and hold the turn, or would if they did not wait for nobody."""
        return [run for run in self.busy if self.attempts[run] and run not in self.resumed]

    @property
    def front(self) -> int:
        return (self.holders or [run for run in self.busy if run in self.resumed] or self.busy)[0]

    def _asked(self, run: int) -> list[tuple[str, Ask]]:
        return [(name, ask) for name, (other, ask, _) in self.requests.items() if other == run]

    def read(self, recorded: Recorded) -> None:
        event = recorded.event
        assert recorded.previous == self.seq < recorded.seq
        self.seq = recorded.seq
        assert event.id not in self.ids, "an event is stored once"
        self.ids.add(event.id)
        data = event.data
        key = event.idempotency_key
        if isinstance(data, SessionErased):
            assert key == self.deletion, "what is left of a session knows the command that deleted it"
        elif key:
            assert key not in self.keys, "a key has one effect"
            self.keys.add(key)
        if isinstance(data, SessionDeleted):
            self.deletion = key
        assert not self.deleted or isinstance(data, SessionErased), "something is stored in a deleted session"
        run = getattr(data, "run", 0)
        of_the_end = isinstance(data, ChildEnded | RunReported)
        assert run not in self.over or of_the_end, f"a fact of run {run} after its end"
        if isinstance(data, RunFact):
            assert data.attempt == self.attempts[run], "a fact of another attempt"
        read: Callable[..., None] | None = getattr(self, f"_{type(data).__name__}", None)
        if read:
            read(data)
        if isinstance(data, RunWaiting | RequestExpired):
            self._read_timed(data, recorded.time)
        assert len(set(self.line)) == len(self.line)
        assert len(set(self.holders) - self.free) <= 1, "two runs hold the turn"
        assert set(self.waits.values()) <= self.live, "a message waits for a run that has ended"

    def _begin(self, run: int, spec: Spec, names: list[str], *, behind: list[int] | None = None) -> None:
        """It is the last in line, or right behind the last of these that are there; where none is, the first."""
        assert run == len(self.attempts) + 1, "runs are numbered without gaps"
        self.attempts[run] = 0
        self.specs[run] = spec
        self.usage[run] = Usage()
        self.own[run] = names
        before = self.line if behind is None else [other for other in self.line if other in behind]
        self.line.insert(self.line.index(before[-1]) + 1 if before else 0, run)

    def _SessionOpened(self, data: SessionOpened) -> None:
        self.parent = data.parent

    def _SessionUpdated(self, data: SessionUpdated) -> None:
        if data.title:
            assert RANKS.index(data.title.source) >= RANKS.index(self.title), "a title is replaced by a lesser one"
            self.title = data.title.source
        assert not (data.untitled and self.untitled), "that there is no title is found once"
        self.untitled |= data.untitled

    def _MessagePosted(self, data: MessagePosted) -> None:
        name = data.message_id
        if data.opens:
            self.parent = data.opens.parent
        assert name not in self.waits
        assert name not in self.fate
        ways = [way for way in (data.starts, data.queued, data.steers, data.answers) if way]
        assert len(ways) <= 1
        assert data.kind == "message" or not ways
        if not ways:
            self.fate[name] = "none"
        if data.answers:
            self._answers(name, data.answers)
        if data.steers:
            assert data.steers.run in self.live
            self.waits[name] = data.steers.run
        if data.starts or data.queued:
            run = data.run
            self.free |= {run} if data.starts and self.busy else set()
            assert data.starts or self.line, "it waits for nobody"
            interrupted = data.queued.interrupts if data.queued else 0
            if interrupted:
                assert interrupted == self.front, "it cancels what merely waits"
                self.cancelled.setdefault(interrupted, None)
                self._doom(interrupted)
                self.interrupting.setdefault(interrupted, []).append(run)
            self._begin(run, (data.starts or data.queued).spec, [name], behind=[interrupted] if interrupted else None)
            self.waits[name] = run

    def _answers(self, name: str, data: Answers) -> None:
        self.fate[name] = "answered"
        self.replies.setdefault(data.run, []).append(name)
        assert data.requests
        for one in data.requests:
            run, ask, _ = self._close(one.request)
            assert run == data.run
            assert ask.kind != "child"
            assert one.declined == (ask.kind == "approval")
            assert not ask.choices or one.declined or one.answer in ask.choices

    def _MessageWithdrawn(self, data: MessageWithdrawn) -> None:
        run = self.waits.pop(data.message_id)
        self.fate[data.message_id] = "settled"
        if data.message_id in self.own[run]:
            assert self.attempts[run] == 0
            self.own[run].remove(data.message_id)
            if not self.own[run]:
                self.own[run] = [name for name, other in self.waits.items() if other == run]
        assert bool(data.run) == (not self.own[run])
        if data.run:
            assert data.run == run
            self._over(run)

    def _RunRequested(self, data: RunRequested) -> None:
        if data.trigger == "retry":
            assert not self.busy, "a turn is tried again while another is live"
            assert data.retry_of in self.over
            assert not any(run > data.retry_of for run in self.line), "a turn is tried again that is not the latest"
            assert all(self.fate[name] in ("taken", "settled", "answered") for name in data.message_ids)
            self.retries.add(data.run)
        else:
            assert data.action
            assert not data.message_ids
            self.actions.add(data.run)
            assert not data.queued or self.line, "it waits for nobody"
            self.free |= {data.run} if self.busy and not data.queued else set()
            self.open[data.run] = {data.action.id}
        self._begin(data.run, data.spec, list(data.message_ids))

    def _RunStarted(self, data: RunStarted) -> None:
        run = data.run
        assert data.attempt == self.attempts[run] + 1
        assert run not in self.cancelled, "a cancelled run is started again"
        assert not self._asked(run), "an open request"
        assert (data.trigger in ("reply", "answers")) == (run in self.to_resume), "it goes on once"
        self.to_resume.discard(run)
        if data.attempt == 1:
            before = self.line[: self.line.index(run)]
            passes = resolve(self.specs[run].policy).on_message_parked == "interleave"
            fits = all(self.parks(other) and passes for other in before) and not self.resumed - self.free
            assert run in self.free or fits, "it is not its turn"
            assert list(data.message_ids) == self.own[run]
            assert (data.trigger == "action") == (run in self.actions)
            self._take(run, data.message_ids, again=run in self.retries)
        elif data.trigger == "reply":
            assert list(data.message_ids) == self.replies.pop(run)
        elif data.trigger == "answers":
            replies = self.replies.pop(run, [])
            assert list(data.message_ids[: len(replies)]) == replies
            self._take(run, data.message_ids[len(replies) :])
        else:
            assert data.message_ids == ()
            assert not self.replies.get(run)
        assert (data.trigger == "recovery") == (run in self.running)
        self.attempts[run] = data.attempt
        self.running.add(run)
        self.resumed.discard(run)

    def _take(self, run: int, names: tuple[str, ...], *, again: bool = False) -> None:
        waiting = [name for name, other in self.waits.items() if other == run]
        for name in names:
            if again:
                self.fate[name] = "answered" if self.fate[name] == "answered" else "taken"
                continue
            assert self.waits.pop(name) == run, "it waits for another run"
            assert name not in self.fate, "a message is taken twice"
            self.fate[name] = "taken"
        assert again or list(names) == waiting[: len(names)], "the oldest are taken first"

    def _RunSteered(self, data: RunSteered) -> None:
        assert data.run in self.running
        assert data.run not in self.cancelled
        assert data.message_ids
        assert not self.open.get(data.run), "a message between a call and its result"
        self._take(data.run, data.message_ids)

    def _RunReleased(self, data: RunReleased) -> None:
        self.running.remove(data.run)

    def _ModelReplied(self, data: ModelReplied) -> None:
        assert data.run in self.running
        assert data.run not in self.cancelled
        if data.path:
            self._of_node(data.run, data.path)
            assert data.tool_calls or data.misfit
            self.items.setdefault((data.run, data.path), 0)
            self._call(data.run, data.path, *[call.id for call in data.tool_calls])
            self.usage[data.run] += data.usage
            return
        assert not self.open.get(data.run), "a step before the results of the last one"
        self.open[data.run] = {call.id for call in data.tool_calls}
        assert len(self.open[data.run]) == len(data.tool_calls)
        fits = data.run in self.waits.values() and not data.misfit
        assert data.tool_calls or fits or (data.misfit and data.run == 1), "an answer is kept from its end by nothing"
        assert not data.misfit or (self.parent and self.parent.schema is not None)
        self.usage[data.run] += data.usage
        self.begun = {place: attempt for place, attempt in self.begun.items() if place[0] != data.run}

    def _call(self, run: int, path: str, *calls: str) -> None:
        """A node asks for these calls."""
        there = self.open.setdefault(run, set())
        assert len(there | set(calls)) == len(there) + len(calls), "a call under the id of another one"
        there.update(calls)
        self.asking.update({(run, call): path for call in calls})

    def _open_of(self, run: int, path: str) -> set[str]:
        """The open calls of a node."""
        return {call for call in self.open.get(run, set()) if self.asking.get((run, call)) == path}

    def _of_node(self, run: int, path: str) -> None:
        """It has not finished, its calls are back, and it is in a graph that is gone through."""
        assert (run, path) not in self.finished, "something of a node that has finished"
        assert self._open_of(run, path) <= {path}, "a node goes on before the results of its calls"
        outer, _, name = path.rpartition(".")
        assert name
        while outer:
            node, _, number = outer.rpartition("[")
            assert (run, node) not in self.finished, "something from inside of a node that has finished"
            assert int(number.removesuffix("]")) < self.items[run, node], "an element that is not there"
            outer = node.rpartition(".")[0]

    def _NodeStarted(self, data: NodeStarted) -> None:
        run, path = data.run, data.path
        assert run in self.running
        assert run not in self.cancelled
        self._of_node(run, path)
        assert data.node == path.rpartition(".")[2]
        if (run, path) in self.items:
            assert data.call is None
            assert data.items == self.items[run, path] + 1, "a node begins twice"
        self.items[run, path] = data.items
        if data.call:
            assert data.call.id == path
            self._call(run, path, path)

    def _NodeFinished(self, data: NodeFinished) -> None:
        run, path = data.run, data.path
        assert run in self.running
        assert run not in self.cancelled
        self._of_node(run, path)
        assert data.node == path.rpartition(".")[2]
        assert not self._waits_for(run, path), "a node finishes before its child has ended"
        if self.begun.get((run, path), data.attempt) < data.attempt:
            assert data.port == "err", "a call of a dead attempt is told to be done"
        left = {
            call
            for call in self.open.get(run, set())
            if (of := self.asking.get((run, call), "")) == path or of.startswith(f"{path}[")
        }
        self.open[run] = self.open.get(run, set()) - left
        self.doomed |= {name for name, child in self.children.items() if name[0] == run and child.call_id in left}
        self.finished[run, path] = data.port
        self.usage[run] += data.usage

    def _waits_for(self, run: int, call: str) -> bool:
        return any((one.run, one.call_id, one.wait) == (run, call, True) for one in self.children.values())

    def _ToolStarted(self, data: ToolStarted) -> None:
        assert data.run in self.running
        assert data.call_id in self.open[data.run]
        assert (data.run, data.call_id) not in self.begun, "begun twice"
        self.begun[data.run, data.call_id] = data.attempt

    def _ToolReturned(self, data: ToolReturned) -> None:
        assert data.run in self.running
        self.open[data.run].remove(data.call_id)
        assert self.asking.get((data.run, data.call_id)) != data.call_id, "a node returns, and does not finish"
        assert not self._waits_for(data.run, data.call_id), "a call returns before its child has ended"
        if self.begun.get((data.run, data.call_id), data.attempt) < data.attempt:
            assert data.status in ("uncertain", "interrupted"), "a call of a dead attempt is told to be done"

    def _read_timed(self, data: RunWaiting | RequestExpired, now: int) -> None:
        if isinstance(data, RequestExpired):
            _, ask, asked_at = self._close(data.request)
            assert ask.expires_in is not None
            assert now >= asked_at + ask.expires_in, "it has expired too early"
            return
        run = data.run
        self.running.remove(run)
        assert run not in self.cancelled
        assert {ask.call_id for ask in data.requests} == self.open[run]
        for ask in data.requests:
            self.asked[run] = self.asked.get(run, 0) + 1
            assert ask.request == f"s1.{run}.q{self.asked[run]}"
            self.requests[ask.request] = (run, ask, now)
        self.waiting.add(run)
        self.to_resume.add(run)

    def _close(self, request: str) -> tuple[int, Ask, int]:
        """A request is not open any more. With none left open, its run is to go on."""
        run = self.requests[request][0]
        parks = self.parks(run)
        found = self.requests.pop(request)
        if not self._asked(run):
            self.waiting.remove(run)
            self.resumed |= {run} if parks else set()
        return found

    def _RequestAnswered(self, data: RequestAnswered) -> None:
        run, ask, _ = self._close(data.request)
        assert run == data.run
        assert ask.kind != "child"
        assert (data.approved is None) == (ask.kind == "question")
        assert not ask.choices or data.approved is not None or data.answer in ask.choices

    def _RunCancelRequested(self, data: RunCancelRequested) -> None:
        assert data.run in self.running
        assert data.run not in self.cancelled
        self.cancelled[data.run] = data.error
        self._doom(data.run)

    def _ChildStarted(self, data: ChildStarted) -> None:
        assert data.run in self.running
        assert data.run not in self.cancelled
        assert data.call_id in self.open[data.run]
        assert data.k == self.born.get(data.run, 0) + 1, "children are numbered without gaps"
        self.born[data.run] = data.k
        self.children[data.run, data.k] = data

    def _ChildEnded(self, data: ChildEnded) -> None:
        child = self.children.pop((data.run, data.k))
        self.doomed.discard((data.run, data.k))
        waits = data.run in self.live and child.wait and child.call_id in self.open[data.run]
        assert data.late != waits
        if data.run not in self.live:
            return
        self.usage[data.run] += data.usage
        for name, ask in self._asked(data.run):
            if ask.kind == "child" and ask.call_id == child.call_id and child.wait:
                self._close(name)

    def _RunReported(self, data: RunReported) -> None:
        assert data.run == 1
        assert self.reported is False, "it is told before the end, or twice"
        self.reported = True

    def _PlanChanged(self, data: PlanChanged) -> None:
        assert data.run in self.running
        assert data.run not in self.cancelled
        assert data.call_id in self.open[data.run]

    def _doom(self, run: int | None = None) -> None:
        """Nobody waits any more for the children of this run, or of all."""
        self.doomed |= {name for name in self.children if run in (None, name[0])}

    def _RunEnded(self, data: RunEnded) -> None:
        run = data.run
        assert run in self.live
        code = data.error.code if data.error else None
        if run in self.cancelled:
            allowed = ("cancelled", None) if self.cancelled[run] is None else ("failed", self.cancelled[run])
            assert (data.status, code) == allowed
        assert set(data.unfinished) == self.open.get(run, set()), "every call ends in a result or with its run"
        assert data.status != "completed" or (run in self.running and not data.unfinished)
        assert data.status != "completed" or not self._goes_on(run), "a run is completed while a node goes on"
        steering = [name for name, other in self.waits.items() if other == run and name not in self.own[run]]
        left = data.leftover
        assert list(left.message_ids if left else ()) == steering, "what is left over is all that steered it"
        assert data.usage == self.usage[run] + data.step_usage
        if data.status != "completed":
            self._doom(run)
        self._over(run, left)

    def _goes_on(self, run: int) -> list[str]:
        """The nodes that have begun, but those that have finished, and what these have left behind."""
        over = [path for other, path in self.finished if other == run]
        return [
            path
            for other, path in self.items
            if other == run and not any(path == done or path.startswith(f"{done}[") for done in over)
        ]

    def _over(self, run: int, left: Leftover | None = None) -> None:
        self.over.add(run)
        self.line.remove(run)
        for runs in (self.running, self.waiting, self.resumed, self.to_resume):
            runs.discard(run)
        if self.parent and run == 1:
            self.reported = False
        self.requests = {name: found for name, found in self.requests.items() if found[0] != run}
        self.open.pop(run, None)
        if left:
            behind = [other for other in self.interrupting.get(run, []) if other in self.line]
            self.free |= {left.run} if run in self.free and not behind else set()
            self._begin(left.run, left.spec, list(left.message_ids), behind=behind)
        for name in [name for name, other in self.waits.items() if other == run]:
            if left and name in left.message_ids:
                self.waits[name] = left.run
            else:
                del self.waits[name]
                self.fate[name] = "settled"

    def _SessionDeleted(self, data: SessionDeleted) -> None:
        assert data.last_run == len(self.attempts)
        self.deleted = True
        self._doom()
        for run in list(self.line):
            self._over(run)

    def _SessionErased(self, data: SessionErased) -> None:
        assert self.deleted
        assert data.last_run == len(self.attempts)
