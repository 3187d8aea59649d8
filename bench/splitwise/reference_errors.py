"""Compare each request of three reference runs with the latencies of SplitwiseSim (`make data`).

    python bench/splitwise/reference_errors.py

Prints the largest relative differences of TTFT and E2E latency of each run. Exits with 1 if one exceeds 1e-6.
"""

import argparse
import csv
import sys
from pathlib import Path

import msgspec
from presets import splitwise_sim
from reference_runs import RUNS, ReferenceRun
from show import table
from twofold_driver import Ended

from twofold.hardware.catalog import load_catalog
from twofold.reporting.output import json_text
from twofold.simulation.simulate import simulate
from twofold.workload.source import workload

MOST = 1e-6


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """Number of requests of a run, and their largest relative differences from SplitwiseSim."""

    requests: int
    ttft_error: float
    e2e_error: float


def compare(run: ReferenceRun) -> Errors:
    catalog, ended = load_catalog(), Ended()
    simulate(
        splitwise_sim(run.pools, catalog=catalog), workload(str(run.trace_path)), catalog=catalog, observers=[ended]
    )
    ours = {int(number): (ttft_s or 0.0, e2e_s or 0.0) for number, ttft_s, e2e_s in ended.rows}
    with run.golden_path.open(newline="") as file:
        theirs = {
            int(float(row["request_ids"])): (float(row["ttft_times"]), float(row["response_times"]))
            for row in csv.DictReader(file)
        }
    if ours.keys() != theirs.keys():
        raise SystemExit(f"{run.name}: the simulators completed different requests")
    errors = [[abs(a / b - 1) for a, b in zip(ours[id_], theirs[id_], strict=True)] for id_ in theirs]
    return Errors(
        requests=len(errors), ttft_error=max(ttft for ttft, _ in errors), e2e_error=max(e2e for _, e2e in errors)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for all results")
    given = parser.parse_args()
    found = {run.name: compare(run) for run in RUNS}
    rows = [(name, f"{e.requests:,}", f"{e.ttft_error:.1e}", f"{e.e2e_error:.1e}") for name, e in found.items()]
    table("Largest difference from SplitwiseSim", ("run", "requests", "TTFT", "E2E"), rows)
    if given.json is not None:
        given.json.write_text(json_text(found), "utf-8")
    return int(any(max(each.ttft_error, each.e2e_error) > MOST for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
