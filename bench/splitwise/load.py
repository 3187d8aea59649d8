"""Latency over load (Splitwise, figure 16): latency percentiles of each cluster design by request rate."""

from collections.abc import Sequence

from designs import KINDS, Kind, family, paper_set
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
    counts = paper_set("iso-power", workload).counts
    for timing in timings(settings, catalog).values():
        problem = problem_of(timing, workload, settings, catalog)
        cases = [(kind, rate) for kind in KINDS if kind.name in counts for rate in rates]
        jobs = [
            Job(problem, Design(family=family(kind, catalog, timing.mixed_batchers[0]), counts=counts[kind.name]), rate)
            for kind, rate in cases
        ]
        whole = run_all(jobs, settings.jobs)
        rows = [_row(kind, counts[kind.name], rate, each) for (kind, rate), each in zip(cases, whole, strict=True)]
        table(f"Latency over load: iso-power, {workload}, {timing.name} timing", _HEADER, rows)


def _row(kind: Kind, counts: Sequence[int], rate: float, whole: CompleteRun) -> list[str]:
    result = whole.result
    latencies = [
        f"{(histogram.percentile(p) or 0.0) * scale:.{digits}f}"
        for histogram, scale, digits in ((result.ttft_s, 1, 2), (result.tpot_s, 1e3, 0), (result.e2e_s, 1, 1))
        for p in (50, 90, 99)
    ]
    met = "kept" if verdict(result, SPLITWISE).met else "missed"
    return [f"{kind.name} {split_name(counts)}", f"{rate:g}", *latencies, met]
