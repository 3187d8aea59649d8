"""The mean of what was seen lately."""

from typing import Final

_KEPT: Final = 128  # enough to even out single requests, few enough to forget the traffic of an hour ago


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
        self._seen = min(self._seen + 1, _KEPT)
        self.value += (value - self.value) / self._seen
