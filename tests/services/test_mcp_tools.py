"""What the tools of MCP servers are called, where their servers are, and what is done with their arguments. No server
is there."""

import subprocess
import sys
from typing import Any

import mcp.types as types
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.agents import ToolContext
from turnstream.agents.mcp import McpServer
from turnstream.agents.tool import NAME
from turnstream_runner.mcp.connection import Listed
from turnstream_runner.mcp.content import shown as content_of
from turnstream_runner.mcp.endpoint import Hidden, found
from turnstream_runner.mcp.failures import Unset
from turnstream_runner.mcp.names import safe
from turnstream_runner.mcp.servers import Servers, place
from turnstream_runner.mcp.tool import ServerTool
from turnstream_runner.tools.port import Unfit
from turnstream_runner.tools.registry import Tools

CONTEXT = ToolContext(account="acme", session="s", run="s.1", attempt=1, call_id="c", idempotency_key="k")
NUMBERS = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}


def tool(schema: dict[str, Any], name: str = "add", **said: Any) -> ServerTool:
    where = place("acme", "default", "srv", McpServer(url="http://127.0.0.1:9/mcp", **said))
    return ServerTool(Servers({}), where, Listed(name, "Adds.", schema), safe("srv", name))


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_name_that_does_is_kept() -> None:
    assert safe("files", "read-text_file") == "files__read-text_file"


@given(st.text(min_size=1, max_size=200))
def test_every_tool_has_a_name_that_does_and_always_the_same(name: str) -> None:
    made = safe("srv", name)
    assert NAME.fullmatch(made)
    assert made.startswith("srv__")
    assert made == safe("srv", name)


@given(st.sets(st.text(min_size=1, max_size=200), min_size=2, max_size=20))
def test_no_two_tools_have_one_name(names: set[str]) -> None:
    taken: set[str] = {"srv__add"}
    for name in sorted(names):
        made = safe("srv", name, taken)
        assert made not in taken
        taken.add(made)


async def test_a_tool_is_found_by_the_name_in_its_agents_definition_too() -> None:
    odd = tool({}, name="a.b/c")
    assert odd.name != odd.listed == "srv__a.b/c"
    tools = Tools({}).besides([odd], {})
    assert tools.has(odd.name) and tools.has(odd.listed)
    assert tools.fingerprint(odd.listed, "{}") != tools.fingerprint("srv__other", "{}")
    assert [spec.name for spec in tools.specs()] == [odd.name]


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"n": "secret"}', "the arguments do not fit: n: it is not of type"),
        ("[1]", "the arguments are no JSON object"),
        ('{"n": ', "the arguments are no JSON: "),
        ("[" * 5000, "the arguments are no JSON"),
    ],
)
async def test_arguments_that_do_not_fit_are_an_error_before_anything_is_sent(arguments: str, said: str) -> None:
    result = await Tools({"srv__add": tool(NUMBERS)}).call("srv__add", arguments, CONTEXT)
    assert result.status == "error"
    assert result.error.startswith(said)
    assert "secret" not in result.error


def test_arguments_that_fit_are_as_they_were_given() -> None:
    assert tool(NUMBERS).read('{"n": 1, "more": [null, 1.5]}') == {"n": 1, "more": [None, 1.5]}
    assert tool({}).read("{}") == {}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "nonsense"}}},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"$ref": "file:///etc/passwd"},
        {"properties": {"a": {"pattern": "("}}},
        {"description": "x" * 70_000},
    ],
)
def test_a_tool_whose_arguments_cannot_be_checked_cannot_be_used(schema: dict[str, Any]) -> None:
    with pytest.raises(Unfit, match="the schema of its arguments"):
        tool(schema)


# --- where a server is ------------------------------------------------------------------------------------------------


