"""Latency over load (Splitwise, figure 16): latency percentiles of each cluster design by request rate."""

from collections.abc import Sequence

from designs import paper_designs
from show import split_name, table
from study import Settings, problem_of, timings
from whole_runs import CompleteRun, Job, run_all

from twofold.hardware.catalog import Catalog
from twofold.planning.design import Design
from twofold.simulation.result import verdict
from twofold.slo import SPLITWISE

_HEADER = ("cluster", "req/s", "TTFT P50", "P90", "P99", "TBT P50", "P90", "P99", "E2E P50", "P90", "P99", "nine SLOs")


def latency_over_load(settings: Settings, catalog: Catalog, workload: str, rates: Sequence[float]) -> None:
    """Print TTFT (s), E2E (s) and TBT (ms) by rate, with the performance models of SplitwiseSim and of Twofold."""
    for timing in timings(settings, catalog).values():
        problem = problem_of(timing, workload, settings, catalog)
        designs = paper_designs(workload, catalog, timing.batching)
        cases = [(name, design, rate) for name, design in designs for rate in rates]
        whole = run_all([Job(problem, design, rate) for _, design, rate in cases], settings.jobs)
        rows = [_row(name, design, rate, each) for (name, design, rate), each in zip(cases, whole, strict=True)]
        table(f"Latency over load: iso-power, {workload}, {timing.name} timing", _HEADER, rows)


def _row(name: str, design: Design, rate: float, whole: CompleteRun) -> list[str]:
    result = whole.result
    latencies = [
        f"{(histogram.percentile(p) or 0.0) * scale:.{digits}f}"
        for histogram, scale, digits in ((result.ttft_s, 1, 2), (result.tpot_s, 1e3, 0), (result.e2e_s, 1, 1))
        for p in (50, 90, 99)
    ]
    met = "kept" if verdict(result, SPLITWISE).met else "missed"
    batching = "" if design.family.split else f" {design.family.batching}"
    return [f"{name} {split_name(design.counts)}{batching}", f"{rate:g}", *latencies, met]
