"""Result of `twofold plan` and of `twofold.plan`: verdict, designs, charts, tables, page and deployment of one plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from rich.console import Group

from twofold.errors import ConfigurationError
from twofold.planning.plan import DesignChoice
from twofold.reporting.chart import ReportChart
from twofold.reporting.output import JsonReport, Tabular
from twofold.reporting.page import html_table
from twofold.reporting.plan.table import HEADINGS, choice_row

if TYPE_CHECKING:  # slow to import
    import pyarrow as pa
    from plotly.graph_objects import Figure as PlotlyFigure


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult(Tabular):
    """A plan: a table with a row for each design that meets the SLO, best first, and the verdict on splitting.

    `verdict` is in words. `report` has all figures, as `twofold plan --json` prints them; its class depends on the
    objective. A plan with `kv_capacity=True` has no designs: its table and its figures are empty.
    """

    title: str
    verdict: str
    report: JsonReport
    choices: tuple[DesignChoice, ...] = ()
    charts: Sequence[ReportChart] = field(default=(), repr=False)
    tables: Group = field(repr=False)
    page: Callable[[], str] | None = field(default=None, repr=False)
    deployment: Callable[[], str] | None = field(default=None, repr=False)

    @property
    def best(self) -> DesignChoice:
        """The recommended design. Raises ConfigurationError for a plan of KV capacity."""
        if not self.choices:
            raise ConfigurationError("a plan of KV capacity has no designs: see its report")
        return self.choices[0]

    def to_arrow(self) -> "pa.Table":
        """Return a row for each design as a `pyarrow.Table`: requests/s, dollars per hour, watts, seconds."""
        import pyarrow as pa  # noqa: PLC0415  (slow to import)

        return pa.Table.from_pylist(list(map(_row, self.choices)))

    def figures(self) -> "dict[str, PlotlyFigure]":
        """Return the charts as plotly figures, by name, such as `pareto`."""
        return {each.id: each.figure() for each in self.charts}

    def to_yaml(self) -> str:
        """Return the best design as a deployment file, for `cluster=` of `simulate` and for `twofold deploy`."""
        return _made(self.deployment)

    def to_html(self) -> str:
        """Return the HTML report, a page that needs no network."""
        return _made(self.page)

    def _repr_html_(self) -> str:
        shown = html_table(HEADINGS, map(choice_row, self.choices), range(1, len(HEADINGS) - 1))
        return f"<p>{escape(self.verdict)}</p>{shown if self.choices else ''}"


def _made(make: Callable[[], str] | None) -> str:
    if make is None:
        raise ConfigurationError("a plan of KV capacity has no deployment and no page: see its report")
    return make()


def _row(choice: DesignChoice) -> dict[str, str | float | bool | None]:
    design, told = choice.design, choice.evaluation
    return {
        "design": design.name,
        "split": design.family.split,
        "rate": choice.rate,
        "highest_rate": choice.highest_rate,
        "accelerators": choice.accelerators,
        "price_per_h": design.price_per_h,
        "tdp_w": design.tdp_w,
        "mean_power_w": told.mean_power_w,
        "requests_per_dollar": choice.requests_per_dollar,
        "requests_per_kwh": choice.requests_per_kwh,
        "ttft_p90_s": None if told.ttft_s is None else told.ttft_s.p90,
        "tpot_p90_s": None if told.tpot_s is None else told.tpot_s.p90,
    }
