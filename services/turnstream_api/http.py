"""The HTTP entrance: Starlette's routes, made from the table, and a lean way from bytes to an operation and back.

A request is decoded by msgspec straight into the operation's struct; there is no middleware. Every answer carries
`X-Request-Id`; every failure is a problem document. An attachment is a body of bytes; one that is answered is sent
piece by piece, and as what is to be saved: no browser shows it as a page of ours.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import aclosing, contextmanager
from urllib.parse import parse_qsl, quote

import msgspec
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from turnstream.broker.errors import BrokerFault
from turnstream.telemetry import Metrics, get_logger, parse_traceparent
from turnstream_api import errors, sse
from turnstream_api.api import Answer, Api, Caller, File, Stream
from turnstream_api.attachments import ANY
from turnstream_api.decoding import body_max, idempotency_key, if_match, last_event_id, parse_json
from turnstream_api.errors import Problem, problem_of
from turnstream_api.keys import Keys
from turnstream_api.operation import Operation, Request, convert, misfit
from turnstream_api.operations import OPERATIONS

log = get_logger()

ACTOR = "client:http"
"""Who asks without an API key."""
JSON = b"application/json"
PROBLEM = errors.CONTENT_TYPE.encode()
UPLOADS = 8
"""As many bytes as so many of the largest attachments have, one process takes in at once."""

Header = tuple[bytes, bytes]

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_encode = msgspec.json.Encoder().encode


class Head(msgspec.Struct, gc=False):
    """The headers that matter here."""

    request_id: str
    authorization: bytes = b""
    content_type: bytes = b""
    content_length: bytes = b""
    accept: bytes = b""
    idempotency_key: bytes | None = None
    if_match: bytes | None = None
    traceparent: bytes | None = None
    last_event_id: bytes | None = None


def read_head(scope: Scope, new_id: Callable[[], str]) -> Head:
    head = Head("")
    for name, value in scope["headers"]:
        match name:
            case b"authorization":
                head.authorization = value
            case b"content-type":
                head.content_type = value
            case b"content-length":
                head.content_length = value
            case b"accept":
                head.accept = value
            case b"idempotency-key":
                head.idempotency_key = value
            case b"if-match":
                head.if_match = value
            case b"traceparent":
                head.traceparent = value
            case b"last-event-id":
                head.last_event_id = value
            case b"x-request-id" if _REQUEST_ID.fullmatch(value):
                head.request_id = value.decode()
            case _:
                pass
    if not head.request_id:
        head.request_id = new_id()
    return head


class Entrance:
    """Everything that one path answers, by method."""

    def __init__(self, api: Api, keys: Keys, metrics: Metrics, operations: Mapping[str, Operation]) -> None:
        self._api = api
        self._keys = keys
        self._rows = {method: Row(operation, metrics) for method, operation in operations.items()}
        self._uploads = Uploads(UPLOADS * api.settings.attachment_max)
        if "GET" in self._rows:
            self._rows["HEAD"] = self._rows["GET"]
        self._allow = ", ".join(self._rows).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = read_head(scope, self._api.request_id)
        row = self._rows.get(scope["method"])
        if row is None:
            problem = Problem("method_not_allowed", f"{scope['method']} is not possible here")
            await send_problem(send, problem, head.request_id, (b"allow", self._allow))
            return
        status = 200
        try:
            status = await self._answer(row, scope, head, receive, send)
        except Exception as error:
            problem = problem_of(error)
            status = problem.status
            if problem.code == "internal_error":
                log.error("a request failed", operation=row.operation.name, request_id=head.request_id, exc_info=True)
            await send_problem(send, problem, head.request_id)
        row.count(status)

    async def _answer(self, row: "Row", scope: Scope, head: Head, receive: Receive, send: Send) -> int:
        operation = row.operation
        caller = self._caller(operation, head, scope["method"] == "HEAD")
        fields: dict[str, object] = dict(scope["path_params"])
        if scope["query_string"]:
            fields |= read_query(row, scope["query_string"])
        if operation.takes_bytes:
            with self._uploads.one() as held:
                body = await receive_body(head, receive, self._api.settings.attachment_max, held)
                fields |= {"content": body, "media_type": media_type(head)}
                return await self._respond(row, scope, head, caller, convert(operation, fields), receive, send)
        if row.has_body:
            fields |= read_body(row, head, await receive_body(head, receive, body_max(self._api)))
        return await self._respond(row, scope, head, caller, convert(operation, fields), receive, send)

    async def _respond(
        self, row: "Row", scope: Scope, head: Head, caller: Caller, request: Request, receive: Receive, send: Send
    ) -> int:
        operation = row.operation
        if row.waiting(request) and not caller.streams:
            answer = await until_gone(operation.call(self._api, caller, request), receive)
            if answer is None:
                return 499
        else:
            answer = await operation.call(self._api, caller, request)
        if isinstance(answer, Stream):
            headers = [(b"x-request-id", head.request_id.encode())]
            await sse.respond(self._api, caller, answer, headers, receive, send)
            return 200
        if isinstance(answer.body, File):
            await send_file(send, answer.body, head.request_id, is_head=scope["method"] == "HEAD")
        else:
            await send_answer(send, answer, head.request_id)
        return answer.status

    def _caller(self, operation: Operation, head: Head, is_head: bool) -> Caller:
        account, key_id = self._keys.authenticate(head.authorization)
        streams = operation.streams and not is_head and b"text/event-stream" in head.accept
        return Caller(
            account=account,
            actor=f"client:{key_id}" if key_id else ACTOR,
            key_id=key_id,
            idempotency_key=idempotency_key(head.idempotency_key) if operation.writes else None,
            expected_seq=if_match(head.if_match) if operation.writes and head.if_match is not None else None,
            traceparent=parse_traceparent(head.traceparent.decode("latin-1")) if head.traceparent else None,
            streams=streams,
            last_event_id=last_event_id(head.last_event_id) if streams and head.last_event_id else None,
        )


class Uploads:
    """What one process holds of uploads, in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0

    @contextmanager
    def one(self) -> Generator[Callable[[int], None]]:
        """Counts the bytes of one, which are held until it is done. Raises `Problem` where they are too many."""
        own = 0

        def hold(size: int) -> None:
            nonlocal own
            if self._held + size > self._limit:
                raise Problem("unavailable", "too much is being uploaded at this moment; try again")
            own += size
            self._held += size

        try:
            yield hold
        finally:
            self._held -= own


