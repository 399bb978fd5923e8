"""What every drive of a runner works with, wired together once, in `app.py`."""

from collections.abc import Callable

import msgspec

from turnstream.log.handle import Sessions
from turnstream.roster import Roster
from turnstream.wire.blobs import Blobs
from turnstream.wire.checkpoints import Checkpoints
from turnstream.wire.live import Live
from turnstream.wire.work import Work
from turnstream_runner.copying import Copier
from turnstream_runner.erase import Eraser
from turnstream_runner.mcp.servers import Servers
from turnstream_runner.models.registry import Models
from turnstream_runner.roles import Roles
from turnstream_runner.room import Room
from turnstream_runner.stories import Stories


class Equipment(msgspec.Struct, frozen=True, kw_only=True):
    """`now` is the broker's time in milliseconds."""

    runner: str
    sessions: Sessions
    roles: Roles
    roster: Roster
    """Who can be delegated to."""
    models: Models
    work: Work
    live: Live
    blobs: Blobs
    checkpoints: Checkpoints
    eraser: Eraser
    copier: Copier
    room: Room
    now: Callable[[], int]
    servers: Servers = msgspec.field(default_factory=Servers)
    stories: Stories = msgspec.field(default_factory=Stories)
