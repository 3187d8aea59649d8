"""When a simulation may end early: the SLO is missed, whatever the rest of the run would be."""

import math
from collections.abc import Sequence

from twofold.request import Request
from twofold.simulation.histogram import Histogram
from twofold.simulation.statistics import MICRO, Statistics
from twofold.slo import Slo, SlowdownSlo

_EVERY = 16  # looks between two counts over histograms, which cost more than the others
_CLEARLY = 1.001  # beyond a bound: more than a histogram rounds


class Hopeless:
    """Says of a run's statistics that `requests` can no longer keep the SLO."""

    def __init__(self, requests: Sequence[Request], slo: Slo | SlowdownSlo, attainment: float) -> None:
        self._requests = len(requests)
        self._decoding = sum(request.output_tokens > 1 for request in requests)
        self._slo, self._attainment = slo, attainment
        self._looks = 0

    def __call__(self, statistics: Statistics) -> bool:
        lost = statistics.rejected + statistics.failed
        if isinstance(self._slo, Slo):
            missed = lost + statistics.completed - statistics.slo_met
            return (self._requests - missed) / self._requests < self._attainment
        self._looks += 1
        return bool(lost) or (self._looks % _EVERY == 0 and self._slow(statistics, self._slo))

    def _slow(self, statistics: Statistics, slo: SlowdownSlo) -> bool:
        slowdowns = statistics.slowdowns
        return slowdowns is not None and (
            _beyond(Histogram.of(slowdowns.ttft, 1 / MICRO), slo.ttft, self._requests)
            or _beyond(Histogram.of(slowdowns.tpot, 1 / MICRO), slo.tpot, self._decoding)
            or _beyond(Histogram.of(slowdowns.e2e, 1 / MICRO), slo.e2e, self._requests)
        )


def _beyond(histogram: Histogram, bounds: dict[int, float], total: int) -> bool:
    """Whether some percentile of `total` values will be over its bound, so many are over it already.

    The percentile is at least the value of rank floor((total − 1)·p/100), counted from 0.
    """
    count = histogram.count
    for percentile, bound in bounds.items():
        needed = total - math.floor((total - 1) * percentile / 100)
        if count >= needed:
            within = histogram.fraction_at_most(bound * _CLEARLY) or 0.0
            if count * (1.0 - within) >= needed:
                return True
    return False
