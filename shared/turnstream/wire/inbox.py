"""The durable entrance for programs that only publish: `ts.inbox.<account>.<session>`.

Messages of one session are handed on one after another in the order of the stream; those of different sessions at
once. One that cannot be taken goes to `REFUSED` with the reason in its headers. A message is acknowledged only when
what became of it is stored, so a killed process loses none; what it had taken comes again, and whoever takes it must
know a repeat. The order holds inside one process: several share the work, not the order.

An acknowledged message is gone, its bytes are not: they lie in the stream's files until those are given up, which they
are when the stream is empty. So a message is erased, not only acknowledged; but where many more wait, acknowledging has
to do, for erasing costs a millisecond and more (`turnstream.broker.erasing`; with 20,000 waiting 200 a second are taken
instead of thousands, measured 2026-11), and the stream is empty once they are all taken.

Not here: what taking a message means (the API's `inbox.py`). Nor FastStream: measured with its 0.7.8, a pull subscriber
whose consumer was deleted spins and never recovers, handles batches in any order and takes single messages three times
slower than `Pull`, which has a watchdog.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress

import msgspec

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.erasing import erase, erase_message
from turnstream.broker.errors import BrokerFault
from turnstream.broker.pull import Delivery, Pull
from turnstream.ids import SessionKey
from turnstream.telemetry import get_logger

SLOTS = 256
"""Messages that one process holds at once."""
RENEW = 10.0
"""Seconds after which the broker is told that what is held is still being worked on; its own patience is 30."""
CALM = 100
"""So many messages may wait behind one that is erased."""
BACKOFF = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds before a message is tried again that failed for a reason which is not its own; the last one repeats."""

CODE = "ts-refused-code"
DETAIL = "ts-refused-detail"
ORIGIN = "ts-refused-seq"
"""Headers of a refused message: why, in one word and in a sentence, and its sequence in `INBOX`."""
SIZE = "ts-refused-size"
"""Header of one that was cut: how many bytes it had."""
KEEP = (subjects.IDEMPOTENCY_KEY, subjects.MESSAGE_ID, subjects.ACTOR)
"""Headers of the message itself that go with it, the names behind a `ts-refused-`."""
HEADER_MAX = 1024
"""Characters of a header that are kept."""
TOKEN_MAX = 128
"""Characters of a subject's token that are kept: no account or session has more."""
HEADERS_ROOM = 16 * 1024
"""Bytes that the headers may take of what the broker takes as one message."""

log = get_logger()


class Letter(msgspec.Struct, frozen=True):
    """A message as it came. `account` and `session` are the subject's tokens, unchecked. `seq` is its sequence in
    `INBOX`, `time` the broker's, in milliseconds."""

    account: str
    session: str
    data: bytes
    headers: dict[str, str]
    seq: int
    time: int


class Refused(Exception):
    """The message cannot be taken, now or later. `keep`: it is kept with the reason; else only that there was one."""

    def __init__(self, code: str, detail: str, *, keep: bool = True) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.keep = keep


class TryAgain(Exception):
    """The message could not be taken for a reason that is not its own."""


Take = Callable[[Letter], Awaitable[None]]
"""Deals with a message. Raises `Refused` or `TryAgain`; with anything else the message is refused too."""


class Inbox:
    """`run` works until it is cancelled. `on_refused` is called for each message that was refused."""

    def __init__(
        self, broker: Broker, take: Take, *, slots: int = SLOTS, on_refused: Callable[[], None] | None = None
    ) -> None:
        self._broker = broker
        self._take = take
        self._slots = slots
        self._on_refused = on_refused
        self._lines: dict[str, deque[Delivery]] = {}
        """What waits, by subject; the first is being worked on."""
        self._workers: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        pull = Pull(self._broker, subjects.INBOX_CONSUMER, slots=self._slots)
        self._start(self._renew(), "inbox renewal")
        try:
            async for deliveries in pull:
                for delivery in deliveries:
                    self._line_up(pull, delivery)
        finally:
            await pull.close()
            await self._give_back()

    def _line_up(self, pull: Pull, delivery: Delivery) -> None:
        line = self._lines.get(delivery.subject)
        if line is not None:
            line.append(delivery)
            return
        line = self._lines[delivery.subject] = deque([delivery])
        self._start(self._work(pull, delivery.subject, line), f"inbox {delivery.subject}")

    async def _work(self, pull: Pull, subject: str, line: deque[Delivery]) -> None:
        while line:
            await self._deal_with(line[0])
            line.popleft()
            pull.release()
        del self._lines[subject]

    async def _deal_with(self, delivery: Delivery) -> None:
        tries = 0
        while True:
            try:
                await self._once(delivery)
                return
            except (TryAgain, BrokerFault) as error:
                pause = BACKOFF[min(tries, len(BACKOFF) - 1)]
                tries += 1
                if tries == len(BACKOFF):
                    log.warning("an inbox message has to wait", subject=delivery.subject, seq=delivery.seq, error=error)
                await asyncio.sleep(pause)

    async def _once(self, delivery: Delivery) -> None:
        account, session = subjects.parse_inbox(delivery.subject)
        headers = delivery.headers or {}
        letter = Letter(account, session, delivery.data, headers, delivery.seq, delivery.time)
        try:
            await self._take(letter)
        except Refused as refused:
            await self._refuse(letter, refused)
        except (TryAgain, BrokerFault):
            raise
        except Exception as error:
            log.error(
                "an inbox message cannot be dealt with", subject=delivery.subject, seq=delivery.seq, exc_info=True
            )
            await self._refuse(letter, Refused("internal_error", type(error).__name__))
        if delivery.pending < CALM:
            await erase_message(self._broker, subjects.INBOX, delivery.seq)
        delivery.ack()

    async def _refuse(self, letter: Letter, refused: Refused) -> None:
        """Returns when the message is stored with the reason; cut, where it leaves no room for that or is not to be
        kept."""
        headers = {CODE: refused.code, DETAIL: " ".join(refused.detail.split())[:HEADER_MAX], ORIGIN: str(letter.seq)}
        for name in KEEP:
            if refused.keep and name in letter.headers:
                headers[f"ts-refused-{name.lower()}"] = letter.headers[name][:HEADER_MAX]
        room = self._broker.nc.max_payload - HEADERS_ROOM if refused.keep else 0
        if len(letter.data) > room:
            headers[SIZE] = str(len(letter.data))
        subject = subjects.refused(letter.account[:TOKEN_MAX], letter.session[:TOKEN_MAX])
        await self._broker.store(subject, letter.data[:room], headers)
        if self._on_refused:
            self._on_refused()

    def _start(self, work: Coroutine[object, object, None], name: str) -> None:
        worker = asyncio.create_task(work, name=name)
        self._workers.add(worker)
        worker.add_done_callback(self._workers.discard)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW)
            with suppress(BrokerFault):
                for line in tuple(self._lines.values()):
                    for delivery in tuple(line):
                        await delivery.progress()

    async def _give_back(self) -> None:
        """At the end: what is not dealt with is for another process, at once."""
        workers = tuple(self._workers)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for line in self._lines.values():
            for delivery in line:
                try:
                    await delivery.nak()
                except BrokerFault:  # it comes again when the broker's patience ends
                    return


async def forget(broker: Broker, key: SessionKey) -> None:
    """Erases what waits in the inbox for a session, and what was refused. Raises `BrokerFault`."""
    await erase(broker, subjects.INBOX, subjects.inbox(key))
    await erase(broker, subjects.REFUSED, subjects.refused(key.account, key.session))
