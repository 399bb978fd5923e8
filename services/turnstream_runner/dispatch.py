"""From the log to work: each event that asks for a wake-up or a timer gets it. The log is the outbox.

Reads headers only and knows no types: `ts-wake` names the queues to wake, `ts-due` says what falls due when,
`ts-settled` what no longer does. An event is acknowledged once everything that it asks for is stored, so a crash
repeats and never forgets; the message id of a wake-up and the subject of a timer make a repeat harmless. Any number of
dispatchers may share the consumer.

Most of what is said to fall due is settled within a moment (a run's deadline, by its end), so a timer is held back for
`HOLD` seconds, its event unacknowledged, and often never stored. A timer that was stored and is settled later is taken
back, a little later where another dispatcher may have stored it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from turnstream import subjects
from turnstream.broker.errors import BrokerFault
from turnstream.broker.pull import Delivery, Pull
from turnstream.ids import SessionKey
from turnstream.session.events import Due
from turnstream.telemetry import log, metrics
from turnstream.wire.timers import Timers, parse_dues
from turnstream.wire.work import Work

SLOTS: Final = 1024
"""Events that are carried at once."""
HOLD: Final = 5.0
"""Seconds that a timer is held back; well below the consumer's patience."""
STORED: Final = 1.0
"""Seconds in which a timer is stored that is held back no longer."""
TIMERS: Final = 100_000
"""How many of its timers a dispatcher remembers, to take them back."""
RETRY: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between attempts to store what an event asks for; the last one repeats."""


_ASKS: Final = frozenset({subjects.WAKE, subjects.DUE, subjects.SETTLED})


class _Asked:
    """What one event asks for: wake-ups, timers to take back, of which another dispatcher may know, timers at once,
    timers that are held back."""

    __slots__ = ("drops", "dues", "held", "key", "others", "wakes")

    def __init__(self, key: SessionKey, wakes: list[str]) -> None:
        self.key = key
        self.wakes = wakes
        self.drops: list[str] = []
        self.others: list[str] = []
        self.dues: list[Due] = []
        self.held: dict[Due, asyncio.Future[None]] = {}


class Dispatch:
    """Carries events until its pull, made with `SLOTS` slots, is closed. `hold`: seconds that a timer is held back."""

    def __init__(self, pull: Pull, work: Work, timers: Timers, *, hold: float = HOLD) -> None:
        self._pull = pull
        self._work = work
        self._timers = timers
        self._hold = hold
        self._carrying: dict[int, asyncio.Task[None]] = {}
        self._held: dict[tuple[SessionKey, str], asyncio.Future[None]] = {}
        self._stored: dict[tuple[SessionKey, str], None] = {}
        """The timers that this dispatcher has stored, oldest first."""
        self._set_lag: Callable[[float], None] = metrics.consumer_lag.labels(consumer=subjects.DISPATCH.name).set

    async def run(self) -> None:
        async for deliveries in self._pull:
            self._set_lag(deliveries[-1].pending)
            for delivery in deliveries:
                if delivery.seq in self._carrying:  # it took longer than the consumer's patience
                    self._pull.release()
                elif asked := self._asked(delivery):
                    self._carrying[delivery.seq] = asyncio.create_task(self._carry(delivery, asked))
                else:
                    delivery.ack()
                    self._pull.release()

    async def close(self, grace: float = 1.0) -> None:
        """Ends `run`. What is not stored within `grace` seconds is carried by whoever gets the event next."""
        await self._pull.close()
        for held in self._held.values():
            held.cancel()
        if self._carrying:
            _, late = await asyncio.wait(self._carrying.values(), timeout=grace)
            for task in late:
                task.cancel()

    def _asked(self, delivery: Delivery) -> _Asked | None:
        """What is to be stored for this event; timers that it settles are held back no longer."""
        headers = delivery.headers
        if headers is None or _ASKS.isdisjoint(headers):
            return None
        key = subjects.parse_session(delivery.subject)
        asked = _Asked(key, headers.get(subjects.WAKE, "").split())
        for what in headers.get(subjects.SETTLED, "").split():
            if held := self._held.pop((key, what), None):
                held.set_result(None)
            elif (key, what) in self._stored:
                del self._stored[key, what]
                asked.drops.append(what)
            else:
                asked.others.append(what)
        try:
            dues = parse_dues(headers[subjects.DUE]) if subjects.DUE in headers else []
        except ValueError as error:
            log.error("an event asks for what cannot be read", seq=delivery.seq, error=error)
            dues = []
        for due in dues:
            if delivery.delivery == 1 and due.after > self._hold * 1000:
                asked.held[due] = self._held[key, due.what] = asyncio.get_running_loop().create_future()
            else:
                asked.dues.append(due)
        return asked if asked.wakes or asked.drops or asked.others or dues else None

    async def _carry(self, delivery: Delivery, asked: _Asked) -> None:
        seq, key = delivery.seq, asked.key
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            try:
                for queue in asked.wakes:
                    name = f"{subjects.SESSIONS}-{seq}-{queue}"
                    await _until_stored(seq, partial(self._work.wake, queue, key, seq, message_id=name))
                for what in asked.drops:
                    await _until_stored(seq, partial(self._timers.drop, key, what))
                for due in asked.dues:
                    await self._store(key, delivery, due)
            finally:
                self._pull.release()  # what is held back keeps no other event waiting
            if asked.held:
                await asyncio.wait(asked.held.values(), timeout=self._hold)
            for due, held in asked.held.items():
                if self._held.get((key, due.what)) is held:
                    del self._held[key, due.what]
                    await self._store(key, delivery, due)
            if asked.others:  # whoever holds them back will have stored them by then
                await asyncio.sleep(max(began + self._hold + STORED - clock(), 0))
                for what in asked.others:
                    if (key, what) not in self._held and (key, what) not in self._stored:  # asked for anew since
                        await _until_stored(seq, partial(self._timers.drop, key, what))
            delivery.ack()
        finally:
            del self._carrying[seq]

    async def _store(self, key: SessionKey, delivery: Delivery, due: Due) -> None:
        put = partial(self._timers.put, key, seq=delivery.seq, at_ms=delivery.time + due.after)
        await _until_stored(delivery.seq, partial(put, queue=due.queue, what=due.what))
        self._stored[key, due.what] = None
        if len(self._stored) > TIMERS:
            del self._stored[next(iter(self._stored))]


async def _until_stored(seq: int, store: Callable[[], Awaitable[None]]) -> None:
    """Tries for ever: the event is not acknowledged before."""
    attempt = 0
    while True:
        try:
            await store()
            return
        except BrokerFault as fault:
            if attempt % 30 == 0:
                log.warning("what an event asks for cannot be stored yet", seq=seq, error=fault)
            await asyncio.sleep(RETRY[min(attempt, len(RETRY) - 1)])
            attempt += 1
