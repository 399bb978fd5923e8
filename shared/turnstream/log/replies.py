"""Answers of the broker to many requests at once, over one inbox: a number, a future and a timer a request.

What is said to JetStream is in `jetstream.py`. `Broker.request` does the same for everybody else; here a request's head
is bytes already, an answer may be many messages, and whoever waits for one learns at once when a reconnect has lost it.
"""

import asyncio

from nats.aio.client import Client
from nats.aio.msg import Msg

from turnstream.broker.connection import Broker
from turnstream.broker.errors import BrokerClosed

STATUS = "Status"
NO_RESPONDERS = "503"
NO_HEAD = b"NATS/1.0\r\n\r\n"


class Replies:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._nc = broker.nc
        self._loop = asyncio.get_running_loop()
        self._inbox = broker.nc.new_inbox() + "."
        self._skip = len(self._inbox)
        self._open = False
        self._next = 0
        self._waiting: dict[str, _Answer] = {}
        broker.on_reconnect(self._lose_all)

    async def one(self, subject: str, head: bytes, payload: bytes, timeout: float) -> Msg | None:
        """The answer. None: none came within `timeout` seconds, nobody was there to give one, or a reconnect lost
        it."""
        answer = await self._ask(subject, head, payload, timeout, several=False)
        return answer[0] if answer else None

    async def several(self, subject: str, payload: bytes, timeout: float) -> list[Msg] | None:
        """All messages of the answer; the last is the one with a status. None: as above, or they did not all come."""
        return await self._ask(subject, NO_HEAD, payload, timeout, several=True)

    async def _ask(
        self, subject: str, head: bytes, payload: bytes, timeout: float, *, several: bool
    ) -> list[Msg] | None:
        if self._nc.is_closed:
            raise BrokerClosed(subject)
        if not self._open:
            self._open = True  # what is sent from here on is sent behind the subscription
            await self._broker.listen(self._inbox + "*", self._take)
        self._next += 1
        token = str(self._next)
        answer = self._waiting[token] = _Answer(self._loop, several)
        timer = self._loop.call_later(timeout, answer.lose)
        try:
            if self._nc.is_connected:  # else the reconnect tells: what is buffered meanwhile could be sent much later
                await _send(self._nc, subject, self._inbox + token, head, payload)
            return await answer.future
        finally:
            timer.cancel()
            del self._waiting[token]

    def _take(self, message: Msg) -> None:
        answer = self._waiting.get(message.subject[self._skip :])
        if answer is not None:
            answer.take(message)

    def _lose_all(self) -> None:
        for answer in self._waiting.values():
            answer.lose()


class _Answer:
    __slots__ = ("future", "messages", "several")

    def __init__(self, loop: asyncio.AbstractEventLoop, several: bool) -> None:
        self.future: asyncio.Future[list[Msg] | None] = loop.create_future()
        self.messages: list[Msg] = []
        self.several = several

    def take(self, message: Msg) -> None:
        self.messages.append(message)
        status = message.headers.get(STATUS) if message.headers else None
        if not self.future.done() and (status or not self.several):
            self.future.set_result(None if status == NO_RESPONDERS else self.messages)

    def lose(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


async def _send(nc: Client, subject: str, reply: str, head: bytes, payload: bytes) -> None:
    """What `Client.publish` does, but for checking and joining headers one by one, which costs a third of an append
    (tests/bench/bench_log.py)."""
    size = len(head)
    line = f"HPUB {subject} {reply} {size} {size + len(payload)}\r\n".encode()
    await nc._send_command(b"%b%b%b\r\n" % (line, head, payload))  # pyright: ignore[reportPrivateUsage]
    queue = nc._flush_queue  # pyright: ignore[reportPrivateUsage]
    if queue is not None and queue.empty():
        await nc._flush_pending()  # pyright: ignore[reportPrivateUsage]
