"""Run one of the simulations defined in `reference_runs.py` with Twofold's simulator, and print the CPU time."""

import argparse
import csv
import json
import time
from pathlib import Path

from presets import splitwise_sim
from reference_runs import RUNS

from twofold.hardware.catalog import load_catalog
from twofold.simulation.observers.base import Observer
from twofold.simulation.simulate import simulate
from twofold.timeline import Timeline
from twofold.workload.source import workload


class Ended(Observer):
    """Observer that collects the TTFT and E2E latency of every request."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float | None, float | None]] = []

    def ended(self, timeline: Timeline, now: float) -> None:
        self.rows.append((timeline.request.id, timeline.ttft_s, timeline.e2e_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[run.name for run in RUNS])
    parser.add_argument("--series", action="store_true", help="also record time series")
    parser.add_argument("--table", type=Path, help="write the latencies of every request")
    args = parser.parse_args()
    run = next(run for run in RUNS if run.name == args.name)
    catalog = load_catalog()
    spec = splitwise_sim(run.pools, catalog=catalog)
    requests = list(workload(str(run.trace_path)))  # read before timing the event loop
    ended = Ended() if args.table else None
    result = simulate(spec, requests, catalog=catalog, observers=[ended] if ended else [], series=args.series)
    if result.completed != len(requests):
        raise SystemExit(f"{result.completed} of {len(requests)} requests completed")
    if ended is not None:
        with args.table.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("id", "ttft_s", "e2e_s"))
            writer.writerows(ended.rows)
    print(json.dumps({"event_loop_cpu_s": result.cpu_s, "process_cpu_s": time.process_time()}))


if __name__ == "__main__":
    main()
