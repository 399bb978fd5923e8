"""The NATS entrance: `ts.api.<account>.<operation>`, one endpoint for each operation of the table.

The service registers with NATS' micro protocol, so `nats micro ls / info / stats` find it and tell the truth: an
endpoint is one subscription in the queue group `api`, and its statistics count what was answered, and what with an
error. The account is the subject's token, which the broker's permissions guard; the actor is `client:nats` unless the
header `ts-actor` names one. The request is one JSON object, path fields included; failures are problem documents,
with the status in `Nats-Service-Error-Code`.
"""

import asyncio
import time
from importlib.metadata import version
from typing import cast

import msgspec
from nats.aio.msg import Msg
from nats.micro.request import ERROR_CODE_HEADER, ERROR_HEADER
from nats.micro.service import Endpoint, EndpointConfig, Service, ServiceConfig

from turnstream import ids, subjects
from turnstream.broker.connection import Broker
from turnstream.telemetry import TRACEPARENT, Metrics, get_logger, parse_traceparent
from turnstream_api.api import Answer, Api, Caller, File, Stream
from turnstream_api.attachments import Got
from turnstream_api.decoding import actor, body_max, bytes_max, idempotency_key, parse_json
from turnstream_api.errors import Problem, problem_of
from turnstream_api.operation import Operation, convert
from turnstream_api.operations import OPERATIONS

log = get_logger()

NAME = "turnstream-api"
QUEUE = "api"
ACTOR = "client:nats"
AT_ONCE = 1000
"""Requests of one operation that one process works on; the next ones wait in the connection's buffer."""

_encode = msgspec.json.Encoder().encode


class Served(Endpoint):
    """An endpoint that works on many requests at once: one that waits for a run holds up no other."""

    def __init__(
        self, service: Service, config: EndpointConfig, operation: Operation, api: Api, metrics: Metrics
    ) -> None:
        super().__init__(service, config)
        self._operation = operation
        self._api = api
        self._metrics = metrics
        self._slots = asyncio.Semaphore(AT_ONCE)
        self.working: set[asyncio.Task[None]] = set()

    async def _handle_request(self, msg: Msg) -> None:
        await self._slots.acquire()
        task = asyncio.create_task(self._serve(msg))
        self.working.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.working.discard(task)
        self._slots.release()

    async def _serve(self, msg: Msg) -> None:
        began = time.perf_counter_ns()
        headers = msg.headers or {}
        request_id = headers.get("X-Request-Id", "")[:128] or self._api.request_id()
        said: dict[str, str] = {"X-Request-Id": request_id}
        status = 200
        try:
            answer = await self._answer(msg, headers)
            body = await self._body(answer)
            self._fits(len(body))
            status = answer.status
            said |= _said(answer)
        except Exception as error:
            problem = problem_of(error)
            status = problem.status
            body = _encode(problem.document(request_id))
            said |= {ERROR_CODE_HEADER: str(status), ERROR_HEADER: _one_line(problem.detail)}
            self._num_errors += 1
            self._last_error = f"{problem.code}: {problem.detail}"
            if problem.code == "internal_error":
                log.error("a request failed", operation=self._operation.name, request_id=request_id, exc_info=True)
        self._num_requests += 1
        self._processing_time += time.perf_counter_ns() - began
        self._average_processing_time = self._processing_time // self._num_requests
        self._metrics.requests.labels(self._operation.name, str(status)).inc()
        if msg.reply:
            await self._service._client.publish(msg.reply, body, headers=said)

    async def _answer(self, msg: Msg, headers: dict[str, str]) -> Answer:
        account, _ = subjects.parse_api(msg.subject)
        if not ids.is_name(account):
            raise Problem("not_found", f"{account[:64]!r} is no account")
        limit = (bytes_max if self._operation.takes_bytes else body_max)(self._api)
        if len(msg.data) > limit:
            raise Problem("too_large", f"the request has {len(msg.data)} bytes, {limit} are allowed", limit=limit)
        fields = parse_json(msg.data) if msg.data else {}
        caller = Caller(
            account=account,
            actor=actor(headers.get(subjects.ACTOR), ACTOR),
            idempotency_key=_key(headers) if self._operation.writes else None,
            traceparent=parse_traceparent(headers.get(TRACEPARENT)),
        )
        answer = await self._operation.call(self._api, caller, convert(self._operation, fields))
        assert not isinstance(answer, Stream)  # nobody asked for one
        return answer

    async def _body(self, answer: Answer) -> bytes:
        match answer.body:
            case None:
                return b""
            case File(about=about) as file:
                self._fits(about.size * 4 // 3)
                content = b"".join([piece async for piece in file.pieces()])
                got = Got(
                    name=about.name,
                    media_type=about.media_type,
                    size=about.size,
                    sha256=about.sha256,
                    content=content,
                )
                return _encode(got)
            case body:
                return _encode(body)

    def _fits(self, size: int) -> None:
        limit = self._service._client.max_payload
        if size > limit - 1024:
            message = f"the answer has {size} bytes, and a message over NATS at most {limit}: ask over HTTP"
            raise Problem("too_large", message, limit=limit)


def _key(headers: dict[str, str]) -> str | None:
    given = headers.get(subjects.IDEMPOTENCY_KEY)
    return None if given is None else idempotency_key(given.encode())


def _said(answer: Answer) -> dict[str, str]:
    headers = {"Status-Code": str(answer.status)}
    if answer.replayed:
        headers["Idempotency-Replayed"] = "true"
    return headers


def _one_line(text: str) -> str:
    return " ".join(text.split())[:512] or "failed"


class NatsService:
    """The registered service; `stop` lets what is being worked on end."""

    def __init__(self, service: Service, endpoints: list[Served]) -> None:
        self._service = service
        self._endpoints = endpoints

    async def stop(self, grace: float) -> None:
        await self._service.stop()
        working = [task for endpoint in self._endpoints for task in endpoint.working]
        if working:
            _, late = await asyncio.wait(working, timeout=grace)
            for task in late:
                task.cancel()


async def serve(broker: Broker, api: Api, metrics: Metrics) -> NatsService:
    """Registers every operation."""
    config = ServiceConfig(
        name=NAME, version=version("turnstream"), description="Sessions and runs of AI agents", queue_group=QUEUE
    )
    service = Service(broker.nc, config)
    endpoints: list[Served] = []
    for operation in OPERATIONS:
        endpoint = EndpointConfig(
            name=operation.name,
            handler=_unused,
            subject=subjects.api("*", operation.name),
            queue_group=QUEUE,
            metadata={"summary": operation.summary, "http": f"{operation.method} {operation.path}"},
        )
        served = Served(service, endpoint, operation, api, metrics)
        await served._start()
        endpoints.append(served)
    cast("list[Endpoint]", service._endpoints).extend(endpoints)
    await service.start()
    return NatsService(service, endpoints)


async def _unused(_: object) -> None:
    """`Served` takes the message itself."""
