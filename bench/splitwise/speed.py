"""Compare the CPU times of Twofold's simulator and SplitwiseSim on the same runs.

    python bench/splitwise/speed.py CHECKOUT [--python PYTHON] [--rounds 3] [--json OUT]

CHECKOUT is a clone of https://github.com/Mutinifni/splitwise-sim. PYTHON is a Python interpreter with the
dependencies of SplitwiseSim. The runs are defined in reference_runs.py. Every simulation runs in a separate
process.

The script prints the median CPU seconds of the event loop (without input and output) and of the whole
process. The script fails if a request has different latencies in the two simulators.
"""

import argparse
import csv
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path

import msgspec
from reference_runs import RUNS, ReferenceRun
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds of one simulator run: event loop, and whole process."""

    event_loop_cpu_s: float
    process_cpu_s: float


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """CPU times of both simulators for one run, and the largest relative difference between their latencies."""

    splitwise_sim: Cost
    twofold: Cost
    with_series: Cost
    requests: int
    worst_difference: float


Pick = Callable[[Round], Cost]
THEIRS: Pick = attrgetter("splitwise_sim")
OURS: Pick = attrgetter("twofold")
WITH_SERIES: Pick = attrgetter("with_series")


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """CPU times of both simulators for the same run, over several rounds."""

    name: str
    rounds: list[Round]

    def median(self, of: Pick, *, process: bool = False) -> float:
        costs = [of(one) for one in self.rounds]
        return statistics.median(cost.process_cpu_s if process else cost.event_loop_cpu_s for cost in costs)

    def ratio(self, of: Pick, *, process: bool = False) -> float:
        return self.median(THEIRS, process=process) / self.median(of, process=process)


def compare(run: ReferenceRun, checkout: Path, python: str) -> Round:
    """Run the same simulation in SplitwiseSim and in Twofold, and return the CPU times of the simulators.

    Raises SystemExit if a simulator fails or the results differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        theirs = _cost(
            [python, str(HERE / "splitwise_sim_driver.py"), str(checkout), str(run.trace_path), folder, *run.overrides]
        )
        table = Path(folder) / "ours.csv"
        driver = [sys.executable, str(HERE / "twofold_driver.py"), run.name]
        # A separate, untimed run writes the table.
        _cost([*driver, "--table", str(table)])
        ours, with_series = _cost(driver), _cost([*driver, "--series"])
        requests, worst = _differences(Path(folder) / "detailed" / "0.csv", table)
    if worst > 1e-6:
        raise SystemExit(f"{run.name}: a request's time differs by {worst:.1e} of it")
    return Round(splitwise_sim=theirs, twofold=ours, with_series=with_series, requests=requests, worst_difference=worst)


def _cost(command: Sequence[str]) -> Cost:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Cost)


def _differences(theirs: Path, ours: Path) -> tuple[int, float]:
    """Compare the latencies of all requests between SplitwiseSim and Twofold.

    Return the number of compared requests and the largest relative difference of a latency.
    """
    expected = {int(float(row["request_ids"])): row for row in _rows(theirs)}
    found = {int(row["id"]): row for row in _rows(ours)}
    if set(expected) != set(found):
        raise SystemExit(f"SplitwiseSim completed {len(expected)} requests and Twofold {len(found)}")
    worst = 0.0
    for number, row in expected.items():
        for column, name in (("ttft_times", "ttft_s"), ("response_times", "e2e_s")):
            worst = max(worst, abs(float(found[number][name]) / float(row[column]) - 1))
    return len(expected), worst


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def show(comparisons: Sequence[Comparison], rounds: int) -> None:
    table = Table(title=f"CPU seconds, median of {rounds}: event loop (whole process)", title_justify="left")
    for column in ("run", "SplitwiseSim", "Twofold", "µs a request", "times less", "with series"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for one in comparisons:
        each = one.median(OURS) / one.rounds[0].requests
        table.add_row(
            one.name,
            f"{one.median(THEIRS):.2f} ({one.median(THEIRS, process=True):.2f})",
            f"{one.median(OURS):.3f} ({one.median(OURS, process=True):.2f})",
            f"{each * 1e6:.0f}",
            f"{one.ratio(OURS):.1f} ({one.ratio(OURS, process=True):.1f})",
            f"{one.ratio(WITH_SERIES):.1f}",
        )
    mean = _geometric_mean([one.ratio(OURS) for one in comparisons])
    process = _geometric_mean([one.ratio(OURS, process=True) for one in comparisons])
    series = _geometric_mean([one.ratio(WITH_SERIES) for one in comparisons])
    table.add_row("geometric mean", "", "", "", f"{mean:.1f} ({process:.1f})", f"{series:.1f}")
    Console(width=110).print(table)
    worst = max(one.worst_difference for comparison in comparisons for one in comparison.rounds)
    print(f"Every request completed in both at equal times within {worst:.0e} of them.")


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--python", default=sys.executable, help="interpreter for SplitwiseSim")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    missing = [run.trace_path for run in RUNS if not run.trace_path.is_file()]
    if missing:
        raise SystemExit(f"{missing[0]} is missing: set TWOFOLD_DATA to the folder with traces/")
    made: dict[str, list[Round]] = {run.name: [] for run in RUNS}
    for _ in range(args.rounds):
        for run in RUNS:
            made[run.name].append(compare(run, args.checkout, args.python))
    comparisons = [Comparison(name=name, rounds=rounds) for name, rounds in made.items()]
    show(comparisons, args.rounds)
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(comparisons)))


if __name__ == "__main__":
    main()
