"""HTML page of a plan in a single file: best designs, Pareto front, and latency over rate."""

from collections.abc import Mapping, Sequence
from html import escape

from twofold.planning.advice import Advice
from twofold.planning.evaluation import LatencyPercentiles
from twofold.planning.pareto import ParetoPoint, RateCurve
from twofold.planning.plan import Plan
from twofold.reporting.chart import Layout, ReportChart, Trace, axis, grid, line, on, run_colour
from twofold.reporting.page import html_chart, html_page, html_section, html_table
from twofold.reporting.plan.table import HEADINGS, choice_row
from twofold.reporting.simulation.facts import slo_text
from twofold.slo import Slo, SlowdownSlo

_RATE = "Requests per second"
_TALLER: Layout = {"height": 460}
_SYMBOLS = {True: "circle", False: "square"}


def pareto_chart(plan: Plan, front: Sequence[ParetoPoint]) -> ReportChart:
    """Plot price and power against request rate, for the Pareto front and the plan's best designs."""
    traces: list[Trace] = []
    families = list(dict.fromkeys(point.design.family.group for point in front))
    for index, family in enumerate(families):
        points = [point for point in front if point.design.family.group == family]
        traces += _marks(family, points, run_colour(index), 7)
    for choice in plan.choices:
        family = choice.design.family.group
        colour = run_colour(families.index(family)) if family in families else "#888888"
        point = ParetoPoint(design=choice.design, rate=choice.highest_rate)
        traces += _marks(f"best {family}", [point], colour, 13)
    axes = [
        (axis(_RATE), axis("Dollars per hour", rangemode="tozero")),
        (axis(_RATE), axis("Power (kW)", rangemode="tozero")),
    ]
    note = "Designs not dominated in rate, price and provisioned power. Circles are split designs."
    return ReportChart(id="pareto", title="Pareto front", note=note, traces=traces, layout=grid(1, 2, axes) | _TALLER)


def rates_chart(curves: Mapping[str, RateCurve], slo: Slo | SlowdownSlo) -> ReportChart:
    """Plot TTFT and TPOT over rate for each design, with the bounds of the SLO."""
    traces: list[Trace] = []
    for index, (name, curve) in enumerate(curves.items()):
        for plot, field in enumerate(("ttft_s", "tpot_s")):
            known = {rate: getattr(each, field) for rate, each in curve.items()}
            told = {rate: latency for rate, latency in known.items() if isinstance(latency, LatencyPercentiles)}
            for percentile, dash in (("p50", "solid"), ("p90", "dash")):
                values = [getattr(latency, percentile) for latency in told.values()]
                label = f"{name}, {percentile.upper()}"
                look: Layout = {"width": 1.5, "dash": dash}
                traces.append(line(label, told, values, run_colour(index), look, showlegend=plot == 0, **on(plot)))
    axes = [(axis(_RATE), axis("TTFT (s)", rangemode="tozero")), (axis(_RATE), axis("TPOT (s)", rangemode="tozero"))]
    layout = grid(1, 2, axes, shapes=_bounds(slo)) | _TALLER
    note = "Up to the highest rate at which each keeps the SLO."
    return ReportChart(id="curves", title="Latency over rate", note=note, traces=traces, layout=layout)


def _marks(name: str, points: Sequence[ParetoPoint], colour: str, size: int) -> list[Trace]:
    look = {"color": colour, "size": size, "symbol": [_SYMBOLS[point.design.family.split] for point in points]}
    heights = ([point.design.price_per_h for point in points], [point.design.tdp_w / 1e3 for point in points])
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [point.rate for point in points],
            "y": y,
            "text": [point.design.name for point in points],
            "marker": look,
            "legendgroup": name,
            "showlegend": plot == 0,
            **on(plot),
        }
        for plot, y in enumerate(heights)
    ]


def _bounds(slo: Slo | SlowdownSlo) -> list[Layout]:
    if not isinstance(slo, Slo):
        return []
    bounds = ((0, slo.ttft_s), (1, slo.tpot_s))
    return [
        {
            "type": "line",
            "xref": f"{on(plot)['xaxis']} domain",
            "yref": on(plot)["yaxis"],
            "x0": 0,
            "x1": 1,
            "y0": bound,
            "y1": bound,
            "line": {"color": "#C00000", "width": 1, "dash": "dot"},
        }
        for plot, bound in bounds
        if bound is not None
    ]


def plan_page(
    plan: Plan,
    advice: Advice,
    front: Sequence[ParetoPoint],
    curves: Mapping[str, RateCurve],
    *,
    slo: Slo | SlowdownSlo,
    title: str,
) -> str:
    body = [f"<p>SLO: {escape(slo_text(slo))}</p>", f'<p class="advice">{escape(advice.text)}</p>']
    headings = [(text, "number") for text in HEADINGS]
    rows = [[(text, "number") for text in choice_row(choice)] for choice in plan.choices]
    ends = (0, len(HEADINGS) - 1)
    for row in (headings, *rows):
        for end in ends:
            row[end] = (row[end][0], "")
    body.append(html_section("The best of each family", html_table(headings, rows)))
    return html_page(title, [*body, html_chart(pareto_chart(plan, front)), html_chart(rates_chart(curves, slo))])
