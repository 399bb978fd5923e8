"""`demo`: the tour. A stranger sees the main job happen, on the embedded default, and every promise is checked.

What it plays (`tour.py`) goes the same ways that anybody's program would take: bare nats-py, bare HTTP, server-sent
events. The runner is a process of its own, so that it can be killed.
"""

import asyncio
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
from functools import partial
from pathlib import Path

from rich.console import Console

from turnstream.broker.server import die_with_parent
from turnstream.settings import Settings
from turnstream_cli import tend
from turnstream_cli.client import Connect, connected
from turnstream_cli.exits import CommandError, Exit
from turnstream_cli.place import Addresses, announced, held
from turnstream_cli.serve import http_url, print_addresses, started, until_stopped
from turnstream_cli.stack import broker, free_port, serving, stop_on_signals, together

LEASE = 2.0
"""Seconds: a killed runner's run is taken over that soon. The default is 15."""


def demo(
    *, data_dir: Path | None = None, port: int | None = None, nats_port: int | None = None, stay: bool | None = None
) -> int:
    """Start everything and play a conversation through it; every step is shown with the command that does the same.

    Parameters
    ----------
    data_dir
        Where everything is kept; default: a folder that is removed at the end.
    port
        Port of the API; 0 for any free one; default: the usual one, or any where that is taken.
    nats_port
        Port of the embedded NATS server; the same.
    stay
        Stay up after the tour; default: if there is a terminal.
    """
    from turnstream.agents.examples import EXAMPLES

    folder = data_dir or Path(tempfile.mkdtemp(prefix="turnstream-demo-"))
    # The tour shows the embedded default, whatever the environment says.
    settings = started(
        data_dir=folder,
        nats_url="",
        database_url="",
        http_host="127.0.0.1",
        http_port=port,
        nats_port=nats_port,
        inbox_on_busy="queue",
        account="default",
        default_model="demo",
        agents_dir=EXAMPLES,
        modules=(),
        lease=LEASE,
        log_level="error",
    )
    ports = {name: _port(settings, name, how) for name, how in (("http_port", "--port"), ("nats_port", "--nats-port"))}
    settings = settings.model_copy(update={**ports, "policy": {"preset": "strict"}})
    broken: list[str] = []

    async def run() -> None:
        stop = asyncio.Event()
        with stop_on_signals(stop):
            broken.extend(await _play(settings, stop, sys.stdout.isatty() if stay is None else stay))

    try:
        until_stopped(run)
    finally:
        if data_dir is None:
            shutil.rmtree(folder, ignore_errors=True)
    if broken:
        raise CommandError(f"the demo did not keep its word: {'; '.join(broken)}", Exit.FAILED)
    return Exit.OK


async def _play(settings: Settings, stop: asyncio.Event, stay: bool) -> list[str]:
    """Starts everything, tells the tour, stays; what the tour did not keep."""
    from turnstream.broker.service import unless
    from turnstream_cli.tour import Tour

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print("starting NATS, API and projector in this process, and a runner beside it …", style="dim")
    with held(settings.data_dir):
        async with broker(settings) as effective:
            addresses = Addresses(os.getpid(), http_url(effective), effective.nats_url)
            parts = together("api", "projector")
            with _Runner(effective) as runner, announced(settings.data_dir, addresses):
                async with serving(effective, parts, stop), connected(Connect(url=addresses.http)) as client:
                    console.print("\n[bold]Turnstream is up.[/]\n")
                    print_addresses(console, settings, addresses)
                    session = f"tour-{uuid.uuid4().hex[:6]}"
                    check = partial(tend.check, effective)
                    tour = Tour(console, client, addresses, runner, session=session, fsck=check)
                    broken = await unless(stop, tour.play())
                    if broken is None:
                        raise CommandError("the demo was interrupted", Exit.INTERRUPTED)
                    if stay and not broken:
                        console.print("\n[bold]Turnstream stays up[/] until Ctrl-C. To try, in another terminal:\n")
                        console.print(
                            f"  {_turnstream()} send hello 'echo Hello.' --url {addresses.http}", markup=False
                        )
                        print_addresses(console, settings, addresses)
                        console.print(
                            f"\n  For every command above as it stands:\n  {_export(settings, addresses)}\n",
                            markup=False,
                            soft_wrap=True,
                        )
                        await stop.wait()
                    elif not broken:
                        console.print(f"\nEvery promise was kept. Next: {_turnstream()} dev", markup=False)
                    return broken


class _Runner:
    """`turnstream runner` as a process of its own; the last one started ends with the block."""

    def __init__(self, settings: Settings) -> None:
        given = {
            "DATA_DIR": settings.data_dir.absolute(),
            "NATS_URL": settings.nats_url,
            "LEASE": settings.lease,
            "DEFAULT_MODEL": settings.default_model,
            "AGENTS_DIR": settings.agents_dir,
            "MODULES": "",
            "LOG_LEVEL": settings.log_level,
        }
        self._environment = os.environ | {f"TURNSTREAM_{name}": str(value) for name, value in given.items()}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def start(self) -> None:
        command = [sys.executable, "-m", "turnstream_cli.main", "runner"]
        self._process = subprocess.Popen(
            command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            process_group=0,  # a Ctrl-C at the terminal is for us
            preexec_fn=die_with_parent(),
        )

    def kill(self) -> None:
        assert self._process
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "_Runner":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()


def _port(settings: Settings, name: str, option: str) -> int:
    """The port that was asked for; if none was, the usual one if it is free, else any. Raises `CommandError`."""
    port: int = getattr(settings, name)
    try:
        return free_port("127.0.0.1", port, what="the demo", how=f"choose another with {option}")
    except CommandError:
        if name in settings.model_fields_set:
            raise
        return free_port("127.0.0.1", 0, what="the demo", how="")


def _export(settings: Settings, addresses: Addresses) -> str:
    """What a terminal needs for the commands of the tour: where everything is, and the program itself."""
    given = {
        "TURNSTREAM_URL": addresses.http,
        "TURNSTREAM_NATS_URL": addresses.nats,
        "TURNSTREAM_DATA_DIR": str(settings.data_dir.absolute()),
        "TURNSTREAM_DATABASE_URL": "",
    }
    named = " ".join(f"{name}={shlex.quote(value) if value else ''}" for name, value in given.items())
    beside = Path(sys.executable).parent
    path = "" if shutil.which("turnstream") else f'PATH={shlex.quote(str(beside))}:"$PATH" '
    return f"export {path}{named}"


def _turnstream() -> str:
    """How a person calls this program from here."""
    beside = Path(sys.executable).with_name("turnstream")
    return "turnstream" if shutil.which("turnstream") or not beside.exists() else os.path.relpath(beside)
