"""Deltas: what a model says while it says it. They travel beside the log and are never stored in it.

A delta is a message on `ts.delta.<account>.<session>.<run>`: the text is the payload, the headers say of which attempt
and step it is, its kind, and its number in the attempt. They are published without acknowledgement and kept for
minutes, so some may be missing: the number shows the gap. What was really said is in the event that ends the step. A
reader drops deltas of an attempt older than the newest it has seen.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal, Protocol, cast, get_args

import msgspec
from nats.aio.msg import Msg

from turnstream import subjects
from turnstream.broker.connection import Broker
from turnstream.broker.declare import ensure_stream
from turnstream.broker.erasing import forget
from turnstream.broker.errors import BrokerFault, BrokerTimeout
from turnstream.ids import SessionKey

Kind = Literal["text", "reasoning", "reset", "tool"]
"""`reset`: what came before in this step is void; the text says why. `tool`: a call begins; the text is a JSON object
of `call_id` and `name`."""

KINDS: Final = get_args(Kind)

GATHER: Final = 0.03
"""Seconds that a delta waits for more of its kind."""
SIZE: Final = 4096
"""Characters at which it waits no longer."""
PIECE: Final = 64 * 1024
"""Characters of one delta at most."""
BATCH: Final = 1000
TIMEOUT: Final = 5.0

ATTEMPT, STEP, INDEX, KIND = "attempt", "step", "index", "kind"


class Delta(msgspec.Struct, frozen=True):
    """One piece of what run `run` says. `index` counts from 1 in each attempt, over all its steps and kinds."""

    run: int
    attempt: int
    step: int
    index: int
    kind: Kind
    text: str


class Speech:
    """The deltas of one attempt, as they are made. Text and reasoning are gathered apart, in the order of their coming.
    Of a step that is over before anything was due, nothing is sent: its words are in the log as soon as a delta would
    be heard.

    Sending is best effort: a delta that cannot be sent leaves a gap and harms nobody.
    """

    def __init__(self, broker: Broker, key: SessionKey, run: int, attempt: int) -> None:
        self._broker = broker
        self._subject = subjects.delta(key, run)
        self._attempt = str(attempt)
        self._index = 0
        self._silent = False
        self._spoken = 0
        """The step of the last delta that was sent."""
        self._kind: Kind = "text"
        self._step = 0
        self._parts: list[str] = []
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None

    async def say(self, step: int, kind: Literal["text", "reasoning"], text: str) -> None:
        if self._parts and (kind != self._kind or step != self._step):
            await self.flush()
        self._kind, self._step = kind, step
        self._parts.append(text)
        self._size += len(text)
        if self._size >= SIZE:
            await self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER, self._due)

    async def mark(self, step: int, kind: Literal["reset", "tool"], text: str) -> None:
        """Says something that is not gathered: a reset, or a tool call that begins."""
        await self.flush()
        await self._send(step, kind, text)

    async def finish(self, step: int) -> None:
        """The step has come to its reply."""
        if self._spoken == step:
            await self.flush()
        self._drop()

    def silence(self) -> None:
        """The run is another's now: nothing more is said of this attempt."""
        self._silent = True
        self._drop()

    async def flush(self) -> None:
        """Sends what was gathered."""
        self._disarm()
        if not self._parts:
            return
        text = "".join(self._parts)
        self._parts.clear()
        self._size = 0
        step, kind = self._step, self._kind
        for start in range(0, len(text), PIECE):
            await self._send(step, kind, text[start : start + PIECE])

    def _drop(self) -> None:
        self._disarm()
        self._parts.clear()
        self._size = 0

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        self._timer = None
        self._sending = asyncio.ensure_future(self.flush())

    async def _send(self, step: int, kind: Kind, text: str) -> None:
        if self._silent:
            return
        self._index += 1
        self._spoken = step
        headers = {ATTEMPT: self._attempt, STEP: str(step), INDEX: str(self._index), KIND: kind}
        with suppress(BrokerFault):
            await self._broker.publish(self._subject, text.encode(errors="replace"), headers=headers)


class Listening(Protocol):
    async def unsubscribe(self) -> None: ...


class Live:
    """Deltas, to say and to hear."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def speak(self, key: SessionKey, run: int, attempt: int) -> Speech:
        return Speech(self._broker, key, run, attempt)

    async def listen(self, key: SessionKey, on_delta: Callable[[Delta], None]) -> Listening:
        """Calls back for each delta of the session from now on, until `unsubscribe` of what this returns."""

        async def heard(message: Msg) -> None:
            if delta := parse(message.subject, message.headers, message.data):
                on_delta(delta)

        subject = subjects.delta(key, "*")
        return await self._broker.nc.subscribe(subject, cb=heard)  # pyright: ignore[reportUnknownMemberType]

    async def read(self, key: SessionKey, run: int) -> list[Delta]:
        """The deltas of the run's newest attempt that are still kept, oldest first. Raises `BrokerFault`. None are kept
        where somebody deleted the stream; then it is made again."""
        subject = subjects.delta(key, run)
        found: list[Delta] = []
        after: int | None = 0
        while after is not None:
            page, after = await self._page(subject, after + 1)
            found += page
        newest = max((delta.attempt for delta in found), default=0)
        return [delta for delta in found if delta.attempt == newest]

    async def forget(self, key: SessionKey) -> None:
        """Keeps no delta of the session any longer. Raises `BrokerFault`."""
        await forget(self._broker, subjects.DELTAS, subjects.delta(key, "*"))

    async def _page(self, subject: str, start: int) -> tuple[list[Delta], int | None]:
        """One batch from this sequence of `DELTAS` on, and where it ended; None if there is no more."""
        nc = self._broker.nc
        found: list[Delta] = []
        gone = False
        end: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

        async def answer(message: Msg) -> None:
            nonlocal gone
            headers = message.headers or {}
            if status := headers.get("Status"):
                gone = gone or status == "503"
                more = status == "204" and int(headers.get("Nats-Num-Pending", "0")) > 0
                if not end.done():
                    end.set_result(int(headers["Nats-Last-Sequence"]) if more else None)
            elif delta := parse(headers.get("Nats-Subject", ""), headers, message.data):
                found.append(delta)

        inbox = nc.new_inbox()
        subscription = await nc.subscribe(inbox, cb=answer)  # pyright: ignore[reportUnknownMemberType]
        try:
            body = {"seq": start, "next_by_subj": subject, "batch": BATCH}
            await self._broker.publish(f"$JS.API.DIRECT.GET.{subjects.DELTAS}", msgspec.json.encode(body), reply=inbox)
            async with asyncio.timeout(TIMEOUT):
                last = await end
        except TimeoutError:
            raise BrokerTimeout(subject, f"no answer within {TIMEOUT:g} s") from None
        finally:
            await subscription.unsubscribe()
        if gone:
            await ensure_stream(self._broker, subjects.DELTAS)
        return found, last


def parse(subject: str, headers: dict[str, str] | None, payload: bytes) -> Delta | None:
    """The delta that a message is, or None: anybody may publish nonsense."""
    try:
        run = int(subject.rsplit(".", 1)[1])
        found = headers or {}
        kind = found[KIND]
        if kind not in KINDS:
            return None
        return Delta(run, int(found[ATTEMPT]), int(found[STEP]), int(found[INDEX]), cast(Kind, kind), payload.decode())
    except (KeyError, ValueError, IndexError):
        return None
