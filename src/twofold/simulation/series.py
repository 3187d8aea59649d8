"""Step functions of time, such as queue lengths, with bounded memory use."""

from itertools import pairwise, zip_longest
from typing import Final

import msgspec

_MOST_BINS: Final = 1024
_FIRST_WIDTH_PS: Final = 10**6  # a microsecond, shorter than any event in a cluster
_NEVER: Final = -(1 << 63)
_PS_PER_S: Final = 1e12


class Series(msgspec.Struct):
    """Mean and maximum of a quantity that changes in steps, such as a queue length, in up to 1,024 equal time bins."""

    start_ps: int = _NEVER
    at_ps: int = _NEVER
    end_ps: int = _NEVER
    width_ps: int = _FIRST_WIDTH_PS  # of a bin; doubles when the bins are used up
    value: float = 0.0  # from `at_ps` on
    areas: list[float] = []  # value × picoseconds by bin
    peaks: list[float] = []  # maximum by bin

    def set(self, at: int, value: float) -> None:
        """Set the value that holds from time `at` (picoseconds). Raise ValueError if `at` is before the last change."""
        if at != self.at_ps:
            self.finish(at)
        self.value = value

    def finish(self, at: int) -> None:
        """Extend the series to `at` (ps) with its value. Raises ValueError before the last `set` or `finish`."""
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
        """Return the time-weighted mean; if no time has passed, the current value."""
        passed = self.at_ps - self.start_ps
        return sum(self.areas) / passed if passed else self.value

    def maximum(self) -> float:
        """Return the maximum over time; if no time has passed, the current value."""
        return max(self.peaks, default=self.value)

    def points(self) -> list[tuple[float, float, float]]:
        """Return (start in seconds, mean, maximum) of every bin."""
        starts = [self.start_ps + i * self.width_ps for i in range(len(self.areas))]
        widths = [end - start for start, end in pairwise([*starts, self.at_ps])]
        rows = zip(starts, self.areas, widths, self.peaks, strict=True)
        return [(start / _PS_PER_S, area / width, peak) for start, area, width, peak in rows]

    def _fill(self, at: int) -> None:
        while at > self.start_ps + _MOST_BINS * self.width_ps:
            # Merge pairs of bins; an odd last bin stays alone.
            odd, left, right = self.areas[1::2], self.peaks[::2], self.peaks[1::2]
            self.areas = [a + b for a, b in zip_longest(self.areas[::2], odd, fillvalue=0.0)]
            self.peaks = [max(a, b) for a, b in zip_longest(left, right, fillvalue=left[-1] if left else 0.0)]
            self.width_ps *= 2
            self.end_ps = self.start_ps + len(self.areas) * self.width_ps
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
