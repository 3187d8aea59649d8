"""Simulate the cost of stale load information, by report interval, router and number of controllers.

BLOOM-176B runs on DGX-H100 machines, with two prefill machines for every three decode machines. Requests have
the prompt and output lengths of the Azure conversation trace. Requests arrive as a Poisson process, with
`--rate` requests per second for each instance. `--controllers` independent controllers share the requests.
Instances report their load every `--reports` seconds (0: at every change). Goodput is the share of requests
within the SLO.

The compared routers choose

    jsq     the least loaded instance
    two     the less loaded of two random instances
    cells   the less loaded of two random cells (groups of instances), then the cell's least loaded instance
    random  a random instance

The label of a router, such as `jsq, + own`, also names the load that a controller assumes for an instance:

    reports  the load in the latest report
    + sent   the load in the latest report, plus requests that the controller has sent since this report
    + own    the reported load from other controllers' requests, plus the controller's own unfinished requests
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from twofold.cluster.spec import ClusterSpec, ControlSpec, PoolSpec
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.scheduling.cluster.shared import OwnLoad
from twofold.simulation.simulate import simulate
from twofold.slo import Slo
from twofold.workload.source import workload

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
CELL = 100
POLICIES = {
    "jsq, reports": ("jsq", OwnLoad.IGNORED),
    "jsq, + sent": ("jsq", OwnLoad.SENT),
    "jsq, + own": ("jsq", OwnLoad.FOLLOWED),
    "two, reports": ("two-choices", OwnLoad.IGNORED),
    "two, + own": ("two-choices", OwnLoad.FOLLOWED),
    "cells, reports": ("cells:jsq", OwnLoad.IGNORED),
    "cells, + own": ("cells:jsq", OwnLoad.FOLLOWED),
    "random": ("random", OwnLoad.IGNORED),
}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one simulation: policy, cluster size, report interval, goodput and latencies."""

    policy: str
    instances: int
    controllers: int
    reports_every_s: float
    goodput: float
    ttft_s: tuple[float, float, float]
    tpot_p99_s: float
    cpu_s: float


def run(
    policy: str, instances: int, controllers: int, every_s: float, delay_s: float, rate: float, seconds: float
) -> Case:
    router, own = POLICIES[policy]
    prefill = round(instances * 2 / 5)
    pools = tuple(
        PoolSpec(machines=machines, machine="dgx-h100", role=role)
        for machines, role in ((prefill, Role.PREFILL), (instances - prefill, Role.DECODE))
    )
    spec = ClusterSpec(
        pools=pools,
        model="bloom-176b",
        router=router,
        cells=max(1, instances // CELL) if router == "cells:jsq" else msgspec.UNSET,
        control=ControlSpec(controllers=controllers, reports_every_s=every_s, report_delay_s=delay_s, own_load=own),
    )
    requests = workload(
        "azure-conv", rate=rate * instances, num_requests=round(rate * instances * seconds), arrival="poisson"
    )
    result = simulate(spec, requests, catalog=load_catalog(), slo=SLO, series=False)
    ttft = [result.ttft_s.percentile(percent) for percent in (50, 90, 99)]
    tpot = result.tpot_s.percentile(99)
    if None in ttft or tpot is None or result.slo_met is None or result.completed != result.arrived:
        raise SystemExit(f"{result.completed} of {result.arrived} requests completed")
    return Case(
        policy=policy,
        instances=instances,
        controllers=controllers,
        reports_every_s=every_s,
        goodput=result.slo_met / result.arrived,
        ttft_s=(ttft[0] or 0.0, ttft[1] or 0.0, ttft[2] or 0.0),
        tpot_p99_s=tpot,
        cpu_s=result.cpu_s,
    )


def show(cases: Sequence[Case]) -> Table:
    table = Table()
    for column in ("policy", "controllers", "reports s", "goodput", "TTFT P50 / P90 / P99 s", "TPOT P99", "CPU s"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for before, case in zip((None, *cases), cases, strict=False):
        if before is not None and before.policy != case.policy:
            table.add_section()
        table.add_row(
            case.policy,
            f"{case.controllers}",
            f"{case.reports_every_s:g}",
            f"{case.goodput:.1%}",
            " / ".join(f"{seconds:.2f}" for seconds in case.ttft_s),
            f"{case.tpot_p99_s * 1e3:.0f} ms",
            f"{case.cpu_s:.1f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1_000)
    parser.add_argument("--controllers", type=int, nargs="+", default=(1,))
    parser.add_argument("--reports", type=float, nargs="+", default=(0.0, 0.01, 0.1, 1.0, 10.0))
    parser.add_argument("--delay", type=float, default=0.0, help="report delay in seconds")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--rate", type=float, default=2.4, help="requests per second and instance")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = []
    for policy in args.policies:
        for controllers in args.controllers:
            for every_s in args.reports[:1] if policy == "random" else args.reports:
                given = (args.delay, args.rate, args.seconds)
                cases.append(run(policy, args.instances, controllers, every_s, *given))
    console = Console(width=110)
    console.print(show(cases))
    console.print(f"{args.instances:,} instances, {args.seconds:g} s of arrivals, goodput within {SLO}.")
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(cases)))


if __name__ == "__main__":
    main()
