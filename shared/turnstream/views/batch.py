"""A batch of events becomes changed rows: however often an event touches a row, it is written once.

Pure but for the loading of the rows that are there already. Projector, rebuild and fsck all fold through here.
"""

from collections.abc import Iterable, Sequence

from turnstream.ids import SessionKey
from turnstream.session.events import MessagePosted, Recorded
from turnstream.views import history, runs, sessions, steps
from turnstream.views.rows import Values


class Cache:
    """Rows as of the last commit, of the sessions that were touched last and of runs that have not ended. Only its
    writer changes these rows, so they hold until somebody else has moved the checkpoint; then they are dropped."""

    def __init__(self, sessions_kept: int = 4096) -> None:
        self._kept = sessions_kept
        self.sessions: dict[str, sessions.Row] = {}
        self.runs: dict[str, runs.Row] = {}

    def clear(self) -> None:
        self.sessions.clear()
        self.runs.clear()

    def keep(self, batch: "Batch") -> None:
        """Takes in the rows of a batch that was committed."""
        for key, row in batch.sessions.items():
            self.sessions.pop(key, None)
            self.sessions[key] = row
        for key in batch.changed:
            row = batch.runs[key]
            self.runs.pop(key, None)
            if row.live:
                self.runs[key] = row
        _trim(self.sessions, self._kept)
        _trim(self.runs, self._kept)


def _trim(rows: dict[str, sessions.Row] | dict[str, runs.Row], kept: int) -> None:
    """Drops the rows that were touched longest ago."""
    for key in list(rows)[: max(0, len(rows) - kept)]:
        del rows[key]


class Batch:
    """Folds events, session by session. Before `fold`, the rows that `sessions_before` and then `runs_before` name have
    to be put in, as far as they exist."""

    def __init__(self, events: Iterable[Recorded]) -> None:
        self.sessions: dict[str, sessions.Row] = {}
        self.runs: dict[str, runs.Row] = {}
        self.changed: dict[str, SessionKey] = {}
        self.outputs: dict[str, runs.Output] = {}
        self.items: dict[tuple[str, int], history.Item | None] = {}
        self.steps: list[tuple[str, steps.Step]] = []
        self.moves: list[tuple[int, str, str, int, int]] = []
        self.events: dict[str, list[Recorded]] = {}
        """By session."""
        for recorded in events:
            key = recorded.event.key
            name = f"{key.account}/{key.session}"
            if name in self.events:
                self.events[name].append(recorded)
            else:
                self.events[name] = [recorded]

    def sessions_before(self) -> list[str]:
        """Keys of the sessions that were there before the batch."""
        return [name for name, events in self.events.items() if events[0].previous]

    def runs_before(self) -> list[str]:
        """Keys of the runs that were there before the batch and that an event is about. Only a run that the session's
        row knows as live can change."""
        wanted: list[str] = []
        for name, session in self.sessions.items():
            if session.live:
                about = {runs.about(recorded.event.data) for recorded in self.events[name]}
                wanted += [f"{name}.{run.n}" for run in session.live if run.n in about or run.message_id in about]
        return wanted

    def fold(self) -> None:
        for name, events in self.events.items():
            row = self.sessions.get(name, sessions.NEW)
            for recorded in events:
                if not recorded.previous:
                    row = sessions.NEW
                if row.seq and not row.one_shot:
                    account = recorded.event.key.account
                    self.moves.append((recorded.seq, account, name, row.seq, row.updated_at))
                self._fold_run(name, row, recorded)
                row = sessions.fold(row, recorded)
            self.sessions[name] = row

    def _fold_run(self, name: str, session: sessions.Row, recorded: Recorded) -> None:
        data = recorded.event.data
        if isinstance(data, MessagePosted):
            self.items[name, recorded.seq] = history.posted(recorded, data)
            if routing := data.routing:
                run = f"{name}.{routing.run}"
                self.runs[run] = runs.requested(recorded, data, routing)
                self.changed[run] = recorded.event.key
            return
        live = runs.concerned(session, data)
        before = self.runs.get(f"{name}.{live.n}") if live else None
        if before is None:
            return
        after = runs.fold(before, recorded)
        if after is before:
            return
        run = f"{name}.{before.n}"
        self.runs[run] = after
        self.changed[run] = recorded.event.key
        if said := runs.output(data):
            self.outputs[run] = said
        if step := steps.fold(recorded, before):
            self.steps.append((run, step))
        if item := history.fold(recorded, before):
            self.items[name, item[0]] = item[1]

    # --- what has to be written ---------------------------------------------------------------------------------

    def session_rows(self) -> list[Values]:
        return [sessions.values(events[0].event.key, self.sessions[name]) for name, events in self.events.items()]

    def run_rows(self) -> list[Values]:
        return [runs.values(key, self.runs[name], self.outputs.get(name)) for name, key in self.changed.items()]

    def item_rows(self) -> list[Values]:
        return [history.values(name, item) for (name, _), item in self.items.items() if item]

    def items_gone(self) -> list[tuple[str, int]]:
        return [place for place, item in self.items.items() if item is None]

    def step_rows(self) -> list[Values]:
        return [steps.values(name, step) for name, step in self.steps]

    def move_rows(self, oldest: int) -> Sequence[Values]:
        """The moves behind the sequence `oldest`."""
        return self.moves if oldest < 1 else [move for move in self.moves if move[0] > oldest]
