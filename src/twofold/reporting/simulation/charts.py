"""Charts of simulations: latencies, slowdowns, queues, instances by role, overload, power and utilization."""

from collections.abc import Iterator
from typing import Final

from twofold.instance import Role
from twofold.reporting.chart import (
    BOUND_COLOUR,
    PHASE_COLOURS,
    Layout,
    ReportChart,
    Trace,
    axis,
    bars,
    grid,
    line,
    log_axis,
    markers,
    on,
    rounded,
    run_colour,
)
from twofold.reporting.simulation.statistics import LATENCIES, SLOWDOWNS, LatencyMetric
from twofold.simulation.histogram import Histogram
from twofold.simulation.result import SimulationResult
from twofold.simulation.series import Series
from twofold.slo import Slo, SlowdownSlo

POINTS = 400
_TITLES = {
    "TTFT": "Time to first token, TTFT (s)",
    "TPOT": "Time per output token, TPOT (s)",
    "ITL": "Gap between tokens, ITL (s)",
    "E2E": "End to end, E2E (s)",
}
TIME: Final = "Simulated time (s)"
_PS_PER_S: Final = 1e12
_SHARE: Final = axis("Share (0 to 1)", range=[0, 1.02])
STEPS: Final[Layout] = {"width": 1.5, "shape": "hv"}
DASHED: Final[Layout] = {"width": 1, "dash": "dash"}


def latencies(name: str, result: SimulationResult, slo: Slo | SlowdownSlo | None = None) -> ReportChart:
    """Plot the cumulative distributions of TTFT, TPOT, ITL and E2E latency, with bounds in seconds as dashed lines."""
    known = [latency for latency in LATENCIES if latency.label in _TITLES]
    axes = [(log_axis(_TITLES[latency.label]), _SHARE) for latency in known]
    traces = [trace for plot, latency in enumerate(known) for trace in cumulative(name, result, latency, plot)]
    bounds = list(_bounds(slo)) if isinstance(slo, Slo) else []
    more = " Dashed: the bounds of the SLO." if bounds else ""
    note = f"Share of requests (of gaps, for ITL) up to each latency.{more}"
    return ReportChart(id="latencies", title="Latencies", note=note, traces=traces + bounds, layout=grid(2, 2, axes))


def cumulative(name: str, result: SimulationResult, distribution: LatencyMetric, plot: int) -> Iterator[Trace]:
    """Yield the cumulative distribution of a metric as a line, unless it has no values."""
    points = _points(distribution.of(result))
    if points:
        values, shares = zip(*points, strict=True)
        yield line(name, values, shares, run_colour(0), legendgroup=name, showlegend=plot == 0, **on(plot))


def _points(histogram: Histogram | None) -> list[tuple[float, float]]:
    """Return the points of a cumulative distribution for a logarithmic axis."""
    if histogram is None or histogram.count == 0:
        return []
    # A logarithmic axis cannot show the value 0.
    return [(value, share) for value, share in histogram.cdf(POINTS) if value > 0]


def _bounds(slo: Slo) -> Iterator[Trace]:
    for plot, bound in ((0, slo.ttft_s), (1, slo.tpot_s), (3, slo.e2e_s)):
        if bound is not None:
            hidden = {**on(plot), "legendgroup": "SLO", "showlegend": False}
            yield line("SLO", (bound, bound), (0, 1), BOUND_COLOUR, DASHED, **hidden)


def slowdowns(name: str, result: SimulationResult, slo: Slo | SlowdownSlo | None = None) -> ReportChart | None:
    """Plot the cumulative distributions of slowdowns and the SLO's bounds. Return None if there are no slowdowns."""
    traces = [trace for plot, known in enumerate(SLOWDOWNS) for trace in cumulative(name, result, known, plot)]
    if not traces:
        return None
    bounds = list(_slowdowns_bounds(slo)) if isinstance(slo, SlowdownSlo) else []
    return ReportChart(
        id="slowdowns",
        title="Slowdowns",
        note="Multiples of the uncontended latency on the reference machine."
        + (" Crosses: the bounds of the SLO; a run meets a bound if its line passes to the left." if bounds else ""),
        traces=traces + bounds,
        layout=grid(1, 3, [(log_axis(f"{known.label} (×)"), _SHARE) for known in SLOWDOWNS]),
    )


def _slowdowns_bounds(slo: SlowdownSlo) -> Iterator[Trace]:
    for plot, bounds in enumerate((slo.ttft, slo.tpot, slo.e2e)):
        shares = (percentile / 100 for percentile in bounds)
        look: Layout = {"color": BOUND_COLOUR, "symbol": "x", "size": 8}
        yield markers("SLO", bounds.values(), shares, look, legendgroup="SLO", showlegend=plot == 0, **on(plot))


