"""Measure the speed of routing decisions and load reports, and memory per instance, by cluster size.

The cluster holds a constant number of requests: each routing decision places a new request after the oldest one
has finished. A load report carries the load of one instance to a controller. A quarter of the instances run prefill,
the others decode. Speeds are per CPU second of this process. A plain loop is also timed, to compare machines.
"""

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from twofold.handoff import HandoffMode
from twofold.instance import LoadTotals, Role
from twofold.kvcache.index import PrefixIndex
from twofold.reporting.output import json_text
from twofold.scheduling.cluster.forecast import ClusterForecast, Prediction
from twofold.scheduling.cluster.router import Router
from twofold.scheduling.cluster.scheduler import ClusterScheduler, FixedHandoff
from twofold.scheduling.cluster.shared import LoadReport, SharedCluster
from twofold.scheduling.routers import ROUTERS
from twofold.scheduling.routers.cells import CellRouter
from twofold.scheduling.routers.forecasting import Conductor

sys.path.append(str(Path(__file__).parents[1]))
from decision_cost import LOOP_ITERATIONS, cpu_seconds, decisions_per_s, reference_loop, sample_requests

INSTANCES = (100, 1_000, 10_000)
CELL = 100
HELD = 8
SLOW = 200_000  # limit on decisions × instances for routers that scan all instances
KNOWN: dict[str, Callable[[], Router]] = {
    **{name: ROUTERS[name] for name in ("jsq", "two-choices", "splitwise", "cells:jsq", "conductor")},
    "cells of conductor": lambda: CellRouter(Conductor()),
}
BY_LAYER = FixedHandoff(HandoffMode.LAYER_WISE)


class Proportional(Prediction):
    """Stub of time predictions: 100 µs per computed prompt token, 1 µs per transferred token."""

    def prefill_s(self, tokens: int, reused: int = 0) -> float:
        return (tokens - reused) * 1e-4

    def transfer_s(self, tokens: int) -> float:
        return tokens * 1e-6


def populate(cluster: ClusterScheduler, instances: int) -> None:
    """Add instances to a cluster: a quarter for prefill, the others for decode."""
    prediction = Proportional()
    forecast = cluster.pools.forecast = ClusterForecast(PrefixIndex(), 512)
    for number in range(instances):
        role = Role.DECODE if number % 4 else Role.PREFILL
        name = f"{role.value}-{number}"
        cluster.add_instance(name, role, 200_000, f"cell-{number // CELL}")
        forecast.join(name, prediction)


def rate_of(name: str, instances: int, decisions: int) -> float:
    """Return a router's decisions per CPU second."""
    cluster, held = ClusterScheduler(KNOWN[name](), BY_LAYER), HELD * instances
    populate(cluster, instances)
    if name == "conductor":  # scans all instances, so it is slow
        decisions, held = max(20, min(decisions, SLOW * 10 // instances)), min(held, 200)
    return decisions_per_s(cluster, decisions, held=held)


def reports_per_s(name: str, instances: int, reports: int) -> float:
    """Return the number of load reports applied per CPU second."""
    cluster = SharedCluster(ROUTERS[name](), BY_LAYER)
    populate(cluster, instances)
    for request in sample_requests(20):
        cluster.place(request, 0.0)  # build the ranking
    names = [load.id for load in cluster.pools]
    draw, nothing = random.Random(0), LoadTotals()
    made = [
        LoadReport(names[n % instances], LoadTotals(draw.randint(0, 9000), draw.randint(0, 90_000)), nothing)
        for n in range(reports)
    ]

    def work() -> None:
        for report in made:
            cluster.reported(report)

    return reports / cpu_seconds(work)


def bytes_per_instance(name: str, instances: int) -> float:
    """Return a cluster scheduler's memory in bytes per instance."""
    process = psutil.Process()
    before = process.memory_info().rss
    cluster = ClusterScheduler(KNOWN[name](), BY_LAYER)
    populate(cluster, instances)
    cluster.place(sample_requests(1)[0], 0.0)
    return (process.memory_info().rss - before) / instances


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=INSTANCES)
    parser.add_argument("--decisions", type=int, default=20_000)
    parser.add_argument("--json", type=Path, help="file for all results")
    args = parser.parse_args()
    loops = [cpu_seconds(reference_loop) for _ in range(3)]
    memory = bytes_per_instance("jsq", max(args.instances))
    rows = [(name, [rate_of(name, instances, args.decisions) for instances in args.instances]) for name in KNOWN]
    rows += [
        (f"reports, {name}", [reports_per_s(name, instances, args.decisions) for instances in args.instances])
        for name in ("jsq", "cells:jsq")
    ]
    loops += [cpu_seconds(reference_loop) for _ in range(3)]
    turn_s = min(loops) / LOOP_ITERATIONS
    table = Table(title="Per CPU second (each in iterations of a plain loop)", title_justify="left")
    table.add_column("decisions")
    for instances in args.instances:
        table.add_column(f"{instances:,} instances", justify="right")
    for name, rates in rows:
        if name.startswith("reports") and not rows[rows.index((name, rates)) - 1][0].startswith("reports"):
            table.add_section()
        table.add_row(name, *(f"{rate:,.0f} ({1 / rate / turn_s:,.0f})" for rate in rates))
    console = Console(width=110)
    console.print(table)
    console.print(
        f"{memory:,.0f} bytes per instance of {max(args.instances):,} instances. A million loop iterations took "
        f"{min(loops) * 1e3:.1f} ms (at most {max(loops) * 1e3:.1f})."
    )
    if args.json is not None:
        per_cpu_s = {name: dict(zip(map(str, args.instances), rates, strict=True)) for name, rates in rows}
        found = {"per_cpu_s": per_cpu_s, "bytes_per_instance": memory, "loop_s": min(loops)}
        args.json.write_text(json_text(found), "utf-8")


if __name__ == "__main__":
    main()
