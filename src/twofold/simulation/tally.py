"""Counting non-negative integers into buckets, as quickly as can be: several are counted for each request.

A bucket holds the values that share their top eleven bits, so every value below 2,048 has a bucket of its own
and above that a bucket is at most 2⁻¹⁰ of its values wide (the layout of HdrHistogram). A bucket is named by
the lowest value in it.
"""

from itertools import compress
from typing import Final

from twofold.cluster.timing import product

# Stands for "no value yet" in `low`, and so bounds the values: in picoseconds it is 106 days.
LIMIT: Final = (1 << 63) - 1
_ROWS: Final = 54  # one for the values below 1,024 and one for each length in bits from there to 63
_ROW: Final = 1024
_PLACES: Final = range(_ROW)


def width_of(lowest: int) -> int:
    """How many integers the bucket that begins at `lowest` holds."""
    return 1 << max(0, lowest.bit_length() - 11)


class Tally:
    """The exact `total` of all values, the least and the greatest (−1 without any), and their counts by bucket."""

    __slots__ = ("_rows", "high", "low", "total")

    def __init__(self) -> None:
        # The buckets of values of equal length are a row; a row without any value is empty.
        self._rows: list[list[int]] = [[]] * _ROWS
        self.total = 0
        self.low = LIMIT
        self.high = -1

    @property
    def counts(self) -> dict[int, int]:
        """How many values are in each bucket that holds any, in rising order."""
        return {
            (_ROW + place << row - 1) if row else place: counts[place]
            for row, counts in enumerate(self._rows)
            for place in compress(_PLACES, counts)
        }

    def add(self, value: int, weight: int = 1) -> None:
        """Count `value` `weight` times (at least once); raises ValueError if it is out of range."""
        if value < self.low or value > self.high:
            self._extend(value, value)
        self.total += value if weight == 1 else product(value, weight)
        row = value.bit_length() - 10
        if row > 0:
            place = (value >> row - 1) - _ROW
        else:
            row, place = 0, value
        counts = self._rows[row]
        if not counts:
            counts = self._rows[row] = [0] * _ROW
        before: int = counts[place]
        counts[place] = before + weight

    def add_ramp(self, first: int, step: int, count: int, weight: int = 1) -> None:
        """Count `first`, `first + step`, … (`count` of them), each `weight` times.

        The result equals that of adding them one by one; the time taken grows with the buckets they fall into.
        Raises ValueError if the step is negative or a value out of range.
        """
        if step < 0:
            raise ValueError(f"a ramp cannot fall: its step is {step}")
        if count < 1 or weight < 1:
            return
        if step == 0:
            self.add(first, count * weight)
            return
        last = first + product(step, count - 1)
        self._extend(first, last)
        total = self.total + weight * (product(first, count) + product(step, count * (count - 1) // 2))
        value, left = first, count
        while left:
            width = width_of(value)
            rest = width - value % width  # of the bucket, from this value on
            inside = left if value + rest > last else (rest - 1) // step + 1
            self.add(value, inside * weight)
            value += inside * step
            left -= inside
        self.total = total  # what is not the first of its bucket was added as if it were

    def _extend(self, first: int, last: int) -> None:
        """Let `low` and `high` include both."""
        if first < 0 or last >= LIMIT:
            raise ValueError(f"a histogram counts integers from 0 to 2**63 - 2, not {first} to {last}")
        self.low = min(self.low, first)
        self.high = max(self.high, last)
