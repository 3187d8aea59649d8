"""Fast counting of non-negative integers in buckets.

A bucket holds the values that share their top eleven bits: every value below 2,048 has its own bucket, and larger
buckets are at most 2⁻¹⁰ of their values wide (the layout of HdrHistogram). A bucket is identified by its lowest value.
"""

from itertools import compress
from typing import Final

from twofold.cluster.timing import product

# Upper limit of values (106 days in picoseconds), and the initial `low`.
LIMIT: Final = (1 << 63) - 1
_ROWS: Final = 54  # values below 1,024, then one row per bit length up to 63
_ROW: Final = 1024
_PLACES: Final = range(_ROW)


def width_of(lowest: int) -> int:
    """Number of integers in the bucket that starts at `lowest`."""
    return 1 << max(0, lowest.bit_length() - 11)


class Tally:
    """Bucket counts with the exact total, minimum and maximum (−1 when empty) of all values."""

    __slots__ = ("_rows", "high", "low", "total")

    def __init__(self) -> None:
        # One row per bit length of values; rows without values are empty.
        self._rows: list[list[int]] = [[]] * _ROWS
        self.total = 0
        self.low = LIMIT
        self.high = -1

    @property
    def counts(self) -> dict[int, int]:
        """Counts of the non-empty buckets, by lowest value in rising order."""
        return {
            (_ROW + place << row - 1) if row else place: counts[place]
            for row, counts in enumerate(self._rows)
            for place in compress(_PLACES, counts)
        }

    def add(self, value: int, weight: int = 1) -> None:
        """Count `value` `weight` times (at least once); raises ValueError if out of range."""
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
        """Count `first`, `first + step`, … (`count` values), each `weight` times.

        Equals adding them one by one, in time proportional to the number of buckets.
        Raises ValueError if the step is negative or a value is out of range.
        """
        if step < 0:
            raise ValueError(f"the step of a ramp must be at least 0, not {step}")
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
            rest = width - value % width  # of the bucket, from this value
            inside = left if value + rest > last else (rest - 1) // step + 1
            self.add(value, inside * weight)
            value += inside * step
            left -= inside
        self.total = total  # corrects values added as the first of their bucket

    def _extend(self, first: int, last: int) -> None:
        """Extend `low` and `high` to include both values."""
        if first < 0 or last >= LIMIT:
            raise ValueError(f"a histogram counts integers from 0 to 2**63 - 2, not {first} to {last}")
        self.low = min(self.low, first)
        self.high = max(self.high, last)
