"""One runner: takes wake-ups of its queues, as many as it has free slots, and drives a session for each.

What becomes of a wake-up is decided by how its drive ends. A session that cannot be driven is put off, longer each
time, and is listed as stuck until a drive of it succeeds.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

import msgspec

from turnstream import subjects
from turnstream.broker.errors import BrokerFault
from turnstream.broker.pull import Delivery, Pull
from turnstream.ids import SessionKey
from turnstream.log.base import Unavailable
from turnstream.session.events import Wake
from turnstream.session.plan import Drive as Identity
from turnstream.telemetry import log, metrics
from turnstream_runner.drive import Drive, Outcome
from turnstream_runner.equipment import Equipment
from turnstream_runner.leases import Lease, Leases

LONGEST: Final = 600.0
"""Seconds that a session which cannot be driven is put off at most."""
AWAY: Final = 1.0
"""Seconds that it is put off where the broker did not answer: that is no fault of the session."""
MOMENT: Final = 1.0
"""Seconds that a session is put off that is to be removed, or to get a title or a summary, while others are."""
STUCK_MAX: Final = 1000
"""How many stuck sessions are listed."""
ASIDE_MAX: Final = 16
"""For how many sessions it looks for a title or a summary at once: they take no run's slot."""
HANDOVER: Final = 2.0
"""Seconds beyond the grace in which runs are given back at shutdown."""


class Stuck(msgspec.Struct, frozen=True):
    """A session that cannot be driven: why, for the how manyth time, and when it is tried again (broker time, ms)."""

    account: str
    session: str
    error: str
    deliveries: int
    again_at: int


class Runner:
    """`nonce` makes a string that no other drive has."""

    def __init__(self, equipment: Equipment, leases: Leases, *, nonce: Callable[[], str]) -> None:
        self.leases = leases
        self._equipment = equipment
        self._nonce = nonce
        self._draining = False
        self._drives: dict[Drive, asyncio.Task[None]] = {}
        self._stuck: dict[SessionKey, Stuck] = {}
        self._aside: set[SessionKey] = set()

    @property
    def active(self) -> int:
        """How many sessions it drives now."""
        return len(self._drives)

    @property
    def stuck(self) -> Iterable[Stuck]:
        return self._stuck.values()

    async def run(self, queue: str, pull: Pull) -> None:
        """Takes the wake-ups of one queue until the pull is closed."""
        lag = metrics.consumer_lag.labels(consumer=f"runner-{queue}")
        async for deliveries in pull:
            lag.set(deliveries[-1].pending)
            for delivery in deliveries:
                if self._draining:
                    with suppress(BrokerFault):
                        await delivery.nak()
                elif lease := self.leases.hold(delivery):
                    self._launch(queue, pull, lease)
                    continue
                pull.release()

    def stop_taking(self) -> None:
        """From now on every wake-up goes back to the broker for others."""
        self._draining = True

    async def drain(self, grace: float) -> None:
        """Gives everything back: model calls at once, tools after `grace` seconds at the latest."""
        self.stop_taking()
        for drive in tuple(self._drives):
            drive.drain()
        if not await self._all_ended(grace):
            for drive in tuple(self._drives):
                drive.end_grace()
            if not await self._all_ended(HANDOVER):
                log.warning("runs were not given back in time; their leases will lapse", runs=self.active)
        for task in tuple(self._drives.values()):
            task.cancel()
        await asyncio.gather(*self._drives.values(), return_exceptions=True)

    async def _all_ended(self, seconds: float) -> bool:
        if self._drives:
            await asyncio.wait(tuple(self._drives.values()), timeout=seconds)
        return not self._drives

    def _launch(self, queue: str, pull: Pull, lease: Lease) -> None:
        delivery = lease.delivery
        cause = (delivery.headers or {}).get(subjects.CAUSE, "")
        identity = Identity(
            runner=self._equipment.runner,
            nonce=self._nonce(),
            queue=queue,
            wake=Wake(work=delivery.seq, cause=int(cause) if cause.isdecimal() else 0, delivery=delivery.delivery),
        )
        key = subjects.parse_work(delivery.subject)[1]
        drive = Drive(
            self._equipment,
            key,
            identity,
            is_here=self.leases.__contains__,
            confirm=lambda: self.leases.confirm(lease),
            step_aside=lambda: self._lets_aside(key, pull),
        )
        lease.on_doubt = drive.doubt
        self._drives[drive] = asyncio.create_task(self._follow(drive, lease, delivery, queue, pull))
        metrics.runs_active.inc()

    def _lets_aside(self, key: SessionKey, pull: Pull) -> bool:
        """Whether a drive may look for a title or a summary; its slot is free from then on."""
        if key in self._aside or len(self._aside) >= ASIDE_MAX:
            return False
        self._aside.add(key)
        pull.release()
        return True

    async def _follow(self, drive: Drive, lease: Lease, delivery: Delivery, queue: str, pull: Pull) -> None:
        """Drives, and says what becomes of the wake-up."""
        redelivered = False
        try:
            outcome = await drive.run()
            redelivered = outcome is Outcome.FENCED and lease.delivery is not delivery
            if not redelivered:
                await self._answer(outcome, lease)
            if self._stuck.pop(drive.key, None):
                metrics.stuck.set(len(self._stuck))
        except Exception as error:
            await self._put_off(drive.key, lease, error)
        finally:
            del self._drives[drive]
            self.leases.drop(lease)
            metrics.runs_active.dec()
            if drive.aside:
                self._aside.discard(drive.key)
            elif redelivered and not self._draining and (again := self.leases.hold(lease.delivery)):
                self._launch(queue, pull, again)
            else:
                pull.release()

    async def _answer(self, outcome: Outcome, lease: Lease) -> None:
        with suppress(BrokerFault):
            match outcome:
                case Outcome.DONE if not lease.doubtful:
                    lease.delivery.ack()
                case Outcome.DONE | Outcome.FENCED:
                    pass  # the wake-up may be another's by now
                case Outcome.HELD:
                    await lease.delivery.nak(self.leases.length)
                case Outcome.BUSY:
                    await lease.delivery.nak(MOMENT)
                case Outcome.HANDED_BACK:
                    await lease.delivery.nak()

    async def _put_off(self, key: SessionKey, lease: Lease, error: Exception) -> None:
        count = lease.delivery.delivery
        away = isinstance(error, Unavailable)
        delay = AWAY if away else min(self.leases.length * 2 ** (min(count, 16) - 1), LONGEST)
        if not away or count > 1:
            again_at = self._equipment.now() + round(delay * 1000)
            what = f"{type(error).__name__}: {error}"
            self._stuck.pop(key, None)
            self._stuck[key] = Stuck(key.account, key.session, what, count, again_at)
            if len(self._stuck) > STUCK_MAX:
                del self._stuck[next(iter(self._stuck))]
            metrics.stuck.set(len(self._stuck))
        log.error(
            "a session cannot be driven and is put off",
            account=key.account,
            session=key.session,
            work=lease.delivery.seq,
            delivery=count,
            delay=delay,
            error=error,
            exc_info=not away and count == 1,
        )
        if not lease.doubtful:
            with suppress(BrokerFault):
                await lease.delivery.nak(delay)
