"""Deltas: what a model says while it says it. They travel beside the log and are never stored in it.

A delta is a message on `ts.delta.<account>.<session>.<run>`: the text is the payload, the headers say of which attempt
and step it is, its kind, and its number in the attempt; in a graph, also of which node: several may speak at once, each
counts its own steps, and the numbers go on over all of them. They are published without acknowledgement and kept for
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

ATTEMPT, STEP, INDEX, KIND, PATH = "attempt", "step", "index", "kind", "path"


class Delta(msgspec.Struct, frozen=True):
    """One piece of what run `run` says. `index` counts from 1 in each attempt, over all its nodes, steps and kinds.
    `path`: of the node that says it, which `step` is counted in; empty outside of a graph."""

    run: int
    attempt: int
    step: int
    index: int
    kind: Kind
    text: str
    path: str = ""


class _Voice:
    """What one node, or a run without a graph, has said and is not sent yet."""

    def __init__(self) -> None:
        self.kind: Kind = "text"
        self.step = 0
        self.spoken = 0
        """The step of the last delta that was sent."""
        self._parts: list[str] = []
        self.size = 0

    def add(self, step: int, kind: Kind, text: str) -> None:
        self.step, self.kind = step, kind
        self._parts.append(text)
        self.size += len(text)

    def goes_on(self, step: int, kind: Kind) -> bool:
        """Whether a piece of this step and kind may be sent together with what is there."""
        return not self._parts or (self.step == step and self.kind == kind)

    def take(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        self.size = 0
        return text


class Speech:
    """The deltas of one attempt, as they are made. What several nodes say at once is gathered for each apart, and so
    are text and reasoning, in the order of their coming. Of a step that is over before anything was due, nothing is
    sent: its words are in the log as soon as a delta would be heard.

    Sending is best effort: a delta that cannot be sent leaves a gap and harms nobody.
    """

    def __init__(self, broker: Broker, key: SessionKey, run: int, attempt: int) -> None:
        self._broker = broker
        self._subject = subjects.delta(key, run)
        self._attempt = str(attempt)
        self._index = 0
        self._silent = False
        self._voices: dict[str, _Voice] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None

    async def say(self, step: int, kind: Literal["text", "reasoning"], text: str, path: str = "") -> None:
        voice = self._voice(path)
        if not voice.goes_on(step, kind):
            await self._utter(voice, path)
        voice.add(step, kind, text)
        if voice.size >= SIZE:
            await self._utter(voice, path)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER, self._due)

    async def mark(self, step: int, kind: Literal["reset", "tool"], text: str, path: str = "") -> None:
        """Says something that is not gathered: a reset, or a tool call that begins."""
        voice = self._voice(path)
        await self._utter(voice, path)
        await self._send(voice, step, kind, text, path)

    async def finish(self, step: int, path: str = "") -> None:
        """The step has come to its reply."""
        voice = self._voices.pop(path, None)
        if not self._voices:
            self._disarm()
        if voice and voice.spoken == step:
            await self._utter(voice, path)

    def silence(self) -> None:
        """The run is another's now: nothing more is said of this attempt."""
        self._silent = True
        self._disarm()
        self._voices.clear()

    async def flush(self) -> None:
        """Sends what was gathered."""
        self._disarm()
        for path, voice in tuple(self._voices.items()):
            await self._utter(voice, path)

    def _voice(self, path: str) -> _Voice:
        if path not in self._voices:
            self._voices[path] = _Voice()
        return self._voices[path]

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        self._timer = None
        self._sending = asyncio.ensure_future(self.flush())

    async def _utter(self, voice: _Voice, path: str) -> None:
        step, kind = voice.step, voice.kind
        text = voice.take()
        for start in range(0, len(text), PIECE):
            await self._send(voice, step, kind, text[start : start + PIECE], path)

    async def _send(self, voice: _Voice, step: int, kind: Kind, text: str, path: str) -> None:
        if self._silent:
            return
        self._index += 1
        voice.spoken = step
        headers = {ATTEMPT: self._attempt, STEP: str(step), INDEX: str(self._index), KIND: kind}
        if path:
            headers[PATH] = path
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
        step, index, path = int(found[STEP]), int(found[INDEX]), found.get(PATH, "")
        return Delta(run, int(found[ATTEMPT]), step, index, cast(Kind, kind), payload.decode(), path)
    except (KeyError, ValueError, IndexError):
        return None
