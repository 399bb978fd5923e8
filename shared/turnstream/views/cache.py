"""What the writer of the views remembers of the rows that it has written."""

from turnstream.views import history, run_row, session_row
from turnstream.views.batch import Batch, session_of


class Cache:
    """Rows as of the last commit, of the sessions that were touched last and of runs that have not ended. Only its
    writer changes these rows, so they hold until somebody else has moved the checkpoint; then they are dropped."""

    def __init__(self, sessions_kept: int = 4096) -> None:
        self._kept = sessions_kept
        self.sessions: dict[str, session_row.Row] = {}
        self.runs: dict[str, run_row.Row] = {}
        self.items: dict[tuple[str, int], history.Stored] = {}
        """What the last batch has put into histories: a message is mostly taken by a run at once."""

    def clear(self) -> None:
        self.sessions.clear()
        self.runs.clear()
        self.items.clear()

    def keep(self, batch: Batch) -> None:
        """Takes in the rows of a batch that was committed."""
        if batch.runless:
            for key in [key for key in self.runs if session_of(key) in batch.runless]:
                del self.runs[key]
        for key, row in batch.sessions.items():
            self.sessions.pop(key, None)
            if row.seq:
                self.sessions[key] = row
        for key in batch.changed:
            row = batch.runs[key]
            self.runs.pop(key, None)
            if row.live:
                self.runs[key] = row
        self.items = {place: item for place, item in batch.items.items() if item}
        _trim(self.sessions, self._kept)
        _trim(self.runs, self._kept)


def _trim(rows: dict[str, session_row.Row] | dict[str, run_row.Row], kept: int) -> None:
    """Drops the rows that were touched longest ago."""
    for key in list(rows)[: max(0, len(rows) - kept)]:
        del rows[key]
