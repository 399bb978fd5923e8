"""The turns of a session: nothing of them is lost by packing them, and adding one costs the same in every session."""

import random

import pytest

from turnstream.session.turns import BLOCK, Turn, Turns


def some(count: int) -> list[Turn]:
    rng = random.Random(count)
    turns: list[Turn] = []
    seq = 0
    for n in range(count):
        seq += rng.randrange(1, 100_000)
        first = seq - rng.randrange(50_000)
        turns.append(Turn(n + 1 + rng.randrange(3), first, rng.randrange(10_000_000), seq))
    return turns


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK + 7])
def test_turns_are_remembered_in_order(count: int) -> None:
    turns = Turns()
    wanted = some(count)
    for turn in wanted:
        before, held = list(turns), turns
        turns = turns.add(turn)
        assert list(held) == before, "whoever holds turns holds them unchanged"
    assert list(turns) == wanted
    assert list(reversed(turns)) == wanted[::-1]
    assert len(turns.last) <= BLOCK and len(turns.packed) == max(0, count - 1) // BLOCK
