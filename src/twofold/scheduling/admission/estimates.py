"""Running estimates of overload control: arrival rates, means, prediction margins and speed corrections."""

from bisect import insort
from collections import deque
from typing import Final

_RATE_PROMPTS: Final = 32  # averages out prompt lengths and still follows the traffic
_MEAN_VALUES: Final = 128
_MARGIN_PREDICTIONS: Final = 100
_MARGIN_MIN_PREDICTIONS: Final = 10
_MARGIN_QUANTILE: Final = 0.9
_MARGIN_MAX: Final = 3.0  # limits the rejections after a short stall of the service
_SPEED_ITERATIONS: Final = 10  # follows a host with drifting speed
_SPEED_MAX: Final = 10.0  # limits the effect of a single delayed iteration


class ArrivalRate:
    """The rate and mean length of the prompts most recently placed on an instance."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, int]] = deque()
        self._tokens = 0

    def add(self, tokens: int, now: float) -> None:
        self._arrivals.append((now, tokens))
        self._tokens += tokens
        if len(self._arrivals) > _RATE_PROMPTS:
            self._tokens -= self._arrivals.popleft()[1]

    @property
    def tokens_per_s(self) -> float:
        """0 with fewer than two arrivals."""
        if len(self._arrivals) < 2:
            return 0.0
        seconds = self._arrivals[-1][0] - self._arrivals[0][0]
        return (self._tokens - self._arrivals[0][1]) / seconds if seconds > 0.0 else 0.0

    @property
    def tokens_per_prompt(self) -> float:
        return self._tokens / len(self._arrivals) if self._arrivals else 0.0


class PredictionMargin:
    """The 90th percentile of actual over predicted time as `factor`, between 1 and 3."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._ratios: deque[float] = deque()
        self._sorted: list[float] = []

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """Compare a prediction with the outcome."""
        if predicted_s <= 0.0:
            return
        ratio = actual_s / predicted_s
        self._ratios.append(ratio)
        insort(self._sorted, ratio)
        if len(self._ratios) > _MARGIN_PREDICTIONS:
            self._sorted.remove(self._ratios.popleft())
        if len(self._ratios) >= _MARGIN_MIN_PREDICTIONS:
            at = min(int(_MARGIN_QUANTILE * len(self._sorted)), len(self._sorted) - 1)
            self.factor = min(max(1.0, self._sorted[at]), _MARGIN_MAX)


class RunningMean:
    """The mean of the first 128 values; after that, each new value has a weight of 1/128."""

    def __init__(self) -> None:
        self.value = 0.0
        self._seen = 0

    @property
    def known(self) -> bool:
        """Whether there is at least one value."""
        return self._seen > 0

    def add(self, value: float) -> None:
        self._seen = min(self._seen + 1, _MEAN_VALUES)
        self.value += (value - self.value) / self._seen


class SpeedFactor:
    """The ratio of measured to modelled iteration times; starts at 1."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._seen = 1  # the model weighs as much as one iteration

    def observe(self, modelled_s: float, measured_s: float) -> None:
        """Learn from an iteration; `modelled_s` is the time of the model without correction."""
        if modelled_s > 0.0:
            self._seen = min(self._seen + 1, _SPEED_ITERATIONS)
            ratio = min(max(measured_s / modelled_s, 1.0 / _SPEED_MAX), _SPEED_MAX)
            self.factor += (ratio - self.factor) / self._seen
