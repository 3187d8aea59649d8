"""Charts of latency and slowdown distributions."""

from collections.abc import Iterator, Mapping

from twofold.reporting.chart import BOUND_COLOUR, ReportChart, Trace, axis, grid, line, log_axis, on, run_colour
from twofold.reporting.simulation.statistics import LATENCIES, SLOWDOWNS, LatencyMetric
from twofold.simulation.histogram import Histogram
from twofold.simulation.result import SimulationResult
from twofold.slo import Slo, SlowdownSlo

POINTS = 400
_TITLES = {
    "TTFT": "Time to first token, TTFT (s)",
    "TPOT": "Time per output token, TPOT (s)",
    "ITL": "Gap between tokens, ITL (s)",
    "E2E": "End to end, E2E (s)",
}


def latencies(results: Mapping[str, SimulationResult], slo: Slo | SlowdownSlo | None = None) -> ReportChart:
    """Cumulative distributions of TTFT, TPOT, ITL and E2E, with the bounds of an SLO in seconds."""
    known = [latency for latency in LATENCIES if latency.label in _TITLES]
    axes = [(log_axis(_TITLES[latency.label]), share_axis()) for latency in known]
    traces = [trace for plot, latency in enumerate(known) for trace in cumulative(results, latency, plot)]
    bounds = list(_bounds(slo)) if isinstance(slo, Slo) else []
    return ReportChart(
        id="latencies",
        title="Latencies",
        note="Share of requests (of gaps, for ITL) up to each latency."
        + (" Dashed: the bounds of the SLO." if bounds else ""),
        traces=traces + bounds,
        layout=grid(2, 2, axes),
    )


def cumulative(results: Mapping[str, SimulationResult], distribution: LatencyMetric, plot: int) -> Iterator[Trace]:
    """A line for each run that measured the metric."""
    for index, (name, result) in enumerate(results.items()):
        points = _points(distribution.of(result))
        if points:
            values, shares = zip(*points, strict=True)
            yield line(name, values, shares, run_colour(index), legendgroup=name, showlegend=plot == 0, **on(plot))


def share_axis() -> dict[str, object]:
    return axis("Share (0 to 1)", range=[0, 1.02])


def _points(histogram: Histogram | None) -> list[tuple[float, float]]:
    """Points of the distribution above 0, for a logarithmic axis."""
    if histogram is None or histogram.count == 0:
        return []
    return [(value, share) for value, share in histogram.cdf(POINTS) if value > 0]


def _bounds(slo: Slo) -> Iterator[Trace]:
    for plot, bound in ((0, slo.ttft_s), (1, slo.tpot_s), (3, slo.e2e_s)):
        if bound is not None:
            dashed = {"color": BOUND_COLOUR, "width": 1, "dash": "dash"}
            yield line("SLO", (bound, bound), (0, 1), BOUND_COLOUR, **on(plot), legendgroup="SLO", showlegend=False) | {
                "line": dashed
            }


def slowdowns(results: Mapping[str, SimulationResult], slo: Slo | SlowdownSlo | None = None) -> ReportChart | None:
    """Cumulative distributions of slowdowns, with the bounds of a slowdown SLO; None without slowdowns."""
    traces = [trace for plot, known in enumerate(SLOWDOWNS) for trace in cumulative(results, known, plot)]
    if not traces:
        return None
    bounds = list(_slowdowns_bounds(slo)) if isinstance(slo, SlowdownSlo) else []
    return ReportChart(
        id="slowdowns",
        title="Slowdowns",
        note="Multiples of the uncontended latency on the reference machine."
        + (" Crosses: the bounds of the SLO; a run meets a bound if its line passes to the left." if bounds else ""),
        traces=traces + bounds,
        layout=grid(1, 3, [(log_axis(f"{known.label} (×)"), share_axis()) for known in SLOWDOWNS]),
    )


def _slowdowns_bounds(slo: SlowdownSlo) -> Iterator[Trace]:
    for plot, bounds in enumerate((slo.ttft, slo.tpot, slo.e2e)):
        yield {
            "type": "scatter",
            "mode": "markers",
            "name": "SLO",
            "x": list(bounds.values()),
            "y": [percentile / 100 for percentile in bounds],
            "marker": {"color": BOUND_COLOUR, "symbol": "x", "size": 8},
            "legendgroup": "SLO",
            "showlegend": plot == 0,
            **on(plot),
        }
