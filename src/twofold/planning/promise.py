"""Checks of planned designs on draws of the workload that the search has not simulated.

A search finds designs that meet the SLO on one draw. On other draws, a design that just meets it there may miss it. It
is therefore resized until enough other draws meet the SLO for the required confidence that one more draw does.

Source: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World (2005): conformal prediction. If n + 1 draws
are exchangeable, the last is in one of the n + 1 ranks with equal probability.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from statistics import NormalDist
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from twofold.errors import require
from twofold.planning.design import Allows, Design
from twofold.planning.evaluation import Trial
from twofold.planning.rates import RateSearch
from twofold.planning.search import cheapest
from twofold.planning.workload import WHOLE

T = TypeVar("T")
Rank = tuple[float | str, ...]
# Multiples of the rate for which a design is sized: smaller while enough draws meet the SLO, larger until they do.
_SMALLER, _LARGER = (0.95, 0.9, 0.85), (1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.6, 2.0, 3.0)
_LEVEL = 0.95  # of the interval of a promise
_CLOSE = 1e-9  # 0.7 · 10 is more than 7 in floating point


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """Number of draws that meet the SLO, among draws that the search has not simulated."""

    confidence: float  # that another draw meets the SLO
    draws: int
    kept: int
    whole: bool | None = None  # whether the whole trace meets the SLO; None if the workload is not a trace
    optimistic: str  # design that meets the SLO on the whole trace, or on the draw of the search if there is no trace
    margin: float  # cost of this design over that of the optimistic one, or the inverse ratio of their rates

    @property
    def holds(self) -> bool:
        return self.kept >= _required(self.confidence, self.draws) and self.whole is not False

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson score interval of the share of draws that meet the SLO, for a confidence level of 95%."""
        z, n, share = NormalDist().inv_cdf((1 + _LEVEL) / 2), self.draws, self.kept / self.draws
        centre, width = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        return max(0.0, (centre - width) / (1 + z * z / n)), min(1.0, (centre + width) / (1 + z * z / n))


class Draws(msgspec.Struct, frozen=True, kw_only=True):
    """Draws of a workload, and the required confidence that another draw meets the SLO."""

    confidence: float
    numbers: tuple[int, ...]
    whole: bool  # the workload is a trace, and the whole of it must meet the SLO as well

    def __post_init__(self) -> None:
        """Raise ConfigurationError if no number of draws that meet the SLO suffices for the confidence."""
        least = math.ceil(self.confidence / (1 - self.confidence) - _CLOSE)
        require(self.spare >= 0, f"a confidence of {self.confidence:g} needs at least {least} draws")

    @property
    def spare(self) -> int:
        """Number of draws that may miss the SLO."""
        return len(self.numbers) - _required(self.confidence, len(self.numbers))

    @property
    def optimistic(self) -> int:
        """Draw that the optimistic design meets the SLO on."""
        return WHOLE if self.whole else 0

    @property
    def all(self) -> tuple[int, ...]:
        return (*self.numbers, WHOLE) if self.whole else self.numbers

    def enough(self, missed: Sequence[int]) -> bool:
        """Return whether a design may miss the SLO in the draws `missed`."""
        return WHOLE not in missed and len(missed) <= self.spare

    def promise(self, missed: Sequence[int], optimistic: Design, margin: float) -> Promise:
        return Promise(
            confidence=self.confidence,
            draws=len(self.numbers),
            kept=len(self.numbers) - len(set(missed) - {WHOLE}),
            whole=WHOLE not in missed if self.whole else None,
            optimistic=optimistic.name,
            margin=margin,
        )


def _required(confidence: float, draws: int) -> int:
    return math.ceil(confidence * (draws + 1) - _CLOSE)


async def missed_draws(search: RateSearch, design: Design, rate: float, draws: Sequence[int]) -> list[int]:
    """Return the draws in which a design misses the SLO at `rate` requests/s."""
    told = await asyncio.gather(*(search.evaluate(Trial(design, rate, draw)) for draw in draws))
    return [draw for draw, evaluation in zip(draws, told, strict=True) if not evaluation.met]


