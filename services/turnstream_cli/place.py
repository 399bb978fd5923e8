"""The data directory of one machine's Turnstream: who uses it, and where that one listens.

One process at a time: an exclusive lock on `<data_dir>/lock` that the operating system gives up when the process ends,
however it ends. Its addresses lie beside it in `dev.json`, so that other commands find it.
"""

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from turnstream_cli.exits import CommandError, Exit


class Addresses(msgspec.Struct, frozen=True):
    """Where the process on a data directory listens."""

    pid: int
    http: str
    nats: str


@contextmanager
def held(data_dir: Path) -> Generator[None]:
    """Holds the data directory. Raises `CommandError` if another process does."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise CommandError(f"the data directory {data_dir} cannot be used: {error.strerror}", Exit.USAGE) from None
    try:
        if not any(_lock(descriptor) or time.sleep(0.05) for _ in range(10)):  # somebody may only be looking
            raise CommandError(_in_use(data_dir), Exit.USAGE)
        (data_dir / "dev.json").unlink(missing_ok=True)  # of one that was killed: nobody takes it for ours
        yield
    finally:
        os.close(descriptor)


def read_addresses(data_dir: Path) -> Addresses | None:
    """The addresses of the process that holds the data directory; None if none does."""
    addresses = left_behind(data_dir)
    return addresses if addresses and taken(data_dir) else None


def left_behind(data_dir: Path) -> Addresses | None:
    """The addresses that lie there, whether or not the process still lives."""
    try:
        return msgspec.json.decode((data_dir / "dev.json").read_bytes(), type=Addresses)
    except (OSError, msgspec.DecodeError):
        return None


def taken(data_dir: Path) -> bool:
    """Whether a process holds the data directory."""
    try:
        descriptor = os.open(data_dir / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _lock(descriptor, fcntl.LOCK_SH)  # others who only look do not count
    finally:
        os.close(descriptor)


@contextmanager
def announced(data_dir: Path, addresses: Addresses) -> Generator[None]:
    """Says where we listen, as long as we do."""
    file = data_dir / "dev.json"
    fresh = file.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(addresses))
    fresh.replace(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use(data_dir: Path) -> str:
    addresses = read_addresses(data_dir)
    who = f"process {addresses.pid} at {addresses.http}" if addresses else "another process"
    return f"the data directory {data_dir} is in use by {who}; stop it, or choose another with TURNSTREAM_DATA_DIR"
