"""Statistics of a trace: counts, arrival times, lengths and possible prefix reuse."""

import math
from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np

from twofold.request import BlockKey, Request


class LengthSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of prompt or output lengths in tokens."""

    total: int
    min: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: int


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a trace. An undefined statistic is None.

    `gap_cv` is the coefficient of variation of the gaps between arrivals: 1 for Poisson arrivals. `highest_reuse` is
    the hit rate of an infinite prefix cache.
    """

    requests: int
    duration_s: float
    requests_per_s: float | None
    gap_cv: float | None
    prompt_tokens: LengthSummary
    output_tokens: LengthSummary
    prefix_blocks: int
    distinct_prefix_blocks: int
    highest_reuse: float | None


def _length_summary(counts: Counter[int]) -> LengthSummary:
    total = sum(value * count for value, count in counts.items())
    lengths = np.repeat(np.array(list(counts)), list(counts.values()))
    p50, p90, p99 = np.percentile(lengths, (50, 90, 99)).tolist()
    least, most = min(counts), max(counts)
    return LengthSummary(total=total, min=least, mean=total / len(lengths), p50=p50, p90=p90, p99=p99, max=most)


class GapStatistics:
    """Mean and coefficient of variation of the gaps between arrivals, computed in one pass (Welford's method)."""

    def __init__(self) -> None:
        self.count, self.mean_s, self._squares, self._latest = 0, 0.0, 0.0, math.nan

    def add(self, arrival_s: float) -> None:
        if not math.isnan(self._latest):
            self.count += 1
            gap = arrival_s - self._latest
            distance = gap - self.mean_s
            self.mean_s += distance / self.count
            self._squares += distance * (gap - self.mean_s)
        self._latest = arrival_s

    @property
    def cv(self) -> float | None:
        return math.sqrt(self._squares / self.count) / self.mean_s if self.count and self.mean_s else None


def summarise(requests: Iterable[Request]) -> TraceSummary:
    """Compute the statistics of a stream of requests. Raises ValueError for an empty stream."""
    prompts, outputs, gaps = Counter[int](), Counter[int](), GapStatistics()
    distinct: set[BlockKey] = set()
    blocks, first_s, last_s = 0, None, 0.0
    for request in requests:
        first_s, last_s = request.arrival_s if first_s is None else first_s, request.arrival_s
        gaps.add(request.arrival_s)
        prompts[request.prompt_tokens] += 1
        outputs[request.output_tokens] += 1
        distinct.update(request.prefix_blocks)
        blocks += len(request.prefix_blocks)
    if first_s is None:
        raise ValueError("there is no request to summarise")
    return TraceSummary(
        requests=gaps.count + 1,
        duration_s=last_s - first_s,
        requests_per_s=gaps.count / (last_s - first_s) if last_s > first_s else None,
        gap_cv=gaps.cv,
        prompt_tokens=_length_summary(prompts),
        output_tokens=_length_summary(outputs),
        prefix_blocks=blocks,
        distinct_prefix_blocks=len(distinct),
        highest_reuse=1 - len(distinct) / blocks if blocks else None,
    )
