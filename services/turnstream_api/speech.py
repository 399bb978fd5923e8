"""What a run is saying at this moment, kept for those who join later."""

from collections import deque

from turnstream_api.frames import Frame


class Speech:
    """What a run has said of the step it is in, for those who join later. Bounded: the oldest goes first."""

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

    def forget(self, step: int) -> None:
        """The event that ends this step holds its text."""
        while self.frames and self.frames[0].step <= step:
            self._size -= len(self.frames.popleft().data)
