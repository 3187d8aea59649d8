"""Highest rate at which a design meets the SLO, by bisection over a grid of rates."""

import asyncio
import math
from collections.abc import Iterable

import msgspec

from twofold.planning.bounds import AnalyticBounds
from twofold.planning.design import Design
from twofold.planning.evaluation import Evaluate, Evaluation, Trial
from twofold.planning.problem import COLOCATED

_DIGITS = 6
_STRIDE = 1.25  # first step away from the start; it doubles
_IDLE = 1 / 64  # share of the analytic bound at which a design is nearly idle


class RateGrid(msgspec.Struct, frozen=True):
    """Grid of rates: step k is the rate `(1 + tolerance)^k`."""

    # All designs use the same grid, so that simulations can be reused.
    tolerance: float = 0.02

    def rate(self, step: int) -> float:
        return float(f"{(1.0 + self.tolerance) ** step:.{_DIGITS}g}")

    def step(self, rate: float) -> int:
        """Return the index of the highest grid rate at or below `rate`."""
        step = math.floor(math.log(rate) / math.log1p(self.tolerance)) + 1
        while self.rate(step) > rate:
            step -= 1
        return step

    @property
    def stride(self) -> int:
        return max(1, round(math.log(_STRIDE) / math.log1p(self.tolerance)))


class MaxRate(msgspec.Struct, frozen=True, kw_only=True):
    """Highest rate (requests/s) at which a design meets the SLO; 0 if there is none."""

    design: Design
    rate: float
    step: int | None  # of the grid; None if there is no such rate
    kept: Evaluation | None  # at this rate


class RateSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Search for the highest rate at which a design meets the SLO."""

    evaluate: Evaluate
    bound: AnalyticBounds
    grid: RateGrid = RateGrid()
    draw: int = 0  # number of the random draw of the workload
    colocated_batching: tuple[tuple[str, int | None], ...] = COLOCATED
    split_batchers: tuple[str | None, ...] = (None,)

    async def at(self, design: Design, step: int) -> Evaluation:
        return await self.at_rate(design, self.grid.rate(step))

    async def at_rate(self, design: Design, rate: float) -> Evaluation:
        return await self.evaluate(Trial(design, rate, self.draw))

    def lowest(self, design: Design) -> int:
        """Return the index in the rate grid of the lowest rate to try for a design."""
        return self.grid.step(self.bound.upper(design) * _IDLE)

    def could(self, design: Design, rate: float) -> bool:
        """Return whether `rate` is at most the analytic upper bound of the design."""
        return self.bound.upper(design) >= rate

    async def highest(self, design: Design, start: int | None = None) -> MaxRate:
        """Find the highest rate at which a design meets the SLO. `start` is the first index in the rate grid to try."""
        # Rates above the analytic bound are not tried: a short simulation might meet the SLO there, before queues have
        # grown.
        step = self.grid.step(self.bound.estimate(design)) if start is None else start
        known = await self._bracket(design, step)
        kept = max((each for each, told in known.items() if told.met), default=None)
        missed = min((each for each, told in known.items() if not told.met), default=None)
        if kept is None:
            return MaxRate(design=design, rate=0.0, step=None, kept=None)
        while missed is not None and missed - kept > 1:
            middle = (kept + missed) // 2
            known[middle] = await self.at(design, middle)
            kept, missed = (middle, missed) if known[middle].met else (kept, middle)
        return MaxRate(design=design, rate=self.grid.rate(kept), step=kept, kept=known[kept])

    async def highest_of(self, designs: Iterable[Design]) -> list[MaxRate]:
        """Return the highest rate within the SLO for each design; omit designs that never meet the SLO."""
        found = await asyncio.gather(*map(self.highest, designs))
        return [each for each in found if each.kept is not None]

    async def _bracket(self, design: Design, start: int) -> dict[int, Evaluation]:
        """Evaluate a design at rates around `start`, until it meets the SLO at one rate and misses it at another."""
        lowest, highest = (self.lowest(design), max(self.grid.step(self.bound.upper(design)), self.lowest(design)))
        step, stride = min(max(start, lowest), highest), self.grid.stride
        known = {step: await self.at(design, step)}
        # Upward if the SLO is met at `start`, else downward; strides double each time.
        up = known[step].met
        while known[step].met is up and step != (highest if up else lowest):
            step = min(step + stride, highest) if up else max(step - stride, lowest)
            stride *= 2
            known[step] = await self.at(design, step)
        return known
