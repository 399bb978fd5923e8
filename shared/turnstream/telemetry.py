"""Logs, metrics, trace context: how the services say what they do.

Logs: `log.bind(account=…, session=…, run=…, seq=…)` on whatever is worth an entry; hot paths count, they do not log.
Metrics: one `Metrics` a process, shared by all services that run in it; no label ever names a session.
Traces: the W3C `traceparent` of a request travels in the event and to the run that the event starts. Spans are made
with OpenTelemetry's API only: nothing happens unless the program that embeds us has set up an SDK.
"""

import logging
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO, cast

import structlog
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, TraceFlags
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

# --- logs ---------------------------------------------------------------------------------------------------------


def get_logger(**bound: object) -> FilteringBoundLogger:
    return cast("FilteringBoundLogger", structlog.get_logger(**bound))


log = get_logger()

_QUIET = (
    *("httpx", "httpx2", "httpcore", "faststream", "uvicorn.access", "uvicorn.error"),
    *("asyncio", "aiosqlite", "nats"),
)
"""Libraries of which only warnings are worth an entry."""


def configure(*, level: str = "info", format: str = "json", stream: TextIO | None = None) -> None:
    """Sends our logs and those of every library to `stream` (default: standard error), as JSON lines or for people."""
    out = stream or sys.stderr
    threshold = cast("int", getattr(logging, level.upper()))
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _exception_name,
    ]
    ending: list[Processor]
    if format == "json":
        ending = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False)]
    else:
        ending = [
            structlog.dev.ConsoleRenderer(
                colors=out.isatty(),
                pad_event_to=0,
                exception_formatter=structlog.dev.plain_traceback,  # others would show what variables hold: keys
            )
        ]
    structlog.configure(
        processors=[*shared, *ending],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(threshold)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING))


def _exception_name(_: WrappedLogger, __: str, entry: EventDict) -> EventDict:
    """`error=exception` is written as its type and message; a traceback is asked for with `exc_info=True`."""
    error = entry.get("error")
    if isinstance(error, BaseException):
        entry["error"] = f"{type(error).__name__}: {error}"
    return entry


# --- metrics ------------------------------------------------------------------------------------------------------

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class Metrics:
    """What is counted. Labels have a closed set of values: an outcome, an operation; never a session."""

    def __init__(self, registry: CollectorRegistry | None = None, *, process: bool = False) -> None:
        """`process`: also what is known of the process itself (CPU, memory, open files, garbage collection)."""
        self.registry = registry if registry is not None else CollectorRegistry()
        r = self.registry
        self.appends = Counter("turnstream_appends", "Events stored.", registry=r)
        self.conflicts = Counter(
            "turnstream_append_conflicts", "Appends refused because the session had moved.", registry=r
        )
        self.append_seconds = Histogram(
            "turnstream_append_seconds", "Time from deciding to stored.", buckets=_SECONDS, registry=r
        )
        self.turns = Counter("turnstream_turns", "Runs ended by this runner, by outcome.", ["outcome"], registry=r)
        self.turn_seconds = Histogram(
            "turnstream_turn_seconds", "Time from a run's first start to its end.", buckets=_SECONDS, registry=r
        )
        self.queue_seconds = Histogram(
            "turnstream_queue_seconds", "Age of a run when it was started.", buckets=_SECONDS, registry=r
        )
        self.runs_active = Gauge("turnstream_runs_active", "Runs that this runner carries out now.", registry=r)
        self.recoveries = Counter("turnstream_recoveries", "Runs taken over from a runner that was gone.", registry=r)
        self.fenced = Counter("turnstream_fenced", "Attempts given up to another runner.", registry=r)
        self.stuck = Gauge("turnstream_sessions_stuck", "Sessions that this runner could not drive.", registry=r)
        self.consumer_lag = Gauge(
            "turnstream_consumer_lag", "Messages a consumer has not taken yet.", ["consumer"], registry=r
        )
        self.projection_lag = Gauge("turnstream_projection_lag_events", "Events the views do not show yet.", registry=r)
        self.projection_seconds = Gauge(
            "turnstream_projection_lag_seconds", "Age of the newest event when its batch was committed.", registry=r
        )
        self.projected = Counter("turnstream_projected", "Events taken into the views.", registry=r)
        self.swept = Counter("turnstream_swept", "Runs that the sweep had to wake.", registry=r)
        self.listeners = Gauge("turnstream_feed_listeners", "Open streams of server-sent events.", registry=r)
        self.overflows = Counter("turnstream_feed_overflows", "Listeners closed for being too slow.", registry=r)
        self.requests = Counter("turnstream_requests", "Answered requests.", ["operation", "status"], registry=r)
        self.inbox_refused = Counter("turnstream_inbox_refused", "Messages the inbox could not take.", registry=r)
        self.reconnects = Counter("turnstream_broker_reconnects", "Connections to the broker made again.", registry=r)
        self.denied = Counter(
            "turnstream_broker_permission_violations", "Operations that the broker did not permit.", registry=r
        )

        if process:
            for collector in (ProcessCollector, PlatformCollector, GCCollector):
                collector(registry=r)

    def appended(self, seconds: float) -> None:
        """An event was stored, so many seconds after it was asked for."""
        self.appends.inc()
        self.append_seconds.observe(seconds)

    def expose(self) -> bytes:
        """The text that a `/metrics` page shows."""
        return generate_latest(self.registry)


metrics = Metrics(process=True)
"""The process's own: Prometheus scrapes processes."""

# --- trace context ------------------------------------------------------------------------------------------------

TRACEPARENT = "traceparent"
"""The header, over HTTP and NATS alike (https://www.w3.org/TR/trace-context/#traceparent-header)."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_tracer = trace.get_tracer("turnstream")


def parse_traceparent(header: str | None) -> str | None:
    """The trace context of a request as version 00, or None: a malformed header is ignored, never refused."""
    match = _TRACEPARENT.fullmatch(header.strip()) if header else None
    if match is None:
        return None
    version, trace_id, parent, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(parent, 16):
        return None
    return f"00-{trace_id}-{parent}-{flags}"


@contextmanager
def model_span(model: str, session: str, run: str, traceparent: str | None) -> Generator[Span]:
    """One model call, by OpenTelemetry's conventions for generative AI: the session is the conversation. No span where
    no SDK would record it and there is no context to hand on."""
    if traceparent is None and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        yield trace.INVALID_SPAN
        return
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": model,
        "gen_ai.conversation.id": session,
        "turnstream.run": run,
    }
    context = trace.set_span_in_context(_remote(traceparent)) if traceparent else None
    with _tracer.start_as_current_span(f"chat {model}", context=context, attributes=attributes) as current:
        yield current


def _remote(traceparent: str) -> Span:
    _, trace_id, span_id, flags = traceparent.split("-")
    return NonRecordingSpan(
        SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    )
