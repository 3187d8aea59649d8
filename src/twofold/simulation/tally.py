"""Counting non-negative integers into buckets, as quickly as can be: several are counted for each request.

A bucket holds the values that share their top eleven bits, so every value below 2,048 has a bucket of its own
and above that a bucket is at most 2⁻¹⁰ of its values wide (the layout of HdrHistogram). A bucket is named by
the lowest value in it, and only those that hold something are kept.
"""

from typing import Final

# Stands for "no value yet" in `low`, and so bounds the values: in picoseconds it is 106 days.
LIMIT: Final = (1 << 63) - 1


def width_of(lowest: int) -> int:
    """How many integers the bucket that begins at `lowest` holds."""
    return 1 << max(0, lowest.bit_length() - 11)


class Tally:
    """`counts` by bucket, the exact `total` of all values, the least and the greatest (−1 without any)."""

    __slots__ = ("counts", "high", "low", "total")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.total = 0
        self.low = LIMIT
        self.high = -1

    def add(self, value: int, weight: int = 1) -> None:
        """Count `value` `weight` times (at least once); raises ValueError if it is out of range."""
        if value < self.low or value > self.high:
            self._extend(value, value)
        shift = value.bit_length() - 11
        bucket = value >> shift << shift if shift > 0 else value
        counts = self.counts
        counts[bucket] = counts.get(bucket, 0) + weight
        self.total += value if weight == 1 else value * weight

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
            shift = value.bit_length() - 11
            width = 1 << shift if shift > 0 else 1
            bucket = value // width * width
            inside = left if bucket + width > last else (bucket + width - 1 - value) // step + 1
            counts[bucket] = counts.get(bucket, 0) + inside * weight
            value += inside * step
            left -= inside

    def _extend(self, first: int, last: int) -> None:
        """Let `low` and `high` include both."""
        if first < 0 or last >= LIMIT:
            raise ValueError(f"a histogram counts integers from 0 to 2**63 - 2, not {first} to {last}")
        self.low = min(self.low, first)
        self.high = max(self.high, last)
