"""Logs, metrics and trace context."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from opentelemetry import trace
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from turnstream.telemetry import (
    Metrics,
    configure,
    log,
    metrics,
    model_span,
    parse_traceparent,
)

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


@pytest.mark.usefixtures("restored")
def test_json_entries_carry_what_is_bound_and_one_line_each() -> None:
    out = io.StringIO()
    configure(level="info", format="json", stream=out)

    log.bind(account="acme", session="s1", run="s1.1").warning("gone", seq=7, error=ValueError("two\nlines"))
    log.debug("not worth it")
    logging.getLogger("some.library").error("foreign %s", "entry")

    ours, foreign = (json.loads(line) for line in out.getvalue().splitlines())
    assert {name: ours[name] for name in ("account", "session", "run", "seq", "event", "level", "error")} == {
        "account": "acme",
        "session": "s1",
        "run": "s1.1",
        "seq": 7,
        "event": "gone",
        "level": "warning",
        "error": "ValueError: two\nlines",
    }
    assert (foreign["event"], foreign["level"], foreign["logger"]) == ("foreign entry", "error", "some.library")


@pytest.mark.usefixtures("restored")
def test_console_entries_are_for_people() -> None:
    out = io.StringIO()
    configure(level="debug", format="console", stream=out)
    log.debug("hello", session="s1")
    assert "hello" in out.getvalue()
    assert "session=s1" in out.getvalue()


def test_no_metric_names_a_session_or_an_account() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    names = {label for family in registry.collect() for sample in family.samples for label in sample.labels}
    for metric in vars(Metrics(CollectorRegistry())).values():
        names |= set(getattr(metric, "_labelnames", ()))
    assert names <= {"le", "outcome", "operation", "status", "consumer"}


def test_the_page_shows_our_metrics_and_the_process() -> None:
    families = {family.name for family in text_string_to_metric_families(metrics.expose().decode())}
    assert {"turnstream_appends", "turnstream_turn_seconds", "turnstream_feed_listeners"} <= families
    assert "process_cpu_seconds" in families


@pytest.mark.parametrize(
    "header",
    [TRACE, f" {TRACE} ", TRACE.replace("00-", "cc-", 1) + "-more", TRACE.replace("00-", "01-", 1)],
)
def test_a_trace_context_is_taken(header: str) -> None:
    assert parse_traceparent(header) == TRACE


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "nonsense",
        TRACE + "-more",
        TRACE.upper(),
        TRACE.replace("00-", "ff-", 1),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        TRACE[:-1],
    ],
)
def test_a_malformed_trace_context_is_ignored(header: str | None) -> None:
    assert parse_traceparent(header) is None


def test_without_an_sdk_a_span_hands_the_context_on() -> None:
    with model_span("demo", "s1", "s1.1", TRACE):
        context = trace.get_current_span().get_span_context()
    assert (f"{context.trace_id:032x}", f"{context.span_id:016x}") == (TRACE[3:35], TRACE[36:52])
    with model_span("demo", "s1", "s1.1", None) as span:
        assert not span.is_recording()
