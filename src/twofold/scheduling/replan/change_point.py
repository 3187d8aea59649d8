"""Online detection of a change in the mean of a sequence of numbers, in bounded memory.

A t-test compares the mean of the latest n numbers with the mean of all earlier numbers, for several n from 4
to 128. The n with the most significant difference locates the change (Hawkins, Qiu and Kang, "The changepoint
model for statistical process control", 2003).
"""

from collections import deque
from math import erfc, log1p, sqrt
from operator import attrgetter
from typing import Final, NamedTuple

WINDOWS: Final = (4, 8, 16, 32, 64, 128)
FEWEST: Final = 8  # minimum of numbers before a window, for a usable variance
_LEAST_VARIANCE: Final = 1e-12  # avoids division by zero if all numbers are equal


class MeanChange(NamedTuple):
    """A change in the mean of a series of numbers."""

    before: float  # mean of all earlier numbers
    after: float  # mean of the latest `numbers` numbers
    numbers: int
    sigmas: float  # significance in standard deviations of a normal distribution

    @property
    def chance(self) -> float:
        """Two-sided p-value of this change, without correction for multiple comparisons."""
        return erfc(self.sigmas / sqrt(2.0))


class ChangePoint:
    """Detects changes of the mean in a sequence of independent, roughly normal numbers."""

    def __init__(self) -> None:
        # Cumulative sums of the numbers and of their squares, as deviations from the first number: a window is the
        # difference of two of them.
        self._sums: deque[tuple[float, float]] = deque([(0.0, 0.0)], WINDOWS[-1] + 1)
        self._origin: float | None = None
        self._count = 0

    def add(self, number: float) -> None:
        if self._origin is None:
            self._origin = number
        deviation = number - self._origin
        total, squares = self._sums[-1]
        self._sums.append((total + deviation, squares + deviation * deviation))
        self._count += 1

    def strongest(self) -> MeanChange | None:
        """Return the most significant change of the mean, or None if the sequence has fewer than 12 numbers.

        The mean of the latest 4, 8, 16, 32, 64 or 128 numbers is compared with the mean of all earlier numbers.
        """
        return self._least_likely(WINDOWS)

    def located(self) -> MeanChange | None:
        """Return the most significant change of the mean, or None if the sequence has fewer than 12 numbers.

        The slow search tries every position with 4 to 128 later numbers and at least 8 earlier numbers.
        """
        return self._least_likely(range(WINDOWS[0], WINDOWS[-1] + 1))

    def restart(self, count: int) -> None:
        """Keep only the last `count` numbers."""
        kept = list(self._sums)[-1 - count :]
        base, base_squares = kept[0]
        self._sums = deque(((s - base, q - base_squares) for s, q in kept), self._sums.maxlen)
        self._count = len(kept) - 1

    def _least_likely(self, windows: tuple[int, ...] | range) -> MeanChange | None:
        # The generalized likelihood ratio statistic for a change of the mean, restricted to these window lengths.
        changes = (self._compare(window) for window in windows if self._count - window >= FEWEST)
        return max(changes, key=attrgetter("sigmas"), default=None)

    def _compare(self, window: int) -> MeanChange:
        earlier_count = self._count - window
        total, squares = self._sums[-1]
        earlier, _ = self._sums[-1 - window]
        before, after = earlier / earlier_count, (total - earlier) / window
        freedom = self._count - 2
        within = squares - earlier_count * before * before - window * after * after
        variance = max(within / freedom, _LEAST_VARIANCE) * (1.0 / earlier_count + 1.0 / window)
        t_squared = (after - before) ** 2 / variance
        # Student's t as a normal deviate (Wallace, 1959), which holds far out in the tails too.
        sigmas = sqrt(freedom * log1p(t_squared / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
        origin = self._origin or 0.0
        return MeanChange(before + origin, after + origin, window, sigmas)
