"""Removes messages for good: their bytes in the store's files are overwritten. Deleting, purging, rolling up and
acknowledging do not do that, they only forget where the bytes are, and what is forgotten can be overwritten no more.

The server rewrites one message at a time and syncs it, about a millisecond and one more for each megabyte that the
message's block of the file holds (8 MiB at most; measured 2026-11, nats-server 2.15), and nobody writes to that stream
meanwhile. So there is only one at a time in flight, and after each there is a pause as long as it took.
"""

import asyncio
from typing import Final

from turnstream.broker.answers import Stored
from turnstream.broker.connection import Broker
from turnstream.broker.declare import STREAM_NOT_FOUND
from turnstream.broker.errors import BrokerError

PAUSE: Final = 0.02
"""Seconds that a pause takes at most."""


async def erase(broker: Broker, stream: str, subject: str, *, before: int | None = None) -> None:
    """Erases the messages of a subject, which may hold wildcards, the oldest first; `before`: only those with a smaller
    sequence. Whatever it has come to when it fails can be gone on with. Raises `BrokerFault`."""
    clock = asyncio.get_running_loop().time
    after = 0
    while found := await following(broker, stream, subject, after):
        if before is not None and found.seq >= before:
            return
        began = clock()
        await erase_message(broker, stream, found.seq)
        await asyncio.sleep(min(clock() - began, PAUSE))
        after = found.seq


async def erase_message(broker: Broker, stream: str, seq: int) -> None:
    """Erases one message; one that is not there is no error. Raises `BrokerFault`."""
    try:
        await broker.api(f"STREAM.MSG.DELETE.{stream}", {"seq": seq})
    except BrokerError:
        if await broker.message(stream, {"seq": seq}) is not None:
            raise


async def forget(broker: Broker, stream: str, subject: str, *, before: int | None = None) -> None:
    """Takes the messages of a subject, which may hold wildcards, out of a stream in memory, or whose messages say
    nothing; `before`: only those with a smaller sequence. Raises `BrokerFault`."""
    which: dict[str, object] = {"filter": subject}
    if before is not None:
        which["seq"] = before
    try:
        await broker.api(f"STREAM.PURGE.{stream}", which)
    except BrokerError as error:
        if error.err_code != STREAM_NOT_FOUND:
            raise


async def following(broker: Broker, stream: str, subject: str, after: int) -> Stored | None:
    """The first message of a subject, which may hold wildcards, behind a sequence, by the word of the stream's leader;
    None also where there is no such stream. Raises `BrokerFault`."""
    try:
        return await broker.message(stream, {"seq": after + 1, "next_by_subj": subject})
    except BrokerError as error:
        if error.err_code == STREAM_NOT_FOUND:
            return None
        raise
