"""A batch of events becomes changed rows: however often an event touches a row, it is written once.

Pure but for the loading of the rows that are there already. Projector, rebuild and fsck all fold through here.
"""

from collections.abc import Iterable, Sequence

from turnstream.ids import SessionKey
from turnstream.session.events import MessagePosted, MessageWithdrawn, Recorded
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
        for key in batch.touched:
            self.sessions.pop(key, None)
            self.sessions[key] = batch.sessions[key]
        for key in batch.changed:
            row = batch.runs[key]
            self.runs.pop(key, None)
            if row and row.live:
                self.runs[key] = row
        _trim(self.sessions, self._kept)
        _trim(self.runs, self._kept)


def _trim(rows: dict[str, sessions.Row] | dict[str, runs.Row], kept: int) -> None:
    """Drops the rows that were touched longest ago."""
    for key in list(rows)[: max(0, len(rows) - kept)]:
        del rows[key]


class Batch:
    """Folds events. Before `fold`, the rows that `sessions_of` and then `runs_of` name have to be put in, as far as
    they exist."""

    def __init__(self) -> None:
        self.sessions: dict[str, sessions.Row] = {}
        self.runs: dict[str, runs.Row | None] = {}
        self.touched: dict[str, SessionKey] = {}
        self.changed: dict[str, SessionKey] = {}
        self.outputs: dict[str, runs.Output] = {}
        self.items: dict[tuple[str, int], history.Item | None] = {}
        self.steps: list[tuple[str, steps.Step]] = []
        self.moves: list[tuple[int, str, str, int, int]] = []

    @staticmethod
    def sessions_of(events: Iterable[Recorded]) -> set[str]:
        """Keys of the sessions that were there before the batch."""
        fresh: set[str] = set()
        known: set[str] = set()
        for recorded in events:
            key = recorded.event.key
            name = f"{key.account}/{key.session}"
            if recorded.previous == 0:
                fresh.add(name)
            elif name not in fresh:
                known.add(name)
        return known

    def runs_of(self, events: Iterable[Recorded]) -> set[str]:
        """Keys of the runs that the events concern; the sessions' rows are in place."""
        wanted: set[str] = set()
        fresh: set[str] = set()
        for recorded in events:
            key, data = recorded.event.key, recorded.event.data
            if isinstance(data, MessageWithdrawn):
                session = self.sessions.get(f"{key.account}/{key.session}", sessions.NEW)
            else:
                session = sessions.NEW
            n = runs.concerns(data, session)
            if n is not None:
                run = f"{key.account}/{key.session}.{n}"
                if isinstance(data, MessagePosted):
                    fresh.add(run)
                elif run not in fresh:
                    wanted.add(run)
        return wanted

    def fold(self, events: Iterable[Recorded]) -> None:
        for recorded in events:
            key = recorded.event.key
            name = f"{key.account}/{key.session}"
            before = self.sessions.get(name, sessions.NEW) if recorded.previous else sessions.NEW
            if before.seq and not before.one_shot:
                self.moves.append((recorded.seq, key.account, name, before.seq, before.updated_at))
            self.sessions[name] = sessions.fold(before, recorded)
            self.touched[name] = key
            n = runs.concerns(recorded.event.data, before)
            run = None if n is None else self._fold_run(f"{name}.{n}", recorded)
            if item := history.fold(recorded, run):
                self.items[name, item[0]] = item[1]

    def _fold_run(self, name: str, recorded: Recorded) -> runs.Row | None:
        """The run's row before the event."""
        before = self.runs.get(name)
        after = runs.fold(before, recorded)
        if after is not before:
            self.runs[name] = after
            self.changed[name] = recorded.event.key
            if said := runs.output(recorded):
                self.outputs[name] = said
            if step := steps.fold(recorded, before):
                self.steps.append((name, step))
        return before

    # --- what has to be written ---------------------------------------------------------------------------------

    def session_rows(self) -> list[Values]:
        return [sessions.values(key, self.sessions[name]) for name, key in self.touched.items()]

    def run_rows(self) -> list[Values]:
        return [
            runs.values(key, row, self.outputs.get(name))
            for name, key in self.changed.items()
            if (row := self.runs[name])
        ]

    def item_rows(self) -> list[Values]:
        return [history.values(name, item) for (name, _), item in self.items.items() if item]

    def items_gone(self) -> list[tuple[str, int]]:
        return [place for place, item in self.items.items() if item is None]

    def step_rows(self) -> list[Values]:
        return [steps.values(name, step) for name, step in self.steps]

    def move_rows(self, oldest: int) -> Sequence[Values]:
        """The moves behind the sequence `oldest`."""
        if self.moves and self.moves[0][0] <= oldest:
            return [move for move in self.moves if move[0] > oldest]
        return self.moves
