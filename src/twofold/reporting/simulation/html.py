"""HTML report about a simulation."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from twofold.performance.cost import ModelAccuracy
from twofold.reporting.chart import ReportChart
from twofold.reporting.page import Cell, html_chart, html_page, html_section, html_table
from twofold.reporting.simulation.charts import latencies, load, membership, overload, power, slowdowns, utilization
from twofold.reporting.simulation.facts import Fact, check_text, design, facts, slo_text
from twofold.reporting.simulation.gantt import GanttRuns, gantt
from twofold.reporting.simulation.table import ERROR_HEADING, HEADINGS, latency_rows
from twofold.simulation.result import SimulationResult, Verdict
from twofold.slo import Slo, SlowdownSlo

_MET: Final[dict[bool, Cell]] = {True: ("met", "met"), False: ("missed", "missed")}


def percentile_table(result: SimulationResult, reference: ModelAccuracy | None = None) -> str:
    """Return an HTML table of latency statistics, with one row per metric."""
    rows = [(label, *texts, error) for label, texts, error in latency_rows(result, reference)]
    return html_table(("", *HEADINGS, ERROR_HEADING), rows, range(1, 1 + len(HEADINGS)))


def verdict_table(name: str, judged: Verdict) -> str:
    """Return an HTML table of the SLO checks of the run `name`."""
    rows = [(name, check.name, *check_text(check), _MET[check.met]) for check in judged.checks]
    return html_table(("run", "check", "value", "bound", ""), rows, (2, 3))


def _fact_table(shown: Sequence[Fact]) -> str:
    texts: dict[str, list[str]] = {}  # by label; texts with the same label are joined
    for fact in shown:
        text = f"{fact.value} ({fact.accuracy})" if fact.accuracy else fact.value
        texts.setdefault(fact.label, []).append(text)
    return html_table((), [(label, "; ".join(joined)) for label, joined in texts.items()])


def html_report(
    name: str,
    result: SimulationResult,
    *,
    title: str,
    slo: Slo | SlowdownSlo | None = None,
    judged: Verdict | None = None,
    runs: GanttRuns | None = None,
    reference: ModelAccuracy | None = None,  # of the performance model behind slowdowns
) -> str:
    """Return an HTML page about a simulation, which charts and tables call `name`."""
    body = [] if slo is None or judged is None else list(_verdict(name, slo, judged))
    body += [html_chart(picture) for picture in pictures(name, result, slo, runs)]
    body += [] if judged is None else [html_section("SLO", verdict_table(name, judged))]
    body += [html_section("Latencies", percentile_table(result, reference))]
    body += [html_section("Rates, energy and cost", _fact_table(facts(result)))]
    return html_page(title, [*body, html_section("Design", _fact_table(design(result)))])


def pictures(
    name: str, result: SimulationResult, slo: Slo | SlowdownSlo | None, runs: GanttRuns | None
) -> Iterator[ReportChart]:
    """Yield the charts of the page in order, without charts that have no data."""
    drawn = (
        *(latencies(name, result, slo), slowdowns(name, result, slo), load(result), overload(result)),
        *(membership(result), power(result), utilization(name, result)),
        None if runs is None else gantt(runs),
    )
    yield from (picture for picture in drawn if picture is not None)


def _verdict(name: str, slo: Slo | SlowdownSlo, judged: Verdict) -> Iterator[str]:
    missed = [check for check in judged.checks if not check.met]
    texts = ", ".join(f"{check.name} {' '.join(check_text(check))}" for check in missed)
    word = '<span class="met">met</span>' if judged.met else '<span class="missed">missed</span>'
    yield f'<p class="advice">{escape(name)}: {word}{escape(f" ({texts})") if missed else ""}</p>'
    yield f"<p>SLO: {escape(slo_text(slo))}</p>"
