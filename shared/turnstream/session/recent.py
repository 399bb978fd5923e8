"""A map that remembers its newest entries: immutable, cheap to add to, small.

It is kept as blocks of `BLOCK` entries, oldest first. Adding copies the last block alone, so that folding a long
session costs the same for each event; what is forgotten is forgotten a block at a time.
"""

from typing import Generic, TypeVar

import msgspec

V = TypeVar("V")

BLOCK = 50


class Recent(msgspec.Struct, Generic[V], frozen=True, array_like=True, gc=False):
    """Remembers the last `keep` entries, and less than two blocks beyond."""

    keep: int
    blocks: tuple[dict[str, V], ...] = ()

    def get(self, key: str) -> V | None:
        for block in self.blocks:
            if key in block:
                return block[key]
        return None

    def put(self, key: str, value: V) -> "Recent[V]":
        """With another value of this key, as old as before; what is not remembered is not remembered by that either."""
        blocks = [{**block, key: value} if key in block else block for block in self.blocks]
        return Recent(self.keep, tuple(blocks))

    def add(self, key: str, value: V) -> "Recent[V]":
        """With this entry as the newest. `key` is one that is not remembered."""
        blocks = self.blocks
        if blocks and len(blocks[-1]) < BLOCK:
            return Recent(self.keep, (*blocks[:-1], {**blocks[-1], key: value}))
        enough = BLOCK * (len(blocks) - 1) + 1 >= self.keep
        return Recent(self.keep, (*(blocks[1:] if enough else blocks), {key: value}))
