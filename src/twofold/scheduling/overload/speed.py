"""How many times longer things take than they should, as far as that was seen."""

from typing import Final

_KEPT: Final = (
    10  # iterations that the latest one is weighed against: a host whose speed drifts is followed within some
)
_MOST: Final = 10.0  # a single iteration that was held up says little


class Speed:
    """The times of a performance model, corrected by what they turned out to be: begins as the model says."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._seen = 1  # what the model says counts like one iteration

    def took(self, expected_s: float, taken_s: float) -> None:
        """Something that the model, uncorrected, says takes `expected_s` took `taken_s`."""
        if expected_s > 0.0:
            self._seen = min(self._seen + 1, _KEPT)
            seen = min(max(taken_s / expected_s, 1.0 / _MOST), _MOST)
            self.factor += (seen - self.factor) / self._seen