def test_references_are_filled_in_and_never_shown() -> None:
    environment = {"TOKEN": "very-secret", "PATH": "/bin", "HOME": "/root", "OTHER": "hidden"}
    server = McpServer(url="https://example.org/mcp", headers={"Authorization": "Bearer ${TOKEN}"})
    endpoint = found(server, environment)
    assert endpoint.headers == {"Authorization": "Bearer very-secret"}
    assert endpoint.hidden.strike("it is very-secret!") == "it is ***!"
    started = found(McpServer(command=["x"], env={"A": "${TOKEN}", "B": "${HOME}"}), environment)
    assert started.env == {"PATH": "/bin", "HOME": "/root", "A": "very-secret", "B": "/root"}
    assert started.hidden.strike("/root has very-secret") == "/root has ***"


def test_a_reference_to_what_is_not_there_is_an_error_that_names_it() -> None:
    with pytest.raises(Unset, match=r"does not have NOT_THERE$"):
        found(McpServer(command=["x"], env={"A": "${NOT_THERE}"}), {})


def test_of_two_secrets_in_one_another_nothing_is_left() -> None:
    assert Hidden(["secret", "secret-key", "tiny"]).strike("secret-key secret tiny") == "*** *** tiny"


@pytest.mark.parametrize("shown", ["it 'pass\\nword-1'", 'it "pass\\nword-1"', "it word-1", "it pass%0Aword-1"])
def test_a_secret_is_not_shown_in_another_form_either(shown: str) -> None:
    assert "word-1" not in Hidden(["pass\nword-1\n"]).strike(shown)


# --- what a tool returned ---------------------------------------------------------------------------------------------


def texts(*some: str) -> list[Any]:
    return [types.TextContent(type="text", text=text) for text in some]


@pytest.mark.parametrize(
    ("content", "structured", "shown", "is_json"),
    [
        (texts("one", "two"), None, "one\ntwo", False),
        ([], None, "", False),
        (texts("3"), {"result": 3}, "3", True),
        (texts("3"), {"result": "3"}, "3", False),
        (texts('{\n  "a": 1\n}'), {"a": 1}, '{\n  "a": 1\n}', True),
        (texts("found one"), {"a": 1}, 'found one\n{"a":1}', False),
        ([], {"a": [1, None]}, '{"a":[1,null]}', True),
        ([], {"result": []}, "[]", True),
        (texts("one"), {"result": ["one"]}, '["one"]', True),
        (texts("one", "two"), {"result": ["one", "two"]}, '["one","two"]', True),
        (texts("3"), {"result": [3]}, "[3]", True),
        (texts('{"a": 1}', "null"), {"result": [{"a": 1}, None]}, '[{"a":1},null]', True),
        (texts('["one", "two"]'), {"result": ["one", "two"]}, '["one", "two"]', True),
        (texts("found two"), {"result": ["one", "two"]}, 'found two\n{"result":["one","two"]}', False),
        (
            [types.AudioContent(type="audio", data="QUJD", mime_type="audio/wav")],
            None,
            "[audio, audio/wav, 3 bytes: not shown]",
            False,
        ),
        (
            [
                types.EmbeddedResource(
                    type="resource",
                    resource=types.TextResourceContents(uri="file:///a", text="inside", mime_type="text/x"),
                )
            ],
            None,
            "[resource file:///a, text/x]\ninside",
            False,
        ),
        (
            [
                types.EmbeddedResource(
                    type="resource", resource=types.BlobResourceContents(uri="file:///a", blob="QUI=")
                )
            ],
            None,
            "[resource file:///a, of unknown type, 2 bytes: not shown]",
            False,
        ),
    ],
)
def test_a_result_is_its_texts_and_whatever_else_is_named(
    content: list[Any], structured: dict[str, Any] | None, shown: str, is_json: bool
) -> None:
    result = types.CallToolResult(content=content, structured_content=structured)
    found = content_of(result)
    assert (found.text, found.json) == (shown, is_json)


def test_a_runner_loads_the_library_only_when_it_is_needed() -> None:
    program = "import sys, turnstream_runner.app; print(sorted({'mcp', 'mcp_types', 'httpx2'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
