"""What identifiers look like and how one is derived from another."""

import uuid

import pytest

from turnstream.ids import (
    SessionKey,
    derive,
    digest,
    is_name,
    is_session,
    is_token,
    may_open,
    parse_run_id,
    run_id,
    uuid7,
)


@pytest.mark.parametrize("text", ["a", "default", "a-b", "0", "-", "a" * 32])
def test_names(text: str) -> None:
    assert is_name(text)


@pytest.mark.parametrize("text", ["", "A", "a_b", "a.b", "a*", "a>", "a b", "é", "a\n", "a" * 33])
def test_what_is_no_name(text: str) -> None:
    assert not is_name(text)


@pytest.mark.parametrize("text", ["", "a.b", "a*", ">", "a b", "é", "a\n", "a/b", "a" * 65])
def test_what_no_client_may_open(text: str) -> None:
    assert not is_token(text)
    assert not may_open(text)


def test_a_childs_session_is_not_for_clients_to_open() -> None:
    assert may_open("a-b_C9")
    assert not may_open("a--1-1")
    assert is_session("a--1-1")
    assert is_session("a" * 128)
    assert not is_session("a" * 129)


@pytest.mark.parametrize("session", ["s", "a--1-1", "A_b-9", "a" * 128])
@pytest.mark.parametrize("n", [1, 10, 999_999_999_999_999])
def test_a_run_id_names_its_session(session: str, n: int) -> None:
    assert parse_run_id(run_id(session, n)) == (session, n)
    assert SessionKey("acc", session).run(n) == run_id(session, n)


@pytest.mark.parametrize(
    "text", ["", "s", "s.", "s.0", "s.01", "s.-1", ".1", "s.1.1", "s.1\n", "s.1a", "s.１", "s." + "9" * 16]
)
def test_what_is_no_run_id(text: str) -> None:
    assert parse_run_id(text) is None


def test_the_same_parts_give_the_same_id() -> None:
    assert derive("a", 1) == derive("a", "1")
    assert len({derive("a", "bc"), derive("ab", "c"), derive("abc"), derive("a", "b", "c")}) == 4


@pytest.mark.parametrize("parts", [(), ("a",), ("default", "s.1", 2, "é\u2028"), ("x" * 1000,)])
def test_a_derived_id_is_a_version_5_uuid(parts: tuple[object, ...]) -> None:
    namespace = uuid.UUID("6f0f5a52-0d3e-5a7b-9c55-7475726e7374")
    assert derive(*parts) == str(uuid.uuid5(namespace, "\x1f".join(map(str, parts))))


def test_a_version_7_uuid_sorts_by_time() -> None:
    early, late = uuid7(1, b"\xff" * 10), uuid7(2, b"\x00" * 10)
    assert early < late
    for text in (early, late, uuid7(1_700_000_000_000, bytes(range(10)))):
        assert uuid.UUID(text).version == 7
        assert uuid.UUID(text).variant == uuid.RFC_4122
    assert uuid.UUID(uuid7(1_700_000_000_000, bytes(10))).int >> 80 == 1_700_000_000_000


def test_a_digest_tells_bodies_apart() -> None:
    assert digest(b"a") == digest(b"a") != digest(b"b")
    assert len(digest(b"")) == 32
