"""MCP servers that are not well, as processes: `python mcp_broken.py <kind>`.

`deaf` says nothing and ignores that it is told to go, `rubbish` says what is no message, `listless` never says which
tools it has, `endless` says one endless message, `ended` ends at once, `old` knows the protocol as it once was, and
`slow` takes `SECONDS` to begin. `NOTES` names a file that gets a line for whatever is done.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

TOOL = {"name": "add", "description": "", "inputSchema": {"type": "object"}}


def note(line: str) -> None:
    with Path(os.environ["NOTES"]).open("a") as file:
        file.write(f"{line}\n")


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
    """Knows the handshake of 2025-06-18, and a notification or two that nobody else does."""
    for line in sys.stdin:
        asked = json.loads(line)
        match asked["method"]:
            case "initialize":
                about = {"name": "broken", "version": "1"}
                result: Any = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": about}
            case "tools/list" if lists:
                result = {"tools": [TOOL]}
            case "tools/call":
                result = {"content": [{"type": "text", "text": json.dumps(asked["params"]["arguments"])}]}
            case "server/discover":
                fault = {"code": -32601, "message": "Method not found"}
                say({"id": asked["id"], "error": fault})
                continue
            case _:
                continue
        say({"method": "notifications/nonsense", "params": {"a": 1}})
        say({"id": asked["id"], "result": result})


def say(message: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


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
        case "slow":
            time.sleep(float(os.environ["SECONDS"]))
            converse(lists=True)
        case kind:
            converse(lists=kind == "old")
