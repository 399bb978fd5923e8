"""MCP servers that are not well, as processes: `python mcp_broken.py <kind>`.

`deaf` says nothing and ignores that it is told to go, `rubbish` says what is no message, `listless` never says which
tools it has, `endless` says one endless message, `ended` ends at once, and `old` knows the protocol as it once was; so
does `http <file>`, which gets the port. `NOTES` names a file that gets a line for whatever is done, and when.
"""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOOL = {"name": "add", "description": "", "inputSchema": {"type": "object"}}


def note(line: str) -> None:
    with Path(os.environ["NOTES"]).open("a") as file:
        file.write(f"{time.monotonic()} {line}\n")


def deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def rubbish() -> None:
    while True:
        print("this is no message", flush=True)
        time.sleep(0.01)


def endless() -> None:
    sys.stdin.readline()
    while True:
        sys.stdout.write("x" * 65536)


def converse(*, lists: bool) -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked and (lists or asked["method"] != "tools/list"):
            say({"jsonrpc": "2.0", "method": "notifications/nonsense", "params": {"a": 1}})
            say(answer(asked))


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Knows the handshake of 2025-06-18, and one tool, which returns its arguments."""
    match asked["method"]:
        case "initialize":
            about = {"name": "broken", "version": "1"}
            result: Any = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list":
            result = {"tools": [TOOL]}
        case "tools/call":
            result = {"content": [{"type": "text", "text": json.dumps(asked["params"]["arguments"])}]}
        case _:
            fault = {"code": -32601, "message": "Method not found"}
            return {"jsonrpc": "2.0", "id": asked["id"], "error": fault}
    return {"jsonrpc": "2.0", "id": asked["id"], "result": result}


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


class Sessions(BaseHTTPRequestHandler):
    """The same over HTTP, with sessions, which it forgets when it is told to."""

    protocol_version = "HTTP/1.1"
    begun = 0
    known: set[str] = set()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        mine = self.headers.get("mcp-session-id")
        if asked["method"] == "initialize":
            Sessions.begun += 1
            mine = f"session {self.begun}"
            self.known.add(mine)
            note(mine)
        elif mine not in self.known:
            return self.reply(404 if mine else 400, b"")
        if "id" not in asked:
            return self.reply(202, b"")
        if asked.get("params", {}).get("arguments", {}).get("forget"):
            self.known.clear()
        return self.reply(200, json.dumps(answer(asked)).encode(), mine)

    def do_GET(self) -> None:
        self.reply(405, b"")

    def do_DELETE(self) -> None:
        self.reply(405, b"")

    def reply(self, status: int, body: bytes, session: str | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        if session:
            self.send_header("mcp-session-id", session)
        self.end_headers()
        self.wfile.write(body)


def http(port_file: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Sessions)
    port_file.write_text(str(server.server_address[1]))
    server.serve_forever()


if __name__ == "__main__":
    note(f"started {os.getpid()}")
    match sys.argv[1]:
        case "deaf":
            deaf()
        case "rubbish":
            rubbish()
        case "endless":
            endless()
        case "ended":
            sys.exit(7)
        case "http":
            http(Path(sys.argv[2]))
        case kind:
            converse(lists=kind == "old")
