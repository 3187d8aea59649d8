"""Batch jobs (Splitwise, section 6): maximum throughput of each cluster design without SLOs."""

from designs import KINDS, family, paper_set, power_units
from show import split_name, table, times
from study import Settings, problem_of, timings
from whole_runs import Job, run_all

from twofold.hardware.catalog import Catalog
from twofold.planning.bounds import AnalyticBounds
from twofold.planning.design import Design

_HEADER = (
    "cluster",
    "req/s",
    "÷ H100",
    "tokens/s",
    "tokens/s per $/h",
    "tokens/s per power unit",
    "tokens/s per TDP kW",
)
_OVERLOAD = 1.5  # multiple of the maximum throughput, so that there is always work


def batch_jobs(settings: Settings, catalog: Catalog, workload: str) -> None:
    """Print each design's maximum throughput with the performance models of SplitwiseSim and of Twofold."""
    counts = paper_set("iso-power", workload).counts
    for timing in timings(settings, catalog).values():
        problem = problem_of(timing, workload, settings, catalog)
        bounds = AnalyticBounds(problem)
        kinds = [kind for kind in KINDS if kind.name in counts]
        designs = [
            Design(family=family(kind, catalog, timing.mixed_batchers[0]), counts=counts[kind.name]) for kind in kinds
        ]
        whole = run_all([Job(problem, design, _OVERLOAD * bounds.upper(design)) for design in designs], settings.jobs)
        base = dict(zip((kind.name for kind in kinds), whole, strict=True))["Baseline-H100"].requests_per_s
        rows = [
            [
                f"{kind.name} {split_name(design.counts)}",
                f"{each.requests_per_s:.1f}",
                times(each.requests_per_s, base),
                f"{each.tokens_per_s:,.0f}",
                f"{each.tokens_per_s / design.price_per_h:.2f}",
                f"{each.tokens_per_s / power_units(design, catalog):.2f}",
                f"{each.tokens_per_s / design.tdp_w * 1e3:.1f}",
            ]
            for kind, design, each in zip(kinds, designs, whole, strict=True)
        ]
        table(f"Batch jobs: iso-power, {workload}, {timing.name} timing", _HEADER, rows)
