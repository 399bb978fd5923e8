"""What is said to a server: which tools it has, and calls of them. This module and `child` alone know the MCP library,
and are loaded only when a server is needed.

A dialog says in `Failed` what went wrong, in words that may be shown: short, first lines only, without what is hidden.
Only text is asked of a server: it may not ask us for a model, for people's input or for folders.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import httpx2
import msgspec
from mcp import Client, MCPError
from mcp.client.session import IncomingMessage
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST, Implementation, Tool, ToolListChangedNotification

from turnstream import __version__
from turnstream_runner.mcp.child import MESSAGE_MAX, spoken
from turnstream_runner.mcp.connection import Listed
from turnstream_runner.mcp.content import Shown, shown
from turnstream_runner.mcp.endpoint import Endpoint
from turnstream_runner.mcp.failures import Ended, Failed, Refused
from turnstream_runner.shown import line, struck

CONNECT: Final = 10.0
"""Seconds to connect in over HTTP."""
PAGES_MAX: Final = 100
TOOLS_MAX: Final = 512
"""Tools of one server that are looked at."""
DESCRIPTION_MAX: Final = 4096
"""Characters of a tool's description that a model is told."""
ERROR_MAX: Final = 8192
"""Characters of what a server says of a failure that are looked at."""
SESSION_GONE: Final = "Session terminated"
"""What the library says where the server does not know the session any more: nothing was done then."""

for _name in ("mcp", "client"):  # the library writes whole messages into its log; what matters of them is said here
    logging.getLogger(_name).addFilter(lambda record: "/mcp/" not in record.pathname.replace("\\", "/"))
logging.getLogger("mcp").setLevel(logging.CRITICAL)


class Dialog:
    def __init__(self, client: Client, endpoint: Endpoint) -> None:
        self._client = client
        self._hidden = endpoint.hidden

    async def tools(self) -> tuple[Listed, ...]:
        """Raises `Failed`."""
        try:
            return tuple([tool async for tool in self._pages()])
        except Exception as error:
            raise self._failed(error) from None

    async def _pages(self) -> AsyncIterator[Listed]:
        cursor: str | None = None
        count = 0
        for _ in range(PAGES_MAX):
            page = await self._client.list_tools(cursor=cursor)
            for tool in page.tools:
                count += 1
                if count > TOOLS_MAX:
                    return
                yield self._listed(tool)
            cursor = page.next_cursor
            if not cursor:
                return

    def _listed(self, tool: Tool) -> Listed:
        description = self._hidden.strike(tool.description or "")[:DESCRIPTION_MAX]
        schema = self._hidden.strike(msgspec.json.encode(tool.input_schema).decode())
        return Listed(tool.name, description, msgspec.json.decode(schema))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Shown:
        """What the tool returned. Raises `Refused` where the server says that it failed, `Failed`, `Ended`."""
        try:
            result = await self._client.call_tool(name, dict(arguments))
            text, is_json = shown(result)
            text = self._hidden.strike(text)
        except Exception as error:
            raise self._failed(error) from None
        if result.is_error:
            raise Refused(struck(text[:ERROR_MAX]) or "the tool failed and did not say why")
        return Shown(text, is_json)

    def _failed(self, error: BaseException) -> Failed:
        return failed(error, self._hidden.strike)


def failed(error: BaseException, strike: Callable[[str], str]) -> Failed:
    """What an error of the library means."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, Failed):
        return error
    said = line(strike(str(error)))
    if not isinstance(error, MCPError):
        return Failed(f"{type(error).__name__}: {said}" if said else type(error).__name__)
    if error.code == INVALID_REQUEST and error.message == SESSION_GONE:
        return Ended("the server does not know the session any more", undone=True)
    return Ended(said) if error.code == CONNECTION_CLOSED else Failed(said)


@asynccontextmanager
async def held(
    name: str, endpoint: Endpoint, *, ended: Callable[[str], None], changed: Callable[[], None]
) -> AsyncGenerator[Dialog, None]:
    """A dialog with a server, from the first word to the last. `ended` is called with the reason when the server is
    gone, `changed` when it says that it has other tools. Raises `Failed`."""

    async def hear(message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            changed()

    answers = Answers()
    try:
        async with AsyncExitStack() as stack:
            if endpoint.url:
                web = await stack.enter_async_context(_web(endpoint, answers))
                transport = streamable_http_client(endpoint.url, http_client=web, max_sse_event_size=MESSAGE_MAX)
            else:
                transport = spoken(name, endpoint, ended)
            about = Implementation(name="turnstream", version=__version__)
            client = Client(transport, message_handler=hear, client_info=about, cache=None)
            yield Dialog(await stack.enter_async_context(client), endpoint)
    except Exception as error:
        raise Failed(f"it answers {answers.refused}") if answers.refused else failed(error, endpoint.hidden.strike)


def _web(endpoint: Endpoint, answers: "Answers") -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        headers={"accept-encoding": "identity", **endpoint.headers},
        timeout=httpx2.Timeout(CONNECT, read=None),  # how long an answer may take is the call's own affair
        event_hooks={"response": [answers.see]},
    )


class Answers:
    """Looks at the answers over HTTP: none is larger than may be, and what the last one was is remembered."""

    def __init__(self) -> None:
        self.refused = ""
        """Status and reason of the last answer, if it was none that does."""

    async def see(self, response: httpx2.Response) -> None:
        self.refused = "" if response.is_success else f"{response.status_code} {response.reason_phrase}".strip()
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = _Bounded(response.stream)


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = MESSAGE_MAX
        async for piece in self._stream:
            left -= len(piece)
            if left < 0:
                raise httpx2.StreamError(f"the answer has more than {MESSAGE_MAX} bytes")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
