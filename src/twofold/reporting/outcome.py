"""Results of `simulate` and `plan` as objects, for commands and for Python: data frames, charts, tables."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.jupyter import JupyterMixin

from twofold.errors import ConfigurationError
from twofold.planning.plan import DesignChoice
from twofold.reporting.chart import ReportChart
from twofold.reporting.output import JsonReport
from twofold.reporting.simulation.report import SimulationReport
from twofold.simulation.observers.files import RequestTable
from twofold.simulation.result import SimulationResult, SteadyState, Verdict

if TYPE_CHECKING:  # slow to import
    import pyarrow as pa
    from plotly.graph_objects import Figure as PlotlyFigure


class Tabular(ABC):
    """Base class of objects that are also a table: for pandas, Polars, DuckDB and others that read Arrow."""

    @abstractmethod
    def to_arrow(self) -> "pa.Table":
        """Return the table as a `pyarrow.Table`."""

    def to_pandas(self) -> Any:  # noqa: ANN401  (pandas may be missing)
        """Return the table as a `pandas.DataFrame`. Raises ConfigurationError if pandas is not installed."""
        _require_package("pandas")
        return self.to_arrow().to_pandas()

    def to_polars(self) -> Any:  # noqa: ANN401  (Polars may be missing)
        """Return the table as a `polars.DataFrame`. Raises ConfigurationError if Polars is not installed."""
        return _require_package("polars").from_arrow(self.to_arrow())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the table as a stream of Arrow's C interface, which `polars.DataFrame(…)` and others read."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)


def _require_package(name: str) -> Any:  # noqa: ANN401
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigurationError(f"to_{name} needs {name}: pip install {name}") from error


@dataclass(frozen=True, kw_only=True)
class Outcome(JupyterMixin, Tabular):
    """Base class of results. `report` has all figures, as the command prints them with `--json`. A notebook, or
    `rich.print`, shows the tables of the command.
    """

    report: JsonReport
    tables: Group = field(repr=False)
    charts: Sequence[ReportChart] = field(default=(), repr=False)

    def figures(self) -> "dict[str, PlotlyFigure]":
        """Return the charts as plotly figures, by name, such as `latencies` or `pareto`."""
        from plotly.graph_objects import Figure  # noqa: PLC0415  (slow to import)

        titles = {each.id: {"title": {"text": each.title}, "margin": {"t": 90}} for each in self.charts}
        return {each.id: Figure(each.traces, each.layout | titles[each.id]) for each in self.charts}

    def __rich__(self) -> Group:
        return self.tables


@dataclass(frozen=True, kw_only=True)
class Simulation(Outcome):
    """A simulated run: a table with a row for each request, and the figures of the whole run.

    `summary` has the main figures; `report.latencies_s["ttft_s"].p99` is one of all. `verdict` compares the run with
    its SLO, and is None without one. `notes` are sentences that the command prints beside the tables.
    """

    pools: str
    report: SimulationReport
    result: SimulationResult = field(repr=False)
    verdict: Verdict | None
    notes: tuple[str, ...]
    requests: RequestTable = field(repr=False)

    @property
    def summary(self) -> dict[str, str | float | bool | None]:
        """Main figures of the run as one flat row, with units at the end of the names: seconds, watts, or per second.

        Rates are those of the second half of the arrivals, if the run is long enough, else of the whole run.
        `slo_attainment` is the share of all arrived requests that meet an SLO in seconds; prices are dollars per hour
        and per million output tokens; `met` is the verdict.
        """
        result, pace = self.result, self.result.steady or self.report.rates
        tokens_per_s = pace.output_tokens_per_s
        latencies = {
            f"{name}_{percentile}_s": getattr(self.report.latencies_s[f"{name}_s"], percentile, None)
            for name in ("ttft", "tpot", "itl", "e2e")
            for percentile in ("p50", "p90", "p99")
        }
        return {
            "cluster": self.pools,
            **{name: getattr(result, name) for name in ("arrived", "completed", "rejected", "failed", "unfinished")},
            **latencies,
            "slo_attainment": None if result.slo_met is None else result.slo_met / result.arrived,
            **{name: getattr(pace, name) for name in SteadyState.__struct_fields__},
            "price_per_h": result.price_per_h,
            "price_per_mtok": result.price_per_h / 3600 / tokens_per_s * 1e6 if tokens_per_s else None,
            "mean_power_w": result.mean_power_w,
            "met": None if self.verdict is None else self.verdict.met,
        }

    def to_arrow(self) -> "pa.Table":
        """Return a row for each request, by its end, as a `pyarrow.Table`: tokens, latencies in seconds, instances."""
        return self.requests.table()


_OF_DESIGN = ("name", "machines", "price_per_h", "tdp_w")
_OF_CHOICE = ("rate", "highest_rate", "accelerators", "requests_per_dollar", "requests_per_kwh")


@dataclass(frozen=True, kw_only=True)
class PlanResult(Outcome):
    """A plan: a table with a row for each design that meets the SLO, best first, and the verdict on splitting in words.

    The class of `report` depends on the objective. A plan with `kv_capacity=True` has no designs.
    """

    verdict: str
    choices: Sequence[DesignChoice] = ()

    def to_arrow(self) -> "pa.Table":
        """Return a row for each design as a `pyarrow.Table`: rates in requests/s, dollars per hour, watts."""
        import pyarrow as pa  # noqa: PLC0415  (slow to import)

        columns = {name: [getattr(each.design, name) for each in self.choices] for name in _OF_DESIGN}
        columns |= {name: [getattr(each, name) for each in self.choices] for name in _OF_CHOICE}
        return pa.table({**columns, "split": [each.design.family.split for each in self.choices]})
