"""A server that is a process of ours. Messages are lines: to its standard input, from its standard output.

It leads a process group of its own, and nothing of that group outlives the runner. Told to go, it gets the end of its
input, then SIGTERM, then SIGKILL. A runner that is killed tells nobody anything: so a shell in the group waits for the
end of a pipe that only the runner holds open, and then kills the group. What a server starts in yet another group is
its own affair.

What it says on its standard error goes to the log, so many lines a minute.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from turnstream.telemetry import log
from turnstream_runner.mcp.endpoint import Endpoint
from turnstream_runner.shown import line

MESSAGE_MAX: Final = 8 << 20
"""Bytes of one message; a server that says more at once is given up."""
LINES_MAX: Final = 60
"""Lines of standard error that are logged in a minute."""
END_OF_INPUT: Final = 1.0
"""Seconds that a server has to end by itself."""
TERM: Final = 1.0
"""Seconds that it has after SIGTERM."""
GUARD: Final = (
    'life=$1; shift; (read -r _ <"/dev/fd/$life"; sleep 2; kill -KILL 0) </dev/null >/dev/null 2>&1 & exec "$@"'
)

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


@asynccontextmanager
async def spoken(name: str, endpoint: Endpoint, ended: Callable[[str], None]) -> AsyncGenerator[Streams, None]:
    """Starts the server and stops it; calls `ended` with the reason when it is at its end before. Raises `OSError`."""
    with anyio.CancelScope(shield=True):  # takes a moment; cut off in it, a process would be left
        child = await Child.start(name, endpoint)
    inbound, heard = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    said, outbound = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(child.listen, inbound, ended)
            group.start_soon(child.speak, outbound)
            group.start_soon(child.log_errors)
            group.start_soon(child.clear_away)
            try:
                yield heard, said
            finally:
                said.close()
                with anyio.CancelScope(shield=True):
                    await child.stop()
                group.cancel_scope.cancel()
    finally:
        for stream in (inbound, heard, said, outbound):
            stream.close()


class Child:
    """The runner's ends of the pipes are its own, so that they close when it wants, whoever else holds the others."""

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        process: asyncio.subprocess.Process,
        stdin: asyncio.StreamWriter,
        stdout: "_Pipe",
        stderr: "_Pipe",
        life: int,
    ) -> None:
        self._name = name
        self._hidden = endpoint.hidden
        self._process = process
        self._gone = asyncio.create_task(process.wait())
        self._stdin = stdin
        self._stdout = stdout
        self._stderr = stderr
        self._life = life

    @classmethod
    async def start(cls, name: str, endpoint: Endpoint) -> "Child":
        command = endpoint.command
        if shutil.which(command[0], path=endpoint.env.get("PATH")) is None and "/" not in command[0]:
            raise FileNotFoundError(f"there is no command {command[0]!r}")
        guarded, life = os.pipe()
        theirs = [guarded]
        ours: list[int] = []
        try:
            for direction in range(3):
                read, write = os.pipe()
                theirs.append(write if direction else read)
                ours.append(read if direction else write)
            process = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", GUARD, "sh", str(guarded), *command),
                stdin=theirs[1],
                stdout=theirs[2],
                stderr=theirs[3],
                pass_fds=(guarded,),
                env=endpoint.env,
                cwd=endpoint.cwd,
                start_new_session=True,
            )
        except BaseException:
            for end in (*ours, life):
                os.close(end)
            raise
        finally:
            for end in theirs:
                os.close(end)
        stdin, stdout, stderr = await _writer(ours[0]), await _Pipe.open(ours[1]), await _Pipe.open(ours[2])
        return cls(name, endpoint, process, stdin, stdout, stderr, life)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def listen(
        self, inbound: MemoryObjectSendStream[SessionMessage | Exception], ended: Callable[[str], None]
    ) -> None:
        """Hands on what the server says, to its end. What is no message is passed over: servers print all sorts."""
        reason = ""
        odd = 0
        async with inbound:
            while True:
                try:
                    said = await self._stdout.reader.readuntil(b"\n")
                except asyncio.IncompleteReadError:
                    break
                except asyncio.LimitOverrunError:
                    reason = f"it said more than {MESSAGE_MAX} bytes at once"
                    break
                try:
                    message = jsonrpc_message_adapter.validate_json(said, by_name=False)
                except ValueError:
                    odd += bool(said.strip())
                    if odd == 1:
                        log.warning("an MCP server says what is no message on its output", server=self._name)
                    continue
                try:
                    await inbound.send(SessionMessage(message))
                except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                    return
            ended(reason or await self._end())

    async def _end(self) -> str:
        if not await self._has_ended(END_OF_INPUT):
            return "it closed its output"
        status = self._gone.result()
        return f"it was killed by signal {-status}" if status < 0 else f"it ended with status {status}"

    async def speak(self, outbound: MemoryObjectReceiveStream[SessionMessage]) -> None:
        async with outbound:
            async for message in outbound:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                try:
                    self._stdin.write(text.encode() + b"\n")
                    await self._stdin.drain()
                except OSError:  # it does not listen any more; that it has ended is seen where it speaks
                    return

    async def log_errors(self) -> None:
        clock = asyncio.get_running_loop().time
        began, lines = clock(), 0
        rest = b""
        while data := await self._stderr.reader.read(65_536):
            *complete, rest = (rest + data).split(b"\n")
            rest = rest[:4096]
            if clock() - began > 60:
                began, lines = clock(), 0
            for said in complete:
                lines += 1
                if lines <= LINES_MAX:
                    text = line(self._hidden.strike(said[:4096].decode(errors="replace")))
                    log.info("an MCP server says", server=self._name, pid=self.pid, text=text)
                elif lines == LINES_MAX + 1:
                    log.info("an MCP server says more than is logged", server=self._name, pid=self.pid)

    async def clear_away(self) -> None:
        """When the server has ended, ends the rest of its group: what is in it may hold the pipes open."""
        await asyncio.wait((self._gone,))
        self._signal(signal.SIGKILL)

    async def stop(self) -> None:
        """Ends the whole group. Takes as long as the times above, at most."""
        self._stdin.close()
        if not await self._has_ended(END_OF_INPUT):
            self._signal(signal.SIGTERM)
            await self._has_ended(TERM)
        self._signal(signal.SIGKILL)
        await self._has_ended(TERM)
        os.close(self._life)
        self._stdout.close()
        self._stderr.close()
        self._reap()

    def _reap(self) -> None:
        """What were its children are ours where we are process 1; they have ended."""
        with suppress(ChildProcessError):
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass

    async def _has_ended(self, seconds: float) -> bool:
        """Also asked by a task that is being cancelled, in which a time-out of asyncio is none in early
        releases of Python 3.11."""
        await asyncio.wait((self._gone,), timeout=seconds)
        return self._gone.done()

    def _signal(self, number: int) -> None:
        """To the group, which is there as long as the shell in it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class _Pipe:
    """The reading end of a pipe."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport) -> None:
        self.reader = reader
        self._transport = transport

    @classmethod
    async def open(cls, end: int) -> "_Pipe":
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MESSAGE_MAX)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(end, "rb", buffering=0)
        )
        return cls(reader, transport)

    def close(self) -> None:
        self._transport.close()


async def _writer(end: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(end, "wb", buffering=0)
    )
    return asyncio.StreamWriter(transport, protocol, None, loop)
