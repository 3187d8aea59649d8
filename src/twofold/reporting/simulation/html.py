"""One page about one simulation, or about several side by side: a single file that opens without a network."""

from collections.abc import Iterator, Mapping
from html import escape

import msgspec

from twofold.performance.base import ModelError
from twofold.reporting.simulation.facts import check_text, slo_text
from twofold.reporting.simulation.gantt import GanttRuns, gantt
from twofold.reporting.simulation.html_tables import (
    design_table,
    facts_table,
    percentile_table,
    verdict_table,
)
from twofold.reporting.simulation.latencies import latencies
from twofold.reporting.simulation.load import load
from twofold.reporting.simulation.membership import membership
from twofold.reporting.simulation.overload import overload
from twofold.reporting.simulation.picture import Picture
from twofold.reporting.simulation.power import power
from twofold.reporting.simulation.slowdowns import slowdowns
from twofold.reporting.simulation.utilization import utilization
from twofold.simulation.result import SimulationResult
from twofold.simulation.verdict import Verdict
from twofold.slo import Slo, SlowdownSlo

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
    reference: ModelError | None = None,
) -> str:
    """The page, about 5 MB of which are plotly.js.

    `results`, `verdicts` and `runs` are by the name of the run; several runs share each picture, or have a row
    of it each; `reference` is the error of what slowdowns are multiples of. Raises ValueError where there is no result.
    """
    if not results:
        raise ValueError("a report needs at least one result")
    from plotly.offline import get_plotlyjs  # noqa: PLC0415 (too heavy for those who want no page)

    body = [f"<h1>{escape(title)}</h1>", *_verdicts(slo, verdicts or {})]
    body += [
        _section("Design", design_table(results)),
        _section("Latencies", percentile_table(results, reference)),
    ]
    body += [_section("Rates, energy and cost", facts_table(results))]
    body += [_drawn(picture) for picture in pictures(results, slo, runs or {})]
    scripts = f"<script>{get_plotlyjs()}</script>\n<script>{_DRAW}</script>"
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    text = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{text}\n{scripts}\n</body></html>\n'


def pictures(
    results: Mapping[str, SimulationResult], slo: Slo | SlowdownSlo | None, runs: Mapping[str, GanttRuns]
) -> Iterator[Picture]:
    """Every picture that the results have data for, in the order of the page."""
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


def _drawn(picture: Picture) -> str:
    """A place for the picture, and its data in a script of their own: no name in them may end it."""
    data = msgspec.json.encode({"traces": picture.traces, "layout": picture.layout}).decode()
    name, safe = escape(picture.id), data.replace("<", "\\u003c")
    note = f"<p>{escape(picture.note)}</p>" if picture.note else ""
    script = f'<script type="application/json" data-picture="{name}">{safe}</script>'
    return _section(picture.title, f'{note}<div id="{name}"></div>{script}')
