"""`sessions`, `runs`, `steps`, `ops`: what a running Turnstream says of itself, through its API."""

from collections.abc import Mapping
from typing import Any, Literal

from cyclopts import App

from turnstream.ids import parse_run_id
from turnstream_cli import show, waterfall
from turnstream_cli.client import HERE, Client, Connect, connected
from turnstream_cli.exits import CommandError, Exit
from turnstream_cli.screen import checklist
from turnstream_cli.talk import checked

PAGE = 200
_CANCELLED = {
    "requested": "cancel asked for",
    "cancelled": "cancelled",
    "ended": "had ended before; nothing has changed",
}

runs = App(name="runs", help="List, show and cancel runs.")


async def sessions(
    session: str | None = None,
    *,
    status: Literal["idle", "busy", "waiting", "error"] | None = None,
    agent: str | None = None,
    parent: str | None = None,
    q: str | None = None,
    limit: int = 50,
    json: bool = False,
    connect: Connect = HERE,
) -> None:
    """List sessions, the latest touched first, or show one.

    Parameters
    ----------
    session
        Show only this one.
    status
        Only those in this state.
    agent
        Only those of this agent.
    parent
        Only those that runs of this session have delegated to.
    q
        Only those whose title holds this.
    limit
        How many at most; 0 for all.
    json
        Print one line of JSON a session.
    """
    async with connected(connect) as client:
        if session is not None:
            one = await client.get(f"/v1/sessions/{checked(session)}")
            show.print_json(one) if json else _show_session(one)
            return
        rows = await listed(client, "/v1/sessions", limit, status=status, agent=agent, parent=parent, q=q)
    if json:
        lines(rows)
        return
    columns = ("session", "status", "agent", "title", "active run", "seq", "touched")
    cells = [
        (
            row["id"],
            show.styled(row["status"]),
            row["agent"],
            row["title"],
            row["active_run"],
            row["seq"],
            show.local_time(row["updated_at"]),
        )
        for row in rows
    ]
    show.table(show.console(), columns, cells, empty="no sessions")


@runs.default
@runs.command(name="list")
async def runs_list(
    *,
    session: str | None = None,
    status: Literal["queued", "running", "waiting", "completed", "failed", "cancelled", "timed_out"] | None = None,
    agent: str | None = None,
    parent: str | None = None,
    root: str | None = None,
    limit: int = 50,
    json: bool = False,
    connect: Connect = HERE,
) -> None:
    """List runs, newest first.

    Parameters
    ----------
    session
        Only those of this session.
    status
        Only those in this state.
    agent
        Only those of this agent.
    parent
        Only those that this run has delegated.
    root
        Only those that this run has delegated, and what they have delegated in turn.
    limit
        How many at most; 0 for all.
    json
        Print one line of JSON a run.
    """
    async with connected(connect) as client:
        rows = await listed(
            client, "/v1/runs", limit, session=session, status=status, agent=agent, parent=parent, root=root
        )
    if json:
        lines(rows)
        return
    columns = ("run", "status", "agent", "parent", "attempts", "asked", "took", "tokens")
    cells = [
        (
            row["id"],
            show.styled(row["status"]),
            row["agent"],
            row["parent"],
            row["attempts"],
            show.local_time(row["requested_at"]),
            show.duration(row["ended_at"] - row["requested_at"]) if row["ended_at"] else "…",
            row["usage"].get("input_tokens", 0) + row["usage"].get("output_tokens", 0),
        )
        for row in rows
    ]
    show.table(show.console(), columns, cells, empty="no runs")


@runs.command(name="show")
async def runs_show(run: str, *, json: bool = False, connect: Connect = HERE) -> None:
    """Show one run.

    Parameters
    ----------
    run
        The run's id, `<session>.<n>`.
    json
        Print it as JSON.
    """
    async with connected(connect) as client:
        one = await client.get(f"/v1/runs/{_run(run)}")
    show.print_json(one) if json else show.pairs(show.console(), _timed(one))


@runs.command(name="cancel")
async def runs_cancel(run: str, *, reason: str = "", json: bool = False, connect: Connect = HERE) -> None:
    """Cancel a run. One that has ended already stays as it is.

    Parameters
    ----------
    run
        The run's id, `<session>.<n>`.
    reason
        Why; it is stored with the cancel.
    json
        Print the answer as JSON.
    """
    async with connected(connect) as client:
        answer = await client.post(f"/v1/runs/{_run(run)}/cancel", {"reason": reason} if reason else {})
    show.print_json(answer) if json else print(f"{run}: {_CANCELLED.get(answer['state'], answer['state'])}")


