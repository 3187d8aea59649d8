"""Histograms of simulation results. Their memory use does not grow with the number of recorded values."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import msgspec

from twofold.simulation.statistics import LIMIT, Tally, width_of

# 0.3 / 1e-9 may round below 300,000,000, but a bound of 0.3 s must include 300,000,000 ns.
_ROUNDING: Final = 1.0 + 2.0**-51


class Histogram(msgspec.Struct):
    """Histogram of values such as latencies, stored as integer multiples of a unit.

    `mean`, `minimum` and `maximum` are multiplied by the unit, and are None for an empty histogram.
    """

    unit: float  # such as 10⁻¹² for picoseconds
    counts: dict[int, int] = {}  # values in each bucket, by its lower bound in units
    total: int = 0  # exact sum, minimum and maximum of the values, in units
    low: int = LIMIT
    high: int = -1

    @classmethod
    def of(cls, tally: Tally, unit: float) -> "Histogram":
        """Create a histogram of the integers in a tally."""
        return cls(unit, tally.counts, tally.total, tally.low, tally.high)

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    @property
    def mean(self) -> float | None:
        return self.total / self.count * self.unit if self.counts else None

    @property
    def minimum(self) -> float | None:
        return self.low * self.unit if self.counts else None

    @property
    def maximum(self) -> float | None:
        return self.high * self.unit if self.counts else None

    def percentile(self, p: float) -> float | None:
        """Return the `p`-th percentile with a relative error of at most 2⁻¹¹. Raise ValueError unless 0 ≤ p ≤ 100."""
        if not 0 <= p <= 100:
            raise ValueError(f"a percentile must be from 0 to 100, not {p}")
        return self._quantiles([p / 100])[0] if self.counts else None

    def fraction_at_most(self, value: float) -> float | None:
        """Return the share of values (times in seconds) that are at most `value`, or None for an empty histogram."""
        if not self.counts:
            return None
        bound = math.floor(min(value / self.unit * _ROUNDING, float(LIMIT)))
        if bound >= self.high:
            return 1.0
        if bound < self.low:
            return 0.0
        below = 0.0
        for bucket, count in self.counts.items():
            width = width_of(bucket)
            below += count * min(max(bound - bucket + 1, 0), width) / width
        return below / self.count

    def cdf(self, points: int) -> list[tuple[float, float]]:
        """Return the distribution as `points` ≥ 2 pairs (value, fraction) at even fractions. Raises ValueError."""
        if points < 2:
            raise ValueError(f"a cdf needs at least 2 points, not {points}")
        if not self.counts:
            return []
        fractions = [i / (points - 1) for i in range(points)]
        return list(zip(self._quantiles(fractions), fractions, strict=True))

    def _quantiles(self, fractions: Sequence[float]) -> list[float]:
        buckets = sorted(self.counts)
        ends = list(accumulate(self.counts[bucket] for bucket in buckets))
        last = ends[-1] - 1

        def value_at(rank: int) -> float:
            if rank in {0, last}:
                return self.low if rank == 0 else self.high
            bucket = buckets[bisect_right(ends, rank)]
            return min(max(bucket + (width_of(bucket) - 1) / 2, self.low), self.high)

        values = []
        for fraction in fractions:
            rank = math.floor(fraction * last)
            here, there = value_at(rank), value_at(min(rank + 1, last))
            values.append((here + (there - here) * (fraction * last - rank)) * self.unit)
        return values
