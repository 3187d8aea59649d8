"""HTML report about one or more simulations."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Final

from twofold.performance.cost import ModelAccuracy
from twofold.reporting.chart import ReportChart
from twofold.reporting.page import Cell, html_chart, html_page, html_section, html_table
from twofold.reporting.simulation.charts import latencies, load, membership, overload, power, slowdowns, utilization
from twofold.reporting.simulation.facts import Fact, check_text, design, facts, slo_text
from twofold.reporting.simulation.gantt import GanttRuns, gantt
from twofold.reporting.simulation.table import ERROR_HEADING, HEADINGS, latency_rows
from twofold.reporting.summary import NOTHING
from twofold.simulation.result import SimulationResult, Verdict
from twofold.slo import Slo, SlowdownSlo

_MET: Final[dict[bool, Cell]] = {True: ("met", "met"), False: ("missed", "missed")}


def percentile_table(results: Mapping[str, SimulationResult], reference: ModelAccuracy | None = None) -> str:
    """Return an HTML table of latency statistics, with one row per metric and run."""
    rows: dict[str, list[list[Cell]]] = {}
    for name, result in results.items():
        for label, texts, error in latency_rows(result, reference):
            lead = [(label, "")] if len(results) == 1 else [(label, ""), (name, "")]
            rows.setdefault(label, []).append(lead + [(text, "number") for text in texts] + [(error, "")])
    lead = [("", "")] if len(results) == 1 else [("", ""), ("run", "")]
    headings = [*lead, *((heading, "number") for heading in HEADINGS), (ERROR_HEADING, "")]
    return html_table(headings, [row for group in rows.values() for row in group])


def verdict_table(verdicts: Mapping[str, Verdict]) -> str:
    """Return an HTML table of the SLO checks of every run."""
    rows = [
        [(name, ""), (check.name, ""), *((text, "number") for text in check_text(check)), _MET[check.met]]
        for name, judged in verdicts.items()
        for check in judged.checks
    ]
    return html_table([("run", ""), ("check", ""), ("value", "number"), ("bound", "number"), ("", "")], rows)


def _columns(runs: Mapping[str, Sequence[Fact]]) -> str:
    columns = [_column(run) for run in runs.values()]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [[(label, ""), *((column.get(label, NOTHING), "") for column in columns)] for label in labels]
    return html_table([("", ""), *((name, "") for name in runs)] if len(runs) > 1 else [], rows)


def _column(run: Sequence[Fact]) -> dict[str, str]:
    column: dict[str, str] = {}  # text by label; texts with the same label are joined
    for fact in run:
        earlier = column.get(fact.label)
        column[fact.label] = _value(fact) if earlier is None else f"{earlier}; {_value(fact)}"
    return column


def _value(fact: Fact) -> str:
    return f"{fact.value} ({fact.accuracy})" if fact.accuracy else fact.value


def html_report(
    results: Mapping[str, SimulationResult],
    *,
    title: str,
    slo: Slo | SlowdownSlo | None = None,
    verdicts: Mapping[str, Verdict] | None = None,
    runs: Mapping[str, GanttRuns] | None = None,
    reference: ModelAccuracy | None = None,  # of the performance model behind slowdowns
) -> str:
    """Return an HTML page about the simulations in `results`, a mapping from name to result. Raises
    ValueError if `results` is empty.
    """
    if not results:
        raise ValueError("a report needs at least one result")
    body = list(_verdicts(slo, verdicts or {}))
    designs = {name: design(result) for name, result in results.items()}
    body += [html_section("Design", _columns(designs)), html_section("Latencies", percentile_table(results, reference))]
    figures = {name: facts(result) for name, result in results.items()}
    body += [html_section("Rates, energy and cost", _columns(figures))]
    return html_page(title, body + [html_chart(picture) for picture in pictures(results, slo, runs or {})])


def pictures(
    results: Mapping[str, SimulationResult], slo: Slo | SlowdownSlo | None, runs: Mapping[str, GanttRuns]
) -> Iterator[ReportChart]:
    """Yield the charts of the page in order, without charts that have no data."""
    drawn = (
        *(latencies(results, slo), slowdowns(results, slo), load(results), overload(results)),
        *(membership(results), power(results), utilization(results)),
    )
    yield from (picture for picture in drawn if picture is not None)
    for index, (name, kept) in enumerate(runs.items()):
        yield gantt(kept, name, index, len(runs))


def _verdicts(slo: Slo | SlowdownSlo | None, verdicts: Mapping[str, Verdict]) -> Iterator[str]:
    if slo is None or not verdicts:
        return
    yield f"<p>SLO: {escape(slo_text(slo))}</p>"
    for name, judged in verdicts.items():
        missed = [check for check in judged.checks if not check.met]
        texts = ", ".join(f"{check.name} {' '.join(check_text(check))}" for check in missed)
        word = '<span class="met">met</span>' if judged.met else '<span class="missed">missed</span>'
        yield f"<p>{escape(name)}: {word}{escape(f' ({texts})') if missed else ''}</p>"
    yield html_section("SLO", verdict_table(verdicts))
