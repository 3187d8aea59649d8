"""Picture: the loads that overload control went by, over time."""

from collections.abc import Mapping

from twofold.reporting.simulation.over_time import TIME, role_lines
from twofold.reporting.simulation.picture import Layout, Picture, Trace, axis, grid, labelled, on
from twofold.simulation.result import SimulationResult


def overload(results: Mapping[str, SimulationResult]) -> Picture | None:
    """A row for each run; None where no run was controlled."""
    controlled = {name: result for name, result in results.items() if result.overload is not None}
    if not controlled:
        return None
    traces: list[Trace] = []
    axes: list[tuple[Layout, Layout]] = []
    for row, (name, result) in enumerate(controlled.items()):
        traces += role_lines(result, "load", on(row), legend=row == 0)
        title = labelled(name, "Predicted latency over its bound", len(controlled))
        axes.append((axis(TIME), axis(title, rangemode="tozero")))
    return Picture(
        id="overload",
        title="Load of the two phases",
        note="Means over the instances when requests arrived. Solid: the mean of an interval; thin: the highest value.",
        traces=traces,
        layout=grid(len(controlled), 1, axes),
    )
