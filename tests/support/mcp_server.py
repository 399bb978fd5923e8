"""A server of the MCP library, run as a process: `python mcp_server.py stdio`, or `http <file>`, which gets the port;
further arguments of `http`: `stateless` and `json`.

`NOTES` names a file that gets a line for whatever is done, and when; `SECRET` is what `leak` tells; who asks over HTTP
has to know the `KEY`.
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ResourceLink, TextContent


def note(line: str) -> None:
    if path := os.environ.get("NOTES"):
        with Path(path).open("a") as file:
            file.write(f"{time.monotonic()} {line}\n")


server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    note(f"add {a} {b}")
    return a + b


@server.tool()
def split(text: str) -> dict[str, Any]:
    """Words of a text."""
    return {"words": text.split(), "size": len(text)}


@server.tool()
def words(text: str) -> list[str]:
    """The same, as a list."""
    return text.split()


@server.tool(structured_output=False)
def gallery() -> list[Any]:
    """A text, an image and a link."""
    link = ResourceLink(type="resource_link", name="more", uri="https://example.org/more")
    return [TextContent(type="text", text="a dot"), Image(data=b"\x89PNG dot", format="png"), link]


@server.tool()
def large(size: int) -> str:
    """A text of so many characters."""
    return "x" * size


@server.tool()
async def slow(seconds: float, name: str = "") -> str:
    """Takes its time."""
    note(f"begun {name}")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        note(f"cancelled {name}")
        raise
    note(f"done {name}")
    return f"waited for {seconds:g} s"


@server.tool()
def die() -> str:
    """Ends the server in the middle of the call."""
    note("dying")
    os._exit(3)


@server.tool()
def leak() -> str:
    """Fails, and tells more than it should."""
    raise ToolError(f"cannot log in with {os.environ.get('SECRET', '')}, api_key=abcdef123456")


@server.tool()
def tell() -> str:
    """Tells a secret as its result."""
    return f"the secret is {os.environ.get('SECRET', '')}"


@server.tool()
def environment() -> list[str]:
    """Names of the variables that the server has."""
    return sorted(os.environ)


@server.tool()
def breed() -> dict[str, int]:
    """Starts a process that outlives the server, if nobody minds it. The ids of both."""
    child = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)
    return {"server": os.getpid(), "child": child.pid}


@server.tool()
def pid() -> int:
    """The process of the server."""
    return os.getpid()


@server.tool()
def complain(lines: int) -> str:
    """Says so many lines on standard error."""
    for number in range(lines):
        print(f"complaint {number} {os.environ.get('SECRET', '')}", file=sys.stderr)
    sys.stderr.flush()
    return "said"


@server.tool()
async def change(context: Context) -> str:
    """Has another tool from now on, and `split` takes something else."""

    def late(word: str) -> str:
        """Came later."""
        return f"late {word}"

    def split(sentence: str) -> list[str]:
        """Words of a sentence."""
        return sentence.split()

    server.remove_tool("split")
    server.add_tool(split)
    server.add_tool(late)
    await context.session.send_tool_list_changed()
    return "changed"


@server.tool(name="odd.name-with-a-very-long-tail-that-no-provider-would-take-as-it-is-for-it-has-too-many")
def odd() -> str:
    """Has a name that does not do."""
    return "odd"


async def http(port_file: Path, options: list[str]) -> None:
    import uvicorn  # takes its time to load

    app = server.streamable_http_app(stateless_http="stateless" in options, json_response="json" in options)
    web = uvicorn.Server(uvicorn.Config(Guarded(app), port=int(os.environ.get("PORT", "0")), log_level="warning"))
    serving = asyncio.create_task(web.serve())
    while not web.started:
        await asyncio.sleep(0.01)
    partial = port_file.with_suffix(".new")
    partial.write_text(str(web.servers[0].sockets[0].getsockname()[1]))
    partial.rename(port_file)
    await serving


class Guarded:
    """Lets in only those who know the key, where there is one."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        key = os.environ.get("KEY")
        if scope["type"] == "http" and key and dict(scope["headers"]).get(b"authorization") != f"Bearer {key}".encode():
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})
            return
        await self._app(scope, receive, send)


if __name__ == "__main__":
    note(f"started {os.getpid()}")
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        asyncio.run(http(Path(sys.argv[2]), sys.argv[3:]))
