"""What the nodes of graphs are saying at this moment: several at once, one of them shown as it speaks.

The first that speaks is shown; what the others say is kept until it has come to its end, so that no two are mixed.
"""

from collections.abc import Iterator
from typing import Any

from turnstream.session.paths import around

Step = tuple[int, float]
"""An attempt of a run, and a step of a node in it."""


class _Voice:
    """What a node has said in the step that it is in, and the pieces that are not shown."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.spoken = {"text": "", "reasoning": ""}
        self.unshown: list[tuple[str, str]] = []


class Voices:
    def __init__(self) -> None:
        self._voices: dict[tuple[int, str], _Voice] = {}
        """By run and path; the first is shown."""
        self._ended: dict[tuple[int, str], Step] = {}
        """The last step of each node that is stored; of those that have finished, any."""
        self._heard: dict[int, tuple[int, int]] = {}
        """By run: attempt and number of the last piece."""

    def hear(self, run: int, delta: dict[str, Any]) -> bool:
        """False for what was heard before, is stored, is of an attempt that was given up, or from inside of a node that
        has finished."""
        place = run, delta["path"]
        heard = int(delta["attempt"]), int(delta["index"])
        step = int(delta["attempt"]), int(delta["step"])
        if heard <= self._heard.get(run, (0, 0)) or step <= self._ended.get(place, (0, 0)):
            return False
        if any((run, node) in self._ended for node in around(delta["path"])):
            return False
        if heard[0] > self._heard.get(run, (0, 0))[0]:
            self._drop(run)
        self._heard[run] = heard
        voice = self._voices.get(place)
        if voice is None or voice.step != step or delta["kind"] == "reset":
            voice = self._voices[place] = _Voice(step)
        if delta["kind"] in voice.spoken:
            voice.spoken[delta["kind"]] += delta["text"]
            voice.unshown.append((delta["kind"], delta["text"]))
        return True

    def to_show(self) -> Iterator[tuple[str, str, str]]:
        """The path, kind and text of the pieces of the first that are not shown; they are then."""
        for (_, path), voice in self._voices.items():
            for kind, text in voice.unshown:
                yield path, kind, text
            voice.unshown.clear()
            return

    def end(self, run: int, path: str, step: Step) -> dict[str, str]:
        """This step is stored: what was shown of it, by kind."""
        self._ended[run, path] = step
        voice = self._voices.pop((run, path), None)
        return voice.spoken if voice and voice.step[0] == step[0] and not voice.unshown else {}

    def leave(self, run: int, path: str) -> None:
        """The node has finished: what is inside of it comes to no end of its own."""
        self._ended.setdefault((run, path), (0, 0))
        self._drop(run, f"{path}[")

    def forget(self, run: int) -> None:
        """The run has ended."""
        self._drop(run)
        self._ended = {place: step for place, step in self._ended.items() if place[0] != run}
        self._heard.pop(run, None)

    def _drop(self, run: int, begins: str = "") -> None:
        for place in [place for place in self._voices if place[0] == run and place[1].startswith(begins)]:
            del self._voices[place]
