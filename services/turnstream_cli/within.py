"""`open`, `history`, `queue`, `withdraw`: a session, what was said in it, and what no run has taken."""

from typing import Any, Literal
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from turnstream_cli import show
from turnstream_cli.client import HERE, Connect, connected
from turnstream_cli.look import lines
from turnstream_cli.talk import checked

SHORT = 60
"""Characters of a message that a list shows."""


async def open_(
    session: str,
    *,
    preset: Literal["strict", "memory", "thread", "workspace"] | None = None,
    agent: str | None = None,
    title: str | None = None,
    json: bool = False,
    connect: Connect = HERE,
) -> None:
    """Open a session. One that is there stays as it is, but for what is given.

    Parameters
    ----------
    session
        The session's id.
    preset
        What its policy begins with; default: what agent and server say.
    agent
        Who answers in it.
    title
        Its title.
    json
        Print the answer as JSON.
    """
    given = {"agent": agent, "title": title, "policy": {"preset": preset} if preset else None}
    body = {"id": checked(session), **{name: value for name, value in given.items() if value is not None}}
    async with connected(connect) as client:
        answer = await client.post("/v1/sessions", body)
    was = "opened" if answer["created"] else "changed" if len(body) > 1 else "there already"
    show.print_json(answer) if json else print(f"session {session} is {was} (#{answer['seq']})")


async def history(session: str, *, json: bool = False, connect: Connect = HERE) -> None:
    """Show what was said in a session, from its beginning.

    Parameters
    ----------
    session
        The session's id.
    json
        Print one line of JSON an item.
    """
    path = f"/v1/sessions/{checked(session)}/history"
    items: list[dict[str, Any]] = []
    async with connected(connect) as client:
        cursor: int | None = None
        while True:
            page = await client.get(path, limit=200, cursor=cursor)
            items += page["items"]
            cursor = page.get("next")
            if cursor is None:
                break
    if json:
        lines(items)
        return
    console = show.console()
    for item in items:
        _item(console, item)


async def queue(session: str, *, json: bool = False, connect: Connect = HERE) -> None:
    """Show what no run of a session has taken yet, in the order in which it will be.

    Parameters
    ----------
    session
        The session's id.
    json
        Print the answer as JSON.
    """
    async with connected(connect) as client:
        answer = await client.get(f"/v1/sessions/{checked(session)}/queue")
    if json:
        show.print_json(answer)
        return
    console = show.console()
    if answer["active"]:
        console.print(f"in front: {answer['active']}", markup=False)
    for item in answer["items"]:
        said = item["verb"] or _short(item)
        console.print(
            Text(f"{item['position']}. {item['waits']} for {item['run']}  {item['author']}: {show.printable(said)}"),
            soft_wrap=True,
        )
        console.print(f"   {item['message'] or item['run']}  #{item['seq']}", style="dim", markup=False)
    if not answer["items"]:
        console.print("nothing waits", style="dim")


async def withdraw(session: str, message: str, *, json: bool = False, connect: Connect = HERE) -> None:
    """Take back a message that no run has taken yet.

    Parameters
    ----------
    session
        The session's id.
    message
        The message's id, as `queue` shows it.
    json
        Print the answer as JSON.
    """
    async with connected(connect) as client:
        answer = await client.delete(f"/v1/sessions/{checked(session)}/messages/{quote(message, safe='')}")
    show.print_json(answer) if json else print(f"message {message} is withdrawn (#{answer['seq']})")


def _item(console: Console, item: dict[str, Any]) -> None:
    match item["type"]:
        case "message":
            text = "\n  ".join(part.get("text", "") for part in item["content"])
            _line(console, "▸", f"{item['author']}: {text}", "bold", item.get("run") or item.get("kind", ""), item)
            for one in item.get("attachments", ()):
                _line(console, "▫", show.attached(one), "", item.get("run") or "", item)
        case "reply":
            for mark, name, style in (("◇", "reasoning", "dim italic"), ("◆", "content", "")):
                if item.get(name):
                    _line(console, mark, item[name], style, item["run"], item)
            for call in item.get("tool_calls", ()):
                _line(console, "⚙", f"{call['name']}({call['arguments']})", "magenta", item["run"], item)
            if status := item.get("status"):
                error = item.get("error")
                why = f": {error['code']}: {error['message'].removeprefix(error['code'] + ': ')}" if error else ""
                _line(console, "■", f"{status}{why}", show.STYLES.get(status, ""), item["run"], item)
        case "action":
            _line(console, "▸", f"{item['author']}: {item['name']}({item['arguments']})", "bold", item["run"], item)
        case "tool_result":
            result = _cut(item.get("output") or item.get("error", ""), 300)
            _line(console, "⚙", f"→ {item['status']}: {result}", "magenta", item["run"], item)
        case "node":
            name = f"{item['path']}: {item['name']}" if item.get("name") else item["path"]
            if item.get("reasoning"):
                _line(console, "◇", item["reasoning"], "dim italic", item["run"], item)
            result = item.get("error") or _cut(item.get("output", ""), 300)
            port = "" if item["port"] == "out" else f" → {item['port']}"
            style = "red" if item["port"] == "err" else ""
            _line(console, "◈", f"{name}{port}: {result}", style, item["run"], item)
        case "requests":
            for request in item["requests"]:
                _line(console, "?", f"{request['prompt']}  {request['state']}", "magenta", request["id"], item)
        case other:
            _line(console, "·", other, "dim", "", item)


def _line(console: Console, mark: str, text: str, style: str, of: str, item: dict[str, Any]) -> None:
    line = Text(f"{mark} ", style="dim") + Text(show.printable(text), style=style)
    console.print(line + Text(f"  {of} #{item['seq']}", style="dim"), soft_wrap=True)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + " …"


def _short(item: dict[str, Any]) -> str:
    said = " ".join(part.get("text", "") for part in item["content"]).replace("\n", " ")
    names = ", ".join(one["name"] for one in item.get("attachments", ()))
    return _cut(said, SHORT) + (f" [{names}]" if names else "")