class Row:
    """An operation, with all that reading its requests needs, worked out once."""

    def __init__(self, operation: Operation, metrics: Metrics) -> None:
        self.operation = operation
        self.has_body = operation.has_body
        self.in_body = operation.in_body | operation.planned
        types = operation.fields
        self.query_types = {name: types[name] for name in operation.in_query} | dict.fromkeys(operation.planned, str)
        outside = operation.request.__struct_encode_fields__
        self._wait = operation.request.__struct_fields__[outside.index(operation.waits)] if operation.waits else ""
        self._metrics = metrics
        self._counts: dict[int, Callable[[], None]] = {}

    def waiting(self, request: Request) -> bool:
        return self._wait != "" and getattr(request, self._wait) > 0

    def count(self, status: int) -> None:
        if status not in self._counts:
            self._counts[status] = self._metrics.requests.labels(self.operation.name, str(status)).inc
        self._counts[status]()


# --- from bytes ---------------------------------------------------------------------------------------------------


def read_query(row: Row, query: bytes) -> dict[str, object]:
    """The fields of a query, as what their types say."""
    operation = row.operation
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=64)
    except ValueError:
        raise Problem("invalid", "the query is not UTF-8, or has too many fields", field="query") from None
    fields: dict[str, object] = {}
    for name, text in pairs:
        if name not in row.query_types:
            raise Problem("invalid", f"{name}: no such field", field=name)
        if name in fields:
            raise Problem("invalid", f"{name}: given twice", field=name)
        if "\0" in text:
            raise Problem("invalid", f"{name}: contains U+0000", field=name)
        try:
            fields[name] = msgspec.convert(text, row.query_types[name], strict=False)
        except msgspec.ValidationError as error:
            raise misfit(operation, f"{error} - at `$.{name}`") from None
    return fields


