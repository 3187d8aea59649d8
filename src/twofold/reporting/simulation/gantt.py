"""Gantt chart of the instances' iterations over time, and the observer that records them."""

import re
from collections import defaultdict

from twofold.instance import Role
from twofold.reporting.chart import PHASE_COLOURS, Layout, ReportChart, Trace, axis, grid
from twofold.simulation.observers.base import IterationRun, Observer

MOST_RUNS = 1500
_PS_PER_S = 10**12
# For a bar with a base, plotly reports its end as x.
_HOVER = (
    "%{y}, from %{base:.3f} s to %{x:.3f} s<br>%{customdata[0]} iterations, %{customdata[1]} prompt tokens"
    " of %{customdata[2]} sequences, %{customdata[3]} decodes, %{customdata[4]} W"
)


class GanttRuns(Observer):
    """Observer that records the iterations of all instances for a Gantt chart."""

    def __init__(self, limit: int = MOST_RUNS) -> None:
        # The chart ends after `limit` runs (consecutive iterations of one batch).
        self.runs: list[IterationRun] = []
        self.instances: set[str] = set()
        self._limit = limit
        self._end_ps: int | None = None

    @property
    def end_s(self) -> float:
        """Simulated time in seconds at which the chart ends."""
        latest = max((run.end_ps for run in self.runs), default=0)
        return (latest if self._end_ps is None else min(latest, self._end_ps)) / _PS_PER_S

    def run(self, run: IterationRun) -> None:
        if self._end_ps is not None and run.start_ps >= self._end_ps:
            return
        self.runs.append(run)
        if len(self.runs) == self._limit:
            self._end_ps = run.end_ps

    def role(self, instance: str, role: Role, at_ps: int) -> None:
        """Add a chart row for an instance that has joined a pool, even if the instance never runs an iteration."""
        self.instances.add(instance)


def gantt(kept: GanttRuns) -> ReportChart:
    """Plot the activity of each instance over time as a row of bars, coloured by phase."""
    by_phase: dict[Role, list[IterationRun]] = defaultdict(list)
    for run in kept.runs:
        by_phase[_phase(run)].append(run)
    rows = sorted(kept.instances | {run.instance for run in kept.runs}, key=_natural, reverse=True)
    return ReportChart(
        id="gantt-0",
        title="Instances over time",
        note=f"Activity of each instance in the first {kept.end_s:.1f} s; white is idle.",
        traces=[_bars(role, by_phase[role], kept.end_s) for role in Role if by_phase[role]],
        layout=_layout(rows, kept.end_s),
    )


def _phase(run: IterationRun) -> Role:
    if run.prefill_sequences == 0:
        return Role.DECODE
    return Role.MIXED if run.decode_sequences else Role.PREFILL


def _bars(role: Role, runs: list[IterationRun], end_s: float) -> Trace:
    starts = [run.start_ps / _PS_PER_S for run in runs]
    ends = [min(run.end_ps / _PS_PER_S, end_s) for run in runs]
    return {
        "type": "bar",
        "orientation": "h",
        "name": role.value,
        "y": [run.instance for run in runs],
        "base": [round(start, 4) for start in starts],
        "x": [round(end - start, 4) for start, end in zip(starts, ends, strict=True)],
        "marker": {"color": PHASE_COLOURS[role], "line": {"width": 0}},
        "customdata": [
            [run.iterations, run.prefill_tokens, run.prefill_sequences, run.decode_sequences, round(run.watts)]
            for run in runs
        ],
        "hovertemplate": _HOVER,
    }


def _layout(rows: list[str], end_s: float) -> Layout:
    x = axis("Simulated time (s)", range=[0, end_s])
    y = axis("Instance", type="category", categoryorder="array", categoryarray=rows, showgrid=False)
    height = min(1600, 160 + 20 * len(rows))
    # Show the legend for a single phase too.
    return grid(1, 1, [(x, y)], barmode="overlay", bargap=0.15, showlegend=True) | {"height": height}


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts decode-2 before decode-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
