"""`dev`, and one command a service."""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from turnstream import settings as settings_file
from turnstream.settings import Settings
from turnstream.telemetry import configure, log
from turnstream_cli.exits import CommandError, Exit
from turnstream_cli.place import Addresses, announced, held
from turnstream_cli.stack import SERVICES, Stopped, broker, free_port, service, serving, stop_on_signals, together

Queues = Annotated[tuple[str, ...], Parameter(name="--queue", negative=())]


def dev(
    *,
    data_dir: Path | None = None,
    port: int | None = None,
    nats_port: int | None = None,
    sync_interval: str | None = None,
) -> int:
    """Start everything in one process: NATS, API, runner, projector.

    Parameters
    ----------
    data_dir
        Where everything is kept; one `dev` at a time.
    port
        Port of the API; 0 for any free one.
    nats_port
        Port of the embedded NATS server; 0 for any free one.
    sync_interval
        How often the embedded NATS server syncs to disk: `always`, or a duration such as `10s`.
    """
    given = {"data_dir": data_dir, "http_port": port, "nats_port": nats_port, "sync_interval": sync_interval}
    settings = with_examples(started(quiet=True, **given))
    console = Console(stderr=True, highlight=False)

    async def run() -> None:
        stop = asyncio.Event()
        with stop_on_signals(stop), held(settings.data_dir):
            http = free_port(settings.http_host, settings.http_port, what="the API", how="choose another with --port")
            if not settings.nats_url:
                how = "choose another with --nats-port, or name the server there with TURNSTREAM_NATS_URL"
                free_port("127.0.0.1", settings.nats_port, what="the embedded NATS server", how=how)
            async with (
                broker(settings.model_copy(update={"http_port": http})) as effective,
                serving(effective, together(*SERVICES), stop),
            ):
                addresses = Addresses(os.getpid(), http_url(effective), effective.nats_url)
                with announced(settings.data_dir, addresses):
                    console.print("\n[bold]Turnstream is up.[/]\n")
                    print_addresses(console, settings, addresses)
                    console.print("\n  try: turnstream send hello 'echo Hello, stranger.'\n  Ctrl-C stops it.\n")
                    await stop.wait()
                    console.print("stopping …", style="dim")

    return until_stopped(run)


def api(*, host: str | None = None, port: int | None = None) -> int:
    """Start the API: HTTP, NATS requests, feeds, the inbox.

    Parameters
    ----------
    host
        Address to listen on.
    port
        Port to listen on; 0 for any free one.
    """
    return _service("api", started(http_host=host, http_port=port))


def runner(*, queue: Queues = (), slots: int | None = None) -> int:
    """Start a runner: it carries out runs.

    Parameters
    ----------
    queue
        A queue to serve; may be given several times.
    slots
        How many runs at once, for each queue.
    """
    return _service("runner", started(queues=queue or None, runner_slots=slots))


def projector() -> int:
    """Start the projector: it keeps the views, and wakes forgotten runs."""
    return _service("projector", started())


def started(*, quiet: bool = False, **given: object) -> Settings:
    """The effective settings of a service that starts, its logs set up by them. Raises `SettingsError`.

    People get their kind of log, and with `quiet` only warnings, unless the settings say otherwise.
    """
    settings = settings_file.load(**given)
    if settings.modules and os.getcwd() not in sys.path:  # they may lie where we are started, as with `python -m`
        sys.path.insert(0, os.getcwd())
    people = sys.stderr.isatty()
    format = "console" if people and "log_format" not in settings.model_fields_set else settings.log_format
    level = "warning" if people and quiet and "log_level" not in settings.model_fields_set else settings.log_level
    configure(level=level, format=format)
    for name in settings_file.unknown(os.environ):
        log.warning("this variable names no setting", variable=name)
    return settings


def with_examples(settings: Settings) -> Settings:
    """With agents to try, where the settings name none."""
    if settings.agents_dir or settings.modules:
        return settings
    from turnstream.agents.examples import EXAMPLES

    return settings.model_copy(update={"agents_dir": EXAMPLES})


def http_url(settings: Settings) -> str:
    host = settings.http_host
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.http_port}"


def until_stopped(run: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Runs a service's main coroutine on uvloop where there is one. Asked to stop is a good end."""
    if sys.platform == "win32":
        factory = None
    else:
        from uvloop import new_event_loop as factory
    with asyncio.Runner(loop_factory=factory) as runner:
        try:
            runner.run(run())
        except Stopped:
            pass
    return Exit.OK


def _service(name: str, settings: Settings) -> int:
    if not settings.nats_url:
        raise CommandError(
            "no NATS server is named: set TURNSTREAM_NATS_URL (only `turnstream dev` brings its own)", Exit.USAGE
        )

    async def run() -> None:
        stop = asyncio.Event()
        with stop_on_signals(stop):
            async with serving(settings, {name: service(name)}, stop):
                log.info("ready", service=name)
                await stop.wait()
                log.info("stopping", service=name)

    return until_stopped(run)


def print_addresses(console: Console, settings: Settings, addresses: Addresses) -> None:
    """Where everything is, and what an acknowledged event survives."""
    rows = {
        "HTTP": f"{addresses.http}  (/docs, /openapi.json, /metrics)",
        "NATS": addresses.nats,
        "data": str(settings.data_dir.absolute()),
        "durability": durability(settings),
    }
    for name, value in rows.items():
        console.print(f"  {name:<11}{value}", soft_wrap=True, markup=False)


def durability(settings: Settings) -> str:
    """In plain words, what an acknowledged event survives."""
    if settings.nats_url:
        return "that of the NATS server that the settings name"
    if settings.sync_interval == "always":
        return "sync_interval: always — every acknowledged event survives kill -9 and power loss"
    interval = settings.sync_interval or "2m, the server's default"
    return (
        f"sync_interval: {interval} — every acknowledged event survives kill -9; power loss may cost the last "
        "interval (--sync-interval always: nothing)"
    )
