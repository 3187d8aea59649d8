"""The summary of a run: what its finished timelines say about rate and latency."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np

from twofold.request import FinishReason
from twofold.slo import Slo
from twofold.timeline import Moment, Timeline


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Mean, percentiles and maximum of some latencies, in seconds.

    Every percentile in Twofold is numpy's `linear` one: it lies at rank p/100 · (n - 1) of the n sorted
    values, counted from 0, on the straight line between the two neighbours.
    """

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Distribution | None":
        """The distribution of `values` (seconds); None where there are none."""
        array = np.fromiter(values, dtype=np.float64)
        if array.size == 0:
            return None
        p50, p90, p99 = np.percentile(array, (50, 90, 99), method="linear").tolist()
        return cls(mean=float(array.mean()), p50=p50, p90=p90, p99=p99, max=float(array.max()))


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Counts, rates and latencies of a run; None where nothing was there to measure.

    sent = completed + failed + unfinished: a request completed when it ended with a finish reason of its own,
    failed when it ended in an error (`errors` counts them by reason), and is unfinished when the run was
    stopped before it ended. Tokens and latencies are those of the completed requests. Rates are per second
    of `duration_s`. `itl_s` pools the gaps of all requests. The attainment is the share of ended requests
    (completed or failed) that met every bound of `slo`; goodput is their rate.
    """

    sent: int
    completed: int
    failed: int
    unfinished: int
    errors: dict[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    request_throughput: float | None
    output_token_throughput: float | None
    total_token_throughput: float | None
    ttft_s: Distribution | None
    itl_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    slo: Slo | None
    slo_attainment: float | None
    goodput: float | None


def summarise(
    timelines: Iterable[Timeline],
    *,
    duration_s: float | None = None,
    slo: Slo | None = None,
    errors: Mapping[str, str] | None = None,
) -> Summary:
    """Summarise finished timelines.

    `duration_s` is the length of the run, from the first arrival to the last event of any request unless it
    is given. `errors` maps ids of failed requests to reasons; one that it does not name counts as "error".
    """
    ended = list(timelines)
    completed = [timeline for timeline in ended if timeline.complete]
    failed = [timeline for timeline in ended if timeline.finish_reason is FinishReason.ERROR]
    reasons = Counter((errors or {}).get(timeline.request.id, "error") for timeline in failed)
    seconds = _duration(ended) if duration_s is None else duration_s
    prompt_tokens = sum(timeline.request.prompt_tokens for timeline in completed)
    output_tokens = sum(timeline.output_tokens for timeline in completed)
    good = None if slo is None else sum(1 for timeline in completed if slo.met_by(timeline))
    answered = len(completed) + len(failed)
    return Summary(
        sent=len(ended),
        completed=len(completed),
        failed=len(failed),
        unfinished=len(ended) - answered,
        errors=dict(reasons.most_common()),
        duration_s=seconds,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        request_throughput=_ratio(len(completed), seconds),
        output_token_throughput=_ratio(output_tokens, seconds),
        total_token_throughput=_ratio(prompt_tokens + output_tokens, seconds),
        ttft_s=_known(timeline.ttft_s for timeline in completed),
        itl_s=Distribution.of(chain.from_iterable(timeline.itl_s for timeline in completed)),
        tpot_s=_known(timeline.tpot_s for timeline in completed),
        e2e_s=_known(timeline.e2e_s for timeline in completed),
        slo=slo,
        slo_attainment=None if good is None else _ratio(good, answered),
        goodput=None if good is None else _ratio(good, seconds),
    )


def _duration(timelines: Sequence[Timeline]) -> float:
    arrivals = [timeline.moments[Moment.ARRIVED] for timeline in timelines]
    events = [max(timeline.moments.values()) for timeline in timelines]
    return max(events) - min(arrivals) if timelines else 0.0


def _known(values: Iterable[float | None]) -> Distribution | None:
    return Distribution.of(value for value in values if value is not None)


def _ratio(count: float, of: float) -> float | None:
    return count / of if of > 0 else None