def by_role(result: SimulationResult, kind: str) -> Iterator[tuple[Role, Series]]:
    """Yield each role with its time series of kind `kind`, such as `queue`."""
    for role in Role:
        series = result.series.get(f"{kind}/{role}")
        if series is not None:
            yield role, series


def role_lines(result: SimulationResult, kind: str, where: dict[str, object], *, legend: bool) -> Iterator[Trace]:
    """Yield two chart lines for each instance role: a quantity's mean and maximum in each time bin."""
    for role, series in by_role(result, kind):
        colour, group = PHASE_COLOURS[role], {"legendgroup": role.value, **where}
        times, means, highest = steps(series)
        yield line(role.value, times, means, colour, STEPS, **group, showlegend=legend)
        thin: Layout = {"width": 0.75, "shape": "hv"}
        maximum = f"{role.value}, maximum"
        yield line(maximum, times, highest, colour, thin, **group, opacity=0.45, showlegend=False)


def steps(series: Series) -> tuple[list[float], list[float], list[float]]:
    """Return three lists to plot a time series: start time in seconds, mean and maximum of each time bin."""
    points = series.points()
    if points:  # the last step lasts until the end of the series
        points.append((series.at_ps / _PS_PER_S, points[-1][1], points[-1][2]))
    times, means, highest = ([point[column] for point in points] for column in range(3))
    return times, means, highest


_KINDS = {"queue": "Waiting requests", "batch": "Requests in batches"}


def load(result: SimulationResult) -> ReportChart:
    """Plot waiting requests (left) and requests in batches (right) over time."""
    traces: list[Trace] = []
    for plot, kind in enumerate(_KINDS):
        traces += role_lines(result, kind, on(plot), legend=plot == 0)
    note = "Totals per role. Solid: mean over an interval; thin: maximum."
    layout = grid(1, len(_KINDS), [(axis(TIME), axis(title, rangemode="tozero")) for title in _KINDS.values()])
    return ReportChart(id="load", title="Queues and batches", note=note, traces=traces, layout=layout)


def membership(result: SimulationResult) -> ReportChart:
    """Plot the number of instances in each role over time as stacked areas."""
    traces: list[Trace] = []
    for role, series in by_role(result, "pool"):
        times, means, _ = steps(series)
        stacked = {"stackgroup": "run0", "legendgroup": role.value, "showlegend": True}
        traces.append(line(role.value, times, means, PHASE_COLOURS[role], STEPS, **stacked, **on(0)))
    note = "Instances working in each role; mixed ones do both. Means over intervals."
    layout = grid(1, 1, [(axis(TIME), axis("Instances", rangemode="tozero"))])
    return ReportChart(id="membership", title="Pool membership", note=note, traces=traces, layout=layout)


def overload(result: SimulationResult) -> ReportChart | None:
    """Plot the ratio of predicted latency to SLO bound against time. Return None without overload control."""
    if result.overload is None:
        return None
    traces = list(role_lines(result, "load", on(0), legend=True))
    note = "Mean over instances at request arrivals. Solid: mean over an interval; thin: maximum."
    layout = grid(1, 1, [(axis(TIME), axis("Predicted latency / bound", rangemode="tozero"))])
    return ReportChart(id="overload", title="Load of the two phases", note=note, traces=traces, layout=layout)


def power(result: SimulationResult) -> ReportChart | None:
    """Plot the consumed and the provisioned power over time; return None if the simulation measured no power."""
    series = result.series.get("power_w")
    if series is None:
        return None
    times, means, _ = steps(series)
    ends, provisioned = (min(times, default=0.0), max(times, default=0.0)), (result.tdp_w / 1e3,) * 2
    traces = [
        line("drawn", times, [watts / 1e3 for watts in means], run_colour(0), STEPS),
        line("provisioned", ends, provisioned, run_colour(0), DASHED),
    ]
    layout = grid(1, 1, [(axis(TIME), axis("Power (kW)", rangemode="tozero"))])
    return ReportChart(id="power", title="Power", note="Means over intervals.", traces=traces, layout=layout)


def utilization(name: str, result: SimulationResult) -> ReportChart:
    """Plot the utilization of each pool as a bar."""
    names = [f"{pool.role}, {pool.machine}" for pool in result.pools]
    colours = [PHASE_COLOURS[Role(pool.role)] for pool in result.pools]
    busy = rounded(pool.utilization * 100 for pool in result.pools)
    traces = [bars(name, names, busy, colours, showlegend=False)]
    axes = [(axis("Pool", type="category"), axis("Busy (% of instance time)", range=[0, 100]))]
    layout = grid(1, 1, axes, barmode="group")
    return ReportChart(id="utilization", title="Utilization", traces=traces, layout=layout)
