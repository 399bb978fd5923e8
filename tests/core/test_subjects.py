"""Subjects are made and parsed in one place, and every one belongs to exactly one stream."""

import pytest

from turnstream import subjects
from turnstream.ids import SessionKey

KEYS = [SessionKey("default", "s1"), SessionKey("a-b", "A_b-9"), SessionKey("acc", "p--1-2")]


def matches(pattern: str, subject: str) -> bool:
    words, tokens = pattern.split("."), subject.split(".")
    if words[-1] == ">":
        return len(tokens) >= len(words) and matches(".".join(words[:-1]), ".".join(tokens[: len(words) - 1]))
    return len(words) == len(tokens) and all(word in ("*", token) for word, token in zip(words, tokens, strict=True))


def streams_of(subject: str) -> list[str]:
    return [stream.name for stream in subjects.STREAMS if any(matches(each, subject) for each in stream.subjects)]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_what_is_made_can_be_parsed(key: SessionKey) -> None:
    assert subjects.parse_session(subjects.session(key)) == key
    assert subjects.parse_work(subjects.work("gpu", key)) == ("gpu", key)
    assert subjects.parse_inbox(subjects.inbox(key)) == (key.account, key.session)
    assert subjects.parse_api(subjects.api(key.account, "post_message")) == (key.account, "post_message")


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_every_stored_subject_lies_in_one_stream(key: SessionKey) -> None:
    assert streams_of(subjects.session(key)) == [subjects.SESSIONS]
    assert streams_of(subjects.archive(key, 3)) == [subjects.SESSIONS]
    assert streams_of(subjects.work("default", key)) == [subjects.WORK]
    assert streams_of(subjects.timer(key, 7)) == [subjects.WORK]
    assert streams_of(subjects.inbox(key)) == [subjects.INBOX]
    assert streams_of(subjects.refused(key.account, key.session)) == [subjects.REFUSED]
    assert streams_of(subjects.delta(key, 1)) == [subjects.DELTAS]
    assert streams_of(subjects.feed(key)) == [], "a feed is republished, never stored"
    assert streams_of(subjects.api(key.account, "open_session")) == []


@pytest.mark.parametrize("key", KEYS)
def test_the_record_of_a_run_is_told_from_a_session(key: SessionKey) -> None:
    assert subjects.is_archive(subjects.archive(key, 3)) and not subjects.is_archive(subjects.session(key))
    assert subjects.parse_archive(subjects.archive(key, 3)) == (key, 3)
    assert matches(subjects.archive(key, "*"), subjects.archive(key, 3))


def test_a_wake_up_is_told_from_a_timer() -> None:
    assert subjects.is_work(subjects.work("default", KEYS[0]))
    assert not subjects.is_work(subjects.timer(KEYS[0], 7))


def fnv_1a(text: str) -> int:
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value


def test_partitions_are_fnv_1a_and_never_change() -> None:
    """A session that moved to another partition would be lost. The first three are published vectors of the hash."""
    assert [fnv_1a(text) for text in ("", "a", "foobar")] == [0x811C9DC5, 0xE40C292C, 0xBF9CF968]
    for key in KEYS:
        assert subjects.partition(key.account, key.session) == fnv_1a(f"{key.account}.{key.session}") % 64
    assert [subjects.partition(key.account, key.session) for key in KEYS] == [56, 29, 42]


def test_every_partition_is_used() -> None:
    assert {subjects.partition("default", f"s{n}") for n in range(2000)} == set(range(64))


def test_a_runner_has_one_consumer_a_queue() -> None:
    consumer = subjects.runner_consumer("gpu", 15)
    assert (consumer.name, consumer.filters, consumer.ack_wait) == ("runner-gpu", ("ts.work.gpu.>",), 15)
    assert matches(consumer.filters[0], subjects.work("gpu", KEYS[0]))
    assert not matches(consumer.filters[0], subjects.work("default", KEYS[0]))
