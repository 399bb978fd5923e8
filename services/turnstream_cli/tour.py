"""The story that `demo` tells, and the promises that it checks while it tells it.

The messages go in by bare nats-py and by HTTP; the same feed is listened to over NATS and as server-sent events; a run
is cancelled, a runner killed in the middle of its answer, and a question answered.
"""

import asyncio
import contextlib
import shlex
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
import nats
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from rich.console import Console

from turnstream_cli import look
from turnstream_cli.client import Client, Connect
from turnstream_cli.follow import Delta, Event, follow
from turnstream_cli.place import Addresses
from turnstream_cli.screen import Screen

PATIENCE = 30.0
"""Seconds that any step may take, on a slow machine."""


class RunnerProcess(Protocol):
    """The runner, as a process that can be killed."""

    @property
    def pid(self) -> int: ...
    def start(self) -> None: ...
    def kill(self) -> None: ...


class Broken(Exception):
    """Something that the tour promised did not happen in time."""


class Tour:
    """One telling."""

    def __init__(
        self,
        console: Console,
        client: Client,
        addresses: Addresses,
        runner: RunnerProcess,
        *,
        session: str,
        fsck: Callable[[], Awaitable[int]],
    ) -> None:
        self._broken: list[str] = []
        self._console = console
        self._client = client
        self._at = addresses
        self._runner = runner
        self._session = session
        self._fsck = fsck
        self._screen = Screen(console)
        self._by_nats: list[tuple[int, dict[str, Any]]] = []
        self._by_sse: list[Event] = []
        self._listening: asyncio.Task[None] | None = None
        self._spoken: Counter[tuple[int, str]] = Counter()
        """How many deltas came, by run and kind."""
        self._changed = asyncio.Event()
        self._number = 0

    async def play(self) -> list[str]:
        """Tells it; what did not come true."""
        nc = await nats.connect(self._at.nats, name="turnstream demo: a stranger's program")
        try:
            await self._publish(nc)
            await self._post()
            await self._cancel()
            await self._kill()
            await self._ask()
            await self._compare()
            await self._look()
        except Broken as broken:
            self._promise(str(broken), False)
        finally:
            if self._listening:
                self._listening.cancel()
                await asyncio.gather(self._listening, return_exceptions=True)
            self._screen.finish()
            await nc.close()
        return self._broken

    # --- the steps ------------------------------------------------------------------------------------------------

    async def _publish(self, nc: Nats) -> None:
        feed, inbox = f"ts.feed.default.{self._session}", f"ts.inbox.default.{self._session}"
        said = "Hello, is anybody there?"
        self._title("A program that only knows a subject publishes; the session opens with its first message.")
        self._command(f"nats sub {feed}")
        self._command(f"nats pub {inbox} {shlex.quote(said)}")
        self._command(
            f"curl -N -H 'Accept: text/event-stream' '{self._at.http}/v1/sessions/{self._session}/events?after=0'"
        )
        await nc.subscribe(feed, cb=self._heard)
        await nc.publish(inbox, said.encode())
        await nc.flush()
        await self._until(lambda: bool(self._by_nats), "a published message became an event on the NATS feed")
        self._listening = asyncio.create_task(self._listen(), name="the tour's SSE feed")
        self._listening.add_done_callback(lambda _: self._changed.set())
        await self._ended(1, "completed", "a published message became a run, and it completed")

    async def _post(self) -> None:
        content = (
            '[tool add {"a": 19, "b": 23}] [tool count_words {"text": "to be or not to be"}] [then] '
            "[think Both results are here.] [slow 30ms] [say The sum is 42, and the text has 6 words.]"
        )
        self._title("Another one posts over HTTP. The model asks two tools at once, reasons, and speaks as it goes.")
        self._console.print("  (The demo model does what its prompt says; [help] as a prompt tells how.)", markup=False)
        await self._message(content)
        ended = await self._ended(2, "completed", "a posted message became a run with reasoning, tools and an answer")
        seen = {event.type for event in self._by_sse if event.data.get("run") == 2}
        self._promise("the tool calls are facts in the log", {"model.replied", "tool.returned"} <= seen)
        self._promise("reasoning was streamed on a channel of its own", self._spoken[2, "reasoning"] > 0)
        self._promise("the answer was streamed while it was made", self._spoken[2, "text"] > 1)
        self._promise("the answer holds no reasoning", "results are here" not in ended.data.get("content", ""))

    async def _cancel(self) -> None:
        self._title("A long answer is cancelled. What was said until then is kept.")
        await self._message("[slow 200 50ms]")
        await self._until_spoken(3)
        self._command(f"turnstream runs cancel {self._session}.3")
        await self._client.post(f"/v1/runs/{self._session}.3/cancel", {"reason": "enough"})
        ended = await self._ended(3, "cancelled", "a cancelled run ends as cancelled")
        self._promise("its partial text is kept", bool(ended.data.get("content")))

    async def _kill(self) -> None:
        self._title(
            "The runner is killed in the middle of an answer. Another one takes the run over, and nothing is lost."
        )
        await self._message("[slow 50 50ms]")
        await self._until_spoken(4)
        self._command(f"kill -9 {self._runner.pid}")
        self._command("turnstream runner")
        self._runner.kill()
        self._runner.start()
        ended = await self._ended(4, "completed", "the run of a killed runner was completed by another")
        self._promise("it took a second attempt", ended.data.get("attempt") == 2)
        ends = sum(event.type == "run.ended" and event.data["run"] == 4 for event in self._by_sse)
        self._promise("it has one end and one answer", ends == 1)

    async def _ask(self) -> None:
        self._title("The model asks a person. The run waits, without a runner, until somebody answers.")
        await self._message('[ask Which colour? {"choices": ["red", "blue"]}]')
        run, request = f"{self._session}.5", f"{self._session}.5.q1"
        await self._until(lambda: any(e.type == "run.waiting" for e in self._by_sse), "a run that asks waits")
        waited = await self._client.get(f"/v1/runs/{run}/wait", timeout=0)
        asked = [one["request"] for one in waited.get("requests", ())]
        self._promise("a run that asks waits", waited["status"] == "waiting" and asked == [request])
        self._command(f"turnstream answer {request} blue")
        await self._client.post(f"/v1/requests/{request}/answer", {"answer": "blue"})
        ended = await self._ended(5, "completed", "the answer lets the same run go on to its end")
        self._promise("the model has the answer", "blue" in ended.data.get("content", ""))

    async def _compare(self) -> None:
        self._title("Both feeds are the log itself: the same events, the same numbers, no gap.")
        await self._until(lambda: len(self._by_nats) >= len(self._by_sse), "the NATS feed is as long as the other")
        over_nats = [seq for seq, _ in self._by_nats]
        over_sse = [event.seq for event in self._by_sse]
        self._console.print(f"  NATS {_short(over_nats)}\n  SSE  {_short(over_sse)}", markup=False)
        self._promise("the same sequence over NATS and SSE", over_nats == over_sse)
        stored = [{"seq": seq, **record} for seq, record in self._by_nats]
        shown = [{name: value for name, value in e.record.items() if name != "storedat"} for e in self._by_sse]
        self._promise("the same events, to the last field", stored == shown)

    async def _look(self) -> None:
        self._title("And the views afterwards.")
        here, last = Connect(url=self._at.http), self._by_sse[-1].seq
        session = await self._client.get(f"/v1/sessions/{self._session}", after=last)
        self._promise("the views show what was written last", session["seq"] >= last and session["status"] == "idle")
        runs = (await self._client.get("/v1/runs", session=self._session))["items"]
        statuses = [run["status"] for run in reversed(runs)]
        expected = ["completed", "completed", "cancelled", "completed", "completed"]
        self._promise("five runs, each with its end", statuses == expected)
        history = (await self._client.get(f"/v1/sessions/{self._session}/history"))["items"]
        self._promise("the transcript has every message", sum(item["type"] == "message" for item in history) == 5)
        tables: tuple[tuple[str, Awaitable[None]], ...] = (
            ("turnstream sessions", look.sessions(connect=here)),
            (f"turnstream runs --session {self._session}", look.runs_list(session=self._session, connect=here)),
            (f"turnstream steps {self._session}.2", look.steps(f"{self._session}.2", connect=here)),
        )
        for command, table in tables:
            self._command(command)
            await table
            self._console.print()
        self._command("turnstream fsck")
        self._promise("log and views are whole and say the same", await self._fsck() == 0)

    # --- what both feeds bring ------------------------------------------------------------------------------------

    async def _heard(self, message: Msg) -> None:
        headers = message.headers or {}
        self._by_nats.append((int(headers["Nats-Sequence"]), msgspec.json.decode(message.data)))
        self._changed.set()

    async def _listen(self) -> None:
        async with contextlib.aclosing(follow(self._client, self._session)) as items:
            async for item in items:
                match item:
                    case Event():
                        self._by_sse.append(item)
                    case Delta():
                        run = int(item.record["run"].rpartition(".")[2])
                        self._spoken[run, item.record["kind"]] += 1
                    case _:
                        continue
                self._screen.show(item)
                self._changed.set()

    # --- telling and checking -------------------------------------------------------------------------------------

    def _title(self, text: str) -> None:
        self._number += 1
        self._screen.finish()
        self._console.print(f"\n[bold]{self._number}. {text}[/]")

    def _command(self, command: str) -> None:
        self._screen.finish()
        self._console.print(f"  $ {command}", style="dim cyan", markup=False, soft_wrap=True)

    def _promise(self, what: str, kept: bool) -> None:
        self._screen.finish()
        self._console.print(
            f"  {'✓' if kept else '✗ not so:'} {what}", style="green" if kept else "bold red", markup=False
        )
        if not kept:
            self._broken.append(what)

    async def _message(self, content: str) -> None:
        body = msgspec.json.encode({"content": content}).decode()
        url = f"{self._at.http}/v1/sessions/{self._session}/messages"
        self._command(f"curl {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}")
        await self._client.post(f"/v1/sessions/{self._session}/messages", {"content": content})

    async def _ended(self, run: int, status: str, promise: str) -> Event:
        """The event that ends the run; checks how."""

        def end() -> Event | None:
            ends = (e for e in self._by_sse if e.type == "run.ended" and e.data["run"] == run)
            return next(ends, None)

        await self._until(lambda: end() is not None, promise)
        event = end()
        assert event is not None
        self._promise(promise, event.data["status"] == status)
        return event

    async def _until_spoken(self, run: int) -> None:
        """Waits until the run is in the middle of what it says."""
        await self._until(lambda: self._spoken[run, "text"] >= 3, f"run {run} is heard while it speaks")

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                while not condition():
                    if self._listening and self._listening.done():
                        self._listening.result()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Broken(what) from None


def _short(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))
