"""The descriptions of the interface, made from the table of operations: OpenAPI 3.1 and AsyncAPI 3.0.

Not a second truth: what is not in the table, the errors or the subjects cannot be said here.
"""

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import msgspec

from turnstream import subjects
from turnstream.session.events import TYPES
from turnstream.telemetry import TRACEPARENT
from turnstream_api.errors import CODES, CONTENT_TYPE, STATUS, Document
from turnstream_api.frames import CONTROL, DELTA, Said
from turnstream_api.operation import Operation
from turnstream_api.operations import OPERATIONS
from turnstream_api.pages import Health
from turnstream_api.sse import At

REF = "#/components/schemas/{name}"
TITLE = "Turnstream"
ABOUT = (
    "Event-sourced sessions and runs for AI agents. A session is an append-only log of events; a run is one turn of it."
)

Json = dict[str, Any]


def openapi() -> bytes:
    types: list[type] = [Document, Health, At, Said]
    for operation in OPERATIONS:
        types += () if operation.gives_bytes else operation.answers
        types += operation.fields.values()
    _, components = _components(types)
    components["Document"]["properties"]["code"]["enum"] = list(CODES)
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    paths["/healthz"] = _page("healthz", "Whether this process runs", Health)
    paths["/readyz"] = _page("readyz", "Whether it can do its work", Health, 503)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": TITLE, "version": version("turnstream"), "description": ABOUT},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "An API key."}},
            },
            "security": [{"key": []}, {}],
        }
    )


def _operation(operation: Operation) -> Json:
    described: Json = {
        "operationId": operation.name,
        "summary": operation.summary,
        "description": (operation.call.__doc__ or "").strip(),
        "tags": [operation.path.split("/")[2]],
        "parameters": _parameters(operation),
        "responses": _responses(operation),
    }
    if operation.has_body:
        described["requestBody"] = _body(operation)
    return described


def _parameters(operation: Operation) -> list[Json]:
    required = _required(operation)
    found = [
        {"name": name, "in": "path", "required": True, "schema": _schema(operation.fields[name])}
        for name in operation.in_path
    ]
    found += [
        {"name": name, "in": "query", "required": name in required, "schema": _schema(operation.fields[name])}
        for name in sorted(operation.in_query)
    ]
    if operation.writes:
        key = {"type": "string", "minLength": 1, "maxLength": 255}
        seq = {"type": "string", "pattern": '^"[0-9]{1,16}"$'}
        found.append(_header("Idempotency-Key", "A repeat with the same key has no second effect.", key))
        found.append(_header("If-Match", "The session's last sequence, in quotes; refused if it is another.", seq))
    if operation.name == "read_events":
        cursor = {"type": "string", "pattern": "^[0-9]{1,15}$"}
        found.append(_header("Last-Event-ID", "The last `id` seen on the stream: it resumes behind it.", cursor))
    return found


def _header(name: str, description: str, schema: Json) -> Json:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


_BYTES: Json = {"*/*": {}}
"""What a body is that is bytes of any type: nothing is said of them."""


def _body(operation: Operation) -> Json:
    if operation.takes_bytes:
        return {"required": False, "content": _BYTES}  # no body is an empty one
    required = _required(operation)
    properties = {
        name: _schema(operation.fields[name], null=name not in required) for name in sorted(operation.in_body)
    }
    schema: Json = {"type": "object", "properties": properties, "additionalProperties": False}
    needed = sorted(required & operation.in_body)
    if needed:
        schema["required"] = needed
    return {"required": bool(needed), "content": {"application/json": {"schema": schema}}}


def _required(operation: Operation) -> frozenset[str]:
    config = msgspec.inspect.type_info(operation.request)
    assert isinstance(config, msgspec.inspect.StructType)
    return frozenset(field.encode_name for field in config.fields if field.required)


def _schema(hint: Any, *, null: bool = False) -> Json:
    (schema,), _ = _components([hint])
    return {"anyOf": [schema, {"type": "null"}]} if null else schema


def _components(types: Iterable[Any]) -> tuple[tuple[Json, ...], dict[str, Json]]:
    return msgspec.json.schema_components(types, schema_hook=_hook, ref_template=REF)


def _hook(hint: type) -> Json:
    """What msgspec has no schema for. It refuses a type, by its name, that there is none for here either."""
    if hint is object:
        return {"description": "Anything."}
    raise NotImplementedError(hint)


def _responses(operation: Operation) -> Json:
    answers: list[Json] = [{"$ref": REF.format(name=answer.__name__)} for answer in operation.answers]
    schema = answers[0] if len(answers) == 1 else {"anyOf": answers}
    content: Json = {"application/json": {"schema": schema}} if answers else {}
    content = _BYTES if operation.gives_bytes else content
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string", "description": _STREAM}}
    found: Json = {}
    for status in operation.statuses:
        found[str(status)] = {"description": "Done.", "headers": _headers(operation)}
        if content:
            found[str(status)]["content"] = content
    if operation.streams:
        found["200"] = found.get("200") or {"description": "Done.", "content": content}
    by_status: dict[int, list[str]] = {}
    for code in operation.all_errors:
        by_status.setdefault(STATUS[code][0], []).append(code)
    for status, codes in sorted(by_status.items()):
        found[str(status)] = {
            "description": ", ".join(codes),
            "content": {CONTENT_TYPE: {"schema": {"$ref": REF.format(name="Document")}}},
        }
    return found


