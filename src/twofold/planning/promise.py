"""Checks of planned designs on windows of the workload that the search has not simulated.

A search finds designs that meet the SLO on one window. On other windows, a design that just meets it there may miss it.
It is therefore resized until a required share of other windows meets the SLO.
"""

import asyncio
import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec

from twofold.planning.design import Design
from twofold.planning.evaluation import Trial
from twofold.planning.rates import RateSearch
from twofold.planning.workload import TYPICAL, WHOLE

_LEVEL = 0.95  # of the interval of a promise


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """Number of windows that meet the SLO, among windows that the search has not simulated."""

    confidence: float  # required share of windows
    windows: int
    kept: int
    whole: bool | None = None  # whether the whole trace meets the SLO; None if the workload is not a trace
    optimistic: str  # design that meets the SLO on a typical window
    margin: float  # cost of this design over that of the optimistic one, or the inverse ratio of their rates

    @property
    def holds(self) -> bool:
        return self.kept >= _required(self.confidence, self.windows) and self.whole is not False

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson score interval of the share of windows that meet the SLO, for a confidence level of 95%."""
        z, n, share = NormalDist().inv_cdf((1 + _LEVEL) / 2), self.windows, self.kept / self.windows
        centre, width = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        return max(0.0, (centre - width) / (1 + z * z / n)), min(1.0, (centre + width) / (1 + z * z / n))


class Windows(msgspec.Struct, frozen=True, kw_only=True):
    """Windows of a workload, by draw number, and the share of them that must meet the SLO."""

    confidence: float
    draws: tuple[int, ...]
    whole: bool  # the workload is a trace, and the whole of it must meet the SLO as well

    @property
    def spare(self) -> int:
        """Number of windows that may miss the SLO."""
        return len(self.draws) - _required(self.confidence, len(self.draws))

    @property
    def typical(self) -> int:
        """Draw of a typical window."""
        return TYPICAL if self.whole else 0

    @property
    def all(self) -> tuple[int, ...]:
        return (*self.draws, WHOLE) if self.whole else self.draws

    def enough(self, missed: Sequence[int]) -> bool:
        """Return whether a design may miss the SLO in the windows `missed`."""
        return WHOLE not in missed and len(missed) <= self.spare

    def promise(self, missed: Sequence[int], optimistic: Design, margin: float) -> Promise:
        return Promise(
            confidence=self.confidence,
            windows=len(self.draws),
            kept=len(self.draws) - len(set(missed) - {WHOLE}),
            whole=WHOLE not in missed if self.whole else None,
            optimistic=optimistic.name,
            margin=margin,
        )


def _required(confidence: float, windows: int) -> int:
    return math.ceil(confidence * windows - 1e-9)  # 0.7 · 10 is more than 7 in floating point


async def missed_windows(search: RateSearch, design: Design, rate: float, draws: Sequence[int]) -> list[int]:
    """Return the windows in which a design misses the SLO at `rate` requests/s."""
    told = await asyncio.gather(*(search.evaluate(Trial(design, rate, draw)) for draw in draws))
    return [draw for draw, evaluation in zip(draws, told, strict=True) if not evaluation.met]


async def promised_step(
    search: RateSearch, design: Design, start: int, windows: Windows
) -> tuple[int, list[int]] | None:
    """Find the highest rate at which enough windows meet the SLO, from the grid step `start` on.

    Return its grid step and the windows that miss the SLO there, or None if there is no such rate.
    """
    # Assume that a window that meets the SLO at a rate meets it at lower rates, too.
    missed, lowest = await missed_windows(search, design, search.grid.rate(start), windows.all), search.lowest(design)
    if windows.enough(missed):
        while search.could(design, search.grid.rate(start + 1)):
            more = await missed_windows(search, design, search.grid.rate(start + 1), windows.all)
            if not windows.enough(more):
                break
            start, missed = start + 1, more
        return start, missed
    above, step, stride = start, start, 1
    while True:
        if step <= lowest:
            return None
        step, stride = max(step - stride, lowest), stride * 2
        few = await missed_windows(search, design, search.grid.rate(step), missed)
        if windows.enough(few):
            break
        above, missed = step, few
    while above - step > 1:
        middle = (above + step) // 2
        found = await missed_windows(search, design, search.grid.rate(middle), missed)
        if windows.enough(found):
            step, few = middle, found
        else:
            above, missed = middle, found
    return step, few
