"""How much comes to an instance, as far as was seen lately.

How far predictions were off lately, on the side that matters.

The mean of what was seen lately.

How many times longer things take than they should, as far as that was seen.
"""

from bisect import insort
from collections import deque
from typing import Final

_KEPT: Final = 32  # prompts: enough to even out their lengths, few enough to follow the traffic


class ArrivalRate:
    """The prompts that were placed on an instance last."""

    def __init__(self) -> None:
        self._came: deque[tuple[float, int]] = deque()
        self._tokens = 0

    def came(self, tokens: int, now: float) -> None:
        """A prompt of so many tokens."""
        self._came.append((now, tokens))
        self._tokens += tokens
        if len(self._came) > _KEPT:
            self._tokens -= self._came.popleft()[1]

    @property
    def tokens_per_s(self) -> float:
        """0 where too few have come to say."""
        if len(self._came) < 2:
            return 0.0
        seconds = self._came[-1][0] - self._came[0][0]
        return (self._tokens - self._came[0][1]) / seconds if seconds > 0.0 else 0.0

    @property
    def tokens_each(self) -> float:
        """Of a prompt, on average."""
        return self._tokens / len(self._came) if self._came else 0.0


_MARGIN_KEPT: Final = (
    100  # predictions: enough to tell the worst tenth of them, few enough to forget what has changed
)
_FEW: Final = 10  # of which nine in ten say nothing
_QUANTILE: Final = 0.9
_MOST: Final = 3.0  # a service that was held up for a moment is not to refuse everybody afterwards


class PredictionMargin:
    """`factor`: how many times longer than predicted things take at most, nine times in ten, and never less than 1."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._ratios: deque[float] = deque()
        self._sorted: list[float] = []

    def turned_out(self, predicted_s: float, real_s: float) -> None:
        """Something that was predicted is known now."""
        if predicted_s <= 0.0:
            return
        ratio = real_s / predicted_s
        self._ratios.append(ratio)
        insort(self._sorted, ratio)
        if len(self._ratios) > _MARGIN_KEPT:
            self._sorted.remove(self._ratios.popleft())
        if len(self._ratios) >= _FEW:
            at = min(int(_QUANTILE * len(self._sorted)), len(self._sorted) - 1)
            self.factor = min(max(1.0, self._sorted[at]), _MOST)


_RUNNING_MEAN_KEPT: Final = (
    128  # enough to even out single requests, few enough to forget the traffic of an hour ago
)


class RunningMean:
    """Of few values their mean; of many one in which each new value counts for one part in 128."""

    def __init__(self) -> None:
        self.value = 0.0
        self._seen = 0

    @property
    def known(self) -> bool:
        """Whether anything was seen."""
        return self._seen > 0

    def add(self, value: float) -> None:
        self._seen = min(self._seen + 1, _RUNNING_MEAN_KEPT)
        self.value += (value - self.value) / self._seen


_SPEED_KEPT: Final = (
    10  # iterations that the latest one is weighed against: a host whose speed drifts is followed within some
)
_SPEED_MOST: Final = 10.0  # a single iteration that was held up says little


class SpeedFactor:
    """The times of a performance model, corrected by what they turned out to be: begins as the model says."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._seen = 1  # what the model says counts like one iteration

    def took(self, expected_s: float, taken_s: float) -> None:
        """Something that the model, uncorrected, says takes `expected_s` took `taken_s`."""
        if expected_s > 0.0:
            self._seen = min(self._seen + 1, _SPEED_KEPT)
            seen = min(max(taken_s / expected_s, 1.0 / _SPEED_MOST), _SPEED_MOST)
            self.factor += (seen - self.factor) / self._seen
