"""Runners that die at a point: a program for tests.

It reads lines of JSON, `{"settings": {…}, "at": 7, "log": "…"}`, and forks a runner for each, which is quick. A runner
kills itself (-9) at its point `at`, counted from 1: before and after every append of an event, every model call, every
tool call, everything that it keeps beside the log. With `at` 0 it lives. `at` may also be the name of a point: there
it freezes (SIGSTOP), the first time that it comes there.
Each point is written to the log as `point <n> <what>`. The answer to a line is the process's id.
"""

import asyncio
import importlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

import uvloop

from turnstream import settings
from turnstream.log.jetstream import JetStreamLog
from turnstream.wire.blobs import Blobs
from turnstream_runner import app
from turnstream_runner.models.demo import DemoModel
from turnstream_runner.models.port import ModelRequest, Reply
from turnstream_runner.tools.registry import Tools


class Bomb:
    def __init__(self, at: int | str) -> None:
        self.at = at
        self.count = 0
        self.frozen = False

    def point(self, what: str) -> None:
        self.count += 1
        os.write(2, f"point {self.count} {what}\n".encode())
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == self.at and not self.frozen:
            self.frozen = True
            os.kill(os.getpid(), signal.SIGSTOP)

    def around(self, owner: type[Any], name: str, label: Callable[..., str | None]) -> None:
        """Before and after each call of this method for which `label` has a name."""
        method = getattr(owner, name)

        async def armed(this: Any, *arguments: Any, **named: Any) -> Any:
            what = label(*arguments, **named)
            if what:
                self.point(f"before {what}")
            result = await method(this, *arguments, **named)
            if what:
                self.point(f"after {what}")
            return result

        setattr(owner, name, armed)

    def in_models(self) -> None:
        stream = DemoModel.stream

        async def armed(this: DemoModel, request: ModelRequest) -> AsyncGenerator[Any, None]:
            self.point("before the model call")
            async for item in stream(this, request):
                if isinstance(item, Reply):
                    self.point("after the model call")
                yield item

        DemoModel.stream = armed  # pyright: ignore[reportAttributeAccessIssue]


def arm(at: int | str) -> None:
    bomb = Bomb(at)
    bomb.around(JetStreamLog, "append", lambda key, decision, expected: decision.event.type)
    bomb.around(Tools, "call", lambda name, arguments, context: f"the tool {name}")
    bomb.around(Blobs, "put", lambda key, name, data: "a blob")
    bomb.in_models()


async def live() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await app.serve(settings.load(), stop=stop, ready=lambda: os.write(2, b"ready\n"))


def begin(order: dict[str, Any]) -> None:
    """In the forked process."""
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["settings"])
    arm(order["at"])
    uvloop.run(live())


def main() -> None:
    importlib.import_module("turnstream_runner.mcp.dialog")  # which takes a second, once and not in every runner
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever has ended is gone at once
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = 1
            try:
                begin(order)
                code = 0
            finally:
                os._exit(code)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
