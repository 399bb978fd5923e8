"""What OpenAI's Responses and Anthropic's Messages refuse in a request, as their references say. Every request that a
peer is sent is looked at (`tests.support.strict`)."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_CALL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def responses(body: Mapping[str, Any]) -> Iterator[str]:
    """Calls without results, results without calls, reasoning without what followed it, items that are looked up where
    nothing is stored, content that is none."""
    items = body["input"]
    waiting: list[str] = []
    seen: set[str] = set()
    for place, item in enumerate(items):
        where = f"input {place}"
        kind = item.get("type", "message")
        match kind:
            case "message":
                yield from _message(where, item)
            case "reasoning":
                if not item.get("encrypted_content") and not item.get("content"):
                    yield f"{where}: reasoning that would have to be looked up"
                if place + 1 == len(items) or items[place + 1].get("role") == "user":
                    yield f"{where}: reasoning that nothing follows"
            case "function_call":
                if item["call_id"] in seen or not _CALL_ID.fullmatch(item["call_id"]):
                    yield f"{where}: the id {item['call_id']!r}"
                seen.add(item["call_id"])
                waiting.append(item["call_id"])
            case "function_call_output":
                if item["call_id"] not in waiting:
                    yield f"{where}: a result of {item['call_id']!r}, which nobody called"
                else:
                    waiting.remove(item["call_id"])
            case _:
                yield f"{where}: an item of type {kind!r}"
    if waiting:
        yield f"at the end, {', '.join(waiting)} has no result"
    if body.get("store") is not False:
        yield "the answer would be stored"
    if missing := {"seed", "stop", "presence_penalty", "frequency_penalty"} & body.keys():
        yield f"Unknown parameter: {', '.join(missing)}"


def _message(where: str, item: Mapping[str, Any]) -> Iterator[str]:
    content = item["content"]
    if not content:
        yield f"{where}: an empty message"
    for part in () if isinstance(content, str) else content:
        wanted = {"output_text", "refusal"} if item["role"] == "assistant" else {"input_text", "input_image"}
        if part["type"] not in wanted:
            yield f"{where}: a part of type {part['type']!r} from {item['role']}"


def messages(body: Mapping[str, Any]) -> Iterator[str]:
    """Roles that do not alternate, blank texts, tool results that are not first, not all or not there; thinking that a
    turn does not begin with, or that is not less than what may be said."""
    sent = body["messages"]
    if not sent or sent[0]["role"] != "user" or sent[-1]["role"] != "user":
        yield "the conversation does not go from a user to a user"
    waiting: list[str] = []
    seen: set[str] = set()
    for place, message in enumerate(sent):
        where = f"messages.{place}"
        if message["role"] == sent[place - 1]["role"] and place:
            yield f"{where}: roles must alternate"
        results = [block["tool_use_id"] for block in message["content"] if block["type"] == "tool_result"]
        if sorted(results) != sorted(waiting):
            yield f"{where}: tool_use ids were found without tool_result blocks immediately after"
        if any(block["type"] != "tool_result" for block in message["content"][: len(results)]):
            yield f"{where}: tool_result blocks come first"
        waiting = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
        if not message["content"]:
            yield f"{where}: messages must have non-empty content"
        for block in message["content"]:
            yield from _block(f"{where}: ", block)
            if block["type"] == "tool_use":
                if block["id"] in seen or not _CALL_ID.fullmatch(block["id"]):
                    yield f"{where}: tool_use ids must be unique and match the pattern: {block['id']!r}"
                seen.add(block["id"])
    yield from _thinking(body)
    if json.dumps(body).count('"cache_control"') > 4:
        yield "A maximum of 4 blocks with cache_control may be provided"
    if unknown := {"seed", "stop", "presence_penalty", "frequency_penalty", "reasoning_effort"} & body.keys():
        yield f"{', '.join(unknown)}: Extra inputs are not permitted"
    if not isinstance(body.get("max_tokens"), int):
        yield "max_tokens: Field required"


def _block(where: str, block: Mapping[str, Any]) -> Iterator[str]:
    match block["type"]:
        case "text":
            if not block["text"].strip():
                yield f"{where}text content blocks must contain non-whitespace text"
        case "tool_result":
            content = block.get("content") or ()
            for part in () if isinstance(content, str) else content:
                yield from _block(where, part)
        case "tool_use":
            if not isinstance(block["input"], dict):
                yield f"{where}tool_use.input: Input should be a valid dictionary"
        case "thinking":
            if not block["signature"]:
                yield f"{where}thinking.signature: Field required"
        case "redacted_thinking" | "image":
            pass
        case kind:
            yield f"{where}a block of type {kind!r}"


def _thinking(body: Mapping[str, Any]) -> Iterator[str]:
    thinking = body.get("thinking") or {}
    if thinking.get("type") != "enabled":
        return
    if not 1024 <= thinking["budget_tokens"] < body["max_tokens"]:
        yield "`max_tokens` must be greater than `thinking.budget_tokens`, which is 1024 at least"
    if body.get("temperature", 1) != 1:
        yield "`temperature` may only be set to 1 when thinking is enabled"
    turn: Mapping[str, Any] | None = None
    for message in body["messages"]:
        if message["role"] == "assistant":
            turn = turn or message
        elif not any(block["type"] == "tool_result" for block in message["content"]):
            turn = None
    if turn and turn["content"][0]["type"] not in ("thinking", "redacted_thinking"):
        yield "a final `assistant` message must start with a thinking block"
