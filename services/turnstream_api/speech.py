"""What a run is saying at this moment, kept for those who join later."""

from collections import deque

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
        """The event that ends this step of the node, or (None) the node, holds its text."""
        kept = [frame for frame in self.frames if frame.path != path or (step is not None and frame.step > step)]
        if len(kept) < len(self.frames):
            self.frames = deque(kept)
            self._size = sum(len(frame.data) for frame in kept)
