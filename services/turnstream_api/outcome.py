"""How a run ended, by the log itself: awaited on the session's feed, or looked up."""

import msgspec

from turnstream.session.events import Blob, Error, MessageWithdrawn, Recorded, RunEnded, RunStatus, Usage
from turnstream.session.state import Session
from turnstream_api.api import Api
from turnstream_api.frames import Filter


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a run ended. An answer too large for an event is in `blob`; `output` then holds its head. `seq` is the
    sequence of the event that ended it."""

    status: RunStatus
    seq: int
    output: str = ""
    reasoning: str = ""
    blob: Blob | None = None
    note: str = ""
    error: Error | None = None
    reason: str = ""
    finish: str = ""
    usage: Usage = Usage()
    model: str = ""


async def outcome_of(api: Api, session: Session, n: int, timeout: float, *, after: int) -> Outcome | None:
    """How run `n` ended; None if it has not within `timeout` seconds. `after`: an event before its end."""
    if session.run(n) is not None:
        recorded = await api.hub.wait(session, Filter(run=n), timeout)
        return recorded and ended(recorded, n)
    begun = max([after, *(turn.seq for turn in session.turns if turn.run == n)])
    async for page in api.log.read(session.key, begun):
        for recorded in page:
            if outcome := ended(recorded, n):
                return outcome
    return None


def ended(recorded: Recorded, n: int) -> Outcome | None:
    """The outcome of run `n`, if this event ends it."""
    data = recorded.event.data
    match data:
        case RunEnded() if data.run == n:
            return Outcome(
                status=data.status,
                seq=recorded.seq,
                output=data.content,
                reasoning=data.reasoning,
                blob=data.blob,
                note=data.note,
                error=data.error,
                reason=data.reason,
                finish=data.finish,
                usage=data.usage,
                model=data.model,
            )
        case MessageWithdrawn() if data.run == n:
            return Outcome(status="cancelled", seq=recorded.seq, reason="its message was withdrawn")
        case _:
            return None
