"""What providers want back with the earlier replies of a run: bytes that nobody but the provider's own module reads.

They are of one run only. They lie in its checkpoint, beside the log, each under the id of its reply's event, and are
used only if the log has that event; with the run they are gone. Without them a model answers less well, and nothing
else is different.
"""

from collections.abc import Sequence
from typing import Final

from turnstream.ids import SessionKey
from turnstream.session.events import ModelReplied, Recorded
from turnstream.session.state import Run
from turnstream.wire.checkpoints import Checkpoints, Entry

SIZE_MAX: Final = 512 * 1024
"""Bytes of all that is kept for a run; beyond that the oldest goes."""


class Opaque:
    """The opaque items of one run, as one attempt knows them. `is_new`: there was no attempt before.

    A session whose id was free again has runs and events of the same ids as the one before it, but not at the same
    place of the log: so an item is also named by the place of its run.
    """

    def __init__(self, checkpoints: Checkpoints, key: SessionKey, run: Run, *, is_new: bool) -> None:
        self._checkpoints = checkpoints
        self._key = key
        self._run = run.n
        self._place = run.requested_seq
        self._entries: dict[str, Entry] | None = {} if is_new else None
        """By name, the oldest first. None: not looked for yet."""
        self._held: tuple[str, bytes] = ("", b"")

    async def of(self, replies: Sequence[Recorded]) -> tuple[bytes, ...]:
        """One for each of the run's replies that the model sees, empty where there is none."""
        if not replies:
            return ()
        entries = await self._load()
        found = [entries.get(self._name(recorded.event.id)) for recorded in replies if _is_shown(recorded)]
        return tuple(entry.item if entry else b"" for entry in found)

    async def keep(self, event_id: str, item: bytes) -> None:
        """What belongs to the reply whose event will have this id."""
        if not 0 < len(item) <= SIZE_MAX:
            return
        entries = await self._load()
        name = self._name(event_id)
        entries.pop(name, None)
        entries[name] = await self._checkpoints.put(self._key, self._run, name, item)
        if (size := sum(len(entry.item) for entry in entries.values())) > SIZE_MAX:
            while size > SIZE_MAX:
                size -= len(entries.pop(next(iter(entries))).item)
            await self._checkpoints.drop(self._key, self._run, before=next(iter(entries.values())).seq)

    async def forget(self, event_id: str) -> None:
        """The reply was not stored: what belongs to it must not go with another one."""
        if self._entries and self._entries.pop(self._name(event_id), None):
            await self._checkpoints.drop(self._key, self._run)
            self._entries.clear()

    def hold(self, event_id: str, item: bytes) -> None:
        """What belongs to an answer, which is the run's last word unless it turns out otherwise."""
        self._held = event_id, item

    async def keep_held(self, event_id: str) -> None:
        """The answer has become one more reply."""
        if self._held[0] == event_id:
            await self.keep(*self._held)

    async def drop(self) -> None:
        """The run has ended."""
        if self._entries is None or self._entries:
            await self._checkpoints.drop(self._key, self._run)

    def _name(self, event_id: str) -> str:
        return f"{self._place}/{event_id}"

    async def _load(self) -> dict[str, Entry]:
        if self._entries is None:
            self._entries = {entry.name: entry for entry in await self._checkpoints.get(self._key, self._run)}
        return self._entries


def _is_shown(recorded: Recorded) -> bool:
    """Whether the reply is a message to the model: one that says nothing and asks for nothing is none."""
    data = recorded.event.data
    return isinstance(data, ModelReplied) and bool(data.tool_calls or data.content)
