"""Capacity plans of KV caches as terminal tables, JSON and HTML."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from twofold.planning.capacity.curve import CapacityCurve, CapacityPoint
from twofold.planning.capacity.plan import CapacityPlan, TierPlan
from twofold.reporting.chart import ReportChart, Trace, axis, grid, line, log_axis, markers, run_colour
from twofold.reporting.output import JsonReport, same_fields, table
from twofold.reporting.page import html_chart, html_page, html_section, html_table

_ROWS = 12


def capacity_tables(plan: CapacityPlan, title: str) -> Group:
    """Return a table of hit rates and savings for each cache tier, and a summary in words."""
    parts: list[RenderableType] = [_table(plan, each, title) for each in plan.tiers]
    return Group(*parts, Text(capacity_text(plan), style="bold"))


def capacity_page(plan: CapacityPlan, title: str) -> str:
    body = [f'<p class="advice">{escape(capacity_text(plan))}</p>', *map(html_chart, capacity_charts(plan))]
    for each in plan.tiers:
        headings = _headings(each)
        body.append(html_section(_title(plan, each), html_table(headings, _rows(plan, each), range(len(headings)))))
    return html_page(title, body)


def capacity_charts(plan: CapacityPlan) -> list[ReportChart]:
    """Plot the hit rate of each cache tier over its capacity, and mark the capacity with the highest net savings."""
    return [_chart(each) for each in plan.tiers]


def _chart(each: TierPlan) -> ReportChart:
    traces, sizes = list[Trace](), capacities(each)[1:]
    for index, (name, curve) in enumerate(_curves(each).items()):
        colour, best = run_colour(index), curve.best()
        traces.append(line(name, sizes, [100 * curve.at(gb).hit_rate for gb in sizes], colour))
        look = {"color": colour, "size": 11}
        traces.append(markers(f"{name}, saves most", [best.gb_per_node], [100 * best.hit_rate], look))
    layout = grid(1, 1, [(log_axis("GB per node"), axis("Hit rate (%)", rangemode="tozero"))])
    return ReportChart(id=each.tier.name, title=f"Hit rate of {_name(each)}", traces=traces, layout=layout)


def capacity_text(plan: CapacityPlan) -> str:
    """Summarize a capacity plan in a few sentences."""
    busy = f"Without reuse, prefill keeps {plan.busy:,.1f} accelerators busy"
    repeated = f"{plan.highest_reuse:.1%} of its blocks are repeated"
    return " ".join(filter(None, (f"{busy}; {repeated}.", *map(_pays, plan.tiers), _pooling(plan), _alone(plan))))


def capacities(each: TierPlan) -> list[float]:
    """Return the cache capacities, in GB per node, at which a report states the hit rate of a cache tier."""
    full = max(curve.full_gb_per_node for curve in _curves(each).values())
    last = math.ceil(math.log2(full)) if full > 0 else 0
    # Zero, and powers of two until the hit rate is at its highest.
    return [0.0, *(2.0**power for power in range(last - _ROWS + 1, last + 1))]


def _pays(each: TierPlan) -> str:
    name, best = _name(each), each.preferred.best()
    where = "in one pool" if each.pool else "on the node"
    behind = f" behind {each.behind_gb:,.0f} GB of DRAM" if each.behind_gb else ""
    if best.gb_per_node == 0:
        return f"{name}{behind} does not pay at ${each.tier.price_per_gb_h:g} per GB and hour."
    gain = f"hit rate {best.hit_rate:.1%}, {best.accelerators:,.1f} accelerators freed"
    worth = f"worth ${best.saved_per_h:,.2f}/h for ${best.price_per_h:,.2f}/h"
    return f"{name}{behind} pays up to {best.gb_per_node:,.0f} GB per node {where}: {gain}, {worth}."


def _pooling(plan: CapacityPlan) -> str:
    last = plan.tiers[-1]
    if last.pool is None:
        return ""
    best = last.pool.best()
    pooled, local = best.hit_rate, last.local.at(best.gb_per_node).hit_rate
    if local == 0:
        return ""
    return f"With separate caches of that size hit rate is {local:.1%}: the pool has {pooled / local:.2f}× the hits."


def _alone(plan: CapacityPlan) -> str:
    dram, disk = plan.tiers
    if not disk.behind_gb:
        return ""
    both = dram.preferred.at(disk.behind_gb).gain_per_h + disk.preferred.best().gain_per_h
    best = plan.disk_alone.preferred.best()
    return (
        f"{_name(disk)} alone pays up to {best.gb_per_node:,.0f} GB per node (hit rate {best.hit_rate:.1%}) and "
        f"saves ${best.gain_per_h:,.2f}/h net; both tiers save ${both:,.2f}/h."
    )


def _table(plan: CapacityPlan, each: TierPlan, title: str) -> Table:
    headings = _headings(each)
    drawn = table(f"{title}: {_title(plan, each)}", headings, range(len(headings)))
    for row in _rows(plan, each):
        drawn.add_row(*row)
    return drawn


def _title(plan: CapacityPlan, each: TierPlan) -> str:
    behind = f" behind {each.behind_gb:,.0f} GB of DRAM on each node" if each.behind_gb else ""
    return f"{_name(each)}{behind}, {plan.nodes} nodes"


def _headings(each: TierPlan) -> list[str]:
    headings = ["GB per node", "$/h"]
    for name in _curves(each):
        headings += [f"{name}: hit rate", "accelerators freed", "s/h per added GB", "return"]
    return headings


def _rows(plan: CapacityPlan, each: TierPlan) -> Iterator[tuple[str, ...]]:
    curves = (_curve_report(plan, curve, capacities(each)).points for curve in _curves(each).values())
    for found in zip(*curves, strict=True):
        one = found[0].point
        cells = (cell for report in found for cell in _cells(report.point, report.added))
        yield _short(one.gb_per_node), _short(one.price_per_h), *cells


def _cells(point: CapacityPoint, added: "MarginalGain") -> tuple[str, ...]:
    returns = "-" if added.returns is None else f"{added.returns:.2g}×"
    return (f"{point.hit_rate:.1%}", f"{point.accelerators:,.2f}", f"{added.accelerator_s_per_gb_h:.3g}", returns)


class MarginalGain(msgspec.Struct, frozen=True, kw_only=True):
    """Savings from enlarging a cache tier: accelerator time per added GB, and dollars saved per dollar spent."""

    accelerator_s_per_gb_h: float  # accelerator seconds saved per hour by each added GB
    returns: float | None  # dollars saved by each dollar spent; None for a free tier


def added_by(plan: CapacityPlan, before: CapacityPoint, point: CapacityPoint) -> MarginalGain:
    gb = (point.gb_per_node - before.gb_per_node) * plan.nodes
    price = point.price_per_h - before.price_per_h
    return MarginalGain(
        accelerator_s_per_gb_h=(point.accelerators - before.accelerators) * 3600 / gb,
        returns=(point.saved_per_h - before.saved_per_h) / price if price > 0 else None,
    )


class CapacityPointReport(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rate, savings and price of a cache tier at one capacity, and the gain over the next smaller one."""

    point: CapacityPoint
    added: MarginalGain