async def receive_body(
    head: Head, receive: Receive, limit: int, hold: Callable[[int], None] = lambda size: None
) -> bytes:
    if head.content_length.isdigit() and int(head.content_length) > limit:
        raise Problem("too_large", f"the body has {int(head.content_length)} bytes, {limit} are allowed", limit=limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Problem("invalid", "the body ends early", field="body")
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise Problem("too_large", f"the body has more than {limit} bytes", limit=limit)
        hold(len(part))
        parts.append(part)
        if not message.get("more_body"):
            return part if size == len(part) else b"".join(parts)


def media_type(head: Head) -> str:
    """What the bytes are said to be."""
    return head.content_type.strip().decode("latin-1") or ANY


def read_body(row: Row, head: Head, body: bytes) -> dict[str, object]:
    """The fields of a JSON body; an empty one has none."""
    if not body:
        return {}
    kind = head.content_type.partition(b";")[0].strip().lower()
    if kind and kind != JSON and not kind.endswith(b"+json"):
        raise Problem("unsupported_media_type", f"{kind.decode('latin-1')}: send application/json")
    fields = parse_json(body)
    for name in fields:
        if name not in row.in_body:
            raise Problem("invalid", f"{name}: no such field", field=name)
    return fields


# --- to bytes -----------------------------------------------------------------------------------------------------


async def send_whole(
    send: Send, status: int, kind: bytes, body: bytes, request_id: str, more: Iterable[Header] = ()
) -> None:
    headers = [(b"x-request-id", request_id.encode()), *more]
    if body:
        headers.append((b"content-type", kind))
    if status != 204:  # which has no body, and no length of it (RFC 9110, 8.6)
        headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_file(send: Send, file: File, request_id: str, *, is_head: bool) -> None:
    """A connection that ends before all of it was sent says that it was not all."""
    name = quote(file.about.name, safe="")
    headers = [
        (b"x-request-id", request_id.encode()),
        (b"content-type", file.about.media_type.encode()),
        (b"content-length", b"%d" % file.about.size),
        (b"content-disposition", f"attachment; filename*=UTF-8''{name}".encode()),
        (b"content-security-policy", b"sandbox; default-src 'none'"),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"private"),
    ]
    async with aclosing(file.pieces()) as pieces:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for piece in pieces:
                if is_head:
                    break
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except BrokerFault as error:
            log.error("an attachment could not be sent whole", request_id=request_id, error=error)
            return
        await send({"type": "http.response.body", "body": b""})


async def send_answer(send: Send, answer: Answer, request_id: str) -> None:
    more: list[Header] = []
    if answer.seq is not None:
        more.append((b"etag", b'"%d"' % answer.seq))
    if answer.replayed:
        more.append((b"idempotency-replayed", b"true"))
    body = b"" if answer.body is None else _encode(answer.body)
    await send_whole(send, answer.status, JSON, body, request_id, more)


async def send_problem(send: Send, problem: Problem, request_id: str, *more: Header) -> None:
    document = problem.document(request_id)
    headers = [*more]
    if document.retry_after:
        headers.append((b"retry-after", b"%d" % document.retry_after))
    if document.status == 409:  # client libraries of model providers ask again on 409: here that helps nobody
        headers.append((b"x-should-retry", b"false"))
    if document.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send_whole(send, document.status, PROBLEM, _encode(document), request_id, headers)


async def until_gone(call: Awaitable[Answer | Stream], receive: Receive) -> Answer | Stream | None:
    """The answer; None if the peer goes away first, who then need not be waited for. What was started goes on."""
    working = asyncio.ensure_future(call)
    gone = asyncio.ensure_future(sse.gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        gone.cancel()


# --- the application ----------------------------------------------------------------------------------------------


def application(api: Api, keys: Keys, metrics: Metrics, pages: Mapping[str, ASGIApp]) -> Router:
    """Routes in the order of the table, pages behind them; everything else is a 404 that says so."""
    by_path: dict[str, dict[str, Operation]] = {}
    for operation in OPERATIONS:
        by_path.setdefault(operation.path, {})[operation.method] = operation
    routes = [Route(path, Entrance(api, keys, metrics, methods)) for path, methods in by_path.items()]
    routes += [Route(path, page) for path, page in pages.items()]

    async def nowhere(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"][:256]
            await send_problem(
                send, Problem("not_found", f"nothing at {path}"), read_head(scope, api.request_id).request_id
            )

    return Router(routes, redirect_slashes=False, default=nowhere)
