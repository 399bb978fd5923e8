"""A batch of events becomes changed rows: however often an event touches a row, it is written once.

Pure but for the loading of the rows that are there already. Projector, rebuild and fsck all fold through here. Each
session is folded by `turnstream.session.fold.evolve`, from what its rows keep; what the event does to a row is asked
of the row's view where that fold has changed something, and only there.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from turnstream.ids import SessionKey
from turnstream.session.events import (
    ChildEnded,
    MessagePosted,
    NodeFinished,
    Parent,
    Recorded,
    RunEnded,
    RunRequested,
    RunWaiting,
    SessionDeleted,
    SessionErased,
)
from turnstream.session.fold import evolve
from turnstream.session.state import Run, Session
from turnstream.views import history, requests, run_row, runs, session_row, sessions, steps
from turnstream.views.rows import Values


class Archived(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a run that outlives its session: the run's own events, without what was said."""

    seq: int
    key: SessionKey
    run: int
    events: tuple[Recorded, ...]


class Batch:
    """Folds events, session by session. Before `fold`, the rows that `sessions_before`, then `runs_before`, then
    `items_before` and `requests_before` name have to be put in, as far as they exist."""

    def __init__(self, entries: Iterable[Recorded | Archived]) -> None:
        self.sessions: dict[str, session_row.Row] = {}
        self.runs: dict[str, run_row.Row] = {}
        self.changed: dict[str, SessionKey] = {}
        self.outputs: dict[str, runs.Output] = {}
        self.requests: dict[str, requests.Row] = {}
        self.asked: dict[str, SessionKey] = {}
        self.items: dict[tuple[str, int], history.Stored | None] = {}
        self.steps: dict[str, list[tuple[int, steps.Step]]] = {}
        self.moves: list[tuple[int, str, str, int, int]] = []
        self.archived: set[str] = set()
        """The runs of which there is a record: it says all that is kept of them."""
        self.emptied: set[str] = set()
        """The sessions of which nothing is kept but their runs."""
        self.runless: set[str] = set()
        """The sessions whose runs are not kept."""
        self.erased: set[str] = set()
        """The sessions that are gone, and of whose runs nothing is kept but records."""
        self.entries: dict[str, list[Recorded | Archived]] = {}
        """By session."""
        for entry in entries:
            key = entry.key if isinstance(entry, Archived) else entry.event.key
            name = f"{key.account}/{key.session}"
            if name in self.entries:
                self.entries[name].append(entry)
            else:
                self.entries[name] = [entry]

    # --- what has to be there before ------------------------------------------------------------------------------

    def sessions_before(self) -> list[str]:
        """Keys of the sessions that were there before the batch."""
        return [
            name for name, entries in self.entries.items() if isinstance(entries[0], Archived) or entries[0].previous
        ]

    def runs_before(self) -> list[str]:
        """Keys of the runs that were there before the batch and that an event is about: of those that its session's row
        knows as live, and of those that are tried again."""
        wanted: list[str] = []
        for name, session in self.sessions.items():
            about: set[int | str] = set()
            for recorded in self._events(name):
                data = recorded.event.data
                about.update(run_row.about(data))
                if isinstance(data, SessionDeleted):
                    about.update(run.n for run in session.live)
                elif isinstance(data, RunRequested):
                    wanted.append(f"{name}.{data.retry_of}")
            wanted += [f"{name}.{run.n}" for run in session.live if about and _is_about(run, about)]
        return wanted

    def items_before(self) -> list[tuple[str, int]]:
        """Places of the messages that were there before the batch and of which an event says whose they are."""
        said: dict[str, dict[str, int]] = {}
        for key, row in self.runs.items():
            said.setdefault(key.rpartition(".")[0], {}).update(row.said)
        return [
            (name, places[message])
            for name, places in said.items()
            for recorded in self._events(name)
            for message in history.told(recorded)
            if message in places
        ]

    def requests_before(self) -> list[str]:
        """Keys of the requests that are open in the runs that were there before the batch."""
        return [
            f"{key}.q{request.k}"
            for key, row in self.runs.items()
            for request in (row.folded.requests if row.folded else ())
        ]

    # --- folding ----------------------------------------------------------------------------------------------------

    def fold(self) -> None:
        there = frozenset(self.sessions)
        for name in self.entries:
            self._fold_session(name)
        for names in (self.emptied, self.runless, self.erased):
            names.intersection_update(there)  # what was not there before leaves nothing to be removed

    def _events(self, name: str) -> Iterator[Recorded]:
        return (entry for entry in self.entries[name] if not isinstance(entry, Archived))

    def _fold_session(self, name: str) -> None:
        row = self.sessions.get(name, session_row.NEW)
        known = {live.n: (self._run_before(name, live), live) for live in row.live}
        session: Session | None = None
        for entry in self.entries[name]:
            if isinstance(entry, Archived):
                self._archive(name, entry)
                continue
            key = entry.event.key
            if not entry.previous:
                row, session = session_row.NEW, None
            session = session or session_row.session_of(
                key, row, tuple([run for run, _ in known.values()]) if row.seq else ()
            )
            data = entry.event.data
            if isinstance(data, SessionErased):
                self._erase(name, data)
                row, session = session_row.NEW, None
            elif not session.deleted:
                if row.seq and row.listed:
                    self.moves.append((entry.seq, key.account, name, row.seq, row.updated_at))
                after = evolve(session, entry)
                if isinstance(data, NodeFinished) and after.runs is not session.runs:
                    after = run_row.without_finished(after, data)
                self._fold_event(name, session, after, entry)
                if after.children is not session.children:
                    row = self._fold_children(name, row, session, after, entry)
                row, session = session_row.fold(row, entry, session), after
        if session and not row.deleted:
            row = session_row.with_runs(row, session, known)
        if row.seq or name in self.sessions:
            self.sessions[name] = row

    def _run_before(self, name: str, live: session_row.Live) -> Run:
        row = self.runs.get(f"{name}.{live.n}")
        return row.folded if row and row.folded else session_row.unread(live)

    def _fold_event(self, name: str, before: Session, after: Session, recorded: Recorded) -> None:
        data = recorded.event.data
        if isinstance(data, MessagePosted):
            self.items[name, recorded.seq] = history.posted(recorded, data)
        if isinstance(data, RunRequested) and data.action and (run := after.run(data.run)):
            self.items[name, recorded.seq] = history.acted(recorded, data, data.action, run.author)
        if after.runs is not before.runs:
            self._fold_runs(name, before, after, recorded)
        if isinstance(data, SessionDeleted):
            self._delete(name, keeps_runs=data.mode == "detach")

    def _fold_children(
        self, name: str, row: session_row.Row, before: Session, after: Session, recorded: Recorded
    ) -> session_row.Row:
        """A child may end when the run that delegated to it has ended long since."""
        changed = session_row.with_children(row, before, after, recorded)
        if isinstance(data := recorded.event.data, ChildEnded):
            for child in row.open_children:
                if child not in changed.open_children:
                    step = steps.child(recorded, data, child)
                    self.steps.setdefault(f"{name}.{child.run}", []).append((0, step))
        return changed

    def _fold_runs(self, name: str, before: Session, after: Session, recorded: Recorded) -> None:
        were = {run.n: run for run in before.runs}
        for run in after.runs:
            was = were.pop(run.n, None)
            if was is None:
                self._add_run(name, run, recorded, after.parent)
            elif was is not run:
                self._change_run(name, run.n, run, recorded)
        for n in were:
            self._change_run(name, n, None, recorded)

    def _add_run(self, name: str, run: Run, recorded: Recorded, parent: Parent | None) -> None:
        key = f"{name}.{run.n}"
        self.runs[key] = run_row.requested(recorded, run, self._said(name, recorded), parent)
        self.changed[key] = recorded.event.key

    def _said(self, name: str, recorded: Recorded) -> dict[str, int]:
        """Where the messages are that a new run may take."""
        data = recorded.event.data
        match data:
            case MessagePosted():
                return {data.message_id: recorded.seq}
            case RunEnded() | RunRequested():
                row = self.runs.get(f"{name}.{data.run if isinstance(data, RunEnded) else data.retry_of}")
                return row.said if row else {}
            case _:
                return {}

    def _change_run(self, name: str, n: int, run: Run | None, recorded: Recorded) -> None:
        """The run `n` of the session has changed; None: it has ended."""
        key = f"{name}.{n}"
        before = self.runs.get(key)
        if before is None:
            return
        data = recorded.event.data
        self.runs[key] = run_row.fold(before, run, recorded)
        self.changed[key] = recorded.event.key
        if said := runs.output(data):
            self.outputs[key] = said
        waits = self._fold_requests(key, before, run, recorded)
        if ended := [*waits, *steps.fold(recorded, before, run)]:
            self.steps.setdefault(key, []).extend(enumerate(ended))
        for seq in history.gone(recorded, before, run):
            self.items[name, seq] = None
        if item := history.fold(recorded, before, run):
            self.items[name, recorded.seq] = item
        for message in history.told(recorded):
            self._move(name, before.said.get(message, 0), recorded)

    def _fold_requests(self, key: str, before: run_row.Row, run: Run | None, recorded: Recorded) -> list[steps.Step]:
        """Asks what the run asks, and closes what is not open any more; the waits that ended."""
        data = recorded.event.data
        if isinstance(data, RunWaiting) and run:
            for request in requests.asked(recorded, data, run, before):
                self._put_request(f"{key}.q{request.k}", request, recorded)
            return []
        still = {request.k for request in run.requests} if run else set[int]()
        ended: list[steps.Step] = []
        for was in before.folded.requests if before.folded else ():
            open_request = self.requests.get(f"{key}.q{was.k}")
            if was.k not in still and open_request:
                closed = requests.close(open_request, recorded)
                self._put_request(f"{key}.q{was.k}", closed, recorded)
                ended.append(steps.wait(recorded, before, closed))
        return ended

    def _put_request(self, key: str, row: requests.Row, recorded: Recorded) -> None:
        self.requests[key] = row
        self.asked[key] = recorded.event.key

    def _move(self, name: str, seq: int, recorded: Recorded) -> None:
        message = self.items.get((name, seq))
        if isinstance(message, history.Message):
            self.items[name, seq] = history.moved(message, recorded)

    # --- what is deleted --------------------------------------------------------------------------------------------

    def _delete(self, name: str, *, keeps_runs: bool) -> None:
        """Forgets what was said in a session."""
        self.emptied.add(name)
        self.moves = [move for move in self.moves if move[2] != name]
        for place in [place for place in self.items if place[0] == name]:
            del self.items[place]
        for rows in (self.asked, self.requests, self.steps, *(() if keeps_runs else (self.changed, self.runs))):
            for key in [key for key in rows if session_of(key) == name and key not in self.archived]:
                del rows[key]
        if not keeps_runs:
            self.runless.add(name)

    def _archive(self, name: str, archived: Archived) -> None:
        """What is kept of a run is what its record says."""
        key = f"{name}.{archived.run}"
        row, output, did = record(archived)
        self.archived.add(key)
        self.steps.pop(key, None)
        self.outputs.pop(key, None)
        self.changed.pop(key, None)
        if row:
            self.runs[key] = row
            self.changed[key] = archived.key
            self.steps[key] = did
            if output:
                self.outputs[key] = output

    def _erase(self, name: str, data: SessionErased) -> None:
        """Nothing is left of a session but the records of its runs. That it was deleted may not have been read: it was
        removed from the log meanwhile."""
        self._delete(name, keeps_runs=data.mode == "detach")
        self.erased.add(name)
        for key in [key for key in self.changed if session_of(key) == name and key not in self.archived]:
            del self.changed[key]

    @property
    def deletes(self) -> bool:
        """Whether anything that was said is removed."""
        return bool(self.emptied or self.erased)

    # --- what has to be written ---------------------------------------------------------------------------------

    def session_rows(self) -> list[Values]:
        return [sessions.values(SessionKey(*name.split("/")), row) for name, row in self.sessions.items() if row.seq]

    def run_rows(self) -> list[Values]:
        return [
            runs.values(
                key,
                self.runs[name],
                self.outputs.get(name),
                detached=name in self.archived or self._is_deleted(name),
                archived=name in self.archived,
                goes_on=not self._is_copied(name),
            )
            for name, key in self.changed.items()
        ]

    def _is_deleted(self, run: str) -> bool:
        session = self.sessions.get(session_of(run))
        return session is not None and session.deleted is not None

    def _is_copied(self, name: str) -> bool:
        """Whether the run, or the request, is of a fork that is not whole: nobody is to do anything for it."""
        session = self.sessions.get(session_of(name))
        return session is not None and session.copying is not None

    def request_rows(self) -> list[Values]:
        return [
            requests.values(key, self.requests[name], goes_on=not self._is_copied(name))
            for name, key in self.asked.items()
        ]

    def item_rows(self) -> list[Values]:
        return [history.values(name, item) for (name, _), item in self.items.items() if item]

    def items_gone(self) -> list[tuple[str, int]]:
        return [place for place, item in self.items.items() if item is None]

    def step_rows(self) -> list[Values]:
        return [steps.values(key, place, step) for key, ended in self.steps.items() for place, step in ended]

    def move_rows(self, oldest: int) -> Sequence[Values]:
        """The moves behind the sequence `oldest`."""
        return self.moves if oldest < 1 else [move for move in self.moves if move[0] > oldest]


def record(archived: Archived) -> tuple[run_row.Row | None, runs.Output | None, list[tuple[int, steps.Step]]]:
    """What the record of a run says: its row, its answer, its steps."""
    batch = Batch(archived.events)
    name = str(archived.key)
    first = archived.events[0].event.data if archived.events else None
    if isinstance(first, RunEnded) and first.run != archived.run:  # it takes what that one left over
        batch.sessions[name] = session_row.about_to_end(first.run, first.attempt)
    batch.fold()
    key = f"{name}.{archived.run}"
    return batch.runs.get(key), batch.outputs.get(key), batch.steps.get(key, [])


def session_of(key: str) -> str:
    """The session in the key of something that belongs to one of its runs."""
    return key.partition(".")[0]


def _is_about(run: session_row.Live, about: set[int | str]) -> bool:
    return run.n in about or not about.isdisjoint(run.message_ids) or not about.isdisjoint(run.steering)
