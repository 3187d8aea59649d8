"""Picture: how many instances work as which role over time."""

from collections.abc import Mapping

from twofold.reporting.simulation.over_time import TIME, by_role, stepped, steps
from twofold.reporting.simulation.picture import PHASE_COLOURS, Picture, Trace, axis, grid, labelled, on
from twofold.simulation.result import SimulationResult


def membership(results: Mapping[str, SimulationResult]) -> Picture:
    """Stacked areas, one row for each run."""
    traces: list[Trace] = []
    for plot, result in enumerate(results.values()):
        for role, series in by_role(result, "pool"):
            times, means, _ = steps(series)
            stacked = {"stackgroup": f"run{plot}", "legendgroup": role.value, "showlegend": plot == 0}
            traces.append(stepped(role.value, times, means, PHASE_COLOURS[role]) | stacked | on(plot))
    titles = [labelled(name, "Instances", len(results)) for name in results]
    return Picture(
        id="membership",
        title="Pool membership",
        note="Instances working in each role; mixed ones do both. Means over intervals.",
        traces=traces,
        layout=grid(len(results), 1, [(axis(TIME), axis(title, rangemode="tozero")) for title in titles]),
    )
