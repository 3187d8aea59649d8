"""Picture: requests waiting and requests in a batch over time, by role."""

from collections.abc import Mapping

from twofold.reporting.simulation.over_time import TIME, role_lines
from twofold.reporting.simulation.picture import Layout, Picture, Trace, axis, grid, labelled, on
from twofold.simulation.result import SimulationResult

_KINDS = (("queue", "Waiting requests"), ("batch", "Requests in batches"))


def load(results: Mapping[str, SimulationResult]) -> Picture:
    """One row for each run: queues left, batches right."""
    traces: list[Trace] = []
    axes: list[tuple[Layout, Layout]] = []
    for row, (name, result) in enumerate(results.items()):
        for column, (kind, title) in enumerate(_KINDS):
            plot = row * len(_KINDS) + column
            traces += role_lines(result, kind, on(plot), legend=plot == 0)
            axes.append((axis(TIME), axis(labelled(name, title, len(results)), rangemode="tozero")))
    return Picture(
        id="load",
        title="Queues and batches",
        note="All instances of a role together. Solid: the mean over an interval; thin: the highest value in it.",
        traces=traces,
        layout=grid(len(results), len(_KINDS), axes),
    )
