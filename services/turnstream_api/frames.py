"""Server-sent events as bytes, each made once, and what decides who gets them.

A frame of an event carries its sequence as `id`; frames that are not events of the log carry none. The data is JSON on
one line: only LF and CR end a line, so U+2028 and its like travel as they are.
"""

import msgspec

from turnstream.ids import SessionKey
from turnstream.log import codec
from turnstream.session.events import ModelReplied, NodeFinished, Recorded, RunReported
from turnstream.session.state import TERMINAL
from turnstream.wire.live import Delta

CONTENT_TYPE = "text/event-stream"
DELTA = "delta"
"""The type of a frame that holds a piece of what a model is saying."""
CONTROL = ("posted", "caught-up", "reset", "overflow", "bye")
"""The other types of frames that are not events of the log."""
DELETED = frozenset({"session.deleted", "session.erased"})
"""The types of the last event of a session that is shown: the second where the first was missed. It ends every run."""
WAITING = "run.waiting"
OPENING = b"retry: 1000\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One server-sent event. `seq` is 0 for what is no event of the log; `run` is 0 for what is of no run."""

    seq: int
    previous: int
    type: str
    run: int
    data: bytes
    step: int = 0
    """The step that this ends (`model.replied`) or belongs to (a delta)."""
    path: str = ""
    """Of the node that the step is one of, or that this ends."""


def event_frame(recorded: Recorded) -> Frame:
    data = recorded.event.data
    # Behind the end of its run comes what others have been told of it.
    run: int = 0 if isinstance(data, RunReported) else getattr(data, "run", 0)
    step = data.step if isinstance(data, ModelReplied) else 0
    path = data.path if isinstance(data, ModelReplied | NodeFinished) else ""
    kind = recorded.event.type
    line = b"id: %d\nevent: %b\ndata: %b\n\n" % (recorded.seq, kind.encode(), codec.public(recorded))
    return Frame(recorded.seq, recorded.previous, kind, run, line, step, path)


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """The data of a `delta` frame. `index` counts from 1 in each attempt: a number left out is a piece that was
    lost. `path`: of the node of a graph that says it, which `step` is counted in; several may speak at once."""

    run: str
    attempt: int
    step: int
    index: int
    kind: str
    text: str
    path: str = ""


def delta_frame(key: SessionKey, delta: Delta) -> Frame:
    said = Said(key.run(delta.run), delta.attempt, delta.step, delta.index, delta.kind, delta.text, delta.path)
    data = b"event: delta\ndata: %b\n\n" % _encode(said)
    return Frame(0, 0, DELTA, delta.run, data, delta.step, delta.path)


def control(kind: str, body: msgspec.Struct | dict[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(body))


_encode = msgspec.json.Encoder().encode


class Filter(msgspec.Struct, frozen=True):
    """What a listener wants to see: events of some types (None: of all), with or without deltas; or one run alone,
    until it has ended."""

    types: frozenset[str] | None = None
    deltas: bool = True
    run: int = 0

    def wants(self, frame: Frame) -> bool:
        if self.run and frame.run != self.run and frame.type not in DELETED:
            return False
        if frame.type == DELTA:
            return self.deltas
        return self.types is None or frame.type in self.types

    def ends(self, frame: Frame) -> bool:
        """Whether nothing that this listener wants can follow."""
        return frame.type in DELETED or (self.run != 0 and frame.run == self.run and frame.type in TERMINAL)

    def settles(self, frame: Frame) -> bool:
        """Whether who waits for the run has an answer: it has ended, or waits for a person."""
        return self.ends(frame) or (frame.run == self.run and frame.type == WAITING)
