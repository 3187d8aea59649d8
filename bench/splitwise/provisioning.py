"""Provisioning (Splitwise, figure 12): numbers of prefill and decode machines that meet the nine SLOs at a rate."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from designs import KINDS, Kind, power_units
from show import progress, split_name, table
from study import Settings, Study, study, timings

from twofold.hardware.catalog import Catalog
from twofold.planning.design import Design
from twofold.planning.evaluation import Evaluation, Trial

Plane = dict[tuple[int, int], Evaluation]
_OVER = 9.9  # limit of printed ratios; a run that was stopped early has no exact ratio


def provisioning(
    settings: Settings,
    catalog: Catalog,
    *,
    kind_name: str,
    workload: str,
    rate: float,
    prefill: Sequence[int],
    decode: Sequence[int],
    html: Path | None,
) -> None:
    """Print the largest ratio of a latency to its SLO bound, by numbers of prefill and decode machines.

    A cluster with a ratio above 1 misses the SLO. If `html` is given, write a heat map of the ratios to `html`.
    """
    kind = next(each for each in KINDS if each.split and each.name.lower().endswith(f"-{kind_name.lower()}"))
    planes: dict[str, Plane] = {}
    for timing in timings(settings, catalog).values():
        with study(timing, workload, settings, catalog) as searches:
            plane = asyncio.run(_plane(searches, kind, rate, prefill, decode))
            _show(searches, kind, workload, rate, plane)
        planes[timing.name] = plane
        progress(f"provisioning: {timing.name} done")
    if html is not None:
        html.write_text(_page(planes, f"{kind.name}, {workload}, {rate:g} requests/s"), encoding="utf-8")


async def _plane(searches: Study, kind: Kind, rate: float, prefill: Sequence[int], decode: Sequence[int]) -> Plane:
    points = [(first, second) for first in prefill for second in decode]
    trials = [Trial(searches.design(kind, point), rate) for point in points]
    told = await asyncio.gather(*(searches.search.evaluate(trial) for trial in trials))
    return dict(zip(points, told, strict=True))


def _show(searches: Study, kind: Kind, workload: str, rate: float, plane: Plane) -> None:
    prefill, decode = _axes(plane)
    rows = [[f"{second} decode", *(_cell(plane, first, second) for first in prefill)] for second in reversed(decode)]
    name = searches.timing.name
    title = f"Provisioning: {kind.name}, {workload}, {rate:g} requests/s, {name} timing"
    table(title, ["machines", *(f"{first} prefill" for first in prefill)], rows)
    kept = [searches.design(kind, point) for point, told in plane.items() if told.met]
    catalog = searches.problem.catalog
    for what, weigh in (("cost", _price), ("power", lambda design: power_units(design, catalog))):
        if kept:
            best = min(kept, key=weigh)
            print(f"\nleast {what}: {split_name(best.counts)} (${best.price_per_h:,.0f}/h, ", end="")
            print(f"{power_units(best, catalog):,.0f} power units)")


def _price(design: Design) -> float:
    return design.price_per_h


def _axes(plane: Plane) -> tuple[list[int], list[int]]:
    return sorted({first for first, _ in plane}), sorted({second for _, second in plane})


def _cell(plane: Plane, first: int, second: int) -> str:
    told = plane[first, second]
    if not told.met:
        return f">{_worst(told):.1f}" if told.stopped else f"{_worst(told):.2f}"
    return f"{_worst(told):.2f}{'*' if _on_frontier(plane, first, second) else ''}"


def _on_frontier(plane: Plane, first: int, second: int) -> bool:
    prefill, decode = _axes(plane)
    # Neither of the two next smaller clusters meets the SLOs.
    fewer = [(each, second) for each in prefill if each < first][-1:]
    fewer += [(first, each) for each in decode if each < second][-1:]
    return not any(plane[point].met for point in fewer)


def _worst(told: Evaluation) -> float:
    ratios = [check.value / check.bound for check in told.checks if check.value is not None and not check.at_least]
    return min(max(ratios, default=0.0), _OVER)


def _page(planes: dict[str, Plane], title: str) -> str:
    import plotly.graph_objects as go  # noqa: PLC0415  (needed for pictures only)
    from plotly.subplots import make_subplots  # noqa: PLC0415

    figure = make_subplots(cols=len(planes), subplot_titles=list(planes))
    for place, plane in enumerate(planes.values(), start=1):
        prefill, decode = _axes(plane)
        worst = [[_worst(plane[first, second]) for first in prefill] for second in decode]
        frontier = [point for point in plane if plane[point].met and _on_frontier(plane, *point)]
        figure.add_trace(go.Heatmap(x=prefill, y=decode, z=worst, zmin=0.5, zmax=2.0, coloraxis="coloraxis"), 1, place)
        marks = {"x": [first for first, _ in frontier], "y": [second for _, second in frontier]}
        figure.add_trace(go.Scatter(**marks, mode="markers", name="SLO frontier", marker_color="red"), 1, place)
        figure.update_xaxes(title_text="prefill machines", row=1, col=place)
        figure.update_yaxes(title_text="decode machines", row=1, col=place)
    colors = {"colorscale": "Viridis_r", "cmin": 0.5, "cmax": 2.0, "colorbar_title": "worst slow-down ÷ bound"}
    figure.update_layout(title=title, coloraxis=colors, showlegend=False)
    page: str = figure.to_html(include_plotlyjs=True)
    return page
