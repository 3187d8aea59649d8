"""Tables of summaries for the terminal, in units that read well."""

from collections.abc import Mapping

from rich.table import Table

from twofold.reporting.summary import Distribution, Summary
from twofold.slo import Slo

NOTHING = "-"
LATENCIES = (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"))
STATISTICS = (("mean", "mean"), ("P50", "p50"), ("P90", "p90"), ("P99", "p99"), ("max", "max"))


def summary_table(
    summary: Summary, title: str | None = None, notes: Mapping[str, str] | None = None
) -> Table:
    """One run: a row per latency, then counts and rates, then `notes`, rows of the caller's own."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading, _ in STATISTICS:
        table.add_column(heading, justify="right")
    for name, attribute in LATENCIES:
        values = [_statistic(getattr(summary, attribute), field) for _, field in STATISTICS]
        table.add_row(name, *values)
    table.add_section()
    for label, value in {**_totals(summary), **(notes or {})}.items():
        table.add_row(label, value)
    return table


def comparison_table(runs: Mapping[str, Summary], title: str | None = None) -> Table:
    """Several runs side by side, one column each, under the names they are given."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    for name, attribute in LATENCIES:
        for heading, field in STATISTICS:
            values = [_statistic(getattr(summary, attribute), field) for summary in runs.values()]
            table.add_row(f"{name} {heading}", *values)
        table.add_section()
    totals = [_totals(summary) for summary in runs.values()]
    for label in dict.fromkeys(label for total in totals for label in total):
        table.add_row(label, *(total.get(label, NOTHING) for total in totals))
    return table


def seconds(value: float | None) -> str:
    """A time with its unit: milliseconds below one second; `-` where there is none."""
    if value is None:
        return NOTHING
    if abs(value) < 1.0:
        return f"{value * 1e3:.2f} ms" if abs(value) < 0.1 else f"{value * 1e3:.1f} ms"
    return f"{value:.2f} s" if abs(value) < 100.0 else f"{value:,.0f} s"


def bounds(slo: Slo) -> list[tuple[str, str]]:
    """What an SLO bounds, and by how much."""
    named = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s))
    return [(name, seconds(bound)) for name, bound in named if bound is not None]


def _statistic(distribution: Distribution | None, field: str) -> str:
    return NOTHING if distribution is None else seconds(getattr(distribution, field))


def _totals(summary: Summary) -> dict[str, str]:
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
    if value is None:
        return NOTHING
    return f"{value:,.2f} /s" if value < 100.0 else f"{value:,.0f} /s"