_STREAM = (
    "Server-sent events. Frames with an `id` are events of the log, `id` being their sequence; other frames are "
    + ", ".join(f"`{kind}`" for kind in (*CONTROL, DELTA))
    + "."
)


def _headers(operation: Operation) -> Json:
    found: Json = {
        "X-Request-Id": {"required": True, "schema": {"type": "string"}},
        "ETag": {"required": False, "schema": {"type": "string"}, "description": "The sequence that this reflects."},
    }
    if operation.writes:
        found["Idempotency-Replayed"] = {"required": False, "schema": {"type": "string", "const": "true"}}
    return found


def _page(name: str, summary: str, answer: type[msgspec.Struct], *more: int) -> Json:
    content = {"application/json": {"schema": {"$ref": REF.format(name=answer.__name__)}}}
    responses = {str(status): {"description": summary, "content": content} for status in (200, *more)}
    return {
        "get": {"operationId": name, "summary": summary, "tags": ["health"], "security": [], "responses": responses}
    }


# --- AsyncAPI -----------------------------------------------------------------------------------------------------


def asyncapi() -> bytes:
    """What travels over NATS: requests, the feed, deltas, the inbox."""
    channels: dict[str, Json] = {}
    operations: dict[str, Json] = {}
    messages: dict[str, Json] = {"Problem": {"payload": {"$ref": REF.format(name="Document")}}}
    types: list[type] = [Document]
    for operation in OPERATIONS:
        name = operation.name
        types += [operation.request, *operation.answers]
        answers = [{"$ref": REF.format(name=answer.__name__)} for answer in operation.answers]
        messages[f"{name}_request"] = {"payload": {"$ref": REF.format(name=operation.request.__name__)}}
        payload: Json = answers[0] if len(answers) == 1 else {"anyOf": answers} if answers else {"maxLength": 0}
        messages[f"{name}_answer"] = {"payload": payload}
        channels[name] = _channel(
            subjects.api("{account}", name), ("account",), f"{name}_request", f"{name}_answer", "Problem"
        )
        operations[name] = {
            "action": "receive",
            "title": operation.summary,
            "description": (operation.call.__doc__ or "").strip(),
            "channel": {"$ref": f"#/channels/{name}"},
            "messages": [{"$ref": f"#/channels/{name}/messages/{name}_request"}],
            "reply": {
                "address": {"location": "$message.header#/reply"},
                "messages": [{"$ref": f"#/channels/{name}/messages/{kind}"} for kind in (f"{name}_answer", "Problem")],
            },
        }
    messages |= _FLOWS
    both = ("account", "session")
    channels["feed"] = _channel("ts.feed.{account}.{session}", both, "Event")
    channels["delta"] = _channel("ts.delta.{account}.{session}.{run}", (*both, "run"), "Delta")
    channels["inbox"] = _channel("ts.inbox.{account}.{session}", both, "Letter")
    for name, action in (("feed", "send"), ("delta", "send"), ("inbox", "receive")):
        operations[name] = {"action": action, "channel": {"$ref": f"#/channels/{name}"}}
    _, schemas = _components(types)
    return msgspec.json.encode(
        {
            "asyncapi": "3.0.0",
            "info": {"title": TITLE, "version": version("turnstream"), "description": ABOUT},
            "defaultContentType": "application/json",
            "channels": channels,
            "operations": operations,
            "components": {"messages": messages, "schemas": schemas},
        }
    )


def _channel(address: str, parameters: tuple[str, ...], *messages: str) -> Json:
    return {
        "address": address,
        "parameters": {name: {} for name in parameters},
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
    }


_TEXT: Json = {"type": "string"}
_FLOWS: dict[str, Json] = {
    "Event": {
        "summary": "A stored event, a CloudEvents 1.0 record. Its number is in the header Nats-Sequence.",
        "contentType": "application/cloudevents+json",
        "headers": {"type": "object", "properties": {"Nats-Sequence": _TEXT, "Nats-Last-Sequence": _TEXT}},
        "payload": {
            "type": "object",
            "required": ["specversion", "id", "type", "source", "time", "data"],
            "properties": {"type": {"type": "string", "examples": list(TYPES)}, "data": {"type": "object"}},
        },
    },
    "Delta": {
        "summary": "A piece of what a model is saying. Pieces may be lost; the index shows it. The path is that of the "
        "node of a graph whose model it is.",
        "contentType": "text/plain",
        "headers": {"type": "object", "properties": dict.fromkeys(("attempt", "step", "index", "kind", "path"), _TEXT)},
        "payload": _TEXT,
    },
    "Letter": {
        "summary": "A message for a session: plain text, or the body of post_message.",
        "headers": {
            "type": "object",
            "properties": {
                subjects.IDEMPOTENCY_KEY: {"type": "string", "description": "A repeat with it has no second effect."},
                subjects.MESSAGE_ID: {
                    "type": "string",
                    "description": "The same, where there is no Idempotency-Key. The broker keeps only the first of "
                    "two messages with one id within a tenth of a second: choose ids that nobody else has.",
                },
                subjects.ACTOR: {"type": "string", "description": "Who says it."},
                TRACEPARENT: _TEXT,
            },
        },
        "payload": {"anyOf": [_TEXT, {"type": "object"}]},
    },
}
