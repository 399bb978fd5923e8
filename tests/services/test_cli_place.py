"""One process at a time on a data directory; ports that are taken."""

import fcntl
import os
import socket
from pathlib import Path

import pytest

from turnstream_cli.client import Connect, connected
from turnstream_cli.exits import CommandError, Exit
from turnstream_cli.place import Addresses, announced, held, left_behind, read_addresses, taken
from turnstream_cli.stack import free_port

HERE = Addresses(os.getpid(), "http://127.0.0.1:1", "nats://127.0.0.1:2")


def test_a_second_process_is_refused_and_told_where_the_first_is(tmp_path: Path) -> None:
    with held(tmp_path), announced(tmp_path, HERE):
        assert read_addresses(tmp_path) == HERE
        where = rf"in use by process {os.getpid()} at http://127\.0\.0\.1:1"
        with pytest.raises(CommandError, match=where) as refused, held(tmp_path):
            pass
        assert refused.value.code is Exit.USAGE
    assert read_addresses(tmp_path) is None
    with held(tmp_path):
        pass


def test_addresses_of_a_process_that_was_killed_do_not_count(tmp_path: Path) -> None:
    with held(tmp_path), announced(tmp_path, HERE):
        left_over = (tmp_path / "dev.json").read_bytes()
    (tmp_path / "dev.json").write_bytes(left_over)
    assert read_addresses(tmp_path) is None
    assert left_behind(tmp_path) == HERE
    with held(tmp_path):  # the next one, which does not listen yet
        assert read_addresses(tmp_path) is None


async def test_a_command_says_that_the_turnstream_here_is_starting_or_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNSTREAM_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("TURNSTREAM_HTTP_PORT", "1")
    with held(tmp_path):
        with pytest.raises(CommandError, match="is starting or stopping: it has no address yet") as starting:
            async with connected(Connect()):
                pass
        async with connected(Connect(url="http://127.0.0.1:1")) as client:  # another is none of its business
            assert client.url == "http://127.0.0.1:1"
        with announced(tmp_path, HERE):
            left_over = (tmp_path / "dev.json").read_bytes()
    (tmp_path / "dev.json").write_bytes(left_over)
    async with connected(Connect()) as client:
        with pytest.raises(CommandError, match=rf"\(process {HERE.pid} at {HERE.http}\) has ended") as gone:
            await client.get("/v1/sessions")
    assert starting.value.code is gone.value.code is Exit.UNREACHABLE


def test_who_only_looks_is_not_taken_for_who_holds_it(tmp_path: Path) -> None:
    with held(tmp_path):
        assert taken(tmp_path)
    with (tmp_path / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not taken(tmp_path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match="file"), held(tmp_path / "file"):
        pass


def test_a_port_in_use_is_named_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            CommandError, match=f"port {port} on 127.0.0.1, for the API, is in use; try --port"
        ) as refused:
            free_port("127.0.0.1", port, what="the API", how="try --port")
    assert refused.value.code is Exit.USAGE
    assert free_port("127.0.0.1", port, what="the API", how="") == port
    assert free_port("127.0.0.1", 0, what="the API", how="") > 0
