"""How far predictions were off lately, on the side that matters."""

from bisect import insort
from collections import deque
from typing import Final

_KEPT: Final = (
    100  # predictions: enough to tell the worst tenth of them, few enough to forget what has changed
)
_FEW: Final = 10  # of which nine in ten say nothing
_QUANTILE: Final = 0.9
_MOST: Final = 3.0  # a service that was held up for a moment is not to refuse everybody afterwards


class Margin:
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
        if len(self._ratios) > _KEPT:
            self._sorted.remove(self._ratios.popleft())
        if len(self._ratios) >= _FEW:
            at = min(int(_QUANTILE * len(self._sorted)), len(self._sorted) - 1)
            self.factor = min(max(1.0, self._sorted[at]), _MOST)
