"""MCP servers as they are written: where they are, what may be used of them, and that no secret is written down."""

from typing import Any

import pytest

from turnstream.agents import AgentsError
from turnstream.agents.definition import define
from turnstream.agents.mcp import McpServer, tool_name


def faults(**servers: Any) -> list[str]:
    with pytest.raises(AgentsError) as caught:
        define("x", {"name": "a", "model": "demo", "mcp": servers})
    return [f"{fault.path}: {fault.message}" for fault in caught.value.faults]


def test_a_server_is_there_or_is_started() -> None:
    agent = define(
        "x",
        {
            "name": "a",
            "model": "demo",
            "mcp": {
                "hub": {
                    "url": "https://hub.example/mcp?x=1",
                    "headers": {"Authorization": "Bearer ${HUB_TOKEN}", "X-Key": "${KEY}"},
                    "tools": ["list/repos", "get.issue"],
                    "idempotent": ["get.issue"],
                    "timeout": 5,
                },
                "files": {"command": ["files", "--root", "/srv"], "env": {"TOKEN": "${FILES_TOKEN}"}, "cwd": "/tmp"},
            },
        },
    )
    hub, files = agent.mcp["hub"], agent.mcp["files"]
    assert hub.may_use("get.issue") and not hub.may_use("delete")
    assert files.may_use("anything") and files.timeout == 60
    assert McpServer.model_validate(hub.model_dump(mode="json")) == hub
    assert tool_name("hub", "get") == "hub__get"


@pytest.mark.parametrize(
    ("server", "found"),
    [
        ({}, "time: either `url` or `command`, and not both"),
        ({"url": "http://x", "command": ["x"]}, "time: either `url` or `command`, and not both"),
        ({"command": []}, "time: either `url` or `command`, and not both"),
        ({"command": [""]}, "time.command.0: string should have at least 1 character"),
        ({"command": "x -y"}, "time.command: "),
        ({"url": "ftp://x"}, "time.url: string should match"),
        ({"url": "http://x y"}, "time.url: string should match"),
        ({"command": ["x"], "headers": {"A": "${B}"}}, "time.headers: go with `url`"),
        ({"url": "http://x", "env": {"A": "${B}"}}, "time.env: goes with `command`"),
        ({"url": "http://x", "cwd": "/"}, "time.cwd: goes with `command`"),
        ({"url": "http://x", "headers": {"Authorization": "Bearer abc"}}, "time.headers.Authorization: names what"),
        ({"url": "http://x", "headers": {"A": "s3cret ${B} "}}, "time.headers.A: names what"),
        ({"url": "http://x", "headers": {"A": "${B}${C}"}}, "time.headers.A: names what"),
        ({"url": "http://x", "headers": {"A b": "${B}"}}, "time.headers.A b: string should match"),
        ({"command": ["x"], "env": {"A": "plain"}}, "time.env.A: names what"),
        ({"command": ["x"], "env": {"A-": "${B}"}}, "time.env.A-: string should match"),
        ({"command": ["x"], "tools": ["a b"]}, "time.tools.0: string should match"),
        ({"command": ["x"], "tools": ["a", "a"]}, "time.tools: named twice: a"),
        ({"command": ["x"], "tools": ["a"], "idempotent": ["b"]}, "time.idempotent: not among `tools`: b"),
        ({"command": ["x"], "timeout": 0}, "time.timeout: input should be greater than 0"),
        ({"command": ["x"], "approval": True}, "time.approval: unknown field"),
    ],
)
def test_a_server_that_does_not_do_says_why(server: dict[str, Any], found: str) -> None:
    assert any(one.startswith(f"mcp.{found}") for one in faults(time=server)), faults(time=server)


@pytest.mark.parametrize("name", ["", "A", "1a", "a__b", "a_", "a b", "a" * 33])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    assert faults(**{name: {"command": ["x"]}})[0].startswith(f"mcp.{name}: string should ")
