"""Results in constant memory: histograms with the buckets of `tally.py`, and time series."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import Final

import msgspec

from twofold.simulation.tally import LIMIT, Tally, width_of

# 0.3 / 1e-9 may round below 300,000,000, but a bound of 0.3 s must include 300,000,000 ns.
_ROUNDING: Final = 1.0 + 2.0**-51


class Histogram(msgspec.Struct):
    """Counts of integers from 0 to 2⁶³ − 2, each standing for a quantity of integer × `unit`.

    `unit` is, for example, 1e-9 for seconds counted in nanoseconds. `counts` maps the lowest value of a bucket to its
    count, `total` is the exact sum of all values, `low` and `high` are the minimum and maximum (`high` is −1 when
    empty). Statistics of an empty histogram are None.
    """

    unit: float
    counts: dict[int, int] = {}
    total: int = 0
    low: int = LIMIT
    high: int = -1

    def add(self, value: int, weight: int = 1) -> None:
        """Count `value` `weight` times (at least once); raises ValueError if out of range."""
        tally = Tally()
        tally.add(value, weight)
        self.merge(Histogram.of(tally, self.unit))

    def add_ramp(self, first: int, step: int, count: int, weight: int = 1) -> None:
        """Count `first`, `first + step`, … (`count` values), each `weight` times.

        Raises ValueError if the step is negative or a value is out of range.
        """
        tally = Tally()
        tally.add_ramp(first, step, count, weight)
        self.merge(Histogram.of(tally, self.unit))

    @classmethod
    def of(cls, tally: Tally, unit: float) -> "Histogram":
        """Create a histogram from a tally."""
        return cls(unit, tally.counts, tally.total, tally.low, tally.high)

    def merge(self, other: "Histogram") -> None:
        """Add the counts of `other`; raises ValueError if its unit differs."""
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
        """Return the `p`-th percentile, interpolated linearly between ranks, with a relative error of at most 2⁻¹¹.

        Raises ValueError unless 0 <= p <= 100.
        """
        if not 0 <= p <= 100:
            raise ValueError(f"a percentile must be from 0 to 100, not {p}")
        return self._quantiles([p / 100])[0] if self.counts else None

    def fraction_at_most(self, value: float) -> float | None:
        """Return the share of values up to `value` (in units), interpolated within its bucket."""
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
        """Return the cumulative distribution as `points` pairs (value, fraction), evenly spaced in fraction.

        Empty without values. Raises ValueError if points < 2.
        """
        if points < 2:
            raise ValueError(f"a cdf needs at least 2 points, not {points}")
        if not self.counts:
            return []
        fractions = [i / (points - 1) for i in range(points)]
        return list(zip(self._quantiles(fractions), fractions, strict=True))

    def _quantiles(self, fractions: Sequence[float]) -> list[float]:
        """Values at these fractions of the rank range."""
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


_MOST_BINS: Final = 1024
_FIRST_WIDTH_PS: Final = 10**6  # a microsecond, shorter than any event in a cluster
_NEVER: Final = -(1 << 63)
_PS_PER_S: Final = 1e12


class Series(msgspec.Struct):
    """A step function of time, stored as mean and maximum over at most 1,024 equal bins.

    Times are picoseconds. The function begins with the first `set` or `add`; bin widths double as it grows. Values
    replaced at the time they were set are ignored. `areas` are value × picoseconds and `peaks` maxima, one per bin;
    the last bin ends at `at_ps`, and `value` holds from there on.
    """

    start_ps: int = _NEVER
    at_ps: int = _NEVER
    end_ps: int = _NEVER
    width_ps: int = _FIRST_WIDTH_PS
    value: float = 0.0
    areas: list[float] = []
    peaks: list[float] = []

    def set(self, at: int, value: float) -> None:
        """Set the value from `at` on; raises ValueError if `at` is before an earlier call's."""
        if at != self.at_ps:
            self.finish(at)
        self.value = value

    def add(self, at: int, delta: float) -> None:
        """Add `delta` to the value at `at`, starting from 0; raises ValueError as `set` does."""
        if at != self.at_ps:
            self.finish(at)
        self.value += delta

    def finish(self, at: int) -> None:
        """Extend the current value to `at`; raises ValueError as `set` does."""
        held = at - self.at_ps
        if held < 0:
            raise ValueError(f"time runs backwards, from {self.at_ps} to {at} ps")
        if at <= self.end_ps:  # common case: within the open bin
            if held:
                self.areas[-1] += self.value * held
                if self.value > self.peaks[-1]:  # noqa: PLR1730  (max() takes twice as long)
                    self.peaks[-1] = self.value
        elif self.start_ps == _NEVER:
            self.start_ps = self.end_ps = at
        else:
            self._fill(at)
        self.at_ps = at

    def mean(self) -> float:
        """Time-weighted mean, or the value if no time has passed."""
        passed = self.at_ps - self.start_ps
        return sum(self.areas) / passed if passed else self.value

    def maximum(self) -> float:
        """Maximum over time, or the value if no time has passed."""
        return max(self.peaks, default=self.value)

    def integral(self) -> float:
        """Value × seconds: joules for watts."""
        return sum(self.areas) / _PS_PER_S

    def points(self) -> list[tuple[float, float, float]]:
        """(start in seconds, mean, maximum) of every bin."""
        starts = [self.start_ps + i * self.width_ps for i in range(len(self.areas))]
        widths = [end - start for start, end in pairwise([*starts, self.at_ps])]
        rows = zip(starts, self.areas, widths, self.peaks, strict=True)
        return [(start / _PS_PER_S, area / width, peak) for start, area, width, peak in rows]

    def _fill(self, at: int) -> None:
        """Extend the current value to `at`, beyond the end of the open bin."""
        while at > self.start_ps + _MOST_BINS * self.width_ps:
            self._merge_pairs()
        value, width = self.value, self.width_ps
        if self.areas and self.at_ps < self.end_ps:
            self.areas[-1] += value * (min(at, self.end_ps) - self.at_ps)
            self.peaks[-1] = max(self.peaks[-1], value)
        if at > self.end_ps:
            whole, rest = divmod(at - self.end_ps, width)
            areas = [float(value * width)] * whole + [float(value * rest)] * bool(rest)
            self.areas += areas
            self.peaks += [float(value)] * len(areas)
            self.end_ps = self.start_ps + len(self.areas) * width

    def _merge_pairs(self) -> None:
        """Halve the number of bins by merging pairs; an odd last bin stays alone."""
        odd = self.areas[1::2]
        self.areas = [a + b for a, b in zip_longest(self.areas[::2], odd, fillvalue=0.0)]
        left, right = self.peaks[::2], self.peaks[1::2]
        self.peaks = [max(a, b) for a, b in zip_longest(left, right, fillvalue=left[-1] if left else 0.0)]
        self.width_ps *= 2
        self.end_ps = self.start_ps + len(self.areas) * self.width_ps
