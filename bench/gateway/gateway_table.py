"""Results of side_by_side.py, and their table."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median

import msgspec
from native import LoadResult
from rich.table import Table

DIRECT, SERVE, REFERENCE = "mock server", "twofold serve", "vllm-router"
REFERENCE_OF_SERVE = "stream"  # the cell with the same tokens on the same connections
COLUMNS = (
    "load and unit",
    "router",
    "units per CPU s",
    f"× {REFERENCE}",
    "added TTFB P50 / P99, ms",
    "at 80%: added P50 / P99, ms",
    "P99 / P50",
    "core used",
)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One router in one cell and round. `units` are the tokens or requests of the closed loop; `cpu_s` is None for the
    mock server itself.
    """

    cell: str
    router: str
    number: int  # of the round
    units: int
    closed: LoadResult
    cpu_s: float | None
    low: LoadResult | None
    high: LoadResult | None

    @property
    def per_cpu_s(self) -> float | None:
        """Units per CPU second of the router."""
        return self.units / self.cpu_s if self.cpu_s else None

    @property
    def core_used(self) -> float | None:
        """Share of its core that the router used in the closed loop."""
        return None if self.cpu_s is None else self.cpu_s / self.closed.seconds


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All measurements, their setting in words, and the versions of the other routers."""

    setting: str
    versions: dict[str, str]
    measured: list[Measured]

    def of(self, cell: str, router: str) -> list[Measured]:
        """Return the measurements of a router in a cell, by round."""
        return [each for each in self.measured if each.cell == cell and each.router == router]

    def per_cpu_s(self, cell: str, router: str) -> float | None:
        """Return the median number of units per CPU second."""
        return middle(each.per_cpu_s for each in self.of(cell, router))

    def ratio(self, cell: str, router: str) -> float | None:
        """Return the median, over the rounds, of the ratio to the units per CPU second of the reference."""
        other = REFERENCE_OF_SERVE if router == SERVE else cell
        references = {each.number: each.per_cpu_s for each in self.of(other, REFERENCE)}
        pairs = ((each.per_cpu_s, references.get(each.number)) for each in self.of(cell, router))
        return middle(ours / reference if ours and reference else None for ours, reference in pairs)


def middle(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there are none."""
    there = [each for each in values if each is not None]
    return median(there) if there else None


def against(
    report: Report, cell: str, router: str, difference: Callable[[Measured, LoadResult], float | None]
) -> float | None:
    """Return the median over the rounds of `difference` between a router and the low load on the mock server itself."""
    bases = {each.number: each.low for each in report.of(cell, DIRECT) if each.low is not None}
    return middle(difference(each, bases[each.number]) for each in report.of(cell, router) if each.number in bases)


def _ttfb_p50(ours: Measured, base: LoadResult) -> float | None:
    return None if ours.low is None else ours.low.ttfb_ms.p50 - base.ttfb_ms.p50


def _ttfb_p99(ours: Measured, base: LoadResult) -> float | None:
    return None if ours.low is None else ours.low.ttfb_ms.p99 - base.ttfb_ms.p99


def _total_p50(ours: Measured, base: LoadResult) -> float | None:
    return None if ours.high is None else ours.high.total_ms.p50 - base.total_ms.p50


def _total_p99(ours: Measured, base: LoadResult) -> float | None:
    return None if ours.high is None else ours.high.total_ms.p99 - base.total_ms.p50


def terminal(report: Report, titles: Mapping[str, str]) -> Table:
    """Return the table of all cells and routers. `titles` has the title of each cell."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    table = Table(title=f"{report.setting} {versions}".strip(), title_justify="left")
    for place, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if place > 1 else "left", no_wrap=place == 1)
    for cell in dict.fromkeys(each.cell for each in report.measured):
        routers = list(dict.fromkeys(each.router for each in report.measured if each.cell == cell))
        for place, router in enumerate(routers):
            title = "" if place else titles[cell]
            table.add_row(title, router, *_figures(report, cell, router), end_section=place == len(routers) - 1)
    return table


def _figures(report: Report, cell: str, router: str) -> Iterator[str]:
    if router == DIRECT:
        low = [each.low for each in report.of(cell, router) if each.low is not None]
        p50, p99 = middle(each.ttfb_ms.p50 for each in low), middle(each.ttfb_ms.p99 for each in low)
        rate = middle(each.units / each.closed.seconds for each in report.of(cell, router))
        yield from (f"{rate:,.0f} per s", "", f"itself {_pair(p50, p99)}", "", "", "")
        return
    own = report.per_cpu_s(cell, router)
    ratio = report.ratio(cell, router)
    yield "" if own is None else f"{own:,.0f}"
    yield "" if ratio is None else f"{ratio:.3f}"
    yield _pair(against(report, cell, router, _ttfb_p50), against(report, cell, router, _ttfb_p99))
    p50, p99 = (against(report, cell, router, each) for each in (_total_p50, _total_p99))
    overloaded = any(each.high is not None and each.high.unsent for each in report.of(cell, router))
    yield _pair(p50, p99) + (" (overloaded)" if overloaded else "")
    yield f"{p99 / p50:.1f}" if p50 is not None and p99 is not None and p50 > 0 else ""
    used = middle(each.core_used for each in report.of(cell, router))
    yield "" if used is None else f"{used:.0%}"


def _pair(p50: float | None, p99: float | None) -> str:
    return "" if p50 is None or p99 is None else f"{p50:,.2f} / {p99:,.2f}"
