"""What a figure is, and how one is taken: a ratio against a baseline measured in the same run, the median of rounds."""

import asyncio
import statistics
import time
from typing import Literal

import msgspec
from nats.aio.client import Client


class Figure(msgspec.Struct, kw_only=True):
    """`bound` is what `value` must not be above (`at_most`) or below (`at_least`)."""

    value: float
    bound: float
    kind: Literal["at_least", "at_most"]
    details: dict[str, float | str] = {}

    @property
    def ok(self) -> bool:
        return self.value >= self.bound if self.kind == "at_least" else self.value <= self.bound


def median(values: list[float]) -> float:
    return statistics.median(values)


async def raw_rate(nc: Client, subject: str, payload: bytes, *, count: int = 6000, in_flight: int = 64) -> float:
    """nats-py's `js.publish` with so many in flight, in messages a second."""
    js = nc.jetstream()
    left = count

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await js.publish(subject, payload)

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return count / (time.perf_counter() - began)
