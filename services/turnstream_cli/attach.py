"""Files that go with what is said: put into the session first, then named by the message."""

import asyncio
import mimetypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from turnstream.ids import may_open
from turnstream_cli.client import Client, Refused
from turnstream_cli.exits import CommandError, Exit

ANY = "application/octet-stream"


async def put(client: Client, session: str, files: Sequence[Path]) -> list[dict[str, Any]]:
    """Puts files into a session, which is opened if it is not there; what a message says to name them. Raises
    `CommandError`."""
    return [await _put(client, session, file) for file in files]


async def _put(client: Client, session: str, file: Path) -> dict[str, Any]:
    try:
        data = await asyncio.to_thread(file.read_bytes)
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror or error}", Exit.USAGE) from None
    path = f"/v1/sessions/{session}/attachments/{quote(file.name, safe='')}"
    try:
        put = await client.put(path, data, _media_type(file, data))
    except Refused as refused:
        if refused.status != 404 or not may_open(session):
            raise
        await client.post("/v1/sessions", {"id": session})
        put = await client.put(path, data, _media_type(file, data))
    return {"name": put["name"], "sha256": put["sha256"]}


def _media_type(file: Path, data: bytes) -> str:
    """By its name; where that says nothing, by whether it is text."""
    guessed, encoding = mimetypes.guess_type(file.name, strict=False)
    if guessed and not encoding:
        return guessed
    try:
        data.decode()
    except UnicodeDecodeError:
        return ANY
    return ANY if encoding or b"\0" in data else "text/plain"
