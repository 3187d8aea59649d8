"""Rates and latencies of a run, computed from request timelines and formatted as terminal tables."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np
from rich.table import Table

from twofold.reporting.output import table
from twofold.request import FinishReason
from twofold.slo import Slo
from twofold.timeline import Moment, Timeline


class LatencyDistribution(msgspec.Struct, frozen=True, kw_only=True):
    """Mean, percentiles and maximum of a latency, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "LatencyDistribution | None":
        """Compute the distribution of latencies in seconds; None if all `values` are None."""
        array = np.fromiter((value for value in values if value is not None), dtype=np.float64)
        if array.size == 0:
            return None
        p50, p90, p99 = np.percentile(array, (50, 90, 99), method="linear").tolist()
        return cls(mean=float(array.mean()), p50=p50, p90=p90, p99=p99, max=float(array.max()))


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Request counts of a run, and token counts, throughput and latencies of its completed requests."""

    sent: int  # completed, failed or unfinished
    completed: int
    failed: int
    unfinished: int
    errors: dict[str, int]  # numbers of failed requests by reason
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    request_throughput: float | None
    output_token_throughput: float | None
    total_token_throughput: float | None
    ttft_s: LatencyDistribution | None
    itl_s: LatencyDistribution | None  # all gaps between tokens
    tpot_s: LatencyDistribution | None
    e2e_s: LatencyDistribution | None
    slo: Slo | None
    slo_attainment: float | None  # share of completed and failed requests that meet all bounds
    goodput: float | None


def summarize(
    timelines: Iterable[Timeline],
    *,
    duration_s: float | None = None,
    slo: Slo | None = None,
    errors: Mapping[str, str] | None = None,
) -> Summary:
    """Summarize the timelines of a run. `errors` maps ids of failed requests to reasons."""
    ended = list(timelines)
    completed = [timeline for timeline in ended if timeline.complete]
    failed = [timeline for timeline in ended if timeline.finish_reason is FinishReason.ERROR]
    reasons = Counter((errors or {}).get(timeline.request.id, "error") for timeline in failed)
    # By default, from the first arrival to the last event.
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
        request_throughput=ratio(len(completed), seconds),
        output_token_throughput=ratio(output_tokens, seconds),
        total_token_throughput=ratio(prompt_tokens + output_tokens, seconds),
        ttft_s=LatencyDistribution.of(timeline.ttft_s for timeline in completed),
        itl_s=LatencyDistribution.of(chain.from_iterable(timeline.itl_s for timeline in completed)),
        tpot_s=LatencyDistribution.of(timeline.tpot_s for timeline in completed),
        e2e_s=LatencyDistribution.of(timeline.e2e_s for timeline in completed),
        slo=slo,
        slo_attainment=None if good is None else ratio(good, answered),
        goodput=None if good is None else ratio(good, seconds),
    )


def _duration(timelines: Sequence[Timeline]) -> float:
    arrivals = [timeline.moments[Moment.ARRIVED] for timeline in timelines]
    events = [max(timeline.moments.values()) for timeline in timelines]
    return max(events) - min(arrivals) if timelines else 0.0


def ratio(count: float, of: float) -> float | None:
    """Return `count / of`, or None if `of` is 0."""
    return count / of if of > 0 else None


NOTHING = "-"
LATENCIES = (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"))
STATISTICS = (("mean", "mean"), ("P50", "p50"), ("P90", "p90"), ("P99", "p99"), ("max", "max"))


def summary_table(summary: Summary, title: str | None = None, notes: Mapping[str, str] | None = None) -> Table:
    """Return a table of one run: latencies, counts and rates. `notes` has further rows (label and text)."""
    drawn = table(title, ("", *(heading for heading, _ in STATISTICS)), range(1, 1 + len(STATISTICS)))
    for name, attribute in LATENCIES:
        found: LatencyDistribution | None = getattr(summary, attribute)
        drawn.add_row(name, *(seconds(None if found is None else getattr(found, field)) for _, field in STATISTICS))
    drawn.add_section()
    for label, value in {**totals(summary), **(notes or {})}.items():
        drawn.add_row(label, value)
    return drawn


def seconds(value: float | None) -> str:
    """Format a time: in ms below one second, else in s. None gives `-`."""
    if value is None:
        return NOTHING
    if abs(value) < 1.0:
        return f"{value * 1e3:.2f} ms" if abs(value) < 0.1 else f"{value * 1e3:.1f} ms"
    return f"{value:.2f} s" if abs(value) < 100.0 else f"{value:,.0f} s"


def bounds(slo: Slo) -> list[tuple[str, str]]:
    """Return the bounds of an SLO as (latency name, bound as text) pairs."""
    named = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s))
    return [(name, seconds(bound)) for name, bound in named if bound is not None]


def totals(summary: Summary) -> dict[str, str]:
    """Return counts, rates and SLO attainment of a run as texts, by label."""
    rows = {
        "Requests sent": f"{summary.sent:,}",
        "Completed": f"{summary.completed:,}",
        "Failed": f"{summary.failed:,}",
    }
    rows |= {f"  {reason}": f"{count:,}" for reason, count in summary.errors.items()}
    if summary.unfinished:
        rows["Unfinished"] = f"{summary.unfinished:,}"
    rows |= {
        "Duration": seconds(summary.duration_s),
        "Requests": _rate(summary.request_throughput),
        "Output tokens": _rate(summary.output_token_throughput),
        "All tokens": _rate(summary.total_token_throughput),
    }
    if summary.slo is not None:
        attained = summary.slo_attainment
        rows["SLO"] = "\n".join(f"{name} ≤ {bound}" for name, bound in bounds(summary.slo)) or NOTHING
        rows["SLO attainment"] = NOTHING if attained is None else f"{attained:.1%}"
        rows["Goodput"] = _rate(summary.goodput)
    return rows


def _rate(value: float | None) -> str:
    return NOTHING if value is None else f"{rate_text(value)} /s"


def rate_text(rate: float) -> str:
    """Format a rate, with two decimals below 100."""
    return f"{rate:,.2f}" if rate < 100.0 else f"{rate:,.0f}"
