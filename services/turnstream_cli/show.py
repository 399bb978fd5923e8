"""How things look in a terminal: JSON lines, tables. The feed and a run's waterfall have files of their own.

What people and models say may hold control characters; people get them as visible pictures, so that no text plays with
their terminal. Whoever wants the bytes takes `--json`.
"""

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

_PICTURES = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {0x7F: 0x2421}
_PICTURES |= dict.fromkeys(range(128, 160), 65533)

STYLES = {
    "completed": "green",
    "ok": "green",
    "idle": "green",
    "failed": "red",
    "timed_out": "red",
    "error": "red",
    "cancelled": "yellow",
    "uncertain": "yellow",
    "interrupted": "yellow",
    "running": "cyan",
    "busy": "cyan",
    "queued": "blue",
    "waiting": "magenta",
    "open": "magenta",
    "answered": "green",
    "approved": "green",
    "denied": "yellow",
    "expired": "yellow",
}


def printable(text: str) -> str:
    """The text with every control character but tab and newline made visible."""
    return text.translate(_PICTURES)


def attached(one: Mapping[str, Any]) -> str:
    """An attachment in a line."""
    return f"{one['name']} ({one['media_type']}, {one['size']} bytes)"


def print_json(value: object) -> None:
    """One line of JSON on standard output; `value` may be bytes that are JSON already."""
    sys.stdout.flush()
    sys.stdout.buffer.write((value if isinstance(value, bytes) else msgspec.json.encode(value)) + b"\n")
    sys.stdout.buffer.flush()


def console() -> Console:
    """Standard output; wide where it is no terminal, so that nothing is folded for a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 240)


def styled(status: object) -> Text:
    return Text(str(status or "–"), style=STYLES.get(str(status), ""))


def table(out: Console, columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """A plain table, or the line `empty` where there is nothing."""
    if not rows:
        out.print(empty, style="dim")
        return
    grid = Table(box=None, pad_edge=False, header_style="bold dim")
    for name in columns:
        grid.add_column(name, overflow="fold")
    for row in rows:
        grid.add_row(*(cell if isinstance(cell, Text) else Text(_cell(cell)) for cell in row))
    out.print(grid)


def pairs(out: Console, values: Mapping[str, object]) -> None:
    """Names and values, one a line, nested ones as JSON."""
    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in values.items():
        grid.add_row(name, styled(value) if name == "status" else Text(_cell(value)))
    out.print(grid)


def local_time(stamp: object) -> str:
    """An RFC 3339 time, or milliseconds since the epoch, as this machine's local time."""
    match stamp:
        case str():
            moment = datetime.fromisoformat(stamp)
        case int() | float():
            moment = datetime.fromtimestamp(stamp / 1000, UTC)
        case _:
            return "–"
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def duration(millis: float | None) -> str:
    if millis is None:
        return "–"
    if millis < 1000:
        return f"{millis:.0f} ms"
    return (
        f"{millis / 1000:.1f} s" if millis < 60_000 else f"{int(millis // 60_000)} min {millis % 60_000 / 1000:.0f} s"
    )


def _cell(value: object) -> str:
    match value:
        case None | "":
            return "–"
        case bool():
            return "yes" if value else "no"
        case dict() | list():
            return printable(msgspec.json.encode(value).decode())
        case _:
            return printable(str(value))
