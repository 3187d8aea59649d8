"""Compare simulations with measured deployments: the silicon sample of aiconfigurator-core.

    pip install 'twofold[aiconfigurator]'
    python bench/silicon/compare.py --rows 900
    python bench/silicon/compare.py --mode disagg

Each deployment is simulated as it was run, with the operator times of its engine. Four constants of each engine are
fitted to a third of the rows: seconds of an iteration, seconds of an iteration for each sequence, seconds of a request
before its first token, and the same for each client. The errors are those of mean TTFT and mean TPOT in the other rows.
"""

import argparse
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rows import SiliconRow, silicon_rows
from scipy.optimize import linprog
from simulated import EngineOverhead, Timings, simulated, tables_of

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.performance.aiconfigurator import OperatorTables

PASSES = 2  # of the fit, each with simulations


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A measured deployment and its simulation."""

    row: SiliconRow
    simulated: Timings

    @property
    def ttft_error(self) -> float:
        return self.simulated.mean_ttft_s / (self.row.silicon_ttft_ms / 1e3) - 1

    @property
    def tpot_error(self) -> float:
        return self.simulated.mean_tpot_s / (self.row.silicon_tpot_ms / 1e3) - 1


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run."""

    rows: int  # that tell all that was run
    covered: int  # with operator times
    overheads: dict[str, EngineOverhead]  # by engine
    compared: list[Compared]  # rows that nothing was fitted to


class Deployment(NamedTuple):
    """A row with the operator times of its engine."""

    row: SiliconRow
    tables: dict[Role, OperatorTables]


def least_relative(
    parts: Sequence[Sequence[float]], wanted: Sequence[float], lowest: Sequence[float] = ()
) -> list[float]:
    """Fit factors of the parts of each measurement to `wanted`, by the least mean absolute relative error.

    Each element of `parts` has a fixed part first, then the parts to be multiplied, by at least `lowest` (default: 0).
    """
    measured = np.array(wanted)
    fixed, free = np.split(np.array(parts) / measured[:, None], [1], axis=1)
    count, factors = free.shape
    # Minimise the sum of e with −e ≤ fixed + free·x − 1 ≤ e.
    rest = 1.0 - fixed[:, 0]
    above = np.hstack([free, -np.eye(count)])
    below = np.hstack([-free, -np.eye(count)])
    costs = np.concatenate([np.zeros(factors), np.ones(count)])
    bounds = [(low, None) for low in (*(lowest or [0.0] * factors), *[0.0] * count)]
    found = linprog(costs, A_ub=np.vstack([above, below]), b_ub=np.concatenate([rest, -rest]), bounds=bounds)
    return [float(factor) for factor in found.x[:factors]]


def fit(known: Sequence[Compared], before: EngineOverhead) -> EngineOverhead:
    """Fit the overhead of an engine to simulations with the overhead `before`."""
    decodes = [each.row.sequences(each.row.roles[-1]) for each in known]
    tpots = [each.simulated.mean_tpot_s for each in known]
    # Iterations get longer by the changes of the two constants that they contain.
    parts = [(tpot, 1.0, sequences) for tpot, sequences in zip(tpots, decodes, strict=True)]
    lowest = (-before.step_s, -before.sequence_s)
    step_s, sequence_s = least_relative(parts, [each.row.silicon_tpot_ms / 1e3 for each in known], lowest)
    clients = [each.row.sequences(each.row.roles[0]) for each in known]
    outside = [before.request_s + before.client_s * count for count in clients]
    ttfts = [
        (each.simulated.mean_ttft_s - before_s, 1.0, count)
        for each, before_s, count in zip(known, outside, clients, strict=True)
    ]
    request_s, client_s = least_relative(ttfts, [each.row.silicon_ttft_ms / 1e3 for each in known])
    return EngineOverhead(
        step_s=before.step_s + step_s, sequence_s=before.sequence_s + sequence_s, request_s=request_s, client_s=client_s
    )


def compare(deployments: Iterable[Deployment], overhead: Callable[[str], EngineOverhead], most: int) -> list[Compared]:
    return [
        Compared(row=row, simulated=simulated(row, tables, overhead(row.backend), most)) for row, tables in deployments
    ]


def covered(rows: Iterable[SiliconRow]) -> list[Deployment]:
    found = ((row, tables_of(row)) for row in rows)
    return [Deployment(row, tables) for row, tables in found if tables is not None]


def run(given: argparse.Namespace) -> Report:
    rows = [row for row in silicon_rows() if row.mode == given.mode and row.complete]
    random.Random(given.seed).shuffle(rows)
    rows = rows[: given.rows]
    known = covered(rows)
    fitted, rest = ([each for each in known if each.row.fitted is third] for third in (True, False))
    overheads = {each.row.backend: EngineOverhead() for each in known}
    for _ in range(PASSES):
        found = compare(fitted, overheads.__getitem__, given.requests)
        overheads = {
            engine: fit([each for each in found if each.row.backend == engine], overhead)
            for engine, overhead in sorted(overheads.items())
        }
    compared = compare(rest, overheads.__getitem__, given.requests)
    return Report(rows=len(rows), covered=len(known), overheads=overheads, compared=compared)


def show(report: Report) -> None:
    console = Console(width=120)
    share = report.covered / report.rows
    console.print(f"{report.rows} rows, of which {report.covered} ({share:.0%}) have operator times")
    for engine, overhead in report.overheads.items():
        console.print(
            f"{engine}: {overhead.step_s * 1e3:.2f} ms an iteration, "
            f"{overhead.sequence_s * 1e6:.0f} µs for each sequence; {overhead.request_s * 1e3:.0f} ms a request, "
            f"{overhead.client_s * 1e3:.1f} ms for each client"
        )
    groups: tuple[tuple[str, Callable[[SiliconRow], str]], ...] = (
        ("", lambda _: "all"),
        ("engine", lambda row: row.backend),
        ("system", lambda row: row.system),
        ("model", lambda row: f"{row.model_path.rpartition('/')[2]} {row.backend}"),
    )
    drawn = Table("", "rows", *(f"{name} {what}" for name in ("TPOT", "TTFT") for what in ("median", "mean", "P90")))
    for _, key in groups:
        by_key: dict[str, list[Compared]] = {}
        for each in report.compared:
            by_key.setdefault(key(each.row), []).append(each)
        for name, members in sorted(by_key.items(), key=lambda item: -len(item[1])):
            errors = [[abs(each.tpot_error) for each in members], [abs(each.ttft_error) for each in members]]
            cells = [
                f"{value:.0%}" for each in errors for value in (np.median(each), np.mean(each), np.quantile(each, 0.9))
            ]
            drawn.add_row(name, str(len(members)), *cells)
        drawn.add_section()
    console.print(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("agg", "disagg"), default="agg", help="colocated or disaggregated")
    parser.add_argument("--rows", type=int, help="rows of the sample (default: all)")
    parser.add_argument("--requests", type=int, default=600, help="simulate all rounds up to this number of requests")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of rows")
    parser.add_argument("--json", type=Path, help="file for all results")
    given = parser.parse_args()
    try:
        report = run(given)
    except ConfigurationError as error:
        raise SystemExit(f"{error}") from error
    show(report)
    if given.json is not None:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))


if __name__ == "__main__":
    main()
