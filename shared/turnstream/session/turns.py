"""The turns of a session, each where its events begin and how many bytes they have: immutable, cheap to add to, small.

They are kept in blocks of `BLOCK`, the older ones packed into about eight bytes a turn: ten thousand turns are a few
hundred objects, and to hold, to store and to load them costs next to nothing. Who looks for a turn unpacks it.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Final

import msgspec

BLOCK: Final = 64


class Turn(msgspec.Struct, frozen=True, gc=False):
    """A run that was started and has ended: its number, the sequence of its first event (nothing that belongs to it is
    older), the bytes of all of them, the sequence of its last."""

    run: int
    seq: int
    size: int
    end: int


class Turns(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """In the order of their ends."""

    packed: tuple[bytes, ...] = ()
    last: tuple[Turn, ...] = ()

    def add(self, turn: Turn) -> "Turns":
        if len(self.last) < BLOCK:
            return Turns(self.packed, (*self.last, turn))
        return Turns((*self.packed, _pack(self.last)), (turn,))

    def __iter__(self) -> Iterator[Turn]:
        return chain(chain.from_iterable(map(_unpack, self.packed)), self.last)

    def __reversed__(self) -> Iterator[Turn]:
        """The newest first; nothing that is older than what is asked for is unpacked."""
        yield from reversed(self.last)
        for block in reversed(self.packed):
            yield from reversed(_unpack(block))


def _pack(turns: tuple[Turn, ...]) -> bytes:
    """By how much each is further than the one before it: numbers that are mostly small."""
    numbers: list[int] = []
    run = seq = 0
    for turn in turns:
        numbers += (turn.run - run, turn.seq - seq, turn.size, turn.end - turn.seq)
        run, seq = turn.run, turn.seq
    return msgspec.msgpack.encode(numbers)


def _unpack(block: bytes) -> list[Turn]:
    numbers = iter(_numbers.decode(block))
    turns: list[Turn] = []
    run = seq = 0
    for one, two, size, length in zip(numbers, numbers, numbers, numbers, strict=True):
        run, seq = run + one, seq + two
        turns.append(Turn(run, seq, size, seq + length))
    return turns


_numbers = msgspec.msgpack.Decoder(list[int])
