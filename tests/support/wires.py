"""The provider's side of each wire, as the providers publish it: chat completions, OpenAI's Responses, Anthropic's
Messages. A `Spoken` answers one request of a peer (`tests.support.providers.Peer`) in the terms of the port; what it
cannot say in its provider's own terms, it does not say.

Nothing here is asked by the product; the shapes are written down from the references:
https://platform.openai.com/docs/api-reference/responses-streaming and
https://docs.anthropic.com/en/docs/build-with-claude/streaming.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tests.support.providers import Exchange

from turnstream.session.events import Usage
from turnstream_runner.models.port import Finish

NOTHING = Usage(input_tokens=7, output_tokens=3)


class Spoken(ABC):
    """The answer to one request. `hidden` is what the provider wants back, in its own form."""

    name: ClassVar[str]
    model: ClassVar[str]
    settings: ClassVar[Mapping[str, Any]]
    reasons: ClassVar[bool] = True

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._at = 0

    async def begin(self, usage: Usage = NOTHING) -> None:
        await self.exchange.begin()
        self._usage = usage

    @abstractmethod
    async def think(self, *pieces: str, hidden: str = "") -> None: ...

    @abstractmethod
    async def say(self, *pieces: str) -> None: ...

    @abstractmethod
    async def ask(self, call_id: str, name: str, *arguments: str) -> None: ...

    @abstractmethod
    async def end(self, finish: Finish = "stop") -> None: ...

    @abstractmethod
    async def broken(self) -> None:
        """An error in the middle of the stream."""

    @staticmethod
    @abstractmethod
    def error(message: str, *, kind: str = "server_error", code: str | None = None) -> str: ...

    @staticmethod
    @abstractmethod
    def texts(body: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Who says what in a request: `user`, `assistant`, and of calls and results name and id."""

    @staticmethod
    @abstractmethod
    def hidden(body: Mapping[str, Any]) -> list[str]:
        """What a request brings back, in its order."""


class Chat(Spoken):
    name = "chat"
    model = "deepseek-reasoner"
    settings = {"provider": "openai", "api": "chat"}

    async def think(self, *pieces: str, hidden: str = "") -> None:
        for piece in pieces:
            await self.exchange.say({"reasoning_content": piece})

    async def say(self, *pieces: str) -> None:
        for piece in pieces:
            await self.exchange.say({"content": piece})

    async def ask(self, call_id: str, name: str, *arguments: str) -> None:
        named = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
        await self.exchange.say({"tool_calls": [{"index": self._at, **named}]})
        for piece in arguments:
            await self.exchange.say({"tool_calls": [{"index": self._at, "function": {"arguments": piece}}]})
        self._at += 1

    async def end(self, finish: Finish = "stop") -> None:
        await self.exchange.say({}, finish)
        usage = self._usage
        counted = {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.total,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        }
        last = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": []}
        await self.exchange.chunk(f"data: {json.dumps({**last, 'usage': counted})}\n\n".encode())
        await self.exchange.end()

    async def broken(self) -> None:
        await self.exchange.chunk(f"data: {self.error('worker died')}\n\n".encode())

    @staticmethod
    def error(message: str, *, kind: str = "server_error", code: str | None = None) -> str:
        return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})

    @staticmethod
    def texts(body: Mapping[str, Any]) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for message in body["messages"]:
            if message["role"] == "tool":
                found.append(("result", message["tool_call_id"]))
                continue
            content = message.get("content")
            parts = [content] if isinstance(content, str) else [part.get("text", "<image>") for part in content or ()]
            found += [(message["role"], part) for part in parts]
            found += [("call", call["id"]) for call in message.get("tool_calls", ())]
        return found

    @staticmethod
    def hidden(body: Mapping[str, Any]) -> list[str]:
        return [message["reasoning_content"] for message in body["messages"] if "reasoning_content" in message]


