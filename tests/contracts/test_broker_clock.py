import time
from datetime import UTC, datetime
from functools import partial

import pytest
from tests.support.nats import connect

from turnstream.broker.clock import BrokerClock, parse_time
from turnstream.broker.connection import Broker
from turnstream.broker.server import NatsServer

HOURS = 3_600_000


class Monotonic:
    """A host's monotonic clock, in seconds from nowhere."""

    def __init__(self) -> None:
        self.seconds = 4711.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def monotonic() -> Monotonic:
    return Monotonic()


@pytest.fixture
def clock(monotonic: Monotonic) -> BrokerClock:
    return BrokerClock(monotonic)


def test_does_not_guess_before_the_first_observation(clock: BrokerClock):
    assert not clock.seeded
    with pytest.raises(RuntimeError, match="not known"):
        clock.now()


def test_goes_on_with_the_monotonic_clock(clock: BrokerClock, monotonic: Monotonic):
    clock.observe(1_000_000)
    monotonic.seconds += 2.5
    assert clock.now() == 1_002_500


def test_an_old_message_does_not_set_it_back(clock: BrokerClock, monotonic: Monotonic):
    clock.observe(1_000_000)
    monotonic.seconds += 60
    clock.observe(1_030_000)  # newer than the newest seen, yet stored half a minute ago
    assert clock.now() == 1_060_000


def test_a_message_from_ahead_sets_it_forward(clock: BrokerClock):
    clock.observe(1_000_000)
    clock.observe(1_000_700)
    assert clock.now() == 1_000_700


def test_a_prompt_answer_corrects_a_fast_host_without_running_backwards(clock: BrokerClock, monotonic: Monotonic):
    clock.observe(1_000_000)
    monotonic.seconds += 100
    assert clock.now() == 1_100_000
    clock.anchor(1_099_000, asked=monotonic())
    assert clock.now() == 1_100_000, "it waits for the truth to catch up"
    monotonic.seconds += 3
    assert clock.now() == 1_102_000


def test_a_slow_answer_is_only_a_lower_bound(clock: BrokerClock, monotonic: Monotonic):
    clock.observe(1_000_000)
    asked = monotonic()
    monotonic.seconds += 4
    clock.anchor(1_000_500, asked)
    assert clock.now() == 1_004_000


def test_is_never_earlier_than_a_time_stamp_that_was_seen(clock: BrokerClock, monotonic: Monotonic):
    clock.observe(1_000_000)
    clock.anchor(999_000, asked=monotonic())
    assert clock.now() == 1_000_000


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("2026-11-30T16:45:21.463323158Z", 463_000),
        ("2026-11-30T16:45:21.4Z", 400_000),
        ("2026-11-30T16:45:21Z", 0),
        ("2026-11-30T18:45:21.46+02:00", 460_000),
    ],
)
def test_reads_time_stamps_as_the_server_prints_them(text: str, micros: int):
    stamp = datetime(2026, 11, 30, 16, 45, 21, micros, UTC)
    assert parse_time(text) == round(stamp.timestamp() * 1000)


async def test_s60_the_hosts_clock_plays_no_part(nats: Broker, nats_url: str, monkeypatch: pytest.MonkeyPatch):
    true = nats.clock.now()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    for skew in (-5 * HOURS, 5 * HOURS):
        host = partial(lambda skew: time.monotonic() + skew / 1000, skew)
        broker = await Broker.connect(nats_url, name="skewed", monotonic=host)
        assert abs(broker.clock.now() - true) < 5_000
        await broker.close()


async def test_is_seeded_on_an_empty_server_and_by_every_answer(own_nats: NatsServer):
    broker = await connect(own_nats.url)
    assert broker.clock.seeded
    before = broker.clock.now()
    await broker.api("STREAM.CREATE.A", {"name": "A", "subjects": ["a"]})
    assert before <= broker.clock.now() < before + 5_000
    await broker.close()
