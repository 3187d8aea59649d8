"""Picture: which instance ran what and when, and the observer that keeps the first runs for it."""

import re
from collections import defaultdict

from twofold.instance import Role
from twofold.reporting.chart import PHASE_COLOURS, Layout, ReportChart, Trace, axis, grid
from twofold.simulation.observers.base import IterationRun, Observer

MOST_RUNS = 5000
_PS_PER_S = 10**12
# Of a bar with a base, plotly calls the end of it x.
_HOVER = (
    "%{y}, from %{base:.3f} s to %{x:.3f} s<br>%{customdata[0]} iterations, %{customdata[1]} prompt tokens"
    " of %{customdata[2]} sequences, %{customdata[3]} decodes, %{customdata[4]} W"
)


class GanttRuns(Observer):
    """Keeps the runs of the first `until_s` seconds, or as far as about `limit` runs reach.

    Memory is bounded: once there are `limit` runs the picture ends where the latest of them does, and of those
    that end later only the parts before count, which is at most one for each life of an instance.
    """

    def __init__(self, limit: int = MOST_RUNS, until_s: float | None = None) -> None:
        self.runs: list[IterationRun] = []
        self.instances: set[str] = set()
        self._limit = limit
        self._end_ps = None if until_s is None else round(until_s * _PS_PER_S)

    @property
    def end_s(self) -> float:
        """Where the picture ends."""
        latest = max((run.end_ps for run in self.runs), default=0)
        return (latest if self._end_ps is None else min(latest, self._end_ps)) / _PS_PER_S

    def run(self, run: IterationRun) -> None:
        if self._end_ps is not None and run.start_ps >= self._end_ps:
            return
        self.runs.append(run)
        if len(self.runs) == self._limit:
            self._end_ps = run.end_ps if self._end_ps is None else min(self._end_ps, run.end_ps)

    def role(self, instance: str, role: Role, at_ps: int) -> None:
        """An instance that never ran has an empty row."""
        self.instances.add(instance)


def gantt(kept: GanttRuns, name: str, index: int = 0, runs: int = 1) -> ReportChart:
    """The runs of one simulation: a row for each instance, a colour for each phase."""
    by_phase: dict[Role, list[IterationRun]] = defaultdict(list)
    for run in kept.runs:
        by_phase[_phase(run)].append(run)
    rows = sorted(kept.instances | {run.instance for run in kept.runs}, key=_natural, reverse=True)
    return ReportChart(
        id=f"gantt-{index}",
        title="Instances over time" if runs == 1 else f"Instances over time: {name}",
        note=f"What each instance ran in the first {kept.end_s:.1f} s; white is idle.",
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
        "customdata": [_details(run) for run in runs],
        "hovertemplate": _HOVER,
    }


def _details(run: IterationRun) -> list[int]:
    prompts = (run.iterations, run.prefill_tokens, run.prefill_sequences)
    return [*prompts, run.decode_sequences, round(run.watts)]


def _layout(rows: list[str], end_s: float) -> Layout:
    x = axis("Simulated time (s)", range=[0, end_s])
    y = axis("Instance", type="category", categoryorder="array", categoryarray=rows, showgrid=False)
    height = min(1600, 160 + 20 * len(rows))
    # A key to the colours also where only one phase ran.
    return grid(1, 1, [(x, y)], barmode="overlay", bargap=0.15, showlegend=True) | {"height": height}


def _natural(name: str) -> list[tuple[int, str]]:
    """decode-2 before decode-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
