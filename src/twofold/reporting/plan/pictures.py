"""The pictures of a plan: the Pareto front, and latency over rate of the designs that it comes down to."""

from collections.abc import Mapping, Sequence

from twofold.planning.curves import Curve
from twofold.planning.evaluation import Latency
from twofold.planning.pareto import Point
from twofold.planning.plan import Plan
from twofold.reporting.simulation.picture import (
    Layout,
    Picture,
    Trace,
    axis,
    grid,
    line,
    on,
    run_colour,
)
from twofold.slo import Slo, SlowdownSlo

_RATE = "Requests per second"
_SYMBOLS = {True: "circle", False: "square"}


def pareto_picture(plan: Plan, front: Sequence[Point]) -> Picture:
    """Dollars and watts over rate: a mark for each point of the front, a larger one for the best of each family."""
    traces: list[Trace] = []
    families = list(dict.fromkeys(point.design.family.name for point in front))
    for index, family in enumerate(families):
        points = [point for point in front if point.design.family.name == family]
        traces += _marks(family, points, run_colour(index), 7)
    for choice in plan.choices:
        family = choice.design.family.name
        colour = run_colour(families.index(family)) if family in families else "#888888"
        point = Point(design=choice.design, rate=choice.highest_rate)
        traces += _marks(f"best {family}", [point], colour, 13)
    axes = [
        (axis(_RATE), axis("Dollars per hour", rangemode="tozero")),
        (axis(_RATE), axis("Power (kW)", rangemode="tozero")),
    ]
    note = "Designs that no other beats at once in rate, dollars and provisioned power. Circles are split designs."
    return Picture(
        id="pareto", title="Pareto front", note=note, traces=traces, layout=_taller(grid(1, 2, axes))
    )


def curves_picture(curves: Mapping[str, Curve], slo: Slo | SlowdownSlo) -> Picture:
    """TTFT and TPOT over rate, P50 solid and P90 dashed, with the bounds of an SLO in seconds."""
    traces: list[Trace] = []
    for index, (name, curve) in enumerate(curves.items()):
        for plot, field in enumerate(("ttft_s", "tpot_s")):
            known = {rate: getattr(each, field) for rate, each in curve.items()}
            told = {rate: latency for rate, latency in known.items() if isinstance(latency, Latency)}
            for percentile, dash in (("p50", "solid"), ("p90", "dash")):
                values = [getattr(latency, percentile) for latency in told.values()]
                label = f"{name}, {percentile.upper()}"
                look = {"color": run_colour(index), "width": 1.5, "dash": dash}
                traces.append(
                    line(label, told, values, run_colour(index), showlegend=plot == 0, **on(plot))
                    | {"line": look}
                )
    axes = [
        (axis(_RATE), axis("TTFT (s)", rangemode="tozero")),
        (axis(_RATE), axis("TPOT (s)", rangemode="tozero")),
    ]
    layout = _taller(grid(1, 2, axes, shapes=_bounds(slo)))
    note = "Up to the highest rate at which each keeps the SLO."
    return Picture(id="curves", title="Latency over rate", note=note, traces=traces, layout=layout)


def _marks(name: str, points: Sequence[Point], colour: str, size: int) -> list[Trace]:
    look = {
        "color": colour,
        "size": size,
        "symbol": [_SYMBOLS[point.design.family.split] for point in points],
    }
    heights = (
        [point.design.price_per_h for point in points],
        [point.design.tdp_w / 1e3 for point in points],
    )
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


def _taller(layout: Layout) -> Layout:
    return layout | {"height": 460}
