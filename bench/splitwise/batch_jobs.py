"""Batch jobs (Splitwise, section 6): maximum throughput of each cluster design without SLOs."""

from designs import paper_designs, power_units
from show import split_name, table, times
from study import Settings, problem_of, timings
from whole_runs import CompleteRun, Job, run_all

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
    for timing in timings(settings, catalog).values():
        problem = problem_of(timing, workload, settings, catalog)
        bounds = AnalyticBounds(problem)
        designs = paper_designs(workload, catalog, timing.batching)
        jobs = [Job(problem, design, _OVERLOAD * bounds.upper(design)) for _, design in designs]
        best: dict[str, tuple[Design, CompleteRun]] = {}  # a baseline has its best batcher
        for (name, design), run in zip(designs, run_all(jobs, settings.jobs), strict=True):
            if name not in best or run.requests_per_s > best[name][1].requests_per_s:
                best[name] = design, run
        base = best["Baseline-H100"][1].requests_per_s
        rows = [
            [
                f"{name} {split_name(design.counts)}",
                f"{each.requests_per_s:.1f}",
                times(each.requests_per_s, base),
                f"{each.tokens_per_s:,.0f}",
                f"{each.tokens_per_s / design.price_per_h:.2f}",
                f"{each.tokens_per_s / power_units(design, catalog):.2f}",
                f"{each.tokens_per_s / design.tdp_w * 1e3:.1f}",
            ]
            for name, (design, each) in best.items()
        ]
        table(f"Batch jobs: iso-power, {workload}, {timing.name} timing", _HEADER, rows)
