"""The pace at which requests end while others wait for them to."""

from collections import deque
from typing import Final

_KEPT: Final = (
    64  # ends that are remembered: enough to even out single requests, few enough to forget an hour ago
)


class Pace:
    """Remembers the gaps between the latest ends, and from them tells how long the next ones take.

    Only time counts in which the service was saturated: how often requests end when few come says nothing about
    how often they would if many waited. The gap that is still open counts as soon as it is the longest, so a service
    that stalls is not remembered as fast.
    """

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=_KEPT)
        self._open = 0.0
        self._at = 0.0
        self._saturated = False

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return len(self._gaps) > 0

    def ended(self, now: float) -> None:
        """A request ended."""
        self._advance(now)
        if self._saturated:
            self._gaps.append(self._open)
            self._open = 0.0

    def saturated(self, saturated: bool, now: float) -> None:
        """From now on, a request that came would have to wait, or would not."""
        self._advance(now)
        self._saturated = saturated

    def mean_gap_s(self, now: float) -> float:
        """Seconds from one end to the next, on average."""
        gaps = self._recent(now)
        return sum(gaps, 0.0) / len(gaps)

    def time_for(self, ends: int, now: float) -> float:
        """Seconds in which `ends` requests end, taken from the slowest stretch of that many in memory.

        The slowest and not the mean: ends come in bursts where requests are batched, and a promise made from the
        mean would be broken between two bursts. Before anything has ended it is as long as that has been waited for.
        """
        gaps = self._recent(now)
        if not self._gaps:
            return gaps[0] if ends else 0.0
        rounds, rest = divmod(ends, len(gaps))
        return rounds * sum(gaps, 0.0) + _slowest(gaps, rest)

    def _advance(self, now: float) -> None:
        if self._saturated:
            self._open += max(0.0, now - self._at)
        self._at = now

    def _recent(self, now: float) -> list[float]:
        """At least one gap."""
        gaps = list(self._gaps)
        still_open = self._open + (max(0.0, now - self._at) if self._saturated else 0.0)
        if not gaps or still_open > max(gaps):
            gaps.append(still_open)
        return gaps


def _slowest(gaps: list[float], count: int) -> float:
    """The largest sum of `count` neighbouring gaps, of which there are at least that many."""
    window = slowest = sum(gaps[:count], 0.0)
    for entering, leaving in zip(gaps[count:], gaps, strict=False):
        window += entering - leaving
        slowest = max(slowest, window)
    return slowest
