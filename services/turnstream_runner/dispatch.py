"""From the log to work: each event that asks for a wake-up or a timer gets it. The log is the outbox.

Reads headers only and knows no types: `ts-wake` names the queues to wake, `ts-due` says what falls due when. An event
is acknowledged once everything that it asks for is stored, so a crash repeats and never forgets; the message id of a
wake-up and the subject of a timer make a repeat harmless. Any number of dispatchers may share the consumer.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from turnstream import subjects
from turnstream.broker.errors import BrokerFault
from turnstream.broker.pull import Delivery, Pull
from turnstream.telemetry import log, metrics
from turnstream.wire.timers import Timers, parse_dues
from turnstream.wire.work import Work

SLOTS: Final = 1024
"""Events that are carried at once."""
RETRY: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between attempts to store what an event asks for; the last one repeats."""


class Dispatch:
    """Carries events until its pull, made with `SLOTS` slots, is closed."""

    def __init__(self, pull: Pull, work: Work, timers: Timers) -> None:
        self._pull = pull
        self._work = work
        self._timers = timers
        self._carrying: dict[int, asyncio.Task[None]] = {}
        self._set_lag: Callable[[float], None] = metrics.consumer_lag.labels(consumer=subjects.DISPATCH.name).set

    async def run(self) -> None:
        async for deliveries in self._pull:
            self._set_lag(deliveries[-1].pending)
            for delivery in deliveries:
                if delivery.seq in self._carrying:  # it took longer than the consumer's patience
                    self._pull.release()
                elif delivery.headers and (subjects.WAKE in delivery.headers or subjects.DUE in delivery.headers):
                    task = asyncio.create_task(self._carry(delivery, delivery.headers))
                    self._carrying[delivery.seq] = task
                else:
                    await self._done(delivery)

    async def close(self, grace: float = 1.0) -> None:
        """Ends `run`. What is not stored within `grace` seconds is carried by whoever gets the event next."""
        await self._pull.close()
        if self._carrying:
            _, late = await asyncio.wait(self._carrying.values(), timeout=grace)
            for task in late:
                task.cancel()

    async def _carry(self, delivery: Delivery, headers: dict[str, str]) -> None:
        attempt = 0
        try:
            while True:
                try:
                    await self._store(delivery, headers)
                    break
                except BrokerFault as fault:
                    if attempt == 0 or attempt % 30 == 0:
                        log.warning("an event's wake-up cannot be stored yet", seq=delivery.seq, error=fault)
                    await asyncio.sleep(RETRY[min(attempt, len(RETRY) - 1)])
                    attempt += 1
                except ValueError as error:
                    log.error("an event asks for what cannot be read", seq=delivery.seq, error=error)
                    break
            await self._done(delivery)
        finally:
            del self._carrying[delivery.seq]

    async def _store(self, delivery: Delivery, headers: dict[str, str]) -> None:
        key = subjects.parse_session(delivery.subject)
        seq = delivery.seq
        for queue in headers.get(subjects.WAKE, "").split():
            await self._work.wake(queue, key, seq, message_id=f"{subjects.SESSIONS}-{seq}-{queue}")
        if dues := headers.get(subjects.DUE):
            for due in parse_dues(dues):
                at = delivery.time + due.after
                await self._timers.put(key, seq=seq, at_ms=at, queue=due.queue, what=due.what)

    async def _done(self, delivery: Delivery) -> None:
        try:
            await delivery.ack()
        except BrokerFault as fault:
            log.warning("an event could not be acknowledged and comes again", seq=delivery.seq, error=fault)
        self._pull.release()
