"""Latency percentiles over a sliding window of time."""

import math
from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from twofold.serving.telemetry.snapshot import LatencySeries, LatencySummary, RecentSummary, ThroughputSeries
from twofold.slo import Slo
from twofold.timeline import Moment, Timeline

# Bucket bounds grow by this factor, so percentiles are accurate to 5%.
_GROWTH = 1.1
_BUCKETS_PER_E = 1 / math.log(_GROWTH)
_OFFSET, _BUCKETS = 121, 200  # from 10 µs to half an hour; latencies beyond are counted at the ends
_SHORTEST_S = 1e-5
RANKS = (0.5, 0.9, 0.99)
BIN_S = 10.0
HISTORY = 2160  # bins: six hours

Floats = npt.NDArray[np.float64]


class LatencyHistogram:
    """Histogram of latencies in seconds, with percentiles accurate to 5%."""

    __slots__ = ("_found", "buckets", "count", "within")

    def __init__(self) -> None:
        self._found: tuple[int, list[float | None]] = (-1, [])
        self.buckets = np.zeros(_BUCKETS, np.int32)  # a dict would take ten times as much memory in six hours
        self.count = 0
        self.within = 0  # latencies within their bound

    def add(self, latencies: Floats, bound_s: float) -> None:
        """Add an array of latencies in seconds."""
        buckets = (np.log(np.maximum(latencies, _SHORTEST_S)) * _BUCKETS_PER_E + _OFFSET).astype(int)
        self.buckets += np.bincount(np.minimum(buckets, _BUCKETS - 1), minlength=_BUCKETS).astype(np.int32)
        self.count += len(latencies)
        self.within += int(np.count_nonzero(latencies <= bound_s))

    def percentiles(self) -> list[float | None]:
        """Return the P50, P90 and P99 in seconds; all are None if the histogram is empty."""
        if self._found[0] != self.count:  # closed bins no longer change
            self._found = (self.count, self._percentiles())
        return self._found[1]

    def _percentiles(self) -> list[float | None]:
        if not self.count:
            return [None] * len(RANKS)
        reached = np.searchsorted(self.buckets.cumsum(), np.array(RANKS) * self.count)
        return [float(f"{_GROWTH ** (number - _OFFSET + 0.5):.4g}") for number in reached.tolist()]

    @classmethod
    def sum(cls, parts: Iterable["LatencyHistogram"]) -> "LatencyHistogram":
        total = cls()
        for part in parts:
            total.count += part.count
            total.within += part.within
            total.buckets += part.buckets
        return total


class _Bin:
    __slots__ = ("good", "itl", "requests", "tokens", "ttft")

    def __init__(self) -> None:
        self.ttft, self.itl = LatencyHistogram(), LatencyHistogram()
        self.requests = self.good = self.tokens = 0


