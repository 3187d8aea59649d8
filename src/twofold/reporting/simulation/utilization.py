"""Picture: the share of time in which the instances of each pool ran a batch."""

from collections.abc import Mapping

from twofold.instance import Role
from twofold.reporting.simulation.picture import (
    PHASE_COLOURS,
    Picture,
    Trace,
    axis,
    grid,
    rounded,
    run_colour,
)
from twofold.simulation.result import SimulationResult


def utilization(results: Mapping[str, SimulationResult]) -> Picture:
    """A bar for each pool; the colour is that of its role, or of the run where several are compared."""
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
    return Picture(id="utilization", title="Utilization", traces=traces, layout=layout)
