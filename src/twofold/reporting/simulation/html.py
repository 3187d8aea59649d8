"""HTML page of one or several simulations in a single file."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Final

import msgspec

from twofold.performance.cost import ModelAccuracy
from twofold.reporting.chart import ReportChart
from twofold.reporting.simulation.charts import latencies, load, membership, overload, power, slowdowns, utilization
from twofold.reporting.simulation.facts import Fact, check_text, design, facts, slo_text
from twofold.reporting.simulation.gantt import GanttRuns, gantt
from twofold.reporting.simulation.table import ERROR_HEADING, HEADINGS, latency_rows
from twofold.reporting.summary import NOTHING
from twofold.simulation.result import SimulationResult, Verdict
from twofold.slo import Slo, SlowdownSlo

Cell = tuple[str, str]  # text and CSS class
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
    """Return the texts of a run's facts by label. The texts of facts with the same label are joined."""
    column: dict[str, str] = {}
    for fact in run:
        earlier = column.get(fact.label)
        column[fact.label] = _value(fact) if earlier is None else f"{earlier}; {_value(fact)}"
    return column


def _value(fact: Fact) -> str:
    return f"{fact.value} ({fact.accuracy})" if fact.accuracy else fact.value


def html_table(headings: Sequence[Cell], rows: Sequence[Sequence[Cell]]) -> str:
    head = f"<thead>{_row(headings, 'th')}</thead>" if headings else ""
    return f"<table>{head}<tbody>{''.join(_row(row, 'td') for row in rows)}</tbody></table>"


def _row(cells: Sequence[Cell], tag: str) -> str:
    return f"<tr>{''.join(_cell(text, kind, tag) for text, kind in cells)}</tr>"


def _cell(text: str, kind: str, tag: str) -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f"<{tag}{attribute}>{escape(text)}</{tag}>"


_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1200px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 1.8em 0 .3em } p { margin: .3em 0; color: #555 }
table { border-collapse: collapse; margin: .5em 0 } th { font-weight: 600 }
th, td { padding: .2em .8em; text-align: left; border-bottom: 1px solid #e5e5e5; vertical-align: top }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
.met { color: #07661f; font-weight: 600 } .missed { color: #c00000; font-weight: 600 }
"""
_DRAW = """
for (const data of document.querySelectorAll('script[data-picture]')) {
  const picture = JSON.parse(data.textContent);
  Plotly.newPlot(data.dataset.picture, picture.traces, picture.layout, {responsive: true, displaylogo: false});
}
"""


def html_report(
    results: Mapping[str, SimulationResult],
    *,
    title: str,
    slo: Slo | SlowdownSlo | None = None,
    verdicts: Mapping[str, Verdict] | None = None,
    runs: Mapping[str, GanttRuns] | None = None,
    reference: ModelAccuracy | None = None,
) -> str:
    """Render the HTML page of one or several runs. plotly.js makes up about 5 MB of it.

    `results`, `verdicts` and `runs` are keyed by the name of the run. `reference` is the error of the performance model
    that is the reference for slowdowns. Raises ValueError if `results` is empty.
    """
    if not results:
        raise ValueError("a report needs at least one result")
    from plotly.offline import get_plotlyjs  # noqa: PLC0415 (slow to import)

    body = [f"<h1>{escape(title)}</h1>", *_verdicts(slo, verdicts or {})]
    designs = {name: design(result) for name, result in results.items()}
    body += [_section("Design", _columns(designs)), _section("Latencies", percentile_table(results, reference))]
    figures = {name: facts(result) for name, result in results.items()}
    body += [_section("Rates, energy and cost", _columns(figures))]
    body += [_drawn(picture) for picture in pictures(results, slo, runs or {})]
    return html_page(title, _STYLE, [*body, f"<script>{get_plotlyjs()}</script>", f"<script>{_DRAW}</script>"])


def html_page(title: str, style: str, body: Sequence[str]) -> str:
    """Return an HTML page with this title, CSS style and lines of the body."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>'
    text = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{text}\n</body></html>\n'


def pictures(
    results: Mapping[str, SimulationResult], slo: Slo | SlowdownSlo | None, runs: Mapping[str, GanttRuns]
) -> Iterator[ReportChart]:
    """Yield the charts of the page in order, leaving out charts without data."""
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
    yield _section("SLO", verdict_table(verdicts))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _drawn(picture: ReportChart) -> str:
    """Return the HTML of a chart: a container, and a script element with the data, in which every `<` is escaped."""
    data = msgspec.json.encode({"traces": picture.traces, "layout": picture.layout}).decode()
    name, safe = escape(picture.id), data.replace("<", "\\u003c")
    note = f"<p>{escape(picture.note)}</p>" if picture.note else ""
    script = f'<script type="application/json" data-picture="{name}">{safe}</script>'
    return _section(picture.title, f'{note}<div id="{name}"></div>{script}')