class LatencyWindow:
    """Latencies, tokens and finished requests in each of the last `bins` time bins of `bin_s` seconds."""

    def __init__(self, slo: Slo, start_s: float, *, bin_s: float = BIN_S, bins: int = HISTORY) -> None:
        self._slo, self._start_s, self._bin_s = slo, start_s, bin_s
        self._ttft_bound_s = math.inf if slo.ttft_s is None else slo.ttft_s
        self._itl_bound_s = math.inf if slo.tpot_s is None else slo.tpot_s
        self._bins = deque((_Bin() for _ in range(bins)), bins)  # all made now: memory does not grow for hours
        self._latest = 0
        self._taken: dict[str, int] = {}

    def take(self, timelines: Iterable[Timeline]) -> None:
        """Add the latencies of the tokens that requests have generated since the last call."""
        times: list[float] = []  # of each request: the time before its new tokens, and those of the tokens
        starts: list[int] = []
        first: list[int] = []  # places of first tokens
        for timeline in timelines:
            all_s, request_id = timeline.token_times_s, timeline.request.id
            taken = self._taken.get(request_id, 0)
            self._taken[request_id] = len(all_s)
            starts.append(len(times))
            if not taken and all_s:
                first.append(len(times) + 1)
            times.append(all_s[taken - 1] if taken else timeline.moments[Moment.ARRIVED])
            times += all_s[taken:]
        at_s = np.array(times)
        latencies, is_token, is_first = np.diff(at_s, prepend=0.0), np.ones(len(at_s), bool), np.zeros(len(at_s), bool)
        is_token[starts], is_first[first] = False, True
        numbers = ((at_s - self._start_s) // self._bin_s).astype(int)
        for number in np.unique(numbers[is_token]).tolist():
            bin_ = self._bin(number)
            if bin_ is not None:
                here = is_token & (numbers == number)
                bin_.tokens += int(np.count_nonzero(here))
                bin_.ttft.add(latencies[here & is_first], self._ttft_bound_s)
                bin_.itl.add(latencies[here & ~is_first], self._itl_bound_s)

    def end(self, timeline: Timeline, now: float, *, good: bool) -> None:
        """Add a finished request after a `take` of its tokens; `good` is whether it met the SLO."""
        del self._taken[timeline.request.id]
        bin_ = self._bin(self._number(now))
        if bin_ is not None:
            bin_.requests += 1
            bin_.good += good

    def flow(self, now: float, last: int = HISTORY) -> ThroughputSeries:
        """Return the series of the `last` bins; the last one is the current bin."""
        self._bin(self._number(now))
        bins = self._last(last)
        return ThroughputSeries(
            bin_s=self._bin_s,
            requests=[each.requests for each in bins],
            good=[each.good for each in bins],
            tokens=[each.tokens for each in bins],
            ttft=_series(each.ttft for each in bins),
            itl=_series(each.itl for each in bins),
        )

    def recent(self, now: float, window_s: float) -> RecentSummary:
        """Return a summary of the last `window_s` seconds."""
        self._bin(self._number(now))
        bins = self._last(math.ceil(window_s / self._bin_s))
        covered_s = (len(bins) - 1) * self._bin_s + (now - self._start_s) % self._bin_s
        requests, good = sum(each.requests for each in bins), sum(each.good for each in bins)
        bounded = self._slo != Slo()
        return RecentSummary(
            window_s=covered_s,
            requests=requests,
            tokens_per_s=sum(each.tokens for each in bins) / max(covered_s, 1e-3),
            good=good / requests if requests and bounded else None,
            ttft=_summary(LatencyHistogram.sum(each.ttft for each in bins), self._ttft_bound_s),
            itl=_summary(LatencyHistogram.sum(each.itl for each in bins), self._itl_bound_s),
        )

    def _last(self, count: int) -> list[_Bin]:
        """Return the last `count` bins that have begun."""
        return list(self._bins)[-min(count, self._latest + 1) :]

    def _number(self, at_s: float) -> int:
        return int((at_s - self._start_s) // self._bin_s)

    def _bin(self, number: int) -> _Bin | None:
        while self._latest < number:
            missing = number - self._latest
            self._latest += max(1, missing - len(self._bins))
            self._bins.append(_Bin())
        age = self._latest - number
        return self._bins[-1 - age] if age < len(self._bins) else None  # None: before the window


def _series(histograms: Iterable[LatencyHistogram]) -> LatencySeries:
    points = [each.percentiles() for each in histograms]
    p50, p90, p99 = ([point[k] for point in points] for k in range(len(RANKS)))
    return LatencySeries(p50_s=p50, p90_s=p90, p99_s=p99)


def _summary(histogram: LatencyHistogram, bound_s: float) -> LatencySummary:
    p50, p90, p99 = histogram.percentiles()
    known = histogram.count and bound_s != math.inf
    within = histogram.within / histogram.count if known else None
    return LatencySummary(count=histogram.count, p50_s=p50, p90_s=p90, p99_s=p99, within=within)