class CurveReport(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rate, savings and price of a cache tier at several capacities."""

    best: CapacityPoint  # with the highest net savings
    full_gb_per_node: float
    points: tuple[CapacityPointReport, ...]


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rate, savings and price of a cache tier by capacity, for one cache per node and for one shared cache."""

    tier: str
    price_per_gb_h: float
    behind_gb: float
    local: CurveReport  # one cache per node
    pool: CurveReport | None  # one shared cache; None for a single node


class CapacityReport(JsonReport, frozen=True, kw_only=True):
    """JSON output of `twofold plan --kv-capacity --json`."""

    model: str
    machine: str
    performance: str
    prefill_error: float | None
    accelerators: int
    nodes: int
    requests: int
    blocks: int
    block_bytes: int
    duration_s: float
    highest_reuse: float
    busy: float
    tiers: tuple[TierReport, ...]
    disk_alone: TierReport
    text: str

    @classmethod
    def of(cls, plan: CapacityPlan) -> "CapacityReport":
        query = plan.query
        return cls(
            model=query.model.name,
            machine=query.machine.name,
            performance=query.performance.name,
            prefill_error=query.performance.error.prefill,
            accelerators=query.accelerators,
            block_bytes=query.block_bytes,
            tiers=tuple(_tier_report(plan, each) for each in plan.tiers),
            disk_alone=_tier_report(plan, plan.disk_alone),
            text=capacity_text(plan),
            **same_fields(cls, plan, without=("tiers", "disk_alone")),
        )


def _tier_report(plan: CapacityPlan, each: TierPlan) -> TierReport:
    rows = capacities(each)
    return TierReport(
        tier=each.tier.name,
        price_per_gb_h=each.tier.price_per_gb_h,
        behind_gb=each.behind_gb,
        local=_curve_report(plan, each.local, rows),
        pool=None if each.pool is None else _curve_report(plan, each.pool, rows),
    )


def _curve_report(plan: CapacityPlan, curve: CapacityCurve, rows: Sequence[float]) -> CurveReport:
    points = tuple(
        CapacityPointReport(point=point, added=added_by(plan, before, point))
        for before, point in pairwise(curve.at(gb) for gb in rows)
    )
    return CurveReport(best=curve.best(), full_gb_per_node=curve.full_gb_per_node, points=points)


def _curves(each: TierPlan) -> dict[str, CapacityCurve]:
    return {"local": each.local} if each.pool is None else {"local": each.local, "pool": each.pool}


def _name(each: TierPlan) -> str:
    return {"dram": "DRAM", "nvme": "NVMe"}.get(each.tier.name, each.tier.name)


def _short(value: float) -> str:
    if value < 1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"
