"""Trend of a series of samples, and a verdict on its growth."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np

PARTS = 12
_T95 = 2.23  # Student's t for a two-sided 95% interval and PARTS - 2 degrees of freedom
HOUR_S = 3600.0
FLAT_PER_H, UNCLEAR_PER_H = 0.01, 0.05
RULE = (
    f"The slope is fitted to the means of {PARTS} parts of the time after the warm-up, with a 95% interval from their "
    f"scatter. Flat: the interval is not above {FLAT_PER_H:.0%} of the start per hour. Unclear: flat, but it reaches "
    f"{UNCLEAR_PER_H:.0%} per hour. Stepped: flat over the second half only, so not a leak. Counts: at most as many at "
    f"rest after the load as before."
)


class Verdict(StrEnum):
    FLAT = "flat"
    UNCLEAR = "unclear"
    STEPPED = "stepped"
    GROWS = "grows"


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """Linear trend of a series of samples, with a 95% confidence interval of the slope per hour."""

    start: float
    end: float
    per_h: float
    noise_per_h: float

    @classmethod
    def of(cls, times_s: Sequence[float], values: Sequence[float]) -> "Trend":
        """Fit a trend to a series. Raises ValueError for fewer than `PARTS` samples."""
        if len(values) < PARTS:
            raise ValueError(f"{len(values)} samples are not enough for {PARTS} parts: run longer or sample more often")
        x = np.array([part.mean() for part in np.array_split(np.array(times_s), PARTS)]) / HOUR_S
        y = np.array([part.mean() for part in np.array_split(np.array(values, dtype=np.float64), PARTS)])
        from_mean = x - x.mean()
        spread = float((from_mean**2).sum())
        slope = float((from_mean * y).sum()) / spread
        scatter = y - y.mean() - slope * from_mean
        error = float(np.sqrt((scatter**2).sum() / (PARTS - 2) / spread))
        return cls(start=float(y[0]), end=float(y[-1]), per_h=slope, noise_per_h=_T95 * error)

    @property
    def verdict(self) -> Verdict:
        if self.per_h - self.noise_per_h > FLAT_PER_H * self.start:
            return Verdict.GROWS
        if self.per_h + self.noise_per_h > UNCLEAR_PER_H * self.start:
            return Verdict.UNCLEAR
        return Verdict.FLAT


def verdict_of(times_s: Sequence[float], values: Sequence[float]) -> Verdict:
    """Classify the growth of a series of samples. Raises ValueError for too few samples."""
    half = len(values) // 2
    whole, late = Trend.of(times_s, values).verdict, Trend.of(times_s[half:], values[half:]).verdict
    return Verdict.STEPPED if whole is Verdict.GROWS and late is not Verdict.GROWS else whole
