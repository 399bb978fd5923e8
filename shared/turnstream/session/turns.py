"""The turns of a session, each where its events begin and how many bytes they have: immutable, cheap to add to, small.

They are kept in blocks of `BLOCK`, the older ones packed into about seven bytes a turn: ten thousand turns are a few
hundred objects, and to hold, to store and to load them costs next to nothing. Who looks for a turn unpacks it.
"""

from collections.abc import Iterator
from itertools import chain
from struct import pack, unpack_from
from typing import Final

import msgspec

BLOCK: Final = 64
COLUMNS: Final = 4
WIDTHS: Final = (("b", 8), ("h", 16), ("i", 32), ("q", 64))


class Turn(msgspec.Struct, frozen=True, gc=False):
    """A run that was started and has ended: its number, the sequence of its first event (nothing that belongs to it is
    older), the bytes of all of them, the sequence of its last."""

    run: int
    seq: int
    size: int
    end: int


class Turns(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """In the order of their ends. `size`: bytes of all of them."""

    packed: tuple[bytes, ...] = ()
    last: tuple[Turn, ...] = ()
    size: int = 0

    def add(self, turn: Turn) -> "Turns":
        size = self.size + turn.size
        if len(self.last) < BLOCK:
            return Turns(self.packed, (*self.last, turn), size)
        return Turns((*self.packed, _pack(self.last)), (turn,), size)

    def __iter__(self) -> Iterator[Turn]:
        return chain(chain.from_iterable(map(_unpack, self.packed)), self.last)

    def __reversed__(self) -> Iterator[Turn]:
        """The newest first; nothing that is older than what is asked for is unpacked."""
        yield from reversed(self.last)
        for block in reversed(self.packed):
            yield from reversed(_unpack(block))


def _pack(turns: tuple[Turn, ...]) -> bytes:
    """A column of each number, as narrow as the block's largest needs: first the columns' widths, as `struct` says
    them, and where the block begins. Run and first event are said by how much they are further than the run and the
    last event before, a turn's last event by its first."""
    first = turns[0]
    before = [Turn(first.run, 0, 0, first.seq), *turns]
    columns = (
        [turn.run - last.run for turn, last in zip(turns, before, strict=False)],
        [turn.seq - last.end for turn, last in zip(turns, before, strict=False)],
        [turn.size for turn in turns],
        [turn.end - turn.seq for turn in turns],
    )
    widths = "".join([_width(column) for column in columns])
    return widths.encode() + pack(_layout(widths), first.run, first.seq, *chain.from_iterable(columns))


def _unpack(block: bytes) -> list[Turn]:
    run, end, *numbers = unpack_from(_layout(block[:COLUMNS].decode()), block, COLUMNS)
    turns: list[Turn] = []
    columns = [numbers[start : start + BLOCK] for start in range(0, COLUMNS * BLOCK, BLOCK)]
    for runs, gap, size, length in zip(*columns, strict=True):
        run, seq = run + runs, end + gap
        end = seq + length
        turns.append(Turn(run, seq, size, end))
    return turns


def _width(column: list[int]) -> str:
    least, most = min(column), max(column)
    return next(width for width, bits in WIDTHS if -(1 << bits - 1) <= least and most < 1 << bits - 1)


def _layout(widths: str) -> str:
    return "<qq" + "".join([f"{BLOCK}{width}" for width in widths])
