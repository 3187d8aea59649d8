"""A histogram of non-negative integers in constant memory: what a run keeps of a million latencies.

A bucket holds the values that share their top eleven bits, so every value below 2,048 has a bucket of its own
and above that a bucket is at most 2⁻¹⁰ of its values wide (the layout of HdrHistogram). A bucket is named by
the lowest value in it, and only those that hold something are kept.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import msgspec

_BITS: Final = 11
# Stands for "no value yet" in `low`, and so bounds the values: in nanoseconds it is 292 years.
_LIMIT: Final = (1 << 63) - 1
# A bound such as 0.3 s must count the value 300,000,000 ns though 0.3 / 1e-9 may fall just short of it.
_ROUNDING: Final = 1.0 + 2.0**-51


def _width(lowest: int) -> int:
    """How many integers the bucket that begins at `lowest` holds."""
    return 1 << max(0, lowest.bit_length() - _BITS)


class Histogram(msgspec.Struct):
    """Counts of integers from 0 to 2⁶³ − 2; the quantity that one stands for is integer × `unit`.

    `unit` is for example 1e-9 for seconds counted in nanoseconds. `counts` maps the lowest value of a bucket to
    how many values are in it, `total` is the exact sum of all values, `low` and `high` are the least and the
    greatest (`high` is −1 while there are none). Methods without a value to report return None.
    """

    unit: float
    counts: dict[int, int] = {}
    total: int = 0
    low: int = _LIMIT
    high: int = -1

    def add(self, value: int, weight: int = 1) -> None:
        """Count `value` `weight` times (at least once); raises ValueError if it is out of range."""
        if value < self.low or value > self.high:
            self._extend(value, value)
        shift = value.bit_length() - 11  # _BITS: a global would be looked up on the hottest path
        bucket = value >> shift << shift if shift > 0 else value
        try:  # costs nothing while the bucket is there, as it nearly always is
            self.counts[bucket] += weight
        except KeyError:
            self.counts[bucket] = weight
        self.total += value * weight

    def add_ramp(self, first: int, step: int, count: int, weight: int = 1) -> None:
        """Count `first`, `first + step`, … (`count` of them), each `weight` times.

        The result equals that of adding them one by one; the time taken grows with the buckets they fall into.
        Raises ValueError if the step is negative or a value out of range.
        """
        if step < 0:
            raise ValueError(f"a ramp cannot fall: its step is {step}")
        if count < 1 or weight < 1:
            return
        last = first + step * (count - 1)
        self._extend(first, last)
        self.total += weight * (count * first + step * (count * (count - 1) // 2))
        counts, value, left = self.counts, first, count
        while left:
            width = 1 << max(0, value.bit_length() - _BITS)
            bucket = value // width * width
            inside = left if bucket + width > last else (bucket + width - 1 - value) // step + 1
            counts[bucket] = counts.get(bucket, 0) + inside * weight
            value += inside * step
            left -= inside

    def merge(self, other: "Histogram") -> None:
        """Add all that `other` counted; raises ValueError if it counts in another unit."""
        if other.unit != self.unit:
            raise ValueError(f"histograms in units of {self.unit} and {other.unit} cannot be merged")
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.total += other.total
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

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
        """The value that `p` of a hundred values do not exceed, interpolated between ranks as numpy's default
        does; at most 2⁻¹¹ from it, relatively. Raises ValueError unless 0 <= p <= 100."""
        if not 0 <= p <= 100:
            raise ValueError(f"a percentile lies between 0 and 100, not at {p}")
        return self._quantiles([p / 100])[0] if self.counts else None

    def fraction_at_most(self, value: float) -> float | None:
        """The share of values that are `value` (in units) or less; a bucket that it divides counts in proportion."""
        if not self.counts:
            return None
        bound = math.floor(min(value / self.unit * _ROUNDING, float(_LIMIT)))
        if bound >= self.high:
            return 1.0
        if bound < self.low:
            return 0.0
        below = 0.0
        for bucket, count in self.counts.items():
            width = _width(bucket)
            below += count * min(max(bound - bucket + 1, 0), width) / width
        return below / self.count

    def cdf(self, points: int) -> list[tuple[float, float]]:
        """The distribution as `points` pairs (value, fraction of values up to it), fractions evenly from 0 to 1;
        empty if nothing was counted. Raises ValueError if points < 2."""
        if points < 2:
            raise ValueError(f"a distribution takes at least 2 points, not {points}")
        if not self.counts:
            return []
        fractions = [i / (points - 1) for i in range(points)]
        return list(zip(self._quantiles(fractions), fractions, strict=True))

    def _extend(self, first: int, last: int) -> None:
        """Let `low` and `high` include both."""
        if first < 0 or last >= _LIMIT:
            raise ValueError(f"a histogram counts integers from 0 to 2**63 - 2, not {first} to {last}")
        self.low, self.high = min(self.low, first), max(self.high, last)

    def _quantiles(self, fractions: Sequence[float]) -> list[float]:
        """The values at these fractions of the way from the first rank to the last."""
        buckets = sorted(self.counts)
        ends = list(accumulate(self.counts[bucket] for bucket in buckets))
        last = ends[-1] - 1

        def value_at(rank: int) -> float:
            if rank in {0, last}:
                return self.low if rank == 0 else self.high
            bucket = buckets[bisect_right(ends, rank)]
            return min(max(bucket + (_width(bucket) - 1) / 2, self.low), self.high)

        values = []
        for fraction in fractions:
            rank = math.floor(fraction * last)
            here, there = value_at(rank), value_at(min(rank + 1, last))
            values.append((here + (there - here) * (fraction * last - rank)) * self.unit)
        return values
