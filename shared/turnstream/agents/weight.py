"""How much a value holds, found out without ever taking long: what an expression or a template makes may be shared many
times over, so that a few objects are an endless text once they are written out."""

from collections.abc import Mapping
from typing import Final, cast

EACH: Final = 64
"""What any value weighs; a text weighs its characters besides."""


def weight_of(value: object, most: int) -> int:
    """Of a value with all that is in it, or something above `most`."""
    weight, ahead = 0, [value]
    while ahead and weight <= most:
        one = ahead.pop()
        weight += EACH
        if isinstance(one, (str, bytes)):
            weight += len(one)
        elif isinstance(one, Mapping):
            for key, inner in cast("Mapping[object, object]", one).items():
                ahead += (key, inner)
        elif isinstance(one, (list, tuple)):
            inside = cast("list[object]", one)
            ahead += inside[: most // EACH + 1]
            weight += max(0, len(inside) - most // EACH) * EACH
    return weight
