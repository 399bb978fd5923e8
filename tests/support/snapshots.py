"""A bucket of snapshots in a dict, as `turnstream.log.snapshots` wants one."""

from collections.abc import Awaitable, Callable, Sequence

from turnstream.ids import SessionKey
from turnstream.session import snapshot
from turnstream.session.events import Recorded
from turnstream.session.fold import fold
from turnstream.session.state import Session


class Store:
    """`away`: nobody answers. `before_put` is awaited before anything is stored."""

    def __init__(self) -> None:
        self.held: dict[SessionKey, tuple[bytes, int]] = {}
        self.written: list[int] = []
        """The revisions that puts were for."""
        self.away = False
        self.before_put: Callable[[], Awaitable[object]] | None = None

    async def get(self, key: SessionKey) -> tuple[bytes, int] | None:
        return None if self.away else self.held.get(key, (b"", 0))

    async def put(self, key: SessionKey, data: bytes, revision: int) -> None:
        if self.before_put:
            await self.before_put()
        self.written.append(revision)
        if not self.away and self.held.get(key, (b"", 0))[1] == revision:
            self.held[key] = data, revision + 1

    def take(self, key: SessionKey, events: Sequence[Recorded]) -> Session:
        """What a session is after its first events, and a snapshot of that."""
        session = fold(Session(key=key), events)
        self.held[key] = snapshot.encode(session, events[-1]), self.held.get(key, (b"", 0))[1] + 1
        return session

    def found(self, key: SessionKey) -> snapshot.Snapshot | None:
        data, _ = self.held.get(key, (b"", 0))
        return snapshot.decode(data, key) if data else None
