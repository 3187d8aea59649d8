"""HTML pages of plans, each in a single file: best designs, and charts."""

from collections.abc import Mapping, Sequence
from html import escape

from twofold.planning.advice import Advice
from twofold.planning.design import RatedDesign
from twofold.planning.evaluation import LatencyPercentiles
from twofold.planning.pareto import RateCurve
from twofold.planning.placement.candidates import PhaseGoodput
from twofold.planning.placement.plan import PlacementPlan
from twofold.planning.plan import DesignChoice, Plan
from twofold.reporting.chart import Layout, ReportChart, Trace, axis, bars, grid, line, markers, on, rounded, run_colour
from twofold.reporting.page import html_chart, html_page, html_section, html_table
from twofold.reporting.plan.placement import (
    DESIGN_HEADINGS,
    ERRORS_HEADING,
    PHASE_HEADINGS,
    design_rows,
    phase_rows,
    verdict_text,
)
from twofold.reporting.plan.table import HEADINGS, choice_row, extrapolation_texts
from twofold.reporting.simulation.facts import slo_text
from twofold.slo import Slo, SlowdownSlo

_RATE = "Requests per second"
_TALLER: Layout = {"height": 460}
_SYMBOLS = {True: "circle", False: "square"}


def pareto_chart(plan: Plan, front: Sequence[RatedDesign]) -> ReportChart:
    """Plot price and power against request rate, for the Pareto front and the plan's best designs."""
    traces: list[Trace] = []
    families = list(dict.fromkeys(point.design.family.group for point in front))
    for index, family in enumerate(families):
        points = [point for point in front if point.design.family.group == family]
        traces += _marks(family, points, run_colour(index), 7)
    for choice in plan.choices:
        family = choice.design.family.group
        colour = run_colour(families.index(family)) if family in families else "#888888"
        point = RatedDesign(design=choice.design, rate=choice.highest_rate)
        traces += _marks(f"best {family}", [point], colour, 13)
    axes = [
        (axis(_RATE), axis("Dollars per hour", rangemode="tozero")),
        (axis(_RATE), axis("Power (kW)", rangemode="tozero")),
    ]
    note = "Not dominated in price, provisioned power, and rate on the draw of the search. Circles are split designs."
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
    ends = (0.0, max((rate for curve in curves.values() for rate in curve), default=0.0))
    for plot, bound_s in enumerate((slo.ttft_s, slo.tpot_s) if isinstance(slo, Slo) else ()):
        if bound_s is not None:
            look = {"width": 1, "dash": "dot"}
            traces.append(line("SLO", ends, (bound_s, bound_s), "#C00000", look, showlegend=False, **on(plot)))
    axes = [(axis(_RATE), axis("TTFT (s)", rangemode="tozero")), (axis(_RATE), axis("TPOT (s)", rangemode="tozero"))]
    layout = grid(1, 2, axes) | _TALLER
    note = "Up to the highest rate at which each keeps the SLO."
    return ReportChart(id="curves", title="Latency over rate", note=note, traces=traces, layout=layout)


def _marks(name: str, points: Sequence[RatedDesign], colour: str, size: int) -> list[Trace]:
    look = {"color": colour, "size": size, "symbol": [_SYMBOLS[point.design.family.split] for point in points]}
    heights = ([point.design.price_per_h for point in points], [point.design.tdp_w / 1e3 for point in points])
    rates, names = [point.rate for point in points], [point.design.name for point in points]
    return [
        markers(name, rates, y, look, text=names, legendgroup=name, showlegend=plot == 0, **on(plot))
        for plot, y in enumerate(heights)
    ]


def plan_page(
    plan: Plan,
    advice: Advice,
    front: Sequence[RatedDesign],
    curves: Mapping[str, RateCurve],
    *,
    slo: Slo | SlowdownSlo,
    title: str,
) -> str:
    body = [f'<p class="advice">{escape(advice.text)}</p>', f"<p>SLO: {escape(slo_text(slo))}</p>"]
    body += [f"<p>Extrapolated for {escape(text)}</p>" for text in extrapolation_texts([plan.best])]
    table = html_table(HEADINGS, map(choice_row, plan.choices), range(1, len(HEADINGS) - 1))
    body += [html_chart(pareto_chart(plan, front)), html_chart(rates_chart(curves, slo))]
    return html_page(title, [*body, html_section("The best of each family", table)])


def placement_page(plan: PlacementPlan, title: str) -> str:
    body = [
        f'<p class="advice">{escape(verdict_text(plan))}</p>',
        f"<p>SLO: {escape(slo_text(plan.prepared.problem.slo))}</p>",
    ]
    body += map(html_chart, placement_charts(plan))
    designs = html_table((*DESIGN_HEADINGS, ERRORS_HEADING), design_rows(plan), range(1, len(DESIGN_HEADINGS)))
    instances = html_table(PHASE_HEADINGS, phase_rows(plan), range(1, len(PHASE_HEADINGS)))
    body += [html_section("Designs", designs), html_section("Instances", instances)]
    return html_page(title, body)


def placement_charts(plan: PlacementPlan) -> tuple[ReportChart, ReportChart]:
    """Plot the goodput of the designs, and of single instances."""
    found = plan.placement
    return _goodput_chart(found.split, found.colocated), _instances_chart(found.prefills, found.decodes)


def _goodput_chart(split: Sequence[DesignChoice], colocated: Sequence[DesignChoice]) -> ReportChart:
    traces: list[Trace] = []
    for index, (name, placed) in enumerate((("split", split), ("colocated", colocated))):
        rates, names = rounded(each.per_accelerator for each in placed), [each.design.name for each in placed]
        traces.append(bars(name, rates, names, run_colour(index), orientation="h"))
    designs = axis("", autorange="reversed", automargin=True)
    layout = grid(1, 1, [(axis(f"{_RATE} and accelerator", rangemode="tozero"), designs)])
    height = {"height": 140 + 26 * (len(split) + len(colocated))}
    return ReportChart(id="goodput", title="Goodput per accelerator", note="", traces=traces, layout=layout | height)


def _instances_chart(prefills: Sequence[PhaseGoodput], decodes: Sequence[PhaseGoodput]) -> ReportChart:
    traces: list[Trace] = [
        markers(
            name,
            [each.kind.accelerators for each in found],
            rounded(each.per_accelerator for each in found),
            {"color": run_colour(index), "size": 9},
            text=[each.kind.short for each in found],
        )
        for index, (name, found) in enumerate((("prefill", prefills), ("decode", decodes)))
    ]
    axes = [(axis("Accelerators of an instance", dtick=1), axis(f"{_RATE} and accelerator", rangemode="tozero"))]
    note = "One instance with requests of one phase, within the SLO of this phase."
    title = "Goodput of one instance"
    return ReportChart(id="instances", title=title, note=note, traces=traces, layout=grid(1, 1, axes) | _TALLER)
