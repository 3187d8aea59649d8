"""Table that compares runs of the same load."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from twofold.reporting.output import table
from twofold.reporting.summary import NOTHING, LatencyDistribution, Summary, rate_text, seconds

_EQUAL = 0.05  # values closer than this, relative to the best, count as equal
_BEST = " ◀"


def comparison_table(runs: Mapping[str, Summary], title: str | None = None) -> Table:
    """Return a table that compares runs, one column per run, with the best value of each row marked."""
    drawn = table(title, ("", *runs), range(1, 1 + len(runs)))
    for name, attribute, field in (
        ("TTFT P50", "ttft_s", "p50"),
        ("TTFT P99", "ttft_s", "p99"),
        ("TPOT P50", "tpot_s", "p50"),
        ("Gap between tokens P99", "itl_s", "p99"),
    ):
        found: list[LatencyDistribution | None] = [getattr(summary, attribute) for summary in runs.values()]
        latencies = [None if each is None else getattr(each, field) for each in found]
        values = [None if latency is None else -latency for latency in latencies]
        drawn.add_row(name, *_marked(values, [seconds(latency) for latency in latencies]))
    attained = [summary.slo_attainment for summary in runs.values()]
    drawn.add_row("Within the SLO", *_marked(attained, [NOTHING if a is None else f"{a:.1%}" for a in attained]))
    rates = [summary.output_token_throughput for summary in runs.values()]
    drawn.add_row("Output tokens", *_marked(rates, [NOTHING if r is None else f"{rate_text(r)} /s" for r in rates]))
    return drawn


def _marked(values: Sequence[float | None], texts: Sequence[str]) -> list[str]:
    """Mark the texts of the highest value, unless all are about equal."""
    known = [value for value in values if value is not None]
    best = max(known, default=0.0)
    close = [value is not None and best - value <= _EQUAL * abs(best) for value in values]
    return [f"{text}{_BEST}" if near and not all(close) else text for text, near in zip(texts, close, strict=True)]
