"""What was found wrong with a log or with the views."""

from typing import Literal

import msgspec

from turnstream.ids import SessionKey

Kind = Literal[
    "unreadable",  # a message that is no event, or lies on another session's subject
    "unguarded",  # stored without naming the event before it
    "broken_chain",  # names another event than the one before it
    "opened_twice",
    "two_holders",  # a run takes the turn that another one holds, where runs do not go side by side
    "run_number",  # a new run that is not the next one
    "no_such_run",
    "fenced",  # a fact of an attempt that is not the current one
    "transition",  # an edge that the state table does not have
    "second_end",  # a run has more than one terminal event, or a child is told of twice
    "call_open",  # a reply, or an end that does not say so, while a tool call has no result
    "no_such_call",  # a tool fact without its call
    "no_such_node",  # of an element, or an iteration, that no node goes through
    "node_over",  # something of a node that has finished, or that is inside of one
    "node_open",  # a run comes to its answer while a node has begun and not finished
    "no_such_request",  # an answer to what is not open, or a request that no call makes
    "no_such_message",  # a run takes, or leaves over, what has not reached it
    "no_such_child",  # a child, or its end, that nobody has delegated to
    "child_missing",  # a run has gone on without the child that it delegated to
    "child_untold",  # a child and whoever delegated to it do not agree on its end
    "message_lost",  # a run ends, and nobody takes what steered it
    "compaction",  # a summary of what is not over, or was summed up before
    "fork",  # a copy in no fork, out of order, or something else in a fork that is not whole
    "deleted",  # an event behind the session's deletion
    "another_log",  # the views were made of another log
    "views_ahead",  # the views show an event that the log does not have
    "row_missing",
    "row_extra",
    "row_differs",
]


class Finding(msgspec.Struct, frozen=True):
    """One fault: in which session, run or row, at which sequence of the log if it has one."""

    kind: Kind
    where: str
    seq: int | None
    message: str


class Findings:
    """What was found, in the order in which it was."""

    def __init__(self) -> None:
        self._found: list[tuple[SessionKey | None, Finding]] = []

    @property
    def all(self) -> tuple[Finding, ...]:
        return tuple(finding for _, finding in self._found)

    @property
    def suspects(self) -> set[SessionKey]:
        """The sessions of which anything was found."""
        return {key for key, _ in self._found if key is not None}

    def add(self, kind: Kind, where: object, seq: int | None, message: str, session: SessionKey | None = None) -> None:
        """`session`: whose fault it is, if it is one's."""
        self._found.append((session, Finding(kind, str(where), seq, message)))

    def forget(self, session: SessionKey) -> None:
        """Drops what was found of a session."""
        self._found = [(key, finding) for key, finding in self._found if key != session]
