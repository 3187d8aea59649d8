"""Has the mean of a stream of numbers changed, and since when?

After each number the last w are compared with all that came before them, for w = 4, 8, … 128, by the t-test: the
generalized likelihood ratio of a mean that changes at a place that is not known, while level and spread are not known
either (Hawkins, Qiu and Kang, "The changepoint model for statistical process control", 2003). A number costs the
logarithm of the longest window, and memory does not grow.
"""

from collections import deque
from math import erfc, log1p, sqrt
from typing import Final, NamedTuple

WINDOWS: Final = (4, 8, 16, 32, 64, 128)
FEWEST: Final = 8  # numbers before a window: fewer say too little about how they spread
_LEAST_VARIANCE: Final = 1e-12  # of numbers that are all the same, as the gaps of a clockwork


class MeanChange(NamedTuple):
    """The mean was `before`, and has been `after` for the last `numbers` of them.

    `sigmas` is the deviation of a standard normal variable that is as rare as this is where nothing changed.
    """

    before: float
    after: float
    numbers: int
    sigmas: float

    @property
    def chance(self) -> float:
        """The probability of as much, one way or the other, where nothing changed: that of a single comparison."""
        return erfc(self.sigmas / sqrt(2.0))


class ChangePoint:
    """Takes numbers that are about normal and independent, such as means over batches of what is watched."""

    def __init__(self) -> None:
        # What all numbers up to each of the last ones add up to, and their squares, as deviations from the first of
        # all: a window is the difference of two of these.
        self._sums: deque[tuple[float, float]] = deque([(0.0, 0.0)], WINDOWS[-1] + 1)
        self._origin: float | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, number: float) -> None:
        if self._origin is None:
            self._origin = number
        deviation = number - self._origin
        total, squares = self._sums[-1]
        self._sums.append((total + deviation, squares + deviation * deviation))
        self._count += 1

    def strongest(self) -> MeanChange | None:
        """The least likely of the comparisons; None before there are enough numbers for any."""
        return self._least_likely(WINDOWS)

    def located(self) -> MeanChange | None:
        """The same over windows of every length, which takes longer and says better where the change is."""
        return self._least_likely(range(WINDOWS[0], WINDOWS[-1] + 1))

    def restart(self, count: int) -> None:
        """Forget all but the last `count` numbers, or as many of them as a window may hold."""
        kept = list(self._sums)[-1 - count :]
        base, base_squares = kept[0]
        self._sums = deque(((s - base, q - base_squares) for s, q in kept), self._sums.maxlen)
        self._count = len(kept) - 1

    def _least_likely(self, windows: tuple[int, ...] | range) -> MeanChange | None:
        found: MeanChange | None = None
        for window in windows:
            if self._count - window < FEWEST:
                break
            change = self._compare(window)
            if found is None or change.sigmas > found.sigmas:
                found = change
        return found

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
