"""What a run is saying at this moment, kept for those who join later."""

from collections import deque

from turnstream.session.paths import is_within
from turnstream_api.frames import Frame


class Speech:
    """What a run has said of the steps that it is in, for those who join later: of one, or of one of each node of its
    graph that speaks. Bounded: the oldest goes first."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.index = 0
        self.frames: deque[Frame] = deque()
        self._size = 0

    def add(self, frame: Frame, budget: int) -> None:
        self.frames.append(frame)
        self._size += len(frame.data)
        while self._size > budget:
            self._size -= len(self.frames.popleft().data)

    def forget(self, path: str, step: int | None = None) -> None:
        """The event that ends this step of the node holds its text; one that ends the node (None), whatever was said
        inside of it."""
        kept = [frame for frame in self.frames if not _is_over(frame, path, step)]
        if len(kept) < len(self.frames):
            self.frames = deque(kept)
            self._size = sum(len(frame.data) for frame in kept)


def _is_over(frame: Frame, path: str, step: int | None) -> bool:
    return is_within(frame.path, path) if step is None else frame.path == path and frame.step <= step
