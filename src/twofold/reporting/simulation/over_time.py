"""What the pictures of series over time share: which series a run has, and how one becomes lines."""

from collections.abc import Iterator
from typing import Final

from twofold.instance import Role
from twofold.reporting.simulation.picture import PHASE_COLOURS, Trace, line
from twofold.simulation.result import SimulationResult
from twofold.simulation.series import Series

TIME: Final = "Simulated time (s)"
_PS_PER_S: Final = 1e12


def by_role(result: SimulationResult, kind: str) -> Iterator[tuple[Role, Series]]:
    """The series `kind/ROLE` of a run, prefill first."""
    for role in Role:
        series = result.series.get(f"{kind}/{role}")
        if series is not None:
            yield role, series


def role_lines(
    result: SimulationResult, kind: str, where: dict[str, object], *, legend: bool
) -> Iterator[Trace]:
    """A solid line of means and a thin, pale one of the highest values, for each role."""
    for role, series in by_role(result, kind):
        colour, group = PHASE_COLOURS[role], {"legendgroup": role.value, **where}
        times, means, highest = steps(series)
        yield stepped(role.value, times, means, colour) | group | {"showlegend": legend}
        thin = {"line": {"color": colour, "width": 0.75, "shape": "hv"}, "opacity": 0.45, "showlegend": False}
        yield stepped(f"{role.value}, highest", times, highest, colour) | group | thin


def steps(series: Series) -> tuple[list[float], list[float], list[float]]:
    """Times, means and highest values of a series; its last step is closed by a point of its own."""
    points = series.points()
    if points:
        points.append((series.at_ps / _PS_PER_S, points[-1][1], points[-1][2]))
    times, means, highest = ([point[column] for point in points] for column in range(3))
    return times, means, highest


def stepped(name: str, times: list[float], values: list[float], colour: str) -> Trace:
    """A line that holds each value until the next."""
    return line(name, times, values, colour) | {"line": {"color": colour, "width": 1.5, "shape": "hv"}}
