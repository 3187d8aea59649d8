"""Measure the cost of a simulated request by cluster size and workload length.

Simulates BLOOM-176B on DGX-H100, with five prefill machines to three decode machines and Splitwise's router. Requests
have the lengths of the Azure conversation trace and arrive at a constant rate per instance. Each case runs in its own
process, and reports peak memory and CPU seconds. CPU time per request is also printed relative to a cluster of 40
instances with the same number of requests.
"""

import argparse
import resource
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.simulation.simulate import simulate
from twofold.workload.source import workload

INSTANCES = (10, 40, 100, 1_000, 4_000)
REQUESTS = (10_000, 100_000, 1_000_000)
BASE = 40
RATE_PER_INSTANCE = 70 / 40
QUICK = (10, 40, 400), (5_000,)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one simulation."""

    instances: int
    requests: int
    cpu_s: float
    us_per_request: float
    peak_mb: float
    events: int
    ttft_p50_s: float | None  # equal values show that the load per instance does not depend on cluster size


def run(instances: int, requests: int) -> Case:
    prefill = round(instances * 5 / 8)
    pools = tuple(
        PoolSpec(machines=machines, machine="dgx-h100", role=role)
        for machines, role in ((prefill, Role.PREFILL), (instances - prefill, Role.DECODE))
    )
    rate = instances * RATE_PER_INSTANCE
    result = simulate(
        ClusterSpec(pools=pools, model="bloom-176b"),
        workload("azure-conv", rate=rate, num_requests=requests),
        catalog=load_catalog(),
    )
    if result.completed != requests:
        raise SystemExit(f"{result.completed} of {requests} requests completed")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return Case(
        instances=instances,
        requests=requests,
        cpu_s=result.cpu_s,
        us_per_request=result.cpu_s / requests * 1e6,
        peak_mb=peak / (1024**2 if sys.platform == "darwin" else 1024),
        events=result.events,
        ttft_p50_s=result.ttft_s.percentile(50),
    )


def run_in_process(instances: int, requests: int) -> Case:
    """Run one case in a new process, to measure its own peak memory."""
    command = [sys.executable, __file__, "--case", str(instances), str(requests)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Case)


def show(cases: Sequence[Case]) -> None:
    base = {case.requests: case.us_per_request for case in cases if case.instances == BASE}
    table = Table()
    for column in ("requests", "instances", "CPU s", "µs a request", f"÷ {BASE} instances", "peak MB"):
        table.add_column(column, justify="right")
    for before, case in zip((None, *cases), cases, strict=False):
        if before is not None and before.requests != case.requests:
            table.add_section()
        ratio = f"{case.us_per_request / base[case.requests]:.2f}" if case.requests in base else "—"
        table.add_row(
            f"{case.requests:,}",
            f"{case.instances:,}",
            f"{case.cpu_s:.2f}",
            f"{case.us_per_request:.0f}",
            ratio,
            f"{case.peak_mb:.0f}",
        )
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=INSTANCES)
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS)
    parser.add_argument("--quick", action="store_true", help="a few small cases")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(msgspec.json.encode(run(*args.case)).decode())
        return
    instances, requests = QUICK if args.quick else (args.instances, args.requests)
    if min(instances) < 2:
        raise SystemExit("a split cluster has at least 2 instances")
    cases = [run_in_process(number, length) for length, number in product(requests, instances)]
    show(cases)
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(cases)))


if __name__ == "__main__":
    main()
