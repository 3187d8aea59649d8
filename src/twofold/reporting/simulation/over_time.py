"""Charts over time: queues and batches, pool membership, load under overload control, power; and utilization."""

from collections.abc import Iterator, Mapping
from typing import Final

from twofold.instance import Role
from twofold.reporting.chart import (
    PHASE_COLOURS,
    Layout,
    ReportChart,
    Trace,
    axis,
    grid,
    labelled,
    line,
    on,
    rounded,
    run_colour,
)
from twofold.simulation.result import SimulationResult
from twofold.simulation.series import Series

TIME: Final = "Simulated time (s)"
_PS_PER_S: Final = 1e12


def by_role(result: SimulationResult, kind: str) -> Iterator[tuple[Role, Series]]:
    """Series `kind/ROLE` of a run, prefill first."""
    for role in Role:
        series = result.series.get(f"{kind}/{role}")
        if series is not None:
            yield role, series


def role_lines(result: SimulationResult, kind: str, where: dict[str, object], *, legend: bool) -> Iterator[Trace]:
    """Mean (solid) and maximum (thin) lines per role."""
    for role, series in by_role(result, kind):
        colour, group = PHASE_COLOURS[role], {"legendgroup": role.value, **where}
        times, means, highest = steps(series)
        yield stepped(role.value, times, means, colour) | group | {"showlegend": legend}
        thin = {"line": {"color": colour, "width": 0.75, "shape": "hv"}, "opacity": 0.45, "showlegend": False}
        yield stepped(f"{role.value}, maximum", times, highest, colour) | group | thin


def steps(series: Series) -> tuple[list[float], list[float], list[float]]:
    """(times, means, maxima) of a series, closed by a final point."""
    points = series.points()
    if points:
        points.append((series.at_ps / _PS_PER_S, points[-1][1], points[-1][2]))
    times, means, highest = ([point[column] for point in points] for column in range(3))
    return times, means, highest


def stepped(name: str, times: list[float], values: list[float], colour: str) -> Trace:
    """A step line."""
    return line(name, times, values, colour) | {"line": {"color": colour, "width": 1.5, "shape": "hv"}}


_KINDS = (("queue", "Waiting requests"), ("batch", "Requests in batches"))


def load(results: Mapping[str, SimulationResult]) -> ReportChart:
    """Queues (left) and batches (right), one row per run."""
    traces: list[Trace] = []
    axes: list[tuple[Layout, Layout]] = []
    for row, (name, result) in enumerate(results.items()):
        for column, (kind, title) in enumerate(_KINDS):
            plot = row * len(_KINDS) + column
            traces += role_lines(result, kind, on(plot), legend=plot == 0)
            axes.append((axis(TIME), axis(labelled(name, title, len(results)), rangemode="tozero")))
    return ReportChart(
        id="load",
        title="Queues and batches",
        note="Totals per role. Solid: mean over an interval; thin: maximum.",
        traces=traces,
        layout=grid(len(results), len(_KINDS), axes),
    )


def membership(results: Mapping[str, SimulationResult]) -> ReportChart:
    """Instances by role as stacked areas, one row per run."""
    traces: list[Trace] = []
    for plot, result in enumerate(results.values()):
        for role, series in by_role(result, "pool"):
            times, means, _ = steps(series)
            stacked = {"stackgroup": f"run{plot}", "legendgroup": role.value, "showlegend": plot == 0}
            traces.append(stepped(role.value, times, means, PHASE_COLOURS[role]) | stacked | on(plot))
    titles = [labelled(name, "Instances", len(results)) for name in results]
    return ReportChart(
        id="membership",
        title="Pool membership",
        note="Instances working in each role; mixed ones do both. Means over intervals.",
        traces=traces,
        layout=grid(len(results), 1, [(axis(TIME), axis(title, rangemode="tozero")) for title in titles]),
    )


def overload(results: Mapping[str, SimulationResult]) -> ReportChart | None:
    """Load under overload control, one row per run; None without overload control."""
    controlled = {name: result for name, result in results.items() if result.overload is not None}
    if not controlled:
        return None
    traces: list[Trace] = []
    axes: list[tuple[Layout, Layout]] = []
    for row, (name, result) in enumerate(controlled.items()):
        traces += role_lines(result, "load", on(row), legend=row == 0)
        title = labelled(name, "Predicted latency / bound", len(controlled))
        axes.append((axis(TIME), axis(title, rangemode="tozero")))
    return ReportChart(
        id="overload",
        title="Load of the two phases",
        note="Mean over instances at request arrivals. Solid: mean over an interval; thin: maximum.",
        traces=traces,
        layout=grid(len(controlled), 1, axes),
    )


def power(results: Mapping[str, SimulationResult]) -> ReportChart | None:
    """Power drawn and provisioned (dashed) per run; None without power series."""
    traces: list[Trace] = []
    for index, (name, result) in enumerate(results.items()):
        series = result.series.get("power_w")
        if series is None:
            continue
        colour, (times, means, _) = run_colour(index), steps(series)
        drawn = [watts / 1e3 for watts in means]
        traces.append(stepped(labelled(name, "drawn", len(results)), times, drawn, colour))
        ends, provisioned = (min(times, default=0.0), max(times, default=0.0)), (result.tdp_w / 1e3,) * 2
        dashed = line(labelled(name, "provisioned", len(results)), ends, provisioned, colour)
        traces.append(dashed | {"line": {"color": colour, "width": 1, "dash": "dash"}})
    if not traces:
        return None
    layout = grid(1, 1, [(axis(TIME), axis("Power (kW)", rangemode="tozero"))])
    return ReportChart(id="power", title="Power", note="Means over intervals.", traces=traces, layout=layout)


def utilization(results: Mapping[str, SimulationResult]) -> ReportChart:
    """A bar per pool, coloured by role, or by run if there are several."""
    traces: list[Trace] = []
    for index, (name, result) in enumerate(results.items()):
        roles = [PHASE_COLOURS[Role(pool.role)] for pool in result.pools]
        traces.append(
            {
                "type": "bar",
                "name": name,
                "x": [f"{pool.role}, {pool.machine}" for pool in result.pools],
                "y": rounded(pool.utilization * 100 for pool in result.pools),
                "marker": {"color": roles if len(results) == 1 else run_colour(index)},
                "showlegend": len(results) > 1,
            }
        )
    axes = [(axis("Pool", type="category"), axis("Busy (% of instance time)", range=[0, 100]))]
    layout = grid(1, 1, axes, barmode="group")
    return ReportChart(id="utilization", title="Utilization", traces=traces, layout=layout)
