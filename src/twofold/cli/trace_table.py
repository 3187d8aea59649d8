"""How `twofold trace show` prints a trace."""

from rich.console import Group
from rich.table import Table

from twofold.planning.capacity.replay import TraceReuse
from twofold.workload.summary import LengthSummary, TraceSummary

_HEADINGS = ("min", "mean", "P50", "P90", "P99", "max", "total")


def trace_tables(title: str, summary: TraceSummary) -> Group:
    """Counts and times of a trace, then its lengths."""
    facts = Table(title=title, title_justify="left", show_header=False)
    for label, value in _facts(summary).items():
        facts.add_row(label, value)
    lengths = Table("", *_HEADINGS, title="Lengths in tokens", title_justify="left")
    for column in lengths.columns[1:]:
        column.justify = "right"
    lengths.add_row("prompt", *_cells(summary.prompt_tokens))
    lengths.add_row("output", *_cells(summary.output_tokens))
    return Group(facts, lengths)


def reuse_table(found: TraceReuse) -> Table:
    """Hit rates of caches, one row for each capacity and one column for each eviction rule."""
    rates = {(cache.capacity, cache.eviction): cache.rate for cache in found.caches}
    evictions = dict.fromkeys(cache.eviction for cache in found.caches)
    table = Table()
    for heading in ("Blocks", *evictions):
        table.add_column(heading, justify="right")
    for capacity in sorted({cache.capacity for cache in found.caches}):
        table.add_row(f"{capacity:,}", *(f"{rates[capacity, eviction]:.2%}" for eviction in evictions))
    return table


def _facts(summary: TraceSummary) -> dict[str, str]:
    facts = {"Requests": f"{summary.requests:,}", "Duration": f"{summary.duration_s:,.1f} s"}
    if summary.requests_per_s is not None:
        facts["Rate"] = f"{summary.requests_per_s:,.3f} requests/s"
    if summary.gap_cv is not None:
        facts["CV of gaps"] = _spread(summary.gap_cv)
    if summary.highest_reuse is not None:
        facts["Prefix blocks"] = f"{summary.prefix_blocks:,}, {summary.distinct_prefix_blocks:,} distinct"
        facts["Highest reuse"] = f"{summary.highest_reuse:.2%} of prefix blocks"
    return facts


def _spread(cv: float) -> str:
    """What the spread of the gaps says: Poisson arrivals have 1."""
    return f"{cv:.3f} (gamma arrivals of burstiness {cv**-2:.3g})" if cv > 0.001 else f"{cv:.3f} (constant)"


def _cells(lengths: LengthSummary) -> list[str]:
    whole = (lengths.max, lengths.total)
    quantiles = (lengths.p50, lengths.p90, lengths.p99)
    return [
        f"{lengths.min:,}",
        f"{lengths.mean:,.1f}",
        *(f"{value:,.0f}" if value == round(value) else f"{value:,.1f}" for value in quantiles),
        *(f"{value:,}" for value in whole),
    ]
