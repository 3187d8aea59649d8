"""Picture: what all machines draw over time, beside what must be provisioned for them."""

from collections.abc import Mapping

from twofold.reporting.simulation.over_time import TIME, stepped, steps
from twofold.reporting.simulation.picture import Picture, Trace, axis, grid, labelled, line, run_colour
from twofold.simulation.result import SimulationResult


def power(results: Mapping[str, SimulationResult]) -> Picture | None:
    """One line for each run and its provisioned power dashed; None where no run has the series."""
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
    return Picture(id="power", title="Power", note="Means over intervals.", traces=traces, layout=layout)
