"""Picture: how much slower than alone on the reference machine, with the bounds of an SLO in multiples."""

from collections.abc import Iterator, Mapping

from twofold.reporting.simulation.latencies import cumulative, share_axis
from twofold.reporting.simulation.picture import BOUND_COLOUR, Picture, Trace, grid, log_axis, on
from twofold.reporting.simulation.statistics import SLOWDOWNS
from twofold.simulation.result import SimulationResult
from twofold.slo import Slo, SlowdownSlo


def slowdowns(
    results: Mapping[str, SimulationResult], slo: Slo | SlowdownSlo | None = None
) -> Picture | None:
    """Cumulative distributions of the slowdowns; None where no run has any."""
    traces = [trace for plot, known in enumerate(SLOWDOWNS) for trace in cumulative(results, known, plot)]
    if not traces:
        return None
    bounds = list(_bounds(slo)) if isinstance(slo, SlowdownSlo) else []
    return Picture(
        id="slowdowns",
        title="Slowdowns",
        note="Multiples of what the same request takes alone on the reference machine."
        + (" Crosses: the bounds of the SLO; a run keeps one by passing left of it." if bounds else ""),
        traces=traces + bounds,
        layout=grid(1, 3, [(log_axis(f"{known.label} (×)"), share_axis()) for known in SLOWDOWNS]),
    )


def _bounds(slo: SlowdownSlo) -> Iterator[Trace]:
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
