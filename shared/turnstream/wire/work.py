"""Wake-ups: "look at this session", one message on a queue's subject in `WORK`.

A wake-up carries no facts, only the sequence of the event that caused it: getting it twice, late, or for nothing is
harmless. Taking wake-ups is the runner's affair (`turnstream.broker.pull`), driving the session too.
"""

import msgspec

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.errors import BrokerError
from turnstream.ids import SessionKey

NO_MESSAGE = 10037
"""JetStream's error code for a message that is not there (any more)."""


class _Refusal(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Ack(msgspec.Struct):
    error: _Refusal | None = None


_acks = msgspec.json.Decoder(_Ack)


def check_stored(subject: str, answer: bytes) -> None:
    """Raises `BrokerError` if the answer to a publish says that the message was not stored."""
    if b'"error"' in answer and (error := _acks.decode(answer).error):
        raise BrokerError(error.code, error.err_code, error.description, operation=subject)


class Work:
    """The stream of wake-ups."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def wake(self, queue: str, key: SessionKey, cause: int, *, message_id: str | None = None) -> None:
        """Wakes a runner of this queue for this session. Returns when the wake-up is stored.

        `cause` is the log sequence that the runner has to have seen. With a message id, a repeat within the stream's
        window is dropped by the broker, also when the first one was taken already. Raises `BrokerFault`.
        """
        subject = subjects.work(queue, key)
        headers = {subjects.CAUSE: str(cause)}
        if message_id is not None:
            headers["Nats-Msg-Id"] = message_id
        answer = await self._broker.request(subject, b"", headers)
        check_stored(subject, answer.data)

    async def exists(self, work: int, key: SessionKey | None = None) -> bool:
        """Whether the wake-up with this sequence is still in `WORK`: not yet acknowledged by its runner.

        With `key`, only if it is a wake-up of that session: a stream that was deleted and made again numbers from 1.
        Asks the stream's leader, not a replica that may lag. Raises `BrokerFault`.
        """
        try:
            found = await self._broker.api(f"STREAM.MSG.GET.{subjects.WORK}", {"seq": work})
        except BrokerError as error:
            if error.err_code == NO_MESSAGE:
                return False
            raise
        if key is None:
            return True
        message = msgspec.convert(found, _Found).message
        return subjects.is_work(message.subject) and subjects.parse_work(message.subject)[1] == key

    async def waiting(self, queue: str, key: SessionKey) -> int | None:
        """Sequence of the newest wake-up of this queue for this session that is not yet acknowledged, if there is one.

        Asks the stream's leader. Raises `BrokerFault`.
        """
        try:
            found = await self._broker.api(
                f"STREAM.MSG.GET.{subjects.WORK}", {"last_by_subj": subjects.work(queue, key)}
            )
        except BrokerError as error:
            if error.err_code == NO_MESSAGE:
                return None
            raise
        return msgspec.convert(found, _Found).message.seq


class _Message(msgspec.Struct):
    subject: str
    seq: int


class _Found(msgspec.Struct):
    message: _Message
