"""Wake-ups: "look at this session", one message on a queue's subject in `WORK`.

A wake-up carries no facts, only the sequence of the event that caused it: getting it twice, late, or for nothing is
harmless. Taking wake-ups is the runner's affair (`turnstream.broker.pull`), driving the session too.
"""

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.erasing import forget
from turnstream.ids import SessionKey


class Work:
    """The stream of wake-ups."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def wake(self, queue: str, key: SessionKey, cause: int, *, message_id: str | None = None) -> None:
        """Wakes a runner of this queue for this session. Returns when the wake-up is stored.

        `cause` is the log sequence that the runner has to have seen. With a message id, a repeat within the stream's
        window is dropped by the broker, also when the first one was taken already. Raises `BrokerFault`.
        """
        headers = {subjects.CAUSE: str(cause)}
        if message_id is not None:
            headers[subjects.MESSAGE_ID] = message_id
        await self._broker.store(subjects.work(queue, key), b"", headers)

    async def exists(self, work: int, key: SessionKey) -> bool:
        """Whether this session's wake-up with this sequence is still in `WORK`: not yet acknowledged by its runner.

        Another session's does not count: a stream that was deleted and made again numbers from 1. Raises `BrokerFault`.
        """
        found = await self._broker.message(subjects.WORK, {"seq": work})
        return found is not None and subjects.is_work(found.subject) and subjects.parse_work(found.subject)[1] == key

    async def waiting(self, queue: str, key: SessionKey) -> int | None:
        """Sequence of the newest wake-up of this queue for this session that is not yet acknowledged, if there is one.
        Raises `BrokerFault`."""
        found = await self._broker.message(subjects.WORK, {"last_by_subj": subjects.work(queue, key)})
        return found and found.seq

    async def drop(self, key: SessionKey, before: int) -> None:
        """Takes back the wake-ups of a session, of every queue, that were stored before the one with this sequence.
        Raises `BrokerFault`."""
        await forget(self._broker, subjects.WORK, subjects.work("*", key), before=before)
