"""Simulations as terminal tables: latencies, other results, pools and SLO checks."""

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from twofold.performance.cost import ModelAccuracy
from twofold.reporting.output import table
from twofold.reporting.simulation.facts import check_text, facts, pool_text
from twofold.reporting.simulation.statistics import LATENCIES, SLOWDOWNS, DistributionSummary, accuracy, describe
from twofold.reporting.summary import NOTHING, seconds
from twofold.simulation.result import SimulationResult, Verdict

HEADINGS = ("mean", "P50", "P90", "P95", "P99", "max")
ERROR_HEADING = "model error"


def simulation_tables(
    result: SimulationResult, title: str, judged: Verdict | None = None, reference: ModelAccuracy | None = None
) -> Group:
    """Return the tables of a simulation."""
    # `reference` is the error of the performance model that slowdowns are relative to.
    tables = [_latencies(result, title, reference), _facts(result), _pools(result)]
    if judged is not None:
        tables.append(_verdict(judged))
    return Group(*tables)


def latency_rows(result: SimulationResult, reference: ModelAccuracy | None = None) -> list[tuple[str, list[str], str]]:
    """Return a table row for each latency metric: label, latencies and the error of the performance model, as text."""
    rows = []
    for known in (*LATENCIES, *SLOWDOWNS):
        histogram, slowdown = known.of(result), known in SLOWDOWNS
        if histogram is not None or not slowdown:
            texts = cells(DistributionSummary.of(histogram), times=not slowdown)
            rows.append((known.label, texts, accuracy(result.pools, known.phases, reference if slowdown else None)))
    return rows


def cells(statistics: DistributionSummary | None, *, times: bool) -> list[str]:
    """Format statistics as table cells: durations if `times` is set, else slowdowns, such as 1.50×."""
    if statistics is None:
        return [NOTHING] * len(HEADINGS)
    values = (*(statistics.mean, statistics.p50, statistics.p90), *(statistics.p95, statistics.p99, statistics.max))
    return [seconds(value) if times else f"{value:.2f}×" for value in values]


def _latencies(result: SimulationResult, title: str, reference: ModelAccuracy | None) -> Table:
    # A title may contain a path with brackets.
    rows = ((label, *texts, error) for label, texts, error in latency_rows(result, reference))
    drawn = table(escape(title), ("", *HEADINGS, ERROR_HEADING), range(1, 1 + len(HEADINGS)), rows)
    drawn.columns[0].no_wrap = True  # in a narrow terminal, break cells between value and unit
    drawn.columns[-1].overflow = "fold"
    return drawn


def _facts(result: SimulationResult) -> Table:
    rows = ((fact.label, fact.value, fact.accuracy) for fact in facts(result))
    return table(None, ("", "", ERROR_HEADING), (), rows)


def _pools(result: SimulationResult) -> Table:
    drawn = table(None, ("pool", "machines", "utilization", "mean batch", "performance model"), (2, 3))
    for pool in result.pools:
        batch = NOTHING if pool.mean_batch is None else f"{pool.mean_batch:,.1f}"
        drawn.add_row(pool.role, pool_text(pool), f"{pool.utilization:.1%}", batch, escape(describe(pool.error)))
    return drawn


def _verdict(judged: Verdict) -> Table:
    drawn = table("SLO", ("", "value", "bound", "met"), (1, 2))
    for check in judged.checks:
        drawn.add_row(check.name, *check_text(check), "yes" if check.met else "[bold red]no[/]")
    drawn.add_section()
    drawn.add_row("verdict", "", "", "[bold green]met[/]" if judged.met else "[bold red]missed[/]")
    return drawn
