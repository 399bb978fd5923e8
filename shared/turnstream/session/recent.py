"""A map that remembers its newest entries: immutable, cheap to add to, small.

It is kept as blocks of `BLOCK` entries, oldest first. Adding copies the last block alone, so that folding a long
session costs the same for each event; what is forgotten is forgotten a block at a time.
"""

from typing import Generic, TypeVar

import msgspec

V = TypeVar("V")

BLOCK = 50


class Recent(msgspec.Struct, Generic[V], frozen=True, gc=False):
    """Remembers the last `keep` entries, and never more than `BLOCK` beyond."""

    keep: int
    blocks: tuple[dict[str, V], ...] = ()

    def get(self, key: str) -> V | None:
        for block in self.blocks:
            if key in block:
                return block[key]
        return None

    def add(self, key: str, value: V) -> "Recent[V]":
        """With this entry as the newest. `key` is one that is not remembered."""
        blocks = self.blocks
        if not blocks or len(blocks[-1]) == BLOCK:
            kept = blocks[1:] if len(blocks) * BLOCK >= self.keep + BLOCK else blocks
            return Recent(self.keep, (*kept, {key: value}))
        return Recent(self.keep, (*blocks[:-1], {**blocks[-1], key: value}))
