"""Result of `twofold simulate` and of `twofold.simulate`: figures, requests, charts, tables and pages of one run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from rich.console import Group

from twofold.performance.cost import ModelAccuracy
from twofold.reporting.output import Tabular
from twofold.reporting.simulation.gantt import GanttRuns
from twofold.reporting.simulation.html import html_report, percentile_table, pictures, verdict_table
from twofold.reporting.simulation.report import SimulationReport, replan_table
from twofold.reporting.simulation.table import simulation_tables
from twofold.scheduling.replan.replanner import ReplanDecision
from twofold.simulation.observers.files import RequestTable
from twofold.simulation.result import SimulationResult, Verdict
from twofold.slo import Slo, SlowdownSlo

if TYPE_CHECKING:  # slow to import
    import pyarrow as pa
    from plotly.graph_objects import Figure as PlotlyFigure


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation(Tabular):
    """A simulated run: a table with a row for each request, and the figures of the whole.

    `summary` has the main figures as one flat row, and `report` all figures, as `twofold simulate --json` prints them:
    `report.latencies_s["ttft_s"].p99`. `verdict` compares the run with its SLO, and is None without one.
    """

    pools: str
    workload: str
    result: SimulationResult
    report: SimulationReport
    slo: Slo | SlowdownSlo | None
    verdict: Verdict | None
    reference: ModelAccuracy | None  # of the performance model that slowdowns are relative to
    replans: Sequence[ReplanDecision] | None
    notes: tuple[str, ...]
    gantt: GanttRuns = field(repr=False)
    requests: RequestTable = field(repr=False)

    @property
    def title(self) -> str:
        """The model, the pools and the workload."""
        return f"{self.result.spec.model} on {self.pools}, {self.workload}"

    @property
    def summary(self) -> dict[str, str | float | bool | None]:
        """Main figures of the run as one flat row, with units at the end of the names: seconds, watts, or per second.

        Rates are those of the second half of the arrivals, if the run is long enough, else of the whole run.
        `slo_attainment` is the share of all arrived requests that meet an SLO in seconds; prices are dollars per hour
        and per million output tokens; `met` is the verdict.
        """
        result, pace = self.result, self.result.pace
        latencies = {
            f"{name}_{percentile}_s": getattr(self.report.latencies_s[f"{name}_s"], percentile, None)
            for name in ("ttft", "tpot", "itl", "e2e")
            for percentile in ("p50", "p90", "p99")
        }
        return {
            "cluster": self.pools,
            "arrived": result.arrived,
            "completed": result.completed,
            **latencies,
            "slo_attainment": None if result.slo_met is None else result.slo_met / result.arrived,
            "requests_per_s": pace.requests_per_s,
            "goodput_per_s": pace.goodput_per_s,
            "output_tokens_per_s": pace.output_tokens_per_s,
            "price_per_h": result.price_per_h,
            "price_per_mtok": result.price_per_mtok,
            "mean_power_w": result.mean_power_w,
            "met": None if self.verdict is None else self.verdict.met,
        }

    def to_arrow(self) -> "pa.Table":
        """Return a row for each request as a `pyarrow.Table`: lengths in tokens, latencies in seconds, instances."""
        return self.requests.table()

    def figures(self) -> "dict[str, PlotlyFigure]":
        """Return the charts of the HTML report as plotly figures, by name, such as `latencies` or `power`."""
        return {each.id: each.figure() for each in pictures(self.pools, self.result, self.slo, self.gantt)}

    def to_html(self) -> str:
        """Return the HTML report, a page that needs no network."""
        return html_report(
            self.pools,
            self.result,
            title=self.title,
            slo=self.slo,
            judged=self.verdict,
            runs=self.gantt,
            reference=self.reference,
        )

    def tables(self) -> Group:
        """Return the tables of `twofold simulate`, for `rich.print`."""
        shown = simulation_tables(self.result, self.title, self.verdict, self.reference)
        return shown if self.replans is None else Group(shown, replan_table(self.replans))

    def _repr_html_(self) -> str:
        judged = "" if self.verdict is None else verdict_table(self.pools, self.verdict)
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<p>{escape(self.title)}</p>{percentile_table(self.result, self.reference)}{judged}{notes}"
