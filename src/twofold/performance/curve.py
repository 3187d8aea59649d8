"""A piecewise linear curve through measured points."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from twofold.errors import ConfigurationError


class Curve:
    """Straight lines between points, and the first and last of those lines continued beyond both ends."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        if len(xs) != len(ys) or len(xs) < 2:
            raise ConfigurationError(
                f"a curve needs at least two points, each with an x and a y, not {len(xs)}"
            )
        if any(right <= left for left, right in pairwise(xs)):
            raise ConfigurationError("the points of a curve must come in rising order of x")
        # Once, and all of them floats, which compare quickly with each other: a simulator asks for millions of points.
        self._xs = [float(x) for x in xs]
        self._ys = [float(y) for y in ys]
        self._slopes = [(ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) for i in range(len(xs) - 1)]

    def __call__(self, x: float) -> float:
        i = min(max(bisect_right(self._xs, x) - 1, 0), len(self._slopes) - 1)
        return self._ys[i] + self._slopes[i] * (x - self._xs[i])