async def steps(run: str, *, json: bool = False, connect: Connect = HERE) -> None:
    """Show a run's model calls, tools, waits and sub-agents as a waterfall; of a graph, its nodes as a tree.

    Parameters
    ----------
    run
        The run's id, `<session>.<n>`.
    json
        Print one line of JSON a step.
    """
    async with connected(connect) as client:
        answer = await client.get(f"/v1/runs/{_run(run)}/steps")
    if json:
        lines(answer["items"])
    else:
        waterfall.show(show.console(), answer["items"])


async def ops(*, json: bool = False, connect: Connect = HERE) -> None:
    """Show how Turnstream is: lag, streams, consumers, stuck runs.

    Parameters
    ----------
    json
        Print one JSON object.
    """
    async with connected(connect) as client:
        parts = {name: await client.get(f"/v1/ops/{name}") for name in ("overview", "streams", "consumers", "views")}
    if json:
        show.print_json(parts)
        return
    console = show.console()
    overview = parts["overview"]
    console.print("overview", style="bold")
    show.pairs(console, _at_a_glance(overview))
    if overview["old_runs"]:
        console.print("\nruns that have been as they are for more than a minute", style="bold")
        old = [(one["run"], show.styled(one["status"]), show.local_time(one["since"])) for one in overview["old_runs"]]
        show.table(console, ("run", "status", "since"), old, empty="")
    console.print("\nviews", style="bold")
    show.pairs(console, parts["views"])
    console.print("\nstreams", style="bold")
    names = ("name", "messages", "bytes", "last_seq", "subjects", "replicas")
    show.table(console, names, _rows(parts["streams"]["items"], names), empty="none")
    console.print("\nconsumers", style="bold")
    names = ("name", "pending", "unacknowledged", "redelivered", "behind", "oldest_at")
    headers = ("name", "pending", "taken", "again", "behind", "oldest")
    show.table(console, headers, _rows(parts["consumers"]["items"], names), empty="none")


def _at_a_glance(overview: Mapping[str, Any]) -> dict[str, object]:
    live = ", ".join(f"{count} {status}" for status, count in overview["runs"].items() if count)
    return {
        "account": overview["account"],
        "runs that have not ended": live or "none",
        "runners with a run in hand": ", ".join(overview["runners"]) or "none",
        "agents": ", ".join(overview["agents"]),
        "wake-ups that wait": overview["pending_wakeups"],
        "letters in the inbox": overview["pending_inbox"],
        "letters refused": overview["refused"],
    }


def _rows(items: list[dict[str, Any]], names: tuple[str, ...]) -> list[tuple[object, ...]]:
    return [
        tuple(show.local_time(item[name]) if name.endswith("_at") else item[name] for name in names) for item in items
    ]


async def listed(client: Client, path: str, limit: int, **filters: object) -> list[dict[str, Any]]:
    """The items of as many pages as `limit` needs; 0: of all."""
    if limit < 0:
        raise CommandError("--limit must not be negative", Exit.USAGE)
    found: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        size = min(PAGE, limit - len(found)) if limit else PAGE
        page = await client.get(path, limit=size, cursor=cursor, **filters)
        found += page["items"]
        cursor = page.get("next")
        if cursor is None or (limit and len(found) >= limit):
            return found


def _run(text: str) -> str:
    """The run's id, if it can be one. Raises `CommandError`."""
    if parse_run_id(text) is None:
        raise CommandError(f"{text!r} is no run's id: it is `<session>.<n>`, such as hello.1", Exit.USAGE)
    return text


def _show_session(one: Mapping[str, Any]) -> None:
    console = show.console()
    show.pairs(console, _timed({name: value for name, value in one.items() if name != "plan"}))
    for mark, text, style in checklist(one["plan"]):
        console.print(f"{mark} {show.printable(text)}", style=style, markup=False)


def _timed(one: Mapping[str, Any]) -> dict[str, Any]:
    """With its times as people read them."""
    times = {name for name in one if name.endswith("_at") or name == "deadline"}
    return {name: show.local_time(value) if name in times else value for name, value in one.items()}


def lines(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        show.print_json(row)
