"""How sure a goodput is: the same search over other draws of arrivals and lengths."""

import asyncio
from collections.abc import Sequence
from statistics import median

import msgspec
from msgspec.structs import replace

from twofold.planning.design import Design
from twofold.planning.rates import RateSearch

DRAWS = 6


class Confidence(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second that a design took in independent draws of the workload, sorted.

    The median over all draws there could be lies between the least and the greatest of n with probability 1 − 2^(1−n),
    however they are distributed.
    """

    rates: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.rates)

    @property
    def level(self) -> float:
        """The probability that `rates[0]` to `rates[-1]` holds the median."""
        return 1.0 - 2.0 ** (1 - len(self.rates))


async def confidence(search: RateSearch, design: Design, rate: float, draws: Sequence[int]) -> Confidence:
    """The goodput of a design in these draws, 0 where it keeps the SLO at no rate; a search begins at `rate`."""
    start = search.grid.step(rate)
    told = await asyncio.gather(*(replace(search, draw=draw).highest(design, start) for draw in draws))
    rates = (0.0 if each.step is None else search.grid.rate(each.step) for each in told)
    return Confidence(rates=tuple(sorted(rates)))
