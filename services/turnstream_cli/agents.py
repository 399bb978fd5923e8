"""`agents`: list, show, save and delete them through the API of a running Turnstream; and check definitions without
one."""

from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter

from turnstream.ids import agent_id, is_version, parse_agent
from turnstream_cli import show
from turnstream_cli.client import HERE, Connect, Refused, connected
from turnstream_cli.exits import CommandError, Exit
from turnstream_cli.look import lines, listed

if TYPE_CHECKING:
    from turnstream.agents import Fault

agents = App(name="agents", help="List, show, save, check and delete agents.")


@agents.default
@agents.command(name="list")
async def agents_list(*, limit: int = 50, json: bool = False, connect: Connect = HERE) -> None:
    """List every agent that can be named, by name: of files and modules, built in, and saved.

    Parameters
    ----------
    limit
        How many at most; 0 for all.
    json
        Print one line of JSON an agent.
    """
    async with connected(connect) as client:
        rows = await listed(client, "/v1/agents", limit)
    if json:
        lines(rows)
        return
    columns = ("agent", "version", "from", "model", "saved", "by", "description")
    cells = [
        (
            row["name"],
            row["version"],
            f"{row['source']} {row['where']}".strip(),
            row["model"],
            show.local_time(row["saved_at"]),
            row["by"],
            row["description"],
        )
        for row in rows
    ]
    show.table(show.console(), columns, cells, empty="no agents")


@agents.command(name="show")
async def agents_show(agent: str, *, json: bool = False, connect: Connect = HERE) -> None:
    """Show one agent: what it says, and its versions.

    Parameters
    ----------
    agent
        Its name: the current version; or `name@version`.
    json
        Print it as JSON.
    """
    name, version = _named(agent)
    path = f"/v1/agents/{name}" if version is None else f"/v1/agents/{name}/versions/{version}"
    async with connected(connect) as client:
        one = await client.get(path)
    if json:
        show.print_json(one)
        return
    console = show.console()
    about = {key: value for key, value in one.items() if key not in ("definition", "versions")}
    show.pairs(console, about | {"saved_at": show.local_time(one["saved_at"])})
    console.print("\ndefinition", style="bold")
    show.pairs(console, one["definition"])
    if versions := one.get("versions"):
        console.print("\nversions", style="bold")
        cells = [(row["version"], row["digest"], show.local_time(row["saved_at"]), row["by"]) for row in versions]
        show.table(console, ("version", "digest", "saved", "by"), cells, empty="")


@agents.command(name="save")
async def agents_save(file: Path, *, version: str | None = None, json: bool = False, connect: Connect = HERE) -> Exit:
    """Save the agent of a file (TOML or JSON). From then on its name means this version; runs that were asked for
    before keep theirs.

    A version never changes: the same content again changes nothing, other content is refused. The exit code is 1 if
    the definition does not do; each fault is named with its path.

    Parameters
    ----------
    file
        The definition; an agent that says no name has the file's.
    version
        What to save it as; default: one made of the content, so that the same is saved once.
    json
        Print the answer as JSON; if the definition does not do, one line a fault.
    """
    from turnstream.agents import AgentsError, Fault, define
    from turnstream.agents.load import read

    if version is not None and not is_version(version):
        raise CommandError(f"{version!r} is no version: up to 32 letters, digits, '_' or '-'", Exit.USAGE)
    try:
        said = read(file, str(file))
        agent = define(str(file), said)
    except AgentsError as error:
        return _told(error.faults, json=json)
    path = f"/v1/agents/{agent.name}/versions/{version or agent.version}"
    async with connected(connect) as client:
        try:
            answer = await client.put(path, msgspec.json.encode({"definition": said}), "application/json")
        except Refused as refused:
            faults = refused.problem.get("faults")
            if not faults:
                raise
            return _told([Fault(str(file), one["path"], one["message"]) for one in faults], json=json)
    if json:
        show.print_json(answer)
    else:
        what = "is saved" if answer["created"] else "was there already, and says the same"
        print(f"{agent_id(answer['name'], answer['version'])} {what}")
    return Exit.OK


@agents.command(name="check")
def agents_check(*paths: Annotated[Path, Parameter(required=True)], json: bool = False) -> Exit:
    """Check definitions without a server: every fault is named with its path. The exit code is 1 if there is any.

    What is known are the tools, models and agents of the settings (TURNSTREAM_MODULES, TURNSTREAM_AGENTS_DIR,
    TURNSTREAM_MODELS), and the agents that are checked together.

    Parameters
    ----------
    paths
        Files, or folders with files (TOML and JSON).
    json
        Print one line of JSON a fault.
    """
    from turnstream.agents.load import files_in
    from turnstream.roster.judge import faults_in
    from turnstream.settings import load

    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise CommandError(f"there is no {path}", Exit.USAGE)
        files += files_in(path) if path.is_dir() else [path]
    faults = faults_in(files, load())
    if not json:
        print(f"{_count(files, 'definition')}, {_count(faults, 'fault')}")
    return _told(faults, json=json)


@agents.command(name="delete")
async def agents_delete(name: str, *, connect: Connect = HERE) -> None:
    """Delete a saved agent, all of its versions: nobody can name it any more. Its runs stay.

    Parameters
    ----------
    name
        Which one.
    """
    if _named(name)[1] is not None:
        raise CommandError(f"{name}: an agent is deleted with all of its versions; give its name alone", Exit.USAGE)
    async with connected(connect) as client:
        await client.delete(f"/v1/agents/{name}")
    print(f"deleted {name}")


def _named(text: str) -> tuple[str, str | None]:
    """Raises `CommandError`."""
    parsed = parse_agent(text)
    if parsed is None:
        raise CommandError(f"{text!r} names no agent: it is `name`, or `name@version`", Exit.USAGE)
    return parsed


def _count(things: Sized, what: str) -> str:
    return f"{len(things)} {what}" if len(things) == 1 else f"{len(things)} {what}s"


def _told(faults: "Iterable[Fault]", *, json: bool) -> Exit:
    code = Exit.OK
    for fault in faults:
        code = Exit.FAILED
        shown: Mapping[str, Any] = {"where": fault.where, "path": fault.path, "message": fault.message}
        show.print_json(shown) if json else print(show.printable(str(fault)))
    return code