class Responses(Spoken):
    name = "responses"
    model = "gpt-5"
    settings = {"provider": "openai", "api": "responses"}

    async def begin(self, usage: Usage = NOTHING) -> None:
        await super().begin(usage)
        self._output: list[dict[str, Any]] = []
        self._number = 0
        await self._event("response.created", response=self._response("in_progress"))

    async def think(self, *pieces: str, hidden: str = "") -> None:
        item = {"type": "reasoning", "id": f"rs_{self._at}", "summary": []}
        place = {"item_id": item["id"], "output_index": self._at, "summary_index": 0}
        await self._added(item)
        if pieces:
            part = {"type": "summary_text", "text": ""}
            await self._event("response.reasoning_summary_part.added", **place, part=part)
            for piece in pieces:
                await self._event("response.reasoning_summary_text.delta", **place, delta=piece)
            text = "".join(pieces)
            await self._event("response.reasoning_summary_text.done", **place, text=text)
            await self._event("response.reasoning_summary_part.done", **place, part={**part, "text": text})
            item = {**item, "summary": [{**part, "text": text}]}
        await self._done({**item, "encrypted_content": hidden} if hidden else item)

    async def say(self, *pieces: str) -> None:
        item = {"type": "message", "id": f"msg_{self._at}", "role": "assistant", "content": [], "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": self._at, "content_index": 0}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        await self._added(item)
        await self._event("response.content_part.added", **place, part=part)
        for piece in pieces:
            await self._event("response.output_text.delta", **place, delta=piece, logprobs=[])
        part = {**part, "text": "".join(pieces)}
        await self._event("response.output_text.done", **place, text=part["text"], logprobs=[])
        await self._event("response.content_part.done", **place, part=part)
        await self._done({**item, "content": [part], "status": "completed"})

    async def refuse(self, text: str) -> None:
        item = {"type": "message", "id": f"msg_{self._at}", "role": "assistant", "content": [], "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": self._at, "content_index": 0}
        await self._added(item)
        await self._event("response.content_part.added", **place, part={"type": "refusal", "refusal": ""})
        await self._event("response.refusal.delta", **place, delta=text)
        await self._event("response.refusal.done", **place, refusal=text)
        await self._event("response.content_part.done", **place, part={"type": "refusal", "refusal": text})
        await self._done({**item, "content": [{"type": "refusal", "refusal": text}], "status": "completed"})

    async def ask(self, call_id: str, name: str, *arguments: str) -> None:
        item = {"type": "function_call", "id": f"fc_{self._at}", "call_id": call_id, "name": name, "arguments": ""}
        place = {"item_id": item["id"], "output_index": self._at}
        await self._added({**item, "status": "in_progress"})
        for piece in arguments:
            await self._event("response.function_call_arguments.delta", **place, delta=piece)
        whole = "".join(arguments)
        await self._event("response.function_call_arguments.done", **place, name=name, arguments=whole)
        await self._done({**item, "arguments": whole, "status": "completed"})

    async def end(self, finish: Finish = "stop") -> None:
        reasons = {"length": "max_output_tokens", "content_filter": "content_filter"}
        if reason := reasons.get(finish):
            response = {**self._response("incomplete"), "incomplete_details": {"reason": reason}}
            await self._event("response.incomplete", response=response)
        else:
            await self._event("response.completed", response=self._response("completed"))
        await self.exchange.raw(b"0\r\n\r\n")

    async def broken(self) -> None:
        await self._event("error", code="server_error", message="worker died", param=None)

    @staticmethod
    def error(message: str, *, kind: str = "server_error", code: str | None = None) -> str:
        return Chat.error(message, kind=kind, code=code)

    @staticmethod
    def texts(body: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [found for item in body["input"] for found in Responses._texts(item)]

    @staticmethod
    def _texts(item: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        match item.get("type", "message"):
            case "message":
                content = item["content"]
                parts = [content] if isinstance(content, str) else [part.get("text", "<image>") for part in content]
                yield from [(item["role"], part) for part in parts]
            case "function_call":
                yield "call", item["call_id"]
            case "function_call_output":
                yield "result", item["call_id"]
            case _:
                pass

    @staticmethod
    def hidden(body: Mapping[str, Any]) -> list[str]:
        return [item["encrypted_content"] for item in body["input"] if item.get("type") == "reasoning"]

    def _response(self, status: str) -> dict[str, Any]:
        usage = self._usage
        counted = {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.total,
        }
        return {
            "id": "resp_1",
            "object": "response",
            "created_at": 1,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": self.model,
            "output": self._output,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "usage": None if status == "in_progress" else counted,
        }

    async def _added(self, item: Mapping[str, Any]) -> None:
        await self._event("response.output_item.added", output_index=self._at, item=item)

    async def _done(self, item: dict[str, Any]) -> None:
        await self._event("response.output_item.done", output_index=self._at, item=item)
        self._output.append(item)
        self._at += 1

    async def _event(self, kind: str, **data: Any) -> None:
        event = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        await self.exchange.chunk(f"event: {kind}\ndata: {json.dumps(event)}\n\n".encode())


class Messages(Spoken):
    name = "anthropic"
    model = "claude-haiku-4-5"
    settings = {"provider": "anthropic"}

    async def begin(self, usage: Usage = NOTHING) -> None:
        await super().begin(usage)
        counted = {
            "input_tokens": usage.input_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": 1,
        }
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": self.model, "content": []}
        message |= {"stop_reason": None, "stop_sequence": None, "usage": counted}
        await self._event("message_start", message=message)
        await self._event("ping")

    async def think(self, *pieces: str, hidden: str = "") -> None:
        await self._start({"type": "thinking", "thinking": "", "signature": ""})
        for piece in pieces:
            await self._delta({"type": "thinking_delta", "thinking": piece})
        if hidden:
            await self._delta({"type": "signature_delta", "signature": hidden})
        await self._stop()

    async def redact(self, data: str) -> None:
        await self._start({"type": "redacted_thinking", "data": data})
        await self._stop()

    async def say(self, *pieces: str) -> None:
        await self._start({"type": "text", "text": ""})
        for piece in pieces:
            await self._delta({"type": "text_delta", "text": piece})
        await self._stop()

    async def ask(self, call_id: str, name: str, *arguments: str) -> None:
        await self._start({"type": "tool_use", "id": call_id, "name": name, "input": {}})
        for piece in arguments:
            await self._delta({"type": "input_json_delta", "partial_json": piece})
        await self._stop()

    async def end(self, finish: Finish = "stop") -> None:
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
        delta = {"stop_reason": reasons[finish], "stop_sequence": None}
        usage: dict[str, Any] = {"output_tokens": self._usage.output_tokens}
        if self._usage.reasoning_tokens:
            usage["output_tokens_details"] = {"thinking_tokens": self._usage.reasoning_tokens}
        await self._event("message_delta", delta=delta, usage=usage)
        await self._event("message_stop")
        await self.exchange.raw(b"0\r\n\r\n")

    async def broken(self) -> None:
        await self.exchange.chunk(
            f"event: error\ndata: {self.error('worker died', kind='overloaded_error')}\n\n".encode()
        )

    @staticmethod
    def error(message: str, *, kind: str = "api_error", code: str | None = None) -> str:
        return json.dumps({"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"})

    @staticmethod
    def texts(body: Mapping[str, Any]) -> list[tuple[str, str]]:
        system = body.get("system") or []
        parts = [system] if isinstance(system, str) else [part["text"] for part in system]
        found = [("system", part) for part in parts]
        for message in body["messages"]:
            found += [said for block in message["content"] for said in Messages._texts(message["role"], block)]
        return found

    @staticmethod
    def _texts(role: str, block: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        match block["type"]:
            case "text":
                yield role, block["text"]
            case "image":
                yield role, "<image>"
            case "tool_use":
                yield "call", block["id"]
            case "tool_result":
                yield "result", block["tool_use_id"]
            case _:
                pass

    @staticmethod
    def hidden(body: Mapping[str, Any]) -> list[str]:
        blocks = [block for message in body["messages"] for block in message["content"]]
        return [
            block.get("signature") or block["data"]
            for block in blocks
            if block["type"] in ("thinking", "redacted_thinking")
        ]

    async def _start(self, block: Mapping[str, Any]) -> None:
        await self._event("content_block_start", index=self._at, content_block=block)

    async def _delta(self, delta: Mapping[str, Any]) -> None:
        await self._event("content_block_delta", index=self._at, delta=delta)

    async def _stop(self) -> None:
        await self._event("content_block_stop", index=self._at)
        self._at += 1

    async def _event(self, kind: str, **data: Any) -> None:
        await self.exchange.chunk(f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode())


WIRES: tuple[type[Spoken], ...] = (Chat, Responses, Messages)