async def promised_step(search: RateSearch, design: Design, start: int, draws: Draws) -> tuple[int, list[int]] | None:
    """Find the highest rate at which enough draws meet the SLO.

    `start` is the first step of the rate grid to try; for a trace, the highest at which the whole trace meets the SLO.
    Return the step and the draws that miss the SLO there, or None if there is no such rate.
    """
    # A draw that meets the SLO at a rate is assumed to meet it at lower rates, too: only the others are tried there.
    top, lowest = start if draws.whole else search.grid.step(search.bound.upper(design)), search.lowest(design)
    told = {start: await missed_draws(search, design, search.grid.rate(start), draws.numbers)}
    up, step, stride = draws.enough(told[start]), start, 1
    while draws.enough(told[step]) is up and (step < top if up else step > lowest):
        among = draws.numbers if up else told[step]
        step = min(step + stride, top) if up else max(step - stride, lowest)
        told[step] = await missed_draws(search, design, search.grid.rate(step), among)
        stride *= 2
    kept = max((step for step, missed in told.items() if draws.enough(missed)), default=None)
    above = min((step for step, missed in told.items() if not draws.enough(missed)), default=None)
    if kept is None:
        return None
    while above is not None and above - kept > 1:
        middle = (above + kept) // 2
        told[middle] = await missed_draws(search, design, search.grid.rate(middle), told[above])
        kept, above = (middle, above) if draws.enough(told[middle]) else (kept, middle)
    return kept, told[kept]


async def promised_rate(search: RateSearch, design: Design, rate: float, draws: Draws) -> tuple[float, Promise]:
    """Change the rate of a design to the highest at which enough draws meet the SLO; keep `rate` if there is none."""
    optimistic = await replace(search, draw=draws.optimistic).highest(design, search.grid.step(rate))
    found = None if optimistic.step is None else await promised_step(search, design, optimistic.step, draws)
    if found is None:
        return rate, draws.promise(await missed_draws(search, design, rate, draws.all), design, 1.0)
    step, missed = found
    promised = search.grid.rate(step)
    return promised, draws.promise(missed, design, optimistic.rate / promised)


async def promised_size(
    search: RateSearch,
    design: Design,
    rate: float,
    draws: Draws,
    allows: Allows,
    weigh: Callable[[Design], tuple[float, ...]],
) -> tuple[Design, Promise]:
    """Change the size of a design so that enough draws meet the SLO at `rate`; keep it if no size does."""
    families = [design.family]
    sized = {design: await missed_draws(search, design, rate, draws.all)}
    kept = design if draws.enough(sized[design]) else None
    for factor in _LARGER if kept is None else _SMALLER:
        other = await cheapest(search, families, rate * factor, allows, weigh)
        if other is None:
            break
        if other not in sized:
            sized[other] = await missed_draws(search, other, rate, draws.all)
        enough = draws.enough(sized[other])
        if enough:
            kept = other
        if enough is (factor > 1.0):
            break
    if kept is None:
        return design, draws.promise(sized[design], design, 1.0)
    alone = replace(search, draw=draws.optimistic)
    optimistic = await cheapest(alone, families, rate, allows, weigh) or design
    cost, least = weigh(kept)[0], weigh(optimistic)[0]
    return kept, draws.promise(sized[kept], optimistic, cost / least if least else 1.0)


async def resized(ranked: Sequence[T], resize: Callable[[T], Awaitable[T]], rank: Callable[[T], Rank]) -> list[T]:
    """Resize the best design, and the next ones while they would otherwise be better; return all, the best first."""
    found: list[T] = []
    for choice in ranked:
        if found and rank(choice) > min(map(rank, found)):
            break
        found.append(await resize(choice))
    return [*sorted(found, key=rank), *ranked[len(found) :]]
