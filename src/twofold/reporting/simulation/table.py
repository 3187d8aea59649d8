"""Simulations as terminal tables: latencies, facts, pools and the SLO verdict."""

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from twofold.performance.cost import ModelAccuracy
from twofold.reporting.simulation.facts import check_text, facts, pool_text
from twofold.reporting.simulation.statistics import LATENCIES, SLOWDOWNS, DistributionSummary, accuracy, describe
from twofold.reporting.summary import NOTHING, seconds
from twofold.simulation.result import SimulationResult, Verdict

HEADINGS = ("mean", "P50", "P90", "P95", "P99", "max")
ERROR_HEADING = "model error"


def simulation_tables(
    result: SimulationResult, title: str, judged: Verdict | None = None, reference: ModelAccuracy | None = None
) -> Group:
    """Tables of one simulation; `reference` is the model error of the slowdown reference."""
    tables = [_latencies(result, title, reference), _facts(result), _pools(result)]
    if judged is not None:
        tables.append(_verdict(judged))
    return Group(*tables)


def latency_rows(result: SimulationResult, reference: ModelAccuracy | None = None) -> list[tuple[str, list[str], str]]:
    """(label, texts of HEADINGS, model error) of every measured distribution."""
    rows = [
        (known.label, cells(DistributionSummary.of(known.of(result)), times=True), accuracy(result.pools, known.phases))
        for known in LATENCIES
    ]
    return rows + [
        (
            known.label,
            cells(DistributionSummary.of(histogram), times=False),
            accuracy(result.pools, known.phases, reference),
        )
        for known in SLOWDOWNS
        if (histogram := known.of(result)) is not None
    ]


def cells(statistics: DistributionSummary | None, *, times: bool) -> list[str]:
    """Texts of HEADINGS, as times or multiples."""
    if statistics is None:
        return [NOTHING] * len(HEADINGS)
    values = (*(statistics.mean, statistics.p50, statistics.p90), *(statistics.p95, statistics.p99, statistics.max))
    return [seconds(value) if times else f"{value:.2f}×" for value in values]


def _latencies(result: SimulationResult, title: str, reference: ModelAccuracy | None) -> Table:
    table = _table(title, ("", *HEADINGS, ERROR_HEADING), right=range(1, 1 + len(HEADINGS)))
    table.columns[0].no_wrap = True  # in a narrow terminal, break cells between value and unit
    table.columns[-1].overflow = "fold"
    for label, texts, error in latency_rows(result, reference):
        table.add_row(label, *texts, error)
    return table


def _facts(result: SimulationResult) -> Table:
    table = _table(None, ("", "", ERROR_HEADING), right=())
    for fact in facts(result):
        table.add_row(fact.label, fact.value, fact.accuracy)
    return table


def _pools(result: SimulationResult) -> Table:
    table = _table(None, ("pool", "machines", "utilization", "mean batch", "performance model"), right=(2, 3))
    for pool in result.pools:
        batch = NOTHING if pool.mean_batch is None else f"{pool.mean_batch:,.1f}"
        table.add_row(pool.role, pool_text(pool), f"{pool.utilization:.1%}", batch, escape(describe(pool.error)))
    return table


def _verdict(judged: Verdict) -> Table:
    table = _table("SLO", ("", "value", "bound", "met"), right=(1, 2))
    for check in judged.checks:
        table.add_row(check.name, *check_text(check), "yes" if check.met else "[bold red]no[/]")
    table.add_section()
    table.add_row("verdict", "", "", "[bold green]met[/]" if judged.met else "[bold red]missed[/]")
    return table


def _table(title: str | None, headings: tuple[str, ...], right: range | tuple[int, ...]) -> Table:
    # A title may contain a path with brackets.
    table = Table(title=None if title is None else escape(title), title_justify="left", show_header=any(headings))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index in right else "left")
    return table
