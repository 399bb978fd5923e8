"""`make bench`: every figure as a ratio against its baseline in the same run, and what is stated besides.

`BENCH_JSON=<file>` keeps the figures as `{"<key>": {"value": …, "bound": …, "ok": …}}`. Names as arguments choose:
`python -m tests.bench log turns`. Exits 1 if a figure misses its bound.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from tests.bench import (
    bench_api,
    bench_history,
    bench_log,
    bench_old,
    bench_start,
    bench_turns,
    bench_views,
    bench_waiting,
)
from tests.bench.figures import Figure

from turnstream import telemetry


async def views() -> dict[str, Figure]:
    return {"views_throughput": await bench_views.views_throughput(), "list_page": await bench_views.list_page()}


GROUPS: dict[str, Callable[[], Awaitable[dict[str, Figure]]]] = {
    "log": bench_log.figures,
    "turns": bench_turns.turns,
    "views": views,
    "api": bench_api.fanout,
    "old": bench_old.old,
    "history": bench_history.history_build,
}


async def measure(wanted: list[str]) -> tuple[dict[str, Figure], dict[str, float | str]]:
    figures: dict[str, Figure] = {}
    stated: dict[str, float | str] = {}
    for name, group in GROUPS.items():
        if name in wanted:
            print(f"measuring {name} …", file=sys.stderr, flush=True)
            figures |= await group()
    if "synced" in wanted:
        print("measuring turns, each write synced …", file=sys.stderr, flush=True)
        for key, figure in (await bench_turns.turns(sync_interval="always")).items():
            stated[f"{key}, sync_interval always"] = figure.value
    if "start" in wanted:
        print("measuring starts …", file=sys.stderr, flush=True)
        stated |= await bench_start.starts()
    if "waiting" in wanted:
        print("measuring runs that wait …", file=sys.stderr, flush=True)
        stated |= await bench_waiting.waiting()
    return figures, stated


def show(figures: dict[str, Figure], stated: dict[str, float | str]) -> None:
    table = Table("figure", "value", "bound", "", "besides")
    for name, figure in figures.items():
        sign = "≥" if figure.kind == "at_least" else "≤"
        table.add_row(
            name,
            f"{figure.value:.3f}",
            f"{sign} {figure.bound:g}",
            "ok" if figure.ok else "MISSED",
            ", ".join(f"{key} {_round(value)}" for key, value in figure.details.items()),
        )
    for name, value in stated.items():
        table.add_row(name, _round(value), "", "stated", "")
    Console(width=200).print(table)


def _round(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def main(arguments: list[str]) -> int:
    telemetry.configure(level="warning", format="console")
    groups = [*GROUPS, "synced", "start", "waiting"]
    wanted = arguments or groups
    if unknown := set(wanted) - set(groups):
        print(f"no such group: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    figures, stated = asyncio.run(measure(wanted))
    show(figures, stated)
    if path := os.environ.get("BENCH_JSON"):
        kept = {name: {"value": f.value, "bound": f.bound, "ok": f.ok} for name, f in figures.items()}
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(kept)))
    return 0 if all(figure.ok for figure in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
